"""A worker process: user code runs in the main thread, one task at a time; what it submits is owned here."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import cloudpickle

from flowengine.chaos.arms import Arms
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.executor import BOTH, Executor, ItemMade, TaskBlocked, TaskEnded
from flowengine.core.executor import HANDLERS as EXECUTOR_HANDLERS
from flowengine.core.ids import object_id, short
from flowengine.core.owner import Owner
from flowengine.core.owner_waits import WaitIsLong
from flowengine.errors import (
    FlowError,
    ObjectLost,
    OutOfDisk,
    StoreFull,
    TaskCancelled,
    TaskTimeout,
    pack_error,
    traceback_text,
)
from flowengine.objects import codec
from flowengine.refs import Current, ObjectRef
from flowengine.runtime.actor import CALL, Actor, Handover
from flowengine.runtime.actor_threads import CallThreads, stop_error
from flowengine.runtime.context import Context
from flowengine.runtime.drive import Drive
from flowengine.runtime.forks import end_fork, guard_forks
from flowengine.runtime.notes import note_running, open_note
from flowengine.runtime.session import Session
from flowengine.runtime.settings import WorkerSettings
from flowengine.slots import as_results, fill_slots

FUNCTIONS_KEPT_MAX = 1_000
INTERRUPT_SIGNAL = signal.SIGUSR1


class Machines:
    """Owner and Executor behind one door; a loss of a peer concerns both."""

    def __init__(self, owner: Owner, executor: Executor) -> None:
        self.owner = owner
        self.executor = executor

    def handle(self, event: Any, now: float, sender: str = "") -> list[Any]:
        """The one door of the process."""
        kind = type(event)
        owner = self.owner
        if kind not in EXECUTOR_HANDLERS:
            out = owner.handle(event, now, sender)
        else:
            out = self.executor.handle(event, now, sender)
            if kind in BOTH:
                out = [*out, *owner.handle(event, now, sender)]
        return owner.gate(out) if owner.gated else out


class WorkerSession(Session):
    """The engine inside of a worker."""

    role = "worker"
    blocks_soon_s = 0.0002

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings.config, settings.secret, settings.tls, settings.host)
        self.settings = settings
        self.jobs: queue.SimpleQueue[c.RunTask | c.SaveState | None] = queue.SimpleQueue()
        self.threads: CallThreads | None = None  # of an actor that has several
        self.blobs: dict[bytes, bytes] = {}
        self.functions: dict[bytes, tuple[Callable[..., Any], list[ObjectRef]]] = {}
        self.in_user_code = False
        self.stop_orders: dict[bytes, c.Interrupt] = {}  # by task: interrupts that have not been raised yet
        self.stream_taken = 0
        self.stream_moved: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.arms = Arms(os.path.join(settings.store_folder, "chaos"))
        self.running_note = open_note(settings.running_path)

    def make_drive(self, owner: Owner) -> Drive:
        """Owner and Executor behind one door."""
        self.executor = Executor(self.endpoint.address, self.node, self.settings.worker_id, owner.stash)
        return Drive(Machines(owner, self.executor), self.on_bug)

    def hello(self) -> None:
        """A worker introduces itself by its number."""
        self.endpoint.send(self.node, m.Joined(self.endpoint.address, os.getpid(), self.role))

    def performers(self) -> dict[type, Callable[[Any], None]]:
        """How this process carries commands out."""
        return {
            **super().performers(),
            c.RunTask: self.run_task,
            c.KeepFunction: self.keep_function,
            c.Interrupt: self.interrupt,
            c.CancelChildren: self.cancel_children,
            c.StreamGo: self.stream_go,
            c.DropResults: self.drop_results,
            c.SaveState: self.save_state,
        }

    def enter(self, welcome: m.Welcome) -> None:
        """The store is known: ready for tasks."""
        super().enter(welcome)
        self.arms.read()  # again: a point may have been armed while this process started
        Current.session = self
        guard_forks()
        self.values.durable_url = f"{self.settings.live_url}/durable"
        started = m.WorkerStarted(self.settings.worker_id, os.getpid(), self.endpoint.address)
        self.endpoint.send(self.node, started)

    def on_lost(self, peer: str, reason: str) -> None:
        """Without its node a worker has no purpose."""
        if peer == self.node:
            os._exit(0)
        super().on_lost(peer, reason)

    # --- commands ---------------------------------------------------------------------------------

    def run_task(self, command: c.RunTask) -> None:
        """A job of the main thread."""
        while not self.stream_moved.empty():
            self.stream_moved.get()
        if self.threads is not None:
            self.threads.run(command)
            return
        self.jobs.put(command)

    def keep_function(self, command: c.KeepFunction) -> None:
        """Remember a pickled function; unpickled when it is first called."""
        self.blobs[command.function] = command.blob
        if len(self.blobs) > FUNCTIONS_KEPT_MAX and self.executor is not None:
            oldest = next(iter(self.blobs))
            del self.blobs[oldest]
            self.functions.pop(oldest, None)
            self.executor.functions.pop(oldest, None)

    def interrupt(self, command: c.Interrupt) -> None:
        """Have the main thread raise, if it still runs that attempt."""
        if isinstance(self.jobs, Handover):
            self.jobs.stop(command)
            return
        if self.threads is not None:
            self.threads.stop(command)
            return
        self.stop_orders[command.task] = command
        signal.pthread_kill(self.main_thread or 0, INTERRUPT_SIGNAL)
        self.stream_moved.put(-1)

    def on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """The signal, in the main thread; outside of user code it waits until that is entered."""
        push = self.context.push
        if push is None or not self.in_user_code:
            return
        stop = self.stop_orders.get(push.spec.id)
        if stop is None or stop.attempt != push.attempt:
            return
        name = f"task {push.spec.name} {short(stop.task)}"
        error = stop_error(name, stop.kind)
        del self.stop_orders[stop.task]
        if self.masked:
            self.pending_signal = error
        else:
            raise error

    def enter_user_code(self) -> None:
        """From here on an interrupt is raised at once; one that came before is raised now."""
        self.in_user_code = True
        if self.stop_orders:
            self.on_interrupt(INTERRUPT_SIGNAL, None)

    def cancel_children(self, command: c.CancelChildren) -> None:
        """What the running task submitted is not wanted."""
        self.drive.step(s.ParentEnded(command.task, True, command.again))

    def stream_go(self, command: c.StreamGo) -> None:
        """The reader has taken items of the running stream."""
        if isinstance(self.jobs, Handover):
            self.jobs.move(command)
            return
        self.stream_moved.put(command.items)

    def save_state(self, command: c.SaveState) -> None:
        """The actor's main thread comes to it between two calls."""
        self.jobs.put(command)

    @property
    def context(self) -> Context:
        """The code that runs: of this thread or coroutine when it is an actor's call, else of the process."""
        return CALL.get(None) or self.base_context

    @context.setter
    def context(self, context: Context) -> None:
        self.base_context = context

    def actor_home(self) -> tuple[bytes, str]:
        """The actor that lives here and its owner."""
        host = self.executor.host if self.executor is not None else None
        return (host.id, host.owner) if host is not None else super().actor_home()

    def drop_results(self, command: c.DropResults) -> None:
        """Results whose owner is gone."""
        self.endpoint.send(self.node, m.ObjectFreed(command.oids))

    def going_to_block(self, context: Context) -> None:
        """The task waits: its slot is free for others (its children, perhaps)."""
        if context.push is not None:
            self.step(TaskBlocked(True, context.task, context.push.attempt))

    def blocked_no_more(self, context: Context) -> None:
        """It goes on."""
        if context.push is not None:
            self.step(TaskBlocked(False, context.task, context.push.attempt))

    def waits_long(self, number: int, context: Context) -> None:
        """Calls may wait for each other in a circle; an actor's main thread runs all of its calls."""
        in_main = threading.get_ident() == self.main_thread
        if not in_main and CALL.get(None) is None:
            return  # a thread of the user's own: the code may end without it
        alone = in_main and context.actor is not None
        self.step(WaitIsLong(number, context.task, context.name, context.depth, alone))

    def submit(self, spec: m.TaskSpec, blob: bytes | None) -> None:
        """A new task of the running one, which is a parent from now on."""
        if not self.context.is_parent:
            self.begin_parent()
        super().submit(spec, blob)

    def note(self, kind: str, number: int, payload: bytes) -> None:
        """The running task made a choice: its owner is told."""
        context = self.context
        if context.actor is not None:
            self.step(s.Noted(context.actor, f"{kind}:{context.task.hex()}", number, payload))
            return
        if not self.context.is_parent:
            self.begin_parent()
        super().note(kind, number, payload)

    def begin_parent(self) -> None:
        """The running task needs its owner to keep what a re-run would need."""
        context = self.context
        if context.push is None:
            return
        context.is_parent = True
        push = context.push
        self.step(s.ParentBegan(push.spec.id, context.caller, push.attempt, push.children))

    # --- running ----------------------------------------------------------------------------------

    def work(self) -> None:
        """The main thread's life."""
        signal.signal(INTERRUPT_SIGNAL, self.on_interrupt)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, frame: self.jobs.put(None))
        while True:
            job = self.jobs.get()
            if not isinstance(job, c.RunTask):
                return
            push = job.push
            note_running(self.running_note, push.spec, push.attempt)
            answer = Run(self, push, job.caller).answer()
            self.at_point("task.reply.before_send")
            if self.jobs.empty():
                flush_streams()  # before the answer, since the program may end the engine when it has that
            self.step(TaskEnded(push.spec.id, push.attempt, answer))
            self.stop_orders.pop(push.spec.id, None)  # it came too late

    def goodbye(self, peer: str, message: m.Goodbye) -> None:
        """The node has more processes than it needs: end, unless somebody needs this one."""
        idle = self.executor is not None and self.executor.running is None
        if peer == self.node and idle and not self.owner.is_needed():
            self.jobs.put(None)

    def note_running(self, spec: m.TaskSpec, attempt: int) -> None:
        """For the account of a death: what runs."""
        note_running(self.running_note, spec, attempt)

    def function(self, name: bytes) -> Callable[..., Any]:
        """The function behind a name."""
        found = self.functions.get(name)
        if found is None:
            packed = self.blobs[name]
            found = self.functions[name] = (self.values.unpacked(b"", packed, None), [])
        return found[0]

    def answer(self, peer: str, question: m.Asked) -> None:
        """Questions about this worker; `arm` arms a named point of the failure laboratory."""
        if question.topic == "arm":
            self.arms.add(question.argument)
        if question.topic == "actor" and self.executor is not None and self.executor.host is not None:
            state = self.executor.host.describe()
            self.endpoint.send(peer, m.Answered(question.request, question.topic, state))
            return
        super().answer(peer, question)

    def at_point(self, point: str, what: bytes = b"") -> None:
        """A named point of the failure laboratory is passed."""
        if self.arms.points:
            context = self.context
            actor = context.actor.hex() if context.actor is not None else ""
            method = f"{actor}.{context.push.spec.function.decode()}" if actor and context.push is not None else ""
            self.arms.passed(point, (context.name, context.task.hex(), actor, method))


