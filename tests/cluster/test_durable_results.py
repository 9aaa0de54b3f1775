"""Results that would be dear to make again are written to durable storage, and come back from there."""
from __future__ import annotations

import time

import numpy as np
import pytest

import flowengine as flow
from tests.cluster.kit import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
LARGE = 200_000  # numbers: 1.6 MB
STEPS = 4


@flow.remote
def step(before, cost_s):
    end = time.perf_counter() + cost_s
    while time.perf_counter() < end:
        pass
    return before + 1


def chain(cost_s):
    """The last of some steps; those before it are needed by nobody else."""
    value = flow.put(np.zeros(LARGE), durable=True)
    for _ in range(STEPS):
        value = step.remote(value, cost_s)
    flow.wait([value])
    return value


def written():
    """The last of some dear steps, when it is in durable storage."""
    last = chain(0.2)
    until(lambda: "durable: written" in flow.explain(last))
    return last


def lose_the_node():
    """All stores of the engine are gone; gives how many tasks have run before."""
    ran = flow.stats()["tasks_executed"]
    old = flow.nodes()[0].node_id
    flow.chaos.kill_node(old)
    until(lambda: [node.node_id for node in flow.nodes()] not in ([], [old]))
    return ran


def test_a_dear_result_is_read_back_and_not_made_again():
    with flow.init(num_workers=2, config={"node_mtbf_s": 1.0}):
        last = written()
        ran = lose_the_node()
        assert flow.get(last, timeout=60).tolist() == [float(STEPS)] * LARGE
        assert flow.stats()["tasks_executed"] == ran
        assert flow.stats()["objects_rebuilt"] >= 1


def test_a_cheap_result_is_made_again_and_not_written():
    with flow.init(num_workers=2):
        last = chain(0.01)
        assert "not written" in flow.explain(last)
        ran = lose_the_node()
        assert flow.get(last, timeout=60)[0] == STEPS
        assert flow.stats()["tasks_executed"] == ran + STEPS
        assert flow.stats()["objects_persisted"] == 0


def test_what_was_written_goes_with_its_references(tmp_path):
    with flow.init(num_workers=1, config={"node_mtbf_s": 1.0}, state_dir=tmp_path):
        last = written()
        [file] = [path for path in tmp_path.rglob(f"*{last.hex()}*") if path.is_file()]
        del last
        until(lambda: not file.exists())


def test_nothing_is_written_beyond_the_bound():
    with flow.init(num_workers=1, config={"node_mtbf_s": 1.0, "persist_bytes_max": 0}):
        assert "persist_bytes_max is 0" in flow.explain(chain(0.1))
        assert flow.stats()["objects_persisted"] == 0
