"""Large steps of a group by scenes, their repair, what is kept of them, and a ledger that goes on from another."""

from __future__ import annotations

import numpy as np
import pytest

from flowengine.collectives.posts_orders import HEAD_BYTES
from flowengine.config import Config
from flowengine.core import messages as m

from .ledger_stage import ME, OTHER, THIRD, WHOLE, Stage, header_of

ONES = np.ones(100, "f4")


def step(number: int) -> m.Step:
    return (WHOLE, WHOLE, number)


# --- large steps ----------------------------------------------------------------------------------

LARGE = np.ones(1 << 18, "f4")


def give_large(stage: Stage, formed: m.GroupFormed, ranks, number: int = 0, op: str = "allreduce", **fields) -> None:
    for rank in ranks:
        stage.give(formed, rank, number, LARGE, oid=f"gift{rank}.{number}".encode(), op=op, **fields)


def done(stage: Stage, course: m.Course, *nodes: str) -> None:
    for node in nodes:
        stage.tell(m.CourseDone(course.op, course.epoch), node)


def finals(stage: Stage, *told: tuple[str, tuple]) -> None:
    asked = stage.heard(m.FinalsAsked)
    for node, ranges in told:
        stage.tell(m.Finals(asked[0].op, asked[0].epoch, ranges), node)


def result_of(course: m.Course, node: str) -> m.Post:
    return next(post for post in course.posts if post.node == node and post.result)


def test_a_large_step_has_a_course_and_ends_when_all_nodes_are_done():
    stage = Stage()
    formed = stage.form()
    give_large(stage, formed, (0, 1))
    here, there = stage.heard(m.Course)
    assert here == there
    done(stage, here, ME)
    assert not stage.heard(m.StepEnded)
    done(stage, here, OTHER)
    assert [told.gifts for told in stage.heard(m.StepEnded)] == [(), ()]
    assert not stage.heard(m.StepDone)
    give_large(stage, formed, (1,))
    [told] = stage.heard(m.StepDone, "p1")
    assert (told.oid, told.nbytes) == (result_of(here, OTHER).result, LARGE.nbytes + HEAD_BYTES)
    assert sorted(told.nodes) == [ME, OTHER]


def test_who_takes_nothing_is_told_when_a_large_step_is_done():
    stage = Stage()
    formed = stage.form()
    give_large(stage, formed, (0, 1), op="reduce", root=0)
    course = stage.heard(m.Course)[0]
    done(stage, course, ME)
    assert [told.empty for told in stage.heard(m.StepDone, "p1")] == [True]


def test_large_and_small_gifts_go_together():
    stage = Stage()
    formed = stage.form()
    stage.give(formed, 0, 0, ONES, op="allgather")
    give_large(stage, formed, (1,), op="allgather")
    course = stage.heard(m.Course)[0]
    assert [blob for _, blob in course.blobs] == [ONES.tobytes()]
    assert course.blobs[0][0] in [oid for post in course.posts for _, oid in post.gives]


def test_a_lost_node_is_asked_for_again_by_those_who_sat_there_and_the_rest_is_spared():
    stage = Stage()
    formed = stage.form(3)
    give_large(stage, formed, (0, 1, 2))
    first = stage.heard(m.Course, ME)[0]
    stage.heard(m.Course)
    stage.lose_node(OTHER)
    finals(stage, (ME, ()))
    assert not stage.heard(m.Course)
    stage.join(1, address="q1", node=THIRD)
    stage.give(formed, 1, 0, LARGE, oid=b"again", address="q1")
    second = stage.heard(m.Course, THIRD)[0]
    assert second.epoch > first.epoch
    done(stage, second, ME, THIRD)
    assert stage.desk.counters["collectives_repaired"] == 1


def test_nobody_has_to_give_again_when_all_is_whole_somewhere():
    stage = Stage()
    formed = stage.form(3)
    give_large(stage, formed, (0, 1, 2))
    course = stage.heard(m.Course, ME)[0]
    stage.lose_node(OTHER)
    finals(stage, (ME, ((result_of(course, ME).result, ((0, LARGE.nbytes),)),)))
    assert stage.heard(m.StepEnded, ME)
    stage.join(1, address="q1", node=THIRD)
    stage.give(formed, 1, 0, LARGE, oid=b"again", address="q1")
    told = stage.heard(m.StepDone, "q1")[0]
    assert told.nodes == (ME,)


