"""Placement policies for the option `placement`: plain descriptions, made into what a task asks for when it is called.

A policy says on which nodes a task may run, what it needs besides its own amounts, and what is tried when no slot is
found. Whoever writes an own one makes a Policy, or a subclass with one of the three hooks `asked`, `turn`, `submitted`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import msgspec

from flowengine.core.parts import Shape
from flowengine.errors import BadType, BadValue

from .resources import ACTOR, shown_name

ANYWHERE = "*"
LIKE_NODES, LIKE_AMOUNTS = '("id", ...)', '(("name", 1.0), ...)'
WHOLES = {"gang": "gang", "placement group": "group"}  # kinds of sets of bundles, by the names of variables
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
        for field, value in (("alternatives", self.alternatives), ("near", self.near), ("share", self.share)):
            if type(value) is not tuple:
                raise BadType(f"a Policy has {field} as a tuple, not {value!r}")
        for other in self.alternatives:
            checked(other, "a Policy: alternatives")
        check_nodes("a Policy has", self.nodes)
        check_amounts("a Policy has", self.needs)
        if not is_real(self.patience_s) or not 0 < self.patience_s < math.inf:
            raise BadValue(f"a Policy has patience_s as a number of seconds above 0, not {self.patience_s!r}")

    def asked(self, shape: Shape) -> tuple[Shape, tuple[str, ...]]:
        """Amounts and nodes that a task of this shape asks for; called once for all calls with the same options."""
        return added(shape, self.needs), self.nodes

    def turn(self, plan: Any) -> Policy:
        """The policy of the next call; plan: the functions.Plan that its calls share."""
        return self

    def submitted(self, session: Any, oid: bytes) -> None:
        """A call with this policy was submitted; oid: its first result, or what stands for its actor."""

    def renames(self) -> bool:
        """Whether it has to see the call's own amounts, before others add theirs: it gives them other names."""
        return any(other.renames() for other in self.alternatives)

    def hooked(self) -> bool:
        """Whether each call has to ask the policy."""
        mine = type(self)
        return mine.turn is not Policy.turn or mine.submitted is not Policy.submitted

    def ways(self, shape: Shape) -> tuple[Way, ...]:
        """What a task of this shape may ask for, in the order in which it is tried."""
        found = self.asked(shape)
        if type(found) is not tuple or len(found) != 2:
            raise BadType(f"{type(self).__name__}.asked gives amounts and nodes as ({LIKE_AMOUNTS}, {LIKE_NODES}), not "
                          f"{found!r}")
        amounts, nodes = found
        check_amounts(f"{type(self).__name__}.asked gives", amounts)
        check_nodes(f"{type(self).__name__}.asked gives", nodes)
        amounts = added((), amounts)
        return (Way(amounts, nodes, self.near), *(way for other in self.alternatives for way in other.ways(shape)))

    def __repr__(self) -> str:
        if type(self) is not Policy:
            given = [f"{one.name}={getattr(self, one.name)!r}" for one in msgspec.structs.fields(self)
                     if getattr(self, one.name) != one.default]
            return f"{type(self).__name__}({', '.join(given)})"
        return shown(self)

    def __and__(self, other: Policy) -> Policy:
        """Both at once."""
        return Both(parts=(self, checked(other, "&")))

    def __or__(self, other: Policy) -> Policy:
        """The first of the two that finds a slot."""
        return Either(parts=(self, checked(other, "|")))


class Parts(Policy, frozen=True, kw_only=True):
    """What is made of other policies; each of them has its turn and is told."""

    parts: tuple[Policy, ...]

    def turn(self, plan: Any) -> Policy:
        """Each part's turn."""
        return type(self)(parts=tuple([turn_of(part, plan) for part in self.parts]), share=self.share)

    def submitted(self, session: Any, oid: bytes) -> None:
        """Each part is told."""
        for part in self.parts:
            part.submitted(session, oid)

    def renames(self) -> bool:
        """Whether a part gives the call's own amounts other names."""
        return any(part.renames() for part in self.parts)

    def hooked(self) -> bool:
        """Whether a part has to be asked for each call."""
        return any(part.hooked() for part in self.parts)


class Both(Parts, frozen=True, kw_only=True):
    """All parts at once: what they need is added, and only nodes that all of them allow are left."""

    def __repr__(self) -> str:
        return " & ".join(f"({part!r})" if isinstance(part, Either) else repr(part) for part in self.parts)

    def ways(self, shape: Shape) -> tuple[Way, ...]:
        """All combinations that are possible, in the order of the first part (of bundles, if one is on those)."""
        found = [Way(shape)]
        for part in sorted(self.parts, key=lambda part: not part.renames()):
            found = [both for way in found for more in part.ways(way.shape) if (both := together(way, more))]
        if not found:
            raise BadValue(f"placement: no node is allowed by all of {self!r}")
        return tuple(found)


