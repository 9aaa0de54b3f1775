"""Folding pieces: numpy's results in the order of the sources, whatever the target is."""
from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from flowengine.collectives import folds


def bytes_of(array):
    return memoryview(array).cast("B")


@pytest.mark.parametrize("dtype", ["|b1", "|i1", "<i8", "<u2", "<f2", "<f4", "<f8", "<c8", ">f4"])
@pytest.mark.parametrize("name", ["sum", "prod", "min", "max"])
def test_folds_are_numpys(name, dtype, monkeypatch):
    monkeypatch.setattr(folds, "CHUNK_BYTES", 64)
    random = np.random.default_rng(3)
    arrays = [(random.standard_normal(101) * 4).astype(dtype) for _ in range(3)]
    expected = functools.reduce(lambda a, b: folds.FOLDS[name](a, b).astype(dtype), arrays)
    out = np.zeros(101, dtype)
    folds.fold((name, dtype, 1), bytes_of(out.view("u1")), [bytes_of(array.view("u1")) for array in arrays])
    assert out.tobytes() == expected.tobytes()
    first = arrays[0].copy()
    sources = [first, *arrays[1:]]
    folds.fold((name, dtype, 1), bytes_of(first.view("u1")), [bytes_of(array.view("u1")) for array in sources])
    assert first.tobytes() == expected.tobytes()


def test_a_mean_divides_the_sum_and_no_fold_copies():
    arrays = [np.arange(9.0), np.ones(9)]
    out = np.zeros(9)
    folds.fold(("mean", "<f8", 2), bytes_of(out), [bytes_of(array) for array in arrays])
    assert (out == (np.arange(9.0) + 1) / 2).all()
    folds.fold(("", "", 1), bytes_of(out), [bytes_of(arrays[0])])
    assert (out == arrays[0]).all()


@pytest.mark.parametrize(("nbytes", "count"), [(1, 4), (64, 2), (1000, 3), (1 << 20, 8), (1 << 20, 1)])
def test_slices_cover_all_and_cut_no_element(nbytes, count):
    parts = folds.slices(nbytes, count)
    assert len(parts) <= count
    assert parts[0].start == 0
    assert parts[-1].stop == nbytes
    assert all(a.stop == b.start and b.start % 64 == 0 for a, b in itertools.pairwise(parts))


@pytest.mark.parametrize("kind", [("sum", "<f4", 1), ("mean", "<f4", 3), ("max", "<i8", 1), ("", "", 1)])
def test_what_is_handed_on_in_chunks_is_the_same(kind):
    rng = np.random.default_rng(7)
    sources = [rng.integers(0, 100, folds.CHUNK_BYTES // 3, np.int64).astype(kind[1] or "<i8").view(np.uint8).data
               for _ in range(3 if kind[0] else 1)]
    whole, pieces = bytearray(len(sources[0])), bytearray(len(sources[0]))

    def write(at, chunk):
        pieces[at : at + len(chunk)] = chunk

    folds.fold(kind, memoryview(whole), sources)
    folds.fold_away(kind, write, sources)
    assert pieces == whole
