"""A node that is not liked best gives way for a while: to one that a policy names, to one that has the inputs.

And who has a slot gives way to who is more urgent, and where there are more than CPUs.
"""
from __future__ import annotations

from flowengine.core import messages as m
from tests.core.test_node import CPU, HEAD, LOCKED, ME, OTHER, Kit, amounts, sent


def test_a_node_that_is_liked_better_is_first_each_time():
    kit = Kit()
    kit.cluster()
    liked = ("n2", "*")
    assert [told.node for told in sent(kit.demand("d", 1, placement=liked), m.LeaseRedirected)] == [OTHER]
    kit.demand("d", 0, placement=liked)  # served there
    again = kit.says(m.LeaseDemand(CPU, liked, 1, 0, 0), "d", after_s=2.0)
    assert sent(again, m.LeaseGranted) == []  # it was asked there too
    assert len(sent(kit.beats(0.5), m.LeaseGranted, "d")) == 1  # and has no room


def test_a_node_with_the_inputs_is_waited_for_as_long_as_they_would_take_on_a_slow_link():
    kit = Kit()
    kit.cluster()
    kit.says(m.LeaseDemand(CPU, ("n2", "*"), 1, 0, 0, 0, ((OTHER, 50_000_000),)), "d")
    assert sent(kit.beats(2.0), m.LeaseGranted, "d") == []
    assert len(sent(kit.beats(1.0), m.LeaseGranted, "d")) == 1
    kit.says(m.LeaseDemand(CPU, ("n2", "*"), 2, 0, 0, 0, ((OTHER, 50_000_000), (ME, 50_000_000))), "d2")
    assert len(sent(kit.beats(0.5), m.LeaseGranted, "d2")) == 1


def test_who_gets_a_slot_hears_how_urgent_others_are_that_need_it():
    kit = Kit()
    kit.cluster()
    kit.says(amounts(10_000), HEAD)
    kit.demand("d", 1, LOCKED)
    other = (*LOCKED, ("CPU", 1.0))
    kit.says(m.LeaseDemand(LOCKED, (), 2, 0, 9.0), "e")
    kit.says(m.LeaseDemand(other, (), 1, 0, 5.0), "e")
    commands = kit.says(m.LeaseReturned(1), "d")
    assert [grant.shape for grant in sent(commands, m.LeaseGranted, "e")] == [LOCKED]
    assert sent(commands, m.LeaseWanted, "e")[-1] == m.LeaseWanted(2, below=5.0)  # not that its own line has 9


# --- slots that are held free for what is more urgent ---------------------------------------------------


BOTH = (("CPU", 2.0),)


class UrgentKit(Kit):
    """A node of two CPUs, both leased to "low" (leases 1 and 2), which wants more; starve_s is 1."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(starve_s=1.0, **sizes)
        self.demand("low", 2)
        self.low(4)

    def low(self, total: int) -> list[m.LeaseGranted]:
        return sent(self.demand("low", total), m.LeaseGranted)

    def urgent(self, total: int, priority: float = 5.0, shape: m.Shape = BOTH) -> None:
        self.says(m.LeaseDemand(shape, (), total, 0, priority), "high")

    def returned(self, lease: int, owner: str = "low") -> list[str]:
        commands = self.says(m.LeaseReturned(lease), owner)
        return [owner for owner in ("low", "middle", "high") for _ in sent(commands, m.LeaseGranted, owner)]


def test_what_urgent_work_lacks_is_held_free_for_it():
    kit = UrgentKit()
    kit.urgent(1)
    assert kit.returned(1) == []
    assert kit.low(5) == []
    assert kit.returned(2) == ["high"]
    assert kit.returned(3, "high") == ["low", "low"]


def test_nothing_is_held_free_for_equals_until_they_starve():
    kit = UrgentKit()
    kit.urgent(1, priority=9.0, shape=(("CPU", 5.0),))  # priorities are used, and this one no node could serve
    kit.urgent(1, priority=0.0)
    assert kit.returned(1) == ["low"]


def test_who_is_less_urgent_hears_why_it_waits_and_goes_on_when_the_urgent_one_is_gone():
    kit = UrgentKit()
    kit.urgent(1)
    kit.returned(1)
    assert [told.reason for told in sent(kit.beats(1.5), m.LeaseDelayed, "low")][-1] == (
        "node n1 keeps CPU free for what is more urgent or waits for long"
    )
    commands = kit.says(m.LeaseDemand(BOTH, (), 0, 0, 5.0), "high")
    assert len(sent(commands, m.LeaseGranted, "low")) == 1


def test_between_two_urgent_ones_the_second_is_held_for_as_well():
    kit = UrgentKit(cpus=3, workers=3)
    kit.says(m.LeaseDemand(BOTH, (), 1, 0, 5.0), "middle")
    kit.urgent(1, priority=9.0, shape=CPU)
    assert kit.returned(1) == ["high"]
    assert kit.returned(2) == []
    assert kit.returned(3) == ["middle"]


def test_others_have_a_turn_when_what_is_urgent_waits_for_long():
    kit = UrgentKit()
    kit.urgent(1)
    kit.returned(1)
    assert sent(kit.beats(3.5), m.LeaseGranted) == []
    (grant,) = sent(kit.beats(0.5), m.LeaseGranted, "low")
    kit.beats(1.0)
    assert kit.returned(grant.lease) == []
    assert sent(kit.beats(7.5), m.LeaseGranted) == []  # twice as long
    assert len(sent(kit.beats(1.5), m.LeaseGranted, "low")) == 1


def test_what_does_not_come_free_by_itself_is_not_waited_for():
    kit = UrgentKit()
    kit.says(m.ActorHere(b"abc"), kit.node.leases.leases[1].worker.address)
    kit.urgent(1)
    assert kit.returned(2) == ["low"]


def test_what_a_task_holds_that_waits_for_others_is_not_waited_for():
    kit = Kit(starve_s=1.0)
    half = (("GPU", 0.5),)
    (parent,) = sent(kit.demand("low", 1, half), m.LeaseGranted)
    kit.says(m.WorkerBlocked(parent.worker_id, True), parent.worker)
    kit.says(m.LeaseDemand((("GPU", 1.0),), (), 1, 0, 5.0), "high")
    assert len(sent(kit.demand(parent.worker, 1, half, depth=1), m.LeaseGranted)) == 1


def test_slots_beyond_the_cpus_are_asked_back_of_an_owner_that_has_more_work():
    kit = Kit(cpus=1, workers=1)
    kit.demand("d", 9)
    kit.says(m.WorkerBlocked("n1.w1", True), "w1")
    assert len(sent(kit.started(2), m.LeaseGranted, "d")) == 1
    commands = kit.says(m.WorkerBlocked("n1.w1", False), "w1") + kit.beats(1.0)  # the task goes on, beside the other
    assert sent(commands, m.LeaseWanted, "d") == [m.LeaseWanted(2)]
    assert sent(kit.says(m.LeaseReturned(2), "d") + kit.beats(1.0), m.LeaseGranted) == []
    assert len(sent(kit.says(m.LeaseReturned(1), "d"), m.LeaseGranted, "d")) == 1
