"""Who an actor belongs to on real processes: it ends when nobody can call it, and lives on without its maker."""

from __future__ import annotations

import gc
import os
import signal

import numpy as np
import pytest

import flowengine as flow
from flowengine.core.ids import object_id
from flowengine.core.messages import HANDLE
from flowengine.refs import Current
from tests.cluster.kit import gone, two_workers, until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def engine():
    yield from two_workers()


@flow.remote(checkpoint="never")
class Tally:
    def __init__(self, first: int = 0) -> None:
        self.total = first

    def add(self, value: object) -> int:
        self.total += int(np.sum(value))
        return self.total

    def pid(self) -> int:
        return os.getpid()


@flow.remote
def ones(tally) -> np.ndarray:
    flow.get(tally.add.remote(1))
    return np.ones(1 << 18)


@flow.remote
def adds_ones(tally) -> int:
    return flow.get(tally.add.remote(ones.remote(tally)))


def test_an_actor_ends_though_its_calls_hold_what_was_made_with_its_handle():
    tally = Tally.remote()
    pid = flow.get(tally.pid.remote())
    large = ones.remote(tally)
    assert flow.get([tally.add.remote(large), adds_ones.remote(tally)])
    assert flow.get(tally.add.remote(0)) == 2 + 2 * (1 << 18)
    del tally
    gc.collect()
    flow.chaos.lose(large)
    assert flow.get(large).size == 1 << 18  # it can be made again as long as somebody holds it
    del large
    until(lambda: gone(pid))


@flow.remote
def makes(first: int = 0):
    tally = Tally.remote(first)
    flow.get(tally.add.remote(1))
    return tally, os.getpid()


def test_an_actor_lives_on_when_its_maker_and_then_itself_is_killed():
    tally, maker = flow.get(makes.remote(5), timeout=20)
    os.kill(maker, signal.SIGKILL)
    until(lambda: gone(maker))
    assert flow.get(tally.add.remote(1), timeout=20) == 7
    os.kill(flow.get(tally.pid.remote()), signal.SIGKILL)
    assert flow.get(tally.add.remote(1), timeout=20) == 8


def test_a_maker_that_runs_again_gets_its_actor_as_it_is():
    @flow.remote(max_retries=2)
    def makes_and_adds():
        tally = Tally.remote()
        totals = [flow.get(tally.add.remote(value)) for value in (1, 10)]
        pid = flow.get(tally.pid.remote())
        totals.append(flow.get(tally.add.remote(100)))
        return tally, pid, totals

    with flow.chaos.at("task.reply.before_send", flow.chaos.kill, of="makes_and_adds") as arm:
        tally, pid, totals = flow.get(makes_and_adds.remote(), timeout=30)
    assert arm.fired
    assert totals == [1, 11, 111]
    assert flow.get(tally.add.remote(0)) == 111
    assert flow.get(tally.pid.remote()) == pid


def test_a_maker_that_raises_and_is_tried_again_gets_its_actor_as_it_is(tmp_path):
    @flow.remote(max_retries=2, retry_exceptions=True)
    def flaky(path):
        tally = Tally.remote()
        totals = [flow.get(tally.add.remote(1))]
        if not path.exists():
            path.touch()
            raise OSError("once")
        return tally, [*totals, flow.get(tally.add.remote(10))]

    tally, totals = flow.get(flaky.remote(tmp_path / "tried"), timeout=30)
    assert totals == [1, 11]
    assert flow.get(tally.add.remote(0)) == 11


