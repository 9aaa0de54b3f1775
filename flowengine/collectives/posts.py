"""A node's side of collectives: it carries courses out, and keeps results for those who may repeat a step."""

from __future__ import annotations

from msgspec.structs import replace

from flowengine.core.collective import (
    BlobsReady,
    Course,
    CourseBroken,
    CourseDone,
    Finals,
    FinalsAsked,
    GiftCame,
    HeldAsked,
    Layout,
    Post,
    StepDone,
    StepEnded,
    StepsForgotten,
)
from flowengine.core.dispatch import on
from flowengine.core.messages import (
    ObjectHere,
    ObjectMissing,
    ObjectSealed,
    ObjectWanted,
    SpaceAsked,
    SpaceGiven,
    SpaceReturned,
)
from flowengine.core.node_desk import Desk
from flowengine.core.node_objects import mib
from flowengine.core.node_store import Store

from .plan_ways import result_name
from .posts_kept import LEFT_S, Kept, is_past
from .posts_orders import (
    HEAD_BYTES,
    AwaitCourse,
    CloseLane,
    CoursePrepared,
    CourseWaits,
    EndCourse,
    LaneBroken,
    PrepareCourse,
    SealResult,
    StopCourse,
)
from .posts_pieces import Pieces
from .posts_state import Result, Work, gifts_of, layout_for, neighbours, stops_of

Takers = tuple[tuple[int, str], ...]

GIFT_PATIENCE_S = 1.0  # what was given may be told to the ledger a moment before it is told to the store
GIFT_RETRY_S = 0.02


