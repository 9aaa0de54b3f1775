"""A network learns from the flights in a group of four; one member is killed; are the weights the same, bit for bit?

    python -m experiments.training.run [--quick] [--steps 240] [--write]

The exit status is 1 when the weights differ or no member was killed, 2 when the flights are not installed. With --write
results.csv, picture.svg and the numbers in README.md are written.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# Members compute beside each other: one thread for each is enough. Read when numpy is loaded, here and in members.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from rich.console import Console

import flowengine as flow
from experiments.flights import source
from experiments.flights.model import Judgement
from experiments.flights.show import Board
from experiments.pages import fill, percentile, table
from experiments.picture import Axis, Series, line_chart
from experiments.training import features
from experiments.training.network import BATCH, Network, Weights, judge
from experiments.training.show import curve, smoothed

HERE = Path(__file__).resolve().parent
MEMBERS = 4
VICTIM = 2
CALL_STEPS = 10  # of a call of a member
LONG_S = 60.0


class Death(NamedTuple):
    """What became of the member that was killed."""

    pid: int
    step: int  # how many steps were done when it was killed
    new_pid: int
    back_to: int  # how many steps its checkpoint covered
    gaps_s: list[float]  # between results of calls: those of the calm time, and the longest after the kill at the end

    def again(self) -> int:
        """How many steps it did once more."""
        return self.step - self.back_to


class Run(NamedTuple):
    """One training."""

    losses: list[float]
    weights: Weights
    took_s: float
    death: Death | None


def train(flights: flow.ObjectRef, steps: int, kill: bool, board: Board) -> Run:
    """So many steps of four members; with `kill` one of them is killed at half time."""
    with flow.train.DataParallel(Network, [flights], workers=MEMBERS, num_cpus=0, steps_per_call=CALL_STEPS) as trainer:
        board.step(f"{MEMBERS} members, pids {', '.join(map(str, trainer.pids()))}")
        done_before = flow.stats()["collectives_done"]
        losses, times_s, began_s, killed = [], [], time.monotonic(), (0, 0)
        for step, loss in shown(trainer, steps, board):
            losses.append(loss)
            times_s.append(time.monotonic())
            if kill and step + 1 == steps // 2:
                time.sleep((times_s[-1] - began_s) / steps * CALL_STEPS)  # into the middle of the next call
                pid = flow.chaos.kill_worker(of=trainer.members[VICTIM])
                killed = pid, flow.stats()["collectives_done"] - done_before
                board.note(f"killed on purpose: SIGKILL to rank {VICTIM}, pid {pid}, in step {killed[1]}")
        took_s = time.monotonic() - began_s
        death = None
        if killed[0]:
            lived = flow.get(trainer.members[VICTIM].steps_here.remote(), timeout=LONG_S)
            gaps_s = [later - earlier for earlier, later in zip(times_s, times_s[CALL_STEPS:], strict=False)]
            gaps_s = gaps_s[CALL_STEPS - 1 :: CALL_STEPS]
            half = steps // 2 // CALL_STEPS - 1
            death = Death(*killed, trainer.pids()[VICTIM], steps - lived, [*gaps_s[1:half], max(gaps_s[half:])])
        return Run(losses, trainer.weights(), took_s, death)


def shown(trainer: flow.train.DataParallel, steps: int, board: Board) -> Iterator[tuple[int, float]]:
    """The steps of the trainer, with a bar on a terminal and a line at each quarter."""
    with board.bars() as bars:
        bar = bars.add_task("train", total=steps)
        for step, loss in trainer.steps(steps):
            bars.update(bar, completed=step + 1, description=f"step {step + 1}: loss {loss:.4f}")
            if (step + 1) % (steps // 4) == 0:
                board.step(f"step {step + 1:>4}: loss {loss:.4f}")
            yield step, loss


def tell(death: Death, board: Board) -> None:
    """The kill and what it cost."""
    board.step(
        f"rank {VICTIM} came back as pid {death.new_pid}, from a checkpoint of step {death.back_to}, and did "
        f"{death.again()} steps again with the results that the group had kept for it"
    )
    board.step(
        f"longest pause after the kill {death.gaps_s[-1] * 1e3:.0f} ms; a call of {CALL_STEPS} steps took "
        f"{percentile(death.gaps_s[:-1], 50) * 1e3:.0f} ms in the median before"
    )


def are_same(calm: Run, hurt: Run) -> bool:
    """Whether two runs ended with the same bits, and had them on the way."""
    same = [calm.weights[name].tobytes() == hurt.weights[name].tobytes() for name in calm.weights]
    return all(same) and calm.losses == hurt.losses


def report(calm: Run, hurt: Run, judged: Judgement, board: Board) -> None:
    """The curve, the quality, and whether the weights are the same."""
    death = hurt.death
    steps = len(hurt.losses) // 40
    title = "[bold]Loss by step of the run with the kill[/bold]"
    board.console.print(f"\n{title} (means of {steps} steps)", highlight=False)
    for line in curve(smoothed(hurt.losses, steps), death.step if death else None):
        board.console.print(line, highlight=False)
    board.console.print(f"{'':9}step 0{'the dotted line: the kill':^52}{len(hurt.losses):>6}\n", highlight=False)
    board.table(
        f"Late arrivals (over 15 min) foretold for {judged.flights:,} held-out flights",
        ("", "network", "base rate"),
        [
            ("area under the curve", f"{judged.auc:.3f}", "0.500"),
            ("accuracy", f"{judged.accuracy:.1%}", f"{judged.base_accuracy:.1%}"),
            ("late among the worst tenth", f"{judged.late_in_worst_tenth:.1%}", f"{judged.base_rate:.1%}"),
        ],
    )
    count = sum(one.size for one in calm.weights.values())
    far = max(float(np.max(np.abs(calm.weights[name] - hurt.weights[name]))) for name in calm.weights)
    mark = "[green]ok  [/green]" if are_same(calm, hurt) else "[red]FAIL[/red]"
    board.console.print(
        f"{mark} the same weights with and without the kill, bit for bit: {count:,}, largest difference {far:g}; "
        f"{sum(a == b for a, b in zip(calm.losses, hurt.losses, strict=True))} of {len(calm.losses)} losses equal",
        highlight=False,
    )


def write(calm: Run, hurt: Run, judged: Judgement) -> None:
    """Results, picture, and the numbers in the README."""
    death = hurt.death
    assert death is not None
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("step", "loss_calm", "loss_killed"))
        writer.writerows(zip(range(len(calm.losses)), calm.losses, hurt.losses, strict=True))
    series = [
        Series(name, list(enumerate(smoothed(run.losses))), run is hurt)
        for name, run in (("calm", calm), ("a member killed", hurt))
    ]
    numbers = [loss for one in series for _, loss in one.points]
    (HERE / "picture.svg").write_text(line_chart(
        f"Loss of {MEMBERS} members: the same curve, with and without a kill",
        Axis("step", 0, len(calm.losses)), Axis("log loss, mean of 8 steps", min(numbers) - 0.01, max(numbers) + 0.01),
        series, [(death.step, "SIGKILL")],
    ))  # fmt: skip
    rows: list[tuple[Any, ...]] = [
        ("seconds of training, calm", f"{calm.took_s:.2f}"),
        ("seconds of training, a member killed", f"{hurt.took_s:.2f}"),
        (f"a call of {CALL_STEPS} steps, median (ms)", f"{percentile(death.gaps_s[:-1], 50) * 1e3:.0f}"),
        ("longest pause after the kill (ms)", f"{death.gaps_s[-1] * 1e3:.0f}"),
        ("killed in step", death.step),
        ("back to step", death.back_to),
        ("steps done again by the killed one", death.again()),
        ("weights that differ at the end", sum(int((calm.weights[n] != hurt.weights[n]).sum()) for n in calm.weights)),
        ("area under the curve", f"{judged.auc:.3f}"),
        ("accuracy", f"{judged.accuracy:.3f}"),
        ("accuracy of the base rate", f"{judged.base_accuracy:.3f}"),
    ]
    fill(HERE / "README.md", table((f"{len(calm.losses)} steps of {MEMBERS} x {BATCH} flights", ""), rows))


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="training", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=240, metavar="N", help="of each of the two runs, at least 40")
    parser.add_argument("--quick", action="store_true", help="80 steps")
    parser.add_argument("--write", action="store_true", help="write results.csv, picture.svg and the README's numbers")
    chosen = parser.parse_args()
    chosen.steps = 80 if chosen.quick else chosen.steps
    if chosen.steps < 40:
        parser.error("--steps must be at least 40")
    return chosen


def main() -> int:
    """Train twice, compare, report."""
    chosen = options()
    board = Board(Console(soft_wrap=True))
    try:
        learnt, held = features.load(source.locate())
    except source.SourceMissing as missing:
        board.note(str(missing))
        return 2
    counts = f"{len(learnt.late):,} flights to learn from, {len(held.late):,} held out"
    board.step(f"{counts}, {len(learnt.center)} features")
    with flow.init(num_workers=2):
        flights = flow.put(tuple(learnt))
        board.step("[bold]a calm run[/bold]")
        calm = train(flights, chosen.steps, False, board)
        board.step(f"{chosen.steps} steps in {calm.took_s:.2f} s")
        board.step("[bold]the same, and a member is killed[/bold]")
        hurt = train(flights, chosen.steps, True, board)
        board.step(f"{chosen.steps} steps in {hurt.took_s:.2f} s")
    if hurt.death is not None:
        tell(hurt.death, board)
    judged = judge(hurt.weights, held)
    report(calm, hurt, judged, board)
    if chosen.write:
        write(calm, hurt, judged)
    return int(not are_same(calm, hurt) or hurt.death is None or hurt.death.new_pid == hurt.death.pid)


if __name__ == "__main__":
    sys.exit(main())
