"""What exactly-once costs a call of an actor: time of one, and calls in a second, by the way to recover.

    python experiments/actor_calls/run.py [--passes 60] [--out experiments/actor_calls/results.md]

The exit status is 1 when exactly-once takes over 1.10 times as long as no recovery, or makes under 0.80 times as
many calls.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import flowengine as flow
from experiments.pages import percentile, table

MODES = ("exactly_once", "restart", "none")
SINGLE_CALLS, BURST_CALLS = 60, 1_000  # short passes, so that noise meets all alike
WARM_UP_CALLS = 2_000
LATENCY_MAX, THROUGHPUT_MIN = 1.10, 0.80


class Counter:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def add(self) -> int:
        """One more."""
        self.calls += 1
        return self.calls


class Pass(NamedTuple):
    """What one actor gave in one pass: microseconds of each call alone, and calls per second in a burst."""

    single_us: list[float]
    burst_per_s: float


def measure(add: Callable[[], Any]) -> Pass:
    """Some calls one at a time, then many that are submitted together and gathered."""
    single_us = []
    for _ in range(SINGLE_CALLS):
        began_s = time.perf_counter()
        flow.get(add())
        single_us.append((time.perf_counter() - began_s) * 1e6)
    began_s = time.perf_counter()
    flow.get([add() for _ in range(BURST_CALLS)])
    return Pass(single_us, BURST_CALLS / (time.perf_counter() - began_s))


def run(passes: int) -> dict[str, list[Pass]]:
    """One actor of each kind, all at once; they take turns, and each pass begins with another one."""
    found: dict[str, list[Pass]] = {mode: [] for mode in MODES}
    with flow.init(num_workers=2):
        actors = {mode: flow.remote(recovery=mode)(Counter).remote() for mode in MODES}
        for actor in actors.values():
            flow.get([actor.add.remote() for _ in range(WARM_UP_CALLS)])
        for number in range(passes):
            first = number % len(MODES)
            for mode in (*MODES[first:], *MODES[:first]):
                found[mode].append(measure(actors[mode].add.remote))
    return found


def ratios(mine: Sequence[Pass], others: Sequence[Pass]) -> tuple[float, float]:
    """Time of a call, and calls in a second, against another way to recover: medians over the passes."""
    pairs = list(zip(mine, others, strict=True))
    slower = median(percentile(a.single_us, 50) / percentile(b.single_us, 50) for a, b in pairs)
    faster = median(a.burst_per_s / b.burst_per_s for a, b in pairs)
    return slower, faster


def report(found: dict[str, list[Pass]]) -> str:
    """The table."""
    rows = []
    for mode, passes in found.items():
        single_us = [call for one in passes for call in one.single_us]
        bursts_per_s = [one.burst_per_s for one in passes]
        slower, faster = ratios(passes, found["none"])
        rows.append(
            (mode, f"{percentile(single_us, 50):,.0f}", f"{percentile(single_us, 99):,.0f}", f"{slower:.2f}",
             f"{median(bursts_per_s):,.0f}", f"{max(bursts_per_s):,.0f}", f"{faster:.2f}")
        )  # fmt: skip
    heads = ("recovery", "p50 (us)", "p99 (us)", "x none", "calls/s", "best", "x none")
    return table(heads, rows)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=60)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    found = run(chosen.passes)
    slower, faster = ratios(found["exactly_once"], found["none"])
    text = report(found)
    text += f"\n{chosen.passes} passes; Python {platform.python_version()}, {platform.machine()}\n"
    sys.stdout.write(text)
    if chosen.out is not None:
        chosen.out.write_text(f"# Results\n\n{text}")
    holds = slower <= LATENCY_MAX and faster >= THROUGHPUT_MIN
    sys.stdout.write(
        f"\nexactly-once takes {slower:.2f} x as long (at most {LATENCY_MAX:.2f}) and makes {faster:.2f} x as many "
        f"calls (at least {THROUGHPUT_MIN:.2f}): {'holds' if holds else 'does not hold'}\n"
    )
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
