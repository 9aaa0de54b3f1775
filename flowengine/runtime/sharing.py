"""Locks, queues, events and variables as a process uses them: it asks its program, which keeps them."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.commons import Commons, Reply
from flowengine.core.ids import TASK_ID_BYTES, object_id, short
from flowengine.core.owner_state import ENDED
from flowengine.errors import FlowError
from flowengine.objects import codec
from flowengine.refs import ObjectRef

if TYPE_CHECKING:
    from flowengine.runtime.context import Context
    from flowengine.runtime.driver import DriverSession
    from flowengine.runtime.session import Session

T = TypeVar("T")

REPEATED_MAX = 10_000  # choices of one task that a run of it after a crash gets again
REPEATED_BYTES_MAX = 256 << 20
RECORD_WEIGHT = 16  # of a byte that is in the record itself, against one in the store
SOON_S = 0.005  # an answer that comes sooner is not worth lending a CPU for
LOOK_S = 1.0  # between looks at whether kept items may be needed again
CHECKPOINTS = 3  # of an actor, after which it does not come back to what was before
KEPT_MAX = 10_000  # items for each task or actor of the program
GIVEN = ("get", "acquire")  # answers that are something, which is given back when nobody takes it


class Ask(NamedTuple):
    """A question, and how long its answer is waited for; None: no limit."""

    asked: m.ShareAsked
    limit_s: float | None


Steps = Generator[Ask, m.ShareAnswered, T]  # what a verb asks one after another, and in the end its value


class Pending:
    """A question under way."""

    def __init__(self, ask: Ask, number: int) -> None:
        self.number = number
        self.verb = ask.asked.verb
        self.answer: m.ShareAnswered | None = None
        self.wake: Callable[[], None] | None = None
        self.waiter = 0  # the session's number of the thread that waits


class Hold(NamedTuple):
    """A lock that code of this process has; token 0: that an actor had in an earlier process."""

    token: int
    shown: int
    code: bytes
    who: tuple[int, int]


class Sharing:
    """One for each session; any thread."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.numbers = itertools.count(1)
        self.open: dict[int, Pending] = {}
        self.holds: dict[str, list[Hold]] = {}  # by the name of the lock
        self.untaken: dict[int, None] = {}  # questions upon which something was given that the code does not have yet
        self.uncounted: dict[bytes, ObjectRef] = {}  # as long as this process
        self.lock = threading.Lock()

    # --- asking -----------------------------------------------------------------------------------

    def question(self, kind: str, name: str, verb: str, **more: Any) -> m.ShareAsked:
        """A question of the code that runs here."""
        context = self.session.context
        who = "the program" if not context.caller else f"{context.name} {short(context.task)}"
        root = bytes.fromhex(context.driver.partition(" ")[2]) if context.caller else b""
        code = context.actor or context.task
        call = context.task if context.actor else b""
        return m.ShareAsked(0, name, kind, verb, code=code, root=root, who=who, call=call, **more)

    def key(self, change: str, items: Sequence[m.SharedItem]) -> bytes:
        """Of a change that the running code makes: the same when it runs again after a crash and makes the same one."""
        context = self.session.context
        if not context.caller:
            return b""
        context.reach_out()
        what = hashlib.blake2b(context.new_child() + change.encode(), digest_size=TASK_ID_BYTES)
        for item in items:
            what.update(b"%d:" % item.size_bytes + item.blob)
        if self.is_beyond(context):
            what.update(b"run %d" % context.attempt)
        return what.digest()

    def new_name(self) -> str:
        """For what is given none: the same when the code runs again after a crash."""
        context = self.session.context
        return (context.new_child() if context.caller else os.urandom(TASK_ID_BYTES)).hex()

    def counted(self, kind: str, name: str) -> ObjectRef | None:
        """A reference that counts the handles of what the program makes without a name.

        Code that may run again has none: its next run makes the same one, when the handles of this run are gone.
        """
        return None

    def stays(self, counted: ObjectRef | None) -> None:
        """A handle was passed on in a way that is not counted."""
        if counted is not None:
            self.uncounted[counted.oid] = counted

    def blocking(self, steps: Steps[T]) -> T:
        """Do it, and wait; raises what the steps raise, FlowError when the program cannot be reached."""
        pending = None
        try:
            ask = next(steps)
            while True:
                pending = self.begin(ask)
                self.await_answer(pending, ask.limit_s)
                ask = steps.send(self.answer_of(pending))
        except StopIteration as over:
            value: T = over.value
            return value
        except BaseException:
            self.drop(pending)
            raise

    async def awaiting(self, steps: Steps[T]) -> T:
        """The same on an event loop."""
        pending = None
        try:
            ask = next(steps)
            while True:
                pending = self.begin(ask)
                await self.await_on_loop(pending, ask.limit_s)
                ask = steps.send(self.answer_of(pending))
        except StopIteration as over:
            value: T = over.value
            return value
        except BaseException:
            self.drop(pending)
            raise

    def begin(self, ask: Ask) -> Pending:
        """Ask the program."""
        self.session.check_open()
        number = next(self.numbers)
        pending = self.open[number] = Pending(ask, number)
        self.say(msgspec.structs.replace(ask.asked, number=number, waits=ask.limit_s != 0))
        return pending

    def say(self, message: Any) -> None:
        """To the program, after what it may depend on."""
        self.session.step(s.Said(self.program(), message))

    def program(self) -> str:
        """The address of the program whose code runs here."""
        return self.session.context.driver.partition(" ")[0] or self.session.address

    def await_answer(self, pending: Pending, limit_s: float | None) -> None:
        """Wait in this thread; when the time is over say so, and wait for the last word."""
        deadline = None if limit_s is None or limit_s == 0 else time.monotonic() + limit_s
        if not self.wait(pending, deadline):
            self.say(m.ShareGivenUp(pending.number))
            self.wait(pending, None)

    def wait(self, pending: Pending, deadline: float | None) -> bool:
        session = self.session
        number, lock = session.new_wait()

        def wake() -> None:
            known = session.waits.pop(number, None)
            if known is not None:
                known()

        with self.lock:
            pending.wake = wake
            pending.waiter = number
            came = pending.answer is not None
        if came:
            session.waits.pop(number, None)
            return True
        session.block(number, lock, deadline, SOON_S)
        return pending.answer is not None or pending.number not in self.open

    async def await_on_loop(self, pending: Pending, limit_s: float | None) -> None:
        """Wait in this coroutine; the CPU is lent to others meanwhile, as by any wait."""
        session, context = self.session, self.session.context
        session.going_to_block(context)
        try:
            if not await self.came(pending, limit_s or None):
                self.say(m.ShareGivenUp(pending.number))
                await self.came(pending, None)
        finally:
            session.blocked_no_more(context)

    async def came(self, pending: Pending, limit_s: float | None) -> bool:
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(over.set)

        with self.lock:
            pending.wake = wake
            if pending.answer is not None:
                return True
        try:
            async with asyncio.timeout(limit_s):
                await over.wait()
        except TimeoutError:
            return pending.answer is not None
        return True

    def answer_of(self, pending: Pending) -> m.ShareAnswered:
        """The answer that came; raises when there will be none."""
        answer = pending.answer
        self.open.pop(pending.number, None)
        if answer is None:
            self.session.check_open()
            raise FlowError("the program cannot be reached, which keeps locks, queues, events and variables")
        if answer.word == "ok" and pending.verb in GIVEN:
            self.untaken[pending.number] = None
        return answer

    def taken(self, answer: m.ShareAnswered) -> None:
        """The running code has what it was given."""
        self.untaken.pop(answer.number, None)
        if answer.items:
            self.say(m.ShareTaken(answer.number))

    def drop(self, pending: Pending | None) -> None:
        """What was under way when something was raised is not wanted, nor what was given upon it."""
        if pending is None:
            return
        was_asked = self.open.pop(pending.number, None) is not None
        was_given = pending.number in self.untaken
        self.untaken.pop(pending.number, None)
        if (was_asked or was_given) and not self.session.closed:
            self.say(m.ShareGivenUp(pending.number, True))

    def answered(self, message: m.ShareAnswered) -> None:
        """The program's answer; on any thread."""
        pending = self.open.get(message.number)
        if pending is None:
            return  # it was dropped, and said so
        with self.lock:
            pending.answer = message
            wake = pending.wake
        if wake is not None:
            wake()

    def why(self, waiter: int) -> str:
        """What a waiting thread waits for; known in the program only."""
        return ""

    def lost(self, peer: str) -> None:
        """A program that is gone does not answer."""
        if not self.open or peer != self.program():
            return
        for number, pending in list(self.open.items()):
            self.open.pop(number, None)
            if pending.wake is not None:
                pending.wake()

    # --- what a run after a crash gets again ------------------------------------------------------

    def is_beyond(self, context: Context) -> bool:
        """Whether a task has taken too much to be given it all again: a new run of it gets what is there then."""
        return ("shared too much", 0) in context.recorded or context.shared > REPEATED_MAX

    def recorded(self, takes: bool) -> tuple[int, bytes | None]:
        """The number of the next choice of the running code, and the answer that it got before; -1: none is kept.

        takes: the answer is something that nobody else gets. Of others a task is told anew, an actor is not, since its
        state must become what it was.
        """
        context = self.session.context
        if not context.caller or not (takes or is_actor(context)) or self.is_beyond(context):
            return -1, None
        if context.is_recording() and not takes:
            return -1, None  # it is a part of what flow.record keeps
        if takes:
            context.reach_out()
        number = context.next_choice("share")
        return number, context.recorded.get(("share", number))

    def keep(self, number: int, answer: m.ShareAnswered) -> None:
        """The answer is a choice, which is entered in the log of the task or actor."""
        if number < 0:
            return
        session, context = self.session, self.session.context
        if not is_actor(context):
            context.shared += 1
            context.shared_bytes += sum(len(item.blob) * RECORD_WEIGHT or item.size_bytes for item in answer.items)
            if context.shared >= REPEATED_MAX or context.shared_bytes >= REPEATED_BYTES_MAX:
                context.shared = REPEATED_MAX + 1
                session.note("shared too much", 0, b"")
                return
        session.note("share", number, msgspec.msgpack.encode(answer))

    def is_repeated(self) -> bool:
        """Whether the running call has been answered before, and is done again to restore the state of its actor."""
        context = self.session.context
        return context.actor is not None and context.push is not None and context.push.seen

    # --- values -----------------------------------------------------------------------------------

    def packed(self, value: Any) -> m.SharedItem:
        """A value on its way to the program: inside of the message, or put into the store for it."""
        session, program = self.session, self.program()
        packed = codec.pack(value)
        if not packed.refs and packed.nbytes <= session.config.inline_bytes_max:
            return m.SharedItem(codec.to_inline(packed), size_bytes=packed.nbytes)
        oid = object_id(os.urandom(TASK_ID_BYTES), 0)  # another one for each run: what comes twice is dropped
        made = session.values.keep(oid, packed, program)
        if made.contained and program != session.address:
            session.step(s.Exported(made.contained, program))
        return m.SharedItem(b"", oid, made, None, packed.nbytes)  # type: ignore[arg-type]

    def refs_of(self, answer: m.ShareAnswered) -> list[Any]:
        """What an answer holds, as references where these are needed: they count from here on."""
        return [item.blob if item.ref is None else self.session.ref_found(item.ref.oid, item.ref.owner, item.ref.heir)
                for item in answer.items]

    def loaded(self, found: list[Any]) -> list[Any]:
        """The values."""
        return [self.session.get_one(item, None, False) if isinstance(item, ObjectRef) else codec.from_inline(item)
                for item in found]

    # --- holds ------------------------------------------------------------------------------------

    def me(self) -> tuple[int, int]:
        """Which thread and coroutine runs."""
        try:
            task = asyncio.current_task()
        except RuntimeError:
            task = None
        return threading.get_ident(), id(task) if task is not None else 0

    def held(self, name: str) -> Hold | None:
        """The hold of the running code: its own last one, else one that another thread of the same code has."""
        context = self.session.context
        holds, me = self.holds.get(name, ()), self.me()
        own = [hold for hold in holds if hold.code == (context.actor or context.task)]
        return next((hold for hold in reversed(own) if hold.who == me), own[-1] if own else None)

    def hold(self, name: str, token: int, shown: int) -> None:
        """The running code has a lock."""
        context = self.session.context
        self.have(name, Hold(token, shown, context.actor or context.task, self.me()))

    def have(self, name: str, hold: Hold) -> None:
        """What an earlier process had does not count any more once the code takes the same anew."""
        holds = self.holds.setdefault(name, [])
        for was in [one for one in holds if hold.token and not one.token and one.code == hold.code]:
            holds.remove(was)
        holds.append(hold)

    def held_by(self, code: bytes) -> tuple[tuple[str, int], ...]:
        """What an actor has, for its next process: names and tokens."""
        return tuple([(name, one.shown) for name, holds in self.holds.items() for one in holds if one.code == code])

    def had(self, code: bytes, holds: tuple[tuple[str, int], ...]) -> None:
        """An earlier process of the actor had these."""
        for name, shown in holds:
            self.have(name, Hold(0, shown, code, self.me()))

    def let_go(self, name: str, hold: Hold) -> None:
        """It has it no more."""
        holds = self.holds.get(name, [])
        if hold in holds:
            holds.remove(hold)
        if not holds:
            self.holds.pop(name, None)

    def code_ended(self, code: bytes) -> None:
        """A task ends here, and with it what it holds."""
        for name, holds in list(self.holds.items()):
            for hold in [hold for hold in holds if hold.code == code]:
                self.let_go(name, hold)
        self.say(m.ShareEnded(code))


