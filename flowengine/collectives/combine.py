"""Small steps of a group done at once with numpy: the same folds in the same order as large ones, so the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowengine.core.commands import BlobsCombined, CombineBlobs

from .folds import FOLDS
from .plan_ways import StepPlan, Way, work_of


def perform_combine(command: CombineBlobs) -> BlobsCombined:
    """Carry the order out; what numpy cannot do is told as a failure."""
    step: StepPlan = command.plan
    blobs = dict(command.blobs)
    try:
        work = work_of(step)
        made = {rank: bytearray(nbytes) for rank, nbytes in work.sizes}
        with np.errstate(all="ignore"):
            for way in work.ways:
                made[way.taker][way.into : way.into + way.nbytes] = _value(step, way, blobs)
    except (TypeError, ValueError, MemoryError) as error:
        return BlobsCombined(command.op, command.epoch, (), failure=f"{type(error).__name__}: {error}")
    results = tuple((rank, bytes(blob)) for rank, blob in made.items())
    return BlobsCombined(command.op, command.epoch, results, work.layout)


def _value(step: StepPlan, way: Way, blobs: dict[int, bytes]) -> bytes | memoryview:
    """One range of bytes, folded in the cyclic order of the group from its start."""
    order, end = step.seating.order, way.offset + way.nbytes
    ranks = [order[(way.start + number) % len(order)] for number in range(way.count)]
    if not way.dtype:
        return memoryview(blobs[ranks[0]])[way.offset : end]
    dtype, fold = np.dtype(way.dtype), step.headers[0][1].fold
    arrays = [np.frombuffer(blobs[rank], dtype, way.nbytes // dtype.itemsize, way.offset) for rank in ranks]
    total: np.ndarray[Any, Any] = arrays[0].copy()
    for array in arrays[1:]:
        FOLDS[fold](total, array, out=total)
    if fold == "mean":
        np.true_divide(total, way.count, out=total)
    return total.tobytes()
