"""One member of a group without a cluster: what it says of results that it has read, and of a seat that is lost."""
from __future__ import annotations

import pickle

import numpy as np
import pytest

from flowengine.collectives import group as groups
from flowengine.core import messages as m
from flowengine.errors import BadValue, MemberLost

SEATING = m.Seating(b"G", 1, (0, 1), (0,), ("n1", "n1"))
ONES = np.ones(4)


class Members:
    """Both the session and its shell of groups: every step is answered at once with what was given to it."""

    def __init__(self):
        self.membership = self
        self.answers = [m.GroupFormed("g", 0, 2, SEATING, 0)]
        self.machine = self
        self.seats = {}
        self.reads = []
        self.later = []
        self.blob = b""

    def home(self):
        return b""

    def sit(self, group):
        group.seat = 1

    def seated(self, group):
        outcome = self.answers.pop(0)
        if isinstance(outcome, m.GroupFormed):
            group.formed(outcome)
            self.seats[1] = self
            self.formed = True
        return outcome

    def give(self, group, step, call):
        self.blob = call.given.blob()
        return m.StepDone(SEATING.group, step, oid=b"large", nodes=("n1",))

    def wait_for(self, group, given):
        return given

    def promise(self, group, given, value_of):
        self.later.append(lambda: value_of(given))

    def buffer_of(self, done):
        return memoryview(bytearray(self.blob))

    def read(self, group, number, pair):
        self.reads.append((number, pair))


@pytest.fixture
def members(monkeypatch):
    made = Members()
    monkeypatch.setattr(groups, "current_session", lambda: made)
    return made


def member(restorable=False):
    group = groups.Group(2, 0)
    group.name, group.restorable = "g", restorable
    return group


def test_who_never_repeats_says_what_it_has_read(members):
    group = member()
    np.testing.assert_array_equal(group.allreduce(ONES), ONES)
    group.allreduce(ONES, wait=False)
    group.allreduce(ONES)
    members.later.pop()()
    assert members.reads == [(1, None), (1, None), (3, None)]
    group.send(ONES, 1)
    assert members.reads[-1] == (3, (0, 1, 0))


def test_who_may_repeat_says_nothing_of_it(members):
    member(restorable=True).allreduce(ONES)
    assert members.reads == []


def test_a_lost_seat_keeps_its_reason(members):
    members.answers = [m.JoinRefused("g", b"", "lost", "group 'g' is over: rank 0 came back too late")]
    group = member()
    for _ in range(2):
        with pytest.raises(MemberLost, match="came back too late"):
            group.barrier()


def test_who_is_behind_the_others_does_no_later_step_with_them(members):
    group = member(restorable=True)
    group.allreduce(ONES)
    members.give = lambda group, step, call: m.StepFailed(SEATING.group, step, "behind", "its result is gone")
    members.left = []
    members.leave = members.left.append
    for _ in range(2):
        with pytest.raises(MemberLost, match="its result is gone"):
            group.allreduce(ONES)
    assert members.left == [1]
    group.timeout_s, group.on_failure = 1.0, "recover"
    again = pickle.loads(pickle.dumps(group))
    assert (again.next_step, again.refusal) == (2, group.refusal)


def test_a_group_that_is_formed_anew_is_to_fold_as_the_former_did(members):
    """Also from a checkpoint, and when its member joins once more in a run of the same code."""
    group = member(restorable=True)
    group.timeout_s, group.on_failure = 1.0, "recover"
    group.allreduce(ONES)
    assert group.former == (SEATING.order, SEATING.starts)
    assert pickle.loads(pickle.dumps(group)).former == group.former


def test_who_has_left_stays_away_when_it_is_restored(members):
    group = member(restorable=True)
    group.timeout_s, group.on_failure = 1.0, "recover"
    group.allreduce(ONES)
    members.leave = lambda seat: None
    group.leave()
    with pytest.raises(BadValue, match="has left it"):
        pickle.loads(pickle.dumps(group)).allreduce(ONES)
