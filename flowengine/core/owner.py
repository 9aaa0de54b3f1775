"""The Owner machine: whoever submits a task owns it, keeps its lineage, and knows who holds its results.

One door: handle(event, now, sender) -> commands. The rules are in parts that share this state: tasks (here), references
(owner_refs), slots (owner_leases), what is done after a loss (owner_recovery) and when owners die (owner_heirs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from . import commands as c
from . import messages as m
from . import owner_state as s
from .ids import object_id, task_of
from .owner_actors import HANDLERS as ACTOR_HANDLERS
from .owner_durable import HANDLERS as DURABLE_HANDLERS
from .owner_durable import DurableRules
from .owner_estate import HANDLERS as ESTATE_HANDLERS
from .owner_estate import EstateRules
from .owner_heirs import HeirRules
from .owner_leases import LeaseRules
from .owner_makers import HANDLERS as MAKER_HANDLERS
from .owner_promises import HANDLERS as PROMISE_HANDLERS
from .owner_promises import PromiseRules
from .owner_records import RecordRules
from .owner_recovery import RecoveryRules
from .owner_refs import RefRules
from .owner_stash import HANDLERS as STASH_HANDLERS
from .owner_stash import StashRules
from .owner_state import (
    DONE,
    ENDED,
    ENDED_WELL,
    FAILED,
    INPUTS_CAME,
    READY,
    SENT,
    WAITING,
    Obj,
    Step,
    Stream,
    Task,
    Waiter,
)
from .owner_story import UNTOLD, StoryRules
from .owner_streams import StreamRules
from .owner_waits import HANDLERS as WAIT_HANDLERS
from .owner_waits import WaitRules
from .past import SHOWN_BYTES_MAX


class Owner(RefRules, LeaseRules, RecoveryRules, HeirRules, EstateRules, StreamRules, StashRules, RecordRules,
            DurableRules, WaitRules, PromiseRules, StoryRules):
    """Decides; never waits, sends or reads a clock."""

    def handle(self, event: m.Message, now: float, sender: str = "") -> list[Any]:
        """The one door."""
        out: list[Any] = []
        self.out = out
        self.now = now
        kind = type(event)
        if kind not in UNTOLD:
            self.journal.event(now, sender, event)
        HANDLERS[kind](self, event, sender)
        if self.coming_home and sender == self.me:
            self.come_home(event)
        return self.stash.attach(out) if self.stash.open else out

    # --- submission -------------------------------------------------------------------------------

    def submitted(self, event: s.Submitted, sender: str) -> None:
        """User code called a remote function: note the lineage, queue. No waiting, no round trip."""
        spec = event.spec
        if spec.actor is not None and self.called_at_once(spec):
            return
        if spec.life is not None and spec.driver:
            self.make_elsewhere(event)
            return
        if spec.id in self.tasks and self.submitted_again(self.tasks[spec.id], event):
            if spec.actor is not None:
                self.called_again(self.tasks[spec.id])
            return
        self.counters["tasks_submitted"] += 1
        if spec.actor is None:
            self.functions.use(spec.function, event.blob)
        place = spec.placement if spec.life is None else (s.SOLE, *(spec.placement or ("*",)))
        task = Task(spec, (spec.shape, place), (), (), (), submitted_at=self.now)
        if spec.num_returns < 0:
            task.stream = Stream()
        else:
            task.results = [self.result_of(task, index) for index in range(spec.num_returns)]
        self.tasks[spec.id] = task
        if spec.deps or spec.nested or spec.args_object is not None:
            self.pin_all(task)
        if spec.actor is not None:
            self.hold_actor(task)
        if self.left_children and self.adopt_child(task):
            return
        if task.results and all([obj.value is not None for obj in task.results]):
            self.end_at_once(task)
            return
        if spec.actor is not None:
            self.called(task)
            if task.state is FAILED:
                return
        elif spec.life is not None:
            self.actor_made(task)
        self.look_at_inputs(task)

    def result_of(self, task: Task, index: int) -> Obj:
        oid = object_id(task.spec.id, index)
        known = self.objects.get(oid)
        if known is not None:
            return self.made_again(known, task)
        obj = self.objects[oid] = Obj(oid, task=task, local=1)
        return obj

    def pin_all(self, task: Task) -> None:
        spec = task.spec
        whole = (spec.args_object,) if spec.args_object is not None else ()
        task.inputs = [self.known(ref) for ref in (*spec.deps, *whole)]
        task.nested = [self.known(ref) for ref in spec.nested]
        for obj in task.inputs:
            obj.pins += 1
        for obj in task.nested:
            obj.pins += 1

    def look_at_inputs(self, task: Task) -> None:
        """A WAITING task: count what is missing; go on when nothing is, end badly when an input is an error."""
        if task.spec.enough:
            self.choose_inputs(task)
        missing = []
        for obj in task.inputs:
            if obj.value is None:
                missing.append(obj)
            elif type(obj.value) is m.Failed and task.spares() < 0:
                self.end_badly(task, obj.value)
                return
        if not missing:
            task.step(INPUTS_CAME)
            if task.spec.actor is None:
                self.enqueue(task)
            else:
                self.call_is_ready(task)
            return
        lease = self.lease_to_follow(task, missing) if task.spec.actor is None else None
        if lease is not None:
            task.step(INPUTS_CAME)
            self.push(lease, task)
            return
        task.missing = len(missing) - (task.spares() if task.spec.enough else 0)
        for obj in missing:
            if obj.dependents is None:
                obj.dependents = [task]
            else:
                obj.dependents.append(task)
        self.want(missing)

    def choose_inputs(self, task: Task) -> None:
        """When enough inputs are there and no errors the task is one of these alone, however often it runs."""
        spec, inputs = task.spec, task.inputs
        there = [index for index, obj in enumerate(inputs) if type(obj.value) in (m.Inline, m.Stored)]
        chosen = dict.fromkeys(there[: spec.enough])
        if len(chosen) < spec.enough:
            return
        task.spec = msgspec.structs.replace(spec, deps=tuple([spec.deps[index] for index in chosen]), enough=0)
        task.inputs = [inputs[index] for index in chosen]
        for index, obj in enumerate(inputs):
            if index not in chosen:
                if obj.dependents is not None:
                    obj.dependents = [other for other in obj.dependents if other is not task] or None
                obj.pins -= 1
                self.release(obj)

    # --- the end of an attempt --------------------------------------------------------------------

    def current(self, task_id: bytes, attempt: int, sender: str = "") -> Task | None:
        """The task, if this attempt is the one that counts; the one place that decides what is stale."""
        task = self.tasks.get(task_id)
        if task is None or task.attempt != attempt or task.state is not SENT or sender in self.stash.fenced:
            self.counters["stale_messages"] += 1
            return None
        return task

    def task_done(self, event: m.TaskDone, sender: str) -> None:
        """An attempt ended well."""
        task = self.current(event.task, event.attempt, sender)
        if task is None:
            if self.repeats:
                self.repeated(event, sender)
            self.drop_values(event.task, event.values)
            return
        if task.spec.actor is not None and self.answered_shortly(task, event, sender):
            return
        self.ran(task, event.began_us, event.run_us, "done")
        self.left_lease(task, event.run_us)
        self.counters["tasks_executed" if task.spec.actor is None else "calls_executed"] += 1
        if event.place and task.spec.actor is not None:
            self.hear_place(task.spec.actor, event.place, sender)
        if event.held:
            self.holds(task, event.held, sender)
        if not task.wanted:
            self.drop_values(event.task, event.values)
            self.end_badly(task, task.why_unwanted)
            return
        if event.recorded:
            task.recorded = {(kind, number): payload for kind, number, payload in event.recorded}
        task.step(ENDED_WELL)
        if task.stream is not None:
            self.stream_ended(task, event.stream_items)
            self.settle(task)
            self.want([obj for obj in task.stream.items.values() if obj.value is None and self.is_awaited(obj)])
            return
        if task.wards:
            self.ran_again(task, sender, event.values)
        for obj, value in zip(task.results, event.values, strict=False):
            if task.rebuilds and obj.value is None and self.objects.get(obj.oid) is obj:
                self.counters["objects_rebuilt"] += 1
            self.set_value(obj, value, sender)
            if type(value) is m.Stored:
                self.weigh(task, obj, event.run_us, sender)
        self.settle(task)
        if task.wards:
            self.want_inside(event.values)
        if task.rebuilds:
            self.free_again(task, event.values)

    def ran(self, task: Task, began_us: int, run_us: int, outcome: str) -> None:
        """Remember the run for the timeline."""
        lease = task.lease
        if task.spec.actor is not None:
            self.call_ran(task, began_us, run_us, outcome)
        elif lease is not None and run_us >= 0:
            submitted_us = int(task.submitted_at * 1e6)
            run = 1 + task.crashes + task.failures + task.rebuilds
            spec = task.spec if len(task.spec.args) <= SHOWN_BYTES_MAX else self.shown(task.spec)
            self.spans.append((spec, lease.worker_id, lease.node_id, run, submitted_us, began_us, run_us, outcome))

    def settle(self, task: Task) -> None:
        """The task ended: inputs need not be kept as values; as lineage only if a result could be lost."""
        task.children = None
        if task.claimed is not None:
            self.drop_children(task)
        if task.spec.actor is not None:
            self.call_settled(task)
            return
        if task.spec.life is not None:
            self.actor_settled(task)
        keep = task.state is DONE and self.keeps_lineage(task)
        inputs, nested = task.inputs, task.nested
        if keep:
            if not task.lineage:
                task.lineage = True
                for obj in inputs:
                    obj.lineage += 1
                for obj in nested:
                    obj.lineage += 1
        elif task.lineage:
            self.drop_lineage_of_inputs(task)
        if task.pinned and not task.unconfirmed:
            self.unpin_task(task)
        if not keep:
            self.forget_task(task)
        for obj in list(task.results):
            if obj.local <= 0:
                self.release(obj)
        if task.again is not None:
            self.look_again(task)
        if task.spec.id in self.tops:
            self.top_ended(task)

    def keeps_lineage(self, task: Task) -> bool:
        """A result that lives in a store, or holds references of the dead worker's, may have to be made again."""
        results = task.results if task.stream is None else task.stream.items.values()
        for obj in results:
            value = obj.value
            if type(value) is m.Stored or (type(value) is m.Inline and value.contained):
                return True
        return task.wards > 0

    def forget_task(self, task: Task) -> None:
        """No result of the task will ever be made again from its lineage."""
        for obj in task.results:
            obj.task = None
        if task.stream is None or (task.stream.dropped and not task.stream.items):
            self.erase(task)

    def erase(self, task: Task) -> None:
        """Nothing is left of the task; its function may go too when no other names it."""
        if self.tasks.pop(task.spec.id, None) is not None and task.spec.actor is None:
            for function in self.functions.leave(task.spec.function):
                self.forget_function(function)

    def unpin_task(self, task: Task) -> None:
        """The run is over: its inputs and the references inside of them are not held for it any more."""
        task.pinned = False
        for obj in task.inputs:
            obj.pins -= 1
            self.release(obj)
        for obj in task.nested:
            obj.pins -= 1
            self.release(obj)

    def task_failed(self, event: m.TaskFailed, sender: str) -> None:
        """An attempt ended with an error; some kinds are not the task's fault and cost nothing."""
        task = self.current(event.task, event.attempt, sender)
        if task is None:
            self.repeated(event, sender)
            return
        self.ran(task, event.began_us, event.run_us, event.kind)
        self.left_lease(task, event.run_us if event.kind == "task" else -1)
        if event.held:
            self.holds(task, event.held, sender)
        if task.spec.actor is not None and event.kind in ("cancelled", "timeout"):
            self.call_cut_short(task)
        if not task.wanted:
            self.end_badly(task, task.why_unwanted)
        elif event.kind == "cancelled" and task.spec.actor is None:  # and wanted again meanwhile
            self.try_again(task)
        elif event.kind == "args":
            for oid, nodes in event.lost:
                self.copies_lost(self.objects[oid], nodes)
            self.try_again(task)
        elif event.kind == "function":
            self.sent_functions.get(sender, {}).pop(task.spec.function, None)
            self.try_again(task)
        elif event.retry and (task.spec.max_retries < 0 or task.failures < task.spec.max_retries):
            task.failures += 1
            self.counters["tasks_retried"] += 1
            self.try_again(task)
        else:
            self.counters["tasks_executed"] += event.kind == "task"
            self.end_badly(task, m.Failed(event.error, event.kind, event.contained), sender)

    def try_again(self, task: Task) -> None:
        """The attempt is over, the wish is not."""
        task.step(Step.TRY_AGAIN)
        if not task.wanted:
            self.end_badly(task, task.why_unwanted)
            return
        self.look_at_inputs(task)

    def end_badly(self, task: Task, error: m.Failed, sender: str = "") -> None:
        """Every result of the task is this error, and so of all that depend on it (chains may be long)."""
        task.step(Step.ENDED_BADLY)
        self.ending.append((task, error, sender))
        if len(self.ending) > 1:
            return  # the loop below, further up the stack, comes to it
        while self.ending:
            self.give_error(*self.ending[0])
            self.ending.popleft()

    def give_error(self, task: Task, error: m.Failed, sender: str) -> None:
        """Set the error as the value of every result; its maker introduced us once to what the error refers to."""
        self.keep_failed(task, error)
        if task.stream is not None:
            task.stream.error = error
            self.stream_ended(task, task.stream.count)
        for obj in (*task.results, *(self.wards_of(task) if task.wards else ())):
            self.set_value(obj, error, sender)
            sender = ""
        self.settle(task)

    def end_later(self, task: Task, error: m.Failed) -> None:
        """As end_badly, for a task that may be queued or running."""
        if task.state is READY and task.spec.actor is None:
            self.dequeue(task)
        self.end_badly(task, error)

    # --- values -----------------------------------------------------------------------------------

    def set_value(self, obj: Obj, value: m.Value, sender: str) -> None:
        """The object has a value (again): whoever waits for it goes on."""
        if self.objects.get(obj.oid) is not obj:
            self.refuse(obj.oid, value)
            return
        if obj.value is not None and not self.replaces(obj, value):
            return
        obj.value = value
        obj.gone_bytes = -1
        if self.expected:
            self.expected.pop(obj.oid, None)
        if obj.strays is not None:
            self.drop_strays(obj)
        if type(value) is m.Inline and not obj.owner:
            self.counters["objects_inlined"] += 1
        if value.contained:
            self.contains(obj, value.contained, sender)
        if obj.waiters is not None:
            waiters, obj.waiters = obj.waiters, None
            for waiter in waiters:
                self.one_less(waiter)
        if obj.watchers is not None:
            self.answer_watchers(obj, value)
        if obj.fetchers is not None:
            self.wake_fetchers(obj)
        if obj.dependents is not None:
            dependents, obj.dependents = obj.dependents, None
            for task in dependents:
                self.input_came(task, value)
        if self.parents and not obj.owner:
            self.stash_child(obj, value)

    def replaces(self, obj: Obj, value: m.Value) -> bool:
        """A value for an object that has one: a re-run may bring references to new owners; else the first stays."""
        old = obj.value
        assert old is not None
        if type(old) is m.Failed or type(value) is m.Failed or obj.owner or not (old.contained or value.contained):
            if type(old) is m.Stored and type(value) is m.Stored and not obj.owner:
                nodes = tuple(dict.fromkeys((*old.nodes, *value.nodes)))
                obj.value = m.Stored(old.size_bytes, nodes, old.contained, old.array)
            elif not obj.owner:
                self.refuse(obj.oid, value)
            return False
        if type(old) is m.Stored:
            kept = value.nodes if type(value) is m.Stored else ()
            for node in old.nodes:
                if node not in kept:
                    self.send(node, m.ObjectFreed((obj.oid,)))
        for ref in old.contained:
            inner = self.objects.get(ref.oid)
            if inner is not None:
                inner.pins -= 1
                if not any(other.oid == ref.oid for other in value.contained):
                    self.release(inner)
        return True

    def input_came(self, task: Task, value: m.Value) -> None:
        if task.state is not WAITING:
            return
        if type(value) is m.Failed:
            if task.spares() < 0:
                self.end_badly(task, value)
            return
        task.missing -= 1
        if task.missing == 0:
            self.look_at_inputs(task)  # another input may have been lost meanwhile

    def value_put(self, event: s.ValuePut, sender: str) -> None:
        """User code stored a value: it is owned here and has no maker."""
        obj = self.objects.get(event.oid)
        if obj is None:
            obj = self.objects[event.oid] = Obj(event.oid, local=1, durable=event.durable, was_put=True)
        else:
            obj.local += 1  # a parent that runs again puts the same value
            obj.was_put = obj.was_put or obj.task is None
        if obj.value is None:
            self.set_value(obj, event.value, sender)

    # --- threads that wait ------------------------------------------------------------------------

    def ready_asked(self, event: s.ReadyAsked, sender: str) -> None:
        """A thread waits for values."""
        missing = []
        for oid in event.oids:
            obj = self.objects[oid]
            if obj.value is None:
                missing.append(obj)
        open_count = event.count - (len(event.oids) - len(missing))
        if open_count <= 0:
            self.out.append(c.Resolve(event.waiter))
            return
        waiter = Waiter(event.waiter, open_count, missing)
        self.waiters[event.waiter] = waiter
        for obj in missing:
            if obj.waiters is None:
                obj.waiters = [waiter]
            else:
                obj.waiters.append(waiter)
        self.want(missing)

    def one_less(self, waiter: Waiter) -> None:
        waiter.missing -= 1
        if waiter.missing == 0 and self.waiters.pop(waiter.id, None) is not None:
            self.out.append(c.Resolve(waiter.id))
            self.unhook(waiter)

    def unhook(self, waiter: Waiter) -> None:
        """The waiter is done: objects that are still pending forget it."""
        for obj in waiter.objects:
            if obj.waiters is not None and waiter in obj.waiters:
                obj.waiters.remove(waiter)
        waiter.objects = []

    def waiter_gone(self, event: s.WaiterGone, sender: str) -> None:
        """The thread gave up (a time limit or an interrupt)."""
        waiter = self.waiters.pop(event.waiter, None)
        if waiter is not None:
            self.unhook(waiter)
        for task in [task for task, number in self.withdrawn.items() if number == event.waiter]:
            del self.withdrawn[task]

    # --- cancelling -------------------------------------------------------------------------------

    def cancel_asked(self, event: s.CancelAsked, sender: str) -> None:
        """User code cancels the task behind an object; twice and too late are harmless."""
        task = self.tasks.get(task_of(event.oid))
        if task is not None:
            self.cancel(task, event.force, event.recursive)
            return
        obj = self.objects.get(event.oid)
        if obj is not None and obj.owner and obj.value is None:
            self.send(obj.owner, m.CancelObject(event.oid, event.force, event.recursive))

    def cancel(self, task: Task, force: bool, recursive: bool, again: bool = False) -> None:
        if task.state in ENDED:
            return
        task.why_unwanted = self.cancelled_error(task, force, again)
        if task.state is not SENT:
            if not self.actor_cancelled(task):
                self.end_later(task, task.why_unwanted)
            return
        task.wanted = False
        task.forced = task.forced or force
        if task.spec.actor is not None:
            worker = self.worker_with(task)
            if worker:  # else it is told when it gets the call again
                self.send(worker, m.CancelTask(task.spec.id, task.attempt, False))
            return
        lease = task.lease
        assert lease is not None
        if force and next(iter(lease.inflight)) == task.spec.id:
            self.kill_forced(lease)
        else:
            self.send(lease.worker, m.CancelTask(task.spec.id, task.attempt, recursive, again))

    def cancel_object(self, event: m.CancelObject, sender: str) -> None:
        """A borrower cancels."""
        self.cancel_asked(s.CancelAsked(event.oid, event.force, event.recursive), sender)


