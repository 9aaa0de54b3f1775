"""Asynchronous SGD with a parameter server, and serving an ensemble of models: here and with Ray, over hosts.

    python experiments/collective_applications/run.py [--quick] [--hosts SCRIPT [--rate-mbit 400]] [--ray-python PATH]

Without a script that makes hosts (experiments/testbed.py) it is the engine alone, on this host, and nothing is written.
Else results.json, picture.svg and the numbers in README.md are; what was measured before of the other engine stays.
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

from experiments.collectives import peers
from experiments.pages import fill, table
from experiments.picture import Axis, Bars, bar_chart
from experiments.testbed import Testbed, last_json, missing, start

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
HOSTS, HOSTS_HERE = 8, 4
CASES = (
    ("asynchronous SGD", 25 * MIB, 7), ("asynchronous SGD", 50 * MIB, 5),
    ("serving an ensemble", 12 * MIB, 7), ("serving an ensemble", 48 * MIB, 5),
)  # fmt: skip
QUICK = (("asynchronous SGD", MIB, 3), ("serving an ensemble", MIB, 3))
NAMES = {"flowengine": "here", "ray": "Ray"}
MODULE = "experiments.collective_applications.program"
LIMIT_S = 900.0


class Row(NamedTuple):
    """What was measured: seconds of each step or request."""

    engine: str
    application: str
    nbytes: int
    rounds_s: list[float]

    @property
    def seconds(self) -> float:
        """The median."""
        return median(self.rounds_s)


Case = tuple[str, int, int]


def rows_of(engine: str, cases: Sequence[Case], found: Sequence[list[float]]) -> list[Row]:
    """One for each case."""
    return [Row(engine, name, nbytes, times) for (name, nbytes, _), times in zip(cases, found, strict=True)]


def measure(engine: str, python: str, cases: Sequence[Case], bed: Testbed | None) -> list[Row]:
    """One engine, over hosts or on this one."""
    asked = json.dumps([bed.hosts if bed else HOSTS_HERE, cases])
    if bed is None:
        process = start((python, "-m", MODULE, engine, asked, ""))
    elif engine == "ray":
        process = peers.start_on_ray(python, bed, MODULE, engine, asked, peers.ray_address(bed))
    else:
        process = bed.start(0, python, "-m", MODULE, engine, asked, bed.cluster())
    return rows_of(engine, cases, last_json(process, engine, LIMIT_S))


def report(rows: Sequence[Row], rate_mbit: float) -> str:
    """The table."""
    found = {row[:3]: row.seconds for row in rows}
    lines = []
    for name, nbytes in dict.fromkeys(row[1:3] for row in rows):
        ours, theirs = (found.get((engine, name, nbytes)) for engine in NAMES)
        lines.append((name, f"{nbytes // MIB} MiB", f"{ours:.3f}" if ours else "-", f"{theirs:.3f}" if theirs else "-",
                      f"{theirs / ours:.1f} x" if ours and theirs else "-"))
    heads = ("application", "gradient or batch", "here (s)", "Ray (s)", "Ray against here")
    where = f"{HOSTS} hosts, links of {rate_mbit:g} Mbit/s each way" if rate_mbit else "One host"
    return f"{where}; seconds of a step or request (the median):\n\n{table(heads, lines)}"


def draw(rows: Sequence[Row]) -> str:
    """Both engines side by side."""
    found = {row[:3]: row.seconds for row in rows}
    cases = list(dict.fromkeys(row[1:3] for row in rows))
    bars = [Bars(name, [found.get((engine, *case)) for case in cases]) for engine, name in NAMES.items()]
    highest = max(found.values())
    groups = [f"{'SGD' if 'SGD' in name else 'serving'}, {nbytes // MIB} MiB" for name, nbytes in cases]
    title = f"Over {HOSTS} hosts: seconds of a step or request"
    return bar_chart(title, groups, Axis("seconds", 0, 1.1 * highest), bars)


def kept(rows: Sequence[Row]) -> list[Row]:
    """Those of earlier runs, with these in their place."""
    file = HERE / "results.json"
    before = [Row(*row) for row in json.loads(file.read_text())] if file.exists() else []
    merged = {row[:3]: row for row in [*before, *rows]}
    file.write_text("[\n" + ",\n".join(json.dumps(row) for row in merged.values()) + "\n]\n")
    return list(merged.values())


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 MiB; writes nothing")
    parser.add_argument("--hosts", default="", metavar="SCRIPT")
    parser.add_argument("--rate-mbit", type=int, default=400)
    parser.add_argument("--ray-python", default=sys.executable, metavar="PATH", help="default: this one")
    parser.add_argument("--engines", default=",".join(NAMES))
    chosen = parser.parse_args()
    cases = QUICK if chosen.quick else CASES
    reason = missing(chosen.hosts)
    if reason:
        sys.stderr.write(f"one host instead of hosts, without peers: {reason}\n")
        sys.stdout.write(report(measure("flowengine", sys.executable, cases, None), 0))
        return 0
    rows: list[Row] = []
    for engine in chosen.engines.split(","):
        lacking = peers.lacks("ray", chosen.ray_python) if engine == "ray" else ""
        if lacking:
            sys.stderr.write(f"Ray is left out: {lacking}\n")
            continue
        with Testbed(chosen.hosts, HOSTS, chosen.rate_mbit) as bed:
            rows += measure(engine, chosen.ray_python if engine == "ray" else sys.executable, cases, bed)
        sys.stderr.write(f"{engine}: done\n")
    if not chosen.quick:
        rows = kept(rows)
        (HERE / "picture.svg").write_text(draw(rows))
        fill(HERE / "README.md", report(rows, chosen.rate_mbit))
    sys.stdout.write(report(rows, chosen.rate_mbit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
