"""Inside of a Dask cluster: nodes beside its workers, leases, workers that come and go, several programs, the relay."""
from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from distributed import Client, LocalCluster, Security

import flowengine as flow
from flowengine.deploy import borrow, dask
from flowengine.deploy.seeds import HEAD_NAME, NODE_NAME
from flowengine.errors import BadType, BadValue, FlowError, HeadLost
from flowengine.runtime.gate import RELAY_OP
from tests.cluster.kit import PROJECT, gone, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(120)]

QUIET = {"dashboard_address": ":0", "silence_logs": 50}


def square(x):
    return x * x


def nap(seconds):
    time.sleep(seconds)
    return os.getpid()


PATIENCE_S = 60.0  # a worker and its node are four processes to start


def come_about(check):
    until(check, PATIENCE_S)


def squares(count=6):
    return flow.get([flow.remote(square).remote(x) for x in range(count)], timeout=60)


def cpus():
    return flow.cluster_resources().get("CPU", 0)


def node_ids():
    return {node.node_id for node in flow.nodes() if node.resources}


def engine_processes():
    """Of the engine, among all that this process and its children have started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("flowengine.runtime" in part or "flowengine.deploy" in part for part in process.cmdline()):
                found.append(process.pid)
    return found


def stores(session):
    """Folders that a session has in shared memory."""
    return [os.path.join(folder, name) for folder, names, _ in os.walk("/dev/shm") if "flowengine" in folder
            for name in names if name.startswith(session)]


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(n_workers=2, threads_per_worker=1, **QUIET) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster):
    with Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def engine(client):
    """One session for most of the tests, which leave it with two nodes."""
    session = flow.init(client=client)
    pids, name = engine_processes(), session.session_id
    yield session
    pids += engine_processes()
    session.shutdown()
    assert not [pid for pid in pids if not gone(pid)]
    assert not stores(name)


def plugin_of(cluster):
    return cluster.scheduler.plugins[HEAD_NAME]


def test_every_worker_is_a_node_with_its_threads(engine, client):
    assert cpus() == sum(client.nthreads().values()) == 2
    assert squares() == [x * x for x in range(6)]
    assert client.submit(square, 7).result(timeout=30) == 49
    value = np.arange(1 << 20)
    assert flow.get(flow.remote(np.sum).remote(flow.put(value)), timeout=30) == value.sum()


def test_workers_in_use_are_kept_and_given_back(engine, cluster, client):
    scheduler, counter = cluster.scheduler, flow.remote(Counter)
    flow.get(flow.remote(nap).remote(0.01), timeout=30)
    held = [counter.options(num_cpus=1).remote() for _ in range(2)]
    flow.get([actor.add.remote() for actor in held], timeout=30)
    come_about(lambda: sum(1 for state in scheduler.workers.values() if state.long_running) == 2)
    assert scheduler.workers_to_close(n=2) == []
    assert client.submit(square, 3).result(timeout=30) == 9             # a lease takes no slot of Dask's
    del held
    come_about(lambda: not any(state.processing for state in scheduler.workers.values()))
    come_about(lambda: not any(client.run(leases_here).values()))
    assert len(scheduler.workers_to_close(n=2)) == 2


class Counter:
    def __init__(self):
        self.count = 0

    def add(self):
        self.count += 1
        return self.count


def leases_here(dask_worker):
    return list(dask_worker.plugins["flowengine-node"].beside.leases)


def test_stored_values_keep_their_worker(engine, cluster):
    ref = flow.remote(np.zeros).remote(1 << 20)
    flow.wait([ref], timeout=30)
    come_about(lambda: len(plugin_of(cluster).used) == 1)
    del ref
    come_about(lambda: plugin_of(cluster).used == ())


def test_a_worker_that_dies_comes_back_with_its_node(engine, client):
    before, victim = node_ids(), next(iter(client.run(os.getpid).values()))
    children = [process.pid for process in psutil.Process(victim).children(recursive=True)]
    refs = [flow.remote(nap).remote(0.05) for _ in range(20)]
    os.kill(victim, signal.SIGKILL)
    assert len(flow.get(refs, timeout=60)) == 20
    come_about(lambda: len(node_ids()) == 2 and node_ids() != before)
    assert all(gone(pid) for pid in children)


def test_workers_come_and_go(engine, cluster):
    cluster.scale(3)
    come_about(lambda: cpus() == 3)
    cluster.scale(2)
    come_about(lambda: cpus() == len(cluster.scheduler.workers) == 2)
    assert squares() == [x * x for x in range(6)]


def test_a_dead_head_and_a_dead_launcher_are_started_again(engine, cluster, client):
    plugin, before = plugin_of(cluster), node_ids()
    head = plugin.child.pid
    os.kill(head, signal.SIGKILL)
    launcher = next(process for process in psutil.Process(next(iter(client.run(os.getpid).values()))).children()
                    if any("launcher" in part for part in process.cmdline()))
    launcher.kill()
    come_about(lambda: plugin.child.pid != head and plugin.report is not None)
    come_about(lambda: len(node_ids()) == 2 and node_ids() != before)
    assert squares() == [x * x for x in range(6)]


PROGRAM = """
import os, sys
import flowengine as flow
from distributed import Client
with Client(sys.argv[1]) as client, flow.init(client=client):
    print(int(flow.cluster_resources()["CPU"]), flow.get(flow.remote(lambda: 5).remote()), flush=True)
    if sys.argv[2] == "die":
        os.kill(os.getpid(), 9)
