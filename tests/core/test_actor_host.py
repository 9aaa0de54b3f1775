"""The order of an actor's calls, and what a new incarnation does again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.actor_host import ActorHost, CallEnded, CallMissed, DrainEnded, HostReady, StateSaved
from flowengine.core.ids import child_id

ACTOR, A, B = b"a" * 16, b"A" * 16, b"B" * 16
OWNER, ME, ADDRESS = "owner", "me", {A: "at-a", B: "at-b"}


def call(caller: bytes, seq: int, seen: bool = False, name: str = "m") -> m.PushTask:
    actor = m.RefTo(ACTOR + bytes(4), OWNER)
    spec = m.TaskSpec(child_id(caller, seq), name.encode(), name, actor=actor, caller_key=caller)
    return m.PushTask(spec, 1, 0, seq=seq, seen=seen)


class Kit:
    """A host that is driven by hand; keeps what it ran and what it said."""

    def __init__(self, attempt: int = 1, recorded: tuple[Any, ...] = (), life: m.ActorLife | None = None) -> None:
        spec = m.TaskSpec(ACTOR, b"f", "C", life=life or m.ActorLife(checkpoint="never"))
        self.host = ActorHost(m.PushTask(spec, attempt, 1, run=attempt, recorded=recorded), OWNER, ME)
        self.ran: list[tuple[bytes, int]] = []
        self.sent: list[tuple[str, Any]] = []
        self.running: list[m.PushTask] = []
        self.saves: list[int] = []

    def see(self) -> None:
        out, self.host.out = self.host.gate(self.host.out, "node"), []
        for command in out:
            if isinstance(command, c.RunTask):
                self.running.append(command.push)
                self.ran.append((command.push.spec.caller_key, command.push.seq))
            elif isinstance(command, c.Send):
                self.sent.append((command.to, command.message))
            elif isinstance(command, c.SaveState):
                self.saves.append(command.calls)

    def ready(self, snapshot: Any = None) -> Kit:
        self.host.host_ready(HostReady(snapshot))
        self.see()
        return self

    def come(self, *pushes: m.PushTask) -> Kit:
        for push in pushes:
            self.host.call_came(push, ADDRESS[push.spec.caller_key])
            self.see()
        return self

    def end(self) -> Kit:
        """The running calls end, until none runs."""
        while self.running:
            push = self.running.pop(0)
            done = m.TaskDone(push.spec.id, push.attempt, (m.Inline(b"N"),), 10)
            self.host.call_ended(CallEnded(push.spec.id, done))
            self.see()
        return self

    def tell(self, event: Any, sender: str = "") -> Kit:
        self.host.told(event, sender)
        self.see()
        return self

    def turns(self) -> tuple[tuple[str, int, bytes], ...]:
        return tuple(entry for to, said in self.sent if isinstance(said, m.StashAdded) for entry in said.recorded)

    def answered(self, to: str) -> int:
        return sum(isinstance(said, m.TaskDone) for receiver, said in self.sent if receiver == to)


def test_calls_of_a_caller_run_in_their_order_however_they_come():
    kit = Kit().ready().come(call(A, 2), call(A, 1), call(A, 0)).end()
    assert kit.ran == [(A, 0), (A, 1), (A, 2)]


def test_a_call_that_comes_twice_runs_once_and_is_answered_twice():
    kit = Kit().ready().come(call(A, 0)).end().come(call(A, 0))
    kit.tell(m.TurnsKept(ACTOR, 0))
    assert kit.ran == [(A, 0)]
    assert kit.answered("at-a") == 2


def test_only_a_change_of_caller_is_a_turn():
    kit = Kit().ready().come(call(A, 0), call(A, 1)).end().come(call(B, 0)).end()
    assert [number for _, number, _ in kit.turns()] == [0, 2]


def test_nothing_leaves_before_the_owner_has_the_turn():
    kit = Kit().ready().come(call(A, 0)).end()
    assert kit.answered("at-a") == 0
    assert kit.tell(m.TurnsKept(ACTOR, 0)).answered("at-a") == 1


def recorded_by(*order: bytes) -> tuple[tuple[str, int, bytes], ...]:
    """The turns of a run in which callers came in this order."""
    kit = Kit().ready()
    seqs: dict[bytes, int] = {}
    for caller in order:
        seqs[caller] = seqs.get(caller, -1) + 1
        kit.come(call(caller, seqs[caller])).end()
    return kit.turns()


@pytest.mark.parametrize("order", [(A, B, A, A, B), (B, B, A), (A, B, A, B, A, B)])
def test_a_new_incarnation_runs_what_was_seen_in_the_same_order(order):
    kit = Kit(2, recorded_by(*order)).ready()
    kit.tell(m.CallersKnown(ACTOR, ("at-a", "at-b")))
    counts = {caller: order.count(caller) for caller in (A, B)}
    last = order[-1]
    for caller in (B, A):  # they send again in another order than the first time, and a new call each
        kit.come(*[call(caller, seq, seen=True) for seq in range(counts[caller])])
        kit.come(call(caller, counts[caller]))
        kit.tell(m.CallsResent(ACTOR), ADDRESS[caller]).end()
    assert [caller for caller, _ in kit.ran[: len(order)]] == list(order)
    assert len(kit.ran) == len(order) + 2
    assert last in (A, B)


def test_new_calls_wait_until_every_caller_has_sent_its_own_again():
    kit = Kit(2, recorded_by(A)).ready()
    kit.tell(m.CallersKnown(ACTOR, ("at-a", "at-b"))).come(call(A, 0, seen=True)).end()
    kit.come(call(A, 1)).tell(m.CallsResent(ACTOR), "at-a")
    assert kit.ran == [(A, 0)]
    assert kit.tell(m.CallerGone(ACTOR, "at-b")).end().ran == [(A, 0), (A, 1)]


def test_a_checkpoint_is_taken_between_calls_and_lets_callers_forget():
    kit = Kit(life=m.ActorLife(checkpoint="2")).ready().come(call(A, 0), call(A, 1), call(A, 2))
    kit.end()
    assert kit.saves == [2]
    assert kit.ran == [(A, 0), (A, 1)]  # the third waits while the state is pickled
    kit.tell(StateSaved(2, m.Checkpoint(2, m.Inline(b"")), 0.001)).end()
    assert kit.ran[-1] == (A, 2)
    kit.tell(m.TurnsKept(ACTOR, 0)).tell(m.CheckpointKept(ACTOR, 2))
    assert ("at-a", m.CallsCovered(ACTOR, A, 1)) in kit.sent


def test_a_restored_actor_knows_what_it_has_done():
    before = Kit(life=m.ActorLife(checkpoint="2")).ready().come(call(A, 0), call(A, 1)).end()
    snapshot = before.host.snapshot(())
    kit = Kit(2).ready(snapshot)
    kit.tell(m.CallersKnown(ACTOR, ("at-a",))).come(call(A, 1)).tell(m.CallsResent(ACTOR), "at-a")
    kit.come(call(A, 2)).end()
    assert kit.ran == [(A, 2)]
    assert kit.answered("at-a") == 2  # the answer that may have been lost, and the new one


def test_the_calls_of_a_dead_caller_go_to_the_owner():
    kit = Kit().ready().come(call(A, 0), call(B, 0)).end()
    kit.tell(m.CallerGone(ACTOR, "at-b"))
    kept = [said for to, said in kit.sent if to == OWNER and isinstance(said, m.CallsKept)]
    assert [push.spec.caller_key for push in kept[0].calls] == [B]


def test_a_number_that_was_not_used_is_passed_over():
    empty = call(A, 0)
    empty = msgspec.structs.replace(empty, spec=msgspec.structs.replace(empty.spec, function=b""))
    assert Kit().ready().come(empty, call(A, 1)).end().ran == [(A, 1)]


def end_with(kit: Kit, kind: str) -> None:
    """The running call fails in this way."""
    push = kit.running.pop(0)
    kit.host.call_ended(CallEnded(push.spec.id, m.TaskFailed(push.spec.id, push.attempt, b"e", kind, False, 10)))
    kit.see()


def test_a_call_that_was_cut_short_is_kept_as_one_without_anything_to_do():
    kit = Kit().ready().come(call(B, 0))
    end_with(kit, "cancelled")
    kit.tell(m.CallerGone(ACTOR, "at-b"))
    kept = [said for _, said in kit.sent if isinstance(said, m.CallsKept)]
    assert kept[0].calls[0].spec.function == b""


def test_what_a_cut_call_left_in_the_state_is_checkpointed():
    kit = Kit(life=m.ActorLife(checkpoint="100")).ready().come(call(A, 0), call(A, 1))
    end_with(kit, "timeout")
    assert kit.saves == [1]


def test_a_reply_that_nobody_has_any_more_is_an_error_and_no_silence():
    before = Kit(life=m.ActorLife(checkpoint="1")).ready().come(call(A, 0)).end()
    before.host.replies.clear()
    kit = Kit(2).ready(before.host.snapshot(())).come(call(A, 0))
    failed = [said for to, said in kit.sent if to == "at-a" and isinstance(said, m.TaskFailed)]
    assert [said.kind for said in failed] == ["lost"]
    assert ("at-a", m.CallsCovered(ACTOR, A, 0)) in kit.sent


def test_replies_in_the_store_and_of_several_values_outlive_the_process():
    kit = Kit().ready().come(call(A, 0))
    push = kit.running.pop()
    values = (m.Stored(1 << 20, ("node",)), m.Inline(b"N"))
    kit.host.call_ended(CallEnded(push.spec.id, m.TaskDone(push.spec.id, 1, values, 10)))
    again = Kit(2).ready(kit.host.snapshot(())).come(call(A, 0))
    assert [said.values for _, said in again.sent if isinstance(said, m.TaskDone)] == [values]


def test_a_checkpoint_of_a_concurrent_actor_counts_no_call_that_the_state_does_not_show():
    life = m.ActorLife(checkpoint="2", is_async=True)
    kit = Kit(life=life).ready().come(call(A, 0), call(A, 1), call(A, 2))
    first, second, third = kit.running
    for push in (first, second):
        kit.host.call_ended(CallEnded(push.spec.id, m.TaskDone(push.spec.id, 1, (m.Inline(b"N"),), 10)))
        kit.see()
    kit.come(call(A, 3))
    assert kit.ran[-1] == (A, 2)  # the fourth waits for the running one to end
    kit.host.call_ended(CallEnded(third.spec.id, m.TaskDone(third.spec.id, 1, (m.Inline(b"N"),), 10)))
    kit.see()
    assert kit.saves == [3]
    kit.come(call(A, 4))
    assert kit.ran[-1] == (A, 2)
    kit.tell(StateSaved(3, m.Checkpoint(3, m.Inline(b"")), 0.001))
    assert kit.ran[-2:] == [(A, 3), (A, 4)]


def test_calls_do_not_wait_long_for_a_checkpoint():
    kit = Kit(life=m.ActorLife(checkpoint="1", is_async=True)).ready().come(call(A, 0), call(A, 1))
    push = kit.running.pop(0)
    kit.host.call_ended(CallEnded(push.spec.id, m.TaskDone(push.spec.id, 1, (m.Inline(b"N"),), 10)))
    kit.come(call(A, 2)).tell(DrainEnded(2))
    assert kit.ran[-1] == (A, 2)  # the second may wait for it


def test_a_replay_goes_on_behind_calls_that_nobody_has_any_more():
    kit = Kit(2, recorded_by(A, B, A)).ready()
    kit.tell(m.CallersKnown(ACTOR, ("at-a",))).come(call(A, 0, seen=True), call(A, 1, seen=True))
    kit.tell(m.CallsResent(ACTOR), "at-a").end()
    assert kit.ran == [(A, 0)]
    kit.tell(CallMissed(1)).end()
    assert kit.ran == [(A, 0), (A, 1)]


def test_a_cancelled_call_is_run_when_it_may_have_been_seen():
    kit = Kit(2, recorded_by(A)).ready().come(call(A, 0))
    other = Kit(2, recorded_by(A))
    other.host.call_came(call(A, 0), "at-a")
    assert not other.host.cancel(call(A, 0).spec.id)
    other.ready().end()
    assert kit.ran == other.ran == [(A, 0)]


def test_items_of_a_generator_go_to_its_caller():
    kit = Kit().ready().come(call(B, 0))
    kit.host.item_made(m.StreamItem(call(B, 0).spec.id, 1, 0, m.Inline(b"N")))
    kit.see()
    kit.tell(m.TurnsKept(ACTOR, 0))
    assert [to for to, said in kit.sent if isinstance(said, m.StreamItem)] == ["at-b"]


def test_an_actor_that_begins_anew_counts_calls_as_they_come():
    kit = Kit(2, life=m.ActorLife(recovery="restart")).ready()
    assert kit.come(call(A, 7), call(A, 0)).end().ran == [(A, 0), (A, 1)]


def test_large_results_are_those_of_the_process_in_which_the_caller_runs_again():
    kit = Kit().ready().come(call(A, 0))
    push = kit.running.pop()
    kit.host.call_came(call(A, 0), "at-b")
    done = m.TaskDone(push.spec.id, 1, (m.Stored(1 << 20, ("node",)),), 10)
    kit.host.call_ended(CallEnded(push.spec.id, done))
    kit.host.call_came(call(A, 0), "at-c")
    kit.see()
    adopted = [said.owner for to, said in kit.sent if to == "node" and isinstance(said, m.ObjectAdopted)]
    assert adopted == ["at-b", "at-c"]


@pytest.mark.parametrize(("kept", "kinds"), [(True, [m.StreamItem, m.TaskDone]), (False, [m.TaskFailed])])
def test_a_generator_that_is_asked_for_again_is_whole_or_an_error(kept, kinds):
    kit = Kit().ready().come(call(A, 0)).tell(m.TurnsKept(ACTOR, 0))
    push = kit.running.pop()
    kit.host.item_made(m.StreamItem(push.spec.id, 1, 0, m.Inline(b"N")))
    kit.host.call_ended(CallEnded(push.spec.id, m.TaskDone(push.spec.id, 1, (), 10, stream_items=1)))
    kit.see()
    if not kept:
        kit.host.items.clear()
    kit.sent.clear()
    kit.come(call(A, 0))
    assert [type(said) for _, said in kit.sent if not isinstance(said, m.CallsCovered)] == kinds


def test_what_may_have_begun_runs_first_when_an_actor_comes_back():
    kit = Kit(2, recorded_by(A)).ready()
    kit.tell(m.CallersKnown(ACTOR, ("at-a", "at-b"))).come(call(B, 0), call(A, 0, seen=True), call(A, 1))
    kit.tell(m.CallsResent(ACTOR), "at-b").tell(m.CallsResent(ACTOR), "at-a").end()
    assert kit.ran == [(A, 0), (A, 1), (B, 0)]  # the second may have called others, though nobody has its reply


def test_every_process_that_made_a_call_is_answered():
    kit = Kit().ready().come(call(A, 0), call(B, 0))
    for push in (call(A, 0), call(B, 0)):  # one runs, one waits
        kit.host.call_came(push, "at-their-next-run")
    kit.end().tell(m.TurnsKept(ACTOR, 1))
    assert [kit.answered(to) for to in ("at-a", "at-b", "at-their-next-run")] == [1, 1, 2]


def test_who_keeps_a_call_does_not_take_its_reply():
    kit = Kit().come(call(A, 0))
    kit.host.call_came(call(A, 0, seen=True), OWNER)
    kit.ready().end().tell(m.TurnsKept(ACTOR, 0))
    assert kit.answered("at-a") == 1


def test_a_call_that_begins_after_its_caller_has_died_goes_to_the_owner_too():
    kit = Kit().ready().come(call(A, 0), call(B, 0)).tell(m.CallerGone(ACTOR, "at-b"))
    assert not any(isinstance(said, m.CallsKept) for _, said in kit.sent)
    kit.end()
    kept = [said for to, said in kit.sent if to == OWNER and isinstance(said, m.CallsKept)]
    assert [push.spec.caller_key for push in kept[0].calls] == [B]
