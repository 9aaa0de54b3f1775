"""What recovers on a live engine: interrupted waits, streams, references to the dead, a node and an engine that end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import flowengine as flow
from flowengine import api
from flowengine.refs import current_session
from tests.cluster.kit import python, two_workers, until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("engine")]
engine = pytest.fixture(scope="module")(
    lambda: (yield from two_workers(config={"suspect_after_s": 2, "link_lost_after_s": 2}))
)
LARGE = 20_000  # numbers: too many for a message


@flow.remote
def plus(x, y=1):
    return x + y


@flow.remote
def large(i):
    return np.full(LARGE, i)


@flow.remote(num_returns="stream")
def counted(count):
    for i in range(count):
        yield np.full(LARGE, i)


def stored():
    return flow.stats()["objects_stored"]


def all_blocked(make):
    """Run as many parents as there are slots; none can end unless its wait gives the slot away."""
    return flow.get([make.remote(i) for i in range(2)], timeout=30)


# --- waits and interrupts ---------------------------------------------------------------------------------------------


def test_a_task_may_await_on_a_loop_of_its_own():
    @flow.remote
    def parent(i):
        async def main():
            return await plus.remote(i)

        return asyncio.run(main())

    assert all_blocked(parent) == [1, 2]


def test_threads_of_a_task_may_wait():
    @flow.remote
    def parent(i):
        with ThreadPoolExecutor(3) as threads:
            return sum(threads.map(lambda k: flow.get(plus.remote(k)), range(3)))

    assert all_blocked(parent) == [6, 6]


def test_a_cancel_that_comes_while_a_task_begins_is_not_lost():
    @flow.remote
    def endless():
        while True:
            pass

    for step in range(20):
        ref = endless.remote()
        time.sleep(step * 0.0002)  # over all moments of a push
        flow.cancel(ref)
        with pytest.raises(flow.TaskCancelled):
            flow.get(ref, timeout=5)


def test_a_forced_cancel_hurts_no_other_task():
    @flow.remote(max_retries=0)
    def brief(i):
        time.sleep(0.001)
        return i

    refs = [brief.remote(i) for i in range(60)]
    for ref in refs[1::2]:
        flow.cancel(ref, force=True)
    assert flow.get(refs[::2], timeout=30) == list(range(0, 60, 2))


def test_interrupted_puts_leave_nothing():
    @flow.remote
    def puts():
        while True:
            assert [flow.put(np.zeros(LARGE)) for _ in range(5)]

    for step in range(8):
        ref = puts.remote()
        time.sleep(0.02 + step * 0.004)
        flow.cancel(ref)
        with pytest.raises(flow.TaskCancelled):
            flow.get(ref, timeout=10)
    until(lambda: stored() == 0)


def test_results_of_which_one_cannot_be_kept_leave_nothing():
    @flow.remote(num_returns=2)
    def pair():
        return [flow.put(np.zeros(LARGE)), np.zeros(LARGE)], threading.Lock()

    first, second = pair.remote()
    with pytest.raises(flow.SerializationError):
        flow.get(first, timeout=10)
    del first, second
    until(lambda: stored() == 0)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_lost_item_of_a_long_stream_comes_back():
    refs = list(counted.remote(100))
    flow.chaos.lose(refs[80])
    assert flow.get(refs[80], timeout=20)[0] == 80


def test_a_lost_item_of_a_stream_that_waits_for_its_reader_comes_back():
    stream = counted.remote(200)
    refs = [next(stream) for _ in range(10)]
    until(lambda: stored() >= 70)  # it waits
    flow.chaos.lose(refs[3])
    assert flow.get(refs[3], timeout=20)[0] == 3
    assert [flow.get(ref, timeout=20)[0] for ref in stream] == list(range(10, 200))


# --- references to the dead -------------------------------------------------------------------------------------------


def test_references_passed_up_by_parents_survive_the_workers_that_made_them():
    @flow.remote(max_retries=-1)
    def tree(depth, i):
        if depth == 0:
            time.sleep(0.02)
            return [flow.put(np.full(LARGE, i))]
        return [ref for pair in flow.get([tree.remote(depth - 1, 2 * i + k) for k in (0, 1)]) for ref in pair]

    with flow.chaos.plan(seed=3, kill_worker_every_s=0.15):
        for _ in range(5):
            found = flow.get(tree.remote(3, 1), timeout=40)
            assert [flow.get(ref, timeout=40)[0] for ref in found] == list(range(8, 16))


# --- a node and an engine that end ------------------------------------------------------------------------------------


def test_what_is_put_and_read_while_the_node_is_started_again():
    ended = threading.Event()
    errors = []

    def put_and_get():
        while not ended.is_set():
            try:
                flow.get(flow.put(np.zeros(LARGE)), timeout=20)
            except flow.ObjectLost:
                continue  # it was there already when its only copy went
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=put_and_get) for _ in range(2)]
    refs = [large.remote(i) for i in range(100)]
    flow.get(refs, timeout=30)
    for thread in threads:
        thread.start()
    before = flow.nodes()[0].node_id
    flow.chaos.kill_node(before)
    assert [value[0] for value in flow.get(refs, timeout=40)] == list(range(100))
    until(lambda: any(info.node_id != before for info in flow.nodes()))
    ended.set()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)


ENDS = """
import os, signal, threading, numpy, psutil, flowengine as flow
flow.init(1, state_dir={folder!r})
[launcher] = psutil.Process().children()
@flow.remote
def endless():
    while True: pass
