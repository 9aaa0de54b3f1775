"""Whatever happens to members and nodes: every step that was given is answered, and all ranks hear the same."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from flowengine.collectives.posts_orders import HEAD_BYTES
from flowengine.core import messages as m

from ..core.ledger_stage import ME, OTHER, THIRD, WHOLE, Stage, header_of

SMALL, LARGE = np.ones(4, "f4"), np.ones(1 << 10, "f4")
STEPS_MAX = 6
NODES = (ME, OTHER, THIRD)
ACTS = 14 * ["give"] + 12 * ["hear"] + 4 * ["work"] + 2 * ["restart"] + ["kill", "lose_node", "sleep"]
pick = st.integers(0, 1000)


class Member:
    """One rank: it gives step after step, and repeats them when it was started again."""

    def __init__(self, rank: int, node: str) -> None:
        self.rank, self.node = rank, node
        self.rank_now = rank  # in a group that has shrunk
        self.life = 0
        self.address = ""  # empty: it is dead
        self.seating: m.Seating | None = None
        self.refused = False
        self.next_step = 0
        self.open: dict[m.Step, None] = {}


class FakeNode:
    """Courses as a whole: a result is whole at once, or in part when it is stopped."""

    def __init__(self) -> None:
        self.courses: dict[bytes, m.Course] = {}
        self.whole: dict[bytes, int] = {}  # result -> bytes
        self.told: dict[bytes, int] = {}  # op -> epoch in which it was done


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()
        self.members: list[Member] = []
        self.nodes = {node: FakeNode() for node in NODES}
        self.queues: dict[str, deque[m.Message]] = {}
        self.outcomes: dict[m.Step, dict[tuple[str, str], list[Member]]] = {}
        self.on_failure = "recover"

    @initialize(on_failure=st.sampled_from(["recover", "shrink", "raise"]), size=st.integers(2, 4))
    def form(self, on_failure: str, size: int) -> None:
        self.on_failure = on_failure
        self.members = [Member(rank, NODES[rank % 3]) for rank in range(size)]
        for member in self.members:
            self.start(member)
        self.settle()

    def start(self, member: Member) -> None:
        member.life += 1
        member.address = f"p{member.rank}.{member.life}"
        member.seating, member.next_step, member.open = None, 0, {}
        self.stage.join(member.rank, len(self.members), node=member.node, address=member.address,
                        on_failure=self.on_failure)
        self.sort()

    # --- what the ledger says goes to its listeners, to each in order -----------------------------

    def sort(self) -> None:
        for to, message in self.stage.said:
            self.queues.setdefault(to, deque()).append(message)
        self.stage.said = []

    def deliver(self, to: str) -> None:
        message = self.queues[to].popleft()
        if to in self.nodes:
            self.node_hears(to, message)
        else:
            for member in self.members:
                if member.address == to:
                    self.member_hears(member, message)
        self.sort()

    def member_hears(self, member: Member, message: m.Message) -> None:
        if isinstance(message, m.GroupFormed):
            member.seating = message.seating
            member.rank_now = message.rank
        elif isinstance(message, m.JoinRefused):
            member.refused = True
        elif isinstance(message, m.StepDone | m.StepFailed):
            if message.step not in member.open:
                return
            del member.open[message.step]  # the rank may be one of before
            outcome = ("", "") if isinstance(message, m.StepDone) else (message.kind, message.reason)
            self.outcomes.setdefault(message.step, {}).setdefault(outcome, []).append(member)

    def node_hears(self, name: str, message: m.Message) -> None:
        node = self.nodes[name]
        if isinstance(message, m.Course):
            if message.fresh:
                for post in message.posts:
                    node.whole.pop(post.result, None)
            node.courses[message.op] = message
        elif isinstance(message, m.FinalsAsked):
            course = node.courses.get(message.op)
            ranges = []
            for post in course.posts if course is not None else ():
                nbytes = node.whole.get(post.result, post.result_bytes // 128 * 64) if post.node == name else 0
                if post.result and nbytes:
                    ranges.append((post.result, ((0, nbytes),)))
            if course is not None:
                node.told[message.op] = message.epoch
            self.stage.tell(m.Finals(message.op, message.epoch, tuple(ranges)), name)
        elif isinstance(message, m.BlobsReady):
            blobs = dict(message.results)
            for rank, address in message.takers:
                blob = blobs.get(rank, blobs.get(WHOLE))
                done = m.StepDone(message.group, message.step, blob or b"", empty=blob is None, rank=rank)
                self.queues.setdefault(address, deque()).append(done)
        elif isinstance(message, m.StepEnded):
            node.courses.pop(message.op, None)

    def finish(self, name: str) -> None:
        """A node makes its results, when all that have a part in the course live and have begun."""
        node = self.nodes[name]
        for course in list(node.courses.values()):
            others = [post.node for post in course.posts]
            if node.told.get(course.op, 0) >= course.epoch or any(
                other not in self.nodes or self.nodes[other].courses.get(course.op) != course for other in others
            ):
                continue
            node.told[course.op] = course.epoch
            for post in course.posts:
                if post.node == name and post.result:
                    node.whole[post.result] = post.result_bytes
                    for rank, address in post.takers:
                        done = m.StepDone(course.group, course.step, b"", post.result,
                                          post.result_bytes + HEAD_BYTES, (name,), rank=rank)
                        if address:
                            self.queues.setdefault(address, deque()).append(done)
            self.stage.tell(m.CourseDone(course.op, course.epoch), name)
            self.sort()

    # --- what may happen --------------------------------------------------------------------------

    def alive(self) -> list[Member]:
        return [member for member in self.members if member.address and member.seating and not member.refused]

    @rule(acts=st.lists(st.tuples(st.sampled_from(ACTS), pick), min_size=5, max_size=40))
    def go_on(self, acts: list[tuple[str, int]]) -> None:
        for act, which in acts:
            getattr(self, act)(which)
            self.sort()

    def give(self, which: int) -> None:
        members = [member for member in self.alive() if member.next_step < STEPS_MAX and len(member.open) < 2]
        if members:
            self.give_next(members[which % len(members)])

    def give_next(self, member: Member) -> None:
        step = (WHOLE, WHOLE, member.next_step)
        member.next_step += 1
        member.open[step] = None
        is_large = step[2] % 3 > 0
        header, blob = header_of(LARGE if is_large else SMALL)
        oid = f"{member.rank}.{step[2]}".encode() if is_large else b""
        given = m.StepGiven(member.seating.group, step, member.rank_now, header, b"" if oid else blob, oid,
                            member.seating.epoch)
        self.stage.tell(given, member.address)

    def hear(self, which: int) -> None:
        waiting = sorted(to for to, queue in self.queues.items() if queue)
        if waiting:
            self.deliver(waiting[which % len(waiting)])

    def work(self, which: int) -> None:
        names = sorted(self.nodes)
        self.finish(names[which % len(names)])

    def kill(self, which: int) -> None:
        if self.alive():
            member = self.alive()[which % len(self.alive())]
            address, member.address = member.address, ""
            self.queues.pop(address, None)
            self.stage.lose(address)

    def restart(self, which: int) -> None:
        dead = [member for member in self.members if not member.address and not member.refused]
        if dead and self.on_failure == "recover":
            member = dead[which % len(dead)]
            member.node = sorted(self.nodes)[which % len(self.nodes)]
            self.start(member)

    def lose_node(self, which: int) -> None:
        names = sorted(node for node in self.nodes if node != ME)
        if not names:
            return
        name = names[which % len(names)]
        del self.nodes[name]
        self.queues.pop(name, None)
        for member in self.members:
            if member.node == name and member.address:
                self.queues.pop(member.address, None)
                member.address = ""
        self.stage.lose_node(name)

    def sleep(self, which: int) -> None:
        self.stage.sleep(which / 500)

    # --- laws -------------------------------------------------------------------------------------

    def settle(self) -> None:
        for _ in range(200):
            for to in list(self.queues):
                while self.queues.get(to):
                    self.deliver(to)
            for name in sorted(self.nodes):
                self.finish(name)
            if not any(self.queues.values()):
                return
        raise AssertionError("they talk for ever")

    def teardown(self) -> None:
        if not self.members:
            return
        for _ in range(10):
            self.settle()
            self.stage.sleep(3.0)
            self.sort()
        self.settle()
        for member in self.members:
            if member.address:
                assert not member.open, (member.address, member.open)
        for step, outcomes in self.outcomes.items():
            # What only those heard who died with their node may be as dead as they: the others cannot know of it.
            known = [outcome for outcome, heard in outcomes.items() if any(self.can_tell(member) for member in heard)]
            assert len(known) <= 1, (step, known)

    def can_tell(self, member: Member) -> bool:
        return bool(member.address) or member.node in self.nodes


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(
    max_examples=40, stateful_step_count=6, deadline=None, suppress_health_check=list(HealthCheck)
)
