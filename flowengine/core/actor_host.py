"""The ActorHost machine: in which order an actor runs the calls of its callers, and how it comes back. Pure.

Each caller numbers its calls; a call runs when all before it of the same caller have run. The order between callers is
a choice: when the caller changes, a turn (calls before, caller, number) goes to the actor's owner, and nothing that
depends on it leaves for anybody else before the owner has it (after Lineage Stash, SOSP'19, with f = 1). A new
incarnation begins from the last checkpoint and runs the turns again; calls that were done are not done twice.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from ..errors import TaskCancelled, pack_error
from ..recovery.checkpoint import Work, is_due
from . import commands as c
from . import messages as m
from .actor_calls import Arrived, for_former, joined, made_again
from .actor_replies import reply_lost, size_of, stored_in
from .ids import short
from .owner_state import ALL_ITEMS

REPLIES_KEPT_MAX = 2_000
REPLIES_KEPT_BYTES_MAX = 16 << 20
CALLERS_KEPT_MAX = 20_000
ITEMS_KEPT_MAX = 1_000
CUT_SHORT = ("cancelled", "timeout")  # kinds of failures that leave a call half done
ALL_READ = {"stream_have": ALL_ITEMS, "stream_taken": ALL_ITEMS}  # nobody reads a stream that is repeated
REPLY_DELAY_S_MAX = 0.001
DRAIN_S = 0.05  # so long new calls of an async actor wait for the running ones, that a checkpoint may be taken
MISSED_S = 2.0  # so long a replay waits for a call that no process alive seems to have


class Snapshot(m.Record, frozen=True):
    """What the machine needs to go on from a checkpoint."""

    calls: int
    frontiers: tuple[tuple[bytes, int], ...]
    last_caller: bytes
    replies: tuple[tuple[bytes, bytes, tuple[m.Value, ...], bytes], ...]  # call, caller, values, error
    seqs: tuple[tuple[bytes, int], ...] = ()  # the actor's own calls to others


class HostReady(m.Message, frozen=True):
    """The shell has constructed the actor, or restored it."""

    snapshot: Any  # Snapshot or None
    error: bytes = b""


class CallEnded(m.Message, frozen=True):
    """The shell has run a call."""

    call: bytes
    answer: Any
    leaving: bool = False  # it called exit_actor


class StateSaved(m.Message, frozen=True):
    """The shell has pickled the state after so many calls; value: a Checkpoint, or None when it cannot be pickled."""

    calls: int
    value: Any
    cost_s: float


class CallDeadline(m.Message, frozen=True):
    """Timer: the time limit of a call is over."""

    task: bytes
    attempt: int
    killing: bool = False


class DrainEnded(m.Message, frozen=True):
    """Timer: calls have waited long enough for those that run."""

    calls: int


class CallMissed(m.Message, frozen=True):
    """Timer: a replay has waited for a call that should have come again."""

    calls: int


class ActorHost:
    """Decides; never waits, sends or reads a clock."""

    def __init__(self, push: m.PushTask, owner: str, me: str) -> None:
        life = push.spec.life
        assert life is not None
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
        self.order: deque[tuple[bytes, int]] = deque()  # arrival
        self.running: dict[bytes, Arrived] = {}
        self.replies: dict[bytes, tuple[bytes, Any]] = {}
        self.reply_bytes = 0
        self.items: dict[bytes, list[m.StreamItem]] = {}  # of calls that are generators, for callers that run again
        self.arrived: dict[bytes, int] = {}  # caller -> number of its last call, when nothing is replayed
        self.forgotten = False  # some callers were dropped from `frontiers`
        self.unwanted: dict[bytes, None] = {}  # calls that were cancelled while a replay may need them
        self.resumed_to = -1  # the last call of the last caller that may have begun before
        self.missed_at = -1  # the number of the call that a replay misses
        self.uncovered: dict[bytes, Arrived] = {}
        self.turns: dict[int, tuple[bytes, int]] = {}
        self.awaited: dict[str, None] = {}  # callers that have yet to send their calls again
        self.resent: dict[str, None] = {}  # those that have
        self.callers_known = push.attempt == 1
        self.recovering = push.attempt > 1 and life.recovery == "exactly_once"
        self.replayed = 0
        self.began_at = 0.0
        self.noted_turn = -1
        self.kept_turn = -1
        self.unanswered_since = -1.0
        self.held: list[c.Send] = []  # what may go out when the owner has the turns
        self.work = Work(deaths=push.run - 1)
        self.saving = False
        self.draining = False
        self.drain_after = 0.0
        self.leaving = False
        self.saved: dict[int, dict[bytes, int]] = {}  # frontiers of checkpoints under way
        self.policy = life.checkpoint if life.recovery == "exactly_once" else "never"
        for kind, number, payload in push.recorded:
            if kind == "turn":
                self.turns[number] = (payload[:-8], int.from_bytes(payload[-8:], "big"))
        self.planned_to = max(self.turns, default=-1)
        self.limit = life.max_concurrency if not life.is_async else max(life.max_concurrency, 1000)

    def told(self, event: Any, sender: str) -> None:
        """Anything but a call."""
        kind = type(event)
        if kind is CallEnded:
            self.call_ended(event)
        elif kind is HostReady:
            self.host_ready(event)
        elif kind is StateSaved:
            self.state_saved(event)
        elif kind is m.TurnsKept:
            self.turns_kept(event.turn)
        elif kind is m.CheckpointKept:
            self.checkpoint_kept(event.calls)
        elif kind is m.CallersKnown:
            self.callers_known_now(event)
        elif kind is m.CallerGone:
            self.caller_gone(event.caller)
        elif kind is m.CallsResent:
            self.calls_resent(sender)
        elif kind is DrainEnded:
            self.drain_ended(event)
        elif kind is CallMissed:
            self.call_missed(event)

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
            "holds_back": len(self.held),
        }

    # --- beginning ------------------------------------------------------------------------------------------

    def host_ready(self, event: HostReady) -> None:
        """Constructed or restored: the owner tells the callers."""
        if not event.error:
            self.ready = True
            self.work.last_at = self.began_at = self.now
            if event.snapshot is not None:
                self.restore(event.snapshot)
        self.send(self.owner, m.ActorReady(self.id, self.push.attempt, self.me, event.error))
        self.run_next()

    def restore(self, snapshot: Snapshot) -> None:
        self.calls = snapshot.calls
        self.frontiers = dict(snapshot.frontiers)
        self.last_caller = snapshot.last_caller
        for call, caller, values, error in snapshot.replies:
            answer: Any = m.TaskFailed(call, 1, error, "task", False, -1)
            if not error:
                answer = m.TaskDone(call, 1, values, -1)
            self.remember(call, caller, answer)

    def snapshot(self, seqs: tuple[tuple[bytes, int], ...]) -> Snapshot:
        """What goes into a checkpoint; replies without references are kept for callers that run again."""
        replies: list[tuple[bytes, bytes, tuple[m.Value, ...], bytes]] = []
        for call, (caller, answer) in self.replies.items():
            if type(answer) is m.TaskFailed:
                if not answer.contained:
                    replies.append((call, caller, (), answer.error))
            elif not answer.stream_items and not any(value.contained for value in answer.values):
                replies.append((call, caller, answer.values, b""))
        return Snapshot(self.calls, tuple(self.frontiers.items()), self.last_caller, tuple(replies), seqs)

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
            self.order.append((caller, seq))
        known = line.get(seq)
        line[seq] = Arrived(push, sender) if known is None else joined(known, push, sender)
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
            self.reply(sender, msgspec.structs.replace(known[1], attempt=push.attempt))
        elif push.spec.function and not push.seen:
            self.reply(sender, reply_lost(push))
        if push.spec.id not in self.uncovered and self.life.recovery == "exactly_once":
            self.send(sender, m.CallsCovered(self.id, push.spec.caller_key, push.seq))

    def adopt_results(self, answer: Any, by: str) -> None:
        """The caller runs again in another process: large results are that one's now."""
        for node, oid in stored_in(answer):
            self.send(node, m.ObjectAdopted(oid, by))

    def callers_known_now(self, event: m.CallersKnown) -> None:
        """Who will send calls again."""
        self.callers_known = True
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
        while self.ready and len(self.running) < self.limit:
            if self.leaving or self.saving or self.draining:
                return  # a checkpoint must not count a call that the state does not show
            item = self.choose()
            if item is None:
                return
            self.begin(item)

    def choose(self) -> Arrived | None:
        """The next call: by the recorded turns while there are any, then in order of arrival."""
        if self.calls <= self.planned_to:
            item = self.taken(*self.planned_turn())
            if item is not None or not self.callers_known or self.awaited:
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
            if not self.callers_known or self.awaited:
                return None
            if self.resumed_to < 0:
                self.resumed_to = self.came_to(self.last_caller)
            if item is not None and seq <= self.resumed_to:
                return self.taken(self.last_caller, seq)  # it may have begun, and have called others
            self.recovering = False
            self.send(self.owner, m.ActorRecovered(self.id, self.push.attempt, self.replayed))
        for index, (caller, seq) in enumerate(self.order):
            if seq == self.frontiers.get(caller, -1) + 1:
                del self.order[index]
                return self.waiting[caller][seq]
        return None

    def came_to(self, caller: bytes) -> int:
        """The number of the last call of a caller that has come with all before it."""
        line = self.waiting.get(caller, {})
        seq = self.frontiers.get(caller, -1)
        while seq + 1 in line:
            seq += 1
        return seq

    def call_missed(self, event: CallMissed) -> None:
        """Actor and caller died at once: the replay goes on behind the calls that nobody has any more."""
        if event.calls == self.calls == self.missed_at and self.taken(*self.planned_turn()) is None:
            later = [number for number in self.turns if number > self.calls]
            self.calls = min(later, default=self.planned_to + 1)
        self.missed_at = -1
        self.run_next()

    def taken(self, caller: bytes, seq: int) -> Arrived | None:
        """This call, if it has come, out of the order of arrival."""
        item = self.waiting.get(caller, {}).get(seq)
        if item is not None:
            self.order.remove((caller, seq))
        return item

    def planned_turn(self) -> tuple[bytes, int]:
        """Who called at this point of the last incarnation."""
        turn = self.turns.get(self.calls)
        if turn is not None:
            return turn
        return self.last_caller, self.frontiers.get(self.last_caller, -1) + 1

    def begin(self, item: Arrived) -> None:
        push = item.push
        caller = push.spec.caller_key
        line = self.waiting[caller]
        del line[push.seq]
        if not line:
            del self.waiting[caller]
        number = self.calls
        self.calls += 1
        self.frontiers.pop(caller, None)
        self.frontiers[caller] = push.seq
        if len(self.frontiers) > CALLERS_KEPT_MAX:
            del self.frontiers[next(iter(self.frontiers))]
            self.forgotten = True
        if caller != self.last_caller and number not in self.turns and self.life.recovery == "exactly_once":
            self.note("turn", number, caller + push.seq.to_bytes(8, "big"))
        self.last_caller = caller
        self.replayed += self.recovering
        if self.life.recovery == "exactly_once":
            self.uncovered[push.spec.id] = item
            if item.orphan:
                self.have_kept([item])
        self.work.calls += 1
        if not push.spec.function:
            return
        if push.spec.id in self.unwanted and not self.recovering:
            self.leave_out(item)
            self.finish(item, self.cancelled(push))
            return
        self.running[push.spec.id] = item
        item.ran_for = item.sender
        if push.spec.timeout_s > 0:
            self.out.append(c.SetTimer(push.spec.timeout_s, self.deadline(push)))
        self.out.append(c.RunTask(push, item.sender))

    def deadline(self, push: m.PushTask) -> m.Message:
        """The timer event of a call's time limit."""
        return CallDeadline(push.spec.id, push.attempt)

    def note(self, kind: str, number: int, payload: bytes) -> None:
        self.noted_turn = number
        self.send(self.owner, m.StashAdded(self.id, self.push.attempt, ((kind, number, payload),)))

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

    def call_ended(self, event: CallEnded) -> None:
        """A call is over: answer, see whether a checkpoint is due, go on."""
        item = self.running.pop(event.call, None)
        cut_short = False
        if item is not None:
            self.work.run_s += max(event.answer.run_us, 0) / 1e6
            cut_short = type(event.answer) is m.TaskFailed and event.answer.kind in CUT_SHORT
            if cut_short:
                self.leave_out(item)
            elif item.sender != item.ran_for:
                self.adopt_results(event.answer, item.sender)
            self.finish(item, msgspec.structs.replace(event.answer, attempt=item.push.attempt))
        if event.leaving:
            self.leaving = True
            self.leave()
            return
        self.work.lived_s = self.now - self.began_at
        # What an interrupted call left in the state cannot be repeated, so it is kept.
        due = self.draining or is_due(self.policy, self.work, self.now) or (cut_short and self.policy != "never")
        if due and not self.saving and not self.recovering:
            self.drain()
        self.run_next()

    def leave_out(self, item: Arrived) -> None:
        """The call was not done, or not in full: a replay must not do it."""
        if item.push.spec.id in self.uncovered:
            empty = msgspec.structs.replace(item.push.spec, function=b"")
            self.uncovered[item.push.spec.id] = Arrived(msgspec.structs.replace(item.push, spec=empty), item.sender)

    def leave(self) -> None:
        """The actor ends by itself, when all that it answered has gone out."""
        if self.leaving and not self.gated:
            self.send(self.owner, m.KillActor(self.id, False, "it called flow.exit_actor()"))

    def finish(self, item: Arrived, answer: Any) -> None:
        self.remember(item.push.spec.id, item.push.spec.caller_key, answer)
        self.reply(item.sender, answer)
        for to, attempt in item.former.items():
            self.reply(to, for_former(item, answer, attempt))

    def remember(self, call: bytes, caller: bytes, answer: Any) -> None:
        self.replies[call] = (caller, answer)
        self.reply_bytes += size_of(answer)
        while len(self.replies) > REPLIES_KEPT_MAX or self.reply_bytes > REPLIES_KEPT_BYTES_MAX:
            first = next(iter(self.replies))
            self.items.pop(first, None)
            self.reply_bytes -= size_of(self.replies.pop(first)[1])

    # --- what goes out --------------------------------------------------------------------------------------

    def reply(self, to: str, answer: Any) -> None:
        """Answer; while more calls wait, answers may wait for each other a little."""
        lazy = False
        if self.order:
            if self.unanswered_since < 0:
                self.unanswered_since = self.now
            lazy = self.now - self.unanswered_since < REPLY_DELAY_S_MAX and answer.run_us < 500
        if not lazy:
            self.unanswered_since = -1.0
        self.out.append(c.Send(to, answer, lazy))

    def send(self, to: str, message: m.Message) -> None:
        """To the owner at once; to others when the owner has all turns that the message may depend on."""
        self.out.append(c.Send(to, message))

    @property
    def gated(self) -> bool:
        """Whether turns are on their way to the owner."""
        return self.noted_turn > self.kept_turn

    def gate(self, commands: list[Any], node: str) -> list[Any]:
        """Hold back messages to others while turns are on their way; order per receiver stays."""
        if not self.gated:
            return commands
        out = []
        for command in commands:
            if type(command) is c.Send and command.to not in (self.owner, node):
                self.held.append(command)
            else:
                out.append(command)
        return out

    def turns_kept(self, turn: int) -> None:
        """The owner has the turns up to this one: what depended on them may go."""
        self.kept_turn = max(self.kept_turn, turn)
        if not self.gated:
            self.out.extend(self.held)
            self.held = []
            self.leave()

    # --- checkpoints -----------------------------------------------------------------------------------------

    def drain(self) -> None:
        """A checkpoint is due: take it when no call runs; new ones wait a little, but no call may wait for itself."""
        if not self.running:
            self.save()
        elif not self.draining and self.now >= self.drain_after:
            self.draining = True
            self.out.append(c.SetTimer(DRAIN_S, DrainEnded(self.calls)))

    def drain_ended(self, event: DrainEnded) -> None:
        """The running calls take long: others go on, and the checkpoint waits for a better moment."""
        if self.draining and event.calls == self.calls:
            self.draining = False
            self.drain_after = self.now + DRAIN_S * 20
            self.run_next()

    def save(self) -> None:
        """Have the state pickled between two calls."""
        self.saving = True
        self.draining = False
        self.saved[self.calls] = dict(self.frontiers)
        self.out.append(c.SaveState(self.calls))

    def state_saved(self, event: StateSaved) -> None:
        """The state is pickled: the owner keeps it."""
        self.saving = False
        if event.value is None:
            self.policy = "never"
            self.saved.pop(event.calls, None)
        else:
            self.work.calls, self.work.run_s, self.work.last_at = 0, 0.0, self.now
            self.work.cost_s += (event.cost_s - self.work.cost_s) * 0.5
            self.send(self.owner, m.CheckpointTaken(self.id, self.push.attempt, event.value))
        self.run_next()

    def checkpoint_kept(self, calls: int) -> None:
        """The owner holds the checkpoint: callers need not keep what it covers."""
        frontiers = self.saved.pop(calls, None)
        if frontiers is None:
            return
        covered: dict[tuple[str, bytes], int] = {}
        for call, item in list(self.uncovered.items()):
            caller, seq = item.push.spec.caller_key, item.push.seq
            if seq <= frontiers.get(caller, -1):
                del self.uncovered[call]
                for to in (item.sender, self.owner):  # the owner may have it too, from a caller that let go of us
                    covered[to, caller] = max(seq, covered.get((to, caller), -1))
        for (to, caller), seq in covered.items():
            self.send(to, m.CallsCovered(self.id, caller, seq))
