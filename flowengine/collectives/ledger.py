"""The ledgers of a node: the groups whose members have found this node as the one that keeps theirs."""

from __future__ import annotations

from math import inf

from flowengine.core.collective import (
    CourseBroken,
    CourseDone,
    Finals,
    GroupJoined,
    GroupLeft,
    Held,
    StepFailed,
    StepGiven,
    StepsPassed,
)
from flowengine.core.commands import BlobsCombined
from flowengine.core.dispatch import Part, on
from flowengine.core.node_desk import Desk

from .ledger_seats import SeatKeeper
from .ledger_state import FAILED, FOLDING, OPEN, SETTLED, Ledger, LedgerDue
from .ledger_steps import StepKeeper
from .ledger_texts import seats_wait_text, wait_text


class Ledgers(Part):
    """A part of the node machine."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.steps = StepKeeper(desk)
        self.seats = SeatKeeper(desk, self.steps)

    @on(GroupJoined)
    def _joined(self, event: GroupJoined, now: float, sender: str) -> None:
        self.seats.joined(event, now, sender)

    @on(GroupLeft)
    def _left(self, event: GroupLeft, now: float, sender: str) -> None:
        self.seats.left(event.group, event.rank, now, sender)

    @on(Held)
    def _held(self, event: Held, now: float, sender: str) -> None:
        self.seats.held(event, now, sender)

    @on(StepGiven)
    def _given(self, event: StepGiven, now: float, sender: str) -> None:
        ledger = self.seats.by_group.get(event.group)
        if ledger is not None and ledger.formed:
            self.steps.given(ledger, event, now, sender)
        else:
            why = "the group is over" if event.group in self.seats.past else "the ledger of the group was lost"
            self.desk.out.send(sender, StepFailed(event.group, event.step, "lost", why, event.rank))

    @on(StepsPassed)
    def _passed(self, event: StepsPassed, now: float, sender: str) -> None:
        ledger = self.seats.by_group.get(event.group)
        if ledger is None:
            return
        for seat in ledger.here():
            if seat.address == sender and seat.rank == event.rank:
                seat.passed = max(seat.passed, event.number)
                book = ledger.books.get(event.pair) if event.pair is not None else None
                if book is not None and not seat.joined.restorable:
                    book.is_read = True
                self.steps.forget(ledger)

    @on(BlobsCombined)
    def _combined(self, event: BlobsCombined, now: float, sender: str) -> None:
        self.steps.combined(event, now)

    @on(CourseDone)
    def _course_done(self, event: CourseDone, now: float, sender: str) -> None:
        ledger, book = self.steps.by_op.get(event.op, (None, None))
        if ledger is not None and book is not None:
            self.steps.courses.done(ledger, book, event, now, sender)

    @on(CourseBroken)
    def _course_broken(self, event: CourseBroken, now: float, sender: str) -> None:
        ledger, book = self.steps.by_op.get(event.op, (None, None))
        if ledger is not None and book is not None:
            self.steps.courses.broken(ledger, book, event, now, sender)

    @on(Finals)
    def _finals(self, event: Finals, now: float, sender: str) -> None:
        ledger, book = self.steps.by_op.get(event.op, (None, None))
        if ledger is not None and book is not None:
            self.steps.courses.told(ledger, book, event, now, sender)

    @on(LedgerDue)
    def _due(self, event: LedgerDue, now: float, sender: str) -> None:
        ledger = self.seats.by_group.get(event.group)
        if ledger is not None:  # timers may come a little early: then another is set
            ledger.timer_s = inf
            self.seats.due(ledger, now)
        self.seats.next_lives(now)

    # --- called by the node -----------------------------------------------------------------------

    def peer_lost(self, address: str, now: float, reason: str = "") -> None:
        """A process is gone for good."""
        self.seats.lost(address, reason, now)

    def nodes_lost(self, dead: tuple[str, ...], now: float) -> None:
        """Nodes are gone for good."""
        for node in dead:
            self.seats.node_lost(node, now)

    def name_claimed(self, number: int, is_ours: bool, now: float) -> None:
        """The head answers whose a name is."""
        self.seats.claimed(number, is_ours, now)

    def head_found(self) -> None:
        """There is a head, perhaps another one than before."""
        self.seats.names.claim_again()

    def beat(self, now: float) -> None:
        """Time passes."""
        self.seats.names.drop_unused(now)

    def waits(self, name: str) -> list[str]:
        """What is open in the groups of a name and for what it waits, for people."""
        ledgers = self.seats.by_name.get(name, ())
        gather = [seats_wait_text(ledger) for ledger in ledgers if not ledger.formed]
        return [*gather, *(wait_text(ledger, book) for ledger in ledgers for book in ledger.open.values())]


def check(ledger: Ledger) -> list[str]:
    """What must always hold of a ledger and does not."""
    found = []
    addresses = [(seat.address, seat.joined.key, seat.asked) for seat in ledger.here()]
    if len(dict.fromkeys(addresses)) != len(addresses):
        found.append("a member has two seats")
    if ledger.formed:
        ranks = list(range(ledger.size))
        if [seat.rank for seat in ledger.roster.seats] != ranks or sorted(ledger.roster.order) != ranks:
            found.append("ranks have gaps")
    for step, book in ledger.books.items():
        known = range(len(book.roster.seats))
        if (step in ledger.open) != (book.state not in SETTLED):
            found.append(f"{step}: {book.state}, but open is {step in ledger.open}")
        if any(rank not in known for rank in (*book.gifts, *book.again)):
            found.append(f"{step}: somebody gave who has no seat in it")
        objects = [gift.oid for gift in book.gifts.values() if gift.oid]
        if len(dict.fromkeys(objects)) != len(objects):
            found.append(f"{step}: counts a gift twice")
        if book.state == FAILED and not (book.kind and book.reason):
            found.append(f"{step}: failed without a reason")
        if book.state == OPEN and not ledger.asked and not (book.missing() and book.due_s < inf):
            found.append(f"{step}: waits for nobody or without an end")
        if book.state not in (*SETTLED, FOLDING, OPEN) and not ((book.waiting or book.awaited) and book.due_s < inf):
            found.append(f"{step}: {book.state}, waits for no node or without an end")
        if step in ledger.open and not ledger.asked and book.state != FOLDING and ledger.timer_s > book.due_s:
            found.append(f"{step}: no timer before {book.due_s}")
    return found
