"""What is it worth to run tasks where their data is? Two hosts with slow links, with and without regard to the data.

    python experiments/locality/run.py [--quick] [--hosts SCRIPT [--rate-mbit 200]]

With a script that makes hosts (experiments/testbed.py) results.json and the numbers in README.md are written. With
--quick two nodes of this host are used, whose links are not limited, and it prints only. The exit status is 1 when the
bound is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.pages import fill, table
from experiments.testbed import Bed, Testbed, missing

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
NBYTES, TASKS, ROUNDS, SEED = 16 * MIB, 24, 3, 5
FASTER_MIN = 10.0
LIMIT_S = 600.0

Found = dict[str, list[tuple[float, int]]]


def measure(bed: Bed, asked: tuple[int, int, int, int]) -> Found:
    """On hosts that are there."""
    found: Found = bed.program("experiments.locality.program", json.dumps(asked), bed.cluster(), limit_s=LIMIT_S)
    return found


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
            + table(("placed", "seconds", "MiB moved"), rows) + f"\n{faster(found):.1f} times faster.\n")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two nodes of this host; writes nothing")
    parser.add_argument("--hosts", default="", metavar="SCRIPT", help="that makes hosts: see experiments/testbed.py")
    parser.add_argument("--rate-mbit", type=int, default=200)
    chosen = parser.parse_args()
    if chosen.quick:
        asked = (4 * MIB, 8, 1, SEED)
        with Bed(2) as bed:
            sys.stdout.write(report(measure(bed, asked), asked, "links that are not limited"))
        return 0
    reason = missing(chosen.hosts)
    if reason:
        sys.stderr.write(f"nothing is measured: {reason}\n")
        return 2
    asked = (NBYTES, TASKS, ROUNDS, SEED)
    with Testbed(chosen.hosts, 2, chosen.rate_mbit) as bed:
        found = measure(bed, asked)
    text = report(found, asked, f"links of {chosen.rate_mbit} Mbit/s")
    sys.stdout.write(text)
    (HERE / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    fill(HERE / "README.md", text)
    if faster(found) < FASTER_MIN:
        sys.stdout.write(f"\nless than {FASTER_MIN:g} times\n")
        return 1
    sys.stdout.write("\nall holds\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
