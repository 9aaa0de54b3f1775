"""A group as its members use it: operations on arrays in which every rank takes part, each a step that has a number."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from flowengine.collectives.forms import Given, Opened, for_fold, value_of
from flowengine.collectives.ledger_headers import EPOCH_STEPS, FOLDS, ON_FAILURE
from flowengine.core.collective import WHOLE, GroupFormed, Header, JoinRefused, Layout, Order, Seating, Step, StepDone
from flowengine.errors import (
    BadType,
    BadValue,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    FlowError,
    MemberLost,
    StaleSession,
    StoreFull,
)
from flowengine.functions import start_default
from flowengine.options import real, unknown_name, whole
from flowengine.refs import Current, current_session

if TYPE_CHECKING:
    from flowengine.runtime.membership import Membership

RANKS_MAX = 1_000_000
TIMEOUT_S_MAX = 1e9
NO_MEMBERS = "a replay in this process has no other members: operations of groups are not replayed"
KINDS: dict[str, type[FlowError]] = {
    "mismatch": CollectiveMismatch, "timeout": CollectiveTimeout, "lost": MemberLost, "behind": MemberLost,
    "refused": BadValue, "usage": BadValue, "store": StoreFull,
}  # fmt: skip
KEPT = (
    "name", "home", "key", "timeout_s", "on_failure", "restorable", "is_formed", "next_step", "pairs", "first_pair",
    "left", "refusal", "former"
)  # fmt: skip


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a member sits, from one epoch to the next."""

    size: int
    rank: int
    seating: Seating | None = None

    @property
    def group(self) -> bytes:
        """The formation: a name that is used again is another."""
        return self.seating.group if self.seating is not None else b""

    @property
    def epoch(self) -> int:
        """Of the seating; 0 before it is known."""
        return self.seating.epoch if self.seating is not None else 0


