"""What a machine orders its shell to do. Each is plain data; most are answered by exactly one event later."""

from __future__ import annotations

from typing import Any

from .messages import Layout, Message, Record


class Command(Record, frozen=True):
    """An order to the shell."""


class Send(Command, frozen=True):
    """Send the message to a process; in order with all else that is sent to it. lazy: may wait for more."""

    to: str
    message: Message
    lazy: bool = False


class SetTimer(Command, frozen=True):
    """Hand this event back to the machine after so many seconds."""

    delay_s: float
    event: Message


# --- orders of the Node machine, and what its shell reports back (events, in the past tense) ------


class StartWorker(Command, frozen=True):
    """Start a worker process; answered by WorkerStarted (over its link) or WorkerEnded."""

    worker_id: str


class StopWorker(Command, frozen=True):
    """Send a signal to a worker process; its end is told by WorkerEnded."""

    worker_id: str
    signal: int


class CheckWorker(Command, frozen=True):
    """Has the silent process stopped or does it use its CPU? Answered by WorkerChecked."""

    worker_id: str
    pid: int


class SpillObject(Command, frozen=True):
    """Write the object to disk and drop its segment; answered by ObjectSpilled or SpillFailed.

    file: its number, as in RemoveObject.
    """

    oid: bytes
    size_bytes: int
    file: int = 0


class RestoreObject(Command, frozen=True):
    """Bring the object back from disk; answered by ObjectRestored or RestoreFailed."""

    oid: bytes
    size_bytes: int


class PullObject(Command, frozen=True):
    """Copy the object from one of these nodes into the local store; answered by ObjectPulled or PullFailed."""

    oid: bytes
    size_bytes: int
    nodes: tuple[str, ...]


class RemoveObject(Command, frozen=True):
    """Drop the object's segment (or its file on disk). writer: this node wrote it; answered by SegmentKept.

    file: the number of the segment's file (0: this node's own); another one under that name stays.
    """

    oid: bytes
    on_disk: bool
    writer: str = ""
    file: int = 0


class TrimPool(Command, frozen=True):
    """Give back this much of the node's own warm pool; answered by PoolTrimmed."""

    size_bytes: int


class CombineBlobs(Command, frozen=True):
    """Do a small step of a group at once, from what each rank gave; answered by BlobsCombined."""

    op: bytes
    epoch: int
    plan: Any  # collectives.plan.StepPlan
    blobs: tuple[tuple[int, bytes], ...]  # by rank


class WriteJournal(Command, frozen=True):
    """Head: put these rows (key, msgpack value or None for delete) into the journal, in this order.

    With a number the shell answers JournalWritten when these and all earlier rows are on disk.
    """

    rows: tuple[tuple[str, bytes | None], ...]
    number: int = 0


class JournalWritten(Message, frozen=True):
    """Head's shell: the rows of the WriteJournal of this number, and all before, are on disk."""

    number: int


class WorkerEnded(Message, frozen=True):
    """The launcher reaped a worker process."""

    death: Any  # messages.Death


class BlobsCombined(Message, frozen=True):
    """Results by rank (-1: the same for all), with where arrays lie in them."""

    op: bytes
    epoch: int
    results: tuple[tuple[int, bytes], ...]
    layout: tuple[Layout, ...] = ()
    failure: str = ""


class WorkerChecked(Message, frozen=True):
    """cpu_s: CPU seconds that the process has used so far; stopped: it stands still by a signal."""

    worker_id: str
    stopped: bool
    cpu_s: float


class MemorySeen(Message, frozen=True):
    """Node's shell: so much of the host's shared memory is free, for its store and for all others."""

    free_bytes: int


class SealedInVain(Message, frozen=True):
    """What a process has sealed lies no longer under the object's name: another life of the object has taken it."""

    oid: bytes
    size_bytes: int
    file: int


class ObjectSpilled(Message, frozen=True):
    """The object is on disk now and its segment is gone; busy: a reader maps it, so it stays."""

    oid: bytes
    disk_bytes: int
    busy: bool = False


class SpillFailed(Message, frozen=True):
    """The object could not be written to disk (it is still in memory)."""

    oid: bytes
    reason: str
    disk_full: bool = False


class ObjectRestored(Message, frozen=True):
    """The object is in memory again."""

    oid: bytes


class RestoreFailed(Message, frozen=True):
    """The object could not be read back; free_bytes: for lack of shared memory, of which so much is free."""

    oid: bytes
    reason: str
    free_bytes: int | None = None


class ObjectPulled(Message, frozen=True):
    """A copy is complete here."""

    oid: bytes
    source: str


class PullFailed(Message, frozen=True):
    """None of these nodes gave the object; silent: those that did not answer."""

    oid: bytes
    nodes: tuple[str, ...]
    reason: str
    silent: tuple[str, ...] = ()


# --- orders of the Owner and the Executor machine -------------------------------------------------


class Resolve(Command, frozen=True):
    """Wake the thread of this waiter."""

    waiter: int


class RestoreDurable(Command, frozen=True):
    """Bring a durable value back from durable storage into the local store; answered by DurableBack."""

    oid: bytes
    url: str = ""  # of the folder that it is in; empty: the one of this process


class WriteDurable(Command, frozen=True):
    """Write a value in the store of this host to durable storage, and tell its owner (ObjectPersisted)."""

    oid: bytes
    owner: str


class DropDurable(Command, frozen=True):
    """Remove a durable copy."""

    oid: bytes
    url: str


class KeepResult(Command, frozen=True):
    """Resumable job: journal the result of one of the program's tasks."""

    oid: bytes
    value: Any  # messages.Value


class KeepNote(Command, frozen=True):
    """Resumable job: journal a choice of the program."""

    kind: str
    number: int
    payload: bytes


class KeepPiece(Command, frozen=True):
    """Write to a file what is known of a task that failed or an actor that died, for a replay when all have ended."""

    name: bytes
    piece: Any  # recovery.record.Piece


class RunTask(Command, frozen=True):
    """Run this task in the main thread; answered by TaskEnded."""

    push: Any  # messages.PushTask
    caller: str


class Interrupt(Command, frozen=True):
    """Raise in the main thread, if it still runs this attempt: kind is cancelled or timeout."""

    task: bytes
    attempt: int
    kind: str


class KeepFunction(Command, frozen=True):
    """Remember the pickled function."""

    function: bytes
    blob: bytes


class CancelChildren(Command, frozen=True):
    """Cancel what the running task has submitted; again: but for calls of actors, which its next attempt makes too."""

    task: bytes
    again: bool = False


class DropResults(Command, frozen=True):
    """Nobody wants these sealed results: their owner is gone."""

    oids: tuple[bytes, ...]


class Warn(Command, frozen=True):
    """Tell the program, in its log."""

    text: str


class DropState(Command, frozen=True):
    """Remove the folder with the checkpoints of an actor that has ended."""

    url: str


class ForgetStates(Command, frozen=True):
    """Remove what only checkpoints after fewer calls than these need."""

    calls: int


class SaveState(Command, frozen=True):
    """Pickle the actor's state between two calls; answered by StateTaken if writing takes longer, and StateSaved."""

    calls: int


class StreamGo(Command, frozen=True):
    """The reader of the running stream has taken so many items (-1: stop, nobody reads)."""

    task: bytes
    items: int
