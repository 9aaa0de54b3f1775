"""Locks, semaphores, queues, events and variables that all code of a program shares: by name, or by passing them on.

The program's process keeps them, so they live as long as its session and survive the death of any other process. A wait
lends the CPU of its task to others, as `get` does. What a task or an exactly-once actor was given by them it is given
again when it runs again after a crash, and what it changed is not changed twice.
"""

from __future__ import annotations

import os
import queue
from collections.abc import AsyncIterator, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from .api import checked_timeout
from .core.messages import ShareAnswered
from .errors import BadType, BadValue, GetTimeout, LockLost, QueueClosed
from .functions import session_of
from .objects import codec
from .options import NAME_CHARS_MAX, whole
from .refs import NOWHERE, Current, ObjectRef
from .runtime.sharing import Ask, Sharing, Steps
from .scheduling.policies import check_text

if TYPE_CHECKING:
    from .runtime.session import Session

T = TypeVar("T")
SIZE_MAX = 1 << 40
NOT_NOW = ("held", "full", "empty", "unset", "late")
KEEPING = ("queue", "event", "variable")  # kinds that keep something when nobody uses them
SIZES = {"queue": "maxsize", "semaphore": "value"}


class Shared:
    """What all of them have: a name, by which the program knows them."""

    _kind = ""
    _origin: Session | None  # the session that knows it; None: it was not used yet
    _counted: ObjectRef | None = None  # goes along with all handles, so that the program knows when none is left

    def __init__(self, name: str | None, size: int = -1) -> None:
        if name is not None and not isinstance(name, str):
            raise BadType(f"the name of a {self._kind} is a string, not {name!r}")
        if name is not None and (not name or len(name) > NAME_CHARS_MAX or name.startswith("~")):
            raise BadValue(f"the name of a {self._kind} has 1 to {NAME_CHARS_MAX} characters and does not begin "
                           f"with '~', not {name[:40]!r}")
        if name is not None:
            check_text(f"the name of a {self._kind}", name)
        session = Current.session
        self._origin = session and session.origin
        if name is None:
            name = "~" + (session.sharing.new_name() if session is not None else os.urandom(16).hex())
            if session is not None and self._kind in KEEPING:
                self._counted = session.sharing.counted(self._kind, name)
        self._name = name
        self._size = size
        if session is not None and not name.startswith("~"):
            self._do(self._ask("open"))

    @property
    def name(self) -> str:
        """By which other code of the program finds it."""
        return self._name

    def __reduce__(self) -> tuple[Any, ...]:
        is_new = self._origin is None
        if self._origin is NOWHERE and Current.session is None:
            return _again, (type(self), self._name, self._size)
        if not is_new:
            session_of(self._origin, self)
        if self._counted is not None and not codec.is_collecting():  # what others pickle is not counted: it stays
            self._sharing().stays(self._counted)
            return _again, (type(self), self._name, self._size)
        return _again, (type(self), self._name, self._size, self._counted, is_new)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._name == self._name

    def __hash__(self) -> int:
        return hash((self._kind, self._name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"

    def _sharing(self) -> Sharing:
        session = session_of(self._origin, self)
        self._origin = session.origin
        return session.sharing

    def _do(self, steps: Steps[T]) -> T:
        return self._sharing().blocking(steps)

    async def _wait_for(self, steps: Steps[T]) -> T:
        return await self._sharing().awaiting(steps)

    def _ask(self, verb: str, limit_s: float | None = None, **more: Any) -> Steps[ShareAnswered]:
        """One question; raises BadValue when what has that name has another size."""
        asked = self._sharing().question(self._kind, self._name, verb, size=self._size, **more)
        answer = yield Ask(asked, limit_s)
        if answer.word == "size":
            size = SIZES[self._kind]
            raise BadValue(f"the {self._kind} {self._name!r} has {size}={answer.count} already, not {self._size}")
        return answer

    def _choose(self, verb: str, limit_s: float | None = None, **more: Any) -> Steps[tuple[ShareAnswered, list[Any]]]:
        """A question whose answer is a choice, which code that runs again gets again; with the items in it."""
        sharing = self._sharing()
        number, before = sharing.recorded(verb == "get" and self._kind == "queue")
        if before is not None:
            answer = msgspec.msgpack.decode(before, type=ShareAnswered)
            return answer, sharing.refs_of(answer)
        answer = yield from self._ask(verb, limit_s, **more)
        found = sharing.refs_of(answer)
        sharing.keep(number, answer)
        sharing.taken(answer)
        return answer, found

    def _count(self, verb: str) -> Steps[int]:
        answer, _ = yield from self._choose(verb)
        return answer.count

    def _change(self, verb: str, *values: Any) -> Steps[None]:
        """A change that is made once, however often its code runs."""
        sharing = self._sharing()
        items = tuple([sharing.packed(value) for value in values])
        key = sharing.key(f"{verb} {self._name}", items)
        yield from self._ask(verb, key=key, items=items)


def _again(
    kind: type[Shared], name: str, size: int, counted: ObjectRef | None = None, is_new: bool = False
) -> Shared:
    """One that was passed on; is_new: it was not used yet."""
    made = kind.__new__(kind)
    made._name, made._size = name, size
    made._origin = Current.session.origin if Current.session is not None else None if is_new else NOWHERE
    made._counted = counted
    return made


def _limit(block: bool, timeout: float | None) -> float | None:
    """How long to wait: 0 for not at all, None for as long as it takes."""
    limit_s = checked_timeout(timeout)
    return limit_s if block else 0.0


class _Permits(Shared):
    """A lock or a semaphore."""

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> int:
        """Have it: gives a token that is larger than all before, or False when `timeout` seconds were not enough.

        Pass the token on to what must not hear late holders. What is held ends with the task or actor that holds it,
        or with its process.
        """
        return self._do(self._acquire(_limit(blocking, timeout)))

    def release(self) -> None:
        """Give it back; raises BadValue when this code does not have it, LockLost when it was taken from it."""
        self._do(self._release())

    async def acquire_async(self, timeout: float | None = None) -> int:  # noqa: ASYNC109 - as without async
        """As acquire, on an event loop."""
        return await self._wait_for(self._acquire(checked_timeout(timeout)))

    async def release_async(self) -> None:
        """As release, on an event loop."""
        await self._wait_for(self._release())

    @property
    def token(self) -> int:
        """The token with which this code holds it; raises BadValue when it does not."""
        hold = self._sharing().held(self._name)
        if hold is None:
            raise BadValue(f"{self!r} is not held here")
        return hold.shown

    def __enter__(self: P) -> P:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    async def __aenter__(self: P) -> P:
        await self.acquire_async()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.release_async()

    def _acquire(self, limit_s: float | None) -> Steps[int]:
        sharing = self._sharing()
        number, before = sharing.recorded(False)
        if before is not None:
            was = msgspec.msgpack.decode(before, type=ShareAnswered)
            if was.word != "ok":
                return False
            if sharing.is_repeated():  # nobody sees what the call does again: others need not wait for it
                sharing.hold(self._name, 0, was.count)
                return was.count
            number, limit_s = -1, None
        answer = yield from self._ask("acquire", limit_s)
        sharing.keep(number, answer)
        if answer.word != "ok":
            return False
        sharing.hold(self._name, answer.count, answer.count)
        sharing.taken(answer)
        return answer.count

    def _release(self) -> Steps[None]:
        sharing = self._sharing()
        hold = sharing.held(self._name)
        if hold is None:
            raise BadValue(f"{self!r} is not held here, so it cannot be released")
        sharing.let_go(self._name, hold)
        number, before = sharing.recorded(False)
        if hold.token:
            answer = yield from self._ask("release", count=hold.token)
        else:
            answer = ShareAnswered(0, "ok" if sharing.is_repeated() else "lost")  # of an earlier process
        if before is None:
            sharing.keep(number, answer)
        else:
            answer = msgspec.msgpack.decode(before, type=ShareAnswered)
        if answer.word == "lost":
            why = "could not be reached for long" if hold.token else "died"
            now = f"; now it is the {answer.text}" if answer.text else ""
            raise LockLost(f"{self!r} was taken from this code, whose process {why}: "
                           f"others may have had it since token {hold.shown}{now}")


P = TypeVar("P", bound=_Permits)


class Lock(_Permits):
    """One at a time, first come first served; not re-entrant. `with lock:`, `async with lock:`, lock.token."""

    _kind = "lock"

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)

    def locked(self) -> bool:
        """Whether somebody has it."""
        return bool(self._do(self._count("count")))

    def _acquire(self, limit_s: float | None) -> Steps[int]:
        sharing = self._sharing()
        hold = sharing.held(self._name)
        if hold is not None and hold.who == sharing.me():
            raise BadValue(f"{self!r} is held by this code already (token {hold.shown}): a Lock is not re-entrant")
        return (yield from super()._acquire(limit_s))


class Semaphore(_Permits):
    """At most `value` at a time: Semaphore(3), Semaphore("downloads", 3); where one has that name, its value counts."""

    _kind = "semaphore"

    def __init__(self, name: str | int | None = None, value: int | None = None) -> None:
        name, value = _name_and_size(name, value, "value")
        super().__init__(name, -1 if value is None else whole("value", value, 1, SIZE_MAX))

    def held(self) -> int:
        """How many permits are held."""
        return self._do(self._count("count"))


def _name_and_size(name: str | int | None, size: int | None, what: str) -> tuple[str | None, int | None]:
    """The size may come first, as in the standard library."""
    if not isinstance(name, int) or isinstance(name, bool):
        return name, size  # type: ignore[return-value]
    if size is not None:
        raise BadType(f"{what} is given twice: {name!r} and {size!r}")
    return None, name


class Queue(Shared):
    """First in, first out, for any number of putters and getters: Queue(), Queue(10), Queue("jobs", maxsize=10).

    Values may hold references; large ones lie in the store. maxsize 0: no limit; where a queue of that name is, its own
    counts. `for item in queue:` gets until the queue is closed. An item that was handed to a process which died before
    its code had it goes to the next; once code has it, it is that code's.
    """

    _kind = "queue"

    def __init__(self, name: str | int | None = None, maxsize: int | None = None) -> None:
        name, maxsize = _name_and_size(name, maxsize, "maxsize")
        super().__init__(name, -1 if maxsize is None else whole("maxsize", maxsize, 0, SIZE_MAX))

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put one in; raises queue.Full when there is no room in time, QueueClosed."""
        self._do(self._put([item], _limit(block, timeout)))

    def put_nowait(self, item: Any) -> None:
        """Put one in if there is room now; else raises queue.Full."""
        self.put(item, False)

    def put_many(self, items: Iterable[Any], timeout: float | None = None) -> None:
        """Put all in, one behind the other, or none of them: raises queue.Full, QueueClosed, BadValue when too many."""
        if isinstance(items, str | bytes) or not isinstance(items, Iterable):
            raise BadType(f"put_many takes a list of items, not {items!r}")
        self._do(self._put(list(items), checked_timeout(timeout)))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take one out; raises queue.Empty when none comes in time, QueueClosed when none will."""
        return self._do(self._get(1, _limit(block, timeout)))[0]

    def get_nowait(self) -> Any:
        """Take one out if one is there; else raises queue.Empty."""
        return self.get(False)

    def get_many(self, count: int, timeout: float | None = None) -> list[Any]:
        """Take out what is there, at most `count` and at least one; raises queue.Empty, QueueClosed."""
        return self._do(self._get(whole("count", count, 1, SIZE_MAX), checked_timeout(timeout)))

    async def put_async(self, item: Any, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as without async
        """As put, on an event loop."""
        await self._wait_for(self._put([item], checked_timeout(timeout)))

    async def get_async(self, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - as without async
        """As get, on an event loop."""
        return (await self._wait_for(self._get(1, checked_timeout(timeout))))[0]

    def qsize(self) -> int:
        """How many items are in it."""
        return self._do(self._count("count"))

    def empty(self) -> bool:
        """Whether none is in it."""
        return not self.qsize()

    def full(self) -> bool:
        """Whether there is no room for one more."""
        return bool(self._do(self._count("full")))

    def close(self) -> None:
        """Nothing more goes in; what is in it can be taken out; twice is harmless."""
        self._do(self._change("close"))

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                item = self.get()
            except QueueClosed:
                return
            yield item

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            try:
                item = await self.get_async()
            except QueueClosed:
                return
            yield item

    def _put(self, values: list[Any], limit_s: float | None) -> Steps[None]:
        sharing = self._sharing()
        items = tuple([sharing.packed(value) for value in values])
        key = sharing.key(f"put {self._name}", items)
        number, before = sharing.recorded(False) if limit_s is not None else (-1, None)
        if before is not None:
            answer = msgspec.msgpack.decode(before, type=ShareAnswered)
        else:
            answer = yield from self._ask("put", limit_s, items=items, key=key)
            sharing.keep(number, answer)
        if answer.word == "closed":
            raise QueueClosed(f"{self!r} is closed: nothing can be put into it")
        if answer.word == "never":
            raise BadValue(f"{len(values)} items never fit into {self!r} with maxsize={answer.count}")
        if answer.word in NOT_NOW:
            raise queue.Full(f"{self!r} has no room")

    def _get(self, count: int, limit_s: float | None) -> Steps[list[Any]]:
        answer, found = yield from self._choose("get", limit_s, count=count)
        if answer.word == "closed":
            raise QueueClosed(f"{self!r} is closed and has no items left")
        if answer.word in NOT_NOW:
            raise queue.Empty(f"{self!r} has no items")
        return self._sharing().loaded(found)


class Event(Shared):
    """Set or not; any number of tasks wait until it is set."""

    _kind = "event"

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)

    def set(self) -> None:
        """Set it: all that wait go on."""
        self._do(self._change("set"))

    def clear(self) -> None:
        """It is not set any more."""
        self._do(self._change("clear"))

    def is_set(self) -> bool:
        """Whether it is."""
        return bool(self._do(self._count("is_set")))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; False when that takes more than `timeout` seconds."""
        return self._do(self._wait(checked_timeout(timeout)))

    async def wait_async(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - as without async
        """As wait, on an event loop."""
        return await self._wait_for(self._wait(checked_timeout(timeout)))

    def _wait(self, limit_s: float | None) -> Steps[bool]:
        answer, _ = yield from self._choose("wait", limit_s)
        return answer.word == "ok"


class Variable(Shared):
    """One value, which may hold references, or none."""

    _kind = "variable"

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)

    def set(self, value: Any) -> None:
        """Give it a value in place of the one that it has."""
        self._do(self._change("set", value))

    def delete(self) -> None:
        """It has no value any more; harmless when it has none."""
        self._do(self._change("delete"))

    def get(self, timeout: float | None = None) -> Any:
        """Its value, waited for; raises GetTimeout when it has none within `timeout` seconds."""
        return self._do(self._get(checked_timeout(timeout)))

    async def get_async(self, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - as without async
        """As get, on an event loop."""
        return await self._wait_for(self._get(checked_timeout(timeout)))

    def _get(self, limit_s: float | None) -> Steps[Any]:
        answer, found = yield from self._choose("get", limit_s)
        if answer.word in NOT_NOW:
            raise GetTimeout(f"{self!r} has no value" + (f" after {limit_s:g} s" if limit_s else ""))
        return self._sharing().loaded(found)[0]
