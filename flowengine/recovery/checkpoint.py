"""When to checkpoint an actor, and why. Pure: costs, sizes and counts of failures are handed in.

"adaptive" weighs the time that a checkpoint takes against the time that calls would take to run again. The interval
between checkpoints is that of Young (1974) and Daly (2006) for the measured cost and a learnt rate of failures, bounded
by an insurance: what costs next to nothing beside the work done is always worth it. Restart and load times lengthen
every recovery alike, whatever the interval, so they do not enter.
"""

from __future__ import annotations

import math
from enum import Enum

import msgspec

from .failures import failure_rate_per_s

COST_S_GUESS = 0.002  # of a first checkpoint, before its bytes
ELSEWHERE_S = 0.001  # what a checkpoint takes from the owner and the callers
WRITING_PART = 0.25  # of the time of writing that calls lose which run meanwhile
INSURANCE = 60.0  # a checkpoint that costs less than this part of the work since the last one is always taken
LOG_CALLS_MAX = 100_000
LOG_BYTES_MAX = 64 << 20  # or as much as the state has, if that is more
LOG_CALL_BYTES = 512  # what a kept call takes besides its arguments
IDLE_S_MIN = 0.1
IDLE_COSTS = 10.0  # an idle time so many times as long as a checkpoint takes: then it takes from nobody


class Why(Enum):
    """What made a checkpoint due."""

    WORK = "running the calls since the last one again would take as long as the interval"
    LOG_CALLS = "callers would have had to keep too many calls"
    LOG_BYTES = "callers would have had to keep too many bytes of arguments"
    IDLE = "the actor had nothing to do, and its calls take longer to run again than a checkpoint takes"
    COUNT = "its option asks for one after so many calls"
    PERIOD = "its option asks for one after so many seconds"
    ASKED = "members of a group keep much for what it may have to repeat"
    CUT_SHORT = "a call was interrupted, and what it left in the state cannot be repeated"


class Work(msgspec.Struct):
    """What happened since the last checkpoint, and what is known of costs and failures."""

    calls: int = 0
    run_s: float = 0.0  # time at work, which running the calls again would take
    log_bytes: int = 0
    last_at: float = 0.0
    last_why: Why | None = None
    taken: int = 0
    cost_s: float = COST_S_GUESS  # of a checkpoint: how long the actor stands still, and what the writing takes from it
    is_measured: bool = False
    deaths: int = 0
    lived_s: float = 0.0
    others_rate_per_s: float = 0.0  # of processes like this one; 0: unknown
    is_asked: bool = False  # others would be glad of one
    short_s: float = 0.0  # surely no interval as long as `lived_s` only grows

    def covered(self, now: float, why: Why) -> None:
        """The state as it is now was pickled."""
        self.calls, self.run_s, self.log_bytes, self.last_at, self.last_why = 0, 0.0, 0, now, why
        self.is_asked = False
        self.taken += 1

    def learn(self, still_s: float, whole_s: float) -> None:
        """The actor stood still so long for a checkpoint that took so long; states grow: the last one counts most."""
        cost_s = still_s + max(0.0, whole_s - still_s) * WRITING_PART + ELSEWHERE_S
        self.cost_s = cost_s if not self.is_measured else self.cost_s + (cost_s - self.cost_s) * 0.7
        self.is_measured = True
        self.short_s = 0.0

    def hear(self, rate_per_s: float) -> None:
        """Others of the session die at this rate."""
        self.others_rate_per_s = rate_per_s
        self.short_s = 0.0


def rate_per_s(work: Work) -> float:
    """Deaths of this actor per second, learnt from its own and those of others."""
    return failure_rate_per_s(work.deaths, work.lived_s, work.others_rate_per_s)


def daly_s(cost_s: float, rate: float) -> float:
    """Seconds of work between checkpoints that cost least in the long run (Daly's higher-order form)."""
    part = cost_s * rate / 2.0
    if part >= 1.0:
        return 1.0 / rate
    root = math.sqrt(part)
    return 2.0 * root / rate * (1.0 + root / 3.0 + part / 9.0) - cost_s


def interval_s(work: Work) -> float:
    """Seconds of work after which a checkpoint is worth its cost."""
    return min(daly_s(work.cost_s, rate_per_s(work)), INSURANCE * work.cost_s)


