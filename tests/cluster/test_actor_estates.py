"""What the code of an actor owns (values that it put, tasks and calls that it submitted) survives with the actor."""

from __future__ import annotations

import numpy as np
import pytest

import flowengine as flow
from tests.cluster.kit import two_workers, until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def engine():
    yield from two_workers()


@flow.remote
class Gate:
    """Calls of it end when a file is there."""

    def pass_on(self, path, value):
        until(path.exists)
        return value

    def count(self):
        return 1


@flow.remote
def pass_on(path, value):
    until(path.exists)
    return value


@flow.remote
class Maker:
    def __init__(self):
        self.kept = None

    def put(self, value):
        self.kept = flow.put(value)

    def run(self, path, value):
        self.kept = pass_on.remote(path, value)
        return [self.kept]

    def call(self, gate, path, value):
        self.kept = gate.pass_on.remote(path, value)
        return [self.kept]

    def read(self):
        return flow.get(self.kept)


@pytest.mark.parametrize("value", [1, np.ones(50_000)], ids=["small", "large"])
def test_a_value_that_an_actor_put_is_in_its_state_after_a_checkpoint_and_a_death(value):
    maker = Maker.options(checkpoint=1).remote()
    flow.get(maker.put.remote(value), timeout=20)
    for _ in range(2):
        flow.chaos.kill_worker(of=maker)
        assert np.sum(flow.get(maker.read.remote(), timeout=20)) == np.sum(value)


@pytest.mark.parametrize("checkpoint", ["never", 1])
@pytest.mark.parametrize("is_call", [False, True], ids=["task", "call"])
def test_what_an_actor_waits_for_comes_to_all_who_have_a_reference_though_the_actor_died(checkpoint, is_call, tmp_path):
    gate = Gate.remote()
    maker = Maker.options(checkpoint=checkpoint).remote()
    path = tmp_path / "open"
    (ref,) = flow.get(maker.call.remote(gate, path, 5) if is_call else maker.run.remote(path, 5), timeout=20)

    @flow.remote(num_cpus=0)
    def read(refs):
        return flow.get(refs[0])

    reader = read.remote([ref])
    flow.chaos.kill_worker(of=maker)
    again = maker.read.remote()
    path.touch()
    assert flow.get([ref, reader, again], timeout=20) == [5, 5, 5]


def test_a_call_that_a_dead_actor_had_submitted_to_one_that_died_as_well_is_done_once():
    @flow.remote(checkpoint=1)
    class Source:
        def send(self, sink, number):
            sink.take.remote(number)

    @flow.remote(checkpoint="never")
    class Sink:
        def __init__(self):
            self.taken = []

        def take(self, number):
            self.taken.append(number)

        def all(self):
            return self.taken

    source, sink = Source.remote(), Sink.remote()
    for number in range(4):
        if number == 1:
            flow.chaos.at("actor.call.before_run", flow.chaos.kill, of=sink.take)
        arm = flow.chaos.at("actor.checkpoint.after_write", flow.chaos.kill, of=source)
        flow.get(source.send.remote(sink, number), timeout=20)
        until(lambda arm=arm: arm.fired)
    until(lambda: len(flow.get(sink.all.remote(), timeout=20)) >= 4)
    assert flow.get(sink.all.remote(), timeout=20) == [0, 1, 2, 3]


def test_a_reference_to_what_nobody_can_bring_back_is_an_error_and_not_a_wait_without_end():
    @flow.remote(recovery="restart")
    class Fresh:
        def start(self, path):
            return [pass_on.remote(path, 1)]

        def ping(self):
            return "pong"

    import pathlib

    fresh = Fresh.remote()
    (ref,) = flow.get(fresh.start.remote(pathlib.Path("never there")), timeout=20)
    flow.chaos.kill_worker(of=fresh)
    with pytest.raises(flow.ObjectLost):
        flow.get(ref, timeout=20)
    until(lambda: flow.get(fresh.ping.remote(), timeout=20) == "pong")
