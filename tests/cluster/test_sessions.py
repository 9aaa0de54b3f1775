"""Programs around a live engine: how they start, what workers see of them, how they end; and what stays small."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

import flowengine as flow
from flowengine.runtime.link import Endpoint, PeerGone
from tests.cluster.kit import gone, python, until
from tests.runtime.kit import PROJECT

pytestmark = pytest.mark.cluster

ADD_ONE = """
import flowengine as flow
@flow.remote
def add_one(x): return x + 1
print(flow.get([add_one.remote(i) for i in range(3)]))
"""


@flow.remote
def same(x):
    return x


@pytest.fixture
def fresh():
    yield flow.init(num_workers=2)
    flow.shutdown()


def processes():
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


# --- how a program may be started ---------------------------------------------------------------------


def test_from_the_command_line_from_stdin_and_without_a_main_guard(tmp_path):
    (tmp_path / "script.py").write_text(ADD_ONE)
    for program in (
        python("-c", ADD_ONE),
        python("-", cwd=tmp_path, stdin=ADD_ONE),
        python("-m", "script", cwd=tmp_path),
    ):
        assert (program.stdout, program.returncode) == ("[1, 2, 3]\n", 0), program.stderr


def test_workers_import_what_the_program_can_import(tmp_path):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "package").mkdir(parents=True)
    elsewhere.mkdir()
    (project / "package" / "__init__.py").touch()
    (project / "package" / "part.py").write_text("class Error(Exception): pass\ndef double(x): return 2 * x\n")
    (project / "script.py").write_text("""
import os
import flowengine as flow
from package.part import Error, double
class Mine:
    def __init__(self, x): self.x = x
def wrap(x): return Mine(double(x))
@flow.remote
def wrapped(x):
    from package import part
    return wrap(x), part.double is double, os.getcwd()
@flow.remote
def fails(): raise Error("e")
if __name__ == "__main__":
    mine, is_same, folder = flow.get(wrapped.remote(3))
    try:
        flow.get(fails.remote())
    except Error:
        print(type(mine) is Mine, mine.x, is_same, folder == os.getcwd())
""")
    program = python(str(project / "script.py"), cwd=elsewhere)
    assert (program.stdout, program.returncode) == ("True 6 True True\n", 0), program.stderr


def test_files_of_the_working_directory_do_not_stand_in_for_modules(tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit('not this one')")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "script.py").write_text(ADD_ONE)
    program = python("elsewhere/script.py", cwd=tmp_path)
    assert (program.stdout, program.returncode) == ("[1, 2, 3]\n", 0), program.stderr


def test_environment_of_tasks_is_that_of_the_program(fresh, monkeypatch):
    wanted = {name: os.environ.get(name) for name in ("PATH", "PYTHONPATH", "HOME")}
    assert flow.get(flow.remote(lambda: {name: os.environ.get(name) for name in wanted}).remote()) == wanted


# --- sessions after each other ------------------------------------------------------------------------


def test_one_session_after_another_leaves_nothing_in_the_process():
    def once(number):
        with flow.init(num_workers=1):
            assert flow.get(same.remote(number)) == number  # the same function, made before any session

    once(0)
    before = psutil.Process().num_fds(), threading.active_count()
    for number in range(2):
        once(number)
    assert (psutil.Process().num_fds(), threading.active_count()) <= before
    assert len(processes()) == 1


def test_what_is_left_of_an_ended_session_says_what_it_is():
    @flow.remote
    class Actor:
        def same(self, x):
            return x

    with flow.init(num_workers=1):
        ref, actor = same.remote(1), Actor.remote()
    with pytest.raises(flow.StaleSession, match=r"^ObjectRef\(.*the value went with it"):
        flow.get(ref)
    for use in (lambda: actor.same.remote(1), lambda: flow.kill(actor)):
        with pytest.raises(flow.StaleSession, match=r"^ActorHandle\(Actor .*the actor went with it"):
            use()


def test_handles_pass_through_a_process_without_a_session_and_are_refused_where_they_are_used(tmp_path):
    program = (
        "import copy, pickle, sys\nimport flowengine as flow\n"
        "new = copy.deepcopy(flow.Queue('new'))\n"
        "ref, actor, queue = passed = pickle.loads(pickle.loads(sys.stdin.buffer.read()))\n"
        "sys.stdout.buffer.write(pickle.dumps(passed))\n"
        "for use in (lambda: flow.get(ref), lambda: actor.same.remote(1), lambda: queue.get(timeout=1), ref.future):\n"
        "    try:\n        use()\n    except flow.StaleSession as error:\n        print(error, file=sys.stderr)\n"
        "assert not flow.is_initialized() and 'another process' in repr(ref), repr(ref)\n"
        "with flow.init(num_workers=1):\n    new.put(1)\n    assert new.get() == 1\n"
        "    try:\n        flow.put([ref])\n"
        "    except flow.SerializationError as error:\n        print(error, file=sys.stderr)\n"
    )

    @flow.remote
    class Actor:
        def same(self, x):
            return x

    with flow.init(num_workers=1):
        kept = same.remote(1), Actor.remote(), flow.Queue()
        child = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(pickle.dumps(kept)),
                               capture_output=True, timeout=60, cwd=PROJECT)
        told = child.stderr.decode().splitlines()
        assert len([line for line in told if "belongs to the session of another process" in line]) == len(told) == 5
        assert child.returncode == 0
        ref, actor, queue = pickle.loads(child.stdout)
        assert (flow.get(ref), flow.get(actor.same.remote(2)), queue) == (1, 2, kept[2])


def test_shutdown_ends_waits_in_other_threads():
    flow.init(num_workers=1)
    began, told = threading.Event(), []

    def wait():
        ref = flow.remote(time.sleep).remote(60)
        began.set()
        try:
            flow.get(ref)
        except flow.StaleSession as error:
            told.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    began.wait()
    flow.shutdown()
    thread.join(timeout=10)
    assert len(told) == 1


def test_start_that_fails_says_why_and_the_next_one_works(tmp_path):
    bare = tmp_path / "bare.py"
    bare.write_text("import sys, flowengine as flow\nsys.executable = '/bin/false'\nflow.init()")
    program = python("-c", f"exec(open({str(bare)!r}).read())")
    assert "HeadLost" in program.stderr.splitlines()[-1]
    assert program.returncode == 1


def test_a_node_that_cannot_be_reached_is_told(monkeypatch):
    async def unreached(endpoint, peer):
        raise PeerGone(f"{peer} is gone")

    monkeypatch.setattr(Endpoint, "connect", unreached)
    with pytest.raises(flow.HeadLost, match=r"node of this host cannot be reached: tcp.* is gone"):
        flow.init(1)
    assert not flow.is_initialized()


# --- children of the program ----------------------------------------------------------------------------


def in_child(work):
    """Run in a forked child; its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_forked_child_has_no_part_in_the_session(fresh):
    ref = same.remote(1)

    def work():
        for attempt in (lambda: flow.get(ref), lambda: same.remote(2)):
            try:
                attempt()
            except flow.StaleSession as error:
                if "forked" not in str(error):
                    return 2
            else:
                return 1
        return 0

    assert in_child(work) == 0
    assert flow.get(ref, timeout=10) == 1


