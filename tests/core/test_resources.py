"""Amounts are exact, and placement follows costs and preferences."""

from __future__ import annotations

import pytest

from flowengine.core.messages import NodeEntry
from flowengine.scheduling import placement
from flowengine.scheduling.resources import Ledger, shape_of, units_of

TOTAL = (("CPU", 2.0), ("GPU", 1.0))


def node(node_id: str, total=TOTAL, available=None, queued=0) -> NodeEntry:
    return NodeEntry(node_id, f"tcp://{node_id}", "h", total, total if available is None else available, (), queued)


def test_large_inputs_draw_a_task_unless_the_queue_there_is_longer_than_their_way() -> None:
    shape = (("CPU", 1.0),)
    busy, idle = node("a", queued=10), node("b")
    held = {busy.address: 1 << 30}
    assert placement.choose([busy, idle], shape, (), 0.01, held) == busy  # 0.1 s of queue against 1 s of transfer
    assert placement.choose([busy, idle], shape, (), 1.0, held) == idle


def test_a_tenth_ten_times_is_one():
    ledger, tenth = Ledger((("CPU", 1.0),)), units_of((("CPU", 0.1),))
    for _ in range(10):
        ledger.take(tenth)
    assert ledger.free("CPU") == 0
    assert not ledger.fits(tenth)
    for _ in range(10):
        ledger.give(tenth)
    assert ledger.available() == (("CPU", 1.0),)


def test_take_never_overcommits_and_retake_may():
    ledger, both = Ledger(TOTAL), units_of((("CPU", 2.0),))
    ledger.take(both)
    with pytest.raises(ValueError, match="not free"):
        ledger.take(both)
    ledger.retake(both)
    assert ledger.free("CPU") == -20_000
    assert ledger.available() == (("CPU", 0.0), ("GPU", 1.0))
    ledger.give(both)
    ledger.give(both)
    assert ledger.available() == TOTAL


def test_unknown_resources_do_not_fit_and_nothing_always_fits():
    ledger = Ledger(TOTAL)
    assert not ledger.could_fit(units_of((("unobtainium", 1.0),)))
    assert ledger.fits(units_of((("unobtainium", 0.0),)))
    assert ledger.times((), 5) == 5
    assert ledger.times(units_of((("CPU", 0.5),)), 10) == 4
    assert ledger.lacking(units_of((("CPU", 1.0), ("GPU", 2.0)))) == "GPU"


def test_shrinking_below_use_is_paid_by_releases():
    ledger, one = Ledger((("lock", 4.0),)), units_of((("lock", 1.0),))
    for _ in range(4):
        ledger.take(one)
    ledger.resize("lock", 1)
    for _ in range(3):
        assert not ledger.fits(one)
        ledger.give(one)
    assert not ledger.fits(one)
    ledger.give(one)
    assert ledger.fits(one)
    ledger.resize("lock", 0)
    assert ledger.names() == ()


def test_smallest_amount_is_not_lost():
    assert shape_of(units_of((("CPU", 1e-9),))) == (("CPU", 0.0001),)


def test_choice_prefers_short_queues_then_spare_room():
    free = (("CPU", 1.0), ("GPU", 1.0))
    shape = (("CPU", 1.0),)
    chosen = placement.choose([node("a", queued=50), node("b", available=free)], shape, ())
    assert chosen is not None
    assert chosen.node_id == "b"
    chosen = placement.choose([node("a", available=free), node("b")], shape, ())
    assert chosen is not None
    assert chosen.node_id == "b"
    assert placement.choose([node("a", available=())], shape, ()) is None


def test_choice_follows_preference_and_strictness():
    nodes = [node("a"), node("b")]
    shape = (("CPU", 1.0),)
    chosen = placement.choose(nodes, shape, ("b", "*"))
    assert chosen is not None
    assert chosen.node_id == "b"
    assert placement.choose(nodes, shape, ("c",)) is None
    assert [entry.node_id for entry in placement.candidates(nodes, shape, ("b", "*"))] == ["b", "a"]


def test_cost_is_in_seconds():
    costs = placement.Costs(run_s=0.5, bytes_to_move=2_000, bytes_per_s=1_000.0)
    assert placement.cost_s(queued=8, slots=4, rank=0, costs=costs) == pytest.approx(3.0)


@pytest.mark.parametrize(("shape", "wanted", "text"), [
    ((("unobtainium", 1.0),), (), "no node has unobtainium: 1 (largest: 0)"),
    ((("CPU", 64.0),), (), "no node has CPU: 64 (largest: 2)"),
    ((("CPU", 1.0),), ("gone",), "node gone is not there"),
    ((("GPU", 3.0),), ("a",), "none of a has GPU: 3 (largest: 1)"),
    ((("CPU", 1.0), ("x", 0.5)), (), "no node has CPU: 1 and x: 0.5 together"),
    ((("CPU", 1.0),), (), ""),
])
def test_reasons(shape, wanted, text):
    assert placement.why_not([node("a"), node("b"), node("c", total=(("x", 1.0),))], shape, wanted) == text


def test_promises_are_subtracted():
    assert placement.minus(TOTAL, units_of((("CPU", 0.5),)), 3) == (("CPU", 0.5), ("GPU", 1.0))
    assert placement.times(TOTAL, units_of((("CPU", 0.5),)), 100) == 4