class Group:
    """One member of a group. It belongs to the actor, task or program that joined, and is restored with its actor."""

    name: str
    timeout_s: float
    on_failure: str
    home = b""  # the actor, task or program that joined
    key = b""  # this seat, by a name that a re-run has again
    restorable = False
    former: Order = ()  # in which the group folds, or one that these ranks were before

    def __init__(self, size: int, rank: int) -> None:
        self.members: Membership | None = None
        self.seat = 0
        self.left = False
        self.lock = threading.Lock()
        self.place = Place(size, rank)
        self.is_formed = False
        self.next_step = 0
        self.pairs: dict[tuple[int, int], int] = {}  # (source, target) -> how much one has sent to the other
        self.first_pair = 0
        self.unread: dict[Step, None] = {}  # steps whose results were not read yet
        self.refusal: tuple[str, str] | None = None  # why there is no seat: kind and reason

    # --- who sits where ---------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The number of this member."""
        return self.place.rank

    @property
    def size(self) -> int:
        """How many members there are; while steps are repeated, how many there were."""
        place = self.place
        return place.seating.size_at(self.next_step, place.size) if place.seating is not None else place.size

    @property
    def epoch(self) -> int:
        """How often who sits where has changed, as far as this member has heard."""
        return self.place.epoch

    @property
    def seating(self) -> Seating | None:
        """Who sits where, when that is known."""
        return self.place.seating

    def formed(self, news: GroupFormed) -> None:
        """The ledger has told who sits where."""
        if not self.is_formed:
            self.is_formed = True
            self.next_step = max(self.next_step, news.first_step)
        elif news.size < self.place.size:  # ranks have new numbers
            self.pairs, self.first_pair = {}, news.seating.epoch * EPOCH_STEPS
        self.place = Place(news.size, news.rank, news.seating)
        self.former = (news.seating.order, news.seating.starts)

    def seated(self) -> Membership:
        """The shell of this process, when the group is formed; raises when the caller is not its member."""
        session = current_session()
        members: Membership | None = session.membership
        if members is None:
            raise BadValue(NO_MEMBERS)
        if self.refusal is not None:
            raise self.error(*self.refusal)
        if self.left:
            raise BadValue(f"group {self.name!r}: rank {self.rank} has left it")
        if members.home() != self.home:
            raise BadValue(f"group {self.name!r}: only the actor or task that joined as rank {self.rank} can use it")
        if self.members is not members:
            if self.members is not None:
                raise StaleSession(f"group {self.name!r} is of an earlier session")
            self.members = members
        seat = members.machine.seats.get(self.seat)
        if seat is None:
            members.sit(self)
        if seat is None or not seat.formed:
            outcome = members.seated(self)
            if type(outcome) is JoinRefused:
                self.left, self.refusal = True, (outcome.kind, outcome.reason)
                raise self.error(*self.refusal)
        return members

    def leave(self) -> None:
        """Give the seat up; twice is harmless."""
        if not self.left and self.members is not None and self.seat:
            self.members.leave(self.seat)
        self.left = True

    def replaced(self) -> None:
        """Its member has joined again: this one must not take the seat from the other."""
        self.left, self.refusal = True, ("usage", f"rank {self.rank} has joined again: use what that join returned")

    def again(self, name: str) -> Group:
        """The same seat in a new group, which folds in the order of this one, wherever its members sit now."""
        self.leave()
        group = Group(self.place.size, self.rank)
        group.name, group.timeout_s, group.on_failure = name, self.timeout_s, self.on_failure
        group.former = self.former
        group.sit()
        return group

    def sit(self) -> None:
        """Take the seat and return when all are taken."""
        session = Current.session or start_default()
        members: Membership | None = session.membership
        if members is not None:  # else this is a replay, which may get along without operations
            number = members.next_join()
            self.home, self.key, self.restorable = members.home(), members.key_of(number), members.is_restorable()
            self.former = members.order_of(number) or self.former
            self.seated()
            members.note_order(number, self.former)

    def fall_behind(self, reason: str) -> None:
        """The others have done a step that this member cannot do: none of its later ones may mix with theirs."""
        self.leave()
        self.refusal = ("behind", reason)

    def error(self, kind: str, reason: str) -> FlowError:
        """What is raised for a failure: the same on all ranks."""
        text = reason if repr(self.name) in reason else f"group {self.name!r}: {reason}"
        return KINDS.get(kind, CollectiveError)(text)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in KEPT}
        state["place"] = msgspec.msgpack.encode(self.place)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(0, 0)  # type: ignore[misc]
        self.__dict__.update(state, place=msgspec.msgpack.decode(state["place"], type=Place))
        members = Current.session.membership if Current.session is not None else None
        if members is not None and members.home() == self.home:
            self.members = members
            if not self.left and self.refusal is None:
                members.sit(self)  # the others wait for it

    def __repr__(self) -> str:
        return f"Group({self.name!r}, rank {self.rank} of {self.size}, epoch {self.epoch})"

    # --- operations -------------------------------------------------------------------------------

    def allreduce(self, x: Any, op: str = "sum", *, wait: bool = True) -> Any:
        """What all ranks give, folded element by element; the same bits on every rank."""
        return self._whole(lambda: self._folded("allreduce", x, op, WHOLE), wait)

    def reduce(self, x: Any, root: int = 0, op: str = "sum", *, wait: bool = True) -> Any:
        """The same for the root alone; the others get None."""
        return self._whole(lambda: self._folded("reduce", x, op, self._rank("root", root)), wait)

    def reduce_scatter(self, x: Any, op: str = "sum", *, wait: bool = True) -> Any:
        """What all give, folded, and cut along the first axis: this rank's run of rows."""
        return self._whole(lambda: self._folded("reduce_scatter", x, op, WHOLE), wait)

    def broadcast(self, x: Any = None, root: int = 0, *, wait: bool = True) -> Any:
        """What the root gives. Who gives something too has it compared with what comes."""

        def asked() -> Asked:
            header = Header("broadcast", root=self._rank("root", root))
            is_root = header.root == self.rank
            return Asked(header, Opened(x, "broadcast") if is_root or x is not None else None, gives=is_root)

        return self._whole(asked, wait)

    def allgather(self, x: Any, *, wait: bool = True) -> Any:
        """A list of what each rank gives."""
        return self._whole(lambda: Asked(Header("allgather"), Opened(x, "allgather")), wait)

    def gather(self, x: Any, root: int = 0, *, wait: bool = True) -> Any:
        """The same for the root alone; the others get None."""
        return self._whole(lambda: Asked(Header("gather", root=self._rank("root", root)), Opened(x, "gather")), wait)

    def alltoall(self, xs: Any, *, wait: bool = True) -> Any:
        """Item r of the list goes to rank r; gives a list of what each rank had for this one."""
        return self._whole(lambda: Asked(Header("alltoall"), Opened(items_of(xs, "alltoall"), "alltoall")), wait)

    def scatter(self, xs: Any = None, root: int = 0, *, wait: bool = True) -> Any:
        """Item r of the root's list, for rank r."""

        def asked() -> Asked:
            header = Header("scatter", root=self._rank("root", root))
            is_root = header.root == self.rank
            return Asked(header, Opened(items_of(xs, "scatter"), "scatter") if is_root else None)

        return self._whole(asked, wait)

    def barrier(self, *, wait: bool = True) -> Any:
        """Return when all ranks have come here."""
        return self._whole(lambda: Asked(Header("barrier")), wait)

    def admit(self, *, wait: bool = True) -> Any:
        """All ranks agree here to take in those that have joined with a larger world size."""
        return self._whole(lambda: Asked(Header("admit")), wait)

    def send(self, x: Any, to: int, *, wait: bool = True) -> Any:
        """Give to another rank; returns when it has been taken."""
        pair = self.rank, self._other("to", to)
        return self._pair(lambda: Asked(Header("send"), Opened(x, "send")), pair, wait)

    def recv(self, source: int, *, wait: bool = True) -> Any:
        """What another rank sends to this one, in the order of its sends."""
        pair = self._other("source", source), self.rank
        return self._pair(lambda: Asked(Header("recv")), pair, wait)

    # --- steps ------------------------------------------------------------------------------------

    def _rank(self, what: str, value: Any) -> int:
        return whole(what, value, 0, self.size - 1)

    def _other(self, what: str, value: Any) -> int:
        rank = self._rank(what, value)
        if rank == self.rank:
            raise BadValue(f"{what} must be another rank than this one, {rank}")
        return rank

    def _folded(self, name: str, x: Any, op: str, root: int) -> Asked:
        if op not in FOLDS:
            raise BadValue(unknown_name("reduction", op, FOLDS))
        return Asked(Header(name, op, root), Opened(x, name))

    def _whole(self, asked: Callable[[], Asked], wait: bool) -> Any:
        """The next step of all members."""
        members = self.seated()
        with self.lock:
            step = (WHOLE, WHOLE, self.next_step)
            self.next_step += 1
            self.unread[step] = None
        return self._run(members, step, asked, wait)

    def _pair(self, asked: Callable[[], Asked], pair: tuple[int, int], wait: bool) -> Any:
        """The next step of two members."""
        members = self.seated()
        with self.lock:
            number = self.pairs.get(pair, self.first_pair)
            self.pairs[pair] = number + 1
        return self._run(members, (*pair, number), asked, wait)

    def _run(self, members: Membership, step: Step, asked: Callable[[], Asked], wait: bool) -> Any:
        try:
            call = Call(self, asked)
            given = members.give(self, step, call)
        except Exception as error:  # the others hear of it, and all ranks go on with the same next step
            members.give_nothing(self, step, error)
            self._read(members, step, None)
            raise
        call.given = None  # it is where the others find it

        def value(outcome: Any) -> Any:
            try:
                return call.value(outcome)
            finally:
                self._read(members, step, outcome)

        return value(members.wait_for(self, given)) if wait else members.promise(self, given, value)

    def _read(self, members: Membership, step: Step, outcome: Any) -> None:
        """Who never repeats a step lets go of its result, when that is large."""
        with self.lock:
            self.unread.pop(step, None)
            passed = min([unread[2] for unread in self.unread], default=self.next_step)
        if not self.restorable and type(outcome) is StepDone and outcome.oid:
            members.read(self, passed, step if step[0] != WHOLE else None)


