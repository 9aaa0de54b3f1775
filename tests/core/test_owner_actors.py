"""An owner driven by hand: calls of actors that others made, and actors that it made."""

from __future__ import annotations

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.ids import child_id, object_id
from flowengine.core.owner import Owner
from flowengine.errors import ActorDied, TaskCancelled, pack_error, unpack_error

ME, NODE, WORKER, MAKER = "tcp://h:1#me", "tcp://h:2#node", "tcp://h:3#worker", "tcp://h:4#maker"
ACTOR = child_id(b"", 99)
ACTOR_REF = m.RefTo(object_id(ACTOR, 0), MAKER)
CALLER = b"c" * 16


class Scene:
    """An owner that calls one actor; keeps what it sent last."""

    def __init__(self) -> None:
        self.owner = Owner(ME, NODE, "node", Config())
        self.now = 0.0
        self.sent: list[tuple[str, m.Message]] = []
        self.files: list[str] = []

    def step(self, event: m.Message, sender: str = "") -> None:
        self.now += 0.001
        out = self.owner.handle(event, self.now, sender)
        self.sent = [(one.to, one.message) for one in out if isinstance(one, c.Send)]
        self.files += [one.path for one in out if isinstance(one, c.DropState)]

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
    scene.step(m.CheckpointTaken(actor, 1, m.Checkpoint(1, m.Inline(b""), "/state/a-1")), f"{WORKER}1")
    scene.step(s.RefsDropped((object_id(actor, 0),)))
    assert scene.files == ["/state/a-1"]
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
