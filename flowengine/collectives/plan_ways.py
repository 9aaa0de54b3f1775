"""What each collective operation means: which bytes of which ranks are folded in which order, and for whom.

Nothing here knows where members sit, so that an operation gives the same bits wherever it is done.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from ..core.collective import ArrayPart, Header, Layout, Seating, Step
from ..core.parts import Record

ALIGN_BYTES = 64
PIECE_BYTES_MIN = 16 * 1024  # a smaller piece costs more than it saves
SHARED = -1  # in place of a rank: one result on each node for all of its takers


class StepPlan(Record, frozen=True):
    """Everything that a course follows from."""

    group: bytes
    step: Step
    epoch: int
    seating: Seating
    headers: tuple[tuple[int, Header], ...]  # by rank, of those that give something
    gifts: tuple[tuple[int, str, bytes], ...]  # (rank, node where it lies, object)
    takers: tuple[tuple[int, str, str], ...]  # (rank, node, address) of those that still need a result
    piece_bytes: int
    blobs: tuple[tuple[bytes, bytes], ...] = ()


class Way(Record, frozen=True):
    """A range of bytes and the ranks that are folded in it: `count` of them from `start`, a position in the order."""

    offset: int
    into: int
    nbytes: int
    dtype: str  # empty: bytes of one rank's gift
    start: int
    count: int
    taker: int = SHARED


class Work(Record, frozen=True):
    """What a step has to do, without places; sizes: (rank or SHARED, bytes of that result)."""

    ways: tuple[Way, ...]
    sizes: tuple[tuple[int, int], ...]
    layout: tuple[Layout, ...] = ()


# --- names ----------------------------------------------------------------------------------------


def _name(kind: bytes, group: bytes, *numbers: int) -> bytes:
    text = group + b"".join(number.to_bytes(8, "big", signed=True) for number in numbers)
    return hashlib.blake2b(text, digest_size=16, person=b"flow-" + kind).digest()


def op_name(group: bytes, step: Step) -> bytes:
    """Name of a step among all groups."""
    return _name(b"step", group, *step)


def gift_name(group: bytes, step: Step, rank: int) -> bytes:
    """Name of the object that holds what a rank gives to a step."""
    return _name(b"gift", group, *step, rank)


def given_name(group: bytes, key: bytes, address: str, step: Step) -> bytes:
    """The same for a member that gives from its own process.

    By its seat, as ranks may have other numbers when it comes again; by its process, so that what an earlier attempt
    gave and this one gives are two objects, of which one may be dropped.
    """
    return gift_name(group + key + address.encode(), step, SHARED)


def result_name(group: bytes, step: Step, rank: int) -> bytes:
    """Name of the object that holds a rank's result; SHARED: that of all takers on a node."""
    return _name(b"result", group, *step, rank)


def seating(group: bytes, epoch: int, nodes: Sequence[str]) -> Seating:
    """The order of folding of a new formation: ranks that share a node are next to each other."""
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    starts: list[int] = []
    order: list[int] = []
    for ranks in by_node.values():
        starts.append(len(order))
        order += ranks
    return Seating(group, epoch, tuple(order), tuple(starts), tuple(nodes))


# --- bytes of arrays ------------------------------------------------------------------------------


@functools.cache
def item_bytes(dtype: str) -> int:
    """Bytes of one element, from numpy's name of its type."""
    found = re.match(r"[<>|=]?([A-Za-z?])(\d*)", dtype)
    if found is None:
        return 1
    return int(found[2] or 1) * (4 if found[1] == "U" else 1)


def grain_bytes(dtype: str) -> int:
    """The distance of places at which bytes of this type may be cut: whole elements, whole cache lines."""
    return math.lcm(ALIGN_BYTES, item_bytes(dtype) if dtype else 1)


