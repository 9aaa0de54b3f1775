"""The steps of a group as its ledger knows them: given, compared, done, answered, failed, forgotten."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import msgspec

from flowengine.core.collective import (
    WHOLE,
    BlobsReady,
    Header,
    HeldAsked,
    HeldStep,
    Layout,
    Step,
    StepDone,
    StepEnded,
    StepFailed,
    StepGiven,
)
from flowengine.core.commands import BlobsCombined, CombineBlobs
from flowengine.core.node_desk import Desk

from .ledger_courses import Courses
from .ledger_early import Early
from .ledger_headers import EMPTY, dealt_to, gives, mismatch, refusal, step_text, takes
from .ledger_state import (
    ASKING,
    DONE,
    FAILED,
    FOLDING,
    OPEN,
    SETTLED,
    Book,
    Gift,
    Ledger,
    Result,
    Roster,
    Seat,
)
from .ledger_texts import gone, late, not_again, step_lost
from .plan_ways import op_name

AGAIN_S = 2.0  # what a member repeats at once when it joins again has come by then


class StepKeeper(Early):
    """Takes what members give, and sees to it that every step has one end for all of them."""

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk, Courses(desk, self.finish, self.fail, self.arm))
        self.courses.look = self.look
        self.admit: Callable[[Ledger, Book, float], None] = lambda ledger, book, now: None  # by who keeps the seats

    # --- given ------------------------------------------------------------------------------------

    def given(self, ledger: Ledger, event: StepGiven, now: float, sender: str) -> None:
        """A member gives to a step, for the first time or again."""
        seat = self._giver(ledger, event, sender)
        if seat is None:
            return
        whole = event.step[0] == WHOLE
        if whole and event.step[2] >= seat.next_step:
            seat.next_step = event.step[2] + 1
            seat.moved_s = now
        book = ledger.books.get(event.step)
        if book is None:
            if whole and event.step[2] < ledger.floor:
                reason = ledger.floor_reason or "all members had passed it"
                self._tell_failed(ledger, event.step, seat, "behind", f"{step_text(event.step)} is forgotten: {reason}")
                self._not_needed(event, seat, None)
                return
            book = self._open(ledger, event.step, now)
        rank = book.roster.rank_of(seat)
        if book.state == FAILED:
            self._tell_failed(ledger, book.step, seat, book.kind, book.reason)
            self._not_needed(event, seat, book)
        elif rank not in book.ranks():
            reason = f"rank {seat.rank} of group {ledger.name!r} has no part in {step_text(event.step)}"
            self._tell_failed(ledger, book.step, seat, "usage", reason)
            self._not_needed(event, seat, book)
        elif book.state == DONE:
            self._give_back(ledger, book, event, seat)
            self.answer(ledger, book, seat, event.header, now)
            self._not_needed(event, seat, book)
        elif rank in book.gifts and book.state != OPEN:
            book.again[rank] = None
            self._spare(event, seat, book, rank)
        else:
            self._replaced(book, rank, (event.oid, seat.node))
            if book.made or book.only >= 0:
                book.again[rank] = None  # its result may be whole already, and was told to its former life
            header = _in_terms_of(book.roster, self._known_to(ledger, event, sender), event.header)
            book.headers[rank] = header
            book.gifts[rank] = Gift(event.blob, event.oid, seat.node)
            if not whole:
                book.mark = max(book.mark, seat.next_step)
            if book.is_early and rank in book.awaited:
                self.came_late(ledger, book, rank, now)
            elif (book.due_s == inf or book.only >= 0 or len(book.gifts) >= book.count() - 1
                  or header.root == rank):  # with the root's part, or when one is left, it may begin early
                self.look(ledger, book, now)

    def _give_back(self, ledger: Ledger, book: Book, event: StepGiven, seat: Seat) -> None:
        """What a rank gave to a step that is done was lost with its node, and may be needed for a lost result."""
        rank = book.roster.rank_of(seat)
        if rank not in book.gifts and (book.headers or self._is_lost(book, rank, event.header)):
            self.courses.count(ledger, book, -1)
            book.headers[rank] = event.header
            book.gifts[rank] = Gift(event.blob, event.oid, seat.node)
            self.courses.count(ledger, book, 1)

    def _spare(self, event: StepGiven, seat: Seat, book: Book, rank: int) -> None:
        """What counts may turn out to be lost: then this is it."""
        gift, spare = book.gifts[rank], Gift(event.blob, event.oid, seat.node)
        if spare.oid and (gift.oid, gift.node) != (spare.oid, spare.node):
            before = book.spares.get(rank, spare)
            if before != spare:
                self._let_go(before)
            book.spares[rank] = spare

    def _replaced(self, book: Book, rank: int, by: tuple[bytes, str]) -> None:
        """A rank gives anew, perhaps on another node."""
        before = book.gifts.get(rank)
        if before is not None and (before.oid, before.node) != by:
            self._let_go(before)

    def _not_needed(self, event: StepGiven, seat: Seat, book: Book | None) -> None:
        """An object that was given and that the step does not count goes, unless it is one that it has."""
        if not event.oid or not self.courses.lives(seat.node):
            return
        has = book is not None and (book.state not in SETTLED or (book.course is not None and book.course.keeps_gifts))
        gifts = book.gifts.values() if book is not None and has else ()
        if all((gift.oid, gift.node) != (event.oid, seat.node) for gift in gifts):
            self.desk.out.send(seat.node, StepEnded(b"", (event.oid,)))

    def _giver(self, ledger: Ledger, event: StepGiven, sender: str) -> Seat | None:
        known = self._known_to(ledger, event, sender)
        seat = known.seats[event.rank] if 0 <= event.rank < len(known.seats) else None
        why = ""
        if seat is None or (seat.address and seat.address != sender):
            why = f"its sender has no seat in group {ledger.name!r}"
        elif ledger.roster.rank_of(seat) < 0:
            why = f"group {ledger.name!r} went on without its former rank {event.rank}"
        elif not seat.address:
            why = gone(ledger, seat, seat.lost_s) or f"rank {event.rank} of group {ledger.name!r} has to join again"
        elif event.step[0] != WHOLE and known.seats != ledger.roster.seats[: len(known.seats)]:
            why = f"the ranks of group {ledger.name!r} have new numbers since a member was lost"
        if not why:
            return seat
        self.desk.out.send(sender, StepFailed(ledger.group, event.step, "lost", why, event.rank))
        return None

    def _known_to(self, ledger: Ledger, event: StepGiven, sender: str) -> Roster:
        """The roster by which a member speaks; without an epoch, the newest in which it sits where it says."""
        if event.epoch or len(ledger.rosters) == 1:
            return ledger.known_roster(event.epoch)
        for roster in reversed(ledger.rosters):
            if 0 <= event.rank < len(roster.seats) and roster.seats[event.rank].address == sender:
                return roster
        return ledger.roster

    def _open(self, ledger: Ledger, step: Step, now: float) -> Book:
        book = Book(step, op_name(ledger.group, step), ledger.roster, now)
        ledger.books[step] = ledger.open[step] = book
        self.by_op[book.op] = (ledger, book)
        return book

    def look(self, ledger: Ledger, book: Book, now: float) -> None:
        """Do the step if all is there, fail it if it never will be."""
        if ledger.asked or book.state != OPEN:
            if book.is_early:
                self.look_early(ledger, book, now)
            return
        if book.only >= 0:
            self._look_again(ledger, book, now)
            return
        missing = book.missing()
        if any(ledger.roster.rank_of(book.roster.seats[rank]) < 0 for rank in missing):
            self._leave_out(ledger, book, now)
            missing = book.missing()
            if book.state != OPEN:
                return
        if not missing:
            self._begin(ledger, book, now)
            return
        for rank in missing:
            seat = book.roster.seats[rank]
            reason = gone(ledger, seat, now)
            if reason:
                self.fail(ledger, book, "lost", reason, now)
                return
        checks = [self._patience_s(ledger, book, book.roster.seats[rank]) for rank in missing]
        if max(checks) <= now:
            self.fail(ledger, book, "timeout", late(ledger, book), now)
            return
        if ledger.adopted and self._ask_again(ledger, book, missing):
            if book.started_s + min(AGAIN_S, ledger.timeout_s) <= now:  # all nodes have told meanwhile
                self.fail(ledger, book, "behind", step_lost(ledger, book), now)
                return
            checks.append(now + self.desk.config.seek_interval_s)
        early_s = self.early_s(ledger, book)
        if early_s <= now:
            self.begin_early(ledger, book, now)
            return
        book.due_s = min(due_s for due_s in (*checks, early_s) if due_s > now)
        self.arm(ledger, book.due_s, now)

    def _ask_again(self, ledger: Ledger, book: Book, missing: list[int]) -> bool:
        """A member that is beyond the step has its result since its node told what it holds."""
        if book.step[0] != WHOLE:
            return False
        seats = [book.roster.seats[rank] for rank in missing]
        beyond = [seat.node for seat in seats if seat.address and seat.next_step > book.step[2]]
        for node in dict.fromkeys(beyond):
            self.desk.out.send(node, HeldAsked(ledger.group))
        return bool(beyond)

    def _patience_s(self, ledger: Ledger, book: Book, seat: Seat) -> float:
        """Until when a member is waited for."""
        since = [book.started_s]
        if not seat.address:
            since = [seat.lost_s]
        elif book.step[0] != WHOLE or seat.next_step <= book.step[2]:
            since.append(seat.moved_s)
        return max(since) + ledger.timeout_s

    # --- done -------------------------------------------------------------------------------------

    def _begin(self, ledger: Ledger, book: Book, now: float) -> None:
        kind, reason = self.unfit(ledger, book)
        if kind:
            self.fail(ledger, book, kind, reason, now)
            return
        if book.course is not None:
            self.courses.resume(ledger, book, now)
            return
        header = book.header()
        givers = [rank for rank in book.gifts if gives(header, book.step, rank)]
        if header.op in EMPTY:
            self._finish_empty(ledger, book, now)
        elif any(book.gifts[rank].oid for rank in givers):
            self.courses.begin(ledger, book, now)
        else:
            book.state, book.due_s = FOLDING, inf
            book.epoch = ledger.epoch
            blobs = tuple((rank, book.gifts[rank].blob) for rank in sorted(givers))
            self.desk.out.add(CombineBlobs(book.op, book.epoch, self.courses.outline(ledger, book), blobs))

    def unfit(self, ledger: Ledger, book: Book) -> tuple[str, str]:
        """Why what was asked for cannot be done: the kind of the failure and the reason, if any."""
        headers = dict(sorted(book.headers.items()))
        text = mismatch(ledger.name, book.step, headers)
        if text:
            return "mismatch", text
        text = refusal(book.step, headers, len(book.roster.seats))
        return ("refused", f"{step_text(book.step)} of group {ledger.name!r}: {text}") if text else ("", "")

    def _finish_empty(self, ledger: Ledger, book: Book, now: float) -> None:
        is_admission = book.header().op == "admit"
        if is_admission:
            self.admit(ledger, book, now)
        self._hand_out(ledger, book, tell=not is_admission)
        if is_admission:
            # Straight from here, so that they hear of the new members first.
            for rank in book.ranks():
                book.again[rank] = None
        self.finish(ledger, book, now)

    def combined(self, event: BlobsCombined, now: float) -> None:
        """The shell has folded what was given."""
        ledger, book = self.by_op.get(event.op, (None, None))
        if ledger is None or book is None or book.state != FOLDING or book.epoch != event.epoch:
            return
        if event.failure:
            self.fail(ledger, book, "refused", event.failure, now)
            return
        book.results = {rank: Result(blob=blob, nbytes=len(blob)) for rank, blob in event.results}
        book.layout = event.layout
        self._hand_out(ledger, book, tell=True)
        self.finish(ledger, book, now)

    def _hand_out(self, ledger: Ledger, book: Book, tell: bool) -> None:
        """Give all nodes with members the blobs.

        As a node may be lost, those of one rank each go to all nodes while they are small, else to one more.
        """
        takers: dict[str, list[tuple[int, str]]] = {}
        for rank in book.ranks():
            seat = book.roster.seats[rank]
            if seat.address:
                takers.setdefault(seat.node, []).append((rank, seat.address))
        results = [(rank, result.blob) for rank, result in sorted(book.results.items())]
        is_small = sum(len(blob) for _, blob in results) <= self.desk.config.collective_inline_bytes_max
        before = list(takers.values())[-1:]
        for node, here in takers.items():
            ranks = [WHOLE, *(rank for ranks in (here, *before) for rank, _ in ranks)]
            before = [here]
            own = tuple((rank, blob) for rank, blob in results if is_small or rank in ranks)
            told = tuple(here) if tell else ()
            self.desk.out.send(node, BlobsReady(book.op, ledger.group, book.step, own, told, book.layout))

    def finish(self, ledger: Ledger, book: Book, now: float) -> None:
        """All results are there."""
        book.state = DONE
        book.due_s = inf
        ledger.open.pop(book.step, None)
        header = book.header()
        again, book.again = book.again, {}
        if book.only < 0:
            self.desk.counters["collectives_done"] += 1
            self.desk.counters["collectives_repaired"] += book.mends > 0
        if book.course is not None and book.only < 0:
            again.update((rank, None) for rank in book.ranks() if not takes(header, book.step, rank))
        book.only, book.mends = -1, 0
        for rank in again:
            seat = book.roster.seats[rank]
            if seat.address:
                self.answer(ledger, book, seat, header, now)
        if book.state != DONE:
            return  # an answer has to be made again
        self._drop_spares(book)
        if book.course is None or not book.course.keeps_gifts or not book.course.posts:
            self._drop_strays(book)
            book.gifts, book.headers = {}, {}
        self._settled(ledger, book)

    def answer(self, ledger: Ledger, book: Book, seat: Seat, header: Header, now: float) -> None:
        """Tell a member the result of a step that is done."""
        rank = book.roster.rank_of(seat)
        result = _result_of(book, rank)
        done = StepDone(ledger.group, book.step, rank=seat.rank)
        if not takes(header, book.step, rank):
            self.desk.out.send(seat.address, msgspec.structs.replace(done, empty=True))
        elif result is not None:
            layout = tuple(part for part in book.layout if part.taker in (WHOLE, rank))
            config = self.desk.config
            is_much = max(ledger.kept_bytes.values(), default=0) > config.collective_kept_bytes_max // 2
            made = msgspec.structs.replace(
                done,
                blob=result.blob,
                oid=result.oid,
                nbytes=result.nbytes,
                nodes=result.nodes,
                layout=layout,
                checkpoint=is_much,
            )
            self.desk.out.send(seat.address, made)
        elif book.state != DONE:
            book.again[rank] = None  # that of another rank is made first
        elif rank in book.gifts and self.courses.lives(seat.node):
            self._make_again(ledger, book, rank, now)
        else:
            self._tell_failed(ledger, book.step, seat, _lost_kind(book), step_lost(ledger, book))

    # --- a lost result is made again --------------------------------------------------------------

    def _is_lost(self, book: Book, rank: int, header: Header) -> bool:
        return takes(header, book.step, rank) and _result_of(book, rank) is None

    def _make_again(self, ledger: Ledger, book: Book, rank: int, now: float) -> None:
        """For one rank, when all that was given is there: those that sat on a lost node give again too."""
        self.courses.count(ledger, book, -1)
        book.results.pop(rank, None)
        book.state, book.only, book.started_s, book.finals = OPEN, rank, now, {}
        book.again[rank] = None
        ledger.open[book.step] = book
        self._look_again(ledger, book, now)

    def _look_again(self, ledger: Ledger, book: Book, now: float) -> None:
        for rank in book.missing():
            spare = book.spares.pop(rank, None)
            if spare is not None and (not spare.oid or self.courses.lives(spare.node)):
                book.gifts[rank] = spare
        missing = [rank for rank in book.missing() if gives(book.header(), book.step, rank)]
        if not missing:
            text = mismatch(ledger.name, book.step, dict(sorted(book.headers.items())))
            if text:
                self.fail(ledger, book, "mismatch", text, now)
            else:
                self.courses.resume(ledger, book, now)
            return
        book.due_s = min(self._comes_again_s(ledger, book, book.roster.seats[rank]) for rank in missing)
        for rank in missing:
            seat = book.roster.seats[rank]
            is_out = ledger.roster.rank_of(seat) < 0 or bool(gone(ledger, seat, now))
            if is_out or self._comes_again_s(ledger, book, seat) <= now:
                reason = f"{step_lost(ledger, book)}; {not_again(seat)}"
                self.fail(ledger, book, "lost", reason, now)
                return
        self.arm(ledger, book.due_s, now)

    def _comes_again_s(self, ledger: Ledger, book: Book, seat: Seat) -> float:
        """Until when a member may give again; who is past the step, at once when it comes."""
        number = book.step[2] if book.step[0] == WHOLE else book.mark
        if seat.passed > number:
            return 0.0
        if seat.address and seat.next_step > number:
            return seat.moved_s + min(AGAIN_S, ledger.timeout_s)
        return self._patience_s(ledger, book, seat)

    def _fail_again(self, ledger: Ledger, book: Book, kind: str, reason: str, now: float) -> None:
        """It stays done for the others: only those that asked once more hear of it."""
        self.courses.stop(book)
        book.state, book.due_s, book.only = DONE, inf, -1
        ledger.open.pop(book.step, None)
        again, book.again = book.again, {}
        for rank in again:
            seat, header = book.roster.seats[rank], book.headers.get(rank)
            if seat.address and header is not None and self._is_lost(book, rank, header):
                self._tell_failed(ledger, book.step, seat, _lost_kind(book) if kind == "lost" else kind, reason)
            elif seat.address and header is not None:
                self.answer(ledger, book, seat, header, now)
        self._settled(ledger, book)

    # --- failed -----------------------------------------------------------------------------------

    def fail(self, ledger: Ledger, book: Book, kind: str, reason: str, now: float) -> None:
        """The step is over for all of its ranks: who gave hears it now, the others when they come."""
        if book.only >= 0:
            self._fail_again(ledger, book, kind, reason, now)
            return
        book.state, book.kind, book.reason, book.due_s, book.awaited = FAILED, kind, reason, inf, {}
        ledger.open.pop(book.step, None)
        nodes: dict[str, None] = {}
        for rank in book.ranks():
            seat = book.roster.seats[rank]
            if seat.address:
                nodes[seat.node] = None
            if rank in book.gifts and seat.address:
                self._tell_failed(ledger, book.step, seat, kind, reason)
        for node in nodes:
            self.desk.out.send(node, BlobsReady(book.op, ledger.group, book.step, (), (), failed=(kind, reason)))
        self.courses.stop(book)
        self._drop_spares(book)
        self._drop_strays(book)
        book.gifts, book.headers, book.again = {}, {}, {}
        self._settled(ledger, book)

    def cut_off(self, ledger: Ledger, seat: Seat, reason: str) -> None:
        """A member counts as dead, but may be there: it hears of what it gave to."""
        for book in ledger.open.values():
            if book.roster.rank_of(seat) in book.gifts:
                why = f"rank {seat.rank} of group {ledger.name!r} was given up: {reason}"
                self._tell_failed(ledger, book.step, seat, "lost", why)

    # --- losses and time --------------------------------------------------------------------------

    def review(self, ledger: Ledger, now: float) -> None:
        """Who sits where has changed, or time has passed."""
        for book in list(ledger.open.values()):
            if book.state == OPEN or book.is_early:
                self.look(ledger, book, now)
            elif book.due_s <= now:
                self.courses.stalled(ledger, book, now)
            elif book.state == ASKING and not book.waiting:
                self.courses.resume(ledger, book, now)
        self.arm(ledger, min([book.due_s for book in ledger.open.values()], default=inf), now)

    def renumbered(self, ledger: Ledger, old: Roster, lost: Seat, now: float) -> None:
        """The group goes on without a member: what is open is done anew, when all that are lost at once are out."""
        for step, book in list(ledger.books.items()):
            if step[0] != WHOLE:
                if book.step in ledger.open:
                    reason = gone(ledger, lost, now) or f"group {ledger.name!r} shrank: its ranks have new numbers"
                    self.fail(ledger, book, "lost", reason, now)
            elif book.state == OPEN and book.only < 0:
                self._leave_out(ledger, book, now)
            elif book.step in ledger.open:
                changed = [rank for rank, seat in enumerate(book.roster.seats) if ledger.roster.rank_of(seat) != rank]
                book.again.update((rank, None) for rank in changed if book.roster.seats[rank] is not lost)

    def _leave_out(self, ledger: Ledger, book: Book, now: float) -> None:
        """Go over to the roster that is left; who was the root may be none of it."""
        old, new = book.roster, ledger.roster
        kept: dict[int, Gift] = {}
        headers: dict[int, Header] = {}
        root_lost = ""
        for rank, gift in book.gifts.items():
            seat, header = old.seats[rank], book.headers[rank]
            if new.rank_of(seat) >= 0:
                kept[new.rank_of(seat)] = gift
                headers[new.rank_of(seat)] = _in_terms_of(new, old, header)
                if 0 <= header.root < len(old.seats) and new.rank_of(old.seats[header.root]) < 0:
                    root_lost = gone(ledger, old.seats[header.root], now)
        left = [rank for rank in book.gifts if new.rank_of(old.seats[rank]) < 0]
        self._drop_spares(book)
        self._drop_strays(book, left)
        book.roster, book.gifts, book.course, book.finals, book.results = new, kept, None, {}, {}
        book.headers, book.made, book.again = headers, {}, {}
        if root_lost:
            self.fail(ledger, book, "lost", f"the root is lost: {root_lost}", now)

    def grown(self, ledger: Ledger, number: int) -> None:
        """Steps after an admission are those of all members."""
        for step, book in ledger.open.items():
            if step[0] == WHOLE and step[2] > number:
                book.roster = ledger.roster

    # --- held by nodes for a ledger before this one ------------------------------------------------

    def held(self, ledger: Ledger, step: HeldStep, node: str, now: float) -> None:
        """A node has results of a step that another ledger saw done."""
        book = ledger.books.get(step.step)
        if book is None:
            book = self._open(ledger, step.step, now)
        is_done = step.failed[0] or step.objects or step.blobs or not step.headers
        if book.state == OPEN and book.only < 0 and is_done:
            ledger.open.pop(step.step, None)
            book.state, book.due_s = FAILED if step.failed[0] else DONE, inf
            book.kind, book.reason = step.failed
            for rank in book.gifts:
                book.again[rank] = None
            if step.step[0] != WHOLE:
                ledger.pairs[step.step] = book
        if ledger.on_failure == "recover":  # else ranks may have had other numbers
            for rank, header in step.headers:
                book.headers.setdefault(rank, header)
            for rank, oid, blob in step.gifts:
                book.spares.setdefault(rank, Gift(blob, oid, node))
        if book.state not in SETTLED or book.course is not None:
            return
        book.layout = _joined_layout(book.layout, step.layout)
        for rank, blob in step.blobs:
            ledger.blob_bytes += len(blob) if rank not in book.results else 0
            book.results[rank] = Result(blob=blob, nbytes=len(blob))
        for rank, oid, nbytes in step.objects:
            known = book.results.get(rank)
            before = known.nodes if known is not None else ()
            if node in before:
                continue
            book.results[rank] = Result(oid=oid, nbytes=nbytes, nodes=(*before, node))
            ledger.kept_bytes[node] = ledger.kept_bytes.get(node, 0) + nbytes

    def adopted(self, ledger: Ledger, now: float) -> None:
        """All nodes have told what they hold: what they still do for the ledger before this one is over."""
        for book in list(ledger.books.values()):
            if book.state == OPEN:
                book.started_s = now
                self._take_spares(book)
            if book.state in SETTLED and any(result.oid for result in book.results.values()):
                for node in ledger.nodes:
                    if self.courses.lives(node):
                        self.desk.out.send(node, StepEnded(book.op))
        self.answer_waiting(ledger, now)

    def _take_spares(self, book: Book) -> None:
        """What nodes kept counts for members that are past the step: its result is lost, and they do not give again."""
        for rank in book.missing():
            spare, is_past = book.spares.get(rank), book.roster.seats[rank].next_step > book.step[2]
            if spare is None or rank not in book.headers or (book.step[0] == WHOLE and not is_past):
                continue
            if not spare.oid or self.courses.lives(spare.node):
                book.gifts[rank] = book.spares.pop(rank)

    def answer_waiting(self, ledger: Ledger, now: float) -> None:
        """What members gave again to steps that nodes hold."""
        for book in list(ledger.books.values()):
            again, book.again = book.again, {}
            for rank in again:
                seat = book.roster.seats[rank]
                if not seat.address:
                    continue
                if book.state == FAILED:
                    self._tell_failed(ledger, book.step, seat, book.kind, book.reason)
                elif book.state == DONE:
                    self.answer(ledger, book, seat, book.headers[rank], now)
                else:
                    book.again[rank] = None  # it is made again just now


def _lost_kind(book: Book) -> str:
    """How a member hears that others have a result which it will never get; of two, they may go on with others."""
    return "behind" if book.step[0] == WHOLE else "lost"


def _result_of(book: Book, rank: int) -> Result | None:
    """What a rank gets, when it is not lost."""
    result = book.results.get(rank) or book.results.get(WHOLE)
    return result if result is not None and (not result.oid or result.nodes) else None


def _in_terms_of(roster: Roster, known: Roster, header: Header) -> Header:
    """What was asked for by the ranks of another roster; a root that is none of them is -1."""
    if known is roster:
        return header
    header = dealt_to(header, [roster.rank_of(seat) >= 0 for seat in known.seats])
    if not 0 <= header.root < len(known.seats):
        return header
    return msgspec.structs.replace(header, root=roster.rank_of(known.seats[header.root]))


def _joined_layout(one: tuple[Layout, ...], other: tuple[Layout, ...]) -> tuple[Layout, ...]:
    return (*one, *(part for part in other if part not in one))
