"""An owner driven by hand: forced cancels, streams whose items are lost, time limits, references to the dead."""
from __future__ import annotations

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.ids import child_id, object_id
from flowengine.core.invariants import check
from flowengine.core.owner import Owner
from flowengine.core.owner_leases import FEW_PATIENCE_S, LEASES_OF_FEW_MAX
from flowengine.core.owner_state import State
from flowengine.errors import ObjectLost, TaskCancelled, TaskTimeout, unpack_error
from flowengine.scheduling.placement import FEW

ME, NODE, WORKER, OTHER = "tcp://h:1#me", "tcp://h:2#node", "tcp://h:3#worker", "tcp://h:4#other"
ONE = (("CPU", 1.0),)
STORED = m.Stored(100_000, (NODE,))


class Scene:
    """An owner with one leased worker; keeps what it sent last."""

    def __init__(self) -> None:
        self.owner = Owner(ME, NODE, "node", Config())
        self.now = 0.0
        self.leases = 0
        self.sent: list[tuple[str, m.Message]] = []
        self.woken: list[int] = []

    def step(self, event: m.Message, sender: str = "") -> None:
        self.now += 0.001
        out = self.owner.handle(event, self.now, sender)
        self.sent = [(one.to, one.message) for one in out if isinstance(one, c.Send)]
        self.woken += [one.waiter for one in out if isinstance(one, c.Resolve)]

    def of(self, kind: type) -> list:
        return [message for _, message in self.sent if isinstance(message, kind)]

    def lease(self) -> None:
        self.leases += 1
        self.step(m.LeaseGranted(self.leases, ONE, (), WORKER, "w1", "node"), NODE)

    def submit(self, number: int, **options: object) -> bytes:
        task = child_id(b"", number)
        self.step(s.Submitted(m.TaskSpec(task, b"f", "f", **options), b"blob"))
        return task

    def crash(self, task: bytes, **more: object) -> None:
        death = m.Death("w1", "h", 7, -9, task, 1, **more)
        self.step(m.LeaseLost(self.leases, death), NODE)

    def error(self, oid: bytes) -> BaseException:
        value = self.owner.objects[oid].value
        assert isinstance(value, m.Failed)
        return unpack_error(value.error)


def with_worker() -> Scene:
    scene = Scene()
    scene.submit(0)
    scene.lease()
    scene.step(m.TaskDone(child_id(b"", 0), 1, (m.Inline(b"x"),), 10), WORKER)
    return scene


def test_a_forced_cancel_does_not_kill_what_runs_ahead():
    scene = with_worker()
    first, second = scene.submit(1), scene.submit(2)
    scene.step(s.CancelAsked(object_id(second, 0), True, True))
    assert scene.sent == [(WORKER, m.CancelTask(second, 1, True))]
    scene.step(m.TaskDone(first, 1, (m.Inline(b"x"),), 10), WORKER)
    assert [kill.task for kill in scene.of(m.KillWorker)] == [second]  # it runs now, if it did not end
    third = scene.submit(3)
    scene.step(m.TaskFailed(second, 1, b"", "cancelled", False, 5), WORKER)
    assert not scene.of(m.KillWorker)
    scene.step(s.CancelAsked(object_id(third, 0), True, True))
    assert [kill.task for kill in scene.of(m.KillWorker)] == [third]


def test_nothing_is_sent_behind_a_task_that_runs_longer_than_was_expected():
    scene = with_worker()
    first = scene.submit(1)
    assert scene.of(m.PushTask)
    scene.now += 1.0
    scene.submit(2)
    assert not scene.of(m.PushTask)
    assert [demand.wanted_total for demand in scene.of(m.LeaseDemand)] == [2]  # another slot
    scene.step(m.TaskDone(first, 1, (m.Inline(b"x"),), 10), WORKER)
    assert scene.of(m.PushTask)


def test_tasks_that_ask_to_be_few_get_more_slots_only_when_some_do_not_go_on():
    scene = Scene()
    place = ("node", FEW, "*")
    for number in range(40):
        scene.submit(number, placement=place, shape=())
    asked = LEASES_OF_FEW_MAX
    assert scene.owner.queues[(), place].demand[NODE].wanted_total == asked
    for number in range(asked):
        scene.step(m.LeaseGranted(number, (), place, f"{WORKER}{number}", f"w{number}", "node"), NODE)
    look = s.LateLooked((), place)
    scene.step(look)
    assert not scene.of(m.LeaseDemand)
    scene.now += FEW_PATIENCE_S
    scene.step(look)
    assert [demand.wanted_total for demand in scene.of(m.LeaseDemand)] == [2 * asked]
    assert check(scene.owner) == []


