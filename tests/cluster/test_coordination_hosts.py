"""Locks and queues, environments, and what commands tell, over two "hosts"."""
from __future__ import annotations

import json
import signal

import numpy as np
import pytest

import flowengine as flow
from flowengine import cli
from tests.cluster.host_kit import Cluster, on, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
NOW_S = 20.0


@flow.remote(num_cpus=0)
def send(jobs, size):
    jobs.put(np.ones(size))
    jobs.put(flow.put(np.ones(size)))


@flow.remote(num_cpus=0)
def receive(jobs):
    return float(jobs.get().sum() + flow.get(jobs.get()).sum())


@flow.remote(num_cpus=0, max_retries=0)
def hold(lock, began):
    with lock:
        print("it holds", flush=True)
        began.set()
        flow.Event("never").wait()


def test_items_travel_between_hosts(cluster):
    one, two = flow.nodes()
    for maker, taker in ((one, two), (two, one)):
        jobs = flow.Queue()
        on(maker, send).remote(jobs, 200_000)
        assert flow.get(on(taker, receive).remote(jobs), timeout=NOW_S) == 400_000


def test_what_the_commands_tell_of_both_hosts(cluster, capsys):
    def told() -> list[dict]:
        """What a command printed, and not what the workers did."""
        return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]

    refs = []
    for node in flow.nodes():
        began = flow.Event()
        refs.append(on(node, hold).remote(flow.Lock(), began))
        assert began.wait(NOW_S)
    assert cli.main(["top", "--json", "--join", str(cluster.file)]) == 0
    (found,) = told()
    running = [worker["name"] for node in found["nodes"] for worker in node["workers"] if worker["task"]]
    assert running.count("hold") == 2
    assert cli.main(["logs", "--join", str(cluster.file), "--json"]) == 0
    assert len({line["worker_id"] for line in told() if line["text"] == "it holds"}) == 2
    for ref in refs:
        flow.cancel(ref)
    flow.wait(refs, num_returns=2, timeout=NOW_S)


def test_a_folder_that_only_one_host_may_have(cluster, tmp_path):
    @flow.remote(num_cpus=0, working_dir=tmp_path / "none")
    def nothing():
        return 1

    with pytest.raises(flow.BadValue, match="cannot be used on host 127"):
        flow.get(on(flow.nodes()[0], nothing).remote(), timeout=NOW_S)


def test_a_lock_is_free_when_the_host_of_its_holder_is_gone(tmp_path):
    cluster = Cluster(tmp_path)
    try:
        with flow.init(address=cluster.file):
            wait_for(lambda: len(flow.nodes()) == 2)
            (two,) = [node for node in flow.nodes() if "two" in node.resources]
            lock, began = flow.Lock(), flow.Event()
            ref = on(two, hold).remote(lock, began)
            assert began.wait(NOW_S)
            cluster.nodes[1].process.send_signal(signal.SIGKILL)
            assert lock.acquire(timeout=40)
            with pytest.raises(flow.WorkerCrashed):
                flow.get(ref, timeout=40)
    finally:
        cluster.end()
