"""A process is killed at each named point, and two at each pair of them: the counter stays exact."""

from __future__ import annotations

import pytest

import flowengine as flow
from experiments.kill_points.scenes import CALLS, PLACES, play, wrong
from flowengine.chaos.inject import POINTS
from tests.cluster.kit import two_workers

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def engine():
    yield from two_workers()


def test_every_point_is_in_a_scene():
    assert {point for point, _ in PLACES} == set(POINTS)


@pytest.mark.parametrize("number", range(len(PLACES)), ids=[f"{point}-{who}" for point, who in PLACES])
def test_a_death_at_a_point_and_another_at_the_same_or_a_later_one(number):
    first = PLACES[number]
    outcomes = [play([(*first, 1), (*second, 1 + (second == first))]) for second in PLACES[number:]]
    assert [str(outcome) for outcome in outcomes if outcome.faults] == []
    assert all(any(outcome.fired) for outcome in outcomes)


def test_the_judge_sees_what_is_wrong():
    right = [(name, number) for name in ("program", "task", "relay") for number in range(CALLS)] + [("end", 0)]
    seen = [right[:place] for place in range(1, len(right))]
    assert wrong(right, seen) == []
    assert wrong([right[0], *right], seen) != []
    assert wrong(right[1:], []) != []
    assert wrong([right[1], right[0], *right[2:]], []) != []
    assert wrong(right, [[right[1]]]) != []
    assert wrong(right, [right[:3], right[:3]]) != []


def test_an_arm_tells_what_came_of_it():
    @flow.remote
    def work():
        return 1

    with flow.chaos.at("task.before_run", flow.chaos.kill, of=work, nth=2) as arm:
        assert flow.get(work.remote(), timeout=20) == 1
        assert (arm.passages, arm.fired, repr(arm)) == (1, False, "Arm(task.before_run, passed 1 of 2 times)")
    assert repr(arm) == "Arm(task.before_run, disarmed)"
    before = flow.stats()["tasks_retried"]
    assert flow.get([work.remote() for _ in range(5)], timeout=20) == [1] * 5
    assert flow.stats()["tasks_retried"] == before
    arm = flow.chaos.at("task.after_run", flow.chaos.kill, of=work)
    assert flow.get(work.remote(), timeout=20) == 1
    assert arm.fired
    arm.disarm()  # harmless
    assert arm.fired


def test_a_method_of_one_actor_is_armed():
    @flow.remote
    class Two:
        def first(self):
            return 1

        def second(self):
            return 2

    one, other = Two.remote(), Two.remote()
    arm = flow.chaos.at("actor.call.after_run", flow.chaos.kill, of=one.second)
    assert flow.get([one.first.remote(), other.second.remote()], timeout=20) == [1, 2]
    assert not arm.fired
    assert flow.get(one.second.remote(), timeout=20) == 2
    assert arm.fired
