"""Policies on two nodes of this host: where tasks and actors run, also when nodes join or die; shares; GPUs."""
from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter

import numpy as np
import pytest

import flowengine as flow
from flowengine.scheduling import Policy, affinity, anti_affinity, fair_share, node, pack, soft, spread
from tests.cluster.host_kit import on, wait_for
from tests.cluster.kit import overlap

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


@flow.remote
def where(wait_s=0.0):
    time.sleep(wait_s)
    return flow.context().node_id


@flow.remote(num_cpus=0)
def span(wait_s):
    began = time.monotonic()
    time.sleep(wait_s)
    return flow.context().node_id, began, time.monotonic()


@flow.remote
def large(number, size=1 << 18):
    return np.full(size, number)


@flow.remote
class Actor:
    def where(self):
        return flow.context().node_id

    def pid(self):
        return os.getpid()


def ids():
    return [entry.node_id for entry in flow.nodes()]


def got(refs):
    return flow.get(refs, timeout=60)


# --- spread and pack ----------------------------------------------------------------------------------


def test_spread_is_even_at_once_and_over_time(cluster):
    assert set(Counter(got([where.options(placement=spread()).remote(0.05) for _ in range(8)])).values()) == {4}
    spreading = where.options(placement=spread())
    assert set(Counter([got(spreading.remote()) for _ in range(6)]).values()) == {3}


def test_actors_are_spread_and_those_that_are_gone_make_room(cluster):
    actors = [Actor.options(placement=spread()).remote() for _ in range(4)]
    places = got([actor.where.remote() for actor in actors])
    assert set(Counter(places).values()) == {2}
    for actor, place in zip(actors, places, strict=True):
        if place == places[0]:
            flow.kill(actor)
    again = [Actor.options(placement=spread()).remote() for _ in range(2)]
    assert got([actor.where.remote() for actor in again]) == [places[0]] * 2


def test_pack_fills_one_node_before_the_next(cluster):
    actors = [Actor.options(placement=pack()).remote() for _ in range(3)]
    assert len(set(got([actor.where.remote() for actor in actors]))) == 1
    packing = where.options(placement=pack())
    assert len(set(got([packing.remote(0.3) for _ in range(2)]))) == 2  # each node has one CPU
    assert len({got(packing.remote()) for _ in range(3)}) == 1


def test_policies_work_inside_of_tasks_and_with_closures(cluster):
    there = on(flow.nodes()[1], large).remote(1)

    @flow.remote(num_cpus=0)
    def nested():
        beside = where.options(placement=affinity(there), num_cpus=0).remote()
        return flow.get([*[where.options(placement=spread(), num_cpus=0).remote() for _ in range(4)], beside])

    *places, beside = got(nested.remote())
    assert set(Counter(places).values()) == {2}
    assert beside == flow.nodes()[1].node_id


def test_nodes_that_join_take_part_and_what_dies_with_a_node_goes_elsewhere(own):
    with flow.init(address=own.file):
        wait_for(lambda: len(flow.nodes()) == 2)
        spreading = Actor.options(placement=spread())
        actors = [spreading.remote() for _ in range(4)]
        got([actor.where.remote() for actor in actors])
        own.nodes.append(own.start_node("three", "--num-workers", 1, "--resources", '{"three": 1}'))
        wait_for(lambda: len(flow.nodes()) == 3)
        (third,) = [entry.node_id for entry in flow.nodes() if "three" in entry.resources]
        more = [spreading.remote() for _ in range(2)]
        assert got([actor.where.remote() for actor in more]) == [third] * 2
        own.nodes[2].end(signal.SIGKILL)
        assert third not in got([actor.where.remote() for actor in (*actors, *more)])
        wait_for(lambda: len(flow.nodes()) == 2)
        assert set(got([where.options(placement=spread()).remote(0.05) for _ in range(4)])) == set(ids())


# --- affinity -----------------------------------------------------------------------------------------


def test_without_a_policy_tasks_run_where_their_large_inputs_are(cluster):
    @flow.remote(num_cpus=0)
    def sized(values):
        return flow.context().node_id, len(values)

    before = flow.stats()["bytes_moved"]
    for name in [*ids(), *ids()]:
        there = large.options(placement=node(name), num_cpus=0).remote(1, 1 << 21)
        assert got(sized.remote(there)) == (name, 1 << 21)
    assert flow.stats()["bytes_moved"] == before