def test_a_shrunk_group_does_a_large_step_anew_without_what_was_lost():
    stage = Stage()
    formed = stage.form(3, on_failure="shrink")
    give_large(stage, formed, (0, 1, 2))
    stage.heard(m.Course)
    stage.lose_node(OTHER)
    finals(stage, (ME, ()))
    course = stage.heard(m.Course, ME)[0]
    assert course.fresh
    assert course.count == 2


def test_a_course_that_breaks_is_repaired_a_few_times():
    stage = Stage()
    formed = stage.form()
    give_large(stage, formed, (0, 1))
    for _ in range(3):
        course = stage.heard(m.Course, ME)[-1]
        stage.tell(m.CourseBroken(course.op, course.epoch, "peer", OTHER, "nothing moved for 15 s"), ME)
        finals(stage, (ME, ()), (OTHER, ()))
    course = stage.heard(m.Course, ME)[-1]
    stage.tell(m.CourseBroken(course.op, course.epoch, "peer", OTHER, "nothing moved for 15 s"), ME)
    first, second = stage.heard(m.StepFailed)
    assert first.kind == "timeout"
    assert "nothing moved for 15 s" in first.reason == second.reason


def test_no_room_is_an_error_of_all():
    stage = Stage()
    formed = stage.form()
    give_large(stage, formed, (0, 1))
    course = stage.heard(m.Course, ME)[0]
    stage.tell(m.CourseBroken(course.op, course.epoch, "store", "", "StoreFull: no room"), OTHER)
    assert [told.kind for told in stage.heard(m.StepFailed)] == ["store", "store"]


def test_a_lost_result_of_one_rank_is_made_again_from_what_was_given():
    stage = Stage()
    formed = stage.form(3)
    give_large(stage, formed, (0, 1, 2), op="reduce", root=1)
    course = stage.heard(m.Course, ME)[0]
    assert course.keeps_gifts
    done(stage, course, OTHER)
    stage.lose_node(OTHER)
    stage.join(1, address="q1", node=THIRD)
    stage.heard(m.StepDone)
    stage.give(formed, 1, 0, LARGE, oid=b"again", op="reduce", root=1, address="q1")
    course = stage.heard(m.Course, THIRD)[0]
    assert not course.fresh
    assert result_of(course, THIRD).takers == ((1, "q1"),)
    done(stage, course, THIRD)
    assert stage.heard(m.StepDone, "q1")[0].nodes == (THIRD,)
    assert stage.desk.counters["collectives_done"] == 1


def lose_two_of_four(op: str) -> tuple[Stage, m.GroupFormed]:
    """A large step is done, and ranks 1 and 3 come again on another node, with nothing of what they had."""
    stage = Stage()
    formed = stage.form(4)
    give_large(stage, formed, range(4), op=op)
    done(stage, stage.heard(m.Course, ME)[0], ME, OTHER)
    stage.lose_node(OTHER)
    for rank in (1, 3):
        stage.join(rank, 4, address=f"q{rank}", node=THIRD)
    stage.heard(m.Course)
    return stage, formed


def give_again(stage: Stage, formed: m.GroupFormed, rank: int, op: str) -> None:
    stage.give(formed, rank, 0, LARGE, oid=b"again%d" % rank, op=op, address=f"q{rank}")


def test_ranks_that_were_lost_with_their_results_and_what_they_gave_give_again_and_each_has_its_own():
    stage, formed = lose_two_of_four("reduce_scatter")
    give_again(stage, formed, 1, "reduce_scatter")
    assert not stage.heard(m.Course)
    assert not stage.heard(m.StepFailed)
    give_again(stage, formed, 3, "reduce_scatter")
    for rank in (1, 3):
        course = stage.heard(m.Course, THIRD)[0]
        assert not course.fresh
        assert result_of(course, THIRD).takers == ((rank, f"q{rank}"),)
        done(stage, course, THIRD)
        assert stage.heard(m.StepDone, f"q{rank}")[0].nodes == (THIRD,)
    assert not stage.heard(m.StepFailed)
    assert not stage.heard(m.Course, THIRD)


