"""The public verbs: init, remote, get, put, wait, cancel and so on. Reads the environment once, at init.

Every argument is checked here, where it was given.
"""

from __future__ import annotations

import gc
import inspect
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from . import asking
from .actors import ActorHandle, actor_class
from .config import Config, from_environment, make_config
from .core import owner_state as s
from .core.ids import TASK_ID_BYTES
from .errors import AlreadyInitialized, BadType, BadValue, FlowError
from .functions import RemoteFunction, remote_function, start_default
from .objects import codec
from .options import real, resource_amounts, whole
from .refs import CompletedRefs, Current, ObjectRef, checked
from .runtime import gpus
from .runtime.launched import DriverSettings, launch
from .runtime.open_files import check_open_files
from .scheduling.policies import check_text

if TYPE_CHECKING:
    from .runtime.driver import DriverSession
    from .runtime.session import Session as ProcessSession

STORE_BYTES_MIN = 1 << 20
STORE_ROOT = "/dev/shm"
FILE_URL = "file://"
SHARED_MEMORY_FRACTION = 0.9  # of what the host has of it, at most for the store
Placement = Any


class Session:
    """A running engine as the program holds it: also a context manager that ends it."""

    def __init__(self, inner: ProcessSession) -> None:
        self._inner = inner

    @property
    def session_id(self) -> str:
        """The name of the session, which is also in the names of its files."""
        return self._inner.session_name

    @property
    def page_url(self) -> str:
        """The address of the live page, with its token, for a browser of the head's host."""
        return asking.page_url(self._inner)

    def shutdown(self) -> None:
        """End the engine if it still runs."""
        if Current.session is self._inner:
            shutdown()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # Whatever session the block has left: it may have ended this one and started another.
        session = Current.session
        if session is not None and session.role == "driver":
            session.shutdown(failed=error is not None)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        state = "running" if Current.session is self._inner else "ended"
        return f"Session({self.session_id}, {state})"


def init(
    num_workers: int | None = None,
    *,
    address: str | os.PathLike[str] | None = None,
    client: Any = None,
    resources: Mapping[str, float] | None = None,
    object_store_bytes: int | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    job: str | None = None,
    log_to_driver: bool = True,
    config: Mapping[str, Any] | Config | None = None,
) -> Session:
    """Start an engine on this machine, or join a cluster (address: its connection file; client: of Dask).

    num_workers: worker processes, one CPU each (default: the CPUs of this machine). object_store_bytes: shared memory
    for values (default: 30 % of the machine's). state_dir: where spilled and durable values and large checkpoints go;
    a URL that fsspec knows takes the latter two, the rest then stays in the default folder.
    Raises AlreadyInitialized in a program that has a session; inside of a task it returns the worker's session.
    """
    if Current.session is not None:
        if Current.session.role == "worker":
            return Session(Current.session)
        raise AlreadyInitialized("flowengine.init() was called before; call flowengine.shutdown() first")
    if job is not None and (not isinstance(job, str) or not job):
        raise BadType(f"job must be a name, not {job!r}")
    check_text("job", job or "")
    if address is not None and (num_workers is not None or object_store_bytes is not None or resources is not None):
        raise BadValue("num_workers, resources and object_store_bytes belong to the nodes of the cluster at address")
    if client is not None and (address, num_workers, object_store_bytes, resources) != (None,) * 4:
        raise BadValue("with client the workers of Dask tell how many there are and what they have: "
                       "address, num_workers, resources and object_store_bytes cannot be given too")
    settings = driver_settings(num_workers, resources, object_store_bytes, state_dir, (log_to_driver, config))
    settings = msgspec.structs.replace(settings, job=job or "")
    if (address, client) != (None, None):
        check_open_files()  # else the node, which needs more, is started here
    if client is not None:
        from .deploy.borrow import borrow

        return Session(borrow(client, settings, durable_url=settings.durable_url if state_dir is not None else ""))
    connection = None
    launched = None
    if address is None:
        launched = launch(settings)  # it imports while this process does
    else:
        from .runtime.connection import own_host, read_connection

        connection = read_connection(address)
        settings = msgspec.structs.replace(settings, secret=connection.secret_bytes, host=own_host(connection.address))
    collecting = gc.isenabled()
    gc.disable()  # imports take a seventh less time without the collector
    try:
        from .runtime.driver import DriverSession
    finally:
        if collecting:
            gc.enable()
    session: DriverSession = DriverSession(settings, connection, launched)
    session.start()
    return Session(session)


