"""How many files may be open: what is refused before anything starts, and a node that is near its limit."""

from __future__ import annotations

import errno
import os
import resource

import pytest

import flowengine as flow
from flowengine.cli import main
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.runtime import open_files
from flowengine.runtime.open_files import check_open_files, two_pipes
from tests.core.test_node import Kit, sent


@pytest.fixture
def limit(monkeypatch):
    found = [resource.RLIM_INFINITY]
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda kind: (found[0], found[0]))
    return found


def test_what_is_needed_grows_with_the_workers(limit):
    for allowed, workers, extra in ((resource.RLIM_INFINITY, 4096, 65_536), (128, 0, 0), (902, 2, 256)):
        limit[0] = allowed
        check_open_files(workers, extra)
    limit[0] = 901
    check_open_files()
    with pytest.raises(flow.BadValue, match=r"may open 901 files here .*902 are needed .*258 workers.*or lower"):
        check_open_files(2, 256)
    limit[0] = 127
    with pytest.raises(flow.BadValue, match=r"127 files .*128 are needed: raise the limit \(`ulimit -n 128`.*\)$"):
        check_open_files()


def test_init_and_the_command_line_refuse_too_low_a_limit(limit, tmp_path, capsys):
    limit[0] = 100
    with pytest.raises(flow.BadValue, match="902 are needed"):
        flow.init(num_workers=2)
    with pytest.raises(flow.BadValue, match="128 are needed"):
        flow.init(address=tmp_path / "no such file")
    assert main(["head", "--connection-file", str(tmp_path / "c.json"), "--state-dir", str(tmp_path)]) == 1
    assert "128 are needed" in capsys.readouterr().err


def test_workers_leave_files_for_all_else(limit):
    before = os.listdir("/proc/self/fd")
    highest = close(two_pipes())
    limit[0] = highest + 1 + open_files.KEPT_FILES
    close(two_pipes())
    limit[0] -= 1
    with pytest.raises(OSError, match=rf"Too many open files.*may have {limit[0]}") as raised:
        two_pipes()
    assert raised.value.errno == errno.EMFILE
    assert len(os.listdir("/proc/self/fd")) == len(before)


def close(pipes: tuple[int, ...]) -> int:
    for fd in pipes:
        os.close(fd)
    return max(pipes)


def test_why_no_worker_can_be_started_is_told():
    kit = Kit(cpus=3)
    kit.demand("d", 3)
    kit.says(c.WorkerEnded(m.Death("n1.w3", "h", 0, 1, reason="too many open files")))
    (told,) = sent(kit.beats(1.5), m.LeaseDelayed, "d")
    assert told.reason == "node n1 cannot start a worker: too many open files"
    assert sent(kit.started(4), m.LeaseGranted, "d")
    assert kit.node.pool.cannot_start == ""
