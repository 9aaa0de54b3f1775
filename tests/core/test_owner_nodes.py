"""An owner and nodes that are declared dead and come back: totals belong to the link, leases to the node's life."""
from __future__ import annotations

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.ids import child_id
from flowengine.core.invariants import check
from flowengine.core.owner import Owner
from flowengine.core.owner_leases import NODES_ASKED_MAX

ME, HOME, FAR = "tcp://127.0.0.1:1#me", "tcp://127.0.0.1:2#home", "tcp://127.0.0.1:3#far"
ONE = (("CPU", 1.0),)
HOME_ENTRY = m.NodeEntry("home", HOME, "127.0.0.1", ONE, ONE)
FAR_ENTRY = m.NodeEntry("far", FAR, "127.0.0.1", ONE, ONE, epoch=2)


class Scene:
    def __init__(self) -> None:
        self.owner = Owner(ME, HOME, "home", Config())
        self.now = 0.0
        self.count = 0

    def step(self, event: m.Message, sender: str = "") -> list[tuple[str, m.Message]]:
        self.now += 0.001
        return [(out.to, out.message) for out in self.owner.handle(event, self.now, sender) if isinstance(out, c.Send)]

    def submit(self, count: int) -> list[tuple[str, m.Message]]:
        sent = []
        for _ in range(count):
            self.count += 1
            sent += self.step(s.Submitted(m.TaskSpec(child_id(b"", self.count), b"f", "f"), b"blob"))
        return sent

    def granted(self, node: str, lease: int) -> list[tuple[str, m.Message]]:
        return self.step(m.LeaseGranted(lease, ONE, (), f"{node}-worker{lease}", f"w{lease}", node), node)

    def demand(self, node: str) -> s.Demand | None:
        return self.owner.queues[ONE, ()].demand.get(node)


def with_leases_of_both() -> Scene:
    scene = Scene()
    scene.submit(6)
    scene.step(m.LeaseRedirected(ONE, (), FAR), HOME)
    scene.granted(HOME, 1)
    scene.granted(FAR, 1)
    assert scene.demand(FAR) is not None
    return scene


def totals(sent: list[tuple[str, m.Message]], node: str) -> list[int]:
    return [message.wanted_total for to, message in sent if to == node and isinstance(message, m.LeaseDemand)]


def test_a_node_that_is_declared_dead_is_told_that_nothing_is_wanted_in_case_it_goes_on():
    scene = with_leases_of_both()
    far = scene.demand(FAR)
    assert far is not None
    assert far.outstanding > 0
    assert totals(scene.step(m.NodesChanged((HOME_ENTRY,), (FAR,)), HOME), FAR) == [1]


def test_what_a_lost_node_said_of_a_wait_is_told_no_more():
    for loss, told in ((m.NodesChanged((HOME_ENTRY,), (FAR,)), "a slot with CPU: 1"),
                       (m.PeerLost(FAR, "gone"), "a slot with CPU: 1"),
                       (m.PeerLost(HOME, "gone"), "another node on this host: its own was lost")):
        scene = with_leases_of_both()
        scene.step(m.LeaseDelayed(ONE, (), "node x is busy"), FAR)
        waiting = scene.owner.tasks[child_id(b"", 6)]
        assert "waits for node x is busy" in scene.owner.why_task(waiting)
        scene.step(loss, HOME)
        assert f"waits for {told}" in scene.owner.why_task(waiting)


def test_a_node_that_was_declared_dead_and_returns_counts_on():
    scene = with_leases_of_both()
    far = scene.demand(FAR)
    assert far is not None
    granted = far.granted
    scene.step(m.NodesChanged((HOME_ENTRY,), (FAR,)), HOME)
    assert scene.demand(FAR) is None
    assert all(lease.node != FAR for lease in scene.owner.leases.values())
    assert FAR in scene.owner.dead
    scene.step(m.NodesChanged((HOME_ENTRY, FAR_ENTRY)), HOME)
    assert FAR not in scene.owner.dead
    scene.step(m.LeaseRedirected(ONE, (), FAR), HOME)
    far = scene.demand(FAR)
    assert far is not None
    assert far.granted == granted  # the node has not forgotten what it granted in its last life
    scene.granted(FAR, 2)
    assert far.granted == granted + 1


