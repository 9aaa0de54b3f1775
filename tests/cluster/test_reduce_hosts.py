"""Reductions over references whose values lie on two hosts: folded on their way, after losses, after a death."""
from __future__ import annotations

import os
import pathlib
import signal

import numpy as np
import pytest

import flowengine as flow
from tests.cluster.host_kit import Cluster, name_of, on, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
LARGE = 1 << 17  # elements: 1 MiB


@flow.remote
def full(number, size=LARGE, dtype="f8"):
    return np.full(size, number, dtype)


def spread(count, dtype="f8", size=LARGE):
    nodes = flow.nodes()
    refs = [on(nodes[n % 2], full).options(num_cpus=0).remote(n, size, dtype) for n in range(count)]
    flow.wait(refs, num_returns=count, timeout=60)
    return refs


@pytest.mark.parametrize("dtype", ["f8", "f4", "i2", "c16"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_large_arrays_on_two_hosts_are_folded_on_their_way(cluster, dtype, op):
    before, done = (flow.stats()[name] for name in ("bytes_moved", "collectives_done"))
    refs = spread(6, dtype)
    total = flow.get(flow.reduce(refs, op=op), timeout=60)
    expected = np.full(LARGE, 15 if op == "sum" else 2.5, np.float64 if op == "mean" and dtype == "i2" else dtype)
    assert total.dtype == expected.dtype
    assert (total == expected).all()
    if expected.dtype == np.dtype(dtype):
        assert flow.stats()["bytes_moved"] - before == 0  # partial sums go over lanes, no input is copied
        assert flow.stats()["collectives_done"] - done == 1


@flow.remote(num_cpus=0)
def weights(number):
    return {"w": np.full((LARGE, 2), number, "f4"), "b": [np.full(5, number), np.full(3, number, "f4")], "n": number}


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_dicts_on_two_hosts_are_folded_on_their_way_too(cluster, op):
    nodes = flow.nodes()
    refs = [on(nodes[n % 2], weights).remote(n) for n in range(6)]
    flow.wait(refs, num_returns=6, timeout=60)
    before = flow.stats()["bytes_moved"]
    total = flow.reduce(refs, op=op)
    expected = 15 if op == "sum" else 2.5
    got = flow.get(total, timeout=60)
    assert sorted(got) == ["b", "n", "w"]
    assert (got["w"].shape, got["w"].dtype) == ((LARGE, 2), np.float32)
    assert (got["w"] == expected).all()
    assert [array.tolist() for array in got["b"]] == [[expected] * 5, [expected] * 3]
    assert got["b"][0].dtype == (np.int64 if op == "sum" else np.float64)
    assert got["n"] == expected
    assert flow.stats()["bytes_moved"] - before < 2 << 20


def test_dicts_on_two_hosts_that_differ_are_a_mismatch(cluster):
    nodes = flow.nodes()
    refs = [on(nodes[n % 2], weights).remote(n) for n in range(3)]
    refs += [on(node, full).options(num_cpus=0).remote(1.0) for node in nodes]
    with pytest.raises(flow.CollectiveMismatch, match="input 3"):
        flow.get(flow.reduce(refs), timeout=60)


def test_functions_and_the_same_input_twice_over_two_hosts(cluster):
    refs = spread(4)
    assert flow.get(flow.reduce([refs[1], refs[2], refs[1], refs[3], refs[3]]), timeout=60)[5] == 10
    assert flow.get(flow.reduce([refs[3], refs[0], refs[2]], num_inputs=2), timeout=60)[5] == 3
    assert flow.get(flow.reduce(refs, op=lambda a, b: a + b), timeout=60)[5] == 6


@pytest.mark.parametrize("dtype", ["f8", "i8"])
def test_inputs_larger_than_all_stores_are_folded_as_there_is_room(cluster, dtype):
    total = flow.reduce(spread(8, dtype, 24 * LARGE), op="mean")  # of 24 MiB each, in two stores of 64
    assert (flow.get(total, timeout=90) == 3.5).all()


@flow.remote(num_cpus=0)
def noise(number, size, is_nested):
    values = np.random.default_rng(number).normal(size=size).astype("f4")
    return {"w": values, "b": [values[:3].astype("f8")]} if is_nested else values


@pytest.mark.parametrize(("count", "size", "is_nested"), [
    (5, LARGE, False),
    (14, 12 * LARGE, False),  # 6 MiB each: several courses, one after the other
    (5, 2 * LARGE, True),
])
def test_a_sum_that_is_lost_is_made_again_with_the_same_bits_wherever_the_inputs_are_then(
    cluster, count, size, is_nested
):
    nodes = flow.nodes()
    refs = [on(nodes[n % 2], noise).remote(n, size, is_nested) for n in range(count)]
    flow.wait(refs, num_returns=count, timeout=60)
    total = flow.reduce(refs)
    before = flow.get(total, timeout=60, copy=True)
    for ref in refs:
        flow.get(ref, timeout=60)  # now all are here, and could be folded in their order
    flow.chaos.lose(total)
    after = flow.get(total, timeout=60)
    pairs = [(before, after)] if not is_nested else [(before["w"], after["w"]), (before["b"][0], after["b"][0])]
    assert all(one.tobytes() == other.tobytes() for one, other in pairs)


def test_losses_on_two_hosts(cluster):
    refs = spread(4)
    flow.chaos.lose(refs[1])
    total = flow.reduce(refs)
    assert flow.get(total, timeout=60)[3] == 6
    flow.chaos.lose(total)
    flow.chaos.lose(refs[2])
    assert flow.get(total, timeout=60)[3] == 6


def test_a_node_with_inputs_dies_while_they_are_folded(tmp_path):
    cluster = Cluster(tmp_path)
    try:
        with flow.init(address=cluster.file):
            wait_for(lambda: len(flow.nodes()) == 2)
            mine = flow.context().node_id
            other = next(node for node in flow.nodes() if node.node_id != mine)
            launcher = flow.get(on(other, flow.remote(num_cpus=0)(os.getppid)).remote(), timeout=60)
            place = flow.scheduling.soft([flow.scheduling.node(other.node_id)])
            refs = [full.options(num_cpus=0, placement=place).remote(float(n), 8 * LARGE) for n in range(4)]
            flow.wait(refs, num_returns=4, timeout=60)
            total = flow.reduce(refs)
            for pid in below(launcher):
                if name_of(pid) == "flow-node":
                    os.kill(pid, signal.SIGKILL)
            assert flow.get(total, timeout=90)[0] == 6
    finally:
        cluster.end()


def below(pid):
    """The children of a launcher."""
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
