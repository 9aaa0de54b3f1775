"""The head's part for gangs and placement groups: who is wanted, on which nodes each bundle lies, who comes next.

All bundles of a set are reserved or none: nodes are asked for theirs, and only when every one has taken them may
members come. The head alone asks, so two sets never wait for each other. They are served in the order in which they
came; one that fits overtakes those that do not, but for the oldest that has waited long (`starve_s`) nodes hold slots
free, for one set at a time. What nodes do not say again to a new head is in the journal: placement groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.scheduling.bundling import Table, arrange, minus_units, summed, why_never, why_not_now
from flowengine.scheduling.resources import CPU, Units, shape_of, units_of
from flowengine.scheduling.rooms import Room

from .bundles import GONE, SPLIT, group_of, index_of, is_gang
from .commands import WriteJournal
from .dispatch import Part, on
from .messages import (
    Answered,
    Asked,
    BundlesAsked,
    BundlesDropped,
    BundleSet,
    BundlesGiven,
    BundlesKept,
    BundlesOpened,
    BundlesTaken,
    BundlesTold,
    GangSought,
    Record,
    Shape,
)
from .node_desk import NEVER_S

if TYPE_CHECKING:
    from .head import Head

GROUP_ROW = "bundles/"
FAILURES_MAX = 16  # sets in a row that found no room: those behind them are looked at with the next beat
HOLDS_DOUBLED_MAX = 6  # a hold that was too short is tried again, longer
SPLIT_BEATS = 2  # heartbeats; a node whose GPUs are shared in parts is asked again then
SERVE_S = 0.05  # reports of many nodes are not looked into one by one
NODES_FEW = 16  # what one of so few gives back is
LISTED_MAX = 30  # sets that are told to people
TOLD_WHY_MAX = 50  # sets whose wait is looked into with each beat


class GroupRow(Record, frozen=True):
    """What the journal keeps of a placement group."""

    described: BundleSet
    job: str


@dataclass(slots=True, eq=False)
class Group:
    """A gang or placement group."""

    described: BundleSet
    units: tuple[Units, ...]
    since_s: float  # when it began to wait
    job: str = ""  # the program that a placement group belongs to
    holders: dict[tuple[str, str], None] = field(default_factory=dict)  # of a gang: nodes and processes with members
    places: dict[int, str] = field(default_factory=dict)  # bundle -> node id, where members may come
    asked: dict[int, str] = field(default_factory=dict)  # the same, of the asking under way
    silent: dict[str, None] = field(default_factory=dict)  # nodes that have not answered it
    turn: int = 0
    holds: int = 0  # how often slots were held free for it
    no_hold_before_s: float = NEVER_S
    split: dict[str, float] = field(default_factory=dict)  # nodes without GPUs for it though amounts are free; until
    reason: str = ""
    never: str = ""  # why the nodes could not hold it if they were empty
    looked: tuple[int, float] = (0, 0.0)  # after which change of nodes that was found out, and when about

    @property
    def id(self) -> str:
        """Its name."""
        return self.described.id

    @property
    def whole(self) -> bool:
        """Whether every bundle has a place."""
        return len(self.places) == len(self.units)

    def rest(self) -> list[int]:
        """Bundles without a place."""
        return [index for index in range(len(self.units)) if index not in self.places]


class HeadBundles(Part):
    """All sets that are wanted; laws H-8, H-9."""

    def __init__(self, head: Head, rows: Mapping[str, bytes]) -> None:
        self.head = head
        self.groups: dict[str, Group] = {}
        self.waiting: dict[str, Group] = {}  # those with bundles that have no place, oldest first
        self.found: dict[str, dict[int, str]] = {}  # reserved under an earlier head, and nobody has asked for it yet
        self.found_until_s = 0.0
        self.orphans: dict[str, float] = {}  # gangs whose holders' node is dead: they may tell another one until then
        self.told: dict[str, None] = {}  # nodes that have said what they hold
        self.settled = False  # what an earlier head had reserved is known
        self.holding = ""  # the set for which slots are held free
        self.turn = 0
        self.beat_s = 0.0  # when the last beat was
        self.served_s = NEVER_S
        self.changes = 1  # how often nodes have come or gone
        self.names: dict[str, None] = {}  # of amounts that sets use
        for key in sorted(rows):
            if key.startswith(GROUP_ROW):
                row = msgspec.msgpack.decode(rows[key], type=GroupRow)
                self._add(row.described, 0.0, row.job)

    def start(self) -> None:
        """Programs may have ended while there was no head: a link to each tells."""
        for job in dict.fromkeys(group.job for group in self.groups.values()):
            self.head.jobs.watch(job)

    def _add(self, described: BundleSet, since_s: float, job: str = "") -> Group:
        units = tuple(units_of(shape) for shape in described.bundles)
        group = self.groups[described.id] = Group(described, units, since_s, job)
        self.names.update((name, None) for bundle in units for name, _ in bundle)
        for index, node_id in self.found.pop(described.id, {}).items():
            group.places[index] = node_id
        if not group.whole:
            self._wait(group)
        return group

    def _wait(self, group: Group) -> None:
        """In the line, by age."""
        last = next(reversed(self.waiting.values()), None)
        self.waiting[group.id] = group
        if last is not None and last.since_s > group.since_s:
            self.waiting = dict(sorted(self.waiting.items(), key=lambda item: item[1].since_s))

    # --- who wants one ----------------------------------------------------------------------------

    @on(GangSought)
    def _sought(self, event: GangSought, now: float, sender: str) -> None:
        key = (sender, event.owner)
        group = self.groups.get(event.described.id)
        if event.wanted:
            if group is None:
                group = self._add(event.described, now - event.waited_s)
            group.holders[key] = None
            self.orphans.pop(group.id, None)
            self.serve(now)
        elif group is not None:
            self._want_no_more(group, key)

    def _want_no_more(self, group: Group, key: tuple[str, str]) -> None:
        group.holders.pop(key, None)
        if not group.holders:
            self._end(group, "")

    def _end(self, group: Group, why: str) -> None:
        """Nobody wants it any more; why: members that run are ended."""
        del self.groups[group.id]
        self._stop_asking(group)
        for node_id in dict.fromkeys(group.places.values()):
            self._send(node_id, BundlesDropped(group.id, 0, why, unless_used=not why))
        self.waiting.pop(group.id, None)
        self.orphans.pop(group.id, None)
        if self.holding == group.id:
            self.holding = ""
        if not self.groups:
            self.names = {}

    def _send(self, node_id: str, message: Any) -> None:
        room = self.head.rooms.nodes.get(node_id)
        if room is not None:
            self.head.out.send(room.entry.address, message)

    def job_ended(self, job: str) -> None:
        """The program is over, and so are its placement groups."""
        for group in [group for group in self.groups.values() if group.job and group.job == job]:
            self._remove(group, "its program has ended")

    def _remove(self, group: Group, why: str) -> None:
        self.head.out.add(WriteJournal(((GROUP_ROW + group.id, None),)))
        self._end(group, f"placement group {group.id} is gone: {why}")
        self.head.slots.explain_bundles(group.id)

    # --- placing ----------------------------------------------------------------------------------

    def serve(self, now: float, all_of_them: bool = False) -> None:
        """Asks nodes for those that wait and fit now, in their order."""
        if not self.settled or not self.waiting:
            return
        self.served_s = now
        failures, free = 0, self._free()
        sums = dict(summed(tuple(row.items()) for row in free.values()))
        for group in list(self.waiting.values()):
            if group.silent:
                continue
            need = summed(group.units[index] for index in group.rest())
            if all(sums.get(name, 0) >= count for name, count in need) and self._try(group, free, 0.0):
                free = self._free()
                sums = dict(summed(tuple(row.items()) for row in free.values()))
                continue
            failures += 1
            if failures >= FAILURES_MAX and not all_of_them:
                return

    def reported(self, now: float) -> None:
        """A node has told what is free."""
        if self.waiting and now - self.served_s >= SERVE_S:
            self.serve(now)

    def _free(self) -> Table:
        return {node_id: self._row(room, room.free) for node_id, room in self.head.rooms.nodes.items()}

    def _total(self) -> Table:
        return {node_id: self._row(room, room.total) for node_id, room in self.head.rooms.nodes.items()}

    def _row(self, room: Room, amounts: Mapping[str, int]) -> dict[str, int]:
        """Amounts of a node by the names that sets use: what it has by itself goes before what a program made."""
        return {name: amounts.get(room.needs(((name, 1),))[0][0], 0) for name in self.names}

    def _emptied(self, but: Group | None = None) -> Table:
        """What nodes have beside the bundles of other sets: the rest is free when tasks that run have ended."""
        free = self._total()
        for group in self.groups.values():
            if group is not but:
                for index, node_id in (*group.places.items(), *group.asked.items()):
                    minus_units(free, node_id, group.units[index])
        for node_id, now_free in self._free().items():
            amounts = free[node_id]
            amounts.update((name, max(count, amounts[name])) for name, count in now_free.items())  # some may be lent
        return free

    def _try(self, group: Group, free: Table, hold_s: float) -> bool:
        """Asks nodes for all that it has not; False when there is no room."""
        if group.split and not hold_s:  # others may do; it is asked again after a while
            group.split = {node_id: until_s for node_id, until_s in group.split.items() if until_s > self.beat_s}
            free = {node_id: row for node_id, row in free.items() if node_id not in group.split}
        plan = arrange(free, group.units, group.described.strategy, group.places)
        if plan is None:
            return False
        self.turn += 1
        group.turn = self.turn
        group.asked = plan
        by_node: dict[str, list[int]] = {}
        for index, node_id in sorted(plan.items()):
            by_node.setdefault(node_id, []).append(index)
        group.silent = dict.fromkeys(by_node)
        for node_id, indices in by_node.items():
            shapes = tuple((index, group.described.bundles[index]) for index in indices)
            for index in indices:
                self.head.rooms.promise(node_id, group.units[index])
            self._send(node_id, BundlesAsked(group.id, group.turn, shapes, hold_s))
        return True

    def _stop_asking(self, group: Group) -> None:
        """Whoever has taken something for the asking under way gives it back."""
        for node_id in dict.fromkeys(group.asked.values()):
            self._send(node_id, BundlesDropped(group.id, group.turn))
        group.asked, group.silent, group.turn = {}, {}, 0
        if self.holding == group.id:
            self.holding = ""

    @on(BundlesTaken)
    def _taken(self, event: BundlesTaken, now: float, sender: str) -> None:
        node_id = self._heard(event.available, sender)
        group = self.groups.get(event.group)
        if group is None or not node_id or event.turn != group.turn:
            if group is not None and event.refused == GONE and node_id in group.places.values():
                self._lost(group, node_id)  # it had lost what it was to open
            return  # the node was told to give it back when the asking was given up
        group.silent.pop(node_id, None)
        if event.refused:
            group.asked = {index: node for index, node in group.asked.items() if node != node_id}
            if event.refused == SPLIT:
                group.split[node_id] = now + SPLIT_BEATS * self.head.config.heartbeat_s
            if self.holding == group.id:
                group.no_hold_before_s = now + self.head.config.starve_s
                group.holds = min(group.holds + 1, HOLDS_DOUBLED_MAX)
            self._stop_asking(group)  # tried again with the next report, not at once: it might be refused for long
        elif not group.silent:
            self._open(group)

    def _open(self, group: Group) -> None:
        """Every bundle has been taken: members may come."""
        for node_id in dict.fromkeys(group.asked.values()):
            self._send(node_id, BundlesOpened(group.id, group.turn))
        group.places.update(group.asked)
        group.asked, group.holds, group.reason, group.turn = {}, 0, "", 0
        group.split = {}
        del self.waiting[group.id]
        if self.holding == group.id:
            self.holding = ""
        self.head.slots.explain_bundles(group.id)

    def _heard(self, available: Shape, sender: str) -> str:
        """What is free on a node now; its id."""
        rooms = self.head.rooms
        node_id = rooms.ids.get(sender, "")
        if node_id:
            rooms.report(msgspec.structs.replace(rooms.nodes[node_id].entry, available=available))
            self.head.slots.news(node_id)
        return node_id

    @on(BundlesGiven)
    def _given(self, event: BundlesGiven, now: float, sender: str) -> None:
        if not self._heard(event.available, sender):
            return
        if len(self.head.rooms.nodes) <= NODES_FEW:
            self.serve(now)
        else:
            self.reported(now)  # each of many would have all of them looked at

    # --- time and losses --------------------------------------------------------------------------

    def beat(self, now: float) -> None:
        """Looks after those that wait."""
        self.beat_s = now
        self._settle(now)
        for group_id in [group_id for group_id, until_s in self.orphans.items() if now > until_s]:
            self._end(self.groups[group_id], "")
        if not self.waiting:
            return
        self.serve(now, all_of_them=True)
        self._break_up(now)
        self._hold(now)
        for place, group in enumerate(list(self.waiting.values())):
            reason = self.why(group, place)
            if reason != group.reason:
                group.reason = reason
                self.head.slots.explain_bundles(group.id)

    def _settle(self, now: float) -> None:
        """A young head reserves nothing before it knows what is reserved."""
        if self.settled:
            if now > self.found_until_s:
                for group_id in list(self.found):
                    self._give_back(group_id)
            return
        head = self.head
        silent = len(self.told) < len(head.rooms.nodes)
        if now < head.expect_until_s and (head.expected or silent):
            return
        self.settled = True
        self.found_until_s = now + head.config.link_lost_after_s
        self.serve(now)

    def _give_back(self, group_id: str) -> None:
        """Nobody knows it."""
        for node_id in dict.fromkeys(self.found.pop(group_id).values()):
            self._send(node_id, BundlesDropped(group_id))

    def _hold(self, now: float) -> None:
        """Slots are held free for the oldest that has waited long."""
        starve_s = self.head.config.starve_s
        if self.holding or not self.settled:
            return
        free = self._emptied()
        for group in self.waiting.values():
            if now - group.since_s < starve_s:
                return
            may = not group.silent and now >= group.no_hold_before_s
            if may and self._try(group, free, starve_s * 2**group.holds):
                self.holding = group.id
                return

    def _break_up(self, now: float) -> None:
        """A gang that lost a bundle and cannot get another while others wait begins anew: it would lock them out."""
        starve_s = self.head.config.starve_s
        torn = [
            group
            for group in self.waiting.values()
            if group.places and is_gang(group.id) and not group.silent and now - group.since_s > starve_s
        ]
        if not torn:
            return
        group = torn[-1]
        strategy = group.described.strategy
        if arrange(self._emptied(), group.units, strategy, group.places) is not None:
            return
        if len(self.waiting) > 1 or arrange(self._emptied(group), group.units, strategy, {}) is not None:
            for node_id in dict.fromkeys(group.places.values()):
                self._send(node_id, BundlesDropped(group.id, 0, f"{group.id} lost a node and begins anew"))
            group.places = {}

    def node_lost(self, node_id: str, address: str) -> None:
        """The node is dead: what lay there is reserved anew, and what its processes wanted is not wanted."""
        self.told.pop(node_id, None)
        self.changes += 1
        for places in self.found.values():
            for index in [index for index, place in places.items() if place == node_id]:
                del places[index]
        for group in list(self.groups.values()):
            for key in [key for key in group.holders if key[0] == address]:
                del group.holders[key]
            if is_gang(group.id) and not group.holders and group.id not in self.orphans:
                self.orphans[group.id] = self.beat_s + self.head.config.link_lost_after_s
            if node_id in group.asked.values():
                self._stop_asking(group)
            self._lost(group, node_id)

    def _lost(self, group: Group, node_id: str) -> None:
        """The node does not hold what it held of the set."""
        lost = [index for index, place in group.places.items() if place == node_id]
        if lost:
            for index in lost:
                del group.places[index]
            if group.id not in self.waiting:
                group.since_s = self.beat_s
                self._wait(group)

    @on(BundlesTold)
    def _told(self, event: BundlesTold, now: float, sender: str) -> None:
        node_id = self.head.rooms.ids.get(sender, "")
        if not node_id:
            return
        self.told[node_id] = None
        self.changes += 1
        held: dict[str, dict[int, None]] = {}
        for bundle in event.held:
            held.setdefault(bundle.group, {})[bundle.index] = None
        for group in list(self.groups.values()):
            if node_id in group.asked.values():
                self._stop_asking(group)  # it has dropped what was not open
            here = [index for index, place in group.places.items() if place == node_id]
            if any(index not in held.get(group.id, {}) for index in here):
                self._lost(group, node_id)
        for group_id, indices in held.items():
            self._holds(node_id, group_id, indices)
        for sought in event.wanted:
            self._sought(sought, now, sender)
        wanted = dict.fromkeys((sought.described.id, sought.owner) for sought in event.wanted)
        for group in list(self.groups.values()):
            for key in [key for key in group.holders if key[0] == sender and (group.id, key[1]) not in wanted]:
                self._want_no_more(group, key)  # said while the node was cut off
        self._settle(now)

    def _holds(self, node_id: str, group_id: str, indices: Iterable[int]) -> None:
        """A node has open bundles of a set, which somebody wants or will want soon."""
        known = self.groups.get(group_id)
        places = known.places if known is not None else self.found.setdefault(group_id, {})
        for index in indices:
            places.setdefault(index, node_id)
        if any(places[index] != node_id for index in indices):
            self._send(node_id, BundlesDropped(group_id))  # reserved anew elsewhere meanwhile
        elif known is not None:
            if known.whole:
                self.waiting.pop(group_id, None)
            self.head.slots.explain_bundles(group_id)

    @on(BundlesKept)
    def _kept(self, event: BundlesKept, now: float, sender: str) -> None:
        """A gang has ended and begun again, and its members were faster than the word of its end."""
        node_id = self.head.rooms.ids.get(sender, "")
        if not node_id:
            return
        group = self.groups.get(event.group)
        if group is not None:
            self._stop_asking(group)
        else:
            self.found_until_s = max(self.found_until_s, now + self.head.config.starve_s)
        self._holds(node_id, event.group, event.bundles)
        self.serve(now)

    # --- answers ----------------------------------------------------------------------------------

    def where(self, bundle: str) -> tuple[str, str, bool]:
        """Address of the node that a member goes to, or none, why it waits, and whether it waits in vain."""
        group = self.groups.get(group_of(bundle))
        if group is None:
            if is_gang(bundle) or not self.settled:
                return "", f"{group_of(bundle)} is being reserved", False
            return "", f"placement group {group_of(bundle)} was removed", True
        node_id = group.places.get(index_of(bundle), "")
        room = self.head.rooms.nodes.get(node_id)
        if room is None:
            return "", group.reason or f"{group.id} is being reserved", False
        return room.entry.address, "", False

    def why(self, group: Group, place: int) -> str:
        """What a set that waits lacks, in words; place: in the line."""
        kind = "gang" if is_gang(group.id) else "placement group"
        head = f"{kind} {group.id} ({len(group.units)} bundles, {group.described.strategy}), which waits"
        line = f"{place} came before it" if place else ""
        if place >= TOLD_WHY_MAX:
            return f"{head}: {line}"
        looked = (self.changes, self.beat_s // self.head.config.starve_s)
        if group.looked != looked:
            group.looked = looked
            group.never = why_never(self._total(), group.units, group.described.strategy)
        if group.never:
            return f"{head} for other nodes: {group.never}"
        lacks = why_not_now(self._free(), group.units, group.rest())
        if any(until_s > self.beat_s for until_s in group.split.values()):
            lacks = f"node {next(iter(group.split))} {SPLIT}"
        return f"{head}: {lacks}; {line}" if line else f"{head}: {lacks}"

    def asked(self, event: Asked, now: float, sender: str) -> None:
        """Questions of programs about their placement groups and gangs, and orders."""
        answer = Answered(event.request, event.topic, True)
        if event.topic == "bundles.create":
            described, job = msgspec.convert(event.argument, tuple[BundleSet, str])
            row = msgspec.msgpack.encode(GroupRow(described, job))
            self.head.resources.answer_when_written(((GROUP_ROW + described.id, row),), sender, answer)
            self.head.jobs.watch(job)  # a link tells when the program ends
            if described.id not in self.groups:
                self._add(described, now, job)
                self.serve(now)
            self.groups[described.id].job = job  # a job that goes on in another process asks again
            return
        if event.topic == "bundles.waiting":
            self.head.out.send(sender, Answered(event.request, event.topic, self.listed()))
            return
        group = self.groups.get(str(event.argument))
        if event.topic == "bundles.remove":
            if group is not None and not is_gang(group.id):
                self._remove(group, "it was removed")
            self.head.resources.answer_when_written((), sender, answer)
            return
        answer = Answered(event.request, event.topic, self._state(group) if group is not None else None)
        self.head.out.send(sender, answer)

    def listed(self) -> list[dict[str, Any]]:
        """The oldest that wait, in the form in which queues of tasks are listed."""
        return [
            {"shape": dict(shape_of(summed(group.units[index] for index in group.rest()))), "placement": [],
             "count": 0, "leases": 0, "reason": self.why(group, place)}
            for place, group in enumerate(islice(self.waiting.values(), LISTED_MAX))
        ]  # fmt: skip

    def _state(self, group: Group) -> dict[str, Any]:
        """Where its bundles are, or why not."""
        if group.id in self.waiting:
            group.reason = self.why(group, list(self.waiting).index(group.id))
        return {"places": [group.places.get(index, "") for index in range(len(group.units))], "reason": group.reason}

    def over_promised(self) -> list[str]:
        """Nodes that hold more open bundles than they have room for; for the laws."""
        free = self._total()
        for group in self.groups.values():
            for index, place in group.places.items():
                minus_units(free, place, group.units[index])
        return [
            f"{node_id}: {name} {count}"
            for node_id, amounts in free.items()
            for name, count in amounts.items()
            if count < 0 and name != CPU  # of which tasks that wait lend theirs
        ]
