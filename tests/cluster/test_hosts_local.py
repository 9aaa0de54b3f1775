"""A head and two nodes of different "hosts" on this one: all that goes between them goes over TLS on loopback."""
from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import flowengine as flow
from flowengine.runtime.connection import read_connection
from tests.cluster.host_kit import Cluster, name_of, on, wait_for
from tests.runtime.kit import PROJECT, gone

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "flowengine.cli", *map(str, arguments)], capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(PROJECT)}, cwd=PROJECT, text=True, timeout=60)


@flow.remote(num_cpus=0)
def where():
    return flow.context().node_id


@flow.remote(num_cpus=0)
def total(values):
    return float(values.sum())


def test_placement_reaches_each_node(cluster):
    nodes = flow.nodes()
    assert flow.get([on(node, where).remote() for node in nodes], timeout=30) == [node.node_id for node in nodes]
    assert flow.get([on(node, where).options(num_cpus=1).remote() for node in nodes], timeout=30) \
        == [node.node_id for node in nodes]


def test_a_resource_that_only_the_other_node_has_is_found(cluster):
    (two,) = [node.node_id for node in flow.nodes() if "two" in node.resources]
    assert flow.get(where.options(resources={"two": 1}).remote(), timeout=30) == two


def test_large_values_travel_between_stores(cluster):
    values = flow.put(np.ones(1 << 20))
    assert flow.get([on(node, total).remote(values) for node in flow.nodes()], timeout=30) == [1 << 20] * 2
    assert flow.stats()["bytes_moved"] >= 8 << 20


def test_what_tasks_print_anywhere_is_shown(cluster, capfd):
    @flow.remote(num_cpus=0)
    def say(word):
        print(word)

    @flow.remote(num_cpus=0)
    def nested(ids):
        flow.get([say.options(placement=flow.scheduling.node(name)).remote(f"inner {name}") for name in ids])

    ids = [node.node_id for node in flow.nodes()]
    flow.get([on(node, say).remote(f"outer {node.node_id}") for node in flow.nodes()], timeout=30)
    flow.get([on(node, nested).remote(ids) for node in flow.nodes()], timeout=30)
    flow.shutdown()
    lines = capfd.readouterr().out.splitlines()
    for name in ids:
        assert sum(line.endswith(f"outer {name}") for line in lines) == 1
        assert sum(line.endswith(f"inner {name}") for line in lines) == 2


def test_status_stack_timeline_and_story(cluster, tmp_path):
    ref = on(flow.nodes()[0], where).remote()
    flow.get(ref, timeout=30)
    status = run("status", "--join", cluster.file)
    assert status.returncode == 0
    for expected in (*(node.node_id for node in flow.nodes()), "127.0.0.1", "idle", "CPU 1 of 1", "of 64 MiB",
                     "tasks_submitted"):
        assert expected in status.stdout
    stack = run("stack", "--join", cluster.file)
    assert stack.returncode == 0
    assert "runs no task" in stack.stdout
    assert "thread flowengine-loop" in stack.stdout
    assert "run_launcher" not in stack.stdout  # what the processes were forked from
    out = tmp_path / "out.json"
    assert run("timeline", out, "--join", cluster.file).returncode == 0
    assert any(event["name"] == "where" for event in json.loads(out.read_bytes())["traceEvents"])
    story = run("story", ref.oid.hex()[:12], "--join", cluster.file)
    assert story.returncode == 0
    assert "where" in story.stdout
    assert run("story", "0123456789ab", "--join", cluster.file).returncode == 1


def test_a_wrong_secret_is_told_quickly(shared, tmp_path):
    forged = json.loads(shared.file.read_bytes())
    forged["secret"] = "0" * len(forged["secret"])
    file = tmp_path / "forged.json"
    file.touch(mode=0o600)
    file.write_text(json.dumps(forged))
    began = time.monotonic()
    with pytest.raises(flow.BadValue, match="secret"):
        flow.init(address=file)
    assert time.monotonic() - began < 10
    assert not flow.is_initialized()
    for command in (("status",), ("node",)):
        refused = run(*command, "--join", file)
        assert refused.returncode == 1
        assert "secret" in refused.stderr


