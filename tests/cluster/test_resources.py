"""Resources that programs make, on a live engine: where they are, who waits for them, and what deaths do to them."""

from __future__ import annotations

import os
import threading
import time

import pytest

import flowengine as flow
from flowengine.refs import Current
from tests.cluster.kit import two_workers, until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("engine")]
engine = pytest.fixture(scope="module")(
    lambda: (yield from two_workers(config={"suspect_after_s": 2, "link_lost_after_s": 4}))
)
create, change, add, delete, listed = (
    flow.resources.create, flow.resources.set, flow.resources.add, flow.resources.delete, flow.resources.list
)  # fmt: skip


@pytest.fixture
def resource(request):
    """A name of this test alone, free before and after."""
    name = request.node.name
    yield name
    delete(name)
    until(lambda: name not in flow.cluster_resources())


@flow.remote(num_cpus=0)
def work(gate=None):
    """Run, or wait until the file is there."""
    while gate is not None and not os.path.exists(gate):
        time.sleep(0.005)
    return time.monotonic()


def asks(name, amount=1.0):
    return work.options(resources={name: amount})


def reason(ref, text):
    """It tells, in the end, why it waits."""
    until(lambda: text in repr(ref))


# --- orders ---------------------------------------------------------------------------------------------------------


def test_what_was_made_is_listed_and_summed(resource):
    create(resource, 2.5)
    (node,) = flow.nodes()
    place = {"total": 2.5, "available": 2.5}
    assert listed()[resource] == {**place, "nodes": {node.node_id: place}, "waiting": ""}
    assert flow.cluster_resources()[resource] == 2.5
    change(resource, 4)
    assert listed()[resource]["total"] == 4
    add(resource, -1.5)
    assert flow.available_resources()[resource] == 2.5
    create(resource, 2.5)  # as at first
    delete(resource)
    delete(resource)
    assert resource not in listed()


def test_places(resource):
    (node,) = flow.nodes()
    create(resource, 1, node.node_id)
    assert list(listed()[resource]["nodes"]) == [node.node_id]
    with pytest.raises(flow.BadValue, match=r"on node .*flow\.resources\.set"):
        create(resource, 1, {})
    delete(resource)
    create(resource, 1, {"GPU": 1})
    assert listed()[resource]["total"] == 0
    assert "each node with {'GPU': 1.0}" in listed()[resource]["waiting"]
    ref = asks(resource).remote()
    reason(ref, f"no node has {resource}: 1; it is made on each node with")
    delete(resource)
    create(resource, float("inf"), {"CPU": 1})
    assert flow.get(ref, timeout=10)
    assert listed()[resource]["total"] == float("inf")


@pytest.mark.parametrize(("name", "amount", "node", "error"), [
    (7, 1, None, "name of a resource is a string"),
    ("", 1, None, "1 to 1000 characters"),
    ("x" * 1001, 1, None, "1 to 1000 characters"),
    ("a@b", 1, None, "'@'"),
    ("a\0b", 1, None, "printable"),
    ("\ud800", 1, None, "printable"),
    ("x", 1, "\ud800", "node must be text"),
    ("x", 1, {"\ud800": 1}, "node must have names"),
    ("memory", 1, None, "memory"),
    ("x", True, None, "amount must be a number"),
    ("x", float("-inf"), None, "amount must be a finite number"),
    ("x", 1e20, None, "amount must be a finite number"),
    ("x", 1, 7, "node must be the id of a node"),
    ("x", 1, "nowhere", "there is no node 'nowhere'"),
    ("x", 1, {"CPU": -1}, "CPU"),
    ("x", 1, {1: 1}, "strings as names"),
])
def test_bad_orders(name, amount, node, error):
    with pytest.raises((flow.BadValue, flow.BadType), match=error):
        create(name, amount, node)


def test_orders_about_what_is_not_there(resource):
    create(resource, 1)
    for order in (change, add):
        with pytest.raises(flow.BadValue, match=rf"there is no resource .* did you mean '{resource}'"):
            order(resource[:-1], 1)
    with pytest.raises(flow.BadValue, match="'@'"):
        work.options(resources={"a@b": 1})


def test_what_is_taken_away_is_gone_when_the_call_returns(resource):
    for number in range(12):
        create(resource, 1)
        assert flow.get(asks(resource).remote(), timeout=10)
        (lambda: change(resource, 0), lambda: add(resource, -1), lambda: delete(resource))[number % 3]()
        ref = asks(resource).remote()
        assert flow.wait([ref], timeout=0.1) == ([], [ref])
        flow.cancel(ref)
        delete(resource)


