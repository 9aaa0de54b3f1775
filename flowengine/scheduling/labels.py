"""Policies over resources: beside an object, an actor or others of a label, and never two of a label on one node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from flowengine.errors import BadType, BadValue

from .policies import Policy, added
from .resources import ACTOR, APART, BESIDE

if TYPE_CHECKING:
    from flowengine.actors import ActorHandle
    from flowengine.core.messages import Shape
    from flowengine.refs import ObjectRef

LABEL_CHARS_MAX = 200


class Together(Policy, frozen=True, kw_only=True):
    """All of a label on one node: each needs one of what there is of there without limit."""

    label: str

    def asked(self, shape: Shape) -> tuple[Shape, tuple[str, ...]]:
        """The resource is made when it is first asked for."""
        from flowengine import resources

        name = BESIDE + self.label
        resources.create(name, float("inf"))
        return added(shape, ((name, 1.0),)), ()

    def __repr__(self) -> str:
        return f"affinity({self.label!r})"


class Apart(Policy, frozen=True, kw_only=True):
    """At most so many of a label on a node at once: each needs one of the few that each node has."""

    label: str
    per_node: int = 1

    def asked(self, shape: Shape) -> tuple[Shape, tuple[str, ...]]:
        """The resource is made on all nodes, also those that join later, when it is first asked for."""
        from flowengine import resources

        name = APART + self.label
        resources.create(name, self.per_node, node={})
        return added(shape, ((name, 1.0),)), ()

    def __repr__(self) -> str:
        return f"anti_affinity({self.label!r}, {self.per_node})"


def affinity(target: ObjectRef | ActorHandle | str | Iterable[ObjectRef | ActorHandle]) -> Policy:
    """On the node of an object, of an actor, or of all others with the same label.

    An object is waited for, and not passed; small values lie where they were made. Of several objects the node counts
    that holds most of their bytes. The policy follows an actor that is restarted elsewhere, and an object that is made
    again. Several actors have to be on one node.

        cache = Cache.remote()
        query.options(placement=flow.scheduling.affinity(cache)).remote(cache)
    """
    from flowengine.actors import ActorHandle
    from flowengine.refs import ObjectRef

    if isinstance(target, str):
        return Together(label=label_of(target))
    targets: list[Any] = [target] if isinstance(target, (ObjectRef, ActorHandle)) else list(several(target))
    if not targets:
        raise BadValue("affinity takes at least one reference or actor")
    for one in targets:
        if not isinstance(one, (ObjectRef, ActorHandle)):
            raise BadType(f"affinity takes references, actors or a label, not {one!r}")
    refs = tuple(dict.fromkeys(one for one in targets if isinstance(one, ObjectRef)))
    actors = dict.fromkeys(one.actor_id for one in targets if isinstance(one, ActorHandle))
    return Policy(needs=tuple(sorted((ACTOR + actor, 1.0) for actor in actors)), near=refs)


def anti_affinity(label: str, per_node: int = 1) -> Policy:
    """Of all tasks and actors with this label at most `per_node` are on one node at the same time.

        replicas = [Replica.options(placement=flow.scheduling.anti_affinity("db")).remote() for _ in range(3)]

    With more of them than nodes the rest waits. With a larger number it balances load: ceil(tasks / nodes) for each.
    """
    from flowengine.options import whole

    return Apart(label=label_of(label), per_node=whole("per_node", per_node, 1, 1 << 30))


def several(targets: Any) -> Iterable[Any]:
    """What was given in a list; raises BadType when it is none."""
    if not isinstance(targets, Iterable):
        raise BadType(f"affinity takes references, actors or a label, not {targets!r}")
    return targets


def label_of(label: Any) -> str:
    """A label as part of the name of a resource; raises BadType or BadValue."""
    if not isinstance(label, str):
        raise BadType(f"a label is a string, not {label!r}")
    if not label or len(label) > LABEL_CHARS_MAX or "@" in label or not label.isprintable():
        raise BadValue(f"a label has 1 to {LABEL_CHARS_MAX} printable characters without @, not {label[:40]!r}")
    return label
