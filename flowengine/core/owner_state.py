"""What an owner knows: objects, tasks, leases; and the literal table of a task's life."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec

from ..errors import EngineBug
from ..scheduling.shares import Shares
from .ids import short
from .messages import BundleSet, Checkpoint, Failed, Message, PushTask, RefTo, Shape, TaskSpec, Value

SOLE = "-sole-"  # first in the placement of what has a process to itself: no node's id
QueueKey = tuple[Shape, tuple[str, ...]]
WANTED = Failed(b"", "")  # no reason against it


class State(IntEnum):
    """Where a task is in its life."""

    WAITING = 0  # inputs are missing
    READY = 1  # waits for a slot
    SENT = 2  # pushed to a worker
    DONE = 3  # has a result
    FAILED = 4  # ended with an error; final


# By name in what runs for every task: to find a member in its class takes ten times as long.
WAITING, READY, SENT, DONE, FAILED = State
ENDED = (DONE, FAILED)


class Step(IntEnum):
    """What happens to a task."""

    INPUTS_CAME = 0
    PUSHED = 1
    ENDED_WELL = 2
    ENDED_BADLY = 3  # for good: error, cancelled, retries used up
    TRY_AGAIN = 4  # the attempt is over, the wish is not
    REBUILD = 5  # a result was lost and is needed


INPUTS_CAME, PUSHED, ENDED_WELL = Step.INPUTS_CAME, Step.PUSHED, Step.ENDED_WELL

LIFE: dict[tuple[State, Step], State] = {
    (State.WAITING, Step.INPUTS_CAME): State.READY,
    (State.WAITING, Step.ENDED_BADLY): State.FAILED,
    (State.READY, Step.PUSHED): State.SENT,
    (State.READY, Step.TRY_AGAIN): State.WAITING,
    (State.READY, Step.ENDED_BADLY): State.FAILED,
    (State.SENT, Step.ENDED_WELL): State.DONE,
    (State.SENT, Step.ENDED_BADLY): State.FAILED,
    (State.SENT, Step.TRY_AGAIN): State.WAITING,
    (State.DONE, Step.REBUILD): State.WAITING,
}


# Objects and tasks refer to each other, yet the cyclic collector does not see them: there may be a million at once, and
# each of its passes would walk them all. Owner.erase and let_go_owned cut the references when a record goes.
class Obj(msgspec.Struct, gc=False):
    """One object as its owner, or a borrower of it, knows it."""

    oid: bytes
    owner: str = ""  # empty: this process
    heir: str = ""
    task: Task | None = None  # the task that makes it again (owned), or whose result holds it (borrowed)
    value: Value | None = None
    maker: str = ""  # the worker that made it
    method: str = ""  # of an actor that made it, when the call is forgotten
    local: int = 0  # ObjectRef instances in this process
    pins: int = 0  # tasks that need the value as input, containers that hold a reference, confirmations under way
    lineage: int = 0  # tasks that would need it to run again
    introduced: int = 0  # borrowed: how often the owner was told that we hold it
    elsewhere: dict[str, int] | None = None  # the same for other processes that own the object in another life
    gone_bytes: int = -1  # size of a stored value without references that has lost all copies that we knew of
    strays: dict[str, None] | None = None  # nodes with a copy of an attempt that may not have been heard of
    watched: bool = False  # borrowed: the owner was asked for the value
    durable: bool = False
    was_put: bool = False
    borrowers: dict[str, int] | None = None
    watchers: dict[str, None] | None = None
    waiters: list[Waiter] | None = None
    dependents: list[Task] | None = None
    via: Obj | None = None  # kept until the owner has confirmed that it knows us as borrower
    fetchers: dict[int, None] | None = None  # local readers that wait for the bytes

    @property
    def ready(self) -> bool:
        """There is a value or an error."""
        return self.value is not None


class Waiter(msgspec.Struct):
    """A local get or wait: resolved when `missing` falls to 0."""

    id: int
    missing: int
    objects: list[Obj]


class LongWait(msgspec.Struct):
    """A thread that has waited long, without a time limit."""

    waiter: int
    code: bytes  # the task or call that waits
    name: str
    depth: int
    alone: bool
    period_s: float = 1.0  # until it is looked at again, doubled each time
    suspected: tuple[tuple[bytes, int], ...] = ()  # the circle that was found once


class Task(msgspec.Struct, gc=False):
    """One task that this process owns. What is wanted and what runs are two fields, joined by the attempt number."""

    spec: TaskSpec
    key: QueueKey
    results: Sequence[Obj]
    inputs: Sequence[Obj]  # dependencies in the order of spec.deps, then args_object
    nested: Sequence[Obj]
    state: State = State.WAITING
    attempt: int = 0  # number of the newest attempt
    missing: int = 0
    lease: Lease | None = None
    pinned: bool = True  # inputs and nested are pinned for a run
    lineage: bool = False  # inputs are held for a re-run
    wanted: bool = True
    forced: bool = False  # cancelled by force: its worker is killed if it runs there
    why_unwanted: Failed = WANTED  # the error that the results get when the attempt has ended
    crashes: int = 0
    failures: int = 0
    rebuilds: int = 0
    recorded: dict[tuple[str, int], bytes] | None = None
    children: dict[bytes, Value] | None = None
    claimed: dict[bytes, tuple[str, ...]] | None = None  # stored ones that we own too, since their owner is dead
    wards: int = 0  # borrowed objects that it would bring again if their owners died
    again: Submitted | None = None  # a stream that was dropped, and asked for again before it had ended
    stream: Stream | None = None
    unconfirmed: int = 0
    submitted_at: float = 0.0
    load_us: int = 0  # by which its lease's load was raised
    run_s: float = 0.0  # of its last run, when that gave a stored result
    rerun_s: float = 0.0  # at most so much would run again for that if its node were lost

    def step(self, what: Step) -> None:
        """Go on in life; a pair that is not in the table is a bug of ours."""
        try:
            self.state = LIFE[self.state, what]
        except KeyError:
            name = f"task {self.spec.name} {short(self.spec.id)}"
            raise EngineBug(f"{name}: {what.name} while {self.state.name}") from None

    def spares(self) -> int:
        """How many inputs more than it needs are no errors so far; below 0: too few are left."""
        good = [obj for obj in self.inputs if type(obj.value) is not Failed]
        return len(good) - (self.spec.enough or len(self.inputs))


class Stream(msgspec.Struct):
    """The items of a streaming task so far."""

    items: dict[int, Obj] = {}  # those that are alive
    count: int = 0  # how many have come
    seen: int = 0  # how far the running attempt is
    restarting: bool = False  # the running attempt was told to end, to begin anew
    ended: bool = False
    error: Value | None = None
    taken: int = 0
    dropped: bool = False  # the reader is gone
    waiters: list[tuple[Waiter, int]] = []


NO_PRIORITY = float("-inf")  # less urgent than all
ALL_ITEMS = 1 << 40  # taken: nobody reads the stream, and its maker need not wait


class Lease(msgspec.Struct):
    """A worker that is ours for a shape."""

    id: int
    worker: str
    worker_id: str
    node: str
    node_id: str
    queue: Queue
    inflight: dict[bytes, Task] = {}
    load_us: int = 0
    unwanted: bool = False  # the node asked for it back
    fleeting: bool = False  # the node asked for it when it is idle
    below: float = NO_PRIORITY  # what is less urgent than this is not to run on it
    open: bool = True  # in the queue's rotation of leases that take more
    idle_since: float = 0.0
    taking_back: bool = False
    devices: tuple[str, ...] = ()  # its GPUs
    progress_at: float = 0.0  # when it last ended a task or got one while idle
    began_at: float = 0.0


class LateLooked(Message, frozen=True):
    """Timer: look for tasks that wait behind one that runs longer than was expected."""

    shape: Shape
    placement: tuple[str, ...]


class Queue(msgspec.Struct):
    """Tasks of one shape and placement that wait for slots, and the slots held for them."""

    key: QueueKey
    ready: dict[float, deque[Task]] = {}  # by priority
    priorities: list[float] = []  # those in use, largest first
    count: int = 0
    leases: dict[tuple[str, int], Lease] = {}
    rotation: deque[Lease] = msgspec.field(default_factory=deque)
    demand: dict[str, Demand] = {}  # by node address
    least: int = 0  # no node owes us fewer leases than this; so not all are looked at each time
    reason: str = ""
    idle_timer: bool = False
    late_timer: bool = False
    told: float = NO_PRIORITY  # how urgent nodes know it to be
    tenants: dict[tuple[tuple[str, float], ...], Any] = {}  # their owner_ways.TenantLine, beside `ready`
    others: bool = False  # tasks without a tenant wait beside those that have one
    yield_s: float = 0.0  # see owner_ways: how long until it gives up another slot for tenants that are behind
    yields_from: float = 0.0
    gang: Gang | None = None  # its tasks are members of this gang


class Gang(msgspec.Struct):
    """A gang whose members code here submits."""

    described: BundleSet
    queues: dict[QueueKey, Queue] = {}  # of members
    wanted: bool = False  # as the node was told
    looks: bool = False  # a timer runs


class Placing(msgspec.Struct):
    """What the policies of tasks need to be known."""

    node_ids: dict[str, str] = {}  # by address
    living: dict[str, None] = {}  # the same ids
    lost: dict[str, None] = {}  # ids of nodes that have died
    knows_all: bool = True  # there are no other nodes
    asked: bool = False  # our node, for all of them
    ways: dict[bytes, Any] = {}  # of tasks that have not begun: owner_ways.Way
    due: list[tuple[float, int, bytes]] = []  # a heap: when to look at which of them
    dues: int = 0  # how many there were
    has_timer: bool = False  # one runs while there are some
    shares: Shares = msgspec.field(default_factory=Shares)
    shared: dict[QueueKey, Queue] = {}  # queues in which tenants wait, or have waited


class Demand(msgspec.Struct):
    """What was asked of one node, in running totals."""

    granted: int = 0
    wanted_total: int = 0

    @property
    def outstanding(self) -> int:
        """What is asked for and not granted yet."""
        return self.wanted_total - self.granted


class Cost(msgspec.Struct):
    """What a function's runs took, smoothed."""

    run_us: float = -1.0


