"""What a process is told when it starts, and what the launcher and its node say to each other.

All of it is plain data: it comes as one JSON line to the launcher and as msgpack to its children.
"""

from __future__ import annotations

import msgspec

from flowengine.config import Config
from flowengine.core.messages import Shape

WORKER_MODULE = "flowengine.runtime.worker"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A part of what a process is told."""


class Tls(Settings, frozen=True, kw_only=True):
    """What a process shows, and whom it trusts, all PEM; no key: it is in one text with the certificate."""

    certificate: str
    key: str
    authority: str = ""  # who signed the others; "": all processes of the cluster show this certificate


class WorkerSettings(Settings, frozen=True, kw_only=True):
    """What runtime.worker.main is called with."""

    worker_id: str
    node: str
    node_id: str
    host: str
    session: str
    secret: bytes
    tls: Tls | None
    store_folder: str
    state_dir: str
    live_url: str  # where large checkpoints and durable values of the session go
    running_path: str  # the worker notes here which task it runs; see node_workers for how
    config: Config
    log_to_driver: bool = True
    head: str = ""
    has_gpus: bool = False  # the node has: a task sees those that it was given, and others none


class NodeProcessSettings(Settings, frozen=True, kw_only=True):
    """What runtime.node.main is called with; its session folder is made below store_root."""

    node_id: str
    host: str
    session: str
    secret: bytes
    tls: Tls | None
    total: Shape
    num_workers: int
    store_limit_bytes: int
    store_root: str
    state_dir: str
    live_url: str
    config: Config
    head: str = ""  # "": the launcher tells it when the head listens
    port: int = 0
    log_to_driver: bool = True
    relay: str = ""  # what Place.relay says
    former: tuple[str, ...] = ()  # ids of the nodes that this launcher had before


class HeadProcessSettings(Settings, frozen=True, kw_only=True):
    """What runtime.head.main is called with."""

    host: str
    session: str
    secret: bytes
    tls: Tls | None
    state_dir: str
    config: Config
    port: int = 0
    connection_paths: tuple[str, ...] = ()  # where `flow head` leaves connection files


class LauncherSettings(Settings, frozen=True, kw_only=True):
    """What the launcher is told: one JSON line (bytes are base64 in it)."""

    host: str
    session: str
    secret: bytes
    total: Shape
    num_workers: int
    store_limit_bytes: int
    state_dir: str
    durable_url: str = ""  # of the storage for what must outlive processes; "": state_dir
    tls: Tls | None = None
    store_root: str = "/dev/shm"
    head: str = ""  # "": start one here
    config: Config = Config()
    worker_module: str = WORKER_MODULE
    watch_parent: bool = True  # end when stdin ends or the parent process does
    log_to_driver: bool = True
    relay: str = ""  # what Place.relay says
    connection_path: str = ""  # that led here, as far as it is to be looked at

    @property
    def extra_workers(self) -> int:
        """How many workers the node may start beyond the slots."""
        return self.config.workers_extra_max if self.total else 0


class LauncherReady(Settings, frozen=True, kw_only=True):
    """The launcher's line on stdout: after the start, and again when the head or the node was started anew."""

    node: str
    node_id: str
    node_pid: int
    head: str
    head_pid: int  # 0: not a child of this launcher
    store_folder: str


# --- node -> launcher -----------------------------------------------------------------------------


class Word(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Something said on the socket between the launcher and its node."""


class NodeListens(Word, frozen=True):
    """The node can be joined."""

    address: str
    store_folder: str


class ForkWorker(Word, frozen=True):
    """Start a worker; with this come the write ends of the pipes that take its stdout and stderr."""

    settings: WorkerSettings


class SignalWorker(Word, frozen=True):
    """Send a signal to a worker that has not been reaped."""

    worker_id: str
    signal: int


class SignalHead(Word, frozen=True):
    """Send a signal to the head, if this launcher started it (failure laboratory)."""

    signal: int


class EndAll(Word, frozen=True):
    """Somebody who may has asked for the end of this node and of all that the launcher has started."""


# --- launcher -> node -----------------------------------------------------------------------------


class HeadListens(Word, frozen=True):
    """The head listens here (it was started, or started again)."""

    address: str


class WorkerForked(Word, frozen=True):
    """The worker's process id."""

    worker_id: str
    pid: int


class WorkerReaped(Word, frozen=True):
    """The worker's process ended; a negative exit code is the number of the signal."""

    worker_id: str
    pid: int
    exit_code: int


TO_LAUNCHER = NodeListens | ForkWorker | SignalWorker | SignalHead | EndAll
TO_NODE = HeadListens | WorkerForked | WorkerReaped
