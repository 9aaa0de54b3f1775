"""Folding pieces with numpy: several sources into a target, in chunks that stay in the cache meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Write = Callable[[int, memoryview], None]

CHUNK_BYTES = 512 << 10
ALIGN_BYTES = 64

FOLDS: dict[str, np.ufunc] = {
    "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "mean": np.add,
}  # fmt: skip


def fold(kind: tuple[str, str, int], target: memoryview, sources: Sequence[memoryview]) -> None:
    """Fold equally long sources from left to right into the target, which may be the first of them.

    kind: the fold (empty: there is one source, to be copied), the dtype, and what the result is divided by.
    """
    name, dtype, divisor = kind
    if not name:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(sources[0], np.uint8))
        return
    ufunc = FOLDS[name]
    out = np.frombuffer(target, dtype)
    first, *rest = [np.frombuffer(source, dtype) for source in sources]
    step = max(1, CHUNK_BYTES // out.itemsize)
    with np.errstate(all="ignore"):
        for at in range(0, len(out), step):
            part = out[at : at + step]
            value = first[at : at + step]
            for other in rest:
                value = ufunc(value, other[at : at + step], out=part)
            if divisor > 1:
                np.true_divide(value, divisor, out=part)


def fold_away(kind: tuple[str, str, int], write: Write, sources: Sequence[memoryview]) -> None:
    """The same, with the result handed on in chunks: write(offset in bytes, chunk)."""
    spare = np.empty(CHUNK_BYTES, np.uint8).data
    for at in range(0, len(sources[0]), CHUNK_BYTES):
        parts = [source[at : at + CHUNK_BYTES] for source in sources]
        if kind[0]:
            chunk = spare[: len(parts[0])]
            fold(kind, chunk, parts)
        else:
            chunk = parts[0]
        write(at, chunk)


def slices(nbytes: int, count: int) -> list[slice]:
    """About equal parts of so many bytes, cut where no element is."""
    step = -(-nbytes // count // ALIGN_BYTES) * ALIGN_BYTES or ALIGN_BYTES
    return [slice(at, min(at + step, nbytes)) for at in range(0, nbytes, step)]