def is_actor(context: Context) -> bool:
    """Whether the code is that of an actor: a call or the constructor."""
    return context.actor is not None or (context.push is not None and context.push.spec.life is not None)


class OwnSharing(Sharing):
    """Of the program itself, which keeps it all."""

    def __init__(self, session: DriverSession) -> None:
        super().__init__(session)
        self.keeper = Keeper(session)

    def counted(self, kind: str, name: str) -> ObjectRef | None:
        """A value without content that the program puts; while anybody has a handle it is there."""
        return self.keeper.counted(kind, name)

    def why(self, waiter: int) -> str:
        """What a waiting thread waits for."""
        return "; ".join([self.keeper.why(one.number) for one in list(self.open.values()) if one.waiter == waiter])

    def say(self, message: Any) -> None:
        """To itself."""
        self.keeper.told(self.session.address, message)


class Kept(NamedTuple):
    """An item as the program keeps it: `ref` counts what is not inside of the item itself."""

    item: m.SharedItem
    ref: ObjectRef | None


class Keeper:
    """The program's side: the machine, and references to what lies in it."""

    def __init__(self, session: DriverSession) -> None:
        self.session = session
        self.machine = Commons()
        self.lock = threading.RLock()
        self.again: dict[bytes, deque[tuple[int, ObjectRef]]] = {}  # what code took that may run again, by its root
        self.checkpoints: dict[bytes, tuple[Any, int]] = {}  # of actors: the last one seen, and how many were
        self.unnamed: dict[bytes, tuple[str, str]] = {}  # reference that counts handles -> kind and name
        self.looking = False

    def counted(self, kind: str, name: str) -> ObjectRef:
        """The reference that goes along with the handles of one without a name."""
        session, oid = self.session, object_id(bytes.fromhex(name[1:]), 0)
        session.drive.step(s.ValuePut(oid, m.Inline(b""), False), "")
        with self.lock:
            self.unnamed[oid] = kind, name
            self.look_soon()
        return ObjectRef(session, oid, session.address)

    def told(self, peer: str, message: Any) -> None:
        """A process, perhaps this one, asks or tells something."""
        with self.lock:
            items = [self.kept(item, peer) for item in message.items] if type(message) is m.ShareAsked else ()
            self.deliver(self.machine.handle(message, peer, items))

    def lost(self, peer: str) -> None:
        """A process is gone."""
        with self.lock:
            self.deliver(self.machine.lost(peer))

    def why(self, number: int) -> str:
        """What a question of the program itself waits for."""
        with self.lock:
            return self.machine.why(self.session.address, number)

    def waits_of(self, code: bytes) -> list[str]:
        """What a task waits for here."""
        with self.lock:
            return self.machine.waits_of(code)

    def kept(self, item: m.SharedItem, peer: str) -> Kept:
        if item.value is None:
            return Kept(item, None)
        session, me = self.session, self.session.address
        session.drive.step(s.ValuePut(item.oid, item.value, False), "" if peer == me else peer)
        ref = ObjectRef(session, item.oid, me)
        return Kept(m.SharedItem(ref=m.RefTo(item.oid, me), size_bytes=item.size_bytes), ref)

    def deliver(self, replies: list[Reply]) -> None:
        session = self.session
        for reply in replies:
            if reply.root:
                self.keep(reply.root, reply.items)
            items = tuple([kept.item for kept in reply.items])
            answer = m.ShareAnswered(reply.number, reply.word, reply.count, items, reply.text)
            if reply.to == session.address:
                session.sharing.answered(answer)
            else:
                session.endpoint.send(reply.to, answer)

    # --- what may be needed again -----------------------------------------------------------------

    def keep(self, root: bytes, items: Any) -> None:
        refs = [kept.ref for kept in items if kept.ref is not None]
        if not refs:
            return
        count = self.checkpoints.get(root, (None, 0))[1]
        self.again.setdefault(root, deque(maxlen=KEPT_MAX)).extend([(count, ref) for ref in refs])
        self.look_soon()

    def look_soon(self) -> None:
        if not self.looking:
            self.looking = True
            self.session.loop.call_soon_threadsafe(self.session.loop.call_later, LOOK_S, self.look)

    def look(self) -> None:
        """On the loop: let go of what no run can ask for again, and of what has no handle any more."""
        owner = self.session.owner
        with self.lock:
            self.looking = False
            for root, kept in list(self.again.items()):
                made, task = owner.made.get(root), owner.tasks.get(root)
                if made is not None and made.state != "dead":
                    last, count = self.checkpoints.get(root, (None, 0))
                    if made.checkpoint is not last:
                        count += 1
                        self.checkpoints[root] = made.checkpoint, count
                    while kept and kept[0][0] <= count - CHECKPOINTS:
                        kept.popleft()
                elif made is not None or task is None or task.state in ENDED:
                    del self.again[root]
                    self.checkpoints.pop(root, None)
            for oid in [oid for oid in self.unnamed if oid not in owner.objects]:
                if self.machine.forget(*self.unnamed[oid]):
                    del self.unnamed[oid]
            if (self.again or self.unnamed) and not self.session.closed:
                self.looking = True
                self.session.loop.call_later(LOOK_S, self.look)
