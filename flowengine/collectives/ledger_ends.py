"""What becomes of steps that have their end: what was given to them, and until when a ledger has results kept."""

from __future__ import annotations

from collections.abc import Iterable

from flowengine.core.collective import WHOLE, Step, StepEnded, StepFailed, StepsForgotten
from flowengine.core.node_desk import Desk

from .ledger_courses import Courses
from .ledger_state import Book, Gift, Ledger, LedgerDue, Seat
from .ledger_texts import too_much

FORGOTTEN_AT_ONCE = 64  # small results are not worth a message each


class Ends:
    """The part of `StepKeeper` that lets go."""

    def __init__(self, desk: Desk, courses: Courses) -> None:
        self.desk = desk
        self.courses = courses
        self.by_op: dict[bytes, tuple[Ledger, Book]] = {}

    def arm(self, ledger: Ledger, due_s: float, now: float) -> None:
        """Look at the ledger at that time at the latest."""
        if due_s < ledger.timer_s:
            ledger.timer_s = due_s
            self.desk.out.timer(max(0.0, due_s - now), LedgerDue(ledger.group))

    def _tell_failed(self, ledger: Ledger, step: Step, seat: Seat, kind: str, reason: str) -> None:
        if kind == "behind":
            seat.reason = reason  # for the others, when it leaves
        self.desk.out.send(seat.address, StepFailed(ledger.group, step, kind, reason, seat.rank))

    # --- what was given ---------------------------------------------------------------------------

    def _let_go(self, gift: Gift) -> None:
        """An object that was given goes."""
        if gift.oid and self.courses.lives(gift.node):
            self.desk.out.send(gift.node, StepEnded(b"", (gift.oid,)))

    def _drop_spares(self, book: Book) -> None:
        spares, book.spares = book.spares, {}
        for spare in spares.values():
            if spare not in book.gifts.values():
                self._let_go(spare)

    def _drop_strays(self, book: Book, ranks: Iterable[int] | None = None) -> None:
        """Objects that were given and are named by no course would stay for ever."""
        named = [oid for post in (book.course.posts if book.course else ()) for _, oid in post.gives]
        strays: dict[str, list[bytes]] = {}
        for gift in [book.gifts[rank] for rank in (book.gifts if ranks is None else ranks)]:
            if gift.oid and gift.oid not in named and self.courses.lives(gift.node):
                strays.setdefault(gift.node, []).append(gift.oid)
        for node, oids in strays.items():
            self.desk.out.send(node, StepEnded(book.op, tuple(oids)))

    # --- forgotten --------------------------------------------------------------------------------

    def _settled(self, ledger: Ledger, book: Book) -> None:
        """A step has its end; when too much is kept, the older half of the steps goes."""
        self.courses.count(ledger, book, 1)
        if book.step[0] != WHOLE:
            ledger.pairs[book.step] = book
            if len(ledger.pairs) % FORGOTTEN_AT_ONCE == 0 or book.course is not None:
                self.forget(ledger)
        limit_bytes = self.desk.config.collective_kept_bytes_max
        if max(ledger.kept_bytes.values(), default=0) + ledger.blob_bytes > limit_bytes:
            kept = [step for step, book in ledger.books.items() if book.results and step not in ledger.open]
            ledger.floor_reason = too_much(limit_bytes)
            numbers = [step[2] + 1 for step in kept[: max(1, len(kept) // 2)] if step[0] == WHOLE]
            # Who gives to a step has read the results of those before the last one.
            read = min((seat.next_step - 1 for seat in ledger.here()), default=0)
            pairs = [step for step in kept if step[0] != WHOLE and ledger.books[step].mark <= read]
            self._drop(ledger, min(max(numbers, default=0), read), pairs)

    def forget(self, ledger: Ledger) -> None:
        """Let go of steps that nobody will repeat."""
        seats = [seat for seat in ledger.roster.seats if not seat.left and (seat.address or seat.joined.restorable)]
        floor = min((seat.passed for seat in seats), default=0)
        is_heavy = any(ledger.kept_bytes.values())
        passed = [
            step
            for step, book in ledger.pairs.items()
            if step not in ledger.open
            and all(self._is_past(book, book.roster.seats[rank], rank) for rank in book.ranks())
        ]
        if floor - ledger.floor + len(passed) >= (1 if is_heavy else FORGOTTEN_AT_ONCE):
            self._drop(ledger, floor, passed)

    def _is_past(self, book: Book, seat: Seat, rank: int) -> bool:
        """Whether one of two has no use for their step any more."""
        never_repeats = not seat.joined.restorable and (book.is_read or rank != book.step[1])
        return seat.left or never_repeats or seat.passed > book.mark

    def _drop(self, ledger: Ledger, floor: int, pairs: list[Step]) -> None:
        steps = [step for step in ledger.books if step[0] == WHOLE and step[2] < floor and step not in ledger.open]
        for step in (*steps, *pairs):
            book = ledger.books.pop(step)
            self._drop_strays(book)
            ledger.pairs.pop(step, None)
            self.by_op.pop(book.op, None)
            self.courses.count(ledger, book, -1)
        ledger.floor = max([ledger.floor, *(step[2] + 1 for step in steps)])
        order = StepsForgotten(ledger.group, ledger.floor, tuple(pairs))
        for node in ledger.nodes:
            if self.courses.lives(node):
                self.desk.out.send(node, order, lazy=True)

    def end(self, ledger: Ledger) -> None:
        """The group is over."""
        for book in ledger.books.values():
            self._drop_spares(book)
            self._drop_strays(book)
            self.by_op.pop(book.op, None)
        for node in ledger.nodes:
            if self.courses.lives(node):
                self.desk.out.send(node, StepsForgotten(ledger.group, -1))
