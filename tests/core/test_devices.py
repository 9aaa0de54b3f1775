"""GPUs as numbered devices: who gets which, which worker, and what a node tells of the actors that live on it."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowengine as flow
from flowengine.config import Config
from flowengine.core import messages as m
from flowengine.core.bundles import SPLIT, in_bundle
from flowengine.core.node import Node, NodeSettings
from flowengine.core.node_desk import Tick
from flowengine.options import task_options
from flowengine.scheduling.devices import Devices, gpus_in, names_of
from flowengine.scheduling.resources import ACTOR, LIMITLESS, SCALE
from tests.core.test_node import HEAD, ME, Kit, sent


def test_names_are_numbers_or_what_is_visible():
    assert names_of(3, None) == ("0", "1", "2")
    assert names_of(2, " 5, GPU-ab,7") == ("5", "GPU-ab")
    assert names_of(0, "") == names_of(0, "3") == ()
    for count, visible in ((1, ""), (2, "1"), (2, "0,-1,1"), (1.5, None)):
        with pytest.raises(flow.BadValue, match="GPU"):
            names_of(count, visible)


@pytest.mark.parametrize("bad", [1.5, 2.25, -1, "1", float("nan")])
def test_a_part_is_of_one_gpu(bad):
    with pytest.raises((flow.BadValue, flow.BadType), match="num_gpus"):
        task_options({"num_gpus": bad})
    assert task_options({"num_gpus": 0.25}).num_gpus == 0.25
    assert task_options({"num_gpus": 2}).num_gpus == 2


def test_parts_fill_one_gpu_before_the_next():
    devices = Devices(("0", "1"))
    for units, wanted in ((0.5, "0"), (0.6, "1"), (0.5, "0"), (0.4, "1")):
        names = devices.pick(int(units * SCALE))
        assert names == (wanted,)
        devices.take(names, int(units * SCALE))
    assert devices.pick(1) == ()
    devices.give(("0",), SCALE // 2)
    assert devices.pick(SCALE) == ()
    assert not Devices(())


@given(st.lists(st.one_of(st.integers(1, SCALE - 1), st.sampled_from((SCALE, 2 * SCALE))), max_size=20))
def test_no_gpu_is_held_by_more_than_it_has(asked):
    devices, held = Devices(("a", "b", "c")), []
    for index, units in enumerate(asked):
        names = devices.pick(units)
        assert len(set(names)) == len(names) == (max(1, units // SCALE) if names else 0)
        devices.take(names, units)
        held.append((names, units))
        if index % 3 == 2:
            devices.give(*held.pop(0))
        for name in "abc":
            assert sum(min(units, SCALE) for names, units in held if name in names) <= SCALE
    for names, units in held:
        devices.give(names, units)
    assert devices.pick(3 * SCALE) == ("a", "b", "c")


def test_amounts_in_bundles_are_gpus_too():
    assert gpus_in((("CPU", 5), ("GPU@x.1", SCALE), ("memory", 7))) == SCALE


class GpuKit(Kit):
    """A node with two GPUs."""

    def __init__(self) -> None:
        total = (("CPU", 8.0), ("GPU", 2.0))
        self.node = Node(NodeSettings(ME, "n1", "h", total, 3, "/f", 100, "s", HEAD, ("4", "6")), Config())
        self.now = 0.0
        self.first = self.node.start(0.0)
        for number in (1, 2, 3):
            self.started(number)

    def grants(self, total: int, gpus: float) -> list[m.LeaseGranted]:
        shape = (("GPU", gpus),) if gpus else (("CPU", 1.0),)
        return sent(self.demand(f"d{gpus}", total, shape), m.LeaseGranted)


def test_leases_have_their_gpus_and_give_them_back():
    kit = GpuKit()
    one, two = kit.grants(2, 1.0)
    assert (one.devices, two.devices) == (("4",), ("6",))
    assert kit.grants(1, 0.5) == []
    [part] = sent(kit.says(m.LeaseReturned(two.lease), "d1.0"), m.LeaseGranted)
    assert part.devices == ("6",)
    [plain] = kit.grants(1, 0)
    assert plain.devices == ()


def test_a_process_that_has_used_a_gpu_is_not_lent_with_another():
    kit = GpuKit()
    one, two = kit.grants(2, 1.0)
    kit.says(m.LeaseReturned(one.lease), "d1.0")
    kit.says(m.LeaseReturned(two.lease), "d1.0")
    again, other = kit.grants(4, 1.0)
    assert (again.worker, other.worker) == (one.worker, two.worker)
    kit.says(m.LeaseReturned(again.lease), "d1.0")
    [plain] = kit.grants(1, 0)
    assert plain.worker not in (one.worker, two.worker)
    kit.says(m.LeaseReturned(other.lease), "d1.0")
    assert kit.grants(1, 2.0) == []  # a process of its own is started first
    [both] = sent(kit.started(4), m.LeaseGranted)
    assert both.devices == ("4", "6")


def test_parts_that_fit_in_sum_but_in_no_gpu_wait_with_the_reason():
    kit = GpuKit()
    assert len(kit.grants(2, 0.6)) == 2
    assert kit.grants(1, 0.7) == []
    told = sent([*kit.beats(2.0)], m.LeaseDelayed, "d0.7")
    assert "GPU" in told[-1].reason


def test_a_gpu_is_free_when_its_worker_has_died():
    kit = GpuKit()
    [one] = kit.grants(1, 2.0)
    number = int(one.worker[1:])
    kit.ended(number)
    [again] = kit.grants(2, 2.0)
    assert again.devices == ("4", "6")


# --- bundles --------------------------------------------------------------------------------------------


def test_gpus_are_taken_for_all_or_none():
    devices = Devices(("0", "1"))
    assert devices.take_each([SCALE // 2, 0, SCALE, SCALE // 2]) == [("1",), (), ("0",), ("1",)]
    assert devices.take_each([1]) is None
    part = Devices(("0", "1"))
    part.take(("1",), SCALE // 2)
    assert part.take_each([SCALE // 2, SCALE, 1]) is None
    assert part.held() == {"1": SCALE // 2}


class BundleKit(GpuKit):
    """The same, and a head that reserves bundles of GPUs."""

    def asks(self, group: str, *gpus: float, hold_s: float = 0.0) -> list[str]:
        bundles = tuple((index, (("GPU", amount),)) for index, amount in enumerate(gpus))
        told = self.says(m.BundlesAsked(group, 1, bundles, hold_s), HEAD)
        self.says(m.BundlesOpened(group, 1), HEAD)
        return [taken.refused for taken in sent(told, m.BundlesTaken)]

    def member(self, bundle: str, gpus: float) -> list[m.LeaseGranted]:
        return sent(self.demand("d", 1, in_bundle((("GPU", gpus),), bundle)), m.LeaseGranted)


def test_a_bundle_has_gpus_that_nobody_else_gets():
    kit = BundleKit()
    assert kit.asks("group-1", 1.0) == [""]
    part, other = kit.grants(2, 0.5)
    assert (part.devices, other.devices) == (("6",), ("6",))
    [member] = kit.member("group-1.0", 1.0)
    assert member.devices == ("4",)
    assert kit.grants(1, 1.0) == []
    kit.says(m.LeaseReturned(member.lease), "d")
    [whole] = sent(kit.says(m.BundlesDropped("group-1"), HEAD), m.LeaseGranted)
    assert whole.devices == ("4",)


def test_a_bundle_with_a_part_of_a_gpu_gives_parts_of_that_one():
    kit = BundleKit()
    [outside] = kit.grants(1, 0.25)
    assert kit.asks("group-1", 0.5) == [""]
    [first] = kit.member("group-1.0", 0.25)
    assert first.devices == outside.devices
    assert kit.member("group-1.0", 0.5) == []
    [whole] = kit.grants(1, 1.0)
    assert whole.devices != outside.devices


def test_a_bundle_is_not_taken_while_what_is_free_lies_in_parts_of_several_gpus():
    kit = BundleKit()
    leases = [kit.grants(1, 0.6)[0].lease, kit.grants(2, 0.6)[0].lease]  # 0.4 is free of each
    assert kit.asks("group-1", 0.6) == [SPLIT]
    assert kit.asks("group-1", 0.4, 0.4) == [""]
    kit.says(m.BundlesDropped("group-1"), HEAD)
    told = kit.says(m.BundlesAsked("group-1", 1, ((0, (("GPU", 0.7),)),), 9.0), HEAD)
    assert sorted(wanted.lease for wanted in sent(told, m.LeaseWanted)) == sorted(leases)
    assert kit.grants(1, 0.25) == []  # kept for the bundle
    told = kit.says(m.LeaseReturned(leases[1]), "d0.6")
    assert [taken.refused for taken in sent(told, m.BundlesTaken)] == [""]


def test_whole_gpus_are_held_free_for_a_task_that_starves_behind_parts():
    kit = GpuKit()
    parts = [kit.grants(1, 0.6)[0], kit.grants(2, 0.6)[0]]
    kit.demand("whole", 1, (("GPU", 0.7),))
    kit.beats(kit.node.config.starve_s + 0.5)
    assert sent(kit.demand("small", 1, (("GPU", 0.25),)), m.LeaseGranted) == []
    told = kit.says(m.LeaseReturned(parts[0].lease), "d0.6")
    assert [grant.shape for grant in sent(told, m.LeaseGranted, "whole")] == [(("GPU", 0.7),)]


# --- actors -------------------------------------------------------------------------------------------


BESIDE = ((f"{ACTOR}{b'abc'.hex()}", 1.0),)


def test_tasks_beside_an_actor_are_served_where_it_lives_as_long_as_it_does():
    kit = Kit()
    kit.cluster()
    assert sent(kit.demand("d", 1, BESIDE), m.LeaseGranted) == []
    told = kit.says(m.ActorHere(b"abc"), "w1")
    granted = sent(told, m.LeaseGranted, "d")
    assert len(granted) == 1
    reported = [report.dynamic for report in sent(kit.says(Tick("report"), after_s=1.0), m.NodeReport, HEAD)]
    assert any(key == BESIDE[0][0] and total == LIMITLESS for dynamic in reported for key, total, _ in dynamic)
    assert [wanted.lease for wanted in sent(kit.ended(1), m.LeaseWanted, "d")] == [granted[0].lease]
    kit.says(m.LeaseReturned(granted[0].lease), "d")
    assert sent(kit.demand("d", 2, BESIDE), m.LeaseGranted) == []
    assert len(sent(kit.says(m.ActorHere(b"abc"), "w2"), m.LeaseGranted, "d")) == 1


def test_an_actor_that_came_back_on_its_node_before_its_old_process_was_reaped_stays():
    kit = Kit()
    kit.says(m.ActorHere(b"abc"), "w1")
    kit.says(m.ActorHere(b"abc"), "w2")
    kit.ended(1)
    assert len(sent(kit.demand("d", 1, BESIDE), m.LeaseGranted)) == 1
