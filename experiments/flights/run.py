"""The graph of tasks: `python -m experiments.flights.run`; the exit status is 1 when a check fails."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console

import flowengine as flow
from experiments.flights import check, graph, model, source
from experiments.flights.show import Board

TIMELINE = Path(__file__).resolve().parent / "out" / "timeline.json"
SHOWN_COUNTERS = (
    "tasks_submitted",
    "tasks_executed",
    "tasks_retried",
    "objects_rebuilt",
    "objects_inlined",
    "objects_stored",
    "bytes_stored",
    "bytes_moved",
    "head_messages",
    "leases_granted",
)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="flights", description="336,776 flights, a killed worker, the same numbers.")
    parser.add_argument("--workers", type=int, default=None, metavar="N", help="default: one for each CPU")
    parser.add_argument("--parts", type=int, default=16, metavar="N", help="how many parts the flights are read in")
    parser.add_argument("--no-kill", action="store_true", help="kill no worker and lose no object")
    parser.add_argument("--timeline", type=Path, default=TIMELINE, metavar="FILE", help="open it in Perfetto")
    parser.add_argument("--quick", action="store_true", help="the first quarter of the file, a looser tolerance")
    chosen = parser.parse_args()
    if chosen.parts < 1:
        parser.error("--parts must be at least 1")
    return chosen


def shown(path: Path) -> Path:
    """The path from here where it lies below, else as it is."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def report(board: Board, outcome: graph.Outcome) -> None:
    """The findings, and what the engine did for them."""
    judged, seen = model.judge(outcome.scores), outcome.seen
    board.table(
        f"Late arrivals (over 15 min) foretold for {judged.flights:,} held-out flights",
        ("", "model", "base rate"),
        [
            ("log loss", f"{outcome.held_losses[-1]:.4f}", f"{model.base_loss(seen):.4f}"),
            ("area under the curve", f"{judged.auc:.3f}", "0.500"),
            ("accuracy", f"{judged.accuracy:.1%}", f"{judged.base_accuracy:.1%}"),
            ("late among the worst tenth", f"{judged.late_in_worst_tenth:.1%}", f"{judged.base_rate:.1%}"),
        ],
    )
    by_carrier = outcome.slots.group_by("carrier", use_threads=False).aggregate([("arrived", "sum"), ("late", "sum")])
    flown = [row for row in by_carrier.to_pylist() if row["arrived_sum"]]
    rows = sorted(flown, key=lambda row: -row["late_sum"] / row["arrived_sum"])
    board.table(
        "Carriers by late arrivals: the three worst, the three best",
        ("carrier", "arrived", "late"),
        [
            (row["carrier"], f"{row['arrived_sum']:,}", f"{row['late_sum'] / row['arrived_sum']:.1%}")
            for row in rows[:3] + rows[-3:]
        ],
    )
    board.table(
        "What the engine did",
        ("counter", "value"),
        [(name, f"{outcome.counters.get(name, 0):,}") for name in SHOWN_COUNTERS],
    )


def main() -> int:
    """Runs the job, checks it, reports; 1 when a check failed, 2 when the flights are not installed."""
    chosen = options()
    board = Board(Console(soft_wrap=True))
    try:
        files = source.locate()
    except source.SourceMissing as missing:
        board.note(str(missing))
        return 2
    share_of_file, tolerance = (0.25, 5e-6) if chosen.quick else (1.0, 3e-6)
    plan = graph.Plan(files, chosen.parts, share_of_file, tolerance, not chosen.no_kill)
    with flow.init(num_workers=chosen.workers):
        board.step(f"engine is up: {sum(len(node.workers) for node in flow.nodes())} workers, {plan.parts} parts")
        began_s = time.monotonic()
        outcome = graph.run(plan, board)
        took_s = time.monotonic() - began_s
        chosen.timeline.parent.mkdir(parents=True, exist_ok=True)
        runs = flow.timeline(chosen.timeline)
    began_s = time.monotonic()
    board.step("now the same in one process, and by Newton's method")
    with board.console.status("computing without the engine"):
        expected = check.expect(plan)
    board.step(f"engine {took_s:.2f} s; the same and Newton's method in one process {time.monotonic() - began_s:.2f} s")
    report(board, outcome)
    checks = check.compare(outcome, expected) + check.compare_failures(outcome)
    board.checks(checks)
    where = f"{shown(chosen.timeline)} (open it at https://ui.perfetto.dev)"
    board.console.print(f"Timeline of {runs:,} runs: {where}", highlight=False)
    return 0 if all(one.holds for one in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
