"""Objects between hosts: bare transfers over real links on loopback, each "host" with a folder of its own."""
from __future__ import annotations

import asyncio
import os

import pytest

from flowengine.config import Config
from flowengine.objects import codec, spill
from flowengine.objects.segments import Segments
from flowengine.objects.transfer import Chain, PullError, Transfers
from flowengine.runtime import process
from flowengine.runtime.connection import new_tls

from .kit import run

SECRET = b"s" * 32
OID = bytes(range(20))
NAME = OID.hex()
MIB = 1 << 20


class Host:
    """One host's store and transfers; counts what it serves, can be slow or break off."""

    def __init__(self, folder, config, tls=None):
        folder.mkdir(mode=0o700)
        self.segments = Segments(str(folder), pool_bytes_max=0)
        self.transfers = Transfers(self.segments, self.open_stream, config)
        self.transfers.disk_path = lambda oid: str(folder / f"{oid.hex()}.lz4")
        place = process.Place(host="127.0.0.1", secret=SECRET, tls=tls, config=config)
        ignore = lambda peer, what: None  # noqa: E731
        self.endpoint = process.new_endpoint(place, ignore, ignore, self.on_stream)
        self.sent_bytes = 0
        self.break_after_bytes = 1 << 62
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()

    async def start(self):
        await self.endpoint.start()
        self.transfers.me = self.endpoint.address

    @property
    def address(self):
        return self.endpoint.address

    async def open_stream(self, to, hello):
        return await self.endpoint.open_stream(to, hello)

    async def on_stream(self, peer, hello, stream):
        self.asked.set()
        write = stream._write
        answered = False

        async def counted(view):
            nonlocal answered
            if answered:
                await self.gate.wait()
                if self.sent_bytes + len(view) > self.break_after_bytes:
                    raise ConnectionError("broken on purpose")
                self.sent_bytes += len(view)
            answered = True
            await write(view)

        stream._write = counted
        await self.transfers.serve(peer, hello, stream)

    def put(self, payload):
        packed = codec.pack(payload)
        segment = self.segments.create(NAME, codec.layout_bytes(packed))
        codec.write_object(segment.view, packed, NAME.encode())
        segment.seal()
        return self.segments.size(NAME)

    def value(self):
        view = self.segments.open(NAME)
        return None if view is None else bytes(view)


@pytest.fixture
def hosts(tmp_path):
    async def make(count, tls=None, **limits):
        config = Config(**{"chunk_bytes": 64 << 10, **limits})
        made = [Host(tmp_path / f"host{number}", config, tls) for number in range(count)]
        for host in made:
            await host.start()
        return made

    return make


async def close(hosts):
    await asyncio.gather(*(host.endpoint.close() for host in hosts))


@pytest.mark.parametrize("secure", [False, True])
def test_an_object_arrives_whole(hosts, secure):
    async def scenario():
        a, b = made = await hosts(2, tls=new_tls() if secure else None)
        size = a.put(os.urandom(3 * MIB + 17))
        assert await b.transfers.pull(OID, size, [a.address]) == a.address
        assert b.value() == a.value()
        await close(made)

    run(scenario)


def test_receivers_form_a_chain(hosts):
    async def scenario():
        made = await hosts(4)
        a, *others = made
        size = a.put(os.urandom(4 * MIB))
        a.gate.clear()      # nobody has anything yet when all have asked
        pulls = []
        for host in others:
            pulls.append(asyncio.create_task(host.transfers.pull(OID, size, [a.address])))
            await a.asked.wait()
            a.asked.clear()
        a.gate.set()
        sources = await asyncio.gather(*pulls)
        assert sources == [host.address for host in made[:3]]
        assert [host.sent_bytes for host in made] == [size, size, size, 0]
        assert {host.value() for host in made} == {a.value()}
        await close(made)

    run(scenario)


def test_goes_on_from_another_node_at_the_same_byte(hosts):
    async def scenario():
        a, b, c = made = await hosts(3)
        payload = os.urandom(2 * MIB)
        size = a.put(payload)
        b.put(payload)
        a.break_after_bytes = MIB
        assert await c.transfers.pull(OID, size, [a.address, b.address]) == b.address
        assert 0 < a.sent_bytes <= MIB
        assert a.sent_bytes + b.sent_bytes == size
        assert c.value() == a.value()
        await close(made)

    run(scenario)


def test_when_the_middle_of_a_chain_breaks_the_end_goes_back_to_the_origin(hosts):
    async def scenario():
        a, b, c = made = await hosts(3)
        size = a.put(os.urandom(2 * MIB))
        b.break_after_bytes = MIB
        a.gate.clear()
        first = asyncio.create_task(b.transfers.pull(OID, size, [a.address]))
        await a.asked.wait()
        second = asyncio.create_task(c.transfers.pull(OID, size, [a.address]))
        await b.asked.wait()
        a.gate.set()
        assert await first == a.address
        assert await second == a.address
        assert b.sent_bytes + a.sent_bytes == 2 * size
        assert c.value() == a.value()
        await close(made)

    run(scenario)


def test_a_source_that_stands_still_is_left(hosts):
    async def scenario():
        a, b, c = made = await hosts(3, transfer_timeout_s=0.3)
        payload = os.urandom(MIB)
        size = a.put(payload)
        b.put(payload)
        a.gate.clear()
        assert await c.transfers.pull(OID, size, [a.address, b.address]) == b.address
        a.gate.set()
        await close(made)

    run(scenario)


def test_says_why_nobody_gave_it(hosts):
    async def scenario():
        a, b = made = await hosts(2)
        with pytest.raises(PullError, match="it is not here") as absent:
            await b.transfers.pull(OID, MIB, [a.address])
        assert absent.value.silent == ()
        with pytest.raises(PullError, match="no other node"):
            await b.transfers.pull(OID, MIB, [b.address])
        a.put(os.urandom(MIB))
        with pytest.raises(PullError, match="were expected"):
            await b.transfers.pull(OID, MIB, [a.address])
        await a.endpoint.close()
        with pytest.raises(PullError, match="nobody listens") as unheard:
            await b.transfers.pull(OID, MIB, [a.address])
        assert unheard.value.silent == (a.address,)
        assert os.listdir(b.segments.folder) == []
        await close(made)

    run(scenario)


def test_what_was_spilled_is_sent_from_disk(hosts):
    async def scenario():
        a, b = made = await hosts(2)
        size = a.put(bytes(MIB) + os.urandom(MIB))
        whole = a.value()
        spill.spill(a.segments.path(NAME), size, a.transfers.disk_path(OID), 64 << 10)
        assert a.value() is None
        assert await b.transfers.pull(OID, size, [a.address]) == a.address
        assert b.value() == whole
        await close(made)

    run(scenario)


def test_two_that_would_pull_from_each_other_do_not_wait_forever(hosts):
    async def scenario():
        a, b, c = made = await hosts(3, transfer_timeout_s=0.5)
        size = a.put(os.urandom(MIB))
        a.gate.clear()
        pulls = [asyncio.create_task(b.transfers.pull(OID, size, [c.address, a.address])),
                 asyncio.create_task(c.transfers.pull(OID, size, [b.address, a.address]))]
        await a.asked.wait()
        a.gate.set()
        await asyncio.gather(*pulls)
        assert b.value() == c.value() == a.value()
        await close(made)

    run(scenario)


def test_a_chain_names_who_came_last_but_for_those_to_avoid():
    chain = Chain()
    for node in ("b", "c", "d", "b"):
        chain.join(node)
    assert chain.last(()) == "b"
    assert chain.last(("b",)) == "d"
    assert chain.last(("b", "c", "d")) is None
