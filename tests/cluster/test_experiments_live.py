"""Experiments in their smallest form: the programs that are measured are right."""
from __future__ import annotations

import io

import pytest
from rich.console import Console

import flowengine as flow
from experiments.actor_rollback import run as rollback
from experiments.against_peers import run as peers
from experiments.flights.show import Board
from experiments.off_critical_path import run as ring
from experiments.training import run as training
from experiments.word_count import run as words
from experiments.word_count import stream
from tests.test_experiments import some_flights

pytestmark = pytest.mark.cluster


def test_every_token_makes_all_its_hops(tmp_path):
    with flow.init(num_workers=1):
        for number, mode in enumerate(ring.MODES[:3]):
            folder = tmp_path / str(number)
            folder.mkdir()
            members = ring.Ring(mode, 3, str(folder))
            for ways in ring.WAYS.values():
                tokens = ways or 3
                assert len(members.turn(2, ways)[0]) == 2 * 3 * tokens
            assert bool(list(folder.iterdir())) == mode.saves


def test_a_stream_whose_mapper_dies_twice_counts_exactly():
    load = words.Load(24, 0.04)
    expected = stream.expected(words.SOURCES, load.batches)
    found = words.run(words.MODES[0], load)
    assert found.words == expected
    assert words.judge(found, load, expected) == (0, 0, 0, 0)
    assert found.failed == 0


@pytest.mark.parametrize("kind", ["the dead actor alone", "all go back"])
def test_a_plate_ends_with_the_same_bits_whoever_goes_back(kind):
    plate = rollback.Plate(2, 4, 8, 1)
    found = rollback.KINDS[kind](plate)
    assert found.digest == rollback.alone(plate)
    assert found.again


def test_a_counter_killed_between_two_callers_is_exact():
    seen = peers.judge("flowengine", peers.WAYS["flowengine"].program(40))
    assert (seen.answered, seen.value, seen.lost, seen.doubled, seen.errors) == (80, 80, 0, 0, {})


def test_a_network_ends_with_the_same_bits_though_a_member_is_killed():
    learnt, held = some_flights()
    text = io.StringIO()
    board = Board(Console(file=text))
    with flow.init(num_workers=2):
        calm, hurt = (training.train(flow.put(tuple(learnt)), 60, kill, board) for kill in (False, True))
    assert training.are_same(calm, hurt)
    assert calm.death is None
    assert hurt.death.new_pid != hurt.death.pid
    assert 0 <= hurt.death.back_to <= hurt.death.step <= 60
    training.tell(hurt.death, board)
    training.report(calm, hurt, training.judge(hurt.weights, held), board)
    assert f"pid {hurt.death.pid}" in text.getvalue()
    assert "ok" in text.getvalue()
