"""What every process that runs user code has: its machines, its endpoint, its view of the host's store, its waits.

The driver's session and a worker's session are the same but for how they begin and end, and that a worker also runs
tasks. User threads hand events to the machines themselves (under a lock), so that a call costs no change of thread;
the loop thread reads the links.
"""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import msgspec

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.ids import object_id
from flowengine.core.owner import Owner
from flowengine.core.owner_seen import Sight
from flowengine.errors import Deadlock, EngineBug, FlowError, GetTimeout, HeadLost, StaleSession, unpack_error
from flowengine.objects import codec
from flowengine.objects.segments import Segments
from flowengine.refs import Current, ObjectRef
from flowengine.runtime import answers, process
from flowengine.runtime.callbacks import Callbacks
from flowengine.runtime.context import Context, Courses, Questions, wait_name
from flowengine.runtime.drive import Drive
from flowengine.runtime.hearing import SHELL, Hearing
from flowengine.runtime.long_waits import LongWaits
from flowengine.runtime.membership import Membership
from flowengine.runtime.sharing import Sharing
from flowengine.runtime.values import Unbroken, Values, drop_durable, drop_state, warn

log = logging.getLogger(__name__)

LONG_WAIT_S = 1.0  # then a worker looks whether the wait can end
TICK_S = 0.1  # between looks at what was dropped
NODES_S = 2.0  # within which a node tells who is there
WITHDRAW_S = 1.0  # a worker that does not say by then whether a task has begun may have begun it


