"""What is it worth to run tasks where their data is? Two hosts with slow links, with and without regard to the data.

    python experiments/locality/run.py [--quick] [--hosts SCRIPT [--rate-mbit 200]]

With a script that makes hosts (experiments/testbed.py) results.json and the numbers in README.md are written. With
--quick two nodes of this host are used, whose links are not limited, and it prints only. The exit status is 1 when the
bound is missed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments import two_hosts
from experiments.pages import table

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
NBYTES, TASKS, ROUNDS, SEED = 16 * MIB, 24, 3, 5
FASTER_MIN = 10.0

Found = dict[str, list[tuple[float, int]]]


def faster(found: Found) -> float:
    """How many times."""
    return median(row[0] for row in found["without"]) / median(row[0] for row in found["with"])


def report(found: Found, asked: tuple[int, ...], links: str) -> str:
    """The table."""
    rows: list[tuple[Any, ...]] = []
    for way, name in (("with", "by the engine, where the data is"), ("without", "without regard to the data")):
        rows.append((name, f"{median(row[0] for row in found[way]):.2f}",
                     f"{median(row[1] for row in found[way]) / MIB:.0f}"))
    return (f"{asked[1]} tasks, each with an input of {asked[0] // MIB} MiB on one of two hosts, {links}:\n\n"
            + table(("placed", "seconds", "MiB moved"), rows)
            + f"\nWithout regard to the data it takes {faster(found):.1f} times as long.\n")


def missed(found: Found) -> str:
    """The bound, when it is missed."""
    return "" if faster(found) >= FASTER_MIN else f"less than {FASTER_MIN:g} times"


TRIAL = two_hosts.Trial(
    "experiments.locality.program", (4 * MIB, 8, 1, SEED), (NBYTES, TASKS, ROUNDS, SEED), report, lambda found: found,
    missed,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(two_hosts.run(__doc__ or "", HERE, TRIAL))
