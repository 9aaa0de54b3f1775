"""Small steps of a group done at once with numpy: the same folds in the same order as large ones, so the same bits."""

from __future__ import annotations

from flowengine.core.commands import BlobsCombined, CombineBlobs

from .folds import fold
from .plan_ways import StepPlan, Way, work_of


def perform_combine(command: CombineBlobs) -> BlobsCombined:
    """Carry the order out; what numpy cannot do is told as a failure."""
    step: StepPlan = command.plan
    blobs = dict(command.blobs)
    try:
        work = work_of(step)
        made = {rank: bytearray(nbytes) for rank, nbytes in work.sizes}
        for way in work.ways:
            _fold(step, way, blobs, memoryview(made[way.taker])[way.into : way.into + way.nbytes])
    except (TypeError, ValueError, MemoryError) as error:
        return BlobsCombined(command.op, command.epoch, (), failure=f"{type(error).__name__}: {error}")
    results = tuple((rank, bytes(blob)) for rank, blob in made.items())
    return BlobsCombined(command.op, command.epoch, results, work.layout)


def _fold(step: StepPlan, way: Way, blobs: dict[int, bytes], target: memoryview) -> None:
    """One range of bytes, folded in the cyclic order of the group from its start."""
    order, end = step.seating.order, way.offset + way.nbytes
    count = way.count if way.dtype else 1
    ranks = [order[(way.start + number) % len(order)] for number in range(count)]
    sources = [memoryview(blobs[rank])[way.offset : end] for rank in ranks]
    if any(len(source) != way.nbytes for source in sources):
        raise ValueError(f"what a rank gave is shorter than {end} bytes")
    name = step.headers[0][1].fold if count > 1 else ""
    fold((name, way.dtype, count if name == "mean" else 1), target, sources)
