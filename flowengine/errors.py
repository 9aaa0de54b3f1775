"""Every error of the engine, and how errors travel between processes.

    FlowError
    ├─ UsageError             the caller's mistake: each concrete one is also a ValueError or a TypeError
    │  ├─ BadValue            also ValueError
    │  │  └─ ConfigError      a limit, or a relation between limits, that cannot hold
    │  ├─ BadType             also TypeError
    │  ├─ AlreadyInitialized  also ValueError
    │  ├─ StaleSession        also ValueError: a ref or handle of an earlier session
    │  └─ SerializationError  also TypeError: names the path to the member that cannot be pickled
    ├─ TaskError              user code raised; also of the type that was raised, where that can be made
    ├─ TaskCancelled          someone asked for it
    ├─ TaskTimeout            ran longer than its timeout_s
    ├─ GetTimeout             also TimeoutError: the result may still come
    ├─ LockLost               whoever releases a lock does not have it any more: its process was taken for dead
    ├─ QueueClosed            no more items go into the queue, and for get: none are left
    ├─ Deadlock               calls wait for each other in a circle: which
    ├─ Lost                   the world's fault, and the retries are used up
    │  ├─ WorkerCrashed       who, host, pid, exit code or signal, attempt n of m, last log lines, what is next
    │  ├─ ActorDied
    │  │  └─ ActorNotFound
    │  ├─ ObjectLost          no copy is left and it cannot be made again: why
    │  └─ HeadLost
    ├─ StoreFull              sizes and path
    ├─ OutOfDisk              sizes and path
    ├─ ReplayDiverged         a replay did something else than the record says: where
    ├─ CollectiveError
    │  ├─ CollectiveMismatch  the ranks did not ask for the same thing
    │  ├─ CollectiveTimeout   a rank did not come
    │  └─ MemberLost          a rank died
    └─ EngineBug              ours; carries the story of what it was about

Errors of user code are packed where they are raised and never fail to arrive: what cannot be rebuilt
arrives as a `Standin` that keeps the name, the text and the attributes in words.
"""
from __future__ import annotations

import functools
import itertools
import pickle
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict, Unpack

import msgspec

from .error_parts import (
    BROKEN,
    HEAP_TYPE_FLAG,
    bare,
    clean,
    dumps,
    fill,
    notes_of,
    portable,
    safe,
    state_of,
)
from .error_parts import shown_bytes as shown_bytes
from .error_parts import signal_of as signal_of

PACKAGE = __file__.removesuffix("errors.py")
LINKS_MAX = 32                  # exceptions kept of one __cause__/__context__ chain
NESTED_MAX = 8                  # tasks that waited for tasks; beyond it the ones in the middle are left out
TRACEBACK_CHARS_MAX = 65_536    # the end is kept: it is next to the fault
TRACEBACK_LINES_SHOWN = 24


class FlowError(Exception):
    """Base of all errors of the engine."""

    def __reduce__(self) -> tuple[Callable[..., FlowError], tuple[bytes]]:
        # Plain pickling would call __init__ with args and lose __cause__: packing keeps both right.
        return unpack_error, (pack_error(self),)


class UsageError(FlowError):
    """The caller's mistake; doing the same again fails again."""


class BadValue(UsageError, ValueError):
    """A value outside of what is allowed."""


class ConfigError(BadValue):
    """A limit, or a relation between limits, that cannot hold."""


class BadType(UsageError, TypeError):
    """A value of a type that is not allowed."""


class AlreadyInitialized(UsageError, ValueError):
    """`init` was called while a session runs in this process."""


class StaleSession(UsageError, ValueError):
    """A ref or handle belongs to a session that has ended."""


