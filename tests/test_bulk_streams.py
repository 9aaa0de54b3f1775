"""Bulk streams, plain and over TLS: both ways at once, closed from here, begun before they are taken over."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from typing import Any

import pytest

from flowengine.runtime import link
from flowengine.runtime.link import BulkStream
from flowengine.runtime.tls_stream import for_bulk

from .test_link import Party, handshake_security, on_loop


@pytest.mark.parametrize("tls", [False, True])
@on_loop
async def test_both_ways_of_a_bulk_stream_are_used_at_once(tls: bool) -> None:
    content = [os.urandom(3_000_000), os.urandom(3_000_000)]
    came: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def take(stream: BulkStream) -> bytes:
        into = memoryview(bytearray(3_000_000))
        filled = 0
        while filled < len(into):
            stream.wake_at(min(len(into) - filled, 100_000))
            filled += await stream.readinto(into[filled:])
        return bytes(into)

    async def serve(peer: str, hello: dict[str, Any], stream: BulkStream) -> None:
        taken, _ = await asyncio.gather(take(stream), stream.write(content[0]))
        came.set_result(taken)

    settings = {"security": handshake_security()} if tls else {}
    async with Party(on_stream=serve, **settings) as a, Party(**settings) as b:
        stream = await b.endpoint.open_stream(a.address, {})
        taken, _ = await asyncio.gather(take(stream), stream.write(content[1]))
        assert [taken, await came] == content
        await stream.close()


@pytest.mark.parametrize("tls", [False, True])
@on_loop
async def test_a_bulk_stream_that_is_closed_here_wakes_who_waits_for_it(tls: bool) -> None:
    opened = asyncio.Event()

    async def serve(peer: str, hello: dict[str, Any], stream: BulkStream) -> None:
        opened.set()
        assert await stream.readinto(memoryview(bytearray(1))) == 0, "the other side has closed it"

    async def ended(work: Awaitable[Any]) -> None:
        try:
            assert not await work
        except ConnectionError:
            pass

    settings = {"security": handshake_security()} if tls else {}
    async with Party(on_stream=serve, **settings) as a, Party(**settings) as b:
        stream = await b.endpoint.open_stream(a.address, {})
        await opened.wait()
        reading = asyncio.ensure_future(ended(stream.readinto(memoryview(bytearray(10)))))
        await asyncio.sleep(0)
        stream.abort()
        await reading
        await ended(stream.readinto(memoryview(bytearray(10))))


@on_loop
async def test_what_tornado_has_read_already_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    came: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(peer: str, hello: dict[str, Any], stream: BulkStream) -> None:
        came.set_result(bytes(await stream.read_exactly(8)))

    def with_early(stream: Any) -> BulkStream:
        stream.stream._read_buffer.extend(b"before")
        return for_bulk(stream)

    security = handshake_security()
    async with Party(on_stream=serve, security=security) as a, Party(security=security) as b:
        monkeypatch.setattr(link, "for_bulk", with_early)
        stream = await b.endpoint.open_stream(a.address, {})
        await stream.write(b"it")
        assert await came == b"beforeit"
        await stream.close()
