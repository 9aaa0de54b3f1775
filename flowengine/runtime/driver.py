"""The driver's session: starts the local engine or joins a cluster, shows what workers print, and ends it all."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

import psutil

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.ids import root_id, task_of
from flowengine.errors import FlowError, HeadLost
from flowengine.objects.session_folders import is_session_here
from flowengine.recovery import durable
from flowengine.recovery.record import Piece, decoded
from flowengine.recovery.records import Records
from flowengine.refs import Current
from flowengine.runtime.connection import Connection
from flowengine.runtime.context import Context
from flowengine.runtime.forks import guard_forks
from flowengine.runtime.job import JobJournal
from flowengine.runtime.launched import DriverSettings, Launched, launch
from flowengine.runtime.link import LinkError
from flowengine.runtime.process import Place
from flowengine.runtime.session import Session
from flowengine.runtime.settings import LauncherReady
from flowengine.runtime.sharing import OwnSharing
from flowengine.runtime.visitor import reach

T = TypeVar("T")

log = logging.getLogger(__name__)
waits = logging.getLogger("flowengine.waits")

ENDED = "the engine of this host has ended"
START_TIMEOUT_S = 30.0
NO_NODE_TOLD_S = 1.0
ASK_AGAIN_S = 0.2
RECORD_TIMEOUT_S = 10.0
LOGS_PATIENCE_S = 1.0  # at the end, for lines on their way
LOCAL_NODE_PATIENCE_S = 1.0  # before a node is started on a host where none seems to be
COMING_NODE = "node-of-"  # `flow node` leaves a folder for a session of this name while it runs


class DriverSession(Session):
    """The engine inside of the user's program."""

    role = "driver"

    def __init__(self, settings: DriverSettings, connection: Connection | None, launched: Launched | None) -> None:
        self.settings = settings
        self.connection = connection
        self.launched = launched
        self.job: JobJournal | None = None
        self.end_reason = ""  # of the engine, when it ended before the session
        self.end_code: int | None = None  # of the launcher then
        self.seeking = False  # a node of this host, for the one that was lost
        self.seeker: threading.Thread | None = None
        self.under_way: concurrent.futures.Future[Any] | None = None
        self.afterwards: Callable[[], None] | None = None  # called when the session has ended
        self.head_lost: Callable[[], None] | None = None  # called when the link to the head has ended
        secret = connection.secret_bytes if connection is not None else settings.secret
        tls = connection.tls if connection is not None else None
        super().__init__(Place(host=settings.host, secret=secret, tls=tls, config=settings.config,
                               relay=settings.relay))
        if launched is not None:
            launched.on_ready = self.node_restarted
            launched.on_end = self.engine_ended
        self.sharing = self.shared = OwnSharing(self)
        if settings.log_to_driver:
            self.log_sink = show_log

    def start(self) -> None:
        """Bring the engine up and join it; raises HeadLost when that fails."""
        try:
            self.open(self._node_to_join())
            self.open_job()
        except BaseException as error:
            self.close()
            if self.launched is not None:
                self.launched.end()
            if isinstance(error, LinkError):
                raise HeadLost(f"the node of this host cannot be reached: {error}") from error
            raise
        Current.session = self
        guard_forks()
        self.guard_interrupts()
        atexit.register(self.shutdown)

    def _node_to_join(self) -> str:
        if self.launched is not None:
            return self.launched.first_ready().node
        assert self.connection is not None
        return self._local_node(self.connection)

    def _local_node(self, connection: Connection) -> str:
        """The node of this host in a cluster; where there is none, one without workers is started for its store."""
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self.reach_head(connection), self.loop).result()
        began_s, due_s = time.monotonic(), NO_NODE_TOLD_S
        while True:
            try:
                nodes = self.nodes_of(connection)
            except FlowError:  # it may be started again: it is there when it is reached once more
                asyncio.run_coroutine_threadsafe(self.reach_head(connection), self.loop).result()
                nodes = self.nodes_of(connection)
            found = nodes_on(local_addresses(), nodes)
            if found:
                return found[0]
            waited_s = time.monotonic() - began_s
            patience_s, why = patience_for(connection, nodes)
            if waited_s > patience_s:
                break
            if waited_s >= due_s and self.config.wait_warn_s:
                waits.warning("waiting for %.0f s, at most %.0f s: %s", waited_s, patience_s, why)
                due_s = 2 * waited_s
            time.sleep(ASK_AGAIN_S)
        if not any(entry["total"] for entry in nodes):
            waits.warning("%s: what is submitted waits for one", no_nodes(connection))
        self.launched = launch(self.settings, connection.session, connection.address, connection.tls)
        self.launched.on_ready = self.node_restarted
        return self.launched.first_ready().node

    async def reach_head(self, connection: Connection) -> None:
        """Have a link to the head."""
        if not self.endpoint.address:
            await self.endpoint.start()
        await reach(self.endpoint, connection.address, self.config.connect_timeout_s)

    def nodes_of(self, connection: Connection) -> list[dict[str, Any]]:
        """The nodes that the head knows."""
        found: list[dict[str, Any]] = self.ask(connection.address, "nodes")
        return found

    def open(self, node: str) -> None:
        """As every session; a thread and an endpoint may run already."""
        super().open(node)
        self.values.durable_url = self.durable_url
        self.records = Records(self.settings.state_dir, self.view_of, self.told_of)
        self.drive.perform[c.KeepPiece] = self.records.keep
        self.owner.keeps_records = True

    def view_of(self, oid: bytes) -> memoryview | None:
        """A stored value, if it is on this host."""
        return self.values.segments.open(oid.hex())

    def ask_record(self, digits: str) -> list[Piece]:
        """All that is known of a task or an actor: by processes, and on disk of one that failed."""
        return [*self.told_of(digits), *self.records.kept(digits)]

    def told_of(self, digits: str) -> list[Piece]:
        """What the processes of the cluster know of a task or an actor."""
        return decoded(self.ask(self.node, "record", digits, timeout_s=RECORD_TIMEOUT_S))

    def open_job(self) -> None:
        """A resumable job: take over what an earlier run left."""
        settings = self.settings
        if not settings.job:
            return
        context = self.context = Context(root_id(b"job:" + settings.job.encode()))
        self.job = JobJournal(settings.job, settings.state_dir, (self.values.make_durable, self.values.drop_durable))
        left = self.job.left(self.node)
        context.recorded = left.notes
        context.is_job = True
        self.drive.perform[c.KeepResult] = self.drive.perform[c.KeepNote] = self.job.keep
        self.step(s.ParentBegan(context.task, "", 1, left.results))

    def commit(self) -> None:
        """In a resumable job: return when what it would continue from is on disk."""
        if self.job is not None:
            self.job.flush()

    def engine_ended(self, code: int | None, reason: str = ENDED) -> None:
        """The launcher is gone, and with it all that it had started: nobody would answer those who wait."""
        if self.closed:
            return
        self.end_code, self.end_reason = code, reason
        self.wake_all()
        self.values.give_up(reason)

    def check_open(self) -> None:
        """Raise when the session, or the engine under it, has ended meanwhile."""
        if self.end_reason:
            raise HeadLost(self.end_reason, exit_code=self.end_code)
        super().check_open()

    def node_restarted(self, ready: LauncherReady) -> None:
        """The launcher started the node or the head again."""
        self.head = ready.head
        if not self.closed and ready.node != self.node:
            self._move(ready.node)

    def on_lost(self, peer: str, reason: str) -> None:
        """In a cluster nobody tells us when this host's node was started again."""
        super().on_lost(peer, reason)
        self.shared.keeper.lost(peer)
        if peer == self.head and self.head_lost is not None and not self.closed:
            self.head_lost()
        if peer == self.node and self.launched is None and not self.closed and not self.seeking:
            self.seeking = True
            self.seeker = threading.Thread(target=self._find_node, name="flowengine-find-node", daemon=True)
            self.seeker.start()

    def nodes_changed(self, peer: str, message: m.NodesChanged) -> None:
        """Workers end with their node, whether their links tell so or not."""
        gone = [worker[3] for entry in self.nodes_seen if entry.address in message.dead for worker in entry.workers]
        super().nodes_changed(peer, message)
        for worker in gone:
            self.shared.keeper.lost(worker)

    def why(self, oid: bytes) -> str:
        """One line about an object; what its task waits for among what the program keeps, too."""
        waits = self.waits_of(task_of(oid))
        return super().why(oid) + (f"; it waits for {', '.join(waits)}" if waits else "")

    def waits_of(self, task: bytes) -> list[str]:
        """What a task waits for among what the program keeps."""
        return self.shared.keeper.waits_of(task)

    def share_told(self, peer: str, message: Any) -> None:
        """Code of this program asks for a lock, an item or the like."""
        self.shared.keeper.told(peer, message)

    def _find_node(self) -> None:
        """Join the node that this host has now."""
        while not self.closed and self.seeking:
            time.sleep(ASK_AGAIN_S)
            self._try_to_move()

    def _try_to_move(self) -> None:
        assert self.connection is not None
        try:
            self._on_loop(self.reach_head(self.connection))
            for found in nodes_on(local_addresses(), self.nodes_of(self.connection)):
                if self._on_loop(self._is_reached(found)):
                    self._move(found)
                    self.seeking = False
                    return
        except (FlowError, OSError, TimeoutError) as error:
            log.debug("no node on this host yet: %s", error)
        except (RuntimeError, concurrent.futures.CancelledError):
            self.seeking = False  # the loop has ended, and so does this program

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the loop do it; shutdown() ends the wait."""
        try:
            under_way = asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:
            work.close()
            raise
        self.under_way = under_way
        return under_way.result()

    async def _is_reached(self, node: str) -> bool:
        """Whether the node lives: the head may not have missed it yet."""
        self.endpoint.forgive(node)
        try:
            async with asyncio.timeout(self.config.connect_timeout_s):
                await self.endpoint.connect(node)
        except (OSError, TimeoutError):
            return False
        return True

    def _move(self, node: str) -> None:
        """Use another node of this host; what the last one had is gone."""
        self.node = node
        self.joined = type(self.joined)()
        self.hello()
        welcome = self.joined.result(timeout=self.config.connect_timeout_s)
        old = self.values
        self.enter(welcome)
        self.values.durable_url = self.durable_url
        self.step(s.NodeMoved(node, welcome.node_id))
        old.give_up("the node of this host was started again meanwhile")

    # --- signals ----------------------------------------------------------------------------------

    def interrupted(self, number: int, frame: FrameType | None) -> None:
        """SIGINT in the main thread: at once in user code, at its end inside of the engine."""
        if self.masked:
            self.pending_signal = KeyboardInterrupt()
        else:
            raise KeyboardInterrupt

    def guard_interrupts(self) -> None:
        """Take over SIGINT where Python's own handler was."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self.handlers = {signal.SIGINT: self.interrupted}
            signal.signal(signal.SIGINT, self.handlers[signal.SIGINT])

    def unguard_interrupts(self) -> None:
        """Give SIGINT back."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) == self.interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    # --- ending -----------------------------------------------------------------------------------

    def shutdown(self, failed: bool = False) -> None:
        """End the engine; harmless when it has ended. failed: the program did not end well, so its job may go on."""
        if self.closed:
            return
        atexit.unregister(self.shutdown)
        self.unguard_interrupts()
        self._drain_logs()
        self._stop_seeking()
        self.records.close()
        self.close()
        if self.job is not None:
            self.job.close(done=not failed and getattr(sys, "last_value", None) is None)
        if self.launched is not None:
            self.launched.end()
        self._drop_durable()
        if self.afterwards is not None:
            self.afterwards()

    @property
    def durable_url(self) -> str:
        """Where durable values go: those of a job stay for its next run, others end with the session."""
        if self.settings.job:
            return f"{self.settings.durable_url}/durable"
        pid = os.getpid()
        if self.launched is not None and self.connection is None:
            pid = self.launched.process.pid  # a local engine, whose launcher removes them when this process is killed
        return f"{durable.live_url(self.settings.durable_url, self.session_name, pid)}/durable"

    def _drop_durable(self) -> None:
        """Remove what only this session needed."""
        if not self.settings.job:
            durable.drop(self.durable_url.rpartition("/")[0])
        for made in self.owner.made.values():
            if made.folder:
                durable.drop(made.folder)

    def _stop_seeking(self) -> None:
        if self.seeking and self.seeker is not None:
            self.seeking = False
            if self.under_way is not None:
                self.under_way.cancel()
            self.seeker.join(timeout=LOGS_PATIENCE_S)

    def ask(self, to: str, topic: str, argument: Any = None, scope: str = "cluster", timeout_s: float = 5.0) -> Any:
        """As every session; a question to this host's node goes to its next one when it is lost meanwhile."""
        end_s = time.monotonic() + timeout_s
        mine = to == self.node
        while True:
            try:
                return super().ask(to, topic, argument, scope, max(0.0, end_s - time.monotonic()))
            except FlowError:
                if not mine or self.closed or time.monotonic() > end_s:
                    raise
            time.sleep(ASK_AGAIN_S)
            to = self.node

    def _drain_logs(self) -> None:
        """Show what was printed until now."""
        end_s = time.monotonic() + LOGS_PATIENCE_S
        others = [entry.address for entry in self.nodes_seen if entry.address != self.node]
        # This host's node is asked again at the end: it passes on what others have sent to its workers.
        for node in [self.node, *others, self.node] if others else [self.node]:
            try:
                timeout_s = max(LOGS_PATIENCE_S / 10, end_s - time.monotonic())
                self.ask(node, "logs", scope="local", timeout_s=timeout_s)
            except FlowError:
                log.debug("node %s did not answer before the end", node)