def test_nested_makers_die_with_their_parents_and_nothing_is_done_twice(tmp_path):
    total = Tally.remote()

    @flow.remote(max_retries=3)
    def inner(total, path):
        tally = Tally.remote()
        flow.get(tally.add.remote(1))
        flow.get(total.add.remote(1))
        if not path.exists():
            path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        flow.get(tally.add.remote(10))
        return tally

    @flow.remote(max_retries=3)
    def outer(total, path):
        tally = flow.get(inner.remote(total, path / "inner"))
        flow.get(total.add.remote(100))
        if not (path / "outer").exists():
            (path / "outer").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return tally, flow.get(tally.add.remote(100))

    tally, seen = flow.get(outer.remote(total, tmp_path), timeout=40)
    assert seen == flow.get(tally.add.remote(0)) == 111
    assert flow.get(total.add.remote(0)) == 101


def test_an_actor_with_large_arguments_survives_their_maker():
    @flow.remote
    class Holds:
        def __init__(self, parts: list[object], whole: np.ndarray) -> None:
            self.parts = parts
            self.total = int(whole.sum())

        def sum(self) -> int:
            return self.total + int(sum(flow.get(ref).sum() for ref in self.parts))

    @flow.remote
    def makes_holder():
        part = flow.put(np.ones(1 << 17))
        return Holds.remote([part], np.ones(1 << 18)), os.getpid()

    holder, maker = flow.get(makes_holder.remote(), timeout=20)
    assert flow.get(holder.sum.remote(), timeout=20) == 3 << 17
    os.kill(maker, signal.SIGKILL)
    until(lambda: gone(maker))
    flow.chaos.kill_worker(of=holder)
    assert flow.get(holder.sum.remote(), timeout=20) == 3 << 17


def test_actors_of_an_actor_outlive_it_and_its_deaths():
    @flow.remote(checkpoint=1)
    class Pool:
        def __init__(self) -> None:
            self.members = []

        def grow(self):
            self.members.append(Tally.remote(100))
            return self.members[-1]

        def shrink(self) -> None:
            self.members.pop()

        def totals(self) -> list[int]:
            return flow.get([tally.add.remote(1) for tally in self.members])

    pool = Pool.remote()
    first, second = flow.get([pool.grow.remote(), pool.grow.remote()], timeout=20)
    assert flow.get(pool.totals.remote()) == [101, 101]
    flow.chaos.kill_worker(of=pool)
    assert flow.get(pool.totals.remote(), timeout=20) == [102, 102]
    pid = flow.get(second.pid.remote())
    del second
    gc.collect()
    flow.get(pool.shrink.remote())
    until(lambda: gone(pid))
    flow.kill(pool)
    assert flow.get(first.add.remote(1), timeout=20) == 103


def test_a_failed_constructor_argument_and_a_lost_one_are_told():
    @flow.remote
    def fails():
        raise KeyError("no")

    @flow.remote
    def makes_with(ref):
        return Tally.remote(ref[0])

    tally = flow.get(makes_with.remote([fails.remote()]), timeout=20)
    with pytest.raises(KeyError):
        flow.get(tally.add.remote(1), timeout=20)


def test_a_name_in_a_task_is_that_of_an_actor_that_lives_on():
    named = Tally.options(name="named", get_if_exists=True)

    @flow.remote
    def joins():
        tally = named.remote()
        return tally, flow.get(tally.add.remote(1)), os.getpid()

    tally, total, maker = flow.get(joins.remote(), timeout=20)
    os.kill(maker, signal.SIGKILL)
    until(lambda: gone(maker))
    assert total == 1
    assert flow.get(flow.get_actor("named").add.remote(1), timeout=20) == 2
    flow.kill(tally)
    with pytest.raises(flow.ActorNotFound):
        flow.get_actor("named")


def test_a_name_whose_actor_was_never_made_is_free():
    session = Current.session
    assert session is not None
    ghost = object_id(os.urandom(16), 0)
    session.ask_head("name.claim", ["ghost", [ghost[:16].hex(), b"", ghost, session.address, HANDLE]])
    with pytest.raises(flow.ActorNotFound):
        flow.get_actor("ghost")
    tally = Tally.options(name="ghost").remote(7)
    assert flow.get(flow.get_actor("ghost").add.remote(0), timeout=20) == 7
    flow.kill(tally)
