"""What an owner keeps of others' logs, whom it asks when an actor is dead, and what waits for a journal."""

from __future__ import annotations

import pytest

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.ids import child_id, object_id
from flowengine.core.owner import Owner

ME, NODE, CALLER, OTHER = "tcp://h:1#me", "tcp://h:2#node", "tcp://h:4#caller", "tcp://h:5#other"
FIRST, SECOND = "tcp://h:3#first", "tcp://h:3#second"
TURN = ("turn", 0, b"k" * 16 + bytes(8))


class Scene:
    """An owner of one actor; keeps what it sent last."""

    def __init__(self, config: Config | None = None) -> None:
        self.owner = Owner(ME, NODE, "node", config or Config())
        self.now = 0.0
        self.sent: list[tuple[str, m.Message]] = []
        self.timers: list[m.Message] = []
        self.actor = child_id(b"", 1)

    def step(self, event: m.Message, sender: str = "") -> Scene:
        self.now += 0.001
        out = self.owner.handle(event, self.now, sender)
        self.sent = [(one.to, one.message) for one in out if isinstance(one, c.Send)]
        self.timers += [one.event for one in out if isinstance(one, c.SetTimer)]
        return self

    def said(self, kind: type[m.Message]) -> list[m.Message]:
        return [message for _, message in self.sent if isinstance(message, kind)]

    def living(self) -> Scene:
        """The actor takes calls, and one process calls it."""
        self.step(s.Submitted(m.TaskSpec(self.actor, b"f", "C", life=m.ActorLife(), max_retries=-1), b"blob"))
        self.granted(1, FIRST).step(m.ActorReady(self.actor, 1, FIRST), FIRST)
        return self.step(m.WatchActor(self.actor), CALLER)

    def granted(self, number: int, worker: str) -> Scene:
        shape, place = next(iter(self.owner.queues))
        return self.step(m.LeaseGranted(number, shape, place, worker, "w1", "node"), NODE)

    def died(self) -> m.Asked:
        self.step(m.LeaseLost(1, m.Death("w1", "h", 7, -9)), NODE)
        (asked,) = self.said(m.Asked)
        assert isinstance(asked, m.Asked)
        return asked

    def back(self) -> Scene:
        return self.granted(2, SECOND).step(m.ActorReady(self.actor, 2, SECOND), SECOND)

    def log(self) -> tuple[object, ...]:
        (known,) = self.said(m.CallersKnown)
        assert isinstance(known, m.CallersKnown)
        return known.callers, known.recorded, known.reach


def test_an_actor_that_is_back_gets_what_all_processes_know_of_its_log():
    scene = Scene().living()
    asked = scene.died()
    assert (asked.topic, asked.argument) == ("stash", [scene.actor, 1, FIRST])
    assert not scene.back().said(m.CallersKnown)
    scene.step(m.Answered(asked.request, "stash", [[[], 0], [[list(TURN)], 3]]), NODE)
    assert scene.log() == ((CALLER,), (TURN,), 3)


def test_another_node_is_asked_when_the_own_one_is_dead_too():
    scene = Scene().living()
    other = m.NodeEntry("other", OTHER, "h", (), ())
    scene.step(m.NodesChanged((other,)), NODE).step(m.PeerLost(NODE, "closed"), NODE)
    assert [to for to, message in scene.sent if isinstance(message, m.Asked)] == [OTHER]


def test_an_answer_that_comes_before_the_actor_is_back_waits_for_it():
    scene = Scene().living()
    asked = scene.died()
    scene.step(m.Answered(asked.request, "stash", [[[list(TURN)], 1]]), NODE)
    assert scene.back().log() == ((CALLER,), (TURN,), 1)


def test_who_does_not_answer_keeps_no_actor_from_coming_back():
    scene = Scene().living()
    scene.died()
    scene.back()
    (over,) = [timer for timer in scene.timers if isinstance(timer, s.PollOver)]
    assert scene.step(over).log() == ((CALLER,), (), 0)
    assert not scene.step(over).sent


def test_entries_of_a_dead_incarnation_count_until_the_question_is_answered():
    scene = Scene().living()
    asked = scene.died()
    scene.step(m.StashAdded(scene.actor, 1, (TURN,), (), 1, 1), CALLER)
    assert scene.said(m.StashKept)
    scene.step(m.Answered(asked.request, "stash", []), NODE)
    scene.step(m.StashAdded(scene.actor, 1, (("turn", 1, b"late"),), (), 2, 2), CALLER)
    assert scene.said(m.StashKept)  # or it would be sent for ever
    assert scene.back().log() == ((CALLER,), (TURN,), 1)