def test_forked_child_may_have_an_engine_of_its_own(fresh):
    def work():
        with flow.init(num_workers=1):
            return flow.get(same.remote(7), timeout=20)

    assert in_child(work) == 7
    assert flow.get(same.remote(1), timeout=10) == 1


def test_engine_ends_with_its_program_though_a_child_lives_on(tmp_path):
    program = python("-c", f"""
import os, signal, subprocess, sys, time
import flowengine as flow, psutil
flow.init(num_workers=1)
flow.get(flow.remote(len).remote([]))
engine = [p.pid for p in psutil.Process().children(recursive=True)]
child = os.fork()
if child == 0:
    os.close(1), os.close(2)
    time.sleep(60)
open({str(tmp_path / "pids")!r}, "w").write(" ".join(map(str, [child, *engine])))
os.kill(os.getpid(), signal.SIGKILL)
""")
    assert program.returncode == -signal.SIGKILL, program.stderr
    child, *engine = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    try:
        until(lambda: all(gone(pid) for pid in engine), patience_s=10)
        assert not gone(child)
    finally:
        os.kill(child, signal.SIGKILL)


# --- signals ------------------------------------------------------------------------------------------


def test_signal_handlers_of_the_program_run_while_it_waits(fresh):
    class Alarm(Exception):
        pass

    def ring(number, frame):
        raise Alarm

    slow = flow.remote(time.sleep).remote(0.3)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Alarm):
            flow.get(slow)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert flow.get(slow, timeout=10) is None


def test_engine_stands_a_storm_of_interrupts():
    program = python("-c", """
import os, signal, threading, time
import flowengine as flow
flow.init(num_workers=2)
@flow.remote
def same(x): return x
storm = threading.Event()
def shoot():
    for _ in range(100):
        time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)
    storm.set()
threading.Thread(target=shoot).start()
interrupted = 0
while True:
    try:
        while not storm.is_set():
            flow.get([same.remote(i) for i in range(20)])
        break
    except KeyboardInterrupt:
        interrupted += 1
assert interrupted > 50, interrupted
assert flow.get([same.remote(i) for i in range(100)], timeout=10) == list(range(100))
assert flow.available_resources()
""")
    assert program.returncode == 0, program.stderr


# --- prints -------------------------------------------------------------------------------------------


def test_last_words_and_half_lines_arrive():
    program = python("-c", """
import subprocess, sys
import flowengine as flow
@flow.remote
def speaks():
    print("a line")
    sys.stdout.buffer.write(b"\\xff no text\\n")
    subprocess.run(["echo", "of a child"])
    sys.stdout.write("half of one")
    print("an error", file=sys.stderr)
flow.get(speaks.remote())
""")
    assert program.returncode == 0, program.stderr
    for words in (") a line", "no text", "of a child", "half of one"):
        assert program.stdout.count(words) == 1, (words, program.stdout)
    assert program.stderr.count("an error") == 1


# --- what stays small ---------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_number_of_tasks(fresh):
    def run(count):
        for _ in range(count // 1_000):
            flow.get([same.remote(number) for number in range(1_000)], timeout=30)

    def resident():
        return {process.pid: process.memory_info().rss for process in processes()}

    run(25_000)  # the timeline's memory is full now
    before = resident()
    run(15_000)
    for pid, resident_bytes in resident().items():
        assert resident_bytes - before.get(pid, resident_bytes) < 15_000 * 200, psutil.Process(pid).name()


def test_idle_engine_costs_next_to_nothing(fresh):
    def spent_s():
        return sum(sum(process.cpu_times()[:2]) for process in processes())

    flow.get([same.remote(np.zeros(100_000)) for _ in range(20)], timeout=20)
    until(lambda: flow.available_resources() == flow.cluster_resources())
    before_s, began_s = spent_s(), time.monotonic()
    threading.Event().wait(1.5)
    assert (spent_s() - before_s) / (time.monotonic() - began_s) < 0.05
