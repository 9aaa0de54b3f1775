"""Folding values of this host with numpy, slice by slice: a slice of the result stays in the cache meanwhile."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowengine.collectives.folds import FOLDS
from flowengine.collectives.forms import Given, Opened, closed
from flowengine.collectives.ledger_headers import header_text, hidden_difference
from flowengine.errors import BadType, BadValue, CollectiveMismatch
from flowengine.objects import arrays, codec
from flowengine.objects.copying import PAIR_BYTES_MIN, in_two

Array = np.ndarray[Any, Any]

SLICE_BYTES = 256 << 10


class Total:
    """The fold of values that are like the first of them, in arrays of its own."""

    def __init__(self, fold: str) -> None:
        self.fold = fold
        self.first: tuple[str, Opened] | None = None
        self.is_array = False
        self.arrays: list[Array] = []
        self.last: list[tuple[Array, ...]] = []  # by array: what came last and is not folded yet
        self.count = 0

    def add(self, batch: Sequence[tuple[str, Any]]) -> None:
        """Fold named values in, in their order; raises CollectiveMismatch with the name of one that is not like it."""
        self.fold_last()
        if not self.count:
            self.is_array = type(batch[0][1]) is np.ndarray
        self.last = list(zip(*[self.taken(name, value).arrays for name, value in batch], strict=True))
        self.count += len(batch)

    def fold_last(self) -> None:
        """Fold what came last, and let go of it."""
        if not self.last:
            return
        fresh = not self.arrays
        if fresh:
            self.arrays = [np.empty(given[0].shape, made_dtype(self.fold, given[0].dtype)) for given in self.last]
        for out, given in zip(self.arrays, self.last, strict=True):
            fold_arrays(FOLDS[self.fold], out, given, fresh)
        self.last = []

    def taken(self, name: str, value: Any) -> Opened:
        """The value taken apart, if it is like the first."""
        try:
            opened = Opened(value, "reduce")
        except (BadType, BadValue) as error:
            raise type(error)(f"{name}: {error}") from None
        if self.first is None:
            hollow = copy.copy(opened)  # what it is, without its memory
            hollow.arrays = [np.broadcast_to(np.empty((), array.dtype), array.shape) for array in opened.arrays]
            self.first = name, hollow
            return opened
        first_name, first = self.first
        alike = opened.form == first.form and all(
            mine.dtype == theirs.dtype and mine.shape == theirs.shape
            for mine, theirs in zip(opened.arrays, first.arrays, strict=True)
        )
        if not alike:
            header, like = [Given(one).header("reduce", self.fold) for one in (opened, first)]
            given = f"{name}: {header_text(header)}; {first_name}: {header_text(like)}"
            where = hidden_difference(header, like)
            raise CollectiveMismatch(f"the inputs do not fit together: {given}{where and f' ({where})'}")
        return opened

    def to_store(self, room_bytes: float = math.inf) -> Any:
        """The result as a task may return it: one array is made only where it is stored, beside the last inputs."""
        if self.is_array and 0 < self.last[0][0].nbytes * (len(self.last[0]) + 1) <= room_bytes:
            return Unwritten.packed(self)
        return self.result()

    def result(self) -> Any:
        """The fold of all that was added, in the form of the first value."""
        assert self.first is not None
        opened = self.first[1]
        self.fold_last()
        if self.fold == "mean":
            for out in self.arrays:
                np.true_divide(out, self.count, out=out)
        return closed(opened.tree, self.arrays)


class Unwritten(codec.ArrowStream):
    """A placeholder buffer for an array whose last inputs are folded where it is kept, which saves a copy."""

    total: Total
    dtype: np.dtype[Any]

    @classmethod
    def packed(cls, total: Total) -> codec.Packed:
        """The result of a total of single arrays, as it is stored."""
        like = total.last[0][0]
        made = cls()
        made.total, made.dtype = total, made_dtype(total.fold, like.dtype)
        made.nbytes = like.size * made.dtype.itemsize
        return arrays.packed_as(made.dtype.str, like.shape, made)

    def write_into(self, target: memoryview) -> None:
        """Fold into a writable view of exactly nbytes."""
        total = self.total
        out = np.frombuffer(target, self.dtype).reshape(total.last[0][0].shape)
        fold_arrays(FOLDS[total.fold], out, (*total.arrays, *total.last[0]), True)
        if total.fold == "mean":
            np.true_divide(out, total.count, out=out)


def made_dtype(fold: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which arrays are folded, as numpy does it; raises BadType for what has no answer."""
    if dtype.kind not in "biufc":
        raise BadType(f"reduce({fold}) of {dtype} is not defined")
    if dtype.kind == "c" and fold in ("min", "max"):
        raise BadType(f"reduce({fold}) of {dtype} is not defined: complex numbers have no order")
    return np.dtype(np.float64) if fold == "mean" and dtype.kind in "biu" else dtype


def fold_arrays(fold: np.ufunc, out: Array, arrays: Sequence[Array], fresh: bool) -> None:
    """Fold arrays of one shape into `out`, the first of them over what is there when it is fresh."""
    if out.nbytes <= SLICE_BYTES or not all(array.flags.c_contiguous for array in arrays):
        fold_slice(fold, out, arrays, fresh)
        return
    whole, lines = out.reshape(-1), [array.reshape(-1) for array in arrays]
    step = max(1, SLICE_BYTES // out.itemsize)

    def fold_range(begin: int, end: int) -> None:
        for at in range(begin, end, step):
            stop = min(at + step, end)
            fold_slice(fold, whole[at:stop], [line[at:stop] for line in lines], fresh)

    if out.nbytes < PAIR_BYTES_MIN:
        fold_range(0, whole.size)
    else:
        in_two(fold_range, whole.size, step)


def fold_slice(fold: np.ufunc, out: Array, arrays: Sequence[Array], fresh: bool) -> None:
    """The same, without cutting."""
    first = 0
    if fresh and len(arrays) == 1:
        out[...] = arrays[0]
        return
    with np.errstate(all="ignore"):  # what overflows is infinite, and nobody is there to be warned
        if fresh:
            fold(arrays[0], arrays[1], out=out, dtype=out.dtype)
            first = 2
        for array in arrays[first:]:
            fold(out, array, out=out, dtype=out.dtype)
