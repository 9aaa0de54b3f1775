"""The scheduler's end of runtime/gate.py: joins connections for programs that reach nothing but the scheduler's port.

It copies bytes and reads none of them: who talks to whom is proved by the handshake that passes through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import msgspec

from flowengine.runtime import handshake
from flowengine.runtime.gate import FAILED, OPEN, REFUSED
from flowengine.runtime.handshake import BulkStream

log = logging.getLogger(__name__)

COPY_BYTES = 256 * 1024
DOOR_KEPT_S = 30.0  # a program whose connections are all broken may come back so long

Seat = asyncio.Future[BulkStream]  # of a connection that waits for somebody to dial


class Door:
    """A port that is open for one process elsewhere."""

    def __init__(self) -> None:
        self.seats: asyncio.Queue[Seat] = asyncio.Queue()
        self.connections = 0
        self.listener: Any = None

    async def welcome(self, stream: BulkStream) -> None:
        """Somebody has dialled: the first connection that still waits has it."""
        try:
            seat = await self.seats.get()
            while seat.done():
                seat = await self.seats.get()
        except BaseException:
            stream.abort()
            raise
        seat.set_result(stream)


class Relay:
    """The connections that pass through one scheduler; `serve` is its handler."""

    def __init__(self, host: str, security: Any) -> None:
        self.host = host
        self.security = security
        self.doors: dict[str, Door] = {}
        self.opening = asyncio.Lock()
        self.streams: dict[int, BulkStream] = {}
        self.tasks: set[asyncio.Task[Any]] = set()

    async def serve(self, comm: Any, ask: str, to: str) -> None:
        """Take the connection over, and return when it has ended."""
        if getattr(comm, "stream", None) is None:
            raise ValueError(f"{comm} is no connection of bytes")
        stream = handshake.take_over(comm)
        self.streams[id(stream)] = stream
        try:
            if ask == "dial":
                await self._dial(stream, to)
            elif ask == "accept":
                await self._accept(stream, to)
        except OSError as error:
            log.debug("a connection through the relay ended: %s", error)
        finally:
            del self.streams[id(stream)]
            stream.abort()

    async def _dial(self, stream: BulkStream, to: str) -> None:
        try:
            other = await handshake.connect(to, self.security, self.tasks)
        except (OSError, ValueError) as error:
            word = REFUSED if isinstance(error, ConnectionRefusedError) else FAILED
            await tell(stream, word, f"{to} cannot be reached from the Dask scheduler: {error}")
            return
        await tell(stream, OPEN, "")
        await join(stream, other)

    async def _accept(self, stream: BulkStream, name: str) -> None:
        door = await self._door(name)
        door.connections += 1
        try:
            await tell(stream, OPEN, door.listener.contact_address)
            seat: Seat = asyncio.get_running_loop().create_future()
            door.seats.put_nowait(seat)
            # The other end is silent until it is told, so what ends this reading before is its end.
            view = memoryview(bytearray(COPY_BYTES))
            first = asyncio.ensure_future(stream.readinto(view))
            await asyncio.wait((first, seat), return_when=asyncio.FIRST_COMPLETED)
            if seat.done():
                await tell(stream, OPEN, "")
                await join(stream, seat.result(), first, view)
            seat.cancel()
            first.cancel()
        finally:
            door.connections -= 1
            asyncio.get_running_loop().call_later(DOOR_KEPT_S, self._close_unused, name)

    async def _door(self, name: str) -> Door:
        async with self.opening:  # a process asks with several connections at once
            door = self.doors.get(name)
            if door is None:
                door = Door()
                door.listener = await handshake.listen((self.host, 0), self.security, door.welcome, self.tasks)
                self.doors[name] = door
        return door

    def _close_unused(self, name: str) -> None:
        door = self.doors.get(name)
        if door is not None and not door.connections:
            door.listener.stop()
            del self.doors[name]

    def close(self) -> None:
        """End all of it."""
        for door in self.doors.values():
            door.listener.stop()
        self.doors.clear()
        for stream in self.streams.values():
            stream.abort()
        for task in self.tasks:
            task.cancel()


async def tell(stream: BulkStream, word: str, text: str) -> None:
    """Answer a program."""
    await handshake.write_message(stream, msgspec.msgpack.encode((word, text)))


async def join(one: BulkStream, other: BulkStream, first: asyncio.Future[int] | None = None,
               view: memoryview | None = None) -> None:
    """Copy both ways until either ends; first: a reading of `one` into `view` that has begun."""
    ways = (asyncio.ensure_future(_copy(one, other, first, view)), asyncio.ensure_future(_copy(other, one, None, None)))
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        one.abort()
        other.abort()
        for way in ways:
            way.cancel()
        with contextlib.suppress(OSError):
            await asyncio.gather(*ways, return_exceptions=True)


async def _copy(source: BulkStream, target: BulkStream, first: asyncio.Future[int] | None,
                view: memoryview | None) -> None:
    view = view or memoryview(bytearray(COPY_BYTES))
    count = await first if first is not None else await source.readinto(view)
    while count:
        await target.write(view[:count])
        count = await source.readinto(view)