def driver_settings(
    num_workers: int | None,
    resources: Mapping[str, float] | None,
    object_store_bytes: int | None,
    state_dir: str | os.PathLike[str] | None,
    rest: tuple[bool, Mapping[str, Any] | Config | None],
) -> DriverSettings:
    """What init was given, checked, with defaults from the environment and the machine."""
    log_to_driver, config = rest
    if not isinstance(config, (Config, Mapping, type(None))):
        raise BadType(f"config must be a dict or a Config, not {config!r}")
    limits = config if isinstance(config, Config) else make_config({**from_environment(os.environ), **(config or {})})
    count = cpu_count() if num_workers is None else whole("num_workers", num_workers, 0, 4096)
    given = dict(resources or {}) if resources is None or isinstance(resources, Mapping) else resources
    asked_gpus = given.pop("GPU", None) if isinstance(given, dict) else None
    gpu_count = gpus.count_gpus() if asked_gpus is None else real("resources['GPU']", asked_gpus, 0, 1 << 20)
    gpus.names_here(gpu_count)
    custom = (*resource_amounts("resources", given), ("GPU", float(gpu_count)))
    wanted_bytes = int(memory_bytes() * limits.store_fraction)
    if object_store_bytes is not None:
        wanted_bytes = whole("object_store_bytes", object_store_bytes, STORE_BYTES_MIN, 1 << 50)
    folder, durable_url = state_places(state_dir)
    check_text("state_dir", folder)
    check_folder(folder)
    total = (("CPU", float(count)), ("memory", float(memory_bytes())), *custom)
    return DriverSettings(
        config=limits,
        total=tuple(sorted((name, amount) for name, amount in total if amount > 0)),
        num_workers=count,
        store_limit_bytes=store_bytes(wanted_bytes),
        state_dir=folder,
        durable_url=durable_url,
        secret=secrets.token_bytes(32),
        log_to_driver=bool(log_to_driver),
    )


def memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def store_bytes(wanted_bytes: int, share: float = 1.0) -> int:
    """The size of a store; share: the part of the host's shared memory that is for it, from 0 to 1.

    Raises BadValue where there is no shared memory, or nothing can be written there.
    """
    # A container may have far less shared memory than memory: beyond it values are spilled, not refused.
    try:
        room = os.statvfs(STORE_ROOT)
        os.rmdir(tempfile.mkdtemp(prefix="flowengine-", dir=STORE_ROOT))
    except OSError as error:
        raise BadValue(f"{STORE_ROOT}, where values are shared, cannot be used: {error}") from error
    room_bytes = int(room.f_blocks * room.f_frsize * SHARED_MEMORY_FRACTION * min(1.0, share))
    return max(STORE_BYTES_MIN, min(wanted_bytes, room_bytes))


def state_places(state_dir: str | os.PathLike[str] | None) -> tuple[str, str]:
    """The local folder, and the URL of the storage for what must outlive processes; raises BadValue if it is no use."""
    given = os.fspath(state_dir) if state_dir is not None else default_state_dir()
    folder = local_folder(given)
    if "://" not in given or given.startswith(FILE_URL):
        return folder, FILE_URL + folder
    from .recovery import durable

    durable.check(given)
    return folder, given.rstrip("/")


def local_folder(state_dir: str) -> str:
    """What has to be on this host: the folder itself, or for a URL of anything else the default one."""
    given = state_dir.removeprefix(FILE_URL)
    return os.path.abspath(given) if "://" not in given else default_state_dir()


def check_folder(folder: str) -> None:
    """Make the state directory; raises BadValue when nothing can be written there."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise BadValue(f"state_dir {folder} cannot be used: {error}") from error


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def default_state_dir() -> str:
    """Where spilled and durable values go when the program names no place: private, per user."""
    return os.path.join(tempfile.gettempdir(), f"flowengine-{os.getuid()}")


def shutdown() -> None:
    """End the session of this program; harmless when there is none. Inside of a task it does nothing."""
    session = Current.session
    if session is not None and session.role == "driver":
        session.shutdown()  # type: ignore[attr-defined]


def is_initialized() -> bool:
    """True when this process has a session."""
    return Current.session is not None


def session_or_start() -> ProcessSession:
    """The session, started with defaults when there is none."""
    return Current.session or start_default()


# --- tasks ----------------------------------------------------------------------------------------


def remote(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a function remote: @flow.remote, @flow.remote(**options), or flow.remote(f).

    Options: num_returns num_cpus num_gpus memory_bytes resources max_retries retry_exceptions timeout_s name placement
    priority env_vars working_dir. Raises BadValue or BadType at once.
    """
    if function is None:
        return lambda function: remote(function, **options)
    if inspect.isclass(function):
        return actor_class(function, options)
    return remote_function(function, options)


# --- results --------------------------------------------------------------------------------------


def get(refs: Any, timeout: float | None = None, copy: bool = False) -> Any:
    """The value of a ref, or the values of a list of refs; waits at most `timeout` seconds.

    Arrays and Arrow values are read-only views of shared memory; copy=True gives writable ones. Raises the task's
    error, GetTimeout, or what became of the value.
    """
    limit_s = checked_timeout(timeout)
    if isinstance(refs, ObjectRef):
        return checked(refs).get_one(refs, limit_s, copy)
    found = checked_refs(refs)
    if not found:
        return []
    return checked(found[0]).get(found, limit_s, copy)


