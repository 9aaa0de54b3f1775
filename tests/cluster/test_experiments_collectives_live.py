"""The experiments with collectives in their smallest form, among processes of one engine."""
from __future__ import annotations

import pytest

import flowengine as flow
from experiments.collective_applications import program as applications
from experiments.collective_failures import program as failing
from experiments.collective_soak import program as soaking
from experiments.collective_soak import run as soak
from experiments.collectives import trial
from experiments.collectives import with_flowengine as ours
from experiments.reduce_degree import program as degrees
from experiments.testbed import Bed
from tests.cluster.kit import two_workers

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
SIZE = 3


@pytest.fixture(scope="module", autouse=True)
def engine():
    yield from two_workers()


@pytest.mark.parametrize("way", list(ours.WAYS))
def test_every_operation_of_a_trial(way):
    cases = [trial.Case(op, nbytes, 2) for op in trial.OPS for nbytes in (1 << 10, 1 << 17)]
    members = [ours.Member.remote() for _ in range(SIZE)]
    assert [len(times) for times in ours.WAYS[way](cases, members)] == [2] * len(cases)


def test_members_that_come_late_and_one_that_is_killed(tmp_path):
    members = [failing.Member.remote("late", SIZE, rank) for rank in range(SIZE)]
    for op in ("reduce", "allreduce"):
        assert 0 < failing.run_late(failing.Late(op, 1 << 17, 0.01, False), members) < 60
    assert failing.refs_late(failing.Late("reduce", 1 << 17, 0.01, True, True), members) < 60
    members = [failing.Member.remote("killed", SIZE, rank) for rank in range(SIZE)]
    found = failing.run_killed(failing.Killed(1 << 17, 0.0, str(tmp_path), True), members)
    assert found["actor_restarts"] == 1
    assert found["restart_s"] > 0
    assert len(found["hurt_s"]) == failing.STEPS


@pytest.mark.parametrize("each", [degrees.CHOSEN, 2])
def test_a_reduction_of_a_given_degree(each):
    refs = [flow.put(degrees.make(1 << 17, number)) for number in range(SIZE)]
    assert degrees.timed(refs, each, flow.scheduling.node(flow.context().node_id)) > 0


def test_a_group_has_the_same_bits_when_a_member_was_killed():
    group = soak.Group(Bed(1), "f2")
    calm = soaking.Harm((0.0,) * soak.SIZE, soaking.NOBODY, soaking.NOBODY, 0.0)
    digests = [*group.run(calm), *group.run(calm._replace(member=2)), *group.run(calm)]
    assert len(digests) == 3 * soak.SIZE
    assert len({*digests}) == 1
    group.end()


def test_what_is_held_is_counted():
    held = soaking.held()
    assert held.resident > 1 << 20
    assert held.files > 10


def test_applications():
    engine = applications.running([{}] * SIZE)
    cases = [("asynchronous SGD", 1 << 17, 2), ("serving an ensemble", 1 << 20, 2)]
    assert [len(times) for times in applications.measure(engine, SIZE, cases)] == [2, 2]
