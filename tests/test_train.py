"""The parts of flow.train that need no engine: buckets, the length of calls, models, and what is imported when."""
from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowengine.errors import BadType, BadValue
from flowengine.train import trainer
from flowengine.train.buckets import Buckets, filled
from flowengine.train.models import checked_model, loss_of, weights_of

SIZES = st.lists(st.integers(0, 100), max_size=30)


# buckets


@given(SIZES, st.integers(1, 120))
def test_buckets_hold_all_items_in_order_and_no_more_than_they_may(sizes, limit):
    buckets = filled(sizes, limit)
    assert [item for items in buckets for item in items] == list(range(len(sizes)))
    assert all(len(items) == 1 or sum(sizes[item] for item in items) <= limit for items in buckets)


@given(SIZES, st.integers(1, 120), st.randoms())
def test_buckets_are_sent_once_in_one_order_when_all_before_are_full(sizes, limit, rng):
    buckets = Buckets(sizes, limit)
    arrivals = rng.sample(range(len(sizes)), rng.randint(0, len(sizes)))
    there, sent = set(), []
    for item in arrivals:
        there.add(item)
        sent += buckets.arrived(item)
        full = [set(items) <= there for items in buckets.buckets]
        assert sent == list(range([*full, False].index(False)))
    sent += buckets.rest()
    assert sent == list(range(len(buckets.buckets)))
    buckets.begin()
    assert buckets.rest() == sent


@given(SIZES.filter(len), st.integers(1, 120), st.integers(1, 4), st.randoms())
def test_each_round_of_arrivals_sends_all_buckets(sizes, limit, rounds, rng):
    buckets, sent, items = Buckets(sizes, limit), [], list(range(len(sizes)))
    for _ in range(rounds):
        some = rng.sample(items[1:], rng.randint(0, len(sizes) - 1))
        for item in [0, *some]:  # one comes in each round, others may not
            sent += buckets.arrived(item)
    assert sent + buckets.rest() == rounds * list(range(len(buckets.buckets)))


# the length of calls


def test_calls_become_as_long_as_they_should_and_stay_as_the_user_says(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(trainer.time, "monotonic", lambda: now[0])
    pace, fixed = trainer.Pace(None), trainer.Pace(7)
    for _ in range(20):
        for one in (pace, fixed):
            one.begin()
        now[0] += 0.01 * pace.steps
        pace.ended(pace.steps)
        fixed.ended(7)
    assert (pace.steps, fixed.steps) == (round(trainer.CALL_S / 0.01), 7)
    now[0] += 100.0
    pace.ended(pace.steps)
    assert pace.steps == 1
    with pytest.raises(BadValue, match="steps_per_call"):
        trainer.Pace(0)


def test_code_that_runs_again_makes_calls_of_the_same_length(monkeypatch):
    monkeypatch.setattr(trainer.flow, "record", lambda function: 5)  # what the first run chose
    assert (trainer.Pace(None).chosen(), trainer.Pace(7).chosen()) == (5, 7)


# models


class Half:
    def gradient(self, step, rank, size):
        return np.zeros(1)


def test_a_model_is_a_class_with_what_is_called():
    with pytest.raises(BadType, match="is a class"):
        checked_model(Half())
    with pytest.raises(BadType, match="Half has no method 'apply'"):
        checked_model(Half)
    with pytest.raises(BadType, match="'weights'"):
        weights_of(Half())
    assert np.isnan(loss_of(Half()))


# imports


def test_training_is_imported_when_it_is_asked_for():
    program = (
        "import sys, flowengine as flow; assert not [n for n in sys.modules if n.startswith('flowengine.train.')]\n"
        "flow.train.DataParallel; assert 'torch' not in sys.modules and 'rich' not in sys.modules\n"
        "sys.modules['torch'] = None\n"
        "try: flow.train.torch\n"
        "except ImportError as error: assert 'pip install torch' in str(error)\n"
        "else: raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = trainer.flow.train.nonsense
