"""The order of an actor's calls, and what a new incarnation does again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.actor_calls import CallEnded, CallMissed, CallsEnded
from flowengine.core.actor_host import AHEAD_CALLS_MAX, ActorHost, HostReady
from flowengine.core.actor_saving import DrainEnded, StateSaved, StateTaken
from flowengine.core.ids import child_id
from flowengine.recovery.stash import Stash

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
        stash = Stash()
        self.recorded = recorded
        self.host = ActorHost(m.PushTask(spec, attempt, 1, run=attempt), OWNER, ME, stash)
        self.ran: list[tuple[bytes, int]] = []
        self.sent: list[tuple[str, Any]] = []
        self.running: list[m.PushTask] = []
        self.saves: list[int] = []
        self.orders: list[Any] = []

    def see(self) -> None:
        out, self.host.out = self.host.stash.attach(self.host.out), []
        self.orders += out
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
        assert self.host.log is not None
        return tuple(self.host.log.entries)

    def callers(self, *addresses: str) -> Kit:
        """The owner tells who will call again, and what is known of the log."""
        reach = max([number for _, number, _ in self.recorded], default=-1) + 1
        return self.tell(m.CallersKnown(ACTOR, addresses, self.recorded, reach))

    def answered(self, to: str) -> int:
        return sum(isinstance(said, m.TaskDone) for receiver, said in self.sent if receiver == to)


def test_calls_of_a_caller_run_in_their_order_however_they_come():
    kit = Kit().ready().come(call(A, 2), call(A, 1), call(A, 0)).end()
    assert kit.ran == [(A, 0), (A, 1), (A, 2)]


def test_a_call_that_comes_twice_runs_once_and_is_answered_twice():
    kit = Kit().ready().come(call(A, 0)).end().come(call(A, 0))
    assert kit.ran == [(A, 0)]
    assert kit.answered("at-a") == 2


def test_only_a_change_of_caller_is_a_turn():
    kit = Kit().ready().come(call(A, 0), call(A, 1)).end().come(call(B, 0)).end()
    assert [number for _, number, _ in kit.turns()] == [0, 2]


def test_the_turn_goes_along_with_the_reply():
    kit = Kit().ready().come(call(A, 0)).end()
    carried = [said for to, said in kit.sent if to == "at-a" and isinstance(said, m.StashCarried)]
    assert [(log.subject, log.reach, log.entries) for log in carried[0].logs] == [(ACTOR, 1, kit.turns())]


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
    kit.callers("at-a", "at-b")
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
    kit.callers("at-a", "at-b").come(call(A, 0, seen=True)).end()
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
    kit.tell(m.CheckpointKept(ACTOR, 2))
    assert ("at-a", m.CallsCovered(ACTOR, A, 1)) in kit.sent


def test_a_restored_actor_knows_what_it_has_done():
    before = Kit(life=m.ActorLife(checkpoint="2")).ready().come(call(A, 0), call(A, 1)).end()
    snapshot = before.host.snapshot(())
    kit = Kit(2).ready(snapshot)
    kit.callers("at-a").come(call(A, 1)).tell(m.CallsResent(ACTOR), "at-a")
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
    kit = Kit().ready().come(empty, call(A, 1)).end()
    assert kit.ran == [(A, 1)]
    kit.sent.clear()
    kit.come(call(A, 0))  # its caller runs again, and makes the call
    assert [message.kind for _, message in kit.sent if isinstance(message, m.TaskFailed)] == ["cancelled"]


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
    kit.callers("at-a").come(call(A, 0, seen=True), call(A, 1, seen=True))
    kit.tell(m.CallsResent(ACTOR), "at-a").end()
    assert kit.ran == [(A, 0)]
    kit.tell(CallMissed(1))
    assert kit.sent[-1] == (OWNER, m.CallerSought(ACTOR, B, 1))
    kit.tell(m.CallerFound(ACTOR, 1, "yes")).end()
    assert kit.ran == [(A, 0)]
    kit.tell(CallMissed(1)).tell(m.CallerFound(ACTOR, 1, "no")).end()
    assert kit.ran == [(A, 0), (A, 1)]


def test_a_replay_does_not_wait_for_ever_for_a_caller_that_its_owner_does_not_know():
    kit = Kit(2, recorded_by(A, B, A)).ready()
    kit.callers("at-a").come(call(A, 0, seen=True), call(A, 1, seen=True))
    kit.tell(m.CallsResent(ACTOR), "at-a").end()
    answers = 0
    while kit.ran == [(A, 0)] and answers < 100:
        kit.tell(CallMissed(1)).tell(m.CallerFound(ACTOR, 1, "")).end()
        answers += 1
    assert 2 < answers < 20


def test_calls_that_were_begun_come_before_new_ones_of_others_though_nobody_has_their_replies():
    kit = Kit(2).ready()
    kit.tell(m.CallersKnown(ACTOR, ("at-a", "at-b"), (("turn", 0, A + bytes(8)),), 2)).come(call(B, 0), call(A, 0))
    kit.tell(m.CallsResent(ACTOR), "at-b").tell(m.CallsResent(ACTOR), "at-a").end()
    assert kit.ran == [(A, 0)]  # its caller died too, runs again, and has yet to make its second call
    assert kit.come(call(A, 1)).end().ran == [(A, 0), (A, 1), (B, 0)]


def test_what_a_call_chose_comes_with_it():
    kit = Kit(2).ready()
    name = call(A, 0).spec.id.hex()
    log = (("turn", 0, A + bytes(8)), (f"wait:{name}:0", 0, b"chosen"))
    kit.tell(m.CallersKnown(ACTOR, ("at-a",), log, 1)).come(call(A, 0, seen=True))
    assert kit.running[0].recorded == (("wait", 0, b"chosen"),)


def test_write_first_runs_a_call_when_the_journal_has_it():
    kit = Kit()
    kit.host.stash.calls_ahead_max = 0
    kit.ready().come(call(A, 0), call(B, 0))
    assert kit.ran == []
    assert kit.tell(m.StashKept(ACTOR, 1, 1, 1)).end().ran == [(A, 0)]
    assert kit.tell(m.StashKept(ACTOR, 1, 2, 2)).end().ran == [(A, 0), (B, 0)]


def test_a_cancelled_call_is_run_when_it_may_have_been_seen():
    kit = Kit(2, recorded_by(A)).ready().callers().come(call(A, 0))
    other = Kit(2, recorded_by(A))
    other.host.call_came(call(A, 0), "at-a")
    assert not other.host.cancel(call(A, 0).spec.id)
    other.ready().callers().end()
    assert kit.ran == other.ran == [(A, 0)]


def interrupted(kit: Kit) -> list[bytes]:
    """The calls that are told to stop."""
    return [command.task for command in kit.orders if isinstance(command, c.Interrupt)]


def test_a_cancelled_call_that_nobody_has_seen_is_not_run():
    """The process died before it came to the call, which was cancelled before another process was there."""
    kit = Kit(2, recorded_by(A))
    kit.host.call_came(call(A, 0, seen=True), "at-a")
    kit.host.call_came(call(A, 1), "at-a")
    kit.host.cancel(call(A, 1).spec.id)
    kit.ready().callers().end()
    assert kit.ran == [(A, 0)]
    assert [said.kind for to, said in kit.sent if isinstance(said, m.TaskFailed)] == ["cancelled"]


def test_what_a_cancelled_call_does_again_is_interrupted_if_it_may_not_have_ended():
    kit = Kit(2, recorded_by(B, A))
    for push in (call(B, 0, seen=True), call(A, 0)):
        kit.host.call_came(push, ADDRESS[push.spec.caller_key])
        kit.host.cancel(push.spec.id)
    kit.ready().callers().end()
    assert kit.ran == [(B, 0), (A, 0)]
    assert interrupted(kit) == [call(A, 0).spec.id]


def test_a_cancelled_call_that_others_came_after_is_done_again_in_full():
    kit = Kit(2, recorded_by(A, B))
    for push in (call(A, 0), call(B, 0)):
        kit.host.call_came(push, ADDRESS[push.spec.caller_key])
    kit.host.cancel(call(A, 0).spec.id)
    kit.ready().callers().end()
    assert kit.ran == [(A, 0), (B, 0)]
    assert interrupted(kit) == []


def test_items_of_a_generator_go_to_its_caller():
    kit = Kit().ready().come(call(B, 0))
    kit.host.item_made(m.StreamItem(call(B, 0).spec.id, 1, 0, m.Inline(b"N")))
    kit.see()
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
    kit = Kit().ready().come(call(A, 0))
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
    kit.callers("at-a", "at-b").come(call(B, 0), call(A, 0, seen=True), call(A, 1))
    kit.tell(m.CallsResent(ACTOR), "at-b").tell(m.CallsResent(ACTOR), "at-a").end()
    assert kit.ran == [(A, 0), (A, 1), (B, 0)]  # the second may have called others, though nobody has its reply


def test_every_process_that_made_a_call_is_answered():
    kit = Kit().ready().come(call(A, 0), call(B, 0))
    for push in (call(A, 0), call(B, 0)):  # one runs, one waits
        kit.host.call_came(push, "at-their-next-run")
    kit.end()
    assert [kit.answered(to) for to in ("at-a", "at-b", "at-their-next-run")] == [1, 1, 2]


def test_a_reply_goes_to_who_waits_for_it_though_others_have_seen_it():
    kit = Kit(2).callers("at-a")
    for sender, seen in ((OWNER, True), ("at-their-next-run", False), ("at-their-last-run", True)):
        kit.host.call_came(call(A, 0, seen=seen), sender)
    kit.ready().tell(m.CallsResent(ACTOR), "at-a").end()
    assert kit.answered("at-their-next-run") == 1


def test_who_keeps_a_call_does_not_take_its_reply():
    kit = Kit().come(call(A, 0))
    kit.host.call_came(call(A, 0, seen=True), OWNER)
    kit.ready().end()
    assert kit.answered("at-a") == 1


def test_a_call_that_begins_after_its_caller_has_died_goes_to_the_owner_too():
    kit = Kit().ready().come(call(A, 0), call(B, 0)).tell(m.CallerGone(ACTOR, "at-b"))
    assert not any(isinstance(said, m.CallsKept) for _, said in kit.sent)
    kit.end()
    kept = [said for to, said in kit.sent if to == OWNER and isinstance(said, m.CallsKept)]
    assert [push.spec.caller_key for push in kept[0].calls] == [B]


def file_at(calls: int) -> m.Checkpoint:
    return m.Checkpoint(calls, m.Inline(b""), f"file:///state/a/1-{calls}")


def covered(kit: Kit) -> list[int]:
    """The numbers of A's calls that it was told to forget, in order."""
    return [said.seq for to, said in kit.sent if to == "at-a" and isinstance(said, m.CallsCovered)]


