"""The machine of the cluster's head: who is a member, under which epoch, and who could serve what others cannot.

It is not on the way of a task. What cannot be learnt again from the nodes goes into the journal: the session, the
port, and for each node id the last epoch, whether that life was declared dead, and its address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.scheduling.rooms import Rooms

from .commands import Command, WriteJournal
from .dispatch import Outbox, Part, on, routes
from .head_bundles import HeadBundles
from .head_jobs import Jobs
from .head_resources import Resources
from .head_slots import Slots
from .journal import NOISE, Journal
from .messages import (
    Answered,
    Asked,
    Goodbye,
    Message,
    NodeAccepted,
    NodeEntry,
    NodeFenced,
    NodeJoined,
    NodeReport,
    NodesChanged,
    NodesWanted,
    PeerLost,
    Ping,
    Pong,
    Record,
)
from .node_desk import NEVER_S
from .telling import KNOWN_TO_ALL_MAX, Telling

if TYPE_CHECKING:
    from flowengine.config import Config

TOLD_AT_ONCE_MAX = 16  # members; with more of them news of those that join are gathered
BACK_BEATS = 3  # heartbeats after which a node that lives has noticed that there is a new head
SILENCE_FACTOR = 2  # a node whose link stands may be silent for so many times longer
DEAD_KEPT_MAX = 1_000  # addresses of dead nodes that are told to nodes that join

SESSION_ROW, PORT_ROW, NODE_ROW, NAME_ROW = "session", "port", "node/", "name/"


class HeadSettings(Record, frozen=True):
    """What a head is told once, at its start; an empty session or port 0 stands for the one in the journal."""

    me: str
    session: str
    host: str = ""
    port: int = 0


class HeadBeat(Message, frozen=True):
    """A heartbeat has passed."""


class AbsentAsked(Message, frozen=True):
    """Nodes that live have found this head by now; it dials the others, and a dead one's port refuses."""


class NewsDue(Message, frozen=True):
    """Nodes that joined within the last report interval are told to the others at once."""


class NodeRow(Record, frozen=True):
    """What the journal keeps of a node."""

    epoch: int
    dead: bool
    address: str


@dataclass(slots=True, eq=False)
class Member:
    """A living node."""

    entry: NodeEntry  # as it last reported
    heard_s: float
    link_lost_s: float = NEVER_S  # never: the link stands


