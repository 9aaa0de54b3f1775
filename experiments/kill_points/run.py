"""Kill processes at every named point, and in every ordered pair of points: is every history that of one exact run?"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import flowengine as flow
from experiments.kill_points.scenes import PLACES, RING_PLACES, Outcome, Place, pairs, play, play_ring, storm

NTHS = (1, 2)
GIVEN_UP = "times in the call"  # three deaths in the same call in a row end an actor, as promised


def parts(seeds: int) -> list[tuple[str, list[list[Place]], Callable[[list[Place]], Outcome]]]:
    """What is played: name, places of each scene, the scene."""
    return [
        ("counter: one place, and every ordered pair", pairs(PLACES, NTHS), play),
        ("counter: six random places", [storm(PLACES, seed) for seed in range(seeds)], play),
        ("ring: one place, and every ordered pair", pairs(RING_PLACES, NTHS), play_ring),
        ("ring: four random places", [storm(RING_PLACES, seed) for seed in range(seeds)], play_ring),
    ]


def row(name: str, outcomes: list[Outcome]) -> str:
    """One line of the table."""
    deaths = [sum(outcome.fired) for outcome in outcomes]
    given_up = [outcome for outcome in outcomes if any(GIVEN_UP in fault for fault in outcome.faults)]
    wrong = sum(bool(outcome.faults) for outcome in outcomes) - len(given_up)
    took_s = sorted(outcome.took_s for outcome in outcomes)
    spread = [sum(died == number for died in deaths) for number in range(max(deaths) + 1)]
    return (
        f"| {name} | {len(outcomes)} | {sum(deaths)} | {'/'.join(str(count) for count in spread)} | {wrong} | "
        f"{len(given_up)} | {statistics.median(took_s):.2f} | {took_s[-1]:.2f} |"
    )


def main() -> int:
    """Play all, print each fault and the table; the exit status says whether all was exact."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="random scenes of each kind")
    parser.add_argument("--every", type=int, default=1, help="only each n-th scene")
    parser.add_argument("--out", type=pathlib.Path, help="file for the table")
    given = parser.parse_args()
    lines = [
        "| scene | scenes | deaths | scenes with 0/1/2 ... deaths | wrong | given up | median s | longest s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    faults = 0
    began = time.monotonic()
    with flow.init(num_workers=2):
        for name, scenes, scene in parts(given.seeds):
            outcomes = []
            for places in scenes[:: given.every]:
                outcome = scene(places)
                outcomes.append(outcome)
                if outcome.faults:
                    faults += not any(GIVEN_UP in fault for fault in outcome.faults)
                    print(outcome, flush=True)
            lines.append(row(name, outcomes))
            print(lines[-1], flush=True)
    table = "\n".join(lines)
    print(f"{table}\n{time.monotonic() - began:.0f} s")
    if given.out:
        given.out.write_text(f"{table}\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
