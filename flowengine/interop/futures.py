"""flow.Executor: the engine behind the interface of concurrent.futures."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import math
import threading
import time
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from .. import asking
from ..core import messages as m
from ..core.owner_state import CancelAsked
from ..errors import BadType, BadValue, FlowError, StaleSession, TaskCancelled
from ..functions import RemoteFunction, is_async, session_of
from ..options import task_options, whole
from ..refs import Current, ObjectRef, current_session
from .calls import Call, CallOfAny, CallOfEach, InitializerFailed, Setup, run_each
from .window import QUICK_S, Window

if TYPE_CHECKING:
    from ..runtime.session import Session
WORKERS_MAX = 1 << 20
CHUNK_MAX = 1 << 40
RUNNERS_MAX = 1_000  # names under which an executor runs what comes with its calls
NAME_CHARS = 100
AHEAD_MAX = 64
LOOK_S = 1.0  # the cluster may have grown meanwhile


class TaskFuture(concurrent.futures.Future[Any]):
    """A standard future of one task; cancel() says True as long as the task has not begun."""

    def __init__(self, executor: Executor, function: RemoteFunction, submit: Callable[[], ObjectRef]) -> None:
        super().__init__()
        self._executor = executor
        self._function = function
        self._submit: Callable[[], ObjectRef] | None = submit  # until the engine has it
        self._ref: ObjectRef | None = None  # while the engine has it
        self._session = current_session()
        self._context = self._session.context
        self._teller = 0  # the thread that tells those who wait for it

    def cancel(self) -> bool:
        """End the task if it has not begun; False when it runs or has ended."""
        if self.done():
            return self.cancelled()
        if self._executor._take_out(self):
            self._settle(None, TaskCancelled())
            return self.cancelled()
        ref = self._ref
        if ref is None or ref._session.closed or not ref._session.withdraw(ref.oid):
            return self.cancelled()
        return super().cancel()

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[Any]], object]) -> None:
        """Have fn called with the future when it has ended, on a thread that it may block."""

        def call(future: concurrent.futures.Future[Any]) -> object:
            self._executor._make_way(self._session)
            return fn(future)

        super().add_done_callback(call)

    def running(self) -> bool:
        """The task was sent to a worker and has not ended."""
        ref = self._ref
        obj = None if ref is None else ref._session.owner.objects.get(ref.oid)
        task = None if obj is None else obj.task
        return task is not None and task.lease is not None and not self.done()

    def _begin(self) -> None:
        """Give the task to the engine, which tells when it is over."""
        assert self._submit is not None
        ref = self._ref = self._submit()
        self._submit = None
        session: Session = ref._session
        session.going_to_block(self._context)  # whoever waits for the future does not compute
        session.when_ready(ref.oid, lambda: self._over(session))

    def _over(self, session: Session) -> None:
        session.blocked_no_more(self._context)
        ref = self._ref
        if ref is not None and type(session.owner.value_of(ref.oid)) in (m.Inline, m.Failed):
            self._executor._fulfil_soon(self, session)
        else:
            session.callbacks.run(self._fulfil)  # may have to wait for the value's bytes

    def _fulfil(self) -> None:
        ref, value, error = self._ref, None, None
        assert ref is not None
        try:
            value = ref._session.values.load(ref.oid, True, None)
        except BaseException as raised:
            error = raised
        self._ref = None
        if isinstance(error, (InitializerFailed, StaleSession)):
            self._executor._give_up(error)
        self._executor._look(ref._session, self._function)
        self._executor._next(1)
        self._settle(value, error)
        del error

    def _settle(self, value: Any, error: BaseException | None) -> None:
        """Have those who wait for it know, and its executor forget it."""
        self._teller = threading.get_ident()
        try:
            if isinstance(error, TaskCancelled):
                super().cancel()
            if self.done() and not self.cancelled():
                return  # somebody else has given it a result
            if self.set_running_or_notify_cancel():
                if error is None:
                    self.set_result(value)
                else:
                    self.set_exception(error)
        finally:
            self._executor._close(self)


class Executor(concurrent.futures.Executor):
    """A concurrent.futures.Executor whose calls are tasks of the engine.

    max_workers: how many run at once (default: as many as the cluster has slots for). initializer(*initargs) runs in
    each worker process before its first call of this executor; an error in it makes the executor broken. Other
    keywords are options of tasks (num_cpus, max_retries, timeout_s ...). Works in the program, in tasks and in actors;
    starts the default engine when there is none. Raises BadValue or BadType.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        *,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        **options: Any,
    ) -> None:
        if initializer is not None and not callable(initializer):
            raise BadType(f"initializer must be a function, not {initializer!r}")
        if "num_returns" in options:
            raise BadValue("num_returns is not for an executor: each future has one result")
        count = 1 if max_workers is None else whole("max_workers", max_workers, -WORKERS_MAX, WORKERS_MAX)
        if count <= 0:
            raise BadValue(f"max_workers must be greater than 0, not {max_workers!r}")
        self._max_workers = None if max_workers is None else count
        self._options = task_options(options)
        self._setup = Setup(initializer, tuple(initargs)) if initializer is not None else None
        self._origin = Current.session and Current.session.origin  # to which it belongs; None: it was not used yet
        self._lock = threading.Lock()
        self._less = threading.Condition(self._lock)  # a call has ended
        self._waiting: OrderedDict[TaskFuture, None] = OrderedDict()
        self._open: dict[TaskFuture, None] = {}  # what has not ended; its order is that of submission
        self._busy = 0  # how many of them the engine has
        self._ended: deque[TaskFuture] = deque()  # their values are here, and have yet to be read
        self._is_reading = False  # a thread does so
        self._ahead = Window(0, AHEAD_MAX)  # how many the engine may have above max_workers
        self._looked_s = 0.0
        self._is_wide = False  # the cluster had no more slots than max_workers when it was looked at
        self._closed = False
        self._broken: BaseException | None = None
        self._known: weakref.WeakKeyDictionary[Any, dict[type[Call], RemoteFunction]] = weakref.WeakKeyDictionary()
        self._runners: dict[str, RemoteFunction] = {}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Submit one call: never blocks. References at the top of the arguments arrive as values.

        Raises RuntimeError after shutdown, BrokenExecutor when the initializer failed, StaleSession when the session
        has ended, SerializationError for what cannot be pickled, BadType for an async function.
        """
        if not callable(fn):
            raise BadType(f"submit takes a function, not {fn!r}")
        self._check_open()
        self._now()
        function, args = self._remote(fn, args)
        future = TaskFuture(self, function, function._later(*args, **kwargs))
        with self._lock:
            self._check_open()
            self._open[future] = None
            if self._is_full():
                self._waiting[future] = None
                return future
            self._busy += 1
        try:
            future._begin()
        except BaseException:
            self._next(1)
            self._close(future)
            raise
        return future

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        **rest: Any,
    ) -> Iterator[Any]:
        """The results of fn over the zipped iterables, in order; one task makes `chunksize` of them.

        The iterator raises TimeoutError when a result is not there `timeout` seconds after the call of map.
        """
        size = whole("chunksize", chunksize, 1, CHUNK_MAX)
        if size == 1:
            return super().map(fn, *iterables, timeout=timeout, **rest)
        chunks = chunked(zip(*iterables, strict=False), size)
        results = super().map(run_each, itertools.repeat(fn), chunks, timeout=timeout, **rest)
        return itertools.chain.from_iterable(results)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls. wait: return when all have ended; cancel_futures: end what has not begun."""
        with self._lock:
            self._closed = True
            pending = list(self._open) if cancel_futures else []
        for future in reversed(pending):  # the newest have the best chance not to have begun
            future.cancel()
        if wait:
            me = threading.get_ident()
            with self._less:
                if any(future._teller == me for future in self._open):  # in a callback: others may wait in the same way
                    self._less.wait_for(lambda: all(future._teller for future in self._open))
                else:
                    self._less.wait_for(lambda: not self._open)

    def stop(self) -> None:
        """Shut down at once: what has not begun never does, what runs gets TaskCancelled."""
        self.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            refs = [future._ref for future in self._open]
        for ref in refs:
            if ref is not None and not ref._session.closed:
                ref._session.step(CancelAsked(ref.oid, False, True))

    def __reduce__(self) -> NoReturn:
        raise TypeError("an executor stays where it was made: code that runs elsewhere makes its own")

    def __repr__(self) -> str:
        state = "shut down" if self._closed else "open"
        return f"Executor({state}, {self._busy} tasks under way, {len(self._waiting)} waiting)"

    # --- the way of a call ------------------------------------------------------------------------

    def _now(self) -> Session:
        """The session to which it belongs from now on; raises StaleSession when that has ended."""
        session = session_of(self._origin, self)
        self._origin = session.origin
        return session

    def _check_open(self) -> None:
        if self._broken is not None:
            raise concurrent.futures.BrokenExecutor(str(self._broken)) from self._broken
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def _remote(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[RemoteFunction, tuple[Any, ...]]:
        """The remote function that runs the call, and its arguments.

        A plain function is sent once. What carries state (a method, a closure, a partial) goes with each call, as it
        is at that moment.
        """
        kind, own, rest = (CallOfEach, args[0], args[1:]) if fn is run_each else (Call, fn, args)
        if self._setup is None and is_plain(own):
            known = self._known.setdefault(own, {})
            if kind not in known:
                check_function(own)
                known[kind] = self._named_remote(own, kind(own))
            return known[kind], rest
        check_function(own)
        runner = self._runners.get(name := function_name(own))
        if runner is None:
            runner = self._named_remote(own, CallOfAny(self._setup))
            if len(self._runners) < RUNNERS_MAX:
                self._runners[name] = runner
        return runner, (fn, *args)

    def _named_remote(self, fn: Callable[..., Any], call: Call) -> RemoteFunction:
        """The remote form of a call, with the name of its function."""
        return RemoteFunction(call, task_options({"name": self._options.name or function_name(fn)}, self._options))

    def _take_out(self, future: TaskFuture) -> bool:
        """Take a call out of the queue of this executor; False when it is not there."""
        with self._lock:
            if future not in self._waiting:
                return False
            del self._waiting[future]
            return True

    def _give_up(self, error: BaseException) -> None:
        """What waits here cannot run any more, and after a failed initializer nothing can."""
        with self._lock:
            if isinstance(error, InitializerFailed):
                self._broken = self._broken or error
            waiting, self._waiting = list(self._waiting), OrderedDict()
        for lost in waiting:
            lost._settle(None, error)

    def _fulfil_soon(self, future: TaskFuture, session: Session) -> None:
        """Have one thread read the values of many: to wake one for each takes longer than all the rest.

        Called under the lock of the engine, so it takes none of its own.
        """
        self._ended.append(future)
        if not self._is_reading:
            self._is_reading = True
            session.callbacks.run(self._fulfil_ended)

    def _fulfil_ended(self) -> None:
        while True:
            try:
                future = self._ended.popleft()
            except IndexError:
                self._is_reading = False
                if not self._ended:  # looked at after that: what comes now is seen here or gets a thread
                    return
                continue
            try:
                future._fulfil()
            except BaseException:  # somebody else gave it a result at this moment
                self._make_way(future._session)
                raise
            del future  # it holds a value

    def _make_way(self, session: Session) -> None:
        """Code of the user is called, which may wait for other futures: another thread reads the values."""
        self._is_reading = False
        if self._ended:
            self._soon(session, self._fulfil_ended)

    def _soon(self, session: Session, call: Callable[[], None]) -> None:
        with session.drive.lock:
            session.callbacks.run(call)

    def _look(self, session: Session, function: RemoteFunction) -> None:
        """While calls are quick, and the cluster has no slots for more than max_workers, some are sent ahead."""
        if not self._waiting:
            return
        now_s, took_s = time.monotonic(), function._took_s()
        if now_s > self._looked_s + LOOK_S and (took_s < QUICK_S or self._ahead.size):
            self._looked_s = now_s
            self._soon(session, lambda: self._see_slots(session))
        if self._is_wide:
            self._ahead.ended(took_s)
        else:
            self._ahead.size = 0

    def _see_slots(self, session: Session) -> None:
        self._is_wide = slots(session, self._options.num_cpus) <= (self._max_workers or 0)

    def _is_full(self) -> bool:
        return self._max_workers is not None and self._busy >= self._max_workers + self._ahead.size

    def _next(self, ended: int) -> None:
        """The engine has so many less: the next ones of the queue take their places."""
        while True:
            with self._lock:
                self._busy -= ended
                if not self._waiting or self._is_full():
                    return
                future, _ = self._waiting.popitem(last=False)
                self._busy += 1
            try:
                future._begin()
                ended = 0
            except BaseException as error:
                ended = 1
                future._settle(None, error)

    def _close(self, future: TaskFuture) -> None:
        """The future has its result, or never will."""
        with self._lock:
            self._open.pop(future, None)
            self._less.notify_all()


def slots(session: Session, num_cpus: float) -> float:
    """How many calls of so many CPUs the cluster can run at once; without end when it is not known."""
    try:
        return asking.resources(session, "total").get("CPU", 0.0) / num_cpus if num_cpus else math.inf
    except FlowError:
        return math.inf


def function_name(fn: Callable[..., Any]) -> str:
    """What the tasks of a function are called."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", None) or type(fn).__name__
    return str(name).rpartition("<locals>.")[2][:NAME_CHARS]


def check_function(fn: Any) -> None:
    """Raise BadType for what cannot be called, or only by an event loop."""
    if not callable(fn):
        raise BadType(f"a call needs a function, not {fn!r}")
    if is_async(fn):
        raise BadType(f"{function_name(fn)} is an async function: a call is a task, which runs a plain function "
                      "(it may call asyncio.run)")


def is_plain(fn: Any) -> bool:
    """Whether it is a function without state of its own."""
    if isinstance(fn, types.BuiltinFunctionType):
        return isinstance(fn.__self__, types.ModuleType)
    return isinstance(fn, types.FunctionType) and fn.__closure__ is None


def chunked(items: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """The items in tuples of `size`, the last one as long as it is."""
    iterator = iter(items)
    while chunk := tuple(itertools.islice(iterator, size)):
        yield chunk