def test_beside_an_object(cluster):
    for name in ids():
        for made in (where, large):
            ref = made.options(placement=node(name)).remote(0)
            beside = where.options(placement=affinity(ref))
            assert got(beside.remote()) == name
            assert got(beside.options(placement=affinity([ref, ref])).remote(0.01)) == name
            actor = Actor.options(placement=affinity(ref)).remote()
            assert got(actor.where.remote()) == name


def test_what_it_is_beside_is_waited_for_and_not_passed(cluster):
    @flow.remote(num_cpus=0)
    def count(*args, **named):
        return len(args), sorted(named), time.monotonic()

    first = on(flow.nodes()[1], span).remote(0.5)
    beside = count.options(placement=affinity(first))
    refs = [beside.remote(), beside.remote(1, x=2), beside.remote(first, flow.put(np.ones(1 << 18)))]
    for answer, wanted in zip(got(refs), [(0, []), (1, ["x"]), (2, [])], strict=True):
        assert answer[:2] == wanted
        assert answer[2] >= got(first)[2]


def test_an_error_of_what_it_is_beside_is_its_own(cluster):
    @flow.remote
    def fails():
        raise KeyError("nothing here")

    with pytest.raises(KeyError, match="nothing here"):
        got(where.options(placement=affinity(fails.remote())).remote())


def test_beside_an_actor_also_when_it_has_come_back(cluster):
    for name in ids():
        actor = Actor.options(placement=node(name)).remote()
        beside = where.options(placement=affinity(actor))
        assert got(beside.remote()) == name
        os.kill(got(actor.pid.remote()), signal.SIGKILL)
        assert got(beside.remote()) == name
        other = Actor.options(placement=affinity(actor)).remote()
        assert got(other.where.remote()) == name


def test_tasks_follow_an_actor_and_an_object_to_another_node(own):
    with flow.init(address=own.file):
        wait_for(lambda: len(flow.nodes()) == 2)
        mine = flow.context().node_id
        index = 0 if "two" in {e.node_id: e for e in flow.nodes()}[mine].resources else 1
        (other,) = [name for name in ids() if name != mine]
        actor = Actor.options(placement=soft([node(other)])).remote()
        ref = large.options(placement=soft([node(other)])).remote(7)
        assert got([where.options(placement=affinity(one)).remote() for one in (actor, ref)]) == [other] * 2
        own.nodes[index].end(signal.SIGKILL)
        places = got([where.options(placement=affinity(one), max_retries=-1).remote() for one in (actor, ref)])
        assert places == [mine] * 2
        assert got(actor.where.remote()) == mine
        assert got(ref)[0] == 7


def test_all_of_a_label_are_on_one_node(cluster):
    refs = [where.options(placement=affinity("team"), num_cpus=0.1).remote(0.02) for _ in range(6)]
    actors = [Actor.options(placement=affinity("team")).remote() for _ in range(2)]
    assert len(set(got([*refs, *[actor.where.remote() for actor in actors]]))) == 1


def test_what_is_to_run_beside_an_actor_that_is_dead_for_good_ends(cluster):
    @flow.remote
    def asks(handle):
        return flow.get(where.options(placement=affinity(handle)).remote(), timeout=20)

    actor = Actor.remote()
    got(actor.where.remote())
    beside = where.options(placement=affinity(actor))
    before = [beside.options(resources={"never": 1}).remote(), asks.remote(actor)]
    got(before[1])
    flow.kill(actor)
    for ref in (before[0], beside.remote(), Actor.options(placement=affinity(actor)).remote().where.remote(),
                asks.remote(actor)):
        with pytest.raises(flow.ActorDied, match="it was killed"):
            got(ref)
    assert got(where.options(placement=soft([affinity(actor)])).remote())


# --- anti-affinity ------------------------------------------------------------------------------------


def test_two_of_a_label_are_never_on_one_node(cluster):
    spans = got([span.options(placement=anti_affinity("apart")).remote(0.1) for _ in range(8)])
    for name in ids():
        assert overlap([(began, ended) for place, began, ended in spans if place == name]) <= 1
    assert {place for place, _, _ in spans} == set(ids())


