"""`flow top`, `flow memory`, `flow logs`, `flow status --json`: on a running engine, and what they refuse."""
from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading

import numpy as np
import pytest

import flowengine as flow
from flowengine import cli
from flowengine.observe import tables, watch
from flowengine.runtime.worker_logs import ENDED_KEPT_MAX, WorkerLog, WorkerLogs
from tests.cluster.kit import until
from tests.runtime.kit import PROJECT

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """An engine that holds something, runs something, and has something that cannot run."""
    state_dir = str(tmp_path_factory.mktemp("state"))
    with flow.init(num_workers=2, state_dir=state_dir, log_to_driver=False):
        yield state_dir
    assert not os.path.exists(os.path.join(state_dir, "logs"))


@flow.remote(max_retries=0)
def chatty(began, go_on, text):
    print(text, flush=True)
    began.set()
    go_on.wait()
    return np.zeros(500_000)


@flow.remote
class Talker:
    def say(self, text):
        print(text, flush=True)


@flow.remote(num_gpus=3)
def impossible():
    return 1


@pytest.fixture
def flow_command(engine, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        code = cli.main([*arguments, "--state-dir", engine])
        found = capsys.readouterr()
        return code, found.out, found.err

    return run


def test_top(flow_command):
    began, go_on = flow.Event(), flow.Event()
    ref, waiting = chatty.remote(began, go_on, "top"), impossible.remote()
    began.wait()
    until(lambda: "no node has GPU" in repr(waiting))
    code, out, _ = flow_command("top", "--once")
    assert code == 0
    assert "workers" in out
    assert "chatty" in out
    assert "no node has GPU" in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = flow_command("top", "--json")
    found = json.loads(out)
    (running,) = [worker for node in found["nodes"] for worker in node["workers"] if worker["name"] == "chatty"]
    assert running["age_s"] > 0
    assert running["memory_bytes"] > 0
    assert found["rates"].keys() == {"tasks_executed", "calls_executed"}
    assert "no node has GPU" in flow_command("status")[1]
    assert json.loads(flow_command("status", "--json")[1])["totals"]["tasks"]["ready"] == 1
    go_on.set()
    flow.cancel(waiting)
    flow.get(ref)


def on_terminal(descriptor: int) -> None:
    """Make a process that is about to begin the one in front of a terminal, with Ctrl-C as usual."""
    os.setsid()
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # who starts tests in the background ignores it, and so would this


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_top_on_a_terminal_ends_with_a_key(engine, key):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "flowengine.cli", "top", "--interval", "0.2", "--state-dir", engine]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "TERM": "xterm"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment, cwd=PROJECT,
                          preexec_fn=lambda: on_terminal(theirs)) as process:
        os.close(theirs)
        try:
            shown = b""
            while shown.count(b"session") < 2:
                shown += os.read(ours, 65_536)
            os.write(ours, key)
            while process.poll() is None:
                with contextlib.suppress(OSError):
                    os.read(ours, 65_536)
            assert process.returncode == 0
            assert process.stderr is not None
            assert process.stderr.read() == b""
        finally:
            process.kill()
            os.close(ours)


def test_memory(flow_command):
    value, small = flow.put(np.zeros(250_000)), flow.put("small")
    code, out, _ = flow_command("memory")
    assert code == 0
    assert "1.9 MiB" in out
    assert "put()" in out
    assert max(map(len, out.splitlines())) <= 80
    found = json.loads(flow_command("memory", "--json", "--limit", "1")[1])
    (largest,) = found["objects"]
    assert (largest["id"], largest["places"], largest["refs"]) == (value.hex(), ["memory"], 1)
    assert found["not_listed"] >= 1
    assert "by function" in flow_command("memory", "--by", "function")[1]
    assert "program" in flow_command("memory", "--by", "owner")[1]
    del small


def test_logs_of_a_task_an_actor_and_a_worker(flow_command):
    began, go_on, talker = flow.Event(), flow.Event(), Talker.remote()
    go_on.set()
    first, second = chatty.remote(began, go_on, "of the first"), chatty.remote(began, go_on, "of the second  ")
    flow.get([first, second, talker.say.remote("of the actor")])
    until(lambda: "of the actor" in flow_command("logs")[1])
    out = flow_command("logs", first.hex()[:32])[1]
    assert "of the first" in out
    assert "of the second" not in out
    assert "of the actor" not in out
    out = flow_command("logs", talker.actor_id)[1]
    assert "of the actor" in out
    assert "of the first" not in out
    (line,) = flow_command("logs", talker.actor_id, "--json", "-n", "1")[1].splitlines()
    found = json.loads(line)
    assert (found["text"], found["stream"]) == ("of the actor", "out")
    assert "of the actor" in flow_command("logs", found["worker_id"])[1]
    assert "of the actor" in flow_command("logs", str(found["pid"]))[1]
    assert len(flow_command("logs", "-n", "2")[1].splitlines()) == 2


