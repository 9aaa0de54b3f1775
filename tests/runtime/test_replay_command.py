"""`flow replay`: against a program that runs, from what it left on disk, and from a file; and under a terminal."""
from __future__ import annotations

import io
import os
import pathlib
import pty
import subprocess
import sys
import threading

import pytest

from flowengine import cli
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.errors import BadValue
from flowengine.objects import codec
from flowengine.recovery import record as r
from flowengine.recovery import records
from tests.runtime.kit import PROJECT

PROGRAM = """
import sys
sys.path.append({project!r})
import flowengine as flow

@flow.remote
def ratio(values, by):
    total = sum(values)
    return total / by

@flow.remote
class Counter:
    def __init__(self):
        self.number = 0
    def add(self, more):
        self.number += more
        return self.number

with flow.init(num_workers=1, state_dir=sys.argv[1]):
    good, bad = ratio.remote([1, 2, 3], 2), ratio.remote(flow.put(list(range(50_000))), 0)
    counter = Counter.remote()
    calls = [counter.add.remote(number) for number in range(5)]
    flow.wait([good, bad, *calls], num_returns=7)
    print(good.hex()[:32], bad.hex()[:32], counter.actor_id, calls[3].hex()[:32], flush=True)
    sys.stdin.read()
"""


class Program:
    """A program that has come to its end and waits to be let go."""

    def __init__(self, state_dir):
        source = state_dir / "program.py"
        source.write_text(PROGRAM.format(project=str(PROJECT)))
        self.process = subprocess.Popen([sys.executable, str(source), str(state_dir)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        self.good, self.bad, self.counter, self.call = self.process.stdout.readline().split()

    def end(self):
        self.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    running = Program(folder)
    running.folder = folder
    yield running
    running.end()


def replayed(capsys, *arguments):
    code = cli.main(["replay", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_without_a_terminal_it_says_what_to_pass(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, shown = replayed(capsys, "0123456789ab")
    assert code == 1
    assert "needs a terminal: pass --no-debug to run through" in shown
    assert "debug=False" not in shown


@pytest.mark.cluster
def test_a_running_program(program, capsys):
    rest = ["--no-debug", "--state-dir", program.folder]
    assert replayed(capsys, program.good, *rest) == (0, f"ratio {program.good[:12]} gave 3.0, as the record says\n")
    code, shown = replayed(capsys, program.bad[:10], *rest)
    assert code == 0
    assert shown.startswith("Traceback")
    assert f"ZeroDivisionError: division by zero\nratio {program.bad[:12]} raised this, as the record says" in shown
    assert "recovery/replay.py" not in shown
    assert replayed(capsys, program.call, *rest)[1].endswith("gave 6, as the record says\n")
    assert replayed(capsys, program.counter, "--call", 3, *rest)[1].endswith("has the state {'number': 3}\n")


@pytest.mark.cluster
def test_what_a_program_has_left(tmp_path, capsys):
    program = Program(tmp_path)
    file = tmp_path / "call.record"
    code, shown = replayed(capsys, program.call, "--to", file, "--state-dir", tmp_path)
    assert (code, shown) == (0, f"the record of Counter {program.call[:12]} is in {file}\n")
    program.end()
    code, shown = replayed(capsys, program.bad[:12], "--no-debug", "--state-dir", tmp_path)
    assert code == 0
    assert "ZeroDivisionError" in shown
    assert replayed(capsys, "--from", file, "--no-debug")[1].endswith("gave 6, as the record says\n")
    code, shown = replayed(capsys, program.good, "--no-debug", "--state-dir", tmp_path)
    assert code == 1
    assert f"have left in {tmp_path}: {program.bad[:12]} (ratio)" in shown
    on_a_terminal(program.bad, tmp_path)


def on_a_terminal(name, state_dir):
    """Stops in the code, where it raises, and ends as it did then."""
    near, far = pty.openpty()
    source = f"import sys; sys.path.append({str(PROJECT)!r}); from flowengine.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", source, "replay", name, "--state-dir", str(state_dir)]
    process = subprocess.Popen(command, stdin=far, stdout=far, stderr=far)
    os.close(far)
    stuck = threading.Timer(30, process.kill)
    stuck.start()
    answers = iter([b"p ('by is', by)\n", b"continue\n", b"p ('total is', total)\n", b"quit\n"])
    shown, answered = "", 0
    while True:
        try:
            shown += os.read(near, 4096).decode()
        except OSError:  # it has ended
            break
        if shown.count("(Pdb) ") > answered:
            answered += 1
            os.write(near, next(answers))
    stuck.cancel()
    os.close(near)
    assert process.wait() == 0
    assert "('by is', 0)" in shown
    assert f"('total is', {sum(range(50_000))})" in shown
    assert "as the record says" in shown


@pytest.mark.parametrize("arguments", [[], ["12345678", "--from", "file"]])
def test_one_thing_is_named(arguments, capsys):
    assert cli.main(["replay", "--no-debug", *arguments]) == 1
    assert "or a file with --from" in capsys.readouterr().err


def test_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert cli.main(["replay", "12345678"]) == 1
    assert "--no-debug" in capsys.readouterr().err


# --- files -------------------------------------------------------------------------------------------------------

LARGE = m.RefTo(b"b" * 16 + bytes(4), "owner")


def a_task(number: int) -> r.TaskTold:
    spec = m.TaskSpec(number.to_bytes(16, "big"), b"f", "square", deps=(LARGE,))
    return r.TaskTold(spec, codec.to_inline(codec.pack(abs)), (m.Stored(10, ("node",)),), (), b"", "task")


def test_records_are_for_this_user_alone(tmp_path):
    file = tmp_path / "one.record"
    records.write_record(file, "00", [a_task(1)])
    assert file.stat().st_mode & 0o777 == 0o600
    assert records.read_record(file) == ("00", [a_task(1)])
    file.chmod(0o620)
    with pytest.raises(BadValue, match="chmod 600"):
        records.read_record(file)


@pytest.mark.parametrize("content", [b"", b"text", b"\x92\xa20\xa20"])
def test_what_is_no_record(tmp_path, content):
    file = tmp_path / "one.record"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(BadValue, match="not the record"):
        records.read_record(file)
    with pytest.raises(BadValue, match="cannot be read"):
        records.read_record(tmp_path / "none.record")


def stored(value) -> memoryview:
    packed = codec.pack(value)
    view = memoryview(bytearray(codec.layout_bytes(packed)))
    codec.write_object(view, packed, b"name")
    return view


def test_stored_values_are_copied_and_old_files_go(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FILES_MAX", 3)
    monkeypatch.setattr(records, "BETWEEN_S", 0.0)
    kept = records.Records(str(tmp_path), lambda oid: stored([1, 2, 3]), lambda digits: [])
    for number in range(1, 6):
        task = a_task(number)
        kept.keep(c.KeepPiece(task.spec.id, task))
    kept.close()
    left = sorted(path.stem for path in (tmp_path / "failed").iterdir())
    assert len(left) == 3
    name, (piece,) = records.read_record(tmp_path / "failed" / f"{left[-1]}.record")
    assert name == left[-1]
    (value,) = piece.values
    assert codec.from_inline(value.blob) == [1, 2, 3]
    with pytest.raises(BadValue, match="give more digits"):
        records.kept_record(str(tmp_path), "0000")
    assert records.kept_record(str(tmp_path), left[-1]) == (name, [piece])
    assert records.kept_record(str(tmp_path), "ffff") is None


def test_a_value_that_is_too_large_is_left_out(monkeypatch):
    monkeypatch.setattr(records, "COPY_BYTES_MAX", 10)
    assert records.with_copies(a_task(1), {LARGE.oid: stored([1])}) == a_task(1)


def test_a_record_that_another_program_removes_meanwhile_is_passed_over(tmp_path, monkeypatch):
    kept, gone = tmp_path / "a.record", tmp_path / "b.record"
    kept.touch()
    monkeypatch.setattr(pathlib.Path, "glob", lambda folder, pattern: iter((gone, kept)))
    assert [path for _, path in records.by_age(tmp_path)] == [kept]
    records.prune(tmp_path)
