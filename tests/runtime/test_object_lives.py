"""An object made again while the node still hears of its earlier life: real files, the order of messages forced."""

from __future__ import annotations

import asyncio

import pytest

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.node import Node, NodeSettings
from flowengine.errors import StoreFull
from flowengine.objects import codec
from flowengine.objects.segments import Segments
from flowengine.runtime.node_objects import Objects

OID, DRIVER, WORKERS = b"x" * 20, "driver", ("w1", "w2")


class Host:
    """A node's machine and its shell for objects, two workers, and messages that go when they are told to."""

    def __init__(self, folder):
        self.machine = Node(NodeSettings("node", "n1", "h", (), 0, str(folder), 1 << 24, "s", "head"), Config())
        self.segments = Segments(str(folder), 0)
        self.objects = Objects(self.segments, None, str(folder), Config())
        self.workers = {name: Segments(str(folder), 1 << 24) for name in WORKERS}
        self.sent = []
        self.machine.start(0.0)
        for name in (DRIVER, *WORKERS):
            self.hears(m.Joined(name, 1, "driver"), name)

    def hears(self, message, sender):
        for command in self.machine.handle(self.objects.looked_at(message), 1.0, sender):
            if isinstance(command, c.RemoveObject):
                self.objects.remove(command)
            elif isinstance(command, c.Send):
                self.sent.append((command.to, command.message))

    def make(self, worker, number):
        """Seal; the message that tells of it."""
        packed = codec.pack(bytes([number]) * (1 << 20))
        size = codec.layout_bytes(packed)
        segment = self.workers[worker].create(OID.hex(), size)
        codec.write_object(segment.view, packed, OID.hex().encode())
        return m.ObjectSealed(OID, size, DRIVER, segment.seal())

    def frees(self):
        """The workers do what they were told; the messages that tell of it."""
        orders, self.sent = [(to, one) for to, one in self.sent if isinstance(one, m.ObjectFreed)], []
        return [(m.SegmentKept(OID, self.workers[to].free(OID.hex(), one.files[0]), one.files[0]), to)
                for to, one in orders]

    def value(self):
        """What a reader is told and then finds; None: the node says that it is not here."""
        self.sent = []
        self.hears(m.ObjectWanted(OID, 1 << 20, DRIVER, ("node",)), DRIVER)
        ((_, answer),) = self.sent
        return codec.read_object(self.segments.open(OID.hex()))[0] if isinstance(answer, m.ObjectHere) else None


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


@pytest.mark.parametrize("again", WORKERS)
@pytest.mark.parametrize("lost", [m.LoseObject(OID), m.ObjectFreed((OID,), True)], ids=["lost", "freed"])
def test_what_is_made_again_before_the_node_hears_of_the_loss_stays(host, lost, again):
    host.hears(host.make("w1", 1), "w1")
    second = host.make(again, 2)
    host.hears(lost, DRIVER)
    for kept, worker in host.frees():
        host.hears(kept, worker)
    host.hears(second, again)
    assert host.value() == 2


def test_a_free_that_comes_late_leaves_what_was_told_meanwhile(host):
    host.hears(host.make("w1", 1), "w1")
    host.hears(m.ObjectFreed((OID,), True), DRIVER)
    host.hears(host.make("w2", 2), "w2")
    ((kept, worker),) = host.frees()
    assert host.value() == 2
    host.hears(kept, worker)
    assert host.value() == 2


def test_what_was_replaced_and_freed_before_it_is_told_is_not_here(host):
    second = host.make("w2", 2)
    host.hears(host.make("w1", 1), "w1")
    host.hears(m.ObjectFreed((OID,), True), DRIVER)
    ((kept, worker),) = host.frees()
    host.hears(second, "w2")
    host.hears(kept, worker)
    assert host.value() is None
    assert host.machine.store.pools == {"w1": kept.kept_bytes}


def test_memory_that_lacks_for_an_object_on_disk_is_told_and_looked_at_afterwards(tmp_path, monkeypatch):
    segments = Segments(str(tmp_path), 0)

    def full(*arguments):
        raise StoreFull("full")

    async def told():
        seen = asyncio.Queue()
        objects = Objects(segments, None, str(tmp_path), Config())
        objects.step, objects.look_at_memory = seen.put_nowait, lambda: seen.put_nowait("looked")
        objects.restore(c.RestoreObject(OID, 100))
        found = [await seen.get(), await seen.get()]
        objects.close()
        return found

    monkeypatch.setattr(segments, "create", full)
    monkeypatch.setattr(segments, "free_bytes", lambda: 7)
    assert asyncio.run(told()) == [c.RestoreFailed(OID, "full", 7), "looked"]
