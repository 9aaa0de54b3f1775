"""Courses of collective operations: where bytes are folded and to whom they go, before and after a loss.

A course draws the ways of a step over the nodes on which gifts lie and takers sit. A way folds in the cyclic order of
the group from its start, wherever its ranks are, so that a repair gives the same bits. Each result is named by one
post of its node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby, pairwise
from operator import itemgetter

from msgspec import structs

from ..core.collective import Course, Finals, Line, Post
from .plan_ways import PIECE_BYTES_MIN, SHARED, StepPlan, Way, Work, grain_bytes, op_name, result_name, work_of
from .plan_ways import gift_name as gift_name
from .plan_ways import seating as seating

PIECE_COST_BYTES = 64 * 1024  # what could be sent in the time that a piece costs besides its bytes
PER_RANK = ("reduce", "gather", "scatter", "alltoall", "reduce_scatter", "send")  # results that one node alone has

Gives = tuple[tuple[int, bytes], ...]
Span = tuple[int, int]


class _Sketch:
    """Posts and lines of a course while they are drawn; late: the node of who comes last, empty when all are there."""

    def __init__(self, plan: StepPlan, work: Work, late: str = "") -> None:
        self.plan = plan
        self.late = late
        self.sizes = dict(work.sizes)
        self.order = plan.seating.order
        self.starts = frozenset(plan.seating.starts)
        self.gifts = {rank: (node, oid) for rank, node, oid in plan.gifts}
        self.posts: dict[tuple[str, Gives, bytes], int] = {}
        self.kept: dict[tuple[str, bytes], Gives] = {}  # the only post that names a result
        self.carriers: dict[tuple[str, Gives], bytes] = {}  # the result that a post of these gifts names
        self.names: dict[int, bytes] = {}
        self.takers: dict[tuple[str, bytes], list[tuple[int, str]]] = {}
        self.nodes: dict[int, list[str]] = {}  # by owner of a result: where it is wanted
        self.lines: list[Line] = []
        for key in self.sizes:
            self.names[key] = result_name(plan.group, plan.step, key)
        for rank, node, address in plan.takers:
            key = SHARED if SHARED in self.sizes else rank
            if key in self.sizes:
                self.takers.setdefault((node, self.names[key]), []).append((rank, address))
                if node not in self.nodes.setdefault(key, []):
                    self.nodes[key].append(node)
        self.spots: dict[str, list[int]] = {}  # by node: positions of its members
        place = {rank: position for position, rank in enumerate(self.order)}
        seated = [(rank, node) for rank, node in enumerate(plan.seating.nodes) if node]
        for rank, node in [*seated, *(gift[:2] for gift in plan.gifts), *(taker[:2] for taker in plan.takers)]:
            if rank in place and place[rank] not in self.spots.setdefault(node, []):
                self.spots[node].append(place[rank])

    def distance(self, node: str, position: int) -> int:
        """How far behind a position of the order the next member on this node is."""
        return min(((spot - position - 1) % len(self.order) for spot in self.spots.get(node, ())),
                   default=len(self.order))

    def runs(self, way: Way) -> list[tuple[str, Gives]]:
        """Stretches of the ranks to be folded that are on one node and do not cross a start."""
        found: list[tuple[str, Gives]] = []
        for number in range(way.count):
            position = (way.start + number) % len(self.order)
            rank = self.order[position]
            node, oid = self.gifts[rank]
            if found and found[-1][0] == node and position not in self.starts:
                found[-1] = (node, (*found[-1][1], (rank, oid)))
            else:
                found.append((node, ((rank, oid),)))
        return found

    def keep(self, way: Way) -> None:
        """Let the root of a way name the result on its node, if no other root does."""
        node, gives = self.runs(way)[-1]
        result = self.names[way.taker]
        if node in self.nodes.get(way.taker, ()) and self.kept.setdefault((node, result), gives) == gives:
            self.carriers.setdefault((node, gives), result)

    def post(self, node: str, gives: Gives, result: bytes = b"") -> int:
        return self.posts.setdefault((node, gives, result), len(self.posts))

    def keeper(self, node: str, result: bytes) -> int:
        """The post that names a result."""
        return self.post(node, self.kept.get((node, result), ()), result)

    def fold(self, way: Way) -> None:
        """Draw a way from the gifts to all nodes that want its result."""
        wanted, result = self.nodes.get(way.taker, []), self.names[way.taker]
        if not wanted:
            return
        runs = self.runs(way)
        node, gives = runs[-1]
        is_kept = self.kept.get((node, result)) == gives
        sources = [self.carrier(*run) for run in runs[:-1]]
        root = self.post(node, gives, result if is_kept else b"")
        rest = [other for other in wanted if not (is_kept and other == node)]
        spread = self.spread(rest, result, node, way.start + way.count - 1)
        folds = tuple(pairwise([*sources, root]))
        if self.is_late(runs):  # each sends what it gives to a post beside the root, which adds its own as the last
            beside = self.post(node, ())
            folds = (*((source, beside) for source in sources), (beside, root))
        self.line(way, folds, [root, *spread])

    def is_late(self, runs: list[tuple[str, Gives]]) -> bool:
        """Whether all is folded at the root, so that no link but the late one's has bytes left when that comes.

        In a chain those behind it would pass partial sums on. Ranks that share a node are folded there, in a chain.
        """
        return bool(self.late) and len(runs) > 2 and all(len(gives) == 1 for _, gives in runs)

    def carrier(self, node: str, gives: Gives) -> int:
        """A post that folds these gifts on the way to another."""
        return self.post(node, gives, self.carriers.get((node, gives), b""))

    def spread(self, nodes: list[str], result: bytes, here: str, position: int) -> list[int]:
        """Posts that are to get a final one after the other: this node's own, then in the order behind a position.

        Who is late comes last: its link has no bytes to spare for others.
        """
        ordered = sorted(nodes, key=lambda node: (node != here, node == self.late, self.distance(node, position)))
        return [self.keeper(node, result) for node in ordered]

    def share(self, way: Way, holders: list[str]) -> None:
        """Draw a way from a node that holds its result to those that want and lack it, each once."""
        result = self.names[way.taker]
        lacking = [node for node in self.nodes.get(way.taker, ()) if node not in holders]
        if not lacking:
            return
        _, position, holder = min((self.distance(node, spot), spot, holder) for holder in holders
                                  for spot in self.spots.get(holder, [-1]) for node in lacking)
        self.line(way, (), [self.keeper(holder, result), *self.spread(lacking, result, holder, position)])

    def line(self, way: Way, folds: tuple[tuple[int, int], ...], spread: list[int]) -> None:
        """From its root on in a chain; piece sizes follow when all lines are there."""
        self.lines.append(Line(way.offset, way.into, way.nbytes, way.nbytes, way.dtype, spread[0], folds,
                               tuple(pairwise(spread))))

    def course(self, is_fresh: bool) -> Course:
        """Make what is drawn into orders for the nodes."""
        for node, result in self.takers:
            self.keeper(node, result)
        plan, first = self.plan, self.plan.headers[0][1]
        bytes_of = {self.names[key]: nbytes for key, nbytes in self.sizes.items()}
        posts = tuple(Post(node, gives, result, bytes_of.get(result, 0), tuple(self.takers.get((node, result), ())))
                      for node, gives, result in self.posts)
        return Course(op=op_name(plan.group, plan.step), group=plan.group, step=plan.step, epoch=plan.epoch,
                      fold=first.fold, count=len(self.order), posts=posts,
                      lines=_in_pieces(self.lines, posts, plan.piece_bytes), fresh=is_fresh,
                      keeps_gifts=first.op in PER_RANK, blobs=plan.blobs,
                      headers=plan.headers if first.op in PER_RANK else ())


def _far(posts: tuple[Post, ...], edges: tuple[tuple[int, int], ...]) -> int:
    """How many of a chain's edges lead to another node."""
    return sum(posts[source].node != posts[target].node for source, target in edges)