class SerializationError(UsageError, TypeError):
    """A value cannot be pickled or unpickled; `path` names the member at fault."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(f"{message} (at {path})" if path and path not in message else message)
        self.path = path


class TaskError(FlowError):
    """User code raised: `cause` is what it raised, `remote_traceback` where, `task` in which task.

    Where the user's exception has an attribute of one of these names, that attribute is kept instead.
    """

    cause: BaseException | None = None
    remote_traceback: str = ""
    task: str = ""
    _origin: tuple[BaseException | None, str, str] = (None, "", "")

    def __init_subclass__(cls, **kwargs: object) -> None:
        # Not passed on: a registry in the user's __init_subclass__ must not see the classes made by wrap().
        return None

    @classmethod
    def wrap(cls, cause: BaseException, remote_traceback: str, task: str) -> TaskError:
        """An error that is a TaskError and, where possible, of the type of `cause`; never raises."""
        try:
            error = _typed_task_error(cause)
        except BROKEN:
            error = TaskError(f"{_type_name(cause)}: {safe(str, cause)}")
        layers = _layers(cause)
        cause = layers[-1] if len(layers) > NESTED_MAX else cause
        own = error.__dict__
        for name, value in (("cause", cause), ("remote_traceback", remote_traceback), ("task", task)):
            own.setdefault(name, value)
        own["_origin"] = (cause, remote_traceback, task)
        error.__cause__ = cause
        return error

    def __str__(self) -> str:
        cause, remote_traceback, task = self._origin
        if cause is None:
            return Exception.__str__(self)
        root = _layers(cause)[-1]     # of a task that waited for a task: its own text would repeat the tracebacks
        text = safe(str, root)
        if type(self) is TaskError:
            text = f"{_type_name(root)}: {text}"
        if not remote_traceback:
            return text
        lines = remote_traceback.rstrip().splitlines()[-TRACEBACK_LINES_SHOWN:]
        return "\n".join([text, f"remote traceback of task {task}:", *("  " + line for line in lines)])

    def __repr__(self) -> str:
        cause, _, task = self._origin
        return Exception.__repr__(self) if cause is None else f"<TaskError in {task}: {safe(repr, cause)}>"


class TaskCancelled(FlowError):
    """The task was cancelled."""


class TaskTimeout(FlowError):
    """The task ran longer than its `timeout_s`."""


class GetTimeout(FlowError, TimeoutError):
    """A result did not come in time; it may still come."""


class LockLost(FlowError):
    """The lock was taken from its holder, whose process died or was not to be reached; others may have had it since."""


class QueueClosed(FlowError):
    """The queue was closed: nothing more can be put, and for a get nothing is left."""


class Deadlock(FlowError):
    """Calls of actors wait for each other in a circle; names them. Raised in one of them, so that the others go on."""


class DeathFields(TypedDict, total=False):
    """What is known of a death; every field may be missing."""

    who: str
    host: str
    pid: int
    exit_code: int | None
    signal_name: str
    attempt: int
    attempts_max: int
    log_lines: Sequence[str]
    what_next: str


class Lost(FlowError):
    """Something is gone for good: the retries are used up or were not allowed."""

    what = "it"

    def __init__(self, message: str = "", **fields: Unpack[DeathFields]) -> None:
        unknown = sorted(fields.keys() - DeathFields.__annotations__.keys())
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(unknown)}")
        self.who: str = fields.get("who", "")
        self.host: str = fields.get("host", "")
        self.pid: int = fields.get("pid", 0)
        self.exit_code: int | None = fields.get("exit_code")
        self.signal_name: str = fields.get("signal_name", "") or signal_of(self.exit_code)
        self.attempt: int = fields.get("attempt", 0)
        self.attempts_max: int = fields.get("attempts_max", 0)
        self.log_lines: tuple[str, ...] = tuple(fields.get("log_lines", ()))
        self.what_next: str = fields.get("what_next", "")
        super().__init__(self._account(message, known=bool(fields)))

    def _account(self, message: str, known: bool) -> str:
        parts = [message] if message else []
        if known or not message:
            parts.append(self._place() + self._manner() + self._count())
        if self.log_lines:
            parts.append("its last log lines:\n" + "\n".join("  " + line for line in self.log_lines))
        if self.what_next:
            parts.append(f"next: {self.what_next}")
        text = parts[0]
        for before, part in itertools.pairwise(parts):
            text += ("\n" if "\n" in before or "\n" in part else "; ") + part
        return text

    def _place(self) -> str:
        place = [f"on host {self.host}"] if self.host else []
        if self.pid:
            place.append(f"pid {self.pid}")
        subject = f"{self.what} {self.who}".rstrip()
        return f"{subject} ({', '.join(place)})" if place else subject

    def _manner(self) -> str:
        if self.signal_name:
            return f" was killed by {self.signal_name}"
        if self.exit_code is not None:
            return f" ended with exit code {self.exit_code}"
        return " is lost"

    def _count(self) -> str:
        most = f" of {self.attempts_max}" if self.attempts_max else ""
        return f", attempt {self.attempt}{most}" if self.attempt else ""


class WorkerCrashed(Lost):
    """The process that ran a task ended before the task did; `who` is the task."""

    what = "the worker that ran"


class ActorDied(Lost):
    """The actor is dead and does not come back; `who` is the actor."""

    what = "actor"


class ActorNotFound(ActorDied):
    """No living actor has that name."""


class ObjectLost(Lost):
    """No copy of the object is left, and it cannot be made again."""

    what = "object"


class HeadLost(Lost):
    """The head of the cluster is gone."""

    what = "head"


class _Full(FlowError):
    """Something of a fixed size is full."""

    def __init__(self, message: str, *, needed_bytes: int = 0, used_bytes: int = 0, limit_bytes: int = 0,
                 path: str = "") -> None:
        self.needed_bytes, self.used_bytes, self.limit_bytes, self.path = needed_bytes, used_bytes, limit_bytes, path
        sizes = [f"{word} {shown_bytes(size)}" for word, size in
                 (("needed", needed_bytes), ("used", used_bytes), ("limit", limit_bytes)) if size]
        parts = [message, ", ".join(sizes), f"path {path}" if path else ""]
        super().__init__("; ".join(part for part in parts if part))


class StoreFull(_Full):
    """The object store cannot take the object."""


class OutOfDisk(_Full):
    """A disk that the engine writes to is full."""


class ReplayDiverged(FlowError):
    """A replay did something else than the record says; the text says where."""


class CollectiveError(FlowError):
    """A collective operation failed, on every rank in the same way."""


class CollectiveMismatch(CollectiveError):
    """The ranks did not ask for the same operation; lists what each gave."""


class CollectiveTimeout(CollectiveError):
    """A rank did not come in time; names it."""


class MemberLost(CollectiveError):
    """A member of the group died; names its rank."""


class EngineBug(FlowError):
    """The engine broke a law of its own; `story` tells what happened before."""

    def __init__(self, message: str, *, story: Sequence[str] = ()) -> None:
        self.story = tuple(story)
        super().__init__("\n".join([message, *("  " + line for line in self.story)]))


class Standin(Exception):
    """Takes the place of an exception that cannot be rebuilt here."""

    def __init__(self, type_name: str, text: str, shown: str, attributes: dict[str, str]) -> None:
        super().__init__(type_name, text, shown, attributes)
        self.type_name, self.text, self.shown, self.attributes = type_name, text, shown, attributes

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.shown


class Link(msgspec.Struct, frozen=True):
    """One exception of a chain; `cause` and `context` are places in the chain, -1 for none."""

    type_name: str
    text: str
    shown: str
    attributes: dict[str, str]
    blob: bytes | None
    cause: int
    context: int
    suppress_context: bool


class Packed(msgspec.Struct, frozen=True):
    """An error on its way; without a task it is an error of the engine itself and arrives as it is."""

    links: list[Link]
    task: str | None
    remote_traceback: str
    notes: list[str]


def traceback_text(error: BaseException) -> str:
    """The traceback of an error in words, its end when it is long, without the engine's own frames; never raises."""
    try:
        told = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
        _leave_out_own_frames(told, error)
        text = "".join(told.format())
    except BROKEN:
        text = f"{_type_name(error)}: {safe(str, error)}\n"
    return text[-TRACEBACK_CHARS_MAX:]


