"""Reductions of large arrays that lie on several hosts: the nodes fold them on their way to this host.

The task of the reduction is the ledger of one step: it sends its course to the nodes that hold inputs and hears from
them. What is broken is tried again where the inputs are then; after a few times they are fetched and folded here.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from flowengine.collectives.plan import best_piece_bytes, in_even_pieces
from flowengine.collectives.posts_orders import HEAD_BYTES
from flowengine.collectives.speeds import Speed, slowest
from flowengine.collectives.totals import made_dtype
from flowengine.collectives.tree import NO_STEP, Shape, degree, levels, parents
from flowengine.core import messages as m
from flowengine.core.ids import object_id
from flowengine.objects import arrays

if TYPE_CHECKING:
    from flowengine.refs import ObjectRef
    from flowengine.runtime.session import Session

log = logging.getLogger(__name__)

TRIES = 3
COURSE_FRACTION = 1 / 2  # of a store, for what it gives to a course and gets of it, which is all there at once
ROUND_TRIP = -1  # in place of an epoch: the answer to a question that is asked to see how long it takes
DEATH_TOLD_S = 2.0  # so long after the first news of it a death is known everywhere


class Spread(msgspec.Struct, frozen=True):
    """Inputs by the node where each is taken, this node last, and what array each of them is."""

    nodes: dict[str, list[int]]
    kind: bytes
    nbytes: int
    above: tuple[int, ...] = ()  # for each node that above it, once they are in the order of their tree

    @property
    def shape(self) -> Shape:
        """In which order they are folded, wherever they are."""
        return tuple([tuple(indices) for indices in self.nodes.values()]), self.above


class Way(msgspec.Struct, frozen=True):
    """How a reduction has gone, which decides its bits: so it goes again."""

    shapes: list[Shape]  # of runs of its inputs; none: in their order
    is_fused: bool = False


def note_way(session: Session, way: Way) -> None:
    """Remember it for another run of the task; where there is one node, all ways are the same."""
    if len(session.nodes_seen) > 1:
        session.note("way", 0, msgspec.msgpack.encode(way))


def reduced_across(
    session: Session, fold: str, refs: Sequence[ObjectRef], shape: Shape | None = None
) -> m.Stored | None:
    """The reduction as an object in the store of this host; None when its inputs are better fetched and folded here.

    shape: in which it has to be folded; without one it is chosen, and noted.
    """
    push = session.context.push
    if push is None or spread_of(session, fold, refs) is None:
        return None
    op = os.urandom(16)  # of this run alone: what nodes still know of another one has nothing to do with it
    news: SimpleQueue[tuple[str, Any]] = SimpleQueue()
    session.courses.open[op] = news
    told: dict[str, None] = {}
    try:
        for number in range(TRIES):
            session.wait_ready([ref.oid for ref in dict.fromkeys(refs)], len(set(refs)), None)
            spread = spread_of(session, fold, refs)
            if spread is not None:
                spread = in_tree(session, spread) if shape is None else as_shaped(session, spread, refs, shape)
            if spread is None:
                return None
            course = course_of(session, (op, number), fold, spread, refs)
            told.update(dict.fromkeys(spread.nodes))
            began = time.monotonic()
            for node in told:
                if not number:
                    session.endpoint.send(node, m.FinalsAsked(op, ROUND_TRIP))
                session.endpoint.send(node, course)
            peer, broken = outcome(session, news, course)
            if broken is None:
                learn(session, course, time.monotonic() - began)
                if shape is None:
                    note_way(session, Way([spread.shape]))
                return m.Stored(spread.nbytes + HEAD_BYTES, (session.node,), (), spread.kind)
            log.warning("a reduction of %d arrays is tried again: %s: %s", len(refs), peer, broken.reason)
            if not can_go_on(session, news, peer, broken):
                return None
        return None
    finally:
        del session.courses.open[op]
        for node in told:
            session.endpoint.send(node, m.StepEnded(op))


def runs_of(session: Session, fold: str, refs: Sequence[ObjectRef]) -> list[list[ObjectRef]]:
    """The inputs in runs for a course each, as the stores have room for; none when they are better fetched.

    Other nodes' stores are taken to be as large as that of this host.
    """
    spread = spread_of(session, fold, refs) if session.context.push is not None else None
    fits = int(session.store_limit_bytes * COURSE_FRACTION) // spread.nbytes if spread is not None else 0
    if spread is None or fits < 2:
        return []
    place = {index: node for node, indices in spread.nodes.items() for index in indices}
    runs: list[list[ObjectRef]] = []
    taken: dict[str, int] = {}
    for index, ref in enumerate(refs):
        node = place[index]
        if not runs or taken.get(node, 0) == fits:
            runs.append([])
            taken = {session.node: 1}  # the result
        runs[-1].append(ref)
        taken[node] = taken.get(node, 0) + 1
    return runs


def spread_of(session: Session, fold: str, refs: Sequence[ObjectRef]) -> Spread | None:
    """Where the inputs are; None unless all are plain arrays of one kind, and some are on other hosts only."""
    values = [session.owner.value_of(ref.oid) for ref in refs]
    kinds = {value.array if type(value) is m.Stored else b"" for value in values}
    kind = kinds.pop()
    if kinds or not kind:
        return None
    name, shape = arrays.read_kind(kind)
    dtype = np.dtype(name)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes <= session.config.collective_inline_bytes_max or made_dtype(fold, dtype) != dtype or not dtype.isnative:
        return None
    nodes: dict[str, list[int]] = {}
    for index, value in enumerate(values):
        having = living(session, value)
        if not having:
            return None
        node = session.node if session.node in having else next((one for one in having if one in nodes), having[0])
        nodes.setdefault(node, []).append(index)
    here = nodes.pop(session.node, [])
    if not nodes:
        return None
    nodes[session.node] = here
    return Spread(nodes, kind, nbytes)


def in_tree(session: Session, spread: Spread) -> Spread:
    """The nodes in a tree with this one at its root, whose degree follows from what is measured."""
    others = list(spread.nodes)[:-1]
    speed = slowest(session.courses.speeds, others)
    above = parents(len(others) + 1, degree(len(others), spread.nbytes, speed.latency_s, speed.bytes_per_s))
    root = above.index(-1)
    order = (*others[:root], session.node, *others[root:])
    return msgspec.structs.replace(spread, nodes={node: spread.nodes[node] for node in order}, above=above)


def as_shaped(session: Session, spread: Spread, refs: Sequence[ObjectRef], shape: Shape) -> Spread | None:
    """The nodes in a tree that was told; None when the inputs are not where they would have to be for that."""
    slots, above = shape
    nodes: dict[str, list[int]] = {}
    for indices, parent in zip(slots, above, strict=True):
        having = [living(session, session.owner.value_of(refs[index].oid)) for index in indices]
        wanted = [session.node] if parent < 0 else [node for node in having[0] if node != session.node]
        node = next((one for one in wanted if one not in nodes and all(one in each for each in having)), None)
        if node is None:
            return None
        nodes[node] = list(indices)
    return msgspec.structs.replace(spread, nodes=nodes, above=above)


def living(session: Session, value: m.Value | None) -> list[str]:
    """The nodes that have a value."""
    return [node for node in value.nodes if node not in session.owner.dead] if type(value) is m.Stored else []


def course_of(
    session: Session, name: tuple[bytes, int], fold: str, spread: Spread, refs: Sequence[ObjectRef]
) -> m.Course:
    """The way of the inputs through their nodes, which are in a tree, to this one."""
    (op, epoch), push, above = name, session.context.push, spread.above
    assert push is not None
    dtype, shape = arrays.read_kind(spread.kind)
    posts = []
    for node, indices in spread.nodes.items():
        gives = tuple([(index, refs[index].oid) for index in indices])
        made = (object_id(push.spec.id, 0), spread.nbytes) if node == session.node else (b"", 0)
        posts.append(m.Post(node, gives, *made))
    edges = tuple([(slot, parent) for slot, parent in enumerate(above) if parent >= 0])
    root, each = above.index(-1), max([above.count(slot) for slot in range(len(above))])
    hops = levels(len(edges), each)
    piece_bytes = best_piece_bytes(spread.nbytes * each, hops, session.config.collective_piece_bytes)
    line = in_even_pieces(m.Line(0, 0, spread.nbytes, spread.nbytes, dtype, root, edges), piece_bytes)
    return m.Course(
        op, op, NO_STEP, epoch, fold, len(refs), tuple(posts), (line,),
        owner=session.context.caller, array=m.ArrayPart(dtype, shape, 0),
    )  # fmt: skip


def outcome(
    session: Session, news: SimpleQueue[tuple[str, Any]], course: m.Course
) -> tuple[str, m.CourseBroken | None]:
    """Wait for the result, or for the process that says why there is none."""
    context = session.context
    nodes = [post.node for post in course.posts]
    began = time.monotonic()
    session.going_to_block(context)
    try:
        while True:
            peer, told = news.get()
            if type(told) is m.PeerLost and peer in nodes:
                return peer, m.CourseBroken(course.op, course.epoch, "peer", peer, told.reason)
            if type(told) is m.Finals and peer != session.node:
                session.courses.speeds.setdefault(peer, Speed()).answered(time.monotonic() - began)
            if type(told) is m.CourseBroken and told.epoch == course.epoch:
                return peer, told
            if type(told) is m.CourseDone and told.epoch == course.epoch and peer == session.node:
                return peer, None
    finally:
        session.blocked_no_more(context)


def can_go_on(session: Session, news: SimpleQueue[tuple[str, Any]], peer: str, broken: m.CourseBroken) -> bool:
    """See to it that what broke a course is known here; False when another one would break in the same way."""
    if broken.gift:
        reason = broken.reason.removeprefix(f"{broken.gift.hex()}: ")
        if reason.startswith(("StoreFull", "OutOfDisk")):
            return False  # it is there, on disk
        session.step(m.ObjectMissing(broken.gift, (peer,), reason))
        return True
    end = time.monotonic() + DEATH_TOLD_S
    while broken.kind == "peer" and broken.peer not in session.owner.dead:
        try:
            news.get(timeout=max(0.0, end - time.monotonic()))
        except Empty:
            break  # it lives, and the way to it broke
    return broken.kind == "peer"


def learn(session: Session, course: m.Course, took_s: float) -> None:
    """A course has ended: its bytes took so long on all of its ways."""
    line = course.lines[0]
    targets = [target for _, target in line.folds]
    each = max(targets.count(target) for target in targets)
    for post in course.posts:
        if post.node != session.node:
            speed = session.courses.speeds.setdefault(post.node, Speed())
            speed.carried(line.nbytes * each, levels(len(targets), each), took_s)
