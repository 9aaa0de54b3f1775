"""What processes say to each other: the same frozen structs are events of the machines and frames on the wire.

Facts are in the past tense, orders are imperative. Everything that can be late carries an attempt, an epoch or a
running total, so that a receiver can tell what is stale. The order of fields is the wire format.
"""

from __future__ import annotations

from .bundles import BundlesAsked as BundlesAsked
from .bundles import BundlesDropped as BundlesDropped
from .bundles import BundleSet as BundleSet
from .bundles import BundlesGiven as BundlesGiven
from .bundles import BundlesKept as BundlesKept
from .bundles import BundlesOpened as BundlesOpened
from .bundles import BundlesTaken as BundlesTaken
from .bundles import BundlesTold as BundlesTold
from .bundles import GangNamed as GangNamed
from .bundles import GangSought as GangSought
from .bundles import GangWanted as GangWanted
from .bundles import HeldBundle as HeldBundle
from .bundles import LeaseRefused as LeaseRefused
from .calling import BEGINNING as BEGINNING
from .calling import ActorAt as ActorAt
from .calling import ActorHere as ActorHere
from .calling import ActorReady as ActorReady
from .calling import ActorRecovered as ActorRecovered
from .calling import CallerFound as CallerFound
from .calling import CallerGone as CallerGone
from .calling import CallersKnown as CallersKnown
from .calling import CallerSought as CallerSought
from .calling import CallsCovered as CallsCovered
from .calling import CallsResent as CallsResent
from .calling import Checkpoint as Checkpoint
from .calling import CheckpointFailed as CheckpointFailed
from .calling import CheckpointKept as CheckpointKept
from .calling import CheckpointTaken as CheckpointTaken
from .calling import KillActor as KillActor
from .calling import Log as Log
from .calling import StashCarried as StashCarried
from .calling import StashKept as StashKept
from .calling import WatchActor as WatchActor
from .collective import ArrayPart as ArrayPart
from .collective import BlobsReady as BlobsReady
from .collective import Course as Course
from .collective import CourseBroken as CourseBroken
from .collective import CourseDone as CourseDone
from .collective import Finals as Finals
from .collective import FinalsAsked as FinalsAsked
from .collective import GiftCame as GiftCame
from .collective import GroupFormed as GroupFormed
from .collective import GroupJoined as GroupJoined
from .collective import GroupLeft as GroupLeft
from .collective import Header as Header
from .collective import Held as Held
from .collective import HeldAsked as HeldAsked
from .collective import HeldStep as HeldStep
from .collective import JoinRefused as JoinRefused
from .collective import Layout as Layout
from .collective import Line as Line
from .collective import Post as Post
from .collective import Seating as Seating
from .collective import StepDone as StepDone
from .collective import StepEnded as StepEnded
from .collective import StepFailed as StepFailed
from .collective import StepGiven as StepGiven
from .collective import StepsForgotten as StepsForgotten
from .collective import StepsPassed as StepsPassed
from .making import ActorLeft as ActorLeft
from .making import ActorMade as ActorMade
from .making import ActorNoted as ActorNoted
from .making import ActorUnneeded as ActorUnneeded
from .making import MakerLeft as MakerLeft
from .membership import AmountsDone as AmountsDone
from .membership import AmountsSet as AmountsSet
from .membership import NodeAccepted as NodeAccepted
from .membership import NodeEntry as NodeEntry
from .membership import NodeFenced as NodeFenced
from .membership import NodeJoined as NodeJoined
from .membership import NodeReport as NodeReport
from .membership import NodesChanged as NodesChanged
from .membership import NodesWanted as NodesWanted
from .membership import OrderSeen as OrderSeen
from .membership import SlotsFound as SlotsFound
from .membership import SlotsSought as SlotsSought
from .parts import HANDLE as HANDLE
from .parts import ActorLife as ActorLife
from .parts import Choice as Choice
from .parts import Death as Death
from .parts import Environment as Environment
from .parts import Failed as Failed
from .parts import Inline as Inline
from .parts import Message as Message
from .parts import Odds as Odds
from .parts import Pending as Pending
from .parts import Record as Record
from .parts import RefTo as RefTo
from .parts import Shape as Shape
from .parts import Stored as Stored
from .parts import TaskSpec as TaskSpec
from .parts import Value as Value
from .sharing import ShareAnswered as ShareAnswered
from .sharing import ShareAsked as ShareAsked
from .sharing import SharedItem as SharedItem
from .sharing import ShareEnded as ShareEnded
from .sharing import ShareGivenUp as ShareGivenUp
from .sharing import ShareTaken as ShareTaken
from .talk import Answered as Answered
from .talk import Asked as Asked
from .talk import ChaosOrdered as ChaosOrdered
from .talk import Goodbye as Goodbye
from .talk import Hop as Hop
from .talk import LogLines as LogLines
from .talk import PeerLost as PeerLost
from .talk import Ping as Ping
from .talk import Pong as Pong
from .talk import WaitProbe as WaitProbe