def driver_of(session: Session) -> DriverSession:
    """What is behind the session of a program."""
    return cast("DriverSession", session._inner)


def checked_timeout(timeout: Any) -> float | None:
    """None or seconds from 0."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.integer, np.floating)):
        raise BadType(f"timeout must be a number of seconds or None, not {timeout!r}")
    if not timeout >= 0:
        raise BadValue(f"timeout must be at least 0 seconds, not {timeout!r}")
    return float(timeout) if timeout <= threading.TIMEOUT_MAX else None


def checked_refs(refs: Any, distinct: bool = False) -> list[ObjectRef]:
    """A list of refs of the current session."""
    if isinstance(refs, ObjectRef):
        raise BadType(f"expected a list of ObjectRefs, not {refs!r} alone")
    if isinstance(refs, (str, bytes, Mapping)) or not isinstance(refs, Iterable):
        raise BadType(f"expected an ObjectRef or a list of them, not {refs!r}")
    found = list(refs)
    for ref in found:
        if not isinstance(ref, ObjectRef):
            raise BadType(f"expected ObjectRefs, found {ref!r}")
        checked(ref)
    if distinct and len({ref.oid for ref in found}) != len(found):
        raise BadValue("the same ref is given twice")
    return found


def put(value: Any, durable: bool = False) -> ObjectRef:
    """Store a value and give a ref; what happens to the original afterwards does not change the stored one.

    durable=True also writes it to the state directory, from where it comes back when every copy is lost.
    """
    if isinstance(value, ObjectRef):
        raise BadType("the value is an ObjectRef already; put a list that contains it to store the ref itself")
    session = session_or_start()
    return session.put_packed(codec.pack(value), bool(durable))


def wait(refs: Any, num_returns: int = 1, timeout: float | None = None) -> tuple[list[ObjectRef], list[ObjectRef]]:
    """(ready, pending): a partition of the refs in their order, when num_returns are ready or the time is over.

    ready has at most num_returns. A task that is run again after a crash gets the choice that it got before.
    """
    found = checked_refs(refs, distinct=True)
    count = whole(f"num_returns, of {len(found)} refs,", num_returns, 0, len(found))
    limit_s = checked_timeout(timeout)
    if not found:
        return [], []
    session = checked(found[0])
    ready = session.choose_ready([ref.oid for ref in found], count, limit_s)
    chosen = dict.fromkeys(ready)
    return [ref for ref in found if ref.oid in chosen], [ref for ref in found if ref.oid not in chosen]


def as_completed(refs: Any, timeout: float | None = None) -> CompletedRefs:
    """The refs in the order in which their values come, also with `async for`; raises GetTimeout after `timeout` s."""
    pending = checked_refs(refs, distinct=True)
    limit_s = checked_timeout(timeout)
    deadline = None if limit_s is None else time.monotonic() + limit_s
    return CompletedRefs(_completed(pending, deadline, limit_s))


def _completed(pending: list[ObjectRef], deadline: float | None, limit_s: float | None) -> Iterator[ObjectRef]:
    while pending:
        session = checked(pending[0])
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        chosen = session.choose_ready([ref.oid for ref in pending], 1, left_s, every=True)
        if not chosen:
            session.time_is_over([ref.oid for ref in pending], limit_s)
        ready = dict.fromkeys(chosen)
        yield from [ref for ref in pending if ref.oid in ready]
        pending = [ref for ref in pending if ref.oid not in ready]


def cancel(ref: ObjectRef, force: bool = False, recursive: bool = True) -> None:
    """End the task behind a ref. Pending: it never starts. Running: TaskCancelled is raised inside; force kills.

    recursive: also what the task has submitted. Done, or cancelled before: nothing happens.
    """
    if not isinstance(ref, ObjectRef):
        raise BadType(f"expected an ObjectRef, not {ref!r}")
    checked(ref).step(s.CancelAsked(ref.oid, bool(force), bool(recursive)))


def free(refs: Any) -> None:
    """Drop the values now though refs exist: a later get runs their tasks again, or raises ObjectLost for put ones."""
    found = [refs] if isinstance(refs, ObjectRef) else checked_refs(refs)
    for ref in found:
        checked(ref)
    if found:
        checked(found[0]).step(s.FreeAsked(tuple([ref.oid for ref in found])))


# --- recording ------------------------------------------------------------------------------------


def rng() -> np.random.Generator:
    """A numpy Generator seeded by the task's id and the number of the call: a re-run draws the same numbers."""
    context = session_or_start().context
    number = context.next_choice("rng")
    return np.random.default_rng([int.from_bytes(context.task, "big"), number])


