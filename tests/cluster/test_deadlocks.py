"""Calls of actors that wait for each other in a circle are told so, on real processes; long waits are left alone."""

from __future__ import annotations

import pytest

import flowengine as flow
from tests.cluster.kit import two_workers, until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def engine():
    yield from two_workers()


@flow.remote
class Station:
    """Passes a request on along a route of stations, and waits for the answer."""

    def __init__(self) -> None:
        self.passed: list[int] = []

    def send(self, *route: flow.ActorHandle) -> int:
        self.passed.append(len(route))
        return flow.get(route[0].send.remote(*route[1:])) if route else len(self.passed)

    def try_to_send(self, *route: flow.ActorHandle) -> str:
        try:
            return str(self.send(*route))
        except flow.Deadlock as error:
            self.passed.append(-1)
            return str(error)

    def through(self, station: flow.ActorHandle) -> int:
        return flow.get(by_task.remote(station))

    def all(self) -> list[int]:
        return self.passed


@flow.remote
def by_task(station: flow.ActorHandle) -> int:
    return flow.get(station.send.remote())


def test_two_actors():
    first, second = Station.remote(), Station.remote()
    circle = r"Station\.send waits for Station\.send, which waits for Station\.send to end"
    with pytest.raises(flow.Deadlock, match=circle):
        flow.get(first.send.remote(second, first), timeout=20)
    assert flow.get([first.send.remote(), second.send.remote()], timeout=20) == [3, 2]


def test_an_actor_that_waits_for_itself_and_a_replay_that_gives_up_in_the_same_way():
    station = Station.options(checkpoint="never").remote()
    told = flow.get(station.try_to_send.remote(station), timeout=20)
    assert told == "Station.try_to_send waits for Station.send, which waits for Station.try_to_send to end"
    assert flow.get(station.all.remote(), timeout=20) == [1, -1, 0]
    flow.chaos.kill_worker(of=station)
    assert flow.get(station.all.remote(), timeout=20) == [1, -1, 0]


def test_three_actors_and_one_of_them_through_a_task():
    stations = [Station.remote() for _ in range(3)]
    with pytest.raises(flow.Deadlock):
        flow.get(stations[0].send.remote(*stations[1:], stations[0]), timeout=20)
    with pytest.raises(flow.Deadlock, match=r"by_task waits for Station\.send, which waits for Station\.through"):
        flow.get(stations[0].through.remote(stations[0]), timeout=20)


def test_a_long_wait_in_threads_and_on_a_loop_is_none(tmp_path):
    @flow.remote(max_concurrency=2, recovery="restart")
    class Threads(Station._class):
        pass

    @flow.remote
    class Loop:
        async def there_and_back(self, station, loop):
            return await station.send.remote(loop)

        async def send(self):
            import asyncio

            (tmp_path / "entered").touch()
            await asyncio.to_thread(until, (tmp_path / "open").exists)
            return "back"

    threads, loop, station = Threads.remote(), Loop.remote(), Station.remote()
    ref = loop.there_and_back.remote(station, loop)
    until((tmp_path / "entered").exists)
    other = threads.send.remote(station, threads)
    assert flow.wait([ref, other], num_returns=2, timeout=3.0) == ([], [ref, other])
    (tmp_path / "open").touch()
    assert flow.get(ref, timeout=20) == "back"
    assert flow.get(other, timeout=20) == 2


def test_a_thread_of_a_method_may_wait_for_a_call_that_waits_for_the_method(tmp_path):
    @flow.remote
    class Threaded(Station._class):
        def start(self, station):
            import threading

            ref = station.send.remote(flow.current_actor())
            threading.Thread(target=flow.get, args=(ref,), daemon=True).start()
            until((tmp_path / "open").exists)
            return [ref]

    first, second = Threaded.remote(), Station.remote()
    ref = first.start.remote(second)
    assert flow.wait([ref], timeout=3.0) == ([], [ref])
    (tmp_path / "open").touch()
    assert flow.get(flow.get(ref, timeout=20)[0], timeout=20) == 1
