"""The command `flow`: what it refuses, and how it finds a local engine."""
from __future__ import annotations

import json
import os
import socket
import sys
import time

import pytest

import flowengine as flow
from flowengine import cli
from flowengine.errors import BadValue, HeadLost
from flowengine.observe import screens
from flowengine.observe.timeline import Span, on_one_clock
from flowengine.runtime.connection import (
    Connection,
    local_sessions,
    new_secret,
    new_session,
    own_host,
    session_path,
    write_connection,
)
from tests.cluster.host_kit import Flow


def a_connection(port: int) -> Connection:
    return Connection(address=f"tcp://127.0.0.1:{port}#head-abc", secret=new_secret().hex(), session=new_session())


@pytest.mark.parametrize("arguments", [["head"], ["node"], ["timeline"], ["story"], ["explain"], ["unknown"]])
def test_what_is_missing_is_told(arguments, capsys):
    with pytest.raises(SystemExit) as ending:
        cli.main(arguments)
    assert ending.value.code == 2
    assert "usage: flow" in capsys.readouterr().err


def test_all_commands_are_told_when_none_is_given(capsys):
    assert cli.main([]) == 2
    assert "run a task or an actor again" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "stack", "stop"])
def test_no_local_engine(command, tmp_path, capsys):
    assert cli.main([command, "--state-dir", str(tmp_path)]) == 1
    assert "--join FILE" in capsys.readouterr().err


def test_no_connection_file(tmp_path, capsys):
    assert cli.main(["status", "--join", str(tmp_path / "none.json")]) == 1
    assert "flow head --connection-file" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[1]", '{"disk": "two"}'])
def test_resources_that_are_none(text):
    with pytest.raises(BadValue, match="--resources"):
        cli.resources_of(text)


def test_resources():
    assert cli.resources_of(None) is None
    assert cli.resources_of('{"disk": 2}') == {"disk": 2}


def test_an_impossible_port(tmp_path, capsys):
    assert cli.main(["head", "--connection-file", str(tmp_path / "c.json"), "--port", "70000"]) == 1
    assert "--port" in capsys.readouterr().err
    for option, limit in (("--page-port", "page_port"), ("--metrics-port", "metrics_port")):
        assert cli.main(["head", "--connection-file", str(tmp_path / "c.json"), option, "70000"]) == 1
        assert limit in capsys.readouterr().err


@pytest.mark.parametrize("command", [["head", "--connection-file"], ["node", "--join"]])
@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "2001:db8::1"])
def test_an_address_of_another_host(command, host, tmp_path, capsys):
    assert cli.main([*command, str(tmp_path / "c.json"), "--host", host]) == 1
    assert f"--host must be an address of this host, not '{host}'" in capsys.readouterr().err


@pytest.mark.cluster
def test_a_second_head_does_not_take_the_place_of_one_that_runs(tmp_path, capsys):
    file = tmp_path / "cluster.json"
    first = Flow("head", "--connection-file", file, "--state-dir", tmp_path / "first")
    first.says("listens at")
    try:
        before = file.read_bytes()
        again = ["head", "--connection-file", str(file), "--state-dir", str(tmp_path / "second")]
        assert cli.main(again) == 1
        assert "of another head, which runs at" in capsys.readouterr().err
        assert file.read_bytes() == before
    finally:
        first.end()
    other = Flow(*again)  # its place is free now
    other.says("listens at")
    other.end()
    assert file.read_bytes() != before


def test_a_head_that_is_not_there(tmp_path, caplog):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        file = tmp_path / "cluster.json"
        write_connection(file, a_connection(taken.getsockname()[1]))
        began = time.monotonic()
        with pytest.raises(HeadLost, match="cannot be reached"):
            flow.init(address=file)
        assert time.monotonic() - began < 15
        assert not flow.is_initialized()
        assert caplog.records == []  # the error has said it


def test_a_pipe_that_nobody_reads_any_more(tmp_path, monkeypatch, capfd):
    def broken(options):
        raise BrokenPipeError

    monkeypatch.setattr(cli, "connection_of", broken)
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert cli.main(["stack"]) == 141
        print("what is left", file=out)
    assert (tmp_path / "out").read_text() == capfd.readouterr().err == ""


def test_a_folder_is_no_connection_file(tmp_path, capsys):
    assert cli.main(["head", "--connection-file", str(tmp_path), "--state-dir", str(tmp_path)]) == 1
    assert "is a folder" in capsys.readouterr().err


def test_own_host():
    assert own_host("tcp://127.0.0.1:4321#x") == "127.0.0.1"


def test_sessions_that_have_ended_are_not_found(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        alive, dead = a_connection(server.getsockname()[1]), a_connection(taken.getsockname()[1])
        for connection in (alive, dead):
            write_connection(session_path(str(tmp_path), connection.session), connection)
        assert local_sessions(str(tmp_path)) == [alive]


@pytest.mark.cluster
def test_a_local_engine_is_found_and_stopped(tmp_path, capsys):
    with flow.init(1, state_dir=tmp_path) as session:
        @flow.remote
        def twice(x):
            return 2 * x

        ref = twice.remote(21)
        assert flow.get(ref, timeout=30) == 42
        file = session_path(str(tmp_path), session.session_id)
        assert os.stat(file).st_mode & 0o777 == 0o600
        here = ["--state-dir", str(tmp_path)]
        assert cli.main(["status", *here]) == 0
        shown = capsys.readouterr().out
        assert session.session_id in shown
        assert ", 1 node\n" in shown
        assert cli.main(["stack", *here]) == 0
        assert "driver" in capsys.readouterr().out
        assert cli.main(["timeline", str(tmp_path / "out.json"), *here]) == 0
        events = json.loads((tmp_path / "out.json").read_bytes())["traceEvents"]
        assert any(event["name"] == "twice" for event in events)
        capsys.readouterr()
        assert cli.main(["story", ref.oid.hex()[:12], *here]) == 0
        shown = capsys.readouterr().out
        assert "twice" in shown
        assert "lives with its owner" in shown
        assert cli.main(["explain", ref.oid.hex()[:12], *here]) == 0
        assert capsys.readouterr().out in shown
        assert cli.main(["explain", "0123456789ab", *here]) == 1
        assert cli.main(["stop", *here]) == 0
        assert not file.exists()


@pytest.mark.cluster
def test_the_connection_file_goes_with_the_engine(tmp_path):
    with flow.init(0, state_dir=tmp_path) as session:
        file = session_path(str(tmp_path), session.session_id)
        assert file.exists()
    assert not file.exists()


def test_clocks_are_brought_together():
    span = Span("t", "f", "w", "far", 1, 1_000, 6_000, 10, "done")
    (moved,) = on_one_clock([span], "near", {"near": 500, "far": 5_200})
    assert (moved.submitted_us, moved.began_us) == (500, 800)


def test_amounts_for_people():
    entry = {"total": {"CPU": 4.0, "memory": float(8 << 30)}, "available": {"CPU": 1.5}}
    assert screens.shown_free(entry) == "CPU 1.5 of 4\nmemory 0.0 of 8.0 GiB"
    store = {"limit_bytes": 64 << 20, "used_bytes": 1 << 20, "granted_bytes": 0, "pool_bytes": 2 << 20, "disk_bytes": 0}
    assert screens.shown_store(store) == "1.0 of 64 MiB\npool 2.0 MiB"
    assert screens.shown_workers([]) == "none"
    assert screens.shown_workers([("w", 1, "idle", ""), {"state": "leased"}]) == "1 idle, 1 leased"
