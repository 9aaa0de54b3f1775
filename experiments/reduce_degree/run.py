"""Of what degree should the tree be that folds arrays of several hosts? The engine's choice against each fixed degree.

    python experiments/reduce_degree/run.py [--quick] [--hosts SCRIPT [--rate-mbit 400]]

The times of the model need no hosts; with a script that makes them (experiments/testbed.py) the same is measured, and
results.json, picture.svg and the numbers in README.md are written. With --quick it prints only. The exit status is 1
when the choice takes more than 1.15 times as long as the best fixed degree, and more than some milliseconds longer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.pages import fill, table
from experiments.picture import Axis, Series, line_chart
from experiments.testbed import TCP_SHARE, Testbed, missing
from flowengine.collectives.tree import degree, fold_s

HERE = Path(__file__).resolve().parent
KIB, MIB = 1 << 10, 1 << 20
HOSTS = 8
INPUTS = HOSTS - 1  # of other hosts than that where the result is wanted
DEGREES = (1, 2, 3, INPUTS)
SIZES = {64 * KIB: 15, 256 * KIB: 11, MIB: 9, 4 * MIB: 5, 16 * MIB: 3, 64 * MIB: 1}  # bytes: rounds
LATENCY_S = 0.001  # of a hop, for the model's tables
WORSE_MAX, SLACK_S = 1.15, 0.01
LIMIT_S = 900.0


class Cell(NamedTuple):
    """One size: seconds with the engine's choice, then with each fixed degree."""

    nbytes: int
    rounds_s: list[list[float]]

    @property
    def seconds(self) -> list[float]:
        """Medians."""
        return [median(one) for one in self.rounds_s]

    @property
    def worse_s(self) -> float:
        """How much longer the choice takes than the best fixed degree."""
        chosen, *fixed = self.seconds
        return chosen - min(fixed)


def model(bytes_per_s: float) -> str:
    """What is reckoned, and what is chosen by it."""
    rows = []
    for nbytes in SIZES:
        times = [fold_s(INPUTS, each, nbytes, LATENCY_S, bytes_per_s) for each in DEGREES]
        rows.append((size_text(nbytes), *(f"{each:.4f}" for each in times),
                     degree(INPUTS, nbytes, LATENCY_S, bytes_per_s)))
    return table(("size", *(f"degree {each}" for each in DEGREES), "chosen"), rows)


def size_text(nbytes: int) -> str:
    """In the unit that fits."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def measure(bed: Testbed) -> list[Cell]:
    """On hosts that are there."""
    asked = json.dumps([bed.hosts, DEGREES, list(SIZES.items())])
    found = bed.program("experiments.reduce_degree.program", asked, bed.cluster(), limit_s=LIMIT_S)
    return [Cell(nbytes, times) for nbytes, times in zip(SIZES, found, strict=True)]


def report(cells: Sequence[Cell], bytes_per_s: float) -> str:
    """The tables."""
    parts = [f"The model at {1e3 * LATENCY_S:g} ms a hop and {bytes_per_s / 1e6:.1f} MB/s, {INPUTS} inputs; seconds:",
             model(bytes_per_s)]
    if cells:
        rows = [(size_text(cell.nbytes), *(f"{each:.4f}" for each in cell.seconds)) for cell in cells]
        heads = ("size", "the engine's choice", *(f"degree {each}" for each in DEGREES))
        parts += [f"Measured over {HOSTS} hosts; seconds (the median round):", table(heads, rows)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def draw(cells: Sequence[Cell]) -> str:
    """Seconds over size, against the best of the fixed degrees."""
    names = ["the engine's choice", *(f"degree {each}" for each in DEGREES)]
    series = [Series(name, [(cell.nbytes / KIB, cell.seconds[number]) for cell in cells], number == 0)
              for number, name in enumerate(names)]
    times = [each for cell in cells for each in cell.seconds]
    sizes = [cell.nbytes / KIB for cell in cells]
    return line_chart(f"Reduction over {HOSTS} hosts", Axis("KiB", min(sizes), max(sizes), is_log=True),
                      Axis("seconds", min(times) / 1.5, max(times) * 1.5, is_log=True), series)


def faults(cells: Sequence[Cell]) -> list[str]:
    """Where the choice was wrong."""
    missed = []
    for cell in cells:
        best_s = min(cell.seconds[1:])
        if cell.worse_s > max(SLACK_S, (WORSE_MAX - 1) * best_s):
            size = size_text(cell.nbytes)
            missed.append(f"{size}: the choice takes {cell.seconds[0]:.3f} s, the best {best_s:.3f} s")
    return missed


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the model alone; writes nothing")
    parser.add_argument("--hosts", default="", metavar="SCRIPT")
    parser.add_argument("--rate-mbit", type=int, default=400)
    chosen = parser.parse_args()
    bytes_per_s = chosen.rate_mbit * 1e6 / 8 * TCP_SHARE
    reason = "not asked for" if chosen.quick else missing(chosen.hosts)
    cells: list[Cell] = []
    if reason:
        sys.stderr.write(f"the part over hosts is left out: {reason}\n")
    else:
        with Testbed(chosen.hosts, HOSTS, chosen.rate_mbit) as bed:
            cells = measure(bed)
    text = report(cells, bytes_per_s)
    sys.stdout.write(text)
    if cells:
        (HERE / "results.json").write_text(json.dumps(cells, indent=1) + "\n")
        (HERE / "picture.svg").write_text(draw(cells))
        fill(HERE / "README.md", text)
    found = faults(cells)
    sys.stdout.write("\n" + "\n".join(found or ["all holds"]) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
