"""Plain bytes over TLS without tornado, which takes more time for a record of 16 KiB than the cipher does."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any

from flowengine.runtime.handshake import BulkStream, TlsStream
from flowengine.runtime.wire import Buffer

RECORD_BYTES = 17 << 10  # more than a record of TLS with all that belongs to it
TURN_BYTES = 1 << 20  # then others on the loop have their turn


class PlainTlsStream(BulkStream):
    """A bulk stream straight on the TLS socket of a stream that has done its handshake."""

    def __init__(self, stream: TlsStream) -> None:
        self.comm = stream.comm  # it closes the socket
        source: Any = stream.stream
        self._loop = asyncio.get_running_loop()
        self._early = bytes(source._read_buffer)  # tornado listens while nobody reads
        source.io_loop.remove_handler(source.fileno())
        self._sock: ssl.SSLSocket = source.socket
        self._fd = self._sock.fileno()
        self._waits: dict[bool, list[asyncio.Future[None]]] = {False: [], True: []}  # by whether for writing
        self._turn_bytes = 0
        self._low_bytes = 1
        self._closed = False

    async def _readinto(self, view: memoryview) -> int:
        if self._early:
            count = min(len(view), len(self._early))
            view[:count], self._early = self._early[:count], self._early[count:]
            return count
        at = 0
        while True:
            self._check_open()
            try:
                while at < len(view):
                    count = self._sock.recv_into(view[at:])
                    at += count
                    if not count:
                        return at
                await self._turn(at)
                return at
            except ssl.SSLWantReadError:
                self._turn_bytes = 0
                if at:
                    return at
                await self._ready(False)
            except ssl.SSLWantWriteError:
                await self._ready(True)

    async def _write(self, view: Buffer) -> None:
        rest = memoryview(view)
        await self._turn(len(rest))
        while rest:
            self._check_open()
            try:
                while rest:
                    rest = rest[self._sock.send(rest) :]
            except ssl.SSLWantWriteError:
                self._turn_bytes = 0
                await self._ready(True)
            except ssl.SSLWantReadError:
                await self._ready(False)

    def wake_at(self, size_bytes: int) -> None:
        """The kernel does that, a little earlier."""
        # Of the last record OpenSSL may have taken a part already.
        low_bytes = max(1, size_bytes - RECORD_BYTES)
        if low_bytes < self._low_bytes or low_bytes > 2 * self._low_bytes:  # each change is a call of the kernel
            self._low_bytes = low_bytes
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_bytes)

    async def _turn(self, size_bytes: int) -> None:
        self._turn_bytes += size_bytes
        if self._turn_bytes > TURN_BYTES:
            self._turn_bytes = 0
            await asyncio.sleep(0)

    async def _ready(self, for_writing: bool) -> None:
        """Wait for the socket; a reader may have to wait until it can be written to, and a writer the other way."""
        waits = self._waits[for_writing]
        if not waits:
            listen = self._loop.add_writer if for_writing else self._loop.add_reader
            listen(self._fd, self._woken, for_writing)
        ready = self._loop.create_future()
        waits.append(ready)
        try:
            await ready
        finally:
            if ready in waits:  # it was cancelled
                waits.remove(ready)
                if not waits:
                    self._forget(for_writing)

    def _woken(self, for_writing: bool) -> None:
        waits = self._waits[for_writing]
        self._forget(for_writing)
        while waits:
            _wake(waits.pop())

    def _forget(self, for_writing: bool) -> None:
        if not self._closed:
            (self._loop.remove_writer if for_writing else self._loop.remove_reader)(self._fd)

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionError("the stream is closed")

    def abort(self) -> None:
        """Close at once."""
        if self._closed:
            return
        for for_writing in (False, True):
            self._woken(for_writing)
        self._closed = True
        self.comm.abort()


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def for_bulk(stream: BulkStream) -> BulkStream:
    """The stream for what follows its handshake; nobody may use the one before any more."""
    return PlainTlsStream(stream) if isinstance(stream, TlsStream) else stream