def _leave_out_own_frames(told: traceback.TracebackException, error: BaseException) -> None:
    """The way to the user's code goes, and what comes after it where the engine raised the error on purpose."""
    pairs: list[tuple[traceback.TracebackException | None, BaseException | None]] = [(told, error)]
    for part, link in pairs:        # grows while it is read, as the chain of causes
        if part is None or link is None:
            continue
        users = [place for place, frame in enumerate(part.stack) if not frame.filename.startswith(PACKAGE)]
        if users:
            end = users[-1] + 1 if isinstance(link, FlowError) else len(part.stack)
            part.stack = traceback.StackSummary.from_list(part.stack[users[0]:end])
        pairs += [(part.__cause__, link.__cause__), (part.__context__, link.__context__)]


def pack_error(error: BaseException, task: str | None = None, remote_traceback: str = "") -> bytes:
    """An error as bytes; with `task` it is what user code raised, without it an error of the engine; never fails."""
    notes: list[str] = []
    if isinstance(error, TaskError) and task is None:
        cause, own_traceback, own_task = error._origin
        if cause is not None:
            notes = [clean(str(note)) for note in notes_of(error)]
            error, task, remote_traceback = cause, own_task, remote_traceback or own_traceback
    elif task is None and not isinstance(error, FlowError):
        task = "?"
    chain = _chain(error)
    links = [_pack_link(link, chain) for link in chain]
    tail = clean(remote_traceback)[-TRACEBACK_CHARS_MAX:]
    return msgspec.msgpack.encode(Packed(links, None if task is None else clean(task), tail, notes))


