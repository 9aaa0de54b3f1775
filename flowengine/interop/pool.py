"""flow.Pool: the engine behind the interface of multiprocessing.Pool."""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

from .. import asking
from ..errors import BadValue
from ..options import whole
from .calls import run_each
from .futures import CHUNK_MAX, WORKERS_MAX, Executor, chunked

CHUNKS_PER_WORKER = 4  # by which map cuts its input, as multiprocessing does
AHEAD_MAX = 1_000  # chunks of imap that are submitted before their results are taken
NO_KEYWORDS: Mapping[str, Any] = {}

Callback = Callable[[Any], object]


class AsyncResult:
    """The result of a call to come, as multiprocessing's."""

    def __init__(self, tasks: Sequence[concurrent.futures.Future[Any]], callbacks: Sequence[Callback | None]) -> None:
        self._tasks = tasks
        self._callbacks = callbacks  # for the value, for an error
        self._left = len(tasks)
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        if not tasks:
            self._finish()
        for task in tasks:
            task.add_done_callback(self._one_done)

    def ready(self) -> bool:
        """All is done."""
        return self._done.is_set()

    def successful(self) -> bool:
        """Done without an error; raises ValueError before it is done."""
        if not self.ready():
            raise ValueError(f"{self!r} not ready")
        return self._error is None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is done, at most `timeout` seconds."""
        self._done.wait(timeout)

    def get(self, timeout: float | None = None) -> Any:
        """The value; raises the first error of the calls, or multiprocessing.TimeoutError."""
        if not self._done.wait(timeout):
            raise multiprocessing.TimeoutError
        if self._error is not None:
            raise self._error
        return self._value

    def _one_done(self, task: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._finish()

    def _finish(self) -> None:
        try:
            self._value = self._gather([task.result() for task in self._tasks])
        except (Exception, concurrent.futures.CancelledError) as error:
            self._error = error
        told, argument = self._callbacks[self._error is not None], self._error or self._value
        try:
            if told is not None:
                told(argument)
        finally:
            self._tasks = ()
            self._done.set()

    def _gather(self, results: list[Any]) -> Any:
        return results[0]


class MapResult(AsyncResult):
    """The results of many calls to come, as a list."""

    def _gather(self, results: list[Any]) -> Any:
        return [result for chunk in results for result in chunk]


class ImapIterator(Iterator[Any]):
    """Results in the order of the input, or as they come; calls are submitted some way ahead of the reader."""

    def __init__(self, pool: Pool, fn: Callable[..., Any], chunks: Iterator[Any], is_ordered: bool) -> None:
        self._pool = pool
        self._fn = fn
        self._chunks: Iterator[Any] | None = chunks  # None: nothing more is submitted
        self._is_ordered = is_ordered
        self._moved = threading.Condition()
        self._feeding = threading.Lock()
        pool._imaps[self] = None
        self._line: deque[concurrent.futures.Future[Any]] = deque()  # not taken; if unordered, only those that are done
        self._open = 0  # chunks that were submitted and not taken
        self._running = 0  # chunks that were submitted and have not ended
        self._is_last = False  # the pool is closed: all that is left of the input has to run, read or not
        self._items: deque[Any] = deque()
        context = pool._executor._now().context
        self._feeder: threading.Thread | None = None
        # The input may be slow, or wait for results. But code that may run again has to make its calls in the same
        # order, so there no other thread makes them.
        if context.push is None and not context.is_job:
            self._feeder = threading.Thread(target=self._feed, args=(True,), name="flowengine-imap", daemon=True)
            self._feeder.start()
        else:
            self._feed(False)

    def __next__(self) -> Any:
        return self.next()

    def next(self, timeout: float | None = None) -> Any:
        """The next result; raises its error, StopIteration, or multiprocessing.TimeoutError."""
        end_s = None if timeout is None else time.monotonic() + timeout
        if self._feeder is None:
            self._feed(False)
        with self._moved:
            while not self._items:
                if self._line and self._line[0].done():
                    self._open -= 1
                    self._moved.notify_all()
                    self._items.extend(self._line.popleft().result())
                elif not self._open and self._chunks is None:
                    raise StopIteration
                elif not self._moved.wait(None if end_s is None else end_s - time.monotonic()):
                    raise multiprocessing.TimeoutError
            return self._items.popleft()

    def _feed(self, waits: bool) -> None:
        """Submit as long as there is room. waits: and wait for more. An error of the input is the last result."""
        with self._feeding:
            while True:
                with self._moved:
                    if waits:
                        self._moved.wait_for(self._has_room)
                    chunks = self._chunks if self._has_room() else None
                if chunks is None:
                    return
                try:
                    task = self._pool._executor.submit(run_each, self._fn, next(chunks))
                except StopIteration:
                    self.end()
                    return
                except Exception as error:
                    task = concurrent.futures.Future()
                    task.set_exception(error)
                    self._submitted(task)
                    self.end()
                    return
                self._submitted(task)

    def _submitted(self, task: concurrent.futures.Future[Any]) -> None:
        with self._moved:
            self._open += 1
            self._running += 1
            if self._is_ordered:
                self._line.append(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: concurrent.futures.Future[Any]) -> None:
        with self._moved:
            self._running -= 1
            if not self._is_ordered:
                self._line.append(task)
            self._moved.notify_all()

    def _has_room(self) -> bool:
        return self._chunks is None or (self._running if self._is_last else self._open) < AHEAD_MAX

    def end(self) -> None:
        """Nothing more of the input is wanted, or there is nothing more."""
        with self._moved:
            self._chunks = None
            self._moved.notify_all()
        self._pool._imaps.pop(self, None)

    def run_all(self) -> None:
        """Have all that is left of the input run, whether it is read or not."""
        with self._moved:
            self._is_last = True
            self._moved.notify_all()

    def join(self) -> None:
        """Return when all of the input was submitted."""
        if self._feeder is not None:
            self._feeder.join()
        else:
            self._feed(True)


class Pool:
    """A multiprocessing.Pool whose calls are tasks of the engine.

    processes: how many calls run at once (default: as many as the cluster has slots for). initializer(*initargs) runs
    in each worker process before its first call of this pool. Other keywords are options of tasks. Leaving the context
    ends what runs, as in multiprocessing. Raises BadValue or BadType.
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        **options: Any,
    ) -> None:
        if maxtasksperchild is not None:
            raise BadValue("maxtasksperchild: the worker processes belong to the engine, a pool cannot replace them")
        self._count = 0 if processes is None else whole("processes", processes, 1, WORKERS_MAX)
        self._executor = Executor(self._count or None, initializer=initializer, initargs=initargs, **options)
        self._imaps: dict[ImapIterator, None] = {}  # whose input has not come to its end
        self._state = "running"

    # --- calls ------------------------------------------------------------------------------------

    def apply(self, func: Callable[..., Any], args: Iterable[Any] = (), kwds: Mapping[str, Any] = NO_KEYWORDS) -> Any:
        """The value of one call."""
        return self.apply_async(func, args, kwds).get()

    def apply_async(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] = NO_KEYWORDS,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult:
        """Submit one call."""
        self._check_running()
        return AsyncResult([self._executor.submit(func, *args, **kwds)], (callback, error_callback))

    def map(self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int | None = None) -> list[Any]:
        """func of each item, as a list in order."""
        values: list[Any] = self.map_async(func, iterable, chunksize).get()
        return values

    def map_async(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult:
        """The same without waiting."""
        return self._map(func, [(item,) for item in iterable], chunksize, (callback, error_callback))

    def starmap(
        self, func: Callable[..., Any], iterable: Iterable[Iterable[Any]], chunksize: int | None = None
    ) -> list[Any]:
        """func(*item) of each item, as a list in order."""
        values: list[Any] = self.starmap_async(func, iterable, chunksize).get()
        return values

    def starmap_async(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult:
        """The same without waiting."""
        return self._map(func, [tuple(item) for item in iterable], chunksize, (callback, error_callback))

    def imap(self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int = 1) -> ImapIterator:
        """An iterator of func of each item, in order; the input may be endless."""
        return self._imap(func, iterable, chunksize, True)

    def imap_unordered(self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int = 1) -> ImapIterator:
        """The same in the order in which results come."""
        return self._imap(func, iterable, chunksize, False)

    def _map(
        self,
        func: Callable[..., Any],
        calls: list[tuple[Any, ...]],
        chunksize: int | None,
        callbacks: tuple[Callback | None, Callback | None],
    ) -> AsyncResult:
        self._check_running()
        if chunksize is None:
            size = max(1, math.ceil(len(calls) / (CHUNKS_PER_WORKER * self._worker_count())))
        else:
            size = whole("chunksize", chunksize, 1, CHUNK_MAX)
        tasks = [self._executor.submit(run_each, func, chunk) for chunk in chunked(calls, size)]
        return MapResult(tasks, callbacks)

    def _imap(
        self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int, is_ordered: bool
    ) -> ImapIterator:
        self._check_running()
        size = whole("chunksize", chunksize, 1, CHUNK_MAX)
        return ImapIterator(self, func, chunked(((item,) for item in iterable), size), is_ordered)

    def _worker_count(self) -> int:
        session = self._executor._now()
        return self._count or max(1, int(asking.resources(session, "total").get("CPU", 1)))

    def _check_running(self) -> None:
        if self._state != "running":
            raise ValueError("Pool not running")

    # --- ending -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Take no more calls; what was submitted runs to its end, inputs of imap included."""
        if self._state == "running":
            self._state = "closed"
            for imap in list(self._imaps):
                imap.run_all()

    def terminate(self) -> None:
        """End at once: what has not begun never does, what runs gets TaskCancelled."""
        self._state = "terminated"
        for imap in list(self._imaps):
            imap.end()
        self._executor.stop()

    def join(self) -> None:
        """Wait until all calls have ended; after close or terminate."""
        if self._state == "running":
            raise ValueError("Pool is still running")
        for imap in list(self._imaps):
            imap.join()
        self._executor.shutdown(wait=True)

    def __enter__(self) -> Pool:
        self._check_running()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.terminate()

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError("pool objects cannot be passed between processes or pickled")

    def __repr__(self) -> str:
        return f"Pool({self._state}, {self._count or 'all'} at once)"
