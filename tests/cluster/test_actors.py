"""Actors on real processes: state, order and calls survive the loss of the actor, its callers, and both in turn."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

import flowengine as flow

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def engine():
    with flow.init(num_workers=2):
        yield


@flow.remote
class Tally:
    def __init__(self) -> None:
        self.lines: list[object] = []

    def add(self, line: object) -> int:
        self.lines.append(line)
        return len(self.lines)

    def all(self) -> list[object]:
        return list(self.lines)

    def pid(self) -> int:
        return os.getpid()


def kill(actor) -> None:
    os.kill(flow.get(actor.pid.remote(), timeout=20), signal.SIGKILL)


@pytest.mark.parametrize("checkpoint", ["never", 3, "0.05s", "adaptive"])
def test_state_is_exact_after_many_deaths(checkpoint):
    tally = Tally.options(checkpoint=checkpoint).remote()
    seen = []
    for number in range(4):
        refs = [tally.add.remote(number) for _ in range(10)]
        kill(tally)
        seen += flow.get(refs, timeout=40)
    assert seen == list(range(1, 41))


def test_a_caller_that_runs_again_finds_its_calls_done(tmp_path):
    tally = Tally.remote()

    @flow.remote
    def caller(tally):
        first = flow.get(tally.add.remote("one"))
        second = flow.get(tally.add.remote("two"))
        if not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        third = flow.get(tally.add.remote("three"))
        return first, second, third

    assert flow.get(caller.remote(tally), timeout=40) == (1, 2, 3)
    assert flow.get(tally.all.remote(), timeout=20) == ["one", "two", "three"]


def test_calls_of_a_caller_that_is_gone_are_replayed():
    tally = Tally.options(checkpoint="never").remote()

    @flow.remote
    def caller(tally, name):
        return flow.get([tally.add.remote((name, i)) for i in range(5)])[-1]

    flow.get([caller.remote(tally, name) for name in "ab"], timeout=20)
    before = flow.get(tally.all.remote())
    for worker in [w.worker_id for node in flow.nodes() for w in node.workers if w.state == "idle"]:
        flow.chaos.kill_worker(of=worker)
    kill(tally)
    assert flow.get(tally.all.remote(), timeout=30) == before


def test_refs_in_the_state_stay_alive_over_deaths():
    @flow.remote(checkpoint=1)
    class Keeper:
        def __init__(self):
            self.refs = []

        def keep(self, refs):
            self.refs += refs
            return len(self.refs)

        def total(self):
            return float(sum(flow.get(ref)[0] for ref in self.refs))

        def pid(self):
            return os.getpid()

    keeper = Keeper.remote()
    flow.get([keeper.keep.remote([flow.put(np.full(1 << 17, float(i)))]) for i in range(3)])
    for _ in range(2):
        kill(keeper)
        assert flow.get(keeper.total.remote(), timeout=30) == 3.0


def test_choices_inside_of_methods_are_repeated():
    @flow.remote(checkpoint="never")
    class Dice:
        def __init__(self):
            self.thrown = []

        def throw(self):
            self.thrown.append(flow.record(lambda: os.urandom(4)))
            return list(self.thrown)

        def pid(self):
            return os.getpid()

    dice = Dice.remote()
    before = flow.get([dice.throw.remote() for _ in range(3)])[-1]
    kill(dice)
    assert flow.get(dice.throw.remote(), timeout=30)[:3] == before


def test_two_threads_and_a_death_lose_nothing():
    tally = Tally.remote()

    def push(name):
        for i in range(40):
            flow.get(tally.add.remote((name, i)), timeout=40)

    threads = [threading.Thread(target=push, args=(name,)) for name in "xy"]
    for thread in threads:
        thread.start()
    for _ in range(2):
        kill(tally)
    for thread in threads:
        thread.join()
    lines = flow.get(tally.all.remote(), timeout=20)
    assert sorted(lines) == sorted((name, i) for name in "xy" for i in range(40))


def test_bad_options_are_refused_when_given():
    for bad in ({"checkpoint": 0}, {"checkpoint": "often"}, {"recovery": "maybe"}, {"lifetime": "for ever"},
                {"max_concurrency": 0}, {"num_returns": 2}, {"no_such": 1}):
        with pytest.raises((ValueError, TypeError)):
            Tally.options(**bad)
    with pytest.raises(ValueError, match="threads"):
        Tally.options(max_concurrency=2).remote()
    with pytest.raises(flow.ActorNotFound):
        flow.get_actor("nobody")
    with pytest.raises(TypeError):
        flow.kill("not an actor")
    with pytest.raises(flow.UsageError):
        flow.exit_actor()


def test_exit_ends_the_actor_after_the_call():
    @flow.remote
    class Quitter:
        def quit(self):
            flow.exit_actor()

    quitter = Quitter.remote()
    assert flow.get(quitter.quit.remote(), timeout=20) is None
    with pytest.raises(flow.ActorDied, match="exit_actor"):
        flow.get(quitter.quit.remote(), timeout=20)


def test_a_call_can_be_cancelled_and_the_next_runs():
    gate = threading.Event()

    @flow.remote
    class Slow:
        def nap(self):
            import time

            time.sleep(600)

        def ping(self):
            return "pong"

    slow = Slow.remote()
    assert flow.get(slow.ping.remote(), timeout=20) == "pong"
    running, waiting = slow.nap.remote(), slow.nap.remote()
    gate.wait(0.2)
    flow.cancel(waiting)
    flow.cancel(running)
    for ref in (running, waiting):
        with pytest.raises(flow.TaskCancelled):
            flow.get(ref, timeout=20)
    assert flow.get(slow.ping.remote(), timeout=20) == "pong"


def test_a_time_limit_of_a_call():
    @flow.remote
    class Slow:
        def nap(self):
            import time

            time.sleep(600)

        def ping(self):
            return "pong"

    slow = Slow.remote()
    with pytest.raises(flow.TaskTimeout):
        flow.get(slow.nap.options(timeout_s=0.3).remote(), timeout=20)
    assert flow.get(slow.ping.remote(), timeout=20) == "pong"