def test_what_waits_behind_a_task_that_runs_longer_than_was_expected_is_taken_back():
    scene = with_worker()
    first, second = scene.submit(1), scene.submit(2)
    assert scene.of(m.PushTask)
    look = s.LateLooked(ONE, ())
    scene.step(look)
    assert not scene.of(m.TakeBack)  # it is too early to tell
    scene.now += 1.0
    scene.step(look)
    assert [back.tasks for back in scene.of(m.TakeBack)] == [(second,)]
    scene.step(m.TakenBack((second,), 1), WORKER)
    assert not scene.of(m.PushTask)
    assert [demand.wanted_total for demand in scene.of(m.LeaseDemand)] == [2]
    scene.step(m.TaskDone(first, 1, (m.Inline(b"x"),), 10), WORKER)
    assert [push.spec.id for push in scene.of(m.PushTask)] == [second]  # no other slot came before


def test_a_worker_that_was_killed_for_its_time_limit_has_not_crashed():
    scene = with_worker()
    task = scene.submit(1, timeout_s=0.5)
    scene.crash(task, overdue=True)
    assert isinstance(scene.error(object_id(task, 0)), TaskTimeout)
    assert scene.owner.counters["tasks_retried"] == 0


def streaming(items: int, taken: int) -> tuple[Scene, bytes]:
    scene = with_worker()
    task = scene.submit(1, num_returns=-1)
    for index in range(items):
        scene.step(m.StreamItem(task, 1, index, STORED), WORKER)
    scene.step(s.StreamTaken(task, taken))
    return scene, task


def pushed(scene: Scene) -> m.PushTask:
    scene.lease()
    [push] = scene.of(m.PushTask)
    return push


def test_a_stream_that_runs_again_knows_what_was_taken_and_brings_what_was_lost():
    scene, task = streaming(6, 4)
    scene.step(s.LoseAsked(object_id(task, 2)))
    scene.crash(task)
    push = pushed(scene)
    assert (push.stream_have, push.stream_taken) == (2, 4)
    scene.step(m.StreamItem(task, 2, 2, STORED), WORKER)
    assert scene.owner.objects[object_id(task, 2)].value == STORED


def test_a_stream_begins_anew_when_an_item_that_it_has_passed_is_lost_and_awaited():
    scene, task = streaming(6, 4)
    lost = object_id(task, 1)
    scene.step(s.LoseAsked(lost))
    assert not scene.of(m.CancelTask)
    scene.step(s.ReadyAsked(5, (lost,), 1))
    assert scene.of(m.CancelTask) == [m.CancelTask(task, 1, True, True)]
    scene.step(s.ReadyAsked(6, (lost,), 1))
    assert not scene.sent  # once is enough
    scene.step(m.TaskFailed(task, 1, b"", "cancelled", False, 5), WORKER)
    [push] = scene.of(m.PushTask)
    assert (push.attempt, push.stream_have) == (2, 1)
    scene.step(m.StreamItem(task, 2, 1, STORED), WORKER)
    assert scene.woken == [5, 6]


def test_a_rebuilt_stream_waits_for_no_reader_and_outlives_it():
    scene, task = streaming(6, 6)
    scene.step(m.TaskDone(task, 1, (), 10, stream_items=6), WORKER)
    lost = object_id(task, 3)
    scene.step(s.LoseAsked(lost))
    scene.step(s.ReadyAsked(5, (lost,), 1))
    [push] = scene.of(m.PushTask)
    assert push.stream_taken == s.ALL_ITEMS
    scene.step(s.StreamTaken(task, -1))
    assert not scene.of(m.CancelTask)
    scene.step(m.StreamItem(task, 2, 3, STORED), WORKER)
    assert scene.woken == [5]


def test_a_lost_item_of_a_failed_stream_is_an_error_and_no_wait_for_ever():
    scene, task = streaming(3, 3)
    scene.step(m.TaskFailed(task, 1, b"", "task", False, 5), WORKER)
    lost = object_id(task, 0)
    scene.step(s.LoseAsked(lost))
    scene.step(s.ReadyAsked(5, (lost,), 1))
    assert scene.woken == [5]
    assert isinstance(scene.error(lost), ObjectLost)


