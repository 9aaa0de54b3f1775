"""Messages of collectives: members of a group, the group's ledger on a node, and the posts that move and fold data.

A step is one operation of a group, named (-1, -1, n) for the n-th of all members and (source, target, n) for the n-th
that one rank sends to another.
"""

from __future__ import annotations

from .parts import Message, Record

Step = tuple[int, int, int]
Order = tuple[tuple[int, ...], ...]  # in which ranks are folded: order and starts of a Seating
WHOLE = -1  # source and target of a step of all members
ENTRY = "collective/"  # before the name of a group, among the names at the head: the node that keeps its ledger


class ArrayPart(Record, frozen=True):
    """One array of what a member gave: where it lies in the fused buffer."""

    dtype: str  # numpy's name with byte order, as "<f4"
    shape: tuple[int, ...]
    offset: int  # bytes; a multiple of 64
    kind: str = ""  # what it is to its giver, where that is no array of numpy


class Header(Record, frozen=True):
    """What a member asks for, told before data is moved; the same of all ranks, but where an operation allows else."""

    op: str  # allreduce, broadcast, reduce, allgather, reduce_scatter, alltoall, gather, scatter, send, barrier, admit
    fold: str = ""  # sum, prod, min, max, mean; empty: nothing is folded
    root: int = -1  # of broadcast, reduce, gather, scatter
    form: str = ""  # how lists and dicts hold the arrays: "*" for one array, "['*', '*']", "{'w': '*'}"
    parts: tuple[ArrayPart, ...] = ()
    nbytes: int = 0  # of the fused buffer


class Seating(Record, frozen=True):
    """Who sits where in a group, from one epoch to the next; with it anybody can go on where a ledger died."""

    group: bytes  # of this formation: a name that is used again gives another
    epoch: int
    order: tuple[int, ...] = ()  # ranks in the order of folding: those that shared a host when the group was formed
    starts: tuple[int, ...] = ()  # positions in `order` at which a host's ranks begin
    nodes: tuple[str, ...] = ()  # by rank: the node of each member, "" while it is away
    keys: tuple[bytes, ...] = ()  # by rank, as in GroupJoined: a new ledger gives a seat to none but its member
    grown: tuple[tuple[int, int], ...] = ()  # (number of a step, members from it on), once some were taken in

    def size_at(self, number: int, size: int) -> int:
        """How many members take part in a step of the whole group, when there are so many now."""
        return next((then for first, then in reversed(self.grown) if first <= number), size)


# --- members and ledger ---------------------------------------------------------------------------


class GroupJoined(Message, frozen=True):
    """A process takes its seat: for the first time, after a restart, or because the ledger has moved."""

    name: str
    size: int
    rank: int
    key: bytes  # who sits there by a name that a re-run has again: an actor, a task, a program
    node: str
    host: str
    pid: int
    timeout_s: float
    on_failure: str  # recover, shrink, raise
    restorable: bool  # it may come again and repeat what it did
    seating: Seating | None = None  # what it knew, when it sat here before
    next_step: int = 0  # the number of its next step of the whole group
    life: int = 0  # how often the actor or task was begun: who comes later has the higher number; 0: it is not known
    order: tuple[int, ...] = ()  # of a group that these ranks were before: this one folds as that did
    starts: tuple[int, ...] = ()


class GroupFormed(Message, frozen=True):
    """All seats are taken, or who sits where has changed: what holds from now on."""

    name: str
    rank: int
    size: int
    seating: Seating
    first_step: int  # steps before it were done without this member


class JoinRefused(Message, frozen=True):
    """There is no seat; kind: usage, timeout, lost; moved: another node keeps the ledger."""

    name: str
    key: bytes  # as in GroupJoined: its rank may be another meanwhile
    kind: str
    reason: str


class StepGiven(Message, frozen=True):
    """What a member gives to a step: small as a blob, larger as an object in its node's store."""

    group: bytes
    step: Step
    rank: int
    header: Header
    blob: bytes = b""
    oid: bytes = b""  # empty: the blob is it
    epoch: int = 0  # of the seating that the member knows: its rank and the header's root are meant by it


class Layout(Record, frozen=True):
    """Where one rank's arrays lie in a result."""

    offset: int
    header: Header
    taker: int = WHOLE  # the only rank whose result has it so (scatter, alltoall, reduce_scatter); WHOLE: every result


class StepDone(Message, frozen=True):
    """The result of a step for a member: a blob, or an object on these nodes."""

    group: bytes
    step: Step
    blob: bytes = b""
    oid: bytes = b""  # empty: the blob is it; the member's own when nothing is given to it (reduce, away from the root)
    nbytes: int = 0
    nodes: tuple[str, ...] = ()
    layout: tuple[Layout, ...] = ()  # empty: as what this member gave
    empty: bool = False  # there is nothing for this rank: None
    checkpoint: bool = False  # many results are kept for this group: a checkpoint soon would let them go
    rank: int = -1  # whose result it is, when several members share a process; -1: of all of the group there


class StepFailed(Message, frozen=True):
    """The step failed for all of its ranks; kind: mismatch, timeout, lost, refused, store."""

    group: bytes
    step: Step
    kind: str
    reason: str
    rank: int = -1  # as in StepDone


class StepsPassed(Message, frozen=True):
    """A member will not repeat steps of the whole group before this number.

    Its checkpoint is past them; or it never repeats any, and has read their results.
    """

    group: bytes
    rank: int
    number: int
    pair: Step | None = None  # nor this one, of two


