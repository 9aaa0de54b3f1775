"""The laws of the Head machine hold after every event, over restarts of the head from its journal."""

from __future__ import annotations

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.head import Head, HeadSettings
from flowengine.core.head_jobs import JobDoubted
from flowengine.core.invariants import check
from flowengine.scheduling.resources import SEP, job_of
from tests.core.shell_kit import due, keep_rows

CONFIG = Config()
KEYS = (f"lock{SEP}d1", f"pair{SEP}d1", f"lock{SEP}d2")
SHAPES = ((("CPU", 1.0),), (("CPU", 2.0),), (("GPU", 1.0),), (), *(((key, 1.0),) for key in KEYS),
          (("CPU", 1.0), (KEYS[0], 1.0), (KEYS[1], 0.5)))
PLACEMENTS = ((), ("n1",), ("n2", "*"))
pick = st.integers(0, 1000)


class HeadMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, bytes] = {}
        self.now = 0.0
        self.lives = 0
        self.nodes: dict[str, m.NodeEntry] = {}  # node id -> the life that runs, as the node itself sees it
        self.epochs: dict[str, int] = {}  # the highest that was given out
        self.begin()

    def begin(self) -> None:
        self.timers: list[tuple[float, m.Message]] = []
        self.unanswered: list[m.Message] = []
        self.head = Head(HeadSettings("tcp://head#a", "s", "h", 7), CONFIG, self.rows)
        self.does(self.head.start(self.now))

    def tell(self, event: m.Message, sender: str = "") -> None:
        self.does(self.head.handle(event, self.now, sender))

    def does(self, commands: list[c.Command]) -> None:
        for command in commands:
            if isinstance(command, c.WriteJournal):
                keep_rows(self.rows, command)
                if command.number:
                    self.unanswered.append(c.JournalWritten(command.number))
            elif isinstance(command, c.SetTimer):
                self.timers.append((self.now + command.delay_s, command.event))
            elif isinstance(command, c.Send):
                self.heard(command.to, command.message)

    def heard(self, to: str, message: m.Message) -> None:
        node = next((entry for entry in self.nodes.values() if entry.address == to), None)
        if node is not None and isinstance(message, m.NodeAccepted | m.NodeFenced):
            assert message.epoch >= self.epochs.get(node.node_id, 0)
            self.epochs[node.node_id] = message.epoch
            self.nodes[node.node_id] = msgspec.structs.replace(node, epoch=message.epoch)
            if isinstance(message, m.NodeFenced):
                assert message.epoch > node.epoch
                self.tell(m.NodeJoined(self.nodes[node.node_id]), to)
        elif isinstance(message, m.AmountsSet) and message.order and self.lives % 2:  # else its next life or end
            self.tell(m.AmountsDone(message.order), to)
        elif isinstance(message, m.SlotsFound) and message.node:
            assert message.node != to
            assert message.node in self.head.by_address

    @rule(number=st.integers(1, 4), gpu=st.booleans())
    def node_starts(self, number: int, gpu: bool) -> None:
        self.lives += 1
        total = (("CPU", 2.0), ("GPU", 1.0)) if gpu else (("CPU", 2.0),)
        address = f"tcp://n{number}#{self.lives}"
        self.nodes[f"n{number}"] = m.NodeEntry(f"n{number}", address, "h", total, total)
        self.tell(m.NodeJoined(self.nodes[f"n{number}"]), address)

    @precondition(lambda self: self.nodes)
    @rule(which=pick, free=st.integers(0, 2), again=st.booleans())
    def node_speaks(self, which: int, free: int, again: bool) -> None:
        node_id, entry = list(self.nodes.items())[which % len(self.nodes)]
        available = tuple((name, min(amount, float(free))) for name, amount in entry.total)
        entry = self.nodes[node_id] = msgspec.structs.replace(entry, available=available)
        self.tell(m.NodeJoined(entry) if again else m.NodeReport(entry), entry.address)

    @precondition(lambda self: self.nodes)
    @rule(which=pick, how=st.integers(0, 2))
    def node_goes(self, which: int, how: int) -> None:
        node_id, entry = list(self.nodes.items())[which % len(self.nodes)]
        if how == 0:
            self.tell(m.PeerLost(entry.address, "cut"))  # it may come back
            return
        del self.nodes[node_id]
        if how == 1:
            self.tell(m.Goodbye("stopped"), entry.address)
        else:
            self.tell(m.PeerLost(entry.address, "killed"))

    @precondition(lambda self: self.nodes)
    @rule(which=pick, shape=st.sampled_from(SHAPES), placement=st.sampled_from(PLACEMENTS), count=st.integers(0, 3))
    def seeks(self, which: int, shape: m.Shape, placement: tuple[str, ...], count: int) -> None:
        entry = list(self.nodes.values())[which % len(self.nodes)]
        self.tell(m.SlotsSought("d1", shape, placement, count), entry.address)

    @rule(key=st.sampled_from(KEYS), verb=st.sampled_from(("create", "create", "set", "add", "delete")),
          units=st.sampled_from((0, 5_000, 20_000)), where=st.sampled_from(("any", "n1", "n2", "all", "gpu")),
          change=pick)
    def orders(self, key: str, verb: str, units: int, where: str, change: int) -> None:
        node = where if where in self.head.rows else None
        selector = {"all": [], "gpu": [["GPU", 1.0]]}.get(where)
        arguments = {"create": [units, node, selector, "n1"], "set": [units], "delete": [],
                     "add": [units - 10_000, f"t/{change % 5}"]}
        self.tell(m.Asked(1, f"resource.{verb}", [key, *arguments[verb]]), job_of(key))

    @precondition(lambda self: self.unanswered)
    @rule()
    def journal_writes(self) -> None:
        self.tell(self.unanswered.pop(0))

    @precondition(lambda self: self.head.resources.answered)
    @rule()
    def caller_goes_on(self) -> None:
        self.tell(m.OrderSeen(next(iter(self.head.resources.answered))), "d1")

    @rule(job=st.sampled_from(("d1", "d2")), lives=st.booleans())
    def link_of_a_program_is_lost(self, job: str, lives: bool) -> None:
        self.tell(m.PeerLost(job, "cut"))
        self.tell(JobDoubted(job))
        self.tell(m.Pong(0) if lives else m.PeerLost(job, "killed"), job)

    @precondition(lambda self: self.nodes)
    @rule(which=pick, key=st.sampled_from(KEYS), used=st.sampled_from((0, 10_000)))
    def node_tells_of_what_was_made(self, which: int, key: str, used: int) -> None:
        entry = list(self.nodes.values())[which % len(self.nodes)]
        room = self.head.rooms.nodes.get(entry.node_id)
        total = room.total.get(key, 0) if room is not None else 0
        self.tell(m.NodeReport(entry, ((key, total, total - used),)), entry.address)

    @rule(seconds=st.sampled_from((0.3, 2.0, 9.0, 30.0)))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        for at, event in due(self.timers, until):
            self.now = max(self.now, at)
            self.tell(event)
        self.now = until

    @rule()
    def head_restarts(self) -> None:
        self.begin()

    @invariant()
    def laws_hold(self) -> None:
        assert check(self.head) == []

    @invariant()
    def journal_is_complete(self) -> None:
        again = Head(HeadSettings("tcp://head#a", ""), CONFIG, self.rows)
        assert again.rows == self.head.rows
        assert again.resources.adds == self.head.resources.adds
        assert list(again.resources.made) == sorted(self.head.resources.made)
        assert (again.session, again.port) == ("s", 7)

    def teardown(self) -> None:
        """Nodes that speak are members in the end, and who is silent is not."""
        for _ in range(80):
            for entry in list(self.nodes.values()):
                self.tell(m.NodeReport(self.nodes[entry.node_id]), entry.address)
            self.time_passes(0.5)
            self.laws_hold()
        assert sorted(self.head.members) == sorted(self.nodes)
        assert not self.head.expected


HeadMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHeadMachine = HeadMachine.TestCase
