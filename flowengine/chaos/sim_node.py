"""Virtual hosts: the Node machine with a virtual store and virtual worker processes, and the Head with its journal."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.head import Head, HeadSettings
from flowengine.core.node import Node, NodeSettings

from .sim_net import Peer

if TYPE_CHECKING:
    from .sim_world import World

FORK_S = 0.01
REAP_S = 0.002
DISK_S = 0.005
SIGTERM = 15
COPY = -1


class Server(Peer):
    """A process that is one machine behind a door."""

    world: World
    machine: Any

    def start(self) -> None:
        """Begin to serve."""
        self.execute(self.machine.start(self.world.clock.now))

    def step(self, event: m.Message, sender: str = "") -> None:
        """One event through the door."""
        world = self.world
        if world.trace is not None:
            world.tell(self.address, sender, event)
        self.execute(self.machine.handle(event, world.clock.now, sender))
        world.check(self.machine, self.address, event)

    def execute(self, commands: list[c.Command]) -> None:
        """Carry out."""
        raise NotImplementedError


class SimNode(Server):
    """A node process and its host's store."""

    machine: Node

    def __init__(self, world: World, address: str, node_id: str) -> None:
        super().__init__(address, f"host-{node_id}", forgiving=True)
        self.world = world
        self.node_id = node_id
        scenario = world.scenario
        settings = NodeSettings(
            address, node_id, self.host, (("CPU", float(scenario.workers)),), scenario.workers, "/shm",
            scenario.store_limit_bytes, "session", world.head_address,
        )
        self.machine = Node(settings, scenario.config)
        self.memory: dict[bytes, bytes] = {}  # what can be read
        self.writers: dict[bytes, str] = {}
        self.files: dict[bytes, int] = {}  # which life of the object lies there; 0: made by this node, COPY: brought
        self.file_number = 0
        self.disk: dict[bytes, bytes] = {}
        self.stepping = False
        self.perform: dict[type, Any] = {
            c.Send: self.do_send,
            c.SetTimer: self.do_timer,
            c.StartWorker: self.do_start_worker,
            c.StopWorker: self.do_stop_worker,
            c.CheckWorker: self.do_check_worker,
            c.SpillObject: self.do_spill,
            c.RestoreObject: self.do_restore,
            c.PullObject: self.do_pull,
            c.RemoveObject: self.do_remove,
        }

    def step(self, event: m.Message, sender: str = "") -> None:
        """One event through the door; what the books have in memory then lies there."""
        super().step(event, sender)
        oid = getattr(event, "oid", b"")
        if oid in self.machine.store.memory and oid not in self.memory:
            raise AssertionError(f"{self.address}: {oid.hex()} is gone after {type(event).__name__}")

    def execute(self, commands: list[c.Command]) -> None:
        """Carry out."""
        for command in commands:
            self.perform[type(command)](command)

    def deliver(self, message: m.Message, sender: str) -> None:
        """All is for the machine, once the shell has looked."""
        if isinstance(message, m.ObjectSealed) and not self.holds(message.oid, message.file):
            message = c.SealedInVain(message.oid, message.size_bytes, message.file)
        self.step(message, sender)

    def lost(self, peer: str, reason: str) -> None:
        """A peer is gone for good."""
        self.step(m.PeerLost(peer, reason), peer)

    def do_send(self, command: c.Send) -> None:
        """Into the network."""
        if self.world.trace is not None:
            self.world.tell(self.address, "->" + command.to, command.message)
        self.world.net.send(self, command.to, command.message)

    def do_timer(self, command: c.SetTimer) -> None:
        """Hand the event back later."""
        self.world.clock.after(command.delay_s, self.run, self.step, command.event)

    def later(self, delay_s: float, event: m.Message) -> None:
        """The shell reports."""
        self.world.clock.after(delay_s, self.run, self.step, event)

    # --- workers ----------------------------------------------------------------------------------

    def do_start_worker(self, command: c.StartWorker) -> None:
        """Fork."""
        delay_s = FORK_S * (0.5 + self.world.dice.random())
        self.world.clock.after(delay_s, self.run, self.world.start_worker, self, command.worker_id)

    def do_stop_worker(self, command: c.StopWorker) -> None:
        """Signal."""
        worker = self.world.worker_of(self, command.worker_id)
        if worker is not None and (command.signal != SIGTERM or not worker.frozen):
            self.world.end_worker(worker, "signal")

    def do_check_worker(self, command: c.CheckWorker) -> None:
        """Look at the process."""
        worker = self.world.worker_of(self, command.worker_id)
        if worker is not None:
            self.later(REAP_S, c.WorkerChecked(command.worker_id, worker.frozen, self.world.clock.now))

    # --- the store --------------------------------------------------------------------------------

    def read(self, oid: bytes) -> bytes | None:
        """As a process of this host maps it."""
        return self.memory.get(oid) if self.alive else None

    def write(self, oid: bytes, blob: bytes, writer: str) -> int:
        """A process of this host seals a segment; its number."""
        self.memory[oid] = blob
        self.writers[oid] = writer
        self.file_number += 1
        self.files[oid] = 0 if writer == self.address else self.file_number
        return self.files[oid]

    def write_copy(self, oid: bytes, blob: bytes) -> None:
        """What this node brings gives way to what was sealed under the name meanwhile."""
        if oid not in self.memory:
            self.write(oid, blob, self.address)
            self.files[oid] = COPY

    def holds(self, oid: bytes, file: int) -> bool:
        """Whether that file is the object now."""
        return oid in self.memory and self.files[oid] == file

    def remove_written(self, oid: bytes, file: int) -> None:
        """A segment is taken away; another one that has its name now stays."""
        if self.holds(oid, file):
            del self.memory[oid]

    def do_spill(self, command: c.SpillObject) -> None:
        """To disk."""
        self.world.clock.after(DISK_S, self.run, self.spilled, command)

    def spilled(self, command: c.SpillObject) -> None:
        """It is on disk, or the disk had an error."""
        oid = command.oid
        found = self.memory.get(oid)
        if found is None or (command.file and not self.holds(oid, command.file)) or self.world.dice.random() < 0.05:
            busy = found is not None and self.world.dice.random() < 0.5
            self.step(c.ObjectSpilled(oid, 0, busy=True) if busy else c.SpillFailed(oid, "no", False))
            return
        self.disk[oid] = found
        del self.memory[oid]
        self.step(c.ObjectSpilled(oid, command.size_bytes // 2))

    def do_restore(self, command: c.RestoreObject) -> None:
        """From disk."""
        self.world.clock.after(DISK_S, self.run, self.restored, command)

    def restored(self, command: c.RestoreObject) -> None:
        """It is in memory again."""
        blob = self.disk.get(command.oid)
        if blob is None:
            self.step(c.RestoreFailed(command.oid, "no file"))
            return
        self.write_copy(command.oid, blob)
        self.step(c.ObjectRestored(command.oid))

    def do_pull(self, command: c.PullObject) -> None:
        """From another host."""
        delay_s = self.world.net.delay_s() * 3
        self.world.clock.after(delay_s, self.run, self.pulled, command, list(command.nodes))

    def pulled(self, command: c.PullObject, sources: list[str]) -> None:
        """The bytes have come, or the source does not have them and the next is tried."""
        world = self.world
        silent: list[str] = []
        for address in sources:
            source = world.nodes.get(address)
            if source is None or not source.alive or source.frozen or world.is_cut(self.host, source.host):
                silent.append(address)
                continue
            blob = source.read(command.oid) or source.disk.get(command.oid)
            if blob is not None:
                self.write_copy(command.oid, blob)
                self.step(c.ObjectPulled(command.oid, source.address))
                return
        failed = c.PullFailed(command.oid, command.nodes, "none gave it", tuple(silent))
        if silent:
            self.later(world.scenario.config.transfer_timeout_s / 10, failed)
        else:
            self.step(failed)

    def do_remove(self, command: c.RemoveObject) -> None:
        """Drop a segment or a file."""
        if command.on_disk:
            self.disk.pop(command.oid, None)
        else:
            self.remove_written(command.oid, command.file or (0 if command.writer else COPY))


class SimHead(Server):
    """The head process; its journal is the world's."""

    machine: Head

    def __init__(self, world: World) -> None:
        super().__init__(world.head_address, "host-head", forgiving=True)
        self.world = world
        self.unwritten: deque[c.WriteJournal] = deque()
        settings = HeadSettings(world.head_address, "session", "", 1)
        self.machine = Head(settings, world.scenario.config, world.rows)

    def execute(self, commands: list[c.Command]) -> None:
        """Carry out: rows are written before what is sent after them."""
        for command in commands:
            if isinstance(command, c.Send):
                if self.world.trace is not None:
                    self.world.tell(self.address, "->" + command.to, command.message)
                self.world.net.send(self, command.to, command.message)
            elif isinstance(command, c.SetTimer):
                self.world.clock.after(command.delay_s, self.run, self.step, command.event)
            elif isinstance(command, c.WriteJournal):
                self.unwritten.append(command)
                if command.number:  # somebody waits for it, so what happens before it is written matters
                    self.world.clock.after(DISK_S, self.run, self.written, command.number)
                else:
                    self.write()

    def write(self, number: int = 0) -> None:
        """Rows come on disk in their order, up to those of a number."""
        while self.unwritten:
            command = self.unwritten.popleft()
            for key, row in command.rows:
                if row is None:
                    self.world.rows.pop(key, None)
                else:
                    self.world.rows[key] = row
            if number and command.number == number:
                return

    def written(self, number: int) -> None:
        """The rows of this number are on disk."""
        if any(command.number == number for command in self.unwritten):
            self.write(number)
        self.step(c.JournalWritten(number))

    def deliver(self, message: m.Message, sender: str) -> None:
        """All is for the machine."""
        self.step(message, sender)

    def lost(self, peer: str, reason: str) -> None:
        """A peer is gone for good."""
        self.step(m.PeerLost(peer, reason, self.world.net.has_ended(peer)), peer)
