"""Segments that get their memory as they are written."""

from __future__ import annotations

import os

import numpy as np
import pytest

from flowengine.errors import StoreFull
from flowengine.objects import codec
from flowengine.objects.segments import Segment, Segments

from .test_segments import MIB, files, folder, put, value_of

__all__ = ["folder"]


def pour(store: Segments, name: str, value: object) -> Segment:
    packed = codec.pack(value)
    segment = store.create(name, packed.nbytes, hollow=True)
    codec.pour_object(segment.write, packed, name.encode())
    return segment


def test_a_hollow_segment_is_an_object_like_any_other(folder: str) -> None:
    store, other = Segments(folder, 10 * MIB), Segments(folder, 10 * MIB)
    segment = pour(store, "a", np.arange(300_000))
    assert segment.is_hollow
    inode = segment.seal()
    np.testing.assert_array_equal(value_of(other, "a"), np.arange(300_000))
    kept_bytes = store.free("a")
    assert kept_bytes == store.pool_bytes == -(-(2_400_000 + 128) // 4096) * 4096
    again = store.create("b", 2_400_000, hollow=True)
    assert not again.is_hollow, "its memory is warm"
    again.abort()
    assert put(store, "c", np.ones(300_000)) != inode
    assert value_of(other, "c")[-1] == 1


def test_the_second_object_in_a_hollow_segment_is_whole(folder: str) -> None:
    store = Segments(folder, 10 * MIB)
    first = pour(store, "a", np.arange(300_000)).seal()
    store.free("a")
    assert put(store, "b", np.arange(300_000)[::-1].copy()) == first
    np.testing.assert_array_equal(value_of(store, "b"), np.arange(300_000)[::-1])


def test_a_hollow_segment_may_be_given_all_of_its_memory(folder: str) -> None:
    store = Segments(folder, 10 * MIB)
    segment = store.create("a", 5 * MIB, hollow=True)
    path = f"{folder}/{os.listdir(folder)[0]}"
    assert os.stat(path).st_blocks * 512 <= 2 * 4096, "the first page and the last"
    segment.allocate()
    assert os.stat(path).st_blocks * 512 == 5 * MIB
    assert not segment.is_hollow
    segment.abort()


def test_a_hollow_segment_finds_no_room_at_its_beginning(folder: str) -> None:
    store = Segments(folder, MIB)
    system = os.statvfs(folder)
    with pytest.raises(StoreFull, match=rf"MiB in {folder}: .* MiB of .* MiB"):
        store.create("a", system.f_frsize * system.f_blocks + MIB, hollow=True)
    assert files(folder) == 0


def test_a_file_system_that_is_full_while_a_hollow_segment_is_filled(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Segments(folder, 10 * MIB)
    put(store, "warm", np.zeros(1 << 15))
    segment = store.create("a", 3 * MIB, hollow=True)
    store.free("warm")
    write, is_full = os.pwrite, False

    def full_while_pooled(descriptor: int, part: memoryview, at: int) -> int:
        if store.pool_bytes or is_full:
            raise OSError(28, "No space left on device")
        return write(descriptor, part, at)

    monkeypatch.setattr(os, "pwrite", full_while_pooled)
    segment.write(0, memoryview(bytes(100)))
    assert store.pool_bytes == 0
    is_full = True
    with pytest.raises(StoreFull, match="no room"):
        segment.write(0, memoryview(bytes(100)))
    segment.abort()
    assert files(folder) == 0