def test_calls_go_on_while_a_checkpoint_is_written_and_no_other_is_begun():
    kit = Kit(life=m.ActorLife(checkpoint="2")).ready().come(*[call(A, seq) for seq in range(6)]).end()
    assert len(kit.ran) == 2
    kit.tell(StateTaken(2)).end()
    assert len(kit.ran) == 6
    assert kit.saves == [2]
    kit.tell(StateSaved(2, file_at(2), 0.001)).come(call(A, 6)).end()
    assert kit.saves == [2, 7]


def test_what_the_older_of_two_files_covers_can_be_forgotten():
    kit = Kit(life=m.ActorLife(checkpoint="2")).ready().come(*[call(A, seq) for seq in range(4)]).end()
    for calls, kept in ((2, 0), (4, 2)):
        kit.tell(StateTaken(calls)).end().tell(StateSaved(calls, file_at(calls), 0.001))
        kit.tell(m.CheckpointKept(ACTOR, kept))
    assert covered(kit) == [1]


def test_calls_that_only_a_file_covers_are_kept_by_a_new_incarnation_too():
    before = Kit(life=m.ActorLife(checkpoint="2")).ready().come(call(A, 0), call(A, 1)).end()
    snapshot = before.host.snapshot(())
    kit = Kit(2, life=m.ActorLife(checkpoint="2"))
    kit.host.push = msgspec.structs.replace(kit.host.push, checkpoint=file_at(2), fallback=m.BEGINNING)
    kit.ready(snapshot).callers("at-a").come(call(A, 0, seen=True), call(A, 1)).tell(m.CallsResent(ACTOR), "at-a")
    assert covered(kit) == []
    kit.come(call(A, 2), call(A, 3)).end().tell(StateSaved(4, file_at(4), 0.001)).tell(m.CheckpointKept(ACTOR, 2))
    assert covered(kit) == [1]


