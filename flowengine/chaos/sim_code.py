"""Virtual user code: the steps of a Body in a virtual process, and a worker's runs of tasks around them.

Mirrors runtime/run.py and what remote functions, put, get and wait do.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.executor import ItemMade, TaskEnded
from flowengine.core.ids import function_id, object_id
from flowengine.scheduling.resources import of_job

from . import sim_process as p
from .sim_actors import ActorSteps, VirtualActor
from .sim_gangs import GangSteps
from .sim_policies import passed, placed
from .sim_programs import STREAM, Body, Op, mix
from .sim_resources import ResourceSteps

if TYPE_CHECKING:
    from .sim_node import SimNode
    from .sim_world import World

ARGS_BYTES = 400  # of arguments that travel as an object


class Frame(ActorSteps, GangSteps, ResourceSteps):
    """Running code: its names and what it has worked out so far; Oracle of sim_programs says what must come out."""

    def __init__(self, process: p.Process, thread: p.Thread, context: p.Context, body: Body) -> None:
        self.process = process
        self.thread = thread
        self.context = context
        self.body = body
        self.env: dict[str, p.Ref] = {}
        self.streams: dict[str, bytes] = {}
        self.acc = body.number

    def function(self, body: Body) -> tuple[bytes, bytes]:
        """Name and pickled form of a body's function."""
        return function_of(body, self.process.world)

    def ops(self) -> p.Code:
        """All steps of the body; raises EngineError."""
        for op in self.body.ops:
            yield from getattr(self, f"do_{op.kind}")(op)

    def take(self, name: str, oid: bytes) -> p.Code:
        """Read a value, and what half of the references in it refer to."""
        payload = yield from self.process.load(self.thread, oid)
        self.acc = mix(self.acc, payload.number)
        refs = self.process.take_refs(self.context, payload.refs, oid)
        if payload.number % 2 == 0:
            for index, ref in enumerate(refs):
                yield from self.get((ref,), f"{name}.{index}")

    def get(self, refs: tuple[p.Ref, ...], name: str) -> p.Code:
        """Wait for the references and read them."""
        oids = tuple(dict.fromkeys(ref.oid for ref in refs))
        yield from self.process.wait_ready(self.thread, oids, len(oids))
        for ref in refs:
            yield from self.take(name, ref.oid)

    def do_call(self, op: Op) -> p.Code:
        """Submit a task; its arguments may be so large that they travel as an object."""
        process, context, body = self.process, self.context, op.body
        assert body is not None
        deps = tuple(self.env[name].to() for name in op.names)
        nested = tuple(self.env[name].to() for name in op.nested)
        whole: p.Ref | None = None
        args = b"" if not nested else msgspec.msgpack.encode(p.Payload(0, nested))
        if op.flag:
            whole = yield from process.put(self.thread, context, p.Payload(0, nested), ARGS_BYTES)
            args, nested = b"", ()
        function, blob = function_of(body, process.world)
        spec = m.TaskSpec(
            process.new_child(), function, f"f{body.number}", args, whole.to() if whole else None, deps, nested,
            STREAM if body.items >= 0 else 1, max_retries=body.retries, depth=context.depth, parent=context.task,
            driver=context.driver,
        )
        if op.asks:
            job = context.driver.partition(" ")[0] or process.address
            spec = msgspec.structs.replace(spec, shape=of_job((*spec.shape, *op.asks), job))
        if process.world.scenario.policies:
            spec = placed(spec, process.world.scenario.nodes)
        process.begin_parent()
        process.step(s.Submitted(spec, blob))
        if whole is not None:
            process.drop(whole)
        if body.items >= 0:
            self.streams[op.name] = spec.id
        else:
            self.env[op.name] = process.made_ref(context, object_id(spec.id, 0))
        process.world.tasks_submitted += 1

    def do_put(self, op: Op) -> p.Code:
        """Store a value."""
        self.env[op.name] = yield from self.process.put(
            self.thread, self.context, p.Payload(op.number), op.size_bytes
        )

    def do_get(self, op: Op) -> p.Code:
        """Read values."""
        yield from self.get(tuple(self.env[name] for name in op.names), op.names[0])

    def do_wait(self, op: Op) -> p.Code:
        """Choose what is ready; a run that comes again must choose the same."""
        process, context = self.process, self.context
        oids = tuple(dict.fromkeys(self.env[name].oid for name in op.names))
        count = min(op.number, len(oids))
        number = next(context.choices)
        before = context.recorded.get(("wait", number))
        if before is not None:
            chosen = tuple(oids[index] for index in before)
            yield from process.wait_ready(self.thread, chosen, len(chosen))
        else:
            yield from process.wait_ready(self.thread, oids, count)
            objects = process.owner.objects
            ready = [index for index, oid in enumerate(oids) if objects[oid].value is not None][:count]
            before = bytes(ready)
            if context.caller:
                context.noted.append(("wait", number, before))
                process.begin_parent()
                process.step(s.Noted(context.task, "wait", number, before))
        process.world.chosen(context.task, number, before)

    def do_drop(self, op: Op) -> p.Code:
        """Forget a reference."""
        self.process.drop(self.env[op.name])
        yield from ()

    def do_keep(self, op: Op) -> p.Code:
        """Another thread keeps the reference for a while, then reads it and lets go."""
        process, source = self.process, self.env[op.name]
        context = p.Context(self.context.task, self.context.caller, self.context.depth)
        refs = process.take_refs(context, (source.to(),), b"")
        process.begin(thread := p.Thread(False), keeper(process, thread, context, refs[0], op.seconds))
        yield from ()

    def do_sleep(self, op: Op) -> p.Code:
        """Compute."""
        yield from self.process.pause(self.thread, op.seconds)

    def do_cancel(self, op: Op) -> p.Code:
        """Cancel a task."""
        self.process.step(s.CancelAsked(self.env[op.name].oid, op.flag, True))
        yield from ()

    def do_settle(self, op: Op) -> p.Code:
        """Whatever came of a cancelled task."""
        try:
            oid = self.env[op.name].oid
            yield from self.process.wait_ready(self.thread, (oid,), 1)
            yield from self.process.load(self.thread, oid)
        except p.EngineError as error:
            if error.kind not in ("cancelled", "task"):
                raise

    def do_read(self, op: Op) -> p.Code:
        """Read items of a stream, all or the first few."""
        process, task = self.process, self.streams[op.name]
        for index in itertools.count() if op.number < 0 else range(op.number):
            ref = yield from self.next_item(task, index)
            if ref is None:
                break
            yield from self.take(op.name, ref.oid)
            process.drop(ref)
        process.step(s.StreamTaken(task, -1))

    def next_item(self, task: bytes, index: int) -> Generator[None, Any, p.Ref | None]:
        """As Session.next_item."""
        process = self.process
        record = process.owner.tasks.get(task)
        stream = record.stream if record is not None else None
        if stream is None:
            return None
        if index >= stream.count and not stream.ended:
            number = next(process.numbers)
            process.waits[number] = self.thread
            process.step(s.StreamAsked(number, task, index))
            yield from process.block(self.thread, number)
        if index < stream.count:
            process.step(s.StreamTaken(task, index + 1))
            return process.made_ref(self.context, object_id(task, index))
        if stream.error is not None:
            error: Any = stream.error
            raise p.EngineError(error.kind, error.error)
        return None


