"""Messages of actors, of those who call them, and of their owners: where they are, what is kept for a replay."""

from __future__ import annotations

from .parts import Inline, Message, Record, Value


class Checkpoint(Record, frozen=True):
    """An actor's state after so many calls; the value is the pickled state with what its machine needs."""

    calls: int
    value: Value
    path: str = ""  # the URL of the file that holds the state when it is large


BEGINNING = Checkpoint(0, Inline(b""))  # no checkpoint: the constructor, and all calls since


class StashKept(Message, frozen=True):
    """The answer of the subject's owner: entries before this mark, and how far the actor came, are held here."""

    subject: bytes
    incarnation: int
    mark: int
    reach: int


class Log(Record, frozen=True):
    """Entries about an actor that its owner may not have yet, and how many calls it had begun."""

    subject: bytes
    incarnation: int
    entries: tuple[tuple[str, int, bytes], ...]
    reach: int
    kept: int  # so many calls the owner is known to know of, and what was entered before the last of them
    holders: int


class StashCarried(Message, frozen=True):
    """Whoever hears what comes next from this sender can be asked for these logs of actors of one owner."""

    owner: str
    logs: tuple[Log, ...]


class WatchActor(Message, frozen=True):
    """A caller wants to know where the actor is, now and whenever that changes."""

    actor: bytes


class ActorAt(Message, frozen=True):
    """Where the actor is. state: alive, restarting, dead. error: packed, why it is dead or had to begin anew."""

    actor: bytes
    incarnation: int
    state: str
    worker: str = ""
    recovery: str = "exactly_once"
    error: bytes = b""
    worker_id: str = ""
    node_id: str = ""
    interrupted: bytes = b""  # the call that ran, or had run, when it died


class ActorHere(Message, frozen=True):
    """Worker to its node: this actor lives here, until the process ends; tasks may ask to run beside it."""

    actor: bytes


class ActorReady(Message, frozen=True):
    """Actor to its owner: the constructor ran, or the state was restored; replayed: calls that were run again."""

    actor: bytes
    attempt: int
    worker: str
    error: bytes = b""  # the constructor raised
    restored: int = 0  # calls before the checkpoint that it began from
    began_us: int = 0  # on the clock of the worker's host
    run_us: int = -1  # what that took; -1: it is not told


class ActorRecovered(Message, frozen=True):
    """Actor to its owner: all that had been seen of the last incarnation was done again."""

    actor: bytes
    attempt: int
    replayed: int


class CheckpointTaken(Message, frozen=True):
    """Actor to its owner: a newer state to begin from."""

    actor: bytes
    attempt: int
    checkpoint: Checkpoint


class CheckpointFailed(Message, frozen=True):
    """Actor to its owner: the state after so many calls could not be kept, or not be read again."""

    actor: bytes
    attempt: int
    calls: int
    reason: str


class CheckpointKept(Message, frozen=True):
    """Owner to actor: it can be brought back without its first so many calls."""

    actor: bytes
    calls: int
    others_rate_per_s: float = 0.0  # see Odds


class CallsCovered(Message, frozen=True):
    """Actor to caller: calls of caller_key up to this number need not be kept for a replay."""

    actor: bytes
    caller_key: bytes
    seq: int


class CallersKnown(Message, frozen=True):
    """Owner to a new incarnation: these processes will send their calls again; wait for each to have done so.

    recorded: all that anybody knows of the last incarnation's log; reach: how many calls it had begun.
    """

    actor: bytes
    callers: tuple[str, ...]
    recorded: tuple[tuple[str, int, bytes], ...] = ()
    reach: int = 0


class CallerSought(Message, frozen=True):
    """Actor to its owner: a replay waits for a call of this caller; will it come?"""

    actor: bytes
    caller_key: bytes
    calls: int


class CallerFound(Message, frozen=True):
    """The answer: yes, it runs or will run; no; or empty, when the owner does not know the caller."""

    actor: bytes
    calls: int
    coming: str


class CallerGone(Message, frozen=True):
    """Owner to actor: do not wait for this process."""

    actor: bytes
    caller: str


class CallsResent(Message, frozen=True):
    """Caller to a new incarnation: all that it needs for a replay has been sent."""

    actor: bytes


class KillActor(Message, frozen=True):
    """To the actor's owner: end it; restart: only its process."""

    actor: bytes
    restart: bool
    reason: str
