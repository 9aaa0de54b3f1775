"""Waits that last tell why, once in a while."""
from __future__ import annotations

import threading

import pytest

import flowengine as flow
from tests.cluster.kit import until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def session():
    with flow.init(num_workers=2, config={"wait_warn_s": 0.2}) as found:
        yield found


@pytest.fixture
def told(caplog):
    return lambda: [record.getMessage() for record in caplog.records if record.name == "flowengine.waits"]


@flow.remote(num_gpus=1)
def impossible():
    return 1


@flow.remote
def same(value):
    return value


@flow.remote
def hold(lock, began, go_on):
    with lock:
        began.set()
        go_on.wait()


def test_a_task_that_no_node_can_run(told):
    refs = [same.remote(same.remote(impossible.remote())) for _ in range(3)]
    with pytest.raises(flow.GetTimeout):
        flow.get(refs, timeout=3)
    assert "and 2 more same needs impossible: waits for no node has GPU: 1" in told()[0]
    assert 2 <= len(told()) <= 3  # doubling, from the first second on


def test_a_wait_tells_too(told):
    ref = impossible.remote()
    assert flow.wait([ref], timeout=1.6) == ([], [ref])
    assert "no node has GPU" in told()[0]


def test_a_lock_and_who_holds_it(told):
    lock, began, go_on = flow.Lock("told"), flow.Event(), flow.Event()
    ref = hold.remote(lock, began, go_on)
    began.wait()
    assert not lock.acquire(timeout=1.6)
    assert "lock 'told', which hold " in told()[0]
    go_on.set()
    flow.get(ref)


def test_a_task_that_waits_for_a_lock(told):
    lock, began, go_on = flow.Lock("asked"), flow.Event(), flow.Event()
    with lock:
        ref = hold.remote(lock, began, go_on)
        with pytest.raises(flow.GetTimeout):
            flow.get(ref, timeout=1.6)
    assert "it waits for lock 'asked', which the program holds" in told()[-1]
    go_on.set()
    flow.get(ref)


def test_many_that_wait_do_not_flood(told):
    refs = [impossible.remote() for _ in range(30)]
    threads = [threading.Thread(target=flow.wait, args=([ref],), kwargs={"timeout": 1.6}) for ref in refs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= len(told()) <= 3


def test_nothing_is_told_while_work_gets_done(told):
    @flow.remote
    def step(stop):
        return stop.wait(0.02)

    stop = flow.Event()
    refs = [step.options(max_retries=0).remote(stop) for _ in range(160)]
    flow.get(refs)
    assert told() == []


def test_what_is_told_in_a_worker(told, session, capfd):
    @flow.remote
    def outer():
        return flow.wait([impossible.remote()], timeout=1.6)[0]

    assert flow.get(outer.remote()) == []
    until(lambda: "no node has GPU" in capfd.readouterr().err)
