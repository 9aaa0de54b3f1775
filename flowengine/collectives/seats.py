"""The Seats machine: the side of a process in all groups in which it has a seat. Pure.

It knows each group's ledger, who sits where as far as it has heard, and the steps that were given and not answered.
When a ledger is gone it has the next one found, takes its seats there by what it knew, and gives the open steps again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ..config import Config
from ..core.collective import (
    WHOLE,
    GroupFormed,
    GroupJoined,
    GroupLeft,
    JoinRefused,
    Seating,
    Step,
    StepDone,
    StepEnded,
    StepFailed,
    StepGiven,
    StepsPassed,
)
from ..core.commands import Command, Send, SetTimer
from ..core.parts import Message
from ..core.talk import PeerLost
from .ledger_headers import dealt_to

ALL_STEPS = 1 << 62  # passed: nothing will be repeated


# --- orders to the shell --------------------------------------------------------------------------


class FindLedger(Command, frozen=True):
    """Ask the head for the node that keeps the ledger of this group, or claim it for ours; answered by LedgerFound."""

    name: str
    dead: str = ""  # the address that we have lost: its entry goes when the node is really dead


class Formed(Command, frozen=True):
    """Who sits where has changed for this seat."""

    seat: int
    formed: GroupFormed


class Tell(Command, frozen=True):
    """What this ticket waits for is there: GroupFormed, JoinRefused, StepDone or StepFailed."""

    ticket: int
    outcome: Any


# --- events of the shell --------------------------------------------------------------------------


class SeatAsked(Message, frozen=True):
    """User code joins a group, or a member that was restored goes on; ticket 0: nobody waits for the answer."""

    seat: int
    ticket: int
    joined: GroupJoined


class StepAsked(Message, frozen=True):
    """User code gives to a step."""

    seat: int
    ticket: int
    given: StepGiven


class StepsDone(Message, frozen=True):
    """The seat will not repeat steps before this number."""

    seat: int
    number: int
    pair: Step | None = None  # nor this one, of two


class SeatLeft(Message, frozen=True):
    """The seat is given up, when what is open is answered; kept: its owner may come again, so nobody is told."""

    seat: int
    kept: bool = False
    at_once: bool = True


class LedgerFound(Message, frozen=True):
    """Where the ledger of a group is; an empty address: reason says why it was not found."""

    name: str
    address: str
    reason: str = ""


class NodeTaken(Message, frozen=True):
    """This host has another node now."""

    node: str


class SeekAgain(Message, frozen=True):
    """Timer: the ledger was not found."""

    name: str


# --- state ----------------------------------------------------------------------------------------


class Open(msgspec.Struct):
    """A step that was given and is not answered."""

    given: StepGiven
    ticket: int


class Seat(msgspec.Struct):
    """One member of a group in this process."""

    number: int
    joined: GroupJoined  # as user code asked for it
    tickets: list[int]  # who waits until the group is formed
    rank: int
    seating: Seating | None
    next_step: int  # of the whole group
    formed: bool = False
    passed: int = 0
    leaving: bool = False  # it is given up when nothing is open
    open: dict[Step, Open] = {}
    former: list[Seating] = []  # those of other members, as they were last; the oldest first

    @property
    def group(self) -> bytes:
        """The formation; empty before it is known."""
        return self.seating.group if self.seating is not None else b""

    def sits(self, seating: Seating) -> None:
        """Who sits where from now on."""
        if self.seating is not None and self.seating.keys != seating.keys:
            self.former.append(self.seating)
        self.seating = seating

    def given_now(self, given: StepGiven) -> StepGiven:
        """The same by the ranks of now."""
        now = self.seating
        if now is None:
            return given
        keys = next((former for former in self.former if given.epoch <= former.epoch), now).keys
        header = given.header
        if keys != now.keys:
            header = dealt_to(header, [key in now.keys for key in keys])
            if 0 <= header.root < len(keys):
                root = now.keys.index(keys[header.root]) if keys[header.root] in now.keys else -1
                header = msgspec.structs.replace(header, root=root)
        return msgspec.structs.replace(given, rank=self.rank, epoch=now.epoch, header=header)


class Ledger(msgspec.Struct):
    """Where the ledger of a name is, as far as it is known here."""

    address: str = ""
    seeking_s: float = -1.0  # since when it is being looked for
    lost: str = ""  # the address before
    farewells: list[Message] = []  # what it has to hear of seats that are given up


class Seats:
    """Decides; never waits, sends or reads a clock."""

    def __init__(self, me: str, node: str, config: Config) -> None:
        self.me = me
        self.node = node
        self.config = config
        self.seats: dict[int, Seat] = {}
        self.refused: dict[int, tuple[str, str]] = {}  # seats that were lost: kind and reason
        self.ledgers: dict[str, Ledger] = {}
        self.out: list[Command] = []
        self.now = 0.0

    def handle(self, event: Any, now: float, sender: str = "") -> list[Command]:
        """The one door."""
        self.out, self.now = [], now
        HANDLERS[type(event)](self, event)
        return self.out

    def describe(self) -> list[str]:
        """What waits, for people."""
        return [
            f"rank {seat.rank} of group {seat.joined.name!r}: step {step} {open_.given.header.op} is open"
            for seat in self.seats.values()
            for step, open_ in seat.open.items()
        ]

    # --- asked by user code -----------------------------------------------------------------------

    def seat_asked(self, event: SeatAsked) -> None:
        """Take a seat, or wait for the one that was asked for."""
        seat = self.seats.get(event.seat)
        if seat is not None:
            if seat.formed:
                self.out.append(Tell(event.ticket, self.formed_now(seat)))
            else:
                seat.tickets.append(event.ticket)
            return
        joined = event.joined
        seat = Seat(event.seat, joined, [event.ticket], joined.rank, joined.seating, joined.next_step)
        self.seats[event.seat] = seat
        ledger = self.ledgers.setdefault(joined.name, Ledger())
        if ledger.address:
            self.introduce(seat, ledger.address)
        else:
            self.seek(joined.name, ledger)

    def formed_now(self, seat: Seat) -> GroupFormed:
        assert seat.seating is not None
        return GroupFormed(seat.joined.name, seat.rank, seat.joined.size, seat.seating, 0)

    def step_asked(self, event: StepAsked) -> None:
        """Give to a step."""
        seat = self.seats.get(event.seat)
        given = event.given
        if seat is None:
            kind, reason = self.refused.get(event.seat, ("usage", "the seat was given up"))
            self.tell(event.ticket, StepFailed(given.group, given.step, kind, reason))
            self.let_go(given)
            return
        seat.open[given.step] = Open(given, event.ticket)
        if given.step[0] == WHOLE:
            seat.next_step = max(seat.next_step, given.step[2] + 1)
        ledger = self.ledgers[seat.joined.name]
        if ledger.address:
            self.out.append(Send(ledger.address, given))

    def steps_done(self, event: StepsDone) -> None:
        """A checkpoint is past these steps, or the task has ended."""
        seat = self.seats.get(event.seat)
        if seat is not None and (event.pair is not None or event.number > seat.passed):
            seat.passed = max(seat.passed, event.number)
            if seat.formed and self.ledgers[seat.joined.name].address:
                self.out.append(Send(self.ledgers[seat.joined.name].address, self.passing(seat, event.pair)))

    def passing(self, seat: Seat, pair: Step | None = None) -> StepsPassed:
        return StepsPassed(seat.group, seat.rank, seat.passed, pair)

    def seat_left(self, event: SeatLeft) -> None:
        """Give the seat up."""
        seat = self.seats.get(event.seat)
        if seat is None:
            self.refused.pop(event.seat, None)
            return
        if seat.open and not event.at_once:
            seat.leaving = True
            return
        del self.seats[event.seat]
        ledger = self.ledgers[seat.joined.name]
        if not event.kept and seat.group:
            seat.passed = ALL_STEPS
            words: tuple[Message, ...] = (self.passing(seat), GroupLeft(seat.group, seat.rank))
            if ledger.address:
                self.out.extend([Send(ledger.address, word) for word in words])
            else:
                ledger.farewells.extend(words)
        self.tell_all(seat, JoinRefused(seat.joined.name, seat.joined.key, "usage", "the seat was given up"))
        self.fail(seat, "usage", "the seat was given up")
        if ledger.address and not any(other.joined.name == seat.joined.name for other in self.seats.values()):
            del self.ledgers[seat.joined.name]

    # --- told by the ledger and the nodes ---------------------------------------------------------

    def group_formed(self, event: GroupFormed) -> None:
        """The group is complete, or who sits where has changed."""
        seat = self.seat_of(event)
        if seat is None:
            return
        if seat.seating is not None and seat.formed:
            if event.seating.group == seat.group and event.seating.epoch < seat.seating.epoch:
                return  # it was overtaken
            if event.seating.group != seat.group:
                self.fail(seat, "lost", f"group {event.name!r} was formed anew, and nobody knows its earlier steps")
        seat.sits(event.seating)
        seat.rank, seat.formed = event.rank, True
        seat.joined = msgspec.structs.replace(seat.joined, size=event.size)
        self.out.append(Formed(seat.number, event))
        self.tell_all(seat, event)

    def seat_of(self, event: GroupFormed) -> Seat | None:
        """Whose news it is, by key: its rank may be any other than it had or asked for."""
        return self.seat_with(event.name, event.seating.keys[event.rank])

    def seat_with(self, name: str, key: bytes) -> Seat | None:
        """The seat in this group that has this key."""
        seats = self.seats.values()
        return next((seat for seat in seats if seat.joined.name == name and seat.joined.key == key), None)

    def join_refused(self, event: JoinRefused) -> None:
        """There is no seat."""
        ledger = self.ledgers.get(event.name)
        if event.kind == "moved":
            if ledger is not None and ledger.address:
                ledger.address = ""
                self.seek(event.name, ledger)
            return
        seat = self.seat_with(event.name, event.key)
        if seat is not None:
            self.refuse(seat, event)

    def refuse(self, seat: Seat, event: JoinRefused) -> None:
        """The seat is lost, and with it all that is given from now on."""
        del self.seats[seat.number]
        self.refused[seat.number] = (event.kind, event.reason)
        self.tell_all(seat, event)
        self.fail(seat, event.kind, event.reason)

    def step_over(self, event: StepDone | StepFailed) -> None:
        """A step has its result."""
        for seat in self.meant(event):
            open_ = seat.open.pop(event.step)
            self.tell(open_.ticket, event)
            if type(event) is StepFailed and event.kind in ("lost", "behind"):
                self.let_go(open_.given)
            if seat.leaving and not seat.open:
                self.seat_left(SeatLeft(seat.number))

    def meant(self, event: StepDone | StepFailed) -> list[Seat]:
        """Whose result it is; a rank may be that of before a member was lost."""
        here = [seat for seat in self.seats.values() if seat.group == event.group and event.step in seat.open]
        if event.rank == WHOLE or len(here) == 1:
            return here
        before = [seat for seat in here if seat.open[event.step].given.rank == event.rank]
        return before or [seat for seat in here if seat.rank == event.rank]

    def tell(self, ticket: int, outcome: Any) -> None:
        """Answer whoever waits, if anybody does."""
        if ticket:
            self.out.append(Tell(ticket, outcome))

    def tell_all(self, seat: Seat, outcome: GroupFormed | JoinRefused) -> None:
        """Answer those who wait for the group."""
        tickets, seat.tickets = seat.tickets, []
        for ticket in tickets:
            self.tell(ticket, outcome)

    def fail(self, seat: Seat, kind: str, reason: str) -> None:
        """Nobody will answer what is open."""
        opened, seat.open = seat.open, {}
        for step, open_ in opened.items():
            self.tell(open_.ticket, StepFailed(seat.group, step, kind, reason, seat.rank))
            if kind != "usage":
                self.let_go(open_.given)

    def let_go(self, given: StepGiven) -> None:
        """No ledger counts what was given: its node does not keep the object for one."""
        if given.oid:
            self.out.append(Send(self.node, StepEnded(b"", (given.oid,))))

    # --- where the ledger is ----------------------------------------------------------------------

    def seek(self, name: str, ledger: Ledger) -> None:
        """Have it found, unless that is under way."""
        if ledger.seeking_s < 0:
            ledger.seeking_s = self.now
            self.out.append(FindLedger(name, ledger.lost))

    def peer_lost(self, event: PeerLost) -> None:
        """If it kept a ledger, another node has it now, or will."""
        for name, ledger in list(self.ledgers.items()):
            if ledger.address != event.peer:
                continue
            ledger.address, ledger.lost = "", event.peer
            if any(seat.joined.name == name for seat in self.seats.values()):
                self.seek(name, ledger)
            else:
                del self.ledgers[name]

    def ledger_found(self, event: LedgerFound) -> None:
        """Take the seats of that group there, and say again what is open."""
        ledger = self.ledgers.get(event.name)
        if ledger is None or ledger.seeking_s < 0:
            return
        seats = [seat for seat in self.seats.values() if seat.joined.name == event.name]
        if not event.address:
            if self.now - ledger.seeking_s < self.config.link_lost_after_s:
                self.out.append(SetTimer(self.config.seek_interval_s, SeekAgain(event.name)))
                return
            ledger.seeking_s = -1.0
            for seat in seats:
                self.refuse(seat, JoinRefused(event.name, seat.joined.key, "lost", event.reason))
            return
        ledger.address, ledger.seeking_s = event.address, -1.0
        for seat in seats:
            self.introduce(seat, event.address)
        self.out.extend([Send(event.address, word) for word in ledger.farewells])
        ledger.farewells = []

    def seek_again(self, event: SeekAgain) -> None:
        """Once more."""
        ledger = self.ledgers.get(event.name)
        if ledger is not None and ledger.seeking_s >= 0:
            self.out.append(FindLedger(event.name, ledger.lost))

    def introduce(self, seat: Seat, address: str) -> None:
        """Say who sits here, and all that was said to a ledger before and may be lost with it."""
        joined = msgspec.structs.replace(
            seat.joined, rank=seat.rank, node=self.node, seating=seat.seating, next_step=seat.next_step
        )
        self.out.append(Send(address, joined))
        if seat.passed:
            self.out.append(Send(address, self.passing(seat)))
        for open_ in seat.open.values():
            open_.given = seat.given_now(open_.given)
            self.out.append(Send(address, open_.given))

    def node_taken(self, event: NodeTaken) -> None:
        """What comes from now on lies in another store."""
        self.node = event.node


HANDLERS: dict[type[Any], Callable[[Seats, Any], None]] = {
    SeatAsked: Seats.seat_asked,
    StepAsked: Seats.step_asked,
    StepsDone: Seats.steps_done,
    SeatLeft: Seats.seat_left,
    GroupFormed: Seats.group_formed,
    JoinRefused: Seats.join_refused,
    StepDone: Seats.step_over,
    StepFailed: Seats.step_over,
    PeerLost: Seats.peer_lost,
    LedgerFound: Seats.ledger_found,
    NodeTaken: Seats.node_taken,
    SeekAgain: Seats.seek_again,
}
