"""What messages are made of: references, values, the spec of a task, the account of a death."""

from __future__ import annotations

import msgspec

Shape = tuple[tuple[str, float], ...]  # sorted amounts that a task needs while it runs: (("CPU", 1.0),)


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of messages."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Something said by one process to another, or by a shell to its own machine."""


# --- parts ----------------------------------------------------------------------------------------


class RefTo(Record, frozen=True):
    """A reference as it travels: whom to ask about the object, and whom when that process is dead."""

    oid: bytes
    owner: str
    heir: str = ""  # address of the parent task's owner, a space, and the parent task in hex; empty: none


HANDLE = " actor"  # in place of an heir: the reference is the handle of an actor, and its owner is the program


class Inline(Message, frozen=True):
    """A small value itself, with the references that are inside of it."""

    blob: bytes
    contained: tuple[RefTo, ...] = ()


class Stored(Message, frozen=True):
    """A value in the stores of these nodes (their addresses)."""

    size_bytes: int
    nodes: tuple[str, ...]
    contained: tuple[RefTo, ...] = ()
    array: bytes = b""  # what one plain array is, as objects/arrays reads it: dtype and shape


class Failed(Message, frozen=True):
    """The value is an error, packed by errors.pack_error; kind tells who erred (see ErrorKind)."""

    error: bytes
    kind: str = "task"
    contained: tuple[RefTo, ...] = ()


class Pending(Message, frozen=True):
    """In place of a value: a task that is ahead on the same worker makes it."""


Value = Inline | Stored | Failed


class ActorLife(Record, frozen=True):
    """How an actor lives and is recovered; checked when its options were given."""

    recovery: str = "exactly_once"  # or restart, none
    checkpoint: str = "adaptive"  # or never, a number of calls, or seconds as "30s"
    max_restarts: int = -1
    max_concurrency: int = 1
    detached: bool = False
    name: str = ""
    is_async: bool = False


class Odds(Record, frozen=True):
    """What is known of failures when an actor's process begins."""

    deaths: int = 0  # of this actor
    lived_s: float = 0.0
    others_rate_per_s: float = 0.0  # of other processes of its owner; 0: unknown


class Choice(Record, frozen=True):
    """How a task may be placed when there is more to say than its shape and placement, which are the first way."""

    ways: tuple[tuple[Shape, tuple[str, ...]], ...] = ()  # all of them, when the first is not the only one
    near: tuple[tuple[int, ...], ...] = ()  # for each way: which of deps it is to be beside
    unread: int = 0  # so many of deps, the last ones, are waited for and not passed
    share: tuple[tuple[str, float], ...] = ()  # the tenant for whom it runs, from the root: names and weights
    patience_s: float = 0.5  # so long each way is tried at first


class Environment(Record, frozen=True):
    """What a process has while it runs a task: variables, and the folder in which it works."""

    env_vars: tuple[tuple[str, str], ...] = ()
    working_dir: str = ""


class TaskSpec(Record, frozen=True):
    """Everything that is needed to run a task, now or again."""

    id: bytes
    function: bytes
    name: str
    args: bytes = b""  # inline form of (args, kwargs); empty: no arguments
    args_object: RefTo | None = None  # (args, kwargs) as an object when they are large
    deps: tuple[RefTo, ...] = ()  # top-level references, in the order of their slots
    nested: tuple[RefTo, ...] = ()  # references inside of arguments or the function: kept alive, not resolved
    num_returns: int = 1  # -1: a stream
    shape: Shape = (("CPU", 1.0),)
    placement: tuple[str, ...] = ()  # node ids in order of preference; the last may be "*" (anywhere)
    max_retries: int = 3
    retry_exceptions: bytes = b""  # empty: no; b"*": all; else a pickled tuple of classes
    timeout_s: float = 0.0  # 0: no limit
    priority: float = 0.0
    depth: int = 0
    parent: bytes = b""
    actor: RefTo | None = None  # a call of this actor; function is its method's name
    caller_key: bytes = b""  # who calls, or makes the actor, by a name that a re-run has again: a task, or an actor
    life: ActorLife | None = None  # the task is an actor: it runs until it is not needed any more
    driver: str = ""  # address of the program, a space, its own task or actor in hex; empty: its owner is the program
    enough: int = 0  # so many of deps are waited for, those that come first, and are all it gets; 0: every one
    choice: Choice | None = None
    environment: Environment | None = None


class Death(Record, frozen=True):
    """How a process ended, told by the node that reaped it."""

    worker_id: str
    host: str
    pid: int
    exit_code: int  # negative: the number of the signal
    running: bytes = b""  # the task that it was running
    running_attempt: int = 0
    reason: str = ""
    log_lines: tuple[str, ...] = ()
    overdue: bool = False  # the time limit of what it ran was over, with all patience
    running_name: str = ""
