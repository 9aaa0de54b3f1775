"""A node that is not liked best gives way for a while: to one that a policy names, to one that has the inputs."""
from __future__ import annotations

from flowengine.core import messages as m
from tests.core.test_node import CPU, ME, OTHER, Kit, sent


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
