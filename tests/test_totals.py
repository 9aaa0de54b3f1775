"""Folding values of one host, and how fast the ways to others are taken to be: no process is started."""
from __future__ import annotations

import types
import weakref
from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowengine.collectives.across import as_shaped, can_go_on, course_of, in_tree, runs_of, spread_of
from flowengine.collectives.folds import FOLDS
from flowengine.collectives.speeds import Speed, slowest
from flowengine.collectives.totals import SLICE_BYTES, Total
from flowengine.config import Config
from flowengine.core import messages as m
from flowengine.errors import BadType, BadValue, CollectiveMismatch
from flowengine.objects import arrays, codec


def folded(op, values, batch=8):
    total = Total(op)
    for begin in range(0, len(values), batch):
        total.add([(f"input {begin + n}", value) for n, value in enumerate(values[begin : begin + batch])])
    result = total.to_store()
    if type(result) is not codec.Packed:
        return result
    stored = codec.from_inline(codec.to_inline(result))
    np.testing.assert_array_equal(stored, total.result())
    return stored


@given(
    st.sampled_from(sorted(FOLDS)),
    st.sampled_from(["?", "i1", "u2", "i8", "f2", "f4", "f8", "c8", "c16"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(1, 20),
)
def test_it_is_numpys_answer_in_the_order_of_the_inputs(op, dtype, shape, count):
    if dtype[0] == "c" and op in ("min", "max"):
        return
    made = np.random.default_rng(count)
    values = [(made.random(shape) * 4).astype(dtype) for _ in range(count)]
    expected = values[0].astype("f8" if op == "mean" and dtype[0] in "?iu" else dtype)
    with np.errstate(all="ignore"):
        for value in values[1:]:
            expected = FOLDS[op](expected, value, dtype=expected.dtype)
    if op == "mean":
        expected = np.true_divide(expected, count, dtype=expected.dtype)
    got = folded(op, values)
    assert got.dtype == expected.dtype
    assert got.shape == shape
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("size", [SLICE_BYTES // 8 - 1, SLICE_BYTES // 8 + 1, (5 << 20) // 8 + 3])
def test_slices_and_threads_leave_nothing_out(size):
    values = [np.arange(size) * n for n in range(11)]
    assert (folded("sum", values) == np.arange(size) * 55).all()
    assert (folded("max", [values[3][::-1], values[2]]) == np.maximum(values[3][::-1], values[2])).all()


def test_what_is_folded_is_let_go_of():
    total = Total("sum")
    values = [np.ones(4), np.ones(4), {"a": 1}]
    left = [weakref.ref(value) for value in values[:2]]
    total.add([("input 0", values.pop(0))])
    total.add([("input 1", values.pop(0))])
    total.fold_last()
    assert [one() for one in left] == [None, None]
    with pytest.raises(CollectiveMismatch, match=r"input 2: .*input 0: reduce\(sum\) of float64 \(4,\)"):
        total.add([("input 2", values.pop(0))])
    assert total.result().tolist() == [2, 2, 2, 2]


def test_the_result_is_made_in_the_store_only_where_it_has_room_beside_the_last_inputs():
    for room_bytes, kind in ((24, codec.Packed), (23, np.ndarray)):
        total = Total("sum")
        total.add([(f"input {n}", np.ones(1)) for n in range(2)])
        assert type(total.to_store(room_bytes)) is kind


def test_the_form_of_the_first_is_that_of_the_result():
    values = [{"b": (np.float32(n), n), "a": [np.full(3, n)]} for n in (1, 2)]
    got = folded("sum", values)
    assert got["b"] == (3, 3)
    assert type(got["b"][0]) is np.float32
    assert type(got["b"][1]) is int
    assert got["a"][0].tolist() == [3, 3, 3]
    assert folded("mean", [True, False]) == 0.5


@pytest.mark.parametrize("other", [np.ones(4), np.ones(3, "f4"), [np.ones(3)], 1.0])
def test_what_is_not_like_the_first_is_named(other):
    with pytest.raises(CollectiveMismatch, match=r"input 2: .*input 0: reduce\(sum\) of float64 \(3,\)"):
        folded("sum", [np.ones(3), np.ones(3), other])


def test_where_many_arrays_differ_is_said():
    values = [[np.ones(3)] * 500, [np.ones(3)] * 400 + [np.ones(2)] * 100]
    with pytest.raises(CollectiveMismatch, match=r"array 400 is float64 \(2,\) and float64 \(3,\)") as told:
        folded("sum", values)
    assert len(str(told.value)) < 1000


@pytest.mark.parametrize(("op", "value"), [("min", np.ones(3, "c8")), ("sum", np.array(["x"])), ("sum", object())])
def test_what_means_nothing_is_refused(op, value):
    with pytest.raises(BadType):
        folded(op, [value, value])


def test_what_cannot_be_folded_is_named():
    with pytest.raises(BadType, match=r"input 1: .*not str 'x' at \['a'\]"):
        folded("sum", [{"a": 1}, {"a": "x"}])
    with pytest.raises(BadValue, match=r"input 1: .*64 bits"):
        folded("sum", [1, 1 << 64])


def test_a_speed_is_learnt_from_what_tells_it():
    speed = Speed()
    speed.answered(0.004)
    speed.carried(1 << 20, 4, 0.009)  # nearly all of it is latency
    assert speed.bytes_per_s == Speed().bytes_per_s
    speed.carried(10_000_000, 2, 1.004)
    assert speed.bytes_per_s == pytest.approx(1e7)
    speed.carried(20_000_000, 2, 1.004)
    assert speed.bytes_per_s == pytest.approx(1.5e7)
    assert slowest({"a": speed}, ["a", "b"]) == Speed(0.002, pytest.approx(1.5e7))


# --- courses --------------------------------------------------------------------------------------

HERE, THERE, FAR = "tcp://h:1#here", "tcp://h:2#there", "tcp://h:3#far"


class StandIn:
    """What a reduction asks of its session."""

    def __init__(self, values):
        self.node, self.config, self.store_limit_bytes = HERE, Config(), 64 << 20
        self.values = dict(enumerate(values))
        self.owner = types.SimpleNamespace(value_of=self.values.get, dead={})
        self.courses = types.SimpleNamespace(speeds={})
        self.context = types.SimpleNamespace(push=types.SimpleNamespace(spec=types.SimpleNamespace(id=b"t" * 16)),
                                             caller="tcp://h:4#caller")


def stored(nodes, dtype="f8", size=1 << 20):
    return m.Stored(8 << 20, nodes, (), arrays.kind_of(codec.pack(np.empty(size, dtype))))


def refs_of(session):
    return [types.SimpleNamespace(oid=oid) for oid in session.values]


def test_inputs_are_taken_where_they_are_near():
    session = StandIn([stored((FAR, HERE)), stored((THERE,)), stored((FAR, THERE)), stored((FAR,))])
    spread = spread_of(session, "sum", refs_of(session))
    assert spread.nodes == {THERE: [1, 2], FAR: [3], HERE: [0]}
    assert list(spread.nodes)[-1] == HERE


@pytest.mark.parametrize(("values", "op"), [
    ([stored((HERE,)), stored((HERE, FAR))], "sum"),  # all are here
    ([stored((HERE,)), stored((FAR,), "f4", 1 << 21)], "sum"),  # they differ
    ([stored((HERE,)), m.Inline(b"x")], "sum"),
    ([stored((FAR,), "i8")] * 2, "mean"),  # they would have to be made floats first
    ([m.Stored(8 << 20, (FAR,))] * 2, "sum"),  # no plain arrays
])
def test_other_inputs_are_folded_here(values, op):
    session = StandIn(values)
    assert spread_of(session, op, refs_of(session)) is None


def test_a_fold_goes_as_it_went_where_the_inputs_are_still_there():
    session = StandIn([stored((node,)) for node in (THERE, FAR, HERE, THERE)])
    refs = refs_of(session)
    spread = spread_of(session, "sum", refs)
    shape = in_tree(session, spread).shape
    assert sorted(index for indices in shape[0] for index in indices) == [0, 1, 2, 3]
    assert as_shaped(session, spread, refs, shape).shape == shape
    moved = StandIn([stored((node, HERE)) for node in ("tcp://h:5#new", FAR, HERE, "tcp://h:5#new")])
    again = as_shaped(moved, spread_of(session, "sum", refs), refs, shape)
    assert (again.shape, set(again.nodes)) == (shape, {"tcp://h:5#new", FAR, HERE})
    apart = StandIn([stored((node,)) for node in (THERE, FAR, HERE, FAR)])
    assert as_shaped(apart, spread_of(apart, "sum", refs), refs, shape) is None


def test_what_has_no_room_at_once_is_folded_in_runs_or_fetched():
    def run_lengths(nodes, limit_bytes):
        session = StandIn([stored((node,)) for node in nodes])
        session.store_limit_bytes = limit_bytes
        refs = refs_of(session)
        runs = runs_of(session, "sum", refs)
        assert not runs or [ref for run in runs for ref in run] == refs
        return [len(run) for run in runs]

    assert run_lengths([THERE] * 9 + [HERE] * 4, 64 << 20) == [4, 4, 4, 1]  # arrays of 8 MiB in half a store
    assert run_lengths([THERE, FAR] * 4, 64 << 20) == [8]
    assert run_lengths([THERE, FAR] * 4, 31 << 20) == []


def test_an_input_that_a_node_has_no_room_for_is_not_lost():
    for reason, goes_on in (("StoreFull: no room", False), ("it is not in the store", True)):
        session, steps = StandIn([]), []
        session.step = steps.append
        broken = m.CourseBroken(b"op", 0, "gift", "", f"{b'g'.hex()}: {reason}", b"g")
        assert can_go_on(session, SimpleQueue(), FAR, broken) == goes_on
        assert steps == [m.ObjectMissing(b"g", (FAR,), reason)] * goes_on


def test_a_course_gives_each_input_once_and_ends_here():
    session = StandIn([stored((node,)) for node in (THERE, HERE, FAR, THERE)])
    refs = refs_of(session)
    course = course_of(session, (b"op", 2), "sum", in_tree(session, spread_of(session, "sum", refs)), refs)
    assert sorted(given for post in course.posts for given in post.gives) == [(n, n) for n in range(4)]
    (line,) = course.lines
    assert course.posts[line.root].node == HERE
    assert course.posts[line.root].result == b"t" * 16 + bytes(4)
    assert [post.result_bytes for post in course.posts if post.result] == [8 << 20]
    assert (course.count, course.owner, course.epoch) == (4, "tcp://h:4#caller", 2)
    assert len(line.folds) == 2
    assert line.piece_bytes % 64 == 0
