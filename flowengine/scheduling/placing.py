"""From a policy to what the calls of a function ask for: the part of a task's spec that says where it may run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from flowengine.core.messages import Choice, Shape
from flowengine.refs import checked

from .policies import Policy, patience_of, share_of
from .resources import key_of, of_job
from .shares import OWN

if TYPE_CHECKING:
    from flowengine.refs import ObjectRef


class Asked(msgspec.Struct, frozen=True):
    """What a call asks for; unread: objects that it is to be beside, which become its last dependencies."""

    shape: Shape
    placement: tuple[str, ...] = ()
    choice: Choice | None = None
    unread: tuple[ObjectRef, ...] = ()


def owns(asked: Asked) -> bool:
    """Whether it asks for names that programs make."""
    ways = asked.choice.ways if asked.choice is not None else ()
    return any(key_of(name, "") != name for shape in (asked.shape, *(way[0] for way in ways)) for name, _ in shape)


def keyed(asked: Asked, job: str) -> Asked:
    """The same with the keys of a program in place of names that programs make."""
    choice = asked.choice
    if choice is not None:
        ways = tuple([(of_job(shape, job), nodes) for shape, nodes in choice.ways])
        choice = msgspec.structs.replace(choice, ways=ways)
    return msgspec.structs.replace(asked, shape=of_job(asked.shape, job), choice=choice)


def asked_by(policy: Policy, shape: Shape) -> Asked:
    """What a task of this shape asks for under the policy."""
    ways = policy.ways(shape)
    unread = tuple(dict.fromkeys(ref for way in ways for ref in way.near))
    for ref in unread:
        checked(ref)
    tenant = share_of(policy)
    share = (*tenant, OWN) if tenant else ()
    first = ways[0]
    if len(ways) == 1 and not unread:
        return Asked(first.shape, first.nodes, Choice(share=share) if share else None)
    near = tuple([tuple([unread.index(ref) for ref in way.near]) for way in ways]) if unread else ()
    choice = Choice(tuple([(way.shape, way.nodes) for way in ways]), near, len(unread), share, patience_of(policy))
    return Asked(first.shape, first.nodes, choice, unread)