class Line(msgspec.Struct):
    """Calls of one caller to one actor, in order: those that wait to be sent."""

    waiting: deque[Task]
    next_seq: int = 0
    covered: int = -1  # a checkpoint covers the calls up to this number
    over: bool = False  # the caller has ended


class Target(msgspec.Struct):
    """An actor as a caller knows it."""

    actor: bytes
    owner: str
    name: str = ""
    incarnation: int = 0
    state: str = "unknown"
    worker: str = ""
    place: tuple[str, str] | None = None  # its worker and node, as people know them
    recovery: str = "exactly_once"
    error: bytes = b""
    open: int = 0  # calls sent to this incarnation and not answered
    lines: dict[bytes, Line] = {}
    # In the order of sending, until a checkpoint covers them; numbers that were not used are sent as empty calls.
    sent: dict[tuple[bytes, int], Task | PushTask] = {}
    seqs: dict[bytes, int] = {}  # task -> its number


class Made(msgspec.Struct):
    """An actor that this process made."""

    task: Task
    incarnation: int = 0
    state: str = "pending"
    worker: str = ""
    error: bytes = b""
    watchers: dict[str, None] = {}
    checkpoint: Checkpoint | None = None
    fallback: Checkpoint | None = None  # the one before, while the newest is a file, which may turn out to be bad
    folder: str = ""  # the URL of that of its checkpoints' files
    unsaved: str = ""  # why there is no newer one
    kept_calls: dict[bytes, PushTask] = {}  # of callers that are dead
    restarts: int = 0
    settled: bool = True  # its replay is over
    born_at: float = -1.0  # when it first took calls
    died_in: bytes = b""  # the call that ran when it died last, and how often in a row
    died_in_times: int = 0
    unborn: int = 0  # how often in a row it died before it took calls
    ending: str = ""  # why it is not wanted any more
    poll: int = 0  # the number of the question what others know of the last incarnation's log, while it is open
    polled_for: int = 0  # the incarnation
    reach: int = 0  # calls that an incarnation is known to have begun
    maker: str = ""  # the worker whose code made it; empty: it has left, or it is the program itself
    unmade: bool = False  # it is dead since its constructor lacked an argument: whoever asks for it may bring that
    bereft: bool = False  # a process died that had a handle: what it did will be done again
    top: bytes = b""  # our task or actor under which it was made
    looking: bool = False  # a timer runs for a look whether anybody needs it

    @property
    def needed_from(self) -> int:
        """The first call that a replay may have to run again."""
        first = self.fallback or self.checkpoint
        return first.calls if first is not None else 0