def _ignore(owner: Owner, event: Any, sender: str) -> None:
    return None


HANDLERS: dict[type[Any], Callable[[Owner, Any, str], None]] = {
    s.Submitted: Owner.submitted,
    m.TaskDone: Owner.task_done,
    m.TaskFailed: Owner.task_failed,
    s.ValuePut: Owner.value_put,
    s.ReadyAsked: Owner.ready_asked,
    s.WaiterGone: Owner.waiter_gone,
    s.CancelAsked: Owner.cancel_asked,
    s.WithdrawAsked: Owner.withdraw_asked,
    m.CancelObject: Owner.cancel_object,
    m.StreamItem: Owner.stream_item,
    s.StreamAsked: Owner.stream_asked,
    s.StreamTaken: Owner.stream_taken,
    s.RefsMade: Owner.refs_made,
    s.InputsGiven: Owner.inputs_given,
    s.RefFound: Owner.ref_found,
    s.RefsDropped: Owner.refs_dropped,
    s.Exported: Owner.given_away,
    s.FreeAsked: Owner.free_asked,
    m.FreeObject: Owner.free_object,
    m.BorrowAdded: Owner.borrow_added,
    m.BorrowConfirmed: Owner.borrow_confirmed,
    m.HeirAsked: Owner.heir_asked,
    m.BorrowDropped: Owner.borrow_dropped,
    m.WatchObject: Owner.watch_object,
    m.ObjectReady: Owner.object_ready,
    m.CopyAdded: Owner.copy_added,
    s.FetchAsked: Owner.fetch_asked,
    m.ObjectHere: Owner.object_here,
    m.ObjectMissing: Owner.object_missing,
    m.LeaseGranted: Owner.lease_granted,
    m.LeaseRedirected: Owner.lease_redirected,
    m.LeaseDelayed: Owner.lease_delayed,
    m.LeaseWanted: Owner.lease_wanted,
    m.LeaseRefused: Owner.lease_refused,
    m.GangNamed: Owner.gang_named,
    s.GangLooked: Owner.gang_looked,
    m.TakenBack: Owner.taken_back,
    s.IdleLooked: Owner.idle_looked,
    s.LateLooked: Owner.late_looked,
    s.WaysLooked: Owner.ways_looked,
    s.AmountLessened: Owner.amount_lessened,
    m.LeaseLost: Owner.lease_lost,
    m.PeerLost: Owner.peer_lost,
    m.NodesChanged: Owner.nodes_changed,
    m.CopiesLost: Owner.copies_lost_told,
    s.CopySought: Owner.copy_sought,
    s.LeaseSilent: Owner.lease_silent,
    s.LoseAsked: Owner.lose_asked,
    m.LoseObject: Owner.lose_object,
    s.ParentBegan: Owner.parent_began,
    s.ParentEnded: Owner.parent_ended,
    s.NodeMoved: Owner.node_moved,
    m.Pong: _ignore,
    **ACTOR_HANDLERS,
    **DURABLE_HANDLERS,
    **MAKER_HANDLERS,
    **PROMISE_HANDLERS,
    **STASH_HANDLERS,
    **ESTATE_HANDLERS,
    **WAIT_HANDLERS,
}
