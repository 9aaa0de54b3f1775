"""Actors that code in workers makes, by hand: as the maker sees it, and as the driver to which they belong."""

from __future__ import annotations

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.ids import child_id, object_id
from flowengine.core.owner import Owner
from flowengine.errors import ActorDied, ObjectLost, pack_error, unpack_error

ME, NODE, DRIVER, MAKER, OTHER = "tcp://h:1#me", "tcp://h:2#node", "tcp://h:3#drv", "tcp://h:4#mkr", "tcp://h:5#oth"
TOP = child_id(b"", 7)
ACTOR = child_id(TOP, 0)
HANDLE = m.RefTo(object_id(ACTOR, 0), DRIVER, m.HANDLE)
LIFE = m.ActorLife()


class Scene:
    """One owner behind the door of a worker; keeps what it sent last."""

    def __init__(self, me: str) -> None:
        self.owner = Owner(me, NODE, "node", Config())
        self.now = 0.0
        self.sent: list[tuple[str, m.Message]] = []

    def step(self, event: m.Message, sender: str = "") -> None:
        self.now += 0.001
        self.leave(self.owner.handle(event, self.now, sender))

    def leave(self, commands: list[object]) -> None:
        self.sent = [(one.to, one.message) for one in self.owner.gate(commands) if isinstance(one, c.Send)]

    def kinds(self, to: str) -> list[type]:
        return [type(message) for receiver, message in self.sent if receiver == to]


# --- the maker ------------------------------------------------------------------------------------------


def maker(**fields: object) -> Scene:
    scene = Scene(ME)
    scene.step(s.ParentBegan(TOP, DRIVER, 1))
    spec = m.TaskSpec(ACTOR, b"f", "C", parent=TOP, life=LIFE, driver=f"{DRIVER} {TOP.hex()}", **fields)
    scene.step(s.Submitted(spec, b"blob"))
    return scene


def test_a_maker_tells_the_driver_first_and_then_others():
    scene = maker()
    assert scene.kinds(DRIVER) == [m.ActorMade]
    call = m.TaskSpec(child_id(TOP, 1), b"m", "C.m", actor=HANDLE, caller_key=TOP, parent=TOP)
    scene.step(s.Submitted(call, None))
    assert scene.kinds(DRIVER) == [m.WatchActor]
    task = m.TaskSpec(child_id(TOP, 2), b"g", "g", nested=(HANDLE,), parent=TOP)
    scene.step(s.Submitted(task, b"blob"))
    scene.step(m.LeaseGranted(9, (("CPU", 1.0),), (), OTHER, "w9", "node"), NODE)
    assert not scene.kinds(OTHER)
    scene.step(m.ActorNoted(ACTOR), DRIVER)
    assert m.PushTask in scene.kinds(OTHER)
    assert not scene.owner.made


def test_what_was_held_back_goes_out_when_the_driver_is_gone():
    scene = maker()
    scene.leave([c.Send(OTHER, m.Ping(1))])
    assert not scene.sent
    scene.step(m.PeerLost(DRIVER, "gone"))
    assert (OTHER, m.Ping(1)) in scene.sent


def test_the_driver_is_introduced_to_the_owners_of_what_a_constructor_gets():
    scene = Scene(ME)
    mine, theirs = m.RefTo(object_id(child_id(TOP, 5), 0), ME), m.RefTo(object_id(child_id(b"x", 5), 0), OTHER)
    scene.step(s.ValuePut(mine.oid, m.Stored(1 << 20, (NODE,)), False))
    scene.step(s.RefsMade((theirs,)))
    spec = m.TaskSpec(
        ACTOR, b"f", "C", deps=(mine,), nested=(theirs,), parent=TOP, life=LIFE, driver=f"{DRIVER} {TOP.hex()}"
    )
    scene.step(s.Submitted(spec, b"blob"))
    made = next(message for _, message in scene.sent if isinstance(message, m.ActorMade))
    assert made.values == (m.Stored(1 << 20, (NODE,)), m.Pending())
    assert scene.owner.objects[mine.oid].borrowers == {DRIVER: 1}
    scene.step(m.ActorNoted(ACTOR), DRIVER)
    assert (OTHER, m.BorrowAdded(theirs.oid, DRIVER)) in scene.sent