# --- owner -> executor ----------------------------------------------------------------------------


class PutFunction(Message, frozen=True):
    """The pickled function that later tasks on this link name by its id."""

    function: bytes
    blob: bytes


class PushTask(Message, frozen=True):
    """Run this task; values has one entry for each of deps, then one for args_object if there is one."""

    spec: TaskSpec
    attempt: int
    lease: int
    values: tuple[Value | Pending, ...] = ()
    run: int = 1  # which run of the user's code this is; pushes that did not begin are not counted
    stream_have: int = 0  # items of an earlier attempt that need not be sent again
    recorded: tuple[tuple[str, int, bytes], ...] = ()  # choices of an earlier attempt: (kind, number, payload)
    children: tuple[tuple[bytes, Value], ...] = ()  # results of children of an earlier attempt
    seq: int = -1  # calls: number among those of its caller to the actor
    seen: bool = False  # calls: the caller has its reply, so a replay must run it where it was
    checkpoint: Checkpoint | None = None  # actors: where to begin
    stream_taken: int = 0  # items that the reader has taken already
    fallback: Checkpoint | None = None  # actors: where to begin when the checkpoint's file turns out to be bad
    odds: Odds | None = None  # actors: what is known of failures
    logs: StashCarried | None = None  # calls: logs of actors that it may depend on
    devices: tuple[str, ...] = ()  # GPUs that it may use


class CancelTask(Message, frozen=True):
    """Stop the task: drop it if it has not begun, else raise TaskCancelled in it, and in its children if recursive."""

    task: bytes
    attempt: int
    recursive: bool
    again: bool = False  # it will run again: calls of actors that it has made stand


class TakeBack(Message, frozen=True):
    """Give back those of these tasks that have not begun."""

    tasks: tuple[bytes, ...]
    lease: int


class StreamConsumed(Message, frozen=True):
    """The reader of the stream has taken this many items."""

    task: bytes
    attempt: int
    items: int


# --- executor -> owner ----------------------------------------------------------------------------


class TaskDone(Message, frozen=True):
    """The attempt ended well; held lists borrowed objects that the worker still refers to."""

    task: bytes
    attempt: int
    values: tuple[Value, ...]
    run_us: int
    held: tuple[RefTo, ...] = ()
    recorded: tuple[tuple[str, int, bytes], ...] = ()
    stream_items: int = 0
    began_us: int = 0  # on the clock of the worker's host
    place: int = 0  # calls: so many the actor had begun, with this one; 0: it does not matter to the receiver


class TaskFailed(Message, frozen=True):
    """The attempt ended with an error of the user's code, or by cancelling or a time limit (kind)."""

    task: bytes
    attempt: int
    error: bytes
    kind: str  # task cancelled timeout store args function
    retry: bool  # the exception is one of those that the task asked to be retried
    run_us: int
    held: tuple[RefTo, ...] = ()
    lost: tuple[tuple[bytes, tuple[str, ...]], ...] = ()  # kind "args": inputs that could not be had, and from where
    began_us: int = 0
    contained: tuple[RefTo, ...] = ()  # references inside of the exception


class TakenBack(Message, frozen=True):
    """These tasks had not begun and will not run here; blocked: what runs waits in get, so send no more for now."""

    tasks: tuple[bytes, ...]
    lease: int
    blocked: bool = False


