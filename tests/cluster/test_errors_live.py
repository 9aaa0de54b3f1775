"""Errors on a live engine: whatever user code raises arrives as what it was, and the engine goes on."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest

import flowengine as flow
from tests.cluster.kit import two_workers

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("engine")]
engine = pytest.fixture(scope="module")(two_workers)


class NeedsKeyword(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


class HidesItsArguments(Exception):
    def __init__(self, first, second):
        super().__init__("only one")
        self.second = second


class HoldsALock(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


class HasSlots(Exception):
    __slots__ = ("x",)


def with_slot():
    error = HasSlots("m")
    error.x = 4
    return error


def with_note():
    error = ValueError("m")
    error.add_note("look here")
    return error


def never_ends():
    return never_ends()


@flow.remote
def same(x):
    return x


@flow.remote(max_retries=0)
def raises(make):
    raise make()


def raised(ref):
    with pytest.raises(flow.TaskError) as caught:
        flow.get(ref, timeout=20)
    return caught.value


@pytest.mark.parametrize(
    ("make", "kind", "holds"),
    [
        (lambda: NeedsKeyword(code=3), NeedsKeyword, lambda e: e.code == 3),
        (lambda: HidesItsArguments(1, 2), HidesItsArguments, lambda e: e.second == 2),
        (lambda: HoldsALock("m"), HoldsALock, lambda e: e.args == ("m",)),
        (with_slot, HasSlots, lambda e: e.x == 4),
        (with_note, ValueError, lambda e: "look here" in e.__notes__ or "look here" in e.__cause__.__notes__),
        (lambda: FileNotFoundError(2, "no such", "name"), OSError, lambda e: (e.errno, e.filename) == (2, "name")),
        (lambda: b"\xff".decode(), UnicodeDecodeError, lambda e: e.object == b"\xff"),
        (never_ends, RecursionError, lambda e: True),
        (lambda: MemoryError("none"), MemoryError, lambda e: True),
        (lambda: ValueError("\udcff\x00"), ValueError, lambda e: True),
        (lambda: ValueError("x" * 3_000_000), ValueError, lambda e: len(e.args[0]) == 3_000_000),
        (lambda: 3, TypeError, lambda e: True),
    ],
)
def test_error_arrives_as_what_it_was(make, kind, holds):
    ref = raises.remote(make)
    error = raised(ref)
    assert isinstance(error, kind)
    assert holds(error)
    assert isinstance(raised(same.remote(ref)), kind)  # and reaches whoever needed the value


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration, StopAsyncIteration])
def test_what_would_end_the_reader_or_its_loop_comes_wrapped(kind):
    ref = raises.remote(kind)
    error = raised(ref)
    assert not isinstance(error, kind)
    assert isinstance(error.__cause__, kind)
    assert kind.__name__ in str(error)

    async def main():
        await ref

    with pytest.raises(flow.TaskError):
        asyncio.run(asyncio.wait_for(main(), 20))


def test_groups_split_by_type_also_nested_ones():
    def make():
        return ExceptionGroup("g", [ValueError(1), ExceptionGroup("h", [NeedsKeyword(code=7), OSError(2, "no")])])

    caught = []
    try:
        flow.get(raises.remote(make), timeout=20)
    except* NeedsKeyword as group:
        caught.append(group.exceptions[0].exceptions[0].code)
    except* (ValueError, OSError):
        caught.append("others")
    assert caught == [7, "others"]


def test_error_through_many_levels_of_tasks():
    @flow.remote
    def level(depth):
        if depth == 0:
            raise NeedsKeyword(code=9)
        return flow.get(level.remote(depth - 1))

    error = raised(level.remote(6))
    assert isinstance(error, NeedsKeyword)
    assert error.code == 9
    assert len(str(error).splitlines()) < 200  # the story of each level is not told at every other


def test_error_caught_in_a_task_may_be_its_result():
    @flow.remote
    def catches():
        try:
            flow.get(raises.remote(lambda: NeedsKeyword(code=5)))
        except NeedsKeyword as error:
            return error.code, error

    code, error = flow.get(catches.remote(), timeout=20)
    assert code == 5
    assert isinstance(error, NeedsKeyword)


@pytest.mark.parametrize("form", [True, (OSError, ValueError), [ValueError], ValueError, (ArithmeticError, ValueError)])
def test_forms_of_retry_exceptions(form, tmp_path):
    ref = flow.remote(retry_exceptions=form)(third_time_lucky).remote(str(tmp_path))
    assert flow.get(ref, timeout=20) == 2


@pytest.mark.parametrize(
    "options", [{}, {"retry_exceptions": (KeyError,)}, {"retry_exceptions": True, "max_retries": 1}]
)
def test_no_retry_of_other_exceptions_nor_beyond_the_limit(options, tmp_path):
    ref = flow.remote(**options)(third_time_lucky).remote(str(tmp_path))
    assert isinstance(raised(ref), ValueError)


def third_time_lucky(folder):
    tries = len(os.listdir(folder))
    open(f"{folder}/{tries}", "w").close()
    if tries < 2:
        raise ValueError(tries)
    return tries


@pytest.mark.parametrize("bad", [5, None, [5], "x", {"a": 1}])
def test_get_of_what_is_no_ref(bad):
    with pytest.raises(TypeError):
        flow.get(bad)


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1", True])
def test_get_with_what_is_no_timeout(timeout):
    with pytest.raises((TypeError, ValueError)):
        flow.get(same.remote(1), timeout=timeout)


def test_value_nested_too_deeply_is_refused_and_harms_nobody():
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(flow.SerializationError):
        flow.put(value)
    with pytest.raises(flow.SerializationError):
        same.remote(value)
    while value:  # freeing it at once would need as deep a recursion
        value = value.pop()
    assert flow.get(same.remote(1), timeout=10) == 1


def test_crash_tells_how_and_what_was_printed_last():
    @flow.remote(max_retries=0)
    def dies():
        print("these were its last words", file=sys.stderr)
        os.abort()

    with pytest.raises(flow.WorkerCrashed, match="SIGABRT") as caught:
        flow.get(dies.remote(), timeout=20)
    assert "these were its last words" in str(caught.value)
