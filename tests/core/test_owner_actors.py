"""An owner driven by hand: calls of actors that others made, and actors that it made."""

from __future__ import annotations

import msgspec
import pytest

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.ids import child_id, object_id, short
from flowengine.core.memory_seen import owned
from flowengine.core.owner import Owner
from flowengine.errors import ActorDied, TaskCancelled, pack_error, unpack_error

ME, NODE, WORKER, MAKER = "tcp://h:1#me", "tcp://h:2#node", "tcp://h:3#worker", "tcp://h:4#maker"
ACTOR = child_id(b"", 99)
ACTOR_REF = m.RefTo(object_id(ACTOR, 0), MAKER, m.HANDLE)
CALLER = b"c" * 16


class Scene:
    """An owner that calls one actor; keeps what it sent last."""

    def __init__(self) -> None:
        self.owner = Owner(ME, NODE, "node", Config())
        self.now = 0.0
        self.sent: list[tuple[str, m.Message]] = []
        self.files: list[str] = []
        self.warned: list[str] = []

    def step(self, event: m.Message, sender: str = "") -> None:
        self.now += 0.001
        out = self.owner.handle(event, self.now, sender)
        self.sent = [(one.to, one.message) for one in out if isinstance(one, c.Send)]
        self.files += [one.url for one in out if isinstance(one, c.DropState)]
        self.warned += [one.text for one in out if isinstance(one, c.Warn)]

    def pushes(self) -> list[m.PushTask]:
        return [message for _, message in self.sent if isinstance(message, m.PushTask)]

    def call(self, number: int, **options: object) -> bytes:
        call = child_id(CALLER, number)
        spec = m.TaskSpec(call, b"m", "C.m", actor=ACTOR_REF, caller_key=CALLER, parent=CALLER, **options)
        self.step(s.Submitted(spec, None))
        return call

    def alive(self, incarnation: int = 1) -> None:
        self.step(m.ActorAt(ACTOR, incarnation, "alive", f"{WORKER}{incarnation}", "exactly_once"), MAKER)

    def done(self, call: bytes) -> None:
        self.step(m.TaskDone(call, 1, (m.Inline(b"x"),), 10), WORKER)

    def error(self, task: bytes) -> BaseException:
        value = self.owner.objects[object_id(task, 0)].value
        assert isinstance(value, m.Failed)
        return unpack_error(value.error)


def with_handle() -> Scene:
    scene = Scene()
    scene.step(s.RefsMade((ACTOR_REF,)))
    return scene


def test_a_call_that_is_cancelled_before_the_actor_is_there_leaves_its_number_unused():
    scene = with_handle()
    first, second = scene.call(0), scene.call(1)
    scene.step(s.CancelAsked(object_id(first, 0), False, False))
    assert isinstance(scene.error(first), TaskCancelled)
    scene.alive()
    assert [(push.seq, push.spec.function) for push in scene.pushes()] == [(0, b""), (1, b"m")]
    assert scene.pushes()[1].spec.id == second


def test_a_call_that_goes_out_when_its_caller_has_ended_is_kept_by_the_actors_owner():
    scene = with_handle()
    scene.step(s.ParentBegan(CALLER, MAKER, 1))
    call = scene.call(0)
    scene.step(s.ParentEnded(CALLER))
    assert not scene.sent
    scene.alive()
    (kept,) = [message for to, message in scene.sent if to == MAKER]
    assert isinstance(kept, m.CallsKept)
    assert [(push.spec.id, push.seq, push.seen) for push in kept.calls] == [(call, 0, True)]
    assert [push.seen for push in scene.pushes()] == [False]


