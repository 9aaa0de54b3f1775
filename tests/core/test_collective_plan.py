"""Courses of operations: the shapes that were meant, what a person sees of them, and odd inputs."""
from __future__ import annotations

import pytest

from flowengine.collectives.plan import (
    StepPlan,
    best_piece_bytes,
    course,
    draw,
    gift_name,
    op_name,
    repaired,
    result_name,
    seating,
)
from flowengine.collectives.plan_ways import grain_bytes, item_bytes, items
from flowengine.collectives.tree import degree, parents
from flowengine.core.collective import ArrayPart, Course, Finals, Header, Layout, Line, Post

GROUP, STEP = b"group", (-1, -1, 4)
KIB = 1 << 10
MIB = 1 << 20
HOSTS = ["tcp://a:1#x", "tcp://a:1#x", "tcp://b:22#y", "tcp://c:3#z"]


def plan_of(header: Header, nodes: list[str], **changes: object) -> StepPlan:
    ranks = range(len(nodes))
    values = dict(
        group=GROUP, step=STEP, epoch=0, seating=seating(GROUP, 0, nodes), headers=tuple((r, header) for r in ranks),
        gifts=tuple((r, nodes[r], gift_name(GROUP, STEP, r)) for r in ranks),
        takers=tuple((r, nodes[r], f"m{r}") for r in ranks), piece_bytes=256 * KIB)
    return StepPlan(**(values | changes))