def test_a_lost_result_is_not_waited_for_longer_than_timeout_s():
    stage, formed = lose_two_of_four("reduce_scatter")
    give_again(stage, formed, 1, "reduce_scatter")
    stage.sleep(4.1)
    told = stage.heard(m.StepFailed, "q1")[0]
    assert told.kind == "behind"
    assert "host host-n2 (n2) took it along; rank 3" in told.reason
    assert told.reason.endswith("has not given to it again")
    give_again(stage, formed, 3, "reduce_scatter")
    assert stage.heard(m.Course, THIRD)


def test_who_will_not_give_again_is_not_waited_for():
    stage, formed = lose_two_of_four("reduce_scatter")
    stage.tell(m.StepsPassed(formed.seating.group, 3, 1), "q3")
    give_again(stage, formed, 1, "reduce_scatter")
    assert "rank 3" in stage.heard(m.StepFailed, "q1")[0].reason


def test_a_result_of_all_that_is_nowhere_is_made_again_when_all_repeat_the_step():
    stage = Stage(me=THIRD)
    formed = stage.form(2, node=OTHER)
    give_large(stage, formed, (0, 1))
    done(stage, stage.heard(m.Course, OTHER)[0], OTHER)
    stage.lose_node(OTHER)
    for rank in (0, 1):
        stage.join(rank, address=f"q{rank}", node=ME)
        give_again(stage, formed, rank, "allreduce")
    course = stage.heard(m.Course, ME)[0]
    done(stage, course, ME)
    assert {to for to, told in stage.said if isinstance(told, m.StepDone)} == {"q0", "q1"}


def test_mismatched_objects_do_not_stay_in_stores():
    stage = Stage()
    formed = stage.form()
    stage.give(formed, 0, 0, LARGE, oid=b"gift0")
    stage.give(formed, 1, 0, LARGE.astype("f8"), oid=b"gift1")
    assert [told.kind for told in stage.heard(m.StepFailed)] == ["mismatch", "mismatch"]
    assert stage.heard(m.StepEnded, OTHER)[0].gifts == (b"gift1",)


# --- forgetting -----------------------------------------------------------------------------------


def test_steps_are_forgotten_when_all_have_passed_them():
    stage = Stage()
    formed = stage.form()
    for number in range(100):
        for rank in (0, 1):
            stage.give(formed, rank, number, ONES)
    stage.tell(m.StepsPassed(formed.seating.group, 0, 90), "p0")
    assert not stage.heard(m.StepsForgotten)
    stage.tell(m.StepsPassed(formed.seating.group, 1, 80), "p1")
    assert [told.number for told in stage.heard(m.StepsForgotten)] == [80, 80]
    stage.give(formed, 1, 79, ONES)
    assert stage.heard(m.StepFailed, "p1")[0].kind == "behind"
    stage.give(formed, 1, 80, ONES)
    assert stage.heard(m.StepDone, "p1")


def test_the_oldest_results_go_when_too_much_is_kept():
    stage = Stage(Config(collective_kept_bytes_max=4 * LARGE.nbytes))
    formed = stage.form()
    for number in range(6):
        give_large(stage, formed, (0, 1), number)
        done(stage, stage.heard(m.Course)[0], ME, OTHER)
    assert stage.heard(m.StepsForgotten)
    give_large(stage, formed, (1,), 0)
    reason = stage.heard(m.StepFailed, "p1")[0].reason
    assert "bytes of results were kept on a node, and the oldest went; shorter calls, or checkpoints" in reason
    give_large(stage, formed, (1,), 5)
    assert stage.heard(m.StepDone, "p1")[0].checkpoint


def test_the_oldest_small_results_go_when_too_much_is_kept():
    stage = Stage(Config(collective_kept_bytes_max=4 * ONES.nbytes))
    formed = stage.form()
    for number in range(6):
        for rank in (0, 1):
            stage.give(formed, rank, number, ONES)
    stage.give(formed, 1, 0, ONES)
    assert "bytes of results were kept" in stage.heard(m.StepFailed, "p1")[0].reason
    stage.give(formed, 1, 5, ONES)
    assert stage.heard(m.StepDone, "p1")