def test_a_call_goes_out_in_the_step_in_which_it_is_made_unless_one_is_ahead_of_it():
    scene = with_handle()
    scene.call(0)
    scene.alive()
    second = scene.call(1)
    assert [(push.spec.id, push.seq, push.attempt) for push in scene.pushes()] == [(second, 1, 1)]
    awaited = m.RefTo(b"i" * 20, MAKER)
    scene.step(s.RefsMade((awaited,)))
    third = scene.call(2, deps=(awaited,))
    fourth = scene.call(3)
    assert not scene.pushes()
    scene.step(m.ObjectReady(awaited.oid, m.Inline(b"x")), MAKER)
    assert [(push.spec.id, push.seq) for push in scene.pushes()] == [(third, 2), (fourth, 3)]


def test_a_call_that_its_caller_makes_again_takes_the_place_of_the_first():
    scene = with_handle()
    first = scene.call(0)
    scene.alive()
    second = scene.call(1)
    for call in (first, second):
        scene.done(call)
        assert scene.owner.objects[object_id(call, 0)].value == m.Inline(b"x")
    assert scene.owner.counters["calls_executed"] == 2
    scene.step(s.RefsDropped((object_id(first, 0), object_id(second, 0))))
    assert not scene.owner.tasks
    scene.step(s.ParentBegan(CALLER, MAKER, 2))
    scene.call(0)
    assert [(push.seq, push.attempt) for push in scene.pushes()] == [(0, 1)]
    sent = scene.owner.targets[ACTOR].sent
    assert list(sent) == [(CALLER, 0), (CALLER, 1)]
    assert sent[CALLER, 0] is scene.owner.tasks[first]  # in place of that of the former run


def test_a_late_reply_of_the_last_incarnation_is_not_heard_when_the_next_is_known():
    scene = with_handle()
    call = scene.call(0)
    scene.alive()
    scene.step(m.ActorAt(ACTOR, 1, "restarting"), MAKER)
    scene.alive(2)
    scene.step(m.TaskDone(call, 1, (m.Inline(b"old"),), 10, place=5), f"{WORKER}1")
    assert scene.owner.tasks[call].state is s.State.SENT
    assert not scene.owner.stash.open  # nor is how far that one came taken for news of this one
    scene.step(m.TaskDone(call, 1, (m.Inline(b"new"),), 10, place=1), f"{WORKER}2")
    assert scene.owner.objects[object_id(call, 0)].value == m.Inline(b"new")


def test_a_call_that_was_cut_short_is_not_done_by_a_new_incarnation():
    scene = with_handle()
    scene.alive()
    calls = [scene.call(number) for number in range(2)]
    scene.alive()
    error = pack_error(TaskCancelled("no"))
    scene.step(m.TaskFailed(calls[0], 1, error, "cancelled", False, -1), WORKER)
    scene.done(calls[1])
    scene.alive(2)
    assert sorted((push.seq, push.spec.function, push.seen) for push in scene.pushes()) == [
        (0, b"", False), (1, b"m", True),
    ]  # fmt: skip


def test_a_call_that_is_cancelled_while_the_actor_is_away_is_cancelled_when_it_is_back():
    scene = with_handle()
    scene.alive()
    call = scene.call(0)
    scene.alive()
    scene.step(m.ActorAt(ACTOR, 1, "restarting"), MAKER)
    scene.step(s.CancelAsked(object_id(call, 0), False, False))
    assert scene.sent == []
    scene.alive(2)
    assert (f"{WORKER}2", m.CancelTask(call, 1, False)) in scene.sent


def test_a_checkpoint_that_covers_a_call_before_its_reply_lets_it_go():
    scene = with_handle()
    call = scene.call(0)
    scene.alive()
    scene.step(m.CallsCovered(ACTOR, CALLER, 0), WORKER)
    scene.done(call)
    target = scene.owner.targets[ACTOR]
    assert not target.sent
    assert not target.seqs


def test_who_gets_another_handle_goes_on_counting():
    scene = with_handle()
    call = scene.call(0)
    scene.alive()
    scene.done(call)
    scene.step(s.RefsDropped((ACTOR_REF.oid, object_id(call, 0))))
    assert ACTOR not in scene.owner.targets
    scene.step(s.RefsMade((ACTOR_REF,)))
    scene.call(1)
    scene.alive()
    assert [push.seq for push in scene.pushes()] == [1]