def error_line(blob: bytes) -> str:
    """What a packed error says, on one line, without making the error; never raises."""
    try:
        first = msgspec.msgpack.decode(blob, type=Packed).links[0]
    except (msgspec.MsgspecError, IndexError) as broken:
        return f"an error that cannot be read: {broken}"
    return " ".join(f"{first.type_name}: {first.text}".split())


def unpack_error(blob: bytes) -> FlowError:
    """The error that was packed; whatever cannot be rebuilt arrives as a Standin; never raises."""
    try:
        packed = msgspec.msgpack.decode(blob, type=Packed)
        chain = [_build_link(link) for link in packed.links]
        for error, link in zip(chain, packed.links, strict=True):
            error.__cause__ = chain[link.cause] if link.cause >= 0 else None
            error.__context__ = chain[link.context] if link.context >= 0 else None
            error.__suppress_context__ = link.suppress_context
        first = chain[0]
    except BROKEN as broken:
        return EngineBug(f"an error arrived that cannot be read: {_type_name(broken)}: {safe(str, broken)}")
    if packed.task is None and isinstance(first, FlowError):
        return first
    if packed.task is None:
        return FlowError(f"{packed.links[0].type_name}: {packed.links[0].text}")
    wrapped = TaskError.wrap(first, packed.remote_traceback, packed.task)
    if packed.notes:
        wrapped.__notes__ = packed.notes
    return wrapped


# ---- the types of wrapped errors -----------------------------------------------------------------


def _typed_task_error(cause: BaseException) -> TaskError:
    """An error of both types, built without any code of the user; raises when that cannot be done."""
    seen = _layers(cause)[-1]
    native: Any = type(seen)
    unfit = (Standin, StopIteration, StopAsyncIteration)        # the last two are no errors to loops and futures
    if not issubclass(native, Exception) or issubclass(native, unfit) or issubclass(TaskError, native):
        return TaskError(f"{_type_name(seen)}: {safe(str, seen)}")
    error = bare(_task_error_type(native), seen.args)
    if not isinstance(error, TaskError):
        raise TypeError(f"{native.__name__} cannot be combined with TaskError")
    fill(error, seen.args, state_of(seen))
    return error


def _layers(error: BaseException) -> list[BaseException]:
    """The error and what it wraps, down to what user code raised first in tasks that waited for each other."""
    layers = [error]
    while isinstance(layers[-1], TaskError) and layers[-1]._origin[0] is not None:
        layers.append(layers[-1]._origin[0])
    return layers


