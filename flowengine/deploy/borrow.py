"""A program that uses a Dask cluster's workers: how it joins the engine there, keeps what it uses, and leaves."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from flowengine import __version__
from flowengine.deploy.dask import LOOPBACK, HeadPlugin, check_version, is_client, lease
from flowengine.deploy.seeds import HEAD_NAME, LEASE_KEY, LEASE_TOPIC, NODE_TOPIC, Entered, Seed, WorkerSeen, tls_from
from flowengine.errors import BadType, BadValue, FlowError, HeadLost
from flowengine.runtime.connection import Connection, new_secret, new_session, own_host
from flowengine.runtime.driver import DriverSession
from flowengine.runtime.launched import DriverSettings, launch

T = TypeVar("T")

log = logging.getLogger(__name__)

ANSWER_S = 45.0  # of the scheduler; starting the head is part of it
REACH_S = 3.0
NODES_S = 60.0  # for the nodes of the workers that are there
LOOK_S = 0.1
HEAD_AWAY_S = 15.0  # a head that was killed is back by then
LEAVE_S = 15.0
RELAYED = ("tcp", "tls")  # schemes of connections that can be passed on as bytes
MISSING = "flowengine {version} is not installed where the Dask {where} runs, or another version is: {error}"


def borrow(client: Any, settings: DriverSettings, durable_url: str) -> DriverSession:
    """A session in the cluster of a Dask client; returns when the nodes of all workers that are there have joined.

    Raises BadType or BadValue for a client that is no use, FlowError with the reason when a node does not come.
    """
    borrowed = Borrowed(checked_client(client))
    entered = borrowed.enter(Seed(session=new_session(), secret=new_secret(), config=settings.config,
                                  durable_url=durable_url, log_to_driver=settings.log_to_driver))
    session: DriverSession | None = None
    try:
        connection, settings = borrowed.way(entered, settings)
        launched = launch(settings, connection.session, connection.address, connection.tls)
        session = DriverSession(settings, connection, launched)
        session.afterwards = borrowed.leave
        session.start()
        borrowed.node_id = session.node_id
        borrowed.watch_head(session, connection)
        borrowed.hold()
        borrowed.wait_for_nodes(session)
        return session
    except BaseException:
        if session is not None:
            session.shutdown(failed=True)
        borrowed.leave()
        raise


def checked_client(client: Any) -> Any:
    """A Dask client that can be used from this thread."""
    if not is_client(client):
        raise BadType(f"client must be a dask.distributed.Client, not {client!r}")
    if client.asynchronous:
        raise BadValue("client is asynchronous, and init() waits: make a Client without asynchronous=True, "
                       "or call init() in a thread, as asyncio.to_thread does")
    if client.status != "running" or client.scheduler is None:
        raise BadValue(f"client has no scheduler (it is {client.status}); connect a new Client")
    return client


class Borrowed:
    """One program's part in a cluster."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.program = secrets.token_hex(8)
        self.node_id = ""  # of this program's own node, for its store
        self.left = False
        self.lock = threading.Lock()
        self.leases: dict[str, Any] = {}  # Dask worker: the future of the task that keeps it
        self.numbers = itertools.count(1)

    def call(self, work: Callable[[], T], timeout_s: float = ANSWER_S) -> T:
        """What the scheduler answers, within bounded time; its errors are told in our words."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, name="flowengine-dask", daemon=True).start()
        try:
            return answer.result(timeout_s)
        except FlowError:
            raise
        except TimeoutError:
            raise HeadLost(f"the Dask scheduler did not answer within {timeout_s:g} s") from None
        except (ImportError, AttributeError) as error:
            raise FlowError(MISSING.format(version=__version__, where="scheduler", error=error)) from error
        except Exception as error:
            raise FlowError(f"the Dask scheduler cannot do it: {type(error).__name__}: {error}") from error

    # --- joining ----------------------------------------------------------------------------------

    def enter(self, seed: Seed) -> Entered:
        """Join the engine that is there, or start one."""
        end_s = time.monotonic() + ANSWER_S
        while True:
            self.call(lambda: self.client.register_plugin(HeadPlugin(seed)))
            entered: Entered | FlowError | None = self.call(
                lambda: self.client.run_on_scheduler(enter_engine, self.program, __version__))
            if isinstance(entered, FlowError):
                raise entered
            if entered is not None:
                return entered
            if time.monotonic() > end_s:
                raise HeadLost(f"the engine of other programs did not end within {ANSWER_S:g} s")
            time.sleep(LOOK_S)  # the last one is about to be gone

    def way(self, entered: Entered, settings: DriverSettings) -> tuple[Connection, DriverSettings]:
        """How this program reaches the engine: directly if both ends can dial each other, else by the scheduler."""
        tls = tls_from(self.client.security, "client") if entered.has_tls else None
        connection = Connection(
            address=entered.head, secret=entered.secret.hex(), session=entered.session,
            certificate=tls.certificate if tls else None, key=tls.key if tls else None,
            authority=tls.authority if tls else "")
        settings = msgspec.structs.replace(settings, secret=entered.secret)
        host = self.direct_host(entered.head)
        if host:
            return connection, msgspec.structs.replace(settings, host=host)
        relay = str(self.client.scheduler.address)
        if relay.partition("://")[0] not in RELAYED:
            raise HeadLost(f"the head at {entered.head.partition('#')[0]} and this program cannot dial each other, "
                           f"and the scheduler at {relay} cannot pass bytes on")
        log.info("the engine is reached through the Dask scheduler at %s", relay)
        return connection, msgspec.structs.replace(settings, host=LOOPBACK, relay=relay)

    def direct_host(self, head: str) -> str:
        """The address of this host as the cluster reaches it; "" when one end cannot dial the other."""
        host, _, port = head.partition("://")[2].partition("#")[0].rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
            mine = own_host(head)
            with socket.create_server((mine, 0), family=socket.AF_INET6 if ":" in mine else socket.AF_INET) as server:
                at = server.getsockname()[1]
                return mine if self.call(lambda: self.client.run_on_scheduler(reaches, mine, at)) else ""
        except (OSError, HeadLost) as error:
            log.debug("the head is not reached directly: %s", error)
            return ""

    def wait_for_nodes(self, session: DriverSession) -> None:
        """Return when the nodes of all Dask workers have joined; raises FlowError for one that does not."""
        end_s = time.monotonic() + NODES_S
        while True:
            seen = self.call(lambda: self.client.run_on_scheduler(engine_workers))
            here = {entry.node_id for entry in session.nodes_seen}
            away = {worker: one for worker, one in seen.items() if not (one.is_here and one.node_id in here)}
            for worker, one in away.items():
                if one.reason:
                    raise FlowError(f"no flowengine node on the Dask worker {worker}: {one.reason}")
            if not away:
                return
            if time.monotonic() > end_s:
                raise HeadLost(f"nodes did not join within {NODES_S:g} s: " + "; ".join(map(why_away, away.items())))
            time.sleep(LOOK_S)

    def watch_head(self, session: DriverSession, connection: Connection) -> None:
        """Have a link to the head: it ends with Dask's scheduler, and nobody would start it again."""
        seeking = threading.Lock()

        def seek() -> None:
            end_s = time.monotonic() + HEAD_AWAY_S
            while not session.closed:
                try:
                    asyncio.run_coroutine_threadsafe(session.reach_head(connection), session.loop).result()
                    seeking.release()
                    return
                except (FlowError, OSError, RuntimeError, concurrent.futures.CancelledError) as error:
                    if time.monotonic() > end_s:
                        session.engine_ended(None, f"the engine inside of the Dask cluster has ended: {error}")
                        return
                time.sleep(LOOK_S)

        def lost() -> None:
            if seeking.acquire(blocking=False):
                threading.Thread(target=seek, name="flowengine-head", daemon=True).start()

        session.head_lost = lost
        asyncio.run_coroutine_threadsafe(session.reach_head(connection), session.loop).result(ANSWER_S)

    # --- leases -----------------------------------------------------------------------------------

    def hold(self) -> None:
        """From now on have a task on each Dask worker whose node is used, so that Dask does not close it."""
        self.client.subscribe_topic(LEASE_TOPIC, self.told_used)
        self.client.subscribe_topic(NODE_TOPIC, told_node)
        used: tuple[str, ...] = self.call(lambda: self.client.run_on_scheduler(engine_used, self.program, self.node_id))
        self.keep(used)

    def told_used(self, event: tuple[float, Any]) -> None:
        """The scheduler tells which workers are used, on the loop of the client."""
        self.keep(event[1]["used"])

    def keep(self, used: Sequence[str]) -> None:
        """Have leases of these and no others."""
        with self.lock:
            for worker in [worker for worker in self.leases if worker not in used or self.left]:
                self.leases.pop(worker).release()
            for worker in used:
                if worker not in self.leases and not self.left and self.client.status == "running":
                    self.leases[worker] = self.client.submit(
                        lease, key=f"{LEASE_KEY}{self.program}-{next(self.numbers)}", workers=[worker],
                        allow_other_workers=False, pure=False, priority=1)

    # --- leaving ----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Give all back; return when nodes and head are gone, if this was the last program."""
        if self.left:
            return
        self.left = True
        if self.client.status != "running":
            return  # with it, Dask has dropped our leases; that this program is gone is seen by the head
        for topic in (LEASE_TOPIC, NODE_TOPIC):
            with contextlib.suppress(Exception):  # it has not come to that, or the client is about to close
                self.client.unsubscribe_topic(topic)
        self.keep(())
        try:
            self.call(lambda: self.client.run_on_scheduler(leave_engine, self.program, self.node_id), LEAVE_S)
        except FlowError as error:
            log.info("the Dask scheduler was not told that this program is done: %s", error)


