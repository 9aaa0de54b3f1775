"""An owner with tasks under policies: ways in turn, beside objects, shares; driven by hand."""
from __future__ import annotations

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.ids import child_id, object_id
from flowengine.core.invariants import check
from flowengine.core.owner import Owner
from flowengine.core.owner_state import State
from flowengine.errors import BadValue, pack_error, unpack_error
from flowengine.scheduling.shares import OWN

ME, NODE, OTHER = "tcp://h:1#me", "tcp://h:2#node", "tcp://h:4#other"
ONE = (("CPU", 1.0),)
A, B = (("A", 2.0), OWN), (("B", 3.0), OWN)


class Scene:
    """An owner on node n1 of two; keeps what it sent last, and the number of its tasks."""

    def __init__(self) -> None:
        self.owner = Owner(ME, NODE, "n1", Config())
        self.now = 0.0
        self.grants = 0
        self.tasks = 0
        self.timers: list[tuple[float, m.Message]] = []
        self.sent: list[tuple[str, m.Message]] = []
        self.told(NODE, OTHER)

    def told(self, *addresses: str, dead: tuple[str, ...] = ()) -> None:
        ids = {NODE: "n1", OTHER: "n2"}
        entries = tuple(m.NodeEntry(ids[address], address, "h", ONE, ONE) for address in addresses)
        self.step(m.NodesChanged(entries, dead), NODE)

    def step(self, event: m.Message, sender: str = "") -> None:
        out = self.owner.handle(event, self.now, sender)
        self.sent = [(one.to, one.message) for one in out if isinstance(one, c.Send)]
        self.timers += [(self.now + one.delay_s, one.event) for one in out if isinstance(one, c.SetTimer)]
        assert check(self.owner) == []

    def wait(self, seconds: float) -> None:
        """Time passes; timers fire."""
        end = self.now + seconds
        while due := sorted((one for one in self.timers if one[0] <= end), key=lambda one: one[0])[:1]:
            self.timers.remove(due[0])
            self.now = due[0][0]
            self.step(due[0][1])
        self.now = end

    def submit(self, choice: m.Choice | None = None, **options: object) -> bytes:
        self.tasks += 1
        task = child_id(b"", self.tasks)
        if choice is not None and choice.ways:
            options = {"shape": choice.ways[0][0], "placement": choice.ways[0][1], **options}
        self.step(s.Submitted(m.TaskSpec(task, b"f", "f", choice=choice, **options), b"blob"))
        return task

    def put(self, value: m.Value, owner: str = "") -> m.RefTo:
        self.tasks += 1
        oid = object_id(child_id(b"", self.tasks), 0)
        self.step(s.ValuePut(oid, value))
        return m.RefTo(oid, ME)

    def grant(self, placement: tuple[str, ...] = (), node: str = NODE, shape: m.Shape = ONE) -> str:
        self.grants += 1
        worker = f"tcp://h:9#w{self.grants}"
        self.step(m.LeaseGranted(self.grants, shape, placement, worker, f"n1.w{self.grants}", "n1"), node)
        return worker

    def pushes(self) -> list[bytes]:
        return [message.spec.id for _, message in self.sent if isinstance(message, m.PushTask)]

    def placements(self) -> list[tuple[str, ...]]:
        """Of queues with tasks."""
        return [key[1] for key, queue in self.owner.queues.items() if queue.count]


def ways(*nodes: tuple[str, ...], **more: object) -> m.Choice:
    return m.Choice(tuple((ONE, each) for each in nodes), **more)


def test_a_task_that_finds_no_slot_goes_round_its_ways_with_growing_patience():
    scene = Scene()
    scene.submit(ways(("n1",), ("n2",)))
    seen = []
    for _ in range(40):
        seen.append(scene.placements()[0][0])
        scene.wait(0.1)
    turns = [place for place, before in zip(seen, ["", *seen], strict=False) if place != before]
    assert turns == ["n1", "n2", "n1", "n2", "n1"]
    scene.grant(("n2",), OTHER)
    assert not scene.pushes()  # it is not there, so what it was granted is not used
    scene.grant(("n1",))
    assert len(scene.pushes()) == 1
    assert scene.owner.placing.ways == {}
    scene.wait(5.0)
    assert not [event for _, event in scene.timers if isinstance(event, s.WaysLooked)]