def _in_pieces(lines: list[Line], posts: tuple[Post, ...], piece_bytes_max: int) -> tuple[Line, ...]:
    """Cut lines that cross the network into pieces of about the size that is best for the longest chain."""
    hops = {number: max(_far(posts, line.folds), _far(posts, line.spreads)) for number, line in enumerate(lines)}
    total = sum(line.nbytes for number, line in enumerate(lines) if hops[number])
    best = best_piece_bytes(total, max(hops.values(), default=0), piece_bytes_max)
    return tuple(in_even_pieces(line, best) if hops[number] else line for number, line in enumerate(lines))


def best_piece_bytes(nbytes: int, hops: int, piece_bytes_max: int) -> int:
    """The size of pieces with which a pipelined chain is done soonest.

    A chain of h hops that carries n bytes in pieces of p takes (h + n/p) * (p/B + c): bandwidth B, and c for each
    piece besides its bytes. That is least at p = sqrt(n*c*B/h), with c*B as PIECE_COST_BYTES. In a ring the hops of a
    line wait for its share of the bytes only, so n is the bytes of all lines. At least two pieces a hop are under way
    as long as they are not too small.
    """
    if not hops:
        return piece_bytes_max
    best = min(math.isqrt(nbytes * PIECE_COST_BYTES // hops), nbytes // (2 * hops))
    return min(max(best, PIECE_BYTES_MIN), piece_bytes_max)


def in_even_pieces(line: Line, piece_bytes: int) -> Line:
    """The line in pieces of at most so many bytes, all of about the same size."""
    grain = grain_bytes(line.dtype)
    pieces = -(-line.nbytes // max(grain, piece_bytes // grain * grain))
    even = -(-line.nbytes // pieces)
    return structs.replace(line, piece_bytes=-(-even // grain) * grain)


def course(plan: StepPlan, late: str = "") -> Course:
    """How a step is done from what was given; late: the node whose ranks have not given yet."""
    work = work_of(plan)
    sketch = _Sketch(plan, work, late)
    for way in work.ways:
        sketch.keep(way)
    for way in work.ways:
        sketch.fold(way)
    return structs.replace(sketch.course(True), layout=work.layout)


# --- after a loss ---------------------------------------------------------------------------------


def repaired(plan: StepPlan, finals: tuple[tuple[str, Finals], ...]) -> Course:
    """How a step goes on from what is whole on the nodes that live: only what somebody lacks is moved or folded.

    The plan has the new epoch, who sits where now and whose result is still wanted.
    """
    held: dict[bytes, dict[str, tuple[Span, ...]]] = {}
    for node, told in finals:
        for result, spans in told.ranges:
            if spans:
                held.setdefault(result, {})[node] = spans
    if not held:
        return course(plan)
    work = work_of(plan)
    sketch = _Sketch(plan, work)
    for way in work.ways:
        for part, holders in _by_holders(way, held.get(sketch.names[way.taker], {})):
            if holders:
                sketch.share(part, holders)
            else:
                sketch.fold(part)
    return structs.replace(sketch.course(False), layout=work.layout)


def _by_holders(way: Way, held: dict[str, tuple[Span, ...]]) -> Iterator[tuple[Way, list[str]]]:
    """Stretches of a way with the nodes on which their results are whole."""
    whole = {node: [_inside(way, span) for span in spans] for node, spans in held.items()}
    marks = sorted({0, way.nbytes, *(mark for spans in whole.values() for span in spans for mark in span)})
    stretches = [(begin, end, [node for node, spans in whole.items() if any(a <= begin and end <= b for a, b in spans)])
                 for begin, end in pairwise(marks)]
    for holders, group in groupby(stretches, key=itemgetter(2)):
        *_, last = stretch = list(group)
        begin, end = stretch[0][0], last[1]
        yield structs.replace(way, offset=way.offset + begin, into=way.into + begin, nbytes=end - begin), holders


def _inside(way: Way, span: Span) -> Span:
    """What a range of a result covers of a way, from the way's begin, in whole grains; begin >= end: nothing."""
    grain, (low, high) = grain_bytes(way.dtype), (edge - way.into for edge in span)
    begin = min(-(-max(low, 0) // grain) * grain, way.nbytes)
    end = way.nbytes if high >= way.nbytes else max(high, 0) // grain * grain
    return begin, end


# --- for people -----------------------------------------------------------------------------------


def draw(course: Course) -> str:
    """A picture of a course, one way a line: `>` leads to where it is folded, `>>` to where it is only kept."""
    rows = [(_size(line.offset), f"{_size(line.nbytes)} of {line.dtype or 'bytes'}",
             f"{-(-line.nbytes // line.piece_bytes)} x {_size(line.piece_bytes)}", _drawn(course.posts, line))
            for line in course.lines]
    if not rows:
        return "nothing is moved"
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  ".join([*(text.rjust(width) for text, width in zip(row, widths, strict=False)), row[3]])
                     for row in rows)


def _size(nbytes: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.4g} {unit}"
    return f"{nbytes} B"


def _label(post: Post) -> str:
    """The node without protocol and life, its ranks in brackets, and a star where a result is kept."""
    place = post.node.rpartition("//")[2].partition("#")[0]
    ranks = f"[{','.join(str(rank) for rank, _ in post.gives)}]" if post.gives else ""
    return f"{place}{ranks}{'*' if post.result else ''}"


def _drawn(posts: tuple[Post, ...], line: Line) -> str:
    text = _inwards(posts, line.folds, line.root)
    for target in _outwards(posts, line.spreads, line.root):
        text += f" >> {target}"
    return text


def _inwards(posts: tuple[Post, ...], edges: tuple[tuple[int, int], ...], post: int) -> str:
    sources: dict[int, list[int]] = {}
    for source, target in edges:
        sources.setdefault(target, []).append(source)
    texts = [_label(posts[post])]
    while len(before := sources.get(post, [])) == 1:
        post = before[0]
        texts.append(_label(posts[post]))
    if before:
        texts.append(f"({', '.join(_inwards(posts, edges, source) for source in before)})")
    return " > ".join(reversed(texts))


def _outwards(posts: tuple[Post, ...], edges: tuple[tuple[int, int], ...], post: int) -> list[str]:
    targets: dict[int, list[int]] = {}
    for source, target in edges:
        targets.setdefault(source, []).append(target)
    texts = []
    while len(after := targets.get(post, [])) == 1:
        post = after[0]
        texts.append(_label(posts[post]))
    if after:
        branches = (" >> ".join([_label(posts[target]), *_outwards(posts, edges, target)]) for target in after)
        texts.append(f"({', '.join(branches)})")
    return texts