def test_a_task_that_runs_again_here_gives_its_calls_the_numbers_that_they_had():
    scene = with_handle()
    scene.step(s.ParentBegan(CALLER, MAKER, 1, ()))
    call = scene.call(0)
    scene.alive()
    scene.done(call)
    scene.step(s.ParentEnded(CALLER, True, True))
    scene.step(s.ParentBegan(CALLER, MAKER, 2, ()))
    scene.call(0)
    scene.call(1)
    assert [push.seq for push in scene.pushes()] == [1]


def test_an_attempt_that_fails_and_is_repeated_does_not_cancel_its_calls():
    scene = with_handle()
    scene.step(s.ParentBegan(CALLER, MAKER, 1, ()))
    scene.call(0)
    scene.alive()
    scene.step(s.ParentEnded(CALLER, True, True))
    assert not any(isinstance(message, m.CancelTask) for _, message in scene.sent)


def test_who_lets_go_of_an_actor_hands_its_calls_and_their_inputs_over():
    scene = with_handle()
    big = child_id(b"", 5) + bytes(4)
    scene.step(s.ValuePut(big, m.Stored(1 << 20, (NODE,)), False))
    call = scene.call(0, deps=(m.RefTo(big, ME),))
    scene.alive()
    scene.done(call)
    scene.step(s.RefsDropped((big, object_id(call, 0))))
    scene.step(s.RefsDropped((ACTOR_REF.oid,)))
    kept = [message for to, message in scene.sent if to == MAKER and isinstance(message, m.CallsKept)]
    assert [push.spec.id for push in kept[0].calls] == [call]
    assert big in scene.owner.objects  # its borrower is the actor's owner now
    assert not any(isinstance(message, m.ObjectFreed) for _, message in scene.sent)


def test_the_maker_of_an_actor_that_is_dead_already_is_not_asked():
    scene = with_handle()
    scene.step(m.PeerLost(MAKER, "gone"))
    call = scene.call(0)
    error = scene.error(call)
    assert isinstance(error, ActorDied)
    assert "actor C " in str(error)


# --- made here ----------------------------------------------------------------------------------------


def made(**options: object) -> tuple[Scene, bytes]:
    scene = Scene()
    actor = child_id(b"", 1)
    spec = m.TaskSpec(actor, b"f", "C", life=m.ActorLife(**options), max_retries=-1)
    scene.step(s.Submitted(spec, b"blob"))
    return scene, actor


def granted(scene: Scene, number: int) -> None:
    shape, place = next(iter(scene.owner.queues))
    scene.step(m.LeaseGranted(number, shape, place, f"{WORKER}{number}", "w1", "node"), NODE)


def test_a_constructor_that_kills_its_process_is_not_tried_for_ever():
    scene, actor = made()
    for number in range(1, 4):
        granted(scene, number)
        scene.step(m.LeaseLost(number, m.Death("w1", "h", 7, -9, actor, number)), NODE)
    assert "in its constructor" in str(scene.error(actor))


@pytest.mark.parametrize("recovery", ["restart", "none"])
def test_a_call_that_died_with_a_process_is_told_which_one_and_how(recovery):
    scene, actor = made(recovery=recovery)
    granted(scene, 1)
    scene.step(m.ActorReady(actor, 1, f"{WORKER}1"), f"{WORKER}1")
    scene.step(m.WatchActor(actor), MAKER)
    death = m.Death("w1", "h", 7, -9, child_id(CALLER, 0), 1, log_lines=("last",))
    scene.step(m.LeaseLost(1, death), NODE)
    told = [message for to, message in scene.sent if to == MAKER and isinstance(message, m.ActorAt)][-1]
    error = unpack_error(told.error)
    assert isinstance(error, ActorDied)
    assert (error.host, error.pid, error.signal_name, error.attempt) == ("h", 7, "SIGKILL", 1)
    assert error.log_lines == ("last",)
    assert "replay" not in str(error)  # its calls are not kept
    if recovery == "restart":
        assert (told.state, error.what_next) == ("restarting", "later calls work")