# --- another node's ledger ------------------------------------------------------------------------


def test_a_new_ledger_goes_on_from_what_members_and_nodes_know():
    old = Stage()
    formed = old.form(3)
    seating = formed.seating
    stage = Stage(me=OTHER)
    stage.desk.dead_nodes[THIRD] = None
    stage.join(1, 3, seating=seating, next_step=2)
    stage.give(formed, 1, 1, ONES)
    stage.give(formed, 1, 2, ONES)
    assert sorted(to for to, told in stage.said if isinstance(told, m.HeldAsked)) == [ME, OTHER]
    kept = m.HeldStep(step(1), (), ((WHOLE, b"sum"),), ())
    stage.tell(m.Held(seating.group, (), 7), OTHER)
    assert not stage.heard(m.GroupFormed)
    stage.tell(m.Held(seating.group, (kept,), 3), ME)
    assert stage.heard(m.GroupFormed, "p1")[0].seating.epoch == 8
    assert stage.heard(m.StepDone, "p1")[0].blob == b"sum"
    for rank in (0, 2):
        stage.join(rank, 3, seating=seating, next_step=2)
        stage.give(formed, rank, 2, ONES)
    assert dict(stage.heard(m.BlobsReady, ME)[-1].results)[WHOLE] == (3 * ONES).tobytes()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_new_ledger_knows_a_newcomer_that_never_heard_which_rank_it_got(is_first: bool):
    old = Stage()
    formed = old.form(2, on_failure="shrink", restorable=False)
    old.join(4, 5, on_failure="shrink", restorable=False)
    for rank in (0, 1):
        old.give(formed, rank, 0, op="admit")
    seating = old.heard(m.GroupFormed, "p1")[-1].seating
    stage = Stage(me=OTHER)
    known = {"on_failure": "shrink", "restorable": False, "seating": seating, "next_step": 1}
    if is_first:
        stage.join(4, 5, on_failure="shrink", restorable=False)
    for rank in (0, 1):
        stage.join(rank, 3, **known)
    for node in (ME, OTHER):
        stage.tell(m.Held(seating.group, ()), node)
    if not is_first:
        stage.join(4, 5, on_failure="shrink", restorable=False)
    told = stage.heard(m.GroupFormed, "p4")[-1]
    assert (told.rank, told.size, told.first_step, told.seating.keys[2]) == (2, 3, 1, b"key4")
    for rank, address in enumerate(("p0", "p1", "p4")):
        stage.give(formed, rank, 1, ONES, address=address)
    assert dict(stage.heard(m.BlobsReady, ME)[-1].results)[WHOLE] == (3 * ONES).tobytes()


def test_a_new_ledger_waits_no_longer_than_a_node_may_be_silent_and_names_who_did_not_come():
    formed = Stage().form(3)
    stage = Stage(me=OTHER)
    stage.join(1, 3, seating=formed.seating)
    stage.give(formed, 1, 0, ONES)
    stage.lose_node(ME)
    stage.tell(m.Held(formed.seating.group, ()), OTHER)
    stage.sleep(4.1)
    assert "was not heard of after the node" in stage.heard(m.StepFailed, "p1")[0].reason


def test_failures_are_kept_by_nodes_for_a_new_ledger():
    stage = Stage()
    formed = stage.form()
    stage.give(formed, 0, 0, ONES)
    stage.give(formed, 1, 0, ONES[:3])
    reason = stage.heard(m.StepFailed)[0].reason
    assert [told.failed for told in stage.heard(m.BlobsReady)] == [("mismatch", reason)] * 2
    other = Stage(me=OTHER)
    other.join(1, seating=formed.seating, next_step=1)
    other.tell(m.Held(formed.seating.group, (m.HeldStep(step(0), (), (), (), ("mismatch", reason)),)), OTHER)
    other.tell(m.Held(formed.seating.group, ()), ME)
    other.give(formed, 1, 0, ONES[:3])
    assert other.heard(m.StepFailed, "p1")[0].reason == reason