class Run:
    """One attempt of one task in the main thread."""

    began_us = 0
    items = 0
    given: tuple[bytes, ...] = ()

    def __init__(self, session: WorkerSession, push: m.PushTask, caller: str) -> None:
        self.session = session
        self.push = push
        self.spec = push.spec
        self.caller = caller

    def answer(self) -> m.TaskDone | m.TaskFailed:
        """Run it and say how it went; never raises."""
        session, spec, push = self.session, self.spec, self.push
        context = Context(spec.id, spec.name, push.run, self.caller, spec.depth + 1)
        context.push = push
        context.heir = f"{self.caller} {spec.id.hex()}"
        context.driver = spec.driver or context.heir
        for kind, number, payload in push.recorded:
            context.recorded[kind, number] = payload
        session.context = context
        session.owner.depth = spec.depth + 1
        self.began_us = time.monotonic_ns() // 1000
        try:
            if push.children:
                session.begin_parent()
            return self.done(self.run())
        except BaseException as error:
            return self.failed(error)
        finally:
            session.in_user_code = False
            session.pending_signal = None

    def answer_call(self, context: Context, invoke: Callable[[Run], tuple[m.Value, ...]]) -> m.TaskDone | m.TaskFailed:
        """Run one call of an actor and say how it went; never raises."""
        self.began_us = time.monotonic_ns() // 1000
        self.session.note_running(self.spec, self.push.attempt)
        try:
            return self.done_call(context, invoke(self))
        except BaseException as error:
            return self.failed_call(context, error)
        finally:
            self.session.pending_signal = None

    def done_call(self, context: Context, values: tuple[m.Value, ...]) -> m.TaskDone:
        """The answer of a call that ended well."""
        self.drop_given()
        items = self.items if self.spec.num_returns < 0 else 0
        held = self.session.owner.still_held()
        return m.TaskDone(self.spec.id, self.push.attempt, values, self.run_us(), held, (), items, self.began_us)

    def failed_call(self, context: Context, error: BaseException) -> m.TaskFailed:
        """The answer of a call that raised."""
        self.session.in_user_code = False
        kind = "cancelled" if isinstance(error, TaskCancelled) else "task"
        if isinstance(error, TaskTimeout):
            kind = "timeout"
        blob, refs = self.packed_error(error, kind == "task")
        self.drop_given()
        return self.failure(blob, kind, False, refs)

    def run(self) -> tuple[m.Value, ...]:
        session, spec = self.session, self.spec
        session.at_point("task.before_run")
        function = session.function(spec.function)
        try:
            session.enter_user_code()
            if spec.life is not None:
                Actor(session, self).live(function)
            args, kwargs = self.arguments(getattr(function, "by_reference", False))
            result = function(*args, **kwargs)
            if spec.num_returns < 0:
                return self.stream(result)
        finally:
            session.in_user_code = False
            if Current.forked:
                end_fork()  # only the process that was given the task answers for it
        session.at_point("task.after_run")
        return self.pack(result)

    def arguments(self, by_reference: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with the values of references in their slots, or the references."""
        spec, push, session = self.spec, self.push, self.session
        if not spec.args and not push.values:
            return (), {}
        values: list[Any] = []
        if push.values:
            values = self.references() if by_reference else self.inputs()
        if spec.args_object is not None:
            args, kwargs = values.pop()
        elif spec.args:
            args, kwargs = session.values.unpacked(b"", spec.args, None)
        else:
            return tuple(values), {}  # nothing but references, in their order
        return fill_slots(args, kwargs, values)

    def inputs(self) -> list[Any]:
        """The values of the references; what is small and refers to nothing is at hand, the rest is looked after."""
        spec, push, session = self.spec, self.push, self.session
        refs = spec.deps if spec.args_object is None else (*spec.deps, spec.args_object)
        at_hand = [type(value) is m.Inline and not value.contained for value in push.values]
        if not all(at_hand):
            rest = [pair for pair, here in zip(zip(refs, push.values, strict=True), at_hand, strict=True) if not here]
            session.step(s.InputsGiven(tuple([ref for ref, _ in rest]), tuple([value for _, value in rest])))
            self.given = tuple([ref.oid for ref, _ in rest])
        found = []
        for ref, value, here in zip(refs, push.values, at_hand, strict=True):
            if here:
                found.append(session.values.plain(ref.oid, value.blob, None))  # type: ignore[union-attr]
            else:
                found.append(session.values.load(ref.oid))
        return found

    def references(self) -> list[Any]:
        """References whose values are known, for code of the engine that looks where these are before it loads them."""
        spec, session = self.spec, self.session
        session.step(s.InputsGiven(spec.deps, self.push.values))
        return [ObjectRef(session, ref.oid, ref.owner, ref.heir) for ref in spec.deps]

    def pack(self, result: Any) -> tuple[m.Value, ...]:
        spec = self.spec
        if spec.num_returns == 1:
            return (self.pack_one(0, result),)
        if spec.num_returns == 0:
            return ()
        results = as_results(result, spec.num_returns, spec.name)
        packed = [codec.pack(value) for value in results]
        made: list[m.Value] = []
        try:
            for index, one in enumerate(packed):
                made.append(self.session.values.keep(object_id(spec.id, index), one, self.caller))
        except BaseException:
            # All results come or none: nobody will hear of those that were kept.
            stored = [object_id(spec.id, index) for index, value in enumerate(made) if isinstance(value, m.Stored)]
            self.session.endpoint.send(self.session.node, m.ObjectFreed(tuple(stored)))
            raise
        for value in made:
            self.export(value)
        return tuple(made)

    def pack_one(self, index: int, value: Any) -> m.Value:
        if type(value) is m.Stored:
            return value  # code of the engine has made it in the store
        packed = value if type(value) is codec.Packed else codec.pack(value)
        if not packed.refs and packed.nbytes <= self.session.config.inline_bytes_max:
            return m.Inline(codec.to_inline(packed))
        made = self.session.values.keep(object_id(self.spec.id, index), packed, self.caller)
        self.export(made)
        return made

    def export(self, made: m.Value) -> None:
        """The caller becomes a borrower of what the value refers to."""
        if made.contained:
            self.session.step(s.Exported(made.contained, self.caller))

    def stream(self, made: Any) -> tuple[m.Value, ...]:
        """Send what the generator yields; wait when the reader is far behind."""
        session, spec, push = self.session, self.spec, self.push
        if not isinstance(made, Iterator):
            made = iter(made)
        taken = push.stream_taken
        moved = session.stream_moved
        for index in itertools.count():
            try:
                value = next(made)
            except StopIteration:
                break
            if Current.forked:
                end_fork()
            if index < push.stream_have:
                continue
            session.in_user_code = False
            item = m.StreamItem(spec.id, push.attempt, index, self.pack_one(index, value))
            session.step(ItemMade(item))
            session.enter_user_code()
            while not moved.empty():
                taken = max(taken, moved.get())
            while index + 1 - taken >= session.config.stream_items_max:
                news = moved.get()
                if news < 0:
                    raise TaskCancelled(f"nobody reads the stream of {spec.name} any more")
                taken = max(taken, news)
        self.items = index
        return ()

    def done(self, values: tuple[m.Value, ...]) -> m.TaskDone:
        self.leave(False)
        session = self.session
        context = session.context
        recorded = (*self.push.recorded, *context.noted) if context.noted or self.push.recorded else ()
        items = self.items if self.spec.num_returns < 0 else 0
        return m.TaskDone(
            self.spec.id, self.push.attempt, values, self.run_us(), session.owner.still_held(), recorded, items,
            self.began_us,
        )

    def failed(self, error: BaseException) -> m.TaskFailed:
        self.session.in_user_code = False
        kind, retry = "task", False
        if isinstance(error, TaskCancelled) and self.session.executor is not None and self.session.executor.stopping:
            kind = "cancelled"
        elif isinstance(error, (StoreFull, OutOfDisk)):
            kind = "store"
        elif not isinstance(error, (ObjectLost, FlowError)) or isinstance(error, Exception):
            retry = self.is_retried(error)
        if retry and self.session.context.is_parent:
            self.session.drive.step(s.ParentRepeats(self.spec.id))
        blob, refs = self.packed_error(error, True)
        self.leave(True, retry)
        return self.failure(blob, kind, retry, refs)

    def packed_error(self, error: BaseException, is_users: bool) -> tuple[bytes, tuple[m.RefTo, ...]]:
        """The error as it travels, and the references inside of it, to which the caller is introduced."""
        with codec.collecting() as found:
            users = (f"{self.spec.name} {short(self.spec.id)}", traceback_text(error)) if is_users else ()
            blob = pack_error(error, *users)
        error.__traceback__ = None
        refs = tuple([ref.to() for ref in found if isinstance(ref, ObjectRef)])
        if refs:
            self.session.step(s.Exported(refs, self.caller))
        return blob, refs

    def failure(self, blob: bytes, kind: str, retry: bool, refs: tuple[m.RefTo, ...]) -> m.TaskFailed:
        held = self.session.owner.still_held()
        spec, run_us = self.spec, self.run_us()
        return m.TaskFailed(
            spec.id, self.push.attempt, blob, kind, retry, run_us, held, began_us=self.began_us, contained=refs
        )

    def is_retried(self, error: BaseException) -> bool:
        wanted = self.spec.retry_exceptions
        if not wanted or not isinstance(error, Exception):
            return False
        if wanted == b"*":
            return True
        try:
            return isinstance(error, tuple(cloudpickle.loads(wanted)))
        except Exception:
            return False

    def leave(self, cancel: bool, again: bool = False) -> None:
        session = self.session
        self.drop_given()
        session.membership.code_ended(again)
        if session.context.is_parent:
            session.drive.step(s.ParentEnded(self.spec.id, cancel, again))

    def drop_given(self) -> None:
        """The inputs are not needed any more, nor what the collector found."""
        session = self.session
        if self.given:
            session.dropped.extend(self.given)
            self.given = ()
        if session.dropped:
            session._drop()

    def run_us(self) -> int:
        return time.monotonic_ns() // 1000 - self.began_us


def flush_streams() -> None:
    """Write out half a line that the task has printed; whatever user code made of the streams does not matter."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        return  # closed, or replaced by something that cannot


def main(settings: WorkerSettings) -> int:
    """The life of a worker process."""
    sys.setswitchinterval(0.001)
    session = WorkerSession(settings)
    session.open(settings.node)
    session.work()
    session.step(s.Leaving())
    session.close()
    return 0