class Asked:
    """What a member asks for, before it is put into a buffer."""

    def __init__(self, header: Header, opened: Opened | None = None, gives: bool = True) -> None:
        """gives: the arrays go to the others; else they are only compared."""
        self.header = header
        self.opened = opened
        self.gives = gives


class Call:
    """One operation from what is given to what comes back."""

    def __init__(self, group: Group, ask: Callable[[], Asked]) -> None:
        self.group = group
        self.place = group.place
        asked = ask()
        while self.place is not group.place:  # ranks may have other numbers now
            self.place = group.place
            asked = ask()
        self.like = opened = asked.opened
        self.header = header = asked.header
        self.given: Given | None = None
        if opened is not None:
            given = Given(opened, for_fold(opened, header.fold))
            self.header = given.header(header.op, header.fold, header.root)
            self.given = given if asked.gives else None
            opened.arrays = []

    def value(self, outcome: Any) -> Any:
        """What the operation gives; raises what the step failed with."""
        if type(outcome) is not StepDone:
            if outcome.kind == "behind":
                self.group.fall_behind(outcome.reason)
            raise self.group.error(outcome.kind, outcome.reason)
        op = self.header.op
        if outcome.empty or op in ("barrier", "admit", "send"):
            return None
        assert self.group.members is not None
        layout = list(outcome.layout) or [Layout(0, self.header)]
        buffer = self.group.members.buffer_of(outcome)
        values = [value_of(buffer, place, self.like) for place in layout]
        if op in ("allgather", "gather") or (op == "alltoall" and self.is_by_item(layout)):
            return values
        return values[0]

    def is_by_item(self, layout: list[Layout]) -> bool:
        """Whether a result of alltoall is told as one place for each rank, not as one list."""
        return len(layout) > 1 or not layout[0].header.form.startswith("[")


