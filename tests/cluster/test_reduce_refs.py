"""Reductions over references on one host: values, order, the first of many, losses, errors, what they hold."""
from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest

import flowengine as flow
from tests.cluster.kit import two_workers, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
LARGE = 1 << 17  # elements: 1 MiB


@pytest.fixture(scope="module")
def engine():
    yield from two_workers()


@flow.remote
def full(number, size=LARGE, dtype="f8"):
    return np.full(size, number, dtype)


@flow.remote(num_cpus=0)
def after(file, value):
    """The value, not before the file is there."""
    until(lambda: os.path.exists(file))
    return value


@flow.remote
def fails(error):
    raise error


async def in_a_while(one, other):
    return one + other


@pytest.mark.parametrize(("op", "expected"), [("sum", 10), ("prod", 24), ("min", 1), ("max", 4), ("mean", 2.5)])
def test_operations_over_results_that_do_not_exist_yet(engine, op, expected):
    got = flow.get(flow.reduce([full.remote(number) for number in (1, 2, 3, 4)], op=op), timeout=30)
    assert got.shape == (LARGE,)
    assert got.dtype == np.float64
    assert (got == expected).all()


def test_a_function_folds_in_the_order_of_the_references(engine):
    words = flow.reduce([flow.put(word) for word in "abcdefgh"], op=lambda a, b: a + b)
    assert flow.get(words, timeout=30) == "abcdefgh"
    pairs = flow.reduce([full.remote(number, 4) for number in range(3)], op=np.maximum)
    assert flow.get(pairs, timeout=30).tolist() == [2, 2, 2, 2]


def test_lists_dicts_numbers_and_what_is_put(engine):
    weights = [flow.put({"w": np.ones((3, 2), "f4") * n, "b": [np.arange(3), n]}) for n in range(5)]
    total = flow.get(flow.reduce(weights), timeout=30)
    assert total["w"].dtype == np.float32
    assert (total["w"] == 10).all()
    assert total["b"][0].tolist() == [0, 5, 10]
    assert total["b"][1] == 10
    assert flow.get(flow.reduce([flow.put(n) for n in (2, 3)], op="mean"), timeout=30) == 2.5
    one = flow.put(np.arange(4))
    assert flow.get(flow.reduce([one, one, one]), timeout=30).tolist() == [0, 3, 6, 9]
    assert flow.get(flow.reduce([one]), timeout=30).tolist() == [0, 1, 2, 3]


def test_results_of_actors_and_reductions_of_reductions_in_tasks(engine):
    @flow.remote(num_cpus=0)
    class Counter:
        def __init__(self):
            self.count = 0

        def next(self):
            self.count += 1
            return np.array([self.count])

    @flow.remote
    def of_tens(refs):
        return flow.get(flow.reduce([flow.reduce(refs[:10]), flow.reduce(refs[10:], op="max")], op="min"))

    counter = Counter.remote()
    refs = [counter.next.remote() for _ in range(20)]
    assert flow.get(flow.allreduce(refs), timeout=30).tolist() == [210]
    assert flow.get(of_tens.remote(refs), timeout=30).tolist() == [20]


def test_the_first_that_arrive(engine, tmp_path):
    file = tmp_path / "now"
    refs = [after.remote(file, np.full(LARGE, 1000.0)), *[full.remote(10.0**n) for n in range(3)],
            after.remote(file, np.full(LARGE, 2000.0))]
    total = flow.reduce(refs, num_inputs=3)
    assert flow.get(total, timeout=30)[0] == 111
    file.touch()
    flow.get(refs, timeout=30)
    flow.chaos.lose(total)
    assert flow.get(total, timeout=30)[7] == 111  # made again from the same ones
    late, early = fails.remote(ValueError("late")), fails.remote(ValueError("early"))
    for refs in ([flow.put(1), late], [early, full.remote(1, 1)]):
        assert flow.get(flow.reduce(refs, num_inputs=1), timeout=30) == 1  # errors are passed over
    with pytest.raises(ValueError, match="both"):
        flow.get(flow.reduce([fails.remote(ValueError("both")) for _ in range(2)], num_inputs=1), timeout=30)


