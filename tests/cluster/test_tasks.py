"""Tasks on a live engine: graphs that grow, many of them, slots and resources, cancelling, forks, signals."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import flowengine as flow
from tests.cluster.kit import gone, overlap, two_workers, until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("engine")]
engine = pytest.fixture(scope="module")(lambda: (yield from two_workers(resources={"licence": 2, "half": 0.5})))


@flow.remote
def add(x, y=0):
    return x + y


@flow.remote
def span(length_s):
    began = time.monotonic()
    time.sleep(length_s)
    return began, time.monotonic()


# --- graphs that grow ---------------------------------------------------------------------------------


def test_tree_deeper_than_there_are_slots():
    @flow.remote
    def tree(depth):
        return 1 if depth == 0 else sum(flow.get([tree.remote(depth - 1), tree.remote(depth - 1)]))

    @flow.remote
    def chain(depth):
        return 0 if depth == 0 else 1 + flow.get(chain.remote(depth - 1))

    assert flow.get(tree.remote(5), timeout=30) == 32
    assert flow.get(chain.remote(12), timeout=30) == 12


def test_functions_that_call_each_other():
    @flow.remote
    def even(n):
        return n == 0 or flow.get(odd.remote(n - 1))

    @flow.remote
    def odd(n):
        return n != 0 and flow.get(even.remote(n - 1))

    assert flow.get(even.remote(6), timeout=20) is True


def test_remote_function_as_an_argument():
    @flow.remote
    def apply(function, x):
        return flow.get(function.remote(x))

    assert flow.get(apply.remote(add, 3), timeout=10) == 3


def test_chain_of_thousands():
    ref = add.remote(0)
    for _ in range(2_000):
        ref = add.remote(ref, 1)
    assert flow.get(ref, timeout=30) == 2_000


def test_as_completed_over_thousands_gives_each_once():
    refs = [add.remote(i) for i in range(3_000)]
    seen = list(flow.as_completed(refs, timeout=30))
    assert len(seen) == len(refs)
    assert set(seen) == set(refs)


def test_work_queue_that_submits_as_it_waits():
    running = {add.remote(number): number for number in range(8)}
    submitted, done = len(running), 0
    while running:
        ready, _ = flow.wait(list(running), timeout=30)
        assert ready
        for ref in ready:
            assert flow.get(ref) == running.pop(ref)
            done += 1
            if submitted < 500:
                running[add.remote(submitted)] = submitted
                submitted += 1
    assert done == 500


def test_thousands_of_arguments_and_hundreds_of_returns():
    @flow.remote
    def total(*numbers):
        return sum(numbers)

    @flow.remote(num_returns=300)
    def many():
        return range(300)

    assert flow.get(total.remote(*[add.remote(i) for i in range(1_000)]), timeout=30) == sum(range(1_000))
    assert flow.get(many.remote(), timeout=10) == list(range(300))


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (operator.add, (1, 2), 3),
        (functools.partial(operator.add, 5), (2,), 7),
        (len, ([1],), 1),
        (np.sum, (np.ones(3),), 3.0),
        (operator.methodcaller("upper"), ("a",), "A"),
    ],
)
def test_anything_callable(function, arguments, expected):
    assert flow.get(flow.remote(function).remote(*arguments), timeout=10) == expected


def test_arguments_may_have_any_name():
    @flow.remote
    def named(self=None, function=None, args=None, kwargs=None, **rest):
        return self, function, args, kwargs, rest

    ref = named.remote(self=1, function=2, args=3, kwargs=add.remote(4), name=5)
    assert flow.get(ref, timeout=10) == (1, 2, 3, 4, {"name": 5})


# --- streams ------------------------------------------------------------------------------------------


def test_stream_longer_than_its_window_and_of_large_items():
    @flow.remote(num_returns="stream")
    def numbers(count, width):
        for number in range(count):
            yield np.full(width, number) if width else number

    assert [flow.get(ref) for ref in numbers.remote(300, 0)] == list(range(300))
    assert [int(flow.get(ref)[0]) for ref in numbers.remote(10, 100_000)] == list(range(10))


def test_stream_of_what_is_no_iterator_is_an_error():
    @flow.remote(num_returns="stream")
    def wrong():
        return 5

    with pytest.raises(TypeError):
        list(wrong.remote())


def test_endless_stream_ends_when_nobody_reads_it():
    @flow.remote(num_returns="stream")
    def endless():
        yield os.getpid()
        while True:
            yield 0

    stream = endless.remote()
    assert flow.get(next(stream), timeout=10) > 0
    del stream
    until(lambda: flow.available_resources()["CPU"] == 2)


def test_stream_in_asyncio_and_its_error():
    @flow.remote(num_returns="stream")
    def numbers(bad):
        yield 1
        yield 2
        if bad:
            raise KeyError("three")

    async def read(bad):
        return [await ref async for ref in numbers.remote(bad)]

    assert asyncio.run(read(False)) == [1, 2]
    with pytest.raises(KeyError):
        asyncio.run(read(True))


def test_stream_cannot_be_an_argument_and_says_what_can():
    stream = flow.remote(num_returns="stream")(lambda: iter([1])).remote()
    with pytest.raises(flow.SerializationError, match="pass the references"):
        add.remote(stream)
    assert flow.get(next(stream), timeout=10) == 1


# --- asyncio ------------------------------------------------------------------------------------------


def test_a_thousand_awaits_at_once():
    async def one(number):
        return await add.remote(await add.remote(number, 1), 1)

    async def all_of_them():
        return await asyncio.gather(*[one(number) for number in range(1_000)])

    assert asyncio.run(all_of_them()) == [number + 2 for number in range(1_000)]


def test_one_ref_awaited_by_many_and_past_a_time_limit(tmp_path):
    @flow.remote
    def until_told(folder):
        until((Path(folder) / "go").exists)
        return 3

    async def main():
        ref = until_told.remote(str(tmp_path))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ref, 0.05)
        (tmp_path / "go").touch()
        return await asyncio.gather(ref, ref, add.remote(ref))

    assert asyncio.run(main()) == [3, 3, 3]


def test_asyncio_inside_of_a_task_and_get_inside_of_asyncio():
    @flow.remote
    def gathers():
        async def main():
            return sum(await asyncio.gather(*[add.remote(number) for number in range(20)]))

        return asyncio.run(main())

    async def blocks():
        return flow.get(add.remote(2), timeout=10)

    assert flow.get(gathers.remote(), timeout=20) == 190
    assert asyncio.run(blocks()) == 2


def test_callbacks_of_futures_may_use_the_engine():
    told = queue.SimpleQueue()

    def again(future):
        told.put(flow.get(add.remote(future.result(), 1), timeout=20))

    for number in range(50):  # more than there are threads for them
        add.remote(number).future().add_done_callback(again)
    assert sorted(told.get(timeout=30) for _ in range(50)) == list(range(1, 51))


class Loads:
    """Asks the engine while it is unpickled."""

    def __init__(self, ref):
        self.ref = ref

    def __reduce__(self):
        return flow.get, (self.ref,)


def test_values_that_use_the_engine_while_they_are_unpickled():
    @flow.remote
    def lazy():
        return Loads(add.remote(2, 3))

    async def main():
        return await lazy.remote()

    assert lazy.remote().future().result(timeout=20) == 5
    assert asyncio.run(main()) == 5


# --- time limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [float("inf"), 1e10])
def test_limits_beyond_any_clock_mean_none(timeout):
    ref = span.remote(0.05)
    assert flow.wait([ref], timeout=timeout)[0] == [ref]
    assert len(flow.get(span.remote(0.05), timeout=timeout)) == 2
    assert len(list(flow.as_completed([span.remote(0.05)], timeout=timeout))) == 1


def test_get_with_a_limit_inside_of_a_task():
    @flow.remote
    def impatient():
        ref = span.remote(20)
        try:
            flow.get(ref, timeout=0.1)
        except flow.GetTimeout:
            flow.cancel(ref)
            return "gave up"

    assert flow.get(impatient.remote(), timeout=10) == "gave up"


def test_time_limit_holds_after_a_task_ignored_the_signals():
    @flow.remote
    def deaf():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    flow.get([deaf.remote() for _ in range(4)], timeout=10)
    with pytest.raises(flow.TaskTimeout):
        flow.get(span.options(timeout_s=0.2).remote(20), timeout=15)


# --- slots and resources ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"num_cpus": 2}, 1),
        ({"num_cpus": 0, "resources": {"licence": 1}}, 2),
        ({"num_cpus": 0, "resources": {"half": 0.5}}, 1),
    ],
)
def test_no_more_at_once_than_the_resources_allow(options, most):
    spans = flow.get([span.options(**options).remote(0.03) for _ in range(5)], timeout=30)
    assert overlap(spans) <= most


def test_memory_is_a_resource():
    most_of_it = int(flow.cluster_resources()["memory"] * 0.6)
    spans = flow.get([span.options(memory_bytes=most_of_it).remote(0.03) for _ in range(3)], timeout=30)
    assert overlap(spans) == 1


def test_tasks_of_no_cpu_run_beside_busy_ones(tmp_path):
    @flow.remote(num_cpus=0)
    def tell(folder):
        (Path(folder) / "go").touch()

    @flow.remote(num_cpus=2)
    def listen(folder):
        until((Path(folder) / "go").exists)
        return "heard"

    ref = listen.remote(str(tmp_path))
    until(lambda: flow.available_resources().get("CPU", 0) == 0)
    flow.get(tell.remote(str(tmp_path)), timeout=20)
    assert flow.get(ref, timeout=20) == "heard"


def test_more_than_there_is_waits_says_so_and_can_be_cancelled():
    ref = span.options(num_cpus=3).remote(0)
    with pytest.raises(flow.GetTimeout, match="CPU: 3"):
        flow.get(ref, timeout=0.3)
    flow.cancel(ref)
    with pytest.raises(flow.TaskCancelled):
        flow.get(ref, timeout=10)


def test_larger_priority_goes_first(tmp_path):
    @flow.remote(num_cpus=2)
    def hold(folder):
        until((Path(folder) / "go").exists)

    @flow.remote(num_cpus=2)
    def when():
        return time.monotonic()

    holder = hold.remote(str(tmp_path))
    until(lambda: flow.available_resources().get("CPU", 0) == 0)
    first = when.remote()  # may have been sent ahead to the worker that is to run it next
    priorities = (0, 5, 1, 9, -3)
    refs = [when.options(priority=priority).remote() for priority in priorities]
    (tmp_path / "go").touch()
    times = flow.get(refs, timeout=20)
    assert [priority for _, priority in sorted(zip(times, priorities, strict=True))] == [9, 5, 1, 0, -3]
    flow.get([holder, first])


# --- cancelling ---------------------------------------------------------------------------------------


def test_cancelling_a_tree_reaches_its_leaves(tmp_path):
    @flow.remote
    def leaf(folder):
        mark = Path(folder) / str(time.monotonic_ns())
        mark.with_suffix(".began").touch()
        try:
            time.sleep(60)
        except flow.TaskCancelled:
            mark.with_suffix(".ended").touch()
            raise

    @flow.remote
    def branch(folder):
        return flow.get([leaf.remote(folder) for _ in range(2)])

    @flow.remote
    def root(folder):
        return flow.get([branch.remote(folder) for _ in range(2)])

    def count(kind):
        return len(list(tmp_path.glob(f"*.{kind}")))

    ref = root.remote(str(tmp_path))
    until(lambda: count("began"))
    flow.cancel(ref)
    with pytest.raises(flow.TaskCancelled):
        flow.get(ref, timeout=20)
    until(lambda: count("began") == count("ended"))
    until(lambda: flow.available_resources()["CPU"] == 2)


def test_a_generator_that_was_not_asked_for_as_a_stream_says_how_it_can_be():
    @flow.remote
    def numbers():
        yield 1

    with pytest.raises(flow.SerializationError, match=r'numbers gave a generator.*num_returns="stream"'):
        flow.get(numbers.remote(), timeout=20)


def test_waits_say_what_is_wrong_with_what_they_were_given():
    ref = add.remote(1)
    with pytest.raises(TypeError, match=r"a list of ObjectRefs, not ObjectRef\(.*\) alone"):
        flow.wait(ref)
    with pytest.raises(ValueError, match="num_returns, of 0 refs, must be a whole number from 0 to 0"):
        flow.wait([])


# --- processes and threads of user code -----------------------------------------------------------------


def test_process_pool_inside_of_a_task():
    @flow.remote
    def pool():
        from multiprocessing import get_context

        with get_context("fork").Pool(2) as pool:
            return pool.map(abs, range(-4, 0))

    assert flow.get(pool.remote(), timeout=30) == [4, 3, 2, 1]


def test_processes_of_a_task_end_with_a_worker_that_is_killed(tmp_path):
    @flow.remote(max_retries=0)
    def pool(folder):
        from multiprocessing import get_context

        with get_context("fork").Pool(2) as pool:
            part = Path(folder) / "part"
            part.write_text(" ".join(str(process.pid) for process in pool._pool))
            part.rename(Path(folder) / "pids")
            time.sleep(60)

    ref = pool.remote(str(tmp_path))
    until((tmp_path / "pids").exists)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    flow.chaos.kill_worker(of=ref)
    with pytest.raises(flow.WorkerCrashed):
        flow.get(ref, timeout=20)
    until(lambda: all(gone(pid) for pid in pids))


@pytest.mark.parametrize(("how", "status"), [("exit", 3), ("raise", 1), ("return", 0)])
def test_forked_child_does_not_answer_for_its_task(how, status):
    @flow.remote(max_retries=0)
    def forks():
        pid = os.fork()
        if pid == 0:
            if how == "exit":
                sys.exit(3)
            if how == "raise":
                raise ValueError("in the child")
            return "from the child"
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert flow.get(forks.remote(), timeout=20) == status
    assert flow.get([add.remote(number) for number in range(50)], timeout=20) == list(range(50))


@pytest.mark.parametrize("starts", ["fork", "program"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_end_what_a_task_has_started(starts, number):
    @flow.remote
    def start():
        reader, writer = os.pipe()
        if starts == "program":
            os.set_inheritable(writer, True)
            code = f"import os, signal; os.write({writer}, b'!'); signal.pause()"
            child = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
        else:
            child = os.fork()
            if child == 0:
                os.write(writer, b"!")
                signal.pause()
                return 0
        os.read(reader, 1)
        os.kill(child, number)
        return os.waitpid(child, 0)[1]

    assert flow.get(start.remote(), timeout=20)  # not pending for ever, and not ended well


def test_forked_child_does_not_feed_its_parents_stream():
    @flow.remote(num_returns="stream")
    def forks():
        pid = os.fork()
        if pid == 0:
            yield "from the child"
        yield os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert [flow.get(ref, timeout=20) for ref in forks.remote()] == [0]


def test_eight_threads_of_the_program():
    right = []

    def work(base):
        right.append(all(flow.get(add.remote(base, i), timeout=30) == base + i for i in range(100)))

    threads = [threading.Thread(target=work, args=(base,)) for base in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 8


def test_thread_that_outlives_its_task_harms_nobody():
    @flow.remote
    def leaves_a_thread():
        ended = threading.Event()
        threading.Thread(target=ended.wait, args=(0.2,), daemon=True).start()
        return 1

    assert flow.get([leaves_a_thread.remote() for _ in range(4)], timeout=10) == [1] * 4
    assert flow.get([add.remote(number) for number in range(20)], timeout=10) == list(range(20))


@pytest.mark.parametrize("harm", ["stdout", "environment", "recursion", "clock", "directory"])
def test_worker_works_on_after_a_rude_task(harm):
    @flow.remote
    def rude():
        if harm == "stdout":
            with contextlib.suppress(OSError):  # the second time
                os.close(1)
        elif harm == "environment":
            os.environ.clear()
        elif harm == "recursion":
            sys.setrecursionlimit(60)
        elif harm == "clock":
            time.monotonic = lambda: 0.0
        else:
            os.chdir("/")
        return os.getpid()

    rude_pids = flow.get([rude.remote() for _ in range(4)], timeout=20)
    assert flow.get([add.remote(number) for number in range(20)], timeout=20) == list(range(20))
    for pid in set(rude_pids):  # the next tests get clean ones
        os.kill(pid, signal.SIGKILL)
    until(lambda: all(gone(pid) for pid in rude_pids))
    assert flow.get(add.remote(1), timeout=20) == 1
