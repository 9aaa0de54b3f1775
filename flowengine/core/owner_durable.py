"""The Owner's rules for results that would be dear to make again: they are written to durable storage too. Pure.

A result in a store is lost with its node, and made again from the nearest values that no node's loss takes: small ones,
which live with the owner, and those in durable storage. When that would cost more, with the chance that it comes to
it, than to write the result, its worker writes it in the background (after Flint, EuroSys'16). Lineage stays, for a
copy may turn out bad.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..recovery.checkpoint import chance_of_loss, once_in, persist_due
from ..recovery.failures import failure_rate_per_s
from ..recovery.lineage import closure
from . import commands as c
from . import messages as m
from . import owner_state as s
from .copies import WRITE_S_MIN, Copy
from .owner_base import OwnerBase
from .owner_state import Obj, State, Task

NODE_PRIOR_S = 600.0  # of a node's life that the expectation counts for
SHARED_PART = 0.5  # an input that is as much of the cost is written instead, when others are made of it too


def rerun_s(obj: Obj) -> float:
    """What it takes, at most, to make the object again; nothing when no node's loss takes it."""
    if obj.task is None or obj.owner or obj.durable or type(obj.value) is m.Inline:
        return 0.0
    return obj.task.rerun_s


def exposed_makers(task: Task) -> list[Task]:
    """The tasks whose results would be lost with a node, and would be needed to run this one again."""
    return [obj.task for obj in task.inputs if obj.task is not None and rerun_s(obj) > 0]


