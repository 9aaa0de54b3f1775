"""The node process: the Node machine with a socket, a store folder, and the launcher to fork its workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.collectives.lanes import LANE_HELLO
from flowengine.core.commands import (
    CheckWorker,
    MemorySeen,
    PullObject,
    RestoreObject,
    SpillObject,
    StartWorker,
    StopWorker,
)
from flowengine.core.messages import (
    Answered,
    Asked,
    ChaosOrdered,
    Goodbye,
    Joined,
    KillWorker,
    LogLines,
    MemoryLacked,
    Message,
    NodeAccepted,
    NodeFenced,
    ObjectSealed,
)
from flowengine.core.node import Node
from flowengine.core.node_desk import NodeSettings
from flowengine.objects import session_folders, spill
from flowengine.objects.segments import Segments
from flowengine.objects.transfer import Transfers
from flowengine.recovery import durable
from flowengine.runtime import gpus, process
from flowengine.runtime.channel import Channel
from flowengine.runtime.drive import Drive
from flowengine.runtime.node_collectives import Collectives
from flowengine.runtime.node_objects import Objects
from flowengine.runtime.node_workers import Workers
from flowengine.runtime.settings import (
    TO_NODE,
    EndAll,
    HeadListens,
    NodeListens,
    NodeProcessSettings,
    SignalHead,
    WorkerForked,
    WorkerReaped,
    WorkerSettings,
)
from flowengine.runtime.worker_logs import LOGS

if TYPE_CHECKING:
    from flowengine.runtime.host_use import HostUse

log = logging.getLogger(__name__)

LOGS_TOPIC = "logs"  # asked by a driver before it ends: answered when all that was printed was forwarded
SHELL_TOPICS = frozenset((LOGS_TOPIC, "running", "threads", "host", "printed", process.END_TOPIC))
FORCE_LOOK_S = 0.02  # a task that is to be killed may be about to begin: its worker is looked at so often ...
FORCE_LOOKS_MAX = 25  # ... and so many times
NO_HEAD_TOLD_S = 30.0
HARMS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "thaw": signal.SIGCONT}


class NodeShell:
    """Carries events to the Node machine and its commands out; decides nothing."""

    def __init__(self, settings: NodeProcessSettings, end: socket.socket) -> None:
        self.settings = settings
        self.config = settings.config
        self.channel: Channel[HeadListens | WorkerForked | WorkerReaped] = Channel(end, TO_NODE)
        self.drivers: dict[str, int] = {}  # address: pid
        self.peers: dict[str, None] = {}  # who has said something
        self.workers: Workers | None = None
        self.drive: Drive | None = None
        self.machine: Node | None = None
        self.host_use: HostUse | None = None
        self.folder = ""
        self.misses_head = False
        self.missed_s = self.tell_s = 0.0  # since when it has no link to the head, and when that is told again
        self.next_look: asyncio.TimerHandle | None = None  # at the shared memory that is free
        self.head_told: asyncio.Future[str]
        self.ended: asyncio.Event

    async def run(self) -> int:
        """Serve until told to end."""
        loop = asyncio.get_running_loop()
        self.head_told = loop.create_future()
        self.ended = process.end_event()
        loop.add_reader(self.channel.end, self._launcher_speaks)
        self._open_store()
        place = process.Place(host=self.settings.host, port=self.settings.port, secret=self.settings.secret,
                              tls=self.settings.tls, config=self.config, relay=self.settings.relay)
        self.endpoint = process.new_endpoint(place, self._on_batch, self._on_lost, self._on_stream)
        await self.endpoint.start()
        self.transfers.me = self.endpoint.address
        self.head = self.settings.head or await self.head_told
        self._start_machine(loop)
        self._say(NodeListens(self.endpoint.address, self.folder))
        await self.ended.wait()
        if self.settings.head:  # others need not wait until they miss this node
            self._tell(self.head, Goodbye("it was told to end"))
        self.objects.close()
        self.collectives.close()
        if self.workers is not None:
            self.workers.drain()
            self.workers.close()
        await self.endpoint.close()
        return 0

    def _open_store(self) -> None:
        settings, pid = self.settings, os.getpid()
        session_folders.sweep(settings.store_root)
        spill.sweep(settings.state_dir)
        spill.sweep(settings.state_dir, LOGS)
        threading.Thread(target=durable.sweep, args=(settings.live_url,), name="flowengine-sweep", daemon=True).start()
        self.folder = session_folders.session_folder(settings.session, pid, settings.store_root)
        # What is pulled here is given back when it is freed; results of collectives have a pool, as writers have.
        self.segments = Segments(self.folder, pool_bytes_max=0)
        disk_folder = spill.spill_folder(settings.state_dir, settings.session, pid)
        self.transfers = Transfers(self.segments, self._open_stream, self.config)
        self.objects = Objects(self.segments, self.transfers, disk_folder, self.config)
        self.transfers.disk_path = self.objects.disk_path
        self.objects.look_at_memory = self._look_at_memory
        pool_bytes = int(settings.store_limit_bytes * self.config.pool_fraction)
        warm = Segments(self.folder, pool_bytes)
        self.collectives = Collectives(self.segments, warm, self._open_stream, self.config)
        self.collectives.remove_other = self.objects.remove

    def _start_machine(self, loop: asyncio.AbstractEventLoop) -> None:
        settings, me = self.settings, self.endpoint.address
        names = gpus.names_here(dict(settings.total).get("GPU", 0))
        machine = self.machine = Node(NodeSettings(
            me=me, node_id=settings.node_id, host=settings.host, total=settings.total, num_workers=settings.num_workers,
            store_folder=self.folder, store_limit_bytes=settings.store_limit_bytes, session=settings.session,
            head=self.head, gpus=names, former=settings.former), self.config)
        machine.desk.journal.wall_offset_s = process.wall_offset_s()
        drive = self.drive = Drive(machine)
        drive.attach(self.endpoint, loop, me)
        template = WorkerSettings(
            worker_id="", node=me, node_id=settings.node_id, host=settings.host, session=settings.session,
            secret=settings.secret, tls=settings.tls, store_folder=self.folder, state_dir=settings.state_dir,
            live_url=settings.live_url, running_path="", config=self.config, log_to_driver=settings.log_to_driver,
            head=self.head, has_gpus=bool(names))
        workers = self.workers = Workers(template, self._say, drive.step, self._forward)
        self.objects.step = drive.step
        self.collectives.me, self.collectives.step = me, drive.step
        drive.perform.update({
            StartWorker: workers.start,
            StopWorker: workers.stop,
            CheckWorker: workers.check,
            SpillObject: self.objects.spill,
            RestoreObject: self.objects.restore,
            PullObject: self.objects.pull,
            **self.collectives.orders,
        })
        drive.begin("the start", machine.start(time.monotonic()))

    # --- the launcher -----------------------------------------------------------------------------

    def _say(self, word: Any, fds: tuple[int, ...] = ()) -> None:
        try:
            self.channel.say(word, fds)
        except OSError:
            self.ended.set()  # the launcher is gone, and this process is about to be killed with it
            return
        if self.channel.waiting:
            asyncio.get_running_loop().add_writer(self.channel.end, self._channel_writable)

    def _channel_writable(self) -> None:
        with contextlib.suppress(OSError):
            if not self.channel.flush():
                return
        asyncio.get_running_loop().remove_writer(self.channel.end)

    def _launcher_speaks(self) -> None:
        try:
            while (heard := self.channel.hear()) is not None:
                self._told(heard[0])
        except EOFError:
            asyncio.get_running_loop().remove_reader(self.channel.end)
            self.ended.set()
        except msgspec.MsgspecError:
            log.exception("the launcher says what the node cannot read")

    def _told(self, word: HeadListens | WorkerForked | WorkerReaped) -> None:
        if isinstance(word, HeadListens):
            if not self.head_told.done():
                self.head_told.set_result(word.address)
        elif self.workers is None:
            return
        elif isinstance(word, WorkerForked):
            self.workers.forked(word)
        else:
            if word.pid:
                self.segments.reap(word.pid)
            self.workers.reaped(word)

    # --- other processes --------------------------------------------------------------------------

    def _on_batch(self, peer: str, messages: list[Any]) -> None:
        if self.drive is None:
            return  # nobody knows this address before the machine runs
        self.peers[peer] = None
        if any(type(message) in SHELL_KINDS for message in messages):
            messages = [self.objects.looked_at(one) for one in messages
                        if type(one) not in SHELL_KINDS or not self._mine(peer, one)]
        self.drive.batch(peer, messages)

    def _mine(self, peer: str, message: Message) -> bool:
        """See to what the shell itself has to do with a message; True when the machine need not see it."""
        if isinstance(message, Joined):
            if message.role == "driver":
                self.drivers[peer] = message.pid
            return False
        if isinstance(message, LogLines):
            self._pass_on(peer, message)
            return True
        if isinstance(message, Asked):
            return self._answered(peer, message)
        if isinstance(message, ObjectSealed):
            return False
        if isinstance(message, (NodeAccepted, NodeFenced)):
            self._head_found(message)
            return False
        if isinstance(message, MemoryLacked):
            self._look_at_memory()
            return True
        if isinstance(message, KillWorker):
            self._kill_if_running(peer, message, FORCE_LOOKS_MAX)
            return True
        assert isinstance(message, ChaosOrdered)
        return self._harm(peer, message)

    def _head_found(self, word: NodeAccepted | NodeFenced) -> None:
        assert self.machine is not None
        if isinstance(word, NodeAccepted):
            if self.misses_head:
                log.info("the head is there again, and this node has joined")
            self.misses_head = False
        elif word.epoch > self.machine.desk.epoch:
            log.warning("the head had taken this node for dead: its workers end, and it joins anew")

    def _look_at_memory(self) -> None:
        """Tell the machine how much shared memory is free; again as long as that is less than the store may take."""
        if self.drive is None or self.machine is None:
            return
        if self.next_look is not None:
            self.next_look.cancel()
            self.next_look = None
        self.drive.step(MemorySeen(self.segments.free_bytes()))
        if self.machine.store.lacking_bytes:
            loop = asyncio.get_running_loop()
            self.next_look = loop.call_later(self.config.heartbeat_s, self._look_at_memory)

    def _kill_if_running(self, peer: str, order: KillWorker, looks: int) -> None:
        """Tell the machine to kill a worker while it runs the task; one that has ended is nobody's harm any more."""
        if self.drive is None or self.workers is None or self.machine is None:
            return
        lease = self.machine.leases.leases.get(order.lease)
        if lease is None or lease.owner != peer or not looks:
            return
        if not order.task or self.workers.stopped_in(lease.worker.worker_id, order.task):
            self.drive.step(order, peer)
        else:  # it is about to begin, or the next has begun
            asyncio.get_running_loop().call_later(FORCE_LOOK_S, self._kill_if_running, peer, order, looks - 1)

    def _answered(self, peer: str, question: Asked) -> bool:
        """Answer what the machine cannot know."""
        if self.workers is None or question.topic not in SHELL_TOPICS:
            return False
        content: Any = None
        if question.topic == LOGS_TOPIC:
            self.workers.drain()
        elif question.topic == "running":
            content = self._running(self.workers)
        elif question.topic == "threads":
            content = process.stacks()
        elif question.topic == "printed":
            content = self.workers.logs.asked(question.argument)
        elif question.topic == "host":
            content = self._host(self.workers)
        self._tell(peer, Answered(question.request, question.topic, content))
        if question.topic == process.END_TOPIC:
            self._say(EndAll())
        return True

    def _running(self, workers: Workers) -> dict[str, tuple[int, str, int, str]]:
        """What each worker runs: process id, task in hex ("" for none), attempt, name."""
        places = self.machine.desk.workers if self.machine is not None else {}
        found = {}
        for worker_id, (pid, task, attempt, name) in workers.running().items():
            place = places.get(worker_id)
            busy = place is not None and place.lease  # else the note tells what it ran last
            found[worker_id] = (pid, task, attempt, name) if busy else (pid, "", 0, "")
        return found

    def _host(self, workers: Workers) -> dict[str, Any]:
        """What the processes of this node use and run, and this host's clock."""
        if self.host_use is None:
            from flowengine.runtime.host_use import HostUse  # here, since only few are ever asked

            self.host_use = HostUse()
        running = self._running(workers)
        pids = (os.getpid(), *self.drivers.values(), *(pid for pid, *_ in running.values()))
        return {**self.host_use.look(pids), "running": running, "pid": os.getpid(),
                "clock_us": round(time.monotonic() * 1e6)}

    def _harm(self, peer: str, order: ChaosOrdered) -> bool:
        """Do harm on purpose: to a worker, to this node ("node" or its id), to the head, to all links of this node."""
        number = HARMS.get(order.action)
        if order.action == "cut":
            self.endpoint.cut({*self.peers, self.head} - {peer})  # that one has to be able to say "heal"
        elif order.action == "heal":
            self.endpoint.heal()
        elif number is None:
            return False
        elif order.target in ("node", self.settings.node_id):
            os.kill(os.getpid(), number)
        elif order.target == "head":
            self._say(SignalHead(number))
        elif self.workers is not None:
            self.workers.stop(StopWorker(order.target, order.argument or number))
            if order.argument:  # it may go on for long all the same
                last = StopWorker(order.target, signal.SIGKILL)
                asyncio.get_running_loop().call_later(self.config.stop_grace_s, self.workers.stop, last)
        return True

    def _on_lost(self, peer: str, reason: str) -> None:
        if self.drive is None:
            return
        self.peers.pop(peer, None)
        pid = self.drivers.pop(peer, 0)
        if pid and not os.path.exists(f"/proc/{pid}"):
            self.segments.reap(pid)
        # The head keeps its address over its lives, and a node that was cut off comes back under its own.
        self.endpoint.forgive(peer)
        if peer == self.head:
            self._no_head(reason, time.monotonic())
        self.drive.lost(peer, reason)

    def _no_head(self, reason: str, now: float) -> None:
        """Tell it, and again when it has lasted for long, then for twice as long, and so on."""
        if not self.misses_head:
            self.misses_head, self.missed_s, self.tell_s = True, now, now + NO_HEAD_TOLD_S
            log.info("this node has no link to the head: %s. It goes on, and tries to join again", reason)
        elif now >= self.tell_s:
            missed_s = now - self.missed_s
            self.tell_s = now + missed_s
            log.warning("this node has had no link to the head for %.0f s: %s. It goes on trying; end the node if that "
                        "cluster is no more", missed_s, reason)

    async def _on_stream(self, peer: str, hello: dict[str, Any], stream: Any) -> None:
        if LANE_HELLO in hello:
            await self.collectives.lanes.serve(peer, stream)
        else:
            await self.transfers.serve(peer, hello, stream)

    async def _open_stream(self, to: str, hello: dict[str, Any]) -> Any:
        return await self.endpoint.open_stream(to, hello)

    def _forward(self, worker_id: str, lines: LogLines) -> None:
        """Lines of a worker go to whom it works for: a program, or a worker elsewhere that passes them on."""
        if not self.settings.log_to_driver or self.machine is None:
            return
        worker = self.machine.desk.workers.get(worker_id)
        for reader in [worker.root] if worker is not None and worker.root else self.drivers:
            self._tell(reader, lines)

    def _pass_on(self, peer: str, lines: LogLines) -> None:
        worker = self.machine.desk.by_address.get(peer) if self.machine is not None else None
        if worker is not None and worker.lease:  # what is late may have nobody to go to any more
            self._forward(worker.worker_id, lines)

    def _tell(self, to: str, message: Message) -> None:
        self.endpoint.send(to, message, True)


SHELL_KINDS = frozenset(
    (Joined, Asked, ChaosOrdered, KillWorker, LogLines, MemoryLacked, NodeAccepted, NodeFenced, ObjectSealed))


def main(settings: NodeProcessSettings, end: socket.socket) -> int:
    """Be the node process; end: the socket to the launcher."""
    return process.run(NodeShell(settings, end).run())
