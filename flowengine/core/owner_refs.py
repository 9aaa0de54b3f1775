"""The Owner's rules for references: who still needs an object, here and in other processes.

An object's value is kept while a reference, a pin or a borrower needs it, and, when nobody could make it again, while
a task's lineage needs it. Its record is kept while lineage needs it. Whoever passes a reference on tells the owner
about the new holder before it lets go itself, so a count never falls to 0 too early; introductions are counted, so
their order does not matter.
"""

from __future__ import annotations

from typing import Any

from . import commands as c
from . import messages as m
from . import owner_state as s
from .ids import TASK_ID_BYTES, object_id
from .owner_base import OwnerBase
from .owner_state import ENDED, Obj, State, Task


class RefRules(OwnerBase):
    """Part of Owner: see there for the state."""

    # --- finding records --------------------------------------------------------------------------

    def known(self, ref: m.RefTo, parent: Task | None = None) -> Obj:
        """The record of a reference that this process holds, made when it is the first; parent: what brought it."""
        obj = self.objects.get(ref.oid)
        if obj is None:
            obj = self.objects[ref.oid] = Obj(ref.oid, owner="" if ref.owner == self.me else ref.owner, heir=ref.heir)
            if obj.owner:
                self.unannounced[ref.oid] = obj
                if obj.owner in self.dead:
                    if parent is not None:
                        self.ward(obj, parent)
                    self.owner_died(obj)
            else:
                self.set_value(obj, self.lost_error(obj, "its owner here has freed it"), "")
        elif obj.lineage and obj.heir == m.HANDLE and obj.owner and not obj.introduced:
            self.unannounced[ref.oid] = obj  # a handle that only lineage held
        elif ref.oid in self.expected and self.is_not_ours(ref, parent):
            del self.expected[ref.oid]
            self.turn_to(obj, ref)
            self.unannounced[ref.oid] = obj
            if parent is not None:
                self.ward(obj, parent)
            if obj.owner not in self.dead:
                if self.is_awaited(obj):
                    self.want([obj])
            elif parent is not None and parent.state is not State.DONE:  # else when it is settled
                self.owner_died(obj)
        return obj

    def is_not_ours(self, ref: m.RefTo, parent: Task | None) -> bool:
        """What is expected here was made by others: the code that runs here again has it from them."""
        if ref.owner == self.me or ref.heir.partition(" ")[2] == self.expected[ref.oid].hex():
            return False
        return parent is not None or ref.owner not in self.dead

    def refs_made(self, event: s.RefsMade, sender: str) -> None:
        """References were unpickled here; those inside of a borrowed object are introduced to their owners by us."""
        outer = self.objects.get(event.via) if event.via else None
        for ref in event.refs:
            obj = self.known(ref if outer is None else self.named_in(outer, ref))
            obj.local += 1
            if obj.owner and not obj.introduced and outer is not None and obj.via is None:
                self.introduce(obj)
                obj.via = outer
                outer.pins += 1
                self.send(obj.owner, m.BorrowAdded(obj.oid, self.me, 1, True))

    def named_in(self, outer: Obj, ref: m.RefTo) -> m.RefTo:
        """A reference inside of a stored value as its owner names it: the bytes may be those of a former life."""
        value = outer.value
        if type(value) is not m.Stored or ref.oid in self.objects:
            return ref
        if value is not self.read_last[0]:
            self.read_last = (value, {inner.oid: inner for inner in value.contained})
        named = self.read_last[1].get(ref.oid, ref)
        heir = named.heir.partition(" ")[0]
        return ref if named.owner in self.dead and (not heir or heir in self.dead) else named

    def refs_dropped(self, event: s.RefsDropped, sender: str) -> None:
        """ObjectRef instances are gone."""
        for oid in event.oids:
            obj = self.objects.get(oid)
            if obj is not None:
                obj.local -= 1
                if obj.local <= 0:
                    self.release(obj)

    def inputs_given(self, event: s.InputsGiven, sender: str) -> None:
        """A pushed task brought these values; whoever pushed it holds them for us while it runs."""
        for ref, value in zip(event.refs, event.values, strict=True):
            is_new = ref.oid not in self.objects
            obj = self.known(ref)
            obj.local += 1
            if is_new and not obj.owner and type(value) is m.Inline:
                obj.value = None  # ours, and forgotten: what was sent is all that is left of it
                self.set_value(obj, value, "")
            elif obj.owner and obj.value is None and type(value) is not m.Pending:  # lost since: it is asked for
                self.set_value(obj, value, "")

    def ref_found(self, event: s.RefFound, sender: str) -> None:
        """A reference came from a directory: we introduce ourselves."""
        obj = self.objects.get(event.oid)
        if obj is not None and obj.owner and not obj.introduced:
            self.introduce(obj)
            self.send(obj.owner, m.BorrowAdded(obj.oid, self.me))

    # --- letting go -------------------------------------------------------------------------------

    def release(self, first: Obj) -> None:
        """Some count of the object fell: free what nobody needs, without recursion (chains may be long)."""
        stack = [first]
        while stack:
            obj = stack.pop()
            if obj.local > 0 or self.objects.get(obj.oid) is not obj:
                continue
            if obj.pins > 0:
                if self.made and obj.task is not None and obj.task.spec.life is not None:
                    self.actor_pinned(obj.task)
                continue
            if obj.borrowers and self.is_borrowed(obj):
                continue
            if obj.owner:
                self.let_go_borrowed(obj, stack)
            else:
                self.let_go_owned(obj, stack)

    def is_borrowed(self, obj: Obj) -> bool:
        """Somebody holds it; below 0 means that whoever should have told of the borrower is late, or dead."""
        return any(count > 0 for count in (obj.borrowers or {}).values())

    def forget_borrowers(self, obj: Obj) -> None:
        """The object is gone: so are the counts below 0."""
        for peer in obj.borrowers or ():
            self.borrowed_by.get(peer, {}).pop(obj.oid, None)
        obj.borrowers = None

    def let_go_borrowed(self, obj: Obj, stack: list[Obj]) -> None:
        if obj.oid[:TASK_ID_BYTES] in self.targets:
            self.target_gone(obj.oid[:TASK_ID_BYTES])
        if obj.heir == m.HANDLE:
            self.unannounced.pop(obj.oid, None)
            if obj.introduced:  # an actor does not live for what is made again elsewhere
                self.send(obj.owner, m.BorrowDropped(obj.oid, obj.introduced))
                obj.introduced = 0
        if obj.lineage > 0 or self.objects.get(obj.oid) is not obj:
            return
        del self.objects[obj.oid]
        self.forget_borrowers(obj)
        task = self.unward(obj)
        if task is not None:
            self.drop_unneeded(task, stack)
        self.unannounced.pop(obj.oid, None)
        if obj.introduced:
            self.send(obj.owner, m.BorrowDropped(obj.oid, obj.introduced))
        self.drop_elsewhere(obj)
        if obj.via is not None:
            outer, obj.via = obj.via, None
            outer.pins -= 1
            stack.append(outer)

    def drop_elsewhere(self, obj: Obj) -> None:
        """Other lives of the object are not needed by us either."""
        if obj.elsewhere is not None:
            for owner, count in obj.elsewhere.items():
                self.send(owner, m.BorrowDropped(obj.oid, count))
            obj.elsewhere = None

    def let_go_owned(self, obj: Obj, stack: list[Obj]) -> None:
        task = obj.task
        if obj.lineage > 0 and task is None:
            return  # a root: nobody could make it again
        under_way = task is not None and task.state not in ENDED
        if under_way and task is not None and task.spec.life is not None:
            self.actor_unneeded(task)
            return
        if under_way and task is not None and task.stream is None:
            return  # its task has yet to run or is running: the result is dropped when it comes
        if obj.value is not None:
            value, obj.value = obj.value, None
            self.discard(value, [obj.oid], stack)
        if obj.lineage > 0:
            return
        del self.objects[obj.oid]
        self.expected.pop(obj.oid, None)
        self.orphans.pop(obj.oid, None)
        if self.persisting.copies:
            self.drop_durable(obj.oid)
        actor = obj.oid[:TASK_ID_BYTES]
        if actor in self.made:
            self.forget_actor(actor)
        elif actor in self.targets:
            self.target_gone(actor)  # its maker is dead
        self.forget_borrowers(obj)
        obj.task = None
        self.drop_elsewhere(obj)
        self.drop_strays(obj)
        if task is None:
            return
        if task.stream is not None:
            task.stream.items.pop(int.from_bytes(obj.oid[-4:], "big"), None)
        self.drop_unneeded(task, stack)

    def drop_unneeded(self, task: Task, stack: list[Obj]) -> None:
        """Forget the task if it has ended, and neither a result nor what it would bring again is left."""
        if task.wards or task.state not in ENDED:
            return
        if task.stream is not None:
            if task.stream.dropped and task.stream.ended and not task.stream.items:
                self.drop_lineage(task, stack)
        elif not any(other.task is task for other in task.results):
            self.drop_lineage(task, stack)

    def drop_lineage(self, task: Task, stack: list[Obj]) -> None:
        """No result of the task is left: the task is forgotten and its inputs are not needed for it."""
        if task.lineage:
            task.lineage = False
            for obj in task.inputs:
                obj.lineage -= 1
                stack.append(obj)
            for obj in task.nested:
                obj.lineage -= 1
                stack.append(obj)
        self.erase(task)

    def drop_lineage_of_inputs(self, task: Task) -> None:
        """The task's results cannot be lost any more."""
        task.lineage = False
        for obj in task.inputs:
            obj.lineage -= 1
            self.release(obj)
        for obj in task.nested:
            obj.lineage -= 1
            self.release(obj)

    def discard(self, value: m.Value, oids: list[bytes], stack: list[Obj] | None = None) -> None:
        """A value that nobody needs: drop its copies and the references inside of it."""
        if type(value) is m.Stored:
            for node in value.nodes:
                self.send(node, m.ObjectFreed(tuple(oids)))
        if not value.contained:
            return
        for ref in value.contained:
            inner = self.objects.get(ref.oid)
            if inner is not None:
                inner.pins -= 1
                if stack is not None:
                    stack.append(inner)
                else:
                    self.release(inner)

    def drop_values(self, task_id: bytes, values: tuple[m.Value, ...], first: int = 0) -> None:
        """Results of an attempt that does not count: their copies go unless the object has another life."""
        for index, value in enumerate(values, first):
            self.refuse(object_id(task_id, index), value)

    def refuse(self, oid: bytes, value: m.Value) -> None:
        """A value that came and is not taken: its copies go, and the owners of what is in it hear that we do not."""
        if type(value) is m.Failed:
            return
        if type(value) is m.Stored:
            obj = self.objects.get(oid)
            kept = obj.value.nodes if obj is not None and type(obj.value) is m.Stored else ()
            for node in value.nodes:
                if node not in kept:
                    self.send(node, m.ObjectFreed((oid,)))
        for ref in value.contained:
            if ref.owner != self.me:
                self.send(ref.owner, m.BorrowDropped(ref.oid, 1))

    # --- references inside of values --------------------------------------------------------------

    def contains(self, outer: Obj, refs: tuple[m.RefTo, ...], sender: str) -> None:
        """Our object holds references: they live as long as it does. A remote maker has introduced us already."""
        if outer.owner:
            return  # its owner holds them
        # A call is not done again: its actor brings what it owned when it comes back.
        maker = outer.task if outer.task is not None and outer.task.spec.actor is None else None
        for ref in refs:
            is_new = ref.oid not in self.objects  # what we knew before may be an input of the task that made this
            obj = self.known(ref, maker if sender else None)
            obj.pins += 1
            if sender and ref.owner != self.me:
                self.introduced_by_maker(obj, ref)
            if obj.owner and sender:
                if maker is not None and is_new:
                    self.ward(obj, maker)
                if not obj.watched and obj.value is None and ref.heir != m.HANDLE and obj.owner not in self.dead:
                    self.want([obj])

    def introduced_by_maker(self, obj: Obj, ref: m.RefTo) -> None:
        """Whoever made the value that holds this reference has told its owner about us."""
        if obj.owner and obj.owner != ref.owner and obj.owner in self.dead:
            # The parent ran again: what its dead attempt owned has a new owner.
            obj.owner, obj.heir = ref.owner, ref.heir
            obj.introduced = 0
            obj.watched = False
        if obj.owner == ref.owner:
            self.introduce(obj)
            return
        if obj.elsewhere is None:
            obj.elsewhere = {}
        obj.elsewhere[ref.owner] = obj.elsewhere.get(ref.owner, 0) + 1

    def exported(self, event: s.Exported, sender: str) -> None:
        """References leave inside of a result: the receiver becomes a borrower before we let go."""
        for ref in event.refs:
            if ref.owner == event.to:
                continue
            obj = self.objects.get(ref.oid)
            if ref.owner == self.me:
                if obj is not None:
                    self.add_borrower(obj, event.to, 1)
            else:
                self.send(ref.owner, m.BorrowAdded(ref.oid, event.to))

    def still_held(self) -> tuple[m.RefTo, ...]:
        """Borrowed objects whose owners have not heard of us yet: told with the reply of the task that brought them."""
        if not self.unannounced:
            return ()
        held = []
        for obj in self.unannounced.values():
            obj.introduced += 1
            held.append(m.RefTo(obj.oid, obj.owner, obj.heir))
        self.unannounced = {}
        return tuple(held)

    def holds(self, task: Task, refs: tuple[m.RefTo, ...], worker: str) -> None:
        """The worker of an ended task still refers to these: their owners must know before our pins go."""
        for ref in refs:
            if ref.owner == self.me:
                obj = self.objects.get(ref.oid)
                if obj is not None:
                    self.add_borrower(obj, worker, 1)
            elif ref.owner not in self.dead:
                task.unconfirmed += 1
                self.unconfirmed.setdefault((ref.owner, ref.oid), []).append(task)
                self.send(ref.owner, m.BorrowAdded(ref.oid, worker, 1, True))

    def add_borrower(self, obj: Obj, borrower: str, count: int) -> None:
        if borrower == self.me or borrower in self.dead:
            return
        if obj.borrowers is None:
            obj.borrowers = {}
        total = obj.borrowers.get(borrower, 0) + count
        if total:
            obj.borrowers[borrower] = total
            self.borrowed_by.setdefault(borrower, {})[obj.oid] = obj
        else:
            del obj.borrowers[borrower]
            self.borrowed_by.get(borrower, {}).pop(obj.oid, None)
        if total <= 0:
            self.release(obj)

    def borrow_added(self, event: m.BorrowAdded, sender: str) -> None:
        """Somebody holds references to our object."""
        obj = self.objects.get(event.oid)
        if obj is not None:
            if event.borrower != sender and event.borrower not in self.borrowed_by:
                self.send(event.borrower, m.Ping(0))  # only a link tells of its death
            self.add_borrower(obj, event.borrower, event.count)
        if event.confirm:
            self.send(sender, m.BorrowConfirmed(event.oid))

    def borrow_dropped(self, event: m.BorrowDropped, sender: str) -> None:
        """A borrower holds no reference any more."""
        obj = self.objects.get(event.oid)
        if obj is not None:
            self.add_borrower(obj, sender, -event.count)

    def borrow_confirmed(self, event: m.BorrowConfirmed, sender: str) -> None:
        """The owner knows: what kept the reference alive until now may go."""
        obj = self.objects.get(event.oid)
        if event.counted:
            if obj is not None and obj.owner == sender:
                obj.introduced += event.counted
            else:
                self.send(sender, m.BorrowDropped(event.oid, event.counted))
        if obj is not None:
            self.leave_via(obj)
        for task in self.unconfirmed.pop((sender, event.oid), ()):
            self.confirmed(task)

    def leave_via(self, obj: Obj) -> None:
        """The container that kept the reference alive may go."""
        if obj.via is not None:
            outer, obj.via = obj.via, None
            outer.pins -= 1
            self.release(outer)

    def confirmed(self, task: Task) -> None:
        task.unconfirmed -= 1
        ended = task.state in ENDED
        if task.unconfirmed == 0 and task.pinned and ended and not self.is_held(task):
            self.unpin_task(task)

    # --- values of objects that others own --------------------------------------------------------

    def want(self, missing: list[Obj]) -> None:
        """Somebody here waits for these: ask the owners, or have lost ones made again."""
        lost: list[Obj] = []
        for obj in missing:
            if obj.value is not None:
                continue
            if obj.owner:
                if obj.owner in self.dead:
                    lost.append(obj)
                elif not obj.watched:
                    obj.watched = True
                    self.send(obj.owner, m.WatchObject(obj.oid))
            elif obj.task is None or obj.task.state in ENDED:
                if obj.oid not in self.expected and obj.oid not in self.promised:
                    lost.append(obj)
            elif obj.task.stream is not None:
                self.resend(obj)
        if lost:
            self.rebuild(lost)

    def watch_object(self, event: m.WatchObject, sender: str) -> None:
        """Somebody waits for our object."""
        obj = self.objects.get(event.oid)
        if obj is None:
            error = self.lost_error(event.oid, "its owner does not know it any more")
            self.send(sender, m.ObjectReady(event.oid, error))
        elif obj.value is not None and event.oid not in self.sought:
            self.send(sender, m.ObjectReady(event.oid, obj.value))
        else:
            if obj.watchers is None:
                obj.watchers = {}
            obj.watchers[sender] = None
            if obj.owner != sender:
                self.want([obj])

    def answer_watchers(self, obj: Obj, value: m.Value) -> None:
        """Whoever asked for the value gets it."""
        if obj.watchers is not None:
            watchers, obj.watchers = obj.watchers, None
            for to in watchers:
                self.send(to, m.ObjectReady(obj.oid, value))

    def object_ready(self, event: m.ObjectReady, sender: str) -> None:
        """The owner told the value."""
        obj = self.objects.get(event.oid)
        if obj is None or not obj.owner:
            return
        obj.watched = False
        if type(event.value) is m.Failed and event.value.kind == "lost":
            if event.oid in self.asked_of and obj.task is not None and obj.task.state not in ENDED:
                return  # a run of its parent that was stopped says so: it runs again
            top = self.brought_again(obj)
            if top is not None:  # the run that owned it was stopped
                self.ward(obj, top)
                return
        self.set_value(obj, event.value, sender)

    def copy_added(self, event: m.CopyAdded, sender: str) -> None:
        """Another node holds a copy; told to nodes again when the object is gone already."""
        obj = self.objects.get(event.oid)
        if obj is None:
            self.send(event.node, m.ObjectFreed((event.oid,)))
            return
        if obj.owner:  # a reader took us for the owner, since we are its heir
            if obj.owner not in self.dead:
                self.send(event.node, m.ObjectAdopted(event.oid, obj.owner))
                self.send(obj.owner, m.CopyAdded(event.oid, event.node, event.left))
            self.send(event.node, m.ObjectFreed((event.oid,), True))
            return
        value = obj.value
        if type(value) is m.Stored and event.node in value.nodes:
            return
        if type(value) is m.Stored and not (event.left and value.contained):
            if event.node not in self.dead:
                obj.value = m.Stored(value.size_bytes, (*value.nodes, event.node), value.contained, value.array)
        elif value is None and not event.left and obj.gone_bytes >= 0 and event.node not in self.dead:
            self.set_value(obj, m.Stored(obj.gone_bytes, (event.node,)), "")  # the news came after that of the loss
        elif value is None:
            if obj.strays is None:
                obj.strays = {}
            obj.strays[event.node] = None  # its TaskDone may be on the way, or never come
        else:
            self.send(event.node, m.ObjectFreed((event.oid,)))

    def drop_strays(self, obj: Obj) -> None:
        """Copies of attempts that do not count go; those of the one that does are in the value."""
        if obj.strays is not None:
            strays, obj.strays = obj.strays, None
            kept = obj.value.nodes if type(obj.value) is m.Stored else ()
            for node in strays:
                if node not in kept:
                    self.send(node, m.ObjectFreed((obj.oid,)))

    def free_asked(self, event: s.FreeAsked, sender: str) -> None:
        """User code frees values though references exist; a later get makes them again if they have a maker."""
        for oid in event.oids:
            obj = self.objects.get(oid)
            if obj is None:
                continue
            if obj.owner:
                self.send(obj.owner, m.FreeObject(oid))
                obj.value = None
            elif type(obj.value) is m.Stored or (obj.was_put and type(obj.value) is m.Inline):
                self.forget_value(obj)  # a small result of a task stays: nothing is won, and nobody could make it again

    def free_object(self, event: m.FreeObject, sender: str) -> None:
        """A borrower frees."""
        self.free_asked(s.FreeAsked((event.oid,)), sender)

    def forget_value(self, obj: Obj) -> None:
        value = obj.value
        obj.value = None
        if type(value) is m.Stored:
            for node in value.nodes:
                self.send(node, m.ObjectFreed((obj.oid,)))
        if obj.task is None and not obj.durable:
            obj.value = self.lost_error(obj, "it was freed with flow.free")

    # --- bytes in the local store -----------------------------------------------------------------

    def fetch_asked(self, event: s.FetchAsked, sender: str) -> None:
        """A thread needs the bytes here; it is woken when they are, or when the value has changed."""
        obj = self.objects.get(event.oid)
        if obj is None or type(obj.value) is m.Inline or type(obj.value) is m.Failed:
            self.out.append(c.Resolve(event.waiter))
            return
        if obj.fetchers is None:
            obj.fetchers = {}
        obj.fetchers[event.waiter] = None
        if obj.value is None:
            self.want([obj])
        elif type(obj.value) is m.Stored:
            self.send(self.node, m.ObjectWanted(obj.oid, obj.value.size_bytes, obj.owner or self.me, obj.value.nodes))

    def wake_fetchers(self, obj: Obj) -> None:
        """Readers look again."""
        if obj.fetchers is not None:
            fetchers, obj.fetchers = obj.fetchers, None
            for waiter in fetchers:
                self.out.append(c.Resolve(waiter))

    def object_here(self, event: m.ObjectHere, sender: str) -> None:
        """The local store has the object."""
        obj = self.objects.get(event.oid)
        if obj is not None:
            self.wake_fetchers(obj)

    def object_missing(self, event: m.ObjectMissing, sender: str) -> None:
        """The local store could not get it from those nodes."""
        obj = self.objects.get(event.oid)
        if obj is None:
            return
        if event.reason.startswith("StoreFull"):
            self.set_fetch_error(obj, event.reason)
            return
        self.copies_lost(obj, event.nodes, event.silent)

    def value_of(self, oid: bytes) -> Any:
        """The value as far as it is known here, or None. Safe from any thread."""
        obj = self.objects.get(oid)
        return None if obj is None else obj.value