def test_a_checkpoint_that_cannot_be_written_is_tried_again_and_one_of_no_use_is_not():
    kit = Kit(life=m.ActorLife(checkpoint="1")).ready().come(call(A, 0)).end()
    kit.tell(StateSaved(1, None, 0.0, "the disk is full")).come(call(A, 1)).end()
    assert kit.saves == [1, 2]
    kit.tell(StateSaved(2, None, 0.0, "C.lock is a lock", True)).come(call(A, 2)).end()
    assert kit.saves == [1, 2]
    assert [said.reason for _, said in kit.sent if isinstance(said, m.CheckpointFailed)][-1] == "C.lock is a lock"


SHORT = 40  # calls after which an actor is known to have short ones


def with_short_calls(**life: Any) -> Kit:
    """An actor that has run so many, and runs one more."""
    kit = Kit(life=m.ActorLife(**{"checkpoint": "never", **life})).ready()
    for seq in range(SHORT):
        kit.come(call(A, seq)).end()
    return kit.come(call(A, SHORT))


def ahead(kit: Kit) -> list[int]:
    """Calls that were ordered and have not ended."""
    return [push.seq for push in kit.running]


def ended(push: m.PushTask, kind: str = "") -> CallEnded:
    if kind:
        return CallEnded(push.spec.id, m.TaskFailed(push.spec.id, 1, b"", kind, False, 10))
    return CallEnded(push.spec.id, m.TaskDone(push.spec.id, 1, (m.Inline(b"N"),), 10))


