"""Laws of courses: an interpreter follows every byte of every result, before and after losses."""
from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowengine.collectives.plan import StepPlan, course, draw, gift_name, repaired, result_name, seating
from flowengine.collectives.plan_ways import SHARED, item_bytes, part_bytes
from flowengine.core.collective import ArrayPart, Course, Finals, Header, Line, Post, Seating

GROUP = b"group"
OPS = ("allreduce", "reduce", "broadcast", "allgather", "gather", "scatter", "alltoall", "reduce_scatter", "send")
FOLDING = ("allreduce", "reduce", "reduce_scatter")
EXAMPLES = settings(max_examples=200)
Whole = dict[tuple[str, bytes], "Result"]


class Result:
    """Per byte of a result: whose gifts are folded in it (a number of `orders`), and where in the gifts it was."""

    def __init__(self, nbytes: int) -> None:
        self.folded = np.full(nbytes, -1)
        self.offset = np.full(nbytes, -1)

    def filled(self) -> list[tuple[int, int]]:
        edges = np.flatnonzero(np.diff(np.concatenate(([0], self.folded >= 0, [0]))))
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


class Interpreter:
    """Does what a course says, one line after the other, and counts what it moves."""

    def __init__(self, made: Course, gifts: dict[bytes, str], orders: list[tuple[int, ...]], whole: Whole) -> None:
        self.made, self.gifts, self.orders, self.whole = made, gifts, orders, whole
        self.moved: dict[tuple[str, str], int] = {}
        named = [(post.node, post.result) for post in made.posts if post.result]
        assert len(named) == len(set(named)), "two posts of a node name one result"
        for post in made.posts:
            assert not post.takers or post.result
            assert all(gifts[oid] == post.node for _, oid in post.gives)
            if post.result:
                self.whole.setdefault((post.node, post.result), Result(post.result_bytes))
        self.before = {key: result.folded.copy() for key, result in whole.items()}
        for line in made.lines:
            self.line(line)

    def line(self, line: Line) -> None:
        assert line.nbytes > 0
        assert line.piece_bytes > 0
        if line.dtype:
            assert line.nbytes % item_bytes(line.dtype) == 0
            assert line.piece_bytes % item_bytes(line.dtype) == 0
        at = slice(line.into, line.into + line.nbytes)
        root = self.made.posts[line.root]
        if root.gives or line.folds:
            sources = [source for source, _ in line.folds]
            assert len(sources) == len(set(sources)), "a partial goes two ways"
            order, seen = self.value(line, line.root)
            assert sorted(seen) == sorted({*sources, line.root})
            assert self.made.fold or len(order) == 1
            folded = np.full(line.nbytes, self.order_number(order))
            offset = np.arange(line.offset, line.offset + line.nbytes)
        else:
            held = self.whole[root.node, root.result]
            folded, offset = held.folded[at].copy(), held.offset[at].copy()
            assert (folded >= 0).all(), "a root spreads what it does not have"
            root = Post(root.node, ())
        reached = [root] * bool(root.result)
        have = {line.root}
        entered = [self.made.posts[target].node for source, target in line.spreads if self.is_far(source, target)]
        assert len(entered) == len({*entered, self.made.posts[line.root].node}) - 1, "a node gets a byte twice"
        for source, target in line.spreads:
            assert source in have, "spreads are not in the order of a tree"
            assert target not in have, "a final comes twice"
            have.add(target)
            reached.append(self.made.posts[target])
            self.carry(source, target, line.nbytes)
        for post in reached:
            result = self.whole[post.node, post.result]
            assert (result.folded[at] < 0).all(), "a byte is written twice, or was there already"
            result.folded[at], result.offset[at] = folded, offset

    def value(self, line: Line, post: int) -> tuple[tuple[int, ...], list[int]]:
        """(ranks in the order of folding, posts) up to here."""
        own = tuple(rank for rank, _ in self.made.posts[post].gives)
        incoming = [source for source, target in line.folds if target == post]
        order, seen = (), [post]
        for number, source in enumerate(incoming):
            more, posts = self.value(line, source)
            self.carry(source, post, line.nbytes)
            order, seen = order + more + (own if number == 0 else ()), seen + posts
        return order if incoming else own, seen

    def is_far(self, source: int, target: int) -> bool:
        return self.made.posts[source].node != self.made.posts[target].node

    def carry(self, source: int, target: int, nbytes: int) -> None:
        link = (self.made.posts[source].node, self.made.posts[target].node)
        assert source != target
        self.moved[link] = self.moved.get(link, 0) + nbytes

    def order_number(self, order: tuple[int, ...]) -> int:
        if order not in self.orders:
            self.orders.append(order)
        return self.orders.index(order)


