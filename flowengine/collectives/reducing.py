"""What a task does that reduces: where its inputs are decides how, since it gets them as references."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flowengine.collectives.across import reduced_across
from flowengine.collectives.fused import is_scattered, reduced_fused
from flowengine.collectives.totals import Total
from flowengine.core.ids import short
from flowengine.refs import ObjectRef, checked

BATCH_INPUTS = 8  # looked at together: a slice of the result stays in the cache for so many


def reduced(fold: str, inputs: Sequence[Any], reduce: Callable[[list[ObjectRef], str], ObjectRef]) -> Any:
    """The fold of the inputs in their order, for a task to return; reduce: flow.reduce, for parts of them.

    A replay in another process has values in place of references.
    """
    refs = [one for one in inputs if isinstance(one, ObjectRef)]
    if refs:
        session = checked(refs[0])
        made = reduced_across(session, fold, refs)
        if made is not None:
            return made
        if is_scattered(session, fold, refs):
            return reduced_fused(session, fold, refs, reduce)
    total = Total(fold)
    for begin in range(0, len(inputs), BATCH_INPUTS):
        total.add(list(_named(inputs[begin : begin + BATCH_INPUTS], begin)))
    return total.to_store() if refs else total.result()


def folded_by(op: Callable[[Any, Any], Any], inputs: Sequence[Any]) -> Any:
    """The fold by a function of two values, in the order of the inputs."""
    value = _value(inputs[0])
    for one in inputs[1:]:
        value = op(value, _value(one))
    return value


def _named(inputs: Sequence[Any], first: int) -> Iterator[tuple[str, Any]]:
    for number, one in enumerate(inputs, first):
        yield (f"input {number} ({short(one.oid)})" if isinstance(one, ObjectRef) else f"input {number}"), _value(one)


def _value(one: Any) -> Any:
    return one._session.get_one(one, None, False) if isinstance(one, ObjectRef) else one
