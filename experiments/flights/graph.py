"""The graph of tasks: it grows while it runs, and two things are broken in it on purpose.

Which columns the model has is known only when the routes were merged; how many rounds it takes, only when the
gradient is small enough. Nothing here computes: every number comes from tables.py and model.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import flowengine as flow
from experiments.flights import model, source, tables
from experiments.flights.show import Board

if TYPE_CHECKING:
    import pyarrow as pa

KILL_ROUND = 8
ROUNDS_MAX = 400


class Plan(NamedTuple):
    """What to compute, and what to break meanwhile."""

    files: source.Source
    parts: int
    share_of_file: float
    tolerance: float
    kill: bool


@dataclass
class Outcome:
    """The results of the run, and what was done to it."""

    slots: pa.Table
    routes: pa.Table
    layout: tables.Layout
    seen: model.Census
    descent: model.Descent
    held_losses: list[float]
    scores: tables.Ints
    faults: Faults
    counters: dict[str, int]  # taken while the results are still held: what is stored is counted as it is now


@dataclass
class Faults:
    """The failures made on purpose: how many tries the kill needed until it hit running work, and its victims."""

    wanted: bool
    lost_part: int | None = None
    killed_pids: list[int] = field(default_factory=list)
    hit: bool = False

    def lose(self, parsed: list[Any], board: Board) -> None:
        """Drops every copy of one parsed part that later tasks still need."""
        if not self.wanted:
            return
        self.lost_part = len(parsed) // 2
        flow.chaos.lose(parsed[self.lost_part])
        board.note(f"lost on purpose: every copy of parsed part {self.lost_part}; the next stage still needs it")

    def kill(self, shares: list[Any], descent: model.Descent, board: Board) -> None:
        """Kills the worker of a share that is still to come, in the middle of a round."""
        _, pending = flow.wait(shares, num_returns=1)
        if not pending:
            return
        try:
            pid = flow.chaos.kill_worker(of=pending[0])
        except flow.UsageError:  # it ended in the meantime: the next round will do
            return
        self.killed_pids.append(pid)
        board.note(f"killed on purpose: worker with pid {pid}, in round {descent.rounds + 1}")

    def due(self, rounds: int) -> bool:
        """Whether this round is to be disturbed: again, if the last victim happened to be idle."""
        return self.wanted and not self.hit and rounds + 1 >= KILL_ROUND and len(self.killed_pids) < 3


def read_weather(path: str) -> tables.Ints:
    """The grid of weather from its file."""
    return tables.weather_grid(Path(path).read_bytes())


def parse_part(text: tables.Bytes, part: int, plan_parts: int, share_of_file: float) -> pa.Table:
    """One part of the file, or of its first lines where only a share of it is wanted."""
    text = text[: tables.after_newline(text, int(len(text) * share_of_file))]
    return tables.parse(text, *tables.byte_range(text, part, plan_parts))


unzip = flow.remote(source.unzip)
weather_grid = flow.remote(read_weather)
parse = flow.remote(parse_part)
group = flow.remote(num_returns=2)(tables.group)
pulse = flow.remote(tables.pulse)
merge_groups = flow.remote(tables.merge_groups)
merge_arrays = flow.remote(tables.merge_arrays)
encode = flow.remote(tables.encode)
census = flow.remote(model.census)
share = flow.remote(model.share)
score = flow.remote(model.score)


def run(plan: Plan, board: Board) -> Outcome:
    """Reads, groups, learns and judges; returns what the checks need."""
    faults = Faults(plan.kill)
    text, weather = unzip.remote(plan.files.flights_zip), weather_grid.remote(plan.files.weather_csv)
    parsed = [parse.remote(text, part, plan.parts, plan.share_of_file) for part in range(plan.parts)]
    groups = [group.remote(table) for table in parsed]
    slots = model.tree([by_slot for by_slot, _ in groups], merge_groups.remote)
    routes = model.tree([by_route for _, by_route in groups], merge_groups.remote)
    pulses = model.tree([pulse.remote(table) for table in parsed], merge_arrays.remote)
    board.follow("read and parse", [text, *parsed])
    board.follow("group and merge", [*(ref for pair in groups for ref in pair), slots, routes, pulses])
    faults.lose(parsed, board)

    layout = tables.layout_of(flow.get(routes))
    encoded = [encode.remote(table, pulses, weather, layout) for table in parsed]
    counted = model.tree([census.remote(part, layout.columns()) for part in encoded], merge_arrays.remote)
    board.follow("encode features", [*encoded, counted])
    seen = model.Census.of(flow.get(counted))

    descent = model.Descent(model.first_curvature(seen, len(layout.sizes())), plan.tolerance)
    held_losses = learn(descent, encoded, seen, faults, board)
    scores = model.tree([score.remote(part, descent.weights) for part in encoded], merge_arrays.remote)
    board.follow("judge", [scores])
    slots_got, routes_got, scores_got = flow.get([slots, routes, scores])
    counters = flow.stats()
    return Outcome(slots_got, routes_got, layout, seen, descent, held_losses, scores_got, faults, counters)


def learn(descent: model.Descent, encoded: list[Any], seen: model.Census, faults: Faults, board: Board) -> list[float]:
    """Rounds until the descent has arrived: a share of each part, a tree, a decision; the held-out losses."""
    held_losses = []
    with board.rounds() as line:
        while not descent.done and descent.rounds < ROUNDS_MAX:
            shares = [share.remote(part, descent.trial) for part in encoded]
            total = model.tree(shares, merge_arrays.remote)
            if faults.due(descent.rounds):
                retried_before = flow.stats()["tasks_retried"]
                faults.kill(shares, descent, board)
                flow.get(total)
                faults.hit = flow.stats()["tasks_retried"] > retried_before
            at_trial = model.objective(flow.get(total), descent.trial, seen)
            descent.observe(at_trial)
            held_losses.append(at_trial.held_loss)
            line(descent.rounds, at_trial.loss, at_trial.held_loss, descent.slope())
    return held_losses
