"""Values that a process will have though none of its tasks makes them: results of groups that somebody refers to."""
from __future__ import annotations

from typing import Any

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.ids import object_id
from flowengine.core.owner import Owner
from flowengine.core.owner_promises import Promised, PromiseKept

OID = object_id(b"p" * 16, 0)
VALUE = m.Inline(b"v")


def owner(*events: Any) -> tuple[Owner, list[Any]]:
    """An owner after these events, and what the last of them led to."""
    machine, out = Owner("me", "node", "n1", Config()), []
    for event in events:
        out = machine.handle(event, 0.0, "other" if isinstance(event, m.WatchObject) else "")
    return machine, out


def test_who_waits_for_it_here_or_elsewhere_is_told_when_it_is_there() -> None:
    machine, out = owner(Promised(OID), s.ReadyAsked(7, (OID,), 1), m.WatchObject(OID))
    assert out == []
    assert machine.why(OID).endswith("waits for the members of a group")
    out = machine.handle(PromiseKept(OID, VALUE), 0.0)
    assert c.Resolve(7) in out
    assert c.Send("other", m.ObjectReady(OID, VALUE)) in out
    assert machine.value_of(OID) == VALUE


def test_a_value_that_comes_when_nobody_refers_to_it_any_more_is_dropped() -> None:
    machine, _ = owner(Promised(OID), s.RefsDropped((OID,)))
    assert not machine.objects
    out = machine.handle(PromiseKept(OID, m.Stored(9, ("node",))), 0.0)
    assert out == [c.Send("node", m.ObjectFreed((OID,)))]
    assert not machine.promised


def test_a_parent_that_runs_again_refers_to_the_same_value() -> None:
    machine, _ = owner(Promised(OID), PromiseKept(OID, VALUE), Promised(OID))
    assert machine.objects[OID].local == 2
    assert not machine.promised
    out = machine.handle(PromiseKept(OID, m.Stored(9, ("node",))), 0.0)
    assert out == [c.Send("node", m.ObjectFreed((OID,)))]
    assert machine.value_of(OID) == VALUE


def test_it_is_not_taken_for_lost_by_whoever_looks_for_what_an_actor_left() -> None:
    machine, _ = owner(Promised(OID), m.HeirAsked(OID, "me", b""))
    assert machine.value_of(OID) is None
