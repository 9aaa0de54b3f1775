"""A worker process: user code runs in the main thread, one task at a time; what it submits is owned here."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from flowengine.chaos.arms import Arms
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.bundles import bundle_of, index_of
from flowengine.core.executor import BOTH, Executor, TaskBlocked, TaskEnded
from flowengine.core.executor import HANDLERS as EXECUTOR_HANDLERS
from flowengine.core.ids import short
from flowengine.core.owner import Owner
from flowengine.core.owner_waits import WaitIsLong
from flowengine.refs import Current, ObjectRef
from flowengine.runtime import gpus
from flowengine.runtime.actor import CALL, Handover
from flowengine.runtime.actor_threads import CallThreads, stop_error
from flowengine.runtime.context import Context
from flowengine.runtime.drive import Drive
from flowengine.runtime.forks import guard_forks
from flowengine.runtime.notes import Lines, note_running, open_note
from flowengine.runtime.process import place_of
from flowengine.runtime.run import Run
from flowengine.runtime.session import Session
from flowengine.runtime.settings import WorkerSettings

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
        super().__init__(place_of(settings))
        self.settings = settings
        self.jobs: queue.SimpleQueue[c.RunTask | c.SaveState | None] = queue.SimpleQueue()
        self.threads: CallThreads | None = None  # of an actor that has several
        self.blobs: dict[bytes, bytes] = {}
        self.functions: dict[bytes, tuple[Callable[..., Any], list[ObjectRef]]] = {}
        self.in_user_code = False
        self.streams: list[Lines] = []  # stdout and stderr
        self.calls_at_once = False  # of an actor
        self.prints = False  # something was printed since that was last looked at
        self.stop_orders: dict[bytes, c.Interrupt] = {}  # by task: interrupts that have not been raised yet
        self.stream_taken = 0
        self.stream_moved: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.arms = Arms(os.path.join(settings.store_folder, "chaos"))
        self.running_note = open_note(settings.running_path)
        self.gpu_ids: tuple[int | str, ...] = ()
        if settings.has_gpus:
            gpus.show(())

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

    def gang_rank(self) -> int | None:
        """The bundle in which the running code runs."""
        host = self.executor.host if self.executor is not None else None
        push = host.push if host is not None else self.context.push
        bundle = bundle_of(push.spec.shape) if push is not None else ""
        return index_of(bundle) if bundle else None

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
        if spec.actor is not None or spec.life is not None:
            self.context.uses_actor(spec)
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
        # Functions, and not SIG_IGN: programs that user code starts do not inherit them.
        self.handlers = {
            INTERRUPT_SIGNAL: self.on_interrupt,
            signal.SIGINT: lambda number, frame: None,
            signal.SIGTERM: lambda number, frame: self.jobs.put(None),
        }
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
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
            if self.prints:
                self.end_lines()
            self.step(TaskEnded(push.spec.id, push.attempt, answer))
            self.stop_orders.pop(push.spec.id, None)  # it came too late

    def end_lines(self) -> None:
        """The code that ran has ended: what it has printed without an end of line is a line."""
        context, self.prints = self.context, False
        for stream in self.streams:
            with contextlib.suppress(OSError, ValueError):  # nobody reads any more, or user code has closed it
                if not stream.code_ended(context):
                    self.prints = True

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
    session.streams = [Lines(1, session), Lines(2, session)]
    sys.stdout, sys.stderr = session.streams
    session.open(settings.node)
    session.work()
    session.step(s.Leaving())
    session.close()
    return 0