def test_a_reference_to_a_dead_owner_that_comes_inside_of_a_result_is_made_again_with_it():
    scene = with_worker()
    scene.step(m.PeerLost(OTHER, "closed"), OTHER)
    task = scene.submit(1)
    inner = m.RefTo(object_id(child_id(task, 0), 0), OTHER)
    scene.step(m.TaskDone(task, 1, (m.Inline(b"x", (inner,)),), 10), WORKER)
    scene.step(s.RefsMade((inner,), object_id(task, 0)))
    assert scene.owner.objects[inner.oid].value is None
    scene.step(s.ReadyAsked(5, (inner.oid,), 1))
    assert scene.owner.tasks[task].state is State.SENT  # again


def test_who_owns_it_now_hears_of_us_before_a_value_that_nobody_needs_is_refused():
    scene = with_worker()
    task = scene.submit(1)
    dead, alive = (m.RefTo(object_id(child_id(task, 0), 0), owner) for owner in (OTHER, "tcp://h:5#new"))
    outer = object_id(task, 0)
    scene.step(m.TaskDone(task, 1, (m.Inline(b"x", (dead,)),), 10), WORKER)
    scene.step(s.RefsMade((dead,), outer))
    scene.step(m.BorrowConfirmed(dead.oid, 1), OTHER)
    scene.step(s.RefsDropped((outer,)))
    scene.step(m.PeerLost(OTHER, "closed"), OTHER)
    scene.step(s.ReadyAsked(5, (dead.oid,), 1))
    [push] = scene.of(m.PushTask)
    scene.step(m.TaskDone(task, push.attempt, (m.Inline(b"x", (alive,)),), 10), WORKER)
    told = [type(message) for to, message in scene.sent if to == alive.owner]
    assert told.index(m.HeirAsked) < told.index(m.BorrowDropped)
    assert scene.owner.objects[dead.oid].owner == alive.owner


def of_the_first(count: int) -> tuple[Scene, bytes, list[bytes]]:
    """A task that needs so many of three inputs."""
    scene = with_worker()
    makers = [scene.submit(number) for number in (1, 2, 3)]
    deps = tuple(m.RefTo(object_id(maker, 0), ME) for maker in makers)
    return scene, scene.submit(4, deps=deps, enough=count), makers


def test_a_task_of_the_first_inputs_is_pushed_with_those_and_does_not_wait_behind_the_others():
    scene, task, makers = of_the_first(2)
    assert not any(push.spec.id == task for push in scene.of(m.PushTask))
    scene.step(m.TaskDone(makers[0], 1, (STORED,), 10), WORKER)
    scene.step(m.TaskDone(makers[2], 1, (m.Inline(b"3"),), 10), WORKER)
    push = next(push for push in scene.of(m.PushTask) if push.spec.id == task)
    assert [ref.oid for ref in push.spec.deps] == [object_id(maker, 0) for maker in (makers[0], makers[2])]
    assert push.values == (STORED, m.Inline(b"3"))
    assert check(scene.owner) == []
    scene.step(s.RefsDropped((object_id(makers[1], 0),)))
    scene.step(m.TaskDone(makers[1], 1, (m.Inline(b"2"),), 10), WORKER)
    assert object_id(makers[1], 0) not in scene.owner.objects  # nothing needs it


def test_a_result_of_the_first_inputs_is_made_again_from_the_same():
    scene, task, makers = of_the_first(2)
    for maker in (makers[2], makers[1]):
        scene.step(m.TaskDone(maker, 1, (STORED,), 10), WORKER)
    scene.step(m.TaskDone(task, 1, (STORED,), 10), WORKER)
    scene.step(m.TaskDone(makers[0], 1, (STORED,), 10), WORKER)
    scene.step(s.LoseAsked(object_id(task, 0)))
    scene.step(m.CopiesLost(object_id(task, 0), (NODE,)), NODE)
    scene.step(s.FetchAsked(1, object_id(task, 0)))
    push = next(push for push in scene.of(m.PushTask) if push.spec.id == task)
    assert [ref.oid for ref in push.spec.deps] == [object_id(maker, 0) for maker in makers[1:]]


