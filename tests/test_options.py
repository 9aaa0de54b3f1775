"""Options of tasks are checked when they are given."""
from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowengine as flow
from flowengine.errors import BadType, BadValue, UsageError
from flowengine.functions import Plan, remote_function
from flowengine.options import NUM_RETURNS_MAX, TaskOptions, actor_options, shape, task_options


def test_defaults():
    options = task_options({})
    assert options == TaskOptions()
    assert (options.num_returns, options.num_cpus, options.max_retries, options.timeout_s) == (1, 1.0, 3, None)
    assert shape(options) == (("CPU", 1.0),)


def test_given_options_lie_over_the_base():
    base = task_options({"num_cpus": 2, "name": "label"})
    over = task_options({"num_cpus": 0, "timeout_s": 1}, base)
    assert (over.num_cpus, over.name, over.timeout_s) == (0.0, "label", 1.0)
    assert base.num_cpus == 2.0


@pytest.mark.parametrize(("name", "value", "kind"), [
    ("num_returns", -2, BadValue), ("num_returns", 3.2, BadType), ("num_returns", True, BadType),
    ("num_returns", "streams", BadValue), ("num_returns", NUM_RETURNS_MAX + 1, BadValue),
    ("num_returns", None, BadType),
    ("num_cpus", -1, BadValue), ("num_cpus", float("nan"), BadValue), ("num_cpus", float("inf"), BadValue),
    ("num_cpus", True, BadType), ("num_cpus", "2", BadType), ("num_gpus", -0.5, BadValue), ("num_gpus", 1j, BadType),
    ("memory_bytes", 1.5, BadType), ("memory_bytes", -1, BadValue), ("max_retries", -5, BadValue),
    ("max_retries", 1.0, BadType), ("max_retries", False, BadType), ("timeout_s", 0, BadValue),
    ("timeout_s", -1, BadValue), ("timeout_s", float("nan"), BadValue), ("timeout_s", "1", BadType),
    ("name", 3, BadType), ("priority", "high", BadType), ("priority", float("inf"), BadValue),
    ("resources", {"x": -1}, BadValue), ("resources", {"x": float("nan")}, BadValue),
    ("resources", {"x": True}, BadType), ("resources", {"x": "1"}, BadType), ("resources", {"": 1}, BadValue),
    ("resources", {1: 1}, BadType), ("resources", {"CPU": 1}, BadValue), ("resources", {"GPU": 1}, BadValue),
    ("resources", {"memory": 1}, BadValue), ("resources", ["x"], BadType), ("retry_exceptions", 1, BadType),
    ("retry_exceptions", (int,), BadType), ("retry_exceptions", ValueError("an instance"), BadType),
    ("resources", {"a\0": 1}, BadValue), ("resources", {"\ud800": 1}, BadValue), ("name", "\ud800", BadValue),
    ("env_vars", {"A": "\ud800"}, BadValue), ("working_dir", "\ud800", BadValue),
    ("retry_exceptions", None, BadType), ("working_dir", "s3://bucket/code", BadValue), ("working_dir", "", BadValue)])
def test_bad_values_are_refused_by_name(name, value, kind):
    with pytest.raises(kind, match=name):
        task_options({name: value})


@pytest.mark.parametrize(("given_name", "near"), [("num_cpu", "num_cpus"), ("max_retry", "max_retries"),
                                                  ("timeout", "timeout_s"), ("ressources", "resources")])
def test_unknown_names_get_the_nearest(given_name, near):
    with pytest.raises(ValueError, match=f"no option '{given_name}': did you mean '{near}'"):
        task_options({given_name: 1})


def test_a_name_that_other_engines_have_is_told_what_does_the_same():
    with pytest.raises(BadValue, match="no option 'runtime_env': use env_vars and working_dir; known are"):
        task_options({"runtime_env": {}})
    with pytest.raises(BadValue, match="use env_vars and working_dir"):
        actor_options({"runtime_env": {}})
    with pytest.raises(BadValue, match="use placement; known are"):
        task_options({"scheduling_strategy": "SPREAD"})
    with pytest.raises(BadValue, match="'max_task_retries': calls are done again as recovery says; known are"):
        actor_options({"max_task_retries": 1})


def test_a_name_like_no_other_lists_all():
    with pytest.raises(BadValue, match="known are env_vars, max_retries, memory_bytes"):
        task_options({"zzz": 1})


@pytest.mark.parametrize(("value", "kept"), [
    (True, True), (False, False), (ValueError, (ValueError,)), ([ValueError, KeyError], (ValueError, KeyError)),
    ((OSError,), (OSError,)), ((), ())])
def test_retry_exceptions_are_normalised(value, kept):
    assert task_options({"retry_exceptions": value}).retry_exceptions == kept


def test_streams_and_numbers_of_numpy():
    assert task_options({"num_returns": "stream"}).num_returns == "stream"
    options = task_options({"num_returns": np.int64(2), "num_cpus": np.float32(0.5), "memory_bytes": np.uint8(7)})
    assert (options.num_returns, options.num_cpus, options.memory_bytes) == (2, 0.5, 7)
    assert [type(v) for v in (options.num_returns, options.num_cpus, options.memory_bytes)] == [int, float, int]


def test_shape_is_sorted_and_without_zeros():
    custom = {"b": 1, "a": 0.5, "z": 0}
    options = task_options({"num_cpus": 0, "num_gpus": 0.25, "memory_bytes": 10, "resources": custom})
    assert shape(options) == (("GPU", 0.25), ("a", 0.5), ("b", 1.0), ("memory", 10.0))
    assert hash(options) == hash(task_options({}, options))


WORDS = st.text("aCPU", max_size=5)
NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans())
ANYTHING = st.one_of(st.none(), NUMBERS, WORDS, st.binary(max_size=3), st.lists(NUMBERS, max_size=2),
                     st.dictionaries(WORDS, st.one_of(NUMBERS, WORDS), max_size=3))


@given(st.dictionaries(st.sampled_from([f for f in TaskOptions.__struct_fields__ if f != "placement"]), ANYTHING))
def test_anything_is_kept_or_refused_with_a_usage_error(options):
    try:
        kept = task_options(options)
    except UsageError:
        return
    assert all(amount > 0 for _, amount in shape(kept))
    assert task_options({}, kept) == kept


async def later():
    return 1


async def items():
    yield 1


class Later:
    async def __call__(self):
        return 1


@pytest.mark.parametrize("fn", [later, items, functools.partial(later), functools.partial(items), Later()])
def test_what_only_an_event_loop_runs_is_no_task(fn):
    with pytest.raises(BadType, match="is an async function: a task is a plain function"):
        remote_function(fn, {"num_returns": "stream"})


@pytest.mark.parametrize("bad", ["half \udc80 a character", "with \0 in it"])
def test_names_that_no_message_can_hold_are_refused_where_they_are_given(bad):
    for refused in (
        lambda: task_options({"name": bad}),
        lambda: actor_options({"name": bad}),
        lambda: flow.remote(type("Odd", (), {bad: lambda self: 1})),
        lambda: Plan(None, len, task_options({}), bad),
        lambda: flow.get_actor(bad),
        lambda: flow.init(job=bad),
        lambda: flow.init(state_dir=bad),
        lambda: flow.Lock(bad),
    ):
        with pytest.raises(BadValue, match="must be text"):
            refused()
