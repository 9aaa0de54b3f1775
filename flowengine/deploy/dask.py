"""The engine inside of a Dask cluster: two plugins that start its processes as children of Dask's, and leases.

Plugins are launchers and relays; whatever has a heartbeat or a deadline lives in a child. Of Dask no more is used than
its plugins, the three calls of a Client that register, run and submit, and two rows of the scheduler's `handlers`:
one of our own (deploy/relay.py), and `adaptive_target`, which is asked how many workers there should be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
import threading
import time
from typing import Any, NamedTuple

import msgspec
from distributed import Client, get_worker, secede
from distributed.comm.addressing import get_address_host, parse_address
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin
from distributed.protocol import pickle

from flowengine import __version__
from flowengine.deploy.nodes import NodeBeside, Share, launcher_settings
from flowengine.deploy.relay import Relay
from flowengine.deploy.reports import Report, workers_wanted
from flowengine.deploy.seeds import (
    HEAD_NAME,
    LEASE_TOPIC,
    NODE_NAME,
    NODE_TOPIC,
    Entered,
    NodeSeed,
    Seed,
    WorkerSeen,
    tls_from,
)
from flowengine.errors import BadValue, FlowError
from flowengine.runtime.connection import port_of
from flowengine.runtime.gate import RELAY_OP
from flowengine.runtime.launched import command_of
from flowengine.runtime.link import make_security
from flowengine.runtime.settings import HeadProcessSettings, Tls

log = logging.getLogger(__name__)
pickled: Any = pickle.dumps  # without types, as the next
leave_slot: Any = secede

LOOPBACK = "127.0.0.1"
HEAD_MODULE = "flowengine.deploy.beside"
HEAD_START_S = 30.0
HEAD_STARTS_MAX = 5  # of heads that end before they listen
HEAD_AGAIN_S = 0.2
HEAD_END_S = 4.0
REPORT_BYTES_MAX = 1 << 26
LOOK_S = 0.25
COMING_S = 90.0  # a program that has entered may take so long to be seen by the head
GONE_S = 10.0  # without any program; one whose node is started again is away for a moment
USED_S = 2.0  # a worker counts as used for so long after its node was last busy
RUNNING = ("executing", "long-running")
TARGET_S = 5.0  # adaptive clusters: work that is over by then needs no more workers


def is_tls(address: str) -> bool:
    """Whether a Dask address is of connections with TLS."""
    return parse_address(address)[0] in ("tls", "wss")


def host_of(address: str) -> str:
    """The host in a Dask address, by which others reach it."""
    return LOOPBACK if parse_address(address)[0] == "inproc" else str(get_address_host(address))


def tls_of(server: Any, role: str) -> Tls | None:
    """What our processes beside a Dask server use; they inherit its certificates."""
    return tls_from(server.security, role) if is_tls(server.address) else None


def is_client(client: Any) -> bool:
    """Whether it is one of Dask's."""
    return isinstance(client, Client)


class Program(NamedTuple):
    """A program that has entered: until when it counts though its node is not seen, and that node, once it has one."""

    until_s: float
    node_id: str = ""


# --- beside the scheduler -----------------------------------------------------------------------------------------


