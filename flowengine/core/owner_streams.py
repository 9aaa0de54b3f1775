"""The Owner's rules for streams: items as they come, their reader, and what is done when one of both is gone."""

from __future__ import annotations

from . import commands as c
from . import messages as m
from . import owner_state as s
from .ids import object_id
from .owner_base import OwnerBase
from .owner_state import ENDED, Obj, Stream, Task, Waiter


class StreamRules(OwnerBase):
    """Part of Owner: see owner_base for the state."""

    def stream_item(self, event: m.StreamItem, sender: str) -> None:
        """An item of a streaming task has come; one that came before is set only if it was lost."""
        task = self.current(event.task, event.attempt, sender)
        if task is None or task.stream is None:
            self.drop_values(event.task, (event.value,), event.index)
            return
        stream = task.stream
        stream.seen = event.index + 1
        oid = object_id(event.task, event.index)
        if event.index < stream.count:
            obj = stream.items.get(event.index)
            if obj is None or obj.value is not None:
                self.refuse(oid, event.value)
                return
            self.counters["objects_rebuilt"] += 1
            self.set_value(obj, event.value, sender)
            return
        stream.count = event.index + 1
        if stream.dropped or not task.wanted:
            self.refuse(oid, event.value)
            return
        known = self.objects.get(oid)  # of an earlier run of the parent
        obj = self.objects[oid] = known or Obj(oid)
        obj.task = task
        obj.pins += 1  # the stream holds it until the reader takes it
        stream.items[event.index] = obj
        self.set_value(obj, event.value, sender)
        self.wake_stream(stream)

    def wake_stream(self, stream: Stream) -> None:
        rest = []
        for waiter, index in stream.waiters:
            if index < stream.count or stream.ended:
                self.out.append(c.Resolve(waiter.id))
                self.waiters.pop(waiter.id, None)
            elif waiter.id in self.waiters:
                rest.append((waiter, index))
        stream.waiters = rest

    def stream_ended(self, task: Task, items: int) -> None:
        stream = task.stream
        assert stream is not None
        stream.ended = True
        for index, obj in list(stream.items.items()):
            if obj.value is None and (stream.error is not None or index >= items):  # this run has not brought it
                error = stream.error or self.lost_error(obj, f"{task.spec.name} ran again and did not yield it")
                self.set_value(obj, error, "")
        if stream.dropped:
            for obj in list(stream.items.values()):
                self.release(obj)
        if task.again is None:
            self.wake_stream(stream)

    def stream_asked(self, event: s.StreamAsked, sender: str) -> None:
        """The reader waits for an item or the end."""
        task = self.tasks.get(event.task)
        stream = task.stream if task is not None else None
        if stream is None or event.index < stream.count or stream.ended:
            self.out.append(c.Resolve(event.waiter))
            return
        waiter = Waiter(event.waiter, 1, [])
        self.waiters[event.waiter] = waiter
        stream.waiters.append((waiter, event.index))

    def stream_taken(self, event: s.StreamTaken, sender: str) -> None:
        """The reader has taken items: they are its references now, and the maker may go on."""
        task = self.tasks.get(event.task)
        if task is None or task.stream is None:
            return
        stream = task.stream
        if event.items < 0:
            stream.dropped = True
            for index in [i for i in stream.items if i >= stream.taken]:
                obj = stream.items[index]
                obj.pins -= 1
                self.release(obj)
            if task.state in ENDED:
                self.forget_stream(task)
            elif any(obj.value is None for obj in stream.items.values()):  # it runs again for items that are needed
                self.tell_maker(task, s.ALL_ITEMS)
            else:
                self.cancel(task, False, True)
            return
        for index in range(stream.taken, event.items):
            obj = stream.items[index]
            obj.pins -= 1
            obj.local += 1
        stream.taken = event.items
        self.tell_maker(task, event.items)

    def tell_maker(self, task: Task, items: int) -> None:
        """The maker may go on until it is too far ahead of these."""
        worker = self.worker_with(task)
        if worker:
            self.send(worker, m.StreamConsumed(task.spec.id, task.attempt, items))

    def forget_stream(self, task: Task) -> None:
        """The reader is gone and the task is over: nothing is left to do for it."""
        if task.stream is not None and not task.stream.items:
            if task.lineage:
                self.drop_lineage_of_inputs(task)
            self.erase(task)
