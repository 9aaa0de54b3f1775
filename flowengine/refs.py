"""ObjectRef: a reference to a value that exists already or will; and StreamOfRefs, the iterator of a streaming task.

Each instance counts: when the last one in any process is gone the value is freed everywhere.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Self

from .core.ids import short
from .core.messages import RefTo
from .errors import StaleSession
from .objects import codec

if TYPE_CHECKING:
    from .runtime.session import Session


class Current:
    """The session of this process; at most one at a time."""

    session: Session | None = None
    forked: bool = False  # this process was forked by user code from one that has a session


def no_session() -> str:
    """Why there is none."""
    if Current.forked:
        return "a forked process has no part in its parent's session: call flowengine.init() here for one of its own"
    return "there is no session: call flowengine.init() first"


class Nowhere:
    """In place of the session in what was unpickled by a process that has none: it can be passed on, and no more.

    To refuse it there would break those who unpickle for others: it ends links of Dask's scheduler and workers.
    """

    why = "it belongs to the session of another process, in which this one has no part: pass on values in its place"


NOWHERE: Any = Nowhere()


def current_session() -> Session:
    """The session, or StaleSession when there is none."""
    if Current.session is None:
        raise StaleSession(no_session())
    return Current.session


class ObjectRef:
    """A reference to one value. Await it, or pass it to flow.get, flow.wait or another remote call."""

    __slots__ = ("__weakref__", "_session", "heir", "oid", "owner")

    def __init__(self, session: Session, oid: bytes, owner: str, heir: str = "") -> None:
        self._session = session
        self.oid = oid
        self.owner = owner
        self.heir = heir

    def __del__(self) -> None:
        try:
            self._session.dropped.append(self.oid)
        except AttributeError:
            return  # it was never made

    def hex(self) -> str:
        """The object's name as hex digits."""
        return self.oid.hex()

    def future(self) -> concurrent.futures.Future[Any]:
        """A standard future of the value; cancelling it ends the waiting, not the task."""
        return checked(self).future_of(self)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self.future()).__await__()

    def __hash__(self) -> int:
        return hash(self.oid)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectRef) and other.oid == self.oid

    def __repr__(self) -> str:
        if self._session is not Current.session:
            whose = "another process's" if self._session is NOWHERE else "an earlier"
            return f"ObjectRef({short(self.oid)}, of {whose} session)"
        return f"ObjectRef({self._session.why(self.oid)})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._session is NOWHERE and Current.session is None:
            return rebuild_ref, (self.oid, self.owner, self.heir)
        checked(self)
        codec.note_ref(self)
        ref = self.to()
        return rebuild_ref, (ref.oid, ref.owner, ref.heir)

    def to(self) -> RefTo:
        """As it travels in messages: the object may have another owner than when the reference was made."""
        session = self._session
        obj = session.owner.objects.get(self.oid)
        if obj is not None and (obj.owner or session.address) != self.owner:
            self.owner, self.heir = (obj.owner, obj.heir) if obj.owner else (session.address, session.heir())
        return RefTo(self.oid, self.owner, self.heir)


def rebuild_ref(oid: bytes, owner: str, heir: str) -> ObjectRef:
    """What unpickling a reference calls."""
    session = Current.session
    return ObjectRef(NOWHERE, oid, owner, heir) if session is None else session.ref_arrived(oid, owner, heir)


def checked(ref: ObjectRef, actor: object = None) -> Session:
    """The ref's session, if it is the current one; raises StaleSession otherwise. actor: whose ref it is."""
    session = ref._session
    if session is not Current.session:
        what = "value" if actor is None else "actor"
        ended = NOWHERE.why if session is NOWHERE else f"its session has ended, the {what} went with it"
        raise StaleSession(f"{actor or ref!r}: {no_session() if Current.forked else ended}")
    return session


class RefIterator(Iterator[ObjectRef]):
    """References one after the other. Also an async iterator, which waits in a thread."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ObjectRef:
        ref: ObjectRef | None = await asyncio.get_running_loop().run_in_executor(None, next, self, None)
        if ref is None:
            raise StopAsyncIteration
        return ref


class CompletedRefs(RefIterator):
    """References in the order in which their values come. Also an async iterator, which waits in a thread."""

    def __init__(self, refs: Iterator[ObjectRef]) -> None:
        self._refs = refs

    def __next__(self) -> ObjectRef:
        return next(self._refs)


class StreamOfRefs(RefIterator):
    """References to what a streaming task yields, in order, each as soon as it is there. Also an async iterator."""

    def __init__(self, session: Session, task: bytes) -> None:
        self._session = session
        self._task = task
        self._taken = 0

    def __next__(self) -> ObjectRef:
        if self._session is not Current.session:
            raise StaleSession("the session of this stream has ended")
        ref = self._session.next_item(self._task, self._taken)
        if ref is None:
            raise StopIteration
        self._taken += 1
        return ref

    def __reduce__(self) -> NoReturn:
        raise TypeError("an iterator of references stays where it was made; pass the references that it gives")

    def __del__(self) -> None:
        try:
            self._session.streams_dropped.append(self._task)
        except AttributeError:
            return

    def __repr__(self) -> str:
        return f"StreamOfRefs({short(self._task)}, {self._taken} taken)"
