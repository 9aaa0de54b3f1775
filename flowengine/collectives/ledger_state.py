"""What a ledger knows: seats, steps and their results. Each record is changed by the parts of the ledger only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from flowengine.core.collective import (
    WHOLE,
    Course,
    Finals,
    GroupJoined,
    Header,
    Layout,
    Seating,
    Step,
)
from flowengine.core.parts import Message, Record

from .ledger_headers import step_text

OPEN, FOLDING, RUNNING, ASKING, DONE, FAILED = "open", "folding", "running", "asking", "done", "failed"
SETTLED = (DONE, FAILED)


class LedgerDue(Message, frozen=True):
    """Timer: something in this formation may wait for too long."""

    group: bytes


class Gift(Record, frozen=True):
    """What a rank gave."""

    blob: bytes
    oid: bytes
    node: str  # where the object lies


class Result(Record, frozen=True):
    """What a rank gets: a blob, or an object on these nodes."""

    blob: bytes = b""
    oid: bytes = b""
    nbytes: int = 0
    nodes: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Seat:
    """One member, from its first coming on; it keeps its seat while it is away."""

    rank: int
    joined: GroupJoined  # as it last said
    asked: int = 0  # the rank as which it first came; below 0: another node knew it
    address: str = ""  # empty: it is away
    attempt: int = 1
    next_step: int = 0  # of the whole group, as this attempt told
    moved_s: float = 0.0  # when it came, or came nearer to the others
    lost_s: float = inf
    reason: str = ""
    left: bool = False
    unknown: bool = False  # it sat here when another node kept the ledger, and did not come yet
    passed: int = 0  # it will not repeat steps before
    first_step: int = 0

    @property
    def node(self) -> str:
        """The node where it sits or sat."""
        return self.joined.node

    def is_of(self, event: GroupJoined) -> bool:
        """Whether this member comes here, by its key and the rank that it asked for."""
        return self.joined.key == event.key and (self.asked < 0 or self.asked == event.rank)

    def where(self) -> str:
        """For people."""
        return f"host {self.joined.host}, pid {self.joined.pid}"


@dataclass(slots=True, eq=False)
class Roster:
    """Who has which rank from an epoch on, and the order of folding."""

    since: int
    seats: tuple[Seat, ...] = ()  # by rank
    order: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()

    def rank_of(self, seat: Seat) -> int:
        """The rank of a member here; -1 when it has none."""
        if seat.rank < len(self.seats) and self.seats[seat.rank] is seat:
            return seat.rank
        return next((rank for rank, other in enumerate(self.seats) if other is seat), -1)


@dataclass(slots=True, eq=False)
class Book:
    """One step: what was given, how it is done, and its results; state is one of OPEN to FAILED."""

    step: Step
    op: bytes
    roster: Roster  # its ranks are those of this roster
    started_s: float
    state: str = OPEN
    gifts: dict[int, Gift] = field(default_factory=dict)
    headers: dict[int, Header] = field(default_factory=dict)  # also of gifts that are lost; roots by this roster
    spares: dict[int, Gift] = field(default_factory=dict)  # given elsewhere while it was under way, or held by nodes
    again: dict[int, None] = field(default_factory=dict)  # ranks that gave once more while it was under way
    epoch: int = 0
    course: Course | None = None
    made: dict[tuple[str, bytes], tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # see `Courses`
    waiting: dict[str, None] = field(default_factory=dict)  # nodes that are not done, or have not answered
    finals: dict[str, Finals] = field(default_factory=dict)
    due_s: float = inf
    mends: int = 0
    stalls: int = 0  # how often a course broke or stood still though no node was lost
    only: int = -1  # the rank for which a lost result is made again; -1: it is done for all
    results: dict[int, Result] = field(default_factory=dict)  # by rank, WHOLE: the same for all
    layout: tuple[Layout, ...] = ()
    kind: str = ""  # of the failure
    reason: str = ""
    mark: int = 0  # of a step of two: no steps of the group before this one follow it
    is_read: bool = False  # of a step of two: by its taker, which never repeats it
    lost: dict[str, None] = field(default_factory=dict)  # why results or gifts are gone
    awaited: dict[int, tuple[str, Gift]] = field(default_factory=dict)  # of a step that runs without them: see `Early`

    @property
    def is_early(self) -> bool:
        """Whether it runs without all of its members."""
        return self.state == RUNNING and bool(self.awaited)

    def ranks(self) -> Iterator[int]:
        """Those that take part."""
        return iter(range(len(self.roster.seats)) if self.step[0] == WHOLE else sorted(dict.fromkeys(self.step[:2])))

    def count(self) -> int:
        """How many take part."""
        return len(self.roster.seats) if self.step[0] == WHOLE else 1 + (self.step[0] != self.step[1])

    def missing(self) -> list[int]:
        """Those whose part is missing."""
        return [rank for rank in self.ranks() if rank not in self.gifts]

    def header(self) -> Header:
        """What is done: of any rank that gives."""
        first = self.headers[min(self.headers)]
        return self.headers.get(first.root, first)

    def text(self) -> str:
        """For people."""
        op = f" ({next(iter(self.headers.values())).op})" if self.headers else ""
        return step_text(self.step) + op


@dataclass(slots=True, eq=False)
class Ledger:
    """One formation of a name."""

    name: str
    group: bytes
    size: int
    timeout_s: float
    on_failure: str
    seats: dict[int, Seat] = field(default_factory=dict)  # while it gathers
    rosters: list[Roster] = field(default_factory=lambda: [Roster(0)])  # the last one is what holds
    formed: bool = False
    over: bool = False
    epoch: int = 0
    books: dict[Step, Book] = field(default_factory=dict)
    open: dict[Step, Book] = field(default_factory=dict)  # those that are not settled
    floor: int = 0  # steps of the group before are forgotten
    floor_reason: str = ""
    grown: tuple[tuple[int, int], ...] = ()  # as in Seating
    pairs: dict[Step, Book] = field(default_factory=dict)  # settled steps of two
    nodes: dict[str, None] = field(default_factory=dict)  # that may hold something of it
    kept_bytes: dict[str, int] = field(default_factory=dict)  # by node: objects
    blob_bytes: int = 0  # of small results, here and on nodes with members
    adopted: bool = False  # another node kept it before
    asked: dict[str, None] = field(default_factory=dict)  # nodes that have not told what they hold
    due_s: float = inf  # until when it gathers, adopts, or has nobody
    timer_s: float = inf  # when the next timer fires

    def is_wish(self, rank: int) -> bool:
        """Whether somebody who comes with this rank wants to be taken in: the rank is a wish for a place then."""
        return rank >= min(len(roster.seats) for roster in self.rosters)

    @property
    def roster(self) -> Roster:
        """Who has which rank now."""
        return self.rosters[-1]

    def everybody(self) -> list[Seat]:
        """All seats that are taken, by rank."""
        return list(self.roster.seats) if self.formed else [self.seats[rank] for rank in sorted(self.seats)]

    def here(self) -> list[Seat]:
        """Those that can be spoken to."""
        return [seat for seat in self.everybody() if seat.address]

    def known_roster(self, epoch: int) -> Roster:
        """Who had which rank in an epoch; 0: now."""
        known = [roster for roster in self.rosters if roster.since <= epoch]
        return known[-1] if epoch and known else self.roster

    def seating(self) -> Seating:
        """As members are told."""
        roster = self.roster
        nodes = tuple(seat.node if seat.address else "" for seat in roster.seats)
        keys = tuple(seat.joined.key for seat in roster.seats)
        return Seating(self.group, self.epoch, roster.order, roster.starts, nodes, keys, self.grown)