class Head(Part):
    """One door, as all machines; `rows` is what the journal holds from earlier runs. Laws H-1 to H-5."""

    def __init__(self, settings: HeadSettings, config: Config, rows: Mapping[str, bytes]) -> None:
        self.settings = settings
        self.config = config
        self.out = Outbox()
        self.journal = Journal(config.story_lines_max, NOISE | {HeadBeat})
        self.counters: dict[str, int] = {"head_messages": 0}
        self.kinds: dict[str, int] = {}  # messages by kind
        self.names: dict[str, Any] = {}  # of actors: id, pickled description, reference
        self.rows: dict[str, NodeRow] = {}  # by node id; the journal holds the same
        self.members: dict[str, Member] = {}  # living nodes by id
        self.by_address: dict[str, str] = {}  # living node's address -> id
        self.expected: dict[str, None] = {}  # ids that lived when an earlier head ended and have not come back
        self.dead: dict[str, None] = {}  # addresses
        self.telling = Telling()
        self.came: dict[str, None] = {}  # ids that not all who want to know have been told of
        self.back: dict[str, None] = {}  # those of them that everybody believes to be dead
        self.lost: dict[str, None] = {}  # addresses of dead nodes that not everybody has been told of
        self.rooms = Rooms()  # what the members have
        self.jobs = Jobs(self.out, config.heartbeat_s, self._job_ended)
        self.resources = Resources(self)
        self.bundles = HeadBundles(self, rows)
        self.slots = Slots(self.out, self.rooms, self.resources.absent, self.bundles.where)
        self.session = settings.session or _text(rows.get(SESSION_ROW))
        self.port = settings.port or _number(rows.get(PORT_ROW))
        self._written = rows.get(SESSION_ROW) is not None
        self._routes = routes(self, self.slots, self.jobs, self.resources, self.bundles)
        self._news_due: bool | None = None  # None: nobody joined lately; True: somebody has yet to be told of
        self._beat_s = 0.0
        self.expect_until_s = 0.0
        self._read(rows)

    def _read(self, rows: Mapping[str, bytes]) -> None:
        for key in sorted(rows):
            if key.startswith(NAME_ROW):
                self.names[key.removeprefix(NAME_ROW)] = msgspec.msgpack.decode(rows[key])
            if key.startswith(NODE_ROW):
                row = msgspec.msgpack.decode(rows[key], type=NodeRow)
                node_id = key.removeprefix(NODE_ROW)
                self.rows[node_id] = row
                if row.dead:
                    self._remember_dead(row.address)
                else:
                    self.expected[node_id] = None
        self.resources.read(rows)

    # --- the door ---------------------------------------------------------------------------------

    def start(self, now: float) -> list[Command]:
        """The commands with which a head begins."""
        pack = msgspec.msgpack.encode
        self.out.add(WriteJournal(((SESSION_ROW, pack(self.session)), (PORT_ROW, pack(self.port)))))
        self._beat_s = now
        self.expect_until_s = now + self.config.suspect_after_s
        self.out.timer(self.config.heartbeat_s, HeadBeat())
        self.out.timer(BACK_BEATS * self.config.heartbeat_s, AbsentAsked())
        self.resources.start()
        self.bundles.start()
        return self.out.take()

    def handle(self, event: Message, now: float, sender: str = "") -> list[Command]:
        """Takes an event in; sender: the address of the process that said it, "" for the shell."""
        if sender:
            self.counters["head_messages"] += 1
            kind = type(event).__name__
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
            member = self.members.get(self.by_address.get(sender, ""))
            if member is not None:
                member.heard_s, member.link_lost_s = now, NEVER_S
        self.journal.event(now, sender, event)
        route = self._routes.get(type(event))
        if route is not None:
            route(event, now, sender)
        commands = self.out.take()
        self.journal.commands(now, commands)
        return commands

    def story(self, name: bytes | str) -> list[str]:
        """What happened here lately to a node or owner."""
        return self.journal.story(name)

    @on(Ping)
    def _ping(self, event: Ping, now: float, sender: str) -> None:
        self.out.send(sender, Pong(event.number))

    # --- membership -------------------------------------------------------------------------------

    def _record(self, node_id: str, row: NodeRow) -> None:
        """Notes a node's state in the journal; what is sent after it in the same batch may rely on it."""
        if self.rows.get(node_id) != row:
            self.rows[node_id] = row
            self.out.add(WriteJournal(((NODE_ROW + node_id, msgspec.msgpack.encode(row)),)))

    @on(NodeJoined)
    def _joined(self, event: NodeJoined, now: float, sender: str) -> None:
        entry = event.entry
        for former in event.former:
            if former in self.members or former in self.expected:
                self._bury(former)
        row = self.rows.get(entry.node_id)
        epoch = self._epoch_of(entry, row)
        if not epoch:
            self._fence(entry, row)
            return
        old = self.members.get(entry.node_id)
        if old is not None and old.entry.address != entry.address:
            self._remember_dead(old.entry.address)
            self._forget(entry.node_id)
        elif row is not None and row.address != entry.address:
            self._remember_dead(row.address)
        self._record(entry.node_id, NodeRow(epoch, False, entry.address))
        self.expected.pop(entry.node_id, None)
        if entry.address in self.dead:
            del self.dead[entry.address]
            self.lost.pop(entry.address, None)
            self.back[entry.node_id] = None
        is_new = entry.node_id not in self.members
        entry = msgspec.structs.replace(entry, epoch=epoch)
        self.members[entry.node_id] = Member(entry, now)
        self.by_address[entry.address] = entry.node_id
        self.rooms.join(entry)
        self.telling.curious.pop(entry.address, None)
        small = self._is_small()
        self.out.send(entry.address, NodeAccepted(epoch, self.nodes() if small else (entry,), small))
        self.resources.joined(entry, event.entry.epoch == 0)
        if is_new:
            self.came[entry.node_id] = None
            if self.dead:
                known = self.nodes() if small else ()
                self.out.send(entry.address, NodesChanged(known, tuple(self.dead), not small, small))
            self._tell_of_joining(entry.address)
        self.slots.joined(entry.node_id)

    def _tell_of_joining(self, address: str) -> None:
        """Tells the others, but when many join at once only once an interval: it is a message to each of them."""
        if len(self.members) <= TOLD_AT_ONCE_MAX:
            self._tell_nodes(address)
            return
        if self._news_due is not None:
            self._news_due = True
            return
        self._news_due = False
        self.out.timer(self.config.report_interval_s, NewsDue())
        self._tell_nodes(address)

    @on(NewsDue)
    def _news(self, event: NewsDue, now: float, sender: str) -> None:
        due, self._news_due = self._news_due, None
        if due:
            self._news_due = False
            self.out.timer(self.config.report_interval_s, NewsDue())
            self._tell_nodes("")

    def _epoch_of(self, entry: NodeEntry, row: NodeRow | None) -> int:
        """The epoch under which a node may join; 0: it must begin a new life first."""
        if row is None:
            return max(1, entry.epoch)
        if entry.epoch == 0:  # a process that was never accepted; or its first message came twice
            again = row.address == entry.address and not row.dead
            return row.epoch if again else row.epoch + 1
        if entry.epoch < row.epoch or (entry.epoch == row.epoch and row.dead):
            return 0
        return entry.epoch

    def _fence(self, entry: NodeEntry, row: NodeRow | None) -> None:
        """A life that was declared dead may not go on: its work runs elsewhere."""
        if row is not None:
            self.out.send(entry.address, NodeFenced(row.epoch + 1 if row.dead else row.epoch))

    @on(NodeReport)
    def _reported(self, event: NodeReport, now: float, sender: str) -> None:
        entry = event.entry
        member = self.members.get(entry.node_id)
        if member is None or member.entry.address != entry.address or entry.epoch != member.entry.epoch:
            row = self.rows.get(entry.node_id)
            if row is not None and (row.dead or entry.epoch < row.epoch or row.address != entry.address):
                self._fence(entry, row)
            elif entry.epoch:
                self._joined(NodeJoined(entry), now, sender)  # this head is younger than the node
            return
        member.entry = entry
        self.rooms.report(entry, event.dynamic)
        for key, total, _ in event.dynamic:
            if not total:
                self.slots.explain(key)
        self.slots.news(entry.node_id)
        self.bundles.reported(now)

    @on(PeerLost)
    def _peer_lost(self, event: PeerLost, now: float, sender: str) -> None:
        node_id = self.by_address.get(event.peer, "") or self._absent_at(event.peer)
        if not node_id:
            self.jobs.lost(event.peer, event.ended)
        elif event.ended:
            self._bury(node_id)
            self._tell_nodes("")
        elif node_id in self.members:
            self.members[node_id].link_lost_s = now  # it may be cut off only: time tells

    def _absent_at(self, address: str) -> str:
        return next((node_id for node_id in self.expected if self.rows[node_id].address == address), "")

    @on(AbsentAsked)
    def _ask_absent(self, event: AbsentAsked, now: float, sender: str) -> None:
        for node_id in self.expected:
            self.out.send(self.rows[node_id].address, Ping(0))

    def _job_ended(self, job: str) -> None:
        self.resources.job_ended(job)
        self.bundles.job_ended(job)

    @on(Goodbye)
    def _goodbye(self, event: Goodbye, now: float, sender: str) -> None:
        if sender in self.by_address:
            self._bury(self.by_address[sender])
            self._tell_nodes("")
        else:
            self.jobs.end(sender)

    @on(HeadBeat)
    def _beat(self, event: HeadBeat, now: float, sender: str) -> None:
        if now - self._beat_s > 4 * self.config.heartbeat_s:
            # This process itself stood still: the silence of the others is not theirs.
            for member in self.members.values():
                member.heard_s = now
                if member.link_lost_s > NEVER_S:
                    member.link_lost_s = now
        self._beat_s = now
        suspect_s = self.config.suspect_after_s
        gone = [
            node_id
            for node_id, member in sorted(self.members.items())
            if now - member.heard_s > suspect_s * SILENCE_FACTOR
            or (member.link_lost_s > NEVER_S and now - max(member.link_lost_s, member.heard_s) > suspect_s)
        ]
        if self.expected and now > self.expect_until_s:
            gone += sorted(self.expected)
        for node_id in gone:
            self._bury(node_id)
        if gone:
            self._tell_nodes("")
        self.bundles.beat(now)
        self.slots.beat(now, self.config.starve_s)
        self.out.timer(self.config.heartbeat_s, HeadBeat())

    def _bury(self, node_id: str) -> None:
        """Declares a node dead for good; if it comes back it is fenced."""
        row = self.rows[node_id]
        self._record(node_id, NodeRow(row.epoch, True, row.address))
        self._remember_dead(row.address)
        self.expected.pop(node_id, None)
        self._forget(node_id)
        self.resources.node_gone(node_id)
        self.slots.explain()

    def _forget(self, node_id: str) -> None:
        member = self.members.pop(node_id, None)
        if member is None:
            return
        self.came.pop(node_id, None)
        self.back.pop(node_id, None)
        address = member.entry.address
        self.telling.curious.pop(address, None)
        del self.by_address[address]
        self.rooms.leave(node_id)
        self.bundles.node_lost(node_id, address)
        self.slots.node_gone(address)

    def _remember_dead(self, address: str) -> None:
        self.dead[address] = self.lost[address] = None
        if len(self.dead) > DEAD_KEPT_MAX:
            oldest = next(iter(self.dead))
            del self.dead[oldest]
            self.lost.pop(oldest, None)

    def nodes(self) -> tuple[NodeEntry, ...]:
        """All living nodes, by id."""
        return tuple(self.members[node_id].entry for node_id in sorted(self.members))

    def _is_small(self) -> bool:
        return len(self.members) + len(self.expected) <= KNOWN_TO_ALL_MAX

    def _tell_nodes(self, but: str) -> None:
        if self._is_small():
            nodes = self.nodes()
            to = [entry.address for entry in nodes if entry.address != but]
            self.telling.tell_all(self.out, to, NodesChanged(nodes, tuple(self.dead)))
        else:
            to = [address for address in self.by_address if address != but]
            came, back = (tuple([self.members[node_id].entry for node_id in ids]) for ids in (self.came, self.back))
            self.telling.tell(self.out, to, NodesChanged(came, tuple(self.lost), more=True), back)
        self.came, self.back, self.lost = {}, {}, {}

    @on(NodesWanted)
    def _wanted(self, event: NodesWanted, now: float, sender: str) -> None:
        if sender in self.by_address:
            self.telling.curious[sender] = None
            self.out.send(sender, NodesChanged(self.nodes(), tuple(self.dead)))

    # --- questions --------------------------------------------------------------------------------

    @on(Asked)
    def _asked(self, event: Asked, now: float, sender: str) -> None:
        if event.topic.startswith("bundles."):
            self.bundles.asked(event, now, sender)
            return
        if event.topic.startswith("resource."):
            self.resources.asked(event, sender)
            return
        self.out.send(sender, Answered(event.request, event.topic, self._content(event)))

    def _named(self, event: Asked) -> Any:
        """The directory of named actors: claim, get, drop."""
        if event.topic == "name.get":
            return self.names.get(event.argument)
        name, entry = event.argument
        known = self.names.get(name)
        if event.topic == "name.claim":
            if known is not None:
                return known[0] == entry[0]
            self.names[name] = entry
            self.out.add(WriteJournal(((NAME_ROW + name, msgspec.msgpack.encode(entry)),)))
        elif known is not None and known[0] == entry:
            del self.names[name]
            self.out.add(WriteJournal(((NAME_ROW + name, None),)))
        return True

    def _content(self, event: Asked) -> Any:
        if event.topic == "stats":
            return dict(self.counters)
        if event.topic == "nodes":
            return [msgspec.to_builtins(msgspec.structs.asdict(entry)) for entry in self.nodes()]
        if event.topic == "story":
            return self.story(event.argument)
        if event.topic.startswith("name."):
            return self._named(event)
        if event.topic == "messages":
            return dict(sorted(self.kinds.items()))
        return None


def _text(row: bytes | None) -> str:
    return "" if row is None else msgspec.msgpack.decode(row, type=str)


def _number(row: bytes | None) -> int:
    return 0 if row is None else msgspec.msgpack.decode(row, type=int)
