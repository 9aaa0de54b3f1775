"""Time travel: a task or an actor runs again in this process, from its record, and is compared with that."""

from __future__ import annotations

import asyncio
import bdb
import contextlib
import functools
import inspect
import pdb
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from flowengine.core import messages as m
from flowengine.core.ids import object_id, short
from flowengine.errors import BadValue, ObjectLost, ReplayDiverged, TaskError, UsageError, unpack_error
from flowengine.objects import codec, state
from flowengine.recovery import record as r
from flowengine.recovery.compare import difference, error_difference, root_of, shown, told_of
from flowengine.recovery.durable import split
from flowengine.recovery.records import with_copies, write_record
from flowengine.recovery.stage import CODE_ERRORS, FETCH_S, Stage, awaited
from flowengine.refs import Current
from flowengine.runtime.actor import ExitActor
from flowengine.runtime.actor_state import Files
from flowengine.runtime.context import Context
from flowengine.runtime.environment import Within
from flowengine.slots import as_results

if TYPE_CHECKING:
    from flowengine.runtime.driver import DriverSession
    from flowengine.runtime.session import Session

OWN_FOLDER = str(Path(__file__).parent.parent)
INSTEAD = "debug=False to run through, or a debugger of your own, debug=pdb.Pdb(...)"  # of a terminal
Ask = Callable[[str], list[r.Piece]]


class Found(msgspec.Struct):
    """What is to be replayed; call: of the actor, up to which; pieces: of which the record was made."""

    record: r.Record
    call: bytes
    pieces: list[r.Piece]

    @property
    def name(self) -> str:
        """As people read it."""
        return f"{self.record.told.spec.name} {short(self.call or self.record.told.spec.id)}"


class Left(BaseException):
    """The debugger was left before the code had ended."""


# --- finding ----------------------------------------------------------------------------------------------------


def find(ask: Ask, digits: str) -> Found:
    """What begins with these digits; raises BadValue when that is nothing, or more than one."""
    pieces = ask(digits)
    names = r.named(pieces, digits)
    if any(isinstance(piece, r.CallsTold) and piece.older for piece in pieces):
        raise BadValue(f"the call {digits} cannot be replayed: a checkpoint of its actor covers it, and the calls "
                       "between an older one and it are not remembered any more")
    if not names:
        raise BadValue(f"nobody has a record of {digits}: tasks that failed are kept, others as long as there are "
                       "references to their results, actors as long as there are handles, and for some time longer")
    if len(names) > 1:
        raise BadValue(f"{digits} may be {', '.join(short(name) for name in names[:5])}: give more digits")
    task = r.task_record(pieces, names[0])
    if task is not None:
        return Found(task, b"", pieces)
    actor = r.actor_of(pieces)
    if actor != names[0]:
        pieces = [*pieces, *ask(actor.hex())]
    record = r.actor_record(pieces, actor)
    if record is None:
        raise BadValue(f"the owner of actor {short(actor)} does not know it any more")
    return Found(record, names[0] if names[0] != actor else b"", pieces)


def write(path: str, found: Found, session: DriverSession | None) -> None:
    """Write a record into a file that can be replayed anywhere; stored values go with it, as far as it may be large."""
    views: dict[bytes, memoryview] = {}
    held = []
    if session is not None:
        refs = r.owners_of(found.record)
        for oid, value in r.objects_of(found.record).items():
            if isinstance(value, m.Stored) and oid in refs:
                ref = session.ref_arrived(oid, refs[oid].owner, refs[oid].heir)
                held.append(session.get_one(ref, FETCH_S, False))
                view = session.view_of(oid)
                if view is not None:
                    views[oid] = view
    name = (found.call or found.record.told.spec.id).hex()
    write_record(path, name, [with_copies(piece, views) for piece in found.pieces])


