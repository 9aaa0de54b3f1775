"""Random groups under harm: each result is that of its members and the same for all; nothing pends, nothing is left."""
from __future__ import annotations

import pytest

from flowengine.chaos.sim import SCENARIOS, simulate, story_of

SEEDS = (("collectives_calm", 40), ("collectives_members", 80), ("collectives", 80), ("collectives_all", 80),
         ("collectives_tight", 20), ("collectives_spill", 20), ("collectives_late", 80))
CHUNK = 20
RUNS = [(name, first) for name, count in SEEDS for first in range(0, count, CHUNK)]

# Seeds that have shown a fault, with what it was.
TELLING = (
    ("collectives_calm", 2),        # a newcomer that was taken in at a higher rank than it asked for was not told
    ("collectives_members", 37),    # what a member gave once more on the same node was kept for good
    ("collectives_members", 385),   # its node never heard of what a dead member had told its ledger that it gave
    ("collectives", 13),            # a result that named the rank of before a loss was taken for another member's
    ("collectives", 85),            # a member died after its node and before its ledger heard of what it gave
    ("collectives", 136),           # who gave to a step that had nobody left to take it
    ("collectives", 311),           # a new ledger gave the seat of one group's member to another's
    ("collectives_all", 1),         # who waited for a lost result that is made again was forgotten by a new ledger
    ("collectives_all", 22),        # the last member and the ledger's node died: what other nodes kept stayed
    ("collectives_all", 128),       # a member's first words came after those of its next life
    ("collectives_all", 397),       # a member that its group had given up on gave an object that nobody counted
    ("collectives_all", 582),       # pieces of a lane that had broken were counted for the next one
    ("collectives_all", 738),       # what a member gave was lost with its node, which lives on: nobody answered it
    ("collectives_all", 1666),      # a member came back while its group waited for another, and its result was whole
    ("collectives_all", 1764),      # a member that was refused by a new ledger was told that it had given its seat up
    ("collectives_all", 510357),    # a ledger died before all nodes had its course: pieces stayed for good
    ("collectives_late", 520006),   # all members came anew, on other nodes: the group folded in another order
    ("collectives_spill", 124),     # a step that needs more than a store has brought its gifts back in turn
    ("collectives_spill", 80),      # a gift was written to disk between the order to open it and its opening
    ("collectives_spill", 113),     # a node that had a part of a result, and nobody who takes it, took it for whole
)


@pytest.mark.parametrize(("name", "first"), RUNS)
def test_seeds(name, first):
    report = simulate(name, range(first, first + CHUNK))
    assert not report.failures, str(report)
    assert report.tasks > 10 * CHUNK


@pytest.mark.parametrize(("name", "seed"), TELLING)
def test_telling_seeds(name, seed):
    report = simulate(name, [seed])
    assert not report.failures, str(report)


def test_a_seed_repeats_a_run():
    assert story_of(SCENARIOS["collectives"], 3) == story_of(SCENARIOS["collectives"], 3)