def test_a_call_that_was_sent_to_a_process_which_begins_anew_fails_with_how_that_died():
    scene = with_handle()
    call = scene.call(0)
    scene.step(m.ActorAt(ACTOR, 1, "alive", f"{WORKER}1", "restart"), MAKER)
    error = pack_error(ActorDied("it fell", who="C", pid=7))
    scene.step(m.ActorAt(ACTOR, 1, "restarting", "", "restart", error), MAKER)
    scene.step(m.ActorAt(ACTOR, 2, "alive", f"{WORKER}2", "restart", error), MAKER)
    assert "pid 7" in str(scene.error(call))


def test_calls_of_the_dead_are_kept_with_their_inputs_until_a_checkpoint_covers_them():
    scene, actor = made()
    granted(scene, 1)
    scene.step(m.ActorReady(actor, 1, f"{WORKER}1"), f"{WORKER}1")
    big = m.RefTo(child_id(b"x", 1) + bytes(4), MAKER)
    spec = m.TaskSpec(child_id(CALLER, 0), b"m", "C.m", deps=(big,), caller_key=CALLER)
    push = m.PushTask(spec, 1, 0, (m.Stored(1 << 20, (NODE,)),), seq=0, seen=True)
    scene.step(m.PeerLost(MAKER, "gone"))
    scene.step(m.CallsKept(actor, (push,)), f"{WORKER}1")
    assert (NODE, m.ObjectAdopted(big.oid, ME)) in scene.sent
    checkpoint = m.Checkpoint(1, m.Inline(b""))
    scene.step(m.CheckpointTaken(actor, 1, checkpoint), f"{WORKER}1")
    assert scene.owner.made[actor].kept_calls  # it may have been kept after the checkpoint was taken
    scene.step(m.CallsCovered(actor, CALLER, 0), f"{WORKER}1")
    assert not scene.owner.made[actor].kept_calls
    assert (NODE, m.ObjectFreed((big.oid,))) in scene.sent


def test_the_files_of_a_state_go_with_the_actor():
    scene, actor = made()
    granted(scene, 1)
    scene.step(m.ActorReady(actor, 1, f"{WORKER}1"), f"{WORKER}1")
    scene.step(m.CheckpointsAt(actor, 1, "file:///state/a"), f"{WORKER}1")
    scene.step(s.RefsDropped((object_id(actor, 0),)))
    assert scene.files == ["file:///state/a"]
    assert actor not in scene.owner.made


def test_an_actor_that_comes_back_goes_before_those_that_wait_for_its_slot():
    scene, actor = made()
    granted(scene, 1)
    scene.step(m.ActorReady(actor, 1, f"{WORKER}1"), f"{WORKER}1")
    other = m.TaskSpec(child_id(b"", 2), b"f", "C", life=m.ActorLife(), max_retries=-1)
    scene.step(s.Submitted(other, b"blob"))
    scene.step(m.LeaseLost(1, m.Death("w1", "h", 7, -9, actor, 1)), NODE)
    granted(scene, 2)
    assert [push.spec.id for push in scene.pushes()] == [actor]


