"""An owner and its gangs: when a node hears that one is wanted, and what becomes of members that no node will run."""

from __future__ import annotations

import pytest

from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.bundles import in_bundle
from flowengine.core.ids import child_id, object_id
from flowengine.errors import TaskCancelled
from tests.core.test_owner import ME, NODE, ONE, OTHER, WORKER, Scene

GANG = m.BundleSet("gang-1", (ONE, ONE))


class GangScene(Scene):
    """An owner that knows a gang of two."""

    def __init__(self) -> None:
        super().__init__()
        self.step(m.GangNamed(GANG))

    def member(self, index: int) -> bytes:
        return self.submit(100 + index, shape=in_bundle(ONE, f"gang-1.{index}"))

    def granted(self, index: int, node: str = NODE) -> None:
        self.leases += 1
        shape = in_bundle(ONE, f"gang-1.{index}")
        self.step(m.LeaseGranted(self.leases, shape, (), f"{WORKER}{index}", f"w{index}", "node"), node)

    def ends(self, index: int) -> None:
        task = child_id(b"", 100 + index)
        self.step(m.TaskDone(task, 1, (m.Inline(b"x"),), 10), f"{WORKER}{index}")

    def wanted(self) -> list[bool]:
        return [message.wanted for message in self.of(m.GangWanted)]


def test_a_gang_is_wanted_once_with_its_first_member_and_not_any_more_after_its_last():
    scene = GangScene()
    scene.member(0)
    assert scene.wanted() == [True]
    scene.member(1)
    assert scene.wanted() == []
    scene.granted(0)
    scene.granted(1)
    scene.ends(0)
    scene.step(s.GangLooked("gang-1"))
    assert scene.sent == []  # the other one runs
    scene.ends(1)
    scene.step(s.GangLooked("gang-1"))
    assert scene.wanted() == [False]
    assert len(scene.of(m.LeaseReturned)) == 2
    scene.member(2)
    assert scene.wanted() == [True]


def test_members_that_wait_for_inputs_are_not_ready():
    scene = GangScene()
    first = scene.submit(1)
    scene.submit(2, shape=in_bundle(ONE, "gang-1.0"), deps=(m.RefTo(object_id(first, 0), ME),))
    assert scene.wanted() == []
    scene.lease()
    scene.step(m.TaskDone(first, 1, (m.Inline(b"x"),), 10), WORKER)
    assert scene.wanted() == [True]


def test_another_node_of_this_host_is_told():
    scene = GangScene()
    scene.member(0)
    scene.step(s.NodeMoved(OTHER, "other"))
    assert [to for to, message in scene.sent if isinstance(message, m.GangWanted)] == [OTHER]


def test_what_is_refused_ends_and_what_runs_does_not():
    scene = GangScene()
    scene.member(0)
    scene.granted(0)
    waiting = scene.submit(7, shape=in_bundle(ONE, "gang-1.1"))
    scene.step(m.LeaseRefused(in_bundle(ONE, "gang-1.1"), (), "it was removed"), NODE)
    with pytest.raises(TaskCancelled, match="it was removed"):
        raise scene.error(object_id(waiting, 0))
    assert scene.owner.objects[object_id(child_id(b"", 100), 0)].value is None


def test_an_actor_that_is_refused_ends():
    scene = GangScene()
    actor = scene.submit(7, shape=in_bundle(ONE, "group-1.0"), life=m.ActorLife(), num_returns=1)
    scene.step(m.LeaseRefused(in_bundle(ONE, "group-1.0"), (s.SOLE, "*"), "it was removed"), NODE)
    assert scene.owner.made[actor].state == "dead"


def test_the_driver_hears_of_gangs_whose_actors_it_owns():
    scene = GangScene()
    scene.step(m.GangNamed(m.BundleSet("gang-2", (ONE,)), OTHER))
    assert scene.sent == [(OTHER, m.GangNamed(m.BundleSet("gang-2", (ONE,))))]
    scene.step(m.GangNamed(m.BundleSet("gang-3", (ONE,)), ME))
    assert scene.sent == []


def test_a_node_that_one_is_sent_to_again_is_asked_again():
    scene = GangScene()
    scene.member(0)
    redirected = m.LeaseRedirected(in_bundle(ONE, "gang-1.0"), (), OTHER)
    for _ in range(2):  # it may have been cut off, and have forgotten
        scene.step(redirected, NODE)
        assert [message.wanted_total for to, message in scene.sent if to == OTHER] == [1]
