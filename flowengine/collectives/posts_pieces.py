"""The way of pieces through the posts of a node: folded as soon as all that is needed is here, and passed on.

A node sends whole pieces before partial ones and those of others before its own, so that a ring fills no memory. Before
a slow way out partial pieces of others wait: in each step at most as many bytes as one rank gave. They are always taken
in, since in a ring in which nobody takes anything all would wait for each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from flowengine.core.dispatch import Part, on
from flowengine.core.node_desk import Desk

from .posts_orders import (
    FINAL,
    PARTIAL,
    DropScratch,
    FoldPiece,
    Frame,
    PieceCame,
    PieceFolded,
    PieceSent,
    Place,
    SendPiece,
)
from .posts_state import Lane, Result, Stop, Work

OWN_PIECES_MAX = 16  # of one stop under way
LANE_PIECES_MAX = 4  # handed to the shell at once: the order among those that wait is still open


class Pieces(Part):
    """Moves the pieces of all steps; what begins and ends a step is in Posts."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.works: dict[bytes, Work] = {}
        self.lanes: dict[str, Lane] = {}
        self._due: list[tuple[Work, Stop]] = []  # stops that may begin more of their own pieces
        self._numbers = 0  # of scratch memory and of orders to send

    # --- for Posts --------------------------------------------------------------------------------

    def whole(self, work: Work, result: Result, now: float) -> None:
        """A result has all of its pieces."""
        raise NotImplementedError

    def finished(self, work: Work, now: float) -> None:
        """All that this node has to do for a step is done."""
        raise NotImplementedError

    def broken(self, work: Work, kind: str, peer: str, reason: str) -> None:
        """A step cannot go on here."""
        raise NotImplementedError

    def count(self, work: Work) -> None:
        """Find out what is to be done: for each result, and at all."""
        me = self.desk.me
        for stop in work.stops.values():
            each = 1 if stop.out >= 0 else 0
            result = work.results.get(stop.post.result)
            if stop.ends:
                each += 1 + sum(work.course.posts[target].node != me for target in stop.spreads)
                if result is not None:
                    result.left += stop.pieces
                    begin = stop.line.into
                    stop.is_held = stop.is_root and result.covers(begin, begin + stop.line.nbytes)
            work.left += each * stop.pieces

    def begin(self, work: Work, now: float) -> None:
        """All is open: begin with what waits for nobody."""
        self._due.extend((work, stop) for stop in work.stops.values() if stop.starts)
        self._go_on(work, now)

    def lane_lost(self, peer: str) -> None:
        """What was to go there does not go."""
        self.lanes.pop(peer, None)

    # --- events -----------------------------------------------------------------------------------

    def _live(self, op: bytes, epoch: int) -> Work | None:
        work = self.works.get(op)
        return work if work is not None and work.course.epoch == epoch and work.state == "open" else None

    @on(PieceCame)
    def _came(self, event: PieceCame, now: float, sender: str) -> None:
        frame = event.frame
        work = self._live(frame.op, frame.epoch)
        stop = work.stops.get((frame.line, frame.target)) if work is not None else None
        if work is None or stop is None:
            return  # the shell forgets the scratch memory of a step with the step
        if frame.stage == FINAL:
            place = Place(scratch=event.scratch) if event.scratch else stop.kept(frame.piece)
            self._whole_piece(work, stop, frame.piece, place)
        else:
            self._partial(work, stop, (frame.piece, frame.source), Place(scratch=event.scratch))
        self._go_on(work, now)

    @on(PieceFolded)
    def _folded(self, event: PieceFolded, now: float, sender: str) -> None:
        work = self._live(event.op, event.epoch)
        if work is None:
            return
        if event.kind:
            self.broken(work, event.kind, "", event.failure)
            return
        stop, piece = work.stops[event.line, event.post], event.piece
        *sources, target = work.folding.pop((event.line, piece, event.stage, event.post))
        for place in sources:
            if place.scratch and place.scratch != target.scratch:
                self._release(work, place)
        self._ended(work, stop, event.stage)
        if event.stage == PARTIAL:
            self._pass_on(work, stop, piece, target)
        else:
            self._whole_piece(work, stop, piece, target, spread=not self._is_plain(work, stop))
        self._go_on(work, now)

    @on(PieceSent)
    def _sent(self, event: PieceSent, now: float, sender: str) -> None:
        lane, frame = self.lanes.get(event.to), event.frame
        if lane is not None and frame in lane.under_way:
            del lane.under_way[frame]
            self._pump(lane)
        work = self._live(frame.op, frame.epoch)
        if work is None:
            return
        work.left -= 1
        self._release(work, event.source)
        self._ended(work, work.stops[frame.line, frame.source], frame.stage)
        self._go_on(work, now)

    # --- folding ----------------------------------------------------------------------------------

    def _go_on(self, work: Work, now: float) -> None:
        while self._due:
            due, stop = self._due.pop()
            while stop.next_piece < stop.pieces and stop.under_way < OWN_PIECES_MAX:
                piece = stop.next_piece
                stop.next_piece += 1
                if stop.is_held:
                    self._whole_piece(due, stop, piece, stop.kept(piece))
                else:
                    self._fold(due, stop, piece, [])
        for result in work.results.values():
            if result.state == "open" and not result.left and result.taken:
                self.whole(work, result, now)
        if not work.left and not work.told:
            self.finished(work, now)

    @staticmethod
    def _is_own(stop: Stop, stage: int) -> bool:
        """Whether a piece in this stage begins at this stop."""
        return stop.starts and (stage == PARTIAL or stop.is_root)

    def _ended(self, work: Work, stop: Stop, stage: int) -> None:
        """One fold or send has ended."""
        if self._is_own(stop, stage):
            stop.under_way -= 1
            if stop.next_piece < stop.pieces:
                self._due.append((work, stop))

    def _partial(self, work: Work, stop: Stop, key: tuple[int, int], place: Place) -> None:
        piece, source = key
        came = stop.came.setdefault(piece, {})
        came[source] = place
        if len(came) == len(stop.ins):
            del stop.came[piece]
            self._fold(work, stop, piece, [came[post] for post in stop.ins])

    def _is_plain(self, work: Work, stop: Stop) -> bool:
        """Whether the value is what the root's post gives, as it is."""
        return (stop.is_root and stop.starts and not stop.is_held and len(stop.post.gives) == 1
                and self._divisor(work, stop) == 1)

    @staticmethod
    def _divisor(work: Work, stop: Stop) -> int:
        return work.course.count if work.course.fold == "mean" and stop.is_root else 1

    def _fold(self, work: Work, stop: Stop, piece: int, came: Sequence[Place]) -> None:
        sources = (*came[:1], *stop.gifts(piece), *came[1:])
        stage = FINAL if stop.is_root else PARTIAL
        if len(sources) > 1 or self._divisor(work, stop) > 1:
            if stage == FINAL and stop.post.result:
                target = stop.kept(piece)
            else:
                target = sources[0] if sources[0].scratch else self._scratch()
            self._order(work, stop, (piece, stage, sources), target)
        elif stage == PARTIAL:
            self._pass_on(work, stop, piece, sources[0])
        elif not stop.post.result:
            self._whole_piece(work, stop, piece, sources[0])
        else:
            self._order(work, stop, (piece, FINAL, sources), stop.kept(piece))
            if self._is_plain(work, stop):
                self._spread(work, stop, piece, sources[0])

    def _scratch(self) -> Place:
        self._numbers += 1
        return Place(scratch=self._numbers)

    def _order(self, work: Work, stop: Stop, what: tuple[int, int, tuple[Place, ...]], target: Place) -> None:
        piece, stage, sources = what
        course = work.course
        if self._is_own(stop, stage):
            stop.under_way += 1
        work.folding[stop.number, piece, stage, stop.at] = (*sources, target)
        divisor = self._divisor(work, stop) if stage == FINAL else 1
        fold = course.fold if len(sources) > 1 or divisor > 1 else ""
        self.desk.out.add(FoldPiece(
            course.op, course.epoch, stop.number, piece, stage, stop.at, fold, stop.line.dtype, sources, target,
            stop.size(piece), divisor))

    def _pass_on(self, work: Work, stop: Stop, piece: int, place: Place) -> None:
        nearby = work.stops.get((stop.number, stop.out))
        if nearby is None:
            self._send(work, stop, (piece, PARTIAL, stop.out), place)
            return
        work.left -= 1
        self._partial(work, nearby, (piece, stop.at), place)

    # --- spreading --------------------------------------------------------------------------------

    def _whole_piece(self, work: Work, stop: Stop, piece: int, place: Place, spread: bool = True) -> None:
        """A piece is whole at a stop, and in its result if it keeps one."""
        work.left -= 1
        if stop.post.result:
            result = work.results[stop.post.result]
            if (stop.number, piece) not in result.done:
                result.done[stop.number, piece] = None
                result.left -= 1
                begin = stop.kept(piece).offset
                _add(result.ranges, begin, begin + stop.size(piece))
        if spread:
            self._spread(work, stop, piece, place)

    def _spread(self, work: Work, stop: Stop, piece: int, place: Place) -> None:
        if place.scratch:
            work.users[place.scratch] = work.users.get(place.scratch, 1) + len(stop.spreads)
        for target in stop.spreads:
            nearby = work.stops.get((stop.number, target))
            if nearby is None:
                self._send(work, stop, (piece, FINAL, target), place)
            elif not nearby.post.result or nearby.post.result == stop.post.result:
                self._whole_piece(work, nearby, piece, place)
            else:
                self._order(work, nearby, (piece, FINAL, (place,)), nearby.kept(piece))
        self._release(work, place)

    def _release(self, work: Work, place: Place) -> None:
        if not place.scratch:
            return
        users = work.users.pop(place.scratch, 1) - 1
        if users:
            work.users[place.scratch] = users
        else:
            self.desk.out.add(DropScratch(work.course.op, place.scratch))

    # --- sending ----------------------------------------------------------------------------------

    def _send(self, work: Work, stop: Stop, what: tuple[int, int, int], place: Place) -> None:
        piece, stage, target = what
        course = work.course
        own = self._is_own(stop, stage)
        if own:
            stop.under_way += 1
        frame = Frame(course.op, course.epoch, stop.number, piece, stage, stop.at, target, stop.size(piece))
        node = course.posts[target].node
        lane = self.lanes.get(node)
        if lane is None:
            lane = self.lanes[node] = Lane()
        self._numbers += 1
        rank = 2 if own else 1 if stage == PARTIAL else 0
        heapq.heappush(lane.heap, (rank, self._numbers, SendPiece(node, frame, place)))
        self._pump(lane)

    def _pump(self, lane: Lane) -> None:
        while lane.heap and len(lane.under_way) < LANE_PIECES_MAX:
            order = heapq.heappop(lane.heap)[2]
            work = self._live(order.frame.op, order.frame.epoch)
            if work is None:
                continue
            lane.under_way[order.frame] = None
            if work.again:
                self.desk.counters["bytes_sent_again"] += order.frame.nbytes
            self.desk.out.add(order)


def _add(ranges: list[tuple[int, int]], begin: int, end: int) -> None:
    """Add a range; the usual case, that it follows the last one, costs nothing more."""
    if ranges and ranges[-1][1] == begin:
        ranges[-1] = (ranges[-1][0], end)
    else:
        ranges.append((begin, end))
