"""What is easily left behind in groups: results under old ranks, gifts that nobody counts, steps without a ledger."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowengine.collectives.posts_kept import LEFT_S
from flowengine.collectives.seats import LedgerFound, SeatAsked, Seats, StepAsked, Tell
from flowengine.config import Config
from flowengine.core import messages as m
from flowengine.core.collective import (
    BlobsReady,
    GroupFormed,
    GroupJoined,
    Header,
    HeldAsked,
    JoinRefused,
    Seating,
    StepDone,
    StepEnded,
    StepFailed,
    StepGiven,
    StepsForgotten,
)
from flowengine.core.commands import Send
from flowengine.core.node import Node, NodeSettings

from .ledger_stage import Stage

JOINED = GroupJoined("g", 3, 1, b"key", "node", "host", 7, 30.0, "shrink", False)
FORMED = GroupFormed("g", 1, 3, Seating(b"G", 1, (0, 1, 2), (0,), ("node",) * 3, (b"a", b"key", b"c")), 0)
FEWER = GroupFormed("g", 0, 2, Seating(b"G", 2, (0, 1), (0,), ("node",) * 2, (b"key", b"c")), 0)
STEP = (-1, -1, 0)
GIVEN = StepGiven(b"G", STEP, 1, Header("barrier"), b"", b"gift", 1)
LEDGER = "tcp://ledger#1"


def seated(*events: Any) -> tuple[Seats, list[Any]]:
    machine, out = Seats("me", "node", Config()), []
    for event in (SeatAsked(1, 5, JOINED), LedgerFound("g", LEDGER), FORMED, *events):
        out = machine.handle(event, 0.0)
    return machine, out


def test_a_result_may_name_the_rank_of_before_a_member_was_lost():
    done = StepDone(b"G", STEP, empty=True, rank=1)
    assert Tell(6, done) in seated(StepAsked(1, 6, GIVEN), FEWER, done)[1]


def test_what_was_given_to_a_lost_step_is_let_go():
    failed = StepFailed(b"G", STEP, "lost", "why", 1)
    assert Send("node", StepEnded(b"", (b"gift",))) in seated(StepAsked(1, 6, GIVEN), failed)[1]


def test_after_a_refusal_by_a_new_ledger_all_that_is_given_fails_for_its_reason():
    out = seated(JoinRefused("g", b"key", "lost", "it is over"), StepAsked(1, 6, GIVEN))[1]
    assert Tell(6, StepFailed(b"G", STEP, "lost", "it is over")) in out
    assert Send("node", StepEnded(b"", (b"gift",))) in out


def node() -> Node:
    settings = NodeSettings("me", "n0", "host", (("CPU", 1.0),), 0, "/shm", 1 << 20, "session", "head")
    made = Node(settings, Config())
    made.start(0.0)
    made.handle(BlobsReady(b"op", b"G", STEP, ((-1, b"blob"),), ()), 0.0, LEDGER)
    return made


def test_results_of_a_group_without_a_ledger_go_after_a_while():
    machine = node()
    machine.handle(m.NodesChanged((), (LEDGER,)), 1.0)
    machine.posts.end_left(LEFT_S)
    assert not machine.desk.out.take()
    machine.posts.end_left(LEFT_S + 2.0)
    assert Send("me", StepsForgotten(b"G", -1)) in machine.desk.out.take()


def test_a_new_ledger_keeps_them():
    machine = node()
    machine.handle(m.NodesChanged((), (LEDGER,)), 1.0)
    machine.handle(HeldAsked(b"G"), 2.0, "tcp://other#1")
    machine.posts.end_left(LEFT_S + 10.0)
    assert Send("me", StepsForgotten(b"G", -1)) not in machine.desk.out.take()


def test_of_two_lives_of_a_member_the_one_that_is_not_lost_has_the_seat():
    stage = Stage()
    formed = stage.form()
    stage.join(1, address="next life")
    assert not stage.heard(m.GroupFormed, "next life")
    stage.give(formed, 1, 0, op="barrier")  # said before it died
    stage.lose("p1")
    assert stage.heard(m.GroupFormed, "next life")[-1].rank == 1
    stage.join(1)  # and this too, heard late
    stage.lose("p1")
    stage.give(formed, 1, 1, op="barrier", address="next life")
    assert not stage.heard(m.StepFailed)


def test_the_next_life_does_not_wait_for_ever():
    stage = Stage()
    stage.form()
    stage.join(1, address="next life")
    stage.sleep(stage.desk.config.link_lost_after_s + 0.1)
    assert stage.heard(m.GroupFormed, "next life")


def test_a_next_life_that_says_so_has_the_seat_at_once_and_steps_go_on_without_its_former_node():
    stage = Stage()
    formed = stage.form(life=1)
    header = Header("allreduce", "sum", -1, "'*'", (m.ArrayPart("<f8", (8,), 0),), 64)
    for rank, oid in ((0, b"first"), (1, b"second")):
        stage.tell(StepGiven(formed.seating.group, STEP, rank, header, b"", oid, 1), f"p{rank}")
    assert {post.node for post in stage.heard(m.Course)[-1].posts} == {"n1", "n2"}
    stage.join(1, address="next life", node="n1", life=2)  # nobody has said yet that p1 or n2 are gone
    assert stage.heard(m.GroupFormed, "next life")[-1].rank == 1
    assert stage.heard(StepsForgotten, "n2")[-1].number == -1
    asked = stage.heard(m.FinalsAsked, "n1")[-1]
    stage.tell(m.Finals(asked.op, asked.epoch, ()), "n1")
    stage.tell(StepGiven(formed.seating.group, STEP, 1, header, b"", b"third", 0), "next life")
    again = stage.heard(m.Course)[-1]
    assert {(post.node, oid) for post in again.posts for _, oid in post.gives} == {("n1", b"first"), ("n1", b"third")}


def test_the_former_node_of_a_next_life_stays_while_others_sit_there():
    stage = Stage()
    stage.form(4, life=1)  # p1 and p3 on n2
    stage.join(1, 4, address="next life", node="n1", life=2)
    assert stage.heard(m.GroupFormed, "next life")[-1].rank == 1
    assert not stage.heard(StepsForgotten)


def test_a_new_ledger_gives_a_seat_to_none_but_its_member():
    formed = Stage().form()
    stage = Stage()
    stage.join(0, seating=formed.seating)
    stage.tell(m.Held(formed.seating.group, ()), "n1")
    stage.tell(m.Held(formed.seating.group, ()), "n2")
    stage.heard(m.GroupFormed)
    stage.join(1, key=b"another", address="q1")
    assert not stage.heard(m.GroupFormed, "q1")
    stage.join(1)
    assert stage.heard(m.GroupFormed, "p1")[-1].seating.group == formed.seating.group


def test_who_comes_again_to_a_step_that_others_have_passed_and_nobody_holds_is_behind():
    formed = Stage().form()
    stage = Stage()
    stage.join(0, seating=formed.seating, next_step=5)
    stage.join(1, seating=formed.seating, next_step=3)
    for node in ("n1", "n2"):
        stage.tell(m.Held(formed.seating.group, ()), node)
    stage.give(formed, 1, 3, np.ones(2))
    stage.sleep(1.5)  # a node may tell yet
    assert not stage.heard(m.StepFailed)
    stage.sleep(1.0)
    [failed] = stage.heard(m.StepFailed, "p1")
    assert failed.kind == "behind"
    assert "the result of step 3 of group 'g' is gone" in failed.reason
    stage.give(formed, 0, 5, np.ones(2))
    stage.tell(m.GroupLeft(formed.seating.group, 1), "p1")
    [failed] = stage.heard(m.StepFailed, "p0")
    assert failed.reason.endswith("has left it (host host-n2, pid 101): the result of step 3 of group 'g' is gone: "
                                  "the nodes that had it took it along")


def test_several_that_are_lost_at_once_fail_no_step_of_those_who_go_on_without_them():
    stage = Stage()
    formed = stage.form(4, on_failure="shrink")
    for rank in (0, 2):
        stage.give(formed, rank, 0, np.ones(2))
    stage.lose_node("n2")
    assert not stage.heard(m.StepFailed)
    assert [told.size for told in stage.heard(m.GroupFormed, "p2")][-1] == 2


def test_several_that_a_new_ledger_never_hears_of_fail_none_either():
    formed = Stage().form(4, on_failure="shrink")
    stage = Stage()
    for rank in (0, 2):
        stage.join(rank, 4, seating=formed.seating, on_failure="shrink")
    for node in ("n1", "n2"):
        stage.tell(m.Held(formed.seating.group, ()), node)
    for rank in (0, 2):
        stage.give(formed, rank, 0, np.ones(2))
    stage.sleep(5.0)
    assert not stage.heard(m.StepFailed)
    assert [told.size for told in stage.heard(m.GroupFormed, "p2")][-1] == 2


def adopted(on_failure: str, *dead: str) -> Stage:
    """A new ledger on n1, found by ranks 0 and 2 of four, that has to do with ranks 1 and 3 of n2."""
    formed = Stage().form(4, on_failure=on_failure)
    stage = Stage()
    stage.desk.dead_nodes.update(dict.fromkeys(dead))
    for rank in (0, 2):
        stage.join(rank, 4, seating=formed.seating, on_failure=on_failure)
        stage.give(formed, rank, 0, np.ones(2))
    for node in [node for node in ("n1", "n2") if node not in dead]:
        stage.tell(m.Held(formed.seating.group, ()), node)
    return stage


@pytest.mark.parametrize("known", [True, False])
def test_nobody_waits_for_members_whose_node_is_dead_when_the_ledger_is_a_new_one(known):
    stage = adopted("shrink", *("n2",) * known)
    if not known:
        stage.lose_node("n2")
    assert [told.size for told in stage.heard(m.GroupFormed, "p2")][-1] == 2
    assert dict(stage.heard(m.BlobsReady, "n1")[-1].results)[-1] == (2 * np.ones(2)).tobytes()
    stage = adopted("raise", *("n2",) * known)
    if not known:
        stage.lose_node("n2")
    [failed] = stage.heard(m.StepFailed, "p0")
    assert failed.reason.endswith("was lost with the node that kept the group's ledger: its node was lost")
    stage = adopted("recover", *("n2",) * known)
    if not known:
        stage.lose_node("n2")
    assert not stage.heard(m.StepFailed)  # they may come again


def test_a_gift_that_did_not_arrive_is_taken_from_the_next_life():
    stage = Stage()
    formed = stage.form()
    header = Header("allreduce", "sum", -1, "'*'", (m.ArrayPart("<f8", (8,), 0),), 64)
    for rank, oid in ((0, b"first"), (1, b"second")):
        stage.tell(StepGiven(formed.seating.group, STEP, rank, header, b"", oid, 1), f"p{rank}")
    course = stage.heard(m.Course)[-1]
    stage.lose("p1")
    stage.join(1, address="next life", node="n1")
    stage.tell(StepGiven(formed.seating.group, STEP, 1, header, b"", b"third", 0), "next life")
    stage.tell(m.CourseBroken(course.op, course.epoch, "gift", "", "it is not here", b"second"), "n2")
    for node in dict.fromkeys(at for at, told in stage.said if isinstance(told, m.FinalsAsked)):
        asked = stage.heard(m.FinalsAsked, node)[-1]
        stage.tell(m.Finals(asked.op, asked.epoch, ()), node)
    again = stage.heard(m.Course)[-1]
    assert sorted(oid for post in again.posts for _, oid in post.gives) == [b"first", b"third"]