class PersistObject(Message, frozen=True):
    """Owner to a worker: write this result, which is in the store of your host, to durable storage too."""

    oid: bytes


class ObjectPersisted(Message, frozen=True):
    """The answer: the durable copy is in the folder of this URL; empty: failure says why not."""

    oid: bytes
    url: str
    write_s: float
    failure: str = ""


class StreamItem(Message, frozen=True):
    """The index-th item of a streaming task."""

    task: bytes
    attempt: int
    index: int
    value: Value


class StashAdded(Message, frozen=True):
    """What a running task would need to take the same way again: its choices and its children's results.

    For an actor also how many calls have begun. With a mark it is answered by StashKept.
    """

    task: bytes
    attempt: int
    recorded: tuple[tuple[str, int, bytes], ...] = ()
    children: tuple[tuple[bytes, Value], ...] = ()
    reach: int = 0
    mark: int = 0


# --- callers, actors and their owners ----------------------------------------------------------------


class CheckpointsAt(Message, frozen=True):
    """Actor to its owner: it begins to write checkpoints into this folder, which goes when the actor ends."""

    actor: bytes
    attempt: int
    url: str


class CallsKept(Message, frozen=True):
    """To an actor's owner: calls that a replay would need, of a caller that will not send them again."""

    actor: bytes
    calls: tuple[PushTask, ...]
    introduced: bool = False  # the owners of their inputs count the receiver as a borrower, once per call


# --- owner <-> node -------------------------------------------------------------------------------


class LeaseDemand(Message, frozen=True):
    """In total, this owner has asked this node for so many leases of this shape (grants included; may go down)."""

    shape: Shape
    placement: tuple[str, ...]
    wanted_total: int
    depth: int
    priority: float
    run_us: int = 0  # expected run time of the task that is next; 0: not known
    held: tuple[tuple[str, int], ...] = ()  # bytes of its inputs by node, when they are worth a detour


class LeaseGranted(Message, frozen=True):
    """A worker process is this owner's for tasks of this shape until it returns the lease or the lease is lost."""

    lease: int
    shape: Shape
    placement: tuple[str, ...]
    worker: str
    worker_id: str
    node_id: str
    devices: tuple[str, ...] = ()  # GPUs that are its own, or of which it has a part


class LeaseRedirected(Message, frozen=True):
    """This node cannot serve the demand soon; that one can."""

    shape: Shape
    placement: tuple[str, ...]
    node: str


class LeaseDelayed(Message, frozen=True):
    """Why the demand is not met yet, for people."""

    shape: Shape
    placement: tuple[str, ...]
    reason: str


class LeaseReturned(Message, frozen=True):
    """The owner needs the lease no more."""

    lease: int


class LeaseWanted(Message, frozen=True):
    """Others wait for such slots: return the lease as soon as what was sent on it is done.

    when_idle: or when it has no work. below: or when what comes next is less urgent than this.
    """

    lease: int
    when_idle: bool = False
    below: float | None = None


class LeaseLost(Message, frozen=True):
    """The worker of the lease is dead."""

    lease: int
    death: Death


class KillWorker(Message, frozen=True):
    """Kill the worker of this lease: while it is in this task (a forced cancel), or whatever it does (an actor's)."""

    lease: int
    task: bytes
    reason: str


# --- worker -> node -------------------------------------------------------------------------------


class WorkerStarted(Message, frozen=True):
    """A worker process listens."""

    worker_id: str
    pid: int
    address: str


class WorkerBlocked(Message, frozen=True):
    """The worker's task waits in get: its slot is free for others. blocked=False: it goes on."""

    worker_id: str
    blocked: bool


class WorkerStuck(Message, frozen=True):
    """The worker cannot stop its task by itself: kill it."""

    worker_id: str
    reason: str


class Joined(Message, frozen=True):
    """A driver (or another process that owns and reads objects) uses this node."""

    address: str
    pid: int
    role: str


class Welcome(Message, frozen=True):
    """What a joining process needs to know."""

    node_id: str
    host: str
    store_folder: str
    store_limit_bytes: int
    session: str
    head: str


# --- store ----------------------------------------------------------------------------------------


class SpaceAsked(Message, frozen=True):
    """May I make an object of this size? request is echoed."""

    request: int
    size_bytes: int


