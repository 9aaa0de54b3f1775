"""A virtual member of a group: a process with its seats, whose loop does one operation after the other.

Mirrors what a Group and its session do: what they wait for with locks and sockets is waited for here in virtual time.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.collectives.plan_ways import given_name
from flowengine.collectives.seats import (
    ALL_STEPS,
    FindLedger,
    Formed,
    LedgerFound,
    SeatAsked,
    SeatLeft,
    Seats,
    StepAsked,
    StepsDone,
    Tell,
)
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.collective import (
    WHOLE,
    ArrayPart,
    GroupFormed,
    GroupJoined,
    JoinRefused,
    Layout,
    Seating,
    Step,
    StepDone,
    StepFailed,
    StepGiven,
)

from .sim_collectives_checks import Outcome, Seat
from .sim_collectives_programs import Arrays, GroupOp, Script, fused, given, width
from .sim_net import Peer

if TYPE_CHECKING:
    from .sim_collectives import GroupWorld
    from .sim_collectives_node import GroupNode

Code = Generator[None, Any, Any]
SEAT = 1  # the number of the only seat of a process
WAKE_S = 0.00005
LIVES_AGAIN_S = 0.1
ADMIT_S = 0.2  # newcomers have come by then
ANSWER_S = 0.3  # the head has not answered by then: it is away


class Saved(msgspec.Struct, frozen=True):
    """A member's checkpoint."""

    at: int = 0  # the operation that comes next
    next_step: int = 0
    pairs: tuple[tuple[tuple[int, int], int], ...] = ()
    rank: int = 0
    size: int = 0
    seating: Seating | None = None


class Refused(Exception):
    """There is no seat for this member."""


