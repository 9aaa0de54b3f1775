"""Four corners of the grid on real processes: an actor that is killed now and then while it does fixed work."""

from __future__ import annotations

import csv
import pathlib
import random
import statistics
import time
from typing import NamedTuple

import numpy as np

import flowengine as flow

WORK_S = 5.0
MTBF_S = 1.7
POLICIES = ("adaptive", "never", "1", "10", "100")
SEEDS = (3,)
AHEAD = 8  # calls under way
TIMEOUT_S = 120.0
COUNTED = ("actor_restarts", "calls_replayed", "checkpoints_taken")


class Corner(NamedTuple):
    """How much state, and how long a call takes."""

    state_bytes: int
    call_s: float


CORNERS = tuple(Corner(size, call_s) for size in (100_000, 16_000_000) for call_s in (0.005, 0.25))


class Table:
    """State of some size, of which each call changes a little."""

    def __init__(self, nbytes: int) -> None:
        self.rows = np.random.default_rng(0).random(nbytes // 8)
        self.calls = 0

    def step(self, cost_s: float) -> int:
        """Compute for so long; how many calls there were."""
        end_s = time.perf_counter() + cost_s
        while time.perf_counter() < end_s:
            self.rows[self.calls % len(self.rows)] += 1.0
        self.calls += 1
        return self.calls


def completion_s(corner: Corner, policy: str, seed: int) -> float:
    """Seconds from the first call to the last reply; the count of calls is checked.

    Kills come after so much progress, not time: on a busy machine restarts take long, and would bring more kills.
    """
    actor = flow.remote(checkpoint=policy if not policy.isdigit() else int(policy))(Table).remote(corner.state_bytes)
    flow.get(actor.step.remote(0.0), timeout=TIMEOUT_S)
    count = round(WORK_S / corner.call_s)
    dice = random.Random(seed)
    kill_at_s = dice.expovariate(1.0 / MTBF_S)
    began_s = time.perf_counter()
    refs = [actor.step.remote(corner.call_s) for _ in range(min(AHEAD, count))]
    for number in range(count):
        last = flow.get(refs[number], timeout=TIMEOUT_S)
        if len(refs) < count:
            refs.append(actor.step.remote(corner.call_s))
        if number * corner.call_s >= kill_at_s:
            flow.kill(actor, restart=True)
            kill_at_s += dice.expovariate(1.0 / MTBF_S)
    if last != count + 1:
        raise SystemExit(f"{last - 1} calls were done instead of {count}")
    return time.perf_counter() - began_s


def corners(path: pathlib.Path) -> int:
    """Measure, store and show."""
    rows = []
    with flow.init(num_workers=2):
        for corner in CORNERS:
            for policy in POLICIES:
                before = flow.stats()
                times = [completion_s(corner, policy, seed) for seed in SEEDS]
                after = flow.stats()
                counts = [(after[name] - before[name]) / len(SEEDS) for name in COUNTED]
                rows.append((*corner, policy, f"{statistics.mean(times):.2f}", *counts))
                print(*rows[-1], flush=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("state_bytes", "call_s", "policy", "mean_s", *COUNTED))
        writer.writerows(rows)
    return 0
