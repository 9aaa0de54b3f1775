"""Steps that begin before all members have come, by scenes."""

from __future__ import annotations

import numpy as np
import pytest

from flowengine.collectives.ledger_early import EARLY_BYTES_MAX
from flowengine.collectives.plan_ways import given_name
from flowengine.core import messages as m

from .ledger_stage import ME, OTHER, WHOLE, Stage
from .test_collective_courses import LARGE, done, finals, give_large, result_of

SOON_S = 0.06
FIRST = (WHOLE, WHOLE, 0)


def name_of(formed: m.GroupFormed, rank: int, address: str = "") -> bytes:
    """What a rank's process calls the object that it gives to the first step."""
    return given_name(formed.seating.group, f"key{rank}".encode(), address or f"p{rank}", FIRST)


def begun(op: str = "reduce", root: int = 0, ranks: tuple[int, ...] = (1,)) -> tuple[Stage, m.GroupFormed, m.Course]:
    """A step of two hosts that has begun with these ranks alone."""
    stage = Stage()
    formed = stage.form()
    for rank in ranks:
        stage.give(formed, rank, 0, LARGE, oid=name_of(formed, rank), op=op, root=root)
    assert not stage.heard(m.Course)
    stage.sleep(SOON_S)
    course, other = stage.heard(m.Course)
    assert course == other
    return stage, formed, course


def test_a_fold_begins_without_its_root_and_ends_soon_after_it_has_come():
    stage, formed, course = begun()
    assert course.awaited == (name_of(formed, 0),)
    assert [oid for post in course.posts for _, oid in post.gives] == [name_of(formed, 1), name_of(formed, 0)]
    stage.give(formed, 0, 0, LARGE, oid=name_of(formed, 0), op="reduce", root=0)
    assert stage.heard(m.GiftCame) == [m.GiftCame(course.op, course.epoch, name_of(formed, 0))]
    assert not stage.heard(m.StepDone)
    done(stage, course, ME)
    assert [told.empty for told in stage.heard(m.StepDone, "p1")] == [True]
    assert [told.oid for told in stage.heard(m.StepDone, "p0")] == [result_of(course, ME).result]
    assert stage.desk.counters["collectives_early"] == stage.desk.counters["collectives_done"] == 1
    assert stage.desk.counters["collectives_repaired"] == 0


def test_the_course_is_the_one_that_all_would_have_had():
    _, formed, early = begun("allreduce", -1)
    other = Stage()
    other.form()
    give_large(other, formed, (0, 1))
    whole = other.heard(m.Course)[0]
    assert early.lines == whole.lines
    assert [[rank for rank, _ in post.gives] for post in early.posts] == \
        [[rank for rank, _ in post.gives] for post in whole.posts]


def test_a_sum_for_all_waits_until_one_is_left_since_the_way_depends_on_who_comes_last():
    stage = Stage()
    formed = stage.form(4)
    for rank in (0, 1):
        stage.give(formed, rank, 0, LARGE, oid=name_of(formed, rank))
    stage.sleep(SOON_S)
    assert not stage.heard(m.Course)
    stage.give(formed, 3, 0, LARGE, oid=name_of(formed, 3))
    assert {course.awaited for course in stage.heard(m.Course)} == {(name_of(formed, 2),)}


def test_what_is_broadcast_lies_on_all_hosts_and_nobody_hears_of_it_before_all_have_come():
    stage, formed, course = begun("broadcast", 0, (0,))
    assert not course.awaited
    assert all(not address for post in course.posts for _, address in post.takers)
    done(stage, course, ME, OTHER)
    assert not stage.heard(m.StepDone)
    stage.give(formed, 1, 0, None, op="broadcast", root=0)
    assert {told.oid for told in stage.heard(m.StepDone)} == {result_of(course, OTHER).result}
    assert not stage.heard(m.GiftCame)


def test_a_broadcast_waits_for_its_root():
    stage = Stage()
    formed = stage.form(3)
    stage.give(formed, 1, 0, None, op="broadcast", root=0)
    stage.sleep(SOON_S)
    assert not stage.heard(m.Course)
    stage.give(formed, 0, 0, LARGE, oid=name_of(formed, 0), op="broadcast", root=0)
    assert stage.heard(m.Course)


