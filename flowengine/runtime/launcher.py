"""The process from which all others of a host are forked: head (where it starts one), node and workers.

It has imported everything, has one thread, decides nothing but whom to start again, and reaps all of them. When its
parent is gone, or on SIGTERM or SIGINT, it ends them and removes what they left in shared memory.

    python -m flowengine.runtime.launcher < SETTINGS      one JSON line, see settings.LauncherSettings
"""

from __future__ import annotations

import contextlib
import functools
import gc
import heapq
import importlib
import itertools
import logging
import os
import secrets
import selectors
import shutil
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import msgspec

from flowengine.errors import FlowError
from flowengine.objects.spill import spill_folder
from flowengine.runtime import child
from flowengine.runtime.channel import Channel, channel_pair, close_all
from flowengine.runtime.connection import (
    Connection,
    listens,
    page_path,
    port_of,
    read_connection,
    session_path,
    write_connection,
)
from flowengine.runtime.settings import (
    TO_LAUNCHER,
    EndAll,
    ForkWorker,
    HeadListens,
    HeadProcessSettings,
    LauncherReady,
    LauncherSettings,
    NodeListens,
    NodeProcessSettings,
    SignalHead,
    SignalWorker,
    WorkerForked,
    WorkerReaped,
    WorkerSettings,
)
from flowengine.runtime.worker_logs import logs_folder

log = logging.getLogger(__name__)

END_GRACE_S_MAX = 0.8  # between SIGTERM and SIGKILL when all end
RESTART_DELAY_S = 0.1
RESTART_DELAY_S_MAX = 5.0
QUICK_DEATH_S = 2.0  # one that lived shorter counts as a failed start
FAILED_STARTS_MAX = 8
FILE_LOOK_S = 2.0
FILE_LOOKS = 5  # in a row that say the same
FORMER_MAX = 16  # more nodes than this do not die before one has joined
# What workers and nodes want at once.
PRELOADED = ("numpy", "lz4.frame", "cloudpickle", "sqlite3", "psutil", "flowengine.collectives.reducing")
READ_BYTES = 65_536

FromNode = EndAll | ForkWorker | NodeListens | SignalHead | SignalWorker
OnReady = Callable[[LauncherReady], None]


class Life:
    """One life of the node or the head: its process and what it told."""

    def __init__(self, pid: int, name: str) -> None:
        self.pid = pid
        self.name = name
        self.began = time.monotonic()
        self.address = ""
        self.store_folder = ""
        self.workers: dict[str, int] = {}  # worker_id: pid
        self.channel: Channel[FromNode] | None = None
        self.report_fd = -1


