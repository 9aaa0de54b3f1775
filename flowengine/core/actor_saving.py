"""Part of ActorHost: when the state is pickled, and what the checkpoints that the owner holds let others forget. Pure.

A checkpoint is pickled between two calls; writing a large one goes on while calls run, one write at a time. One that
the owner has in its own memory counts at once. One in a file may be torn, so what came after the one before it stays.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ..recovery.checkpoint import Why, Work
from . import commands as c
from . import messages as m
from .actor_calls import Arrived, kept_bytes

HISTORY_MAX = 1_000
HISTORY_BYTES_MAX = 4 << 20
DRAIN_S = 0.05  # so long new calls of an async actor wait for the running ones, that a checkpoint may be taken


class History:
    """The last calls that a checkpoint covers: only who looks back wants them, so there is a bound."""

    def __init__(self) -> None:
        self.calls: deque[Arrived] = deque()
        self.bytes = 0

    def add(self, item: Arrived) -> None:
        """The newest."""
        calls = self.calls
        calls.append(item)
        self.bytes += kept_bytes(item.push)
        while len(calls) > HISTORY_MAX or self.bytes > HISTORY_BYTES_MAX:
            self.bytes -= kept_bytes(calls.popleft().push)


class Snapshot(m.Record, frozen=True):
    """What the machine needs to go on from a checkpoint."""

    calls: int
    frontiers: tuple[tuple[bytes, int], ...]
    last_caller: bytes
    replies: tuple[tuple[bytes, bytes, tuple[m.Value, ...], bytes], ...]  # call, caller, values, error
    seqs: tuple[tuple[bytes, int], ...] = ()  # the actor's own calls to others
    cost_s: float = 0.0  # of a checkpoint; 0: not measured
    estate: Any = None  # what its code owns: an Estate
    holds: tuple[tuple[str, int], ...] = ()  # locks that it has: names and tokens


class StateTaken(m.Message, frozen=True):
    """The shell has pickled the state after so many calls: calls go on while it is written, into this folder."""

    calls: int
    folder: str = ""


class StateSaved(m.Message, frozen=True):
    """The state after so many calls is pickled and written; value: a Checkpoint, or None: failure says why not."""

    calls: int
    value: Any
    cost_s: float
    failure: str = ""
    for_good: bool = False  # it cannot be pickled, so another try is no better


class CheckpointAsked(m.Message, frozen=True):
    """Others keep much for what this actor may have to repeat: a checkpoint soon would let them drop it."""


class DrainEnded(m.Message, frozen=True):
    """Timer: calls have waited long enough for those that run."""

    calls: int


class ActorSaving:
    """Part of ActorHost."""

    id: bytes
    push: m.PushTask
    owner: str
    out: list[Any]
    now: float
    calls: int
    frontiers: dict[bytes, int]
    last_caller: bytes
    running: dict[bytes, Arrived]
    replies: dict[bytes, tuple[bytes, Any]]
    uncovered: dict[bytes, Arrived]
    work: Work
    policy: str

    def __init__(self) -> None:
        self.saving = False  # the state is being pickled: no call may begin
        self.writing = False  # a checkpoint is under way to the owner
        self.draining = False
        self.drain_after = 0.0
        self.why = Why.WORK  # the newest checkpoint is taken
        self.stood_at = 0.0  # since when no call may begin
        self.still_s = 0.0  # how long the actor stood still for it
        self.saved: dict[int, dict[bytes, int]] = {}  # frontiers of checkpoints that others may yet need
        self.folder = ""  # where the owner knows files of this actor
        self.history = History()
        self.unsure_from = -1  # restored from a file that nobody else vouches for: the calls that it was taken after

    def run_next(self) -> None:
        """Begin what may run now."""
        raise NotImplementedError

    def send(self, to: str, message: m.Message) -> None:
        """Say something to another process."""
        raise NotImplementedError

    def remember(self, call: bytes, caller: bytes, answer: Any) -> None:
        """Keep an answer for whoever asks again."""
        raise NotImplementedError

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a checkpoint."""
        self.calls = snapshot.calls
        self.frontiers = dict(snapshot.frontiers)
        self.last_caller = snapshot.last_caller
        if snapshot.cost_s:
            self.work.cost_s, self.work.is_measured = snapshot.cost_s, True
        checkpoint = self.push.checkpoint
        if checkpoint is not None and checkpoint.path:
            self.saved[self.calls] = dict(self.frontiers)
            self.unsure_from = self.calls
        for call, caller, values, error in snapshot.replies:
            answer: Any = m.TaskFailed(call, 1, error, "task", False, -1)
            if not error:
                answer = m.TaskDone(call, 1, values, -1)
            self.remember(call, caller, answer)

    def snapshot(self, seqs: tuple[tuple[bytes, int], ...], estate: Any = None) -> Snapshot:
        """What goes into a checkpoint; replies without references are kept for callers that run again."""
        replies: list[tuple[bytes, bytes, tuple[m.Value, ...], bytes]] = []
        for call, (caller, answer) in self.replies.items():
            if type(answer) is m.TaskFailed:
                if not answer.contained:
                    replies.append((call, caller, (), answer.error))
            elif not answer.stream_items and not any(value.contained for value in answer.values):
                replies.append((call, caller, answer.values, b""))
        cost_s = self.work.cost_s if self.work.is_measured else 0.0
        frontiers = tuple(self.frontiers.items())
        return Snapshot(self.calls, frontiers, self.last_caller, tuple(replies), seqs, cost_s, estate)

    def drain(self, why: Why) -> None:
        """A checkpoint is due: take it when no call runs; new ones wait a little, but no call may wait for itself."""
        self.why = why
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
        self.saving = self.writing = True
        self.draining = False
        self.stood_at = self.now
        self.saved[self.calls] = dict(self.frontiers)
        self.out.append(c.SaveState(self.calls))

    def state_taken(self, event: StateTaken) -> None:
        """The state is pickled: calls go on, and the work since then is what a replay would have to do."""
        if event.folder and event.folder != self.folder:
            self.folder = event.folder
            self.send(self.owner, m.CheckpointsAt(self.id, self.push.attempt, event.folder))
        if self.saving:
            self.saving = False
            self.still_s = self.now - self.stood_at
            self.work.covered(self.now, self.why)
            self.run_next()

    def state_saved(self, event: StateSaved) -> None:
        """The state is written: the owner keeps it."""
        self.state_taken(StateTaken(event.calls))
        self.writing = False
        if event.value is None:
            self.saved.pop(event.calls, None)
            if event.failure:
                self.send(self.owner, m.CheckpointFailed(self.id, self.push.attempt, event.calls, event.failure))
            if event.for_good:
                self.policy = "never"
        else:
            self.work.learn(self.still_s, event.cost_s)
            self.send(self.owner, m.CheckpointTaken(self.id, self.push.attempt, event.value))
        self.run_next()

    def checkpoint_asked(self) -> None:
        """The end of the next call takes one, if any are taken at all."""
        self.work.is_asked = True

    def checkpoint_kept(self, calls: int) -> None:
        """The owner can bring the actor back without the first so many calls: nobody need keep them."""
        frontiers = self.saved.get(calls, {})
        self.saved = {number: kept for number, kept in self.saved.items() if number > calls}
        if calls >= self.unsure_from:
            self.unsure_from = -1
        self.out.append(c.ForgetStates(calls))
        covered: dict[tuple[str, bytes], int] = {}
        for call, item in list(self.uncovered.items()):
            caller, seq = item.push.spec.caller_key, item.push.seq
            if seq <= frontiers.get(caller, -1):
                del self.uncovered[call]
                self.history.add(item)
                for to in (item.sender, self.owner):  # the owner may have it too, from a caller that let go of us
                    covered[to, caller] = max(seq, covered.get((to, caller), -1))
        for (to, caller), seq in covered.items():
            self.send(to, m.CallsCovered(self.id, caller, seq))