def test_each_line_is_of_whoever_printed_it(flow_command):
    @flow.remote
    def short(text):
        print(text)
        print()
        print("half ", end="", flush=True)
        print("of", text)

    refs = [short.remote(f"short {number}") for number in range(20)]
    flow.get(refs)
    talker = Talker.remote()
    calls = [talker.say.remote(f"said {number}") for number in range(5)]
    flow.get(calls)
    until(lambda: "said 4" in flow_command("logs")[1])
    for number, ref in enumerate(refs):
        lines = flow_command("logs", ref.hex()[:12], "--json")[1].splitlines()
        assert [json.loads(line)["text"] for line in lines] == [f"short {number}", "", f"half of short {number}"]
    (line,) = flow_command("logs", calls[3].hex()[:12], "--json")[1].splitlines()
    assert json.loads(line)["text"] == "said 3"
    assert len(flow_command("logs", talker.actor_id)[1].splitlines()) == 5


@flow.remote
class Murmurs:
    def __init__(self) -> None:
        print("made", end="")

    def say(self, text: str) -> None:
        print(text, end="")

    async def wait(self, text: str, here: flow.Event, go_on: flow.Event) -> None:
        print(text, end="")
        here.set()
        await asyncio.to_thread(go_on.wait)


@flow.remote
def murmur(text: str, raw: bool = False) -> None:
    if raw:
        sys.stdout.buffer.write(text.encode())
    else:
        print(text, end="")
    print(text, "as a warning", end="", file=sys.stderr)


def texts(flow_command, ref) -> list[str]:
    return sorted(json.loads(line)["text"] for line in flow_command("logs", ref.hex()[:12], "--json")[1].splitlines())


def test_half_a_line_is_shown_as_that_of_the_task_that_printed_it_when_it_ends(flow_command):
    refs = [murmur.remote(f"half {number}", number % 2 == 0) for number in range(20)]
    flow.get(refs)
    until(lambda: all(len(texts(flow_command, ref)) == 2 for ref in refs))
    for number, ref in enumerate(refs):
        assert texts(flow_command, ref) == [f"half {number}", f"half {number} as a warning"]


def test_half_a_line_of_a_call_is_shown_when_it_ends(flow_command):
    actor = Murmurs.remote()
    here, go_on = flow.Event(), flow.Event()
    long = actor.wait.remote("of the long one", here, go_on)
    here.wait()
    calls = [actor.say.remote(f"call {number}") for number in range(3)]
    flow.get(calls)
    until(lambda: texts(flow_command, calls[2]))
    assert [texts(flow_command, one) for one in (*calls, long)] == [
        ["call 0"], ["call 1"], ["call 2"], ["of the long one"]]
    assert "made" in flow_command("logs", actor.actor_id)[1]
    go_on.set()
    flow.get(long)


def test_logs_of_a_worker_that_was_killed_stay(flow_command):
    @flow.remote(max_retries=0)
    def dies(began):
        print("last words", flush=True)
        began.set()
        flow.Event().wait()

    began = flow.Event()
    ref = dies.remote(began)
    began.wait()
    flow.chaos.kill_worker(of=ref)
    with pytest.raises(flow.WorkerCrashed):
        flow.get(ref)
    assert "last words" in flow_command("logs", ref.hex()[:12])[1]


def test_logs_that_are_followed(engine, capsys):
    seen, talker = threading.Event(), Talker.remote()
    flow.get(talker.say.remote("before"))
    show = watch.show

    def stop_at_the_end(lines, plain):
        show(lines, plain)
        if any("after" in line["text"] for line in lines):
            raise KeyboardInterrupt
        seen.set()

    def speak():
        assert seen.wait(30)
        flow.get(talker.say.remote("after"))

    speaker = threading.Thread(target=speak)
    speaker.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "show", stop_at_the_end)
        assert cli.main(["logs", "--follow", talker.actor_id, "--state-dir", engine]) == 0
    speaker.join()
    out = capsys.readouterr().out
    assert out.count("before") == out.count("after") == 1


