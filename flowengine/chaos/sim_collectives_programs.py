"""Programs of groups, as data: who joins what, which operations they do in which order, and what must come of each.

Numbers stand in for arrays: an element is an unsigned integer of its dtype's width. Folding two of them is neither
commutative nor associative: a contribution that is missing, counted twice or folded elsewhere in the order shows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import permutations
from random import Random

import msgspec

from flowengine.collectives.ledger_headers import FOLDS
from flowengine.core.collective import ArrayPart, Header

from .sim_settings import GroupSettings, Scenario

ALIGN = 64
FOLDED = ("allreduce", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
UNEVEN = ("broadcast", "allgather", "alltoall", "gather", "scatter", "send")  # sizes may differ from rank to rank
PER_RANK = ("alltoall", "scatter")  # what is given has a part for each rank
KINDS = ("allreduce", "allreduce", "allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall",
         "gather", "scatter", "barrier", "send", "send")  # fmt: skip
STEADY_KINDS = ("allreduce", "allreduce", "allgather", "reduce_scatter", "barrier")  # have no rank in them
BIG_KINDS = ("allreduce", "allreduce", "broadcast", "reduce")
BIG_COUNTS = (64, 90)
DTYPES = ("<i8", "<i8", "<f4", "<f8", "<i2", "|u1")
COUNTS = (1, 2, 7, 8, 16, 33, 64, 90)

CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}  # of numbers of so many bytes

Array = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bytes
Arrays = tuple[Array, ...]


class GroupOp(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of all members, or of two."""

    number: int
    kind: str
    fold: str = ""
    root: int = -1
    dtypes: tuple[str, ...] = ()  # of each array
    counts: tuple[int, ...] = ()  # elements of each array
    uneven: bool = False  # each member's arrays are longer than those of the one before
    late: int = -1  # this rank comes later by so much
    late_s: float = 0.0
    wrong: int = -1  # this rank gives something else
    source: int = -1
    target: int = -1
    is_waited: bool = True  # False: the next operations begin before its result is there


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What one member does."""

    group: str
    key: bytes
    rank: int
    size: int
    home: int  # number of its node
    start_s: float = 0.0
    after: int = -1  # it comes when this operation of its group has been done
    checkpoint_every: int = 0  # 0: never
    restored_s: float = -1.0  # how long after a death it is there again; below 0: never
    moves: bool = False  # it may be restored on another node


class Formation(msgspec.Struct, frozen=True, kw_only=True):
    """The members of a group from its beginning to its end, newcomers included."""

    name: str
    size: int  # at its beginning
    on_failure: str
    timeout_s: float
    ops: tuple[GroupOp, ...]
    scripts: tuple[Script, ...]

    def turns(self) -> Iterator[tuple[bytes, ...]]:
        """All members in each order in which ranks may follow: newcomers come as they are taken in."""
        keys = [script.key for script in self.scripts]
        for newcomers in permutations(keys[self.size :]):
            yield (*keys[: self.size], *newcomers)

    @property
    def is_slow(self) -> bool:
        """Whether a rank comes so late that the others do not wait for it."""
        return any(op.late_s >= self.timeout_s for op in self.ops if op.late >= 0)


# --- values -----------------------------------------------------------------------------------------


def width(dtype: str) -> int:
    """Bytes of an element."""
    return int(dtype[2:])


def scramble(number: int) -> int:
    """A number of 64 bits that looks like chance."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)


def numbers_in(dtype: str, raw: bytes) -> tuple[int, ...]:
    """The elements of an array."""
    return struct.unpack(f"<{len(raw) // width(dtype)}{CODES[width(dtype)]}", raw)


def array_bytes(dtype: str, numbers: list[int]) -> bytes:
    """An array of these elements."""
    return struct.pack(f"<{len(numbers)}{CODES[width(dtype)]}", *numbers)


