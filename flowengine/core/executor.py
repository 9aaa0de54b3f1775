"""The Executor machine: what a worker runs next, for which owner, and when it answers. Pure.

One task runs at a time, in the worker's main thread; what waits is kept in the order in which it came and can be
taken back by its owner. When the running task blocks in get, what waits goes back at once: it might be what the
running task waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ..errors import TaskCancelled, TaskTimeout, pack_error
from ..recovery.stash import Stash
from . import commands as c
from . import messages as m
from .actor_calls import CallDeadline, CallEnded, CallMissed, CallsEnded
from .actor_host import ActorHost, HostReady, Rested
from .actor_saving import CheckpointAsked, DrainEnded, StateSaved, StateTaken
from .ids import object_id, short, task_of
from .owner_waits import WaitTraced

REPLY_DELAY_S_MAX = 0.001  # a reply may wait so long for others when more tasks are queued
STOP_GRACE_S = 2.0  # for a task to end after its time limit, before its worker is killed


PENDING = m.Pending()
RECENT_MAX = 512
RECENT_BYTES_MAX = 4 << 20


def size_of(value: m.Value) -> int:
    """What keeping the value takes."""
    return len(value.blob) if type(value) is m.Inline else 64


class TaskEnded(m.Message, frozen=True):
    """The shell has run the task: what it answers, without what only the machine knows."""

    task: bytes
    attempt: int
    answer: Any  # TaskDone or TaskFailed


class TaskBlocked(m.Message, frozen=True):
    """A thread of the running task waits in get (or goes on)."""

    blocked: bool
    task: bytes = b""  # empty: the running one
    attempt: int = 0


class ItemMade(m.Message, frozen=True):
    """The running streaming task has made an item."""

    item: Any  # messages.StreamItem


class DeadlinePassed(m.Message, frozen=True):
    """Timer: the time limit of an attempt is over; killing: it had its grace too."""

    task: bytes
    attempt: int
    killing: bool = False


class Queued(msgspec.Struct):
    """A pushed task."""

    push: m.PushTask
    caller: str


class Executor:
    """Decides; never waits, sends or reads a clock."""

    def __init__(self, me: str, node: str, worker_id: str, stash: Stash) -> None:
        """stash: that of the process."""
        self.stash = stash
        self.me = me
        self.node = node
        self.worker_id = worker_id
        self.queue: dict[bytes, Queued] = {}
        self.running: Queued | None = None
        self.stopping = ""  # why the running task was interrupted: cancelled or timeout
        self.blocked = 0
        self.functions: dict[bytes, None] = {}
        self.unanswered_since = -1.0
        self.host: ActorHost | None = None  # this process is an actor's
        self.out: list[Any] = []
        self.now = 0.0
        self.gone: dict[str, None] = {}
        self.recent: dict[bytes, m.Value] = {}  # results of the last tasks, for those that follow
        self.recent_bytes = 0
        self.counters = {"tasks_started": 0}

    def handle(self, event: m.Message, now: float, sender: str = "") -> list[Any]:
        """The one door."""
        out: list[Any] = []
        self.out = out
        self.now = now
        if self.host is not None:
            self.host.out, self.host.now = out, now
        HANDLERS[type(event)](self, event, sender)
        return self.stash.attach(out) if self.stash.open else out

    # --- from owners ------------------------------------------------------------------------------

    def put_function(self, event: m.PutFunction, sender: str) -> None:
        """Tasks will name this function. An owner that was only cut off begins so again."""
        self.gone.pop(sender, None)
        self.functions[event.function] = None
        self.out.append(c.KeepFunction(event.function, event.blob))

    def push_task(self, event: m.PushTask, sender: str) -> None:
        """A task to run."""
        if event.spec.actor is not None:
            mine = self.host is not None and self.host.id == task_of(event.spec.actor.oid)
            if self.host is not None and mine and sender not in self.stash.fenced:
                if event.logs is not None:
                    self.stash.merge(event.logs.owner, event.logs.logs, sender)
                self.host.call_came(event, sender)
            return
        item = Queued(event, sender)
        if event.spec.function not in self.functions:
            failed = m.TaskFailed(event.spec.id, event.attempt, b"", "function", False, -1)
            self.out.append(c.Send(sender, failed))
        elif self.running is None:
            self.start(item)
        elif self.blocked:
            self.out.append(c.Send(sender, m.TakenBack((event.spec.id,), event.lease, True)))
        else:
            self.queue[event.spec.id] = item

    def take_back(self, event: m.TakeBack, sender: str) -> None:
        """The owner wants back what has not begun."""
        by_lease: dict[int, list[bytes]] = {}
        for task in event.tasks:
            item = self.queue.get(task)
            if item is not None and item.caller == sender:
                del self.queue[task]
                by_lease.setdefault(item.push.lease, []).append(task)
        for lease, tasks in by_lease.items():
            self.out.append(c.Send(sender, m.TakenBack(tuple(tasks), lease)))
        if not by_lease:
            self.out.append(c.Send(sender, m.TakenBack((), event.lease)))

    def cancel_task(self, event: m.CancelTask, sender: str) -> None:
        """The owner does not want the task any more."""
        item = self.queue.get(event.task)
        if item is not None and item.push.attempt == event.attempt:
            del self.queue[event.task]
            self.out.append(c.Send(sender, self.cancelled(item)))
            return
        running = self.running
        if self.host is not None and self.host.id != event.task:
            if self.host.cancel(event.task):
                self.out.append(c.Interrupt(event.task, event.attempt, "cancelled"))
            return
        if running is None or running.push.spec.id != event.task or running.push.attempt != event.attempt:
            return
        self.stopping = self.stopping or "cancelled"
        if event.recursive:
            self.out.append(c.CancelChildren(event.task, event.again))
        self.out.append(c.Interrupt(event.task, event.attempt, "cancelled"))

    def cancelled(self, item: Queued) -> m.TaskFailed:
        spec = item.push.spec
        error = pack_error(TaskCancelled(f"task {spec.name} {short(spec.id)} was cancelled before it began"))
        return m.TaskFailed(spec.id, item.push.attempt, error, "cancelled", False, -1)

    def stream_consumed(self, event: m.StreamConsumed, sender: str) -> None:
        """The reader of the stream goes on; one that has not begun will begin with that."""
        running, item = self.running, self.queue.get(event.task)
        if self.host is not None:
            self.host.stream_consumed(event)
        elif running is not None and running.push.spec.id == event.task and running.push.attempt == event.attempt:
            self.out.append(c.StreamGo(event.task, event.items))
        elif item is not None and item.push.attempt == event.attempt:
            item.push = msgspec.structs.replace(item.push, stream_taken=max(item.push.stream_taken, event.items))

    def peer_lost(self, event: m.PeerLost, sender: str) -> None:
        """An owner is gone: nobody wants what it queued; what runs for it is stopped."""
        self.gone[event.peer] = None
        self.queue = {task: item for task, item in self.queue.items() if item.caller != event.peer}
        running = self.running
        if self.host is not None:
            if event.peer == self.host.owner:
                # Its node would take this process for a free one, as the owner's leases are given back.
                self.out.append(c.Send(self.node, m.WorkerStuck(self.worker_id, "the actor's program is gone")))
            self.host.caller_gone(event.peer)
            return
        if running is not None and running.caller == event.peer and not self.stopping:
            self.stopping = "cancelled"
            self.out.append(c.CancelChildren(running.push.spec.id, True))
            self.out.append(c.Interrupt(running.push.spec.id, running.push.attempt, "cancelled"))

    # --- from the main thread ---------------------------------------------------------------------

    def start(self, item: Queued) -> None:
        """Run the task, with the results of those that were ahead of it; give it back when one is not there."""
        if PENDING in item.push.values:
            push = self.with_results(item.push)
            if push is None:
                self.out.append(c.Send(item.caller, m.TakenBack((item.push.spec.id,), item.push.lease)))
                self.next()
                return
            item = Queued(push, item.caller)
        self.running = item
        if item.push.spec.life is not None:
            self.host = ActorHost(item.push, item.caller, self.me, self.stash)
            self.host.out, self.host.now = self.out, self.now
        self.stopping = ""
        self.blocked = 0
        self.counters["tasks_started"] += 1
        limit_s = item.push.spec.timeout_s
        if limit_s > 0:
            self.out.append(c.SetTimer(limit_s, DeadlinePassed(item.push.spec.id, item.push.attempt)))
        self.out.append(c.RunTask(item.push, item.caller))

    def task_ended(self, event: TaskEnded, sender: str) -> None:
        """The task is over: answer, and run the next."""
        item = self.running
        self.running = None
        if self.blocked:  # a thread that the task has left behind, or an interrupt at the wrong moment
            self.blocked = 0
            self.out.append(c.Send(self.node, m.WorkerBlocked(self.worker_id, False)))
        if item is not None:
            self.answer(item, event.answer)
            if type(event.answer) is m.TaskDone:
                self.remember(event.answer)
        self.next()

    def next(self) -> None:
        """Run the oldest of what is queued."""
        if self.queue:
            self.start(self.queue.pop(next(iter(self.queue))))

    def with_results(self, push: m.PushTask) -> m.PushTask | None:
        """The push with values in place of what was pending when it was sent; None when one is not here."""
        spec = push.spec
        refs = spec.deps if spec.args_object is None else (*spec.deps, spec.args_object)
        values = []
        for ref, value in zip(refs, push.values, strict=True):
            found = self.recent.get(ref.oid) if type(value) is m.Pending else value
            if found is None:
                return None
            values.append(found)
        return msgspec.structs.replace(push, values=tuple(values))

    def remember(self, done: m.TaskDone) -> None:
        """Keep the results of the last tasks for those that follow them here."""
        for index, value in enumerate(done.values):
            if type(value) is not m.Failed:
                oid = object_id(done.task, index)
                known = self.recent.pop(oid, None)  # of an earlier run
                self.recent[oid] = value
                self.recent_bytes += size_of(value) - (0 if known is None else size_of(known))
        while self.recent_bytes > RECENT_BYTES_MAX or len(self.recent) > RECENT_MAX:
            oldest = next(iter(self.recent))
            self.recent_bytes -= size_of(self.recent.pop(oldest))

    def answer(self, item: Queued, answer: Any) -> None:
        if item.caller in self.gone:
            for ref in answer.held:  # it would have told their owners
                self.out.append(c.Send(ref.owner, m.BorrowAdded(ref.oid, self.me)))
            if type(answer) is m.TaskDone:
                self.drop(item, answer)
            return
        if self.stopping == "timeout" and type(answer) is m.TaskFailed:
            answer = self.timed_out(item, answer.run_us)
        waited_s = 0.0
        if self.queue:
            if self.unanswered_since < 0:
                self.unanswered_since = self.now
            waited_s = self.now - self.unanswered_since
        lazy = bool(self.queue) and waited_s < REPLY_DELAY_S_MAX and answer.run_us < 500
        if not lazy:
            self.unanswered_since = -1.0
        self.out.append(c.Send(item.caller, answer, lazy))

    def drop(self, item: Queued, answer: m.TaskDone) -> None:
        stored = [i for i, value in enumerate(answer.values) if type(value) is m.Stored]
        if stored:
            self.out.append(c.DropResults(tuple(item.push.spec.id + i.to_bytes(4, "big") for i in stored)))

    def timed_out(self, item: Queued, run_us: int) -> m.TaskFailed:
        spec = item.push.spec
        error = TaskTimeout(f"task {spec.name} {short(spec.id)} ran longer than its limit of {spec.timeout_s:g} s")
        return m.TaskFailed(spec.id, item.push.attempt, pack_error(error), "timeout", False, run_us)

    def item_made(self, event: ItemMade, sender: str) -> None:
        """An item of the running stream goes to its owner at once."""
        if self.host is not None:
            self.host.item_made(event.item)
            return
        if self.running is not None and self.running.caller not in self.gone:
            self.out.append(c.Send(self.running.caller, event.item))

    def task_blocked(self, event: TaskBlocked, sender: str) -> None:
        """The running task waits in get: its slot is free, and what is queued goes back to its owners."""
        running = self.running
        if running is None or (not event.blocked and not self.blocked):
            return
        if event.task and (running.push.spec.id, running.push.attempt) != (event.task, event.attempt):
            return  # what is left of an earlier task
        self.blocked += 1 if event.blocked else -1
        if event.blocked and self.blocked == 1:
            self.out.append(c.Send(self.node, m.WorkerBlocked(self.worker_id, True)))
            by_lease: dict[tuple[str, int], list[bytes]] = {}
            if self.running is not None and self.running.caller not in self.gone:
                by_lease[self.running.caller, self.running.push.lease] = []
            for task, item in self.queue.items():
                by_lease.setdefault((item.caller, item.push.lease), []).append(task)
            self.queue = {}
            for (caller, lease), tasks in by_lease.items():
                self.out.append(c.Send(caller, m.TakenBack(tuple(tasks), lease, True)))
        elif not event.blocked and self.blocked == 0:
            self.out.append(c.Send(self.node, m.WorkerBlocked(self.worker_id, False)))

    def for_host(self, event: Any, sender: str) -> None:
        """News for the actor that lives here."""
        if self.host is not None:
            if type(event) is HostReady and not event.error:
                self.out.append(c.Send(self.node, m.ActorHere(self.host.id)))
            self.host.told(event, sender)

    def wait_probed(self, event: m.WaitProbe, sender: str) -> None:
        """Somebody waits for a task, perhaps for one that is here: the owner of what it waits for itself goes on."""
        here = self.running is not None and self.running.push.spec.id == event.task
        here = here or (self.host is not None and self.host.has(event.task))
        self.out.append(c.SetTimer(0.0, WaitTraced(event, here)))

    # --- time limits ------------------------------------------------------------------------------

    def deadline_passed(self, event: DeadlinePassed, sender: str) -> None:
        """The time limit of an attempt is over: raise in it; if that does not help, have the worker killed."""
        running = self.running
        if self.host is not None and event.task in self.host.running:
            self.out.append(c.Interrupt(event.task, event.attempt, "timeout"))
            return
        if running is None or running.push.spec.id != event.task or running.push.attempt != event.attempt:
            return
        if event.killing:
            self.out.append(c.Send(running.caller, self.timed_out(running, -1)))
            reason = f"task {running.push.spec.name} did not stop within {STOP_GRACE_S:g} s after its time limit"
            self.out.append(c.Send(self.node, m.WorkerStuck(self.worker_id, reason)))
            return
        self.stopping = self.stopping or "timeout"
        self.out.append(c.CancelChildren(event.task))
        self.out.append(c.Interrupt(event.task, event.attempt, self.stopping))
        self.out.append(c.SetTimer(STOP_GRACE_S, DeadlinePassed(event.task, event.attempt, True)))


BOTH = frozenset((m.PeerLost, m.StashKept))  # concern the Owner of the process too

HANDLERS: dict[type[Any], Callable[[Executor, Any, str], None]] = {
    m.PutFunction: Executor.put_function,
    m.PushTask: Executor.push_task,
    m.TakeBack: Executor.take_back,
    m.CancelTask: Executor.cancel_task,
    m.StreamConsumed: Executor.stream_consumed,
    m.PeerLost: Executor.peer_lost,
    TaskEnded: Executor.task_ended,
    ItemMade: Executor.item_made,
    TaskBlocked: Executor.task_blocked,
    DeadlinePassed: Executor.deadline_passed,
    CallDeadline: Executor.deadline_passed,
    HostReady: Executor.for_host,
    CallEnded: Executor.for_host,
    CallsEnded: Executor.for_host,
    StateTaken: Executor.for_host,
    StateSaved: Executor.for_host,
    DrainEnded: Executor.for_host,
    CheckpointAsked: Executor.for_host,
    CallMissed: Executor.for_host,
    Rested: Executor.for_host,
    m.CallerFound: Executor.for_host,
    m.StashKept: Executor.for_host,
    m.CheckpointKept: Executor.for_host,
    m.CallersKnown: Executor.for_host,
    m.CallerGone: Executor.for_host,
    m.CallsResent: Executor.for_host,
    m.WaitProbe: Executor.wait_probed,
}
