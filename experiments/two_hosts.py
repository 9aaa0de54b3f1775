"""The frame of experiments that compare ways of placing work over two hosts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from experiments.pages import fill
from experiments.testbed import Bed, Testbed, missing

LIMIT_S = 600.0
RATE_MBIT = 200

Asked = tuple[int, ...]


class Trial(NamedTuple):
    """One experiment; asked: numbers that its program takes as JSON, `quick` for two nodes of this host."""

    program: str  # the module that runs on the first host, with what is asked and the connection file
    quick: Asked
    asked: Asked
    report: Callable[[Any, Asked, str], str]  # of what was found, what was asked, links
    kept: Callable[[Any], Any]  # of what was found: for results.json
    missed: Callable[[Any], str]  # which bound, if any


def measure(bed: Bed, trial: Trial, asked: Asked) -> Any:
    """On hosts that are there."""
    return bed.program(trial.program, json.dumps(asked), bed.cluster(), limit_s=LIMIT_S)


def run(text: str, folder: Path, trial: Trial) -> int:
    """Measure, print, write into the folder; the exit status, 0 when no hosts were asked for. text: of --help."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two nodes of this host; writes nothing")
    parser.add_argument("--hosts", default="", metavar="SCRIPT", help="that makes hosts: see experiments/testbed.py")
    parser.add_argument("--rate-mbit", type=int, default=RATE_MBIT)
    chosen = parser.parse_args()
    if chosen.quick:
        with Bed(2) as bed:
            sys.stdout.write(trial.report(measure(bed, trial, trial.quick), trial.quick, "links that are not limited"))
        return 0
    reason = missing(chosen.hosts)
    if reason:
        sys.stderr.write(f"nothing is measured: {reason}\n")
        return 2 if chosen.hosts else 0
    with Testbed(chosen.hosts, 2, chosen.rate_mbit) as bed:
        found = measure(bed, trial, trial.asked)
    told = trial.report(found, trial.asked, f"links of {chosen.rate_mbit} Mbit/s")
    sys.stdout.write(told)
    (folder / "results.json").write_text(json.dumps(trial.kept(found), indent=1) + "\n")
    fill(folder / "README.md", told)
    missed = trial.missed(found)
    sys.stdout.write(f"\n{missed or 'all holds'}\n")
    return 1 if missed else 0
