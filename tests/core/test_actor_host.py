"""The order of an actor's calls, and what a new incarnation does again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.actor_host import ActorHost, CallEnded, HostReady, StateSaved
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
    kit.tell(m.CallersKnown(ACTOR, ("at-a",))).come(call(A, 1, seen=True)).tell(m.CallsResent(ACTOR), "at-a")
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
