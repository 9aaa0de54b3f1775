"""The laws of the Owner machine hold after every event, in any order of events, and in the end nothing is left."""
from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.ids import child_id, object_id
from flowengine.core.invariants import check
from flowengine.core.owner import Owner

ME, NODES, PEERS = "tcp://d#1", ("tcp://n1#1", "tcp://n2#1"), ("tcp://p1#1", "tcp://p2#1")
SHAPE = (("CPU", 1.0),)
pick = st.integers(0, 1000)


class OwnerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.owner = Owner(ME, NODES[0], "n1", Config(story_lines_max=1))
        self.now = 0.0
        self.children = 0
        self.refs: list[bytes] = []  # one entry for each reference in user code
        self.pushed: list[tuple[str, m.PushTask]] = []  # at workers
        self.leases: dict[tuple[str, int], str] = {}
        self.workers = 0
        self.wanted: dict[str, int] = {}
        self.granted: dict[str, int] = {}
        self.waiting: dict[int, None] = {}
        self.numbers = 0
        self.borrows: list[tuple[str, bytes]] = []
        self.timers: list[m.Message] = []

    def tell(self, event: m.Message, sender: str = "") -> None:
        self.now += 0.001
        for command in self.owner.handle(event, self.now, sender):
            if isinstance(command, c.SetTimer):
                self.timers.append(command.event)
            elif isinstance(command, c.Resolve):
                self.waiting.pop(command.waiter, None)
            elif isinstance(command, c.Send):
                self.sent(command.to, command.message)

    def sent(self, to: str, message: m.Message) -> None:
        if isinstance(message, m.PushTask):
            assert to in self.leases.values()
            self.pushed.append((to, message))
        elif isinstance(message, m.LeaseDemand):
            self.wanted[to] = message.wanted_total
        elif isinstance(message, m.LeaseReturned):
            worker = self.leases.pop((to, message.lease))
            assert all(other != worker for other, _ in self.pushed)

    # --- user code ---

    @rule(deps=st.lists(pick, max_size=3), nested=st.lists(pick, max_size=1), returns=st.sampled_from((1, 1, 2)),
          some=st.booleans())
    def submits(self, deps: list[int], nested: list[int], returns: int, some: bool) -> None:
        known = [ref for ref in self.refs if ref in self.owner.objects]
        inputs = tuple(m.RefTo(known[i % len(known)], ME) for i in deps if known)
        inside = tuple(m.RefTo(known[i % len(known)], ME) for i in nested if known)
        self.children += 1
        task = child_id(b"parent".ljust(16), self.children)
        enough = len(inputs) - 1 if some and len(inputs) > 1 else 0
        spec = m.TaskSpec(task, b"f" * 16, "f", b"", None, inputs, inside, returns, SHAPE, max_retries=1, enough=enough)
        self.tell(s.Submitted(spec, b"code"))
        self.refs += [object_id(task, index) for index in range(returns)]

    @rule(stored=st.booleans())
    def puts(self, stored: bool) -> None:
        self.children += 1
        oid = object_id(child_id(b"parent".ljust(16), self.children), 0)
        self.tell(s.ValuePut(oid, m.Stored(10, (NODES[0],)) if stored else m.Inline(b"v")))
        self.refs.append(oid)

    @precondition(lambda self: self.refs)
    @rule(which=pick)
    def drops(self, which: int) -> None:
        self.tell(s.RefsDropped((self.refs.pop(which % len(self.refs)),)))

    @precondition(lambda self: self.refs)
    @rule(which=st.lists(pick, min_size=1, max_size=3), count=st.integers(1, 3))
    def waits(self, which: list[int], count: int) -> None:
        oids = tuple(dict.fromkeys(self.refs[i % len(self.refs)] for i in which))
        self.numbers += 1
        self.waiting[self.numbers] = None
        self.tell(s.ReadyAsked(self.numbers, oids, min(count, len(oids))))

    @precondition(lambda self: self.waiting)
    @rule()
    def gives_up_waiting(self) -> None:
        number = next(iter(self.waiting))
        del self.waiting[number]
        self.tell(s.WaiterGone(number))

    @precondition(lambda self: self.refs)
    @rule(which=pick)
    def cancels(self, which: int) -> None:
        self.tell(s.CancelAsked(self.refs[which % len(self.refs)], False, True))

    @precondition(lambda self: self.refs)
    @rule(which=pick)
    def withdraws(self, which: int) -> None:
        self.numbers += 1
        self.waiting[self.numbers] = None
        self.tell(s.WithdrawAsked(self.refs[which % len(self.refs)], self.numbers))

    # --- nodes and workers ---

    @rule(node=st.sampled_from(NODES))
    def node_grants(self, node: str) -> None:
        if self.wanted.get(node, 0) <= self.granted.get(node, 0):
            return
        self.granted[node] = self.granted.get(node, 0) + 1
        self.workers += 1
        worker = f"tcp://w{self.workers}#1"
        self.leases[node, self.workers] = worker
        self.tell(m.LeaseGranted(self.workers, SHAPE, (), worker, f"w{self.workers}", node[6:8]), node)

    @rule()
    def node_redirects(self) -> None:
        self.tell(m.LeaseRedirected(SHAPE, (), NODES[1]), NODES[0])

    @precondition(lambda self: self.leases)
    @rule(which=pick, below=st.sampled_from((None, 0.0, 1.0)))
    def node_wants_back(self, which: int, below: float | None) -> None:
        node, lease = list(self.leases)[which % len(self.leases)]
        self.tell(m.LeaseWanted(lease, below=below), node)

    def take(self, which: int) -> tuple[str, m.PushTask]:
        """The oldest push of some worker."""
        workers = list(dict.fromkeys(worker for worker, _ in self.pushed))
        worker = workers[which % len(workers)]
        index = next(i for i, (other, _) in enumerate(self.pushed) if other == worker)
        return self.pushed.pop(index)

    @precondition(lambda self: self.pushed)
    @rule(which=pick, kind=st.sampled_from(("inline", "stored", "error", "function")))
    def worker_ends_task(self, which: int, kind: str) -> None:
        worker, push = self.take(which)
        task, attempt = push.spec.id, push.attempt
        if kind in ("error", "function"):
            self.tell(m.TaskFailed(task, attempt, b"e", "task" if kind == "error" else kind, False, 5), worker)
            return
        made: m.Value = m.Inline(b"v") if kind == "inline" else m.Stored(10, (NODES[which % 2],))
        self.tell(m.TaskDone(task, attempt, (made,) * push.spec.num_returns, 10), worker)

    @precondition(lambda self: self.pushed)
    @rule(which=pick, blocked=st.booleans())
    def worker_gives_back(self, which: int, blocked: bool) -> None:
        worker, first = self.pushed[which % len(self.pushed)]
        mine = [push for other, push in self.pushed if other == worker][1:]
        self.pushed = [pair for pair in self.pushed if pair[0] != worker or pair[1] not in mine]
        self.tell(m.TakenBack(tuple(push.spec.id for push in mine), first.lease, blocked), worker)

    @precondition(lambda self: self.leases)
    @rule(which=pick, link_first=st.booleans())
    def worker_dies(self, which: int, link_first: bool) -> None:
        node, lease = list(self.leases)[which % len(self.leases)]
        worker = self.leases.pop((node, lease))
        running = next((push.spec.id for other, push in self.pushed if other == worker), b"")
        self.pushed = [pair for pair in self.pushed if pair[0] != worker]
        self.borrows = [pair for pair in self.borrows if pair[0] != worker]
        lost = m.LeaseLost(lease, m.Death(f"w{lease}", "h", 1, -9, running))
        events = [(lost, node), (m.PeerLost(worker, "x"), worker)]
        for event, sender in reversed(events) if link_first else events:
            self.tell(event, sender)

    @rule(which=pick, node=st.sampled_from(NODES))
    def copies_are_lost(self, which: int, node: str) -> None:
        stored = [oid for oid, obj in self.owner.objects.items() if type(obj.value) is m.Stored]
        if stored:
            self.tell(m.CopiesLost(stored[which % len(stored)], (node,)), node)

    @rule(which=pick, node=st.sampled_from(NODES), left=st.booleans())
    def copy_is_added(self, which: int, node: str, left: bool) -> None:
        if self.owner.objects:
            oids = list(self.owner.objects)
            self.tell(m.CopyAdded(oids[which % len(oids)], node, left), node)

    @precondition(lambda self: self.timers)
    @rule()
    def timer_fires(self) -> None:
        self.now += 0.3
        self.tell(self.timers.pop(0))

    # --- borrowers ---

    @rule(which=pick, peer=st.sampled_from(PEERS), watch=st.booleans())
    def peer_borrows(self, which: int, peer: str, watch: bool) -> None:
        held = [oid for oid in self.owner.objects if self.owner.objects[oid].local > 0]
        if held and peer not in self.owner.dead:
            oid = held[which % len(held)]
            self.borrows.append((peer, oid))
            self.tell(m.BorrowAdded(oid, peer, 1, True), peer)
            if watch:
                self.tell(m.WatchObject(oid), peer)

    @precondition(lambda self: self.borrows)
    @rule(which=pick)
    def peer_drops(self, which: int) -> None:
        peer, oid = self.borrows.pop(which % len(self.borrows))
        self.tell(m.BorrowDropped(oid, 1), peer)

    @rule(peer=st.sampled_from(PEERS))
    def peer_dies(self, peer: str) -> None:
        self.borrows = [pair for pair in self.borrows if pair[0] != peer]
        self.tell(m.PeerLost(peer, "x"), peer)

    @invariant()
    def laws_hold(self) -> None:
        assert check(self.owner) == []

    def teardown(self) -> None:
        """Everything comes to its end, then nothing is left."""
        while self.waiting:
            self.gives_up_waiting()
        while self.refs:
            self.drops(0)
        while self.borrows:
            self.peer_drops(0)
        for _ in range(10_000):
            if not self.pushed and not any(queue.count for queue in self.owner.queues.values()):
                break
            for node in NODES:
                self.node_grants(node)
            while self.pushed:
                self.worker_ends_task(0, "inline")
                self.laws_hold()
        while self.timers and self.owner.leases:
            self.timer_fires()
        assert not self.owner.tasks
        assert not self.owner.objects
        assert not self.owner.leases
        assert not any(self.owner.borrowed_by.values())


TestOwnerMachine = OwnerMachine.TestCase
TestOwnerMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