def test_a_handle_in_a_result_for_its_owner_is_held_until_the_result_has_left():
    scene = maker()
    scene.step(m.ActorNoted(ACTOR), DRIVER)
    scene.step(s.Exported((HANDLE,), DRIVER))
    scene.step(s.RefsDropped((HANDLE.oid,)))
    assert not scene.sent
    scene.leave([c.Send(DRIVER, m.TaskDone(TOP, 1, (m.Inline(b"x", (HANDLE,)),), 10))])
    assert scene.kinds(DRIVER) == [m.TaskDone, m.BorrowDropped]
    assert not scene.owner.objects


def test_a_maker_that_will_run_again_says_so_before_its_references_go():
    scene = maker()
    scene.step(s.ParentRepeats(TOP))
    assert scene.kinds(DRIVER) == [m.MakerLeft]
    scene = maker()
    scene.step(s.ParentEnded(TOP, True, True))
    assert scene.kinds(DRIVER) == [m.MakerLeft]
    scene = maker()
    scene.step(s.ParentEnded(TOP))
    assert not scene.sent


# --- the driver -----------------------------------------------------------------------------------------


def driver(*deps: m.RefTo, values: tuple[m.Value | m.Pending, ...] = ()) -> Scene:
    """A task of its own runs in the maker's process and makes an actor."""
    scene = Scene(DRIVER)
    scene.step(s.Submitted(m.TaskSpec(TOP, b"g", "g"), b"blob"))
    scene.step(m.LeaseGranted(1, (("CPU", 1.0),), (), MAKER, "w1", "node"), NODE)
    scene.step(asked(*deps, values=values), MAKER)
    return scene


def asked(*deps: m.RefTo, values: tuple[m.Value | m.Pending, ...] = ()) -> m.ActorMade:
    spec = m.TaskSpec(ACTOR, b"f", "C", deps=deps, parent=TOP, max_retries=-1, caller_key=TOP, life=LIFE)
    return m.ActorMade(spec, b"blob", values, TOP)


def test_an_actor_that_a_worker_made_is_the_drivers_and_ends_with_its_last_handle():
    scene = driver()
    assert m.ActorNoted in scene.kinds(MAKER)
    actor = scene.owner.objects[HANDLE.oid]
    assert (actor.local, actor.borrowers) == (0, {MAKER: 1})
    scene.step(m.BorrowDropped(HANDLE.oid, 1), MAKER)
    assert not scene.owner.made
    assert not scene.owner.tops


def test_an_actor_waits_for_a_maker_that_has_died_and_is_found_by_its_next_run():
    scene = driver()
    scene.step(m.LeaseLost(1, m.Death("w1", "h", 7, -9, TOP, 1)), NODE)
    made = scene.owner.made[ACTOR]
    scene.step(asked(), OTHER)
    assert scene.owner.made[ACTOR] is made
    assert scene.owner.objects[HANDLE.oid].borrowers == {OTHER: 1}
    scene.step(m.BorrowDropped(HANDLE.oid, 1), OTHER)
    assert not scene.owner.made


def test_an_actor_whose_maker_died_ends_with_the_task_that_might_have_made_it_again():
    scene = driver()
    scene.step(m.LeaseLost(1, m.Death("w1", "h", 7, -9, TOP, 1)), NODE)
    scene.step(s.CancelAsked(object_id(TOP, 0), False, False))
    assert not scene.owner.made