def test_a_new_ledger_makes_results_of_one_rank_again_from_what_nodes_hold():
    old = Stage()
    formed = old.form(4)
    give_large(old, formed, range(4), op="reduce_scatter")
    course = old.heard(m.Course)[0]
    group = formed.seating.group
    stage = Stage(me=OTHER)
    stage.desk.dead_nodes[ME] = None
    stage.join(1, 4, seating=formed.seating, next_step=1)
    stage.give(formed, 1, 0, LARGE, oid=b"gift1.0", op="reduce_scatter")
    whole = (3, result_of(course, OTHER).result, 99)
    gifts = ((1, b"gift1.0", b""), (3, b"gift3.0", b""))
    stage.tell(m.Held(group, (m.HeldStep(step(0), (whole,), (), (), headers=course.headers, gifts=gifts),)), OTHER)
    for rank in (0, 2):
        assert not stage.heard(m.StepFailed)
        assert not stage.heard(m.Course)
        stage.join(rank, 4, address=f"q{rank}", node=THIRD)
        give_again(stage, formed, rank, "reduce_scatter")
    again = stage.heard(m.Course, OTHER)[0]
    assert not again.fresh
    assert result_of(again, OTHER).takers == ((1, "p1"),)


def test_a_new_ledger_does_a_step_anew_whose_result_is_lost_from_what_a_node_holds():
    """The node of the root and of the ledger died: who had passed the step does not give again."""
    old = Stage()
    formed = old.form()
    give_large(old, formed, (0, 1), op="reduce", root=0)
    course = old.heard(m.Course)[0]
    stage = Stage(me=OTHER)
    stage.desk.dead_nodes[ME] = None
    stage.join(1, seating=formed.seating, next_step=5)
    held = m.HeldStep(step(0), (), (), (), headers=course.headers, gifts=((1, b"gift1.0", b""),))
    stage.tell(m.Held(formed.seating.group, (held,)), OTHER)
    stage.join(0, address="q0", node=OTHER, seating=formed.seating)
    stage.give(formed, 0, 0, LARGE, oid=b"again0.0", op="reduce", root=0, address="q0")
    again = stage.heard(m.Course, OTHER)[0]
    assert [rank for post in again.posts for rank, _ in post.gives] == [1, 0]
    assert result_of(again, OTHER).takers == ((0, "q0"),)
    done(stage, again, OTHER)
    assert not stage.heard(m.StepFailed)


def test_a_new_ledger_gives_once_more_what_was_sent_to_a_member_whose_node_died():
    formed = Stage().form()
    stage = Stage(me=OTHER)
    stage.desk.dead_nodes[ME] = None
    stage.join(1, seating=formed.seating, next_step=5)
    headers = ((1, header_of(LARGE, "send")[0]),)
    held = m.HeldStep((1, 0, 0), (), (), (), headers=headers, gifts=((1, b"sent", b""),))
    stage.tell(m.Held(formed.seating.group, (held,)), OTHER)
    stage.join(0, address="q0", node=OTHER, seating=formed.seating)
    stage.give(formed, 0, (1, 0, 0), None, op="recv", address="q0")
    course = stage.heard(m.Course, OTHER)[0]
    assert result_of(course, OTHER).takers == ((0, "q0"),)


def test_large_results_go_when_members_that_never_repeat_have_read_them():
    stage = Stage()
    formed = stage.form(restorable=False)
    group = formed.seating.group
    give_large(stage, formed, (0, 1))
    done(stage, stage.heard(m.Course, ME)[0], ME, OTHER)
    stage.tell(m.StepsPassed(group, 0, 1), "p0")
    assert not stage.heard(m.StepsForgotten)
    stage.tell(m.StepsPassed(group, 1, 1), "p1")
    assert stage.heard(m.StepsForgotten, OTHER)[0].number == 1
    pair = (0, 1, 0)
    stage.give(formed, 0, pair, LARGE, oid=b"sent", op="send")
    stage.give(formed, 1, pair, op="recv")
    course = stage.heard(m.Course, ME)[-1]
    stage.tell(m.StepsPassed(group, 1, 1, pair), "p1")
    assert not stage.heard(m.StepsForgotten, ME)[1:]
    done(stage, course, OTHER)
    assert stage.heard(m.StepsForgotten, OTHER)[0].steps == (pair,)
