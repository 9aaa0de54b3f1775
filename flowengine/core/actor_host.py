"""The ActorHost machine: in which order an actor runs the calls of its callers, and how it comes back. Pure.

Each caller numbers its calls; a call runs when all before it of the same caller have run. The order between callers is
a choice: when the caller changes, a turn (calls before, caller, number) is entered in the actor's log, which goes along
with whatever leaves this process until the actor's owner has it (recovery/stash.py). A new incarnation begins from the
last checkpoint, gets all that anybody knows of the log, and runs the turns again; what was done is not done twice.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from ..errors import TaskCancelled, pack_error
from ..recovery.checkpoint import Why, Work, due, idle_s, is_worth_idle_time, told
from ..recovery.stash import Stash
from . import commands as c
from . import messages as m
from .actor_calls import (
    Arrived,
    CallDeadline,
    CallEnded,
    CallMissed,
    CallsEnded,
    for_former,
    is_plain,
    joined,
    kept_bytes,
    made_again,
)
from .actor_replies import never_done, reply_lost, size_of, stored_in
from .actor_saving import ActorSaving, CheckpointAsked, DrainEnded, StateSaved, StateTaken
from .ids import short
from .owner_state import ALL_ITEMS

REPLIES_KEPT_MAX = 2_000
REPLIES_KEPT_BYTES_MAX = 16 << 20
CALLERS_KEPT_MAX = 20_000
ITEMS_KEPT_MAX = 1_000
CUT_SHORT = ("cancelled", "timeout")  # kinds of failures that leave a call half done
ALL_READ = {"stream_have": ALL_ITEMS, "stream_taken": ALL_ITEMS}  # nobody reads a stream that is repeated
AHEAD_US_MAX = 4_000  # so much work is ordered ahead: a hand-over costs more than a short call
AHEAD_CALLS_MAX = 256
MISSED_S = 2.0  # a replay that waits so long for a call asks whether its caller will come
STRANGER_S_MAX = 20.0  # so long it waits for a caller that the owner does not know


class HostReady(m.Message, frozen=True):
    """The shell has constructed the actor, or restored it."""

    snapshot: Any  # Snapshot or None
    error: bytes = b""
    passed_over: tuple[tuple[int, str], ...] = ()  # checkpoints that were bad: calls before them, and why
    took: tuple[int, int] = (0, -1)  # when that began, and how long it took, in microseconds


class Rested(m.Message, frozen=True):
    """Timer: an actor that had begun so many calls had nothing to do."""

    calls: int


class ActorHost(ActorSaving):
    """Decides; never waits, sends or reads a clock."""

    def __init__(self, push: m.PushTask, owner: str, me: str, stash: Stash) -> None:
        life = push.spec.life
        assert life is not None
        super().__init__()
        self.push = push
        self.id = push.spec.id
        self.life = life
        self.owner = owner
        self.me = me
        self.out: list[Any] = []
        self.now = 0.0
        self.ready = False
        self.calls = 0  # calls begun
        self.frontiers: dict[bytes, int] = {}  # caller -> number of its last call that has begun
        self.last_caller = b""
        self.waiting: dict[bytes, dict[int, Arrived]] = {}
        self.order: OrderedDict[tuple[bytes, int], None] = OrderedDict()  # arrival
        self.running: dict[bytes, Arrived] = {}
        self.replies: OrderedDict[bytes, tuple[bytes, Any]] = OrderedDict()
        self.reply_bytes = 0
        self.items: dict[bytes, list[m.StreamItem]] = {}  # of calls that are generators, for callers that run again
        self.arrived: dict[bytes, int] = {}  # caller -> number of its last call, when nothing is replayed
        self.forgotten = False  # some callers were dropped from `frontiers`
        self.unwanted: dict[bytes, None] = {}  # calls that were cancelled while a replay may need them
        self.resumed_to = -1  # the last call of the last caller that may have begun before
        self.missed_at = -1  # the number of the call that a replay misses
        self.missed_s = 0.0  # how long its caller has not been known
        self.uncovered: dict[bytes, Arrived] = {}
        self.turns: dict[int, tuple[bytes, int]] = {}
        self.choices: dict[str, list[tuple[str, int, bytes]]] = {}  # call -> what it chose in an earlier incarnation
        self.planned_to = -1  # the last call whose place is known
        self.awaited: dict[str, None] = {}  # callers that have yet to send their calls again
        self.resent: dict[str, None] = {}  # those that have
        self.callers_known = push.attempt == 1 or life.recovery != "exactly_once"
        self.recovering = push.attempt > 1 and life.recovery == "exactly_once"
        self.replayed = 0
        self.began_at = 0.0
        self.pace_us = float(AHEAD_US_MAX)  # what a call takes, smoothed
        self.ahead = 1  # so many calls may be ordered at a time
        self.stash = stash
        self.log = stash.begin(self.id, owner, push.attempt) if life.recovery == "exactly_once" else None
        self.unlogged: list[tuple[int, c.RunTask]] = []  # calls that wait for the journal
        self.odds = odds = push.odds or m.Odds(push.run - 1)
        self.work = Work(deaths=odds.deaths, lived_s=odds.lived_s, others_rate_per_s=odds.others_rate_per_s)
        self.busy_since = 0.0
        self.resting = False  # a timer runs
        self.leaving = False
        self.policy = life.checkpoint if life.recovery == "exactly_once" else "never"
        self.limit = life.max_concurrency if not life.is_async else max(life.max_concurrency, 1000)

    def told(self, event: Any, sender: str) -> None:
        """Anything but a call."""
        kind = type(event)
        if kind is CallsEnded:
            self.calls_ended(event.ended, event.unbegun)
        elif kind is CallEnded:
            self.call_ended(event)
        elif kind is HostReady:
            self.host_ready(event)
        elif kind is StateTaken:
            self.state_taken(event)
        elif kind is StateSaved:
            self.state_saved(event)
        elif kind is m.StashKept:
            self.logged(event.reach)
        elif kind is m.CallerFound:
            self.caller_found(event)
        elif kind is m.CheckpointKept:
            self.checkpoint_kept(event.calls)
            self.work.hear(event.others_rate_per_s)
        elif kind is m.CallersKnown:
            self.callers_known_now(event)
        elif kind is m.CallerGone:
            self.caller_gone(event.caller)
        elif kind is m.CallsResent:
            self.calls_resent(sender)
        elif kind is DrainEnded:
            self.drain_ended(event)
        elif kind is CheckpointAsked:
            self.checkpoint_asked()
        elif kind is Rested:
            self.rested(event)
        elif kind is CallMissed:
            self.call_missed(event)

    def has(self, call: bytes) -> bool:
        """Whether the call runs or waits here."""
        return call in self.running or any(
            item.push.spec.id == call for line in self.waiting.values() for item in line.values()
        )

    def describe(self) -> dict[str, Any]:
        """Where the actor is, for people."""
        return {
            "calls": self.calls,
            "running": [item.push.spec.name for item in self.running.values()],
            "waiting": {short(caller): sorted(line) for caller, line in self.waiting.items()},
            "frontiers": {short(caller): seq for caller, seq in self.frontiers.items()},
            "recovering": self.recovering,
            "planned_to": self.planned_to,
            "waits_for_callers": list(self.awaited),
        }

    def explain(self) -> list[str]:
        """Why a checkpoint was or was not taken, for people."""
        head = f"actor {self.push.spec.name} {short(self.id)} in this process, {self.calls} calls begun"
        state = "being written" if self.writing else "replaying" if self.recovering else ""
        return [head + (f", {state}" if state else ""), *told(self.policy, self.work, self.now)]

    # --- beginning ------------------------------------------------------------------------------------------

    def host_ready(self, event: HostReady) -> None:
        """Constructed or restored: the owner tells the callers."""
        if not event.error:
            self.ready = True
            self.work.last_at = self.began_at = self.now
            if event.snapshot is not None:
                self.restore(event.snapshot)
        for calls, reason in event.passed_over:
            self.send(self.owner, m.CheckpointFailed(self.id, self.push.attempt, calls, reason))
        self.send(self.owner, m.ActorReady(self.id, self.push.attempt, self.me, event.error, self.calls, *event.took))
        self.run_next()

    # --- calls come ------------------------------------------------------------------------------------------

    def call_came(self, push: m.PushTask, sender: str) -> None:
        """A call, new or again."""
        if self.life.recovery != "exactly_once":
            push = self.numbered(push)
        caller, seq = push.spec.caller_key, push.seq
        if self.forgotten and caller not in self.frontiers and caller not in self.waiting:
            self.frontiers[caller] = seq - 1  # what it called before was long ago
        if seq <= self.frontiers.get(caller, -1):
            self.done_before(push, sender)
            return
        line = self.waiting.setdefault(caller, {})
        if seq not in line:
            self.order[caller, seq] = None
            line[seq] = Arrived(push, sender, waits=not push.seen)
        else:
            line[seq] = joined(line[seq], push, sender)
        self.run_next()

    def numbered(self, push: m.PushTask) -> m.PushTask:
        """Nothing is sent again to an actor that is not brought back: calls count as they come."""
        caller = push.spec.caller_key
        number = self.arrived.pop(caller, -1) + 1
        self.arrived[caller] = number
        if len(self.arrived) > CALLERS_KEPT_MAX:
            del self.arrived[next(iter(self.arrived))]
        return msgspec.structs.replace(push, seq=number)

    def done_before(self, push: m.PushTask, sender: str) -> None:
        """The call has begun here, or before the checkpoint: answer again what was answered."""
        running = self.running.get(push.spec.id)
        if running is not None:
            made_again(running, push, sender)
            return
        known = self.replies.get(push.spec.id)
        items = self.items.get(push.spec.id, [])
        if known is not None and getattr(known[1], "stream_items", 0) > max(len(items), push.stream_have):
            known = None  # an end without its items would be a shorter stream
        if known is not None and not push.seen:
            for item in items[push.stream_have :]:
                self.send(sender, msgspec.structs.replace(item, attempt=push.attempt))
            self.adopt_results(known[1], sender)
            self.send(sender, msgspec.structs.replace(known[1], attempt=push.attempt))
        elif push.spec.function and not push.seen:
            self.send(sender, reply_lost(push))
        if push.spec.id in self.uncovered or self.life.recovery != "exactly_once":
            return
        if self.unsure_from >= 0:
            self.uncovered[push.spec.id] = Arrived(push, sender)  # the next incarnation may have to begin before it
        else:
            self.send(sender, m.CallsCovered(self.id, push.spec.caller_key, push.seq))

    def adopt_results(self, answer: Any, by: str) -> None:
        """The caller runs again in another process: large results are that one's now."""
        for node, oid in stored_in(answer):
            self.send(node, m.ObjectAdopted(oid, by))

    def callers_known_now(self, event: m.CallersKnown) -> None:
        """Who will send calls again, and in which order they were run."""
        self.callers_known = True
        for kind, number, payload in event.recorded:
            if kind == "turn":
                self.turns[number] = (payload[:-8], int.from_bytes(payload[-8:], "big"))
            elif ":" in kind:
                choice, call, _ = kind.split(":")
                self.choices.setdefault(call, []).append((choice, number, payload))
        self.planned_to = max(event.reach - 1, *self.turns, -1)
        for caller in event.callers:
            if caller not in self.resent:
                self.awaited[caller] = None
        self.run_next()

    def calls_resent(self, sender: str) -> None:
        """A caller has sent all that a replay needs of it."""
        self.resent[sender] = None
        self.awaited.pop(sender, None)
        self.run_next()

    def caller_gone(self, caller: str) -> None:
        """A caller is dead: its calls would be missed in a replay, so the owner keeps them."""
        self.awaited.pop(caller, None)
        self.have_kept([item for item in self.uncovered.values() if item.sender == caller])
        for line in self.waiting.values():
            for item in line.values():
                item.orphan = item.orphan or item.sender == caller
        self.run_next()

    def have_kept(self, items: list[Arrived]) -> None:
        """Nobody will send these calls again: the owner keeps them for a replay."""
        kept = [item.push for item in items if item.sender != self.owner]
        if kept:
            kept = [msgspec.structs.replace(push, seen=True, **ALL_READ) for push in kept]
            self.send(self.owner, m.CallsKept(self.id, tuple(kept)))

    # --- running ----------------------------------------------------------------------------------------------

    def run_next(self) -> None:
        """Begin what may run now."""
        while self.ready:
            if self.leaving or self.saving or self.draining:
                return  # a checkpoint must not count a call that the state does not show
            item = self.choose() if len(self.running) < self.limit else self.follower()
            if item is None:
                return
            self.begin(item)

    def follower(self) -> Arrived | None:
        """A call that is ordered while the one before it runs: a short one of the same caller."""
        if len(self.running) >= self.ahead or not self.order or self.recovering or self.calls <= self.planned_to:
            return None
        caller, seq = next(iter(self.order))
        if caller != self.last_caller or seq != self.frontiers[caller] + 1:
            return None
        item = self.waiting[caller][seq]
        return self.taken(caller, seq) if is_plain(item.push.spec) else None

    def choose(self) -> Arrived | None:
        """The next call: by the recorded turns while there are any, then in order of arrival."""
        if not self.callers_known:
            return None
        if self.calls <= self.planned_to:
            item = self.taken(*self.planned_turn())
            if item is not None or self.awaited:
                return item
            if self.missed_at != self.calls:
                self.missed_at = self.calls
                self.out.append(c.SetTimer(MISSED_S, CallMissed(self.calls)))
            return None
        if self.recovering:
            seq = self.frontiers.get(self.last_caller, -1) + 1
            item = self.waiting.get(self.last_caller, {}).get(seq)
            if item is not None and item.push.seen:
                return self.taken(self.last_caller, seq)
            if self.awaited:
                return None
            if self.resumed_to < 0:
                self.resumed_to = self.came_to(self.last_caller)
            if item is not None and seq <= self.resumed_to:
                return self.taken(self.last_caller, seq)  # it may have begun, and have called others
            self.recovering = False
            self.send(self.owner, m.ActorRecovered(self.id, self.push.attempt, self.replayed))
        for caller, seq in self.order:
            if seq == self.frontiers.get(caller, -1) + 1:
                return self.taken(caller, seq)
        return None

    def came_to(self, caller: bytes) -> int:
        """The number of the last call of a caller that has come with all before it."""
        line = self.waiting.get(caller, {})
        seq = self.frontiers.get(caller, -1)
        while seq + 1 in line:
            seq += 1
        return seq

    def call_missed(self, event: CallMissed) -> None:
        """Actor and caller died at once: the caller may run again and call again."""
        caller, seq = self.planned_turn()
        if event.calls == self.calls == self.missed_at and seq not in self.waiting.get(caller, {}):
            self.send(self.owner, m.CallerSought(self.id, caller, self.calls))

    def caller_found(self, event: m.CallerFound) -> None:
        """The replay waits on, or goes on behind calls that nobody will make any more."""
        if event.calls != self.calls or self.missed_at != self.calls:
            return
        caller, seq = self.planned_turn()
        self.missed_s = 0.0 if event.coming == "yes" else self.missed_s + MISSED_S
        if event.coming == "no" or self.missed_s > STRANGER_S_MAX:
            if seq not in self.waiting.get(caller, {}):
                later = [number for number in self.turns if number > self.calls]
                self.calls = min(later, default=self.planned_to + 1)
            self.missed_at, self.missed_s = -1, 0.0
            self.run_next()
        else:
            self.out.append(c.SetTimer(MISSED_S, CallMissed(self.calls)))

    def taken(self, caller: bytes, seq: int) -> Arrived | None:
        """This call, if it has come, out of the order of arrival."""
        item = self.waiting.get(caller, {}).get(seq)
        if item is not None:
            del self.order[caller, seq]
        return item

    def planned_turn(self) -> tuple[bytes, int]:
        """Who called at this point of the last incarnation."""
        turn = self.turns.get(self.calls)
        if turn is not None:
            return turn
        return self.last_caller, self.frontiers.get(self.last_caller, -1) + 1

    def begin(self, item: Arrived) -> None:
        push, spec = item.push, item.push.spec
        call, caller = spec.id, spec.caller_key
        line = self.waiting[caller]
        del line[push.seq]
        if not line:
            del self.waiting[caller]
        if caller != self.last_caller:
            self.turn_to(caller, push.seq)
        self.frontiers[caller] = push.seq
        self.calls += 1
        self.replayed += self.recovering
        if self.log is not None:
            self.log.reach, self.log.holders = self.calls, 1
            self.uncovered[call] = item
            item.number = self.calls - 1
            if item.orphan:
                self.have_kept([item])
        self.work.calls += 1
        self.work.log_bytes += kept_bytes(push)
        if not spec.function:
            if call not in self.replies:
                self.remember(call, caller, never_done(push))
            return
        if call in self.unwanted and not push.seen and self.calls > self.planned_to + 1:  # nobody has seen it
            self.leave_out(item)
            self.finish(item, self.cancelled(push))
            return
        if not self.running:
            self.busy_since = self.now
        self.running[call] = item
        if not is_plain(spec):
            self.ahead = 1
        item.ran_for = item.sender
        if spec.timeout_s > 0:
            self.out.append(c.SetTimer(spec.timeout_s, self.deadline(push)))
        if self.choices:
            push = msgspec.structs.replace(push, recorded=tuple(self.choices.pop(call.hex(), ())))
        self.order_run(c.RunTask(push, item.sender))
        if self.unwanted and self.recovering and self.calls > max(self.turns, default=-1):
            self.stop_unwanted()  # else others came after its end

    def stop_unwanted(self) -> None:
        """What is done again of calls that were cancelled meanwhile is interrupted."""
        for call, item in self.running.items():
            if call in self.unwanted and not item.push.seen:
                self.out.append(c.Interrupt(call, item.push.attempt, "cancelled"))

    def order_run(self, order: c.RunTask) -> None:
        """Run the call now, or when the journal has it."""
        if self.log is not None and self.calls - self.log.reach_kept > self.stash.calls_ahead_max:
            self.unlogged.append((self.calls, order))
            self.send(self.owner, self.stash.written(self.log))
        else:
            self.out.append(order)

    def deadline(self, push: m.PushTask) -> m.Message:
        """The timer event of a call's time limit."""
        return CallDeadline(push.spec.id, push.attempt)

    def turn_to(self, caller: bytes, seq: int) -> None:
        """Another caller than before comes at this place."""
        self.last_caller = caller
        self.frontiers.pop(caller, None)  # the one that called last is the last to be forgotten
        if len(self.frontiers) >= CALLERS_KEPT_MAX:
            del self.frontiers[next(iter(self.frontiers))]
            self.forgotten = True
        if self.log is not None and self.calls not in self.turns:
            self.stash.add(self.log, ("turn", self.calls, caller + seq.to_bytes(8, "big")))

    def logged(self, reach: int) -> None:
        """The journal has so many calls: those that waited for that begin."""
        while self.unlogged and self.unlogged[0][0] <= reach + self.stash.calls_ahead_max:
            self.out.append(self.unlogged.pop(0)[1])

    def cancelled(self, push: m.PushTask) -> m.TaskFailed:
        error = pack_error(TaskCancelled(f"call {push.spec.name} {short(push.spec.id)} was cancelled before it began"))
        return m.TaskFailed(push.spec.id, push.attempt, error, "cancelled", False, -1)

    def cancel(self, call: bytes) -> bool:
        """A caller cancels; True when the call runs and has to be interrupted."""
        if call in self.running:
            return True
        if self.recovering or not self.ready:
            self.unwanted[call] = None  # its former run may have been seen: then it is done again
            return False
        for line in self.waiting.values():
            for item in line.values():
                if item.push.spec.id == call and item.push.spec.function:
                    self.finish(item, self.cancelled(item.push))
                    empty = msgspec.structs.replace(item.push.spec, function=b"")
                    item.push = msgspec.structs.replace(item.push, spec=empty)
                    return False
        return False

    def item_made(self, item: m.StreamItem) -> None:
        """A call that is a generator has yielded: its caller gets the item at once."""
        call = self.running.get(item.task)
        if call is not None:
            items = self.items.setdefault(item.task, [])
            if len(items) == item.index < ITEMS_KEPT_MAX:
                items.append(item)
            self.send(call.sender, item)

    def stream_consumed(self, event: m.StreamConsumed) -> None:
        """The reader of a call's items goes on; a call that waits will begin with that."""
        if event.task in self.running:
            self.out.append(c.StreamGo(event.task, event.items))
            return
        for line in self.waiting.values():
            for item in line.values():
                if item.push.spec.id == event.task:
                    taken = max(item.push.stream_taken, event.items)
                    item.push = msgspec.structs.replace(item.push, stream_taken=taken)

    def calls_ended(self, ended: tuple[CallEnded, ...], unbegun: tuple[bytes, ...] = ()) -> None:
        """Calls are over: answer, see whether a checkpoint is due, go on."""
        if self.running:
            self.work.run_s += self.now - self.busy_since
            self.busy_since = self.now
        cut_short = False
        for event in ended:
            cut_short = self.over(event)
        for call in reversed(unbegun):
            self.put_back(self.running.pop(call))
        if ended[-1].leaving:
            self.leaving = True
            self.send(self.owner, m.KillActor(self.id, False, "it called flow.exit_actor()"))
            return
        self.look_ahead(max([event.answer.run_us for event in ended]))
        self.work.lived_s = self.odds.lived_s + self.now - self.began_at
        # What an interrupted call left in the state cannot be repeated, so it is kept.
        cut_short = cut_short and self.policy != "never"
        why = Why.CUT_SHORT if cut_short else self.why if self.draining else due(self.policy, self.work, self.now)
        if why is not None and not self.writing:
            self.drain(why)
        self.run_next()
        if not self.running:
            self.rest()

    def call_ended(self, event: CallEnded) -> None:
        """One call is over."""
        self.calls_ended((event,))

    def over(self, event: CallEnded) -> bool:
        """Answer a call; whether it was not done in full."""
        item = self.running.pop(event.call, None)
        if item is None:
            return False
        answer, attempt = event.answer, item.push.attempt
        cut_short = type(answer) is m.TaskFailed and answer.kind in CUT_SHORT
        if cut_short:
            self.leave_out(item)
        elif item.sender != item.ran_for:
            self.adopt_results(answer, item.sender)
        self.finish(item, answer if answer.attempt == attempt else msgspec.structs.replace(answer, attempt=attempt))
        return cut_short

    def put_back(self, item: Arrived) -> None:
        """The call was ordered and did not begin: it is the next."""
        push, caller = item.push, item.push.spec.caller_key
        self.calls -= 1
        self.work.calls -= 1
        self.work.log_bytes -= kept_bytes(push)
        self.uncovered.pop(push.spec.id, None)
        self.frontiers[caller] = push.seq - 1
        self.waiting.setdefault(caller, {})[push.seq] = item
        self.order[caller, push.seq] = None
        self.order.move_to_end((caller, push.seq), last=False)

    def look_ahead(self, run_us: int) -> None:
        """How many calls may be ordered at a time, after some of which the longest took so long."""
        self.pace_us = max(run_us, self.pace_us + (run_us - self.pace_us) * 0.2, 1.0)
        if self.limit == 1 and self.policy in ("adaptive", "never") and self.stash.calls_ahead_max > AHEAD_CALLS_MAX:
            self.ahead = min(AHEAD_CALLS_MAX, int(AHEAD_US_MAX / self.pace_us))

    def rest(self) -> None:
        """With nothing to do a checkpoint is free; a timer runs only while there is something to cover."""
        if not self.resting and not self.writing and is_worth_idle_time(self.policy, self.work):
            self.resting = True
            self.out.append(c.SetTimer(idle_s(self.work), Rested(self.calls)))

    def rested(self, event: Rested) -> None:
        """Nothing has come for a while, or the rest begins anew."""
        self.resting = False
        if self.running or self.writing or self.recovering or self.leaving:
            return  # the end of a call will look again
        if event.calls == self.calls and not self.order and is_worth_idle_time(self.policy, self.work):
            self.drain(Why.IDLE)
        else:
            self.rest()

    def leave_out(self, item: Arrived) -> None:
        """The call was not done, or not in full: a replay must not do it."""
        if item.push.spec.id in self.uncovered:
            empty = msgspec.structs.replace(item.push.spec, function=b"")
            push = msgspec.structs.replace(item.push, spec=empty)
            self.uncovered[item.push.spec.id] = Arrived(push, item.sender, number=item.number)

    def finish(self, item: Arrived, answer: Any) -> None:
        self.remember(item.push.spec.id, item.push.spec.caller_key, answer)
        if self.log is not None and item.sender != self.owner and type(answer) is m.TaskDone:
            answer = msgspec.structs.replace(answer, place=item.number + 1)
        self.send(item.sender, answer)
        for to, attempt in item.former.items():
            self.send(to, for_former(item, answer, attempt))

    def remember(self, call: bytes, caller: bytes, answer: Any) -> None:
        replies = self.replies
        replies[call] = caller, answer
        self.reply_bytes += size_of(answer)
        while len(replies) > REPLIES_KEPT_MAX or self.reply_bytes > REPLIES_KEPT_BYTES_MAX:
            first, (_, old) = replies.popitem(last=False)
            self.items.pop(first, None)
            self.reply_bytes -= size_of(old)

    # --- what goes out --------------------------------------------------------------------------------------

    def send(self, to: str, message: m.Message) -> None:
        self.out.append(c.Send(to, message))
