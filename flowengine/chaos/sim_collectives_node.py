"""A virtual node of groups: what the shell of a node does for its ledgers and posts, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowengine.collectives import posts_orders as o
from flowengine.collectives.plan_ways import StepPlan, work_of
from flowengine.collectives.posts_state import ends_of
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.collective import Course, Layout

from .sim_collectives_programs import folded, mean_of
from .sim_node import SimNode

if TYPE_CHECKING:
    from .sim_world import World

FOLD_S = 0.0002
OPEN_S = 0.0005


@dataclass(slots=True, eq=False)
class Work:
    """A step under way: its course, results that are being made, and pieces that lie beside them."""

    course: Course
    blobs: dict[bytes, bytes]
    gifts: tuple[bytes, ...]
    sealed: list[bytes]  # results that are objects
    results: dict[bytes, bytearray] = field(default_factory=dict)
    scratch: dict[int, bytes] = field(default_factory=dict)
    is_open: bool = False
    is_stopped: bool = False


class Lane:
    """A stream from one node to another: ordered, it waits while a host is cut off, and it may break."""

    def __init__(self, source: GroupNode, to: str) -> None:
        self.source = source
        self.to = to
        self.busy_until_s = 0.0
        self.is_broken = False

    def carry(self, command: o.SendPiece, piece: bytes) -> None:
        """Send a piece; it arrives after all that was sent before, or never."""
        world = self.source.world
        due_s = self.busy_until_s = max(self.busy_until_s, world.clock.now + world.net.delay_s() + len(piece) * 1e-7)
        world.clock.after(due_s - world.clock.now, self.arrive, command, piece, world.clock.now)

    def arrive(self, command: o.SendPiece, piece: bytes, sent_s: float) -> None:
        """The oldest piece in flight has come, unless the lane broke or stands still for too long."""
        world, target = self.source.world, self.source.world.nodes.get(self.to)
        if self.is_broken:
            return
        if target is None or not target.alive or not self.source.alive:
            self.broke("the other end is gone")
        elif world.is_cut(self.source.host, target.host):
            if world.clock.now - sent_s > world.scenario.config.transfer_timeout_s:
                self.broke("nothing moves")
            else:
                self.busy_until_s = world.clock.now + 0.05
                world.clock.after(0.05, self.arrive, command, piece, sent_s)
        else:
            assert isinstance(target, GroupNode)
            target.run(target.came, command.frame, piece)
            self.source.run(self.source.step, o.PieceSent(self.to, command.frame, command.source))

    def broke(self, reason: str) -> None:
        """The stream is closed for both ends; what is in flight is lost."""
        if self.is_broken:
            return
        self.is_broken = True
        if self.source.lanes.get(self.to) is self:
            del self.source.lanes[self.to]
        world, target = self.source.world, self.source.world.nodes.get(self.to)
        self.source.later(world.net.delay_s(), o.LaneBroken(self.to, reason))
        if isinstance(target, GroupNode):
            target.later(world.net.delay_s(), o.LaneBroken(self.source.address, reason))


class GroupNode(SimNode):
    """A node process with its ledgers and posts."""

    def __init__(self, world: World, address: str, node_id: str) -> None:
        super().__init__(world, address, node_id)
        self.lanes: dict[str, Lane] = {}
        self.works: dict[bytes, Work] = {}
        self.ended: dict[bytes, int] = {}  # by op: frames up to this epoch are dropped
        self.early: dict[bytes, list[tuple[o.Frame, bytes]]] = {}  # that came before their course
        self.scratch_number = 0
        self.perform |= {
            o.PrepareCourse: self.do_prepare,
            o.AwaitCourse: lambda command: None,  # all that comes early is kept here
            o.FoldPiece: self.do_fold,
            o.SendPiece: self.do_send_piece,
            o.DropScratch: self.do_drop_scratch,
            o.SealResult: self.do_seal,
            o.StopCourse: self.do_stop,
            o.EndCourse: self.do_end,
            o.CloseLane: self.do_close_lane,
            c.CombineBlobs: self.do_combine,
            c.TrimPool: self.do_trim,
        }

    def deliver(self, message: m.Message, sender: str) -> None:
        """All is for the machine."""
        if isinstance(message, m.ObjectSealed) and sender in self.machine.desk.gone:
            return  # a link gives nothing out when it is lost
        super().deliver(message, sender)

    def do_send(self, command: c.Send) -> None:
        """Into the network, or back to the machine itself."""
        if command.to != self.address:
            super().do_send(command)
            return
        self.world.clock.after(0.0, self.run, self.step, command.message, self.address)

    def do_remove(self, command: c.RemoveObject) -> None:
        """Drop a segment; what this node wrote itself is answered."""
        super().do_remove(command)
        if command.writer:
            self.world.clock.after(0.0, self.run, self.step, m.SegmentKept(command.oid, 0, command.file), self.address)

    def do_trim(self, command: c.TrimPool) -> None:
        """There is no pool."""
        self.world.clock.after(0.0, self.run, self.step, m.PoolTrimmed(0), self.address)

    def do_combine(self, command: c.CombineBlobs) -> None:
        """A thread folds what members gave as blobs."""
        results, layout = combined(command.plan, dict(command.blobs))
        self.later(FOLD_S * self.world.dice.random(), c.BlobsCombined(command.op, command.epoch, results, layout))

    # --- courses ----------------------------------------------------------------------------------

    def do_prepare(self, command: o.PrepareCourse) -> None:
        """Open gifts, make room for results, keep those of an earlier epoch that are named."""
        course = command.course
        before = self.works.get(course.op)
        work = self.works[course.op] = Work(course, dict(course.blobs), command.gifts, list(command.kept))
        for oid, object_bytes in command.made:
            work.results[oid] = bytearray(object_bytes - o.HEAD_BYTES)
        for oid in command.kept:
            if before is not None and oid in before.results:
                work.results[oid] = before.results[oid]
        self.ended[course.op] = max(course.epoch - 1, self.ended.get(course.op, -1))
        ends = ends_of(course)
        missing = [oid for oid in command.gifts if len(self.memory.get(oid, b"")) < ends.get(oid, 1)]
        kind, reason = ("gift", f"{missing[0].hex()} is not here or too short") if missing else ("", "")
        self.world.clock.after(OPEN_S * self.world.dice.random(), self.run, self.prepared, work, kind, reason)

    def prepared(self, work: Work, kind: str, reason: str) -> None:
        """All is open: pieces that came early are taken."""
        course, work.is_open = work.course, True
        self.step(o.CoursePrepared(course.op, course.epoch, kind, reason))
        if self.works.get(course.op) is work:
            for frame, piece in self.early.pop(course.op, []):
                self.came(frame, piece)

    def do_stop(self, command: o.StopCourse) -> None:
        """Pieces that are under way are forgotten."""
        work = self.works.get(command.op)
        if work is not None:
            work.is_stopped = True
            work.scratch.clear()
        self.is_past(command.op, command.epoch)

    def is_past(self, op: bytes, epoch: int) -> None:
        """Pieces of this epoch and of earlier ones are dropped, those too that came before their course."""
        past = self.ended[op] = max(epoch, self.ended.get(op, -1))
        late = [(frame, piece) for frame, piece in self.early.pop(op, []) if frame.epoch > past]
        if late:
            self.early[op] = late

    def do_end(self, command: o.EndCourse) -> None:
        """All of the step but sealed results is dropped."""
        self.works.pop(command.op, None)
        self.is_past(command.op, command.epoch)

    def spilled(self, command: c.SpillObject) -> None:
        """What a step reads is mapped: it stays."""
        oid = command.oid
        if any(oid in work.gifts or oid in work.sealed for work in self.works.values()):
            self.step(c.ObjectSpilled(oid, 0, busy=True))
        else:
            super().spilled(command)

    def do_seal(self, command: o.SealResult) -> None:
        """A result becomes an object."""
        work = self.works[command.op]
        self.write(command.oid, bytes(work.results.pop(command.oid)), self.address)
        work.sealed.append(command.oid)

    def do_drop_scratch(self, command: o.DropScratch) -> None:
        """A piece is not needed any more."""
        work = self.works.get(command.op)
        if work is not None:
            del work.scratch[command.scratch]

    # --- pieces -----------------------------------------------------------------------------------

    def bytes_at(self, work: Work, place: o.Place, nbytes: int) -> bytes:
        """What lies at a place."""
        if place.scratch:
            found: bytes | bytearray = work.scratch[place.scratch]
        else:
            blob = work.blobs.get(place.oid, work.results.get(place.oid))
            found = self.memory[place.oid] if blob is None else blob
            found = found[place.offset : place.offset + nbytes]
        if len(found) != nbytes:
            raise AssertionError(f"{self.address} reads {nbytes} bytes at {place}, there are {len(found)}")
        return bytes(found)

    def put(self, work: Work, place: o.Place, piece: bytes) -> None:
        """Write to a place."""
        if place.scratch:
            work.scratch[place.scratch] = piece
        elif place.oid in work.results:
            work.results[place.oid][place.offset : place.offset + len(piece)] = piece
        elif self.memory[place.oid][place.offset : place.offset + len(piece)] != piece:
            raise AssertionError(f"{self.address}: a result that is sealed would change")

    def do_fold(self, command: o.FoldPiece) -> None:
        """A thread folds."""
        work = self.works[command.op]
        self.world.clock.after(FOLD_S * self.world.dice.random(), self.run, self.fold, work, command)

    def fold(self, work: Work, command: o.FoldPiece) -> None:
        """Folding ends."""
        if work.is_stopped or self.works.get(command.op) is not work:
            return
        first, *rest = (self.bytes_at(work, place, command.nbytes) for place in command.sources)
        for piece in rest:
            first = folded(command.fold, command.dtype, first, piece)
        if command.divide > 1:
            first = mean_of(command.dtype, first, command.divide)
        self.put(work, command.target, first)
        self.step(
            o.PieceFolded(command.op, command.epoch, command.line, command.piece, command.stage, command.post)
        )

    def do_send_piece(self, command: o.SendPiece) -> None:
        """Over the lane to that node, which is opened when there is none."""
        lane = self.lanes.get(command.to)
        if lane is None:
            lane = self.lanes[command.to] = Lane(self, command.to)
        piece = self.bytes_at(self.works[command.frame.op], command.source, command.frame.nbytes)
        lane.carry(command, piece)

    def do_close_lane(self, command: o.CloseLane) -> None:
        """Nobody is there any more."""
        lane = self.lanes.pop(command.peer, None)
        if lane is not None:
            lane.is_broken = True

    def came(self, frame: o.Frame, piece: bytes) -> None:
        """A piece arrives: into its result, beside it, or to wait for its course."""
        if frame.epoch <= self.ended.get(frame.op, -1):
            return
        work = self.works.get(frame.op)
        if work is None or not work.is_open or frame.epoch > work.course.epoch:
            if frame.op not in self.early:
                self.world.clock.after(o.EARLY_S, self.run, self.end_early, frame.op)
            self.early.setdefault(frame.op, []).append((frame, piece))
            return
        line, post = work.course.lines[frame.line], work.course.posts[frame.target]
        if frame.stage == o.FINAL and post.result:
            self.put(work, o.Place(post.result, line.into + frame.piece * line.piece_bytes), piece)
            self.step(o.PieceCame(frame))
            return
        self.scratch_number -= 1
        work.scratch[self.scratch_number] = piece
        self.step(o.PieceCame(frame, self.scratch_number))

    def end_early(self, op: bytes) -> None:
        """A course that its ledger took to its grave does not come."""
        if op not in self.machine.posts.works:
            self.early.pop(op, None)

    def known_segments(self) -> int:
        """What is in memory, but for what a process wrote and did not come to tell of."""
        return sum(oid in self.machine.store.entries or self.writers[oid] == self.address for oid in self.memory)

    def left(self) -> dict[str, int]:
        """Sizes of the books that must be empty in the end."""
        store = self.machine.store
        return {
            "objects": len(store.entries), "granted bytes": store.granted_bytes, "used bytes": store.used_bytes,
            "asks": len(store.asks), "segments": self.known_segments(), "files": len(self.disk),
            "steps under way": len(self.works), "pieces that wait": len(self.early),
        }  # fmt: skip


def combined(plan: StepPlan, blobs: dict[int, bytes]) -> tuple[tuple[tuple[int, bytes], ...], tuple[Layout, ...]]:
    """Results by rank, or -1 for all, of small gifts."""
    work, order, header = work_of(plan), plan.seating.order, plan.headers[0][1]
    results = {rank: bytearray(nbytes) for rank, nbytes in work.sizes}
    for way in work.ways:
        ranks = [order[(way.start + number) % len(order)] for number in range(way.count)]
        first, *rest = (blobs[rank][way.offset : way.offset + way.nbytes] for rank in ranks)
        for piece in rest:
            first = folded(header.fold, way.dtype, first, piece)
        if header.fold == "mean":
            first = mean_of(way.dtype, first, len(order))
        results[way.taker][way.into : way.into + way.nbytes] = first
    return tuple((rank, bytes(result)) for rank, result in results.items()), work.layout
