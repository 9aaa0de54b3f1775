"""Steps that begin before all members have come: what is there is folded and moved while the last are on their way.

The ways are those of the whole step, so that the bits are the same whoever comes last; what a member will give has a
name that is known before. Nobody hears of a result before all have come and asked for the same. When something is not
as it was foreseen, the course is stopped, the step waits as any other does, and goes on from what is whole. Folding in
the order of arrival is from Hoplite (SIGCOMM '21), whose sums change with it.
"""

from __future__ import annotations

from math import inf

from flowengine.core.collective import WHOLE, GiftCame

from .ledger_ends import Ends
from .ledger_headers import FROM_ROOT, gives
from .ledger_state import Book, Gift, Ledger, Seat
from .plan_ways import given_name

EARLY_S = 0.05  # members that come so close to each other are waited for
EARLY_BYTES_MAX = 256 << 20  # nodes keep what comes for a member that is not there
EARLY_OPS = ("allreduce", "reduce", "broadcast")


class Early(Ends):
    """The part of `StepKeeper` that does not wait for the last."""

    def _patience_s(self, ledger: Ledger, book: Book, seat: Seat) -> float:
        """Until when a member is waited for."""
        raise NotImplementedError

    def fail(self, ledger: Ledger, book: Book, kind: str, reason: str, now: float) -> None:
        """The step is over for all of its ranks."""
        raise NotImplementedError

    def unfit(self, ledger: Ledger, book: Book) -> tuple[str, str]:
        """Why what was asked for cannot be done: the kind of the failure and the reason, if any."""
        raise NotImplementedError

    def early_s(self, ledger: Ledger, book: Book) -> float:
        """From when on the step may begin without those that are missing; inf: never."""
        if book.course is not None or book.step[0] != WHOLE or not book.headers or ledger.adopted:
            return inf
        header = book.header()
        are_objects = self.desk.config.collective_inline_bytes_max < header.nbytes <= EARLY_BYTES_MAX
        if header.op not in EARLY_OPS or not are_objects:
            return inf
        if header.op in FROM_ROOT and header.root not in book.gifts:
            return inf
        if header.op == "allreduce" and len(book.missing()) > 1:
            return inf  # the way depends on who comes last
        seats = book.roster.seats
        if not all(seat.address and self.courses.lives(seat.node) for seat in seats) or _on_one_node(seats):
            return inf
        before = [step for step in ledger.open if step[0] == WHOLE and step[2] < book.step[2]]
        if before or any(self.unfit(ledger, book)):
            return inf
        return book.started_s + EARLY_S

    def begin_early(self, ledger: Ledger, book: Book, now: float) -> None:
        """Begin without those that are missing."""
        header = book.header()
        for rank in book.missing():
            seat, oid = book.roster.seats[rank], b""
            if gives(header, book.step, rank):
                oid = given_name(ledger.group, seat.joined.key, seat.address, book.step)
            book.awaited[rank] = seat.address, Gift(b"", oid, seat.node)
        book.again.update(dict.fromkeys(book.ranks()))  # they hear of it when all have come
        self.desk.counters["collectives_early"] += 1
        self.courses.begin(ledger, book, now)
        self.look_early(ledger, book, now)

    def look_early(self, ledger: Ledger, book: Book, now: float) -> None:
        """Whether those that are awaited may still come as it was foreseen."""
        seats = {rank: book.roster.seats[rank] for rank in book.awaited}
        due_s = [self._patience_s(ledger, book, seat) for seat in seats.values()]
        as_foreseen = all(
            (seat.address, seat.node) == (book.awaited[rank][0], book.awaited[rank][1].node)
            and ledger.roster.rank_of(seat) >= 0
            for rank, seat in seats.items()
        )
        if not as_foreseen or max(due_s) <= now:
            self.courses.take_back(ledger, book, now)
            return
        book.due_s = min(moment for moment in due_s if moment > now)
        self.arm(ledger, book.due_s, now)

    def came_late(self, ledger: Ledger, book: Book, rank: int, now: float) -> None:
        """One that was awaited has given."""
        foreseen = book.awaited[rank][1]
        if foreseen.oid and book.gifts[rank] != foreseen:
            self.courses.take_back(ledger, book, now)
            return
        del book.awaited[rank]
        if foreseen.oid:
            self.desk.out.send(foreseen.node, GiftCame(book.op, book.epoch, foreseen.oid))
        if book.awaited:
            self.look_early(ledger, book, now)
            return
        kind, reason = self.unfit(ledger, book)
        if kind:
            self.fail(ledger, book, kind, reason, now)
        elif book.waiting:
            self.courses.be_patient(ledger, book, now)
        else:
            self.courses.ended(ledger, book, now)


def _on_one_node(seats: tuple[Seat, ...]) -> bool:
    return len(dict.fromkeys(seat.node for seat in seats)) == 1