def is_enough(run_s: float, calls: int, interval: float) -> bool:
    """Whether now is nearer to the interval than after one more call like those so far.

    With checkpoints s apart a second of work costs cost/s + rate s/2 more: as much at s as at s + call when
    s (s + call) is the square of the best interval.
    """
    return run_s * (run_s + run_s / calls) >= interval * interval


def due(policy: str, work: Work, now: float) -> Why | None:
    """Why a checkpoint should be taken after the call that has just ended; None when it should not."""
    if work.calls == 0 or policy == "never":
        return None
    if work.is_asked:
        return Why.ASKED
    if policy == "adaptive":
        if work.calls >= LOG_CALLS_MAX:
            return Why.LOG_CALLS
        if work.log_bytes + work.calls * LOG_CALL_BYTES >= LOG_BYTES_MAX:
            return Why.LOG_BYTES
        if not is_enough(work.run_s, work.calls, work.short_s):
            return None
        work.short_s = interval_s(work)
        return Why.WORK if is_enough(work.run_s, work.calls, work.short_s) else None
    if policy.endswith("s"):
        return Why.PERIOD if now - work.last_at >= float(policy[:-1]) else None
    return Why.COUNT if work.calls >= int(policy) else None


def is_worth_idle_time(policy: str, work: Work) -> bool:
    """Whether a checkpoint should be taken when the actor has nothing to do for `idle_s`."""
    return policy == "adaptive" and work.calls > 0 and work.run_s > work.cost_s


def idle_s(work: Work) -> float:
    """How long nothing must have come, for a checkpoint to be free."""
    return max(IDLE_S_MIN, IDLE_COSTS * work.cost_s)


def why_not(policy: str, work: Work, now: float) -> str:
    """What a checkpoint waits for, in words."""
    if policy == "never":
        return "its option is never: its callers keep all calls"
    if work.calls == 0:
        return "there was no call since the last one"
    if policy == "adaptive":
        more = f", or {idle_s(work):.3g} s without a call" if is_worth_idle_time(policy, work) else ""
        return f"after {work.run_s:.3g} s of work it waits for {interval_s(work):.3g} s{more}"
    if policy.endswith("s"):
        return f"{now - work.last_at:.3g} s since the last one; its option says {policy}"
    return f"{work.calls} calls since the last one; its option says {policy}"


def told(policy: str, work: Work, now: float) -> list[str]:
    """Why a checkpoint of the actor was or was not taken, in words."""
    rate, others = rate_per_s(work), work.others_rate_per_s
    known = "measured" if work.is_measured else "a guess, for none was taken"
    like_it = f", like it {once_in(others)}" if others else ""
    last = f"{now - work.last_at:.3g} s ago: {work.last_why.value}" if work.last_why is not None else "none"
    return [
        f"policy: {policy}",
        f"a checkpoint costs {work.cost_s:.3g} s ({known})",
        f"failures: {work.deaths} of this actor in {work.lived_s:.3g} s{like_it}; expected {once_in(rate)}",
        f"interval: {interval_s(work):.3g} s of work" + ("" if policy == "adaptive" else " would be best"),
        f"since the last one: {work.calls} calls, {work.run_s:.3g} s of work, {work.log_bytes} bytes of arguments",
        f"taken by this process: {work.taken}, the last {last}" if work.taken else "taken by this process: none",
        f"not taken now: {why_not(policy, work, now)}",
    ]


def once_in(rate_per_s: float) -> str:
    """A rate for people."""
    return f"once in {1.0 / rate_per_s:.3g} s"


def chance_of_loss(rate_per_s: float, rerun_s: float) -> float:
    """That a result's node is lost while it is needed: for about half as long as what leads to it took."""
    return 1.0 - math.exp(-rate_per_s * rerun_s / 2.0)


def persist_due(rerun_s: float, write_s: float, rate_per_s: float) -> bool:
    """Whether a result should be written to durable storage: it is likely to cost more to make again.

    Along a chain that is once in about sqrt(2 x cost / rate) seconds of work, as with checkpoints of actors.
    """
    return rerun_s * chance_of_loss(rate_per_s, rerun_s) > write_s
