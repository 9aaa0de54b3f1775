"""The tests of others that the experiment runs: its parts, and a part of it."""
from __future__ import annotations

import subprocess
import sys

import pytest

from experiments.interop import run as interop
from experiments.interop.run import ELSEWHERE, QUICK, SUITES, Seen, report, shards
from experiments.interop.skips import SKIPS
from tests.runtime.kit import PROJECT


def test_every_file_of_tests_is_run_once():
    files = [file for suite in SUITES.values() for shard in shards(suite) for file in shard]
    assert len(files) == len(set(files)) > 60
    assert not [file for file in files if file.endswith(ELSEWHERE)]


def test_tests_that_cannot_run_do_not_count_as_passed(monkeypatch, capsys):
    monkeypatch.setattr(interop, "find_spec", lambda name: None if name == "pytest_timeout" else name)
    monkeypatch.setattr(sys, "argv", ["run.py", "--quick"])
    with pytest.raises(SystemExit):
        interop.main()
    assert "need pytest_timeout" in capsys.readouterr().err


def test_the_report_tells_what_differs_and_why():
    known = next(iter(SKIPS))
    text = report([Seen("bag", known, "failed", "x", "passed"), Seen("bag", "new", "failed", "a | b", "passed"),
                   Seen("bag", "both", "failed", "y", "failed"), Seen("bag", "good", "passed")], "python3.11")
    assert "| bag | 4 | 1 | 0 | 1 | 1 | 1 |" in text
    assert f"| `{known}` | {SKIPS[known]} |" in text
    assert "| `new` | a / b |" in text


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_a_part_of_the_suites_passes():
    assert QUICK
    done = subprocess.run([sys.executable, "-m", "experiments.interop.run", "--quick"], cwd=PROJECT,
                          capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stdout + done.stderr