def test_a_task_that_was_sent_and_waits_behind_a_long_one_is_taken_back():
    scene = Scene()
    for _ in range(2):
        scene.submit()
    scene.grant()
    for lease in list(scene.owner.leases.values()):
        for task in list(lease.inflight.values()):
            scene.step(m.TaskDone(task.spec.id, 1, (m.Inline(b"x"),), 10), lease.worker)
    worker = scene.grant(("n1",))
    first, second = scene.submit(ways(("n1",), ("n2",))), scene.submit(ways(("n1",), ("n2",)))
    assert scene.owner.tasks[second].state is State.SENT
    scene.wait(0.65)
    lease = scene.owner.tasks[second].lease
    assert lease.taking_back
    scene.step(m.TakenBack((second,), lease.id), worker)
    assert scene.owner.tasks[second].key == (ONE, ("n2",))
    assert scene.owner.tasks[first].state is State.SENT
    scene.step(m.TaskDone(first, 1, (m.Inline(b"x"),), 10), worker)
    scene.grant(("n2",), OTHER)
    assert scene.pushes() == [second]


def test_a_way_to_a_node_that_is_not_there_is_passed_over():
    scene = Scene()
    scene.submit(ways(("n9",), ("n2",), ("n1",)))
    assert scene.placements() == [("n2",)]
    scene.submit(ways(("n9",), ("n8",)))
    assert ("n9",) in scene.placements()  # it may come


def test_a_task_that_was_cancelled_between_ways_is_gone():
    scene = Scene()
    task = scene.submit(ways(("n1",), ("n2",)))
    scene.wait(0.7)
    scene.step(s.CancelAsked(object_id(task, 0), False, True))
    assert scene.placements() == []
    assert scene.owner.placing.ways == {}
    scene.wait(3.0)


def test_a_task_runs_beside_what_it_is_near_to_and_after_it():
    scene = Scene()
    there = scene.put(m.Stored(5, (OTHER,)))
    scene.submit(ways((), near=((0,),), unread=1), deps=(there,))
    assert scene.placements() == [("n2",)]
    maker = scene.submit(placement=("n1",))
    waiting = scene.submit(ways((), near=((0,),), unread=1), deps=(m.RefTo(object_id(maker, 0), ME),))
    assert scene.owner.tasks[waiting].state is State.WAITING
    worker = scene.grant(("n1",))
    scene.step(m.TaskDone(maker, 1, (m.Stored(1 << 20, (OTHER,)),), 10), worker)
    assert scene.owner.tasks[waiting].key == (ONE, ("n2",))


def test_of_several_objects_the_node_with_most_bytes_counts():
    scene = Scene()
    refs = (scene.put(m.Stored(5, (OTHER,))), scene.put(m.Stored(7, (NODE, OTHER))), scene.put(m.Stored(6, (NODE,))))
    task = scene.submit(ways((), near=((0, 1, 2),), unread=3), deps=refs)
    assert scene.owner.tasks[task].key == (ONE, ("n1",))
    small = scene.submit(ways((), near=((0,),), unread=1), deps=(scene.put(m.Inline(b"x")),))
    assert scene.owner.tasks[small].key == (ONE, ("n1",))  # it is here


