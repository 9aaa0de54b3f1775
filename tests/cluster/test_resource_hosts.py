"""Resources that programs make, over two hosts and several programs: tasks go to them, they go where nodes are."""

from __future__ import annotations

import signal

import pytest

import flowengine as flow
from flowengine.refs import Current
from tests.cluster.host_kit import Cluster, wait_for
from tests.cluster.kit import python

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
create, delete, listed = flow.resources.create, flow.resources.delete, flow.resources.list


@flow.remote(num_cpus=0)
def where():
    return flow.context().node_id


def asks(name):
    return where.options(resources={name: 1})


def sides():
    """The node of the program, and the other."""
    mine = flow.context().node_id
    (other,) = [node.node_id for node in flow.nodes() if node.node_id != mine]
    return mine, other


@pytest.fixture
def own(tmp_path):
    cluster = Cluster(tmp_path)
    with flow.init(address=cluster.file, config={"suspect_after_s": 2}):
        wait_for(lambda: len(flow.nodes()) == 2)
        yield cluster
    cluster.end()


def test_tasks_go_where_a_resource_is_whenever_it_comes(cluster):
    mine, other = sides()
    early = asks("far").remote()
    create("far", 1, other)
    create("near", 2)
    assert flow.get([early, asks("far").remote(), asks("near").remote()], timeout=30) == [other, other, mine]
    flow.resources.set("far", 0)
    late = asks("far").remote()
    wait_for(lambda: "(largest: 0)" in repr(late) or "it has none left" in repr(late))
    flow.resources.add("far", 1)
    assert flow.get(late, timeout=30) == other
    for name in ("far", "near"):
        delete(name)


def test_one_on_each_node_spreads_and_a_selector_chooses(cluster):
    mine, other = sides()
    (two,) = [node.node_id for node in flow.nodes() if "two" in node.resources]

    @flow.remote(num_cpus=0)
    def meet(rank):
        flow.collectives.join("both", 2, rank).barrier()
        return flow.context().node_id

    create("once", 1, {})
    create("beside two", 1, {"two": 1})
    assert flow.cluster_resources()["once"] == 2
    assert list(listed()["beside two"]["nodes"]) == [two]
    both = [meet.options(resources={"once": 1}).remote(rank) for rank in range(2)]  # they wait for each other
    assert sorted(flow.get(both, timeout=30)) == sorted((mine, other))
    assert flow.get(asks("beside two").remote(), timeout=30) == two
    for name in ("once", "beside two"):
        delete(name)


def test_names_are_of_one_program_and_go_with_it(cluster):
    create("shared name", 1)
    program = f"""
import flowengine as flow
with flow.init(address={str(cluster.file)!r}):
    assert flow.resources.list() == {{}}, flow.resources.list()
    flow.resources.create("shared name", 5, {{}})
    assert flow.cluster_resources()["shared name"] == 10
    task = flow.remote(num_cpus=0)(lambda: flow.resources.list()["shared name"]["total"])
    assert flow.get(task.options(resources={{"shared name": 5}}).remote(), timeout=30) == 10
    print(flow.refs.Current.session.address)
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    session = Current.session
    wait_for(lambda: session.ask_head("resource.list", done.stdout.strip()) == {})
    assert listed()["shared name"]["total"] == 1
    delete("shared name")


def test_a_node_that_joins_gets_its_part_and_one_that_dies_loses_it(own):
    mine, other = sides()
    create("each", 1, {})
    create("anywhere", 1, None)
    create("there", 1, other)
    three = own.start_node("three", "--num-workers", 1)
    own.nodes.append(three)
    wait_for(lambda: len(listed()["each"]["nodes"]) == 3)
    (late,) = [node for node in listed()["each"]["nodes"] if node not in (mine, other)]
    assert set(flow.get([asks("each").remote() for _ in range(30)], timeout=30)) <= {mine, other, late}
    gone = own.nodes[1] if "two" in {node.node_id: node.resources for node in flow.nodes()}[other] else own.nodes[0]
    gone.end(signal.SIGKILL)
    waits = asks("there").remote()
    wait_for(lambda: f"it belongs to node {other}, which is not there" in repr(waits))
    assert sorted(listed()["each"]["nodes"]) == sorted((mine, late))
    assert list(listed()["anywhere"]["nodes"]) == [mine]
    flow.cancel(waits)
