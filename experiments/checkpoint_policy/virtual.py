"""One actor and one caller in virtual time: the engine's own ActorHost and policy, failures drawn by a seed."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.actor_host import ActorHost, CallEnded, HostReady
from flowengine.core.actor_saving import Snapshot, StateSaved
from flowengine.core.ids import child_id
from flowengine.recovery.checkpoint import daly_s
from flowengine.recovery.failures import Lives
from flowengine.recovery.stash import Stash

ACTOR, CALLER = b"a" * 16, b"c" * 16
OWNER, ME, CALLER_AT = "owner", "actor", "caller"
DISK_BYTES_PER_S = 500e6
CHECKPOINT_S_MIN = 0.001
RESTART_S = 0.5  # from a death until the constructor or the load begins
AHEAD = 3  # calls that the caller sends without waiting for their replies
TRUE_RATE = "true rate"


class Cell(NamedTuple):
    """One place of the grid."""

    state_bytes: float
    call_s: float
    mtbf_s: float  # mean time between failures; infinite: none
    work_s: float

    @property
    def checkpoint_s(self) -> float:
        """How long the actor stands still for a checkpoint; loading it takes as long."""
        return CHECKPOINT_S_MIN + self.state_bytes / DISK_BYTES_PER_S


def failures(cell: Cell, seed: int) -> Iterator[float]:
    """When the actor's process dies: the same moments whatever the policy."""
    dice, at = random.Random(f"failures {cell.mtbf_s} {seed}"), 0.0
    while math.isfinite(cell.mtbf_s):
        at += dice.expovariate(1.0 / cell.mtbf_s)
        yield at
    yield math.inf


def option(policy: str, cell: Cell) -> str:
    """The actor's option `checkpoint` for a policy of the experiment."""
    if policy != TRUE_RATE:
        return policy
    return f"{daly_s(cell.checkpoint_s, 1 / cell.mtbf_s)!r}s" if math.isfinite(cell.mtbf_s) else "never"


@functools.cache
def spec_of(seq: int) -> m.TaskSpec:
    """The call of this number."""
    actor = m.RefTo(ACTOR + bytes(4), OWNER)
    return m.TaskSpec(child_id(CALLER, seq), b"m", "m", actor=actor, caller_key=CALLER)


