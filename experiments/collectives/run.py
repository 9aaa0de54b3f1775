"""Broadcast, reduce and allreduce of arrays of several sizes: over hosts of a testbed, and among processes of one.

    python experiments/collectives/run.py [--quick] [--peers group,refs,gloo,openmpi,ray] [--python gloo=PATH ...]
                                          [--hosts SCRIPT [--rate-mbit 400]]

Peers whose Python lacks them are left out, and it is said; so are the hosts without a script that makes them. What is
measured takes the place of what was measured before in results.json; picture.svg and the numbers in README.md follow
from that. With --quick it prints only. The exit status is 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.collectives import peers
from experiments.collectives.trial import OPS, Case
from experiments.pages import fill, table
from experiments.picture import Axis, Bars, bar_chart
from experiments.testbed import TCP_SHARE, ProgramFailed, Testbed, missing

HERE = Path(__file__).resolve().parent
KIB, MIB = 1 << 10, 1 << 20
HOSTS = 8
SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
LARGEST_OF_RAY = 64 * MIB  # what lies above takes it minutes, and says the same
PROCESSES, LOCAL_SIZES = (2, 4, 8), (MIB, 64 * MIB)
NAMES = {
    "group": "groups here", "refs": "references here", "gloo": "Gloo", "openmpi": "OpenMPI", "ray": "Ray"
}  # fmt: skip
SECONDS_MAX = {  # of groups here over 8 hosts of 400 Mbit/s
    ("broadcast", 64 * MIB): 1.8, ("reduce", 64 * MIB): 1.9, ("allreduce", 64 * MIB): 2.9,
    ("broadcast", MIB): 0.08, ("reduce", MIB): 0.08, ("allreduce", MIB): 0.11,
}  # fmt: skip
GLOO_SHARE_MAX = {64 * MIB: 1 / 5, MIB: 1 / 2}  # of Gloo's time, 4 processes, allreduce


class Row(NamedTuple):
    """What was measured: seconds of each round until the last member had its result."""

    place: str  # hosts or processes
    size: int
    peer: str
    op: str
    nbytes: int
    rounds_s: list[float]

    @property
    def key(self) -> tuple[Any, ...]:
        """What it is about."""
        return self[:5]

    @property
    def seconds(self) -> float:
        """The median round."""
        return median(self.rounds_s)


def rounds(nbytes: int) -> int:
    """How often an operation on so much is done."""
    return next(count for limit, count in ((MIB, 15), (16 * MIB, 5), (64 * MIB, 3), (1 << 62, 1)) if nbytes <= limit)


def size_text(nbytes: int) -> str:
    """In the unit that fits."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def bound_s(op: str, nbytes: int, size: int, rate_mbit: float) -> float:
    """What no way can be faster than, when every link carries that much both ways."""
    once_s = nbytes / (rate_mbit * 1e6 / 8 * TCP_SHARE)
    return once_s * 2 * (size - 1) / size if op == "allreduce" else once_s


# --- measuring ----------------------------------------------------------------------------------------


def measured(place: str, size: int, peer: str, cases: Sequence[Case], found: Sequence[list[float]]) -> list[Row]:
    """The rows of one program."""
    return [
        Row(place, size, peer, case.op, case.nbytes, rounds_s) for case, rounds_s in zip(cases, found, strict=True)
    ]


def over_hosts(pythons: dict[str, str], chosen: argparse.Namespace) -> list[Row]:
    """All peers, one after the other, each on hosts of its own."""
    rows: list[Row] = []
    for peer, python in pythons.items():
        cases = [
            Case(op, nbytes, rounds(nbytes)) for nbytes in chosen.sizes for op in OPS
            if peer != "ray" or nbytes <= LARGEST_OF_RAY
        ]  # fmt: skip
        try:
            with Testbed(chosen.hosts, HOSTS, chosen.rate_mbit) as bed:
                rows += measured("hosts", HOSTS, peer, cases, peers.on_hosts(peer, python, cases, bed))
        except ProgramFailed as error:
            sys.stderr.write(f"{NAMES[peer]} over hosts: {error}\n")
        else:
            sys.stderr.write(f"{NAMES[peer]} over hosts: done\n")
    return rows


