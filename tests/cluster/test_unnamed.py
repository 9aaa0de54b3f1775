"""Queues, events and variables without a name: they go with their last handle."""

from __future__ import annotations

import pickle

import pytest

import flowengine as flow
from tests.cluster.kit import two_workers, until

pytestmark = pytest.mark.cluster
NOW_S = 10.0  # long enough for what comes at once


@pytest.fixture(scope="module", autouse=True)
def session():
    yield from two_workers()


def entries():
    return {name for _, name in list(flow.refs.Current.session.shared.keeper.machine.entries)}


@flow.remote
class Holder:
    def have(self, shared):
        self.shared = shared

    def get(self):
        return self.shared.get()


@flow.remote
def puts(shared, value):
    shared.put(value)


def test_items_go_with_the_last_handle_of_a_queue_without_a_name():
    shared, name = flow.Queue(), ""
    shared.put_many(range(5))
    name = shared.name
    flow.get([puts.remote(shared, number) for number in range(3)])
    assert name in entries()
    del shared
    until(lambda: name not in entries())


def test_a_queue_without_a_name_stays_while_an_actor_a_value_or_an_item_has_it():
    holder = Holder.remote()
    inner, outer, cell = flow.Queue(), flow.Queue(), flow.Variable()
    inner.put("kept")
    outer.put(inner)
    cell.set(7)
    ref, names = flow.put([cell]), {inner.name, cell.name}
    flow.get(holder.have.remote(outer))
    del inner, outer, cell
    probe = flow.Queue()
    probe.put(1)
    name = probe.name
    del probe
    until(lambda: name not in entries())  # the look that found this one gone found the others needed
    assert names <= entries()
    flow.chaos.kill_worker(of=holder)
    found = flow.get(holder.get.remote(), timeout=30)
    assert (found.get(timeout=NOW_S), flow.get(ref)[0].get(timeout=NOW_S)) == ("kept", 7)
    flow.kill(holder)
    del holder, found, ref
    until(lambda: not names & entries())


def test_a_handle_that_was_pickled_by_hand_keeps_the_queue():
    shared = flow.Queue()
    shared.put(1)
    blob, oid = pickle.dumps(shared), shared._counted.oid
    del shared
    session = flow.refs.Current.session
    assert oid in session.sharing.uncounted
    assert pickle.loads(blob).get(timeout=NOW_S) == 1
