"""What a node knows of the steps that it takes part in: results, and the way of pieces through its posts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from flowengine.core.collective import WHOLE, Course, Layout, Line, Post, Step

from .posts_orders import HEAD_BYTES, Frame, Place, SendPiece

Range = tuple[int, int]


@dataclass(slots=True, eq=False)
class Result:
    """A result on this node; state: asked (for room), granted, open, sealed."""

    oid: bytes
    nbytes: int
    rank: int  # whose it is; -1: of all takers
    state: str = "asked"
    ranges: list[Range] = field(default_factory=list)  # whole, from this and earlier epochs
    done: dict[tuple[int, int], None] = field(default_factory=dict)  # (line, piece) of this epoch
    left: int = 0  # pieces of this epoch that are not whole yet
    taken: bool = True  # somebody takes it here; else it is what other nodes lack, and the rest of it does not come

    @property
    def object_bytes(self) -> int:
        """Its size in the store."""
        return self.nbytes + HEAD_BYTES

    def covers(self, begin: int, end: int) -> bool:
        """Whether a range is whole."""
        return any(low <= begin and end <= high for low, high in self.merged())

    def merged(self) -> tuple[Range, ...]:
        """The whole ranges, in order, none next to another."""
        if self.state == "sealed":
            return ((0, self.nbytes),) if self.nbytes else ()
        found: list[Range] = []
        for begin, end in sorted(self.ranges):
            if found and begin <= found[-1][1]:
                found[-1] = (found[-1][0], max(end, found[-1][1]))
            else:
                found.append((begin, end))
        self.ranges = found
        return tuple(found)


@dataclass(slots=True, eq=False)
class Stop:
    """One post of this node on one line."""

    number: int  # of the line
    line: Line
    at: int  # of the post
    post: Post
    ins: tuple[int, ...] = ()  # posts from which partial pieces come, in the order of folding
    out: int = -1  # the post to which they go
    spreads: tuple[int, ...] = ()  # posts to which whole pieces go
    ends: bool = False  # whole pieces come to be here
    is_held: bool = False  # the root's result had this line's bytes before the course began
    came: dict[int, dict[int, Place]] = field(default_factory=dict)  # piece: by post, until all are here
    next_piece: int = 0  # of a stop that waits for nobody
    under_way: int = 0  # folds and sends of such a stop

    @property
    def is_root(self) -> bool:
        return self.line.root == self.at

    @property
    def starts(self) -> bool:
        """Whether its pieces begin here."""
        return not self.ins and (self.is_root or self.out >= 0)

    @property
    def folds(self) -> bool:
        """Whether what this post gives is needed."""
        return self.out >= 0 or (self.is_root and not self.is_held)

    @property
    def pieces(self) -> int:
        return -(-self.line.nbytes // self.line.piece_bytes)

    def size(self, piece: int) -> int:
        """Bytes of a piece."""
        return min(self.line.piece_bytes, self.line.nbytes - piece * self.line.piece_bytes)

    def gifts(self, piece: int) -> list[Place]:
        """Where this post's own contributions to a piece lie."""
        at = self.line.offset + piece * self.line.piece_bytes
        return [Place(oid, at) for _, oid in self.post.gives]

    def kept(self, piece: int) -> Place:
        """Where a whole piece lies in the result."""
        return Place(self.post.result, self.line.into + piece * self.line.piece_bytes)


@dataclass(slots=True, eq=False)
class Work:
    """A step under way on this node."""

    course: Course
    ledger: str  # the node that ordered it
    began_s: float
    again: bool = False  # an earlier epoch moved bytes for it
    results: dict[bytes, Result] = field(default_factory=dict)
    stops: dict[tuple[int, int], Stop] = field(default_factory=dict)
    peers: dict[str, None] = field(default_factory=dict)
    asks: dict[int, bytes] = field(default_factory=dict)  # request for room: result
    gifts: dict[bytes, None] = field(default_factory=dict)  # objects that are needed
    given: dict[bytes, None] = field(default_factory=dict)  # those of earlier epochs too: let go of at the end
    missing: dict[bytes, None] = field(default_factory=dict)  # gifts that are not in memory yet
    awaited: dict[bytes, None] = field(default_factory=dict)  # those of them whose members have not come
    state: str = "begun"  # prepared: all that it needs was ordered; open; stopped; broken
    told: bool = False  # the ledger knows that all is done here
    left: int = 0  # pieces to be passed on, to become whole, and to be sent out whole
    users: dict[int, int] = field(default_factory=dict)  # scratch memory that several need
    folding: dict[tuple[int, int, int, int], tuple[Place, ...]] = field(default_factory=dict)  # sources of a fold


