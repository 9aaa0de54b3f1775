"""The adaptive policy against every fixed one, with the real machine of an actor in virtual time: a coarse grid."""
from __future__ import annotations

import math

import pytest

from experiments.checkpoint_policy.run import BOUND, FIXED, OURS, measure_cell, verdict
from experiments.checkpoint_policy.virtual import Cell

NOISE = 0.04  # of a few seeds; results.csv has more of them, and keeps the bound itself
CELLS = [
    Cell(state_bytes, call_s, mtbf_s, 120.0)
    for state_bytes in (1e6, 500e6) for call_s in (1.0, 5.0) for mtbf_s in (15.0, 120.0, math.inf)
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.state_bytes:g}-{cell.call_s:g}-{cell.mtbf_s:g}")
def test_adaptive_is_as_good_as_the_best_fixed_policy_of_the_cell(cell):
    rows = measure_cell(cell, seeds=12)
    assert [row.policy for row in rows] == [*FIXED, OURS]
    found = verdict(rows)
    assert found.ratio <= BOUND + NOISE, found


def test_a_bad_fixed_policy_is_far_worse():
    often = {row.policy: row.completion_s for row in measure_cell(Cell(500e6, 0.5, math.inf, 60.0), seeds=1)}
    seldom = {row.policy: row.completion_s for row in measure_cell(Cell(1e6, 0.5, 15.0, 60.0), seeds=8)}
    assert often["1"] > 2 * often[OURS]
    assert seldom["never"] > 1.5 * seldom[OURS]
