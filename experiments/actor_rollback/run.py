"""A loop over actors, one of them killed: does only that one go back, or all of them?

    python experiments/actor_rollback/run.py [--quick] [--actors 8] [--repeats 3]

Writes results.csv, picture.svg and the numbers in README.md; with --quick it prints only. The exit status is 1 when a
result differs in one bit from that of one process without the engine.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import flowengine as flow
from experiments.pages import fill, table
from experiments.picture import Axis, Stack, stack_chart

HERE = Path(__file__).resolve().parent
PHASES = ("detect", "restart", "load", "replay", "rest of the step")
STEPS, SAVE_STEPS, KILL_STEP = 300, 150, 285
LONG_S = 300.0
Row = Any  # a row of the plate: an array


class Plate(NamedTuple):
    """A plate whose heat spreads: so many strips, each of so many rows; sweeps over it in one step."""

    strips: int
    rows: int
    columns: int
    sweeps: int


class Run(NamedTuple):
    """What one run gave."""

    digest: str
    iterations_s: list[float]
    phases_s: dict[str, float]
    again: int  # steps of actors that were done again

    def longest_s(self) -> float:
        """The iteration that the death fell into."""
        return max(self.iterations_s)


class Strip:
    """A strip of the plate between two others; knows the rows at its edges only from what it is given."""

    def __init__(self, number: int, plate: Plate) -> None:
        self.sweeps, self.loaded = plate.sweeps, (0.0, 0.0)
        self.heat = np.random.default_rng(number).random((plate.rows, plate.columns))

    def edges(self) -> tuple[Row, Row]:
        """The first and the last row."""
        return self.heat[0].copy(), self.heat[-1].copy()

    def step(self, above: Row, below: Row) -> tuple[Row, Row]:
        """Spread the heat within the strip; gives the new edges."""
        around = np.vstack((above, self.heat, below))
        for _ in range(self.sweeps):
            inner = around[1:-1]
            around[1:-1] = 0.2 * (
                inner + around[:-2] + around[2:] + np.roll(inner, 1, axis=1) + np.roll(inner, -1, axis=1)
            )
        self.heat = around[1:-1].copy()
        return self.edges()

    def digest(self) -> str:
        """All bits of the strip in few."""
        return hashlib.sha256(self.heat.tobytes()).hexdigest()

    def save(self, path: str) -> None:
        """Write the state, as a user does whose actors do not come back by themselves."""
        np.save(path, self.heat)

    def load(self, path: str) -> None:
        """Go back to what was written."""
        self.heat = np.load(path)

    def pid(self) -> int:
        """Whom to kill."""
        return os.getpid()

    def took(self) -> tuple[float, float]:
        """When the engine began and ended to load a checkpoint, on the clock of this host."""
        return self.loaded

    def __flow_save__(self) -> tuple[int, Row]:
        return self.sweeps, self.heat

    def __flow_load__(self, state: tuple[int, Row]) -> None:
        began_s = time.time()
        self.sweeps, heat = state
        self.heat = heat.copy()
        self.loaded = (began_s, time.time())


Actor = flow.remote(Strip)


def combined(digests: Sequence[str]) -> str:
    """One short digest of many."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def alone(plate: Plate) -> str:
    """The digest after all steps in this process, without any engine."""
    strips = [Strip(number, plate) for number in range(plate.strips)]
    edges = [strip.edges() for strip in strips]
    for _ in range(STEPS):
        edges = [strip.step(edges[n - 1][1], edges[(n + 1) % len(strips)][0]) for n, strip in enumerate(strips)]
    return combined([strip.digest() for strip in strips])