def test_actors_of_a_label_hold_their_nodes(cluster):
    keeping = Actor.options(placement=anti_affinity("replica"))
    actors = [keeping.remote() for _ in range(2)]
    places = got([actor.where.remote() for actor in actors])
    assert sorted(places) == sorted(ids())
    third = keeping.remote()
    with pytest.raises(flow.GetTimeout, match="anti-affinity replica"):
        flow.get(third.where.remote(), timeout=2)
    os.kill(got(actors[1].pid.remote()), signal.SIGKILL)  # it comes back to its place, not the third
    assert got(actors[1].where.remote()) == places[1]
    flow.kill(actors[0])
    assert got(third.where.remote()) == places[0]


def test_a_few_of_a_label(cluster):
    spans = got([span.options(placement=anti_affinity("few", per_node=2)).remote(0.1) for _ in range(8)])
    for name in ids():
        assert overlap([(began, ended) for place, began, ended in spans if place == name]) <= 2
    with pytest.raises(flow.BadValue, match="anti-affinity few"):
        span.options(placement=anti_affinity("few", per_node=3)).remote(0.1)


# --- composition --------------------------------------------------------------------------------------


def test_soft_holds_over_time(cluster):
    for name in [*ids(), *ids()]:
        assert got(where.options(placement=soft([node(name)])).remote()) == name
    assert got(where.options(placement=soft([node("none")])).remote()) in ids()
    assert got(where.options(placement=soft([Policy(needs=(("not there", 1.0),))])).remote()) in ids()


def test_or_takes_the_first_that_can_be_met_and_and_takes_both(cluster):
    one, two = ids()
    assert got(where.options(placement=node("none") | node(two)).remote()) == two
    assert got(where.options(placement=Policy(needs=(("not there", 1.0),)) | node(one)).remote()) == one
    assert got(where.options(placement=spread() & node(two)).remote()) == two
    with pytest.raises(flow.BadValue, match="no node is allowed"):
        where.options(placement=node(one) & node(two)).remote()
    ref = large.options(placement=node(one)).remote(1)
    assert got(where.options(placement=affinity(ref) & node(one)).remote()) == one
    with pytest.raises(flow.BadValue, match="where its objects are not"):
        got(where.options(placement=affinity(ref) & node(two)).remote())
    assert got(where.options(placement=affinity(ref) & soft([node(two)])).remote()) == one


def test_a_busy_node_is_waited_for_and_then_left(cluster):
    one, two = ids()
    blocks = where.options(placement=node(one)).remote(3.0)
    began = time.monotonic()
    assert got(where.options(placement=node(one) | node(two)).remote()) == two
    assert time.monotonic() - began < 2.5
    got(blocks)


class Alternating(Policy, frozen=True):
    """What a user may write: one node after the other, by the number of the call."""

    names: tuple[str, ...] = ()

    def turn(self, plan):
        TURNS.append(plan.name)
        return node(self.names[len(TURNS) % len(self.names)])

    def submitted(self, session, oid):
        raise AssertionError("the policy of the turn is told, not this one")


TURNS: list[str] = []


def test_an_own_policy(cluster):
    placed = where.options(placement=Alternating(names=tuple(ids())))
    assert set(Counter(got([placed.remote() for _ in range(6)])).values()) == {3}


# --- shares -------------------------------------------------------------------------------------------


class Tenants:
    """Tenants of a program that always have tasks that wait, until they are told to end."""

    def __init__(self):
        self.spans = {}
        self.ended = threading.Event()
        self.threads = []

    def add(self, name, policy, wait_s):
        self.spans[name] = []
        self.threads.append(threading.Thread(target=self.run, args=(name, policy, wait_s)))
        self.threads[-1].start()

    def run(self, name, policy, wait_s):
        asking = span.options(placement=policy, num_cpus=1)
        pending = [asking.remote(wait_s) for _ in range(12)]
        while not self.ended.is_set():
            (ready,), pending = flow.wait(pending)
            self.spans[name].append(flow.get(ready)[1:])
            pending.append(asking.remote(wait_s))
        flow.get(pending)

    def used_s(self, name, since, until):
        return sum(max(0.0, min(ended, until) - max(began, since)) for began, ended in list(self.spans[name]))

    def end(self):
        self.ended.set()
        for thread in self.threads:
            thread.join()


