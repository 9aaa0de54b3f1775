"""Owners driven by hand: what an actor's code owns goes with a checkpoint, and comes back in another process."""

from __future__ import annotations

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.ids import child_id, object_id
from flowengine.core.owner import Owner
from flowengine.core.owner_estate import Estate, EstateLetGo, EstateRestored, EstateTaken

OLD, NEW, DRIVER, NODE = "tcp://h:1#old", "tcp://h:1#new", "tcp://h:2#driver", "tcp://h:3#node"
ACTOR, OTHER = child_id(b"", 1), child_id(b"", 2)
OTHER_REF = m.RefTo(object_id(OTHER, 0), DRIVER, m.HANDLE)
PUT = object_id(child_id(ACTOR, 7), 0)


class Process:
    """An owner that keeps what it orders."""

    def __init__(self, me: str) -> None:
        self.owner = Owner(me, NODE, "node", Config())
        self.sent: list[tuple[str, m.Message]] = []
        self.timers: list[m.Message] = []
        self.now = 0.0

    def step(self, event: m.Message, sender: str = "") -> None:
        self.now += 0.001
        out = self.owner.handle(event, self.now, sender)
        self.sent = [(one.to, one.message) for one in out if isinstance(one, c.Send)]
        self.timers += [one.event for one in out if isinstance(one, c.SetTimer)]

    def told(self, kind: type) -> list[m.Message]:
        return [message for _, message in self.sent if isinstance(message, kind)]

    def call(self, number: int, *deps: m.RefTo) -> bytes:
        call = child_id(ACTOR, number)
        spec = m.TaskSpec(call, b"m", "C.m", deps=deps, actor=OTHER_REF, caller_key=ACTOR, parent=ACTOR)
        self.step(s.Submitted(spec, None))
        return call


def old() -> Process:
    """Its code has called another actor three times (the first has ended), put a value, and submitted a task."""
    process = Process(OLD)
    process.step(s.RefsMade((OTHER_REF,)))
    calls = [process.call(number) for number in range(3)]
    process.step(m.ActorAt(OTHER, 1, "alive", "other", "exactly_once"), DRIVER)
    process.step(m.TaskDone(calls[0], 1, (m.Inline(b"x"),), 10), "other")
    process.step(s.ValuePut(PUT, m.Inline(b"put"), False))
    process.step(s.Submitted(m.TaskSpec(child_id(ACTOR, 8), b"f", "f", parent=ACTOR), b"blob"))
    return process


def back(estate: Estate) -> Process:
    process = Process(NEW)
    process.step(s.ParentBegan(ACTOR, DRIVER, 2, ()))
    process.step(s.SeqsRestored(ACTOR, ((OTHER, 3),)))
    process.step(EstateRestored(ACTOR, estate, ((OTHER, 3),)))
    return process


def test_an_estate_has_what_had_not_ended_with_its_numbers_and_what_is_held():
    estate = old().owner.estate()
    assert [(child.spec.id, child.blob, child.seq) for child in estate.children] == [
        (child_id(ACTOR, 1), None, 1), (child_id(ACTOR, 2), None, 2), (child_id(ACTOR, 8), b"blob", -1),
    ]  # fmt: skip
    assert {owned.oid: owned.was_put for owned in estate.values} == {PUT: True, object_id(child_id(ACTOR, 0), 0): False}
    assert OTHER_REF in estate.refs()


def test_calls_that_had_ended_and_have_references_are_kept_by_the_owner_of_their_actor():
    process = old()
    call = process.call(3, m.RefTo(PUT, OLD))
    process.step(m.TaskDone(call, 1, (m.Inline(b"x"),), 10), "other")
    process.step(EstateTaken())
    (kept,) = process.told(m.CallsKept)
    assert [(push.seq, push.seen) for push in kept.calls] == [(3, True)]
    process.step(EstateTaken())
    assert process.told(m.CallsKept) == []


def test_calls_that_had_ended_of_an_actor_that_the_state_does_not_know_go_to_its_owner():
    process = Process(NEW)
    process.step(s.ParentBegan(ACTOR, DRIVER, 2, ()))
    only_ended = Estate(calls=old().owner.estate().calls)
    process.step(EstateRestored(ACTOR, only_ended, ((OTHER, 3),)))
    (kept,) = process.told(m.CallsKept)
    assert [(push.seq, push.seen) for push in kept.calls] == [(0, True)]
    assert not process.owner.targets


def test_what_had_not_ended_is_made_again_by_the_same_names_and_numbers():
    process = back(old().owner.estate())
    process.step(m.ActorAt(OTHER, 1, "alive", "other", "exactly_once"), DRIVER)
    assert [(push.spec.id, push.seq, push.seen) for push in process.told(m.PushTask)] == [
        (child_id(ACTOR, 0), 0, True), (child_id(ACTOR, 1), 1, False), (child_id(ACTOR, 2), 2, False),
    ]  # fmt: skip
    process.call(3)
    assert [push.seq for push in process.told(m.PushTask)] == [3]


def test_a_value_is_there_for_those_who_ask_in_time():
    process = back(old().owner.estate())
    process.step(m.HeirAsked(PUT, NEW, ACTOR), DRIVER)
    (timer,) = [event for event in process.timers if isinstance(event, EstateLetGo)]
    process.step(timer)
    assert list(process.owner.objects[PUT].borrowers or ()) == [DRIVER]
    assert object_id(child_id(ACTOR, 0), 0) not in process.owner.objects
    process.step(m.BorrowDropped(PUT, 1), DRIVER)
    assert PUT not in process.owner.objects


def test_what_the_replay_has_yet_to_make_is_waited_for_and_what_it_does_not_make_is_lost():
    process = back(Estate())
    made, never = object_id(child_id(ACTOR, 20), 0), object_id(child_id(ACTOR, 21), 0)
    for oid in (made, never):
        process.step(m.HeirAsked(oid, NEW, ACTOR), DRIVER)
        process.step(m.WatchObject(oid), DRIVER)
        assert process.told(m.ObjectReady) == []
    process.step(s.ValuePut(made, m.Inline(b"v"), False))
    assert process.told(m.ObjectReady) == [m.ObjectReady(made, m.Inline(b"v"))]
    for oid in (made, never):
        process.step(m.HeirAsked(oid, NEW, b""), DRIVER)
        assert [type(ready.value) for ready in process.told(m.ObjectReady)] == ([m.Failed] if oid == never else [])


def test_the_actors_owner_sends_those_who_ask_to_the_new_process():
    process = Process(DRIVER)
    life = m.ActorLife()
    process.step(s.Submitted(m.TaskSpec(ACTOR, b"f", "A", life=life, shape=()), b"blob"))
    task = process.owner.tasks[ACTOR]
    ref = m.RefTo(PUT, OLD, f"{DRIVER} {ACTOR.hex()}")
    process.step(s.RefsMade((ref,)))
    process.step(s.ReadyAsked(1, (PUT,), 1))
    process.step(m.PeerLost(OLD, "killed"))
    assert process.owner.objects[PUT].task is task
    made = process.owner.made[ACTOR]
    made.state, made.worker = "alive", NEW
    process.owner.out = []
    process.owner.bring_wards(task, False)
    orders = [one.message for one in process.owner.out if isinstance(one, c.Send)]
    assert orders == [m.HeirAsked(PUT, NEW, ACTOR), m.WatchObject(PUT)]