def test_a_head_that_comes_back_keeps_its_address_and_its_nodes(own):
    before = own.file.read_bytes()
    with flow.init(address=own.file):
        wait_for(lambda: len(flow.nodes()) == 2)
        own.head.end(signal.SIGKILL)
        assert len(flow.get([where.remote() for _ in range(20)], timeout=30)) == 20  # tasks go on without it
        own.head = own.start_head()
        assert own.file.read_bytes() == before
        wait_for(lambda: len(flow.nodes()) == 2)
        ids = [node.node_id for node in flow.nodes()]
        wait_for(lambda: all(name in run("status", "--join", own.file).stdout for name in ids))
        (two,) = [node.node_id for node in flow.nodes() if "two" in node.resources]
        assert flow.get(where.options(resources={"two": 1}).remote(), timeout=30) == two


def test_while_the_head_is_away_waits_and_errors_say_so(own):
    with flow.init(address=own.file, config={"suspect_after_s": 2, "link_lost_after_s": 2}):
        wait_for(lambda: len(flow.nodes()) == 2)
        own.head.end(signal.SIGKILL)
        own.nodes[0].says("no link to the head.*goes on")
        ref = where.options(resources={"three": 1}).remote()
        wait_for(lambda: "no node has three: 1 (largest: 0); the head is not there to be asked" in repr(ref))
        with pytest.raises(flow.HeadLost, match=r"no answer to resource.create within 2 s from the head at tls://"):
            flow.resources.create("licence", 1)
        own.head = own.start_head()
        wait_for(lambda: "not there" not in repr(ref))


def test_the_node_of_a_driver_is_killed_and_its_launcher_brings_another(own):
    with flow.init(address=own.file):
        wait_for(lambda: len(flow.nodes()) == 2)
        mine = flow.context().node_id
        refs = [on_any.remote(number) for number in range(20)]
        flow.get(refs[0], timeout=30)
        for node in (pid for pid in children(own) if name_of(pid) == "flow-node"):
            os.kill(node, signal.SIGKILL)
        assert flow.get(refs, timeout=60) == list(range(20))
        wait_for(lambda: flow.context().node_id != mine)
        assert flow.get(flow.put(np.ones(1 << 20)), timeout=30).sum() == 1 << 20


@flow.remote(max_retries=-1)
def on_any(number):
    time.sleep(0.01)
    return number


def children(cluster: Cluster) -> list[int]:
    found = []
    for node in cluster.nodes:
        pid = node.process.pid
        found += [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found


def test_a_node_that_is_told_to_end_leaves_at_once(own):
    pids = children(own)
    with flow.init(address=own.file):
        wait_for(lambda: len(flow.nodes()) == 2)
        assert own.nodes[1].end() == 0
        wait_for(lambda: len(flow.nodes()) == 1)
        assert own.nodes[0].end(signal.SIGINT) == 0
    assert gone(pids)
    assert own.left() == []


def test_a_node_waits_for_its_head(own):
    own.head.end()
    late = own.start_node("three")
    own.head = own.start_head()
    late.says("the head is there again")
    own.nodes.append(late)
    with flow.init(address=own.file):
        wait_for(lambda: len(flow.nodes()) == 3)


def test_stop_ends_all(own):
    pids = [*children(own), own.head.process.pid]
    done = run("stop", "--join", own.file)
    assert done.returncode == 0, done.stderr
    assert "2 nodes and the head" in done.stdout
    assert [part.end() for part in (*own.nodes, own.head)] == [0, 0, 0]
    assert gone(pids)
    assert own.left() == []


def test_without_tls(tmp_path):
    cluster = Cluster(tmp_path, "--no-tls")
    try:
        connection = read_connection(cluster.file)
        assert connection.tls is None
        assert connection.address.startswith("tcp://")
        with flow.init(address=cluster.file):
            wait_for(lambda: len(flow.nodes()) == 2)
            nodes = flow.nodes()
            assert flow.get([on(node, where).remote() for node in nodes], timeout=30) == [n.node_id for n in nodes]
    finally:
        cluster.end()