def part_bytes(part: ArrayPart) -> int:
    return math.prod(part.shape) * item_bytes(part.dtype)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _stretches(header: Header) -> list[tuple[int, int, str]]:
    """(begin, end, dtype) of arrays of one type that lie next to each other, with the gaps behind them."""
    parts = sorted((part for part in header.parts if part_bytes(part)), key=lambda part: part.offset)
    found: list[tuple[int, int, str]] = []
    for number, part in enumerate(parts):
        size = item_bytes(part.dtype)
        limit = parts[number + 1].offset if number + 1 < len(parts) else header.nbytes
        end = part.offset + max(part_bytes(part), (limit - part.offset) // size * size)
        if found and found[-1][1:] == (part.offset, part.dtype):
            found[-1] = (found[-1][0], end, part.dtype)
        else:
            found.append((part.offset, end, part.dtype))
    return found


def _cut(stretches: list[tuple[int, int, str]], nbytes: int, count: int) -> Iterator[tuple[int, int, int, str]]:
    """(number of the range, begin, end, dtype): `count` ranges of about the same size, no element cut through."""
    marks = [nbytes * number // count // ALIGN_BYTES * ALIGN_BYTES for number in range(count)] + [nbytes]
    for number, (low, high) in enumerate(pairwise(marks)):
        for begin, end, dtype in stretches:
            grain = grain_bytes(dtype)
            # One rule for both edges, so that each range begins where the one before ends, also in the rest of a grain.
            first, last = (end if mark >= end else max(begin, begin + (mark - begin) // grain * grain)
                           for mark in (low, high))
            if first < last:
                yield number, first, last, dtype


# --- what each operation means --------------------------------------------------------------------


class _Step:
    """A plan with what is looked up in it again and again."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.headers = dict(plan.headers)
        self.first = plan.headers[0][1]
        self.order = plan.seating.order
        self.starts = plan.seating.starts or (0,)
        self.place = {rank: position for position, rank in enumerate(self.order)}
        self.ranks = sorted(self.order)

    def start_after(self, rank: int) -> int:
        """Where a fold begins that is to end among those who were with this rank."""
        return next((start for start in self.starts if start > self.place[rank]), self.starts[0])

    def gift(self, rank: int, span: tuple[int, int, int], taker: int = SHARED) -> Way:
        """A range (offset, into, bytes) of one rank's gift."""
        return Way(*span, "", self.place[rank], 1, taker)


def _allreduce(step: _Step) -> Work:
    nbytes = step.first.nbytes
    # as many ranges as hosts keep all links busy both ways, unless their pieces would be too small
    count = max(1, min(len(step.starts), nbytes // min(PIECE_BYTES_MIN, step.plan.piece_bytes)))
    starts = [step.starts[number * len(step.starts) // count] for number in range(count)]
    ways = tuple(Way(begin, begin, end - begin, dtype, starts[number], len(step.order))
                 for number, begin, end, dtype in _cut(_stretches(step.first), nbytes, count))
    return Work(ways, ((SHARED, nbytes),))


def _reduce(step: _Step) -> Work:
    start, root = step.start_after(step.first.root), step.first.root
    ways = tuple(Way(begin, begin, end - begin, dtype, start, len(step.order), root)
                 for begin, end, dtype in _stretches(step.first))
    return Work(ways, ((root, step.first.nbytes),))


def _broadcast(step: _Step) -> Work:
    header = step.headers[step.first.root]
    return Work((step.gift(step.first.root, (0, 0, header.nbytes)),), ((SHARED, header.nbytes),), (Layout(0, header),))


def _send(step: _Step) -> Work:
    source, target, _ = step.plan.step
    header = step.headers[source]
    way = step.gift(source, (0, 0, header.nbytes), target)
    return Work((way,), ((target, header.nbytes),), (Layout(0, header),))


def _gathered(step: _Step, taker: int) -> Work:
    ways, layout, end = [], [], 0
    for rank in step.ranks:
        header = step.headers[rank]
        ways.append(step.gift(rank, (0, end, header.nbytes), taker))
        layout.append(Layout(end, header))
        end = aligned(end + header.nbytes)
    return Work(tuple(ways), ((taker, layout[-1].offset + layout[-1].header.nbytes),), tuple(layout))


def _allgather(step: _Step) -> Work:
    return _gathered(step, SHARED)


def _gather(step: _Step) -> Work:
    return _gathered(step, step.first.root)


def _reduce_scatter(step: _Step) -> Work:
    ways, sizes, layout = [], [], []
    for number, rank in enumerate(step.ranks):
        packed = _Packed()
        for part in step.first.parts:
            rows, row_bytes = part.shape[0], math.prod(part.shape[1:]) * item_bytes(part.dtype)
            each, more = divmod(rows, len(step.ranks))
            begin = number * each + min(number, more)
            held = each + (number < more)
            packed.add(part, part.offset + begin * row_bytes, (held, *part.shape[1:]))
        start = step.start_after(rank)
        ways += [Way(offset, into, nbytes, dtype, start, len(step.order), rank)
                 for offset, into, nbytes, dtype in packed.spans]
        sizes.append((rank, packed.nbytes))
        layout.append(Layout(0, packed.header(step.first, step.first.form), rank))
    return Work(tuple(ways), tuple(sizes), tuple(layout))


def _scatter(step: _Step) -> Work:
    return _dealt(step, [step.first.root])


def _alltoall(step: _Step) -> Work:
    return _dealt(step, step.ranks)


def _dealt(step: _Step, sources: list[int]) -> Work:
    """The k-th item of each source goes to the k-th rank."""
    ways, sizes, layout = [], [], []
    hands = {source: list(items(step.headers[source])) for source in sources}
    for number, rank in enumerate(step.ranks):
        packed, forms = _Packed(), []
        for source in sources:
            form, parts = hands[source][number]
            forms.append(form)
            kept = len(packed.spans)
            for part in parts:
                packed.add(part, part.offset, part.shape, "", kept)
            ways += [step.gift(source, span[:3], rank) for span in packed.spans[kept:]]
        form = ("*" if forms[0] == "'*'" else forms[0]) if step.first.op == "scatter" else f"[{', '.join(forms)}]"
        sizes.append((rank, packed.nbytes))
        layout.append(Layout(0, packed.header(step.first, form), rank))
    return Work(tuple(ways), tuple(sizes), tuple(layout))


class _Packed:
    """Arrays that are put one behind the other into a new result."""

    def __init__(self) -> None:
        self.parts: list[ArrayPart] = []
        self.spans: list[tuple[int, int, int, str]] = []  # offset, into, bytes, dtype
        self.nbytes = 0

    def add(self, part: ArrayPart, offset: int, shape: tuple[int, ...], dtype: str | None = None, own: int = 0) -> None:
        """Take these rows of an array; what lies next to the last span (of those from number `own`) makes it longer."""
        made = ArrayPart(part.dtype, shape, aligned(self.nbytes), part.kind)
        self.parts.append(made)
        nbytes = part_bytes(made)
        if not nbytes:
            return
        self.nbytes = made.offset + nbytes
        folded = part.dtype if dtype is None else dtype
        if len(self.spans) > own:
            before, into, _, kind = self.spans[-1]
            if kind == folded and offset - before == made.offset - into:
                self.spans[-1] = (before, into, self.nbytes - into, kind)
                return
        self.spans.append((offset, made.offset, nbytes, folded))

    def header(self, given: Header, form: str) -> Header:
        return Header(given.op, given.fold, given.root, form, tuple(self.parts), self.nbytes)


_LEAF = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\[\](){},:]|[^\[\](){},:'"]+""")


def items(header: Header) -> Iterator[tuple[str, tuple[ArrayPart, ...]]]:
    """(form, arrays) of each item of a list that is to be dealt out; without a list each array is an item."""
    if not header.form.startswith(("[", "(")):
        yield from (("'*'", (part,)) for part in header.parts)
        return
    at, text = 0, ""
    leaves, tokens = 0, _LEAF.findall(header.form)
    opened: list[int] = []  # leaves before each bracket
    for token, after in zip(tokens, [*tokens[1:], ""], strict=True):
        if token in ("[", "(", "{"):
            opened.append(leaves)
        elif token in ("]", ")", "}"):
            before = opened.pop()
            leaves = before if after == ":" else leaves  # in a key there are none
        depth = len(opened)
        if depth == 0 or (depth == 1 and token == ","):
            if text.strip():
                yield text.strip(), header.parts[at:at + leaves]
            at, leaves, text = at + leaves, 0, ""
        elif depth > 1 or token not in ("[", "(", "{") or text:
            leaves += token in ("'*'", '"*"') and after != ":"
            text += token


_WORK: dict[str, Callable[[_Step], Work]] = {
    "allreduce": _allreduce, "reduce": _reduce, "broadcast": _broadcast, "send": _send, "allgather": _allgather,
    "gather": _gather, "reduce_scatter": _reduce_scatter, "scatter": _scatter, "alltoall": _alltoall,
}


def work_of(plan: StepPlan) -> Work:
    """What the step has to do, wherever its members are."""
    work = _WORK[plan.headers[0][1].op](_Step(plan))
    return Work(tuple(way for way in work.ways if way.nbytes), work.sizes, work.layout)