def test_a_link_that_was_lost_takes_its_totals_with_it():
    scene = with_leases_of_both()
    scene.step(m.NodesChanged((HOME_ENTRY,), (FAR,)), HOME)
    scene.step(m.PeerLost(FAR, "not reached"), FAR)
    scene.step(m.NodesChanged((HOME_ENTRY, FAR_ENTRY)), HOME)
    scene.step(m.LeaseRedirected(ONE, (), FAR), HOME)
    far = scene.demand(FAR)
    assert far is not None
    assert far.granted == 0


def test_the_own_node_returns_and_is_asked_again():
    scene = with_leases_of_both()
    scene.step(m.PeerLost(HOME, "it is frozen"), HOME)
    assert scene.demand(HOME) is None
    sent = scene.step(m.NodesChanged((HOME_ENTRY, FAR_ENTRY)), FAR)
    assert totals(sent, HOME) == [scene.owner.queues[ONE, ()].count]


def test_a_worker_that_was_only_cut_off_is_not_dead_when_it_is_granted_again():
    scene = with_leases_of_both()
    scene.step(m.PeerLost(FAR, "not reached"), FAR)
    assert f"{FAR}-worker1" in scene.owner.dead
    scene.step(m.NodesChanged((HOME_ENTRY, FAR_ENTRY)), HOME)
    scene.granted(FAR, 1)
    assert f"{FAR}-worker1" not in scene.owner.dead


def test_tasks_that_have_not_run_yet_do_not_wait_behind_each_other_while_another_slot_may_be_free():
    scene = Scene()
    scene.submit(2)
    sent = scene.granted(HOME, 1)
    assert sum(isinstance(message, m.PushTask) for _, message in sent) == 1
    assert scene.demand(HOME).wanted_total > scene.demand(HOME).granted


def over_many_nodes(count: int) -> Scene:
    """Tasks that wait, and nodes that were named one after the other; each grants one lease."""
    scene = Scene()
    scene.submit(150)
    for number in range(count):
        node = f"tcp://127.0.0.1:9#{number}"
        sent = scene.step(m.LeaseRedirected(ONE, (), node), HOME)
        assert [to for to, message in sent if isinstance(message, m.LeaseDemand)] == [node]  # the others stay as told
        scene.granted(node, 1)
    return scene


def test_of_many_nodes_few_are_asked_again_when_tasks_come_after_there_were_none():
    scene = over_many_nodes(100)
    queue = scene.owner.queues[ONE, ()]
    for lease in range(1, 100):
        scene.granted(HOME, lease)
        if not queue.count:
            break
    assert len(queue.demand) == NODES_ASKED_MAX
    assert check(scene.owner) == []
    far = "tcp://127.0.0.1:9#99"
    assert scene.demand(far) is None
    scene.submit(500)
    scene.step(m.LeaseRedirected(ONE, (), far), HOME)
    assert scene.demand(far).granted == 1  # as the node counts


def test_totals_outlive_a_queue_that_was_forgotten():
    scene = Scene()
    shapes = [(("CPU", 1.0), (f"R{number}", 1.0)) for number in range(80)]
    for lease, shape in enumerate([*shapes, shapes[0]], 1):
        task = child_id(b"", 1_000 + lease)
        sent = scene.step(s.Submitted(m.TaskSpec(task, b"f", "f", shape=shape), b"blob"))
        assert totals(sent, HOME)[0] == (2 if lease == 81 else 1)  # the node has not forgotten that it granted one
        scene.step(m.LeaseGranted(lease, shape, (), f"w{lease}", f"w{lease}", "home"), HOME)
        scene.step(m.TaskDone(task, 1, (m.Inline(b"x"),), 10), f"w{lease}")
        for _ in range(3):
            scene.now += 1.0
            scene.step(s.IdleLooked(shape, ()))
    assert len(scene.owner.queues) < 70
