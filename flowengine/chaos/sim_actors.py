"""Virtual actors: their process between its beginning and its end, and what user code does with handles.

Mirrors runtime/actor.py. An actor's state is the list of the calls that were done; a reply tells its place in it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.actor_calls import CallEnded, CallsEnded
from flowengine.core.actor_host import HostReady
from flowengine.core.actor_saving import Snapshot, StateSaved, StateTaken
from flowengine.core.ids import child_id, object_id, task_of

from . import sim_process as p
from .sim_actor_programs import CHECKPOINTS
from .sim_policies import placed
from .sim_programs import Op

if TYPE_CHECKING:
    from .sim_code import Frame, Worker
    from .sim_programs import Body

LOOK = b"look"
UNTOLD_S = 0.15  # by then the journal has the log of what was seen
SAVE_S = 0.002
WRITE_S = 0.05
REPORT_S = 0.001


class State(msgspec.Struct, array_like=True):
    """What is in a checkpoint."""

    history: list[bytes]
    snapshot: Snapshot


STATE = msgspec.msgpack.Decoder(State)


class MadeCall(NamedTuple):
    """A call as user code made it."""

    actor: bytes
    caller: bytes  # an actor, or a task
    parent: bytes  # the call or task whose code made it
    number: int  # among the children of its parent
    awaited: bool


class Reply(NamedTuple):
    """What somebody was answered."""

    life: bytes
    call: bytes
    position: int
    digest: bytes  # of the history up to there
    reader: str
    at_s: float


class Look(NamedTuple):
    """A history as somebody read it."""

    life: bytes
    call: bytes
    history: tuple[bytes, ...]
    reader: str
    at_s: float


class ActorBook:
    """What was seen of all actors, from outside."""

    def __init__(self) -> None:
        self.made: dict[bytes, MadeCall] = {}
        self.lives: dict[bytes, list[bytes]] = {}  # actor -> its lives: after its end it may be made again
        self.ended: dict[bytes, None] = {}  # tasks and calls whose code has come to its end
        self.too_early: list[bytes] = []  # actors that were made again before their makers had ended
        self.replies: list[Reply] = []
        self.read: list[Look] = []
        self.unsure: list[Look] = []  # by processes that died just afterwards: whether they told of it is not known

    @property
    def looks(self) -> dict[bytes, list[tuple[bytes, ...]]]:
        """By life, all histories as they were read."""
        found: dict[bytes, list[tuple[bytes, ...]]] = {}
        for look in self.read:
            found.setdefault(look.life, []).append(look.history)
        return found

    def died(self, reader: str, now: float) -> None:
        """What a process saw just before its end binds nobody: it told of it, if at all, together with the log."""
        self.replies = [one for one in self.replies if one.reader != reader or one.at_s < now - UNTOLD_S]
        self.unsure += [one for one in self.read if one.reader == reader and one.at_s >= now - UNTOLD_S]
        self.read = [one for one in self.read if one.reader != reader or one.at_s < now - UNTOLD_S]

    def look(self, look: Look) -> None:
        """Somebody reads a history; a caller that runs again reads what was read before."""
        if not any((one.call, one.life, one.history) == (look.call, look.life, look.history) for one in self.read):
            self.read.append(look)

    def is_whole(self, life: bytes) -> bool:
        """Whether the last that was read of this life is sure, and its end."""
        last = [look for look in self.read if look.life == life][-1]
        return all(look.life != life or (look.at_s < last.at_s and look.call != last.call) for look in self.unsure)

    def begins(self, spec: m.TaskSpec, made_at: float) -> bytes:
        """A process of an actor that was made then; gives the name of its life."""
        life = spec.id + b"%.9f" % made_at
        lives = self.lives.setdefault(spec.id, [])
        if life not in lives:
            if lives and spec.parent not in self.ended:
                self.too_early.append(spec.id)
            lives.append(life)
        return life


def digest_of(history: list[bytes]) -> bytes:
    """A short name of a history."""
    return hashlib.blake2b(b"".join(history), digest_size=8).digest()


class ActorSteps:
    """Part of Frame: making and calling actors."""

    process: p.Process
    thread: p.Thread
    context: p.Context
    env: dict[str, p.Ref]

    def do_actor(self, op: Op) -> p.Code:
        """Make an actor."""
        process, context = self.process, self.context
        deps = tuple(self.env[name].to() for name in op.names)
        spec = m.TaskSpec(
            process.new_child(), b"actor", "actor", deps=deps, shape=(), max_retries=-1, depth=context.depth,
            parent=context.task, life=m.ActorLife(checkpoint=CHECKPOINTS[op.number]), caller_key=context.caller_key,
            driver=context.driver,
        )
        if process.world.scenario.policies:
            spec = placed(spec, process.world.scenario.nodes)
        process.begin_parent()
        process.step(s.Submitted(spec, b"actor"))
        handle = p.Ref(process, object_id(spec.id, 0), context.driver.partition(" ")[0] or process.address, m.HANDLE)
        context.refs.append(handle)
        self.env[op.name] = handle
        yield from ()

    def do_act(self, op: Op) -> p.Code:
        """Call an actor."""
        world = self.process.world
        assert op.body is not None
        function, _ = self.function(op.body)
        index = self.call(op, function)
        call = child_id(self.context.task, index)
        actor = task_of(self.env[op.names[0]].oid)
        world.actors.made[call] = MadeCall(actor, self.context.caller_key, self.context.task, index, not op.flag)
        if op.flag:
            self.process.drop(self.env[op.name])
        yield from ()

    def function(self, body: Body) -> tuple[bytes, bytes]:
        """Name of a body, under which the world knows it."""
        raise NotImplementedError

    def do_look(self, op: Op) -> p.Code:
        """Ask for the whole history."""
        self.call(op, LOOK)
        yield from ()

    def call(self, op: Op, function: bytes) -> int:
        """Submit a call; gives its number among the children."""
        process, context = self.process, self.context
        handle, *deps = (self.env[name].to() for name in op.names)
        nested = tuple(self.env[name].to() for name in op.nested)
        index = next(context.children)
        spec = m.TaskSpec(
            child_id(context.task, index), function, "call", msgspec.msgpack.encode(p.Payload(0, nested)), None,
            tuple(deps), nested, max_retries=0, depth=context.depth, parent=context.task, actor=handle,
            caller_key=context.caller_key,
        )
        process.begin_parent()
        process.step(s.Submitted(spec, b""))
        self.env[op.name] = process.made_ref(context, object_id(spec.id, 0))
        process.world.tasks_submitted += 1
        return index

    def do_handle(self, op: Op) -> p.Code:
        """Take the handle that a task gives."""
        process, oid = self.process, self.env[op.names[0]].oid
        yield from process.wait_ready(self.thread, (oid,), 1)
        payload = yield from process.load(self.thread, oid)
        self.env[op.name] = process.take_refs(self.context, payload.refs, oid)[0]

    def do_replies(self, op: Op) -> p.Code:
        """Read replies: anybody's sight of an actor is written down."""
        process = self.process
        for name in op.names:
            ref = self.env[name]
            yield from process.wait_ready(self.thread, (ref.oid,), 1)
            payload = yield from process.load(self.thread, ref.oid)
            book, call = process.world.actors, task_of(ref.oid)
            if call in book.made:
                seen = process.address, process.world.clock.now
                book.replies.append(Reply(payload.more[1], call, payload.number, payload.more[0], *seen))
            else:
                book.look(Look(payload.more[0], call, payload.more[1:], process.address, process.world.clock.now))
            process.drop(ref)


