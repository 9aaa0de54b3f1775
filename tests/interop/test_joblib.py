"""flow.joblib(): joblib's Parallel on the engine."""
from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import flowengine as flow
from flowengine.errors import BadType, BadValue, SerializationError
from tests.cluster.kit import two_workers
from tests.runtime.kit import PROJECT

joblib = pytest.importorskip("joblib")
Parallel, delayed = joblib.Parallel, joblib.delayed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(60)]
SQUARES = [i * i for i in range(30)]


@pytest.fixture(scope="module", autouse=True)
def engine():
    for session in two_workers():
        with flow.joblib():
            yield session


def square(x):
    return x * x


def odd_only(x):
    if x == 4:
        raise KeyError(x)
    return x


def squares(**options):
    return Parallel(**options)(delayed(square)(i) for i in range(30))


def test_results_come_in_order_however_they_are_asked_for():
    assert squares() == squares(n_jobs=2) == squares(batch_size=7) == squares(pre_dispatch="all") == SQUARES
    assert list(squares(return_as="generator")) == SQUARES
    assert sorted(squares(return_as="generator_unordered")) == SQUARES
    assert squares(n_jobs=1) == SQUARES
    captured = 3
    assert Parallel()(delayed(lambda x: x + captured)(i) for i in range(3)) == [3, 4, 5]


def test_the_number_of_jobs_is_that_of_the_cluster():
    assert joblib.effective_n_jobs() == joblib.effective_n_jobs(-1) == 2
    assert joblib.effective_n_jobs(-2) == 1
    with pytest.raises(ValueError, match="n_jobs == 0"):
        squares(n_jobs=0)
    pids = Parallel()(delayed(os.getpid)() for _ in range(4))
    assert os.getpid() not in pids


def test_an_error_ends_the_rest_and_the_next_call_is_clean():
    with Parallel(n_jobs=2) as parallel:
        for _ in range(3):
            with pytest.raises(KeyError):
                parallel(delayed(odd_only)(i) for i in range(30))
            assert parallel(delayed(square)(i) for i in range(30)) == SQUARES


def test_a_time_limit():
    began = time.monotonic()
    with pytest.raises(multiprocessing.TimeoutError):
        Parallel(timeout=0.2)(delayed(time.sleep)(30) for _ in range(4))
    assert time.monotonic() - began < 20


def test_large_arguments_are_stored_once():
    array = np.arange(1 << 18, dtype=np.float64)
    before = flow.stats()["objects_stored"]
    sums = Parallel(batch_size=1)(delayed(lambda a, i: float(a[i]) + a.sum())(array, i) for i in range(6))
    assert sums == [i + array.sum() for i in range(6)]
    assert flow.stats()["objects_stored"] - before <= 1


@pytest.mark.parametrize("told", [{"max_nbytes": None}, {"mmap_mode": "c"}, {"mmap_mode": None}])
def test_large_arguments_may_be_each_call_s_own(told):
    def change(array, i):
        array[0] += i
        return array[0]

    array = np.zeros(1 << 18)
    assert Parallel(batch_size=1, **told)(delayed(change)(array, i) for i in range(4)) == [0, 1, 2, 3]
    assert array[0] == 0


@pytest.mark.parametrize("rows", [4, 1 << 18])
def test_calls_write_to_memory_maps_that_are_open_for_writing(tmp_path, rows):
    def fill(part, out, i):
        part[:] = out[i, 1] = i + 1

    out = np.memmap(tmp_path / "out", dtype=np.float64, shape=(rows, 2), mode="w+")
    Parallel(batch_size=1)(delayed(fill)(out[i, :1], out=out, i=i) for i in range(4))
    assert out[:4].tolist() == [[i + 1.0] * 2 for i in range(4)]
    read = np.memmap(tmp_path / "out", dtype=np.float64, shape=(rows, 2), mode="r")
    assert Parallel()(delayed(np.sum)(read[:4]) for _ in range(2)) == [20.0, 20.0]


def test_a_parallel_within_a_call():
    def inner(count):
        kind = type(joblib.parallel.get_active_backend()[0]).__name__
        return sum(Parallel(n_jobs=2)(delayed(square)(i) for i in range(count))), kind

    assert Parallel()(delayed(inner)(i) for i in range(3)) == [(n, "ThreadingBackend") for n in (0, 0, 1)]


def test_what_cannot_be_pickled_is_told_by_its_place():
    lock = threading.Lock()
    with pytest.raises(SerializationError, match=r"pickled: argument \[0\] of call 0 of its batch is a _thread.lock"):
        Parallel()(delayed(square)(one) for one in [lock])
    with pytest.raises(SerializationError, match=r"keyword argument \['x'\] of call 0 of its batch"):
        Parallel()(delayed(square)(x=one) for one in [lock])


def test_options_are_those_of_tasks_and_checked():
    with flow.joblib(n_jobs=2, max_retries=0):
        assert squares() == SQUARES
    with pytest.raises(BadValue, match="did you mean 'max_retries'"), flow.joblib(max_retris=1):
        pass
    with pytest.raises(BadType, match="n_jobs"), flow.joblib(n_jobs="all"):
        pass


def test_without_joblib_it_says_what_to_install():
    program = (
        "import sys; sys.modules['joblib'] = None; import flowengine as flow\n"
        "try:\n    flow.joblib().__enter__()\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert "flowengine[joblib]" in done.stdout
