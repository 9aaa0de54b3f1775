"""One attempt of one task in the main thread of a worker, and how calls of actors are answered."""

from __future__ import annotations

import itertools
import time
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import cloudpickle

from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.executor import ItemMade
from flowengine.core.ids import object_id, short
from flowengine.errors import (
    FlowError,
    ObjectLost,
    OutOfDisk,
    SerializationError,
    StoreFull,
    TaskCancelled,
    TaskTimeout,
    pack_error,
    traceback_text,
)
from flowengine.objects import codec
from flowengine.refs import Current, ObjectRef
from flowengine.runtime import gpus
from flowengine.runtime.actor import Actor
from flowengine.runtime.context import Context
from flowengine.runtime.environment import Within
from flowengine.runtime.forks import end_fork
from flowengine.slots import as_results, fill_slots

if TYPE_CHECKING:
    from flowengine.runtime.worker import WorkerSession


class Run:
    """One attempt of one task in the main thread."""

    began_us = 0
    items = 0
    given: tuple[bytes, ...] = ()

    def __init__(self, session: WorkerSession, push: m.PushTask, caller: str) -> None:
        self.session = session
        self.push = push
        self.spec = push.spec
        self.caller = caller

    def answer(self) -> m.TaskDone | m.TaskFailed:
        """Run it and say how it went; never raises."""
        session, spec, push = self.session, self.spec, self.push
        context = Context(spec.id, spec.name, push.run, self.caller, spec.depth + 1)
        context.push = push
        context.heir = f"{self.caller} {spec.id.hex()}"
        context.driver = spec.driver or context.heir
        if session.settings.has_gpus:
            gpus.show(push.devices)
            session.gpu_ids = gpus.ids_of(push.devices)
        context.environment = spec.environment
        for kind, number, payload in push.recorded:
            context.recorded[kind, number] = payload
        session.context = context
        session.owner.depth = spec.depth + 1
        self.began_us = context.began_us = time.monotonic_ns() // 1000
        try:
            if push.children:
                session.begin_parent()
            return self.done(self.run() if spec.environment is None else self.run_within(spec.environment))
        except BaseException as error:
            return self.failed(error)
        finally:
            session.in_user_code = False
            session.pending_signal = None

    def answer_call(self, context: Context, invoke: Callable[[Run], tuple[m.Value, ...]]) -> m.TaskDone | m.TaskFailed:
        """Run one call of an actor and say how it went; never raises."""
        self.began_us = context.began_us = time.monotonic_ns() // 1000
        self.session.note_running(self.spec, self.push.attempt)
        try:
            return self.done_call(context, invoke(self))
        except BaseException as error:
            return self.failed_call(context, error)
        finally:
            self.session.pending_signal = None

    def done_call(self, context: Context, values: tuple[m.Value, ...]) -> m.TaskDone:
        """The answer of a call that ended well."""
        self.drop_given()
        items = self.items if self.spec.num_returns < 0 else 0
        held = self.session.owner.still_held()
        return m.TaskDone(self.spec.id, self.push.attempt, values, self.run_us(), held, (), items, self.began_us)

    def failed_call(self, context: Context, error: BaseException) -> m.TaskFailed:
        """The answer of a call that raised."""
        self.session.in_user_code = False
        kind = "cancelled" if isinstance(error, TaskCancelled) else "task"
        if isinstance(error, TaskTimeout):
            kind = "timeout"
        blob, refs = self.packed_error(error, kind == "task")
        self.drop_given()
        return self.failure(blob, kind, False, refs)

    def run_within(self, environment: m.Environment) -> tuple[m.Value, ...]:
        """Run it in an environment of its own."""
        with Within(environment, self.session.host):
            return self.run()

    def run(self) -> tuple[m.Value, ...]:
        session, spec = self.session, self.spec
        session.at_point("task.before_run")
        function = session.function(spec.function)
        try:
            session.enter_user_code()
            if spec.life is not None:
                Actor(session, self).live(function)
            by_reference = getattr(function, "by_reference", False)
            args, kwargs = self.arguments(by_reference, getattr(function, "owns_arguments", False))
            result = function(*args, **kwargs)
            if spec.num_returns < 0:
                return self.stream(result)
        finally:
            session.in_user_code = False
            if Current.forked:
                end_fork()  # only the process that was given the task answers for it
        session.at_point("task.after_run")
        return self.pack(result)

    def arguments(self, by_reference: bool = False, owned: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with the values of references in their slots, or the references.

        owned: what came with the call (not the values of references) may be changed by the code.
        """
        spec, push, session = self.spec, self.push, self.session
        if not spec.args and not push.values:
            return (), {}
        values: list[Any] = []
        if push.values:
            values = self.references() if by_reference else self.inputs()
        if spec.args_object is not None:
            args, kwargs = values.pop()
            if owned:
                args, kwargs = session.values.load(spec.args_object.oid, True)
        elif spec.args:
            args, kwargs = session.values.unpacked(b"", spec.args, None, owned)
        else:
            return tuple(values), {}  # nothing but references, in their order
        return fill_slots(args, kwargs, values)

    def inputs(self) -> list[Any]:
        """The values of the references; what is small and refers to nothing is at hand, the rest is looked after."""
        spec, push, session = self.spec, self.push, self.session
        refs = spec.deps if spec.args_object is None else (*spec.deps, spec.args_object)
        values = push.values
        if spec.choice is not None and spec.choice.unread:
            read, given = len(spec.deps) - spec.choice.unread, len(spec.deps)
            refs, values = refs[:read] + refs[given:], values[:read] + values[given:]
        at_hand = [type(value) is m.Inline and not value.contained for value in values]
        if not all(at_hand):
            rest = [pair for pair, here in zip(zip(refs, values, strict=True), at_hand, strict=True) if not here]
            session.step(s.InputsGiven(tuple([ref for ref, _ in rest]), tuple([value for _, value in rest])))
            self.given = tuple([ref.oid for ref, _ in rest])
        found = []
        for ref, value, here in zip(refs, values, at_hand, strict=True):
            if here:
                found.append(session.values.plain(ref.oid, value.blob, None))  # type: ignore[union-attr]
            else:
                found.append(session.values.load(ref.oid))
        return found

    def references(self) -> list[Any]:
        """References whose values are known, for code of the engine that looks where these are before it loads them."""
        spec, session = self.spec, self.session
        session.step(s.InputsGiven(spec.deps, self.push.values))
        return [ObjectRef(session, ref.oid, ref.owner, ref.heir) for ref in spec.deps]

    def pack(self, result: Any) -> tuple[m.Value, ...]:
        spec = self.spec
        if spec.num_returns == 1:
            try:
                return (self.pack_one(0, result),)
            except SerializationError as error:
                if isinstance(result, (types.GeneratorType, types.AsyncGeneratorType)):
                    hint = 'num_returns="stream" sends its items as they come'
                    raise SerializationError(f"{spec.name} gave a generator, which cannot be sent: {hint}") from error
                raise
        if spec.num_returns == 0:
            return ()
        results = as_results(result, spec.num_returns, spec.name)
        packed = [codec.pack(value) for value in results]
        made: list[m.Value] = []
        try:
            for index, one in enumerate(packed):
                made.append(self.session.values.keep(object_id(spec.id, index), one, self.caller))
        except BaseException:
            # All results come or none: nobody will hear of those that were kept.
            stored = [object_id(spec.id, index) for index, value in enumerate(made) if isinstance(value, m.Stored)]
            self.session.endpoint.send(self.session.node, m.ObjectFreed(tuple(stored)))
            raise
        for value in made:
            self.export(value)
        return tuple(made)

    def pack_one(self, index: int, value: Any) -> m.Value:
        if type(value) is m.Stored:
            return value  # code of the engine has made it in the store
        packed = value if type(value) is codec.Packed else codec.pack(value)
        if not packed.refs and packed.nbytes <= self.session.config.inline_bytes_max:
            return m.Inline(codec.to_inline(packed))
        made = self.session.values.keep(object_id(self.spec.id, index), packed, self.caller)
        self.export(made)
        return made

    def export(self, made: m.Value) -> None:
        """The caller becomes a borrower of what the value refers to."""
        if made.contained:
            self.session.step(s.Exported(made.contained, self.caller))

    def stream(self, made: Any) -> tuple[m.Value, ...]:
        """Send what the generator yields; wait when the reader is far behind."""
        session, spec, push = self.session, self.spec, self.push
        if not isinstance(made, Iterator):
            made = iter(made)
        taken = push.stream_taken
        moved = session.stream_moved
        for index in itertools.count():
            try:
                value = next(made)
            except StopIteration:
                break
            if Current.forked:
                end_fork()
            if index < push.stream_have:
                continue
            session.in_user_code = False
            item = m.StreamItem(spec.id, push.attempt, index, self.pack_one(index, value))
            session.step(ItemMade(item))
            session.enter_user_code()
            while not moved.empty():
                taken = max(taken, moved.get())
            while index + 1 - taken >= session.config.stream_items_max:
                news = moved.get()
                if news < 0:
                    raise TaskCancelled(f"nobody reads the stream of {spec.name} any more")
                taken = max(taken, news)
        self.items = index
        return ()

    def done(self, values: tuple[m.Value, ...]) -> m.TaskDone:
        session = self.session
        context = session.context
        parent = session.owner.parents.get(self.spec.id) if context.is_parent else None
        if parent is not None and parent.reaches_out:
            context.reach_out()
        self.leave(False)
        recorded = (*self.push.recorded, *context.noted) if context.noted or self.push.recorded else ()
        items = self.items if self.spec.num_returns < 0 else 0
        return m.TaskDone(
            self.spec.id, self.push.attempt, values, self.run_us(), session.owner.still_held(), recorded, items,
            self.began_us,
        )

    def failed(self, error: BaseException) -> m.TaskFailed:
        self.session.in_user_code = False
        kind, retry = "task", False
        if isinstance(error, TaskCancelled) and self.session.executor is not None and self.session.executor.stopping:
            kind = "cancelled"
        elif isinstance(error, (StoreFull, OutOfDisk)):
            kind = "store"
        elif not isinstance(error, (ObjectLost, FlowError)) or isinstance(error, Exception):
            retry = self.is_retried(error)
        if retry and self.session.context.is_parent:
            self.session.drive.step(s.ParentRepeats(self.spec.id))
        blob, refs = self.packed_error(error, True)
        self.leave(True, retry)
        return self.failure(blob, kind, retry, refs)

    def packed_error(self, error: BaseException, is_users: bool) -> tuple[bytes, tuple[m.RefTo, ...]]:
        """The error as it travels, and the references inside of it, to which the caller is introduced."""
        with codec.collecting() as found:
            users = (f"{self.spec.name} {short(self.spec.id)}", traceback_text(error)) if is_users else ()
            blob = pack_error(error, *users)
        error.__traceback__ = None
        refs = tuple([ref.to() for ref in found if isinstance(ref, ObjectRef)])
        if refs:
            self.session.step(s.Exported(refs, self.caller))
        return blob, refs

    def failure(self, blob: bytes, kind: str, retry: bool, refs: tuple[m.RefTo, ...]) -> m.TaskFailed:
        held = self.session.owner.still_held()
        spec, run_us = self.spec, self.run_us()
        return m.TaskFailed(
            spec.id, self.push.attempt, blob, kind, retry, run_us, held, began_us=self.began_us, contained=refs
        )

    def is_retried(self, error: BaseException) -> bool:
        wanted = self.spec.retry_exceptions
        if not wanted or not isinstance(error, Exception):
            return False
        if wanted == b"*":
            return True
        try:
            return isinstance(error, tuple(cloudpickle.loads(wanted)))
        except Exception:
            return False

    def leave(self, cancel: bool, again: bool = False) -> None:
        session = self.session
        self.drop_given()
        session.membership.code_ended(again)
        if session.sharing.holds:
            session.sharing.code_ended(self.spec.id)
        if session.context.is_parent:
            session.drive.step(s.ParentEnded(self.spec.id, cancel, again))

    def drop_given(self) -> None:
        """The inputs are not needed any more, nor what the collector found."""
        session = self.session
        if self.given:
            session.dropped.extend(self.given)
            self.given = ()
        if session.dropped:
            session._drop()

    def run_us(self) -> int:
        return time.monotonic_ns() // 1000 - self.began_us
