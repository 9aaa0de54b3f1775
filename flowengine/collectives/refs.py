"""flow.reduce and flow.allreduce: one value of many references, also of those that do not exist yet.

A reduction is a task whose dependencies are the references, so waiting for them holds no process, and losses, retries
and errors go the way of all tasks. It gets the references and not the values: it looks where these are first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.collectives.ledger_headers import FOLDS
from flowengine.errors import BadType, BadValue
from flowengine.functions import Plan, pack_call, results_of
from flowengine.options import task_options, unknown_name, whole
from flowengine.refs import ObjectRef, checked
from flowengine.scheduling.placement import ANYWHERE, FEW
from flowengine.scheduling.policies import Policy

if TYPE_CHECKING:
    from flowengine.collectives.tree import Shape
    from flowengine.runtime.session import Session

Op = str | Callable[[Any, Any], Any]

_plans: dict[str, Plan] = {}  # by operation, for the session of now


def reduce(refs: Iterable[ObjectRef], op: Op = "sum", num_inputs: int | None = None) -> ObjectRef:
    """A reference to the fold of the values of refs: of all in their order, or of the first num_inputs that arrive.

    op: sum, prod, min, max, mean, or an associative function of two values. Values are arrays, numbers, and lists and
    dicts of them. An input's error is the error of the result; inputs that differ are a CollectiveMismatch.
    """
    found = _inputs(refs)
    count = len(found) if num_inputs is None else whole("num_inputs", num_inputs, 1, len(found))
    if count < len(found) and len({ref.oid for ref in found}) < len(found):
        raise BadValue("the same ref is given twice: which of them would be among the first is not defined")
    session = checked(found[0])
    return _submit(session, _plan(session, op), found, count)


def allreduce(refs: Iterable[ObjectRef], op: Op = "sum") -> ObjectRef:
    """The same as reduce over all of refs, for a value that many processes read: they pass it on to each other."""
    return reduce(refs, op)


def reduce_part(refs: list[ObjectRef], op: str, shape: Shape) -> ObjectRef:
    """A part of a reduction, folded in the shape."""
    session = checked(refs[0])
    return _submit(session, _new_plan(session, Reduction(op, shape), op), refs, len(refs))


def _submit(session: Session, plan: Plan, refs: list[ObjectRef], count: int) -> ObjectRef:
    spec, held = pack_call(plan, tuple(refs), {})
    if count < len(refs):
        spec = msgspec.structs.replace(spec, enough=count)
    session.submit(spec, plan.blob)
    del held  # it lives until the owner has noted the task
    ref: ObjectRef = results_of(session, spec)
    return ref


def _inputs(refs: Any) -> list[ObjectRef]:
    if isinstance(refs, (str, bytes, Mapping, ObjectRef)) or not isinstance(refs, Iterable):
        raise BadType(f"refs must be a list of ObjectRefs, not {refs!r}")
    found = list(refs)
    if not found:
        raise BadValue("refs must hold at least one ObjectRef: nothing has no sum")
    for ref in found:
        if not isinstance(ref, ObjectRef):
            raise BadType(f"refs must hold ObjectRefs, not {ref!r}; flow.put(value) makes one")
        checked(ref)
    return found


def _plan(session: Session, op: Any) -> Plan:
    """What all reductions by this operation share."""
    if isinstance(op, str):
        if op not in FOLDS:
            raise BadValue(unknown_name("reduction", op, FOLDS))
        if op not in _plans or _plans[op].session is not session:
            _plans[op] = _new_plan(session, Reduction(op), op)
        return _plans[op]
    if not callable(op):
        raise BadType(f"op must be one of {', '.join(FOLDS)}, or a function of two values, not {op!r}")
    name = getattr(op, "__name__", type(op).__name__)
    if hasattr(op, "remote") or inspect.iscoroutinefunction(op):
        kind = "remote" if hasattr(op, "remote") else "async"
        raise BadType(f"op must be a plain function, which the reduction calls itself: {name} is {kind}")
    return _new_plan(session, Reduction(op), name)


def _new_plan(session: Session, reduction: Reduction, name: str) -> Plan:
    # Here, where it will be read, if there is room. That is also a placement of its own: with others' a reduction would
    # wait behind their tasks on the same leases.
    options = task_options({"num_cpus": 0, "placement": near(session.node_id)})
    return Plan(session, reduction, options, f"reduce {name}")


def near(node_id: str) -> Policy:
    """At a node if there is room, and few at once: each of many reductions would have a process started for it."""
    return Policy((node_id, FEW, ANYWHERE))


class Reduction:
    """What the task of a reduction runs, given its inputs as references."""

    by_reference = True

    def __init__(self, op: Op, shape: Shape | None = None) -> None:
        self.op = op
        self.shape = shape  # in which the inputs have to be folded

    def __call__(self, *inputs: Any) -> Any:
        from .reducing import folded_by, reduced  # a program that only asks for reductions needs none of it

        if isinstance(self.op, str):
            return reduced(self.op, inputs, self.shape, reduce_part)
        return folded_by(self.op, inputs)