def test_many_threads_give_orders(resource):
    create(resource, 0)
    threads = [threading.Thread(target=lambda: [add(resource, 1) for _ in range(25)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert listed()[resource]["total"] == 100


# --- who waits ------------------------------------------------------------------------------------------------------


def test_a_wait_tells_what_is_missing(resource, tmp_path):
    ref = asks(resource).remote()
    reason(ref, f"no node has {resource}: 1; it was not created yet")
    with pytest.raises(flow.GetTimeout, match="it was not created yet"):
        flow.get(ref, timeout=0.1)
    create(resource, 0.5)
    reason(ref, f"no node has {resource}: 1 (largest: 0.5)")
    change(resource, 1)
    assert flow.get(ref, timeout=10)
    holds = asks(resource).remote(str(tmp_path / "gate"))
    until(lambda: "sent to" in repr(holds))
    waits = asks(resource, 0.25).remote()
    other = work.options(resources={resource: 1}, num_cpus=1).remote()
    reason(other, f"needs {resource}: 1, free 0 of 1")
    (tmp_path / "gate").touch()
    flow.get([holds, waits, other], timeout=10)


def test_nobody_runs_beyond_what_is_left_and_what_is_gone_is_given_back(resource, tmp_path):
    create(resource, 2)
    gate = str(tmp_path / "gate")
    long = [asks(resource).remote(gate) for _ in range(2)]
    until(lambda: listed()[resource]["available"] == 0)
    change(resource, 1)
    late = asks(resource).remote()
    delete(resource)
    assert flow.wait([late], timeout=0.3)[0] == []
    (tmp_path / "gate").touch()
    flow.get(long, timeout=10)
    reason(late, "it was not created yet")
    create(resource, 1)
    flow.get(late, timeout=10)


def test_a_more_urgent_task_of_another_shape_gets_the_lock_between_two_others(resource):
    create(resource, 1)
    first = asks(resource).remote()
    many = [asks(resource).remote() for _ in range(300)]
    urgent = work.options(resources={resource: 1}, num_cpus=1, priority=5).remote()
    flow.get(urgent, timeout=20)
    flow.get([first, *many], timeout=60)


def test_the_most_urgent_task_is_next_whatever_else_it_asks_for(resource, tmp_path):
    create(resource, 1)
    order, gate = tmp_path / "order", tmp_path / "gate"

    @flow.remote(num_cpus=0)
    def note(urgent):
        with order.open("a") as file:
            file.write(f"{urgent} ")

    first = asks(resource).remote(str(gate))
    until(lambda: listed()[resource]["available"] == 0)
    refs = [note.options(resources={resource: 1}, priority=urgent, num_cpus=cpus).remote(urgent)
            for urgent, cpus in ((9, 0), (1, 0), (5, 0.5), (7, 0.5), (3, 0), (8, 0))]
    for ref in refs:
        reason(ref, "waits for")
    gate.touch()
    flow.get([first, *refs], timeout=60)
    assert order.read_text().split() == list("987531")


def test_an_actor_holds_what_it_asks_for_as_long_as_it_lives(resource):
    @flow.remote
    class Holder:
        def ping(self):
            return True

    create(resource, 1)
    holder = Holder.options(resources={resource: 1}).remote()
    assert flow.get(holder.ping.remote(), timeout=20)
    ref = asks(resource).remote()
    assert flow.wait([ref], timeout=0.5)[0] == []
    flow.kill(holder)
    assert flow.get(ref, timeout=20)


def test_a_task_makes_what_its_child_needs(resource):
    @flow.remote
    def parent():
        ref = asks(resource).remote()
        create(resource, 1)
        return flow.get(ref)

    assert flow.get(parent.remote(), timeout=20)
    assert listed()[resource]["total"] == 1


# --- deaths ---------------------------------------------------------------------------------------------------------


def test_a_dead_task_gives_its_lock_back_and_adds_once(resource, tmp_path):
    @flow.remote(num_cpus=0)
    def dies_once(mark):
        add("lives", 1)
        if not os.path.exists(mark):
            open(mark, "x").close()
            os._exit(3)
        add("lives", 1)

    create(resource, 1)
    create("lives", 0)
    flow.get(dies_once.options(resources={resource: 1}).remote(str(tmp_path / "mark")), timeout=30)
    assert flow.get(asks(resource).remote(), timeout=20)
    assert listed()["lives"]["total"] == 2
    delete("lives")


def test_the_death_of_the_head_forgets_nothing(resource):
    for number in range(3):
        create(f"{resource}{number}", number + 1)
        flow.chaos.kill_head()
        assert listed()[f"{resource}{number}"]["total"] == number + 1
        assert flow.get(asks(f"{resource}{number}").remote(), timeout=20)
        delete(f"{resource}{number}")
        flow.chaos.kill_head()
        assert f"{resource}{number}" not in listed()


def test_a_head_that_died_while_tasks_waited_serves_them(resource):
    ref = asks(resource).remote()
    reason(ref, "it was not created yet")
    flow.chaos.kill_head()
    create(resource, 1)
    assert flow.get(ref, timeout=30)


def test_the_death_of_the_node_moves_what_may_be_anywhere(resource):
    create(resource, 1)
    create(f"{resource} each", 1, {})
    (node,) = flow.nodes()
    flow.chaos.kill_node(node.node_id)
    assert flow.get([asks(resource).remote(), asks(f"{resource} each").remote()], timeout=40)
    assert listed()[resource]["total"] == 1
    delete(f"{resource} each")


def test_a_program_that_only_waits_keeps_its_resources_when_the_head_dies(resource):
    """The link of the head that is no more must not pass for the death of the program."""
    create(resource, 1)
    session = Current.session
    before = sum(session.ask_head("messages", None).values())
    is_new = False  # the head that counts
    flow.chaos.kill_head()

    def total():
        """After the program was asked whether it lives; a head that dies again and again is started later and later."""
        nonlocal is_new
        try:
            messages = session.ask_head("messages", None)
            is_new = is_new or sum(messages.values()) < before
            return is_new and messages.get("Pong") and listed()[resource]["total"]
        except flow.HeadLost:
            return None

    until(lambda: total() == 1)