class VirtualActor:
    """The main thread of an actor's process."""

    def __init__(self, worker: Worker, push: m.PushTask, owner: str, make_frame: type[Frame]) -> None:
        self.worker = worker
        self.push = push
        self.id = push.spec.id
        self.owner = owner
        self.make_frame = make_frame
        self.history: list[bytes] = []
        self.life = b""
        self.jobs: deque[c.RunTask | c.SaveState] = deque()
        self.ended: list[CallEnded] = []
        self.idle = 0  # the number under which the thread waits for a job

    def take(self, job: c.RunTask | c.SaveState) -> None:
        """An order of the machine."""
        self.jobs.append(job)
        if self.idle:
            self.worker.wake(self.worker.main, self.idle)

    def live(self) -> p.Code:
        """Construct or restore, then run calls until the process ends."""
        worker, push = self.worker, self.push
        worker.running, worker.running_attempt = self.id, push.attempt
        made = worker.world.driver.owner.made.get(self.id)
        if made is not None:
            self.life = worker.world.actors.begins(push.spec, made.task.submitted_at)
        worker.step(s.ParentBegan(self.id, self.owner, push.attempt, ()))
        yield from worker.pause(worker.main, SAVE_S)
        snapshot = None
        checkpoint = self.good_checkpoint()
        if checkpoint is not None and checkpoint.calls:
            assert isinstance(checkpoint.value, m.Inline)
            blob = worker.world.files[checkpoint.path] if checkpoint.path else checkpoint.value.blob
            state = STATE.decode(blob)
            self.history, snapshot = state.history, state.snapshot
            worker.step(s.SeqsRestored(self.id, snapshot.seqs))
        elif push.spec.deps:
            try:
                yield from self.construct()
            except p.EngineError as error:
                worker.step(HostReady(None, error.blob or b"?"))
                return
        worker.step(HostReady(snapshot))
        while True:
            while not self.jobs:
                self.idle = worker.main.wait = next(worker.numbers)
                yield
                self.idle = 0
            job = self.jobs.popleft()
            if isinstance(job, c.SaveState):
                yield from self.save(job.calls)
            else:
                yield from self.call(job.push)

    def construct(self) -> p.Code:
        """Read what the constructor gets."""
        worker, push = self.worker, self.push
        worker.step(s.InputsGiven(push.spec.deps, push.values))
        for ref in push.spec.deps:
            yield from worker.load(worker.main, ref.oid)
        worker.step(s.RefsDropped(tuple(ref.oid for ref in push.spec.deps)))

    def good_checkpoint(self) -> m.Checkpoint | None:
        """The newest, or the one before if that is torn."""
        push, world = self.push, self.worker.world
        if push.fallback is not None and world.dice.random() < world.scenario.torn:
            return push.fallback
        return push.checkpoint

    def forget(self, calls: int) -> None:
        """Remove what this and earlier incarnations wrote after fewer calls."""
        files = self.worker.world.files
        for path in list(files):
            actor, attempt, number = path.split("-")
            if actor == self.id.hex() and int(attempt) <= self.push.attempt and int(number) < calls:
                del files[path]

    def write(self, calls: int, blob: bytes) -> None:
        """The state is in a file."""
        path = f"{self.id.hex()}-{self.push.attempt}-{calls}"
        self.worker.world.files[path] = blob
        self.worker.step(StateSaved(calls, m.Checkpoint(calls, m.Inline(b""), path), SAVE_S))

    def save(self, calls: int) -> p.Code:
        """The state between two calls."""
        worker = self.worker
        assert worker.executor is not None
        assert worker.executor.host is not None
        owner = worker.owner
        seqs = {actor: seq for (actor, caller), seq in owner.seqs_before.items() if caller == self.id}
        for actor, target in owner.targets.items():
            line = target.lines.get(self.id)
            if line is not None:
                seqs[actor] = line.next_seq
        snapshot = worker.executor.host.snapshot(tuple(seqs.items()))
        blob = msgspec.msgpack.encode(State(list(self.history), snapshot))
        yield from worker.pause(worker.main, SAVE_S)
        if worker.world.scenario.files and worker.world.dice.random() < worker.world.scenario.files:
            worker.step(StateTaken(calls))
            worker.world.clock.after(WRITE_S, worker.run, self.write, calls, blob)
            return
        worker.step(StateSaved(calls, m.Checkpoint(calls, m.Inline(blob)), SAVE_S))

    def call(self, push: m.PushTask) -> p.Code:
        """As Run.answer_call."""
        worker, spec = self.worker, push.spec
        worker.running, worker.running_attempt = spec.id, push.attempt
        context = worker.context = p.Context(spec.id, self.owner, spec.depth + 1)
        context.heir = f"{self.owner} {self.id.hex()}"
        context.caller_key = self.id
        context.driver = f"{self.owner} {self.id.hex()}"
        worker.owner.depth = spec.depth + 1
        began_s = worker.world.clock.now
        answer: m.TaskDone | m.TaskFailed
        try:
            payload = yield from self.method(push, context)
            # Inline, since a reply whose copies are gone cannot be made again.
            value = yield from worker.keep(worker.main, object_id(spec.id, 0), payload, 10, worker.address)
            error = b""
        except p.EngineError as raised:
            error = raised.blob or b"?"
        worker.drop_all(context)
        worker.dropped.extend(ref.oid for ref in spec.deps)
        if worker.dropped:
            worker.drop_now()
        held = worker.owner.still_held()
        run_us = int((worker.world.clock.now - began_s) * 1e6)
        if error:
            answer = m.TaskFailed(spec.id, push.attempt, error, "task", False, run_us, held)
        else:
            answer = m.TaskDone(spec.id, push.attempt, (value,), run_us, held)
        worker.running, worker.running_attempt = self.id, self.push.attempt
        self.ended.append(CallEnded(spec.id, answer))
        if self.jobs:
            worker.world.clock.after(REPORT_S, worker.run, self.report)
        else:
            self.report()

    def report(self) -> None:
        """As Actor.report."""
        ended, self.ended = tuple(self.ended), []
        if ended:
            self.worker.step(CallsEnded(ended))

    def method(self, push: m.PushTask, context: p.Context) -> Generator[None, Any, p.Payload]:
        """What the call does, and its reply."""
        worker, spec = self.worker, push.spec
        if spec.deps:
            worker.step(s.InputsGiven(spec.deps, push.values))
        nested = worker.take_refs(context, spec.nested, b"")
        if spec.function == LOOK:
            return p.Payload(len(self.history), (), (self.life, *self.history))
        self.history.append(spec.id)
        position, digest = len(self.history) - 1, digest_of(self.history)
        body = worker.world.bodies[spec.function]
        frame = self.make_frame(worker, worker.main, context, body)
        for index, ref in enumerate(spec.deps):
            yield from frame.take(f"d{index}", ref.oid)
        frame.env.update({f"n{index}": ref for index, ref in enumerate(nested)})
        yield from worker.pause(worker.main, body.run_s)
        yield from frame.ops()
        worker.world.actors.ended[spec.id] = None
        return p.Payload(position, (), (digest, self.life))
