"""Whether an actor is needed by nothing but the inputs of calls that would go with it. Pure.

A call is kept for a replay with its inputs; an input that may be lost is kept with the lineage of its task; and that
lineage may hold the handle of the actor, or of another that is kept in the same way. Counts alone never come to an end.
"""

from __future__ import annotations

from collections.abc import Iterator

from .ids import TASK_ID_BYTES
from .owner_base import OwnerBase
from .owner_calls import held_by
from .owner_state import ENDED, Obj, Task


class Hold:
    """How much of what holds an object comes from objects that are looked at."""

    def __init__(self) -> None:
        self.pins = 0
        self.lineage = 0


class Trial:
    """What is held, directly or not, by what an actor holds."""

    def __init__(self, owner: OwnerBase) -> None:
        self.owner = owner
        self.found: dict[bytes, Obj] = {}
        self.holds: dict[bytes, Hold] = {}
        self.tasks: dict[bytes, None] = {}

    def ends(self, actor: Obj) -> bool:
        """Whether nothing from outside needs the actor."""
        todo = [actor]
        while todo:
            obj = todo.pop()
            if obj.oid not in self.found:
                self.found[obj.oid] = obj
                todo += self.look(obj)
        alive = [obj for obj in self.found.values() if self.is_held(obj)]
        known = {obj.oid: None for obj in alive}
        while alive:
            obj = alive.pop()
            for inner in (*self.pinned_by(obj), *self.lineage_of(obj)):
                if inner.oid not in known:
                    known[inner.oid] = None
                    alive.append(inner)
        return actor.oid not in known

    def look(self, obj: Obj) -> list[Obj]:
        """Count what the object holds; gives that, and what else holds the same lineage."""
        pinned, lineage = list(self.pinned_by(obj)), list(self.lineage_of(obj))
        for inner in pinned:
            self.holds.setdefault(inner.oid, Hold()).pins += 1
        task = obj.task
        if not lineage or task is None or task.spec.id in self.tasks:
            return pinned
        self.tasks[task.spec.id] = None
        for inner in lineage:
            self.holds.setdefault(inner.oid, Hold()).lineage += 1
        return [*pinned, *lineage, *self.holders(task)]

    def is_held(self, obj: Obj) -> bool:
        """Whether something else holds the object."""
        hold = self.holds.get(obj.oid) or Hold()
        borrowed = any(count > 0 for count in (obj.borrowers or {}).values())
        return obj.local > 0 or borrowed or obj.pins > hold.pins or obj.lineage > hold.lineage

    def pinned_by(self, obj: Obj) -> Iterator[Obj]:
        """References inside of the object's value, its container; inputs of an actor and of its calls."""
        objects, name = self.owner.objects, obj.oid[:TASK_ID_BYTES]
        if obj.value is not None and not obj.owner:
            yield from (objects[ref.oid] for ref in obj.value.contained if ref.oid in objects)
        if obj.via is not None:
            yield obj.via
        made, target = self.owner.made.get(name), self.owner.targets.get(name)
        if made is not None and made.task.pinned:
            yield from (*made.task.inputs, *made.task.nested)
        for state in (made.checkpoint, made.fallback) if made is not None else ():
            if state is not None:
                yield from (objects[ref.oid] for ref in state.value.contained if ref.oid in objects)
        for push in made.kept_calls.values() if made is not None else ():
            yield from (objects[ref.oid] for ref in held_by(push) if ref.oid in objects)
        for task in target.sent.values() if target is not None else ():
            if isinstance(task, Task) and task.pinned and task.state in ENDED:
                yield from (*task.inputs, *task.nested)

    def lineage_of(self, obj: Obj) -> tuple[Obj, ...]:
        """What the task that would bring the object would need to run again."""
        task = obj.task
        return (*task.inputs, *task.nested) if task is not None and task.lineage else ()

    def holders(self, task: Task) -> list[Obj]:
        """Results of the task that are alive, and others' objects that it would bring again."""
        results = task.results if task.stream is None else task.stream.items.values()
        wards = self.owner.objects.values() if task.wards else ()
        return [obj for obj in (*results, *wards) if obj.task is task]
