"""flow.Executor: what the standard ones promise, cancelling before the start, initializers, asyncio, use in tasks."""
from __future__ import annotations

import asyncio
import concurrent.futures as cf
import functools
import itertools
import os
import queue
import threading
import time

import numpy as np
import pytest

import flowengine as flow
from flowengine.errors import BadType, BadValue, SerializationError, StaleSession
from tests.cluster.kit import two_workers, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(60)]


@pytest.fixture(scope="module", autouse=True)
def engine():
    yield from two_workers()


def square(x):
    return x * x


def wait_for_file(path):
    while not os.path.exists(path):
        time.sleep(0.005)
    return os.getpid()


def raised(array):
    array += 1
    return array


def test_results_errors_and_arguments_are_those_of_a_call():
    with flow.Executor() as executor:
        assert executor.submit(divmod, 7, 2).result(timeout=20) == (3, 1)
        assert executor.submit(dict, a=1).result(timeout=20) == {"a": 1}
        assert executor.submit(functools.partial(pow, 2), 5).result(timeout=20) == 32
        assert executor.submit(dict(fn=1, self=2).get, "self").result(timeout=20) == 2
        assert executor.submit(square, flow.put(4)).result(timeout=20) == 16
        error = executor.submit(divmod, 1, 0).exception(timeout=20)
        assert isinstance(error, ZeroDivisionError)
        assert "remote traceback" in str(error)
        with pytest.raises(SerializationError, match="lock"):
            executor.submit(square, threading.Lock())
        with pytest.raises(BadType):
            executor.submit(3)
        assert executor.submit(square, 3).result(timeout=20) == 9
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(square, 1)


def test_arguments_and_results_belong_to_their_side():
    small, large = np.zeros(3), np.zeros(1 << 20)
    with flow.Executor() as executor:
        results = list(executor.map(raised, [small, large]))
    assert small.sum() == large.sum() == 0
    for result in results:
        result += 1
        assert (result == 2).all()


def test_what_carries_state_is_sent_as_it_is_at_the_call():
    seen = []

    class Counter:
        def __init__(self):
            self.count = 0

        def read(self):
            return self.count

    counter = Counter()
    with flow.Executor() as executor:
        for count in range(3):
            counter.count = count
            seen.append(executor.submit(counter.read))
    assert [future.result() for future in seen] == [0, 1, 2]


def test_map_keeps_order_cuts_into_chunks_and_has_a_time_limit(tmp_path):
    with flow.Executor() as executor:
        assert list(executor.map(pow, range(50), [2] * 50, chunksize=7)) == [i * i for i in range(50)]
        assert list(executor.map(square, [])) == []
        results = executor.map(wait_for_file, [tmp_path / "go"], timeout=0.1)
        with pytest.raises(cf.TimeoutError):
            next(results)
        (tmp_path / "go").touch()
        with pytest.raises(BadValue, match="chunksize"):
            executor.map(square, [1], chunksize=0)


def test_thousands_of_small_calls():
    with flow.Executor() as executor:
        assert sum(executor.map(square, range(3000))) == sum(i * i for i in range(3000))


@pytest.mark.parametrize("count", [None, 1, 2])
def test_what_has_not_begun_can_be_cancelled_and_what_runs_cannot(tmp_path, count):
    gate = tmp_path / "go"
    with flow.Executor(max_workers=count) as executor:
        blocking = [executor.submit(wait_for_file, gate) for _ in range(count or 2)]
        until(lambda: all(future.running() for future in blocking))
        waiting = [executor.submit(square, number) for number in range(5)]
        told = threading.Event()
        waiting[0].add_done_callback(lambda future: told.set())
        assert all(future.cancel() for future in waiting[:3])
        assert told.wait(20)
        assert cf.wait(waiting[:3], timeout=20).not_done == set()
        assert waiting[0].cancelled()
        with pytest.raises(cf.CancelledError):
            waiting[0].result()
        # A worker that was just given the task may not have begun it, but then it is told so.
        assert not any(future.cancel() for future in blocking if not future.cancelled())
        gate.touch()
        assert [future.result(timeout=20) for future in waiting[3:]] == [9, 16]


def test_max_workers_bounds_what_runs_at_once():
    def span():
        began = time.time()
        time.sleep(0.02)
        return began, time.time()

    with flow.Executor(max_workers=1) as executor:
        spans = sorted(future.result() for future in [executor.submit(span) for _ in range(6)])
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(spans))


def test_quick_calls_are_sent_ahead_where_the_cluster_bounds_them_anyway():
    most = {}
    for count in (1, 2):
        with flow.Executor(max_workers=count) as executor:
            for n, result in enumerate(executor.map(square, range(600))):
                most[count] = max(most.get(count, 0), executor._ahead.size)
                assert result == n * n
    assert most[1] == 0 < most[2]


def test_shutdown_may_cancel_what_waits(tmp_path):
    executor = flow.Executor(max_workers=1)
    running = executor.submit(wait_for_file, tmp_path / "go")
    until(running.running)
    waiting = [executor.submit(square, 1) for _ in range(100)]
    executor.shutdown(wait=False, cancel_futures=True)
    assert all(future.cancelled() for future in waiting)
    (tmp_path / "go").touch()
    executor.shutdown()
    assert running.done()


def test_callbacks_may_shut_the_executor_down():
    executor = flow.Executor(max_workers=2)
    futures = [executor.submit(square, n) for n in range(6)]
    left = queue.SimpleQueue()
    for future in futures:
        future.add_done_callback(lambda future: left.put(executor.shutdown()))
    assert [left.get(timeout=20) for _ in futures] == [None] * 6
    executor.shutdown()
    assert [future.result() for future in futures] == [0, 1, 4, 9, 16, 25]