def test_what_a_dead_process_says_after_the_question_is_not_heard():
    scene = Scene()
    handle = m.RefTo(object_id(scene.actor, 0), CALLER, "")
    scene.step(s.RefsMade((handle,)))
    call = child_id(b"p" * 16, 0)
    scene.step(s.Submitted(m.TaskSpec(call, b"m", "C.m", actor=handle, caller_key=b"p" * 16), None))
    scene.step(m.ActorAt(scene.actor, 1, "alive", FIRST), CALLER)
    scene.owner.log_given(scene.actor, 1, FIRST)
    scene.step(m.TaskDone(call, 1, (m.Inline(b"x"),), 10), FIRST)
    assert scene.owner.objects[object_id(call, 0)].value is None
    scene.step(m.ActorAt(scene.actor, 2, "alive", SECOND), CALLER)
    scene.step(m.TaskDone(call, 1, (m.Inline(b"y"),), 10), SECOND)
    assert scene.owner.objects[object_id(call, 0)].value == m.Inline(b"y")


def test_a_checkpoint_lets_the_entries_before_it_go():
    scene = Scene().living()
    log = (TURN, (f"wait:{b'c'.hex()}:0", 0, b"old"), ("turn", 2, b"k" * 24), (f"wait:{b'd'.hex()}:2", 0, b"new"))
    scene.step(m.StashAdded(scene.actor, 1, log, (), 3, 4), FIRST)
    scene.step(m.CheckpointTaken(scene.actor, 1, m.Checkpoint(2, m.Inline(b""))), FIRST)
    asked = scene.died()
    scene.step(m.Answered(asked.request, "stash", [[[list(entry) for entry in log], 3]]), NODE)
    assert scene.back().log() == ((CALLER,), log[2:], 3)


@pytest.mark.parametrize(("state", "coming"), [("running", "yes"), ("done", "no"), ("unknown", "")])
def test_a_replay_that_misses_a_call_hears_whether_its_caller_comes(state, coming):
    scene = Scene().living()
    task = child_id(b"", 7)
    if state != "unknown":
        scene.step(s.Submitted(m.TaskSpec(task, b"g", "g"), b"blob"))
        shape, place = list(scene.owner.queues)[-1]
        scene.step(m.LeaseGranted(9, shape, place, OTHER, "w9", "node"), NODE)
    if state == "done":
        scene.step(m.TaskDone(task, 1, (m.Stored(1 << 20, (NODE,)),), 10), OTHER)
    scene.step(m.CallerSought(scene.actor, task, 5), FIRST)
    assert scene.sent == [(FIRST, m.CallerFound(scene.actor, 5, coming))]


def test_what_a_task_says_waits_until_its_choice_is_kept():
    scene = Scene()
    task = b"t" * 16
    scene.step(s.ParentBegan(task, CALLER, 1)).step(s.Noted(task, "wait", 0, b"chosen"))
    assert scene.sent == [(CALLER, m.StashAdded(task, 1, (("wait", 0, b"chosen"),), (), 0, 1))]
    oid = object_id(child_id(task, 0), 0)
    scene.step(s.ValuePut(oid, m.Inline(b"x"))).step(m.WatchObject(oid), OTHER)
    assert not scene.sent
    scene.step(m.StashKept(task, 1, 1, 0), CALLER)
    assert scene.sent == [(OTHER, m.ObjectReady(oid, m.Inline(b"x")))]
    assert not scene.owner.stash.open


def test_what_a_task_says_does_not_wait_for_a_journal_that_was_dead_before():
    scene = Scene()
    task = b"t" * 16
    scene.step(m.PeerLost(CALLER, "closed"), CALLER)
    scene.step(s.ParentBegan(task, CALLER, 1)).step(s.Noted(task, "wait", 0, b"chosen"))
    assert not scene.sent
    oid = object_id(child_id(task, 0), 0)
    scene.step(s.ValuePut(oid, m.Inline(b"x"))).step(m.WatchObject(oid), OTHER)
    assert scene.sent == [(OTHER, m.ObjectReady(oid, m.Inline(b"x")))]


def test_a_slow_journal_confirms_late():
    scene = Scene(Config(journal_delay_s=0.005)).living()
    scene.step(m.StashAdded(scene.actor, 1, (TURN,), (), 1, 1), FIRST)
    assert not scene.sent
    (written,) = [timer for timer in scene.timers if isinstance(timer, s.JournalWritten)]
    assert scene.step(written).sent == [(FIRST, m.StashKept(scene.actor, 1, 1, 1))]
