"""What does it cost a group when members come late, or when one of them dies in the middle of a step?

    python experiments/collective_failures/run.py [--quick] [--hosts SCRIPT [--rate-mbit 400]]

Without a script that makes hosts (experiments/testbed.py): processes of this host alone. Writes results.json,
picture.svg and the numbers in README.md; with --quick it prints only. The exit status is 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.collective_failures import program
from experiments.pages import fill, table
from experiments.picture import Axis, Bars, bar_chart
from experiments.testbed import PROJECT, TCP_SHARE, Testbed, last_json, missing, start

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
HOSTS, PROCESSES = 8, 4
LIMIT_S = 900.0
LATE_ROUNDS = 3
ALONE = 4  # gaps before a root comes that all others wait for
LATE_SHARE_MAX = 0.3  # of the bound, after the last arrival
SLACK_S = 0.1  # of a busy machine
MODULE = "experiments.collective_failures.program"


class Load(NamedTuple):
    """Where, how much, and how long it must take at least."""

    size: int
    nbytes: int
    gap_s: float
    half_s: float  # from the start of a step to its middle
    once_s: float  # the bytes over one link


def load_of(chosen: argparse.Namespace) -> Load:
    """For hosts, or for processes of this host."""
    if not chosen.hosts:
        return Load(PROCESSES, MIB if chosen.quick else 64 * MIB, 0.1, 0.02, 0.0)
    nbytes = MIB if chosen.quick else 64 * MIB
    once_s = nbytes / (chosen.rate_mbit * 1e6 / 8 * TCP_SHARE)
    return Load(HOSTS, nbytes, 0.2 if chosen.quick else 1.0, once_s * (HOSTS - 1) / HOSTS, once_s)


def late_cases(load: Load) -> list[program.Late]:
    """At the same time, one after the other, and with the root as the last."""
    return [
        program.Late(op, load.nbytes, *when)
        for op in ("broadcast", "reduce", "allreduce")
        for when in ((0.0, False), (load.gap_s, False), (load.gap_s, True), (ALONE * load.gap_s, True, True))
    ]


def crash_when_told(bed: Testbed, asked: program.Killed) -> None:
    """Take the power from the last host in the middle of the step."""
    while not program.noted(asked.folder, "step"):
        time.sleep(0.005)
    time.sleep(asked.after_s)
    program.note(asked.folder, "killed")
    bed.crash(bed.hosts - 1)


def measure(load: Load, bed: Testbed | None, folder: str) -> dict[str, Any]:
    """One engine: late members, a member that is killed, and on hosts one whose host loses power."""
    late = [(*one, LATE_ROUNDS) for one in late_cases(load)]
    killed = []
    for kind in ("process", "host") if bed else ("process",):
        Path(folder, kind).mkdir()
        killed.append(program.Killed(load.nbytes, load.half_s, f"{folder}/{kind}", kind == "process"))
    asked = json.dumps({"late": late, "refs": [one for one in late if one[0] == "reduce"], "killed": killed})
    if bed is None:
        process = start((sys.executable, "-m", MODULE, asked, load.size), cwd=PROJECT)
    else:
        process = bed.start(0, sys.executable, "-m", MODULE, asked, load.size, bed.cluster())
        threading.Thread(target=crash_when_told, args=(bed, killed[-1]), daemon=True).start()
    return dict(last_json(process, MODULE, LIMIT_S))


# --- reporting ----------------------------------------------------------------------------------------


def late_text(one: program.Late) -> str:
    """Who comes when."""
    if not one.gap_s:
        return "all at once"
    if one.is_alone:
        return f"the root {one.gap_s:g} s after all others"
    return f"{one.gap_s:g} s apart, {'the root' if one.is_root_last else 'another than the root'} last"


def late_rows(load: Load, found: dict[str, Any]) -> list[tuple[str, str, float]]:
    """Operation, order, seconds after the last arrival."""
    cases = late_cases(load)
    rows = [(one.op, late_text(one), median(times)) for one, times in zip(cases, found["late"], strict=True)]
    folds = [one for one in cases if one.op == "reduce"]
    return rows + [("flow.reduce", late_text(one), median(times))
                   for one, times in zip(folds, found["refs"], strict=True)]


def extra_s(one: dict[str, Any]) -> float:
    """How much longer all steps together took than without harm."""
    return float(sum(one["hurt_s"]) - sum(one["calm_s"]))


def report(load: Load, found: dict[str, Any]) -> str:
    """The tables."""
    what = f"{load.size} {'hosts' if load.once_s else 'processes of one host'}, {load.nbytes // MIB} MiB"
    rows = [(op, order, f"{seconds:.3f}", f"{seconds / load.once_s:.2f}" if load.once_s else "-")
            for op, order, seconds in late_rows(load, found)]
    parts = [f"{what}. Seconds from the last arrival to the last result, and how often the bytes could have gone over "
             "a link in this time:", table(("operation", "members come", "seconds", "x once"), rows)]
    lines = []
    for kind, one in zip(("a process is killed", "a host loses power"), found["killed"], strict=False):
        lines.append((
            kind, f"{median(one['calm_s']):.2f}", f"{one['hurt_s'][program.HURT_STEP]:.2f}", f"{extra_s(one):.2f}",
            f"{one['restart_s']:.2f}", f"{one['bytes_sent_again'] / MIB:.1f}", one["collectives_repaired"],
        ))  # fmt: skip
    heads = ("in the middle of an allreduce", "a calm step (s)", "the hurt step (s)", "all steps longer by (s)",
             "kill to first code again (s)", "MiB sent again", "steps repaired")  # fmt: skip
    return "\n\n".join(part.strip() for part in [*parts, table(heads, lines)]) + "\n"


def faults(load: Load, found: dict[str, Any]) -> list[str]:
    """Bounds that are missed; processes of one host have none for late members."""
    missed = []
    for op, order, seconds in late_rows(load, found) if load.once_s else ():
        bound_s = load.once_s * (2 * (load.size - 1) / load.size if op == "allreduce" else 1)
        most_s = LATE_SHARE_MAX * bound_s
        if "apart" in order and seconds > most_s:
            missed.append(f"{op}, {order}: {seconds:.2f} s after the last arrival, at most {most_s:.2f}")
    for one in found["killed"]:
        bound_s = SLACK_S + one["restart_s"] + max(load.once_s * 2 * (load.size - 1) / load.size, median(one["calm_s"]))
        if extra_s(one) > bound_s:
            missed.append(f"a death costs {extra_s(one):.2f} s, at most {bound_s:.2f}")
    return missed


def draw(load: Load, found: dict[str, Any]) -> str:
    """Steps without harm and with it."""
    bars = [Bars("calm", found["killed"][0]["calm_s"])]
    names = ("a process is killed", "a host loses power")
    bars += [Bars(name, one["hurt_s"]) for name, one in zip(names, found["killed"], strict=False)]
    highest = max(height or 0.0 for one in bars for height in one.heights)
    groups = [f"step {step}" for step in range(program.STEPS)]
    return bar_chart("Allreduce, somebody dies in step 2: seconds", groups, Axis("seconds", 0, 1.1 * highest), bars)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 MiB; writes nothing")
    parser.add_argument("--hosts", default="", metavar="SCRIPT")
    parser.add_argument("--rate-mbit", type=int, default=400)
    chosen = parser.parse_args()
    reason = missing(chosen.hosts)
    if reason:
        sys.stderr.write(f"processes of this host instead of hosts: {reason}\n")
        chosen.hosts = ""
    load = load_of(chosen)
    with tempfile.TemporaryDirectory() as folder:
        if chosen.hosts:
            with Testbed(chosen.hosts, HOSTS, chosen.rate_mbit) as bed:
                found = measure(load, bed, folder)
        else:
            found = measure(load, None, folder)
    text = report(load, found)
    sys.stdout.write(text)
    if not chosen.quick and (chosen.hosts or not (HERE / "results.json").exists()):  # hosts tell more
        (HERE / "results.json").write_text(json.dumps(found, indent=1) + "\n")
        (HERE / "picture.svg").write_text(draw(load, found))
        fill(HERE / "README.md", text)
    missed = faults(load, found)
    sys.stdout.write("\n" + "\n".join(missed or ["all holds"]) + "\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
