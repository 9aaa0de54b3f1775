"""Placement policies for the option `placement`: plain descriptions, made into what a task asks for when it is called.

A policy says on which nodes a task may run, what it needs besides its own amounts, and what is tried when no slot is
found. Whoever writes an own one makes a Policy, or a subclass with one of the three hooks `asked`, `turn`, `submitted`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import msgspec

from flowengine.core.parts import Shape
from flowengine.errors import BadType, BadValue

ANYWHERE = "*"
WEIGHT_MIN = 1e-6


class Way(msgspec.Struct, frozen=True):
    """One way to place a task: amounts, nodes in order of preference, objects beside which it runs."""

    shape: Shape
    nodes: tuple[str, ...] = ()
    near: tuple[Any, ...] = ()  # ObjectRefs


class Policy(msgspec.Struct, frozen=True, cache_hash=True):
    """Nodes in order of preference ("*" at the end: anywhere else; none: anywhere), and more amounts that are needed.

    near: objects that are waited for, and beside which the task runs. share: path of a tenant, with weights.
    alternatives: policies that are tried in turn while no slot is found; the task moves from one to the next after
    patience_s, which is twice as long in each round.
    """

    nodes: tuple[str, ...] = ()
    needs: Shape = ()
    alternatives: tuple[Policy, ...] = ()
    near: tuple[Any, ...] = ()  # ObjectRefs
    share: tuple[tuple[str, float], ...] = ()
    patience_s: float = 0.5

    def __post_init__(self) -> None:
        names = [*self.nodes, *[pair[0] for pair in self.needs if isinstance(pair, tuple) and len(pair) == 2]]
        if type(self.nodes) is not tuple or len(names) != len(self.nodes) + len(self.needs):
            raise BadType('a Policy has nodes as ("id", ...) and needs as (("name", 1.0), ...), not '
                          f"{self.nodes!r} and {self.needs!r}")
        for name in names:
            if not isinstance(name, str):
                raise BadType(f"names in a Policy are strings, not {name!r}")

    def asked(self, shape: Shape) -> tuple[Shape, tuple[str, ...]]:
        """Amounts and nodes that a task of this shape asks for; called once for all calls with the same options."""
        return added(shape, self.needs), self.nodes

    def turn(self, plan: Any) -> Policy:
        """The policy of the next call; plan: the functions.Plan that its calls share."""
        return self

    def submitted(self, session: Any, oid: bytes) -> None:
        """A call with this policy was submitted; oid: its first result, or what stands for its actor."""

    def hooked(self) -> bool:
        """Whether each call has to ask the policy."""
        mine = type(self)
        return mine.turn is not Policy.turn or mine.submitted is not Policy.submitted

    def ways(self, shape: Shape) -> tuple[Way, ...]:
        """What a task of this shape may ask for, in the order in which it is tried."""
        amounts, nodes = self.asked(shape)
        return (Way(amounts, nodes, self.near), *(way for other in self.alternatives for way in other.ways(shape)))

    def __and__(self, other: Policy) -> Policy:
        """Both at once."""
        return Both(parts=(self, checked(other, "&")))

    def __or__(self, other: Policy) -> Policy:
        """The first of the two that finds a slot."""
        return Either(parts=(self, checked(other, "|")))


class Both(Policy, frozen=True, kw_only=True):
    """All parts at once: what they need is added, and only nodes that all of them allow are left."""

    parts: tuple[Policy, ...]

    def turn(self, plan: Any) -> Policy:
        """Each part's turn."""
        return Both(parts=tuple([part.turn(plan) for part in self.parts]), share=self.share)

    def submitted(self, session: Any, oid: bytes) -> None:
        """Each part is told."""
        for part in self.parts:
            part.submitted(session, oid)

    def hooked(self) -> bool:
        """Whether a part has to be asked for each call."""
        return any(part.hooked() for part in self.parts)

    def ways(self, shape: Shape) -> tuple[Way, ...]:
        """All combinations that are possible, in the order of the first part."""
        found = [Way(shape)]
        for part in self.parts:
            found = [both for way in found for more in part.ways(way.shape) if (both := together(way, more))]
        if not found:
            raise BadValue(f"placement: no node is allowed by all of {', '.join(map(repr, self.parts))}")
        return tuple(found)


class Either(Policy, frozen=True, kw_only=True):
    """The parts in turn."""

    parts: tuple[Policy, ...]

    def turn(self, plan: Any) -> Policy:
        """Each part's turn."""
        return Either(parts=tuple([part.turn(plan) for part in self.parts]), share=self.share)

    def submitted(self, session: Any, oid: bytes) -> None:
        """Each part is told."""
        for part in self.parts:
            part.submitted(session, oid)

    def hooked(self) -> bool:
        """Whether a part has to be asked for each call."""
        return any(part.hooked() for part in self.parts)

    def ways(self, shape: Shape) -> tuple[Way, ...]:
        """One part after the other."""
        return tuple([way for part in self.parts for way in part.ways(shape)])