class GroupLeft(Message, frozen=True):
    """A member gives its seat up, or its process ended on purpose."""

    group: bytes
    rank: int


# --- ledger and nodes -----------------------------------------------------------------------------


class Post(Record, frozen=True):
    """Where contributions are folded and results kept: ranks of one node that are next to each other in the order.

    Posts may give the same objects, but only one names a result. Edges may join two posts of one node.
    """

    node: str
    gives: tuple[tuple[int, bytes], ...]  # (rank, object) in the order of folding; may be empty
    result: bytes = b""  # the object that becomes the result here; empty: none is kept
    result_bytes: int = 0
    takers: tuple[tuple[int, str], ...] = ()  # (rank, address) of the members that get it


class Line(Record, frozen=True):
    """One range of bytes and its way: folded towards `root` along `folds`, then spread from there along `spreads`.

    Edges are pairs of posts (from, to), indices into the course's posts. A post folds what comes along its edges in
    the order in which they are listed, its own contributions after the first of them. When nothing is folded, the
    root's only contribution is the value. A root that gives nothing and gets nothing along `folds` spreads what its
    result holds already: what an earlier epoch made final. A result is whole when the lines that end in it are done.
    """

    offset: int  # in what was given
    into: int  # in the results
    nbytes: int
    piece_bytes: int
    dtype: str  # of the elements that are folded; empty: bytes
    root: int
    folds: tuple[tuple[int, int], ...] = ()
    spreads: tuple[tuple[int, int], ...] = ()


class Course(Message, frozen=True):
    """How a step is done, the same to every node that has a post; a later epoch takes the place of an earlier."""

    op: bytes  # 16 bytes, made of group and step
    group: bytes
    step: Step
    epoch: int
    fold: str
    count: int  # ranks that are folded: what a mean divides by
    posts: tuple[Post, ...]
    lines: tuple[Line, ...]
    layout: tuple[Layout, ...] = ()
    fresh: bool = True  # what earlier epochs made of this step is dropped; else whole pieces of results are kept
    keeps_gifts: bool = False  # the nodes keep what was given until the step is forgotten, not until it is done
    owner: str = ""  # of the results, and they are not kept here for others; empty: the node of each
    array: ArrayPart | None = None  # what a result is read as; None: an array of bytes
    blobs: tuple[tuple[bytes, bytes], ...] = ()  # gifts that are no objects, by the name under which posts give them
    headers: tuple[tuple[int, Header], ...] = ()  # by rank, of gifts that are kept: told to a new ledger
    awaited: tuple[bytes, ...] = ()  # gifts of members that have not come yet: GiftCame tells when they are here


class GiftCame(Message, frozen=True):
    """Who was awaited has given this object."""

    op: bytes
    epoch: int
    gift: bytes


class CourseDone(Message, frozen=True):
    """All results of the step on this node are whole."""

    op: bytes
    epoch: int


class CourseBroken(Message, frozen=True):
    """This node cannot go on: a neighbour does not take or send, or there is no room (kind: peer, store, gift)."""

    op: bytes
    epoch: int
    kind: str
    peer: str
    reason: str
    gift: bytes = b""  # the object that was given and is not here


class FinalsAsked(Message, frozen=True):
    """Stop the step and tell which parts of its results are whole."""

    op: bytes
    epoch: int


class Finals(Message, frozen=True):
    """(result object, ((begin, end), ...)): the ranges of bytes that are whole on this node, merged and in order."""

    op: bytes
    epoch: int
    ranges: tuple[tuple[bytes, tuple[tuple[int, int], ...]], ...]


class StepEnded(Message, frozen=True):
    """The step is done on all nodes: what was given is let go, unless it is kept for those who may repeat it."""

    op: bytes
    gifts: tuple[bytes, ...] = ()  # objects on this node that were given to it and that no course names


class BlobsReady(Message, frozen=True):
    """Small results, for a node to keep and to hand to its members; results: (rank or -1 for all, blob).

    A rank that takes and has no result gets none: its StepDone is empty.
    """

    op: bytes
    group: bytes
    step: Step
    results: tuple[tuple[int, bytes], ...]
    takers: tuple[tuple[int, str], ...]
    layout: tuple[Layout, ...] = ()
    failed: tuple[str, str] = ("", "")  # kind and reason: takers have heard it, it is kept for a new ledger


class StepsForgotten(Message, frozen=True):
    """Nobody will repeat the group's steps before this number; below 0: the group is over."""

    group: bytes
    number: int
    steps: tuple[Step, ...] = ()  # these too: of two ranks each


class HeldAsked(Message, frozen=True):
    """A new ledger asks a node what it holds of a group."""

    group: bytes


class HeldStep(Record, frozen=True):
    """A step whose results are on a node: objects by rank (-1: all), or blobs; or only what was given to it."""

    step: Step
    objects: tuple[tuple[int, bytes, int], ...]  # (rank, object, bytes)
    blobs: tuple[tuple[int, bytes], ...]
    layout: tuple[Layout, ...]
    failed: tuple[str, str] = ("", "")  # kind and reason
    headers: tuple[tuple[int, Header], ...] = ()  # by rank, of all that was given, when results are of one rank each
    gifts: tuple[tuple[int, bytes, bytes], ...] = ()  # (rank, object on this node or b"", else the blob)


class Held(Message, frozen=True):
    """The answer to HeldAsked."""

    group: bytes
    steps: tuple[HeldStep, ...]
    epoch: int = 0  # the highest that the node has heard of
    floor: int = 0  # steps of the whole group before it are forgotten