def test_short_calls_of_a_caller_are_ordered_ahead_and_answered_together():
    kit = with_short_calls().come(call(A, SHORT + 1), call(B, 0), call(A, SHORT + 2))
    assert ahead(kit) == [SHORT, SHORT + 1]  # another caller's turn is noted when it begins
    before = kit.answered("at-a")
    both, kit.running = kit.running, []
    kit.tell(CallsEnded(tuple(ended(push) for push in both)))
    assert kit.answered("at-a") == before + 2
    assert kit.end().ran[-2:] == [(B, 0), (A, SHORT + 2)]


def test_no_more_are_ordered_ahead_than_are_soon_done():
    kit = with_short_calls().come(*[call(A, SHORT + 1 + more) for more in range(2 * AHEAD_CALLS_MAX)])
    assert len(ahead(kit)) == AHEAD_CALLS_MAX
    first = kit.running.pop(0)
    slow = m.TaskDone(first.spec.id, 1, (m.Inline(b"N"),), 30_000)
    kit.tell(CallEnded(first.spec.id, slow))
    assert len(ahead(kit)) == AHEAD_CALLS_MAX - 1


def test_what_needs_attention_runs_alone():
    for special in ({"timeout_s": 5.0}, {"num_returns": -1}):
        push = call(A, SHORT + 1)
        push = msgspec.structs.replace(push, spec=msgspec.structs.replace(push.spec, **special))
        kit = with_short_calls().come(push, call(A, SHORT + 2))
        assert ahead(kit) == [SHORT]
        first = kit.running.pop(0)
        kit.tell(ended(first))
        assert ahead(kit) == [SHORT + 1]
    assert ahead(with_short_calls(checkpoint="1000").come(call(A, SHORT + 1))) == [SHORT]
    assert ahead(with_short_calls(max_concurrency=2, recovery="none").come(call(A, SHORT + 1), call(A, SHORT + 2))) == [
        SHORT, SHORT + 1,
    ]  # fmt: skip


def test_nothing_begins_between_an_interrupted_call_and_its_checkpoint():
    kit = with_short_calls(checkpoint="adaptive").come(call(A, SHORT + 1), call(A, SHORT + 2), call(B, 0))
    first, *rest = kit.running
    kit.running = []
    kit.tell(CallsEnded((ended(first, "cancelled"),), tuple(push.spec.id for push in rest)))
    assert kit.saves == [SHORT + 1]
    assert kit.host.snapshot(()).frontiers == ((A, SHORT),)
    assert ahead(kit) == []
    kit.tell(StateSaved(SHORT + 1, m.Checkpoint(SHORT + 1, m.Inline(b"")), 0.001)).end()
    assert kit.ran[-3:] == [(A, SHORT + 1), (A, SHORT + 2), (B, 0)]
    turns = [(number, payload[:-8]) for _, number, payload in kit.turns()]
    assert turns == [(0, A), (SHORT + 3, B)]