def among_processes(pythons: dict[str, str], sizes: Sequence[int], processes: Sequence[int]) -> list[Row]:
    """Allreduce on this host; for each number of processes all peers directly after each other."""
    rows: list[Row] = []
    cases = [Case("allreduce", nbytes, rounds(nbytes)) for nbytes in sizes]
    for size in processes:
        for peer, python in pythons.items():
            if peer in ("refs", "ray"):
                continue
            try:
                rows += measured("processes", size, peer, cases, peers.on_this_host(peer, python, cases, size))
            except ProgramFailed as error:
                sys.stderr.write(f"{NAMES[peer]}, {size} processes: {error}\n")
        sys.stderr.write(f"{size} processes: done\n")
    return rows


# --- reporting ----------------------------------------------------------------------------------------


def report(rows: Sequence[Row], rate_mbit: float) -> str:
    """The tables."""
    found = {row.key: row.seconds for row in rows}
    parts = []
    shown = [peer for peer in NAMES if any(row.peer == peer for row in rows if row.place == "hosts")]
    if shown:
        lines = []
        for op in OPS:
            for nbytes in sorted({row.nbytes for row in rows if row.place == "hosts"}):
                cells = [found.get(("hosts", HOSTS, peer, op, nbytes)) for peer in shown]
                least_s = f"{bound_s(op, nbytes, HOSTS, rate_mbit):.3f}"
                texts = ["-" if cell is None else f"{cell:.3f}" for cell in cells]
                lines.append((op, size_text(nbytes), least_s, *texts))
        parts += [f"{HOSTS} hosts, links of {rate_mbit:g} Mbit/s each way; seconds until the last one has the result "
                  "(the median round):", table(("operation", "size", "bound", *(NAMES[peer] for peer in shown)), lines)]
    local = [peer for peer in NAMES if any(row.peer == peer for row in rows if row.place == "processes")]
    if local:
        places = sorted({(row.size, row.nbytes) for row in rows if row.place == "processes"})
        lines = []
        for size, nbytes in places:
            cells = [found.get(("processes", size, peer, "allreduce", nbytes)) for peer in local]
            lines.append((size, size_text(nbytes), *("-" if cell is None else f"{1e3 * cell:.1f}" for cell in cells)))
        parts += [f"Processes of one host with {os.cpu_count()} cores, allreduce; milliseconds:",
                  table(("processes", "size", *(NAMES[peer] for peer in local)), lines)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def faults(rows: Sequence[Row], rate_mbit: float) -> list[str]:
    """Bounds that are missed."""
    found = {row.key: row.seconds for row in rows}
    missed = []
    for (op, nbytes), most_s in SECONDS_MAX.items() if rate_mbit == 400 else ():
        seconds = found.get(("hosts", HOSTS, "group", op, nbytes), 0.0)
        if seconds > most_s:
            missed.append(f"{op} of {size_text(nbytes)} over hosts: {seconds:.3f} s, at most {most_s} s")
    for nbytes, share in GLOO_SHARE_MAX.items():
        ours, theirs = (found.get(("processes", 4, peer, "allreduce", nbytes), 0.0) for peer in ("group", "gloo"))
        if theirs and ours > theirs * share:
            missed.append(f"4 processes, {size_text(nbytes)}: {ours / theirs:.2f} of Gloo's time, at most {share:g}")
    return missed


def draw(rows: Sequence[Row], rate_mbit: float) -> str:
    """64 MiB over the hosts, else what there is among processes."""
    found = {row.key: row.seconds for row in rows}
    if any(row.place == "hosts" for row in rows):
        nbytes = min({row.nbytes for row in rows if row.place == "hosts"}, key=lambda size: abs(size - 64 * MIB))
        bars = [Bars("bound", [bound_s(op, nbytes, HOSTS, rate_mbit) for op in OPS])]
        bars += [Bars(name, [found.get(("hosts", HOSTS, peer, op, nbytes)) for op in OPS])
                 for peer, name in NAMES.items() if any(row.peer == peer for row in rows)]
        title, groups = f"{size_text(nbytes)} over {HOSTS} hosts at {rate_mbit:g} Mbit/s: seconds", list(OPS)
    else:
        places = sorted({(row.size, row.nbytes) for row in rows})
        bars = [Bars(name, [found.get(("processes", size, peer, "allreduce", nbytes)) for size, nbytes in places])
                for peer, name in NAMES.items() if any(row.peer == peer for row in rows)]
        title = "Allreduce among processes of one host: seconds"
        groups = [f"{size}: {size_text(nbytes)}" for size, nbytes in places]
    heights = [height for one in bars for height in one.heights if height]
    return bar_chart(title, groups, Axis("seconds", min(heights) / 2, max(heights) * 1.6, is_log=True), bars)


def kept(rows: Sequence[Row]) -> list[Row]:
    """Those of earlier runs, with these in their place."""
    file = HERE / "results.json"
    before = [Row(*row) for row in json.loads(file.read_text())] if file.exists() else []
    merged = {row.key: row for row in [*before, *rows]}
    file.write_text("[\n" + ",\n".join(json.dumps(row) for row in merged.values()) + "\n]\n")
    return list(merged.values())


# --- the command line ---------------------------------------------------------------------------------


def parsed() -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, 2 processes; writes nothing")
    parser.add_argument("--peers", default=",".join(NAMES), help="group and refs are the engine itself")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH", help="default: this one")
    parser.add_argument("--hosts", default="", metavar="SCRIPT", help="that makes hosts: see experiments/testbed.py")
    parser.add_argument("--rate-mbit", type=int, default=400)
    parser.add_argument("--sizes", default=",".join(str(size // KIB) for size in SIZES), help="over hosts, in KiB")
    parser.add_argument("--only", choices=["hosts", "processes"], help="one of both parts")
    chosen = parser.parse_args()
    chosen.sizes = [int(size) * KIB for size in chosen.sizes.split(",")]
    return chosen


def present(chosen: argparse.Namespace) -> dict[str, str]:
    """The peers that can be measured, with the Python of each; says which cannot."""
    paths = dict(text.split("=", 1) for text in chosen.python)
    found = {}
    for peer in chosen.peers.split(","):
        python = paths.get(peer, sys.executable)
        reason = peers.lacks(peer, python) if peer in peers.MODULES else ""
        if reason:
            sys.stderr.write(f"{NAMES[peer]} is left out: {reason}\n")
        else:
            found[peer] = python
    return found


def main() -> int:
    """Measure and print."""
    chosen = parsed()
    pythons = present(chosen)
    local_sizes, processes = LOCAL_SIZES, PROCESSES
    if chosen.quick:
        chosen.sizes, local_sizes, processes = [64 * KIB, MIB], (64 * KIB, MIB), (2,)
    rows: list[Row] = []
    if chosen.only != "processes":
        reason = missing(chosen.hosts)
        if reason:
            sys.stderr.write(f"the part over hosts is left out: {reason}\n")
        else:
            rows += over_hosts(pythons, chosen)
    if chosen.only != "hosts":
        rows += among_processes(pythons, local_sizes, processes)
    all_rows = rows if chosen.quick else kept(rows)
    tables = report(all_rows, chosen.rate_mbit)
    sys.stdout.write(tables)
    if not chosen.quick:
        (HERE / "picture.svg").write_text(draw(all_rows, chosen.rate_mbit))
        versions = ", ".join(f"{NAMES[peer]} {peers.version(peer, python)}" for peer, python in pythons.items()
                             if peer in peers.MODULES)
        fill(HERE / "README.md", tables + (f"\n{versions}.\n" if versions else ""))
    found = faults(rows, chosen.rate_mbit)
    sys.stdout.write("\n" + "\n".join(found or ["all holds"]) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
