"""Who talks much should live together: boards and their models by policies, by hand and by chance, over two hosts.

    python experiments/co_location/run.py [--quick] [--hosts SCRIPT [--rate-mbit 200]]

With a script that makes hosts (experiments/testbed.py) results.json and the numbers in README.md are written. With
--quick two nodes of this host are used, whose links are not limited, and it prints only. The exit status is 1 when
policies cost more than the hosts written into the program, or are not better than chance.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments import two_hosts
from experiments.pages import percentile, table

HERE = Path(__file__).resolve().parent
PAIRS, MOVES, ROUNDS, SEED = 4, 200, 4, 7
BY_HAND_MAX = 1.1  # times the median of the hosts that are written into the program
PERCENTS = (50, 95)
NAMES = {
    "policies": "by two policies: `anti_affinity`, `affinity`", "hand": "by hosts written into the program",
    "chance": "without regard to who talks to whom",
}  # fmt: skip

Found = dict[str, list[float]]


def times(found: Found, way: str, other: str, percent: float) -> float:
    """How many times as long one way takes."""
    return percentile(found[way], percent) / percentile(found[other], percent)


def report(found: Found, asked: tuple[int, ...], links: str) -> str:
    """The table."""
    rows = [(NAMES[way], *(f"{1e3 * percentile(taken, percent):.2f}" for percent in PERCENTS), f"{len(taken):,}")
            for way, taken in found.items()]
    return (f"{asked[0]} boards and {asked[0]} models on two hosts, {links}:\n\n"
            + table(("placed", "P50, ms a move", "P95, ms", "moves"), rows)
            + f"\nWith policies a move takes {times(found, 'policies', 'hand', 50):.2f} of the time with written hosts "
            f"and {times(found, 'policies', 'chance', 50):.2f} of that by chance (P95: "
            f"{times(found, 'policies', 'chance', 95):.2f}).\n")


def holds(found: Found) -> bool:
    """Whether policies are as good as what one writes by hand, and better than nothing."""
    return times(found, "policies", "hand", 50) <= BY_HAND_MAX and times(found, "policies", "chance", 95) < 1


def kept(found: Found) -> dict[str, dict[str, float]]:
    """Of all moves what the table has."""
    return {way: {f"p{percent}_s": percentile(taken, percent) for percent in PERCENTS} for way, taken in found.items()}


TRIAL = two_hosts.Trial(
    "experiments.co_location.program", (2, 20, 1, SEED), (PAIRS, MOVES, ROUNDS, SEED), report, kept,
    lambda found: "" if holds(found) else "short of what was asked",
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(two_hosts.run(__doc__ or "", HERE, TRIAL))
