"""What the parts of the node machine share: settings, who is there, and the list of commands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowengine.errors import EngineBug

from .dispatch import Outbox
from .journal import Journal
from .messages import Death, Message, NodeEntry, NodesWanted, Record, Shape
from .telling import Telling

if TYPE_CHECKING:
    from flowengine.config import Config

SIGKILL, SIGTERM = 9, 15
NEVER_S = float("-inf")  # a moment before all others

COUNTERS = (
    "bytes_spilled",
    "bytes_moved",
    "leases_granted",
    "leases_spilled",
    "workers_started",
    "workers_lost",
    "events_ignored",
    "collectives_done",
    "collectives_early",
    "collectives_repaired",
    "bytes_sent_again",
)


class NodeSettings(Record, frozen=True):
    """What a node is told once, at its start."""

    me: str
    node_id: str
    host: str
    total: Shape
    num_workers: int
    store_folder: str
    store_limit_bytes: int
    session: str
    head: str
    gpus: tuple[str, ...] = ()  # their names, as CUDA_VISIBLE_DEVICES lists them
    former: tuple[str, ...] = ()  # node ids of those that its launcher had before, the last ones


class Tick(Message, frozen=True):
    """A timer of the node's own; what: "beat" every heartbeat, "store", "workers" and "report" when needed."""

    what: str


class QuestionExpired(Message, frozen=True):
    """The time to collect answers to a question is over."""

    number: int


@dataclass(slots=True, eq=False)
class Process:
    """A process that joined: a driver, or a worker beside its place in the pool."""

    address: str
    pid: int
    role: str


@dataclass(slots=True, eq=False)
class Worker:
    """A worker process; state is one of those in node_pool.MOVES."""

    worker_id: str
    started_s: float
    state: str = "starting"
    pid: int = 0
    address: str = ""
    lease: int = 0  # 0: none
    root: str = ""  # the driver on whose behalf it works or worked last
    idle_since_s: float = 0.0
    told_to_end: bool = False  # since it is one too many; it does so unless it is needed
    heard_s: float = 0.0
    cpu_s: float = -1.0  # at the last check while it was silent; below 0: not checked
    kill_reason: str = ""
    killed_s: float = 0.0
    killed_task: bytes = b""
    devices: tuple[str, ...] = ()  # GPUs that it was last lent with
    actor: str = ""  # the key of what tasks ask for that are to be beside the actor that lives in it
    counters: dict[str, int] = field(default_factory=dict)  # as it last told


class Desk:
    """State that all parts may read; each field is changed by one part only."""

    __slots__ = (
        "asked_head",
        "by_address",
        "config",
        "counters",
        "dead_nodes",
        "epoch",
        "gone",
        "head",
        "head_up",
        "journal",
        "knows_all",
        "leases_due",
        "me",
        "node_id",
        "nodes",
        "out",
        "past",
        "processes",
        "report_due",
        "settings",
        "telling",
        "workers",
    )

    def __init__(self, settings: NodeSettings, config: Config) -> None:
        self.settings = settings
        self.config = config
        self.me = settings.me
        self.node_id = settings.node_id
        self.out = Outbox()
        self.journal = Journal(config.story_lines_max)
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.gone: dict[str, None] = {}  # processes that ended; what they said last may come later
        self.past: dict[str, int] = {}  # counters of workers that are dead
        self.workers: dict[str, Worker] = {}  # all processes of the pool, also dying ones
        self.by_address: dict[str, Worker] = {}  # those that listen and are not known to be dead
        self.processes: dict[str, Process] = {}  # all that joined and live
        self.nodes: dict[str, NodeEntry] = {}  # as the head told, this node included
        self.knows_all = True  # these are all, as far as is known
        self.asked_head = False  # for all of them
        self.telling = Telling()
        self.dead_nodes: dict[str, None] = {}  # addresses
        self.head = settings.head
        self.head_up = False
        self.epoch = 0  # 0: never accepted
        self.leases_due = False  # something changed that may allow a grant
        self.report_due = False  # something changed that the head should know

    def is_alive(self, address: str) -> bool:
        """Whether a process of this host is there; False for all of other hosts."""
        return address in self.by_address or address in self.processes

    def others(self) -> Iterator[NodeEntry]:
        """The other living nodes, by id."""
        for node_id in sorted(self.nodes):
            if node_id != self.node_id:
                yield self.nodes[node_id]

    def locals(self) -> list[str]:
        """Addresses of all processes of this node that can be asked."""
        return sorted({**dict.fromkeys(self.by_address), **dict.fromkeys(self.processes)})

    def want_nodes(self) -> None:
        """Somebody here needs to know all nodes: the head is asked once, and from then on tells what changes."""
        if not self.knows_all and self.head_up and not self.asked_head:
            self.asked_head = True
            self.out.send(self.head, NodesWanted())

    def root_of(self, address: str) -> str:
        """The driver on whose behalf a process works; itself when that is not known."""
        worker = self.by_address.get(address)
        return worker.root if worker is not None and worker.root else address

    def bug(self, message: str, name: bytes | str) -> EngineBug:
        """An error of the engine with the story of what it is about."""
        return EngineBug(message, story=self.journal.story(name, lines_max=50))


def account(worker: Worker, death: Death, settings: NodeSettings) -> Death:
    """The death of a worker as its node knows it: what was reaped, and why the node killed it."""
    return Death(
        worker_id=worker.worker_id,
        host=death.host or settings.host,
        pid=death.pid or worker.pid,
        exit_code=death.exit_code,
        running=death.running or worker.killed_task,
        running_attempt=death.running_attempt,
        reason=worker.kill_reason or death.reason,
        log_lines=death.log_lines,
        overdue=death.overdue,
        running_name=death.running_name,
    )
