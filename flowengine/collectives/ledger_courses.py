"""How a ledger has steps done by the nodes: a course, and after a loss another one for what is missing."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from flowengine.core.collective import WHOLE, Course, CourseBroken, CourseDone, Finals, FinalsAsked, Seating, StepEnded
from flowengine.core.node_desk import Desk

from . import plan
from .ledger_headers import SHARED, gives, step_text, takes
from .ledger_state import ASKING, OPEN, RUNNING, Book, Ledger, Result, Seat
from .ledger_texts import seconds_text
from .plan_ways import StepPlan, gift_name, result_name
from .posts_orders import HEAD_BYTES

STALLS_MAX = 3
SLOW_BYTES_PER_S = 1 << 20  # a course that is slower than this stands still

Finish = Callable[[Ledger, Book, float], None]
Fail = Callable[[Ledger, Book, str, str, float], None]
Arm = Callable[[Ledger, float, float], None]


def may_return(ledger: Ledger, seat: Seat) -> bool:
    """Whether a member that is away may come again and ask for results."""
    return ledger.on_failure == "recover" and seat.joined.restorable and not seat.left


class Courses:
    """The part of a ledger that talks with nodes about large steps.

    `Book.made` says which results they begin: (node, object) -> (bytes, ranks that take it there).
    """

    def __init__(self, desk: Desk, finish: Finish, fail: Fail, arm: Arm) -> None:
        self.desk = desk
        self.finish = finish
        self.fail = fail
        self.arm = arm
        self.silent: dict[str, None] = {}  # nodes to which the link is lost, whatever the head says
        self.look: Callable[[Ledger, Book, float], None] = lambda ledger, book, now: None  # at a step that is open

    def lives(self, node: str) -> bool:
        """Whether a node may be asked for something."""
        return bool(node) and node not in self.desk.dead_nodes and node not in self.silent

    # --- a course and its end ---------------------------------------------------------------------

    def begin(self, ledger: Ledger, book: Book, now: float) -> None:
        """Have the step done for all of its ranks."""
        book.epoch = self._next_epoch(ledger) if book.epoch else ledger.epoch
        known = self.plan_of(ledger, book)
        self._send(ledger, book, self._early(book, known) if book.awaited else plan.course(known), now)

    def _early(self, book: Book, known: StepPlan) -> Course:
        """The course before all have given; nobody is told of results."""
        header = book.header()
        coming = [(rank, gift.node, gift.oid) for rank, (_, gift) in book.awaited.items() if gift.oid]
        whole = msgspec.structs.replace(
            known,
            headers=tuple(sorted([*known.headers, *((rank, header) for rank, _, _ in coming)])),
            gifts=tuple(sorted([*known.gifts, *coming])),
            takers=tuple([(rank, node, "") for rank, node, _ in known.takers]),
        )
        awaited = tuple([oid for _, _, oid in coming])
        late = coming[0][1] if header.op == "allreduce" else ""
        return msgspec.structs.replace(plan.course(whole, late), awaited=awaited)

    def _next_epoch(self, ledger: Ledger) -> int:
        ledger.epoch += 1
        return ledger.epoch

    def outline(self, ledger: Ledger, book: Book) -> StepPlan:
        """What is to be done, without places."""
        header = book.header()
        headers = [(rank, book.headers[rank]) for rank in sorted(book.headers) if gives(header, book.step, rank)]
        seating = Seating(ledger.group, book.epoch, book.roster.order, book.roster.starts)
        piece_bytes = self.desk.config.collective_piece_bytes
        return StepPlan(ledger.group, book.step, book.epoch, seating, tuple(headers), (), (), piece_bytes)

    def plan_of(self, ledger: Ledger, book: Book) -> StepPlan:
        """What the course follows from."""
        outline = self.outline(ledger, book)
        nodes = tuple(seat.node if self.lives(seat.node) else "" for seat in book.roster.seats)
        gifts, blobs = [], []
        for rank, _ in outline.headers:
            gift = book.gifts.get(rank)
            if gift is None:
                continue  # all that it gave is whole in results
            oid = gift.oid or gift_name(ledger.group, book.step, rank)
            if not gift.oid:
                blobs.append((oid, gift.blob))
            gifts.append((rank, gift.node if self.lives(gift.node) else self.desk.me, oid))
        return msgspec.structs.replace(
            outline,
            seating=msgspec.structs.replace(outline.seating, nodes=nodes),
            gifts=tuple(gifts),
            takers=tuple(self._takers(ledger, book)),
            blobs=tuple(blobs),
        )

    def _takers(self, ledger: Ledger, book: Book) -> list[tuple[int, str, str]]:
        """Ranks that still need a result, those too that may come back: it is kept for them where they sat, or here."""
        header, found, homeless = book.header(), [], []
        ranks = [book.only] if book.only >= 0 else [rank for rank in book.ranks() if takes(header, book.step, rank)]
        lacking = [rank for rank in ranks if not self._has_result(book, rank)]
        for rank in lacking:
            seat = book.roster.seats[rank]
            if self.lives(seat.node):
                if seat.address or may_return(ledger, seat):
                    found.append((rank, seat.node, seat.address))
            elif may_return(ledger, seat):
                homeless.append((rank, self.desk.me, ""))
        if result_name(ledger.group, book.step, WHOLE) in [oid for _, oid in book.made] or header.op in SHARED:
            return found or (homeless[:1] if len(lacking) == len(ranks) else [])
        return [*found, *homeless]

    def _has_result(self, book: Book, rank: int) -> bool:
        """Whether it is whole on the rank's node, which has told the rank so."""
        node = book.roster.seats[rank].node
        finals = book.finals.get(node)
        if finals is None:
            return False
        ranges = dict(finals.ranges)
        return any(
            at == node and rank in ranks and (not nbytes or ranges.get(oid) == ((0, nbytes),))
            for (at, oid), (nbytes, ranks) in book.made.items()
        )

    def _send(self, ledger: Ledger, book: Book, course: Course, now: float) -> None:
        self._note_results(ledger, book, course)
        nodes = dict.fromkeys(post.node for post in course.posts)
        book.course, book.state = course, RUNNING
        book.waiting = dict.fromkeys(post.node for post in course.posts if post.result)
        book.layout = course.layout or book.layout
        if not book.waiting:
            self.ended(ledger, book, now)
            return
        self.be_patient(ledger, book, now)
        for node in nodes:
            ledger.nodes[node] = None
            self.desk.out.send(node, course)

    def be_patient(self, ledger: Ledger, book: Book, now: float) -> None:
        """From now on the course may take as long as its bytes let expect."""
        assert book.course is not None
        posts, lines = book.course.posts, book.course.lines
        nbytes = sum(post.result_bytes for post in posts) + sum(line.nbytes for line in lines)
        patience_s = max(ledger.timeout_s, 2 * self.desk.config.transfer_timeout_s) + nbytes / SLOW_BYTES_PER_S
        book.due_s = now + patience_s
        self.arm(ledger, book.due_s, now)

    def _note_results(self, ledger: Ledger, book: Book, course: Course) -> None:
        if course.fresh:
            book.results, book.made = {}, {}
        shared = result_name(ledger.group, book.step, WHOLE)
        for post in course.posts:
            if not post.result:
                continue
            takers = tuple(rank for rank, _ in post.takers)
            before = book.made.get((post.node, post.result), (0, ()))[1]
            book.made[post.node, post.result] = (post.result_bytes, (*before, *takers))
            for rank in [WHOLE] if post.result == shared else takers:
                known = book.results.get(rank)
                nodes = dict.fromkeys([*(known.nodes if known is not None else ()), post.node])
                book.results[rank] = Result(b"", post.result, post.result_bytes + HEAD_BYTES, tuple(nodes))

    def done(self, ledger: Ledger, book: Book, event: CourseDone, now: float, sender: str) -> None:
        """A node has its results."""
        if book.state == RUNNING and event.epoch == book.epoch:
            book.waiting.pop(sender, None)
            if not book.waiting and not book.awaited:
                self.ended(ledger, book, now)

    def ended(self, ledger: Ledger, book: Book, now: float) -> None:
        """All nodes have their results."""
        self.stop(book)
        book.finals = {}
        self.finish(ledger, book, now)

    def stop(self, book: Book) -> None:
        """Tell the nodes of the course that it is over."""
        nodes = dict.fromkeys(post.node for post in book.course.posts) if book.course is not None else {}
        for node in nodes:
            if self.lives(node):
                self.desk.out.send(node, StepEnded(book.op))

    # --- repair -----------------------------------------------------------------------------------

    def broken(self, ledger: Ledger, book: Book, event: CourseBroken, now: float, sender: str) -> None:
        """A node cannot go on."""
        if book.state != RUNNING or event.epoch != book.epoch:
            return
        if book.awaited:
            self.take_back(ledger, book, now)
            return
        if event.kind == "gift" and event.gift:
            self._gift_missing(book, event.gift, sender)
            reason = f"{self._host(ledger, sender)} has not got what a rank gave: {event.reason}"
            self._mend_or_fail(ledger, book, reason, now)
            return
        if event.kind != "peer":
            kind = "store" if event.kind == "store" else "lost"
            reason = f"{step_text(book.step)} of group {ledger.name!r} failed on {self._host(ledger, sender)}"
            self.fail(ledger, book, kind, f"{reason}: {event.reason}", now)
            return
        reason = f"{self._host(ledger, sender)} and {self._host(ledger, event.peer)}: {event.reason}"
        self._mend_or_fail(ledger, book, reason, now)

    def _gift_missing(self, book: Book, oid: bytes, node: str) -> None:
        """Who gave it died before its node heard of it: what it gave since counts, or it has to give again."""
        for rank, gift in list(book.gifts.items()):
            if (gift.oid, gift.node) == (oid, node) and (rank in book.spares or not book.roster.seats[rank].address):
                self._replace(book, rank)

    def _replace(self, book: Book, rank: int) -> None:
        """A gift is gone."""
        spare = book.spares.pop(rank, None)
        if spare is not None and self.lives(spare.node):
            book.gifts[rank] = spare
        else:
            del book.gifts[rank]

    def stalled(self, ledger: Ledger, book: Book, now: float) -> None:
        """Nodes have not answered for too long."""
        hosts = ", ".join(self._host(ledger, node) for node in book.waiting)
        limit = seconds_text(ledger.timeout_s)
        self._mend_or_fail(ledger, book, f"no answer within {limit} and more from {hosts}", now)

    def _mend_or_fail(self, ledger: Ledger, book: Book, reason: str, now: float) -> None:
        book.stalls += self.lives_all(book)
        if book.stalls > STALLS_MAX:
            text = f"{step_text(book.step)} of group {ledger.name!r} was given up after {STALLS_MAX} repairs: {reason}"
            self.fail(ledger, book, "timeout", text, now)
        else:
            self.mend(ledger, book, now)

    def lives_all(self, book: Book) -> bool:
        """Whether no node of the course is known to be dead."""
        return book.course is None or all(self.lives(post.node) for post in book.course.posts)

    def _host(self, ledger: Ledger, node: str) -> str:
        host = next((seat.joined.host for seat in ledger.everybody() if seat.node == node), "")
        return f"host {host} ({node})" if host else f"node {node}"

    def mend(self, ledger: Ledger, book: Book, now: float) -> None:
        """Stop the course and ask what is whole; what is missing is planned anew."""
        book.mends += 1
        self.take_back(ledger, book, now)

    def take_back(self, ledger: Ledger, book: Book, now: float) -> None:
        """The same for a step that is not what was foreseen when it began early: nothing was lost."""
        assert book.course is not None
        book.epoch = self._next_epoch(ledger)
        book.state = ASKING
        nodes = [post.node for post in book.course.posts] + [node for node, _ in book.made]
        book.waiting = dict.fromkeys(node for node in nodes if self.lives(node))
        book.finals = {}
        book.due_s = now + max(ledger.timeout_s, self.desk.config.link_lost_after_s)
        self.arm(ledger, book.due_s, now)
        for node in book.waiting:
            self.desk.out.send(node, FinalsAsked(book.op, book.epoch))
        if not book.waiting:
            self.resume(ledger, book, now)

    def told(self, ledger: Ledger, book: Book, event: Finals, now: float, sender: str) -> None:
        """What is whole on a node."""
        if book.state == ASKING and event.epoch == book.epoch and sender in book.waiting:
            del book.waiting[sender]
            book.finals[sender] = event
            if not book.waiting:
                self.resume(ledger, book, now)

    def resume(self, ledger: Ledger, book: Book, now: float) -> None:
        """All have told: do what is missing, or wait for what has to be given again."""
        if book.awaited:  # from here on as any other step
            book.awaited, book.state = {}, OPEN
            self.look(ledger, book, now)
            return
        if not self._takers(ledger, book):
            self.ended(ledger, book, now)
            return
        missing = [rank for rank in book.missing() if gives(book.header(), book.step, rank)]
        if missing and not self._all_final(book):
            book.state = OPEN
            self.look(ledger, book, now)
            return
        book.epoch = self._next_epoch(ledger)
        finals = tuple(sorted(book.finals.items()))
        course = plan.repaired(self.plan_of(ledger, book), finals)
        # For one rank alone: what nodes have for the others of their members stays.
        self._send(ledger, book, course if book.only < 0 else msgspec.structs.replace(course, fresh=False), now)

    def _all_final(self, book: Book) -> bool:
        """Whether every byte of every result is whole on some node."""
        wanted = {oid: nbytes for (_, oid), (nbytes, ranks) in book.made.items() if ranks}
        for oid, nbytes in wanted.items():
            spans = sorted(span for finals in book.finals.values() for span in dict(finals.ranges).get(oid, ()))
            end = 0
            for first, last in spans:
                if first <= end:
                    end = max(end, last)
            if end < nbytes:
                return False
        return True

    def all_lost(self, ledger: Ledger, node: str, now: float) -> None:
        """A node is dead with what lay there: gifts have to be given again, courses go on without it."""
        ledger.kept_bytes.pop(node, None)
        for book in list(ledger.books.values()):
            self.lose(book, node, f"{self._host(ledger, node)} took it along")
            if book.state == RUNNING and book.course is not None:
                if any(post.node == node for post in book.course.posts):
                    self.mend(ledger, book, now)
            elif book.state == ASKING and book.waiting.pop(node, 0) is None and not book.waiting:
                self.resume(ledger, book, now)

    def lose(self, book: Book, node: str, why: str) -> None:
        """What a node had for a step is gone."""
        for rank in [rank for rank, gift in book.gifts.items() if gift.oid and gift.node == node]:
            self._replace(book, rank)
            book.lost[why] = None
        for rank, result in list(book.results.items()):
            if node in result.nodes:
                nodes = tuple(other for other in result.nodes if other != node)
                book.results[rank] = Result(result.blob, result.oid, result.nbytes, nodes)
                if not nodes:
                    book.lost[why] = None
        book.finals.pop(node, None)

    # --- what is kept -----------------------------------------------------------------------------

    def count(self, ledger: Ledger, book: Book, sign: int) -> None:
        """Add up what nodes keep for this group, or take it off."""
        gifts = [(gift.node, book.headers[rank].nbytes) for rank, gift in book.gifts.items() if gift.oid]
        results = [(node, result.nbytes) for result in book.results.values() if result.oid for node in result.nodes]
        ledger.blob_bytes += sign * sum(len(result.blob) for result in book.results.values())
        for node, nbytes in (*gifts, *results):
            ledger.kept_bytes[node] = max(0, ledger.kept_bytes.get(node, 0) + sign * nbytes)