def tell(found: Found, session: DriverSession | None, count: int | None, debugger: pdb.Pdb | None) -> list[str]:
    """Run it and give the outcome in words; raises ReplayDiverged, and what keeps it from being run."""
    try:
        result = run_or_leave(found, session, count, debugger)
    except Left:
        return ["the debugger was left"]
    except (ReplayDiverged, UsageError, ObjectLost):
        raise
    except CODE_ERRORS as error:
        lines = "".join(traceback.format_exception(error.with_traceback(users_part(error)))).rstrip().splitlines()
        return [*lines, f"{found.name} raised this{', as the record says' if is_compared(found) else ''}"]
    if isinstance(found.record, r.ActorRecord) and not found.call:
        return [f"{found.name} has the state {shown(getattr(result, '__dict__', result))}"]
    return [f"{found.name} gave {shown(result)}{', as the record says' if is_compared(found) else ''}"]


def users_part(error: BaseException) -> types.TracebackType | None:
    """The traceback from the first frame that is not the engine's or the debugger's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((OWN_FOLDER, bdb.__file__)):
        trace = trace.tb_next
    return trace or error.__traceback__


def is_compared(found: Found) -> bool:
    """Whether the record has an outcome to compare with."""
    record = found.record
    if isinstance(record, r.TaskRecord):
        return record.told.kind == "task" or any(not isinstance(value, m.Pending) for value in record.told.results)
    return any(call.push.spec.id == found.call and call.answer is not None for call in record.calls)


# --- running ----------------------------------------------------------------------------------------------------


def run(found: Found, beneath: DriverSession | None, count: int | None, debugger: pdb.Pdb | None) -> Any:
    """Run it in this process; raises ReplayDiverged, or what the code raised as it did before. None: debugger left."""
    try:
        return run_or_leave(found, beneath, count, debugger)
    except Left:
        return None


def run_or_leave(found: Found, beneath: DriverSession | None, count: int | None, debugger: pdb.Pdb | None) -> Any:
    """The same; raises Left when the debugger was left."""
    stage = Stage(found.record, beneath)
    environment = found.record.told.spec.environment
    place = Within(environment, "this host") if environment is not None else contextlib.nullcontext()
    try:
        with on(stage), place:
            if isinstance(found.record, r.TaskRecord):
                if count is not None:
                    raise BadValue("call is for actors: how many of its calls are replayed")
                return TaskReplay(stage, found.record, debugger).run()
            return ActorReplay(stage, found.record, found.call, debugger).run(count)
    except ReplayDiverged as error:
        error.args = (f"the replay of {found.name} diverged: {error}",)
        raise


@contextlib.contextmanager
def on(stage: Stage) -> Iterator[None]:
    """While the block runs, the stage is what the engine's verbs find."""
    before, Current.session = Current.session, cast("Session", stage)
    try:
        yield
    finally:
        Current.session = before


def debugger_for(debug: bool | pdb.Pdb, instead: str = INSTEAD) -> pdb.Pdb | None:
    """The debugger that is meant; raises BadValue, with what to do instead, when there is nobody to use it."""
    if isinstance(debug, pdb.Pdb):
        return debug
    if not debug:
        return None
    if not sys.stdin.isatty():
        raise BadValue(f"a replay under pdb needs a terminal: pass {instead}")
    return pdb.Pdb()


def watched(debugger: pdb.Pdb | None, function: Any, run_it: Callable[[Any], Any]) -> Any:
    """What run_it gives with the function, with a stop at the function's first line and where it raises."""
    if debugger is None:
        return run_it(function)
    leave, left, clear = debugger.set_quit, list[bool](), debugger.do_clear

    def set_quit() -> None:
        left.append(True)
        leave()

    def do_clear(number: str) -> None:
        debugger.do_clear = clear  # type: ignore[method-assign]
        debugger.clear_bpbynumber(int(number))  # without a word, as it is not the user's

    debugger.set_quit, debugger.do_clear = set_quit, do_clear  # type: ignore[method-assign, assignment]
    try:
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None and not debugger.set_break(code.co_filename, first_line(code), temporary=True):
            debugger.rcLines.append("continue")  # past the engine's own frames
            result = debugger.runcall(run_it, function)
        else:  # without its source there can be no break in it
            result = run_it(functools.partial(debugger.runcall, function))
    except bdb.BdbQuit:
        raise Left from None
    except CODE_ERRORS as error:
        post_mortem(debugger, error)
        raise
    finally:
        debugger.set_quit, debugger.do_clear = leave, clear  # type: ignore[method-assign]
    if left:
        raise Left
    return result