class Parent(msgspec.Struct):
    """A task whose user code runs in this process and may submit children."""

    task: bytes
    caller: str
    attempt: int
    stashed_bytes: int = 0
    made: dict[bytes, str] = {}  # actors, and the driver that owns each
    reaches_out: bool = False  # one of its children did what its result does not show


# --- events that only this process's shell gives --------------------------------------------------

REACHED_OUT = ("reached out", 0)  # among the choices of a task that did what its result does not show


class Submitted(Message, frozen=True):
    """User code called a remote function."""

    spec: TaskSpec
    blob: bytes | None = None  # the pickled function, when the owner does not have it


class ValuePut(Message, frozen=True):
    """User code stored a value."""

    oid: bytes
    value: Any
    durable: bool = False


class RefsMade(Message, frozen=True):
    """References were unpickled in this process; via: the object that they were inside of."""

    refs: tuple[RefTo, ...]
    via: bytes = b""


class InputsGiven(Message, frozen=True):
    """The values of a task's inputs came with it; they are held until their RefsDropped."""

    refs: tuple[RefTo, ...]
    values: tuple[Any, ...]


class RefsDropped(Message, frozen=True):
    """ObjectRef instances are gone."""

    oids: tuple[bytes, ...]


class ReadyAsked(Message, frozen=True):
    """A thread waits until `count` of the objects have a value."""

    waiter: int
    oids: tuple[bytes, ...]
    count: int