class Session(Hearing):
    """The engine as one process sees it."""

    role = "driver"
    places = True  # what code here calls is placed on nodes: policies are asked
    actor_kind: type | None = None  # the class of the actor that lives here
    blocks_soon_s = 0.0  # a wait that is over before that is not worth telling anybody

    def __init__(self, place: process.Place) -> None:
        self.config = place.config
        self.host = place.host
        self.dropped: deque[bytes] = deque()
        self.streams_dropped: deque[bytes] = deque()
        self.waits: dict[int, Callable[[], None]] = {}
        self.waiter_ids = itertools.count(1)
        self.node = ""
        self.node_id = ""
        self.session_name = ""
        self.head = ""
        self.store_limit_bytes = 0  # of this host's node
        self.nodes_seen: tuple[m.NodeEntry, ...] = ()
        self.nodes_known = threading.Event()  # those that were seen are all
        self.nodes_known.set()
        self.context = Context(os.urandom(16))
        self.masked = 0  # the main thread is inside of the engine: signals wait
        self.pending_signal: BaseException | None = None
        self.handlers: dict[int, Callable[[int, FrameType | None], None]] = {}  # of signals, as set in this process
        self.main_thread = threading.main_thread().ident
        self.local = threading.local()
        self.closed = False
        self.bug: EngineBug | None = None
        self.loop = process.new_loop()
        self.joined = concurrent.futures.Future[m.Welcome]()
        self.endpoint = process.new_endpoint(
            msgspec.structs.replace(place, runs_code=True), self.on_batch, self.on_lost)
        self.questions = Questions(self.endpoint)
        self.sight = Sight()
        self.owner: Owner
        self.drive: Drive
        self.membership: Membership
        self.values: Values
        self.log_sink: Callable[[m.LogLines], None] | None = None
        self.courses = Courses()
        self.sharing = Sharing(self)
        self.long_waits = LongWaits(self)
        self.callbacks = Callbacks()
        self.thread = threading.Thread(target=self._run_loop, name="flowengine-loop", daemon=True)

    # --- beginning --------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def open(self, node: str) -> None:
        """Listen, join the node, and make the machines; raises what the link raises."""
        if not self.thread.is_alive():
            self.thread.start()
        asyncio.run_coroutine_threadsafe(self._open(node), self.loop).result()
        welcome = self.joined.result(timeout=self.config.connect_timeout_s)
        self.enter(welcome)

    async def _open(self, node: str) -> None:
        if not self.endpoint.address:
            await self.endpoint.start()
        self.node = node
        owner = Owner(self.endpoint.address, node, "", self.config)
        self.owner = owner
        owner.journal.wall_offset_s = time.time() - time.monotonic()
        self.drive = self.make_drive(owner)
        self.drive.attach(self.endpoint, self.loop)
        self.drive.perform.update(self.performers())
        self.membership = Membership(self)
        await self.endpoint.connect(node)
        self.hello()
        self.loop.call_later(TICK_S, self._tick)

    def hello(self) -> None:
        """What the process says first to its node."""
        self.endpoint.send(self.node, m.Joined(self.endpoint.address, os.getpid(), self.role))

    def make_drive(self, owner: Owner) -> Drive:
        """The door to the machines of this process; what may wait goes out with a reply or when a thread blocks."""
        return Drive(owner, self.on_bug, lazy_s=None)

    def enter(self, welcome: m.Welcome) -> None:
        """The node has told where its store is."""
        self.node_id = welcome.node_id
        self.owner.node_id = welcome.node_id
        self.session_name = welcome.session
        self.head = welcome.head
        self.owner.head = welcome.head
        self.store_limit_bytes = welcome.store_limit_bytes
        pool_bytes = int(welcome.store_limit_bytes * self.config.pool_fraction)
        self.values = Values(self, Segments(welcome.store_folder, pool_bytes))
        self.membership.moved(self.node)

    def performers(self) -> dict[type, Callable[[Any], None]]:
        """How this process carries commands out."""
        return {c.Resolve: self._resolve, c.RestoreDurable: lambda command: self.values.bring_back(command),
                c.WriteDurable: lambda command: self.values.write_behind(command),
                c.DropDurable: drop_durable, c.DropState: drop_state, c.Warn: warn}

    @property
    def address(self) -> str:
        """Where this process listens."""
        return self.endpoint.address

    def on_bug(self, event: Any, error: BaseException) -> None:
        """A machine failed: log it, and let those who wait know, for what they wait for may never come."""
        log.error("a machine failed on %.2000r", event, exc_info=error)
        bug = error if isinstance(error, EngineBug) else EngineBug(f"{type(error).__name__}: {error}")
        bug.story = tuple(self.owner.journal.story(getattr(event, "task", b"") or getattr(event, "oid", b""), 50))
        self.bug = bug
        self.wake_all()

    # --- stepping ---------------------------------------------------------------------------------

    def step(self, event: Any) -> None:
        """Hand an event to the machines; what was dropped by the garbage collector goes first."""
        if _thread.get_ident() != self.main_thread:
            if self.dropped:
                self._drop()
            self.drive.step(event)
            return
        self.masked += 1
        try:
            if self.dropped:
                self._drop()
            self.drive.step(event)
        finally:
            self.masked -= 1
            if self.pending_signal is not None and not self.masked:
                self.raise_pending()

    def raise_pending(self) -> None:
        """A signal came while the engine was at work: now is the time."""
        error, self.pending_signal = self.pending_signal, None
        if error is not None:
            raise error

    def _drop(self) -> None:
        dropped, oids = self.dropped, []
        while dropped:
            try:
                oids.append(dropped.popleft())
            except IndexError:
                break
        if oids:
            self.drive.step(s.RefsDropped(tuple(oids)))
        while self.streams_dropped:
            self.drive.step(s.StreamTaken(self.streams_dropped.popleft(), -1))

    def _tick(self) -> None:
        if self.closed:
            return
        if self.dropped or self.streams_dropped:
            self._drop()
        self.drive.flush_lazily()  # the program may compute for long
        self.loop.call_later(TICK_S, self._tick)

    def on_batch(self, peer: str, messages: list[Any]) -> None:
        """What a peer sent: most is for the machines, some for this shell."""
        rest: list[Any] = []
        for message in messages:
            handler = SHELL.get(type(message))
            if handler is None:
                rest.append(message)
                continue
            if rest:
                self.drive.batch(peer, rest)
                rest = []
            getattr(self, handler)(peer, message)
        if rest:
            self.drive.batch(peer, rest)

    def on_lost(self, peer: str, reason: str) -> None:
        """A peer is gone for good; if it was only cut off, it comes back under its own address."""
        self.endpoint.forgive(peer)
        self.questions.lost(peer, reason)
        if not self.node:
            return  # there are no machines yet: the head is asked for a node
        self.drive.lost(peer, reason)
        self.courses.lost((peer,), reason)
        self.membership.lost(peer, reason)
        self.sharing.lost(peer)

    # --- waiting ----------------------------------------------------------------------------------

    def new_wait(self) -> tuple[int, Any]:
        """A number for a machine's Resolve, and the lock that it releases."""
        lock = _thread.allocate_lock()
        lock.acquire()
        number = next(self.waiter_ids)
        self.waits[number] = lock.release
        return number, lock

    def wake_all(self) -> None:
        """Nothing more will come: wake everybody who waits, each once, whoever else does so at the same time."""
        for number in list(self.waits):
            wake = self.waits.pop(number, None)
            if wake is not None:
                wake()

    def block(self, number: int, lock: Any, deadline: float | None, soon_s: float = 0.0) -> bool:
        """Wait for the lock; False when the time is over. An interrupt comes through and the wait is forgotten.

        soon_s: nobody is told of a wait that is over before.
        """
        self.drive.flush_lazily()
        context = self.context
        try:
            self.check_open()
            soon_s = self.blocks_soon_s and max(self.blocks_soon_s, soon_s)
            if soon_s and lock.acquire(timeout=soon_s):
                return True
            try:
                self.going_to_block(context)
                first_s = LONG_WAIT_S if deadline is None else min(LONG_WAIT_S, max(0.0, deadline - time.monotonic()))
                came = bool(lock.acquire(timeout=first_s))
                if not came and deadline is None:
                    self.waits_long(number, context)
                came = came or self.long_waits.wait(lock, number, deadline, first_s)
                self.check_open()
                return came
            finally:
                self.blocked_no_more(context)
        finally:
            if self.waits.pop(number, None) is not None:
                self.step(s.WaiterGone(number))

    def going_to_block(self, context: Context) -> None:
        """A worker gives its slot back while its task waits, in whatever thread."""

    def blocked_no_more(self, context: Context) -> None:
        """The wait is over."""

    def waits_long(self, number: int, context: Context) -> None:
        """A wait without a time limit lasts: in a worker it may be that it can never end."""

    def _resolve(self, command: c.Resolve) -> None:
        wake = self.waits.pop(command.waiter, None)
        if wake is not None:
            wake()

    def wait_ready(self, oids: Sequence[bytes], count: int, deadline: float | None) -> bool:
        """Wait until `count` of the objects have a value; False when the time is over; raises Deadlock."""
        before = self.context.recorded
        if before and oids and (circle := before.get(("circle", wait_name(oids)))) is not None:
            raise Deadlock(circle.decode())
        objects = self.owner.objects
        ready = 0
        for oid in oids:
            if objects[oid].value is not None:
                ready += 1
        if ready >= count:
            return True
        if deadline is not None and deadline <= time.monotonic():
            self.drive.flush_lazily()
            return False
        number, lock = self.new_wait()
        self.step(s.ReadyAsked(number, tuple(oids), count))
        came = self.block(number, lock, deadline)
        if self.owner.circles and (told := self.owner.circles.pop(number, "")):
            self.note("circle", wait_name(oids), told.encode())
            raise Deadlock(told)
        return came

    def fetch(self, oid: bytes, deadline: float | None) -> None:
        """Wait until the object's bytes may be in the local store, or its value has changed."""
        number, lock = self.new_wait()
        self.step(s.FetchAsked(number, oid))
        if not self.block(number, lock, deadline):
            raise GetTimeout(f"the bytes of {self.why(oid)} did not arrive in time")
        reason = self.owner.fetch_errors.pop(oid, None)
        if reason is not None:
            raise self.values.store_error(reason)

    # --- references -------------------------------------------------------------------------------

    def ref_arrived(self, oid: bytes, owner: str, heir: str) -> ObjectRef:
        """A reference was unpickled here."""
        ref = ObjectRef(self, oid, owner, heir)
        via = getattr(self.local, "via", b"")
        self.step(s.RefsMade((m.RefTo(oid, owner, heir),), via))
        return ref

    def ref_found(self, oid: bytes, owner: str, heir: str) -> ObjectRef:
        """A reference was found in a directory: its owner hears that we hold it."""
        ref = self.ref_arrived(oid, owner, heir)
        self.step(s.RefFound(oid))
        return ref

    def heir(self) -> str:
        """Who is asked about what we own when we are dead: the owner of the task that runs here."""
        return self.context.heir

    def actor_home(self) -> tuple[bytes, str]:
        """The actor that lives here and its owner; asked in its process only."""
        return b"", ""

    def why(self, oid: bytes) -> str:
        """One line about an object."""
        return self.owner.why(oid)

    def waits_of(self, task: bytes) -> list[str]:
        """What a task waits for of locks, queues and the like; known where these are kept."""
        return []

    # --- submitting, storing, choosing ------------------------------------------------------------

    def submit(self, spec: m.TaskSpec, blob: bytes | None) -> None:
        """A new task of the running code."""
        self.step(s.Submitted(spec, blob))

    def put_packed(self, packed: codec.Packed, durable: bool = False) -> ObjectRef:
        """A new value of the running code."""
        oid = object_id(self.context.new_child(), 0)
        if durable:
            self.values.write_durable(oid, packed)
        with Unbroken(self):  # an interrupt in between would leave a value to which nothing refers
            value = self.values.keep(oid, packed, self.address)
            ref = ObjectRef(self, oid, self.address, self.heir())
            self.step(s.ValuePut(oid, value, durable))
        return ref

    def choose_ready(
        self, oids: Sequence[bytes], count: int, limit_s: float | None, every: bool = False
    ) -> list[bytes]:
        """Which of the objects are ready when `count` are, or the time is over; a re-run makes the same choice."""
        context = self.context
        number = context.next_choice("wait")
        before = context.recorded.get(("wait", number))
        if before is not None:
            chosen = [oids[index] for index in msgspec.msgpack.decode(before)]
            self.wait_ready(chosen, len(chosen), None)
            return chosen
        deadline = None if limit_s is None else time.monotonic() + limit_s
        self.wait_ready(oids, count, deadline)
        objects = self.owner.objects
        indices = [index for index, oid in enumerate(oids) if objects[oid].value is not None]
        if not every:
            indices = indices[:count]
        self.note("wait", number, msgspec.msgpack.encode(indices))
        return [oids[index] for index in indices]

    def note(self, kind: str, number: int, payload: bytes) -> None:
        """The running task made a choice; in the program itself nobody needs it."""
        context = self.context
        if context.caller or context.is_job:
            context.noted.append((kind, number, payload))
            self.step(s.Noted(context.task, kind, number, payload))

    def recorded_call(self, function: Callable[[], Any]) -> Any:
        """Run the function once per task, however often the task runs."""
        context = self.context
        if context.is_recording():
            return function()
        number = context.next_choice("record")
        before = context.recorded.get(("record", number))
        if before is not None:
            return codec.from_inline(before)
        value = context.outside(function) if context.caller or context.is_job else function()
        self.note("record", number, codec.to_inline(codec.pack(value)))
        return value

    def commit(self) -> None:
        """Wait until others have what it takes to come here again: the task's owner, and those of actors heard of."""
        with self.drive.lock:
            self.step(s.CommitAsked())
            journals = {held.owner: None for held in self.owner.stash.open.values()}
        if self.context.caller:
            journals[self.context.caller] = None
        for journal in journals:
            self.ask(journal, "commit", scope="local", timeout_s=self.config.link_lost_after_s)

    # --- getting ----------------------------------------------------------------------------------

    def get(self, refs: Sequence[ObjectRef], timeout: float | None, copy: bool) -> list[Any]:
        """The values, in order; raises the first error, or GetTimeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        oids = [ref.oid for ref in refs]
        distinct = list(dict.fromkeys(oids)) if len(oids) > 1 else oids
        if not self.wait_ready(distinct, len(distinct), deadline):
            self.time_is_over(distinct, timeout)
        load = self.values.load
        return [load(oid, copy, deadline) for oid in oids]

    def get_one(self, ref: ObjectRef, timeout: float | None, copy: bool) -> Any:
        """The value of one reference, by the shortest way when it is there."""
        if self.owner.value_of(ref.oid) is None:
            return self.get([ref], timeout, copy)[0]
        return self.values.load(ref.oid, copy, None if timeout is None else time.monotonic() + timeout)

    def time_is_over(self, oids: Sequence[bytes], timeout: float | None) -> None:
        """Raise GetTimeout saying what each object waits for; an error that is there already is told instead."""
        pending = [oid for oid in oids if self.owner.value_of(oid) is None]
        if not pending:
            return
        shown = "; ".join(self.why(oid) for oid in pending[:5])
        more = f"; and {len(pending) - 5} more" if len(pending) > 5 else ""
        raise GetTimeout(f"{len(pending)} of {len(oids)} values are not there after {timeout:g} s: {shown}{more}")

    def when_ready(self, oid: bytes, wake: Callable[[], None]) -> None:
        """Have `wake` called once the object has a value, or the session has ended; under the lock of the engine."""
        number = next(self.waiter_ids)
        self.waits[number] = wake
        self.step(s.ReadyAsked(number, (oid,), 1))

    def withdraw(self, oid: bytes) -> bool:
        """Cancel the task of an object if it has not begun; True when it is cancelled."""
        number, lock = self.new_wait()
        self.step(s.WithdrawAsked(oid, number))
        self.block(number, lock, time.monotonic() + WITHDRAW_S)
        value = self.owner.value_of(oid)
        return type(value) is m.Failed and value.kind == "cancelled"

    def future_of(self, ref: ObjectRef) -> concurrent.futures.Future[Any]:
        """A standard future of the ref's value."""
        self.check_open()
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def fulfil() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                value = self.values.load(ref.oid, False, None)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(value)

        context = self.context

        def soon() -> None:
            if blocked:
                self.blocked_no_more(context)
            self.callbacks.run(fulfil)  # unpickling and what waits for the future are user code and may take long

        blocked = self.owner.value_of(ref.oid) is None
        if blocked:
            self.going_to_block(context)  # an event loop may wait for this future
        self.when_ready(ref.oid, soon)
        return future

    def next_item(self, task: bytes, index: int) -> ObjectRef | None:
        """The index-th item of a stream, waited for; None at its end; raises its error."""
        record = self.owner.tasks.get(task)
        stream = record.stream if record is not None else None
        if stream is None:
            return None
        if index >= stream.count and not stream.ended:
            number, lock = self.new_wait()
            self.step(s.StreamAsked(number, task, index))
            self.block(number, lock, None)
        if index < stream.count:
            self.step(s.StreamTaken(task, index + 1))
            return ObjectRef(self, object_id(task, index), self.address, self.heir())
        if stream.error is not None:
            error = unpack_error(stream.error.error)  # type: ignore[union-attr]
            stream.error = None
            raise error
        return None

    # --- asking others ----------------------------------------------------------------------------

    def ask(self, to: str, topic: str, argument: Any = None, scope: str = "cluster", timeout_s: float = 5.0) -> Any:
        """Ask a process and wait for the answer."""
        if self.dropped:
            self._drop()
        return self.questions.ask(m.Asked(self.questions.next(), topic, argument, scope), to, timeout_s)

    def all_nodes(self) -> tuple[m.NodeEntry, ...]:
        """The nodes that live; in a large cluster a worker knows few, and asks its node: it waits a while for that."""
        if not self.nodes_known.is_set() and threading.current_thread() is not self.thread:
            self.endpoint.send(self.node, m.NodesWanted())
            self.nodes_known.wait(NODES_S)
        return self.nodes_seen

    def ask_head(self, topic: str, argument: Any) -> Any:
        """Ask the head, again while it is being started anew; raises HeadLost when there is no answer at length."""
        patience_s = self.config.link_lost_after_s
        end = time.monotonic() + patience_s
        while True:
            try:
                return self.ask(self.head, topic, argument)
            except FlowError as error:
                if self.closed:
                    raise
                if time.monotonic() > end:
                    where = self.head.partition("#")[0]
                    text = f"no answer to {topic} within {patience_s:g} s from the head at {where}: {error}"
                    raise HeadLost(text) from error
            time.sleep(TICK_S)
            self.endpoint.forgive(self.head)

    def answer(self, peer: str, question: m.Asked) -> None:
        """A question from another process."""
        self.endpoint.send(peer, m.Answered(question.request, question.topic, answers.content(self, question)))

    def answered(self, peer: str, message: m.Answered) -> None:
        """An answer came; negative numbers are of the machine."""
        if message.request < 0:
            self.drive.step(message, peer)
        self.questions.answered(message)

    # --- ending -----------------------------------------------------------------------------------

    def close(self) -> None:
        """End this process's part: waits fail, links close, the loop thread ends."""
        if self.closed:
            return
        if self.session_name:
            self.membership.close()
        self.closed = True
        if Current.session is self:
            Current.session = None
        self.wake_all()
        self.callbacks.close()
        if self.session_name:
            self.values.give_up("the session has ended")
        if not self.thread.is_alive():
            self.loop.close()
            return  # the start has failed before anything ran here
        try:
            asyncio.run_coroutine_threadsafe(self.endpoint.close(), self.loop).result(timeout=3)
        except Exception:
            log.debug("the endpoint did not close well", exc_info=True)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=3)
        if not self.thread.is_alive():
            self.loop.close()

    @property
    def origin(self) -> Session | None:
        """To which handles belong that are made or used here; None: to none yet."""
        return self

    def check_open(self) -> None:
        """Raise when the session has ended meanwhile, or a machine failed while somebody waited."""
        if self.closed:
            raise StaleSession("the session has ended")
        if self.bug is not None:
            bug, self.bug = self.bug, None
            raise bug