def test_reductions_that_wait_hold_no_process(engine, tmp_path):
    file = tmp_path / "now"
    gate = after.remote(file, np.zeros(4))
    pending = [flow.reduce([gate, flow.put(np.full(4, float(n)))]) for n in range(300)]
    until(lambda: len(flow.nodes()[0].workers) >= 2)
    assert flow.get(flow.reduce([full.remote(1, 4), full.remote(2, 4)]), timeout=30).tolist() == [3] * 4
    assert len(flow.nodes()[0].workers) < 20
    file.touch()
    assert [int(value[0]) for value in flow.get(pending, timeout=60)] == list(range(300))
    assert len(flow.nodes()[0].workers) < 20  # nor do many that could run at once


def test_a_thousand_small_ones(engine):
    refs = [flow.put(np.arange(8) + n) for n in range(1000)]
    assert flow.get(flow.reduce(refs), timeout=30).tolist() == [499_500 + 1000 * k for k in range(8)]


def test_lost_inputs_and_lost_results_are_made_again(engine):
    refs = [full.remote(float(n)) for n in range(6)]
    flow.wait(refs, num_returns=6)
    flow.chaos.lose(refs[2])
    total = flow.reduce(refs)
    assert flow.get(total, timeout=30)[0] == 15
    flow.chaos.lose(total)
    flow.chaos.lose(refs[4])
    assert flow.get(total, timeout=30)[0] == 15


def test_errors_of_inputs_pass_on(engine):
    with pytest.raises(KeyError, match="input 1"):
        flow.get(flow.reduce([flow.put(np.ones(4)), fails.remote(KeyError("input 1"))]), timeout=30)
    with pytest.raises(ZeroDivisionError):
        flow.get(flow.reduce([flow.put(1), flow.put(2)], op=lambda a, b: a / 0), timeout=30)


@pytest.mark.parametrize(("values", "words"), [
    ((np.ones(3), np.ones(4)), r"input 1 .*float64 \(4,\).*input 0 .*float64 \(3,\)"),
    ((np.ones(LARGE), np.ones(LARGE, "i8")), "int64"),
    (({"a": np.ones(2)}, {"b": np.ones(2)}), "'b'"),
    ((np.ones(2), [np.ones(2)]), "input 1"),
])
def test_inputs_that_differ_are_a_mismatch_that_names_them(engine, values, words):
    with pytest.raises(flow.CollectiveMismatch, match=words):
        flow.get(flow.reduce([flow.put(value) for value in values]), timeout=30)


def test_what_has_no_answer_is_refused(engine):
    for value, op in ((np.ones(3, "c8"), "max"), (np.array(["a"]), "sum"), (object, "sum")):
        with pytest.raises(TypeError):
            flow.get(flow.reduce([flow.put(value), flow.put(value)], op=op), timeout=30)


def test_mistakes_of_the_caller_are_told_at_once(engine):
    ref = flow.put(1)
    for refs, options, error in (
        ([], {}, "at least one"), ([ref], {"op": "nonsense"}, "nonsense"), ([ref], {"op": 3}, "function"),
        ([ref], {"num_inputs": 2}, "num_inputs"), ([ref], {"num_inputs": 0}, "num_inputs"), ([ref, 1], {}, "found 1|1"),
        (ref, {}, "list"), ([ref, ref], {"num_inputs": 1}, "twice"), ([ref], {"op": full}, "full is remote"),
        ([ref], {"op": in_a_while}, "in_a_while is async"),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            flow.reduce(refs, **options)


def test_nothing_is_left_in_the_store(engine):
    before = len(list(store_files()))
    for _ in range(5):
        refs = [full.remote(n) for n in range(4)]
        total = flow.reduce(refs)
        flow.get(total, timeout=30)
        del refs, total
    until(lambda: len(list(store_files())) <= before + 8)  # some are kept warm for the next


def store_files():
    base = pathlib.Path(f"/dev/shm/flowengine-{os.getuid()}")
    return base.rglob("*")
