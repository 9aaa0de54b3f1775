"""The node shell's part for collectives: gifts and results in memory, folding by threads, lanes to other nodes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flowengine.collectives import folds
from flowengine.collectives.combine import perform_combine
from flowengine.collectives.lanes import Lanes, OpenStream
from flowengine.collectives.posts_orders import (
    EARLY_S,
    FINAL,
    AwaitCourse,
    CloseLane,
    CoursePrepared,
    DropScratch,
    EndCourse,
    FoldPiece,
    Frame,
    LaneBroken,
    PieceCame,
    PieceFolded,
    PieceSent,
    Place,
    PrepareCourse,
    SealResult,
    SendPiece,
    StopCourse,
)
from flowengine.collectives.posts_state import ends_of
from flowengine.core.commands import CombineBlobs, RemoveObject, TrimPool
from flowengine.core.messages import Message, PoolTrimmed, SegmentKept
from flowengine.errors import StoreFull
from flowengine.objects import codec
from flowengine.objects.warm_reads import IDLE_S, WarmReads

if TYPE_CHECKING:
    from flowengine.config import Config
    from flowengine.core.collective import Course
    from flowengine.objects.segments import Segment, Segments

log = logging.getLogger(__name__)

THREADS_MAX = 8
WRITTEN_BYTES_MIN = 2 << 20  # of a piece whose place in the result is not mapped yet
INLINE_BYTES_MAX = 4 << 20  # read by one fold; less is done on the loop, as a thread costs more
OPENED_BYTES_MAX = 8 << 20  # of gifts and results that are opened on the loop
EARLY_BYTES_MAX = 64 << 20  # of pieces whose course is not known here yet
SCRATCH_KEPT_BYTES_MAX = 64 << 20
PAST_MAX = 10_000
CREATE_THREADS = 2
WARM_S = 5.0  # so long after a step the memory of results is kept for the next

Step = Callable[[Message, str], None]
Failure = tuple[str, str]  # kind and reason, if any


@dataclass(slots=True, eq=False)
class Opened:
    """What one step holds in memory on this node."""

    course: Course
    is_ready: bool = False  # its pieces may come
    objects: dict[bytes, memoryview] = field(default_factory=dict)  # gifts and results
    segments: dict[bytes, Segment] = field(default_factory=dict)  # results that are not sealed
    begins: dict[bytes, int] = field(default_factory=dict)  # of their arrays, in bytes
    scratch: dict[int, memoryview] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Landing:
    """Where a piece goes that is on its way in."""

    frame: Frame
    view: memoryview
    in_result: bool = False
    is_early: bool = False  # it came before its course could begin
    early_bytes: int = 0  # counted as such
    came_s: float = 0.0


class GiftMissing(Exception):
    """What was given is not there, or nothing that can be folded."""


class Scratch:
    """Memory for pieces on their way, used again and again; bounded while it is idle."""

    def __init__(self) -> None:
        self._free: dict[int, list[memoryview]] = {}
        self.kept_bytes = 0

    def take(self, nbytes: int) -> memoryview:
        """Memory of this size, with anything in it."""
        free = self._free.get(nbytes)
        if free:
            self.kept_bytes -= nbytes
            return free.pop()
        return np.empty(nbytes, np.uint8).data

    def give(self, view: memoryview) -> None:
        """Nobody looks at this any more."""
        nbytes = len(view)
        if self.kept_bytes + nbytes > SCRATCH_KEPT_BYTES_MAX:
            self._free.clear()
            self.kept_bytes = 0
        self._free.setdefault(nbytes, []).append(view)
        self.kept_bytes += nbytes


class Collectives:
    """Performs the orders of Posts; on the node's loop. The pool of warm segments is its own, apart from pulls."""

    def __init__(self, segments: Segments, warm: Segments, open_stream: OpenStream, config: Config) -> None:
        self.me = ""
        self.step: Step
        self.remove_other: Callable[[RemoveObject], None]  # what this part did not write
        self._segments = segments
        self._warm = warm
        self._gifts = WarmReads(segments.folder)
        self.lanes = Lanes(open_stream, config.transfer_timeout_s, self)
        self.opened: dict[bytes, Opened] = {}
        self.scratch = Scratch()
        self.early: dict[bytes, list[Landing]] = {}
        self.early_bytes = 0
        self._less_early = asyncio.Event()
        self.awaited: dict[bytes, int] = {}  # op: its epoch, of courses that cannot be opened yet
        self._sweeping = False
        self._ended_s = 0.0  # when a step ended last
        self._past: OrderedDict[bytes, int] = OrderedDict()  # op: pieces up to this epoch are late
        self._numbers = 0  # of scratch memory that pieces came into, downwards
        self._count = min(os.cpu_count() or 1, THREADS_MAX)
        self._folders = ThreadPoolExecutor(self._count, "fold")
        self._openers = ThreadPoolExecutor(CREATE_THREADS, "open")
        self._tasks: set[asyncio.Task[None]] = set()
        self.orders: dict[type, Callable[..., None]] = {
            AwaitCourse: self.wait,
            PrepareCourse: self.prepare, FoldPiece: self.fold, SendPiece: self.send, DropScratch: self.drop_scratch,
            SealResult: self.seal, StopCourse: self.stop, EndCourse: self.end, CloseLane: self.close_lane,
            CombineBlobs: self.combine, TrimPool: self.trim, RemoveObject: self.remove,
        }  # fmt: skip

    def close(self) -> None:
        """Drop what is under way."""
        for task in self._tasks:
            task.cancel()
        self.lanes.close()
        self._folders.shutdown(wait=False, cancel_futures=True)
        self._openers.shutdown(wait=False, cancel_futures=True)

    # --- objects ----------------------------------------------------------------------------------

    def wait(self, order: AwaitCourse) -> None:
        """Take what comes for it, however much: who waits for the same lane is not to wait for whom this waits."""
        self.awaited[order.op] = order.epoch

    def prepare(self, order: PrepareCourse) -> None:
        """Open gifts, and make room for results, which may take long."""
        op = order.course.op
        self.awaited.pop(op, None)
        old = self.opened.pop(op, None)
        now = self.opened[op] = Opened(order.course)
        if old is not None:
            self._past_of(op, old.course.epoch)
            for oid in order.kept:
                if oid in old.objects:
                    now.objects[oid] = old.objects[oid]
                if oid in old.segments:
                    now.segments[oid] = old.segments.pop(oid)
                    now.begins[oid] = old.begins[oid]
            _abort(old)
        given_bytes = len(order.gifts) * max((line.offset + line.nbytes for line in order.course.lines), default=0)
        if given_bytes + sum(object_bytes for _, object_bytes in order.made) <= OPENED_BYTES_MAX:
            made = Opened(order.course)
            self._prepared(now, made, self._open(order, now, made))
            return
        task = asyncio.get_running_loop().create_task(self._prepare(order, now))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prepare(self, order: PrepareCourse, opened: Opened) -> None:
        made = Opened(order.course)
        run = asyncio.get_running_loop().run_in_executor
        self._prepared(opened, made, await run(self._openers, self._open, order, opened, made))

    def _open(self, order: PrepareCourse, opened: Opened, made: Opened) -> Failure:
        try:
            self._open_all(order, opened, made)
        except GiftMissing as error:
            return "gift", str(error)
        except (StoreFull, OSError) as error:
            return "store", str(error)
        except Exception as error:
            log.exception("a step cannot begin")
            return "gift", f"{type(error).__name__}: {error}"
        return "", ""

    def _prepared(self, opened: Opened, made: Opened, failure: Failure) -> None:
        course, (kind, reason) = made.course, failure
        if kind or self.opened.get(course.op) is not opened:
            _abort(made)
        else:
            opened.objects.update(made.objects)
            opened.segments.update(made.segments)
            opened.begins.update(made.begins)
        opened.is_ready = not kind
        self.step(CoursePrepared(course.op, course.epoch, kind, reason), "")
        if opened.is_ready:
            self._replay(course.op)

    def _open_all(self, order: PrepareCourse, opened: Opened, made: Opened) -> None:
        course = order.course
        for oid in order.gifts:
            view = self._gifts.open(oid.hex())
            found = codec.array_bytes(view) if view is not None else None
            if found is None:
                raise GiftMissing(f"{oid.hex()} is {'not here' if view is None else 'no contiguous array'}")
            made.objects[oid] = found
        for oid, blob in course.blobs:
            made.objects[oid] = memoryview(blob)
        self._check(course, made)
        sizes = {post.result: post.result_bytes for post in course.posts}
        is_alone = all(post.node == self.me for post in course.posts)
        for oid in order.kept if not is_alone else ():
            if oid in opened.segments:
                opened.segments[oid].allocate()  # pieces of others come straight into its view
        for oid, object_bytes in order.made:
            segment = self._warm.create(oid.hex(), object_bytes, is_alone and object_bytes >= WRITTEN_BYTES_MIN)
            made.segments[oid] = segment
            array = course.array
            kind = (array.dtype, array.shape) if array is not None else ("|u1", (sizes[oid],))
            begin = codec.write_array_head(segment.view, oid.hex().encode(), kind, sizes[oid])
            made.begins[oid] = begin
            made.objects[oid] = segment.view[begin : begin + sizes[oid]]
        for oid in order.kept:
            view = self._segments.open(oid.hex()) if oid not in opened.objects else None
            found = codec.array_bytes(view) if view is not None else None
            if found is not None:
                made.objects[oid] = found

    @staticmethod
    def _check(course: Course, made: Opened) -> None:
        """Whether what is given is long enough for what is to be read of it."""
        for oid, end in ends_of(course).items():
            view = made.objects.get(oid)
            if view is not None and end > len(view):
                raise GiftMissing(f"{oid.hex()} has {len(view)} bytes, {end} are needed")

    def seal(self, order: SealResult) -> None:
        """Let a result be found; what still goes out of it stays mapped."""
        opened = self.opened[order.op]
        opened.segments.pop(order.oid).seal()

    def stop(self, order: StopCourse) -> None:
        """Drop pieces, keep results."""
        opened = self.opened.get(order.op)
        self._past_of(order.op, order.epoch)
        if opened is not None:
            opened.is_ready = False
            opened.scratch.clear()

    def end(self, order: EndCourse) -> None:
        """Drop everything."""
        loop = asyncio.get_running_loop()
        self._ended_s = loop.time()
        self._sweep_later(loop)
        opened = self.opened.pop(order.op, None)
        self._past_of(order.op, order.epoch)
        if opened is not None:
            _abort(opened)

    def _sweep_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._sweeping:
            self._sweeping = True
            loop.call_later(IDLE_S, self._sweep)

    def _sweep(self) -> None:
        """Give back what lies warm when no step has ended for a while, and what has come for nothing."""
        loop = asyncio.get_running_loop()
        self._end_early()
        is_warm = self._gifts.sweep() or loop.time() - self._ended_s < WARM_S
        if not is_warm and self._warm.pool_bytes:
            self.step(PoolTrimmed(self._warm.trim(self._warm.pool_bytes)), self.me)
        self._sweeping = False
        if is_warm or self.early:
            self._sweep_later(loop)

    def remove(self, order: RemoveObject) -> None:
        """Drop an object; the memory of what this node wrote is kept warm."""
        name = order.oid.hex()
        if order.writer:
            self.step(SegmentKept(order.oid, self._warm.free(name, order.file), order.file), self.me)
        else:
            self.remove_other(order)
            self._warm.forget(name)

    def trim(self, order: TrimPool) -> None:
        """Give warm memory back."""
        self.step(PoolTrimmed(self._warm.trim(order.size_bytes)), self.me)

    # --- pieces -----------------------------------------------------------------------------------

    def _view(self, opened: Opened, place: Place, nbytes: int) -> memoryview:
        if place.scratch:
            view = opened.scratch.get(place.scratch)
            if view is None:
                view = opened.scratch[place.scratch] = self.scratch.take(nbytes)
            return view
        return opened.objects[place.oid][place.offset : place.offset + nbytes]

    def fold(self, order: FoldPiece) -> None:
        """Fold here and now what is small, else by all threads."""
        opened, nbytes = self.opened[order.op], order.nbytes
        sources = [self._view(opened, place, nbytes) for place in order.sources]
        kind = (order.fold, order.dtype, order.divide)
        if self._is_written(opened, order):
            segment, begin = opened.segments[order.target.oid], opened.begins[order.target.oid] + order.target.offset
            # Pages that nobody has mapped: to write them past the mapping costs half of what the faults would.
            self._begin_fold(order, [partial(_written, kind, segment, begin + part.start,
                                             [source[part] for source in sources])
                                     for part in folds.slices(nbytes, self._count)])
            return
        target = self._view(opened, order.target, nbytes)
        if nbytes * len(sources) <= INLINE_BYTES_MAX:
            failure = _folded(kind, target, sources)
            self._tell_folded(order, failure)
            return
        self._begin_fold(order, [partial(_folded, kind, target[part], [source[part] for source in sources])
                                 for part in folds.slices(nbytes, self._count)])

    def _begin_fold(self, order: FoldPiece, parts: Sequence[Callable[[], Failure]]) -> None:
        task = asyncio.get_running_loop().create_task(self._fold(order, parts))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fold(self, order: FoldPiece, parts: Sequence[Callable[[], Failure]]) -> None:
        run = asyncio.get_running_loop().run_in_executor
        failures = await asyncio.gather(*(run(self._folders, part) for part in parts))
        self._tell_folded(order, max(failures))

    @staticmethod
    def _is_written(opened: Opened, order: FoldPiece) -> bool:
        """Whether a large part of a new result is made here at once."""
        segment = opened.segments.get(order.target.oid) if not order.target.scratch else None
        if segment is None:
            return False
        return segment.is_hollow or (segment.is_new and order.nbytes >= WRITTEN_BYTES_MIN)

    def _tell_folded(self, order: FoldPiece, failure: Failure) -> None:
        kind, reason = failure
        self.step(PieceFolded(order.op, order.epoch, order.line, order.piece, order.stage, order.post, reason, kind),
                  "")

    def drop_scratch(self, order: DropScratch) -> None:
        """Use it again."""
        opened = self.opened.get(order.op)
        view = opened.scratch.pop(order.scratch, None) if opened is not None else None
        if view is not None:
            self.scratch.give(view)

    def send(self, order: SendPiece) -> None:
        """Put a piece on its lane."""
        opened = self.opened[order.frame.op]
        self.lanes.send(order.to, order.frame, self._view(opened, order.source, order.frame.nbytes), order)

    def combine(self, order: CombineBlobs) -> None:
        """A small step is done here and now."""
        self.step(perform_combine(order), "")

    def close_lane(self, order: CloseLane) -> None:
        """The other end is dead."""
        self.lanes.close_lane(order.peer)

    # --- what comes (Inlet) -----------------------------------------------------------------------

    def sent(self, to: str, order: SendPiece) -> None:
        """A piece is with the kernel."""
        self.step(PieceSent(to, order.frame, order.source), "")

    def broken(self, peer: str, reason: str) -> None:
        """A lane ended."""
        self.step(LaneBroken(peer, reason), "")

    async def room(self, frame: Frame) -> Landing:
        """The result itself for a whole piece, scratch memory for all else; waits while too much is early."""
        opened = self._ready(frame)
        if opened is not None:
            result = opened.course.posts[frame.target].result if frame.stage == FINAL else b""
            if not result:
                return Landing(frame, self.scratch.take(frame.nbytes))
            return Landing(frame, self._kept(opened, frame, result), in_result=True)
        landing = Landing(frame, self.scratch.take(frame.nbytes))
        if not self._is_late(frame):
            landing.is_early = True
            if self.awaited.get(frame.op) != frame.epoch:
                while self.early_bytes and self.early_bytes + frame.nbytes > EARLY_BYTES_MAX and not self._end_early():
                    self._less_early.clear()
                    await self._less_early.wait()
                self.early_bytes += frame.nbytes
                landing.early_bytes = frame.nbytes
        return landing

    def came(self, landing: Landing) -> None:
        """All bytes of a piece are there."""
        frame, opened = landing.frame, self._ready(landing.frame)
        if opened is not None:
            self._not_early(landing)
            self._deliver(opened, landing)
        elif landing.is_early and not self._is_late(frame):
            loop = asyncio.get_running_loop()
            landing.came_s = loop.time()
            self.early.setdefault(frame.op, []).append(landing)
            self._sweep_later(loop)
        else:
            self.failed(landing)

    def failed(self, landing: Landing) -> None:
        """A piece is not wanted, or the rest of it does not come."""
        self._not_early(landing)
        if not landing.in_result:
            self.scratch.give(landing.view)

    def _deliver(self, opened: Opened, landing: Landing) -> None:
        frame, number = landing.frame, 0
        if not landing.in_result:
            result = opened.course.posts[frame.target].result if frame.stage == FINAL else b""
            if result:
                self._kept(opened, frame, result)[:] = landing.view
                self.scratch.give(landing.view)
            else:
                self._numbers -= 1
                number = self._numbers
                opened.scratch[number] = landing.view
        self.step(PieceCame(frame, number), "")

    @staticmethod
    def _kept(opened: Opened, frame: Frame, result: bytes) -> memoryview:
        line = opened.course.lines[frame.line]
        at = line.into + frame.piece * line.piece_bytes
        if frame.nbytes != min(line.piece_bytes, line.nbytes - frame.piece * line.piece_bytes):
            raise ConnectionError(f"a piece of {frame.nbytes} bytes does not belong to its line")
        return opened.objects[result][at : at + frame.nbytes]

    def _ready(self, frame: Frame) -> Opened | None:
        opened = self.opened.get(frame.op)
        is_ready = opened is not None and opened.is_ready and opened.course.epoch == frame.epoch
        return opened if is_ready else None

    def _is_late(self, frame: Frame) -> bool:
        opened = self.opened.get(frame.op)
        return self._past.get(frame.op, -1) >= frame.epoch or (
            opened is not None and opened.course.epoch > frame.epoch)

    def _past_of(self, op: bytes, epoch: int) -> None:
        if self.awaited.get(op, epoch + 1) <= epoch:
            del self.awaited[op]
        self._past[op] = max(epoch, self._past.pop(op, -1))
        if len(self._past) > PAST_MAX:
            self._past.popitem(last=False)
        self._replay(op)

    def _replay(self, op: bytes) -> None:
        """Look again at pieces that came early."""
        for landing in self.early.pop(op, ()):
            self.came(landing)

    def _not_early(self, landing: Landing) -> None:
        if landing.is_early:
            landing.is_early = False
            self.early_bytes -= landing.early_bytes
            self._less_early.set()

    def _end_early(self) -> bool:
        """Drop what came so long ago that its course will not come; whether there was any."""
        before_s = asyncio.get_running_loop().time() - EARLY_S
        old = [op for op, landings in self.early.items()
               if landings[-1].came_s < before_s and op not in self.awaited]
        for op in old:
            for landing in self.early.pop(op):
                self.failed(landing)
        return bool(old)


def _folded(kind: tuple[str, str, int], target: memoryview, sources: Sequence[memoryview]) -> Failure:
    """Fold; why it could not be done."""
    try:
        folds.fold(kind, target, sources)
    except (ValueError, TypeError) as error:
        return "gift", str(error)
    return "", ""


def _written(kind: tuple[str, str, int], segment: Segment, begin: int, sources: Sequence[memoryview]) -> Failure:
    """Fold into a segment from `begin` on; why it could not be done."""
    try:
        folds.fold_away(kind, lambda at, chunk: segment.write(begin + at, chunk), sources)
    except (ValueError, TypeError) as error:
        return "gift", str(error)
    except (StoreFull, OSError) as error:
        return "store", str(error)
    return "", ""


def _abort(opened: Opened) -> None:
    for segment in opened.segments.values():
        segment.abort()
    opened.segments.clear()