def post_mortem(debugger: pdb.Pdb | None, error: BaseException) -> None:
    """Have it look at the frame that raised."""
    if debugger is not None:
        debugger.reset()
        debugger.interaction(None, error.__traceback__)


def first_line(code: Any) -> int:
    """The number of the first line of a function's body."""
    first: int = code.co_firstlineno
    return min([line for _, _, line in code.co_lines() if line is not None and line > first], default=first)


class TaskReplay:
    """A task that is run again."""

    def __init__(self, stage: Stage, record: r.TaskRecord, debugger: pdb.Pdb | None) -> None:
        self.stage = stage
        self.record = record
        self.told = record.told
        self.debugger = debugger

    def run(self) -> Any:
        """The value that it gave, or what it raised."""
        stage, told = self.stage, self.told
        context = stage.context_of(told.spec, told.run, told.recorded)
        function = stage.function(told.spec.function, told.function)
        if self.record.is_complete and told.recorded:
            stage.strict[context.task] = None
        with stage.within(context):
            args, kwargs = stage.arguments(told.spec)
            try:
                result = watched(self.debugger, function, lambda call: items_of(told.spec, call(*args, **kwargs)))
                if self.record.is_complete:
                    stage.check_ended(context)
            except ReplayDiverged:
                raise
            except CODE_ERRORS as error:
                self.compare_error(error)
                raise
            self.compare(result)
        return result

    def compare_error(self, error: BaseException) -> None:
        """The code raised."""
        check_divergence(self.stage)
        if not self.told.error and self.told.results:
            raise ReplayDiverged(f"it raises {type(error).__name__}: {error}; the record has a result") from error
        if self.told.kind == "task" and (found := error_difference(unpack_error(self.told.error), error)):
            raise ReplayDiverged(found) from error

    def compare(self, result: Any) -> None:
        """The code ended well."""
        told, spec = self.told, self.told.spec
        check_divergence(self.stage)
        if told.kind == "task":
            recorded = told_of(root_of(unpack_error(told.error)))
            raise ReplayDiverged(f"the result is {shown(result)}, the record says that it raised {recorded}")
        results = [result] if spec.num_returns == 1 else []
        if spec.num_returns > 1 or spec.num_returns < 0:
            results = result if spec.num_returns < 0 else as_results(result, spec.num_returns, spec.name)
            if told.results and spec.num_returns < 0 and len(results) < len(told.results):
                raise ReplayDiverged(f"it gives {len(results)} items, the record has {len(told.results)}")
        for index, (value, kept) in enumerate(zip(results, told.results, strict=False)):
            if isinstance(kept, m.Pending):
                continue  # nobody refers to it any more
            oid = object_id(spec.id, index)
            self.stage.known.setdefault(oid, kept)
            self.stage.refs.setdefault(oid, m.RefTo(oid, told.owner))
            place = "the result" if spec.num_returns == 1 else f"result {index}"
            if found := difference(self.stage.load(oid), as_sent(value), place):
                raise ReplayDiverged(found)


