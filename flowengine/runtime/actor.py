"""An actor in its worker process: constructed or restored, then calls, one by one, in threads or on a loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.actor_calls import CallEnded, CallsEnded
from flowengine.core.actor_host import CUT_SHORT, HostReady
from flowengine.core.actor_saving import Snapshot
from flowengine.core.executor import ItemMade
from flowengine.core.ids import root_id, short
from flowengine.core.owner_estate import EstateRestored
from flowengine.errors import ActorDied, FlowError, pack_error, traceback_text
from flowengine.refs import Current
from flowengine.runtime.actor_state import ActorStates
from flowengine.runtime.actor_threads import CallThreads, stop_error
from flowengine.runtime.context import Context
from flowengine.runtime.forks import end_fork
from flowengine.runtime.notes import noted

if TYPE_CHECKING:
    from flowengine.runtime.run import Run
    from flowengine.runtime.worker import WorkerSession

REPORT_S_MAX = 0.001  # so long an answer may wait for those of the calls behind it
CALL: contextvars.ContextVar[Context] = contextvars.ContextVar("flowengine_call")


class ExitActor(BaseException):
    """Raised by flow.exit_actor() through the method."""


class Actor:
    """The instance and how its calls are run; made in the main thread, which stays in `live` until the process ends."""

    def __init__(self, session: WorkerSession, run: Run) -> None:
        self.session = session
        self.run = run
        self.push = run.push
        self.id = run.spec.id
        self.owner = run.caller
        self.heir = f"{self.owner} {self.id.hex()}"
        life = run.spec.life
        is_same = life is not None and life.recovery == "exactly_once"  # a fresh state makes calls that nobody has yet
        self.caller_key = self.id if is_same else root_id(self.id + self.push.attempt.to_bytes(8, "big"))
        self.instance: Any = None
        self.leaving = False  # a method called exit_actor
        self.ended: deque[CallEnded] = deque()  # calls that the machine has not been told of
        self.report_is_due = False  # a timer runs
        self.kind: type = object
        self.note = noted(run.spec, run.push.attempt)
        self.states = ActorStates(session, run.push, run.caller)

    def live(self, cls: Any) -> None:
        """Construct or restore, then run calls; returns never."""
        session, life = self.session, self.push.spec.life
        assert life is not None
        session.step(s.ParentBegan(self.id, self.owner, self.push.attempt, ()))
        session.context.is_parent = True
        session.context.caller_key = self.caller_key
        began_us = time.monotonic_ns() // 1000
        try:
            snapshot = self.begin(cls)
        except BaseException as error:
            if isinstance(error, ActorDied):
                blob = pack_error(error)
            else:
                blob = pack_error(error, f"{self.push.spec.name}.__init__", traceback_text(error))
            session.in_user_code = False
            if session.prints:
                session.end_lines()
            session.membership.code_ended(False)  # it will not come again: the others need not wait for it
            session.step(HostReady(None, blob, tuple(self.states.passed_over), since(began_us)))
            queue.SimpleQueue[None]().get()  # its owner has the process killed
            return
        session.in_user_code = False
        if session.prints:
            session.end_lines()
        session.calls_at_once = life.is_async or life.max_concurrency > 1
        if life.max_concurrency > 1 and not life.is_async:
            session.threads = CallThreads(self, life.max_concurrency)
        session.step(HostReady(snapshot, b"", tuple(self.states.passed_over), since(began_us)))
        if life.is_async:
            asyncio.run(self.serve_async())
        elif session.threads is not None:
            queue.SimpleQueue[None]().get()
        else:
            self.serve()

    def begin(self, cls: Any) -> Snapshot | None:
        self.kind = self.session.actor_kind = cls
        restored = self.states.restored(cls)
        if restored is None:
            args, kwargs = self.run.arguments()
            self.session.at_point("actor.constructor.before_run")
            self.session.enter_user_code()
            self.instance = cls(*args, **kwargs)
            return None
        self.instance, snapshot = restored
        self.session.sharing.had(self.id, snapshot.holds)
        self.session.step(s.SeqsRestored(self.id, snapshot.seqs))
        self.session.step(EstateRestored(self.id, snapshot.estate, snapshot.seqs))
        self.session.at_point("actor.restored")
        return snapshot

    # --- running calls ---------------------------------------------------------------------------------------

    def serve(self) -> None:
        """One call at a time, in the main thread; those that were ordered together are answered together."""
        session = self.session
        while True:
            job = session.jobs.get()
            if type(job) is c.RunTask:
                over = self.end_of(job.push, self.call(job))
                self.ended.append(over)
                if session.jobs.empty() or is_last(over):
                    self.report()
                elif not self.report_is_due:
                    self.report_is_due = True  # the next call may take long
                    session.loop.call_soon_threadsafe(session.loop.call_later, REPORT_S_MAX, self.report_late)
            elif isinstance(job, c.SaveState):
                self.states.save(job.calls, self.instance, self.kind)

    def report_late(self) -> None:
        """The timer, in the loop thread."""
        self.report_is_due = False
        self.report()

    def report(self) -> None:
        """Tell the machine which calls have ended; behind one that was interrupted nothing may begin."""
        session = self.session
        with session.drive.lock:
            ended = []
            while self.ended:
                ended.append(self.ended.popleft())
            if not ended:
                return
            unbegun = []
            while is_last(ended[-1]) and not session.jobs.empty():
                job = session.jobs.get()
                if isinstance(job, c.RunTask):
                    unbegun.append(job.push.spec.id)
            session.step(CallsEnded(tuple(ended), tuple(unbegun)))
        for call in ended:
            session.stop_orders.pop(call.call, None)

    def call(self, job: c.RunTask) -> m.TaskDone | m.TaskFailed:
        run = self.new_run(job)
        self.session.context = context = self.new_context(job)
        return run.answer_call(context, self.invoke)

    def answer_in_thread(self, job: c.RunTask) -> m.TaskDone | m.TaskFailed:
        """Run a call in this thread, which is one of several."""
        run = self.new_run(job)
        context = self.new_context(job)
        CALL.set(context)
        return run.answer_call(context, self.invoke)

    async def serve_async(self) -> None:
        """Calls are coroutines on one loop; plain methods run on it too."""
        session, handover = self.session, Handover(asyncio.get_running_loop())
        with session.drive.lock:  # what is ordered meanwhile comes behind
            earlier, session.jobs = session.jobs, handover  # type: ignore[assignment]
            while not earlier.empty():
                handover.take(earlier.get())
            for order in session.stop_orders.values():
                handover.interrupt(order)
        while True:
            job = await handover.jobs.get()
            if isinstance(job, c.SaveState):
                self.states.save(job.calls, self.instance, self.kind)
            elif job is not None:
                call = handover.running[job.push.spec.id]
                call.task = asyncio.create_task(self.call_async(call))

    async def call_async(self, call: AsyncCall) -> None:
        job = call.job
        run = self.new_run(job)
        run.began_us = time.monotonic_ns() // 1000
        context = self.new_context(job)
        CALL.set(context)
        try:
            call.begun = True
            if call.stop:
                raise asyncio.CancelledError
            self.at_call()
            method, args, kwargs = self.prepared(run)
            result = method(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
            if run.spec.num_returns < 0:
                await self.stream_async(run, call, result)
            self.session.at_point("actor.call.after_run")
            answer: m.TaskDone | m.TaskFailed = run.done_call(
                context, run.pack(result) if run.spec.num_returns >= 0 else ()
            )
        except ExitActor:
            self.leaving = True
            answer = run.done_call(context, run.pack(None))
        except BaseException as error:
            if call.stop and isinstance(error, asyncio.CancelledError):
                error = stop_error(f"task {run.spec.name} {short(run.spec.id)}", call.stop)
            answer = run.failed_call(context, error)
        self.session.jobs.running.pop(job.push.spec.id, None)  # type: ignore[attr-defined]
        self.finish(job.push, answer)

    async def stream_async(self, run: Run, call: AsyncCall, made: Any) -> None:
        """Send what a generator yields, of either kind; wait when the reader is far behind."""
        push = run.push
        call.taken = max(call.taken, push.stream_taken)
        items = made if hasattr(made, "__aiter__") else as_async(made)
        async for value in items:
            index = run.items
            run.items += 1
            if index < push.stream_have:
                continue
            item = m.StreamItem(run.spec.id, push.attempt, index, run.pack_one(index, value))
            self.session.step(ItemMade(item))
            while index + 1 - call.taken >= self.session.config.stream_items_max:
                call.moved.clear()
                await call.moved.wait()

    def invoke(self, run: Run) -> tuple[m.Value, ...]:
        """Run the method in this thread."""
        session = self.session
        self.at_call()
        try:
            method, args, kwargs = self.prepared(run)
            session.enter_user_code()
            result = method(*args, **kwargs)
            if run.spec.num_returns < 0:
                return run.stream(result)
        except ExitActor:
            self.leaving = True
            result = None
        finally:
            session.in_user_code = False
            if Current.forked:
                end_fork()
        session.at_point("actor.call.after_run")
        return run.pack(result)

    def at_call(self) -> None:
        """The points before a call, which may be one that is done again."""
        session = self.session
        if not session.arms.points:
            return
        executor = session.executor
        if executor is not None and executor.host is not None and executor.host.recovering:
            session.at_point("actor.replay.before_call")
        session.at_point("actor.call.before_run")

    def prepared(self, run: Run) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        try:
            args, kwargs = run.arguments()
        except FlowError as error:
            if run.push.seen:
                self.give_up(run, error)
            raise
        return getattr(self.instance, run.spec.function.decode()), args, kwargs

    def give_up(self, run: Run, error: FlowError) -> None:
        """A call that was done cannot be done again: better no actor than one with another state."""
        why = f"it cannot be brought back: an input of the call {run.spec.name}, which has to run again, is lost"
        blob = pack_error(ActorDied(f"{why} ({error})", who=self.push.spec.name, what_next="nothing: it stays dead"))
        self.session.step(HostReady(None, blob))
        queue.SimpleQueue[None]().get()  # its owner has the process killed

    def new_run(self, job: c.RunTask) -> Run:
        return type(self.run)(self.session, job.push, job.caller)

    def new_context(self, job: c.RunTask) -> Context:
        spec = job.push.spec
        context = Context(spec.id, spec.name, self.push.run, self.owner, spec.depth + 1)
        context.push = job.push
        context.caller_key = self.caller_key
        context.actor = self.id
        context.is_parent = True  # its children are found again by the order of the calls
        context.heir = self.heir
        context.driver = self.heir
        context.environment = self.push.spec.environment
        for kind, number, payload in job.push.recorded:
            context.recorded[kind, number] = payload
        self.session.owner.depth = spec.depth + 1
        return context

    def end_of(self, push: m.PushTask, answer: m.TaskDone | m.TaskFailed) -> CallEnded:
        self.session.at_point("actor.reply.before_send")
        self.session.running_note[:] = self.note  # a death from here on is not the call's fault
        if self.session.prints:
            self.session.end_lines()
        return CallEnded(push.spec.id, answer, self.leaving)

    def finish(self, push: m.PushTask, answer: m.TaskDone | m.TaskFailed) -> None:
        self.session.step(self.end_of(push, answer))
        self.session.stop_orders.pop(push.spec.id, None)


def since(began_us: int) -> tuple[int, int]:
    """When something began, and how long it took up to now."""
    return began_us, time.monotonic_ns() // 1000 - began_us


def is_last(over: CallEnded) -> bool:
    """Whether a call left a state that must be looked at before another call begins."""
    answer = over.answer
    return over.leaving or (type(answer) is m.TaskFailed and answer.kind in CUT_SHORT)


class Handover:
    """Looks like the queue of jobs, and puts them on an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.jobs: asyncio.Queue[Any] = asyncio.Queue()
        self.running: dict[bytes, AsyncCall] = {}  # those that have been ordered

    def put(self, job: Any) -> None:
        """From any thread."""
        self.loop.call_soon_threadsafe(self.take, job)

    def take(self, job: Any) -> None:
        """In the loop's thread; from here on a call can be stopped."""
        if isinstance(job, c.RunTask):
            self.running[job.push.spec.id] = AsyncCall(job)
        self.jobs.put_nowait(job)

    def stop(self, order: c.Interrupt) -> None:
        """Cancel the coroutine of a call."""
        self.loop.call_soon_threadsafe(self.interrupt, order)

    def interrupt(self, order: c.Interrupt) -> None:
        """In the loop's thread; a call that has yet to begin looks itself."""
        call = self.running.get(order.task)
        if call is not None:
            call.stop = order.kind
            if call.begun and call.task is not None:
                call.task.cancel()

    def move(self, order: c.StreamGo) -> None:
        """The reader of a call's items has taken some."""
        self.loop.call_soon_threadsafe(self._move, order)

    def _move(self, order: c.StreamGo) -> None:
        call = self.running.get(order.task)
        if call is not None:
            call.taken = max(call.taken, order.items)
            call.moved.set()


class AsyncCall:
    """A call on the event loop."""

    def __init__(self, job: c.RunTask) -> None:
        self.job = job
        self.task: asyncio.Task[None] | None = None
        self.begun = False  # a task that is cancelled before its first step would end without an answer
        self.stop = ""  # why it was told to stop
        self.taken = 0  # items that its reader has taken
        self.moved = asyncio.Event()


async def as_async(items: Iterable[Any]) -> AsyncIterator[Any]:
    """A plain generator, with a chance for others between two items."""
    for item in items:
        yield item
        await asyncio.sleep(0)
