"""What an owner keeps of calls and of actors that began, for the timeline."""

from __future__ import annotations

from typing import Any

from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.ids import child_id, object_id
from flowengine.core.owner_base import INTERRUPTED
from flowengine.core.owner_calls import REPEATED
from flowengine.core.owner_seen import Sight
from flowengine.core.past import SHOWN_BYTES_MAX
from flowengine.errors import TaskCancelled, pack_error
from flowengine.recovery.record import TaskTold
from tests.core.test_owner import WORKER as FIRST_WORKER
from tests.core.test_owner import with_worker
from tests.core.test_owner_actors import ACTOR, CALLER, MAKER, ME, NODE, WORKER, Scene, granted, made, with_handle


def at(scene: Scene, life: int = 1, recovery: str = "exactly_once") -> None:
    where = m.ActorAt(ACTOR, life, "alive", f"{WORKER}{life}", recovery, b"", f"n.w{life}", "n")
    scene.step(where, MAKER)


def called(count: int) -> tuple[Scene, list[bytes]]:
    scene = with_handle()
    calls = [scene.call(number) for number in range(count)]
    at(scene)
    return scene, calls


def done(call: bytes, began_us: int = 5, **more: Any) -> m.TaskDone:
    return m.TaskDone(call, 1, (m.Inline(b"x"),), 10, began_us=began_us, **more)


def kept(scene: Scene) -> list[tuple[Any, ...]]:
    """name, worker, node, life, submitted (whether it is told), began, took, end"""
    return [(run[0].name, *run[1:4], run[4] > 0, *run[5:]) for run in scene.owner.call_spans]


def test_a_call_is_kept_with_its_worker_and_times():
    scene, (first,) = called(1)
    scene.step(done(first), f"{WORKER}1")
    second = scene.call(1)
    scene.step(done(second, 20, held=(m.RefTo(object_id(child_id(b"", 5), 0), MAKER),)), f"{WORKER}1")
    assert kept(scene) == [("C.m", "n.w1", "n", 1, True, 5, 10, "done"), ("C.m", "n.w1", "n", 1, True, 20, 10, "done")]
    assert not scene.owner.spans  # calls drive no task out


def test_a_call_that_failed_is_kept_and_one_that_never_began_is_not():
    scene, (bad, cancelled) = called(2)
    scene.step(m.TaskFailed(bad, 1, pack_error(ValueError("no"), "m"), "task", False, 7, began_us=3), f"{WORKER}1")
    error = pack_error(TaskCancelled("no"))
    scene.step(m.TaskFailed(cancelled, 1, error, "cancelled", False, -1), f"{WORKER}1")
    assert kept(scene) == [("C.m", "n.w1", "n", 1, True, 3, 7, "task")]


def test_large_arguments_do_not_stay_for_the_timeline():
    scene, _ = called(1)
    for number, size in enumerate((SHOWN_BYTES_MAX, SHOWN_BYTES_MAX + 1), 1):
        scene.step(done(scene.call(number, args=bytes(size))), f"{WORKER}1")
    assert [len(run[0].args) for run in scene.owner.call_spans] == [SHOWN_BYTES_MAX, 0]


def test_large_arguments_of_tasks_stay_for_replays_only_and_the_last_of_them():
    scene = with_worker()
    sizes = (SHOWN_BYTES_MAX, 40 << 20, 40 << 20)
    tasks = [scene.submit(number, args=bytes(size)) for number, size in enumerate(sizes, 1)]
    for task in tasks:
        scene.step(m.TaskDone(task, 1, (m.Inline(b"x"),), 10), FIRST_WORKER)
    owner = scene.owner
    assert [len(run[0].args) for run in owner.spans if run[0].id in tasks] == [SHOWN_BYTES_MAX, 0, 0]
    told = [one for task in tasks for one in owner.told(task.hex()) if isinstance(one, TaskTold)]
    assert {one.spec.id: len(one.spec.args) for one in told} == {tasks[0]: SHOWN_BYTES_MAX, tasks[2]: 40 << 20}


def test_what_an_actor_does_again_after_its_death_is_kept_as_such_once():
    scene, (seen, open_) = called(2)
    scene.step(done(seen), f"{WORKER}1")
    scene.step(m.ActorAt(ACTOR, 1, "restarting"), MAKER)
    at(scene, 2)
    for _ in range(2):
        scene.step(done(seen, 100), f"{WORKER}2")
    scene.step(done(open_, 200), f"{WORKER}2")
    assert kept(scene)[1:] == [("C.m", "n.w2", "n", 2, False, 100, 10, REPEATED),
                               ("C.m", "n.w2", "n", 2, True, 200, 10, "done")]


