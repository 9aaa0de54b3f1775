"""Policies that look at how many calls of a function are under way on each node: even over nodes, or on few of them."""

from __future__ import annotations

import heapq
import weakref
import zlib
from collections import deque
from typing import TYPE_CHECKING

from flowengine.core.ids import TASK_ID_BYTES

from .policies import Policy
from .resources import units_of

if TYPE_CHECKING:
    from flowengine.core.messages import NodeEntry, Shape
    from flowengine.functions import Plan
    from flowengine.runtime.session import Session

PATIENCE_S = 2.0  # a node may have to start a process first
STILL_THERE_MAX = 2  # calls that turn out to be under way still, for each look
STALE_MAX = 8  # places in the line for each node, until it is made anew
NO_LIMIT = 1 << 30
ANYWHERE = Policy()


class Count:
    """Calls of one function that this process has under way by such a policy, by node."""

    def __init__(self, seed: int) -> None:
        self.seed = seed  # so that the tasks of many processes do not all begin with the same node
        self.under_way: dict[str, int] = {}
        self.calls: deque[tuple[bytes, str]] = deque()
        self.turn = 0
        self.turns: dict[str, int] = {}  # when each node was chosen last
        self.chance: dict[str, int] = {}  # by node
        self.line: list[tuple[int, int, int, str]] = []  # a heap of these nodes, the emptiest first; some twice
        self.policies: dict[tuple[type, str], Policy] = {}
        self.rooms: list[tuple[str, int]] = []  # of nodes that could run it, and how often
        self.known: tuple[tuple[NodeEntry, ...], Shape] = (), ()  # of which nodes and amounts

    def look(self, session: Session) -> None:
        """Forget calls that have ended: oldest first, and no more than a few that have not."""
        still_there = 0
        for _ in range(len(self.calls)):
            oid, node_id = self.calls[0]
            if is_under_way(session, oid):
                still_there += 1
                self.calls.rotate(-1)
                if still_there == STILL_THERE_MAX:
                    return
            else:
                self.calls.popleft()
                self.under_way[node_id] -= 1
                self.line_up(node_id)

    def add(self, node_id: str, oid: bytes) -> None:
        """A call was submitted that goes there."""
        self.calls.append((oid, node_id))
        self.under_way[node_id] = self.under_way.get(node_id, 0) + 1
        self.turn += 1
        self.turns[node_id] = self.turn
        self.line_up(node_id)

    def able(self, session: Session, shape: Shape) -> list[tuple[str, int]]:
        """Nodes that could run the shape if they were empty, and how often."""
        nodes = session.all_nodes()
        if self.known[0] is not nodes or self.known[1] is not shape:
            self.known = nodes, shape
            self.rooms = [(entry.node_id, room) for entry, room in able_nodes(nodes, shape)]
            self.chance = {node_id: zlib.crc32(node_id.encode(), self.seed) for node_id, _ in self.rooms}
            self.line = []
        return self.rooms

    def policy(self, kind: type[Spread | Pack], node_id: str, scope: bytes) -> Policy:
        """The turn of a node."""
        found = self.policies.get((kind, node_id))
        if found is None:
            found = kind(nodes=(node_id,), alternatives=(ANYWHERE,), scope=scope, patience_s=PATIENCE_S)
            self.policies[kind, node_id] = found
        return found

    def emptiest(self) -> str:
        """The node with the fewest; of several the one whose turn is longest ago, then by chance."""
        line = self.line
        if not line or len(line) > STALE_MAX * len(self.chance):
            line = self.line = [self.place_of(node_id) for node_id in self.chance]
            heapq.heapify(line)
        while line[0] != self.place_of(line[0][-1]):
            heapq.heappop(line)
        return line[0][-1]

    def place_of(self, node_id: str) -> tuple[int, int, int, str]:
        """Where the node stands in the line."""
        return (self.under_way.get(node_id, 0), self.turns.get(node_id, 0), self.chance[node_id], node_id)

    def line_up(self, node_id: str) -> None:
        """Its place is another now; the old one is passed over when it comes first."""
        if self.line and node_id in self.chance:
            heapq.heappush(self.line, self.place_of(node_id))


class Spread(Policy, frozen=True, kw_only=True):
    """The node with the fewest calls under way; anywhere when it has no slot for long."""

    scope: bytes = b""

    def turn(self, plan: Plan) -> Policy:
        """Of the nodes that could run it, the one with the fewest."""
        count = count_of(plan.session, plan.function)
        count.look(plan.session)
        if not count.able(plan.session, plan.shape):
            return ANYWHERE
        return count.policy(Spread, count.emptiest(), plan.function)

    def submitted(self, session: Session, oid: bytes) -> None:
        """One more goes there."""
        count_of(session, self.scope).add(self.nodes[0], oid)

    def __repr__(self) -> str:
        return "spread()"


class Pack(Policy, frozen=True, kw_only=True):
    """The node with the most calls under way that has room for one more; anywhere when it has no slot for long."""

    scope: bytes = b""

    def turn(self, plan: Plan) -> Policy:
        """Of the nodes that could run one more, the one with the most."""
        count = count_of(plan.session, plan.function)
        count.look(plan.session)
        rooms = count.able(plan.session, plan.shape)
        able = [(-used, name) for name, room in rooms if (used := count.under_way.get(name, 0)) < room]
        if not able:
            return ANYWHERE
        return count.policy(Pack, min(able)[1], plan.function)

    def submitted(self, session: Session, oid: bytes) -> None:
        """One more goes there."""
        count_of(session, self.scope).add(self.nodes[0], oid)

    def __repr__(self) -> str:
        return "pack()"


COUNTS: weakref.WeakKeyDictionary[Session, dict[bytes, Count]] = weakref.WeakKeyDictionary()


def count_of(session: Session, function: bytes) -> Count:
    """What is under way of a function in this session."""
    counts = COUNTS.setdefault(session, {})
    count = counts.get(function)
    if count is None:
        count = counts[function] = Count(zlib.crc32(session.context.task))
    return count


def able_nodes(nodes: tuple[NodeEntry, ...], shape: Shape) -> list[tuple[NodeEntry, int]]:
    """Nodes that could run the shape if they were empty, and how often; amounts that come at run time do not count."""
    static = {name for entry in nodes for name, _ in entry.total}
    need = [(name, units) for name, units in units_of(shape) if name in static]
    totals = [(entry, dict(units_of(entry.total))) for entry in nodes]
    rooms = [(entry, min((has.get(name, 0) // each for name, each in need), default=NO_LIMIT)) for entry, has in totals]
    return [(entry, room) for entry, room in rooms if room]


def is_under_way(session: Session, oid: bytes) -> bool:
    """Whether the call has no result yet, or the actor lives."""
    obj = session.owner.objects.get(oid)
    if obj is None or obj.value is not None:
        return False
    task = obj.task
    return task is None or task.spec.life is None or session.owner.has_actor(oid[:TASK_ID_BYTES])


def spread() -> Policy:
    """Evenly over nodes: each call goes to the node on which fewest calls of its function are under way.

    Nodes that join take part at once. A task that finds no slot there for long goes anywhere, so nothing idles.

        workers = [Worker.options(placement=flow.scheduling.spread()).remote() for _ in range(8)]
    """
    return Spread()


def pack() -> Policy:
    """On few nodes: each call goes where most calls of its function are under way, as long as there is room.

    Room is what the node has, for the amounts of the call; what other programs use is not known. When all are full, a
    task goes wherever a slot is free first.

        refs = [work.options(placement=flow.scheduling.pack()).remote(n) for n in range(4)]
    """
    return Pack()
