"""An actor in its worker process: constructed or restored, then calls, one by one, in threads or on a loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import queue
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.actor_host import CallEnded, HostReady, Snapshot, StateSaved
from flowengine.core.executor import ItemMade
from flowengine.core.ids import short
from flowengine.errors import ActorDied, FlowError, TaskCancelled, TaskTimeout, pack_error, traceback_text
from flowengine.objects import codec
from flowengine.refs import Current, ObjectRef
from flowengine.runtime.context import Context
from flowengine.runtime.forks import end_fork

if TYPE_CHECKING:
    from flowengine.runtime.worker import Run, WorkerSession

STATE_IN_MESSAGE_BYTES_MAX = 4 << 20  # a larger state goes to a file
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
        self.recorded: dict[str, dict[tuple[str, int], bytes]] = {}
        for kind, number, payload in self.push.recorded:
            plain, _, call = kind.partition(":")
            if call:
                self.recorded.setdefault(call, {})[plain, number] = payload
        self.instance: Any = None
        self.leaving = False  # a method called exit_actor
        self.files: list[str] = []

    def live(self, cls: Any) -> None:
        """Construct or restore, then run calls; returns never."""
        session, life = self.session, self.push.spec.life
        assert life is not None
        session.step(s.ParentBegan(self.id, self.owner, self.push.attempt, ()))
        session.context.is_parent = True
        try:
            snapshot = self.begin(cls)
        except BaseException as error:
            blob = pack_error(error, f"{self.push.spec.name}.__init__", traceback_text(error))
            session.in_user_code = False
            session.step(HostReady(None, blob))
            queue.SimpleQueue[None]().get()  # its owner has the process killed
            return
        session.in_user_code = False
        session.step(HostReady(snapshot))
        if life.is_async:
            asyncio.run(self.serve_async())
        elif life.max_concurrency > 1:
            self.serve_threads(life.max_concurrency)
        else:
            self.serve()

    def begin(self, cls: Any) -> Snapshot | None:
        checkpoint = self.push.checkpoint
        if checkpoint is None or not isinstance(checkpoint.value, m.Inline):
            args, kwargs = self.run.arguments()
            self.session.enter_user_code()
            self.instance = cls(*args, **kwargs)
            return None
        blob = checkpoint.value.blob
        if checkpoint.path:
            blob = Path(checkpoint.path).read_bytes()
            self.files.append(checkpoint.path)
        state, snapshot = self.session.values.unpacked(b"", blob, None, True)
        self.instance = cls.__new__(cls)
        restore_state(self.instance, state)
        assert isinstance(snapshot, Snapshot)
        self.session.step(s.SeqsRestored(self.id, snapshot.seqs))
        return snapshot

    # --- running calls ---------------------------------------------------------------------------------------

    def serve(self) -> None:
        """One call at a time, in the main thread."""
        while True:
            job = self.session.jobs.get()
            if isinstance(job, c.SaveState):
                self.save(job.calls)
            elif job is not None:
                self.finish(job.push, self.call(job))

    def call(self, job: c.RunTask) -> m.TaskDone | m.TaskFailed:
        run = self.new_run(job)
        self.session.context = context = self.new_context(job)
        return run.answer_call(context, lambda: self.invoke(run))

    def serve_threads(self, count: int) -> None:
        """Up to so many calls at a time, in threads."""
        pool = ThreadPoolExecutor(count, thread_name_prefix="flowengine-call")
        while True:
            job = self.session.jobs.get()
            if isinstance(job, c.RunTask):
                pool.submit(self.call_in_thread, job)

    def call_in_thread(self, job: c.RunTask) -> None:
        run = self.new_run(job)
        context = self.new_context(job)
        CALL.set(context)
        self.finish(job.push, run.answer_call(context, lambda: self.invoke(run)))

    async def serve_async(self) -> None:
        """Calls are coroutines on one loop; plain methods run on it too."""
        loop = asyncio.get_running_loop()
        jobs: asyncio.Queue[Any] = asyncio.Queue()
        earlier, self.session.jobs = self.session.jobs, Handover(loop, jobs)  # type: ignore[assignment]
        while not earlier.empty():
            jobs.put_nowait(earlier.get())
        running = self.session.jobs.running  # type: ignore[attr-defined]
        while True:
            job = await jobs.get()
            if isinstance(job, c.SaveState):
                self.save(job.calls)
            elif job is not None:
                call = running[job.push.spec.id] = AsyncCall(job)
                call.task = asyncio.create_task(self.call_async(call))

    async def call_async(self, call: AsyncCall) -> None:
        job = call.job
        run = self.new_run(job)
        run.began_us = time.monotonic_ns() // 1000
        context = self.new_context(job)
        CALL.set(context)
        try:
            self.session.at_point("actor.call.before_run")
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
        session.at_point("actor.call.before_run")
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
        context.caller_key = self.id
        context.actor = self.id
        context.is_parent = True  # its children are found again by the order of the calls
        context.heir = self.heir
        if self.recorded:
            context.recorded = self.recorded.get(spec.id.hex(), {})
        self.session.owner.depth = spec.depth + 1
        return context

    def finish(self, push: m.PushTask, answer: m.TaskDone | m.TaskFailed) -> None:
        self.session.at_point("actor.reply.before_send")
        self.session.note_running(self.run.spec, self.push.attempt)  # a death from here on is not the call's fault
        self.session.step(CallEnded(push.spec.id, answer, self.leaving))

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def save(self, calls: int) -> None:
        """Pickle the state between two calls and hand it to the machine."""
        session = self.session
        began = time.perf_counter()
        host = session.executor.host if session.executor is not None else None
        assert host is not None
        try:
            session.at_point("actor.checkpoint.before_write")
            with session.drive.lock:
                snapshot = host.snapshot(self.seqs())
            packed = codec.pack((state_of(self.instance), snapshot))
        except Exception:
            session.step(StateSaved(calls, None, 0.0))
            return
        refs = tuple([ref.to() for ref in packed.refs if isinstance(ref, ObjectRef)])
        if refs:
            session.step(s.Exported(refs, self.owner))
        path = ""
        blob = codec.to_inline(packed)
        if len(blob) > STATE_IN_MESSAGE_BYTES_MAX:
            path, blob = self.write(calls, blob), b""
        checkpoint = m.Checkpoint(calls, m.Inline(blob, refs), path)
        session.step(StateSaved(calls, checkpoint, time.perf_counter() - began))
        session.at_point("actor.checkpoint.after_write")

    def write(self, calls: int, blob: bytes) -> str:
        """A large state goes to a file; the two newest stay."""
        settings = self.session.settings
        folder = Path(settings.state_dir, "actors", settings.session)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = str(folder / f"{self.id.hex()}-{calls}")
        part = f"{path}.part-{os.getpid()}"
        Path(part).write_bytes(blob)
        Path(part).replace(path)
        self.files.append(path)
        while len(self.files) > 2:
            Path(self.files.pop(0)).unlink(missing_ok=True)
        return path

    def seqs(self) -> tuple[tuple[bytes, int], ...]:
        """The numbers of this actor's next calls to others."""
        owner = self.session.owner
        found = {actor: seq for (actor, caller), seq in owner.seqs_before.items() if caller == self.id}
        for actor, target in owner.targets.items():
            line = target.lines.get(self.id)
            if line is not None:
                found[actor] = line.next_seq
        return tuple(found.items())


