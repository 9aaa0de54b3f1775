"""Gangs and placement groups of whole engines: all or nothing, under contention and under harm."""

from __future__ import annotations

import threading
import time

import pytest

import flowengine as flow
from tests.cluster.kit import all_free, meet, members, two_workers, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def engine():
    yield from two_workers()


@flow.remote
def rank():
    return flow.context().gang_rank


@flow.remote
def wait_and_rank(seconds):
    time.sleep(seconds)
    return flow.context().gang_rank


@flow.remote
class Member:
    def rank(self):
        return flow.context().gang_rank


# --- gangs ----------------------------------------------------------------------------------------


def test_gangs_do_not_lock_each_other_out_beside_a_flood_of_single_tasks(engine):
    single = [wait_and_rank.remote(0.02) for _ in range(200)]
    gangs = [members(flow.scheduling.gang([{"CPU": 1}] * 2), meet, f"flood {k}", 2) for k in range(4)]
    assert [flow.get(refs, timeout=60) for refs in gangs] == [[0, 1]] * 4
    assert flow.get(single, timeout=60) == [None] * 200
    until(all_free)


def test_a_gang_is_reserved_with_its_members_and_again_with_the_next(engine):
    gang = flow.scheduling.gang([{"CPU": 1}, {"CPU": 1}])
    assert len(gang) == 2
    assert "not reserved" in repr(gang)
    for _ in range(3):
        assert flow.get(members(gang, rank), timeout=20) == [0, 1]
    until(lambda: "not reserved" in repr(gang))
    until(all_free)


def test_a_bundle_runs_one_member_at_a_time(engine):
    gang = flow.scheduling.gang([{"CPU": 2}])
    spans = flow.get([span.options(placement=gang[0]).remote() for _ in range(3)], timeout=20)
    assert all(first[1] <= second[0] for first, second in zip(sorted(spans), sorted(spans)[1:], strict=False))


@flow.remote
def span():
    began = time.monotonic()
    time.sleep(0.05)
    return began, time.monotonic()


def test_actors_are_members_too(engine):
    gang = flow.scheduling.gang([{"CPU": 1}] * 2)
    actors = [Member.options(placement=place).remote() for place in gang]
    assert flow.get([actor.rank.remote() for actor in actors], timeout=20) == [0, 1]
    assert flow.available_resources()["CPU"] == 0
    del actors
    until(all_free)


def test_children_of_a_member_run_outside_of_its_bundle_unless_they_ask_for_it(engine):
    @flow.remote
    def parent(gang):
        return flow.get([rank.remote(), *members(gang, rank)])  # the first of these in its own bundle, which it lends

    gang = flow.scheduling.gang([{"CPU": 1}] * 2)
    assert flow.get(parent.options(placement=gang[0]).remote(gang), timeout=30) == [None, 0, 1]


def test_actors_that_a_task_makes_are_members(engine):
    @flow.remote(num_cpus=0)
    def maker(gang):
        actors = [Member.options(placement=place).remote() for place in gang]
        return flow.get([actor.rank.remote() for actor in actors])

    assert flow.get(maker.remote(flow.scheduling.gang([{"CPU": 1}] * 2)), timeout=20) == [0, 1]
    until(all_free)


def test_what_a_member_waits_for_may_run_first(engine):
    gang = flow.scheduling.gang([{"CPU": 1}] * 2)
    first = meet.options(placement=gang[0]).remote("late", 2)

    @flow.remote
    def late(value):
        group = flow.collectives.join("late", 2, flow.context().gang_rank)
        group.barrier()
        return value

    second = late.options(placement=gang[1]).remote(wait_and_rank.remote(0.1))
    assert flow.get([first, second], timeout=40) == [0, None]


def test_a_member_that_is_cancelled_leaves_nothing_behind(engine):
    gang = flow.scheduling.gang([{"CPU": 2}, {"CPU": 1}])  # more than there is
    waiting = members(gang, rank)
    until(lambda: "needs CPU: 3 and all nodes have 2" in repr(waiting[0]))
    for ref in waiting:
        flow.cancel(ref)
    with pytest.raises(flow.TaskCancelled):
        flow.get(waiting[0], timeout=20)
    until(lambda: "not reserved" in repr(gang))


def test_a_member_whose_worker_dies_runs_again_in_its_bundle(engine):
    gang = flow.scheduling.gang([{"CPU": 1}] * 2)
    refs = members(gang, wait_and_rank, 0.5)
    until(lambda: kills(refs[1]))
    assert flow.get(refs, timeout=30) == [0, 1]


def test_an_actor_that_dies_comes_back_in_its_bundle(engine):
    gang = flow.scheduling.gang([{"CPU": 1}] * 2)
    actors = [Member.options(placement=place).remote() for place in gang]
    assert flow.get([actor.rank.remote() for actor in actors], timeout=20) == [0, 1]
    flow.chaos.kill_worker(of=actors[1])
    assert flow.get([actor.rank.remote() for actor in actors], timeout=20) == [0, 1]
    flow.kill(actors[0])
    assert flow.get(actors[1].rank.remote(), timeout=20) == 1
    del actors
    until(all_free)


def kills(ref):
    try:
        return flow.chaos.kill_worker(of=ref)
    except ValueError:
        return None  # it does not run yet