def folded(fold: str, dtype: str, left: bytes, right: bytes) -> bytes:
    """Two ranges of elements folded one by one: what stands for `left + right`."""
    salt, mask = 4 * FOLDS.index("sum" if fold == "mean" else fold), (1 << 8 * width(dtype)) - 1
    first, second = 5 + salt, 3 + salt
    pairs = zip(numbers_in(dtype, left), numbers_in(dtype, right), strict=True)
    return array_bytes(dtype, [(a * first + b * second + 7 * a * b + 1) & mask for a, b in pairs])


def mean_of(dtype: str, value: bytes, count: int) -> bytes:
    """What stands for a sum divided by the count of ranks; of one value it is that value."""
    if count == 1:
        return value
    mask = (1 << 8 * width(dtype)) - 1
    return array_bytes(dtype, [(number * 9 + count * 1001 + 17) & mask for number in numbers_in(dtype, value)])


@lru_cache(maxsize=1024)
def array_of(key: bytes, op: GroupOp, part: int, count: int) -> Array:
    """An array that this member gives."""
    dtype = op.dtypes[part % len(op.dtypes)]
    seed = int.from_bytes(key, "big") * 1_000_003 + op.number * 1_009 + part
    size = width(dtype)
    raw = b"".join(scramble(seed * 4099 + at).to_bytes(8, "little") for at in range((count * size + 7) // 8))
    return dtype, (count,), raw[: count * size]


def given(key: bytes, op: GroupOp, rank: int, size: int) -> Arrays:
    """All arrays that a member gives; none where the operation takes none from it."""
    if op.kind in ("barrier", "admit") or (op.kind in ("broadcast", "scatter") and rank != op.root):
        return ()
    if op.kind == "send" and rank != op.source:
        return ()
    longer = key[-1] if op.uneven else 0
    if op.kind in PER_RANK:
        counts = [op.counts[0] + longer + (other if op.uneven else 0) for other in range(size)]
    elif op.kind == "reduce_scatter":
        counts = [op.counts[0] * size]
    else:
        counts = [count + longer for count in op.counts]
    if key[-1] - 1 == op.wrong:
        counts[0] += 1
    return tuple(array_of(key, op, part, count) for part, count in enumerate(counts))


def fused(op: GroupOp, arrays: Arrays) -> tuple[Header, bytes]:
    """Arrays behind each other as a member tells and gives them."""
    kinds = list(dict.fromkeys(dtype for dtype, _, _ in arrays))
    places: dict[int, int] = {}
    blob = bytearray()
    for place in sorted(range(len(arrays)), key=lambda place: (kinds.index(arrays[place][0]), place)):
        blob += bytes(-len(blob) % ALIGN)
        places[place] = len(blob)
        blob += arrays[place][2]
    parts = [ArrayPart(dtype, shape, places[place]) for place, (dtype, shape, _) in enumerate(arrays)]
    is_list = len(arrays) > 1 or op.kind in PER_RANK
    form = "" if not arrays else repr(["*"] * len(arrays)) if is_list else repr("*")
    kind = "recv" if op.kind == "send" and not arrays else op.kind
    return Header(kind, op.fold, op.root, form, tuple(parts), len(blob)), bytes(blob)


# --- what must come of an operation -----------------------------------------------------------------


class Members(msgspec.Struct, frozen=True):
    """Who takes part: keys by rank, the order of folding and where a host's ranks begin in it."""

    keys: tuple[bytes, ...]
    order: tuple[int, ...]
    starts: tuple[int, ...]


@lru_cache(maxsize=256)
def folds_of(op: GroupOp, members: Members, part: int) -> tuple[bytes, ...]:
    """One array folded from each position at which a fold may begin."""
    size, found = len(members.keys), []
    values = {rank: given(members.keys[rank], op, rank, size)[part] for rank in members.order}
    for start in range(size):
        ranks = members.order[start:] + members.order[:start]
        dtype, _, value = values[ranks[0]]
        for rank in ranks[1:]:
            value = folded(op.fold, dtype, value, values[rank][2])
        found.append(mean_of(dtype, value, size) if op.fold == "mean" else value)
    return tuple(found)


def is_mix(dtype: str, found: bytes, folds: Sequence[bytes]) -> bool:
    """Whether each element is that of one of these."""
    if any(found == fold for fold in folds):
        return True
    columns = zip(*(numbers_in(dtype, fold) for fold in folds), strict=True)
    return all(number in column for number, column in zip(numbers_in(dtype, found), columns, strict=True))


def is_fold_of(op: GroupOp, members: Members, part: int, found: Array) -> bool:
    """Whether each element is a fold of all contributions, each once, in the cyclic order from a start of the group."""
    folds = folds_of(op, members, part)
    dtype = op.dtypes[part % len(op.dtypes)]
    if (found[0], found[1], len(found[2])) != (dtype, (len(folds[0]) // width(dtype),), len(folds[0])):
        return False
    # A reduce ends at its root's node, so it may begin anywhere.
    starts = dict.fromkeys((0, *members.starts))
    return is_mix(dtype, found[2], folds if op.kind == "reduce" else [folds[start] for start in starts])


def is_right(op: GroupOp, members: Members, rank: int, found: Arrays | None) -> bool:
    """Whether this is what an operation of these members gives to one of them."""
    size = len(members.keys)
    if size > 1 and any(key[-1] - 1 == op.wrong for key in members.keys):
        return False  # they did not ask for the same
    gifts = [given(key, op, other, size) for other, key in enumerate(members.keys)]
    if op.kind in ("allreduce", "reduce"):
        if op.kind == "reduce" and rank != op.root:
            return found is None
        return found is not None and len(found) == len(gifts[0]) and all(
            is_fold_of(op, members, part, array) for part, array in enumerate(found)
        )
    if op.kind == "reduce_scatter":
        return found is not None and is_own_part(op, members, rank, found)
    return found == moved(op, rank, gifts)


def moved(op: GroupOp, rank: int, gifts: Sequence[Arrays]) -> Arrays | None:
    """What a rank gets of an operation that folds nothing."""
    if op.kind in ("barrier", "admit"):
        return None
    if op.kind == "broadcast":
        return gifts[op.root]
    if op.kind == "scatter":
        return (gifts[op.root][rank],)
    if op.kind == "send":
        return gifts[op.source] if rank == op.target else None
    if op.kind == "alltoall":
        return tuple(gift[rank] for gift in gifts)
    if op.kind == "gather" and rank != op.root:
        return None
    return tuple(array for gift in gifts for array in gift)


def is_own_part(op: GroupOp, members: Members, rank: int, found: Arrays) -> bool:
    """Whether this is a rank's part of a fold of all."""
    count, dtype = op.counts[0], op.dtypes[0]
    nbytes = count * width(dtype)
    if len(found) != 1 or found[0][:2] != (dtype, (count,)) or len(found[0][2]) != nbytes:
        return False
    parts = [fold[rank * nbytes : (rank + 1) * nbytes] for fold in folds_of(op, members, 0)]
    return is_mix(dtype, found[0][2], parts)


# --- drawing a program ------------------------------------------------------------------------------


class GroupWriter:
    """Draws the groups of a seed."""

    def __init__(self, dice: Random, scenario: Scenario) -> None:
        self.dice = dice
        self.tasks = scenario.tasks
        self.settings = scenario.group or GroupSettings()
        self.nodes = dice.randrange(1, scenario.nodes + 1)

    def formations(self) -> tuple[Formation, ...]:
        """One group, now and then followed by others of the same name or beside one of another name."""
        dice = self.dice
        made = [self.formation("g", 0, 0.0)]
        # Members of a next formation would be taken for newcomers of one that grows.
        if dice.random() < self.settings.again and all(op.kind != "admit" for op in made[0].ops):
            made.append(self.formation("g", 1, dice.random() * 2))
        if dice.random() < self.settings.beside:
            made.append(self.formation("h", 2, dice.random()))
        return tuple(self.in_turn(formation) for formation in made)

    def in_turn(self, formation: Formation) -> Formation:
        """Some of the groups that grow take one newcomer after the other, whatever ranks they wish for."""
        dice, ops = self.dice, list(formation.ops)
        admits = [op.number for op in ops if op.kind == "admit"]
        if not admits or dice.random() > 0.4:
            return formation
        ops += [GroupOp(number=len(ops), kind="admit"), *(
            self.op(len(ops) + 1 + index, formation.size, formation.on_failure, True) for index in range(3)
        )]  # fmt: skip
        late = dice.randrange(formation.size, len(formation.scripts))
        scripts = [
            msgspec.structs.replace(script, after=admits[0]) if script.rank == late else script
            for script in formation.scripts
        ]
        return msgspec.structs.replace(formation, ops=tuple(ops), scripts=tuple(scripts))

    def formation(self, name: str, number: int, start_s: float) -> Formation:
        """A group with its members and their operations."""
        dice, settings = self.dice, self.settings
        size = dice.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 8))
        on_failure = dice.choice(settings.on_failure)
        grows = 2 if dice.random() < settings.grows else 0
        ops = [self.op(index, size, on_failure, bool(grows)) for index in range(dice.randrange(1, self.tasks))]
        if grows:
            at = dice.randrange(len(ops))
            ops[at] = GroupOp(number=at, kind="admit")
        together = dice.random() < 0.5
        scripts = [
            Script(
                group=name, key=bytes((number + 1, rank + 1)), rank=rank, size=size + (grows if rank >= size else 0),
                home=(rank * self.nodes // size if together else dice.randrange(self.nodes)) % self.nodes,
                start_s=start_s + dice.random() * (0.3 if rank < size else 0.1),
                checkpoint_every=dice.choice((0, 1, 2, 5)), restored_s=self.restored_s(on_failure),
                moves=dice.random() < 0.4,
            )
            for rank in range(size + grows)
        ]  # fmt: skip
        return Formation(
            name=name, size=size, on_failure=on_failure, timeout_s=settings.timeout_s, ops=tuple(ops),
            scripts=tuple(scripts),
        )  # fmt: skip

    def restored_s(self, on_failure: str) -> float:
        """How long a dead member stays away."""
        dice = self.dice
        if on_failure != "recover" or dice.random() < self.settings.never_back:
            return -1.0
        return dice.choice((0.01, 0.05, 0.2, 1.0))

    def op(self, number: int, size: int, on_failure: str, steady: bool) -> GroupOp:
        """An operation of a group of this size."""
        dice, settings = self.dice, self.settings
        is_steady = steady or on_failure == "shrink"
        kind = dice.choice(STEADY_KINDS if is_steady else BIG_KINDS if settings.big else KINDS)
        if kind == "reduce_scatter" and on_failure == "shrink":
            kind = "allreduce"  # what is given would follow from a size that is another meanwhile
        if kind == "send" and size == 1:
            kind = "barrier"
        source = dice.randrange(size)
        target = (source + dice.randrange(1, size)) % size if size > 1 else 0
        arrays = 1 if kind in (*PER_RANK, "reduce_scatter") else dice.choice((1, 1, 1, 2, 3))
        fold = dice.choice(FOLDS) if kind in FOLDED else ""
        dtypes = ("<f4", "<f8") if fold == "mean" else DTYPES
        one_dtype = dice.choice(dtypes) if dice.random() < 0.5 or kind in PER_RANK else ""
        return GroupOp(
            number=number, kind=kind,
            fold=fold,
            root=dice.randrange(size) if kind in ROOTED else -1,
            dtypes=tuple(one_dtype or dice.choice(dtypes) for _ in range(arrays)),
            counts=tuple(dice.choice(BIG_COUNTS if settings.big else COUNTS) for _ in range(arrays)),
            uneven=kind in UNEVEN and dice.random() < 0.3,
            late=dice.randrange(size) if dice.random() < settings.late else -1,
            late_s=dice.random() * 0.2 if dice.random() > settings.too_late else settings.timeout_s * 1.5,
            wrong=dice.randrange(size) if kind in FOLDED and size > 1 and dice.random() < settings.wrong else -1,
            source=source if kind == "send" else -1, target=target if kind == "send" else -1,
            is_waited=dice.random() < 0.8,
        )  # fmt: skip