class Posts(Pieces):
    """Begins and ends steps; laws P-1 and P-2."""

    def __init__(self, desk: Desk, store: Store) -> None:
        super().__init__(desk)
        self.store = store
        self.kept = Kept(desk, store)
        self.orphans: dict[bytes, float] = {}  # groups whose ledger's node is lost, since when
        self._requests = 0
        self._asked: dict[int, tuple[Course, int]] = {}  # request for room: for which course, and the bytes

    # --- a course begins --------------------------------------------------------------------------

    @on(Course)
    def _course(self, event: Course, now: float, sender: str) -> None:
        known = self.works.get(event.op)
        if known is not None and event.epoch <= known.course.epoch:
            return
        mine = [post for post in event.posts if post.node == self.desk.me]
        if not mine:
            if known is not None and not known.told:
                self._stop(known)
            return
        carried = self._carried(known, event)
        group = self.kept.group(event.group)
        self.heard(event.group, sender)
        group.epoch = max(group.epoch, event.epoch)
        work = Work(event, sender, now, again=known is not None or not event.fresh)
        work.results = self._results(event, mine, carried)
        for result in carried.values():
            self._drop(result)
        work.stops = stops_of(event, self.desk.me)
        self.count(work)
        work.peers = dict.fromkeys(neighbours(event, self.desk.me))
        given = gifts_of(event, self.desk.me)
        needed = dict.fromkeys(oid for stop in work.stops.values() if stop.folds for _, oid in stop.post.gives)
        work.gifts = {oid: None for oid in needed if oid in given}
        work.given = {**(known.given if known is not None else {}), **given}
        work.awaited = {oid: None for oid in event.awaited if oid in work.gifts}
        if work.awaited:
            self.desk.out.add(AwaitCourse(event.op, event.epoch))
        self.kept.used(iter(given))
        self.works[event.op] = work
        self._ask(work, now)
        self._prepare(work, now)

    def _carried(self, known: Work | None, course: Course) -> dict[bytes, Result]:
        """Results of earlier epochs; those that are whole may be kept for long."""
        carried = dict(known.results) if known is not None else {}
        kept = self.kept.step_of(course.group, course.op)
        if kept is not None and course.fresh:
            for oid in kept.objects:
                carried.pop(oid, None)
            self.kept.forget(course.group, course.op, gifts_of(course, self.desk.me))
        elif kept is not None:
            for oid, (rank, nbytes) in kept.objects.items():
                carried[oid] = Result(oid, nbytes - HEAD_BYTES, rank, "sealed")
        return carried

    def _results(self, course: Course, mine: list[Post], carried: dict[bytes, Result]) -> dict[bytes, Result]:
        """The results to be made here, each once; what can stay of earlier epochs is taken out of the carried ones."""
        results: dict[bytes, Result] = {}
        for post in mine:
            if not post.result or post.result in results:
                continue
            old = carried.get(post.result)
            if (old is not None and not course.fresh and old.state in ("open", "sealed")
                    and old.nbytes == post.result_bytes):
                del carried[post.result]
                old.left, old.done = 0, {}
                results[post.result] = old
                continue
            shared = post.result == result_name(course.group, course.step, -1)
            rank = post.takers[0][0] if post.takers and not shared else -1
            results[post.result] = Result(post.result, post.result_bytes, rank)
        takers = {post.result: None for post in mine if post.takers}
        for result in results.values():
            result.taken = course.fresh or result.oid in takers
        return results

    def _ask(self, work: Work, now: float) -> None:
        """Ask the store for room and for what was given."""
        me, out = self.desk.me, self.desk.out
        self._look_for_gifts(work, now)
        for result in work.results.values():
            if result.state == "asked" and work.state == "begun":
                self._requests += 1
                work.asks[self._requests] = result.oid
                self._asked[self._requests] = (work.course, result.object_bytes)
                out.send(me, SpaceAsked(self._requests, result.object_bytes))

    def _is_too_much(self, work: Work) -> bool:
        """Whether what is given and made here can never be in memory at once; the course is broken then."""
        given = [self.store.entries[oid].size_bytes for oid in work.gifts if oid in self.store.entries]
        need_bytes = sum(given) + sum([result.object_bytes for result in work.results.values()])
        if need_bytes <= self.store.limit_bytes:
            return False
        need, limit = mib(need_bytes), mib(self.store.limit_bytes)
        reason = f"the step needs {need} at once, and the limit of the store is {limit}"
        self.broken(work, "store", "", f"{reason}; give init a larger object_store_bytes")
        return True

    def _look_for_gifts(self, work: Work, now: float) -> None:
        """Have those brought back that are not in memory, or not any more."""
        if self._is_too_much(work):
            return
        for oid in work.gifts:
            entry = self.store.entries.get(oid)
            if oid in work.awaited:
                work.missing[oid] = None
            elif entry is None or entry.place != "memory" or entry.running:
                work.missing[oid] = None
                self.desk.out.send(self.desk.me, ObjectWanted(oid, 0, self.desk.me, ()))
            else:
                entry.wanted_s = now  # not written to disk before it is opened

    @on(SpaceGiven)
    def _space_given(self, event: SpaceGiven, now: float, sender: str) -> None:
        course, nbytes = self._asked.pop(event.request)
        work = self.works.get(course.op)
        if work is None or work.course is not course:
            if event.granted:
                self.desk.out.send(self.desk.me, SpaceReturned(nbytes))
            return
        result = work.results[work.asks.pop(event.request)]
        if event.granted:
            result.state = "granted"
            self._prepare(work, now)
        else:
            result.state = "refused"
            self.broken(work, "store", "", f"{event.kind}: {event.reason}")

    @on(ObjectHere)
    def _here(self, event: ObjectHere, now: float, sender: str) -> None:
        for work in list(self.works.values()):
            if event.oid in work.missing:
                del work.missing[event.oid]
                self._prepare(work, now)

    @on(ObjectMissing)
    def _missing(self, event: ObjectMissing, now: float, sender: str) -> None:
        for work in list(self.works.values()):
            if event.oid not in work.missing or work.state != "begun":
                continue
            if work.course.owner or now - work.began_s > GIFT_PATIENCE_S:  # inputs of a task were there before it began
                self.broken(work, "gift", "", f"{event.oid.hex()}: {event.reason}", event.oid)
            else:
                self.desk.out.timer(GIFT_RETRY_S, CourseWaits(work.course.op, work.course.epoch))

    @on(GiftCame)
    def _gift_came(self, event: GiftCame, now: float, sender: str) -> None:
        work = self.works.get(event.op)
        if work is None or work.course.epoch != event.epoch or event.gift not in work.awaited:
            return
        del work.awaited[event.gift]
        work.missing.pop(event.gift, None)
        if work.state == "begun":
            work.began_s = now
            self._look_for_gifts(work, now)
            self._prepare(work, now)

    @on(CourseWaits)
    def _waits(self, event: CourseWaits, now: float, sender: str) -> None:
        work = self.works.get(event.op)
        if work is not None and work.course.epoch == event.epoch and work.state == "begun":
            for oid in work.missing:
                self.desk.out.send(self.desk.me, ObjectWanted(oid, 0, self.desk.me, ()))

    def _prepare(self, work: Work, now: float) -> None:
        if work.state != "begun" or work.asks or work.missing:
            return
        self._look_for_gifts(work, now)
        if work.missing:
            return  # they made room for the results
        work.state = "prepared"
        made = tuple((result.oid, result.object_bytes) for result in work.results.values()
                     if result.state == "granted")
        kept = tuple(oid for oid in work.results if work.results[oid].state in ("open", "sealed"))
        self.desk.out.add(PrepareCourse(work.course, tuple(work.gifts), made, kept))

    @on(CoursePrepared)
    def _prepared(self, event: CoursePrepared, now: float, sender: str) -> None:
        work = self.works.get(event.op)
        if work is None or work.course.epoch != event.epoch:
            return
        if event.kind:
            for result in work.results.values():
                if result.state == "granted":
                    self._drop(result)
            self.broken(work, event.kind, "", event.reason)
            return
        for result in work.results.values():
            if result.state == "granted":
                result.state = "open"
        if work.state != "prepared":
            return  # stopped meanwhile
        work.state = "open"
        for result in work.results.values():
            if result.state == "sealed":
                self._tell_takers(work, result)
        self.begin(work, now)

    # --- it goes well -----------------------------------------------------------------------------

    def whole(self, work: Work, result: Result, now: float) -> None:
        """A result has all of its pieces: it becomes an object, and its takers hear of it."""
        course, me = work.course, self.desk.me
        result.state = "sealed"
        self.desk.out.add(SealResult(course.op, result.oid))
        self.desk.out.send(me, ObjectSealed(result.oid, result.object_bytes, course.owner or me))
        if not course.owner:
            self.kept.keep_result(course, result)
        self._tell_takers(work, result)

    def _tell_takers(self, work: Work, result: Result) -> None:
        course, me = work.course, self.desk.me
        much = self.kept.is_much(course.group)
        for post in course.posts:
            if post.node == me and post.result == result.oid:
                done = StepDone(course.group, course.step, b"", result.oid, result.object_bytes, (me,))
                self._tell(done, post.takers, course.layout, much)

    def _tell(self, done: StepDone, takers: Takers, layout: tuple[Layout, ...], much: bool) -> None:
        for rank, address in takers:
            if address:  # else it is kept for one that may come back
                parts = layout_for(layout, rank)
                self.desk.out.send(address, replace(done, layout=parts, checkpoint=much, rank=rank))

    def finished(self, work: Work, now: float) -> None:
        """All results are whole and all pieces are sent."""
        work.told = True
        if work.course.owner and work.results:  # a task's: no ledger counts it
            self.desk.counters["collectives_done"] += 1
            self.desk.counters["collectives_repaired"] += work.course.epoch > 0
        self.desk.out.send(work.ledger, CourseDone(work.course.op, work.course.epoch))

    @on(StepEnded)
    def _step_ended(self, event: StepEnded, now: float, sender: str) -> None:
        work = self.works.get(event.op)
        if event.gifts:
            self.kept.free(event.gifts, present=False)
        elif work is not None:
            self._end(work)

    def _end(self, work: Work) -> None:
        """Lets go of a step; what is whole stays for those who may repeat it."""
        course = work.course
        del self.works[course.op]
        self.desk.out.add(EndCourse(course.op, course.epoch))
        for result in work.results.values():
            self._drop(result)
        if course.owner:
            return  # what was given is not this node's
        kept = self.kept.step_of(course.group, course.op)
        if course.keeps_gifts and (kept is None or not kept.failed[0]):
            self.kept.keep_gifts(course, tuple(work.given))
            return
        self.kept.free(tuple(work.given))
        # Of these the store may hear after the ledger: its members have given, on the same host but another way.
        late = [oid for oid in work.missing if oid not in work.awaited and oid not in self.store.entries]
        self.kept.free(tuple(late), present=False)

    def _drop(self, result: Result) -> None:
        """A result that is not whole is not needed; its room is given back, if it was given."""
        if result.state in ("granted", "open"):
            self.desk.out.send(self.desk.me, SpaceReturned(result.object_bytes))
        if result.state != "sealed":
            result.state = "dropped"

    # --- it does not ------------------------------------------------------------------------------

    def _stop(self, work: Work) -> None:
        work.state = "stopped"
        self.desk.out.add(StopCourse(work.course.op, work.course.epoch))

    def broken(self, work: Work, kind: str, peer: str, reason: str, gift: bytes = b"") -> None:
        """The ledger is told once; what is whole stays until it says how to go on."""
        if work.state in ("stopped", "broken"):
            return
        work.state = "broken"
        course = work.course
        self.desk.out.send(work.ledger, CourseBroken(course.op, course.epoch, kind, peer, reason, gift))

    @on(FinalsAsked)
    def _finals_asked(self, event: FinalsAsked, now: float, sender: str) -> None:
        work = self.works.get(event.op)
        ranges: tuple[tuple[bytes, tuple[tuple[int, int], ...]], ...] = ()
        if work is not None:
            work.ledger = sender
            self._stop(work)
            found = ((result.oid, result.merged()) for result in work.results.values()
                     if result.state in ("open", "sealed"))
            ranges = tuple((oid, parts) for oid, parts in found if parts)
        else:
            kept = self.kept.find(event.op)
            if kept is not None:
                ranges = tuple((oid, ((0, nbytes - HEAD_BYTES),)) for oid, (_, nbytes) in kept.objects.items()
                               if nbytes > HEAD_BYTES)
        self.desk.out.send(sender, Finals(event.op, event.epoch, ranges))

    @on(LaneBroken)
    def _lane_broken(self, event: LaneBroken, now: float, sender: str) -> None:
        self.lane_lost(event.peer)
        for work in list(self.works.values()):
            if event.peer in work.peers:
                self.broken(work, "peer", event.peer, event.reason)

    def peer_lost(self, address: str, now: float) -> None:
        """A process is gone; it matters when it is a node, or a task that has ordered a course of its own."""
        self.nodes_lost((address,), now)
        for work in list(self.works.values()):
            if work.course.owner and work.ledger == address:
                self._end(work)

    def heard(self, group: bytes, ledger: str) -> None:
        """The group has a ledger, on this node."""
        self.orphans.pop(group, None)
        if group in self.kept.groups:
            self.kept.groups[group].ledger = ledger

    def end_left(self, now: float) -> None:
        """Groups whose ledger is lost and has no successor go, with what members left that are dead."""
        for group, since_s in list(self.orphans.items()):
            if now - since_s > LEFT_S:
                del self.orphans[group]
                self.desk.out.send(self.desk.me, StepsForgotten(group, -1))
        self.kept.end_left(now)

    def nodes_lost(self, dead: tuple[str, ...], now: float) -> None:
        """These nodes are dead."""
        for peer in dead:
            groups = [group for group, known in self.kept.groups.items() if known.ledger == peer]
            groups += [work.course.group for work in self.works.values() if work.ledger == peer]
            self.orphans.update((group, now) for group in groups)
            works = [work for work in self.works.values() if peer in work.peers]
            if peer in self.lanes or works:
                self.lane_lost(peer)
                self.desk.out.add(CloseLane(peer))
            for work in works:
                self.broken(work, "peer", peer, "the node is dead")

    def clear(self) -> None:
        """A new life of the node: all steps go on without it."""
        for work in list(self.works.values()):
            for result in work.results.values():
                self._drop(result)
            self.desk.out.add(EndCourse(work.course.op, work.course.epoch))
        self.works = {}
        self.kept.clear()

    # --- what is kept -----------------------------------------------------------------------------

    @on(BlobsReady)
    def _blobs_ready(self, event: BlobsReady, now: float, sender: str) -> None:
        self.kept.keep_blobs(event)
        self.heard(event.group, sender)
        blobs = dict(event.results)
        much = self.kept.is_much(event.group)
        for rank, address in event.takers:
            blob = blobs.get(rank, blobs.get(-1))
            done = StepDone(event.group, event.step, blob or b"", empty=blob is None)
            self._tell(done, ((rank, address),), event.layout, much)

    @on(StepsForgotten)
    def _forgotten(self, event: StepsForgotten, now: float, sender: str) -> None:
        for work in list(self.works.values()):
            course = work.course
            if course.group == event.group and is_past(course.step, event):
                self._end(work)
        self.kept.forgotten(event, now)

    @on(HeldAsked)
    def _held_asked(self, event: HeldAsked, now: float, sender: str) -> None:
        self.heard(event.group, sender)
        self.desk.out.send(sender, self.kept.held(event.group, [work.course for work in self.works.values()]))
