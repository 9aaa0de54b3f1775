"""Heads without nodes, and heads without what they knew: who waits for them is told, and does not wait for ever."""

from __future__ import annotations

import logging
import shutil
import signal

import pytest

import flowengine as flow
from flowengine.runtime import driver, launcher
from flowengine.runtime.connection import Connection, read_connection, write_connection
from flowengine.runtime.launcher import led_elsewhere
from tests.cluster.host_kit import Flow, wait_for
from tests.runtime.kit import PATIENCE_S

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def start_head(folder) -> Flow:
    head = Flow("head", "--connection-file", folder / "cluster.json", "--state-dir", folder / "head")
    head.says("listens at")
    return head


def test_a_program_is_told_that_its_cluster_has_no_nodes(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(driver, "NO_NODE_TOLD_S", 0.2)
    monkeypatch.setattr(driver, "START_TIMEOUT_S", 1.0)
    head = start_head(tmp_path)
    try:
        with caplog.at_level(logging.WARNING, "flowengine.waits"), flow.init(address=tmp_path / "cluster.json"):
            first, *_, last = [record.getMessage() for record in caplog.records if record.name == "flowengine.waits"]
            assert first.startswith("waiting for 0 s, at most 1 s: the cluster at tls://127.0.0.1:")
            assert "has no node that runs tasks; `flow node --join FILE` brings one" in first
            assert last.endswith("brings one: what is submitted waits for one")
            ref = flow.remote(pow).remote(2, 3)
            wait_for(lambda: "no node that runs tasks is there" in repr(ref))
            node = Flow("node", "--join", tmp_path / "cluster.json", "--state-dir", tmp_path / "node",
                        "--num-workers", 1, "--object-store-bytes", 64 << 20)
            try:
                assert flow.get(ref, timeout=PATIENCE_S) == 8
            finally:
                node.end()
    finally:
        head.end()


@pytest.mark.slow
def test_nodes_end_when_their_file_leads_to_another_cluster_and_their_head_is_gone(tmp_path):
    head, file, state = start_head(tmp_path), tmp_path / "cluster.json", tmp_path / "head"
    first = read_connection(file)
    node = Flow("node", "--join", file, "--state-dir", tmp_path / "node", "--num-workers", 1,
                "--object-store-bytes", 64 << 20)
    try:
        node.says("listens at")
        shutil.rmtree(state)
        head.says("was removed while the head runs; it was made again")
        wait_for((state / "head.json").exists)
        head.end(signal.SIGKILL)
        head = start_head(tmp_path)
        assert read_connection(file) == first  # the same cluster again
        node.says("the head is there again, and this node has joined")
        head.end(signal.SIGKILL)
        shutil.rmtree(state)
        head = start_head(tmp_path)
        found = node.says(r"cluster.json leads to another cluster now, and .*\(session (\w+)\) is gone: the node ends")
        assert found[1] == first.session
        assert node.process.wait(PATIENCE_S) == 1
    finally:
        node.end()
        head.end()


def test_what_leads_elsewhere(tmp_path, monkeypatch):
    file, other = tmp_path / "c.json", Connection(address="tcp://h:7#head-b", secret="ab", session="b")
    listening = [True]
    monkeypatch.setattr(launcher, "listens", lambda address: listening[0])
    assert not led_elsewhere(str(file), "a", "tcp://h:8#head-a")
    write_connection(file, other)
    assert not led_elsewhere(str(file), "b", "tcp://h:7#head-b")
    assert not led_elsewhere(str(file), "a", "tcp://h:8#head-a")  # that head is still there
    assert led_elsewhere(str(file), "a", "tcp://h:7#head-a")  # this one has its place
    listening[0] = False
    assert led_elsewhere(str(file), "a", "tcp://h:8#head-a")
    assert not led_elsewhere(str(file), "b", "tcp://h:7#head-b")


def test_the_head_of_a_cluster_is_not_for_programs_to_kill(cluster):
    with pytest.raises(flow.BadValue, match="started by others"):
        flow.chaos.kill_head()