@functools.lru_cache(maxsize=1024)
def _task_error_type(native: Any) -> type[TaskError]:
    name = f"TaskError({native.__name__})"
    return types.new_class(name, (TaskError, native), {}, lambda body: body.update(__module__=__name__))


# ---- packing ---------------------------------------------------------------------------------------


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what its __cause__ and __context__ lead to, each once, at most LINKS_MAX."""
    chain = [error]
    for link in chain:              # grows while it is read: breadth first
        if len(_layers(link)) > 1:
            continue                # pickles with its own chain; to follow it here too would double it at each nesting
        for other in (link.__cause__, link.__context__):
            if other is not None and len(chain) < LINKS_MAX and not any(other is known for known in chain):
                chain.append(other)
    return chain


def _pack_link(error: BaseException, chain: list[BaseException]) -> Link:
    blob = _blob(error)
    return Link(
        type_name=_type_name(error),
        text=safe(str, error),
        shown=safe(repr, error),
        attributes={clean(str(name)): safe(repr, value) for name, value in error.__dict__.items()},
        blob=blob,
        cause=_place(error.__cause__, chain),
        context=_place(error.__context__, chain),
        suppress_context=error.__suppress_context__,
    )


def _place(error: BaseException | None, chain: list[BaseException]) -> int:
    return next((place for place, link in enumerate(chain) if link is error), -1)


def _blob(error: BaseException) -> bytes | None:
    """The first way of pickling that was seen to work here, or None."""
    for attempt, checks_text in _ways(error):
        try:
            blob = attempt()
            back = _load(blob)
            if type(back) is type(error) and (not checks_text or safe(str, back) == safe(str, error)):
                return blob
        except BROKEN:
            continue
    return None


def _ways(error: BaseException) -> Iterator[tuple[Callable[[], bytes], bool]]:
    """Ways of pickling, best first, each with whether code of the user takes part and its text must be compared."""
    if len(_layers(error)) > 1:
        yield lambda: dumps(error), False
        return
    if _pickles_itself(type(error)):
        yield lambda: dumps(error), True
    yield lambda: dumps((type(error), _args(error), state_of(error))), False
    # The type is worth more than an attribute that cannot travel (a lock, a socket): that one goes in words.
    yield lambda: dumps((type(error), tuple(portable(arg) for arg in error.args),
                          {name: portable(value) for name, value in state_of(error).items()})), False


def _args(error: BaseException) -> tuple[object, ...]:
    """Its args; each member of a group in the way that works for it."""
    if not isinstance(error, BaseExceptionGroup):
        return error.args
    words = (Standin(_type_name(one), safe(str, one), safe(repr, one), {}) for one in error.exceptions)
    return error.message, [_blob(one) or dumps(word) for one, word in zip(error.exceptions, words, strict=True)]


def _pickles_itself(kind: type[BaseException]) -> bool:
    """Whether the author of the class took pickling into his own hands."""
    own = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
    classes = [base for base in kind.__mro__ if base.__flags__ & HEAP_TYPE_FLAG and base.__module__ != __name__]
    return any(name in vars(base) for base in classes for name in own)


def _load(blob: bytes) -> BaseException:
    loaded: Any = pickle.loads(blob)
    if isinstance(loaded, BaseException):
        return loaded
    kind, args, state = loaded
    if issubclass(kind, BaseExceptionGroup):
        args = args[0], [_load(member) for member in args[1]]
    error = bare(kind, args)
    fill(error, args, state)
    return error


def _build_link(link: Link) -> BaseException:
    if link.blob is not None:
        try:
            return _load(link.blob)
        except BROKEN:
            pass                    # its module is missing here, or differs: the record tells the rest
    return Standin(link.type_name, link.text, link.shown, link.attributes)


def _type_name(error: BaseException) -> str:
    return clean(error.type_name if isinstance(error, Standin) else type(error).__qualname__)