class Run:
    """One program: so many calls to one actor."""

    def __init__(self, cell: Cell, policy: str, seed: int) -> None:
        self.cell = cell
        dice = random.Random(f"calls {seed}")
        count = max(1, round(cell.work_s / cell.call_s))
        self.call_s = [cell.call_s * dice.uniform(0.5, 1.5) for _ in range(count)]
        life = m.ActorLife(checkpoint=option(policy, cell))
        self.spec = m.TaskSpec(ACTOR, b"C", "C", life=life)
        self.failures = failures(cell, seed)
        self.fails_at = next(self.failures)
        self.now = 0.0
        self.deaths = 0
        self.replayed = 0
        self.checkpoints = 0
        # What the owner and the caller hold.
        self.lives = Lives()
        self.snapshot: Snapshot | None = None
        self.sent: deque[int] = deque()
        self.next_seq = 0
        self.answered = 0
        self.events: list[tuple[float, int, Any]] = []
        self.order = itertools.count()
        self.host: ActorHost | None = None

    def run(self, end_s: float) -> float:
        """Virtual seconds until the last reply; infinite when it is not there by then."""
        while self.answered < len(self.call_s):
            if self.now > end_s:
                return math.inf
            if self.host is None:
                self.begin()
                continue
            if not self.events:
                raise RuntimeError(f"nothing happens any more: {self.host.describe()}")
            event = min(self.events)
            if event[0] >= self.fails_at:
                self.die()
                continue
            self.events.remove(event)
            self.now = event[0]
            self.tell(event[2])
        return self.now

    def begin(self) -> None:
        """A process starts, and constructs or loads the actor; it may die over that."""
        ready_at = self.now + (RESTART_S if self.deaths else 0.0)
        ready_at += self.cell.checkpoint_s if self.snapshot is not None else 0.0
        if ready_at >= self.fails_at:
            self.die()
            return
        self.now = ready_at
        self.lives.begin(self.now)
        odds = m.Odds(self.deaths, self.now, self.lives.rate_per_s(self.now))
        push = m.PushTask(self.spec, self.deaths + 1, 1, run=self.deaths + 1, odds=odds)
        self.host = host = ActorHost(push, OWNER, ME, Stash())
        host.now = self.now
        self.tell(HostReady(self.snapshot))
        if self.deaths:
            turns = (("turn", 0, CALLER + bytes(8)),) if self.snapshot is None and self.answered else ()
            self.tell(m.CallersKnown(ACTOR, (CALLER_AT,), turns, self.answered))
            for seq in self.sent:
                self.push(seq, seq < self.answered)
            self.tell(m.CallsResent(ACTOR), CALLER_AT)
        self.call()

    def die(self) -> None:
        """The process is gone, and with it what it did since the checkpoint."""
        self.now = self.fails_at
        self.fails_at = next(self.failures)
        if self.host is not None:
            self.lives.end(self.host.began_at, self.now, True)
        self.deaths += 1
        self.host = None
        self.events.clear()

    # --- the caller ---------------------------------------------------------------------------------------------

    def call(self) -> None:
        """Keep a few calls under way."""
        while self.host is not None and self.next_seq < min(self.answered + AHEAD, len(self.call_s)):
            self.sent.append(self.next_seq)
            self.next_seq += 1
            self.push(self.next_seq - 1, False)

    def push(self, seq: int, seen: bool) -> None:
        assert self.host is not None
        self.host.now = self.now
        self.host.call_came(m.PushTask(spec_of(seq), 1, 0, seq=seq, seen=seen), CALLER_AT)
        self.perform()

    # --- the shell and the owner ----------------------------------------------------------------------------------

    def tell(self, event: Any, sender: str = "") -> None:
        """Hand an event to the machine."""
        if self.host is not None:
            self.host.now = self.now
            self.host.told(event, sender)
            self.perform()

    def later(self, after_s: float, event: Any) -> None:
        self.events.append((self.now + after_s, next(self.order), event))

    def perform(self) -> None:
        """Carry out what the machine has ordered."""
        host = self.host
        assert host is not None
        commands, host.out = host.out, []
        for command in commands:
            if isinstance(command, c.RunTask):
                push = command.push
                done = m.TaskDone(push.spec.id, push.attempt, (), int(self.call_s[push.seq] * 1e6))
                self.replayed += push.seq < self.answered
                self.later(self.call_s[push.seq], CallEnded(push.spec.id, done))
            elif isinstance(command, c.SaveState):
                host.replies.clear()  # the caller has them all
                self.checkpoints += 1
                self.later(self.cell.checkpoint_s, self.saved(command.calls, host.snapshot(())))
            elif isinstance(command, c.SetTimer):
                self.later(command.delay_s, command.event)
            elif isinstance(command, c.Send):
                self.hear(command.message)

    def saved(self, calls: int, snapshot: Snapshot) -> StateSaved:
        checkpoint = m.Checkpoint(calls, m.Stored(0, (), ()), snapshot)  # type: ignore[arg-type]
        return StateSaved(calls, checkpoint, self.cell.checkpoint_s)

    def hear(self, message: Any) -> None:
        """The owner's and the caller's side."""
        if isinstance(message, m.TaskDone):
            if message.task == spec_of(self.answered).id:  # else it was answered before
                self.answered += 1
                self.call()
        elif isinstance(message, m.CheckpointTaken):
            self.snapshot = message.checkpoint.path  # type: ignore[assignment]
            rate = self.lives.rate_per_s(self.now)
            self.tell(m.CheckpointKept(ACTOR, message.checkpoint.calls, rate))
        elif isinstance(message, m.CallsCovered):
            while self.sent and self.sent[0] <= message.seq:
                self.sent.popleft()
