"""A process that is not needed for its slot stays while others need what it owns."""

from __future__ import annotations

import pytest

import flowengine as flow
from tests.cluster.kit import until

pytestmark = pytest.mark.cluster


@flow.remote
class Counter:
    def __init__(self):
        self.count = 0

    def increment(self):
        self.count += 1
        return self.count


def workers() -> set[str]:
    return {worker.worker_id for node in flow.nodes() for worker in node.workers}


def test_an_actor_outlives_the_idleness_of_the_task_that_made_it():
    with flow.init(num_workers=1, config={"worker_idle_s": 0.5}):

        @flow.remote(num_cpus=0)
        def make():
            return Counter.remote()

        @flow.remote(num_cpus=0)
        def idle():
            return flow.context().worker_id

        counter = flow.get(make.remote(), timeout=20)
        assert flow.get(counter.increment.remote(), timeout=20) == 1
        surplus = set(flow.get([idle.remote() for _ in range(6)], timeout=20))
        assert surplus
        before = workers()
        until(lambda: len(workers()) < len(before) or len(workers()) <= 3)
        assert flow.get(counter.increment.remote(), timeout=20) == 2