def items_of(xs: Any, op: str) -> list[Any]:
    """What is for each rank; the rows of an array or of a tensor of torch count too."""
    torch = sys.modules.get("torch")
    if (isinstance(xs, np.ndarray) or (torch is not None and isinstance(xs, torch.Tensor))) and xs.ndim:
        return list(xs)
    if isinstance(xs, (list, tuple)):
        return list(xs)
    raise BadType(f"{op} takes a list with one item for each rank, not {type(xs).__name__}")


def join(name: str, world_size: int, rank: int, *, timeout_s: float = 30.0, on_failure: str = "recover") -> Group:
    """Take a seat and return when all are taken; raises CollectiveTimeout when they are not in time."""
    if not isinstance(name, str) or not name:
        raise BadType(f"a group's name is a string, not {name!r}")
    if not name.isprintable():
        raise BadValue(f"a group's name has printable characters only, not {name!r}")
    size = whole("world_size", world_size, 1, RANKS_MAX)
    rank = whole("rank", rank, 0, size - 1)
    limit_s = real("timeout_s", timeout_s, 0.001, TIMEOUT_S_MAX)
    if on_failure not in ON_FAILURE:
        raise BadValue(unknown_name("way on_failure", on_failure, ON_FAILURE))
    group = Group(size, rank)
    group.name, group.timeout_s, group.on_failure = name, limit_s, on_failure
    group.sit()
    return group


