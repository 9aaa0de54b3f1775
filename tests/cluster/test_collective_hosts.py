"""A group over two hosts loses one of them, with the node that keeps its books: it goes on with the same results."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

import flowengine as flow
from flowengine.refs import current_session
from tests.cluster.host_kit import Cluster, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(120)]
RANKS = 4
PATIENCE_S = 60
LATE_FLOATS = 1 << 18


@flow.remote(num_cpus=0)
class Member:
    def __init__(self, name: str, rank: int) -> None:
        self.group = flow.collectives.join(name, RANKS, rank)
        self.rank = rank

    def steps(self, count: int, floats: int) -> np.ndarray:
        x = np.zeros(floats)
        for step in range(count):
            x += self.group.allreduce(np.arange(floats) % 7 * (self.rank + 1) + step)
            x[:8] += self.group.allgather(x[-8:])[self.rank]
        return x

    def late(self, op: str, go: str) -> np.ndarray | None:
        """One operation with rank 0 as the root; the last rank comes when it is told to."""
        while self.rank == RANKS - 1 and not os.path.exists(go):
            time.sleep(0.001)
        x = np.arange(LATE_FLOATS) % 7 * (self.rank + 1)
        return self.group.allreduce(x) if op == "allreduce" else getattr(self.group, op)(x, root=0)

    def nodes(self) -> tuple[str, ...]:
        return self.group.seating.nodes


def wanted(count: int, floats: int) -> np.ndarray:
    x = np.zeros(floats)
    for step in range(count):
        x += np.arange(floats) % 7 * sum(range(1, RANKS + 1)) + RANKS * step
        x[:8] += x[-8:]
    return x


@pytest.mark.parametrize("floats", [64, 1 << 16])
@pytest.mark.parametrize("with_books", [True, False])
def test_a_host_is_lost(tmp_path, floats, with_books):
    cluster = Cluster(tmp_path)
    try:
        with flow.init(address=cluster.file):
            wait_for(lambda: len(flow.nodes()) == 2)
            nodes = flow.nodes()
            places = [flow.scheduling.soft([flow.scheduling.node(nodes[rank % 2].node_id)]) for rank in range(RANKS)]
            group = [Member.options(placement=place).remote("hosts", rank) for rank, place in enumerate(places)]
            first = [member.steps.remote(5, floats) for member in group]
            for got in flow.get(first, timeout=PATIENCE_S):
                np.testing.assert_array_equal(got, wanted(5, floats))
            assert len(set(flow.get(group[0].nodes.remote()))) == 2
            books = current_session().ask_head("name.get", "collective/hosts")[0]
            refs = [member.steps.remote(20, floats) for member in group]
            [lost] = [node for node in nodes if (node.address == books) == with_books]
            flow.chaos.kill_node(lost.node_id)
            for got in flow.get(refs, timeout=PATIENCE_S):
                np.testing.assert_array_equal(got, wanted(20, floats))
    finally:
        cluster.end()


@pytest.mark.parametrize(("op", "fate"), [("broadcast", "comes"), ("reduce", "comes"), ("allreduce", "dies")])
def test_a_step_begins_before_its_last_member_has_come(tmp_path, op, fate):
    cluster = Cluster(tmp_path)
    go = tmp_path / "go"
    try:
        with flow.init(address=cluster.file):
            wait_for(lambda: len(flow.nodes()) == 2)
            places = [flow.scheduling.node(node.node_id) for node in flow.nodes()]
            group = [Member.options(placement=places[rank % 2]).remote("late", rank) for rank in range(RANKS)]
            flow.get([member.nodes.remote() for member in group])
            refs = [member.late.remote(op, str(go)) for member in group]
            wait_for(lambda: flow.stats()["collectives_early"] == 1)
            if fate == "dies":
                flow.chaos.kill_worker(of=group[-1])
            go.touch()
            got = flow.get(refs, timeout=PATIENCE_S)
            summed = 1 if op == "broadcast" else sum(range(1, RANKS + 1))
            for rank, result in enumerate(got):
                if op == "reduce" and rank:
                    assert result is None
                else:
                    np.testing.assert_array_equal(result, np.arange(LATE_FLOATS) % 7 * summed)
    finally:
        cluster.end()