def test_an_actor_that_only_inputs_of_its_own_calls_would_need_ends():
    scene, actor = made()
    granted(scene, 1)
    scene.step(m.ActorReady(actor, 1, f"{WORKER}1"), f"{WORKER}1")
    handle = m.RefTo(object_id(actor, 0), ME)
    scene.step(s.Submitted(m.TaskSpec(child_id(b"", 2), b"g", "g", nested=(handle,)), b"blob"))
    large, node = m.RefTo(object_id(child_id(b"", 2), 0), ME), m.Stored(1 << 20, (NODE,))
    scene.step(m.LeaseGranted(9, (("CPU", 1.0),), (), f"{WORKER}9", "w9", "node"), NODE)
    scene.step(m.TaskDone(child_id(b"", 2), 1, (node,), 10), f"{WORKER}9")
    call = child_id(CALLER, 0)
    scene.step(s.Submitted(m.TaskSpec(call, b"m", "C.m", deps=(large,), actor=handle, caller_key=CALLER), None))
    scene.step(m.ActorAt(actor, 1, "alive", f"{WORKER}1"), ME)
    scene.done(call)
    scene.step(s.RefsDropped((handle.oid, object_id(call, 0))))
    scene.step(s.ActorLooked(actor))
    assert actor in scene.owner.made  # who holds the large one may have it made again
    scene.step(s.RefsDropped((large.oid,)))
    scene.step(s.ActorLooked(actor))
    assert not scene.owner.made
    assert not scene.owner.objects


def test_an_actor_ends_that_only_calls_which_are_kept_for_it_pin():
    scene, actor = made()
    granted(scene, 1)
    scene.step(m.ActorReady(actor, 1, f"{WORKER}1"), f"{WORKER}1")
    handle, call, kept = m.RefTo(object_id(actor, 0), ME), child_id(CALLER, 0), child_id(CALLER, 1)
    scene.step(s.Submitted(m.TaskSpec(call, b"m", "C.m", nested=(handle,), actor=handle, caller_key=CALLER), None))
    scene.step(m.ActorAt(actor, 1, "alive", f"{WORKER}1"), ME)
    again = m.TaskSpec(kept, b"m", "C.m", nested=(handle,), actor=handle, caller_key=CALLER)
    scene.step(m.CallsKept(actor, (m.PushTask(again, 1, 0, seq=1, seen=True),)), f"{WORKER}1")
    scene.step(s.RefsDropped((handle.oid,)))
    scene.step(s.ActorLooked(actor))
    assert actor in scene.owner.made  # a call is open
    scene.done(call)
    scene.step(s.ActorLooked(actor))
    scene.step(s.RefsDropped((object_id(call, 0),)))
    assert not scene.owner.made
    assert not scene.owner.objects


def test_an_actor_ends_that_only_the_argument_of_another_in_its_own_calls_would_need():
    scene, actor = made()
    granted(scene, 1)
    scene.step(m.ActorReady(actor, 1, f"{WORKER}1"), f"{WORKER}1")
    handle, maker = m.RefTo(object_id(actor, 0), ME), child_id(b"", 2)
    second = m.RefTo(object_id(child_id(maker, 1), 0), ME, m.HANDLE)
    scene.step(s.Submitted(m.TaskSpec(maker, b"g", "g", nested=(handle,)), b"blob"))
    for lease, worker in ((8, f"{WORKER}8"), (9, f"{WORKER}9")):  # the first run of the maker dies
        scene.step(m.LeaseGranted(lease, (("CPU", 1.0),), (), worker, f"w{lease}", "node"), NODE)
        gift = m.RefTo(object_id(child_id(maker, 0), 0), worker, f"{ME} {maker.hex()}")
        life = m.ActorLife()
        other = m.TaskSpec(child_id(maker, 1), b"f", "D", deps=(gift,), parent=maker, max_retries=-1, life=life)
        scene.step(m.ActorMade(other, b"blob", (m.Pending(),), maker), worker)
        if lease == 8:
            scene.step(m.LeaseLost(8, m.Death("w8", "h", 7, -9, maker, 1)), NODE)
    scene.step(m.TaskDone(maker, 2, (m.Inline(b"done"),), 10), f"{WORKER}9")
    call = m.TaskSpec(child_id(CALLER, 0), b"m", "C.m", nested=(second,), actor=handle, caller_key=CALLER)
    scene.step(m.CallsKept(actor, (m.PushTask(call, 1, 0, seq=0, seen=True),), True), f"{WORKER}9")
    scene.step(m.BorrowDropped(second.oid, 1), f"{WORKER}9")
    scene.step(s.RefsDropped((handle.oid, object_id(maker, 0))))
    scene.step(s.ActorLooked(actor))
    assert not scene.owner.made


