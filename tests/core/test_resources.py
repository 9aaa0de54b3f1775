"""Amounts are exact, and placement follows costs and preferences."""

from __future__ import annotations

import pytest

from flowengine.core.messages import NodeEntry
from flowengine.scheduling import placement
from flowengine.scheduling.resources import (
    LIMITLESS,
    SCALE,
    SEP,
    Ledger,
    Wide,
    brief,
    key_of,
    of_job,
    plain,
    resolve,
    shape_of,
    shown_need,
    units_of,
)
from flowengine.scheduling.rooms import SAMPLE, Rooms, Wish

TOTAL = (("CPU", 2.0), ("GPU", 1.0))


def node(node_id: str, total=TOTAL, available=None, queued=0) -> NodeEntry:
    return NodeEntry(node_id, f"tcp://{node_id}", "h", total, total if available is None else available, (), queued)


def rooms_of(*entries: NodeEntry) -> Rooms:
    rooms = Rooms()
    for entry in entries:
        rooms.join(entry)
    return rooms


def chosen(rooms: Rooms, shape, placement=(), **wish) -> str:
    room = rooms.choose(Wish(shape, placement, **wish))
    return room.entry.node_id if room is not None else ""


def test_large_inputs_draw_a_task_unless_the_queue_there_is_longer_than_their_way() -> None:
    shape = (("CPU", 1.0),)
    busy, idle = node("a", queued=10), node("b")
    held, rooms = ((busy.address, 1 << 30),), rooms_of(busy, idle)
    assert chosen(rooms, shape, run_s=0.01, held=held) == "a"  # 0.1 s of queue against 1 s of transfer
    assert chosen(rooms, shape, run_s=1.0, held=held) == "b"


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
    ledger, one = Ledger(()), units_of((("lock", 1.0),))
    ledger.resize("lock", 4)
    for _ in range(4):
        ledger.take(one)
    ledger.resize("lock", 1)
    for _ in range(3):
        assert not ledger.fits(one)
        assert list(ledger.over) == ["lock"]
        ledger.give(one)
    assert not ledger.fits(one)
    assert not ledger.over
    ledger.give(one)
    assert ledger.fits(one)
    ledger.resize("lock", 0)
    assert ledger.names() == ()
    assert ledger.news() == (("lock", 0, 0),)
    assert ledger.news() == ()


def test_a_resource_that_goes_while_it_is_held_goes_with_its_last_holder():
    ledger, one = Ledger(TOTAL), units_of((("lock", 1.0),))
    ledger.resize("lock", 1)
    ledger.take(one)
    ledger.resize("lock", 0)
    assert ledger.free("lock") == -10_000
    assert ledger.total() == TOTAL  # what came at run time is no part of it
    ledger.give(one)
    assert ledger.names() == ("CPU", "GPU")


def test_names_of_programs_are_keys_and_a_node_has_its_own_first():
    shape = (("CPU", 1.0), ("lock", 1.0), ("lock@7.0", 1.0))
    keys = of_job(shape, "tcp://d#1")
    assert keys == (("CPU", 1.0), (f"lock{SEP}tcp://d#1", 1.0), ("lock@7.0", 1.0))
    assert [plain(key) for key, _ in keys] == ["CPU", "lock", "lock@7.0"]
    assert brief(keys) == (("CPU", 1.0), ("lock@7.0", 1.0))
    assert resolve(units_of(keys), {"CPU": None}) == units_of(keys)
    assert resolve(units_of(keys), {"CPU": None, "lock": None}) == units_of(shape)
    assert key_of("GPU", "j") == "GPU"


def test_a_wide_shape_is_as_good_as_any():
    shape = tuple((f"r{number}", 1.0) for number in range(100))
    wide = of_job(shape, "j")
    assert type(wide) is Wide
    assert {(wide, ()): 1}[tuple((f"r{number}{SEP}j", 1.0) for number in range(100)), ()] == 1
    assert brief(wide) == ()


def test_smallest_amount_is_not_lost():
    assert shape_of(units_of((("CPU", 1e-9),))) == (("CPU", 0.0001),)


def test_choice_prefers_short_queues_then_spare_room():
    free = (("CPU", 1.0), ("GPU", 1.0))
    shape = (("CPU", 1.0),)
    assert chosen(rooms_of(node("a", queued=50), node("b", available=free)), shape) == "b"
    assert chosen(rooms_of(node("a", available=free), node("b")), shape) == "b"
    assert chosen(rooms_of(node("a", available=())), shape) == ""


def test_choice_follows_preference_and_strictness():
    nodes, shape = [node("a"), node("b")], (("CPU", 1.0),)
    rooms = rooms_of(*nodes)
    assert chosen(rooms, shape, ("b", "*")) == "b"
    assert chosen(rooms, shape, ("c",)) == ""
    assert chosen(rooms, shape, ("a", "*"), but="tcp://a") == "b"
    assert [entry.node_id for entry in placement.candidates(nodes, shape, ("b", "*"))] == ["b", "a"]
    known = {entry.node_id: entry for entry in nodes}
    assert placement.preferred(known, ("gone", "b", "a"), units_of(shape)) == nodes[1]
    assert placement.preferred(known, ("a",), units_of((("CPU", 5.0),))) is None


