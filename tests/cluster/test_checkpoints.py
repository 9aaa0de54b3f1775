"""Large checkpoints on real processes: written while calls go on, passed over when they are bad, gone at the end."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

import flowengine as flow
from flowengine.errors import ActorDied
from tests.cluster.kit import python, until

pytestmark = pytest.mark.cluster

FLOATS = 1 << 20  # 8 MiB


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module", autouse=True)
def engine(folder):
    with flow.init(num_workers=2, state_dir=folder):
        yield


@flow.remote(checkpoint=5)
class Large:
    def __init__(self) -> None:
        self.count = 0
        self.state = np.zeros(FLOATS)
        self.fixed = np.arange(FLOATS)

    def add(self) -> int:
        self.count += 1
        self.state[self.count] = self.count
        assert self.state.sum() == self.count * (self.count + 1) / 2
        return self.count

    def pid(self) -> int:
        return os.getpid()


def add(actor, times: int) -> list[int]:
    return flow.get([actor.add.remote() for _ in range(times)], timeout=40)


def kill(actor) -> None:
    os.kill(flow.get(actor.pid.remote(), timeout=20), signal.SIGKILL)


def states(folder: Path, actor: object) -> list[Path]:
    """The files of an actor's checkpoints that name the others, oldest first."""
    start = repr(actor).rstrip(")").rpartition(" ")[2]
    found = folder.glob(f"live/*/actors/{start}*/*")
    names = [path for path in found if len(path.name) < 20 and ".part-" not in path.name]
    return sorted(names, key=lambda path: int(path.name.partition("-")[2]))


def with_states(folder: Path, count: int) -> tuple[object, int, list[Path]]:
    """An actor with so many checkpoints in files, and how often it was called."""
    actor, calls = Large.remote(), 0
    while len(states(folder, actor)) < count:
        calls = add(actor, 1)[-1]
    taken = flow.stats()["checkpoints_taken"]
    until(lambda: flow.stats()["checkpoints_taken"] >= taken)
    return actor, calls, states(folder, actor)


def test_a_large_state_is_exact_after_kills(folder):
    actor, calls, _ = with_states(folder, 1)
    for _ in range(3):
        kill(actor)
        calls += 7
        assert add(actor, 7)[-1] == calls


@pytest.mark.parametrize("harm", ["torn", "corrupt", "missing", "buffer"])
def test_a_bad_checkpoint_is_passed_over_for_the_one_before(folder, harm, caplog):
    actor, calls, _ = with_states(folder, 2)
    pid = flow.get(actor.pid.remote(), timeout=20)  # may be the call after which a third one is due
    until(lambda: "being written" not in flow.explain(actor))
    newest = states(folder, actor)[-1]
    if harm == "torn":
        newest.write_bytes(newest.read_bytes()[:-10])
    elif harm == "corrupt":
        newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    elif harm == "missing":
        newest.unlink()
    else:
        largest = max(newest.parent.glob("*"), key=lambda path: path.stat().st_mtime_ns * (len(path.name) > 20))
        largest.write_bytes(b"?" * largest.stat().st_size)
    for _ in range(2):  # the second time it has to know what the first passed over
        os.kill(pid, signal.SIGKILL)
        pid = flow.get(actor.pid.remote(), timeout=20)
        calls += 1
        assert add(actor, 1) == [calls]
    assert "a checkpoint is bad" in caplog.text


def test_a_checkpoint_that_was_good_once_may_turn_bad(folder):
    actor, calls, _ = with_states(folder, 2)
    kill(actor)
    assert add(actor, 1) == [calls + 1]
    until(lambda: "being written" not in flow.explain(actor))
    states(folder, actor)[-1].unlink()
    kill(actor)
    assert add(actor, 1) == [calls + 2]


def test_an_only_checkpoint_that_is_bad_leaves_the_constructor(folder):
    found: list[Path] = []
    while len(found) != 1:  # on a busy machine the last call may have led to a second one, after which the first counts
        actor, calls, _ = with_states(folder, 1)
        until(lambda actor=actor: "being written" not in flow.explain(actor))
        found = states(folder, actor)
    found[0].unlink()
    kill(actor)
    assert add(actor, 1) == [calls + 1]


def test_without_any_good_checkpoint_the_actor_is_dead_and_says_why(folder):
    actor, _, found = with_states(folder, 2)
    for path in found:
        path.write_bytes(b"nothing")
    kill(actor)
    with pytest.raises(ActorDied, match="none of its checkpoints can be used") as caught:
        add(actor, 1)
    assert found[-1].name in str(caught.value)


@pytest.mark.parametrize("point", ["actor.checkpoint.before_write", "actor.checkpoint.after_write"])
def test_a_death_around_the_writing_harms_nothing(folder, point):
    actor = Large.remote()
    with flow.chaos.at(point, flow.chaos.kill, of=actor) as arm:
        for calls in range(1, 25):
            assert add(actor, 1) == [calls]
        until(lambda: arm.fired)
    assert add(actor, 1) == [25]


