"""A virtual process that runs user code: Owner and Executor, threads as generators, values in a virtual store.

Mirrors runtime/session.py: what that shell does with sockets, locks and files happens here in virtual time.
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
from flowengine.core.executor import BOTH, Executor, TaskBlocked
from flowengine.core.executor import HANDLERS as EXECUTOR_HANDLERS
from flowengine.core.ids import child_id, object_id
from flowengine.core.owner import Owner

from .sim_net import Peer
from .sim_node import DISK_S

if TYPE_CHECKING:
    from .sim_node import SimNode
    from .sim_world import World

Code = Generator[None, Any, Any]
WAKE_S = 0.00005
BLOCK_AFTER_S = 0.0002
TICK_S = 0.1
TORN_PART = 0.1  # of the copies in durable storage


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """What a virtual value is made of."""

    number: int
    refs: tuple[m.RefTo, ...] = ()
    more: tuple[bytes, ...] = ()


PAYLOAD = msgspec.msgpack.Decoder(Payload)


class EngineError(Exception):
    """An error that came as a value, or was raised in user code: kind and packed form."""

    def __init__(self, kind: str, blob: bytes) -> None:
        super().__init__(kind, blob[:200])
        self.kind = kind
        self.blob = blob


class Interrupted(Exception):
    """Raised in user code by a cancel or a time limit."""


class Ref:
    """A reference of user code; alive until it is dropped."""

    __slots__ = ("alive", "heir", "oid", "owner", "process")

    def __init__(self, process: Process, oid: bytes, owner: str, heir: str) -> None:
        self.process = process
        self.oid = oid
        self.owner = owner
        self.heir = heir
        self.alive = True

    def to(self) -> m.RefTo:
        """As it travels: the object may have another owner than when the reference was made."""
        process = self.process
        obj = process.owner.objects.get(self.oid)
        if obj is not None and (obj.owner or process.address) != self.owner:
            mine = process.address, process.context.heir
            self.owner, self.heir = (obj.owner, obj.heir) if obj.owner else mine
        return m.RefTo(self.oid, self.owner, self.heir)


class Context:
    """The task whose code runs: what session.Context has, and the references that its code holds."""

    def __init__(self, task: bytes, caller: str = "", depth: int = 0) -> None:
        self.task = task
        self.caller = caller
        self.depth = depth
        self.heir = f"{caller} {task.hex()}" if caller else ""
        self.driver = ""  # see TaskSpec
        self.caller_key = task  # an actor's own name when it is one that calls
        self.children = itertools.count()
        self.choices = itertools.count()
        self.recorded: dict[tuple[str, int], bytes] = {}
        self.noted: list[tuple[str, int, bytes]] = []
        self.refs: list[Ref] = []


class Thread:
    """A thread of user code."""

    __slots__ = ("blocked", "code", "in_user_code", "is_main", "wait")

    def __init__(self, is_main: bool) -> None:
        self.code: Code
        self.is_main = is_main
        self.wait = 0  # the number of what it waits for
        self.blocked = False  # the executor was told
        self.in_user_code = False


class Process(Peer):
    """A driver or worker."""

    def __init__(self, world: World, address: str, node: SimNode, worker_id: str = "") -> None:
        super().__init__(address, node.host, forgiving=True)
        self.world = world
        self.node = node
        self.worker_id = worker_id
        self.owner = Owner(address, node.address, node.node_id, world.scenario.config)
        stash = self.owner.stash
        self.executor = Executor(address, node.address, worker_id, stash) if worker_id else None
        self.context = Context(b"driver".ljust(16, b"\0"))
        self.dropped: deque[bytes] = deque()
        self.waits: dict[int, Thread] = {}
        self.numbers = itertools.count(1)
        self.space: dict[int, m.SpaceGiven] = {}
        self.asked: dict[int, int] = {}
        self.restores: dict[int, tuple[bytes, bytes]] = {}  # requests for room for copies from durable storage
        self.orders: dict[int, Thread] = {}  # about resources, that the head has not answered
        self.answers: dict[int, Any] = {}
        self.stepping = False
        self.later: deque[tuple[m.Message, str]] = deque()
        self.perform: dict[type, Any] = {
            c.Send: self.do_send,
            c.SetTimer: self.do_timer,
            c.Resolve: self.do_resolve,
            c.RestoreDurable: self.do_restore_durable,
            c.WriteDurable: self.do_write_durable,
            c.DropDurable: lambda command: self.world.durable.pop(command.oid, None),
            c.DropState: lambda command: None,
            c.Warn: lambda command: None,
        }

    # --- the machines -----------------------------------------------------------------------------

    def step(self, event: m.Message, sender: str = "") -> None:
        """Hand an event to the machines; a step within a step is done after it."""
        if self.stepping:
            self.later.append((event, sender))
            return
        if self.dropped and not sender:
            self.drop_now()
        self.stepping = True
        self.handle(event, sender)
        while self.later:
            self.handle(*self.later.popleft())
        self.stepping = False

    def handle(self, event: m.Message, sender: str) -> None:
        """One event through the door, its commands performed, the laws checked."""
        world, kind = self.world, type(event)
        now = world.clock.now
        if world.trace is not None:
            world.tell(self.address, sender, event)
        if self.executor is not None and kind in EXECUTOR_HANDLERS:
            out = self.executor.handle(event, now, sender)
            if kind in BOTH:
                out = [*out, *self.owner.handle(event, now, sender)]
            else:
                world.check(self.executor, self.address, event)
        else:
            out = self.owner.handle(event, now, sender)
        if self.owner.gated:
            out = self.owner.gate(out)
        perform = self.perform
        for command in out:
            perform[type(command)](command)
        world.check(self.owner, self.address, event)

    def drop_now(self) -> None:
        """References that user code let go of."""
        oids = tuple(self.dropped)
        self.dropped.clear()
        self.step(s.RefsDropped(oids))

    def told_to_end(self, sender: str) -> None:
        """The node has more processes than it needs; a driver is none of them."""

    def deliver(self, message: m.Message, sender: str) -> None:
        """What the shell answers itself, else the machines."""
        kind = type(message)
        if kind is m.Asked:
            content = [self.owner.log_given(*message.argument)]  # type: ignore[attr-defined]
            self.send(sender, m.Answered(message.request, message.topic, content))  # type: ignore[attr-defined]
        elif kind is m.Ping:
            self.send(sender, m.Pong(message.number))  # type: ignore[attr-defined]
        elif kind is m.Answered and message.topic.startswith("resource."):  # type: ignore[attr-defined]
            self.answered(message)  # type: ignore[arg-type]
        elif kind is m.Goodbye:
            self.told_to_end(sender)
        elif kind is m.SpaceGiven:
            self.space_given(message)  # type: ignore[arg-type]
        elif kind is m.ObjectFreed:
            for oid, file in zip(message.oids, message.files, strict=True):  # type: ignore[attr-defined]
                self.node.remove_written(oid, file)
                self.send(sender, m.SegmentKept(oid, 0, file))
        elif kind is m.PoolTrimmed:
            self.send(sender, m.PoolTrimmed(0))
        elif kind is m.Welcome:
            self.welcomed()
        else:
            self.step(message, sender)

    def answered(self, message: m.Answered) -> None:
        """The head's answer to an order."""
        thread = self.orders.pop(message.request, None)
        if thread is not None and thread.wait == message.request:
            self.answers[message.request] = message.content
            self.wake(thread, message.request)

    def welcomed(self) -> None:
        """The node takes us."""

    def lost(self, peer: str, reason: str) -> None:
        """A peer is gone for good; if it was only cut off, it comes back under its own address."""
        self.step(m.PeerLost(peer, reason), peer)

    def send(self, to: str, message: m.Message) -> None:
        """To another process."""
        self.world.net.send(self, to, message)

    # --- commands ---------------------------------------------------------------------------------

    def do_send(self, command: c.Send) -> None:
        """Into the network."""
        if self.world.trace is not None:
            self.world.tell(self.address, "->" + command.to, command.message)
        self.world.net.send(self, command.to, command.message)

    def do_timer(self, command: c.SetTimer) -> None:
        """Hand the event back later."""
        self.world.clock.after(command.delay_s, self.run, self.step, command.event)

    def do_resolve(self, command: c.Resolve) -> None:
        """Wake a thread."""
        thread = self.waits.pop(command.waiter, None)
        if thread is not None:
            self.wake(thread, command.waiter)

    def do_restore_durable(self, command: c.RestoreDurable) -> None:
        """Read a copy, which may be torn, and ask the node for room."""
        blob = self.world.durable.get(command.oid)
        if blob is None or self.world.dice.random() < TORN_PART:
            self.step(s.DurableBack(command.oid, self.node.address, "it is torn"))
            return
        number = next(self.numbers)
        self.restores[number] = command.oid, blob
        self.asked[number] = len(blob)
        self.send(self.node.address, m.SpaceAsked(number, len(blob)))

    def restored(self, oid: bytes, blob: bytes, given: m.SpaceGiven) -> None:
        """There is room, or there will be none."""
        node = self.node.address
        if given.granted:
            file = self.node.write(oid, blob, self.address)
            self.send(node, m.ObjectSealed(oid, len(blob), self.address, file))
        self.step(s.DurableBack(oid, node, "" if given.granted else given.reason))

    def do_write_durable(self, command: c.WriteDurable) -> None:
        """Behind the back of the machines."""
        self.world.clock.after(DISK_S, self.run, self.write_durable, command)

    def write_durable(self, command: c.WriteDurable) -> None:
        """Write what is still there."""
        blob = self.node.read(command.oid)
        if blob is not None:
            self.world.durable[command.oid] = blob
        failure = "" if blob is not None else "it is not here"
        self.send(command.owner, m.ObjectPersisted(command.oid, "" if failure else "sim://", DISK_S, failure))

    # --- threads ----------------------------------------------------------------------------------

    def begin(self, thread: Thread, code: Code) -> None:
        """Start user code."""
        thread.code = code
        self.resume(thread, 0)

    def wake(self, thread: Thread, number: int) -> None:
        """What the thread waits for is there: it goes on a moment later."""
        self.world.clock.after(WAKE_S, self.run, self.resume, thread, number)

    def resume(self, thread: Thread, number: int) -> None:
        """The thread goes on, if it still waits for this."""
        if thread.wait != number:
            return
        thread.wait = 0
        try:
            thread.code.send(None)
        except StopIteration:
            return

    def interrupt(self, thread: Thread, error: Exception) -> None:
        """Raise in the thread where it stands."""
        if not thread.in_user_code or not thread.wait:
            return
        thread.wait = 0
        try:
            thread.code.throw(error)
        except StopIteration:
            return

    def pause(self, thread: Thread, seconds: float) -> Code:
        """Compute."""
        number = thread.wait = next(self.numbers)
        self.world.clock.after(seconds, self.run, self.resume, thread, number)
        yield

    def block(self, thread: Thread, number: int) -> Code:
        """Wait for a Resolve; a worker gives its slot back when it takes long."""
        if number not in self.waits:
            return  # it was resolved at once
        thread.wait = number
        if thread.is_main and self.executor is not None and self.executor.host is None and thread.in_user_code:
            self.world.clock.after(BLOCK_AFTER_S, self.run, self.going_to_block, thread, number)
        try:
            yield
        finally:
            if thread.blocked:
                thread.blocked = False
                self.step(TaskBlocked(False))
            if self.waits.pop(number, None) is not None:
                self.step(s.WaiterGone(number))

    def going_to_block(self, thread: Thread, number: int) -> None:
        """The main thread still waits."""
        if thread.wait == number and number in self.waits:
            thread.blocked = True
            self.step(TaskBlocked(True))

    def wait_ready(self, thread: Thread, oids: tuple[bytes, ...], count: int) -> Code:
        """Until so many of the objects have a value."""
        objects = self.owner.objects
        if sum(objects[oid].value is not None for oid in oids) >= count:
            return
        number = next(self.numbers)
        self.waits[number] = thread
        self.step(s.ReadyAsked(number, oids, count))
        yield from self.block(thread, number)

    # --- values -----------------------------------------------------------------------------------

    def load(self, thread: Thread, oid: bytes) -> Generator[None, Any, Payload]:
        """The value of an object that is ready; raises EngineError."""
        while True:
            value = self.owner.value_of(oid)
            if type(value) is m.Inline:
                return self.unpacked(value.blob)
            if type(value) is m.Failed:
                raise EngineError(value.kind, value.error)
            if type(value) is m.Stored:
                blob = self.node.read(oid)
                if blob is not None:
                    return self.unpacked(blob)
            if oid not in self.owner.objects:
                raise AssertionError(f"object {oid.hex()} is read at {self.address} though nothing refers to it")
            number = next(self.numbers)
            self.waits[number] = thread
            self.step(s.FetchAsked(number, oid))
            yield from self.block(thread, number)
            reason = self.owner.fetch_errors.pop(oid, None)
            if reason is not None:
                raise EngineError("store", reason.encode())

    def unpacked(self, blob: bytes) -> Payload:
        """A value's parts."""
        return PAYLOAD.decode(blob)

    def take_refs(self, context: Context, refs: tuple[m.RefTo, ...], via: bytes) -> list[Ref]:
        """References come into user code."""
        made = []
        for ref in refs:
            made.append(Ref(self, ref.oid, ref.owner, ref.heir))
            self.step(s.RefsMade((ref,), via))
        context.refs += made
        return made

    def keep(
        self, thread: Thread, oid: bytes, payload: Payload, size_bytes: int, owner: str
    ) -> Generator[None, Any, m.Value]:
        """A value as it is kept: inline, or stored on this host."""
        blob = msgspec.msgpack.encode(payload)
        if size_bytes <= self.world.scenario.config.inline_bytes_max:
            return m.Inline(blob, payload.refs)
        number = next(self.numbers)
        if self.dropped:
            self.drop_now()
        self.waits[number] = thread
        self.asked[number] = size_bytes
        self.send(self.node.address, m.SpaceAsked(number, size_bytes))
        try:
            thread.wait = number
            yield
        except BaseException:
            self.waits.pop(number, None)
            given = self.space.pop(number, None)
            if given is not None and given.granted:
                self.send(self.node.address, m.SpaceReturned(size_bytes))
            raise
        given = self.space.pop(number)
        if not given.granted:
            raise EngineError("store", given.reason.encode())
        node = self.node
        file = node.write(oid, blob, self.address)
        self.send(node.address, m.ObjectSealed(oid, size_bytes, owner, file))
        return m.Stored(size_bytes, (node.address,), payload.refs)

    def space_given(self, message: m.SpaceGiven) -> None:
        """The node's answer."""
        restore = self.restores.pop(message.request, None)
        if restore is not None:
            del self.asked[message.request]
            self.restored(*restore, message)
            return
        thread = self.waits.pop(message.request, None)
        size_bytes = self.asked.pop(message.request, 0)
        if thread is None or thread.wait != message.request:
            if message.granted:
                self.send(self.node.address, m.SpaceReturned(size_bytes))
            return
        self.space[message.request] = message
        self.wake(thread, message.request)

    # --- what user code calls ---------------------------------------------------------------------

    def new_child(self) -> bytes:
        """The name of the next child."""
        return child_id(self.context.task, next(self.context.children))

    def made_ref(self, context: Context, oid: bytes) -> Ref:
        """A reference to something of ours."""
        ref = Ref(self, oid, self.address, context.heir)
        context.refs.append(ref)
        return ref

    def put(self, thread: Thread, context: Context, payload: Payload, size_bytes: int) -> Generator[None, Any, Ref]:
        """Store a value."""
        oid = object_id(self.new_child(), 0)
        value = yield from self.keep(thread, oid, payload, size_bytes, self.address)
        self.step(s.ValuePut(oid, value))
        return self.made_ref(context, oid)

    def drop(self, ref: Ref) -> None:
        """The last name of a reference is gone."""
        if ref.alive:
            ref.alive = False
            if not self.dropped:
                self.world.clock.after(TICK_S, self.run, self.tick)
            self.dropped.append(ref.oid)

    def drop_all(self, context: Context) -> None:
        """The code's frame is gone."""
        for ref in context.refs:
            self.drop(ref)
        context.refs = []

    def begin_parent(self) -> None:
        """A worker tells its machine that what runs is a parent."""

    def tick(self) -> None:
        """What was dropped is told soon, even if nothing else happens."""
        if self.dropped:
            self.drop_now()
