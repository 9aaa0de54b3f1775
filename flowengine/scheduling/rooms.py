"""What the head knows of the amounts of all nodes, indexed by name, so that no decision walks over the cluster.

For each name there is a list of the nodes that have it and one of those where some of it is free. A demand is looked
up under its rarest name; of the nodes there a bounded number is compared, in turn, beside those that hold its inputs
and those that its placement names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from flowengine.core.messages import NodeEntry, Shape

from .placement import ANYWHERE, RUN_S_GUESS, allows, cost_s, rank_of
from .resources import ACTOR, Units, is_own, plain, resolve, shown_amount, shown_need, units_of

SAMPLE = 16  # nodes that are compared for one demand
LOOKS_MAX = 512  # nodes that are looked at to find those; one that is missed serves it after its next report
EVERY = ""  # the name under which all nodes are listed

Amounts = Mapping[str, int]
Index = dict[str, "OrderedDict[str, None]"]


@dataclass(slots=True, eq=False)
class Room:
    """The amounts of one node in whole units, those that came at run time included."""

    entry: NodeEntry
    static: dict[str, None]
    total: dict[str, int]
    free: dict[str, int]  # as it last reported, less what was promised since
    promised: dict[str, int] = field(default_factory=dict)  # of what came at run time, since its last report

    def needs(self, need: Units) -> Units:
        """What a demand needs, under the names of this node."""
        return resolve(need, self.static)


@dataclass(slots=True)
class Wish:
    """What is sought: amounts, where, and what a choice is judged by; held: bytes of the inputs by node's address."""

    shape: Shape
    placement: tuple[str, ...] = ()
    run_s: float = RUN_S_GUESS
    held: tuple[tuple[str, int], ...] = ()
    but: str = ""  # not at this address
    need: Units = ()  # the amounts in whole units
    owns: bool = False  # whether nodes may know them under other names

    def __post_init__(self) -> None:
        self.need = units_of(self.shape)
        self.owns = any(is_own(name) for name, _ in self.need)

    def at(self, room: Room) -> Units:
        """The amounts under the names of a node."""
        return room.needs(self.need) if self.owns else self.need

    @property
    def anywhere(self) -> bool:
        """Whether a node may serve that the placement does not name."""
        return not self.placement or self.placement[-1] == ANYWHERE