def test_equal_nodes_take_turns_and_the_rare_one_is_found_among_many():
    shape = (("CPU", 1.0),)
    rooms = rooms_of(*(node(f"n{number}") for number in range(10 * SAMPLE)), node("z", (("CPU", 1.0), ("rare", 1.0))))
    assert len({chosen(rooms, shape) for _ in range(3 * SAMPLE)}) == 3 * SAMPLE
    assert chosen(rooms, (("CPU", 1.0), ("rare", 1.0))) == "z"
    rooms.promise("z", units_of((("rare", 1.0),)))
    assert chosen(rooms, (("CPU", 1.0), ("rare", 1.0))) == ""
    assert rooms.able(Wish((("rare", 1.0),)), 5) == [rooms.nodes["z"]]


class Counted(Rooms):
    """Counts the nodes that decisions look at."""

    looks = 0

    def fits(self, room, wish) -> bool:
        self.looks += 1
        return super().fits(room, wish)


def test_no_decision_walks_over_the_cluster():
    rooms, key = Counted(), key_of("lock", "j")
    for number in range(2_000):
        rooms.join(node(f"n{number}"))
        rooms.resize(f"n{number}", key, 10_000)
    wishes = [Wish((("CPU", 1.0),)), Wish(((key, 1.0),)), Wish(()), Wish((("CPU", 1.0),), ("n1999", "*")),
              Wish((("CPU", 9.0),)), Wish((("GPU", 1.0), (key, 1.0)), ("n3", "n4"))]
    for _ in range(10):
        for wish in wishes:
            rooms.looks = 0
            rooms.choose(wish)
            assert rooms.looks <= SAMPLE + 2
    for number in range(1_990):
        rooms.report(node(f"n{number}", available=()))  # busy ones are not in the way of free ones
    rooms.looks = 0
    assert chosen(rooms, (("CPU", 1.0),))
    assert rooms.looks <= SAMPLE


def test_promises_count_until_the_next_report():
    key, entry = key_of("lock", "j"), node("a")
    rooms = rooms_of(entry)
    rooms.resize("a", key, 20_000)
    rooms.promise("a", ((key, 10_000),), 2)
    assert chosen(rooms, ((key, 1.0),)) == ""
    rooms.report(entry)
    assert chosen(rooms, ((key, 1.0),)) == "a"
    rooms.report(entry, ((key, 0, -20_000),))  # it had not yet heard how much there is, and two were held of old
    assert chosen(rooms, ((key, 1.0),)) == ""
    rooms.leave("a")
    assert rooms.has.keys() == rooms.open.keys() == {""}


def test_cost_is_in_seconds():
    assert placement.cost_s(queued=8, slots=4, rank=2, run_s=0.5, bytes_to_move=2 * 10**9) == pytest.approx(3.1)


@pytest.mark.parametrize(("shape", "wanted", "text"), [
    ((("unobtainium", 1.0),), (), "no node has unobtainium: 1 (largest: 0)"),
    ((("CPU", 64.0),), (), "no node has CPU: 64 (largest: 2)"),
    ((("CPU", 1.0),), ("gone",), "node gone is not there"),
    ((("GPU", 3.0),), ("a",), "none of a has GPU: 3 (largest: 1)"),
    ((("CPU", 1.0), ("x", 0.5)), (), "no node has CPU: 1 and x: 0.5 together"),
    ((("CPU", 1.0),), (), ""),
])
def test_reasons(shape, wanted, text):
    nodes = [node("a"), node("b"), node("c", total=(("x", 1.0),))]
    assert placement.why_not(nodes, shape, wanted) == text
    assert not text or rooms_of(*nodes).why_not(Wish(shape, wanted), lambda key: "") == text


def test_keys_and_amounts_in_words():
    assert shown_need("y\x1ftcp://h:1#d", 10_000) == "y: 1"
    assert shown_need("CPU@gang-1f.2", 5_000) == "CPU of bundle 2 of gang-1f: 0.5"
    assert shown_need("@group-1f.0", 10_000) == "bundle 0 of group-1f: 1"
    assert shown_need("@actor:0123456789abcdef", 10_000) == "actor 0123456789ab: 1"
    assert shown_need("memory", 10**15 * SCALE) == "memory: 931,322.6 GiB"
    assert shown_need("memory@group-1f.0", 30_000) == "memory of bundle 0 of group-1f: 3 bytes"
    assert shown_need("x", LIMITLESS) == "x: any amount"
    assert shown_need("x", 10**15 * SCALE) == "x: 1e+15"