class Launcher:
    """One host's supervisor; run() returns when all its children are gone."""

    def __init__(self, settings: LauncherSettings, on_ready: OnReady) -> None:
        self.settings = settings
        self.on_ready = on_ready
        self.pid = os.getpid()
        self.head_address = settings.head
        self.head: Life | None = None
        self.node: Life | None = None
        self.former: tuple[str, ...] = ()  # ids of nodes that are dead
        self.worker_of: dict[int, tuple[Life, str]] = {}
        self.folders: list[str] = []
        self.failed_starts = {"head": 0, "node": 0}
        self.led_elsewhere = 0  # how often in a row the connection file did
        self.exit_code = 0
        self.ending = False
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._modules: dict[str, ModuleType] = {}

    def run(self) -> int:
        """Start all, keep them running until told to end, end all."""
        self._watch_signals()
        if self.settings.watch_parent:
            self._watch_parent()
        self._modules = preload(self.settings)
        try:
            if not self.settings.head:
                self._start_head()
            self._start_node()
            if self.settings.connection_path:
                self._after(FILE_LOOK_S, self._look_at_file)
            while not self.ending:
                self._turn(self._wait_s())
        finally:
            self._end()
        return self.exit_code

    # --- waiting ----------------------------------------------------------------------------------

    def _turn(self, timeout_s: float | None) -> None:
        """Wait for what happens next and see to it."""
        for key, _ in self._selector.select(timeout_s):
            key.data()
        while self._due and self._due[0][0] <= time.monotonic() and not self.ending:
            heapq.heappop(self._due)[2]()

    def _wait_s(self) -> float | None:
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else None

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._order), action))

    def _watch_signals(self) -> None:
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a background job of a script
                signal.signal(number, lambda number, frame: self._stop())
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._woken)

    def _watch_parent(self) -> None:
        """End when stdin does, and when the parent does: a fork of the parent may hold the other end of stdin open."""
        with contextlib.suppress(OSError):  # a file has no end to wait for
            self._selector.register(0, selectors.EVENT_READ, self._stdin_moved)
        parent = os.getppid()
        with contextlib.suppress(OSError):
            parent_fd = os.pidfd_open(parent)
            self._selector.register(parent_fd, selectors.EVENT_READ, self._stop)

    def _stdin_moved(self) -> None:
        if not os.read(0, READ_BYTES):
            self._selector.unregister(0)
            self._stop()

    def _stop(self) -> None:
        self.ending = True

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(READ_BYTES):
                continue
        self._reap()

    def _look_at_file(self) -> None:
        """End when the file by which this node joined leads elsewhere and its head is gone: that comes back no more."""
        path, session, head = self.settings.connection_path, self.settings.session, self.settings.head
        self.led_elsewhere = self.led_elsewhere + 1 if led_elsewhere(path, session, head) else 0
        if self.led_elsewhere >= FILE_LOOKS:
            log.error("%s leads to another cluster now, and the head of this node's cluster (session %s) is gone: the "
                      "node ends. Start it again to join the other one", path, session)
            self.exit_code = 1
            self._stop()
        self._after(FILE_LOOK_S, self._look_at_file)

    # --- ends of processes ------------------------------------------------------------------------

    def _reap(self) -> None:
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            pid = found.si_pid
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)  # what it started and left; its pid is not free before the next line
            exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._ended(pid, exit_code)

    def _ended(self, pid: int, exit_code: int) -> None:
        worker = self.worker_of.pop(pid, None)
        if worker is not None:
            life, worker_id = worker
            life.workers.pop(worker_id, None)
            self._tell_node(life, WorkerReaped(worker_id, pid, exit_code))
        elif self.node is not None and pid == self.node.pid:
            self._node_ended(self.node, exit_code)
        elif self.head is not None and pid == self.head.pid:
            self._head_ended(self.head, exit_code)

    def _node_ended(self, life: Life, exit_code: int) -> None:
        self.node = None
        self.former = (*self.former, life.name)[-FORMER_MAX:]
        for pid in life.workers.values():
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so it is still that process
        self._drop_channel(life)
        self._remove(life)
        self._start_again("node", life, exit_code, self._start_node)

    def _head_ended(self, life: Life, exit_code: int) -> None:
        self.head = None
        self._drop_report(life)
        self._start_again("head", life, exit_code, self._start_head)

    def _start_again(self, kind: str, life: Life, exit_code: int, start: Callable[[], None]) -> None:
        if self.ending:
            return
        quick = not life.address or time.monotonic() - life.began < QUICK_DEATH_S
        failed = self.failed_starts[kind] = self.failed_starts[kind] + 1 if quick else 0
        if failed > FAILED_STARTS_MAX:
            log.error("the %s ended %d times in a row at its start (exit code %d): giving up", kind, failed, exit_code)
            self.exit_code = 1
            self._stop()
            return
        log.info("the %s (pid %d) ended with exit code %d and is started again", kind, life.pid, exit_code)
        self._after(min(RESTART_DELAY_S * 2 ** max(0, failed - 1), RESTART_DELAY_S_MAX), start)

    def _remove(self, life: Life) -> None:
        whose = self.settings.state_dir, self.settings.session, life.pid
        for left in filter(None, (life.store_folder, spill_folder(*whose), logs_folder(*whose))):
            shutil.rmtree(left, ignore_errors=True)

    # --- head -------------------------------------------------------------------------------------

    def _start_head(self) -> None:
        settings = self.settings
        head = HeadProcessSettings(
            host=settings.host, session=settings.session, secret=settings.secret, tls=settings.tls,
            state_dir=settings.state_dir, config=settings.config, port=port_of(self.head_address))
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        pid = os.fork()
        if not pid:
            child.run_and_exit(functools.partial(self._be_head, head, writer))
        os.close(writer)
        self.head = Life(pid, "head")
        self.head.report_fd = reader
        self._selector.register(reader, selectors.EVENT_READ, functools.partial(self._head_reports, self.head))

    def _be_head(self, settings: HeadProcessSettings, report_fd: int) -> int | None:
        child.become_child("flow-head", self.pid, (report_fd,))
        code: int | None = self._modules["head"].main(settings, report_fd)
        return code

    def _head_reports(self, life: Life) -> None:
        text = os.read(life.report_fd, READ_BYTES).decode().strip()
        self._drop_report(life)
        if not text:
            return  # it ended; that is told by its reaping
        life.address = self.head_address = text
        if self.node is not None:
            self._tell_node(self.node, HeadListens(text))
        self._tell_ready()

    def _drop_report(self, life: Life) -> None:
        if life.report_fd >= 0:
            self._selector.unregister(life.report_fd)
            os.close(life.report_fd)
            life.report_fd = -1

    # --- node -------------------------------------------------------------------------------------

    def _start_node(self) -> None:
        settings = self.settings
        node_id = secrets.token_hex(6)
        node = NodeProcessSettings(
            node_id=node_id, host=settings.host, session=settings.session, secret=settings.secret, tls=settings.tls,
            total=settings.total, num_workers=settings.num_workers, store_limit_bytes=settings.store_limit_bytes,
            store_root=settings.store_root, state_dir=settings.state_dir, live_url=self._live_url(),
            config=settings.config, head=self.head_address, log_to_driver=settings.log_to_driver, relay=settings.relay,
            former=self.former)
        mine, its = channel_pair()
        pid = os.fork()
        if not pid:
            child.run_and_exit(functools.partial(self._be_node, node, its))
        its.close()
        life = self.node = Life(pid, node_id)
        life.channel = Channel(mine, TO_LAUNCHER)
        self._selector.register(mine, selectors.EVENT_READ, functools.partial(self._node_speaks, life))

    def _live_url(self) -> str:
        """Where checkpoints go: with a local engine they end, those of a cluster outlive this host."""
        settings = self.settings
        url = settings.durable_url or f"file://{settings.state_dir}"
        found: str = self._modules["durable"].live_url(url, settings.session, 0 if settings.head else self.pid)
        return found

    def _be_node(self, settings: NodeProcessSettings, end: socket.socket) -> int | None:
        child.become_child("flow-node", self.pid, (end.fileno(),))
        code: int | None = self._modules["node"].main(settings, end)
        return code

    def _node_speaks(self, life: Life) -> None:
        channel = life.channel
        if channel is None:
            return
        try:
            channel.flush()
            self._watch_channel(life)
            while (heard := channel.hear()) is not None:
                self._obey(life, *heard)
        except (OSError, EOFError):
            self._drop_channel(life)  # it is about to be reaped
        except msgspec.MsgspecError:
            log.exception("the node says what the launcher cannot read")

    def _obey(self, life: Life, word: FromNode, fds: list[int]) -> None:
        if isinstance(word, ForkWorker):
            self._fork_worker(life, word.settings, fds)
        elif isinstance(word, SignalWorker):
            pid = life.workers.get(word.worker_id)
            if pid is not None:
                os.kill(pid, word.signal)
        elif isinstance(word, SignalHead):
            if self.head is not None:
                os.kill(self.head.pid, word.signal)
        elif isinstance(word, EndAll):
            self._stop()
        else:
            life.address, life.store_folder = word.address, word.store_folder
            self.folders.append(word.store_folder)
            self._tell_ready()

    def _tell_node(self, life: Life, word: HeadListens | WorkerForked | WorkerReaped) -> None:
        if life.channel is None:
            return
        try:
            life.channel.say(word)
            self._watch_channel(life)
        except OSError:
            self._drop_channel(life)

    def _watch_channel(self, life: Life) -> None:
        """Wait for the channel to be writable only while something waits to be sent."""
        assert life.channel is not None
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if life.channel.waiting else 0)
        key = self._selector.get_key(life.channel.end)
        if key.events != wanted:
            self._selector.modify(life.channel.end, wanted, key.data)

    def _drop_channel(self, life: Life) -> None:
        if life.channel is not None:
            self._selector.unregister(life.channel.end)
            life.channel.close()
            life.channel = None

    def _tell_ready(self) -> None:
        node, head = self.node, self.head
        if node is None or not node.address or not self.head_address or (head is not None and not head.address):
            return
        if head is not None:
            self._leave_connection()
        self.on_ready(LauncherReady(node=node.address, node_id=node.name, node_pid=node.pid, head=self.head_address,
                                    head_pid=head.pid if head else 0, store_folder=node.store_folder))

    def _leave_connection(self) -> None:
        """Let this user's programs find the local engine."""
        settings, tls = self.settings, self.settings.tls
        path = session_path(settings.state_dir, settings.session)
        try:
            os.makedirs(path.parent, mode=0o700, exist_ok=True)
            write_connection(path, Connection(
                address=self.head_address, secret=settings.secret.hex(), session=settings.session,
                certificate=tls.certificate if tls else None, key=tls.key if tls else None))
        except OSError as error:
            log.warning("programs like `flow status` will not find this engine: %s", error)

    # --- workers ----------------------------------------------------------------------------------

    def _fork_worker(self, life: Life, settings: WorkerSettings, fds: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            log.error("cannot fork a worker: %s", error)
            close_all(fds)
            self._tell_node(life, WorkerReaped(settings.worker_id, 0, 1))
            return
        if not pid:
            child.run_and_exit(functools.partial(self._be_worker, settings, fds))
        close_all(fds)
        life.workers[settings.worker_id] = pid
        self.worker_of[pid] = (life, settings.worker_id)
        self._tell_node(life, WorkerForked(settings.worker_id, pid))

    def _be_worker(self, settings: WorkerSettings, fds: list[int]) -> int | None:
        child.become_child("flow-worker", self.pid, (), (fds[0], fds[1]))
        code: int | None = self._modules["worker"].main(settings)
        return code

    # --- the end ----------------------------------------------------------------------------------

    def _end(self) -> None:
        """SIGTERM to all, SIGKILL to those that are still there after the grace; then nothing of them is left."""
        self.ending = True
        self._signal_all(signal.SIGTERM)
        grace_ends = time.monotonic() + min(self.settings.config.stop_grace_s, END_GRACE_S_MAX)
        while self._children() and (left_s := grace_ends - time.monotonic()) > 0:
            self._turn(left_s)
        self._signal_all(signal.SIGKILL)
        while self._children():
            self._turn(None)
        if not self.settings.head:
            with contextlib.suppress(OSError):
                session_path(self.settings.state_dir, self.settings.session).unlink()
            page_path(self.settings.state_dir, self.settings.session).unlink(missing_ok=True)
            for left in Path(self.settings.state_dir).glob(f"head-{self.settings.session}.sqlite*"):
                left.unlink(missing_ok=True)  # the session will not be taken up again
            self._modules["durable"].drop(self._live_url())
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(folder))  # when this was the last session of this user

    def _children(self) -> list[int]:
        lives = [life.pid for life in (self.node, self.head) if life is not None]
        return [*self.worker_of, *lives]

    def _signal_all(self, number: int) -> None:
        for pid in self._children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def led_elsewhere(path: str, session: str, head: str) -> bool:
    """Whether a connection file is of another cluster than that session, whose head does not listen any more."""
    try:
        known = read_connection(path)
    except FlowError:
        return False  # no file, or none of ours, says nothing
    place = head.partition("#")[0]
    return known.session != session and (known.address.partition("#")[0] == place or not listens(head))


