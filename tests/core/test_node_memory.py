"""The store of a node: what goes to disk and back, also where others use the shared memory of the host."""

from __future__ import annotations

from flowengine.core import commands as c
from flowengine.core import messages as m
from tests.core.test_node import ME, Kit, ordered, put, sent


def test_where_others_use_the_shared_memory_too_less_is_granted_and_objects_go_to_disk():
    kit = Kit()
    put(kit, b"a", 40)
    kit.says(c.MemorySeen(0))
    assert ordered(kit.says(m.SpaceAsked(7, 30), "w2"), c.SpillObject) == [c.SpillObject(b"a" * 20, 40, 0)]
    assert sent(kit.says(c.ObjectSpilled(b"a" * 20, 10)), m.SpaceGiven, "w2") == [m.SpaceGiven(7, True)]
    kit.says(c.MemorySeen(40))
    assert sent(kit.says(m.SpaceAsked(8, 30), "w2"), m.SpaceGiven) == []
    (refused,) = sent(kit.beats(8.0), m.SpaceGiven, "w2")
    assert not refused.granted
    assert "of other programs" in refused.reason
    kit.says(c.MemorySeen(1000))
    assert sent(kit.says(m.SpaceAsked(9, 70), "w2"), m.SpaceGiven, "w2") == [m.SpaceGiven(9, True)]


def test_an_object_that_lacks_memory_to_come_back_stays_on_disk_until_there_is_some():
    kit = Kit()
    put(kit, b"a", 60)
    kit.says(m.SpaceAsked(7, 50), "w1")
    kit.says(c.ObjectSpilled(b"a" * 20, 30))
    kit.says(m.SpaceReturned(50), "w1")
    wanted = m.ObjectWanted(b"a" * 20, 60, "d", (ME,))
    assert ordered(kit.says(wanted, "w2"), c.RestoreObject) == [c.RestoreObject(b"a" * 20, 60)]
    assert kit.says(c.RestoreFailed(b"a" * 20, "no room", 10)) == []
    assert ordered(kit.says(c.MemorySeen(80)), c.RestoreObject) == [c.RestoreObject(b"a" * 20, 60)]
    assert kit.says(c.RestoreFailed(b"a" * 20, "no room", 10)) == []
    (missing,) = sent(kit.beats(8.0), m.ObjectMissing, "w2")
    assert missing.reason.startswith("StoreFull: no room")
    assert kit.node.store.entries[b"a" * 20].place == "disk"
    kit.says(c.MemorySeen(80))
    assert ordered(kit.says(wanted, "w2"), c.RestoreObject) == [c.RestoreObject(b"a" * 20, 60)]
    assert sent(kit.says(c.ObjectRestored(b"a" * 20)), m.ObjectHere, "w2") == [m.ObjectHere(b"a" * 20)]


def test_free_while_it_is_spilled_is_done_afterwards():
    kit = Kit()
    put(kit, b"a", 60)
    kit.says(m.SpaceAsked(7, 50), "w1")
    kit.says(m.ObjectFreed((b"a" * 20,)), "d")
    assert ordered(kit.says(c.ObjectSpilled(b"a" * 20, 30)), c.RemoveObject) == [c.RemoveObject(b"a" * 20, True)]
    assert kit.node.store.entries == {}


def test_lost_on_purpose_is_lost_silently():
    kit = Kit()
    put(kit, b"a", 60)
    assert kit.says(m.LoseObject(b"a" * 20), "d") == [c.RemoveObject(b"a" * 20, False)]


def test_an_owner_that_was_named_by_another_process_is_spoken_to_since_only_a_link_tells_of_its_death():
    kit = Kit()
    put(kit, b"a", 60)
    oid = b"a" * 20
    assert sent(kit.says(m.ObjectAdopted(oid, "heir"), "heir"), m.Ping) == []
    assert sent(kit.says(m.ObjectAdopted(oid, "dead"), "d"), m.Ping, "dead") == [m.Ping(0)]
    for owner in ("heir", "d"):
        kit.says(m.ObjectFreed((oid,)), owner)
    kit.says(m.PeerLost("dead", "refused"), "dead")
    assert list(kit.node.orphans) == ["dead"], "what it owned goes when nobody has adopted it for a while"
