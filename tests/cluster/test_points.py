"""A process is killed at each named point, and two at each pair of them: the counter stays exact."""

from __future__ import annotations

import signal
import time

import pytest

import flowengine as flow
from experiments.kill_points.scenes import CALLS, PLACES, play, wrong
from flowengine.chaos.inject import POINTS
from tests.cluster.kit import two_workers, until

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


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGINT, signal.SIGTERM])
def test_a_worker_that_a_signal_does_not_end_is_killed(number, tmp_path):
    @flow.remote(max_retries=0)
    def wait():
        (tmp_path / "began").touch()
        while True:
            time.sleep(0.01)

    ref = wait.remote()
    until((tmp_path / "began").exists)
    flow.chaos.kill_worker(of=ref, signal=number)
    with pytest.raises(flow.WorkerCrashed, match="SIGSEGV" if number == signal.SIGSEGV else "SIGKILL"):
        flow.get(ref, timeout=20)


def test_harm_that_cannot_be_done_is_refused_at_the_call():
    chaos = flow.chaos
    for number in (signal.SIGCONT, signal.SIGSTOP, signal.SIGCHLD, 0, -1, 65):
        with pytest.raises(flow.BadValue, match="signal"):
            chaos.kill_worker(of="any", signal=number)
    for harm in (chaos.kill_worker, chaos.freeze, chaos.thaw):
        with pytest.raises(flow.BadType, match="an actor or a worker_id, not 7"):
            harm(7)
        with pytest.raises(flow.BadValue, match="no worker 'w7' now"):
            harm("w7")
    for harm in (chaos.kill_node, chaos.cut, chaos.heal):
        for wrong_id in (7, [], flow.nodes()[0]):
            with pytest.raises(flow.BadType, match="node_id must be the id of a node"):
                harm(wrong_id)
    with pytest.raises(flow.BadValue, match="lose_every_s must be"), chaos.plan(7, 1, 0):
        raise AssertionError("it began")