def checked(policy: Any, where: str) -> Policy:
    """The policy; raises BadType for anything else."""
    if not isinstance(policy, Policy):
        raise BadType(f"{where} takes policies of flowengine.scheduling, not {policy!r}")
    return policy


def added(shape: Shape, needs: Shape) -> Shape:
    """The amounts together, sorted by name."""
    if not needs:
        return shape
    sums = dict(shape)
    for name, amount in needs:
        sums[name] = sums.get(name, 0.0) + amount
    return tuple(sorted(sums.items()))


def together(first: Way, then: Way) -> Way | None:
    """A way that is both; `then` was made for the amounts of `first`. None: no node is allowed by both."""
    nodes = meet(first.nodes, then.nodes)
    if not nodes and (first.nodes or then.nodes):
        return None
    return Way(then.shape, nodes, tuple(dict.fromkeys((*first.near, *then.near))))


def meet(first: tuple[str, ...], then: tuple[str, ...]) -> tuple[str, ...]:
    """Nodes that both allow, best liked by the first in front. () allows all; when neither does, as a result, none."""
    if not first or not then:
        return first or then
    liked = dict.fromkeys((*first, *then))
    allowed = [
        node_id for node_id in liked
        if node_id != ANYWHERE
        and (node_id in first or first[-1] == ANYWHERE) and (node_id in then or then[-1] == ANYWHERE)
    ]  # fmt: skip
    both_soft = first[-1] == ANYWHERE and then[-1] == ANYWHERE
    return (*allowed, ANYWHERE) if both_soft else tuple(allowed)


def node(node_id: str) -> Policy:
    """On this node and no other: `f.options(placement=node(flow.nodes()[0].node_id)).remote()`."""
    if not isinstance(node_id, str):
        raise BadType(f"node takes a node_id of flowengine.nodes(), not {node_id!r}")
    if not node_id or node_id == ANYWHERE:
        raise BadValue(f"node takes a node_id of flowengine.nodes(), not {node_id!r}")
    return Policy((node_id,))


def soft(policies: Iterable[Policy]) -> Policy:
    """The first of these that can be met, else anywhere: `soft([node(a), affinity(actor)])`."""
    if isinstance(policies, Policy):
        raise BadType(f"soft takes a list of policies, not {policies!r}")
    parts = [checked(policy, "soft") for policy in policies]
    if all(type(part) is Policy and part == Policy(part.nodes) for part in parts):
        liked = dict.fromkeys(name for part in parts for name in part.nodes if name != ANYWHERE)
        return Policy((*liked, ANYWHERE))  # nodes alone: these are ranked by whoever gives slots
    return Either(parts=(*parts, Policy()))


def patience_of(policy: Policy) -> float:
    """How long a task tries one way before the next, in seconds: that of the most patient part."""
    parts = cast(tuple[Policy, ...], getattr(policy, "parts", ()))
    return max(map(patience_of, parts), default=policy.patience_s)


def share_of(policy: Policy) -> tuple[tuple[str, float], ...]:
    """The path of the tenant that the policy names; raises BadValue when it names two."""
    parts = cast(tuple[Policy, ...], getattr(policy, "parts", ()))
    found = dict.fromkeys(path for path in (policy.share, *map(share_of, parts)) if path)
    if len(found) > 1:
        raise BadValue("placement: a task has one fair share, not two")
    return next(iter(found), ())


def fair_share(name: str, weight: float = 1.0, parent: Policy | None = None) -> Policy:
    """For a tenant who has a share by weight of what the tasks of this program get; parent: of that tenant's share.

    What a tenant leaves idle is lent to the others, first to those of the same parent. Shares are of CPU time (run time
    times CPUs or GPUs), kept over time: long tasks of one are made up for to the others. Tasks without a share count as
    one more tenant of weight 1. Priorities are judged inside of each share.

        one = flow.scheduling.fair_share("one")
        a = flow.scheduling.fair_share("A", weight=2, parent=one)
        work.options(placement=a).remote()
    """
    if not isinstance(name, str) or not name:
        raise BadType(f"the name of a share is a string, not {name!r}")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise BadType(f"weight must be a number, not {weight!r}")
    if not WEIGHT_MIN <= weight <= 1 / WEIGHT_MIN:
        raise BadValue(f"weight must be from {WEIGHT_MIN:g} to {1 / WEIGHT_MIN:g}, not {weight!r}")
    above: tuple[tuple[str, float], ...] = ()
    if parent is not None:
        above = share_of(checked(parent, "fair_share: parent"))
        if not above:
            raise BadValue(f"fair_share: parent must be another fair share, not {parent!r}")
    return Policy(share=(*above, (name, float(weight))))