def test_references_and_handles_in_a_large_state_stay_alive():
    @flow.remote(checkpoint=2)
    class Holder:
        def __init__(self) -> None:
            self.held, self.state = [], np.zeros(FLOATS)

        def add(self, held: list[object] | None = None) -> int:
            self.held += held or []
            return len(self.held)

        def read(self) -> tuple[float, int]:
            return float(flow.get(self.held[0]).sum()), flow.get(self.held[1].add.remote())

        def pid(self) -> int:
            return os.getpid()

    holder, before = Holder.remote(), flow.stats()["checkpoints_taken"]
    flow.get(holder.add.remote([flow.put(np.ones(100_000)), Large.remote()]))
    while flow.stats()["checkpoints_taken"] < before + 2:
        add(holder, 1)
    kill(holder)
    assert flow.get(holder.read.remote(), timeout=20) == (100_000.0, 1)


def test_files_go_with_the_actor(folder):
    actor, _, (newest,) = with_states(folder, 1)
    del actor
    until(lambda: not newest.parent.exists())


def test_an_actor_of_coroutines_goes_on_while_its_state_is_written(folder):
    @flow.remote(checkpoint=3)
    class Loop:
        def __init__(self) -> None:
            self.count, self.state = 0, np.ones(FLOATS)

        async def add(self) -> int:
            self.count += 1
            return self.count

        async def pid(self) -> int:
            return os.getpid()

    actor = Loop.remote()
    before = flow.stats()["checkpoints_taken"]
    assert add(actor, 20)[-1] == 20
    until(lambda: flow.stats()["checkpoints_taken"] > before)
    kill(actor)
    assert add(actor, 1) == [21]


def test_a_state_that_cannot_be_pickled_is_told_once_with_its_culprit(caplog):
    @flow.remote(checkpoint=2)
    class Locked:
        def __init__(self) -> None:
            self.count = 0
            self.inner = {"gate": threading.Lock()}

        def add(self) -> int:
            self.count += 1
            return self.count

        def pid(self) -> int:
            return os.getpid()

    actor = Locked.remote()
    calls = 0
    for _ in range(2):
        calls += 5
        assert add(actor, 5)[-1] == calls
        kill(actor)
    assert add(actor, 1)[-1] == calls + 1
    told = [line for line in caplog.text.splitlines() if "no checkpoints are taken" in line]
    assert len(told) == 1
    assert "Locked.inner['gate'] is a _thread.lock" in told[0]
    assert "__flow_save__" in told[0]


def test_a_flow_save_that_raises_is_told(caplog):
    @flow.remote(checkpoint=2)
    class Broken:
        def add(self) -> int:
            return 1

        def __flow_save__(self) -> object:
            raise ValueError("not today")

    actor = Broken.remote()
    assert add(actor, 5) == [1] * 5
    until(lambda: "Broken.__flow_save__ raised ValueError: not today" in caplog.text)


PROGRAM = """
import sys, os, signal, numpy as np, flowengine as flow

@flow.remote(checkpoint=2)
class Large:
    def __init__(self):
        self.count, self.state = 0, np.zeros(1 << 20)
    def add(self):
        self.count += 1
        return self.count
    def pid(self):
        return os.getpid()

if __name__ == "__main__":
    with flow.init(1, state_dir=sys.argv[1]):
        actor = Large.remote()
        value = flow.put(np.zeros(1 << 20), durable=True)
        for _ in range(9):
            flow.get(actor.add.remote())
        while not flow.stats()["checkpoints_taken"]:
            flow.get(actor.add.remote())
        before = flow.get(actor.add.remote())
        os.kill(flow.get(actor.pid.remote()), signal.SIGKILL)
        print(flow.get(actor.add.remote()) - before, flush=True)
        if len(sys.argv) > 2:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


@pytest.mark.parametrize("scheme", ["", "file://", "local://", "memory://"])
def test_storage_by_url_and_nothing_is_left_of_it(tmp_path, scheme):
    url = f"{scheme}{tmp_path}/kept"
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = python(str(tmp_path / "program.py"), url, cwd=tmp_path)
    assert ended.stdout.strip() == "1", ended.stderr
    assert not files_below(tmp_path / "kept")


def test_nothing_is_left_of_a_program_that_was_killed(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = python(str(tmp_path / "program.py"), str(tmp_path / "kept"), "killed", cwd=tmp_path)
    assert (ended.stdout.strip(), ended.returncode) == ("1", -signal.SIGKILL), ended.stderr
    until(lambda: not files_below(tmp_path / "kept"))


def test_a_storage_of_no_use_is_refused_at_once():
    ended = python("-c", "import flowengine as flow; flow.init(1, state_dir='s3://nowhere/x')")
    assert "BadValue: state_dir s3://nowhere/x needs a package that is not installed" in ended.stderr