class Rooms:
    """All living nodes."""

    def __init__(self) -> None:
        self.nodes: dict[str, Room] = {}
        self.ids: dict[str, str] = {}  # by address
        self.has: Index = {EVERY: OrderedDict()}  # name -> nodes that have some of it
        self.open: Index = {EVERY: OrderedDict()}  # name -> those where some of it is free, in turn
        self._largest: dict[str, int] = {}  # the most of a name that one node has, as far as it was asked for

    # --- what nodes tell --------------------------------------------------------------------------

    def join(self, entry: NodeEntry) -> None:
        """A node is there, for the first time or anew."""
        self.leave(entry.node_id)
        static = dict(units_of(entry.total))
        self.nodes[entry.node_id] = Room(entry, dict.fromkeys(static), {}, {})
        self.ids[entry.address] = entry.node_id
        self.has[EVERY][entry.node_id] = self.open[EVERY][entry.node_id] = None
        self.report(entry)

    def leave(self, node_id: str) -> None:
        """A node is there no more."""
        room = self.nodes.pop(node_id, None)
        if room is None:
            return
        del self.ids[room.entry.address], self.has[EVERY][node_id], self.open[EVERY][node_id]
        for name in room.total:
            self._listed(self.has, name, node_id, False)
            self._listed(self.open, name, node_id, False)
            self._measure(name, room.total[name], 0)

    def report(self, entry: NodeEntry, dynamic: tuple[tuple[str, int, int], ...] = ()) -> None:
        """A node has told what it has now; promises to it are over."""
        room = self.nodes[entry.node_id]
        room.entry = entry
        total, free = dict(units_of(entry.total)), dict(units_of(entry.available))
        if total.keys() != room.static.keys():
            for name in room.static:
                if name not in total:
                    self._put(room, name, 0, 0)
            room.static = dict.fromkeys(total)
        for name, units in total.items():
            self._put(room, name, units, free.get(name, 0))
        promised, room.promised = room.promised, {}
        for name, units in promised.items():
            self._put(room, name, room.total.get(name, 0), room.free.get(name, 0) + units)
        for name, units, left in dynamic:
            mine = room.total.get(name, 0) if is_own(name) else units  # of what programs make the head says how much
            self._put(room, name, mine, mine - (units - left))

    def resize(self, node_id: str, name: str, units: int) -> None:
        """A node is being told that it has so much of what programs make."""
        room = self.nodes[node_id]
        self._put(room, name, units, room.free.get(name, 0) + units - room.total.get(name, 0))

    def promise(self, node_id: str, need: Units, count: int = 1) -> None:
        """So many demands are sent there: it counts until the node's next report."""
        room = self.nodes[node_id]
        for name, units in room.needs(need):
            left = max(0, room.free.get(name, 0) - units * count)
            if name not in room.static:
                room.promised[name] = room.promised.get(name, 0) + room.free.get(name, 0) - left
            self._put(room, name, room.total.get(name, 0), left)

    def _put(self, room: Room, name: str, total: int, free: int) -> None:
        node_id, before, was = room.entry.node_id, room.total.get(name, 0), room.free.get(name, 0)
        if total != before:
            self._measure(name, before, total)
            self._listed(self.has, name, node_id, total > 0)
        if (free > 0) != (was > 0):
            self._listed(self.open, name, node_id, free > 0)
        if total or free:
            room.total[name], room.free[name] = total, free
        else:
            room.total.pop(name, None)
            room.free.pop(name, None)

    def _measure(self, name: str, before: int, total: int) -> None:
        """The most of a name that one node has may be another now."""
        most = self._largest.get(name)
        if most is not None and total > most:
            self._largest[name] = total
        elif before == most:
            del self._largest[name]

    @staticmethod
    def _listed(index: Index, name: str, node_id: str, there: bool) -> None:
        nodes = index.get(name)
        if there:
            if nodes is None:
                nodes = index[name] = OrderedDict()
            nodes[node_id] = None
        elif nodes is not None:
            nodes.pop(node_id, None)
            if not nodes:
                del index[name]

    # --- choosing ---------------------------------------------------------------------------------

    def fits(self, room: Room, wish: Wish) -> bool:
        """Whether the node could serve it now."""
        if room.entry.address == wish.but or not covers(room.free, wish.at(room)):
            return False
        return not wish.placement or allows(wish.placement, room.entry.node_id)

    def choose(self, wish: Wish) -> Room | None:
        """The node with the amounts free where the task begins soonest, of those that are looked at; None: no node."""
        if any(self._most(key, None) < count for key, count in wish.need):
            return None
        found: dict[str, Room] = {}
        for node_id in (*self._named(wish.placement), *(self.ids.get(address, "") for address, _ in wish.held)):
            room = self.nodes.get(node_id)
            if room is not None and self.fits(room, wish):
                found[node_id] = room
        if wish.anywhere:
            self._sample(wish, found)
        if not found:
            return None
        held = dict(wish.held)
        largest = max(held.values(), default=0)

        def price(room: Room) -> tuple[float, int]:
            entry, units = room.entry, wish.at(room)
            moves = largest - held.get(entry.address, 0) if held else 0
            rank = rank_of(wish.placement, entry.node_id) if wish.placement else 0
            slots = times(room.total, units, 1 << 20) if entry.queued else 1
            return (cost_s(entry.queued, slots, rank, wish.run_s, moves), -times(room.free, units, 1 << 20))

        best = min(found.values(), key=price)
        for nodes in self._rarest(self.open, wish.need):
            if best.entry.node_id in nodes:
                nodes.move_to_end(best.entry.node_id)
        return best

    def _sample(self, wish: Wish, found: dict[str, Room]) -> None:
        """Adds nodes that fit, up to a bound; what does not fit is looked at last the next time."""
        for nodes in self._rarest(self.open, wish.need):
            passed: list[str] = []
            for node_id in islice(nodes, LOOKS_MAX):
                if len(found) >= SAMPLE:
                    break
                room = self.nodes[node_id]
                if self.fits(room, wish):
                    found[node_id] = room
                else:
                    passed.append(node_id)
            for node_id in passed:
                nodes.move_to_end(node_id)

    @staticmethod
    def _named(placement: tuple[str, ...]) -> Iterator[str]:
        return (node_id for node_id in placement if node_id != ANYWHERE)

    def _rarest(self, index: Index, need: Units) -> list[OrderedDict[str, None]]:
        """The nodes listed under the name of a demand that the fewest have."""
        best = [index[EVERY]]
        size = len(best[0]) + 1
        for key, _ in need:
            names = (key, plain(key)) if is_own(key) else (key,)
            lists = [nodes for name in names if (nodes := index.get(name)) is not None]
            count = sum(map(len, lists))
            if count < size:
                best, size = lists, count
        return best

    # --- why not ----------------------------------------------------------------------------------

    def able(self, wish: Wish, limit: int) -> list[Room]:
        """Nodes that could serve it when they were empty, at most so many."""
        if any(self._most(key, None) < count for key, count in wish.need):
            return []
        ids: Iterator[str] = (
            (node_id for nodes in self._rarest(self.has, wish.need) for node_id in nodes)
            if wish.anywhere
            else self._named(wish.placement)
        )
        found: list[Room] = []
        for node_id in ids:
            room = self.nodes.get(node_id)
            if room is not None and room.entry.address != wish.but and covers(room.total, wish.at(room)):
                found.append(room)
                if len(found) >= limit:
                    break
        return found

    def why_not(self, wish: Wish, absent: Callable[[str], str]) -> str:
        """Why no node can ever serve it as things are; absent: what is known of a name that no node has."""
        allowed = None if wish.anywhere else [node for node in self._named(wish.placement) if node in self.nodes]
        if allowed == []:
            return f"node {', '.join(self._named(wish.placement))} is not there"
        if not any(node.entry.total for node in self.nodes.values()):
            return "no node that runs tasks is there: `flow node --join FILE` brings one"
        who = "no node" if allowed is None else f"none of {', '.join(allowed)}"
        for key, count in wish.need:
            largest = self._most(key, allowed)
            if largest >= count:
                continue
            if key.startswith(ACTOR):
                who = who if allowed else "no node"
                return f"actor {key[len(ACTOR) :][:12]} lives on {who}: it has not begun, or its process has died"
            reason = absent(key) if not largest else ""
            what = f"{who} has {shown_need(key, count)}"
            return f"{what}; {reason}" if reason else f"{what} (largest: {shown_amount(largest, key)})"
        wanted = " and ".join(shown_need(key, count) for key, count in wish.need)
        return f"{who} has {wanted} together"

    def _most(self, key: str, allowed: list[str] | None) -> int:
        names = (key, plain(key)) if is_own(key) else (key,)
        if allowed is not None:
            return max(self.nodes[node_id].total.get(name, 0) for node_id in allowed for name in names)
        most = 0
        for name in names:
            if name not in self._largest:
                totals = (self.nodes[node_id].total[name] for node_id in self.has.get(name, ()))
                self._largest[name] = max(totals, default=0)
            most = max(most, self._largest[name])
        return most


def covers(have: Amounts, need: Units) -> bool:
    """Whether the amounts of a node cover what is needed."""
    for name, units in need:
        if have.get(name, 0) < units:
            return False
    return True


def times(have: Amounts, need: Units, limit: int) -> int:
    """How often the amounts of a node cover what is needed, at most `limit`."""
    for name, units in need:
        limit = min(limit, have.get(name, 0) // units)
    return max(0, limit)
