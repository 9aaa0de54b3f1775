"""Why an actor was checkpointed or not, told by the processes that decide."""
from __future__ import annotations

import time

import pytest

import flowengine as flow
from tests.cluster.kit import two_workers, until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("engine")]
engine = pytest.fixture(scope="module")(lambda: (yield from two_workers()))


@flow.remote
class Worker:
    def work(self, cost_s):
        end = time.perf_counter() + cost_s
        while time.perf_counter() < end:
            pass


def test_an_actor_with_nothing_to_do_is_checkpointed_and_says_so():
    worker = Worker.remote()
    flow.get(worker.work.remote(0.05), timeout=30)
    until(lambda: "the actor had nothing to do" in flow.explain(worker))
    assert "the checkpoint after 1 calls is held here" in flow.explain(worker)


def test_an_actor_at_work_says_what_a_checkpoint_waits_for():
    worker = Worker.options(checkpoint=7).remote()
    flow.get([worker.work.remote(0.001) for _ in range(3)], timeout=30)
    text = flow.explain(worker)
    assert "policy: 7" in text
    assert "3 calls since the last one; its option says 7" in text
    assert "no checkpoint: it would be constructed" in text


def test_deaths_are_learnt():
    worker = Worker.remote()
    flow.get(worker.work.remote(0.0), timeout=30)
    flow.kill(worker, restart=True)
    flow.get(worker.work.remote(0.0), timeout=30)
    until(lambda: "failures: 1 of this actor" in flow.explain(worker))


@pytest.mark.parametrize("wrong", [1, "abc", None])
def test_only_references_and_handles_are_explained(wrong):
    with pytest.raises(flow.BadType, match="takes a ref or an actor's handle"):
        flow.explain(wrong)
