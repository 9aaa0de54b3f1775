"""The machine of a host's node: its workers, leases and store, its place in the cluster. It decides; a shell acts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowengine.collectives.ledger import Ledgers
from flowengine.collectives.posts import Posts
from flowengine.errors import signal_of

from .commands import Command, WorkerEnded
from .dispatch import Part, on, routes
from .messages import (
    Death,
    Goodbye,
    Joined,
    Message,
    NodeAccepted,
    NodeEntry,
    NodeFenced,
    NodeJoined,
    NodeReport,
    NodesChanged,
    NodesWanted,
    OwnerEnded,
    PeerLost,
    Ping,
    Pong,
    Welcome,
)
from .node_bundles import Bundles
from .node_desk import NEVER_S, SIGTERM, Desk, NodeSettings, Process, Tick, account
from .node_leases import Leases
from .node_pool import Pool
from .node_questions import Questions
from .node_store import Store
from .telling import KNOWN_TO_ALL_MAX, known_after

if TYPE_CHECKING:
    from flowengine.config import Config

__all__ = ["Node", "NodeSettings", "Tick"]

ORPHANS_MAX = 10_000
GONE_MAX = 10_000
ORPHANS_KEPT = 2  # times the time after which a link is given up: then everybody who could adopt has heard


class Node(Part):
    """One door: `handle(event, now, sender)` gives the commands that follow from an event."""

    def __init__(self, settings: NodeSettings, config: Config) -> None:
        self.settings = settings
        self.config = config
        self.desk = Desk(settings, config)
        self.pool = Pool(self.desk)
        self.leases = Leases(self.desk, self.pool)
        self.bundles = Bundles(self.desk, self.pool, self.leases)
        self.store = Store(self.desk)
        self.ledgers = Ledgers(self.desk)
        self.posts = Posts(self.desk, self.store)
        self.questions = Questions(self.desk, self)
        self.counters = self.desk.counters
        self.orphans: dict[str, tuple[str, float]] = {}  # dead owner of objects here -> its driver, and until when
        self._routes = routes(
            self, self.pool, self.leases, self.bundles, self.store, self.ledgers, self.posts, self.posts.kept,
            self.questions,
        )  # fmt: skip
        self._reported_s = NEVER_S
        self._report_timer = False
        self._reported: tuple[object, ...] = ()  # the capacity that the head knows

    # --- the door ---------------------------------------------------------------------------------

    def start(self, now: float) -> list[Command]:
        """The commands with which a node begins."""
        self.pool.replenish(now)
        self._join()
        self.desk.out.timer(self.config.heartbeat_s, Tick("beat"))
        return self._done(now)

    def handle(self, event: Message, now: float, sender: str = "") -> list[Command]:
        """Takes an event in; sender: the address of the process that said it, "" for the shell."""
        desk = self.desk
        worker = desk.by_address.get(sender)
        if worker is not None:
            worker.heard_s = now
        desk.journal.event(now, sender, event)
        route = self._routes.get(type(event))
        if route is None:
            desk.counters["events_ignored"] += 1
            return []
        route(event, now, sender)
        return self._done(now)

    def _done(self, now: float) -> list[Command]:
        desk = self.desk
        if self.bundles.asking or self.leases.moved:
            self.bundles.serve(now)
        if desk.leases_due:
            desk.leases_due = False
            if self.leases.waiting or self.leases.reserved:
                self.leases.serve(now)
        elif self.leases.fresh:
            self.leases.serve_fresh(now)
        if self.leases.moved:
            self.bundles.settle(now)
        if self.store.asks:
            self.store.serve(now)
        if desk.report_due and not self._report_timer:
            self._report(now)
        commands = desk.out.take()
        desk.journal.commands(now, commands)
        return commands

    def story(self, name: bytes | str) -> list[str]:
        """What happened here lately to a task, object, worker or process."""
        return self.desk.journal.story(name)

    def stats(self) -> dict[str, int]:
        """Counters and gauges of this node alone."""
        return {**self.counters, **self.store.gauges()}

    @on(Tick)
    def _tick(self, event: Tick, now: float, sender: str) -> None:
        if event.what == "beat":
            self.pool.beat(now)
            self.posts.end_left(now)
            self.ledgers.beat(now)
            self.bundles.beat()
            self._end_orphans(now)
            self.desk.leases_due = True
            if not self.desk.head_up:
                self._join()
            elif now - self._reported_s >= self.config.heartbeat_s:
                self.desk.report_due = True
            self.desk.out.timer(self.config.heartbeat_s, Tick("beat"))
        elif event.what == "store":
            self.store.timer_fired(now)
        elif event.what == "workers":
            self.pool.timer_fired(now)
        elif event.what == "report":
            self._report_timer = False

    @on(Ping)
    def _ping(self, event: Ping, now: float, sender: str) -> None:
        self.desk.out.send(sender, Pong(event.number))

    # --- processes of this host -------------------------------------------------------------------

    @on(Joined)
    def _joined(self, event: Joined, now: float, sender: str) -> None:
        desk, settings = self.desk, self.settings
        desk.processes[event.address] = Process(event.address, event.pid, event.role)
        welcome = Welcome(
            settings.node_id,
            settings.host,
            settings.store_folder,
            settings.store_limit_bytes,
            settings.session,
            desk.head,
        )
        desk.out.send(event.address, welcome)
        if event.role == "driver":
            desk.telling.curious[event.address] = None
            desk.want_nodes()
        if desk.knows_all and (event.role == "driver" or len(desk.nodes) <= KNOWN_TO_ALL_MAX):
            desk.telling.all_know = True
            if desk.nodes:
                desk.out.send(event.address, NodesChanged(self._known_nodes(), tuple(desk.dead_nodes)))
        else:
            desk.out.send(event.address, NodesChanged((), tuple(desk.dead_nodes), more=True, whole=False))

    @on(NodesWanted)
    def _nodes_wanted(self, event: NodesWanted, now: float, sender: str) -> None:
        desk = self.desk
        if desk.is_alive(sender):
            desk.telling.curious[sender] = None
            desk.want_nodes()
            if desk.knows_all:
                desk.out.send(sender, NodesChanged(self._known_nodes(), tuple(desk.dead_nodes)))

    @on(WorkerEnded)
    def _worker_ended(self, event: WorkerEnded, now: float, sender: str) -> None:
        death: Death = event.death
        worker = self.pool.ended(death, now)
        if worker is None:
            return
        self.leases.worker_ended(worker, account(worker, death, self.settings))
        if not worker.address:
            return
        self.desk.processes.pop(worker.address, None)
        self.store.writer_died(worker.address)
        self._process_gone(worker.address, worker.root, now, _how(account(worker, death, self.settings)))

    def _process_gone(self, address: str, root: str, now: float, reason: str) -> None:
        if address in self.store.by_owner:
            # Not removed at once: who borrowed them may adopt them. When the driver ends all go.
            self.orphans[address] = (root, now + ORPHANS_KEPT * self.config.link_lost_after_s)
            if len(self.orphans) > ORPHANS_MAX:
                del self.orphans[next(iter(self.orphans))]
        self.desk.telling.curious.pop(address, None)
        self.desk.gone[address] = None
        if len(self.desk.gone) > GONE_MAX:
            del self.desk.gone[next(iter(self.desk.gone))]
        self.leases.owner_lost(address, now)
        self.bundles.process_gone(address)
        self.store.process_gone(address, now)
        self.posts.peer_lost(address, now)
        self.ledgers.peer_lost(address, now, reason)
        self.questions.process_gone(address)

    @on(PeerLost)
    def _peer_lost(self, event: PeerLost, now: float, sender: str) -> None:
        worker = self.desk.by_address.get(event.peer)
        if worker is None:
            self._gone(event.peer, now, event.reason)
        else:
            # Most likely it is dead: its exit tells more than this, so no reason is given. The rest follows then.
            self.pool.kill(worker, "", now)

    @on(Goodbye)
    def _goodbye(self, event: Goodbye, now: float, sender: str) -> None:
        worker = self.desk.by_address.get(sender)
        if worker is None:
            self._gone(sender, now, event.reason)
        else:
            self.pool.kill(worker, event.reason or "it ended on purpose", now, SIGTERM)

    def _gone(self, address: str, now: float, reason: str) -> None:
        desk = self.desk
        if address == desk.head:
            desk.head_up = False  # nothing local stops; the beat joins again
            return
        if desk.processes.pop(address, None) is not None:
            self._driver_ended(address, now)
            self.store.writer_died(address)  # what it gave to groups belongs to this node
            for entry in desk.others():
                desk.out.send(entry.address, OwnerEnded(address))
        self._process_gone(address, "", now, reason)

    def _driver_ended(self, driver: str, now: float) -> None:
        self.leases.root_lost(driver, now)
        self.store.owner_ended(driver)
        for orphan in [orphan for orphan, (root, _) in self.orphans.items() if root == driver]:
            del self.orphans[orphan]
            self.store.owner_ended(orphan)

    def _end_orphans(self, now: float) -> None:
        """What a dead owner left and nobody adopted in time goes."""
        for owner in self.store.by_owner:
            if owner in self.desk.gone and owner not in self.orphans:
                self.orphans[owner] = ("", now + ORPHANS_KEPT * self.config.link_lost_after_s)
        for orphan in [orphan for orphan, (_, until_s) in self.orphans.items() if until_s <= now]:
            del self.orphans[orphan]
            if not self.desk.is_alive(orphan):
                self.store.owner_ended(orphan)

    @on(OwnerEnded)
    def _owner_ended(self, event: OwnerEnded, now: float, sender: str) -> None:
        self.orphans.pop(event.owner, None)
        if self.desk.is_alive(event.owner):
            self.store.owner_ended(event.owner)  # said before it was reaped: its leases end with the process
        else:
            self._driver_ended(event.owner, now)

    # --- head and other nodes ---------------------------------------------------------------------

    def entry(self) -> NodeEntry:
        """This node as others see it."""
        settings = self.settings
        workers = tuple(
            (worker.worker_id, worker.pid, worker.state, worker.address)
            for worker in self.desk.workers.values()
            if worker.state != "dying"
        )
        ledger = self.leases.ledger
        return NodeEntry(
            settings.node_id,
            settings.me,
            settings.host,
            ledger.total(),
            ledger.available(),
            workers,
            self.leases.queued(),
            self.desk.epoch,
        )

    def _join(self) -> None:
        self.desk.out.send(self.desk.head, NodeJoined(self.entry(), self.settings.former))

    def _report(self, now: float) -> None:
        """Tells the head what changed, at most once an interval."""
        if not self.desk.head_up:
            self.desk.report_due = False
            return
        wait_s = self._reported_s + self.config.report_interval_s - now
        if wait_s > 0:
            self._report_timer = True
            self.desk.out.timer(wait_s, Tick("report"))
            return
        self.desk.report_due = False
        entry = self.entry()
        # The length of the queue moves with every burst of tasks: it is told at the next heartbeat, not for itself.
        capacity, dynamic = (entry.total, entry.available, entry.workers), self.leases.ledger.news()
        if capacity == self._reported and not dynamic and now - self._reported_s < self.config.heartbeat_s:
            return
        self._reported = capacity
        self._reported_s = now
        self.desk.out.send(self.desk.head, NodeReport(entry, dynamic), lazy=True)

    def _known_nodes(self) -> tuple[NodeEntry, ...]:
        return tuple(self.desk.nodes[node_id] for node_id in sorted(self.desk.nodes))

    def _learn_nodes(self, news: NodesChanged, now: float) -> None:
        desk = self.desk
        back = tuple([entry for entry in news.nodes if entry.address in desk.dead_nodes])
        for address in news.dead:
            desk.dead_nodes[address] = None
        for entry in news.nodes:
            desk.dead_nodes.pop(entry.address, None)  # it was declared dead and lives again, under a new epoch
        if news.more and not news.dead:
            desk.nodes.update((entry.node_id, entry) for entry in news.nodes)
        else:
            desk.nodes = {entry.node_id: entry for entry in known_after(self._known_nodes(), news)}
        desk.knows_all = news.whole
        if news.whole and len(desk.nodes) <= KNOWN_TO_ALL_MAX:
            desk.telling.tell_all(desk.out, desk.locals(), NodesChanged(self._known_nodes(), news.dead))
        else:
            desk.telling.tell(desk.out, desk.locals(), news, back)
        if news.whole:
            desk.asked_head = False
            self.questions.nodes_known(now)
        elif desk.telling.curious or self.questions.early:
            desk.want_nodes()

    @on(NodeAccepted)
    def _accepted(self, event: NodeAccepted, now: float, sender: str) -> None:
        desk = self.desk
        desk.head = sender or desk.head
        desk.head_up = True
        desk.epoch = event.epoch
        self.leases.ledger.all_changed()
        desk.asked_head = False
        self._learn_nodes(NodesChanged(event.nodes, (), not event.whole, event.whole), now)
        self.leases.look_again(head_is_new=True)
        self.ledgers.head_found()
        self.bundles.head_found(now)
        desk.report_due = True

    @on(NodesChanged)
    def _nodes_changed(self, event: NodesChanged, now: float, sender: str) -> None:
        self._learn_nodes(event, now)
        self.posts.nodes_lost(event.dead, now)
        self.ledgers.nodes_lost(event.dead, now)
        self.leases.look_again(head_is_new=False)

    @on(NodeFenced)
    def _fenced(self, event: NodeFenced, now: float, sender: str) -> None:
        """The cluster has written this node off: what it ran is running elsewhere, so it begins a new life."""
        if event.epoch <= self.desk.epoch:
            return
        self.desk.epoch = event.epoch
        self.desk.head = sender or self.desk.head
        self.desk.head_up = False
        for worker in list(self.desk.workers.values()):
            self.pool.kill(worker, "its node was declared dead and began a new life", now)
        self.posts.clear()
        self.leases.new_life()
        self.bundles.clear(now)
        self.ledgers.nodes_lost((self.desk.me,), now)
        self.store.clear()
        self.pool.replenish(now)
        self._join()


def _how(death: Death) -> str:
    """How a process ended, in words."""
    end = f"killed by {signal_of(death.exit_code)}" if death.exit_code < 0 else f"exit code {death.exit_code}"
    return f"{death.reason} ({end})" if death.reason else end