def test_a_task_goes_after_an_object_that_is_made_again_elsewhere():
    scene = Scene()
    maker = scene.submit()
    worker = scene.grant()
    scene.step(m.TaskDone(maker, 1, (m.Stored(1 << 20, (OTHER,)),), 10), worker)
    task = scene.submit(ways((), near=((0,),), unread=1), deps=(m.RefTo(object_id(maker, 0), ME),))
    assert scene.placements() == [("n2",)]
    scene.told(NODE, dead=(OTHER,))
    assert scene.owner.tasks[task].state is State.WAITING
    scene.step(m.TaskDone(maker, 2, (m.Stored(1 << 20, (NODE,)),), 10), scene.owner.tasks[maker].lease.worker)
    assert scene.owner.tasks[task].key == (ONE, ("n1",))


def test_a_task_that_may_not_be_where_its_object_is_ends_with_the_reason():
    scene = Scene()
    task = scene.submit(ways(("n1",), near=((0,),), unread=1), deps=(scene.put(m.Stored(5, (OTHER,))),))
    error = unpack_error(scene.owner.objects[object_id(task, 0)].value.error)
    assert isinstance(error, BadValue)
    assert "n1" in str(error)
    soft = scene.submit(
        ways(("n1",), ("n2",), near=((0,), (0,)), unread=1), deps=(scene.put(m.Stored(5, (OTHER,))),)
    )
    assert scene.owner.tasks[soft].key == (ONE, ("n2",))


def test_a_task_leans_to_the_node_with_its_large_inputs_and_slots_of_the_same_amounts_move():
    scene = Scene()
    far, near = scene.put(m.Stored(1 << 24, (OTHER,))), scene.put(m.Stored(1 << 24, (NODE, OTHER)))
    small = scene.put(m.Stored(1000, (OTHER,)))
    maker = scene.submit()
    worker = scene.grant(node=OTHER)
    lease = scene.owner.leases[OTHER, 1]
    lease.node_id = "n2"
    scene.step(m.TaskDone(maker, 1, (m.Inline(b"x"),), 10), worker)
    task = scene.submit(deps=(far, small))
    assert scene.owner.tasks[task].key == (ONE, ("n2", "*"))
    assert scene.pushes() == [task]  # the slot there was idle
    assert lease.queue.key == (ONE, ("n2", "*"))
    here = scene.put(m.Stored(1 << 25, (NODE,)))
    for deps, place in (((near,), ()), ((small,), ()), ((far, near, here), ("n1", "*"))):
        assert scene.owner.tasks[scene.submit(deps=deps)].key == (ONE, place)
    fixed = scene.submit(deps=(far,), placement=("n1",))
    assert scene.owner.tasks[fixed].key == (ONE, ("n1",))
    share = scene.submit(m.Choice(share=A), deps=(far,))
    assert scene.owner.tasks[share].key == (ONE, ("n2", "*"))


def served(scene: Scene, count: int, run_us: int = 20_000) -> list[str]:
    """Whose tasks run, one after the other, on the worker that has some."""
    names = []
    for _ in range(count):
        lease = next(lease for lease in scene.owner.leases.values() if lease.inflight)
        task = next(iter(lease.inflight.values()))
        names.append(task.spec.choice.share[0][0] if task.spec.choice is not None else "")
        scene.now += run_us / 1e6
        scene.step(m.TaskDone(task.spec.id, task.attempt, (m.Inline(b"x"),), run_us), lease.worker)
    return names


def test_slots_go_by_shares_in_one_queue_and_priorities_count_inside_of_them():
    scene = Scene()
    for _ in range(60):
        scene.submit(m.Choice(share=A))
    for _ in range(60):
        scene.submit(m.Choice(share=B))
    urgent = scene.submit(m.Choice(share=A), priority=1.0)
    scene.grant()
    assert scene.owner.tasks[urgent].state is State.SENT
    names = served(scene, 52)
    assert 18 <= names[2:].count("A") <= 22
    for _ in range(40):
        scene.submit()
    names = served(scene, 36)  # A 2, B 3, the rest 1
    assert 4 <= names.count("") <= 8


