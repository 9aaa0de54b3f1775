"""The way through a Dask scheduler's port: both ends dial, what nobody serves is refused, broken ways are made anew."""
from __future__ import annotations

import asyncio
import contextlib

import pytest
from distributed import Security
from distributed.core import Server

from flowengine.deploy.relay import Relay
from flowengine.runtime.gate import RELAY_OP
from flowengine.runtime.link import PeerGone
from tests.runtime.kit import run
from tests.test_link import Note, Party


@contextlib.asynccontextmanager
async def relay(security=None):
    """A Dask server that has the handler, as a scheduler with the plugin has."""
    passing = Relay("127.0.0.1", security)

    async def serve(comm, ask, to):
        await passing.serve(comm, ask, to)

    server = Server(handlers={RELAY_OP: serve})
    arguments = security.get_listen_args("scheduler") if security else {}
    await server.listen(f"{'tls' if security else 'tcp'}://127.0.0.1:0", **arguments)
    try:
        yield server.address, passing
    finally:
        passing.close()
        await server.close()


@pytest.mark.parametrize("secure", [False, True])
def test_both_ends_dial_and_links_and_streams_pass(secure):
    async def scenario():
        security = Security.temporary() if secure else None
        served = asyncio.Event()

        async def echo(peer, hello, stream):
            await stream.write(bytes(await stream.read_exactly(hello["size"])))
            served.set()

        async with relay(security) as (where, _), Party(security=security, on_stream=echo) as inside, \
                Party(security=security, relay=where, on_stream=echo) as outside:
            outside.endpoint.send(inside.address, Note(1))
            await inside.until(lambda: inside.got == [Note(1)])
            async with Party(security=security) as other:
                other.endpoint.send(outside.address, Note(2))
                await outside.until(lambda: outside.got == [Note(2)])
            sent = bytes(range(256)) * 4096
            for dialler, server in ((outside, inside), (inside, outside)):
                stream = await dialler.endpoint.open_stream(server.address, {"size": len(sent)})
                writing = asyncio.ensure_future(stream.write(sent))
                assert bytes(await stream.read_exactly(len(sent))) == sent
                await writing
                stream.abort()

    run(scenario)


def test_who_is_not_there_is_gone_at_once():
    async def scenario():
        async with relay() as (where, _), Party(relay=where) as outside:
            async with Party() as inside:
                address = inside.address
            with pytest.raises(PeerGone, match="nobody listens"):
                await outside.endpoint.connect(address)

    run(scenario)


def test_the_secret_is_asked_for_through_the_relay():
    async def scenario():
        async with relay() as (where, _), Party(secret=b"o" * 32) as inside, Party(relay=where) as outside:
            with pytest.raises(ConnectionError, match="secret"):
                await outside.endpoint.connect(inside.address)

    run(scenario)


def test_a_broken_way_is_made_anew():
    async def scenario():
        async with relay() as (where, passing), Party() as inside, Party(relay=where) as outside:
            outside.endpoint.send(inside.address, Note(1))
            await inside.until(lambda: len(inside.got) == 1)
            for stream in list(passing.streams.values()):
                stream.abort()
            inside.endpoint.send(outside.address, Note(2))
            outside.endpoint.send(inside.address, Note(3))
            await inside.until(lambda: Note(3) in inside.got)
            await outside.until(lambda: Note(2) in outside.got)
            assert not inside.lost
            assert not outside.lost

    run(scenario)