class WaiterGone(Message, frozen=True):
    """The thread waits no more."""

    waiter: int


class FetchAsked(Message, frozen=True):
    """A thread needs the bytes of the object in the local store."""

    waiter: int
    oid: bytes


class CancelAsked(Message, frozen=True):
    """User code cancels the task of an object."""

    oid: bytes
    force: bool
    recursive: bool


class WithdrawAsked(Message, frozen=True):
    """User code does not want the task of an object if it has not begun; a thread waits for the answer."""

    oid: bytes
    waiter: int


class CopySought(Message, frozen=True):
    """Timer: ask a node again that was silent and may have the last copy."""

    oid: bytes


class LeaseSilent(Message, frozen=True):
    """Timer: a worker that its owner has lost should have been reported dead by its node."""

    node: str
    lease: int


class FreeAsked(Message, frozen=True):
    """User code frees objects though references exist."""

    oids: tuple[bytes, ...]


class LoseAsked(Message, frozen=True):
    """Failure laboratory: lose all copies."""

    oid: bytes


class StreamAsked(Message, frozen=True):
    """A thread waits for the index-th item of a stream, or its end."""

    waiter: int
    task: bytes
    index: int


class StreamTaken(Message, frozen=True):
    """The reader has taken so many items; -1: it is gone."""

    task: bytes
    items: int


class ParentBegan(Message, frozen=True):
    """User code of this task runs here now: its children are adopted from what an earlier attempt left."""

    task: bytes
    caller: str
    attempt: int
    children: tuple[tuple[bytes, Value], ...] = ()


class ParentEnded(Message, frozen=True):
    """The task that ran here is over; cancel: its unfinished children are not wanted; again: it will run again."""

    task: bytes
    cancel: bool = False
    again: bool = False


class ParentRepeats(Message, frozen=True):
    """The task that runs here has failed in a way that may be tried again; its references are about to go."""

    task: bytes


class WaysLooked(Message, frozen=True):
    """Timer: tasks that found no slot for long are placed another way."""


class AmountLessened(Message, frozen=True):
    """This process ordered that its program has less of a resource."""

    key: str


class Noted(Message, frozen=True):
    """The running task made a choice that a re-run must repeat."""

    task: bytes
    kind: str
    number: int
    payload: bytes


class Exported(Message, frozen=True):
    """References leave inside a result for another owner: `to` is now a borrower."""

    refs: tuple[RefTo, ...]
    to: str


class RefFound(Message, frozen=True):
    """A reference came from a directory, not from somebody who introduced us."""

    oid: bytes


class Said(Message, frozen=True):
    """Code that runs here says something to its program, after what it may depend on."""

    to: str
    message: Any


class Leaving(Message, frozen=True):
    """This process ends on purpose: what others may need of it goes to them."""


class SeqsRestored(Message, frozen=True):
    """An actor goes on from a checkpoint: the numbers of its next calls to other actors."""

    caller_key: bytes
    seqs: tuple[tuple[bytes, int], ...]


class ActorOverdue(Message, frozen=True):
    """Timer: the process of an actor that has ended should have left its lease."""

    actor: bytes
    node: str
    lease: int


class ActorLooked(Message, frozen=True):
    """Timer: look whether anybody needs the actor."""

    actor: bytes


class CommitAsked(Message, frozen=True):
    """User code is about to have an effect on the outside world."""


class JournalWritten(Message, frozen=True):
    """Timer: a journal that is said to be slow has written what this confirms."""

    to: str
    kept: Any


class PollOver(Message, frozen=True):
    """Timer: not all processes have said what they hold of a dead actor's log."""

    actor: bytes
    poll: int


class NodeMoved(Message, frozen=True):
    """The node of this host has a new address (it was restarted)."""

    node: str
    node_id: str


class DurableBack(Message, frozen=True):
    """The shell brought a durable value back into the store of this node, or could not."""

    oid: bytes
    node: str
    reason: str = ""


class GangLooked(Message, frozen=True):
    """Timer: look whether a gang has no member left."""

    gang: str


class IdleLooked(Message, frozen=True):
    """Timer: look for leases that were idle for long."""

    shape: Shape
    placement: tuple[str, ...]
