"""flow.Pool: what multiprocessing's pool promises; inputs without end."""
from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

import flowengine as flow
from flowengine.errors import BadValue
from tests.cluster.kit import two_workers
from tests.runtime.kit import PROJECT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(60)]


@pytest.fixture(scope="module", autouse=True)
def engine():
    yield from two_workers()


@pytest.fixture
def pool():
    with flow.Pool(2) as made:
        yield made


def square(x):
    return x * x


def add(a, b=10):
    return a + b


def odd_only(x):
    if x % 2 == 0:
        raise KeyError(x)
    return x


def wait_for_file(path):
    while not os.path.exists(path):
        time.sleep(0.005)


def test_maps(pool):
    squares = [i * i for i in range(20)]
    assert pool.map(square, range(20)) == squares
    assert pool.map(square, iter(range(20)), chunksize=3) == squares
    assert pool.map(square, []) == []
    assert pool.starmap(add, [(1, 2), (3, 4), [5]]) == [3, 7, 15]
    assert list(pool.imap(square, range(20), chunksize=6)) == squares
    assert sorted(pool.imap_unordered(square, range(20))) == squares
    with pytest.raises(BadValue, match="chunksize"):
        pool.map(square, [1], chunksize=0)


def test_calls_and_their_results(pool, tmp_path):
    assert pool.apply(add, (1,), {"b": 2}) == 3
    told, both = [], threading.Event()
    good = pool.apply_async(add, (1,), callback=told.append, error_callback=lambda error: both.set())
    assert good.get(20) == 11
    assert good.ready()
    assert good.successful()
    bad = pool.map_async(odd_only, [1, 2, 3], error_callback=lambda error: (told.append(error), both.set()))
    with pytest.raises(KeyError):
        bad.get(20)
    assert both.wait(20)
    assert not bad.successful()
    assert told[0] == 11
    assert isinstance(told[1], KeyError)
    slow = pool.apply_async(wait_for_file, (tmp_path / "go",))
    with pytest.raises(multiprocessing.TimeoutError):
        slow.get(0.05)
    with pytest.raises(ValueError, match="not ready"):
        slow.successful()
    slow.wait(0.01)
    (tmp_path / "go").touch()
    assert slow.get(20) is None


def test_an_input_may_be_endless_or_raise(pool, tmp_path):
    assert list(itertools.islice(pool.imap(square, itertools.count()), 5)) == [0, 1, 4, 9, 16]

    def breaks():
        yield 3
        raise OSError("input")

    results = pool.imap(square, breaks())
    assert next(results) == 9
    with pytest.raises(OSError, match="input"):
        next(results)
    assert list(results) == []
    errors = pool.imap(odd_only, range(1, 4))
    assert next(errors) == 1
    with pytest.raises(KeyError):
        next(errors)
    assert next(errors) == 3
    for waits in (pool.imap(wait_for_file, [tmp_path / "go"]), pool.imap_unordered(wait_for_file, [tmp_path / "go"])):
        with pytest.raises(multiprocessing.TimeoutError):
            waits.next(timeout=0.02)
    (tmp_path / "go").touch()


def test_closing_finishes_what_was_asked_for():
    pool = flow.Pool(2)
    many, few = pool.imap(square, range(1500)), pool.map_async(square, range(10))
    with pytest.raises(ValueError, match="still running"):
        pool.join()
    pool.close()
    pool.join()
    assert few.ready()
    assert sum(many) == sum(i * i for i in range(1500))
    for call in (pool.map, pool.imap, pool.apply_async):
        with pytest.raises(ValueError, match="not running"):
            call(square, [1])


def test_an_input_may_wait_for_the_results_of_what_it_gave_before(pool):
    for imap in (pool.imap, pool.imap_unordered):
        told = queue.SimpleQueue()

        def steps(told=told):
            yield 2
            for _ in range(3):
                yield told.get(timeout=20)

        seen = []
        for result in imap(square, steps()):
            seen.append(result)
            told.put(result)
        assert seen == [4, 16, 256, 65536]


def test_closing_runs_an_input_that_nobody_reads(tmp_path):
    pool = flow.Pool(2)
    pool.imap_unordered(os.mkdir, (tmp_path / str(n) for n in range(1_200)))
    pool.close()
    pool.join()
    assert len(list(tmp_path.iterdir())) == 1_200


def test_closing_returns_though_an_input_is_endless():
    pool = flow.Pool(2)
    results = pool.imap(square, itertools.count())
    assert next(results) == 0
    pool.close()
    assert next(results) == 1
    pool.terminate()
    pool.join()


def test_several_threads_may_read_one_iterator(pool):
    for imap in (pool.imap, pool.imap_unordered):
        results = imap(square, range(100))
        with ThreadPoolExecutor(4) as readers:
            parts = [reader.result(20) for reader in [readers.submit(list, results) for _ in range(4)]]
        assert sorted(itertools.chain(*parts)) == [n * n for n in range(100)]


def test_terminating_ends_what_runs(tmp_path):
    pool = flow.Pool(2)
    results = pool.map_async(wait_for_file, [tmp_path / "never"] * 5, chunksize=1)
    pool.terminate()
    pool.join()
    with pytest.raises(CancelledError):
        results.get(20)


def test_options_initializers_and_refusals():
    def begin(value):
        os.environ["INTEROP_POOL"] = value

    with flow.Pool(initializer=begin, initargs=("yes",)) as pool:
        assert pool.map(lambda _: os.environ["INTEROP_POOL"], range(4)) == ["yes"] * 4
        with pytest.raises(NotImplementedError):
            pickle.dumps(pool)
    with pytest.raises(BadValue, match="maxtasksperchild"):
        flow.Pool(maxtasksperchild=10)
    with pytest.raises(BadValue, match="processes"):
        flow.Pool(0)


def test_in_a_task():
    def nested(count):
        with flow.Pool(2) as pool:
            return sum(pool.map(square, range(count)))

    with flow.Pool() as pool:
        assert pool.map(nested, [3, 4, 5]) == [5, 14, 30]


WITH_GLOBALS = """
import functools
import flowengine as flow

limit, model, cache = 1, None, {}

def begin(value):
    global model
    model = value
    cache["begun"] = cache.get("begun", 0) + 1

def use(_):
    return model, cache["begun"], limit

def through(_):
    return use(_)[0]

class Adds:
    def __call__(self, x):
        return model + x

    def subtract(self, x):
        return model - x

if __name__ == "__main__":
    with flow.init(num_workers=2), flow.Pool(2, begin, (5,)) as pool:
        assert pool.map(use, range(3)) == [(5, 1, 1)] * 3
        limit = 2
        assert list(pool.imap(use, [0])) == [(5, 1, 2)]
        assert pool.map(functools.partial(through), range(3)) == [5] * 3
        assert pool.map(Adds(), [1]) + pool.map(Adds().subtract, [1]) == [6, 4]
        assert pool.apply(lambda: model) == 5
        with flow.Executor(initializer=begin, initargs=(7,)) as executor:
            assert set(executor.map(use, range(4), chunksize=2)) == {(7, 1, 2)}
        assert pool.apply(through, (0,)) == 5
"""


def test_the_functions_of_a_script_see_what_its_initializer_has_made(tmp_path):
    (tmp_path / "program.py").write_text(WITH_GLOBALS)
    done = subprocess.run([sys.executable, tmp_path / "program.py"], cwd=PROJECT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(PROJECT)}, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