def test_a_slot_of_one_shape_is_given_up_for_a_tenant_who_waits_for_another():
    scene = Scene()
    other = (("CPU", 1.0), ("disk", 1.0))
    for _ in range(10):
        scene.submit(m.Choice(share=A))
    scene.submit(m.Choice(share=B), shape=other)
    worker = scene.grant()
    returned = False
    for _ in range(10):
        lease = next(iter(scene.owner.leases.values()), None)
        if lease is None:
            break
        task = next(iter(lease.inflight.values()))
        scene.now += 0.05
        scene.step(m.TaskDone(task.spec.id, task.attempt, (m.Inline(b"x"),), 50_000), worker)
        returned = any(isinstance(message, m.LeaseReturned) for _, message in scene.sent)
    assert returned
    assert sum(task.state is State.DONE for task in scene.owner.tasks.values()) < 5
    scene.grant((), NODE, other)
    assert len(scene.pushes()) == 1


def test_a_slot_is_kept_when_those_that_are_behind_could_not_use_it():
    scene = Scene()
    for _ in range(10):
        scene.submit(m.Choice(share=A))
    scene.submit(m.Choice(share=B), placement=("n2",))
    worker = scene.grant()
    for _ in range(8):
        [lease] = scene.owner.leases.values()
        task = next(iter(lease.inflight.values()))
        scene.now += 0.05
        scene.step(m.TaskDone(task.spec.id, task.attempt, (m.Inline(b"x"),), 50_000), worker)
        assert not [message for _, message in scene.sent if isinstance(message, m.LeaseReturned)]


def test_what_a_task_of_a_tenant_did_not_run_is_not_charged():
    scene = Scene()
    task = scene.submit(m.Choice(share=A))
    worker = scene.grant()
    clock = scene.owner.placing.shares.root.child("A")
    assert clock.clock > 0
    lease = next(iter(scene.owner.leases.values()))
    scene.step(m.TakenBack((task,), lease.id), worker)
    before = clock.clock
    scene.step(m.TaskDone(task, scene.owner.tasks[task].attempt, (m.Inline(b"x"),), 500_000), worker)
    assert before < 0.01
    assert abs(clock.clock - 0.25) < 0.01


def test_slots_with_some_of_what_was_taken_away_are_used_no_more():
    scene = Scene()
    lock = (*ONE, ("lock\x1fd", 1.0))
    for shape in (lock, lock, ONE):
        scene.submit(shape=shape)
        scene.grant(shape=shape)
    idle, runs, other = scene.owner.leases.values()
    for lease in (idle, other):
        scene.step(m.TaskDone(next(iter(lease.inflight)), 1, (m.Inline(b"x"),), 10), lease.worker)
    scene.step(s.AmountLessened("lock\x1fd"))
    assert scene.sent == [(NODE, m.LeaseReturned(idle.id))]
    scene.submit(shape=lock)
    assert not scene.pushes()  # it waits for a slot that is given anew
    scene.step(m.TaskDone(next(iter(runs.inflight)), 1, (m.Inline(b"x"),), 10), runs.worker)
    assert not scene.pushes()
    assert list(scene.owner.leases.values()) == [other]
    scene.grant(shape=lock)
    assert len(scene.pushes()) == 1


def test_what_can_run_only_beside_an_actor_ends_when_that_is_dead_for_good():
    scene = Scene()
    actor = child_id(b"other", 1)
    beside = (*ONE, ("@actor:" + actor.hex(), 1.0))
    only, or_else = scene.submit(shape=beside), scene.submit(m.Choice(((beside, ()), (ONE, ()))))
    scene.step(m.LeaseDelayed(beside, (), "it has not begun"), NODE)
    assert scene.owner.tasks[only].state is State.READY
    scene.step(m.ActorAt(actor, 1, "dead", error=pack_error(BadValue("it was killed"))), OTHER)
    value = scene.owner.objects[object_id(only, 0)].value
    assert "it was killed" in str(unpack_error(value.error))
    assert scene.owner.tasks[or_else].state is State.READY