def test_logs_are_followed_over_the_death_of_the_head(engine, capsys, monkeypatch):
    talker, went_on, show = Talker.remote(), threading.Event(), watch.show
    flow.get(talker.say.remote("first"))

    def see(lines, plain):
        show(lines, plain)
        if any("second" in line["text"] for line in lines):
            raise KeyboardInterrupt
        if not went_on.is_set():
            went_on.set()
            flow.chaos.kill_head()
            flow.get(talker.say.remote("second"))

    monkeypatch.setattr(watch, "show", see)
    assert cli.main(["logs", "--follow", talker.actor_id, "--state-dir", engine]) == 0
    assert "second" in capsys.readouterr().out


def test_nothing_is_known_of_it(flow_command):
    code, out, error = flow_command("logs", "deadbeef")
    assert (code, out) == (1, "")
    assert "deadbeef" in error


@pytest.mark.parametrize(("arguments", "told"), [
    (("story", "dead"), "at least 8"), (("explain", "dead"), "at least 8"), (("explain", "deadbeef"), "flow story"),
    (("story", ""), "must not be empty"), (("explain", " "), "must not be empty")])
def test_names_that_are_nobodys(flow_command, arguments, told):
    code, out, error = flow_command(*arguments)
    assert (code, out) == (1, "")
    assert told in error


@pytest.mark.parametrize(("arguments", "told"), [
    (["logs", "abc"], "too short"), (["logs", "-n", "-1"], "--lines"), (["memory", "--limit", "0"], "--limit"),
    (["top", "--interval", "0"], "--interval"),
])  # fmt: skip
def test_what_is_refused(flow_command, arguments, told):
    code, _, error = flow_command(*arguments)
    assert code == 1
    assert told in error


@pytest.mark.parametrize("command", ["top", "memory", "logs"])
def test_without_an_engine(command, tmp_path, capsys):
    assert cli.main([command, "--state-dir", str(tmp_path)]) == 1
    assert "--join FILE" in capsys.readouterr().err


# --- the files ----------------------------------------------------------------------------------------------------


def test_a_log_is_bounded_and_is_read_from_any_place(tmp_path):
    log = WorkerLog(str(tmp_path / "logs" / "w.log"), 2_000)
    places = []
    for number in range(200):
        places.append(log.end)
        log.write("out", ("ab" * 16, ""), [f"line {number}"])
    assert sum(path.stat().st_size for path in (tmp_path / "logs").iterdir()) <= 2_000
    text, place = log.read(0, 1 << 20)
    lines = text.splitlines()
    assert lines[-1].endswith("abababababab ------------ line 199")
    assert [int(line.rpartition(" ")[2]) for line in lines] == list(range(200 - len(lines), 200))
    assert place == log.end
    assert log.read(place, 1 << 20) == ("", place)
    assert log.read(places[197], 1 << 20)[0].count("\n") == 3
    assert log.read(-100, 1 << 20)[0].count("\n") in (1, 2)
    text, place = log.read(places[190], 100)
    assert text.endswith("\n")
    assert log.read(place, 1 << 20)[0].splitlines()[0].endswith(f"line {190 + text.count(chr(10))}")
    log.close()


def test_logs_of_many_workers_that_ended(tmp_path):
    logs = WorkerLogs(str(tmp_path / "logs" / "here"), 1_000)
    for number in range(ENDED_KEPT_MAX + 3):
        logs.keep(f"w{number}", number, ("", ""), ("err", ["x"]))
        logs.ended(f"w{number}")
    assert len(logs.logs) == ENDED_KEPT_MAX
    assert len(list((tmp_path / "logs" / "here").iterdir())) == ENDED_KEPT_MAX
    assert next(one["worker_id"] for one in logs.asked({})) == "w3"
    assert logs.asked({"places": {f"w{number}": 1_000 for number in range(200)}}) == []
    logs.close()
    assert list(tmp_path.iterdir()) == []


def test_no_logs_are_kept_when_none_are_wanted(tmp_path):
    logs = WorkerLogs(str(tmp_path / "none"), 0)
    logs.keep("w", 1, ("", ""), ("out", ["x"]))
    assert logs.asked(None) == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("size_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1.0 MiB"),
                                                  (5 << 40, "5.0 TiB")])
def test_sizes(size_bytes, text):
    assert tables.size(size_bytes) == text


@pytest.mark.parametrize(("age_s", "text"), [(-1, ""), (0.02, "20 ms"), (3.21, "3.2 s"), (300, "5 min"),
                                             (8_000, "2 h"), (200_000, "2 d")])
def test_ages(age_s, text):
    assert tables.age(age_s) == text