def test_a_callback_may_wait_for_what_ends_at_the_same_time(tmp_path):
    with flow.Executor(max_workers=2) as executor:
        gates = [executor.submit(wait_for_file, tmp_path / "go") for _ in range(2)]
        futures = [executor.submit(square, n) for n in range(12)]
        left = queue.SimpleQueue()
        for future, later in itertools.pairwise(futures):
            future.add_done_callback(lambda _, later=later: left.put(later.result(timeout=20)))
        (tmp_path / "go").touch()
        assert {left.get(timeout=30) for _ in futures[1:]} == {n * n for n in range(1, 12)}
        assert all(gate.exception(timeout=20) is None for gate in gates)


def test_a_future_that_was_given_a_result_by_others_keeps_it(tmp_path):
    with flow.Executor(max_workers=1) as executor:
        first, second = (executor.submit(wait_for_file, tmp_path / "go") for _ in range(2))
        first.set_result("mine")
        second.set_exception(KeyError("mine"))
        (tmp_path / "go").touch()
        assert executor.submit(square, 3).result(timeout=20) == 9
    assert first.result() == "mine"
    assert isinstance(second.exception(), KeyError)


def test_an_initializer_runs_once_in_each_process_before_its_calls():
    def begin(name):
        os.environ[name] = str(int(os.environ.get(name, 0)) + 1)

    with flow.Executor(initializer=begin, initargs=("INTEROP_BEGUN",)) as executor:
        read = [executor.submit(lambda: os.environ["INTEROP_BEGUN"]) for _ in range(10)]
        assert {future.result(timeout=20) for future in read} == {"1"}
    with pytest.raises(BadType):
        flow.Executor(initializer=3)


def test_a_failing_initializer_breaks_the_executor():
    def fail():
        raise KeyError("no such file")

    with flow.Executor(max_workers=1, initializer=fail) as executor:
        futures = [executor.submit(square, number) for number in range(3)]
        for future in futures:
            with pytest.raises(cf.BrokenExecutor, match="no such file"):
                future.result(timeout=20)
        with pytest.raises(cf.BrokenExecutor):
            executor.submit(square, 1)


async def later(x):
    return x


@pytest.mark.parametrize("fn", [later, functools.partial(later, 1)])
def test_what_only_an_event_loop_runs_is_refused(fn):
    with flow.Executor() as executor, pytest.raises(BadType, match="later is an async function"):
        executor.submit(fn, 1)
    with flow.Pool(2) as pool, pytest.raises(BadType, match="later is an async function"):
        pool.map(fn, [1])
    with flow.Pool(2) as pool, pytest.raises(BadType, match="needs a function, not 5"):
        pool.map(5, [1])


def test_options_are_those_of_tasks_and_checked():
    with pytest.raises(ValueError, match="max_workers must be greater than 0"):
        flow.Executor(0)
    with pytest.raises(BadValue, match="did you mean 'max_retries'"):
        flow.Executor(max_retris=1)
    with pytest.raises(BadValue, match="num_returns"):
        flow.Executor(num_returns=2)
    with flow.Executor(max_retries=0) as executor, pytest.raises(flow.WorkerCrashed):
        executor.submit(os._exit, 1).result(timeout=30)


def test_with_asyncio():
    async def main():
        loop = asyncio.get_running_loop()
        remote = flow.remote(square)
        assert await asyncio.gather(*[remote.remote(number) for number in range(5)]) == [0, 1, 4, 9, 16]
        with flow.Executor() as executor:
            assert await asyncio.gather(*[loop.run_in_executor(executor, square, n) for n in range(3)]) == [0, 1, 4]
            with pytest.raises(ZeroDivisionError):
                await loop.run_in_executor(executor, divmod, 1, 0)
        seen = [await ref async for ref in flow.as_completed([remote.remote(number) for number in range(3)])]
        assert sorted(seen) == [0, 1, 4]
        slow = flow.remote(time.sleep).remote(60)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(slow, 0.05)
        flow.cancel(slow)
        with pytest.raises(flow.TaskCancelled):
            await slow

    asyncio.run(main())


def test_in_tasks_and_in_actors():
    @flow.remote
    def outer(count):
        with flow.Executor() as executor:
            return sum(executor.map(square, range(count)))

    @flow.remote
    class Holder:
        def __init__(self):
            self.executor = flow.Executor(max_workers=2)

        def outer(self, count):
            return sum(self.executor.map(square, range(count)))

    assert flow.get([outer.remote(count) for count in (3, 4, 5)], timeout=30) == [5, 14, 30]


def test_an_executor_stays_where_it_was_made():
    with flow.Executor() as executor:
        with pytest.raises(SerializationError, match=r"closure variable 'executor' is .*stays where it was made"):
            executor.submit(lambda: executor.submit(square, 2))
        with pytest.raises(SerializationError, match="stays where it was made"):
            flow.put([executor])


def test_the_end_of_the_session_is_told_and_the_next_one_is_another():
    flow.shutdown()
    try:
        with flow.init(num_workers=1):
            executor = flow.Executor(max_workers=1)
            unused, pool = flow.Executor(), flow.Pool(2)
            futures = [executor.submit(time.sleep, 60) for _ in range(3)]
        for future in futures:
            with pytest.raises(StaleSession):
                future.result(timeout=20)
        for stale in (executor.submit, unused.submit, pool.apply_async, lambda *call: pool.map(square, [1])):
            with pytest.raises(StaleSession, match="its session has ended: make it anew"):
                stale(square, (5,))
        assert flow.refs.Current.session is None
        early = flow.Executor()
    finally:
        flow.init(num_workers=2)
    with pytest.raises(StaleSession):
        executor.submit(square, 5)
    assert early.submit(square, 5).result(timeout=20) == 25
    executor.shutdown()
