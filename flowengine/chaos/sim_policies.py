"""Policies in virtual programs: which a task has follows from its id, so that a run that comes again asks the same."""

from __future__ import annotations

import msgspec

from flowengine.core import messages as m
from flowengine.scheduling.shares import OWN

TENANTS = ((("x", 1.0), ("A", 2.0), OWN), (("x", 1.0), ("B", 3.0), OWN), (("y", 1.0), ("C", 1.0), OWN))


def placed(spec: m.TaskSpec, nodes: int) -> m.TaskSpec:
    """The task with a policy: ways in turn, beside one of its inputs, a share, or none."""
    number = spec.id[0]
    some, kind = f"n{number % nodes}", number % 6
    ways = ((spec.shape, (some,)), (spec.shape, ())) if number & 64 else ((spec.shape, (some, "*")),)
    share = () if spec.life is not None else TENANTS[number % 3]
    if kind < 2:
        choice = m.Choice(ways=ways, patience_s=0.05)
    elif kind < 4 and spec.deps:
        beside = ways if kind == 2 else ((spec.shape, ()),)
        choice = m.Choice(beside, ((0,),) * len(beside), 1, share if kind == 3 else (), 0.05)
        spec = msgspec.structs.replace(spec, deps=(*spec.deps, spec.deps[number % len(spec.deps)]))
    elif kind == 4 and share:
        choice = m.Choice(share=share)
    else:
        return spec
    shape, placement = choice.ways[0] if choice.ways else (spec.shape, spec.placement)
    return msgspec.structs.replace(spec, choice=choice, shape=shape, placement=placement)


def passed(push: m.PushTask) -> tuple[tuple[m.RefTo, ...], tuple[m.Value | m.Pending, ...]]:
    """References of a task that are passed to its code, and what came for them; not those that it is only beside."""
    spec, values = push.spec, push.values
    unread = spec.choice.unread if spec.choice is not None else 0
    count = len(spec.deps) - unread
    refs, values = spec.deps[:count], (*values[:count], *values[len(spec.deps) :])
    return (refs if spec.args_object is None else (*refs, spec.args_object)), values
