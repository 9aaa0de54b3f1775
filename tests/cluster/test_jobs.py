"""Resumable jobs: a program that is run again finds what was done, and does again what ended with it."""
from __future__ import annotations

import signal

import pytest

from tests.cluster.kit import python

pytestmark = pytest.mark.cluster

BEGIN = """
import os
import sys
import time
import flowengine as flow

@flow.remote
def square(number):
    return number * number

def end():
    if sys.argv[2] == "die":
        flow.commit()
        os.kill(os.getpid(), 9)

with flow.init(num_workers=2, job="job", state_dir=sys.argv[1]):
"""


def twice(folder, program):
    """What the program prints when it is killed at its end and run again: both times."""
    first = python("-c", BEGIN + program, str(folder), "die")
    second = python("-c", BEGIN + program, str(folder), "live")
    assert first.returncode == -signal.SIGKILL, first.stderr
    assert second.returncode == 0, second.stderr
    return first.stdout.splitlines(), second.stdout.splitlines()


def test_what_was_done_is_there_and_choices_are_the_same(tmp_path):
    first, second = twice(tmp_path, """
    refs = [square.remote(number) for number in range(5)]
    print(flow.record(time.time), flow.get(refs), [refs.index(ref) for ref in flow.as_completed(refs)])
    print(flow.stats()["tasks_executed"])
    end()
""")
    assert first[0] == second[0]
    assert (first[1], second[1]) == ("5", "0")


def test_tasks_that_called_an_actor_call_it_again(tmp_path):
    """It is another one; so do tasks of which only a child did, but none that has an actor of its own."""
    first, second = twice(tmp_path, """
    @flow.remote
    class Sum:
        def __init__(self):
            self.total = 0
        def add(self, number):
            self.total += number
            return self.total

    @flow.remote
    def pay(total, number):
        flow.get(total.add.remote(number))
        return number

    @flow.remote
    def pay_by(total, number):
        return flow.get(pay.remote(total, number))

    @flow.remote
    def alone():
        return flow.get(Sum.remote().add.remote(1))

    total = Sum.remote()
    print(flow.get([pay.remote(total, 1), pay_by.remote(total, 10), square.remote(2), alone.remote()]))
    print(flow.get(total.add.remote(100)))
    print(flow.stats()["tasks_executed"])
    end()
""")
    assert first == ["[1, 10, 4, 1]", "111", "5"]
    assert second == ["[1, 10, 4, 1]", "111", "3"]


def test_what_tasks_said_to_others_is_said_again(tmp_path):
    first, second = twice(tmp_path, """
    @flow.remote
    def produce(items, ready, name):
        items.put_many(range(3))
        ready.set()
        flow.resources.create(name, 1)

    @flow.remote
    def consume(items):
        return items.get(timeout=20)

    @flow.remote
    def meet(rank):
        return flow.collectives.join("pair", 2, rank).allreduce(1)

    items, ready = flow.Queue(), flow.Event()
    flow.get(produce.remote(items, ready, "signal"))
    taken = flow.get([consume.remote(items) for _ in range(2)])
    print(sorted([*taken, items.get(timeout=20)]), ready.wait(timeout=20))
    print(flow.get(square.options(resources={"signal": 1}).remote(3), timeout=20))
    print(flow.get([meet.remote(rank) for rank in range(2)]))
    end()
""")
    assert first == second == ["[0, 1, 2] True", "9", "[2, 2]"]
