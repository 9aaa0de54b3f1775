"""Demands that a node cannot serve alone: the head names a node with room, now or when one reports it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from flowengine.scheduling.placement import RUN_S_GUESS, allows
from flowengine.scheduling.resources import AT, SEP, plain, units_of
from flowengine.scheduling.rooms import LOOKS_MAX, SAMPLE, Room, Rooms, Wish, covers, times

from .bundles import bundle_of, group_of
from .dispatch import Outbox, Part, on
from .messages import Shape, SlotsFound, SlotsSought

SeekerKey = tuple[str, str, Shape, tuple[str, ...]]  # node, owner, shape, placement
GroupKey = tuple[Shape, tuple[str, ...]]
Where = Callable[[str], tuple[str, str, bool]]  # bundle -> its node's address, or why it has none, and if for ever


@dataclass(slots=True, eq=False)
class Seeker:
    """A demand that its node cannot serve, waiting for a node that can."""

    sought: SlotsSought
    node: str  # the address of the node that asks
    since_s: float = 0.0  # when it began to wait here
    told: str = ""

    @property
    def wish(self) -> Wish:
        """What it needs, and what its choice is judged by."""
        sought = self.sought
        run_s = sought.run_us / 1e6 if sought.run_us else RUN_S_GUESS
        return Wish(sought.shape, sought.placement, run_s, sought.held, self.node)


@dataclass(slots=True, eq=False)
class Group:
    """Seekers of one shape and placement, in the order in which they came."""

    key: GroupKey
    watch: str = ""  # a name that came at run time: only news of nodes that have it can help; "": of any
    seekers: OrderedDict[SeekerKey, Seeker] = field(default_factory=OrderedDict)


class Slots(Part):
    """Who seeks what, first come, first served; law H-4."""

    def __init__(self, out: Outbox, rooms: Rooms, absent: Callable[[str], str], where: Where) -> None:
        self.out = out
        self.rooms = rooms
        self.absent = absent  # what is known of a name that no node has
        self.where = where  # where a bundle is
        self.seekers: dict[SeekerKey, Seeker] = {}
        self.groups: dict[GroupKey, Group] = {}
        self.watched: dict[str, OrderedDict[GroupKey, Group]] = {}
        self.bundled: dict[str, dict[GroupKey, Group]] = {}  # by gang or placement group

    @on(SlotsSought)
    def _sought(self, event: SlotsSought, now: float, sender: str) -> None:
        key = (sender, event.owner, event.shape, event.placement)
        if event.count <= 0:
            self._forget(key)
        elif key in self.seekers:  # said again in case it was forgotten; a node with room would have been named
            self.seekers[key].sought = event
            self._say_why(self.seekers[key])
        elif sender in self.rooms.ids:
            seeker = self.seekers[key] = Seeker(event, sender, now)
            self._group(key, seeker)
            found = self.rooms.choose(seeker.wish) if not bundle_of(event.shape) else None
            if found is not None:
                self._found(key, seeker, found)
            else:
                self._say_why(seeker)

    def _group(self, key: SeekerKey, seeker: Seeker) -> None:
        group = self.groups.get(key[2:])
        if group is None:
            group = self.groups[key[2:]] = Group(key[2:])
            bundle = bundle_of(group.key[0])
            if bundle:
                self.bundled.setdefault(group_of(bundle), {})[group.key] = group
            names = [name for name, _ in units_of(key[2]) if SEP in name or AT in name]
            self._watch(group, next((name for name in names if AT in name or plain(name) not in self.rooms.has), ""))
        group.seekers[key] = seeker

    def _watch(self, group: Group, name: str) -> None:
        self._watch_no_more(group)
        group.watch = name
        self.watched.setdefault(name, OrderedDict())[group.key] = group

    def _watch_no_more(self, group: Group) -> None:
        groups = self.watched.get(group.watch, OrderedDict())
        if groups.pop(group.key, None) is not None and not groups:
            del self.watched[group.watch]

    def _forget(self, key: SeekerKey) -> None:
        if self.seekers.pop(key, None) is None:
            return
        group = self.groups[key[2:]]
        del group.seekers[key]
        if not group.seekers:
            del self.groups[group.key]
            self._watch_no_more(group)
            gang = group_of(bundle_of(group.key[0]))
            if gang in self.bundled:
                self.bundled[gang].pop(group.key, None)
                if not self.bundled[gang]:
                    del self.bundled[gang]

    # --- news -------------------------------------------------------------------------------------

    def news(self, node_id: str) -> None:
        """That node's room may have grown, no other's."""
        room = self.rooms.nodes.get(node_id)
        if room is not None and self.seekers:
            self._serve(self._concerned(room), room)

    def joined(self, node_id: str) -> None:
        """A node is there: it may serve any, and reasons why one waits may be others now."""
        room = self.rooms.nodes[node_id]
        for group in list(self.groups.values()):
            if plain(group.watch) in room.static:  # the node has by itself what only programs had
                self._watch(group, "")
        self._serve(list(self.groups.values()), room)
        self.explain()

    def _concerned(self, room: Room) -> list[Group]:
        watched, total = self.watched, room.total
        first, second = (watched, total) if len(watched) < len(total) else (total, watched)
        names = [name for name in first if name in second]
        return [group for name in ("", *names) for group in watched.get(name, {}).values()]

    def _serve(self, groups: list[Group], room: Room) -> None:
        while groups:  # one of each in turn, as long as something fits
            groups = [group for group in groups if self._serve_one(group, room)]
            for group in groups:
                if group.seekers:
                    self.watched[group.watch].move_to_end(group.key)
            groups = [group for group in groups if group.seekers]

    def _serve_one(self, group: Group, room: Room) -> bool:
        """Sends the first that may go there; whether there was one."""
        if bundle_of(group.key[0]):
            return False  # not the news of nodes say where bundles are
        for key, seeker in group.seekers.items():
            if seeker.node == room.entry.address:
                continue
            fits = self.rooms.fits(room, seeker.wish)
            if fits:
                self._found(key, seeker, room)
            return fits
        return False

    def node_gone(self, address: str) -> None:
        """Who asked on behalf of that node asks no more."""
        for key in [key for key in self.seekers if key[0] == address]:
            self._forget(key)

    def explain(self, name: str | None = None) -> None:
        """Nodes or amounts have come or gone: why one waits may be another reason now; name: of those who need it."""
        watched = self.watched if name is None else (name,)
        for group in [group for key in list(watched) for group in self.watched.get(key, {}).values()]:
            for seeker in list(group.seekers.values()):
                self._say_why(seeker)

    # --- answers ----------------------------------------------------------------------------------

    def _found(self, key: SeekerKey, seeker: Seeker, room: Room) -> None:
        """Names the node, and counts as promised what the seeker may take there."""
        units = units_of(seeker.sought.shape)
        count = times(room.free, room.needs(units), seeker.sought.count)
        self._forget(key)
        self.rooms.promise(room.entry.node_id, units, count)
        self._answer(seeker, room.entry.address, "")

    def _say_why(self, seeker: Seeker) -> None:
        """Why no node has room; the only one that could serve is named though it is busy, so that all wait there."""
        sought = seeker.sought
        bundle = bundle_of(sought.shape)
        if bundle:
            self._send_to_bundle(seeker, bundle)
            return
        wish = Wish(sought.shape, sought.placement)
        able = self.rooms.able(wish, SAMPLE)
        if len(able) == 1 and able[0].entry.address != seeker.node:
            self._send_to_busy(seeker, able[0])
            return
        if not able:
            reason = self.rooms.why_not(wish, self.absent)
        elif len(able) == 1:
            reason = "its node is busy"
        else:
            count = f"all {len(able)}" if len(able) < SAMPLE else f"more than {SAMPLE - 1}"
            reason = f"{count} nodes that could run it are busy"
        if reason != seeker.told:
            seeker.told = reason
            self._answer(seeker, "", reason)

    def _send_to_busy(self, seeker: Seeker, room: Room) -> None:
        """Names a node without room: it sees to it that some comes free."""
        sought = seeker.sought
        self._forget((seeker.node, sought.owner, sought.shape, sought.placement))
        self._answer(seeker, room.entry.address, f"node {room.entry.node_id} is busy")

    def beat(self, now: float, starve_s: float) -> None:
        """Who has waited long is sent to a busy node if its own can never serve it: else none holds slots free for it.

        One of each shape and placement at a time, to the node with the shortest queue.
        """
        for group in [group for group in self.groups.values() if not bundle_of(group.key[0])]:
            for seeker in islice(group.seekers.values(), LOOKS_MAX):
                if now - seeker.since_s < starve_s:
                    break
                if self._may_wait_at_home(seeker):
                    continue
                able = self.rooms.able(seeker.wish, SAMPLE)
                if able:
                    self._send_to_busy(seeker, min(able, key=lambda room: room.entry.queued))
                break

    def _may_wait_at_home(self, seeker: Seeker) -> bool:
        home, wish = self.rooms.nodes[self.rooms.ids[seeker.node]], seeker.wish
        return covers(home.total, wish.at(home)) and allows(wish.placement, home.entry.node_id)

    def _send_to_bundle(self, seeker: Seeker, bundle: str) -> None:
        """Names the node where the bundle is, busy or not, or says why it is nowhere."""
        node, reason, refused = self.where(bundle)
        if refused or (node and node != seeker.node):
            self._forget((seeker.node, seeker.sought.owner, seeker.sought.shape, seeker.sought.placement))
            self._answer(seeker, node, reason, refused)
        elif reason and reason != seeker.told:
            seeker.told = reason
            self._answer(seeker, "", reason)

    def explain_bundles(self, gang: str) -> None:
        """A gang or placement group has been reserved, or waits for another reason, or is no more."""
        for group in list(self.bundled.get(gang, {}).values()):
            for seeker in list(group.seekers.values()):
                self._say_why(seeker)

    def _answer(self, seeker: Seeker, node: str, reason: str, refused: bool = False) -> None:
        sought = seeker.sought
        found = SlotsFound(sought.owner, sought.shape, sought.placement, node, reason, refused)
        self.out.send(seeker.node, found)

    def could_serve(self, seeker: Seeker) -> bool:
        """Whether a node has room for a seeker; for the laws."""
        bundle = bundle_of(seeker.sought.shape)
        if bundle:
            return self.where(bundle)[0] not in ("", seeker.node)
        return any(self.rooms.fits(room, seeker.wish) for room in self.rooms.nodes.values())