def preload(settings: LauncherSettings) -> dict[str, ModuleType]:
    """Import all that children use, so that a fork has it at once; leaves nothing for the collector to walk."""
    for name in PRELOADED:
        importlib.import_module(name)
    with contextlib.suppress(ImportError):
        importlib.import_module("uvloop")
    modules = {"node": importlib.import_module("flowengine.runtime.node"),
               "worker": importlib.import_module(settings.worker_module),
               "durable": importlib.import_module("flowengine.recovery.durable")}
    if not settings.head:
        modules["head"] = importlib.import_module("flowengine.runtime.head")
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # lost peers are news for the machines alone
    # The threads are those of BLAS, which sees to its own forks.
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
    gc.freeze()  # without a collection, which would take longer than its little garbage is worth
    gc.enable()
    return modules


def run_launcher(settings: LauncherSettings, on_ready: OnReady = lambda ready: None) -> int:
    """Be the launcher in this process (`flow node`); returns its exit code when all children are gone."""
    return Launcher(settings, on_ready).run()


def run_head(settings: HeadProcessSettings) -> int:
    """Be the head in this process (`flow head`); returns its exit code when it was told to end."""
    head = importlib.import_module("flowengine.runtime.head")
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    code: int | None = head.main(settings, -1)
    return code or 0


def read_settings(arguments: list[str]) -> LauncherSettings:
    """The settings from the file named by the only argument, else from the first line of stdin."""
    if arguments:
        return msgspec.json.decode(Path(arguments[0]).read_bytes(), type=LauncherSettings)
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, READ_BYTES)
        if not part:
            break
        line += part
    return msgspec.json.decode(line, type=LauncherSettings)


def main() -> int:
    """Entry point of the process that init() starts."""
    logging.basicConfig(level=logging.WARNING, format="flowengine %(process)d %(levelname)s %(name)s: %(message)s")
    settings = read_settings(sys.argv[1:])
    ready_fd = os.dup(1)
    os.dup2(child.STDERR, 1)  # stray prints of imports must not be taken for the ready line
    os.set_blocking(ready_fd, False)  # nobody has to read on after the first line
    if settings.watch_parent:
        with contextlib.suppress(OSError):
            os.setsid()

    def tell(ready: LauncherReady) -> None:
        with contextlib.suppress(OSError):
            os.write(ready_fd, msgspec.json.encode(ready) + b"\n")

    return run_launcher(settings, tell)


if __name__ == "__main__":
    sys.exit(main())
