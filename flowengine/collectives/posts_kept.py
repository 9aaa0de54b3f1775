"""What a node keeps of finished steps for members that may repeat them, and until when."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from flowengine.core.collective import BlobsReady, Course, Held, HeldStep, Step, StepsForgotten
from flowengine.core.dispatch import Part, on
from flowengine.core.messages import CopiesLost, CopyAdded, ObjectFreed
from flowengine.core.node_desk import Desk
from flowengine.core.node_store import Store

from .posts_state import KeptGroup, KeptStep, Result

LEFT_S = 600.0  # what a member gave before it died, or had brought here, waits so long for a step that needs it


class Kept(Part):
    """The kept steps of all groups, and the objects in the store that this node owns for them."""

    def __init__(self, desk: Desk, store: Store) -> None:
        self.desk = desk
        self.store = store
        self.groups: dict[bytes, KeptGroup] = {}
        self.copies: dict[bytes, dict[str, None]] = {}  # own object: other nodes that have it
        self.left: dict[bytes, float] = {}  # object of a dead member: when it was told

    # --- keeping ----------------------------------------------------------------------------------

    def step_of(self, group: bytes, op: bytes) -> KeptStep | None:
        """What is kept of a step."""
        known = self.groups.get(group)
        return known.steps.get(op) if known is not None else None

    def find(self, op: bytes) -> KeptStep | None:
        """The same where the group is not told."""
        return next((group.steps[op] for group in self.groups.values() if op in group.steps), None)

    def keep(self, group: bytes, op: bytes, step: Step) -> KeptStep:
        """Begin to keep something of a step."""
        steps = self.group(group).steps
        if op not in steps:
            steps[op] = KeptStep(op, step)
        return steps[op]

    def group(self, group: bytes) -> KeptGroup:
        """What is kept for a group."""
        return self.groups.setdefault(group, KeptGroup())

    def keep_result(self, course: Course, result: Result) -> None:
        """A result that is whole."""
        kept = self.keep(course.group, course.op, course.step)
        more_bytes = 0 if result.oid in kept.objects else result.object_bytes
        kept.objects[result.oid] = (result.rank, result.object_bytes)
        kept.layout = course.layout
        kept.course = course if course.keeps_gifts else None
        self._more(course.group, course.op, more_bytes)

    def keep_blobs(self, event: BlobsReady) -> None:
        """Small results, or that there are none."""
        kept = self.keep(event.group, event.op, event.step)
        more_bytes = sum(len(blob) for rank, blob in event.results if rank not in kept.blobs)
        kept.blobs.update(event.results)
        kept.layout, kept.failed = event.layout, event.failed
        self._more(event.group, event.op, more_bytes)

    def keep_gifts(self, course: Course, gifts: tuple[bytes, ...]) -> None:
        """What was given to a step that is done."""
        kept = self.keep(course.group, course.op, course.step)
        more_bytes = 0
        for oid in gifts:
            entry = self.store.entries.get(oid)
            if entry is not None and oid not in kept.gifts:
                kept.gifts[oid] = entry.size_bytes
                more_bytes += entry.size_bytes
        kept.course = course
        self._more(course.group, course.op, more_bytes)

    def is_much(self, group: bytes) -> bool:
        """Whether members should see to it that something can go."""
        known = self.groups.get(group)
        return known is not None and known.nbytes > self.desk.config.collective_kept_bytes_max // 2

    def _more(self, group: bytes, newest: bytes, more_bytes: int) -> None:
        """Something was added to a step; the ledger counts too, and says which go when it is too much."""
        known = self.groups[group]
        known.steps[newest].nbytes += more_bytes
        known.nbytes += more_bytes

    # --- forgetting -------------------------------------------------------------------------------

    def forget(self, group: bytes, op: bytes, needed: Container[bytes] = ()) -> None:
        """Let go of what is kept of a step; needed: gifts that stay for another course."""
        known = self.groups[group]
        kept = known.steps.pop(op)
        known.nbytes -= kept.nbytes
        self.free((*kept.objects, *[oid for oid in kept.gifts if oid not in needed]))

    def forgotten(self, event: StepsForgotten, now: float) -> None:
        """Nobody repeats these steps."""
        known = self.groups.get(event.group)
        if known is not None:
            known.floor = max(known.floor, event.number)
            for op, kept in list(known.steps.items()):
                if is_past(kept.step, event):
                    self.forget(event.group, op)
            if event.number < 0:
                del self.groups[event.group]
        self.end_left(now)

    def free(self, oids: tuple[bytes, ...], present: bool = True) -> None:
        """Objects of this node that are not needed any more, wherever they are; present: all were told to the store."""
        if not oids:
            return
        self.desk.out.send(self.desk.me, ObjectFreed(oids, present))
        for oid in oids:
            self.left.pop(oid, None)
            for node in self.copies.pop(oid, {}):
                self.desk.out.send(node, ObjectFreed((oid,)))

    def held(self, group: bytes, courses: Iterable[Course] = ()) -> Held:
        """All that is kept for a group, and what was given to courses under way."""
        known = self.groups.get(group)
        if known is None:
            return Held(group, ())
        under_way = {course.op: course for course in courses if course.group == group and course.keeps_gifts}
        steps = [self._held_step(kept, under_way.pop(op, kept.course)) for op, kept in known.steps.items()]
        steps += [self._held_step(KeptStep(op, course.step), course) for op, course in under_way.items()]
        return Held(group, tuple(steps), known.epoch, known.floor)

    def _held_step(self, kept: KeptStep, course: Course | None) -> HeldStep:
        blobs = dict(course.blobs) if course is not None else {}
        gifts = {}
        for post in course.posts if course is not None else ():
            for rank, oid in post.gives if post.node == self.desk.me else ():
                if oid in blobs:
                    gifts[rank] = (rank, b"", blobs[oid])
                elif oid in self.store.entries:
                    gifts[rank] = (rank, oid, b"")
        objects = tuple((rank, oid, nbytes) for oid, (rank, nbytes) in kept.objects.items())
        headers = course.headers if course is not None else ()
        blobs_kept = tuple(kept.blobs.items())
        return HeldStep(kept.step, objects, blobs_kept, kept.layout, kept.failed, headers, tuple(gifts.values()))

    def clear(self) -> None:
        """A new life of the node: its objects go with the old one."""
        self.groups, self.copies, self.left = {}, {}, {}

    # --- copies -----------------------------------------------------------------------------------

    @on(CopyAdded)
    def _copied(self, event: CopyAdded, now: float, sender: str) -> None:
        mine = event.oid in self.store.by_owner.get(self.desk.me, {})
        if event.left or event.node == self.desk.me:
            if mine and event.oid not in self._in_use():
                self.left[event.oid] = now
        elif mine:
            self.copies.setdefault(event.oid, {})[event.node] = None
        else:
            self.desk.out.send(event.node, ObjectFreed((event.oid,)))
        self.end_left(now)

    @on(CopiesLost)
    def _copies_lost(self, event: CopiesLost, now: float, sender: str) -> None:
        for node in event.nodes:
            if node != self.desk.me:
                self.copies.get(event.oid, {}).pop(node, None)
                continue
            for group in self.groups.values():
                for kept in group.steps.values():
                    less_bytes = kept.objects.pop(event.oid, (0, 0))[1] + kept.gifts.pop(event.oid, 0)
                    kept.nbytes -= less_bytes
                    group.nbytes -= less_bytes

    def _in_use(self) -> dict[bytes, None]:
        return dict.fromkeys(
            oid for group in self.groups.values() for kept in group.steps.values()
            for oid in (*kept.objects, *kept.gifts))

    def end_left(self, now: float) -> None:
        """What has been left for long goes."""
        old = [oid for oid, since_s in self.left.items() if now - since_s > LEFT_S]
        self.free(tuple(old))

    def used(self, oids: Iterator[bytes]) -> None:
        """A step needs these after all."""
        for oid in oids:
            self.left.pop(oid, None)


def is_past(step: Step, event: StepsForgotten) -> bool:
    """Whether a step is one of those that nobody repeats."""
    return event.number < 0 or step in event.steps or (step[0] < 0 and step[2] < event.number)