def one_array(op: str, nbytes: int, fold: str = "", root: int = -1) -> Header:
    return Header(op, fold, root, "*", (ArrayPart("<f4", (nbytes // 4,), 0),), nbytes)


def test_names_differ_by_kind_group_step_and_rank():
    names = {op_name(GROUP, STEP), op_name(b"other", STEP), op_name(GROUP, (0, 1, 4)), gift_name(GROUP, STEP, 0),
             gift_name(GROUP, STEP, 1), result_name(GROUP, STEP, 0), result_name(GROUP, STEP, -1)}
    assert len(names) == 7
    assert {len(name) for name in names} == {16}


def test_ranks_that_share_a_host_are_next_to_each_other():
    seats = seating(GROUP, 3, ["b", "a", "b", "c", "a"])
    assert (seats.order, seats.starts, seats.epoch) == ((0, 2, 1, 4, 3), (0, 2, 4), 3)


def test_a_ring_as_drawn():
    assert draw(course(plan_of(one_array("allreduce", 3 * MIB, "sum"), HOSTS))) == """\
  0 B  1 MiB of <f4  4 x 256 KiB  a:1[0,1]* > b:22[2]* > c:3[3]* >> a:1[0,1]* >> b:22[2]*
1 MiB  1 MiB of <f4  4 x 256 KiB  b:22[2]* > c:3[3]* > a:1[0,1]* >> b:22[2]* >> c:3[3]*
2 MiB  1 MiB of <f4  4 x 256 KiB  c:3[3]* > a:1[0,1]* > b:22[2]* >> c:3[3]* >> a:1[0,1]*"""


def test_the_way_of_who_comes_last_as_drawn():
    plan = plan_of(one_array("allreduce", 4 * MIB, "sum"), ["a:1", "b:2", "c:3", "d:4"])
    assert draw(course(plan, "b:2")) == """\
  0 B  1 MiB of <f4  4 x 256 KiB  (a:1[0]*, b:2[1]*, c:3[2]*) > d:4 > d:4[3]* >> a:1[0]* >> c:3[2]* >> b:2[1]*
1 MiB  1 MiB of <f4  4 x 256 KiB  (b:2[1]*, c:3[2]*, d:4[3]*) > a:1 > a:1[0]* >> c:3[2]* >> d:4[3]* >> b:2[1]*
2 MiB  1 MiB of <f4  4 x 256 KiB  (c:3[2]*, d:4[3]*, a:1[0]*) > b:2 > b:2[1]* >> c:3[2]* >> d:4[3]* >> a:1[0]*
3 MiB  1 MiB of <f4  4 x 256 KiB  (d:4[3]*, a:1[0]*, b:2[1]*) > c:3 > c:3[2]* >> d:4[3]* >> a:1[0]* >> b:2[1]*"""


def test_chains_as_drawn():
    assert draw(course(plan_of(one_array("reduce", MIB, "sum", root=2), HOSTS))) == (
        "0 B  1 MiB of <f4  6 x 170.7 KiB  c:3[3] > a:1[0,1] > b:22[2]*")
    assert draw(course(plan_of(one_array("broadcast", 3 * MIB, root=2), HOSTS))) == (
        "0 B  3 MiB of bytes  12 x 256 KiB  b:22[2]* >> c:3* >> a:1*")
    empty = course(plan_of(one_array("allreduce", 0, "sum"), HOSTS))
    assert draw(empty) == "nothing is moved"
    assert sorted(rank for post in empty.posts for rank, _ in post.takers) == [0, 1, 2, 3]


def test_trees_as_drawn():
    posts = [Post(f"n{number}", ((number, b"%d" % number),)) for number in range(5)]
    above = tuple(enumerate(parents(6, 2)))
    slots = (*posts[:3], Post("n", (), b"r", MIB), *posts[3:])
    folds = tuple((slot, parent) for slot, parent in above if parent >= 0)
    line = Line(0, 0, MIB, MIB // 4, "<f8", [parent for _, parent in above].index(-1), folds)
    assert draw(Course(b"op", b"op", STEP, 0, "sum", 5, slots, (line,))) == (
        "0 B  1 MiB of <f8  4 x 256 KiB  ((n0[0], n2[2]) > n1[1], n3[3] > n4[4]) > n*")


def test_on_one_host_nothing_is_cut():
    made = course(plan_of(one_array("allreduce", 64 * MIB, "sum"), ["a"] * 4))
    [line], [post] = made.lines, made.posts
    assert (line.piece_bytes, line.folds, line.spreads) == (64 * MIB, (), ())
    assert [rank for rank, _ in post.gives] == [0, 1, 2, 3]


def test_ranges_part_where_no_element_is_cut_also_behind_the_last_whole_grain():
    # Elements of 12 bytes: the second range begins at byte 1280, which lies behind the first array.
    parts = (ArrayPart("<f12", (33, 3), 0), ArrayPart("|i1", (1392,), 1216))
    made = course(plan_of(Header("allreduce", "sum", -1, "[*, *]", parts, 2608), ["a", "b"], piece_bytes=64))
    assert [(line.offset, line.offset + line.nbytes, line.dtype) for line in made.lines] == [
        (0, 1212, "<f12"), (1216, 1280, "|i1"), (1280, 2608, "|i1")]


def test_small_arrays_are_cut_into_fewer_ranges_than_hosts():
    nodes = [f"n{number}" for number in range(8)]
    assert len(course(plan_of(one_array("allreduce", 64 * KIB, "sum"), nodes)).lines) == 4
    assert len(course(plan_of(one_array("allreduce", MIB, "sum"), nodes)).lines) == 8


@pytest.mark.parametrize(("nbytes", "hops", "wanted"), [
    (64 * MIB, 7, 256 * KIB),      # many pieces anyway: as large as is allowed
    (MIB, 7, MIB // 14),           # two pieces a hop
    (4 * MIB, 7, 198_162),         # the least of the formula
    (32 * KIB, 7, 16 * KIB),       # not smaller
    (MIB, 0, 256 * KIB)])
def test_size_of_pieces(nbytes, hops, wanted):
    assert best_piece_bytes(nbytes, hops, 256 * KIB) == wanted


@pytest.mark.parametrize(("dtype", "item", "grain"), [
    ("<f4", 4, 64), ("|b1", 1, 64), ("?", 1, 64), ("<c16", 16, 64), ("<U5", 20, 320), ("|S5", 5, 320),
    ("<M8[ns]", 8, 64), ("<f12", 12, 192)])
def test_bytes_of_elements(dtype, item, grain):
    assert (item_bytes(dtype), grain_bytes(dtype)) == (item, grain)


@pytest.mark.parametrize(("form", "forms", "counts"), [
    ("['*', '*']", ["'*'", "'*'"], [1, 1]),
    ("('*',)", ["'*'"], [1]),
    ("[{'b': ['*', '*'], '*': '*'}, '*', []]", ["{'b': ['*', '*'], '*': '*'}", "'*'", "[]"], [3, 1, 0]),
    ("[{\"it's, [\": '*'}, ('*', '*')]", ["{\"it's, [\": '*'}", "('*', '*')"], [1, 2]),
    ("[{(1, '*'): '*'}, '*']", ["{(1, '*'): '*'}", "'*'"], [1, 1]),
    ("[]", [], []),
    ("*", ["'*'"], [1])])
def test_items_of_a_form(form, forms, counts):
    parts = tuple(ArrayPart("<f4", (1,), 64 * number) for number in range(sum(counts)))
    found = list(items(Header("alltoall", form=form, parts=parts, nbytes=64 * len(parts))))
    assert [item for item, _ in found] == forms
    assert [len(arrays) for _, arrays in found] == counts
    assert [part for _, arrays in found for part in arrays] == list(parts)


def test_dealt_items_have_their_own_layout():
    parts = tuple(ArrayPart("<f4", (number + 1,), 64 * number) for number in range(3))
    header = Header("scatter", "", 0, "['*', {'w': '*', 'v': '*'}]", parts, 140)
    made = course(plan_of(header, ["a", "b"]))
    assert made.layout == (
        Layout(0, Header("scatter", "", 0, "*", parts[:1], 4), 0),
        Layout(0, Header("scatter", "", 0, "{'w': '*', 'v': '*'}",
                         (ArrayPart("<f4", (2,), 0), ArrayPart("<f4", (3,), 64)), 76), 1))
    assert [(line.offset, line.into, line.nbytes) for line in made.lines] == [(0, 0, 4), (64, 0, 76)]


def test_a_repair_moves_what_is_missing_and_cuts_no_element():
    before = plan_of(one_array("allreduce", 3 * MIB, "sum"), ["a", "b", "c"])
    there = result_name(GROUP, STEP, -1)
    finals = (("a", Finals(b"", 1, ((there, ((0, MIB),)),))),
              ("b", Finals(b"", 1, ((there, ((0, MIB), (2 * MIB + 1, 3 * MIB))),))))
    made = repaired(plan_of(one_array("allreduce", 3 * MIB, "sum"), ["a", "b", "d"], epoch=1,
                            seating=before.seating), finals)
    assert not made.fresh
    assert [(line.offset, line.nbytes, bool(line.folds)) for line in made.lines] == [
        (0, MIB, False), (MIB, MIB, True), (2 * MIB, 64, True), (2 * MIB + 64, MIB - 64, False)]
    assert [post.node for post in made.posts if post.result] == ["b", "d", "a"]


def test_what_is_whole_where_it_is_wanted_needs_no_line():
    plan = plan_of(one_array("allreduce", MIB, "sum"), ["a", "b"])
    whole = ((result_name(GROUP, STEP, -1), ((0, MIB),)),)
    made = repaired(plan, (("a", Finals(b"", 1, whole)), ("b", Finals(b"", 1, whole))))
    assert made.lines == ()
    assert [(post.node, post.takers) for post in made.posts] == [("a", ((0, "m0"),)), ("b", ((1, "m1"),))]
    assert repaired(plan, (("a", Finals(b"", 1, ())),)) == course(plan)


def test_only_a_reduction_to_one_rank_has_one_taker():
    made = course(plan_of(one_array("reduce", MIB, "sum", root=1), ["a", "b"]))
    assert [post.takers for post in made.posts] == [(), ((1, "m1"),)]
    assert made.keeps_gifts


@pytest.mark.parametrize(("count", "nbytes", "best"), [
    (16, 32 * KIB, 16), (16, 64 * MIB, 1), (1, MIB, 1)])
def test_degree_by_size(count, nbytes, best):
    assert degree(count, nbytes, 0.00075, 1.21e9) == best


def test_middling_sizes_get_a_tree():
    assert 1 < degree(16, MIB, 0.00075, 1.21e9) < 16