"""


def other_program(cluster, way):
    done = subprocess.run([sys.executable, "-c", PROGRAM, cluster.scheduler_address, way], capture_output=True,
                          text=True, timeout=60, cwd=PROJECT)
    assert done.stdout.split() == ["2", "5"], done.stderr
    return done.returncode


def test_programs_share_the_nodes(engine, cluster):
    assert other_program(cluster, "leave") == 0
    assert squares() == [x * x for x in range(6)]


def test_restart_is_a_death_of_all_nodes_at_once(engine, client):
    before = node_ids()
    refs = [flow.remote(nap).remote(0.05) for _ in range(10)]
    client.restart()
    assert len(flow.get(refs, timeout=60)) == 10
    come_about(lambda: len(node_ids()) == 2 and not node_ids() & before)


def test_a_retired_worker_takes_its_node_along(engine, cluster, client):
    worker = next(iter(cluster.scheduler.workers))
    node_id = plugin_of(cluster).nodes[worker][0]
    assert client.retire_workers([worker])
    come_about(lambda: node_id not in node_ids())
    assert squares() == [x * x for x in range(6)]


def test_dask_goes_on_when_the_last_program_has_left(engine, cluster, client):
    pids = engine_processes()
    flow.shutdown()
    assert all(gone(pid) for pid in pids)
    assert HEAD_NAME not in cluster.scheduler.plugins
    assert RELAY_OP not in cluster.scheduler.handlers
    assert NODE_NAME not in cluster.scheduler.worker_plugins
    assert client.submit(square, 8).result(timeout=30) == 64


# --- other clusters -----------------------------------------------------------------------------------------------


@pytest.fixture
def small():
    """A cluster in this process."""
    if flow.is_initialized():
        flow.shutdown()
    with LocalCluster(n_workers=1, threads_per_worker=2, processes=False, protocol="tcp://", **QUIET) as cluster:
        yield cluster
        flow.shutdown()


def test_with_tls_and_nothing_but_the_port_of_the_scheduler(monkeypatch):
    monkeypatch.setattr(borrow.Borrowed, "direct_host", lambda self, head: "")
    security = Security.temporary()
    with LocalCluster(n_workers=1, threads_per_worker=1, processes=False, protocol="tls://", security=security,
                      **QUIET) as cluster, Client(cluster, security=security) as client:
        with flow.init(client=client):
            assert all(node.address.startswith("tls://") for node in flow.nodes())
            value = np.arange(1 << 19)
            ref = flow.put(value)
            assert flow.get(flow.remote(np.sum).remote(ref), timeout=30) == value.sum()
            assert flow.get(flow.remote(lambda refs: flow.get(refs[0])[7]).remote([ref]), timeout=30) == 7
            assert plugin_of(cluster).relay.doors
        assert not engine_processes()


def test_an_adaptive_cluster_grows_for_the_engine_and_shrinks_again():
    with LocalCluster(n_workers=0, threads_per_worker=1, processes=False, **QUIET) as cluster, \
            Client(cluster) as client:
        cluster.adapt(minimum=0, maximum=2, interval="100ms", wait_count=2)
        with flow.init(client=client):
            assert cpus() == 0
            refs = [flow.remote(nap).options(num_cpus=1).remote(1) for _ in range(6)]
            come_about(lambda: len(cluster.scheduler.workers) >= 1)
            assert len(flow.get(refs, timeout=60)) == 6
            come_about(lambda: not cluster.scheduler.workers)
        assert not engine_processes()


def test_clients_that_are_no_use_are_refused(small):
    client = Client(small)
    with pytest.raises(BadValue, match="workers of Dask"):
        flow.init(num_workers=2, client=client)
    client.close()
    with pytest.raises(BadType, match=r"distributed\.Client"):
        flow.init(client="tcp://127.0.0.1:8786")
    with pytest.raises(BadValue, match="no scheduler"):
        flow.init(client=client)

    async def from_a_loop():
        async with Client(small.scheduler_address, asynchronous=True) as client:
            with pytest.raises(BadValue, match="asynchronous"):
                flow.init(client=client)

    asyncio.run(from_a_loop())
    assert not flow.is_initialized()


def test_all_ends_when_the_last_program_was_killed(small, monkeypatch):
    monkeypatch.setattr(dask, "GONE_S", 0.5)
    assert other_program(small, "die") == -signal.SIGKILL
    come_about(lambda: HEAD_NAME not in small.scheduler.plugins and not engine_processes())


def test_a_node_that_cannot_start_is_told_with_its_reason(small, monkeypatch):
    with Client(small) as client:
        monkeypatch.setattr(dask, "launcher_settings", broken)
        with pytest.raises(FlowError, match=r"no flowengine node on the Dask worker .*: the disk is away"):
            flow.init(client=client)
        assert not flow.is_initialized()
        assert HEAD_NAME not in small.scheduler.plugins
        assert not engine_processes()
        assert client.submit(square, 4).result(timeout=30) == 16


def broken(share, told):
    raise BadValue("the disk is away")


def test_a_session_whose_client_was_closed_goes_on_until_the_cluster_ends(small, monkeypatch):
    monkeypatch.setattr(borrow, "HEAD_AWAY_S", 1.0)
    with Client(small) as client:
        flow.init(client=client)
    assert squares() == [x * x for x in range(6)]
    small.close()
    with pytest.raises(HeadLost, match="inside of the Dask cluster has ended"):
        flow.get(flow.remote(square).remote(2), timeout=60)
    flow.shutdown()
    assert not engine_processes()