def test_a_borrower_does_not_hold_an_actor_for_what_it_may_make_again():
    scene = with_handle()
    scene.step(m.BorrowAdded(ACTOR_REF.oid, ME))
    scene.step(s.Submitted(m.TaskSpec(child_id(b"", 2), b"g", "g", nested=(ACTOR_REF,)), b"blob"))
    scene.step(m.LeaseGranted(9, (("CPU", 1.0),), (), f"{WORKER}9", "w9", "node"), NODE)
    scene.step(m.TaskDone(child_id(b"", 2), 1, (m.Stored(1 << 20, (NODE,)),), 10), f"{WORKER}9")
    call = scene.call(0, deps=(m.RefTo(object_id(child_id(b"", 2), 0), ME),))
    scene.alive()
    scene.done(call)
    scene.owner.still_held()  # the reply of the running task introduces us
    scene.step(s.RefsDropped((ACTOR_REF.oid, object_id(call, 0), object_id(child_id(b"", 2), 0))))
    assert [type(message) for to, message in scene.sent if to == MAKER] == [m.CallsKept, m.BorrowDropped]
    scene.step(s.RefsMade((ACTOR_REF,)))
    assert [ref.oid for ref in scene.owner.still_held()] == [ACTOR_REF.oid]


def in_file(calls: int, contained: tuple[m.RefTo, ...] = ()) -> m.Checkpoint:
    return m.Checkpoint(calls, m.Inline(b"", contained), f"file:///state/a/1-{calls}")


def alive_with(*checkpoints: m.Checkpoint) -> tuple[Scene, bytes]:
    """An actor that has taken these, and has turns at 0, 3, 6 and 9."""
    scene, actor = made()
    granted(scene, 1)
    scene.step(m.ActorReady(actor, 1, f"{WORKER}1"), f"{WORKER}1")
    turns = tuple(("turn", number, CALLER + bytes(8)) for number in (0, 3, 6, 9))
    scene.step(m.StashAdded(actor, 1, turns, (), 10, 4), f"{WORKER}1")
    for checkpoint in checkpoints:
        scene.step(m.CheckpointTaken(actor, 1, checkpoint), f"{WORKER}1")
    return scene, actor


def comes_back(scene: Scene, actor: bytes, attempt: int) -> m.PushTask:
    """The actor's process dies, and it is pushed to the next one."""
    scene.step(m.LeaseLost(attempt - 1, m.Death(f"w{attempt - 1}", "h", 7, -9, actor, attempt - 1)), NODE)
    granted(scene, attempt)
    return next(push for push in scene.pushes() if push.spec.id == actor)


def kept_turns(scene: Scene, actor: bytes) -> list[int]:
    return [number for _, number in scene.owner.made[actor].task.recorded or ()]


def covered(scene: Scene) -> list[int]:
    """Calls that the actor was told it can be brought back without."""
    return [said.calls for to, said in scene.sent if to == f"{WORKER}1" and isinstance(said, m.CheckpointKept)]


def test_of_checkpoints_in_files_two_are_kept_and_the_older_counts():
    scene, actor = alive_with(in_file(3))
    assert covered(scene) == [0]
    assert kept_turns(scene, actor) == [0, 3, 6, 9]
    scene.step(m.CheckpointTaken(actor, 1, in_file(6)), f"{WORKER}1")
    assert covered(scene) == [3]
    assert kept_turns(scene, actor) == [3, 6, 9]
    push = comes_back(scene, actor, 2)
    assert (push.checkpoint, push.fallback) == (in_file(6), in_file(3))