@dataclass(slots=True, eq=False)
class Lane:
    """What is to be sent to a node: (rank, number, order), the lowest first."""

    heap: list[tuple[int, int, SendPiece]] = field(default_factory=list)
    under_way: dict[Frame, None] = field(default_factory=dict)  # of a lane before this one nothing counts


def stops_of(course: Course, node: str) -> dict[tuple[int, int], Stop]:
    """All stops of a node's posts, by line and post."""
    stops: dict[tuple[int, int], Stop] = {}
    for number, line in enumerate(course.lines):
        if not line.nbytes:
            continue
        ins: dict[int, list[int]] = {}
        spreads: dict[int, list[int]] = {}
        outs = dict(line.folds)
        for source, target in line.folds:
            ins.setdefault(target, []).append(source)
        for source, target in line.spreads:
            spreads.setdefault(source, []).append(target)
        ends = {line.root: None, **dict.fromkeys(target for _, target in line.spreads)}
        for at in {**ends, **outs, **ins}:
            if course.posts[at].node == node:
                stops[number, at] = Stop(
                    number, line, at, course.posts[at], tuple(ins.get(at, ())), outs.get(at, -1),
                    tuple(spreads.get(at, ())), at in ends)
    return stops


def gifts_of(course: Course, node: str) -> dict[bytes, None]:
    """The objects that a node's posts give."""
    blobs = dict(course.blobs)
    return {oid: None for post in course.posts if post.node == node for _, oid in post.gives if oid not in blobs}


def ends_of(course: Course) -> dict[bytes, int]:
    """How many bytes each gift has to have at least."""
    ends: dict[bytes, int] = {}
    for line in course.lines:
        for at in dict.fromkeys([line.root, *(source for source, _ in line.folds)]):
            for _, oid in course.posts[at].gives:
                ends[oid] = max(line.offset + line.nbytes, ends.get(oid, 0))
    return ends


def layout_for(layout: tuple[Layout, ...], rank: int) -> tuple[Layout, ...]:
    """What a rank has to know of a layout."""
    return tuple(part for part in layout if part.taker in (WHOLE, rank))


def neighbours(course: Course, node: str) -> Iterator[str]:
    """Nodes with which a node exchanges pieces."""
    for line in course.lines:
        for source, target in (*line.folds, *line.spreads):
            ends = (course.posts[source].node, course.posts[target].node)
            if node in ends and ends[0] != ends[1]:
                yield ends[1] if ends[0] == node else ends[0]


@dataclass(slots=True, eq=False)
class KeptStep:
    """A step that somebody may repeat: what this node has of it."""

    op: bytes
    step: Step
    objects: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # (rank, bytes)
    blobs: dict[int, bytes] = field(default_factory=dict)
    layout: tuple[Layout, ...] = ()
    gifts: dict[bytes, int] = field(default_factory=dict)  # bytes
    course: Course | None = None  # the last, when gifts are kept
    failed: tuple[str, str] = ("", "")  # kind and reason
    nbytes: int = 0  # of all of it


@dataclass(slots=True, eq=False)
class KeptGroup:
    """What is kept for a group, the oldest step first."""

    steps: dict[bytes, KeptStep] = field(default_factory=dict)  # by op
    nbytes: int = 0
    epoch: int = 0  # the highest heard of
    ledger: str = ""  # the node that keeps its ledger, as last heard
    floor: int = 0  # steps of the whole group before it are forgotten
