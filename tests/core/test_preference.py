"""A node that is not liked best gives way for a while: to one that a policy names, to one that has the inputs.

And who has a slot gives way to who is more urgent.
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