def record(function: Callable[[], Any]) -> Any:
    """Run the function once and keep its value: a task that is run again gets the recorded value instead.

    It is for what the outside world tells. In code that may run again the function may not submit or put anything,
    nor take from a queue: that raises BadValue.
    """
    if not callable(function):
        raise BadType(f"record takes a function without arguments, not {function!r}")
    return session_or_start().recorded_call(function)


def commit() -> None:
    """Return when all that this task depends on is held by others: call it before an effect on the outside world."""
    session_or_start().commit()


# --- time travel ----------------------------------------------------------------------------------


def replay(target: ObjectRef | ActorHandle | str, *, call: int | None = None, debug: Any = True) -> Any:
    """Run a task that has ended, or an actor up to now or up to a call of it, again in this process from its record.

    target: a ref, a handle, or the hex digits of an id. call: of an actor, how many calls of its life are run. debug:
    stop at the first line and where it raises, in pdb or in the given pdb.Pdb. Gives the value, or for a handle the
    instance; raises what the code raised, or ReplayDiverged when it did something else than the record says.
    """
    session = session_or_start()
    if session.role != "driver":
        raise BadValue("replay is for the program, not for its tasks")
    driver = cast("DriverSession", session)
    if isinstance(target, ActorHandle):
        checked(target._ref)
        digits = target.actor_id
    elif isinstance(target, ObjectRef):
        checked(target).wait_ready([target.oid], 1, None)
        digits = target.oid[:TASK_ID_BYTES].hex()
    elif isinstance(target, str):
        digits = target
    else:
        raise BadType(f"replay takes a ref, an actor's handle or an id, not {target!r}")
    count = None if call is None else whole("call", call, 0, 1 << 62)
    from .recovery import replay as replays

    debugger = replays.debugger_for(debug)
    return replays.run(replays.find(driver.ask_record, digits), driver, count, debugger)


def explain(target: ObjectRef | ActorHandle) -> str:
    """Why the actor was checkpointed or not, or the result written to durable storage or not, as text."""
    if isinstance(target, ActorHandle):
        target = target._ref
    if not isinstance(target, ObjectRef):
        raise BadType(f"explain takes a ref or an actor's handle, not {target!r}")
    checked(target)
    return asking.explain(session_or_start(), target.oid.hex())


# --- seeing ---------------------------------------------------------------------------------------


class RuntimeContext(msgspec.Struct, frozen=True, kw_only=True):
    """Where the calling code runs. Ids are hex strings; task_id is None in the program itself."""

    job_id: str
    node_id: str
    worker_id: str | None
    task_id: str | None
    actor_id: str | None
    attempt: int
    was_recovered: bool
    gang_rank: int | None
    gpu_ids: tuple[int | str, ...]  # GPUs of this host that are given to the task or actor


def context() -> RuntimeContext:
    """Where the calling code runs."""
    session = session_or_start()
    inner = session.context
    in_task = session.role == "worker"
    return RuntimeContext(
        job_id=session.session_name,
        node_id=session.node_id,
        worker_id=session.settings.worker_id if in_task else None,  # type: ignore[attr-defined]
        task_id=inner.task.hex() if in_task else None,
        actor_id=inner.actor.hex() if inner.actor is not None else None,
        attempt=inner.attempt,
        was_recovered=inner.attempt > 1,
        gang_rank=session.gang_rank() if in_task else None,  # type: ignore[attr-defined]
        gpu_ids=session.gpu_ids if in_task else (),  # type: ignore[attr-defined]
    )


def stats() -> dict[str, int]:
    """Cluster-wide counters."""
    return asking.stats(session_or_start())


def nodes() -> list[asking.NodeInfo]:
    """The nodes of the cluster and their workers."""
    return asking.nodes(session_or_start())


def cluster_resources() -> dict[str, float]:
    """What all nodes have."""
    return asking.resources(session_or_start(), "total")


def available_resources() -> dict[str, float]:
    """What is free now."""
    return asking.resources(session_or_start(), "available")


def page_url() -> str:
    """The address of the live page, with its token, for a browser of the head's host; raises FlowError if none is."""
    return asking.page_url(session_or_start())


def timeline(path: str | os.PathLike[str]) -> int:
    """Write the last runs of this program's tasks and calls as a Chrome trace (for Perfetto); gives their number."""
    return asking.write_timeline(session_or_start(), path)


def progress(refs: Sequence[ObjectRef], desc: str | None = None) -> Iterator[ObjectRef]:
    """A progress bar that is also an iterator over the refs in the order in which they complete."""
    from .observe.bars import bar

    return bar(checked_refs(refs, distinct=True), desc, as_completed)


__all__ = ["FlowError", "RemoteFunction", "RuntimeContext", "Session"]