def test_shares_of_two_organisations_are_max_min_when_tenants_come_one_by_one():
    with flow.init(num_workers=2):
        first, second = fair_share("first"), fair_share("second")
        policies = {"A": fair_share("A", 2, first), "B": fair_share("B", 3, first), "C": fair_share("C", parent=second)}
        tenants = Tenants()
        wanted = ({"A": 1.0}, {"A": 0.4, "B": 0.6}, {"A": 0.2, "B": 0.3, "C": 0.5})
        lengths_s = {"A": 0.02, "B": 0.05, "C": 0.03}
        try:
            for shares in wanted:
                name = list(shares)[-1]
                tenants.add(name, policies[name], lengths_s[name])
                wait_for(lambda: all(tenants.spans[one] for one in tenants.spans))
                since = time.monotonic() + 0.3
                wait_for(lambda: time.monotonic() > since + 2.5)  # noqa: B023
                until = time.monotonic() - 0.1
                used = {one: tenants.used_s(one, since, until) for one in shares}
                for one, share in shares.items():
                    assert used[one] / sum(used.values()) == pytest.approx(share, abs=0.03)
                assert sum(used.values()) > 0.5 * 2 * (until - since)  # less than 1 since machines are busy
        finally:
            tenants.end()


# --- GPUs ---------------------------------------------------------------------------------------------


@flow.remote(num_cpus=0, num_gpus=1)
def gpus(wait_s=0.0):
    time.sleep(wait_s)
    return os.environ.get("CUDA_VISIBLE_DEVICES"), flow.context().gpu_ids


@flow.remote(num_gpus=1)
class OnGpu:
    def gpus(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES"), flow.context().gpu_ids

    def pid(self):
        return os.getpid()


def test_gpus_are_numbered_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with flow.init(num_workers=2, resources={"GPU": 2}):
        assert got(gpus.options(num_gpus=0).remote()) == ("", ())
        assert got(gpus.options(num_gpus=2).remote()) == ("0,1", (0, 1))
        actors = [OnGpu.remote() for _ in range(2)]
        assert sorted(got([actor.gpus.remote() for actor in actors])) == [("0", (0,)), ("1", (1,))]
        with pytest.raises(flow.GetTimeout, match="GPU"):
            flow.get(gpus.options(num_gpus=0.5).remote(), timeout=1.5)
        os.kill(got(actors[0].pid.remote()), signal.SIGKILL)
        assert got(actors[0].gpus.remote())[1] in ((0,), (1,))
        del actors
        halves = got([gpus.options(num_gpus=0.5).remote(0.1) for _ in range(6)])
        assert {shown for shown, _ in halves} <= {"0", "1"}


def test_a_bundle_has_gpus_of_its_own(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with flow.init(num_workers=2, resources={"GPU": 2}):
        with flow.placement_group([{"GPU": 1}]) as group:
            assert group.wait(20)
            member = gpus.options(num_gpus=1, num_cpus=0, placement=group[0])
            mine = got(member.remote())
            parts = got([gpus.options(num_gpus=0.5, num_cpus=0).remote(0.1) for _ in range(4)])
            assert dict.fromkeys(parts) == {("0", (0,)) if mine == ("1", (1,)) else ("1", (1,)): None}
            assert got([member.remote() for _ in range(2)]) == [mine] * 2
        assert got(gpus.options(num_gpus=2).remote()) == ("0,1", (0, 1))


def test_gpus_are_those_that_the_node_may_see(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    with flow.init(num_workers=1, resources={"GPU": 2}):
        assert got(gpus.options(num_gpus=2).remote()) == ("3,GPU-5", (3, "GPU-5"))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,GPU-5"
    with pytest.raises(flow.BadValue, match="CUDA_VISIBLE_DEVICES"):
        flow.init(num_workers=1, resources={"GPU": 3})


def test_nothing_is_hidden_on_a_node_without_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with flow.init(num_workers=1, resources={"GPU": 0}):
        assert got(gpus.options(num_gpus=0).remote()) == (None, ())
    with pytest.raises(flow.BadValue, match="whole"):
        flow.init(num_workers=1, resources={"GPU": 0.5})