def test_one_in_memory_counts_at_once():
    scene, actor = alive_with(in_file(3), in_file(6), m.Checkpoint(9, m.Inline(b"state")))
    assert covered(scene) == [9]
    assert kept_turns(scene, actor) == [9]
    assert comes_back(scene, actor, 2).fallback is None


def test_one_in_memory_is_kept_while_the_newest_is_a_file():
    inner = m.RefTo(child_id(b"", 5) + bytes(4), MAKER)
    scene, actor = alive_with(m.Checkpoint(3, m.Inline(b"state", (inner,))), in_file(6))
    assert covered(scene) == [3]
    assert scene.owner.objects[inner.oid].pins == 1
    scene.step(m.CheckpointTaken(actor, 1, in_file(9)), f"{WORKER}1")
    assert inner.oid not in scene.owner.objects


def test_a_checkpoint_that_turned_out_to_be_bad_is_no_fallback():
    scene, actor = alive_with(in_file(3), in_file(6))
    comes_back(scene, actor, 2)
    scene.step(m.ActorReady(actor, 2, f"{WORKER}2", b"", 3), f"{WORKER}2")
    assert scene.owner.made[actor].checkpoint == in_file(3)
    scene.step(m.CheckpointTaken(actor, 2, in_file(9)), f"{WORKER}2")
    push = comes_back(scene, actor, 3)
    assert (push.checkpoint, push.fallback) == (in_file(9), in_file(3))


def test_when_the_only_checkpoint_is_bad_the_constructor_runs_again():
    scene, actor = alive_with(in_file(3))
    push = comes_back(scene, actor, 2)
    assert (push.checkpoint, push.fallback) == (in_file(3), m.BEGINNING)
    scene.step(m.ActorReady(actor, 2, f"{WORKER}2"), f"{WORKER}2")
    assert comes_back(scene, actor, 3).checkpoint is None


def test_the_program_is_told_once_why_there_is_no_checkpoint():
    scene, actor = alive_with()
    for attempt in (1, 1):
        scene.step(m.CheckpointFailed(actor, attempt, 3, "C.lock is a _thread.lock"), f"{WORKER}1")
    assert scene.warned == [f"actor C {short(actor)}: C.lock is a _thread.lock"]
    assert "C.lock is a _thread.lock" in scene.owner.story(actor)[-1]


def test_a_checkpoint_that_is_begun_after_the_end_leaves_no_file():
    scene, actor = alive_with()
    scene.step(s.RefsDropped((object_id(actor, 0),)))
    scene.step(m.CheckpointsAt(actor, 1, "file:///state/a"), f"{WORKER}1")
    assert scene.files == ["file:///state/a"]


def test_numbers_of_calls_are_forgotten_with_an_actor_that_was_let_go_and_has_ended():
    scene = with_handle()
    call = scene.call(0)
    scene.alive()
    scene.done(call)
    scene.step(s.RefsDropped((ACTOR_REF.oid, object_id(call, 0))))
    assert scene.owner.seqs_before
    scene.step(m.ActorAt(ACTOR, 1, "dead", error=b"x"), MAKER)
    assert not scene.owner.seqs_before


def test_the_story_tells_of_checkpoints_and_does_not_keep_them():
    scene, actor = alive_with(m.Checkpoint(3, m.Inline(bytes(100_000))), in_file(6))
    told = [line for line in scene.owner.story(actor) if "CheckpointTaken" in line]
    assert ["calls=3" in told[0], "file:///state/a/1-6" in told[1]] == [True, True]
    assert sum(len(msgspec.msgpack.encode(entry)) for entry in scene.owner.journal._entries) < 10_000


def test_what_takes_the_memory_is_told_by_the_method_that_made_it():
    scene = with_handle()
    call = scene.call(1)
    scene.step(m.ActorAt(ACTOR, 1, "alive", f"{WORKER}1", "none"), MAKER)
    scene.done(call)
    assert call not in scene.owner.tasks
    assert [(one["name"], one["refs"]) for one in owned(scene.owner)["objects"]] == [("C.m", 1)]
