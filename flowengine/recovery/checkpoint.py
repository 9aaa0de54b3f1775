"""When to checkpoint an actor. Pure: costs and rates are handed in, the answer is yes or no with its reason.

"adaptive" checkpoints when the work since the last one would take longer to run again than the interval of Young (1974)
and Daly (2006), sqrt(2 x cost of a checkpoint / failure rate); the rate is learnt from a prior.
"""

from __future__ import annotations

import math

import msgspec

RATE_PRIOR_PER_S = 1 / 600.0
PRIOR_WEIGHT_S = 600.0
LOG_CALLS_MAX = 2_000
COST_S_GUESS = 0.002


class Work(msgspec.Struct):
    """What happened since the last checkpoint, and what is known of their cost."""

    calls: int = 0
    run_s: float = 0.0
    last_at: float = 0.0
    cost_s: float = COST_S_GUESS
    lived_s: float = 0.0
    deaths: int = 0


def failure_rate_per_s(work: Work) -> float:
    """Deaths per second of life: a prior of one in ten minutes, updated by what was seen."""
    return (work.deaths + RATE_PRIOR_PER_S * PRIOR_WEIGHT_S) / (work.lived_s + PRIOR_WEIGHT_S)


def interval_s(work: Work) -> float:
    """Seconds of work between checkpoints that cost least in the long run (Young/Daly)."""
    return math.sqrt(2.0 * work.cost_s / failure_rate_per_s(work))


def is_due(policy: str, work: Work, now: float) -> bool:
    """Whether a checkpoint should be taken after the call that has just ended."""
    if policy == "never" or work.calls == 0:
        return False
    if policy == "adaptive":
        return work.run_s >= interval_s(work) or work.calls >= LOG_CALLS_MAX
    if policy.endswith("s"):
        return now - work.last_at >= float(policy[:-1])
    return work.calls >= int(policy)