def told_node(event: tuple[float, Any]) -> None:
    """A worker tells what became of its node; one that joins later has no other way to let people know."""
    worker, reason = event[1]["worker"], event[1]["reason"]
    if reason:
        log.warning("no flowengine node on the Dask worker %s: %s", worker, reason)


def why_away(entry: tuple[str, WorkerSeen]) -> str:
    """What is known of a node that is awaited."""
    worker, one = entry
    if not one.node_id:
        return f"of the Dask worker {worker}, which has not told that it listens"
    what = "was not told to us" if one.is_here else "listens, but does not reach the head"
    return f"{one.node_id} of the Dask worker {worker}, which {what}"


# --- what is run in the scheduler's process -----------------------------------------------------------------------


async def enter_engine(program: str, version: str, dask_scheduler: Any = None) -> Entered | FlowError | None:
    """Join, or why not; None: there is no engine, or one that ends just now."""
    plugin = dask_scheduler.plugins.get(HEAD_NAME)
    if plugin is None or plugin.ending:
        return None
    try:
        check_version(version, "the Dask scheduler")
        entered: Entered | None = await plugin.enter(program)
        return entered
    except FlowError as error:  # what is raised here, Dask would log with a traceback
        return error


async def leave_engine(program: str, node_id: str, dask_scheduler: Any = None) -> None:
    """Leave; returns when all is gone, if it was the last one."""
    plugin = dask_scheduler.plugins.get(HEAD_NAME)
    if plugin is not None:
        await plugin.leave(program, node_id)


def engine_workers(dask_scheduler: Any = None) -> dict[str, WorkerSeen]:
    """What became of the node of each worker."""
    plugin = dask_scheduler.plugins.get(HEAD_NAME)
    if plugin is None:
        raise HeadLost("the engine has ended meanwhile")
    found: dict[str, WorkerSeen] = plugin.workers()
    return found


def engine_used(program: str, node_id: str, dask_scheduler: Any = None) -> tuple[str, ...]:
    """The workers that are in use, asked by a program that has just come up."""
    plugin = dask_scheduler.plugins.get(HEAD_NAME)
    return plugin.arrived(program, node_id) if plugin is not None else ()


async def reaches(host: str, port: int) -> bool:
    """Whether the scheduler's host can dial."""
    try:
        async with asyncio.timeout(REACH_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