class Member(Peer):
    """A process that has a seat."""

    def __init__(self, world: GroupWorld, address: str, node: GroupNode, seat: tuple[int, Script]) -> None:
        super().__init__(address, node.host, forgiving=True)
        self.world = world
        self.node = node
        self.number, self.script = seat
        self.formation = world.formations[self.number]
        self.seats = Seats(address, node.address, world.scenario.config)
        self.saved = world.saved.get(self.script.key, Saved(rank=self.script.rank, size=self.script.size))
        self.rank, self.size = self.saved.rank, self.saved.size
        self.seating = self.saved.seating
        self.next_step = self.saved.next_step
        self.pairs = dict(self.saved.pairs)
        self.at = self.saved.at  # the operation that the loop is at
        self.numbers = itertools.count(1)
        self.outcomes: dict[int, Any] = {}  # by number of what was waited for
        self.awaited = 0
        self.finds: dict[int, FindLedger] = {}
        self.dead_nodes: dict[str, None] = {}
        self.is_done = False
        self.code: Code = self.loop()
        self.stepping = False
        self.later: list[tuple[m.Message, str]] = []

    def start(self) -> None:
        """The process begins."""
        self.world.net.send(self, self.node.address, m.Joined(self.address, 1, "driver"))
        self.resume(0)

    def waits_for(self) -> str:
        """What its loop waits for."""
        op = self.formation.ops[self.at].kind if self.at < len(self.formation.ops) else "the end"
        return f"operation {self.at} ({op}), rank {self.rank} of {self.size}: {'; '.join(self.seats.describe())}"

    # --- the machine ------------------------------------------------------------------------------

    def step(self, event: m.Message, sender: str = "") -> None:
        """One event through the door, and those that it leads to at once."""
        self.later.append((event, sender))
        if self.stepping:
            return
        self.stepping = True
        while self.later:
            self.handle(*self.later.pop(0))
        self.stepping = False

    def handle(self, event: m.Message, sender: str) -> None:
        """One event and its commands."""
        world = self.world
        if world.trace is not None:
            world.tell(self.address, sender, event)
        for command in self.seats.handle(event, world.clock.now, sender):
            self.perform(command)
        world.events += 1

    def perform(self, command: c.Command) -> None:
        """Carry out."""
        if isinstance(command, c.Send):
            self.send(command.to, command.message)
        elif isinstance(command, c.SetTimer):
            self.world.clock.after(command.delay_s, self.run, self.step, command.event)
        elif isinstance(command, FindLedger):
            self.find(command)
        elif isinstance(command, Formed):
            self.formed(command.formed)
        elif isinstance(command, Tell):
            self.answered(command.ticket, command.outcome)
        else:
            raise AssertionError(f"nobody performs {command}")

    def send(self, to: str, message: m.Message) -> None:
        """Into the network."""
        if self.world.trace is not None:
            self.world.tell(self.address, "->" + to, message)
        self.world.net.send(self, to, message)

    def deliver(self, message: m.Message, sender: str) -> None:
        """What the shell sees to itself, else the machine."""
        if isinstance(message, m.Ping):
            self.world.net.send(self, sender, m.Pong(message.number))
        elif isinstance(message, m.Answered):
            self.head_answered(message)
        elif isinstance(message, m.SpaceGiven):
            self.answered(message.request, message)
        elif isinstance(message, (m.ObjectHere, m.ObjectMissing)):
            for number in [number for number, found in self.outcomes.items() if found == message.oid]:
                self.answered(number, message)
        elif isinstance(message, m.NodesChanged):
            self.dead_nodes.update(dict.fromkeys(message.dead))
        elif isinstance(message, m.ObjectFreed):
            for oid, file in zip(message.oids, message.files, strict=True):
                self.node.remove_written(oid, file)
                self.send(sender, m.SegmentKept(oid, 0, file))
        elif isinstance(message, m.PoolTrimmed):
            self.send(sender, m.PoolTrimmed(0))
        elif not isinstance(message, m.Welcome):
            self.step(message, sender)

    def lost(self, peer: str, reason: str) -> None:
        """A peer is gone for good."""
        if peer == self.node.address:
            self.world.end_member(self)  # a worker ends with its node
            return
        self.step(m.PeerLost(peer, reason), peer)

    # --- where the ledger is ----------------------------------------------------------------------

    def find(self, command: FindLedger) -> None:
        """Ask the head."""
        self.ask(command, "name.get", f"collective/{command.name}")

    def ask(self, command: FindLedger, topic: str, argument: Any) -> None:
        """A question to the head, which may be away."""
        number = next(self.numbers)
        self.finds[number] = command
        self.send(self.world.head_address, m.Asked(number, topic, argument))
        self.world.clock.after(ANSWER_S, self.run, self.head_is_away, number)

    def head_is_away(self, number: int) -> None:
        """No answer has come."""
        command = self.finds.pop(number, None)
        if command is not None:
            self.step(LedgerFound(command.name, "", "the head does not answer"))

    def head_answered(self, message: m.Answered) -> None:
        """The entry of a name, or that it was claimed or dropped."""
        command = self.finds.pop(message.request, None)
        if command is None:
            return
        name, mine = f"collective/{command.name}", self.node.address
        if message.topic == "name.get":
            entry = message.content
            if entry is None:
                self.ask(command, "name.claim", [name, [mine]])
            elif entry[0] in self.dead_nodes or (entry[0] == command.dead and self.is_dead(entry[0])):
                self.ask(command, "name.drop", [name, entry[0]])
            elif entry[0] == command.dead:  # it lives, only the link was lost
                self.world.clock.after(LIVES_AGAIN_S, self.run, self.step, LedgerFound(command.name, entry[0]))
            else:
                self.step(LedgerFound(command.name, entry[0]))
        elif message.topic == "name.claim" and message.content:
            self.step(LedgerFound(command.name, mine))
        else:
            self.find(command)

    def is_dead(self, address: str) -> bool:
        """Whether a node that our link has lost is really dead, as far as its host can tell."""
        node = self.world.nodes.get(address)
        return node is None or not node.alive

    # --- waiting ----------------------------------------------------------------------------------

    def answered(self, number: int, outcome: Any) -> None:
        """What a number stands for is there."""
        self.outcomes[number] = outcome
        if self.awaited == number:
            self.world.clock.after(WAKE_S, self.run, self.resume, number)

    def resume(self, number: int) -> None:
        """The loop goes on, if it still waits for this."""
        if self.is_done or number != self.awaited:
            return
        self.awaited = 0
        try:
            self.code.send(None)
        except StopIteration:
            return

    def wait(self, number: int) -> Generator[None, Any, Any]:
        """Until the number has an outcome."""
        if number not in self.outcomes:
            self.awaited = number
            yield
        return self.outcomes.pop(number)

    def pause(self, seconds: float) -> Code:
        """Compute."""
        number = self.awaited = next(self.numbers)
        self.world.clock.after(seconds, self.run, self.resume, number)
        yield

    # --- the loop ---------------------------------------------------------------------------------

    def loop(self) -> Code:
        """Join, do all operations, leave."""
        book, script = self.world.book, self.script
        try:
            yield from self.join()
            pending: list[tuple[GroupOp, int, StepGiven]] = []
            while self.at < len(self.formation.ops):
                op = self.formation.ops[self.at]
                if not pending:
                    self.checkpoint()
                if op.kind == "admit":
                    yield from self.pause(ADMIT_S)
                if self.rank == op.late:
                    yield from self.pause(op.late_s)
                if op.source < 0 or self.rank in (op.source, op.target):
                    pending.append((yield from self.give(op)))
                self.at += 1
                if op.is_waited or self.at == len(self.formation.ops):
                    for done in pending:
                        yield from self.take(*done)
                    pending.clear()
            book.ended[script.key] = "done"
        except Refused as refused:
            book.ended[script.key] = str(refused)
        self.step(StepsDone(SEAT, ALL_STEPS))
        self.step(SeatLeft(SEAT))
        self.is_done = True

    def join(self) -> Code:
        """Take the seat."""
        script, formation, ticket = self.script, self.formation, next(self.numbers)
        joined = GroupJoined(
            formation.name, self.size, self.rank, script.key, self.node.address, self.host, 1, formation.timeout_s,
            formation.on_failure, script.restored_s >= 0, self.seating, self.next_step,
            self.world.lives[f"m{script.key.hex()}"], *self.world.orders.get(script.key, ()),
        )  # fmt: skip
        self.step(SeatAsked(SEAT, ticket, joined))
        formed = yield from self.wait(ticket)
        if isinstance(formed, JoinRefused):
            self.world.book.refused.append((self.number, script.key, formed.kind, formed.reason))
            raise Refused(f"{formed.kind}: {formed.reason}")
        if formed.first_step > self.next_step:
            self.next_step = formed.first_step
            self.at = self.place_of(formed.first_step)

    def place_of(self, number: int) -> int:
        """Which operation is this step of the whole group."""
        whole = [op.number for op in self.formation.ops if op.source < 0]
        return whole[number] if number < len(whole) else len(self.formation.ops)

    def formed(self, event: GroupFormed) -> None:
        """Who sits where has changed."""
        self.rank, self.size, self.seating = event.rank, event.size, event.seating
        self.world.orders[self.script.key] = (event.seating.order, event.seating.starts)  # a choice that is recorded
        self.world.book.formed(self.number, Seat(self.script.key, event.rank, event.size, event.seating))

    def checkpoint(self) -> None:
        """What comes before will not be repeated."""
        every = self.script.checkpoint_every
        if not every or self.at % every or self.script.restored_s < 0:
            return
        pairs = tuple(self.pairs.items())
        self.world.saved[self.script.key] = Saved(
            self.at, self.next_step, pairs, self.rank, self.size, self.seating
        )
        self.step(StepsDone(SEAT, self.next_step))

    def give(self, op: GroupOp) -> Generator[None, Any, tuple[GroupOp, int, StepGiven]]:
        """Give to an operation; a larger gift is an object in the store of this host."""
        assert self.seating is not None
        header, blob = fused(op, given(self.script.key, op, self.rank, self.seating.size_at(self.next_step, self.size)))
        step: Step
        if op.source >= 0:
            number = self.pairs.get((op.source, op.target), 0)
            self.pairs[op.source, op.target] = number + 1
            step = op.source, op.target, number
        else:
            step = WHOLE, WHOLE, self.next_step
            self.next_step += 1
        group, oid = self.seating.group, b""
        if len(blob) > self.world.scenario.config.collective_inline_bytes_max:
            oid = given_name(group, self.script.key, self.address, step)
            yield from self.store(oid, blob)
            blob = b""
        gift = StepGiven(group, step, self.rank, header, blob, oid, self.seating.epoch)
        ticket = next(self.numbers)
        self.world.tasks_submitted += 1
        self.step(StepAsked(SEAT, ticket, gift))
        return op, ticket, gift

    def store(self, oid: bytes, blob: bytes) -> Code:
        """Write an object that outlives this process."""
        node, number = self.node, next(self.numbers)
        self.send(node.address, m.SpaceAsked(number, len(blob)))
        space = yield from self.wait(number)
        if space.granted:
            file = node.write(oid, blob, self.address)
            self.send(node.address, m.ObjectSealed(oid, len(blob), node.address, file))

    def take(self, op: GroupOp, ticket: int, gift: StepGiven) -> Code:
        """What has come of it."""
        done: StepDone | StepFailed = yield from self.wait(ticket)
        outcome = Outcome()
        if isinstance(done, StepFailed):
            outcome = Outcome(kind=done.kind, reason=done.reason)
        elif op.kind not in ("barrier", "admit") and not done.empty:
            blob: bytes | None = done.blob
            if done.oid:
                blob = yield from self.fetch(done)
            outcome = Outcome(kind="lost", reason="it cannot be read")
            if blob is not None:
                outcome = Outcome(arrays_in(blob, done.layout or (Layout(0, gift.header),)))
        self.world.book.saw(self.number, op, self.script.key, outcome)

    def fetch(self, done: StepDone) -> Generator[None, Any, bytes | None]:
        """Read an object, from another host if need be."""
        blob = self.node.read(done.oid)
        if blob is None:
            number = next(self.numbers)
            self.outcomes[number] = done.oid
            nodes = tuple(node for node in done.nodes if node != self.node.address)
            self.send(self.node.address, m.ObjectWanted(done.oid, done.nbytes, done.nodes[0], nodes))
            self.awaited = number
            yield
            self.outcomes.pop(number)
            blob = self.node.read(done.oid)
        return blob


def arrays_in(blob: bytes, layout: tuple[Layout, ...]) -> Arrays:
    """The arrays of a result."""
    return tuple(array_in(blob, one.offset, part) for one in layout for part in one.header.parts)


def array_in(blob: bytes, offset: int, part: ArrayPart) -> tuple[str, tuple[int, ...], bytes]:
    """One array of a result."""
    count = 1
    for length in part.shape:
        count *= length
    begin = offset + part.offset
    return part.dtype, part.shape, blob[begin : begin + count * width(part.dtype)]


