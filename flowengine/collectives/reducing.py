"""What a task does that reduces: where its inputs are decides how, since it gets them as references."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.collectives.across import Way, in_tree, note_way, reduced_across, runs_of, spread_of
from flowengine.collectives.fused import fused_shape, is_scattered, reduced_fused
from flowengine.collectives.totals import Total
from flowengine.collectives.tree import Shape, upwards
from flowengine.core import messages as m
from flowengine.core.ids import short
from flowengine.refs import ObjectRef, checked

if TYPE_CHECKING:
    from flowengine.runtime.session import Session

BATCH_INPUTS = 8  # looked at together: a slice of the result stays in the cache for so many
BATCH_FRACTION = 1 / 8  # of the store, which others use too


Part = Callable[[list[ObjectRef], str, Shape], ObjectRef]  # a part of the inputs, a fold, a shape


def reduced(fold: str, inputs: Sequence[Any], shape: Shape | None, reduce: Part) -> Any:
    """The fold of the inputs, for a task to return; shape: in which it has to be folded; reduce: for parts of it.

    A replay in another process has values in place of references.
    """
    refs = [one for one in inputs if isinstance(one, ObjectRef)]
    if not refs:
        total = Total(fold)
        total.add([_named(number, one) for number, one in enumerate(inputs)])
        return total.result()
    session = checked(refs[0])
    before = session.context.recorded.get(("way", 0))
    if shape is not None:
        way = Way([shape])
    elif before is not None:
        way = msgspec.msgpack.decode(before, type=Way)
    else:
        runs = runs_of(session, fold, refs)
        made = reduced_across(session, fold, refs) if len(runs) == 1 else None
        if made is not None:
            return made
        way = new_way(session, fold, refs, runs)
        if all(type(session.owner.value_of(ref.oid)) is m.Stored for ref in refs):  # else there is no other
            note_way(session, way)
    if way.is_fused:
        return reduced_fused(session, fold, refs, lambda column: reduce(column, fold, way.shapes[0]))
    if len(way.shapes) > 1:
        return reduced_in_runs(session, fold, refs, (way.shapes, reduce))
    if not way.shapes:
        return folded_as(session, fold, refs, in_order(refs))
    made = reduced_across(session, fold, refs, way.shapes[0])
    return folded_as(session, fold, refs, way.shapes[0]) if made is None else made


def new_way(session: Session, fold: str, refs: list[ObjectRef], runs: list[list[ObjectRef]]) -> Way:
    """How inputs are folded that are not one course."""
    if len(runs) > 1:
        return Way([run_shape(session, fold, run) for run in runs])
    if not runs and is_scattered(session, fold, refs):
        return Way([fused_shape(session, refs)], True)
    return Way([])


def run_shape(session: Session, fold: str, run: list[ObjectRef]) -> Shape:
    """In which order a run of the inputs is folded."""
    spread = spread_of(session, fold, run)
    return in_order(run) if spread is None else in_tree(session, spread).shape


def in_order(refs: Sequence[ObjectRef]) -> Shape:
    """The shape of a fold in one place."""
    return (tuple(range(len(refs))),), (-1,)


def reduced_in_runs(session: Session, fold: str, refs: list[ObjectRef], how: tuple[list[Shape], Part]) -> Any:
    """The fold of runs of the inputs, one after the other, since they need the same room."""
    shapes, reduce = how
    total, begin = Total(fold), 0
    for shape in shapes:
        end = begin + sum(map(len, shape[0]))
        total.add([("", _value(reduce(refs[begin:end], "sum" if fold == "mean" else fold, shape)))])
        begin = end
    total.count = len(refs)
    return total.to_store(int(session.store_limit_bytes * BATCH_FRACTION))


def folded_as(session: Session, fold: str, refs: list[ObjectRef], shape: Shape) -> Any:
    """The fold of the inputs here, in the order of a tree: a slot's is behind its first child's, before the others'."""
    slots, above = shape
    room_bytes = int(session.store_limit_bytes * BATCH_FRACTION)
    made: dict[int, Any] = {}
    for slot in upwards(above):
        total = Total("sum" if fold == "mean" and above[slot] >= 0 else fold)
        parts = [[("", made.pop(child))] for child, parent in enumerate(above) if parent == slot]
        for part in parts[:1]:
            total.add(part)
        for batch in _batches(session, refs, slots[slot], room_bytes):
            total.fold_last()  # before the next are there: it may be all that there is room for
            total.add([_named(index, refs[index]) for index in batch])
        for part in parts[1:]:
            total.add(part)
        total.count = len(refs)
        made[slot] = total.result() if above[slot] >= 0 else total.to_store(room_bytes)
    return made[above.index(-1)]


def folded_by(op: Callable[[Any, Any], Any], inputs: Sequence[Any]) -> Any:
    """The fold by a function of two values, in the order of the inputs."""
    value = _value(inputs[0])
    for one in inputs[1:]:
        value = op(value, _value(one))
    return value


def _batches(
    session: Session, refs: Sequence[ObjectRef], indices: Sequence[int], room_bytes: int
) -> Iterator[list[int]]:
    """The inputs that are in memory at the same time."""
    batch: list[int] = []
    batch_bytes = 0
    for index in indices:
        value = session.owner.value_of(refs[index].oid)
        nbytes = value.size_bytes if type(value) is m.Stored else 0
        if batch and (len(batch) == BATCH_INPUTS or batch_bytes + nbytes > room_bytes):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(index)
        batch_bytes += nbytes
    if batch:
        yield batch


def _named(number: int, one: Any) -> tuple[str, Any]:
    return (f"input {number} ({short(one.oid)})" if isinstance(one, ObjectRef) else f"input {number}"), _value(one)


def _value(one: Any) -> Any:
    return one._session.get_one(one, None, False) if isinstance(one, ObjectRef) else one