def test_who_comes_late_and_asks_for_something_else_fails_the_step_for_all():
    stage, formed, course = begun("broadcast", 0, (0,))
    done(stage, course, ME, OTHER)
    stage.give(formed, 1, 0, LARGE, oid=name_of(formed, 1), op="allreduce")
    assert {told.kind for told in stage.heard(m.StepFailed)} == {"mismatch"}
    assert not stage.heard(m.StepDone)
    assert name_of(formed, 1) in [oid for told in stage.heard(m.StepEnded, OTHER) for oid in told.gifts]


def test_a_node_that_cannot_go_on_with_what_came_late_leaves_the_reason_to_those_who_compare():
    stage, formed, course = begun()
    stage.tell(m.CourseBroken(course.op, course.epoch, "gift", "", "it has 8 bytes"), ME)
    finals(stage, (ME, ()), (OTHER, ()))
    assert not stage.heard(m.StepFailed)
    stage.give(formed, 0, 0, np.ones(1, "f8"), oid=name_of(formed, 0), op="reduce", root=0)
    assert {told.kind for told in stage.heard(m.StepFailed)} == {"mismatch"}


@pytest.mark.parametrize("comes_back", [True, False])
def test_who_dies_on_the_way_is_waited_for_as_in_any_step(comes_back):
    stage, formed, early = begun()
    stage.lose("p0")
    finals(stage, (ME, ()), (OTHER, ()))
    if comes_back:
        stage.join(0, address="q0", seating=formed.seating)
        stage.give(formed, 0, 0, LARGE, oid=name_of(formed, 0, "q0"), op="reduce", root=0, address="q0")
        course = stage.heard(m.Course)[0]
        assert course.epoch > early.epoch
        assert not course.awaited
        done(stage, course, ME)
        assert stage.heard(m.StepDone, "q0")
    else:
        stage.sleep(5)
        [told] = stage.heard(m.StepFailed, "p1")
        assert told.kind == "lost"
        assert "rank 0" in told.reason
    assert stage.desk.counters["collectives_repaired"] == 0


def test_who_does_not_come_is_named_when_the_time_is_over():
    stage, _, _ = begun()
    stage.sleep(4)
    finals(stage, (ME, ()), (OTHER, ()))
    [told] = stage.heard(m.StepFailed, "p1")
    assert told.kind == "timeout"
    assert "rank 0" in told.reason


def test_a_node_with_a_part_is_lost():
    stage, formed, _ = begun(ranks=(0,))
    stage.lose_node(OTHER)
    finals(stage, (ME, ()))
    stage.join(1, address="q1", node=ME, seating=formed.seating)
    stage.give(formed, 1, 0, LARGE, oid=name_of(formed, 1, "q1"), op="reduce", root=0, address="q1")
    course = stage.heard(m.Course)[0]
    done(stage, course, ME)
    assert stage.heard(m.StepDone, "q1")


def test_a_group_goes_on_without_who_was_awaited():
    stage = Stage()
    formed = stage.form(3, on_failure="shrink")
    for rank in (0, 1):
        stage.give(formed, rank, 0, LARGE, oid=name_of(formed, rank))
    stage.sleep(SOON_S)
    assert stage.heard(m.Course)
    stage.lose("p2")
    finals(stage, (ME, ()), (OTHER, ()))
    course = stage.heard(m.Course)[0]
    assert {rank for post in course.posts for rank, _ in post.gives} == {0, 1}
    done(stage, course, ME, OTHER)
    assert stage.heard(m.StepEnded)


@pytest.mark.parametrize("why", ["one host", "small", "huge", "another operation", "an earlier step is open", "soon"])
def test_others_wait_for_all(why):
    stage = Stage()
    formed = stage.form(node=ME) if why == "one host" else stage.form()
    number = 0
    if why == "an earlier step is open":
        stage.give(formed, 1, 0, LARGE, op="barrier")
        number = 1
    value = {"small": LARGE[:4], "huge": np.broadcast_to(np.float32(1), (EARLY_BYTES_MAX // 4 + 1,))}.get(why, LARGE)
    op = "allgather" if why == "another operation" else "allreduce"
    header = m.Header(op, "sum", -1, "*", (m.ArrayPart("<f4", value.shape, 0),), value.nbytes)
    given = m.StepGiven(formed.seating.group, (WHOLE, WHOLE, number), 1, header, b"", b"gift")
    stage.tell(given, "p1")
    stage.sleep(0.01 if why == "soon" else SOON_S)
    assert not stage.heard(m.Course)
