"""The laws of the Node machine hold after every event, in any order of events, and what can be served is served."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.invariants import check
from flowengine.core.node import Node, NodeSettings
from flowengine.scheduling.resources import SEP
from tests.core.shell_kit import due

ME, HEAD, OTHER = "tcp://n1#a", "tcp://head#a", "tcp://n2#a"
SHAPES: tuple[m.Shape, ...] = (
    (("CPU", 1.0),),
    (("CPU", 0.5),),
    (("CPU", 2.0),),
    (("GPU", 1.0),),
    (),
    (("CPU", 1.0), ("GPU", 1.0)),
    (("CPU", 9.0),),
    ((f"lock{SEP}d1", 1.0),),
    (("CPU", 1.0), (f"pair{SEP}d1", 1.0)),
    (("GPU", 0.5),),
)
MADE = (f"lock{SEP}d1", f"pair{SEP}d1")
PLACEMENTS = ((), ("n1",), ("n2", "*"), ("n2",), ("n1", "n2"))
DRIVERS = ("d1", "d2")
LIMIT_BYTES = 100
SIZES = (10, 25, 40, 100, 120, 30, 35, 45)  # of object i
CONFIG = Config(workers_extra_max=3, pull_parallel_max=2, spill_parallel_max=2, spill_limit_bytes=150)
CLUSTER = tuple(
    m.NodeEntry(node_id, address, "h", (("CPU", 2.0), ("GPU", 1.0)), (("CPU", 2.0),))
    for node_id, address in (("n1", ME), ("n2", OTHER))
)

pick = st.integers(0, 1000)


def oid_of(index: int) -> bytes:
    return bytes([index + 1]) * 20


class NodeMachine(RuleBasedStateMachine):
    gpus: tuple[str, ...] = ("0",)

    def __init__(self) -> None:
        super().__init__()
        total = (("CPU", 2.0), ("GPU", float(len(self.gpus))))
        self.node = Node(NodeSettings(ME, "n1", "h", total, 2, "/shm", LIMIT_BYTES, "s", HEAD, self.gpus), CONFIG)
        self.now = 0.0
        self.timers: list[tuple[float, int, m.Message]] = []
        self.order = 0
        self.work: list[c.Command] = []  # that the shell has yet to do
        self.processes: dict[str, str] = {}  # worker id -> address or ""
        self.drivers: dict[str, None] = {}
        self.wanted: dict[tuple[str, int, int], int] = {}
        self.granted: dict[tuple[str, int, int], int] = {}
        self.leases: dict[int, str] = {}
        self.tokens: list[tuple[str, int]] = []  # (process, object) for which room was granted
        self.asked: dict[tuple[str, int], int] = {}
        self.request = 0
        self.files = 0
        self.to_free: list[tuple[str, bytes, int]] = []  # writer has to answer
        self.waiting_for: dict[tuple[str, bytes], None] = {}
        self.does(self.node.start(0.0))

    # --- the shell -----------------------------------------------------------------------------------------------

    def tell(self, event: m.Message, sender: str = "") -> None:
        self.does(self.node.handle(event, self.now, sender))

    def does(self, commands: list[c.Command]) -> None:
        for command in commands:
            if isinstance(command, c.SetTimer):
                self.order += 1
                self.timers.append((self.now + command.delay_s, self.order, command.event))
            elif isinstance(command, c.Send):
                self.heard(command.to, command.message)
            elif isinstance(command, c.StartWorker):
                self.processes[command.worker_id] = ""
                self.work.append(command)
            elif not isinstance(command, c.RemoveObject):
                self.work.append(command)

    def heard(self, to: str, message: m.Message) -> None:
        if isinstance(message, m.LeaseGranted):
            assert message.worker in self.processes.values()
            self.leases[message.lease] = to
            key = (to, SHAPES.index(message.shape), PLACEMENTS.index(message.placement))
            self.granted[key] = self.granted.get(key, 0) + 1
        elif isinstance(message, m.LeaseLost):
            self.leases.pop(message.lease, None)
        elif isinstance(message, m.SpaceGiven):
            index = self.asked.pop((to, message.request))
            if message.granted:
                self.tokens.append((to, index))
            else:
                assert message.kind in ("StoreFull", "OutOfDisk")
        elif isinstance(message, m.ObjectFreed):
            self.to_free += [(to, *freed) for freed in zip(message.oids, message.files, strict=True)]
        elif isinstance(message, m.ObjectHere | m.ObjectMissing):
            self.waiting_for.pop((to, message.oid), None)

    def alive(self) -> list[str]:
        return [*self.drivers, *(address for address in self.processes.values() if address)]

    def gone(self, address: str) -> None:
        self.tokens = [token for token in self.tokens if token[0] != address]
        self.asked = {key: index for key, index in self.asked.items() if key[0] != address}
        self.to_free = [pair for pair in self.to_free if pair[0] != address]
        self.waiting_for = {pair: None for pair in self.waiting_for if pair[0] != address}
        for book in (self.wanted, self.granted):
            for key in [key for key in book if key[0] == address]:
                del book[key]
        self.leases = {lease: owner for lease, owner in self.leases.items() if owner != address}

    def end(self, worker_id: str) -> None:
        address = self.processes.pop(worker_id)
        self.gone(address)
        self.tell(c.WorkerEnded(m.Death(worker_id, "h", 1, -9)))

    def act(self, command: c.Command, luck: int) -> None:
        """One command is carried out, well or badly."""
        well, oid = luck % 3 > 0, getattr(command, "oid", b"")
        if isinstance(command, c.StartWorker):
            if command.worker_id in self.processes:
                if well:
                    address = f"tcp://{command.worker_id}"
                    self.processes[command.worker_id] = address
                    self.tell(m.WorkerStarted(command.worker_id, 7, address), address)
                else:
                    self.end(command.worker_id)
        elif isinstance(command, c.StopWorker):
            if command.worker_id in self.processes:
                self.end(command.worker_id)
        elif isinstance(command, c.CheckWorker):
            self.tell(c.WorkerChecked(command.worker_id, not well, float(luck)))
        elif isinstance(command, c.SpillObject):
            bad = c.SpillFailed(oid, "no", luck % 2 == 0) if luck % 4 else c.ObjectSpilled(oid, 0, busy=True)
            self.tell(c.ObjectSpilled(oid, command.size_bytes // 2) if well else bad)
        elif isinstance(command, c.RestoreObject):
            free_bytes = luck % 100 if luck % 2 else None
            self.tell(c.ObjectRestored(oid) if well else c.RestoreFailed(oid, "no", free_bytes))
        elif isinstance(command, c.PullObject):
            self.tell(c.ObjectPulled(oid, command.nodes[0]) if well else c.PullFailed(oid, command.nodes, "no"))

    @precondition(lambda self: self.work)
    @rule(which=pick, luck=pick)
    def shell_acts(self, which: int, luck: int) -> None:
        self.act(self.work.pop(which % len(self.work)), luck)

    @rule(free_bytes=st.sampled_from((0, 20, 1_000)))
    def others_use_memory(self, free_bytes: int) -> None:
        self.tell(c.MemorySeen(free_bytes))

    @rule(seconds=st.sampled_from((0.05, 0.3, 1.0, 3.0)))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        for at, _, event in due(self.timers, until):
            self.now = max(self.now, at)
            self.tell(event)
        self.now = until

    # --- processes -------------------------------------------------------------------------------------------------

    @rule(driver=st.sampled_from(DRIVERS))
    def driver_joins(self, driver: str) -> None:
        self.drivers[driver] = None
        self.tell(m.Joined(driver, 5, "driver"), driver)

    @precondition(lambda self: self.drivers)
    @rule(which=pick)
    def driver_dies(self, which: int) -> None:
        driver = list(self.drivers)[which % len(self.drivers)]
        del self.drivers[driver]
        self.gone(driver)
        self.tell(m.PeerLost(driver, "it died"))

    @precondition(lambda self: self.processes)
    @rule(which=pick)
    def worker_dies(self, which: int) -> None:
        self.end(list(self.processes)[which % len(self.processes)])

    @precondition(lambda self: self.processes)
    @rule(which=pick, on_purpose=st.booleans())
    def worker_link_ends(self, which: int, on_purpose: bool) -> None:
        address = list(self.processes.values())[which % len(self.processes)]
        if address:
            self.tell(m.Goodbye() if on_purpose else m.PeerLost(address, "closed"), address if on_purpose else "")

    @precondition(lambda self: self.processes)
    @rule(which=pick, blocked=st.booleans())
    def worker_blocks(self, which: int, blocked: bool) -> None:
        worker_id, address = list(self.processes.items())[which % len(self.processes)]
        if address:
            self.tell(m.WorkerBlocked(worker_id, blocked), address)

    @precondition(lambda self: self.processes)
    @rule(which=pick)
    def worker_is_stuck(self, which: int) -> None:
        worker_id, address = list(self.processes.items())[which % len(self.processes)]
        if address:
            self.tell(m.WorkerStuck(worker_id, "task did not stop after its time limit"), address)

    @precondition(lambda self: self.alive())
    @rule(which=pick)
    def somebody_speaks(self, which: int) -> None:
        self.tell(m.Pong(1), self.alive()[which % len(self.alive())])

    # --- leases ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.alive())
    @rule(which=pick, shape=st.integers(0, len(SHAPES) - 1), placement=st.integers(0, len(PLACEMENTS) - 1),
          count=st.integers(0, 4), depth=st.integers(0, 2), priority=st.integers(0, 1))
    def demands(self, which: int, shape: int, placement: int, count: int, depth: int, priority: int) -> None:
        owner = self.alive()[which % len(self.alive())]
        key = (owner, shape, placement)
        self.wanted[key] = self.granted.get(key, 0) + count
        demand = m.LeaseDemand(SHAPES[shape], PLACEMENTS[placement], self.wanted[key], depth, priority)
        self.tell(demand, owner)

    @precondition(lambda self: self.leases)
    @rule(which=pick)
    def returns(self, which: int) -> None:
        lease, owner = list(self.leases.items())[which % len(self.leases)]
        del self.leases[lease]
        self.tell(m.LeaseReturned(lease), owner)

    @precondition(lambda self: self.leases)
    @rule(which=pick)
    def kills_by_lease(self, which: int) -> None:
        lease, owner = list(self.leases.items())[which % len(self.leases)]
        self.tell(m.KillWorker(lease, b"t" * 16, "cancelled by force"), owner)

    # --- store -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.alive())
    @rule(which=pick, index=st.integers(0, len(SIZES) - 1))
    def asks_room(self, which: int, index: int) -> None:
        process = self.alive()[which % len(self.alive())]
        self.request += 1
        self.asked[process, self.request] = index
        self.tell(m.SpaceAsked(self.request, SIZES[index]), process)

    @precondition(lambda self: self.tokens)
    @rule(which=pick, owner=pick, seal=st.booleans())
    def uses_room(self, which: int, owner: int, seal: bool) -> None:
        process, index = self.tokens.pop(which % len(self.tokens))
        self.files += 1
        if seal:
            names = self.alive()
            self.tell(m.ObjectSealed(oid_of(index), SIZES[index], names[owner % len(names)], self.files), process)
        elif owner % 2:
            self.tell(c.SealedInVain(oid_of(index), SIZES[index], self.files), process)
        else:
            self.tell(m.SpaceReturned(SIZES[index]), process)

    @precondition(lambda self: self.alive())
    @rule(which=pick, index=st.integers(0, len(SIZES) - 1), owner=pick)
    def puts(self, which: int, index: int, owner: int) -> None:
        self.asks_room(which, index)
        while self.tokens:
            self.uses_room(0, owner, True)

    @rule(luck=pick)
    def shell_does_all(self, luck: int) -> None:
        for _ in range(len(self.work)):
            self.act(self.work.pop(0), luck)

    @precondition(lambda self: self.alive())
    @rule(which=pick, index=st.integers(0, len(SIZES) - 1), here_only=st.booleans())
    def wants(self, which: int, index: int, here_only: bool) -> None:
        process = self.alive()[which % len(self.alive())]
        self.waiting_for[process, oid_of(index)] = None
        nodes = (ME,) if here_only else (ME, OTHER)
        self.tell(m.ObjectWanted(oid_of(index), SIZES[index], "d1", nodes), process)

    @rule(index=st.integers(0, len(SIZES) - 1), kind=st.integers(0, 3))
    def object_goes(self, index: int, kind: int) -> None:
        oid = oid_of(index)
        events = (m.ObjectFreed((oid,)), m.LoseObject(oid), m.OwnerEnded("d1"), m.ObjectAdopted(oid, "d2"))
        self.tell(events[kind], "d1")

    @precondition(lambda self: self.to_free)
    @rule(which=pick, keep=st.booleans())
    def writer_frees(self, which: int, keep: bool) -> None:
        writer, oid, file = self.to_free.pop(which % len(self.to_free))
        self.tell(m.SegmentKept(oid, 10 if keep else 0, file), writer)

    @precondition(lambda self: self.alive())
    @rule(which=pick, size_bytes=st.integers(0, 20))
    def writer_trims(self, which: int, size_bytes: int) -> None:
        self.tell(m.PoolTrimmed(size_bytes), self.alive()[which % len(self.alive())])

    # --- the cluster -----------------------------------------------------------------------------------------------

    @rule(kind=st.integers(0, 4), both=st.booleans())
    def head_speaks(self, kind: int, both: bool) -> None:
        nodes = CLUSTER if both else CLUSTER[:1]
        if kind == 0:
            self.tell(m.NodeAccepted(max(1, self.node.desk.epoch), nodes), HEAD)
        elif kind == 1:
            self.tell(m.NodesChanged(nodes), HEAD)
        elif kind == 2:
            self.tell(m.PeerLost(HEAD, "it died"))
        elif kind == 3:
            owner, shape, placement = next(iter(self.wanted), ("d1", 0, 0))
            self.tell(m.SlotsFound(owner, SHAPES[shape], PLACEMENTS[placement], OTHER if both else "", "busy"), HEAD)
        elif both:
            self.tell(m.NodeFenced(self.node.desk.epoch + 1), HEAD)

    @rule(which=st.integers(0, len(MADE) - 1), units=st.sampled_from((0, 10_000, 20_000, 40_000)), whole=st.booleans())
    def head_sets_amounts(self, which: int, units: int, whole: bool) -> None:
        self.tell(m.AmountsSet(((MADE[which], units),), self.node.desk.epoch, whole), HEAD)

    @precondition(lambda self: self.alive())
    @rule(which=pick, topic=st.sampled_from(("stats", "nodes", "resources", "story", "stack", "nonsense")))
    def asks(self, which: int, topic: str) -> None:
        self.tell(m.Asked(self.request, topic, "n1.w1"), self.alive()[which % len(self.alive())])

    # --- laws ------------------------------------------------------------------------------------------------------

    @invariant()
    def laws_hold(self) -> None:
        assert check(self.node) == []

    def teardown(self) -> None:
        """Once failures stop and leases are given back, everybody has got an answer."""
        for _ in range(60):
            self.tell(m.AmountsSet(tuple((key, 40_000) for key in MADE), self.node.desk.epoch), HEAD)
            while self.work:
                self.act(self.work.pop(0), 1)
            for writer, oid, file in self.to_free:
                self.tell(m.SegmentKept(oid, 0, file), writer)
            self.to_free = []
            for process, index in self.tokens:
                self.tell(m.SpaceReturned(SIZES[index]), process)
            self.tokens = []
            for lease, owner in list(self.leases.items()):
                self.leases.pop(lease, None)
                self.tell(m.LeaseReturned(lease), owner)
            self.time_passes(0.5)
            for address in self.alive():
                self.tell(m.Pong(0), address)
            self.laws_hold()
        assert not self.asked
        assert not self.waiting_for
        # For these two, another node is proposed instead of this one, or none can serve them.
        for (owner, shape, placement), wanted in self.wanted.items():
            if SHAPES[shape] != (("CPU", 9.0),) and PLACEMENTS[placement] != ("n2",):
                assert self.granted.get((owner, shape, placement), 0) >= wanted, (owner, shape, placement)


NodeMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestNodeMachine = NodeMachine.TestCase
