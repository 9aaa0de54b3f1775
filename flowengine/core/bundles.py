"""Bundles: amounts that are reserved together. Their names in shapes, and what owners, nodes and the head say of them.

A set of bundles is a gang, reserved while it has members, or a placement group, reserved until it is removed. A node
that holds a bundle takes its amounts from what it has and offers them again under names of the bundle alone, so a
member is a task like any other: it asks for these names.
"""

from __future__ import annotations

from .parts import Message, Record, Shape

GANG, GROUP = "gang-", "group-"  # what ids begin with
MARK = "@"  # before the name of a bundle: what a member holds of it, besides amounts
MARKS = (MARK + GANG, MARK + GROUP)
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
GONE = "is gone"  # why a node refuses to open bundles
SPLIT = "has no such GPUs free, only parts of several"  # why it does not take them though the amounts are free


def bundle_name(group: str, index: int) -> str:
    """A bundle of a set."""
    return f"{group}.{index}"


def mark_of(bundle: str) -> str:
    """The amount that a member holds while it runs: a gang's bundle has 1, a placement group's any number."""
    return MARK + bundle


def renamed(name: str, bundle: str) -> str:
    """An amount of a bundle."""
    return f"{name}{MARK}{bundle}"


def in_bundle(shape: Shape, bundle: str) -> Shape:
    """What a member asks for."""
    return tuple(sorted([(mark_of(bundle), 1.0), *((renamed(name, bundle), amount) for name, amount in shape)]))


def bundle_of(shape: Shape) -> str:
    """The bundle that a task of this shape runs in, "" for none."""
    for name, _ in shape:
        if name.startswith(MARKS):
            return name[len(MARK) :]
    return ""


def group_of(bundle: str) -> str:
    """The set that a bundle belongs to."""
    return bundle.rpartition(".")[0]


def index_of(bundle: str) -> int:
    """Its place in the set."""
    return int(bundle.rpartition(".")[2])


def is_gang(group: str) -> bool:
    """Whether it ends with its members, and has one of them in each bundle at a time."""
    return group.startswith(GANG)


class BundleSet(Record, frozen=True):
    """A gang or placement group as it was described; amounts are sorted by name."""

    id: str
    bundles: tuple[Shape, ...]
    strategy: str = STRATEGIES[0]


class HeldBundle(Record, frozen=True):
    """What a node tells of one."""

    group: str
    index: int
    shape: Shape


class GangNamed(Message, frozen=True):
    """Shell to its owner, and on to the driver, which owns actors: code here may submit members of this gang."""

    described: BundleSet
    driver: str = ""  # who is to hear it too


class GangWanted(Message, frozen=True):
    """Owner to its node: members of the gang are ready or run here, or none is any more."""

    described: BundleSet
    wanted: bool


class GangSought(Message, frozen=True):
    """Node to head: the same, of one of its processes."""

    owner: str
    described: BundleSet
    wanted: bool
    waited_s: float = 0.0


class BundlesAsked(Message, frozen=True):
    """Head to node: take these out of what is free, all or none; hold_s: for so long what lacks may be waited for."""

    group: str
    turn: int
    bundles: tuple[tuple[int, Shape], ...]
    hold_s: float = 0.0


class BundlesTaken(Message, frozen=True):
    """The node's answer: they are taken, or refused and why; available: what is free now."""

    group: str
    turn: int
    refused: str
    available: Shape


class BundlesOpened(Message, frozen=True):
    """Head to node: every bundle of the set has been taken, so members may come."""

    group: str
    turn: int


class BundlesDropped(Message, frozen=True):
    """Head to node: give back what it holds of the set (turn: of that asking only); why: members that run are ended.

    unless_used: nothing of it, if a member has a slot there already; it came while the gang ended.
    """

    group: str
    turn: int = 0
    why: str = ""
    unless_used: bool = False


class BundlesKept(Message, frozen=True):
    """Node to head: it was not given back, since members have come again."""

    group: str
    bundles: tuple[int, ...]


class BundlesGiven(Message, frozen=True):
    """Node to head: what it held of the set is free again."""

    group: str
    available: Shape


class BundlesTold(Message, frozen=True):
    """Node to a head that has accepted it: all that it holds open, and what gangs its processes want."""

    held: tuple[HeldBundle, ...]
    wanted: tuple[GangSought, ...]


class LeaseRefused(Message, frozen=True):
    """Node to owner: there will never be a slot for this; why."""

    shape: Shape
    placement: tuple[str, ...]
    reason: str