def spread(strips: Sequence[Any], edges: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """Submit one step of all strips; edges are references."""
    size = len(strips)
    return [
        strip.step.options(num_returns=2).remote(edges[n - 1][1], edges[(n + 1) % size][0])
        for n, strip in enumerate(strips)
    ]


def wait_for(edges: Sequence[Sequence[Any]]) -> None:
    """Returns when all of them are there; raises the first error."""
    flow.get([first for first, _ in edges], timeout=LONG_S)


def first_edges(strips: Sequence[Any]) -> list[Sequence[Any]]:
    """References of the edges as they are."""
    return [strip.edges.options(num_returns=2).remote() for strip in strips]


def kill(pid: int) -> float:
    """At once; gives the time."""
    os.kill(pid, signal.SIGKILL)
    return time.time()


def by_replay(plate: Plate, kill_step: int) -> Run:
    """The engine's own recovery: the loop knows nothing of it."""
    victim = plate.strips // 2
    with tempfile.TemporaryDirectory() as folder, flow.init(num_workers=2, state_dir=folder):
        strips = [Actor.options(checkpoint=SAVE_STEPS).remote(number, plate) for number in range(plate.strips)]
        edges = first_edges(strips)
        wait_for(edges)
        pid = flow.get(strips[victim].pid.remote())
        iterations_s, phases_s = [], {}
        for step in range(1, STEPS + 1):
            began_s = time.time()
            if step == kill_step:
                killed_s = kill(pid)
            edges = spread(strips, edges)
            wait_for(edges)
            ended_s = time.time()
            iterations_s.append(ended_s - began_s)
            if step == kill_step:
                step_s = (killed_s, ended_s)
        if kill_step:
            phases_s = told_phases(strips[victim], story(strips[victim].actor_id, folder), *step_s)
        digests = flow.get([strip.digest.remote() for strip in strips])
        return Run(combined(digests), iterations_s, phases_s, flow.stats()["calls_replayed"])


def told_phases(victim: Any, lines: Sequence[str], killed_s: float, ended_s: float) -> dict[str, float]:
    """The phases as the engine's story of the actor and the actor itself tell them."""
    lost_s, ready_s, recovered_s = (last_time(lines, word, killed_s) for word in
                                    ("state=restarting", "ActorReady", "ActorRecovered"))  # fmt: skip
    load_began_s, load_ended_s = flow.get(victim.took.remote())
    load_s = load_ended_s - load_began_s
    return dict(zip(PHASES, (
        lost_s - killed_s, ready_s - lost_s - load_s, load_s, recovered_s - ready_s, ended_s - recovered_s,
    ), strict=True))  # fmt: skip


def story(name: str, state_dir: str) -> list[str]:
    """What `flow story` says."""
    command = [sys.executable, "-m", "flowengine.cli", "story", name, "--state-dir", state_dir]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def last_time(lines: Sequence[str], word: str, day_of_s: float) -> float:
    """When the last line with the word was told; lines begin with the time of the day."""
    found = [re.match(r"(\d+):(\d+):(\d+\.\d+)", line) for line in lines if word in line]
    if not found or found[-1] is None:
        raise LookupError(f"the story tells nothing of {word}:\n" + "\n".join(lines))
    hours, minutes, seconds = found[-1].groups()
    midnight_s = day_of_s - day_of_s % 86_400
    return midnight_s + int(hours) * 3600 + int(minutes) * 60 + float(seconds)


class Rollback:
    """What a user writes whose actors stay dead: save all every so often, and go back with all of them."""

    def __init__(self, plate: Plate, folder: str) -> None:
        self.plate, self.folder = plate, folder
        self.strips = [self.make(number) for number in range(plate.strips)]
        self.again = 0
        self.phases_s: dict[str, float] = {}

    def make(self, number: int) -> Any:
        """A new actor."""
        return Actor.options(recovery="none").remote(number, self.plate)

    def all(self, call: Callable[[Any, str], Any]) -> None:
        """Save or load all."""
        flow.get([call(strip, f"{self.folder}/{number}.npy") for number, strip in enumerate(self.strips)])

    def save(self) -> None:
        """A checkpoint of the whole."""
        self.all(lambda strip, path: strip.save.remote(path))

    def go_back(self, dead: int, steps: int) -> list[Sequence[Any]]:
        """A new actor for the dead one, all to the checkpoint, so many steps again; gives the edges after them."""
        began_s = time.time()
        self.strips[dead] = self.make(dead)
        flow.get(self.strips[dead].took.remote())
        ready_s = time.time()
        self.all(lambda strip, path: strip.load.remote(path))
        loaded_s = time.time()
        edges = first_edges(self.strips)
        for _ in range(steps):
            edges = spread(self.strips, edges)
            wait_for(edges)
        self.again = steps * len(self.strips)
        self.phases_s |= {"restart": ready_s - began_s, "load": loaded_s - ready_s, "replay": time.time() - loaded_s}
        return edges


def by_rollback(plate: Plate, kill_step: int) -> Run:
    """The same loop with checkpoints of all and a return of all to the last one."""
    victim = plate.strips // 2
    with tempfile.TemporaryDirectory() as folder, flow.init(num_workers=2):
        group = Rollback(plate, folder)
        edges = first_edges(group.strips)
        wait_for(edges)
        pid = flow.get(group.strips[victim].pid.remote())
        group.save()
        iterations_s, saved_step = [], 0
        for step in range(1, STEPS + 1):
            began_s, before = time.time(), edges
            if step == kill_step:
                killed_s = kill(pid)
            edges = spread(group.strips, before)
            try:
                wait_for(edges)
            except flow.ActorDied:
                group.phases_s["detect"] = time.time() - killed_s
                before = group.go_back(victim, step - 1 - saved_step)
                replayed_s = time.time()
                edges = spread(group.strips, before)
                wait_for(edges)
                group.phases_s["rest of the step"] = time.time() - replayed_s
            if step % SAVE_STEPS == 0:
                group.save()
                saved_step = step
            iterations_s.append(time.time() - began_s)
        digests = flow.get([strip.digest.remote() for strip in group.strips])
        phases_s = {phase: group.phases_s.get(phase, 0.0) for phase in PHASES}
        return Run(combined(digests), iterations_s, phases_s, group.again)


KINDS: dict[str, Callable[[Plate], Run]] = {
    "calm": lambda plate: by_replay(plate, 0),
    "the dead actor alone": lambda plate: by_replay(plate, KILL_STEP),
    "all go back": lambda plate: by_rollback(plate, KILL_STEP),
}


def middle(runs: Sequence[Run]) -> Run:
    """The run whose longest iteration is the median."""
    return sorted(runs, key=Run.longest_s)[len(runs) // 2]


def report(runs: dict[str, Run], expected: str) -> str:
    """The tables."""
    rows = [
        (kind, f"{statistics.median(run.iterations_s) * 1e3:.1f}", f"{run.longest_s():.2f}", f"{run.again:,}",
         "yes" if run.digest == expected else "NO")
        for kind, run in runs.items()
    ]  # fmt: skip
    heads = ("recovery", "median iteration (ms)", "longest (s)", "steps done again", "same bits")
    killed = {kind: run for kind, run in runs.items() if run.again}
    phases = [(phase, *(f"{run.phases_s[phase] * 1e3:,.1f}" for run in killed.values())) for phase in PHASES]
    times = runs["all go back"].longest_s() / runs["the dead actor alone"].longest_s()
    return (
        f"{table(heads, rows)}\nThe longest iteration is {times:.1f} times shorter when the dead actor recovers alone. "
        f"Where its time goes, in milliseconds:\n\n{table(('phase', *killed), phases)}"
    )


def write(runs: dict[str, Run], tables: str) -> None:
    """Results, picture, and the numbers in the README."""
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("recovery", "median_iteration_s", "longest_iteration_s", "steps_again", *PHASES, "digest"))
        for kind, run in runs.items():
            figures = (statistics.median(run.iterations_s), run.longest_s(), run.again)
            phases = [run.phases_s.get(phase, 0.0) for phase in PHASES]
            writer.writerow((kind, *(f"{number:.4f}" for number in (*figures, *phases)), run.digest))
    stacks = [Stack(f"{kind} (s)", list(run.phases_s.values())) for kind, run in runs.items() if run.phases_s]
    longest_s = max(sum(stack.parts) for stack in stacks)
    title = f"An actor is killed in step {KILL_STEP}, {KILL_STEP - SAVE_STEPS} steps after the checkpoint"
    (HERE / "picture.svg").write_text(stack_chart(title, Axis("seconds", 0.0, longest_s * 1.05), PHASES, stacks))
    fill(HERE / "README.md", tables)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small strips, once; writes nothing")
    parser.add_argument("--actors", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    plate = Plate(chosen.actors, 256, 512, 4)
    if chosen.quick:
        plate, chosen.repeats = Plate(min(4, chosen.actors), 32, 128, 2), 1
    expected = alone(plate)
    found: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    for number in range(chosen.repeats):
        for kind, run in KINDS.items():
            found[kind].append(run(plate))
            sys.stderr.write(f"round {number + 1}, {kind}: {sum(found[kind][-1].iterations_s):.1f} s\n")
    runs = {kind: middle(of_kind) for kind, of_kind in found.items()}
    tables = report(runs, expected)
    sys.stdout.write(tables)
    if not chosen.quick:
        write(runs, tables)
    return int(any(run.digest != expected for of_kind in found.values() for run in of_kind))


if __name__ == "__main__":
    sys.exit(main())