class Handover:
    """Looks like the queue of jobs, and puts them on an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, jobs: asyncio.Queue[Any]) -> None:
        self.loop = loop
        self.jobs = jobs
        self.running: dict[bytes, AsyncCall] = {}

    def put(self, job: Any) -> None:
        """From any thread."""
        self.loop.call_soon_threadsafe(self.jobs.put_nowait, job)

    def stop(self, order: c.Interrupt) -> None:
        """Cancel the coroutine of a call."""
        self.loop.call_soon_threadsafe(self._stop, order)

    def _stop(self, order: c.Interrupt) -> None:
        call = self.running.get(order.task)
        if call is not None and call.task is not None:
            call.stop = order.kind
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
        self.stop = ""  # why it was told to stop
        self.taken = 0  # items that its reader has taken
        self.moved = asyncio.Event()


async def as_async(items: Iterable[Any]) -> AsyncIterator[Any]:
    """A plain generator, with a chance for others between two items."""
    for item in items:
        yield item
        await asyncio.sleep(0)


def stop_error(name: str, kind: str) -> FlowError:
    """What is raised in code that is to stop."""
    if kind == "timeout":
        return TaskTimeout(f"{name} ran longer than its time limit")
    return TaskCancelled(f"{name} was cancelled while it ran")


def state_of(instance: Any) -> Any:
    """What a checkpoint keeps of an instance."""
    save = getattr(instance, "__flow_save__", None)
    return save() if save is not None else instance.__getstate__()


def restore_state(instance: Any, state: Any) -> None:
    """The opposite."""
    load = getattr(instance, "__flow_load__", None) or getattr(instance, "__setstate__", None)
    if load is not None:
        load(state)
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    for part in (attributes, slots):
        for name, value in (part or {}).items():
            object.__setattr__(instance, name, value)