class HeadPlugin(SchedulerPlugin):
    """Runs the head as a child of the scheduler's, and the nodes beside its workers, while there are programs."""

    name = HEAD_NAME
    idempotent = True

    def __init__(self, seed: Seed) -> None:
        self.packed = msgspec.json.encode(seed)
        self.version = __version__

    async def start(self, scheduler: Any) -> None:
        """Begin; without any wait inside, so that a second program cannot come between."""
        check_version(self.version, "the Dask scheduler")
        self.scheduler = scheduler
        self.seed = msgspec.json.decode(self.packed, type=Seed)
        self.ending = False
        self.programs: dict[str, Program] = {}  # who has entered and not left
        self.alone_since_s = time.monotonic()
        self.report: Report | None = None  # of the head, while it lives
        self.address = ""
        self.failure = ""
        self.nodes: dict[str, tuple[str, str]] = {}  # Dask worker: id of its node, why there is none
        self.used_s: dict[str, float] = {}  # Dask worker: when its node was last seen busy
        self.used: tuple[str, ...] = ()
        self.child: asyncio.subprocess.Process | None = None
        self.tls = tls_of(scheduler, "scheduler")
        self.folder = tempfile.mkdtemp(prefix="flowengine-head-")  # the head removes it when it is told to end
        security = make_security(self.tls.certificate, self.tls.key, self.tls.authority) if self.tls else None
        self.relay = Relay(host_of(scheduler.address), security)
        scheduler.handlers[RELAY_OP] = self.relay_link
        self.dask_target = scheduler.handlers["adaptive_target"]
        scheduler.handlers["adaptive_target"] = self.adaptive_target
        self.up = asyncio.Event()
        self.tasks = [asyncio.create_task(self._keep_head()), asyncio.create_task(self._look())]

    async def relay_link(self, comm: Any, ask: str, to: str) -> None:
        """The handler that takes connections over; see runtime/gate.py."""
        await self.relay.serve(comm, ask, to)

    # --- the head ---------------------------------------------------------------------------------

    async def _keep_head(self) -> None:
        failed = 0
        while not self.ending:
            before = self.address
            try:
                reason = await self._live_once()
            except OSError as error:
                reason = str(error)
            failed = 0 if self.report is not None else failed + 1
            self.report = None
            if failed > HEAD_STARTS_MAX and not before:
                self.failure = f"{reason}, {failed} times in a row; the log of the Dask scheduler tells more"
                self.up.set()
                return
            await asyncio.sleep(HEAD_AGAIN_S)

    async def _live_once(self) -> str:
        """One life of the head; gives how it ended."""
        settings = HeadProcessSettings(
            host=host_of(self.scheduler.address), session=self.seed.session, secret=self.seed.secret, tls=self.tls,
            state_dir=self.folder, config=self.seed.config, port=port_of(self.address))
        child = self.child = await asyncio.create_subprocess_exec(
            *command_of(HEAD_MODULE), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            start_new_session=True, limit=REPORT_BYTES_MAX)
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(ConnectionError):
            child.stdin.write(msgspec.json.encode(settings) + b"\n")
            await child.stdin.drain()
        while line := await child.stdout.readline():
            await self._heard(msgspec.json.decode(line, type=Report))
        return f"the head ended with exit code {await child.wait()}"

    async def _heard(self, report: Report) -> None:
        self.report, self.address = report, report.address
        if not self.up.is_set() and not self.ending:
            self.up.set()
            plugin = node_plugin(NodeSeed(head=report.address, seed=self.seed), self.version)
            self.tasks.append(asyncio.create_task(self._register(pickled(plugin))))

    async def _register(self, plugin: bytes) -> None:
        try:
            await self.scheduler.register_worker_plugin(None, plugin, NODE_NAME, idempotent=True)
        except Exception as error:  # a worker that leaves just now; those who are there tell of themselves
            log.warning("a Dask worker did not take the plugin of flowengine: %s", error)

    # --- programs ---------------------------------------------------------------------------------

    async def enter(self, program: str) -> Entered | None:
        """A program joins; None: it came when all was about to end."""
        self.programs[program] = Program(time.monotonic() + COMING_S)
        try:
            async with asyncio.timeout(HEAD_START_S):
                await self.up.wait()
        except TimeoutError:
            self.failure = self.failure or f"the head did not listen within {HEAD_START_S:g} s"
        if self.ending:
            return None
        if self.failure:
            await self.leave(program)
            raise FlowError(f"the engine could not be started beside the Dask scheduler: {self.failure}")
        return Entered(head=self.address, session=self.seed.session, secret=self.seed.secret,
                       has_tls=self.tls is not None)

    def arrived(self, program: str, node_id: str) -> tuple[str, ...]:
        """The program runs: from now on its node tells that it is there. Gives the workers that are in use."""
        if program in self.programs:
            self.programs[program] = Program(time.monotonic() + GONE_S, node_id)
        return self.used

    async def leave(self, program: str, node_id: str = "") -> None:
        """A program is done, and so is its node; with the last one all ends."""
        self.programs.pop(program, None)
        nodes = self.report.nodes if self.report is not None else {}
        if not self.programs and all(node.total or name == node_id for name, node in nodes.items()):
            await self.end()

    async def _look(self) -> None:
        """Notes who is in use, and whether any program is left: one may have been killed."""
        while not self.ending:
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            report = self.report
            if report is None:
                self.alone_since_s = now_s
                continue
            self._note_used(report, now_s)
            for program, one in list(self.programs.items()):
                if one.node_id in report.nodes:
                    self.programs[program] = Program(now_s + GONE_S, one.node_id)
                elif now_s > one.until_s:
                    del self.programs[program]
            is_coming = any(not one.node_id for one in self.programs.values())
            if is_coming or any(not node.total for node in report.nodes.values()):
                self.alone_since_s = now_s
            elif now_s - self.alone_since_s > GONE_S:
                log.info("no program uses flowengine any more")
                self.scheduler.loop.add_callback(self.end)  # this task is one of those that it ends
                return

    async def end(self) -> None:
        """End nodes and head, and leave nothing behind."""
        if self.ending:
            return
        self.ending = True
        with contextlib.suppress(Exception):  # one that is not there any more, or a worker that leaves just now
            await self.scheduler.unregister_worker_plugin(None, NODE_NAME)
        await self.close()
        if self.scheduler.plugins.get(HEAD_NAME) is self:
            self.scheduler.remove_plugin(HEAD_NAME)

    async def close(self) -> None:
        """The scheduler ends."""
        self.ending = True
        self.up.set()
        handlers = self.scheduler.handlers
        if handlers.get("adaptive_target") == self.adaptive_target:
            handlers["adaptive_target"] = self.dask_target
            handlers.pop(RELAY_OP, None)
        self.relay.close()
        child = self.child
        if child is not None and child.stdin is not None:
            child.stdin.close()
            try:
                await asyncio.wait_for(child.wait(), HEAD_END_S)
            except TimeoutError:
                child.kill()
        me = asyncio.current_task()
        for task in self.tasks:
            if task is not me:
                task.cancel()
        await asyncio.gather(*(task for task in self.tasks if task is not me), return_exceptions=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- workers ----------------------------------------------------------------------------------

    def log_event(self, topic: str, msg: Any) -> None:
        """A worker tells of its node."""
        if topic == NODE_TOPIC and isinstance(msg, dict) and msg["worker"] in self.scheduler.workers:
            self.nodes[msg["worker"]] = msg["node"], msg["reason"]
            if msg["reason"]:
                log.warning("no flowengine node beside the Dask worker %s: %s", msg["worker"], msg["reason"])

    def remove_worker(self, scheduler: Any, worker: str, **rest: Any) -> None:
        """A worker has left; its node ends by itself."""
        self.nodes.pop(worker, None)
        if self.used_s.pop(worker, None) is not None:
            self._tell_used()

    def workers(self) -> dict[str, WorkerSeen]:
        """What became of the node of each worker that runs."""
        known = self.report.nodes if self.report is not None else {}
        found = {}
        for address, state in self.scheduler.workers.items():
            if state.status.name in ("running", "paused", "init"):
                node_id, reason = self.nodes.get(address, ("", ""))
                found[address] = WorkerSeen(node_id=node_id, is_here=node_id in known, reason=reason)
        return found

    def _note_used(self, report: Report, now_s: float) -> None:
        for worker, (node_id, _) in self.nodes.items():
            node = report.nodes.get(node_id)
            if node is not None and node.is_used:
                self.used_s[worker] = now_s
        self.used_s = {worker: seen_s for worker, seen_s in self.used_s.items() if now_s - seen_s < USED_S}
        self._tell_used()

    def _tell_used(self) -> None:
        used = tuple(sorted(self.used_s))
        if used != self.used:
            self.used = used
            self.scheduler.log_event(LEASE_TOPIC, {"used": list(used)})

    def valid_workers_downscaling(self, scheduler: Any, workers: list[Any]) -> list[Any]:
        """Those that are not in use."""
        return [state for state in workers if state.address not in self.used_s]

    def adaptive_target(self, target_duration: Any = None) -> int:
        """Dask's own wish for workers, or ours if that is more: those in use, and some for what waits."""
        asked: int = self.dask_target(target_duration=target_duration)
        report = self.report
        if report is None:
            return asked
        totals = [dict(node.total) for node in report.nodes.values() if node.total]
        return max(asked, len(self.used_s) + workers_wanted(report.waiting, totals, TARGET_S))


def check_version(version: str, where: str) -> None:
    """Raise BadValue when a program has another version of the engine than a process of the cluster."""
    if version != __version__:
        raise BadValue(f"this program has flowengine {version}, {where} has flowengine {__version__}: "
                       "install the same version everywhere")


# --- beside a worker ----------------------------------------------------------------------------------------------


def node_plugin(told: NodeSeed, version: str) -> WorkerPlugin:
    """The plugin of the workers."""
    packed_seed = msgspec.json.encode(told)

    # A class inside of a function travels by value: where flowengine is missing, a worker that joins would otherwise
    # fail over a plugin that it cannot read, and be lost to Dask.
    class FlowengineNode(WorkerPlugin):
        """Starts a node beside the worker."""

        name = "flowengine-node"
        idempotent = True

        def __init__(self, packed: bytes, version: str) -> None:
            self.packed = packed
            self.version = version
            self.beside: Any = None

        def setup(self, worker: Any) -> None:
            try:
                try:
                    from flowengine.deploy.dask import WorkerSide, check_version
                except ImportError as error:
                    raise ImportError(f"flowengine {self.version} is not installed there ({error})") from error
                check_version(self.version, "the Dask worker")
                self.beside = WorkerSide(worker, self.packed)
            except Exception as error:
                worker.log_event("flowengine-node", {"worker": worker.address, "node": "", "reason": str(error)})

        async def teardown(self, worker: Any) -> None:
            if self.beside is not None:
                await self.beside.end()

        def transition(self, key: Any, start: str, finish: str, **rest: Any) -> None:
            if self.beside is not None and str(key).startswith("flowengine-lease-"):
                self.beside.lease_moved(key, finish)

    return FlowengineNode(packed_seed, version)


class WorkerSide:
    """A node and the leases of programs, beside one Dask worker."""

    def __init__(self, worker: Any, packed: bytes) -> None:
        told = msgspec.json.decode(packed, type=NodeSeed)
        self.worker = worker
        self.leases: dict[str, threading.Event] = {}
        share = Share(
            host=host_of(worker.address), threads=worker.state.nthreads,
            memory_bytes=int(worker.memory_manager.memory_limit or 0), local_directory=worker.local_directory,
            resources=dict(worker.state.total_resources), tls=tls_of(worker, "worker"))
        self.node = NodeBeside(launcher_settings(share, told), self.tell)
        self.node.start()

    def tell(self, node_id: str, reason: str) -> None:
        """Let the scheduler know."""
        self.worker.log_event(NODE_TOPIC, {"worker": self.worker.address, "node": node_id, "reason": reason})

    async def end(self) -> None:
        """End the node; return when it is gone, but do not keep a nanny waiting for the end of its worker."""
        for lease in list(self.leases.values()):
            lease.set()
        if self.worker.nanny and self.worker.status.name not in ("running", "paused"):
            self.node.ask_to_end()
        else:
            await asyncio.to_thread(self.node.end)

    def lease_moved(self, key: str, finish: str) -> None:
        """The state of a lease's task; it ends by being forgotten."""
        if finish not in RUNNING and key in self.leases:
            self.leases[key].set()


def lease() -> None:
    """The task by which a program keeps a worker whose node it uses: it takes no slot, and ends when released."""
    worker: Any = get_worker()
    plugin: Any = worker.plugins.get(NODE_NAME)
    key = worker.get_current_task()
    if plugin is None or plugin.beside is None:
        return
    leases = plugin.beside.leases
    ended = leases[key] = threading.Event()
    leave_slot()
    task = worker.state.tasks.get(key)
    if task is not None and task.state in RUNNING:  # else it was released just before, and nobody tells that again
        ended.wait()
    del leases[key]
