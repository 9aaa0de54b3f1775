"""The same results without the engine: one process, numpy and pyarrow, and a second way to the model's optimum."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from experiments.flights import graph, model, source, tables
from experiments.flights.show import Check

if TYPE_CHECKING:
    import pyarrow as pa

LOSS_TOLERANCE = 1e-6
CHANCE_TOLERANCE = 2e-3
AUC_TOLERANCE = 1e-4  # the tasks count scores in 4,096 bins, the check ranks them


class Expected(NamedTuple):
    """What one process finds."""

    flights: int
    slots: pa.Table
    routes: pa.Table
    layout: tables.Layout
    seen: model.Census
    descent: model.Descent
    auc: float
    newton_weights: tables.Floats
    newton_loss: float
    whole: tables.Encoded


def expect(plan: graph.Plan) -> Expected:
    """Everything once more: the table read and grouped in one piece, the model in the same rounds and by Newton."""
    text = source.unzip(plan.files.flights_zip)
    flights = graph.parse_part(text, 0, 1, plan.share_of_file)
    slots, routes = tables.group(flights)
    layout = tables.layout_of(routes)
    seen_delays = tables.pulse(flights)
    weather = tables.weather_grid(Path(plan.files.weather_csv).read_bytes())
    whole = tables.encode(flights, seen_delays, weather, layout)
    seen = model.Census.of(model.census(whole, layout.columns()))
    pieces = [graph.parse_part(text, part, plan.parts, plan.share_of_file) for part in range(plan.parts)]
    descent = descend(plan, [tables.encode(piece, seen_delays, weather, layout) for piece in pieces], seen, layout)
    weights, loss = model.newton(whole, layout.columns(), tolerance=1e-9)
    auc = ranked_auc(model.logits(whole.held, descent.weights), whole.held_late)
    return Expected(len(flights), slots, routes, layout, seen, descent, auc, weights, loss, whole)


def descend(plan: graph.Plan, parts: list[tables.Encoded], seen: model.Census, layout: tables.Layout) -> model.Descent:
    """The rounds of the model in a plain loop, added up in the same order."""
    descent = model.Descent(model.first_curvature(seen, len(layout.sizes())), plan.tolerance)
    while not descent.done and descent.rounds < graph.ROUNDS_MAX:
        total = model.tree([model.share(part, descent.trial) for part in parts], tables.merge_arrays)
        descent.observe(model.objective(total, descent.trial, seen))
    return descent


def ranked_auc(z: tables.Floats, late: tables.Floats) -> float:
    """The area under the curve from the mean ranks of the late flights."""
    _, place, counts = np.unique(z, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    late_total = late.sum()
    rank_sum = mean_rank[place][late > 0].sum()
    return float((rank_sum - late_total * (late_total + 1) / 2) / (late_total * (len(late) - late_total)))


def table_check(name: str, got: pa.Table, expected: pa.Table) -> Check:
    """Whether two grouped tables hold the same integers in every row."""
    got_flights, cells = sum(got["flights"].to_pylist()), got.num_rows * len(tables.SUMS)
    figures = f"{got.num_rows:,} groups, {cells:,} sums, {got_flights:,} flights"
    return Check(f"{name}, exact", got.equals(expected), figures)


def compare(outcome: graph.Outcome, expected: Expected) -> list[Check]:
    """All checks of the results."""
    got, same = outcome.descent, expected.descent
    far = float(np.max(np.abs(got.weights - same.weights)))
    above = got.loss - expected.newton_loss
    chances = [model.probability(model.logits(expected.whole.held, w)) for w in (got.weights, expected.newton_weights)]
    chance_gap = float(np.max(np.abs(chances[0] - chances[1])))
    auc = model.judge(outcome.scores).auc
    counted = np.array_equal(outcome.seen.columns, expected.seen.columns) and outcome.seen[1:] == expected.seen[1:]
    return [
        table_check("by carrier, airport, month and hour", outcome.slots, expected.slots),
        table_check("by route and carrier", outcome.routes, expected.routes),
        Check(
            "feature counts, exact",
            outcome.layout == expected.layout and counted,
            f"{expected.layout.columns()} columns, {expected.seen.train:,} flights to learn from",
        ),
        Check("the descent arrived", got.done, f"slope {got.slope():.1e} after {got.rounds} rounds"),
        Check(
            "weights, bit for bit, same rounds",
            got.rounds == same.rounds and got.weights.tobytes() == same.weights.tobytes(),
            f"{len(got.weights)} weights, largest difference {far:g}, {got.rounds} and {same.rounds} rounds",
        ),
        Check(
            f"loss at the optimum of Newton's method, within {LOSS_TOLERANCE:g}",
            abs(above) <= LOSS_TOLERANCE,
            f"{got.loss:.9f}, {above:+.1e}",
        ),
        Check(
            f"probabilities of Newton's method, within {CHANCE_TOLERANCE:g}",
            chance_gap <= CHANCE_TOLERANCE,
            f"largest difference {chance_gap:.1e} over {len(chances[0]):,} held-out flights",
        ),
        Check(
            f"area under the curve by ranks, within {AUC_TOLERANCE:g}",
            abs(auc - expected.auc) <= AUC_TOLERANCE,
            f"{auc:.6f} and {expected.auc:.6f}",
        ),
        Check(
            "better than the base rate",
            outcome.held_losses[-1] < model.base_loss(outcome.seen) and auc > 0.6,
            f"held-out loss {outcome.held_losses[-1]:.4f} against {model.base_loss(outcome.seen):.4f}",
        ),
    ]


def compare_failures(outcome: graph.Outcome) -> list[Check]:
    """Whether the failures made on purpose did happen, and were repaired."""
    if not outcome.faults.wanted:
        return []
    faults, counters = outcome.faults, outcome.counters
    victims = ", ".join(map(str, faults.killed_pids)) or "none"
    return [
        Check("a killed worker's tasks ran again", counters["tasks_retried"] > 0, f"pid {victims}"),
        Check("a lost part was made again", counters["objects_rebuilt"] > 0, f"part {faults.lost_part}"),
    ]