class ActorReplay:
    """An actor that is made and called again."""

    def __init__(self, stage: Stage, record: r.ActorRecord, call: bytes, debugger: pdb.Pdb | None) -> None:
        self.stage = stage
        self.record = record
        self.told = record.told
        self.call = call
        self.debugger = debugger
        self.kind = stage.function(self.told.spec.function, self.told.function)
        self.instance: Any = None

    def run(self, count: int | None) -> Any:
        """The instance after so many calls; or, up to a call, the value that it gave or what it raised."""
        numbers = {one.push.spec.id: one.number for one in self.record.calls}
        last = max(numbers.values(), default=sys.maxsize) if count is None else count - 1
        start = self.record.start(numbers.get(self.call, last))
        snapshot = None if start == m.BEGINNING else self.restore(start)
        calls: Sequence[r.Call] = self.record.calls
        if self.told.error:
            frontiers, last_caller = ({}, b"") if snapshot is None else (dict(snapshot.frontiers), snapshot.last_caller)
            calls = r.in_order(self.record, frontiers, last_caller, start.calls)
        chosen = [one for one in r.upto(self.record, calls, count, self.call) if one.number >= start.calls]
        chosen = [one for one in chosen if one.push.spec.function]  # the others were cancelled
        if snapshot is None:
            self.construct(None if chosen else self.debugger)
        life = self.told.spec.life
        run = self.run_async if life is not None and life.is_async else self.run_all
        result = run(chosen)
        return result if self.call else self.instance

    def restore(self, start: m.Checkpoint) -> Any:
        """Make the instance from a checkpoint; gives what the machine kept with it."""
        if start.path:
            store, name = split(start.path)
            try:
                payload, buffers = Files(store, 0).read(start.calls, name)
            except Exception as error:  # each file system has errors of its own
                raise BadValue(f"the checkpoint that the replay begins from cannot be read: {error}") from error
            self.instance, snapshot = state.unpack(payload, buffers, self.kind)
        else:
            assert isinstance(start.value, m.Inline)
            self.instance, snapshot = state.unpack_inline(start.value.blob, self.kind)
        self.stage.sharing.had(self.told.spec.id, snapshot.holds)
        return snapshot

    def construct(self, debugger: pdb.Pdb | None) -> None:
        """Make the instance with its constructor."""
        spec = self.told.spec
        context = self.stage.context_of(spec, self.told.run, self.record.recorded)
        context.caller_key = context.actor = spec.id
        with self.stage.within(context):
            args, kwargs = self.stage.arguments(spec)
            try:
                self.instance = watched(debugger, self.kind.__init__, lambda _: self.kind(*args, **kwargs))
            except CODE_ERRORS as error:
                check_divergence(self.stage)
                expected = unpack_error(self.told.error) if self.told.error else None
                if not isinstance(expected, TaskError) or error_difference(expected, error):
                    text = f"its constructor raises {type(error).__name__}: {error}"
                    raise ReplayDiverged(text) from error
                raise

    def run_all(self, calls: Sequence[r.Call]) -> Any:
        """Run the calls one after the other; gives the last result."""
        result = None
        for place, one in enumerate(calls, 1):
            result = self.run_one(one, self.debugger if place == len(calls) else None)
        return result

    def run_one(self, call: r.Call, debugger: pdb.Pdb | None) -> Any:
        """Run a call and compare its answer."""
        with self.stage.within(self.context_of(call)):
            method, args, kwargs = self.prepared(call)
            try:
                result = watched(debugger, method, lambda run: items_of(call.push.spec, run(*args, **kwargs)))
            except ExitActor:
                result = None
            except CODE_ERRORS as error:
                return self.raised(call, error)
            return self.ended(call, result)

    def run_async(self, calls: Sequence[r.Call]) -> Any:
        """Begin the calls in their order on one loop, and compare the answers of all; gives the last result."""

        async def run_one(call: r.Call) -> Any:
            with self.stage.within(self.context_of(call)):
                method, args, kwargs = self.prepared(call)
                result = method(*args, **kwargs)
                if hasattr(result, "__aiter__"):
                    return [item async for item in result]
                return items_of(call.push.spec, await result if inspect.isawaitable(result) else result)

        async def run_all() -> list[Any]:
            tasks = []
            for one in calls:
                tasks.append(asyncio.create_task(run_one(one)))
                await asyncio.sleep(0)
            return await asyncio.gather(*tasks, return_exceptions=True)

        last = getattr(self.instance, calls[-1].push.spec.function.decode(), None) if calls else None
        results = watched(self.debugger if calls else None, last, lambda _: awaited(run_all()))
        result = None
        for one, result in zip(calls, results, strict=True):
            if isinstance(result, ExitActor):
                result = None
            if isinstance(result, BaseException):
                if one is calls[-1]:
                    post_mortem(self.debugger, result)
                self.raised(one, result)
            else:
                with self.stage.within(self.context_of(one)):
                    self.compare(one, result)
        return result

    def prepared(self, call: r.Call) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Method and arguments."""
        args, kwargs = self.stage.arguments(call.push.spec)
        return getattr(self.instance, call.push.spec.function.decode()), args, kwargs

    def context_of(self, call: r.Call) -> Context:
        """As the code of a call finds it."""
        spec = call.push.spec
        context = self.stage.context_of(spec, self.told.run)
        context.recorded = r.choices_of(self.record.recorded, spec.id)
        context.caller_key = context.actor = self.told.spec.id
        if context.recorded and call.answer is not None:
            self.stage.strict[spec.id] = None
        return context

    def raised(self, call: r.Call, error: BaseException) -> None:
        """A call raised: it did so before, too, or the replay diverges."""
        try:
            check_divergence(self.stage)
            if isinstance(call.answer, m.TaskDone):
                raise ReplayDiverged(f"it raises {type(error).__name__}: {error}; the record has a result") from error
            if call.answer is not None and (found := error_difference(unpack_error(call.answer.error), error)):
                raise ReplayDiverged(found) from error
        except ReplayDiverged as diverged:
            diverged.args = (f"{name_of(call)}: {diverged}",)
            raise
        if call.push.spec.id == self.call:
            raise error

    def ended(self, call: r.Call, result: Any) -> Any:
        """A call ended well."""
        if call.answer is not None:
            self.stage.check_ended(self.stage.context)
        self.compare(call, result)
        return result

    def compare(self, call: r.Call, result: Any) -> None:
        """The answer is that of the record, or the replay diverges."""
        check_divergence(self.stage)
        spec, answer = call.push.spec, call.answer
        found = ""
        if isinstance(answer, m.TaskFailed):
            found = f"the result is {shown(result)}, the record says that it raised {told_of(answer_error(answer))}"
        elif isinstance(answer, m.TaskDone) and spec.num_returns < 0 and len(result) != answer.stream_items:
            found = f"it gives {len(result)} items, the record has {answer.stream_items}"
        elif isinstance(answer, m.TaskDone) and spec.num_returns > 0:
            results = [result] if spec.num_returns == 1 else as_results(result, spec.num_returns, spec.name)
            for value, kept in zip(results, answer.values, strict=False):
                if isinstance(kept, m.Inline):  # a large one is its caller's
                    found = found or difference(codec.from_inline(kept.blob), as_sent(value), "the result")
        if found:
            raise ReplayDiverged(f"{name_of(call)}: {found}")


def check_divergence(stage: Stage) -> None:
    """Raise what the code itself may have caught."""
    if stage.diverged:
        raise ReplayDiverged(stage.diverged)


def items_of(spec: m.TaskSpec, result: Any) -> Any:
    """The result, of a generator the items."""
    return list(result) if spec.num_returns < 0 else result


def as_sent(value: Any) -> Any:
    """The value as a receiver has it."""
    return codec.from_inline(codec.to_inline(codec.pack(value)))


def answer_error(answer: m.TaskFailed) -> BaseException:
    """What a call raised."""
    return root_of(unpack_error(answer.error))


def name_of(call: r.Call) -> str:
    """A call as people read it; the first of an actor's life is call 1."""
    return f"call {call.number + 1} {call.push.spec.function.decode()}"