class SpaceGiven(Message, frozen=True):
    """The answer: granted, or the text of the error (kind StoreFull or OutOfDisk)."""

    request: int
    granted: bool
    kind: str = ""
    reason: str = ""


class SpaceReturned(Message, frozen=True):
    """Granted space that was not used after all."""

    size_bytes: int


class MemoryLacked(Message, frozen=True):
    """Process to its node: what it was granted is not there, since others use the host's shared memory too."""


class ObjectSealed(Message, frozen=True):
    """An object is now in the store of this host (its space had been granted)."""

    oid: bytes
    size_bytes: int
    owner: str
    file: int = 0  # its number: which life of the object this is; 0: the node wrote it itself


class ObjectFreed(Message, frozen=True):
    """Nobody needs these objects: drop the copies. From owners to nodes, and from nodes to the writing process.

    present: only what is there now; else a copy whose sealing is told later is meant too.
    files: from nodes, which file each object is.
    """

    oids: tuple[bytes, ...]
    present: bool = False
    files: tuple[int, ...] = ()


class SegmentKept(Message, frozen=True):
    """The writer put a freed segment of this many bytes into its warm pool (0: removed)."""

    oid: bytes
    kept_bytes: int
    file: int = 0


class PoolTrimmed(Message, frozen=True):
    """Order to a writer: give back this much of the warm pool; and its answer with what was given."""

    size_bytes: int


class ObjectWanted(Message, frozen=True):
    """Have this object in the local store: read it back from disk or pull it from one of these nodes."""

    oid: bytes
    size_bytes: int
    owner: str
    nodes: tuple[str, ...]


class ObjectHere(Message, frozen=True):
    """The object is in the local store now."""

    oid: bytes


class ObjectMissing(Message, frozen=True):
    """The object could not be had from these nodes; silent: those of them that did not answer, and may have it."""

    oid: bytes
    nodes: tuple[str, ...]
    reason: str
    silent: tuple[str, ...] = ()


class CopyAdded(Message, frozen=True):
    """Node to owner: this node holds a copy too. left: it was made here, by a worker that is dead now."""

    oid: bytes
    node: str
    left: bool = False


class CopiesLost(Message, frozen=True):
    """To the owner: these nodes do not have the object (any more); silent: those of them that did not answer."""

    oid: bytes
    nodes: tuple[str, ...]
    silent: tuple[str, ...] = ()


class ObjectAdopted(Message, frozen=True):
    """To a node: the object has another owner now."""

    oid: bytes
    owner: str


class OwnerEnded(Message, frozen=True):
    """To a node: what this owner left and nobody adopted can go."""

    owner: str


# --- owner <-> owner ------------------------------------------------------------------------------


class WatchObject(Message, frozen=True):
    """Tell me when the object has a value."""

    oid: bytes


class ObjectReady(Message, frozen=True):
    """The object's value, or its new value after a loss."""

    oid: bytes
    value: Value


class BorrowAdded(Message, frozen=True):
    """This process holds references to the object; count introductions; confirm: answer with BorrowConfirmed."""

    oid: bytes
    borrower: str
    count: int = 1
    confirm: bool = False


class BorrowConfirmed(Message, frozen=True):
    """The owner knows the borrower; counted: introductions by HeirAsked, 0 when it does not know the object."""

    oid: bytes
    counted: int = 0


class HeirAsked(Message, frozen=True):
    """The owner of the object is dead; the receiver owns its parent task. A BorrowAdded, if it knows one of the two."""

    oid: bytes
    owner: str
    parent: bytes


class BorrowDropped(Message, frozen=True):
    """The process holds no reference any more; takes back this many introductions."""

    oid: bytes
    count: int


class CancelObject(Message, frozen=True):
    """A borrower asks to cancel the task that makes the object."""

    oid: bytes
    force: bool
    recursive: bool


class FreeObject(Message, frozen=True):
    """A borrower asks to free the object's value everywhere."""

    oid: bytes


class LoseObject(Message, frozen=True):
    """Failure laboratory: drop every copy of the object, keep its lineage."""

    oid: bytes


WIRE: tuple[type[Message], ...] = tuple(
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
)
