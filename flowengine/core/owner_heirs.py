"""The Owner's rules when owners die: adoption, heirs, and a parent that runs again with what it had left. Pure."""

from __future__ import annotations

from . import messages as m
from . import owner_state as s
from .owner_base import OwnerBase
from .owner_state import ENDED, Obj, Parent, State, Step, Task


class HeirRules(OwnerBase):
    """Part of Owner: see there for the state."""

    # --- dead owners ------------------------------------------------------------------------------

    def owner_died(self, obj: Obj) -> None:
        """The owner of a borrowed object is dead: adopt the value, have its parent task run again, or ask the heir."""
        value = obj.value
        if type(value) is m.Stored and all(node in self.dead for node in value.nodes):
            obj.value = value = None
        if value is not None and not value.contained:
            self.orphans[obj.oid] = obj.owner
            self.adopt(obj)
            return
        # What a value refers to may have been freed when the container's owner died: it has to be made again.
        heir, _, parent = obj.heir.partition(" ")
        if obj.task is None and heir == self.me and bytes.fromhex(parent) in self.tasks:
            self.ward(obj, self.tasks[bytes.fromhex(parent)])
        elif obj.task is None and value is None and (not heir or heir in self.dead):
            top = self.brought_again(obj)
            if top is not None:
                self.ward(obj, top)
        if obj.task is not None and obj.task.state is not State.FAILED:
            obj.value = None
            obj.watched = False
            self.bring_to(obj)
            if obj.task.state is State.DONE and self.is_awaited(obj):
                self.begin_rebuild(obj.task)
        elif heir and heir != self.me and heir not in self.dead:
            self.unward(obj)
            self.send(heir, m.HeirAsked(obj.oid, obj.owner, bytes.fromhex(parent)))
            obj.owner, obj.heir = heir, ""
            obj.value = None
            obj.watched = False
            obj.introduced = 0
            self.unannounced.pop(obj.oid, None)
            if self.is_awaited(obj):
                self.want([obj])
        elif value is not None:
            self.adopt(obj)
        else:
            self.unward(obj)
            self.unannounced.pop(obj.oid, None)
            obj.owner = ""
            obj.introduced = 0
            self.set_value(obj, self.lost_error(obj, "the process that owned it died and left no value of it"), "")
            self.leave_via(obj)

    def brought_again(self, obj: Obj) -> Task | None:
        """Our task below which code runs again that made an actor with this argument, and will bring it anew."""
        for made in self.made.values():
            if made.top not in self.made and any(one is obj for one in (*made.task.inputs, *made.task.nested)):
                return self.tasks.get(made.top) if self.awaits_maker(made) else None
        return None

    def ward(self, obj: Obj, task: Task) -> None:
        """The task would bring the borrowed object again if its owner died."""
        if obj.task is None:
            obj.task = task
            task.wards += 1

    def unward(self, obj: Obj) -> Task | None:
        """The object does not need its parent task any more; gives the task."""
        task, obj.task = obj.task, None
        self.asked_of.pop(obj.oid, None)
        if task is not None:
            task.wards -= 1
        return task

    def heir_asked(self, event: m.HeirAsked, sender: str) -> None:
        """A borrower's owner is dead, and we own the parent task: it can bring the object again."""
        obj = self.asked_as_heir(event, sender) if event.owner == self.me else self.objects.get(event.oid)
        if obj is None:
            task = self.tasks.get(event.parent)
            if task is not None and task.state is not State.FAILED:
                obj = self.objects[event.oid] = Obj(event.oid, owner=event.owner)
                self.ward(obj, task)
                self.bring_to(obj)
        if obj is not None:
            self.add_borrower(obj, sender, 1)
        self.send(sender, m.BorrowConfirmed(event.oid, 0 if obj is None else 1))

    def bring_to(self, obj: Obj) -> None:
        """A ward of an actor that is back already, or of a task that runs again."""
        task = obj.task
        made = self.made.get(task.spec.id) if task is not None else None
        if made is not None:
            self.bring_wards(made.task, made.settled)
        elif task is not None and task.state is State.SENT and task.lease is not None:
            self.ask_run(obj, task, task.lease.worker)

    def bring_from_run(self, task: Task, worker: str) -> None:
        """The code that is to run there may make anew what its dead run owned."""
        for obj in self.wards_of(task):
            self.ask_run(obj, task, worker)

    def ask_run(self, obj: Obj, task: Task, worker: str) -> None:
        """The parent may wait for whoever waits for the object: so it is asked for before the parent has ended."""
        if worker in self.dead or worker == self.me:
            return
        if obj.owner in self.dead or self.asked_of.get(obj.oid) == obj.owner:
            self.turn_to(obj, m.RefTo(obj.oid, worker, obj.heir))
            self.asked_of[obj.oid] = worker
            self.send(worker, m.HeirAsked(obj.oid, worker, task.spec.id))
            if self.is_awaited(obj):
                self.want([obj])

    def wards_of(self, task: Task) -> list[Obj]:
        """Borrowed objects that wait for the task to bring a new owner."""
        return [obj for obj in self.objects.values() if obj.task is task and obj.owner and obj.value is None]

    def ran_again(self, task: Task, worker: str, values: tuple[m.Value, ...]) -> None:
        """The parent has run again: what its dead attempt owned may be had from those who own it now.

        They hear of us before we refuse any of the values, or they would let go.
        """
        named = {ref.oid: ref for value in values for ref in value.contained}
        for obj in self.wards_of(task):
            ref = named.get(obj.oid)
            owner = worker if ref is None else ref.owner
            # When the worker itself believes a dead owner to be alive, a later run has to bring a better one.
            is_open = obj.owner in self.dead or self.asked_of.pop(obj.oid, "") == obj.owner
            if is_open and owner not in self.dead and owner != self.me:
                if owner != obj.owner:
                    self.turn_to(obj, m.RefTo(obj.oid, owner, obj.heir if ref is None else ref.heir))
                self.send(owner, m.HeirAsked(obj.oid, owner, b""))
            if obj.owner not in self.dead and self.is_awaited(obj):
                self.want([obj])

    def want_inside(self, values: tuple[m.Value, ...]) -> None:
        """The task that brought these has ended, and may run again: for what they hold and dead processes owned."""
        inside = [self.objects.get(ref.oid) for value in values for ref in value.contained]
        self.want([obj for obj in inside if obj is not None and obj.owner in self.dead and self.is_awaited(obj)])

    def free_again(self, task: Task, values: tuple[m.Value, ...]) -> None:
        """What was made beside an older copy and is not needed: a free that overtook its sealing took the older one."""
        for obj, value in zip(task.results, values, strict=False):
            if type(value) is m.Stored and self.objects.get(obj.oid) is not obj:
                for node in value.nodes:
                    self.send(node, m.ObjectFreed((obj.oid,)))

    def adopt(self, obj: Obj) -> None:
        """The object is ours now; without lineage, since its maker's is gone."""
        self.unannounced.pop(obj.oid, None)
        was_theirs, obj.owner = bool(obj.owner), ""
        obj.introduced = 0
        obj.watched = False
        task = self.unward(obj)
        if type(obj.value) is m.Stored:
            for node in obj.value.nodes:
                self.send(node, m.ObjectAdopted(obj.oid, self.me))
        if was_theirs and obj.value is not None:
            self.contains(obj, obj.value.contained, "")
            for ref in obj.value.contained:  # their owners know of the dead owner alone
                self.ref_found(s.RefFound(ref.oid), "")
        self.leave_via(obj)
        self.release(obj)
        if task is not None:
            freed: list[Obj] = []
            self.drop_unneeded(task, freed)
            for other in freed:
                self.release(other)

    # --- nested owners: what the next attempt of a parent will need -------------------------------

    def parent_began(self, event: s.ParentBegan, sender: str) -> None:
        """User code of the task runs here: take over what an earlier attempt left."""
        self.parents[event.task] = Parent(event.task, event.caller, event.attempt)
        self.number_anew(event.task)
        for oid, value in event.children:
            self.left_children[oid] = value

    def parent_ended(self, event: s.ParentEnded, sender: str) -> None:
        """The task is over."""
        parent = self.parents.pop(event.task, None)
        if parent is None:
            return
        if self.seqs_before:
            self.forget_numbers(event.task)
        if event.again:
            self.makers_leave(parent)
        elif parent.caller:
            self.caller_ended(event.task)
        if event.cancel:
            for task in self.children_of(event.task):
                if not event.again or task.spec.actor is None:  # the next attempt makes the same calls
                    self.cancel(task, False, True, event.again)
        if not self.parents:
            # The next task here has other needs: a worker that holds slots while it runs something else blocks others.
            for lease in list(self.leases.values()):
                if not lease.inflight:
                    self.return_lease(lease)
        if self.left_children and not self.parents:
            self.left_children = {}  # the parent's owner still owns what was not taken over

    # --- a parent that runs again in this process -------------------------------------------------

    def submitted_again(self, task: Task, event: s.Submitted) -> bool:
        """A parent that runs again here calls what it called before: the task goes on; False: it is made anew."""
        stream = task.stream
        if stream is not None:
            if stream.dropped and task.state not in ENDED:
                task.again = event
                return True
            if not stream.dropped:
                return True
        if stream is not None or task.state is State.FAILED:
            if task.lineage:
                self.drop_lineage_of_inputs(task)
            self.erase(task)
            return False
        task.wanted, task.why_unwanted = True, s.WANTED  # it may be about to be cancelled for the earlier run
        for index, old in enumerate(task.results):
            obj = self.objects.get(old.oid)
            if obj is None:
                obj = self.objects[old.oid] = Obj(old.oid, task=task, local=1)
                task.results = [*task.results[:index], obj, *task.results[index + 1 :]]
            elif obj.owner:
                task.results = [*task.results[:index], self.made_again(obj, task), *task.results[index + 1 :]]
            else:
                obj.local += 1
        return True

    def look_again(self, task: Task) -> None:
        """A stream that was dropped has ended: if it was asked for again it begins anew, for those who wait already."""
        event, stream = task.again, task.stream
        if event is None or stream is None:
            return
        task.again = None
        waiters = stream.waiters
        if task.lineage:
            self.drop_lineage_of_inputs(task)
        self.erase(task)
        self.submitted(event, "")
        fresh = self.tasks[event.spec.id]
        if fresh.stream is not None:
            fresh.stream.waiters += waiters

    def made_again(self, obj: Obj, task: Task) -> Obj:
        """The result of a task that was forgotten, or that another process owned: it is ours, to be made if need be."""
        obj.local += 1
        if obj.owner:
            self.unward(obj)
            if obj.introduced:
                self.send(obj.owner, m.BorrowDropped(obj.oid, obj.introduced))
            if obj.owner not in self.dead:
                obj.value = None  # the copies are that owner's
            elif type(obj.value) is m.Stored:
                for node in obj.value.nodes:
                    self.send(node, m.ObjectAdopted(obj.oid, self.me))
            obj.owner, obj.introduced, obj.watched = "", 0, False
            self.unannounced.pop(obj.oid, None)
            self.leave_via(obj)
        obj.task = task
        if type(obj.value) is m.Failed:
            obj.value = None
        return obj

    def end_at_once(self, task: Task) -> None:
        """All results are there."""
        if task.spec.actor is not None:
            self.count_adopted(task)
        task.state = State.SENT
        task.attempt = 1
        self.counters["tasks_submitted"] -= 1
        task.step(Step.ENDED_WELL)
        self.settle(task)

    def take_children(self, task: Task) -> None:
        """Results of children outlive the worker that owned them, until their parent has ended."""
        if task.claimed is None:
            task.claimed = {}
        for oid, value in (task.children or {}).items():
            if type(value) is m.Stored:
                task.claimed[oid] = tuple(dict.fromkeys((*task.claimed.get(oid, ()), *value.nodes)))
                for node in value.nodes:
                    self.send(node, m.ObjectAdopted(oid, self.me))

    def drop_children(self, task: Task) -> None:
        """The parent has ended: its last attempt owns what it took over, the rest is not needed."""
        for oid, nodes in (task.claimed or {}).items():
            for node in nodes:
                self.send(node, m.ObjectFreed((oid,), True))
        task.claimed = None

    def adopt_child(self, task: Task) -> bool:
        """An earlier attempt of the parent had these results already."""
        values = [self.left_children.pop(obj.oid, None) for obj in task.results]
        if not values or any(value is None for value in values):
            return False
        if task.spec.actor is not None:
            self.count_adopted(task)
        task.state = State.SENT
        task.attempt = 1
        self.counters["tasks_submitted"] -= 1
        task.step(Step.ENDED_WELL)
        for obj, value in zip(task.results, values, strict=True):
            assert value is not None
            if type(value) is m.Stored:
                obj.durable = not task.spec.parent or self.is_job(task.spec.parent)
                for node in value.nodes:
                    self.send(node, m.ObjectAdopted(obj.oid, self.me))
            self.set_value(obj, value, "")
        self.settle(task)
        return True

    def is_job(self, parent: bytes) -> bool:
        """Whether the parent is the program itself, as a resumable job."""
        known = self.parents.get(parent)
        return known is not None and not known.caller

    def children_of(self, task: bytes) -> list[Task]:
        """Tasks that the running task submitted."""
        return [child for child in self.tasks.values() if child.spec.parent == task]