def patience_for(connection: Connection, nodes: list[dict[str, Any]]) -> tuple[float, str]:
    """How long a program waits for a node on its host, and what for."""
    if not nodes:
        return START_TIMEOUT_S, no_nodes(connection)
    if is_session_here(COMING_NODE + connection.session):
        return START_TIMEOUT_S, f"the node of this host has yet to join the cluster at {place_of(connection)}"
    return LOCAL_NODE_PATIENCE_S, ""


def no_nodes(connection: Connection) -> str:
    """What to do about a cluster without nodes."""
    return f"the cluster at {place_of(connection)} has no node that runs tasks; `flow node --join FILE` brings one"


def place_of(connection: Connection) -> str:
    """Where the head listens."""
    return connection.address.partition("#")[0]


def nodes_on(addresses: set[str], nodes: list[dict[str, Any]]) -> list[str]:
    """Addresses of the nodes on this host that have something to offer; those of drivers have nothing."""
    return [str(entry["address"]) for entry in nodes if entry["host"] in addresses and entry["total"]]


def local_addresses() -> set[str]:
    """Addresses of this host."""
    found = {"localhost"}
    for addresses in psutil.net_if_addrs().values():
        found.update(address.address for address in addresses)
    return found


def show_log(message: m.LogLines) -> None:
    """Print what a worker printed, on the same stream."""
    stream = sys.stdout if message.stream == "out" else sys.stderr
    try:
        stream.write("".join(f"({message.source}) {line}\n" for line in message.lines))
        stream.flush()
    except (OSError, ValueError):
        return  # the program has closed its stream
