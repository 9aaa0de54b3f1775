"""The threads of an actor that runs several calls at a time. Shell."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.actor_calls import CallEnded
from flowengine.core.ids import object_id, short
from flowengine.errors import FlowError, TaskCancelled, TaskTimeout, pack_error

if TYPE_CHECKING:
    from flowengine.runtime.actor import Actor


class CallThreads:
    """Runs calls; no exception is raised in a thread from outside, since it would hit code that holds locks.

    A call that is cancelled or out of time is answered at once, and what its thread makes of it later is dropped.
    """

    def __init__(self, actor: Actor, count: int) -> None:
        self.actor = actor
        self.pool = ThreadPoolExecutor(count, thread_name_prefix="flowengine-call")
        self.open: dict[bytes, c.RunTask] = {}  # calls that are not answered

    def run(self, job: c.RunTask) -> None:
        """Have a thread do it."""
        self.open[job.push.spec.id] = job
        self.pool.submit(self.call, job)

    def call(self, job: c.RunTask) -> None:
        """In a thread."""
        call = job.push.spec.id
        if self.open.get(call) is not job:
            return
        answer = self.actor.answer_in_thread(job)
        if self.open.pop(call, None) is job:
            self.actor.finish(job.push, answer)
        else:
            self.drop(answer)

    def stop(self, order: c.Interrupt) -> None:
        """Answer that the call is cancelled or out of time."""
        job = self.open.pop(order.task, None)
        if job is None:
            return
        spec = job.push.spec
        error = pack_error(stop_error(f"task {spec.name} {short(spec.id)}", order.kind))
        answer = m.TaskFailed(spec.id, job.push.attempt, error, order.kind, False, -1)
        self.actor.session.step(CallEnded(spec.id, answer))

    def drop(self, answer: m.TaskDone | m.TaskFailed) -> None:
        """Nobody waits for it; the owners of what it still refers to are told of us, as the caller would have done."""
        session = self.actor.session
        values = answer.values if isinstance(answer, m.TaskDone) else ()
        stored = [object_id(answer.task, index) for index, value in enumerate(values) if type(value) is m.Stored]
        if stored:
            session.drop_results(c.DropResults(tuple(stored)))
        for ref in answer.held:
            session.endpoint.send(ref.owner, m.BorrowAdded(ref.oid, session.address))


def stop_error(name: str, kind: str) -> FlowError:
    """What is raised in code that is to stop."""
    if kind == "timeout":
        return TaskTimeout(f"{name} ran longer than its time limit")
    return TaskCancelled(f"{name} was cancelled while it ran")
