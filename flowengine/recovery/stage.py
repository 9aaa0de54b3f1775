"""Stands in for the session while recorded code runs in this process: what it asks of the engine changes nothing.

What the record knows is given back: choices, values, results of children. A child that it does not know runs here
too, at once and in the caller's thread, and so does an actor that the code makes. A call of any other actor is answered
with what that actor answered then; it is never called again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import inspect
from bdb import BdbQuit
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.config import Config
from flowengine.core import messages as m
from flowengine.core.bundles import bundle_of, index_of
from flowengine.core.ids import child_id, object_id, short, task_of
from flowengine.errors import (
    BadValue,
    FlowError,
    ObjectLost,
    ReplayDiverged,
    TaskError,
    pack_error,
    traceback_text,
    unpack_error,
)
from flowengine.objects import codec
from flowengine.recovery.record import (
    Choices,
    Piece,
    Record,
    ReplyTold,
    TaskRecord,
    arguments_of,
    choices_of,
    decoded,
    objects_of,
    owners_of,
    task_record,
)
from flowengine.recovery.rehearsal import Rehearsal
from flowengine.refs import ObjectRef
from flowengine.runtime.context import Context
from flowengine.slots import as_results, fill_slots

if TYPE_CHECKING:
    from flowengine.runtime.driver import DriverSession

ADDRESS = "replay"  # of what replayed code owns
FETCH_S = 20.0
QUESTIONS = ("stats", "nodes", "resources", "alive", "worker_of")  # asked of the cluster beneath; they change nothing
HERE: contextvars.ContextVar[Context] = contextvars.ContextVar("flowengine_replayed")
CODE_ERRORS = (Exception, SystemExit, GeneratorExit)  # what a task may raise; a debugger is left with another


class Nowhere:
    """An endpoint whose messages reach nobody."""

    address = ADDRESS

    def send(self, to: str, message: Any, urgent: bool = True) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""


class Books(msgspec.Struct):
    """An owner that knows of nothing."""

    objects: dict[bytes, Any] = {}
    dead: dict[str, None] = {}
    gangs: dict[str, Any] = {}


class Replayed(Context):
    """A task or call whose code runs again; its children are numbered as they were."""

    def __init__(self, spec: m.TaskSpec, run: int, recorded: Choices, numbers: dict[bytes, int]) -> None:
        super().__init__(spec.id, spec.name, run, "", spec.depth + 1)
        self.recorded = choices_of(recorded)
        self.numbers = numbers
        self.environment = spec.environment

    def new_child(self) -> bytes:
        """The name of the next child; its place among them is remembered."""
        number = next(self.children)
        task = child_id(self.task, number)
        self.numbers[task] = number
        return task


class Settings(msgspec.Struct):
    """Of a worker, as far as flow.context() tells of them."""

    worker_id: str = ADDRESS


class Stage:
    """What the engine's verbs find in place of a session."""

    role = "worker"
    places = False
    gpu_ids: tuple[int | str, ...] = ()
    closed = False
    address = ADDRESS
    membership = None  # the other members of groups are not here

    def __init__(self, record: Record, beneath: DriverSession | None) -> None:
        """beneath: the session that the values of a record come from; None: all that is known is in the record."""
        self.beneath = self.origin = beneath  # handles are of the program, not of its replay
        config = beneath.config if beneath is not None else Config()
        self.config = msgspec.structs.replace(config, inline_bytes_max=record.told.inline_bytes_max)
        self.node = beneath.node if beneath is not None else ""
        self.node_id = beneath.node_id if beneath is not None else ""
        self.head = beneath.head if beneath is not None else ""
        self.session_name = beneath.session_name if beneath is not None else ADDRESS
        self.settings = Settings()
        self.endpoint = Nowhere()
        self.owner = Books()
        self.dropped: deque[bytes] = deque(maxlen=0)
        self.streams_dropped: deque[bytes] = deque(maxlen=0)
        self.known: dict[bytes, m.Value] = objects_of(record)
        self.refs: dict[bytes, m.RefTo] = owners_of(record)
        self.names: dict[bytes, str] = dict(record.names) if isinstance(record, TaskRecord) else {}
        self.numbers: dict[bytes, int] = {}  # children that were made, by their places among their parent's
        self.shape = record.told.spec.shape
        self.root = Replayed(record.told.spec, record.told.run, (), self.numbers)
        self.functions: dict[bytes, Any] = {}
        self.streams: dict[bytes, Iterator[Any]] = {}
        self.actors: dict[bytes, Any] = {}  # those that the code makes; an exception: its constructor raised it
        self.held: list[ObjectRef] = []  # of the session beneath: values that are views of its store
        self.strict: dict[bytes, None] = {}  # tasks and calls all of whose choices are in the record
        self.diverged = ""
        self.sharing = Rehearsal(self)
        self.is_actor = not isinstance(record, TaskRecord)

    # --- whose code runs ---------------------------------------------------------------------------------

    def gang_rank(self) -> int | None:
        """The bundle in which the code ran."""
        bundle = bundle_of(self.shape)
        return index_of(bundle) if bundle else None

    @property
    def context(self) -> Context:
        """The task or call whose code runs in this thread or coroutine."""
        return HERE.get(self.root)

    @contextlib.contextmanager
    def within(self, context: Context) -> Iterator[None]:
        """The block is code of this task or call."""
        before = HERE.set(context)
        try:
            yield
        finally:
            HERE.reset(before)

    def context_of(self, spec: m.TaskSpec, run: int, recorded: Choices = ()) -> Replayed:
        """As the code of a task finds it."""
        return Replayed(spec, run, recorded, self.numbers)

    def diverge(self, where: str) -> None:
        """The code did something else than the record says; the first time is told."""
        self.diverged = self.diverged or where
        raise ReplayDiverged(where)

    def check_ended(self, context: Context) -> None:
        """The code has come to its end: it should have made all choices and children that the record has."""
        last: dict[str, int] = {}
        for kind, number in context.recorded:
            last[kind] = max(number, last.get(kind, 0))
        for kind, number in last.items():
            made = context.next_choice(kind)
            if number >= made:
                self.diverge(f"the record has {number + 1} of flow.{kind}, the replay {made}")
        if context.task == self.root.task:
            for task, name in self.names.items():
                if task not in self.numbers:
                    self.diverge(f"the record has a child {name} {short(task)} that the replay did not make")

    # --- what code is run with ------------------------------------------------------------------------------

    def function(self, name: bytes, blob: bytes | None) -> Any:
        """The function or class behind a name."""
        if name not in self.functions:
            if not blob:
                raise BadValue("a function is needed that is not in the record")
            try:
                self.functions[name] = codec.from_inline(blob)
            except ModuleNotFoundError as error:
                raise BadValue(f"{error}: start the replay where the program's own modules are found, for example in "
                               "its folder, or set PYTHONPATH") from error
        return self.functions[name]

    def arguments(self, spec: m.TaskSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with the values of references in their slots."""
        values = [self.load(ref.oid) for ref in arguments_of(spec)]
        if spec.args_object is not None:
            args, kwargs = values.pop()
        elif spec.args:
            args, kwargs = codec.from_inline(spec.args)  # type: ignore[misc]
        else:
            return tuple(values), {}
        return fill_slots(args, kwargs, values)

    # --- values ----------------------------------------------------------------------------------------------

    def keep(self, oid: bytes, value: Any) -> None:
        """A value that the code made."""
        self.known[oid] = m.Inline(codec.to_inline(codec.pack(value)))

    def load(self, oid: bytes, copy: bool = False) -> Any:
        """The value of an object; raises its error."""
        value = self.known.get(oid)
        if value is None or type(value) is m.Stored:
            try:
                return self.fetch(oid, copy)
            except ObjectLost:
                value = self.known.get(oid) if self.made_again(task_of(oid)) else None
                if value is None:
                    raise
        if type(value) is m.Failed:
            raise unpack_error(value.error)
        assert type(value) is m.Inline
        return codec.from_inline(value.blob, copy)

    def fetch(self, oid: bytes, copy: bool) -> Any:
        """A value from the session beneath."""
        ref = self.refs.get(oid)
        if self.beneath is None or ref is None or not ref.owner:
            why = "nobody has it any more" if self.beneath is not None else "it went with the session"
            raise ObjectLost(f"the value of {short(oid)} is not in the record: {why}")
        real = self.beneath.ref_arrived(oid, ref.owner, ref.heir)
        self.held.append(real)
        return self.beneath.get_one(real, FETCH_S, copy)

    def made_again(self, task: bytes) -> bool:
        """Whether a value that is gone could be made again, by running its task here."""
        record = task_record(self.ask_record(task.hex()), task)
        if record is None:
            return False
        self.known = {**objects_of(record), **self.known}
        self.refs.update(owners_of(record))
        told = record.told
        for index in range(max(told.spec.num_returns, 1)):
            self.known.pop(object_id(task, index), None)
        self.run_child(told.spec, told.function, told.recorded)
        return True

    def ask_record(self, digits: str) -> list[Piece]:
        """What processes of the session beneath know of a task."""
        return self.beneath.ask_record(digits) if self.beneath is not None else []

    def get(self, refs: Sequence[ObjectRef], timeout: float | None, copy: bool) -> list[Any]:
        """The values, in order; they are there."""
        return [self.load(ref.oid, copy) for ref in refs]

    def get_one(self, ref: ObjectRef, timeout: float | None, copy: bool) -> Any:
        """The value of one reference."""
        return self.load(ref.oid, copy)

    def future_of(self, ref: ObjectRef) -> concurrent.futures.Future[Any]:
        """A future that has ended."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(self.load(ref.oid))
        except CODE_ERRORS as error:
            future.set_exception(error)
        return future

    def put_packed(self, packed: codec.Packed, durable: bool = False) -> ObjectRef:
        """A new value of the running code."""
        oid = object_id(self.new_child(), 0)
        self.check_child(task_of(oid), "put a value")
        self.known[oid] = m.Inline(codec.to_inline(packed))
        return ObjectRef(self, oid, ADDRESS)  # type: ignore[arg-type]

    def ref_arrived(self, oid: bytes, owner: str, heir: str) -> ObjectRef:
        """A reference was unpickled here."""
        if owner and owner != ADDRESS:
            self.refs.setdefault(oid, m.RefTo(oid, owner, heir))
        return ObjectRef(self, oid, owner, heir)  # type: ignore[arg-type]

    ref_found = ref_arrived

    def heir(self) -> str:
        """Nobody."""
        return ""

    def why(self, oid: bytes) -> str:
        """One line about an object."""
        value = self.known.get(oid)
        state = "in a store" if value is None or type(value) is m.Stored else "ready"
        return f"{short(oid)} {'failed' if type(value) is m.Failed else state}, replayed"

    # --- children -----------------------------------------------------------------------------------------------

    def new_child(self) -> bytes:
        """The name of the next child of the running code."""
        return self.context.new_child()

    def check_child(self, task: bytes, does: str) -> None:
        """Compare a child with the one that the record has in its place."""
        name = self.names.get(task)
        if name is not None and does != f"called {name}":
            self.diverge(f"child {self.numbers[task]}: the record says {name}(...), the replay {does}")

    def submit(self, spec: m.TaskSpec, blob: bytes | None) -> None:
        """A child: what the record has of it, else it runs here and now."""
        self.check_child(spec.id, f"called {spec.name}")
        if spec.actor is not None:
            self.call(spec)
        elif spec.life is not None:
            self.make_actor(spec, blob)
        elif spec.num_returns < 0:
            self.streams[spec.id] = self.stream(spec, blob)
        elif not all([object_id(spec.id, index) in self.known for index in range(spec.num_returns)]):
            self.run_child(spec, blob)

    def run_child(self, spec: m.TaskSpec, blob: bytes | None, recorded: Choices = ()) -> None:
        """Run a task; its results are values from then on."""
        with self.within(self.context_of(spec, 1, recorded)):
            try:
                args, kwargs = self.arguments(spec)
                self.keep_results(spec, self.function(spec.function, blob)(*args, **kwargs))
            except CODE_ERRORS as error:
                self.keep_error(spec, error)

    def keep_results(self, spec: m.TaskSpec, result: Any) -> None:
        """What a task or call gave, as so many values as it was asked for."""
        results = [result] if spec.num_returns == 1 else []
        if spec.num_returns < 0:
            results = list(result)
        elif spec.num_returns > 1:
            results = as_results(result, spec.num_returns, spec.name)
        for index, value in enumerate(results):
            self.keep(object_id(spec.id, index), value)

    def keep_error(self, spec: m.TaskSpec, error: BaseException) -> None:
        """A task or call raised."""
        if isinstance(error, ReplayDiverged | BdbQuit):
            raise error
        failed = m.Failed(pack_error(error, spec.name, traceback_text(error)))
        for index in range(max(spec.num_returns, 1)):
            self.known[object_id(spec.id, index)] = failed

    def stream(self, spec: m.TaskSpec, blob: bytes | None) -> Iterator[Any]:
        """The items of a child that is a generator, made as they are asked for."""
        context = self.context_of(spec, 1)
        with self.within(context):
            args, kwargs = self.arguments(spec)
            items = iter(self.function(spec.function, blob)(*args, **kwargs))
        while True:
            with self.within(context):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item

    def next_item(self, task: bytes, index: int) -> ObjectRef | None:
        """The index-th item of a stream; None at its end; raises its error."""
        oid = object_id(task, index)
        try:
            self.keep(oid, next(self.streams[task]))
        except StopIteration:
            return None
        except CODE_ERRORS as error:
            if isinstance(error, FlowError):
                raise
            raise TaskError.wrap(error, traceback_text(error), "a stream") from error
        return ObjectRef(self, oid, ADDRESS)  # type: ignore[arg-type]

    # --- actors -------------------------------------------------------------------------------------------------

    def make_actor(self, spec: m.TaskSpec, blob: bytes | None) -> None:
        """An actor that the code makes lives here."""
        with self.within(self.context_of(spec, 1)):
            try:
                args, kwargs = self.arguments(spec)
                self.actors[spec.id] = self.function(spec.function, blob)(*args, **kwargs)
            except CODE_ERRORS as error:
                self.actors[spec.id] = error

    def call(self, spec: m.TaskSpec) -> None:
        """A call: of an actor that was made here it runs, any other has answered it long ago."""
        assert spec.actor is not None
        if task_of(spec.actor.oid) in self.actors:
            self.call_here(spec, self.actors[task_of(spec.actor.oid)])
            return
        if all([object_id(spec.id, index) in self.known for index in range(max(spec.num_returns, 1))]):
            return
        answer = self.answer_of(spec.id)
        if isinstance(answer, m.TaskDone) and answer.values:
            self.known.update({object_id(spec.id, index): value for index, value in enumerate(answer.values)})
        elif isinstance(answer, m.TaskFailed):
            self.known[object_id(spec.id, 0)] = m.Failed(answer.error, answer.kind)
        else:
            why = "its reply is not in the record, and a replay calls no actor that others use"
            self.keep_error(spec, ObjectLost(f"call {spec.name} {short(spec.id)}: {why}"))

    def answer_of(self, call: bytes) -> m.TaskDone | m.TaskFailed | None:
        """What an actor answered then."""
        if self.beneath is None:
            return None
        told = decoded(self.beneath.ask(self.beneath.node, "reply", call))
        return next((piece.answer for piece in told if isinstance(piece, ReplyTold)), None)

    def call_here(self, spec: m.TaskSpec, instance: Any) -> None:
        if isinstance(instance, BaseException):
            self.keep_error(spec, instance)
            return
        with self.within(self.context_of(spec, 1)):
            try:
                args, kwargs = self.arguments(spec)
                result = awaited(getattr(instance, spec.function.decode())(*args, **kwargs))
                if spec.num_returns < 0:
                    self.streams[spec.id] = iter(result)
                else:
                    self.keep_results(spec, result)
            except CODE_ERRORS as error:
                self.keep_error(spec, error)

    # --- choices ------------------------------------------------------------------------------------------------

    def choice(self, kind: str) -> bytes | None:
        """The recorded choice that is next; None when the code is to choose."""
        context = self.context
        number = context.next_choice(kind)
        before = context.recorded.get((kind, number))
        if before is None and context.task in self.strict:
            self.diverge(missing(context, kind, number))
        return before

    def choose_ready(
        self, oids: Sequence[bytes], count: int, limit_s: float | None, every: bool = False
    ) -> list[bytes]:
        """The refs that were ready then; else as many as were asked for."""
        before = self.choice("wait")
        if before is None:
            return list(oids if every else oids[:count])
        chosen: list[int] = msgspec.msgpack.decode(before)
        if any(index >= len(oids) for index in chosen):
            self.diverge(f"flow.wait of {self.context.name}: the record chose among more refs than {len(oids)}")
        return [oids[index] for index in chosen]

    def recorded_call(self, function: Callable[[], Any]) -> Any:
        """The value that the function gave then; one that raised is run again, as nothing was recorded of it."""
        if self.context.is_recording():
            return function()
        context = self.context
        number = context.next_choice("record")
        before = context.recorded.get(("record", number))
        if before is not None:
            return codec.from_inline(before)
        value = context.outside(function)
        if context.task in self.strict:
            self.diverge(missing(context, "record", number))
        return value

    def time_is_over(self, oids: Sequence[bytes], timeout: float | None) -> None:
        """Every value is there."""

    def commit(self) -> None:
        """Nothing that the code does has an effect."""

    # --- the rest -----------------------------------------------------------------------------------------------

    def step(self, event: Any) -> None:
        """Cancelling, freeing and the like have no effect."""

    def ask(self, to: str, topic: str, argument: Any = None, scope: str = "cluster", timeout_s: float = 5.0) -> Any:
        """Questions about the cluster go to the session beneath."""
        if self.beneath is None or topic not in QUESTIONS:
            raise FlowError(f"a replay cannot ask about {topic}")
        return self.beneath.ask(to, topic, argument, scope, timeout_s)

    def ask_head(self, topic: str, argument: Any) -> Any:
        """Names of actors: they can be found, and are given to none."""
        if topic != "name.get" or self.beneath is None:
            return True if topic == "name.claim" else None
        return self.beneath.ask_head(topic, argument)

    def check_open(self) -> None:
        """It is."""

    def at_point(self, point: str, what: bytes = b"") -> None:
        """No harm is done to a replay."""


def missing(context: Context, kind: str, number: int) -> str:
    """The record has no choice of this number."""
    return f"flow.{kind} number {number + 1} of {context.name}: the record has only {number}"


def awaited(result: Any) -> Any:
    """The result of a method, whether it is a coroutine or not; a loop that runs in this thread is left alone."""
    if not inspect.isawaitable(result):
        return result

    async def end(coroutine: Awaitable[Any]) -> Any:
        return await coroutine

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(end(result))
    context = contextvars.copy_context()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(context.run, asyncio.run, end(result)).result()