def keeper(process: p.Process, thread: p.Thread, context: p.Context, ref: p.Ref, seconds: float) -> p.Code:
    """A thread that user code left behind: it reads a reference later, then drops it."""
    yield from process.pause(thread, seconds)
    try:
        yield from process.wait_ready(thread, (ref.oid,), 1)
        yield from process.load(thread, ref.oid)
    except p.EngineError:
        pass  # the value may be an error, or its owner may have died by now
    process.drop_all(context)


def function_of(body: Body, world: World) -> tuple[bytes, bytes]:
    """Name and pickled form of a body's function."""
    name = world.names.get(body.number)
    if name is None:
        blob = len(world.bodies).to_bytes(4, "big")
        name = world.names[body.number] = function_id(blob)
        world.bodies[name] = body
        world.blobs[name] = blob
    return name, world.blobs[name]


class Driver(p.Process):
    """The user's program."""

    def __init__(self, world: World, address: str, node: SimNode) -> None:
        super().__init__(world, address, node)
        self.outcome: Any = None
        self.main = p.Thread(True)

    def start(self) -> None:
        """Join and run the program."""
        self.send(self.node.address, m.Joined(self.address, 1, "driver"))
        self.main.in_user_code = True
        self.begin(self.main, self.program())

    def program(self) -> p.Code:
        """The whole program; then nothing is referred to any more."""
        frame = Frame(self, self.main, self.context, self.world.program)
        try:
            yield from frame.ops()
            self.outcome = frame.acc
        except p.EngineError as error:
            self.outcome = error.blob.decode(errors="replace") if error.kind == "task" else error
        for task in frame.streams.values():
            self.step(s.StreamTaken(task, -1))
        self.drop_all(self.context)

    def moved(self, node: SimNode) -> None:
        """The node of this host was started again."""
        self.node = node
        self.send(node.address, m.Joined(self.address, 1, "driver"))
        self.step(s.NodeMoved(node.address, node.node_id))
        for number, size_bytes in self.asked.items():
            self.send(node.address, m.SpaceAsked(number, size_bytes))


