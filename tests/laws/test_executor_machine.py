"""The laws of the Executor machine hold after every event; every push is answered once, or its owner is gone."""
from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.executor import Executor, TaskBlocked, TaskEnded
from flowengine.core.invariants import check
from flowengine.recovery.stash import Stash

OWNERS = ("tcp://a#1", "tcp://b#1")
pick = st.integers(0, 1000)


class ExecutorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.executor = Executor("tcp://w#1", "tcp://n#1", "w1", Stash())
        self.now = 0.0
        self.tasks = 0
        self.open: dict[tuple[bytes, int], str] = {}  # pushes that are not answered
        self.running: c.RunTask | None = None
        self.blocked = False
        self.gone: dict[str, None] = {}

    def tell(self, event: m.Message, sender: str = "") -> None:
        self.now += 0.0005
        for command in self.executor.handle(event, self.now, sender):
            if isinstance(command, c.RunTask):
                assert self.running is None
                self.running = command
            elif isinstance(command, c.Send) and command.to in OWNERS:
                self.answered(command.to, command.message)

    def answered(self, owner: str, message: m.Message) -> None:
        assert owner not in self.gone
        if isinstance(message, m.TakenBack):
            for task in message.tasks:
                assert self.open.pop((task, 1)) == owner
        elif isinstance(message, m.TaskDone | m.TaskFailed):
            assert self.open.pop((message.task, message.attempt)) == owner

    @rule(owner=st.sampled_from(OWNERS), known=st.integers(0, 9))
    def pushes(self, owner: str, known: int) -> None:
        if owner in self.gone:
            return
        self.tasks += 1
        function = b"known" if known else b"other"
        if function not in self.executor.functions and known:
            self.tell(m.PutFunction(function, b"code"), owner)
        task = self.tasks.to_bytes(16, "big")
        self.open[task, 1] = owner
        lease = 1 + OWNERS.index(owner)
        self.tell(m.PushTask(m.TaskSpec(task, function, "f"), 1, lease), owner)

    @precondition(lambda self: self.running is not None)
    @rule(well=st.booleans())
    def ends(self, well: bool) -> None:
        if self.blocked:
            self.goes_on()
        push = self.running.push
        self.running = None
        task = push.spec.id
        done = m.TaskDone(task, push.attempt, (m.Inline(b"v"),), 10)
        failed = m.TaskFailed(task, push.attempt, b"e", "task", False, 10)
        self.tell(TaskEnded(task, push.attempt, done if well else failed))

    @precondition(lambda self: self.running is not None and not self.blocked)
    @rule()
    def blocks(self) -> None:
        self.blocked = True
        self.tell(TaskBlocked(True))
        assert not self.executor.queue

    @precondition(lambda self: self.running is not None and self.blocked)
    @rule()
    def goes_on(self) -> None:
        self.blocked = False
        self.tell(TaskBlocked(False))

    @rule(owner=st.sampled_from(OWNERS), which=st.lists(pick, max_size=3))
    def owner_takes_back(self, owner: str, which: list[int]) -> None:
        mine = [task for (task, _), other in self.open.items() if other == owner]
        if owner not in self.gone and mine:
            wanted = tuple(dict.fromkeys(mine[i % len(mine)] for i in which))
            self.tell(m.TakeBack(wanted, 1 + OWNERS.index(owner)), owner)

    @rule(owner=st.sampled_from(OWNERS), which=pick)
    def owner_cancels(self, owner: str, which: int) -> None:
        mine = [task for (task, _), other in self.open.items() if other == owner]
        if owner not in self.gone and mine:
            self.tell(m.CancelTask(mine[which % len(mine)], 1, True), owner)

    @precondition(lambda self: len(self.gone) == 0)
    @rule(owner=st.sampled_from(OWNERS))
    def owner_dies(self, owner: str) -> None:
        self.gone[owner] = None
        self.open = {key: other for key, other in self.open.items() if other != owner}
        self.tell(m.PeerLost(owner, "x"), owner)

    @invariant()
    def laws_hold(self) -> None:
        assert check(self.executor) == []
        assert (self.running is None) == (self.executor.running is None)

    def teardown(self) -> None:
        """What is queued runs, then every push has been answered."""
        while self.running is not None:
            self.ends(True)
        assert not self.open
        assert not self.executor.queue


TestExecutorMachine = ExecutorMachine.TestCase
TestExecutorMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