def test_an_actor_waits_for_a_maker_that_was_stopped_and_for_a_holder_that_died():
    scene = driver()
    scene.step(m.MakerLeft(ACTOR), MAKER)
    scene.step(m.BorrowDropped(HANDLE.oid, 1), MAKER)
    assert ACTOR in scene.owner.made
    scene = driver()
    scene.step(m.BorrowAdded(HANDLE.oid, OTHER), MAKER)
    scene.step(m.BorrowDropped(HANDLE.oid, 1), MAKER)
    scene.step(m.PeerLost(OTHER, "gone"))
    assert ACTOR in scene.owner.made


def test_a_constructors_arguments_outlive_their_owner():
    large = m.RefTo(object_id(child_id(TOP, 5), 0), MAKER)
    scene = driver(large, values=(m.Stored(1 << 20, (OTHER,)),))
    scene.step(m.PeerLost(MAKER, "gone"))
    assert (OTHER, m.ObjectAdopted(large.oid, DRIVER)) in scene.sent
    assert scene.owner.made[ACTOR].state == "pending"


def test_a_constructors_argument_that_is_lost_is_the_actors_end_and_callers_hear_it():
    unknown = m.RefTo(object_id(child_id(TOP, 5), 0), MAKER)
    scene = driver(unknown, values=(m.Pending(),))
    scene.step(m.WatchActor(ACTOR), OTHER)
    scene.step(m.ObjectReady(unknown.oid, m.Failed(pack_error(ObjectLost("it is gone")), "lost")), MAKER)
    told = next(message for to, message in scene.sent if to == OTHER and isinstance(message, m.ActorAt))
    error = unpack_error(told.error)
    assert isinstance(error, ActorDied)
    assert "an argument of its constructor is lost" in str(error)
    scene.step(asked(m.RefTo(unknown.oid, OTHER), values=(m.Inline(b"x"),)), OTHER)
    assert scene.owner.made[ACTOR].state == "pending"  # the maker has run again and brings it
    assert scene.owner.objects[HANDLE.oid].borrowers == {MAKER: 1, OTHER: 1}


def test_an_argument_whose_owner_died_is_waited_for_while_its_maker_may_run_again():
    pending = m.RefTo(object_id(child_id(TOP, 5), 0), MAKER)
    scene = driver(pending, values=(m.Pending(),))
    scene.step(m.PeerLost(MAKER, "gone"))
    assert scene.owner.made[ACTOR].state == "pending"
    scene.step(m.LeaseLost(1, m.Death("w1", "h", 7, -9, TOP, 1)), NODE)
    scene.step(m.LeaseGranted(3, (("CPU", 1.0),), (), OTHER, "w3", "node"), NODE)
    asked = [message for to, message in scene.sent if to == OTHER][-2:]
    assert asked == [m.HeirAsked(pending.oid, OTHER, TOP), m.WatchObject(pending.oid)]
    scene.step(m.TaskDone(TOP, 2, (m.Inline(b"x"),), 10), OTHER)  # it did not come to the actor again
    assert [message for to, message in scene.sent if to == OTHER] == [m.HeirAsked(pending.oid, OTHER, b"")]
    scene.step(m.BorrowConfirmed(pending.oid), OTHER)
    scene.step(m.ObjectReady(pending.oid, m.Failed(pack_error(ObjectLost("unknown")), "lost")), OTHER)
    assert not scene.owner.made or scene.owner.made[ACTOR].state == "dead"


def test_an_argument_of_a_run_that_was_stopped_is_waited_for_while_its_maker_may_run_again():
    pending = m.RefTo(object_id(child_id(TOP, 5), 0), MAKER)
    lost = m.ObjectReady(pending.oid, m.Failed(pack_error(ObjectLost("it had to stop")), "lost"))
    scene = driver(pending, values=(m.Pending(),))
    scene.step(m.MakerLeft(ACTOR), MAKER)
    scene.step(lost, MAKER)
    assert scene.owner.made[ACTOR].state == "pending"
    scene.step(m.TaskDone(TOP, 1, (m.Inline(b"x"),), 10), MAKER)  # nobody brings it any more
    assert scene.kinds(MAKER) == [m.WatchObject]
    scene.step(lost, MAKER)
    assert ACTOR not in scene.owner.made or scene.owner.made[ACTOR].state == "dead"


