"""How soon does a gang begin? Reserved by the engine, by a library with a lock, and by each application for itself.

    python experiments/gangs/run.py [--quick]

Writes results.json and the numbers in README.md; with --quick it prints only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import flowengine as flow
from experiments.pages import fill, percentile, table

HERE = Path(__file__).resolve().parent
SLOTS, SIZES = 6, (2, 3, 5)  # of the node, and members of a gang in turn
SLOT = {"slot": 1.0}  # an actor takes no CPU, so slots are an amount of their own
APPLICATIONS, GANGS = 4, 12  # at the same time, and of each
RUN_S = 0.05
ATTEMPT_S, BACK_OFF_S, BACK_OFF_S_MAX = 0.3, 0.05, 1.0  # of an application that reserves by itself
names = itertools.count()


@flow.remote(resources=SLOT, recovery="none")
class Member:
    """One slot of a gang."""

    def is_up(self) -> bool:
        """It has its slot."""
        return True

    def work(self, name: str, size: int, rank: int) -> float:
        """Meet the others and work; tells when they had met."""
        flow.collectives.join(name, size, rank, timeout_s=60).barrier()
        met_s = time.monotonic()
        time.sleep(RUN_S)
        return met_s


def together(members: Sequence[Any]) -> float:
    """Have the members of a gang work; when they had met, in seconds."""
    name = f"gang {next(names)}"
    met = flow.get([one.work.remote(name, len(members), rank) for rank, one in enumerate(members)])
    for one in members:
        flow.kill(one)
    return float(max(met))


def by_engine(size: int, rng: random.Random) -> float:
    """The head reserves all slots or none."""
    gang = flow.scheduling.gang([SLOT] * size)
    return together([Member.options(placement=gang[rank]).remote() for rank in range(size)])


lock = threading.Lock()


def by_library(size: int, rng: random.Random) -> float:
    """One gang at a time takes its slots: all applications go through one library."""
    with lock:
        members = [Member.remote() for _ in range(size)]
        flow.get([one.is_up.remote() for one in members])
    return together(members)


def by_application(size: int, rng: random.Random) -> float:
    """Each takes what it gets; whoever has not got all in time gives back, waits and tries again."""
    back_off_s = BACK_OFF_S
    while True:
        members = [Member.remote() for _ in range(size)]
        up = [one.is_up.remote() for one in members]
        _, late = flow.wait(up, num_returns=size, timeout=ATTEMPT_S)
        if not late:
            return together(members)
        for one in members:
            flow.kill(one)
        time.sleep(rng.uniform(0.5, 1.5) * back_off_s)
        back_off_s = min(BACK_OFF_S_MAX, 2 * back_off_s)


WAYS: dict[str, Callable[[int, random.Random], float]] = {
    "engine": by_engine, "library": by_library, "application": by_application,
}  # fmt: skip


def application(way: str, gangs: int, seed: int) -> list[float]:
    """Gangs one after the other; seconds from asking until the members had met."""
    rng, found = random.Random(seed), []
    for number in range(gangs):
        size = SIZES[(number + seed) % len(SIZES)]
        began_s = time.monotonic()
        found.append(WAYS[way](size, rng) - began_s)
    return found


def measure(way: str, gangs: int) -> dict[str, Any]:
    """All applications at once."""
    began_s = time.monotonic()
    with ThreadPoolExecutor(APPLICATIONS) as pool:
        found = list(pool.map(lambda seed: application(way, gangs, seed), range(APPLICATIONS)))
    return {"waits_s": [each for one in found for each in one], "whole_s": time.monotonic() - began_s}


def report(found: dict[str, dict[str, Any]]) -> str:
    """The table."""
    rows = []
    for way, one in found.items():
        waits = one["waits_s"]
        rows.append((way, f"{median(waits):.3f}", f"{mean(waits):.3f}", f"{percentile(waits, 95):.3f}",
                     f"{max(waits):.3f}", f"{one['whole_s']:.1f}"))
    sizes = ", ".join(map(str, SIZES))
    head = f"{APPLICATIONS} applications, gangs of {sizes} members in turn, {SLOTS} slots; seconds:"
    return head + "\n\n" + table(("reserved by", "median", "mean", "95 %", "longest", "all done"), rows)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two gangs of each; writes nothing")
    chosen = parser.parse_args()
    found = {}
    with flow.init(num_workers=SLOTS, resources={"slot": SLOTS}):
        for way in WAYS:
            found[way] = measure(way, 2 if chosen.quick else GANGS)
            sys.stderr.write(f"{way}: done\n")
    text = report(found)
    sys.stdout.write(text)
    if not chosen.quick:
        (HERE / "results.json").write_text(json.dumps(found, indent=1) + "\n")
        fill(HERE / "README.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