ref = endless.remote()
future = ref.future()
threading.Timer(0.3, launcher.kill).start()
for wait in (lambda: flow.get(ref), lambda: future.result(20), lambda: flow.put(numpy.zeros(50_000))):
    try:
        wait()
    except flow.HeadLost as error:
        print("HeadLost")
"""


def test_an_engine_that_is_killed_ends_all_waits(tmp_path):
    done = python("-c", ENDS.format(folder=str(tmp_path)))
    assert done.stdout.split() == ["HeadLost"] * 3, done.stderr


def test_a_state_directory_of_no_use_is_refused_at_once_and_one_that_was_used_is_clean(tmp_path):
    file = tmp_path / "file"
    file.touch()
    code = "import sys, flowengine as flow\nwith flow.init(1, state_dir=sys.argv[1]): pass"
    refused = python("-c", code, str(file / "below"))
    assert "cannot be used" in refused.stderr
    assert python("-c", code, str(tmp_path / "state")).returncode == 0
    assert [path for path in (tmp_path / "state").rglob("*") if path.is_file()] == []


def test_shared_memory_of_no_use_is_refused_at_once(tmp_path, monkeypatch):
    for root, told in ((tmp_path / "missing", "No such file"), (tmp_path / "file", "Not a directory")):
        (tmp_path / "file").touch()
        monkeypatch.setattr(api, "STORE_ROOT", str(root))
        with pytest.raises(flow.BadValue, match=rf"{root}.*cannot be used.*{told}"):
            api.store_bytes(1 << 20)


def test_memory_that_was_granted_and_taken_by_others_is_asked_for_again(monkeypatch):
    segments = current_session().values.segments
    create, full = segments.create, [flow.StoreFull("taken")]

    def taken_once(*arguments):
        if full:
            raise full.pop()
        return create(*arguments)

    monkeypatch.setattr(segments, "create", taken_once)
    assert flow.get(flow.put(np.ones(LARGE))).sum() == LARGE
    full += [flow.StoreFull("taken"), flow.StoreFull("taken again")]
    with pytest.raises(flow.StoreFull, match=r"taken$"):
        flow.put(np.ones(LARGE))
    assert full == []


def test_a_disk_that_does_not_take_a_durable_value(tmp_path):
    code = """
import resource, sys
import flowengine as flow
with flow.init(1, state_dir=sys.argv[1]):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        flow.put(bytes(1_000_000), durable=True)
    except flow.OutOfDisk as error:
        print(error.needed_bytes >= 1_000_000, sys.argv[1] in error.path, sys.argv[1] in str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    print(len(flow.get(flow.put(bytes(1_000_000), durable=True))))
"""
    done = python("-c", code, str(tmp_path / "state"))
    assert done.stdout.splitlines() == ["True True True", "1000000"], done.stderr


def test_code_that_never_lets_go_of_the_interpreter_has_a_time_limit_too():
    @flow.remote(timeout_s=0.2)
    def holds():
        sum(range(10**12))

    with pytest.raises(flow.TaskTimeout):
        flow.get(holds.remote(), timeout=20)


def test_code_that_keeps_the_interpreter_for_longer_than_links_are_silent_goes_on():
    @flow.remote(max_retries=0)
    def holds():
        began = time.monotonic()
        found = -1
        while time.monotonic() - began < 5:  # each sum is one call in C
            found = sum(range(1 << 28))
        return found

    assert flow.get(holds.remote(), timeout=80) == (1 << 27) * ((1 << 28) - 1)


def test_what_is_recorded_takes_no_place_of_what_a_new_run_finds():
    @flow.remote
    def double(number):
        return 2 * number

    @flow.remote
    class Adder:
        def add(self, number):
            return number + 100

    def refused(function):
        try:
            return flow.record(function)
        except flow.BadValue as error:
            return "cannot submit" in str(error)

    def looks(limit, jobs, adder):
        tried = [refused(function) for function in (lambda: double.remote(1), lambda: adder.add.remote(1), jobs.get,
                                                    lambda: jobs.put(1), lambda: flow.put(1), flow.rng)]
        seen = flow.record(lambda: flow.record(limit.get))
        return tried, seen, jobs.get(), flow.get(double.remote(4)), flow.get(adder.add.remote(4))

    @flow.remote
    def dies_once(limit, jobs, adder):
        found = looks(limit, jobs, adder)
        if flow.context().attempt == 1:
            limit.set("late")
            flow.commit()
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    @flow.remote
    class Looker:
        def __init__(self):
            self.found = None

        def look(self, limit, jobs, adder):
            self.found = looks(limit, jobs, adder)

        def get(self):
            return self.found

    limit, jobs, adder = flow.Variable(), flow.Queue(), Adder.remote()
    limit.set("early")
    jobs.put_many(["first", "second", "third"])
    expected = ([True] * 6, "early", "first", 8, 104)
    ref = dies_once.remote(limit, jobs, adder)
    assert flow.get(ref) == expected
    assert flow.replay(ref, debug=False) == expected
    looker = Looker.options(checkpoint="never").remote()
    flow.get(looker.look.remote(limit, jobs, adder))
    limit.set("later")
    flow.chaos.kill_worker(of=looker)
    assert flow.get(looker.get.remote()) == ([True] * 6, "late", "second", 8, 104)
    assert jobs.get() == "third"
