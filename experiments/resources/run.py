"""What do resources that programs make cost: to create them, to ask for many, and for those who ask for none?

    python experiments/resources/run.py [--quick]

Writes results.json and the numbers in README.md; with --quick it prints only. The exit status is 1 when a bound is
missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import flowengine as flow
from experiments.pages import fill, table

HERE = Path(__file__).resolve().parent
CREATED, ASKED, PRESENT = 1_000, (1, 3, 10, 30, 100), 10_000
CREATE_MS_MAX, MANY_MAX, PRESENT_MAX = 1.0, 1.1, 1.02
WORKERS = 2
NODES = f"one host, {WORKERS} workers"


@flow.remote(num_cpus=1)
def nothing() -> None:
    """A task that needs a CPU alone."""


@flow.remote(num_cpus=0)
def holder() -> None:
    """A task that needs what its call asks for."""


def seconds(action: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def create_ms(count: int) -> float:
    """Milliseconds for each of so many that are created one after the other."""
    took_s = seconds(lambda: [flow.resources.create(f"made {number}", 1) for number in range(count)])
    for number in range(count):
        flow.resources.delete(f"made {number}")
    return 1e3 * took_s / count


def asking_us(count: int, tasks: int, rounds: int) -> list[list[float]]:
    """Microseconds of a task, one at a time, that asks for 1, 3 ... resources; a list of rounds for each."""
    for number in range(count):
        flow.resources.create(f"asked {number}", 1)
    kinds = {asked: holder.options(resources={f"asked {number}": 1 for number in range(asked)})
             for asked in ASKED if asked <= count}
    found: list[list[float]] = [[] for _ in kinds]
    for turn in range(rounds + 1):  # in turn, so that what else the machine does meets all alike
        for place, kind in enumerate(kinds.values()):
            flow.get(kind.remote())
            took_s = seconds(lambda kind=kind: [flow.get(kind.remote()) for _ in range(tasks)])  # type: ignore[misc]
            if turn:
                found[place].append(1e6 * took_s / tasks)
            time.sleep(2 * flow.Config().lease_idle_s)  # its lease goes back
    for number in range(count):
        flow.resources.delete(f"asked {number}")
    return found


def first_ms(count: int, rounds: int) -> list[list[float]]:
    """Milliseconds of the first task of its kind, for which a slot has to be granted."""
    for number in range(count):
        flow.resources.create(f"asked {number}", 1)
    found: list[list[float]] = [[] for asked in ASKED if asked <= count]
    for _ in range(rounds):
        for place, asked in enumerate(asked for asked in ASKED if asked <= count):
            kind = holder.options(resources={f"asked {number}": 1 for number in range(asked)})
            found[place].append(1e3 * seconds(lambda kind=kind: flow.get(kind.remote())))  # type: ignore[misc]
            time.sleep(2 * flow.Config().lease_idle_s)
    for number in range(count):
        flow.resources.delete(f"asked {number}")
    return found


def bystanders(count: int, tasks: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of a burst of tasks that ask for none, while there are none and while there are many; paired rounds."""
    def burst() -> float:
        return seconds(lambda: flow.get([nothing.remote() for _ in range(tasks)]))

    burst()
    without, with_many = [], []
    for _ in range(rounds):
        without.append(burst())
        for number in range(count):
            flow.resources.create(f"there {number}", 1)
        burst()  # the first one after so many messages is not counted
        with_many.append(burst())
        for number in range(count):
            flow.resources.delete(f"there {number}")
        burst()
    return without, with_many


def measure(quick: bool) -> dict[str, object]:
    """All of it in one engine."""
    created, present = (100, 500) if quick else (CREATED, PRESENT)
    with flow.init(num_workers=WORKERS):
        flow.get([nothing.remote() for _ in range(2_000)])
        return {
            "create_ms": [create_ms(created) for _ in range(2 if quick else 5)],
            "created": created,
            "asked": list(ASKED),
            "asking_us": asking_us(max(ASKED), 50 if quick else 500, 2 if quick else 7),
            "first_ms": first_ms(max(ASKED), 2 if quick else 9),
            "present": present,
            "bystanders_s": bystanders(present, 2_000 if quick else 20_000, 2 if quick else 7),
        }


def ratio(pairs: Sequence[Sequence[float]]) -> float:
    """The median of the second over the first, round by round."""
    return median(after / before for before, after in zip(*pairs, strict=True))


def report(found: dict[str, object]) -> str:
    """The tables."""
    asking, first = found["asking_us"], found["first_ms"]
    rows = [(asked, f"{median(first[place]):.2f}", f"{median(asking[place]):.0f}",  # type: ignore[index]
             f"{ratio((asking[0], asking[place])):.2f}")  # type: ignore[index]
            for place, asked in enumerate(found["asked"])]  # type: ignore[arg-type, var-annotated]
    create = median(found["create_ms"])  # type: ignore[call-overload]
    slower = ratio(found["bystanders_s"])  # type: ignore[arg-type]
    return "\n".join([
        f"{NODES}.", "",
        f"Creating {found['created']:,} resources: {create:.3f} ms each (at most {CREATE_MS_MAX:g} ms).", "",
        table(("resources asked", "first task, ms", "each of many, us", "of one"), rows),
        f"Tasks that ask for none, while there are {found['present']:,} resources: {slower:.3f} of the time without "
        f"(at most {PRESENT_MAX:g}).",
    ])


def faults(found: dict[str, object]) -> list[str]:
    """Bounds that are missed."""
    missed = []
    if median(found["create_ms"]) > CREATE_MS_MAX:  # type: ignore[call-overload]
        missed.append("creating takes too long")
    asking = found["asking_us"]
    if ratio((asking[0], asking[-1])) > MANY_MAX:  # type: ignore[index]
        missed.append("asking for many costs too much")
    if ratio(found["bystanders_s"]) > PRESENT_MAX:  # type: ignore[arg-type]
        missed.append("those who ask for none are slowed")
    return missed


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer of everything; writes nothing")
    chosen = parser.parse_args()
    found = measure(chosen.quick)
    text = report(found)
    sys.stdout.write(text + "\n")
    if not chosen.quick:
        (HERE / "results.json").write_text(json.dumps(found, indent=1) + "\n")
        fill(HERE / "README.md", text)
    missed = faults(found)
    sys.stdout.write("\n" + "\n".join(missed or ["all holds"]) + "\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