class DurableRules(OwnerBase):
    """Part of Owner: see owner_base for the state."""

    def node_rate_per_s(self) -> float:
        """How often a node is lost, learnt from those that were."""
        lives = self.persisting.nodes
        return failure_rate_per_s(lives.deaths, lives.lived_s(self.now), 1.0 / self.config.node_mtbf_s, NODE_PRIOR_S)

    def weigh(self, task: Task, obj: Obj, run_us: int, worker: str) -> None:
        """A result was stored: note what it would cost to make it again, and have it written if that is too much."""
        if task.spec.actor is not None:
            return  # a call is not made again
        known, value = self.persisting, obj.value
        task.run_s = max(run_us, 0) / 1e6
        task.rerun_s = task.run_s + sum([rerun_s(one) for one in task.inputs])
        known.run_s += task.run_s
        if type(value) is not m.Stored:
            return
        rate, write_s = self.node_rate_per_s(), known.write_s(value.size_bytes)
        if not persist_due(min(task.rerun_s, known.run_s), write_s, rate):
            return
        task.rerun_s = self.exact_rerun_s(task)
        if persist_due(task.rerun_s, write_s, rate):
            self.persist(self.frontier(obj), worker)

    def exact_rerun_s(self, task: Task) -> float:
        """What all tasks take that would have to run again, each once."""
        return sum([one.run_s for one in closure([task], exposed_makers, lambda one: one.spec.id)])

    def frontier(self, obj: Obj) -> Obj:
        """The object, or one further up that most of its cost is in, and that others need as well."""
        while obj.task is not None:
            whole_s = rerun_s(obj)
            shared = [one for one in obj.task.inputs if one.lineage + one.pins > 1 and type(one.value) is m.Stored]
            dear = [one for one in shared if rerun_s(one) >= SHARED_PART * whole_s]
            if not dear:
                return obj
            obj = max(dear, key=rerun_s)
        return obj

    def persist(self, obj: Obj, worker: str) -> None:
        """Have it written by the worker that has just made or read it."""
        known, value = self.persisting, obj.value
        if type(value) is not m.Stored or value.contained or obj.oid in known.copies or obj.task is None:
            return
        if self.is_job(obj.task.spec.parent):
            return  # the journal has it
        if known.bytes + value.size_bytes <= self.config.persist_bytes_max:
            known.copies[obj.oid] = Copy(value.size_bytes)
            known.bytes += value.size_bytes
            self.send(worker, m.PersistObject(obj.oid))

    def persist_object(self, event: m.PersistObject, sender: str) -> None:
        """The owner of a result that is in this host's store wants it in durable storage too."""
        self.out.append(c.WriteDurable(event.oid, sender))

    def object_persisted(self, event: m.ObjectPersisted, sender: str) -> None:
        """A durable copy of our result is there, or could not be made."""
        obj, copy = self.objects.get(event.oid), self.persisting.copies.get(event.oid)
        if copy is not None and event.url:
            copy.url, copy.write_s = event.url, event.write_s
            known = self.persisting
            known.bytes_per_s += (copy.size_bytes / max(event.write_s, WRITE_S_MIN) - known.bytes_per_s) * 0.3
        elif copy is not None:
            copy.failure = event.failure
        if obj is not None and copy is not None and event.url:
            obj.durable = True
            self.counters["objects_persisted"] += 1
        elif event.url:
            self.out.append(c.DropDurable(event.oid, event.url))

    def restore(self, obj: Obj) -> None:
        """Bring the durable copy back into a store."""
        copy = self.persisting.copies.get(obj.oid)
        if copy is None:
            self.out.append(c.RestoreDurable(obj.oid))
        elif not copy.restoring:
            copy.restoring = True
            self.out.append(c.RestoreDurable(obj.oid, copy.url))

    def drop_durable(self, oid: bytes) -> None:
        """The object is not needed any more: nor is its durable copy, if the engine chose to make one."""
        copy = self.persisting.copies.pop(oid, None)
        if copy is not None:
            self.persisting.bytes -= copy.size_bytes
            if copy.url:
                self.out.append(c.DropDurable(oid, copy.url))

    def durable_back(self, event: s.DurableBack, sender: str) -> None:
        """A durable value is in the store of this node again, or not even there."""
        obj, copy = self.objects.get(event.oid), self.persisting.copies.get(event.oid)
        if copy is not None:
            copy.restoring = False
        if obj is None or obj.value is not None:
            if not event.reason:  # nobody needs it any more, or it was made again meanwhile
                self.refuse(event.oid, m.Stored(0, (event.node,)))
            return
        if event.reason and obj.task is not None:
            obj.durable = False
            self.drop_durable(obj.oid)
            self.rebuild([obj])
        elif event.reason:
            self.set_value(obj, self.lost_error(obj, event.reason), "")
        else:
            self.counters["objects_rebuilt"] += 1
            self.set_value(obj, m.Stored(max(0, obj.gone_bytes), (event.node,)), "")

    # --- for people -------------------------------------------------------------------------------------------

    def why_persisted(self, obj: Obj) -> list[str]:
        """What an object would cost to make again and to write, and what follows from that."""
        value, task = obj.value, obj.task
        if obj.owner:
            return [f"owned by {obj.owner}, which decides"]
        if type(value) is m.Inline:
            return [f"size {len(value.blob)} bytes: it lives with its owner, and no node's loss takes it"]
        if type(value) is m.Failed:
            return ["it is an error, which lives with its owner"]
        if value is None and obj.gone_bytes < 0:
            return ["it has no value yet, so there is nothing to keep"]
        size_bytes = value.size_bytes if type(value) is m.Stored else max(0, obj.gone_bytes)
        lines = [f"size {size_bytes / 1e6:.3g} MB, in {len(value.nodes) if type(value) is m.Stored else 0} store(s)"]
        copy = self.persisting.copies.get(obj.oid)
        if task is None or task.state is not State.DONE or task.spec.actor is not None:
            made = "it was put" if obj.was_put else "no task that is done can make it again"
            return [*lines, f"{made}; in durable storage: {'yes' if obj.durable else 'no'}"]
        again_s, rate = self.exact_rerun_s(task), self.node_rate_per_s()
        write_s = copy.write_s if copy is not None and copy.url else self.persisting.write_s(size_bytes)
        lines.append(f"to make it again from what no loss of a node takes: {again_s:.3g} s of run time")
        lines.append(f"a node is lost {once_in(rate)}; chance of loss {chance_of_loss(rate, again_s):.2g}")
        lines.append(f"to write it: {write_s:.3g} s" + ("" if copy is not None and copy.url else " (expected)"))
        return [*lines, self.why_written(copy, again_s * chance_of_loss(rate, again_s), write_s)]

    def why_written(self, copy: Copy | None, expected_s: float, write_s: float) -> str:
        """The decision."""
        if copy is not None:
            where = f"written: {copy.url}" if copy.url else copy.failure or "being written"
            return f"durable: {where}"
        if not self.config.persist_bytes_max:
            return "not written: persist_bytes_max is 0"
        if expected_s > write_s:
            return f"not written: {expected_s:.2g} s are expected to be lost, but it was decided when less was known"
        return f"not written: {expected_s:.2g} s are expected to be lost, less than writing takes"


HANDLERS: dict[type[Any], Callable[[Any, Any, str], None]] = {
    m.PersistObject: DurableRules.persist_object,
    m.ObjectPersisted: DurableRules.object_persisted,
    s.DurableBack: DurableRules.durable_back,
}