class Either(Parts, frozen=True, kw_only=True):
    """The parts in turn."""

    def __repr__(self) -> str:
        if self.parts[-1] == Policy():
            return f"soft([{', '.join(map(repr, self.parts[:-1]))}])"
        return " | ".join(map(repr, self.parts))

    def ways(self, shape: Shape) -> tuple[Way, ...]:
        """One part after the other."""
        return tuple([way for part in self.parts for way in part.ways(shape)])


def checked(policy: Any, where: str) -> Policy:
    """The policy; raises BadType for anything else."""
    if not isinstance(policy, Policy):
        raise BadType(f"{where} takes policies of flowengine.scheduling, not {no_policy(policy)}")
    return policy


def no_policy(value: Any) -> str:
    """What was given in place of a policy, and how to make one of it."""
    kind = getattr(value, "kind", "")
    if kind in WHOLES:
        return f"the whole {kind} {value.id}: take a bundle: {WHOLES[kind]}[0]"
    called = f"; call it: {value.__name__}(...)" if callable(value) and hasattr(value, "__name__") else ""
    return f"{value!r}{called}"


def turn_of(policy: Policy, plan: Any) -> Policy:
    """The policy's own for the next call; raises BadType when it gives something else."""
    mine = policy.turn(plan)
    if not isinstance(mine, Policy):
        raise BadType(f"{type(policy).__name__}.turn gives a policy of flowengine.scheduling, not {no_policy(mine)}")
    return mine


def check_nodes(where: str, nodes: Any) -> None:
    """Raises BadType or BadValue unless these are ids of nodes."""
    if type(nodes) is not tuple:
        raise BadType(f"{where} nodes as {LIKE_NODES}, not {nodes!r}")
    for name in nodes:
        if not isinstance(name, str):
            raise BadType(f"{where} nodes as {LIKE_NODES}, not with {name!r}")
        check_text(f"{where} nodes that", name)
    if ANYWHERE in nodes[:-1]:
        raise BadValue(f"{where} {ANYWHERE!r}, anywhere else, only at the end of nodes, not {nodes!r}")


def check_amounts(where: str, needs: Any) -> None:
    """Raises BadType or BadValue unless these are pairs of names and amounts; in any order."""
    if type(needs) is not tuple:
        raise BadType(f"{where} needs as {LIKE_AMOUNTS}, not {needs!r}")
    for pair in needs:
        if type(pair) is not tuple or len(pair) != 2 or not isinstance(pair[0], str) or not is_real(pair[1]):
            raise BadType(f"{where} needs as {LIKE_AMOUNTS}, not with {pair!r}")
        if not pair[0] or not 0 <= pair[1] < math.inf:
            raise BadValue(f"{where} needs with names and finite amounts from 0, not {pair!r}")
        check_text(f"{where} needs with names that", pair[0])


def check_text(where: str, text: str) -> str:
    """The text; raises BadValue when it has NUL, or halves of characters (surrogates), which no message can hold."""
    if "\0" in text:
        raise BadValue(f"{where} must be text without NUL, not {text[:40]!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadValue(f"{where} must be text that can be written in UTF-8, not {text[:40]!r}") from error
    return text


def is_real(value: Any) -> bool:
    """Whether it is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shown(policy: Policy) -> str:
    """A plain policy in the words by which it is made, or nearly so."""
    words = [f"affinity({ref!r})" for ref in policy.near]
    words += [
        f"affinity({shown_name(name)})" if name.startswith(ACTOR) else f"Policy(needs=(({name!r}, {amount!r}),))"
        for name, amount in policy.needs
    ]
    if policy.nodes and policy.nodes[-1] == ANYWHERE:
        words.append(f"soft([{', '.join(f'node({name!r})' for name in policy.nodes[:-1])}])")
    elif policy.nodes:
        liked = f"Policy(nodes={policy.nodes!r})" if len(policy.nodes) > 1 else f"node({policy.nodes[0]!r})"
        words.append(liked)
    if policy.share:
        name, weight = policy.share[-1]
        below = f", parent={shown(Policy(share=policy.share[:-1]))}" if len(policy.share) > 1 else ""
        words.append(f"fair_share({name!r}, {weight:g}{below})")
    return " | ".join([" & ".join(words) or "Policy()", *map(repr, policy.alternatives)])


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
    check_text("the name of a share", name)
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