def test_spares_take_the_places_of_errors_until_too_few_are_left():
    scene, task, makers = of_the_first(2)
    scene.step(m.TaskFailed(makers[0], 1, b"e", "task", False, 5), WORKER)
    late = scene.submit(5, deps=tuple(m.RefTo(object_id(maker, 0), ME) for maker in makers), enough=2)
    scene.step(m.TaskDone(makers[2], 1, (STORED,), 10), WORKER)
    assert scene.owner.tasks[task].state is State.WAITING
    scene.step(m.TaskDone(makers[1], 1, (STORED,), 10), WORKER)
    for each in (task, late):
        push = next(push for push in scene.of(m.PushTask) if push.spec.id == each)
        assert [ref.oid for ref in push.spec.deps] == [object_id(maker, 0) for maker in makers[1:]]
    assert check(scene.owner) == []
    scene, task, makers = of_the_first(2)
    scene.step(m.TaskFailed(makers[0], 1, b"e", "task", False, 5), WORKER)
    scene.step(m.TaskFailed(makers[2], 1, b"f", "task", False, 5), WORKER)
    assert scene.owner.objects[object_id(task, 0)].value == m.Failed(b"f", "task")


def test_an_error_that_comes_late_is_not_that_of_a_task_of_the_first():
    scene, task, makers = of_the_first(1)
    scene.step(m.TaskDone(makers[1], 1, (STORED,), 10), WORKER)
    scene.step(m.TaskFailed(makers[0], 1, b"e", "task", False, 5), WORKER)
    assert scene.owner.tasks[task].state is State.SENT


def test_what_has_not_begun_is_withdrawn_and_what_runs_goes_on():
    scene = with_worker()
    first, second = scene.submit(1), scene.submit(2)
    scene.step(s.WithdrawAsked(object_id(second, 0), 1))
    assert scene.sent == [(WORKER, m.TakeBack((second,), scene.leases))]
    scene.step(s.WithdrawAsked(object_id(second, 0), 2))  # asked twice: one answer is enough
    assert scene.woken == [2]
    scene.step(m.TakenBack((second,), scene.leases), WORKER)
    assert 1 in scene.woken
    assert isinstance(scene.error(object_id(second, 0)), TaskCancelled)
    scene.step(s.WithdrawAsked(object_id(first, 0), 3))
    scene.step(m.TakenBack((), scene.leases), WORKER)
    assert 3 in scene.woken
    scene.step(m.TaskDone(first, 1, (m.Inline(b"x"),), 10), WORKER)
    assert scene.owner.objects[object_id(first, 0)].value == m.Inline(b"x")
    assert scene.owner.withdrawn == {}


def test_what_waits_for_a_slot_is_withdrawn_at_once_and_a_worker_that_is_silent_is_not_waited_for():
    scene = Scene()
    waiting = scene.submit(0)
    scene.step(s.WithdrawAsked(object_id(waiting, 0), 1))
    assert scene.woken == [1]
    assert isinstance(scene.error(object_id(waiting, 0)), TaskCancelled)
    sent = scene.submit(1)
    scene.lease()
    scene.step(s.WithdrawAsked(object_id(sent, 0), 2))
    scene.step(s.WaiterGone(2))
    assert scene.owner.withdrawn == {}
    scene.step(m.TakenBack((sent,), scene.leases), WORKER)  # too late: it is wanted
    assert scene.owner.tasks[sent].state in (State.READY, State.SENT)


def test_a_slot_goes_back_before_tasks_that_are_less_urgent_than_those_of_others_that_wait():
    scene = with_worker()
    first, low, high = (scene.submit(number, priority=urgent) for number, urgent in ((1, 9.0), (2, 1.0), (3, 8.0)))
    scene.step(m.LeaseWanted(1, below=5.0), NODE)
    assert [back.tasks for back in scene.of(m.TakeBack)] == [(low,)]
    scene.step(m.TakenBack((low,), 1), WORKER)
    assert [demand.priority for demand in scene.of(m.LeaseDemand)] == [1.0]
    scene.submit(4, priority=6.0)
    assert scene.of(m.LeaseDemand)[-1].priority == 6.0  # the node hears that it is urgent now
    for task in (first, high):
        assert scene.of(m.LeaseReturned) == []
        scene.step(m.TaskDone(task, 1, (m.Inline(b"x"),), 10), WORKER)
    assert scene.of(m.LeaseReturned) == [m.LeaseReturned(1)]


def test_a_slot_that_is_wanted_when_idle_is_kept_while_there_is_work():
    scene = with_worker()
    task = scene.submit(1)
    scene.step(m.LeaseWanted(1, when_idle=True), NODE)
    assert scene.of(m.LeaseReturned) == []
    scene.step(m.TaskDone(task, 1, (m.Inline(b"x"),), 10), WORKER)
    assert scene.of(m.LeaseReturned) == [m.LeaseReturned(1)]
    scene = with_worker()
    scene.step(m.LeaseWanted(1, when_idle=True), NODE)
    assert scene.of(m.LeaseReturned) == [m.LeaseReturned(1)]