# --- plans ----------------------------------------------------------------------------------------


def header_of(op: str, fold: str, root: int, form: str, arrays: list[tuple[str, tuple[int, ...]]],
              places: list[int]) -> Header:
    """Arrays in a buffer in which they lie in the order `places`."""
    parts: list[ArrayPart | None] = [None] * len(arrays)
    end = 0
    for number in places:
        dtype, shape = arrays[number]
        part = ArrayPart(dtype, shape, -(-end // 64) * 64)
        parts[number], end = part, part.offset + part_bytes(part)
    return Header(op, fold, root, form, tuple(part for part in parts if part), end)


@st.composite
def plans(draw_from, ops=OPS):
    op = draw_from(st.sampled_from(ops))
    nodes = draw_from(st.lists(st.sampled_from("ABCDE"), min_size=2 if op == "send" else 1, max_size=7))
    size, chosen = len(nodes), random.Random(draw_from(st.integers(0, 9999)))
    fold = "sum" if op in FOLDING else ""
    kinds = ["<f4", "<f2", "<f8", "|b1", "<c16", "|i1", "<f12"] + ([] if fold else ["<U3", "|S5"])
    count = size if op in ("scatter", "alltoall") else chosen.randint(1, 3)
    root = chosen.randrange(size) if op in ("reduce", "broadcast", "gather", "scatter") else -1

    def given_by(rank: int) -> Header:
        if op in ("broadcast", "scatter") and rank != root:
            return Header(op, "", root)
        arrays = [(chosen.choice(kinds), (chosen.choice((0, 1, 5, 33, 400)), *chosen.choice(((), (3,), (0,), (2, 2)))))
                  for _ in range(count)]
        places = chosen.sample(range(count), count)
        return header_of(op, fold, root, repr(["*"] * count), arrays, places)

    one = given_by(max(root, 0))
    headers = {rank: one if fold else given_by(rank) for rank in range(size)}
    step = (-1, -1, 3)
    if op == "send":
        source, target = chosen.sample(range(size), 2)
        step, headers = (source, target, 3), {source: headers[source]}
    if root >= 0 and not fold and op != "gather":
        headers[root] = one
    gifts = tuple((rank, nodes[rank], gift_name(GROUP, step, rank)) for rank in headers if headers[rank].form)
    takers = tuple((rank, node, f"m{rank}") for rank, node in enumerate(nodes))
    return StepPlan(GROUP, step, 0, seating(GROUP, 0, nodes), tuple(headers.items()), gifts, takers,
                    draw_from(st.sampled_from((64, 256, 1 << 18))))


def followed(plan: StepPlan, made: Course, orders: list[tuple[int, ...]], whole: Whole) -> Interpreter:
    return Interpreter(made, {oid: node for _, node, oid in plan.gifts}, orders, whole)


def bytes_of(part: ArrayPart) -> np.ndarray:
    """Where each byte of an array is in its buffer, in the array's shape."""
    return part.offset + np.arange(part_bytes(part)).reshape(*part.shape, item_bytes(part.dtype))


def wanted(plan: StepPlan, rank: int) -> list[tuple[tuple[int, ...] | None, np.ndarray]]:
    """What numpy says of a rank's result: for each array whose it is (None: folded of all), and its bytes there."""
    headers, op, size = dict(plan.headers), plan.headers[0][1].op, len(plan.seating.order)
    root = plan.headers[0][1].root
    first = plan.headers[0][1]
    if op in ("allreduce", "reduce"):
        return [(None, bytes_of(part)) for part in first.parts] if op == "allreduce" or rank == root else []
    if op == "reduce_scatter":
        return [(None, np.array_split(bytes_of(part), size)[rank]) for part in first.parts]
    if op in ("broadcast", "send"):
        source = plan.step[0] if op == "send" else root
        takes = op == "broadcast" or rank == plan.step[1]
        return [((source,), bytes_of(part)) for part in headers[source].parts] if takes else []
    if op in ("scatter", "alltoall"):
        return [((source,), bytes_of(headers[source].parts[rank])) for source in headers if headers[source].parts]
    takes = op == "allgather" or rank == root
    return [((source,), bytes_of(part)) for source in sorted(headers) for part in headers[source].parts] * takes


def placed(plan: StepPlan, made: Course, rank: int) -> list[tuple[ArrayPart, int]]:
    """The arrays of a rank's result and where they are in it, as the member reads them."""
    layout = [at for at in made.layout if at.taker in (-1, rank)]
    if not layout:
        return [(part, part.offset) for part in plan.headers[0][1].parts]
    return [(part, at.offset + part.offset) for at in layout for part in at.header.parts]


def check_results(plan: StepPlan, made: Course, orders: list[tuple[int, ...]], whole: Whole) -> None:
    order, starts = plan.seating.order, plan.seating.starts
    cycles = [order[start:] + order[:start] for start in starts]
    for rank, node, address in plan.takers:
        expected = wanted(plan, rank)
        posts = [post for post in made.posts if (rank, address) in post.takers]
        if not expected:
            assert not posts
            continue
        [post] = posts
        assert post.node == node
        assert post.result in (result_name(GROUP, plan.step, rank), result_name(GROUP, plan.step, SHARED))
        result = whole[node, post.result]
        arrays = placed(plan, made, rank)
        assert len(arrays) == len(expected)
        for (part, offset), (ranks, source) in zip(arrays, expected, strict=True):
            assert (*part.shape, item_bytes(part.dtype)) == source.shape
            at = slice(offset, offset + part_bytes(part))
            assert (result.offset[at] == source.reshape(-1)).all()
            for number in set(result.folded[at].tolist()):
                assert orders[number] == ranks if ranks else orders[number] in cycles


# --- laws -----------------------------------------------------------------------------------------


@EXAMPLES
@given(plans())
def test_each_contribution_is_once_in_each_byte_of_each_result(plan):
    made = course(plan)
    orders, whole = [], {}
    followed(plan, made, orders, whole)
    check_results(plan, made, orders, whole)
    assert {post.node for post in made.posts} <= {node for _, node, _ in (*plan.gifts, *plan.takers)}
    for line in made.lines:
        if line.dtype:
            part = max((part for part in plan.headers[0][1].parts if part.offset <= line.offset and part_bytes(part)),
                       key=lambda part: part.offset)
            assert (line.offset - part.offset) % item_bytes(line.dtype) == 0
    assert draw(made).count("\n") == max(0, len(made.lines) - 1)


def moved_away(plan: StepPlan, chosen: random.Random, dead: frozenset[str]) -> StepPlan:
    """The next epoch: who was on a dead node gives and takes elsewhere, and some have their result already."""
    homes = {rank: node if node not in dead and chosen.random() < 0.8 else chosen.choice("FG")
             for rank, node in enumerate(plan.seating.nodes)}
    old = plan.seating
    seats = Seating(GROUP, old.epoch + 1, old.order, old.starts, tuple(homes[rank] for rank in range(len(homes))))
    gifts = tuple((rank, homes[rank] if node in dead else node, oid) for rank, node, oid in plan.gifts)
    takers = tuple((rank, homes[rank], f"new{rank}") for rank, _, _ in plan.takers if chosen.random() < 0.8)
    return StepPlan(GROUP, plan.step, old.epoch + 1, seats, plan.headers, gifts, takers, plan.piece_bytes)


def left_over(made: Course, whole: Whole, chosen: random.Random, dead: frozenset[str]) -> Whole:
    """Of the results on nodes that live some pieces."""
    left: Whole = {}
    share = chosen.choice((0.0, 0.3, 0.9, 1.0))
    for (node, oid), result in whole.items():
        if node in dead:
            continue
        left[node, oid] = kept = Result(len(result.folded))
        for line in made.lines:
            if not any(post.node == node and post.result == oid and number in (line.root, *(b for _, b in line.spreads))
                       for number, post in enumerate(made.posts)):
                continue
            for begin in range(line.into, line.into + line.nbytes, line.piece_bytes):
                piece = slice(begin, min(begin + line.piece_bytes, line.into + line.nbytes))
                if chosen.random() < share:
                    kept.folded[piece], kept.offset[piece] = result.folded[piece], result.offset[piece]
    return left


@EXAMPLES
@given(plans(), st.integers(0, 1 << 20), st.frozensets(st.sampled_from("ABCDE"), max_size=3), st.integers(1, 3))
def test_after_any_losses_the_bits_are_the_same_and_only_what_is_missing_moves(plan, seed, dead, losses):
    chosen = random.Random(seed)
    orders, whole = [], {}
    made = course(plan)
    followed(plan, made, orders, whole)
    truth = {oid: (result.folded.copy(), result.offset.copy()) for (_, oid), result in whole.items()}
    for _ in range(losses):
        plan = moved_away(plan, chosen, dead)
        whole = left_over(made, whole, chosen, dead)
        finals = tuple((node, Finals(made.op, plan.epoch, ((oid, tuple(result.filled())),)))
                       for (node, oid), result in whole.items())
        kept_before = any(result.filled() for result in whole.values())
        made = repaired(plan, finals)
        assert made.epoch == plan.epoch
        assert made.fresh == (not kept_before)
        run = followed(plan, made, orders, whole)
        check_results(plan, made, orders, whole)
        check_sparse(plan.seating, made, run, truth)
        for (_, oid), result in whole.items():
            if oid in truth:
                has = result.folded >= 0
                assert (result.folded[has] == truth[oid][0][has]).all()
                assert (result.offset[has] == truth[oid][1][has]).all()


def check_sparse(seats: Seating, made: Course, run: Interpreter,
                 truth: dict[bytes, tuple[np.ndarray, np.ndarray]]) -> None:
    """Nothing is folded that is whole somewhere, and each line ends where somebody waits for it."""
    for post in made.posts:
        places = [seats.order.index(rank) for rank, _ in post.gives]
        assert not set(places[1:]) & set(seats.starts)
    somewhere: dict[bytes, np.ndarray] = {}
    for (_, oid), folded in run.before.items():
        somewhere[oid] = somewhere.get(oid, np.zeros(len(folded), bool)) | (folded >= 0)
    for line in made.lines:
        ends = [made.posts[number] for number in (line.root, *(target for _, target in line.spreads))]
        results = {post.result for post in ends if post.result}
        assert len(results) == 1
        at = slice(line.into, line.into + line.nbytes)
        is_folded = bool(line.folds or made.posts[line.root].gives)
        has = somewhere[results.pop()][at]
        assert not has.any() if is_folded else has.all()
        assert all(post.takers for post in ends[1:] if post.result)
    assert truth or not made.lines


@EXAMPLES
@given(plans(FOLDING), st.lists(st.sampled_from("ABCDE"), min_size=7, max_size=7))
def test_where_ranks_sit_does_not_change_the_order_of_folding(plan, elsewhere):
    orders, whole, others = [], {}, {}
    followed(plan, course(plan), orders, whole)
    moved = StepPlan(GROUP, plan.step, 1, plan.seating, plan.headers,
                     tuple((rank, elsewhere[rank], oid) for rank, _, oid in plan.gifts),
                     tuple((rank, elsewhere[rank], address) for rank, _, address in plan.takers), plan.piece_bytes)
    followed(moved, course(moved), orders, others)
    there = {oid: result for (_, oid), result in others.items()}
    for (_, oid), result in whole.items():
        assert (result.folded == there[oid].folded).all()


@EXAMPLES
@given(plans(FOLDING), st.sampled_from("ABCDE"))
def test_who_comes_last_does_not_change_the_order_of_folding(plan, late):
    orders, whole, others = [], {}, {}
    followed(plan, course(plan), orders, whole)
    made = course(plan, late)
    followed(plan, made, orders, others)
    check_results(plan, made, orders, others)
    for (node, oid), result in others.items():
        assert (result.folded == whole[node, oid].folded).all()


@EXAMPLES
@given(st.integers(3, 8), st.integers(0, 7))
def test_when_the_last_comes_no_link_carries_more_than_once_what_each_gives(hosts, last):
    nodes = [f"n{host}" for host in range(hosts)]
    late, nbytes = nodes[last % hosts], hosts << 16
    header = header_of("allreduce", "sum", -1, "*", [("<f4", (nbytes // 4,))], [0])
    gifts = tuple((rank, node, gift_name(GROUP, (-1, -1, 0), rank)) for rank, node in enumerate(nodes))
    plan = StepPlan(GROUP, (-1, -1, 0), 0, seating(GROUP, 0, nodes), tuple((rank, header) for rank in range(hosts)),
                    gifts, tuple((rank, node, f"m{rank}") for rank, node in enumerate(nodes)), 1 << 14)
    made = course(plan, late)
    then: dict[tuple[str, str], int] = {}  # (out or in, node): bytes that wait for the last
    for line in made.lines:
        for edges, is_waiting in ((line.folds, False), (line.spreads, True)):
            for source, target in edges:
                ends = made.posts[source].node, made.posts[target].node
                if ends[0] != ends[1] and (is_waiting or ends[0] == late):
                    for way, node in zip(("out", "in"), ends, strict=True):
                        then[way, node] = then.get((way, node), 0) + line.nbytes
    assert max(then.values()) <= nbytes


@EXAMPLES
@given(st.lists(st.integers(1, 3), min_size=2, max_size=8), st.integers(1, 3), st.sampled_from((64, 1024, 1 << 14)))
def test_a_ring_keeps_every_link_equally_busy(ranks, arrays, piece_bytes):
    nodes = [f"n{host}" for host, count in enumerate(ranks) for _ in range(count)]
    hosts = len(ranks)
    header = header_of("allreduce", "sum", -1, "*", [("<f4", (2000,)), ("<f8", (999,)), ("<f2", (50, 50))][:arrays],
                       list(range(arrays)))
    gifts = tuple((rank, node, gift_name(GROUP, (-1, -1, 0), rank)) for rank, node in enumerate(nodes))
    headers = tuple((rank, header) for rank in range(len(nodes)))
    plan = StepPlan(GROUP, (-1, -1, 0), 0, seating(GROUP, 0, nodes), headers,
                    gifts, tuple((rank, node, f"m{rank}") for rank, node in enumerate(nodes)), piece_bytes)
    made = course(plan)
    run = followed(plan, made, [], {})
    # ranges are cut at multiples of 64 bytes, so that one may be longer by that
    piece = max(line.piece_bytes for line in made.lines) + 2 * 64
    ranges = max(1, min(hosts, header.nbytes // min(16 * 1024, piece_bytes)))
    share = header.nbytes / ranges
    for (source, target), nbytes in run.moved.items():
        assert source != target
        if ranges == hosts:
            assert nbytes <= 2 * (hosts - 1) * share + 2 * piece
        assert nbytes <= 2 * header.nbytes
    assert len(run.moved) <= hosts