def test_an_argument_is_asked_of_the_maker_that_runs_again_and_not_of_an_heir_that_waits_for_it():
    pending = m.RefTo(object_id(child_id(TOP, 5), 0), MAKER, f"{OTHER} {TOP.hex()}")
    scene = driver(pending, values=(m.Pending(),))
    scene.step(m.PeerLost(MAKER, "gone"))
    assert m.HeirAsked in scene.kinds(OTHER)
    fresh = "tcp://h:6#fresh"
    scene.step(asked(m.RefTo(pending.oid, fresh, pending.heir), values=(m.Pending(),)), fresh)
    assert m.WatchObject in scene.kinds(fresh)
    scene.step(m.BorrowConfirmed(pending.oid, 1), OTHER)
    assert scene.kinds(OTHER) == [m.BorrowDropped]
    scene.step(m.ObjectReady(pending.oid, m.Inline(b"x")), fresh)
    assert any(queue.count for queue in scene.owner.queues.values())


def test_an_argument_that_is_lost_while_the_actor_lives_is_had_from_the_maker_that_runs_again():
    heir, gone = f"{DRIVER} {TOP.hex()}", "tcp://h:6#gone"
    scene = driver(m.RefTo(object_id(child_id(TOP, 5), 0), MAKER, heir), values=(m.Stored(1 << 20, (gone,)),))
    shape, place = next(key for key in scene.owner.queues if key[1][:1] == (s.SOLE,))
    scene.step(m.LeaseGranted(2, shape, place, OTHER, "w2", "node"), NODE)
    scene.step(m.ActorReady(ACTOR, 1, OTHER), OTHER)
    scene.step(m.PeerLost(gone, "gone"))
    scene.step(m.LeaseLost(1, m.Death("w1", "h", 7, -9, TOP, 1)), NODE)
    fresh = "tcp://h:7#fresh"
    scene.step(asked(m.RefTo(object_id(child_id(TOP, 5), 0), fresh, heir), values=(m.Pending(),)), fresh)
    assert m.WatchObject in scene.kinds(fresh)  # it waits for the actor, which may die now


def test_an_actor_that_nobody_needs_hands_its_calls_over_before_its_process_ends():
    scene = driver()
    shape, place = next(key for key in scene.owner.queues if key[1][:1] == (s.SOLE,))
    scene.step(m.LeaseGranted(2, shape, place, OTHER, "w2", "node"), NODE)
    scene.step(m.ActorReady(ACTOR, 1, OTHER), OTHER)
    scene.step(m.BorrowDropped(HANDLE.oid, 1), MAKER)
    assert scene.kinds(OTHER) == [m.ActorUnneeded]
    assert not scene.kinds(NODE)
    scene.step(m.ActorLeft(ACTOR), OTHER)
    assert scene.kinds(NODE) == [m.KillWorker]

    actor = Scene(OTHER)
    called = m.RefTo(object_id(child_id(b"x", 1), 0), DRIVER, m.HANDLE)
    actor.step(s.RefsMade((called,)))
    call = m.TaskSpec(child_id(ACTOR, 0), b"m", "C.m", actor=called, caller_key=ACTOR, parent=ACTOR)
    actor.step(s.Submitted(call, None))
    actor.step(m.ActorAt(called.oid[:16], 1, "alive", MAKER), DRIVER)
    actor.step(m.TaskDone(call.id, 1, (m.Inline(b"x"),), 10), MAKER)
    actor.step(m.ActorUnneeded(ACTOR), DRIVER)
    assert actor.kinds(DRIVER) == [m.CallsKept, m.ActorLeft]
