"""Gangs and placement groups over several hosts: nodes that come and die, and programs that end."""

from __future__ import annotations

import time

import pytest

import flowengine as flow
from tests.cluster.host_kit import wait_for
from tests.cluster.kit import all_free, meet, members, python, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(120)]


@flow.remote
def where(seconds):
    time.sleep(seconds)
    return flow.context().node_id


def test_what_a_program_has_reserved_ends_with_it(own):
    code = f"""
import flowengine as flow, os
flow.init(address={str(own.file)!r})
group = flow.placement_group([{{"CPU": 1}}] * 2)
assert group.wait(20)
f = flow.remote(lambda: flow.get(flow.remote(lambda: 1).remote()))
gang = flow.scheduling.gang([{{"CPU": 1}}])
f.options(placement=gang[0]).remote()
print("so far", flush=True)
os.kill(os.getpid(), 9)
"""
    assert "so far" in python("-c", code).stdout
    with flow.init(address=own.file):
        until(all_free)
        assert flow.get(members(flow.scheduling.gang([{"CPU": 1}] * 2), meet, "after", 2), timeout=30) == [0, 1]


def test_a_gang_whose_node_dies_is_reserved_anew_and_its_members_run_again(own):
    with flow.init(address=own.file):
        wait_for(lambda: len(flow.nodes()) == 2)
        apart = flow.scheduling.gang([{"CPU": 1}] * 2, "STRICT_SPREAD")
        refs = members(apart, where, 1.0)
        until(lambda: "bundles 0 on" in repr(apart) and "sent" in repr(refs[1]))
        flow.chaos.kill_node(flow.nodes()[1].node_id)  # it is started again, as another one
        assert len(dict.fromkeys(flow.get(refs, timeout=60))) == 2
        until(all_free)


def test_a_gang_that_is_larger_than_the_cluster_begins_when_a_node_joins(own):
    with flow.init(address=own.file):
        wait_for(lambda: len(flow.nodes()) == 2)
        large = members(flow.scheduling.gang([{"CPU": 1}] * 3, "STRICT_SPREAD"), meet, "three", 3)
        until(lambda: "nodes of their own" in repr(large[0]))
        own.nodes.append(own.start_node("three", "--num-workers", 1))
        assert flow.get(large, timeout=60) == [0, 1, 2]
        until(all_free)