def test_a_run_that_a_death_ends_is_kept_until_the_death_and_what_waited_behind_it_is_not():
    scene = with_worker()
    running, _ = (scene.submit(number, args=bytes(SHOWN_BYTES_MAX + 1)) for number in (1, 2))
    scene.now = 3.0
    scene.crash(running)
    (ran,) = [run for run in scene.owner.spans if run[7] == INTERRUPTED]
    assert (ran[0].id, ran[0].args, ran[1:4]) == (running, b"", ("w1", "node", 1))
    assert ran[4] <= ran[5] < 10_000
    assert ran[5] + ran[6] == 3_001_000
    scene.lease()
    scene.now = 9.0
    scene.crash(running)
    assert [run[3] for run in scene.owner.spans if run[7] == INTERRUPTED] == [1, 2]
    assert "interrupted after 2" in scene.owner.story(running)[1]


def test_the_call_that_a_death_ends_is_kept_by_its_caller_alone():
    scene, (seen, open_) = called(2)
    scene.step(done(seen), f"{WORKER}1")
    scene.now = 5.0
    for call in (seen, child_id(b"", 77), open_):  # answered, or another one's
        scene.step(m.ActorAt(ACTOR, 1, "restarting", interrupted=call), MAKER)
        at(scene)
    assert kept(scene)[1:] == [("C.m", "n.w1", "n", 1, True, 5_005_000, 0, INTERRUPTED)]


def test_an_actor_tells_its_callers_in_which_call_it_died_and_its_own_beginning_is_kept():
    scene, actor = made()
    granted(scene, 1)
    scene.now = 1.0
    scene.step(m.LeaseLost(1, m.Death("w1", "h", 7, -9, actor, 1)), NODE)
    ((name, *_, took_us, end),) = kept(scene)
    assert (name, took_us > 900_000, end) == ("C", True, INTERRUPTED)
    granted(scene, 2)
    scene.step(m.ActorReady(actor, 2, f"{WORKER}2", run_us=-1), f"{WORKER}2")
    scene.step(m.WatchActor(actor), MAKER)
    assert [message.interrupted for _, message in scene.sent if type(message) is m.ActorAt] == [b""]
    scene.step(m.LeaseLost(2, m.Death("w2", "h", 7, -9, b"call" * 4, 1)), NODE)
    assert [message.interrupted for to, message in scene.sent if to == MAKER and type(message) is m.ActorAt] \
        == [b"call" * 4]
    assert len(kept(scene)) == 1


def test_what_may_be_done_again_is_forgotten_when_a_checkpoint_covers_it_or_the_process_is_gone():
    scene, calls = called(2)
    for call in calls:
        scene.step(done(call), f"{WORKER}1")
    at(scene, 2)
    assert len(scene.owner.repeats[f"{WORKER}2"]) == 2
    at(scene, 3)
    scene.step(m.CallsCovered(ACTOR, CALLER, 0), f"{WORKER}3")
    assert list(scene.owner.repeats[f"{WORKER}3"]) == calls[1:]
    for life in (2, 3):
        scene.step(m.PeerLost(f"{WORKER}{life}", "gone"))
    assert not scene.owner.repeats


def test_the_beginning_of_an_actor_is_kept_with_how_it_ended():
    scene, actor = made()
    granted(scene, 1)
    scene.step(m.ActorReady(actor, 1, f"{WORKER}1", began_us=5, run_us=9), f"{WORKER}1")
    scene.step(m.WatchActor(actor), ME)
    (where,) = [message for _, message in scene.sent if isinstance(message, m.ActorAt)]
    assert (where.worker_id, where.node_id) == ("w1", "node")
    assert kept(scene) == [("C", "w1", "node", 1, True, 5, 9, "done")]
    scene, actor = made()
    granted(scene, 1)
    failed = m.ActorReady(actor, 1, f"{WORKER}1", pack_error(ValueError("no"), "C.__init__"), began_us=5, run_us=9)
    scene.step(failed, f"{WORKER}1")
    assert kept(scene) == [("C", "w1", "node", 1, True, 5, 9, "task")]


def test_calls_are_told_and_counted_like_tasks():
    (scene, calls), sight = called(1), Sight()
    scene.step(done(calls[0]), f"{WORKER}1")
    told = sight.look(scene.owner, 1.0, "a")
    assert [(row["name"], row["runs"]) for row in told["functions"]] == [("C.m", 1)]
    assert [run[1:] for run in told["runs"]] == [("C.m", "n.w1", "n", 1, 5, 10, "done")]
    scene.step(done(scene.call(1), 6), f"{WORKER}1")
    told = sight.look(scene.owner, 1.0, "a")
    assert told["functions"][0]["runs"] == 2
    assert [run[5] for run in told["runs"]] == [6]


def test_the_story_of_a_call_tells_where_it_ran():
    scene, (call,) = called(1)
    scene.step(done(call), f"{WORKER}1")
    scene.step(s.RefsDropped((object_id(call, 0),)))
    assert any("in life 1" in line and "on n.w1 of node n: done" in line for line in scene.owner.story(call))
