"""The cost of a task does not grow with the cluster: few messages, none of them through the head."""
from __future__ import annotations

import pytest

from flowengine.chaos.sim import Scenario, simulate
from flowengine.config import Config
from flowengine.core import head as heads
from flowengine.core import messages as m
from flowengine.core import node as nodes_
from flowengine.core.head import Head, HeadSettings
from flowengine.scheduling.rooms import LOOKS_MAX, SAMPLE, Room, Rooms, Wish

SMALL, LARGE = 100, 2_000
FOUR = (("CPU", 4.0),)


def flat(nodes: int):
    config = Config(heartbeat_s=1.0, story_lines_max=1)
    scenario = Scenario(
        name="flat", nodes=nodes, workers=2, tasks=1_500, flat=True, run_s=0.1, check_every=1_000, config=config,
        end_s=1_000.0,
    )
    report = simulate(scenario, [nodes])
    assert not report.failures, str(report)
    return report


def test_messages_per_task_are_few_and_flat():
    small, large = flat(4), flat(40)
    work = ("PutFunction", "PushTask", "TaskDone", "TakeBack", "TakenBack")
    per_task = [sum(report.kinds.get(kind, 0) for kind in work) / report.tasks for report in (small, large)]
    assert max(per_task) < 3.5
    assert per_task[1] < per_task[0] + 0.5


def test_the_head_hears_of_slots_and_not_of_tasks():
    report = flat(10)
    sought = report.kinds.get("SlotsSought", 0)
    assert sought < report.tasks / 20
    assert "TaskDone" not in report.head_kinds


class CountingRooms(Rooms):
    """Counts the nodes that are looked at."""

    looks = 0

    def fits(self, room: Room, wish: Wish) -> bool:
        self.looks += 1
        return super().fits(room, wish)


def looks_of_a_head(count: int, free: int, cpus: float = 1.0) -> list[int]:
    """How many nodes each of 200 decisions looks at when so many of all have three free CPUs."""
    head = Head(HeadSettings("head", "s", "h", 7), Config(), {})
    head.start(0.0)
    head.rooms = head.slots.rooms = CountingRooms()
    for number in range(count):
        available = (("CPU", 3.0),) if number < free else (("CPU", 0.0),)
        entry = m.NodeEntry(f"n{number}", f"n{number}#1", "h", FOUR, available)
        head.handle(m.NodeJoined(entry), 0.0, entry.address)
    looks = []
    for number in range(200):
        before = head.rooms.looks
        sought = m.SlotsSought(f"owner{number}", (("CPU", cpus),), (), 1)
        head.handle(sought, 1.0, f"n{count - 1 - number % 10}#1")
        looks.append(head.rooms.looks - before)
    return looks


@pytest.mark.parametrize("free", [50, SMALL])
def test_a_decision_of_the_head_looks_at_as_many_nodes_in_a_large_cluster(free):
    small, large = looks_of_a_head(SMALL, free), looks_of_a_head(LARGE, free)
    assert sum(large) <= sum(small)
    assert max(large) <= 2 * SAMPLE


def test_a_demand_that_nearly_fits_everywhere_looks_at_a_bounded_number():
    assert max(looks_of_a_head(LARGE, LARGE, cpus=4.0)) <= LOOKS_MAX


def test_in_a_large_cluster_few_know_of_all_nodes():
    report = flat(100)
    assert report.kinds["NodesWanted"] == 1  # by the node of the program
    assert report.kinds["NodesChanged"] < 10 * 100 + 2 * heads.KNOWN_TO_ALL_MAX**2


@pytest.mark.parametrize("name", ["all", "policies", "resources", "actors_all", "collectives_all"])
@pytest.mark.parametrize("known", [1, 2])
def test_seeds_in_which_few_know_of_all_nodes(monkeypatch, name, known):
    for machine in (heads, nodes_):
        monkeypatch.setattr(machine, "KNOWN_TO_ALL_MAX", known)
    report = simulate(name, range(7_000, 7_004))
    assert not report.failures, str(report)
    assert report.kinds["NodesWanted"]