class Worker(p.Process):
    """Runs tasks, one at a time."""

    def __init__(self, world: World, address: str, node: SimNode, worker_id: str) -> None:
        super().__init__(world, address, node, worker_id)
        self.main = p.Thread(True)
        self.running = b""
        self.running_attempt = 0
        self.moved: deque[int] = deque()
        self.stream_wait = 0
        self.stop_kind = ""
        self.actor: VirtualActor | None = None  # that lives here
        self.parent_push: m.PushTask | None = None  # of a task that has neither submitted nor chosen anything
        self.perform |= {
            c.RunTask: self.do_run_task,
            c.SaveState: self.do_for_actor,
            c.ForgetStates: self.do_forget_states,
            c.KeepFunction: lambda command: None,
            c.Interrupt: self.do_interrupt,
            c.CancelChildren: lambda command: self.step(s.ParentEnded(command.task, True, command.again)),
            c.StreamGo: self.do_stream_go,
            c.DropResults: lambda command: self.send(self.node.address, m.ObjectFreed(command.oids)),
        }

    def start(self) -> None:
        """Join."""
        self.send(self.node.address, m.Joined(self.address, 1, "worker"))

    def told_to_end(self, sender: str) -> None:
        """End, unless somebody needs this process."""
        idle = self.executor is not None and self.executor.running is None
        if sender == self.node.address and idle and not self.owner.is_needed():
            self.world.end_worker(self, "it was not needed")

    def welcomed(self) -> None:
        """Ready for tasks."""
        self.send(self.node.address, m.WorkerStarted(self.worker_id, 1, self.address))

    def begin_parent(self) -> None:
        """The running task submits or chooses for the first time."""
        push, self.parent_push = self.parent_push, None
        if push is not None:
            self.step(s.ParentBegan(push.spec.id, self.context.caller, push.attempt, push.children))

    def lost(self, peer: str, reason: str) -> None:
        """Without its node a worker has no purpose."""
        if peer == self.node.address:
            self.world.end_worker(self, "its node is gone")
        else:
            super().lost(peer, reason)

    def do_run_task(self, command: c.RunTask) -> None:
        """The main thread takes the job."""
        self.moved.clear()
        if self.actor is not None:
            self.do_for_actor(command)
            return
        code = self.job(command.push, command.caller)
        if command.push.spec.life is not None:
            self.actor = VirtualActor(self, command.push, command.caller, Frame)
            code = self.actor.live()
        self.world.clock.after(p.WAKE_S, self.run, self.begin, self.main, code)

    def do_forget_states(self, command: c.ForgetStates) -> None:
        """Files of checkpoints are not needed any more."""
        if self.actor is not None:
            self.actor.forget(command.calls)

    def do_for_actor(self, command: c.RunTask | c.SaveState) -> None:
        """The actor's next job."""
        assert self.actor is not None
        self.actor.take(command)

    def do_interrupt(self, command: c.Interrupt) -> None:
        """Have the main thread raise, if it still runs that attempt."""
        if self.context.task == command.task:
            self.stop_kind = command.kind
            self.world.clock.after(p.WAKE_S, self.run, self.signal, command.task)

    def signal(self, task: bytes) -> None:
        """The signal comes."""
        if self.context.task == task and self.stop_kind and self.main.in_user_code and self.main.wait:
            self.stop_kind = ""
            self.interrupt(self.main, p.Interrupted())

    def do_stream_go(self, command: c.StreamGo) -> None:
        """The reader has taken items."""
        self.moved.append(command.items)
        if self.stream_wait:
            self.wake(self.main, self.stream_wait)

    # --- running ----------------------------------------------------------------------------------

    def job(self, push: m.PushTask, caller: str) -> p.Code:
        """As WorkerSession.work for one task."""
        self.running, self.running_attempt = push.spec.id, push.attempt
        answer = yield from self.attempt(push, caller)
        self.running = b""
        self.step(TaskEnded(push.spec.id, push.attempt, answer))

    def attempt(self, push: m.PushTask, caller: str) -> Generator[None, Any, Any]:
        """As Run.answer."""
        spec = push.spec
        context = self.context = p.Context(spec.id, caller, spec.depth + 1)
        context.driver = spec.driver or f"{caller} {spec.id.hex()}"
        for kind, number, payload in push.recorded:
            context.recorded[kind, number] = payload
        self.owner.depth = spec.depth + 1
        self.stop_kind = ""
        began_s = self.world.clock.now
        given: tuple[bytes, ...] = ()
        refs, values = passed(push)
        frame = Frame(self, self.main, context, self.world.bodies[spec.function])
        try:
            self.parent_push = push
            if push.children:
                self.begin_parent()
            self.main.in_user_code = True
            if refs:
                self.step(s.InputsGiven(refs, values))
                given = tuple(ref.oid for ref in refs)
            made, items = yield from self.body(frame, push, given)
            self.world.actors.ended[spec.id] = None
            self.leave(frame, given, False)
            recorded = (*push.recorded, *context.noted)
            run_us = int((self.world.clock.now - began_s) * 1e6)
            return m.TaskDone(spec.id, push.attempt, made, run_us, self.owner.still_held(), recorded, items, 0)
        except (p.EngineError, p.Interrupted) as error:
            self.main.in_user_code = False
            run_us = int((self.world.clock.now - began_s) * 1e6)
            kind, blob = "task", b"interrupted"
            if isinstance(error, p.EngineError):
                kind, blob = ("store" if error.kind == "store" else "task"), error.blob
            elif self.executor is not None and self.executor.stopping:
                kind = "cancelled"
            self.leave(frame, given, True)
            return m.TaskFailed(spec.id, push.attempt, blob, kind, False, run_us, self.owner.still_held())
        finally:
            self.main.in_user_code = False
            self.stop_kind = ""

    def body(self, frame: Frame, push: m.PushTask, given: tuple[bytes, ...]) -> Generator[None, Any, Any]:
        """Arguments, code, results."""
        spec, body = push.spec, frame.body
        for index, ref in enumerate(spec.deps[: len(spec.deps) - (spec.choice.unread if spec.choice else 0)]):
            yield from frame.take(f"d{index}", ref.oid)
        nested = list(self.take_refs(frame.context, spec.nested, b""))
        if spec.args_object is not None:
            whole = yield from self.load(self.main, spec.args_object.oid)
            nested = self.take_refs(frame.context, whole.refs, spec.args_object.oid)
        frame.env.update({f"n{index}": ref for index, ref in enumerate(nested)})
        yield from self.pause(self.main, body.run_s)
        yield from frame.ops()
        if body.error:
            raise p.EngineError("task", b"error %d" % body.number)
        if body.items >= 0:
            count = yield from self.stream(frame, push)
            return (), count
        self.main.in_user_code = False
        payload = p.Payload(frame.acc, tuple(frame.env[name].to() for name in body.refs))
        made = yield from self.result(spec.id, 0, payload, body.size_bytes, frame.context.caller)
        return (made,), 0

    def result(
        self, task: bytes, index: int, payload: p.Payload, size_bytes: int, caller: str
    ) -> Generator[None, Any, m.Value]:
        """As Run.pack_one."""
        made = yield from self.keep(self.main, object_id(task, index), payload, size_bytes, caller)
        if payload.refs:
            self.step(s.Exported(payload.refs, caller))
        return made

    def stream(self, frame: Frame, push: m.PushTask) -> Generator[None, Any, int]:
        """As Run.stream."""
        body, taken = frame.body, push.stream_taken
        for index in range(body.items):
            yield from self.pause(self.main, body.run_s / 4)
            if index < push.stream_have:
                continue
            self.main.in_user_code = False
            payload = p.Payload(mix(frame.acc, index))
            made = yield from self.result(push.spec.id, index, payload, body.size_bytes, frame.context.caller)
            self.step(ItemMade(m.StreamItem(push.spec.id, push.attempt, index, made)))
            self.main.in_user_code = True
            while self.moved:
                taken = max(taken, self.moved.popleft())
            while index + 1 - taken >= self.world.scenario.config.stream_items_max:
                self.stream_wait = self.main.wait = next(self.numbers)
                yield
                self.stream_wait = 0
                taken = max(taken, *self.moved)
                self.moved.clear()
        return body.items

    def leave(self, frame: Frame, given: tuple[bytes, ...], cancel: bool) -> None:
        """As Run.leave; the frame's references are gone."""
        for task in frame.streams.values():
            self.step(s.StreamTaken(task, -1))
        self.drop_all(frame.context)
        self.dropped.extend(given)
        if self.dropped:
            self.drop_now()
        self.step(s.ParentEnded(frame.context.task, cancel))