def test_the_head_may_die_while_a_gang_is_reserved_and_while_it_waits(engine):
    first = flow.scheduling.gang([{"CPU": 1}] * 2)
    running = members(first, wait_and_rank, 1.0)
    until(lambda: "bundles 0 on" in repr(first))
    waiting = members(flow.scheduling.gang([{"CPU": 1}] * 2), meet, "after the head", 2)
    flow.chaos.kill_head()
    assert flow.get(running, timeout=30) == [0, 1]
    assert flow.get(waiting, timeout=60) == [0, 1]
    with flow.placement_group([{"CPU": 1}]) as group:
        assert group.wait(30)
        flow.chaos.kill_head()
        assert flow.get(rank.options(placement=group[0]).remote(), timeout=30) == 0
    until(all_free)


# --- placement groups -----------------------------------------------------------------------------


def test_a_group_is_there_until_it_is_removed(engine):
    with flow.placement_group([{"CPU": 1}, {"CPU": 1}]) as group:
        assert group.wait(20)
        assert flow.get(group.ready(), timeout=20) is True
        assert flow.available_resources()["CPU"] == 0
        assert group.bundles == [{"CPU": 1.0}, {"CPU": 1.0}]
        node = flow.nodes()[0].node_id
        assert f"0 on {node}, 1 on {node}" in repr(group)
        assert flow.get(members(group, rank), timeout=20) == [0, 1]
    until(all_free)
    assert "removed" in repr(group)
    with pytest.raises(flow.TaskCancelled, match="was removed"):
        group.wait(20)


def test_when_a_group_is_removed_its_members_end_with_the_reason(engine):
    group = flow.placement_group([{"CPU": 1}])
    place = group[0]
    running, waiting = (wait_and_rank.options(placement=place).remote(60) for _ in range(2))
    actor = Member.options(placement=place).remote()
    assert flow.get(actor.rank.remote(), timeout=20) == 0
    until(lambda: "sent" in repr(running))
    group.remove()
    for ref in (running, waiting):
        with pytest.raises(flow.TaskCancelled, match=r"placement group .* was removed"):
            flow.get(ref, timeout=30)
    until(lambda: "was removed" in death_of(actor))  # a call that comes before the end of its process is done
    with pytest.raises(flow.TaskCancelled, match="removed"):
        group.wait(20)
    until(all_free)


def death_of(actor):
    try:
        flow.get(actor.rank.remote(), timeout=20)
    except flow.ActorDied as error:
        return str(error)
    return ""


def test_a_group_that_does_not_fit_says_why(engine):
    with flow.placement_group([{"CPU": 2}, {"CPU": 1}]) as group:
        assert group.wait(0.2) is False
        assert "needs CPU: 3 and all nodes have 2" in repr(group)
    with flow.placement_group([{"CPU": 1}] * 2, "STRICT_SPREAD") as group:
        assert group.wait(0.2) is False
        assert "STRICT_SPREAD" in repr(group)


def test_a_group_can_be_passed_on(engine):
    @flow.remote(num_cpus=0)
    def user(group):
        return flow.get(members(group, rank))

    with flow.placement_group([{"CPU": 1}] * 2) as group:
        assert flow.get(user.remote(group), timeout=20) == [0, 1]


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bundles", "strategy", "kind", "words"), [
    ([], "PACK", ValueError, "1 to"),
    ({"CPU": 1}, "PACK", TypeError, "list of dicts"),
    ([1], "PACK", TypeError, "bundle 0 must be a dict"),
    ([{}], "PACK", ValueError, "bundle 0 must have an amount above 0"),
    ([{"CPU": 0}], "PACK", ValueError, "above 0"),
    ([{"CPU": -1}], "PACK", ValueError, "bundle 0"),
    ([{"CPU": "many"}], "PACK", TypeError, "bundle 0"),
    ([{"CPU": float("nan")}], "PACK", ValueError, "finite"),
    ([{"num_cpus": 1}], "PACK", ValueError, "'CPU'"),
    ([{"GPU": 1.5}], "PACK", ValueError, "part of one GPU"),
    ([{"a@b": 1}], "PACK", ValueError, "without '@'"),
    ([{"CPU": 1}], "TIGHT", ValueError, "STRICT_PACK"),
])  # fmt: skip
def test_bad_bundles_are_refused_at_once(engine, bundles, strategy, kind, words):
    for make in (flow.scheduling.gang, flow.placement_group):
        with pytest.raises(kind, match=words):
            make(bundles, strategy)


def test_bad_members_are_refused_at_once(engine):
    gang = flow.scheduling.gang([{"CPU": 1}, {"GPU": 1}])
    for index in (-1, 2):
        with pytest.raises(ValueError, match="bundles 0 to 1") as caught:
            gang[index]
        assert isinstance(caught.value, IndexError)
    with pytest.raises(TypeError):
        gang["0"]
    with pytest.raises(TypeError, match="placement"):
        rank.options(placement=gang)
    with pytest.raises(ValueError, match=r"needs CPU: 2, and bundle 0 .* has CPU: 1"):
        rank.options(placement=gang[0], num_cpus=2).remote()
    with pytest.raises(ValueError, match=r"needs CPU: 1, and bundle 1 .* has CPU: 0"):
        rank.options(placement=gang[1]).remote()


def test_threads_may_submit_members_at_the_same_time(engine):
    gangs = [flow.scheduling.gang([{"CPU": 1}] * 2) for _ in range(4)]
    got: list[list[int]] = []

    def use(gang):
        got.append(flow.get(members(gang, rank), timeout=60))

    threads = [threading.Thread(target=use, args=(gang,)) for gang in gangs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [[0, 1]] * 4
