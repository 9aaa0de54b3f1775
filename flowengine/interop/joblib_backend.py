"""flow.joblib(): the engine as a backend of joblib. joblib is imported when it is used."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .. import asking
from ..errors import BadType, SerializationError
from ..functions import start_default
from ..objects import codec
from ..options import task_options
from ..refs import Current, ObjectRef
from ..slots import Slot, fill_slots
from .futures import Executor, function_name

NAME = "flowengine"
# A batch is a list of calls; a call is a function, its arguments and its keyword arguments.
PATH = re.compile(r"argument \[0\]\.calls\.items\[(\d+)\]\[([012])\](\[[^]]*\])?")
PARTS = ("function", "argument ", "keyword argument ")
SHARED_BYTES_MIN = 1 << 20  # arguments from that size on are stored once for all calls, as joblib's memory maps
OWN_MODES = (None, "c")  # of memory maps: each call may write to what it gets, and nobody else sees it


@contextlib.contextmanager
def joblib(n_jobs: int = -1, **options: Any) -> Iterator[None]:
    """Make the engine joblib's backend inside of this context: `with flow.joblib(): Parallel()(...)`.

    n_jobs: what Parallel takes where it is not told (-1: all CPUs of the cluster). Other keywords are options of tasks.
    Large arrays among the arguments are stored once and arrive read-only, as with joblib's own processes, unless
    Parallel is told max_nbytes=None or mmap_mode="c". A Parallel within a call runs in threads, or one after the other.
    Raises ImportError without joblib, BadValue or BadType.
    """
    try:
        import joblib as library
    except ImportError as error:
        raise ImportError("flow.joblib() needs joblib: install flowengine[joblib], or joblib itself") from error
    if isinstance(n_jobs, bool) or not isinstance(n_jobs, int):
        raise BadType(f"n_jobs must be a whole number, not {n_jobs!r}")
    task_options(options)
    library.register_parallel_backend(NAME, backend_kind())
    with library.parallel_config(backend=NAME, n_jobs=n_jobs, **options):
        yield


def named_path(text: str) -> str:
    """The path of what cannot be pickled, told in the words of joblib's caller."""
    return PATH.sub(lambda found: f"{PARTS[int(found[2])]}{found[3] or ''} of call {found[1]} of its batch", text)


class InFile:
    """An array in a file that may be written to: a call gets the file's, as in joblib's own processes."""

    def __init__(self, opened: tuple[Any, ...]) -> None:
        self.opened = opened

    def __reduce__(self) -> tuple[Any, ...]:
        return self.opened


def written_file(value: Any) -> InFile | None:
    """What goes in place of an argument that lies in a memory map which is open for writing."""
    if not isinstance(value, np.ndarray) or value.base is None:
        return None
    from joblib._memmapping_reducer import _get_backing_memmap, _reduce_memmap_backed

    file = _get_backing_memmap(value)
    if not isinstance(file, np.memmap) or file.mode not in ("r+", "w+") or file.filename is None:
        return None
    return InFile(_reduce_memmap_backed(value, file))


class Batch:
    """Some calls of joblib as one function, called as their own function is."""

    def __init__(self, calls: Any) -> None:
        self.calls = calls
        self.__qualname__ = function_name(calls.items[0][0])

    def __call__(self, *values: Any) -> Any:
        """Run them, with shared arguments in their places."""
        self.calls.items = [(fn, *fill_slots(args, kwargs, values)) for fn, args, kwargs in self.calls.items]
        return self.calls()


class FlowBackend:
    """joblib's view of the engine; to be mixed into its base class, which comes when joblib is there."""

    nesting_level: int | None
    parallel: Any = None

    MIN_IDEAL_BATCH_DURATION = 0.05
    MAX_IDEAL_BATCH_DURATION = 0.5
    default_n_jobs = -1
    supports_retrieve_callback = True
    supports_inner_max_num_threads = False

    def __init__(self, nesting_level: int | None = None, inner_max_num_threads: Any = None, **options: Any) -> None:
        levels: dict[str, Any] = {"nesting_level": nesting_level, "inner_max_num_threads": inner_max_num_threads}
        super().__init__(**levels)
        self.options = options
        self.executor: Executor | None = None
        self.shared: dict[int, tuple[Any, ObjectRef]] = {}
        self.shared_bytes_min: float = SHARED_BYTES_MIN

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """How many calls run at once."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        if n_jobs > 0:
            return n_jobs
        cpus = int(asking.resources(Current.session or start_default(), "total").get("CPU", 1))
        return max(cpus + 1 + n_jobs, 1)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **rest: Any) -> int:
        """Before the calls of a Parallel."""
        from joblib._parallel_backends import FallbackToBackend, SequentialBackend

        count = self.effective_n_jobs(n_jobs)
        if count == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self.parallel = parallel
        if "max_nbytes" in rest:
            is_own = rest["max_nbytes"] is None or rest.get("mmap_mode") in OWN_MODES
            self.shared_bytes_min = math.inf if is_own else rest["max_nbytes"]
        self.executor = Executor(count, **self.options)
        return count

    def submit(self, func: Any, callback: Callable[[Any], object] | None = None) -> Any:
        """Submit a batch of calls."""
        assert self.executor is not None
        batch, refs = self.with_shared(func)
        try:
            future: Any = self.executor.submit(Batch(batch), *refs)
        except SerializationError as error:
            raise SerializationError(named_path(str(error))) from error
        future.get = future.result
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def with_shared(self, func: Any) -> tuple[Any, list[ObjectRef]]:
        """The batch with slots in place of large arguments, and references to these."""
        refs: list[ObjectRef] = []

        def swapped(value: Any) -> Any:
            file = written_file(value)
            if file is not None:
                return file
            size_bytes = getattr(value, "nbytes", 0)
            if not isinstance(size_bytes, int) or size_bytes < self.shared_bytes_min:
                return value
            known = self.shared.get(id(value))
            if known is None:
                session = Current.session or start_default()
                known = self.shared[id(value)] = value, session.put_packed(codec.pack(value))
            if known[1] not in refs:
                refs.append(known[1])
            return Slot(refs.index(known[1]))

        batch = copy.copy(func)
        batch.items = [
            (fn, [swapped(arg) for arg in args], {name: swapped(arg) for name, arg in kwargs.items()})
            for fn, args, kwargs in func.items
        ]
        return batch, refs

    def retrieve_result_callback(self, out: Any) -> Any:
        """The results of a batch; raises its error."""
        return out.result()

    def start_call(self) -> None:
        """Before the calls of a Parallel: what an aborted one has left in its queue is not of this one."""
        left = getattr(self.parallel, "_ready_batches", None)
        while left is not None and not left.empty():
            left.get()

    def stop_call(self) -> None:
        """After the calls of a Parallel: what they shared may go."""
        self.shared.clear()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """A call has raised, or took too long: the rest is not wanted."""
        self.terminate()
        if ensure_ready:
            self.configure(n_jobs=self.parallel.n_jobs, parallel=self.parallel)

    def terminate(self) -> None:
        """End what runs."""
        if self.executor is not None:
            self.executor.stop()
            self.executor = None
        self.shared.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt, (self.options,)


@functools.cache
def backend_kind() -> type[Any]:
    """The class that joblib makes backends of."""
    from joblib._parallel_backends import AutoBatchingMixin, ParallelBackendBase

    return type("FlowBackend", (FlowBackend, AutoBatchingMixin, ParallelBackendBase), {})


def rebuilt(options: dict[str, Any]) -> Any:
    """What unpickling a backend calls."""
    return backend_kind()(**options)
