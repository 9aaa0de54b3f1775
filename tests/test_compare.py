"""Whether two values are the same, and in which words the first difference is told."""
from __future__ import annotations

import math

import numpy as np
import pytest

from flowengine.errors import TaskError
from flowengine.recovery.compare import difference, error_difference, root_of, shown


class Plain:
    def __init__(self, **fields):
        self.__dict__.update(fields)


class Stubborn:
    def __eq__(self, other):
        raise RuntimeError("not with me")

    def __repr__(self):
        raise RuntimeError("nor this")

    __hash__ = None


SAME = [
    (1, 1), ("a", "a"), (math.nan, math.nan), ([1, (2, {"a": 3})], [1, (2, {"a": 3})]), ({1, 2}, {2, 1}),
    (np.arange(3), np.arange(3)), (np.array([1.0, math.nan]), np.array([1.0, math.nan])),
    (Plain(x=1, y=[2]), Plain(x=1, y=[2])), (np.array("text"), np.array("text")),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same(one, other):
    assert difference(one, other) == ""


@pytest.mark.parametrize(("recorded", "replayed", "said"), [
    (5, 6, "the result is 6, the record says 5"),
    (1, 1.5, "the result is 1.5, the record says 1"),
    ([1, 2, 3], [1, 7, 3], "the result[1] is 7, the record says 2"),
    ({"a": {"b": 1}}, {"a": {"b": 2}}, "the result['a']['b'] is 2, the record says 1"),
    ({"a": 1}, {"b": 1}, "the result has the keys ['b'], the record says ['a']"),
    ([1], [1, 2], "the result has 2 items, the record says 1"),
    (np.array([1.0, 2.0]), np.array([1.0, 2.5]), "at [1]"),
    (np.zeros(2), np.zeros(3), "the result differs: float64[3], the record says float64[2]"),
    (np.zeros(2), np.zeros(2, int), "the result differs: int64[2], the record says float64[2]"),
    (Plain(x=1), Plain(x=2), "the result.__dict__['x'] is 2, the record says 1"),
])  # fmt: skip
def test_the_first_difference_is_told(recorded, replayed, said):
    assert said in difference(recorded, replayed, "the result")


def test_what_cannot_be_compared_is_compared_as_it_is_pickled():
    assert difference(Stubborn(), Stubborn()) == ""
    assert shown(Stubborn()) == "<Stubborn>"


def test_errors_are_compared_by_type_and_text():
    assert error_difference(ValueError("a"), ValueError("a")) == ""
    assert error_difference(ValueError("a"), KeyError("a")) == "it raises KeyError: 'a', the record says ValueError: a"
    first, again = object(), object()
    assert error_difference(ValueError(first), ValueError(again)) == ""  # where it lies in memory is no difference


def test_errors_of_nested_tasks_are_compared_by_what_was_raised_first():
    inner = TaskError.wrap(ValueError("a"), "", "inner")
    outer = TaskError.wrap(inner, "", "outer")
    assert type(root_of(outer)) is ValueError
    assert error_difference(outer, inner) == ""
