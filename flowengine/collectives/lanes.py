"""Streams between nodes that stay: pieces go out in their order, and come in straight to where they belong."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from .posts_orders import Frame

if TYPE_CHECKING:
    from flowengine.runtime.link import BulkStream

log = logging.getLogger(__name__)

HEAD = struct.Struct("<16sIIIIIQI")  # op, epoch, line, piece, source, target, bytes, stage
FRAME_BYTES_MAX = 1 << 30
WRITE_BYTES = 1 << 20  # written at once: after each the lane has moved
WAKE_BYTES = 128 << 10  # a reader is woken for so many bytes, or the rest of a frame
LANE_HELLO = "lane"  # key of the hello of such a stream

OpenStream = Callable[[str, dict[str, Any]], "Awaitable[BulkStream]"]


class Inlet(Protocol):
    """Who takes the pieces that come."""

    async def room(self, frame: Frame) -> Any:
        """Where the bytes of a frame go (`view`); waits while there is too much to keep."""

    def came(self, landing: Any) -> None:
        """All bytes of a frame are there."""

    def failed(self, landing: Any) -> None:
        """They are not, and will not be."""

    def sent(self, to: str, order: Any) -> None:
        """The kernel has all bytes of an order."""

    def broken(self, peer: str, reason: str) -> None:
        """Pieces to or from this peer may be lost."""


class Outgoing:
    """The lane to one node; its stream is opened when there is something to send."""

    def __init__(self, to: str, lanes: Lanes) -> None:
        self.to = to
        self.lanes = lanes
        self.waiting: deque[tuple[Frame, memoryview, Any]] = deque()
        self.wakened = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._run())

    def put(self, frame: Frame, view: memoryview, order: Any) -> None:
        """Send this after all before; order: for `sent`."""
        self.waiting.append((frame, view, order))
        self.wakened.set()

    async def _run(self) -> None:
        reason = "closed"
        try:
            async with asyncio.timeout(self.lanes.timeout_s):
                stream = await self.lanes.open_stream(self.to, {LANE_HELLO: 1})
            watch = asyncio.get_running_loop().create_task(self._watch(stream))
            try:
                await self._write(stream)
            finally:
                watch.cancel()
                stream.abort()
        except TimeoutError:
            reason = f"it took nothing for {self.lanes.timeout_s:g} s"
        except OSError as error:
            reason = str(error) or type(error).__name__
        self.lanes.lost(self, reason)

    async def _watch(self, stream: BulkStream) -> None:
        """Nothing is ever said on the way back: what comes is the end."""
        reason = "it closed the stream"
        try:
            await stream.readinto(memoryview(bytearray(1)))
        except OSError as error:
            reason = str(error) or reason
        self.lanes.lost(self, reason)

    async def _write(self, stream: BulkStream) -> None:
        while True:
            while not self.waiting:
                self.wakened.clear()
                await self.wakened.wait()
            frame, view, order = self.waiting.popleft()
            head = HEAD.pack(frame.op, frame.epoch, frame.line, frame.piece, frame.source, frame.target, frame.nbytes,
                             frame.stage)
            await self._write_in_time(stream, head, view[:WRITE_BYTES])
            for at in range(WRITE_BYTES, len(view), WRITE_BYTES):
                await self._write_in_time(stream, b"", view[at : at + WRITE_BYTES])
            del view
            self.lanes.inlet.sent(self.to, order)

    async def _write_in_time(self, stream: BulkStream, head: bytes, view: memoryview) -> None:
        async with asyncio.timeout(self.lanes.timeout_s):
            if head:
                await stream.write(head)
            await stream.write(view)


class Lanes:
    """All lanes of one node, out and in; on its loop."""

    def __init__(self, open_stream: OpenStream, timeout_s: float, inlet: Inlet) -> None:
        self.open_stream = open_stream
        self.timeout_s = timeout_s
        self.inlet = inlet
        self.out: dict[str, Outgoing] = {}

    def send(self, to: str, frame: Frame, view: memoryview, order: Any) -> None:
        """Queue a piece; nobody writes to the view until it is sent."""
        lane = self.out.get(to)
        if lane is None:
            lane = self.out[to] = Outgoing(to, self)
        lane.put(frame, view, order)

    def lost(self, lane: Outgoing, reason: str) -> None:
        """A lane ended; told once, and not when it was closed on purpose."""
        if self.out.get(lane.to) is lane:
            self.close_lane(lane.to)
            self.inlet.broken(lane.to, reason)

    def close_lane(self, to: str) -> None:
        """Drop the lane to a node and what waits there."""
        lane = self.out.pop(to, None)
        if lane is not None:
            lane.waiting.clear()
            lane.task.cancel()

    def close(self) -> None:
        """Drop all lanes."""
        for to in list(self.out):
            self.close_lane(to)

    async def serve(self, peer: str, stream: BulkStream) -> None:
        """Take in what a node sends, until its stream ends."""
        reason = "the stream ended"
        try:
            await self._read(stream)
        except (OSError, LookupError, ValueError) as error:
            reason = str(error) or type(error).__name__
        self.inlet.broken(peer, reason)

    async def _read(self, stream: BulkStream) -> None:
        head = memoryview(bytearray(HEAD.size))
        while True:
            await _fill(stream, head)
            op, epoch, line, piece, source, target, nbytes, stage = HEAD.unpack(head)
            if nbytes > FRAME_BYTES_MAX:
                raise ConnectionError(f"a piece of {nbytes} bytes")
            frame = Frame(op, epoch, line, piece, stage, source, target, nbytes)
            landing = await self.inlet.room(frame)
            try:
                await _fill(stream, landing.view)
            except BaseException:
                self.inlet.failed(landing)
                raise
            self.inlet.came(landing)


async def _fill(stream: BulkStream, view: memoryview) -> None:
    """Read exactly as much as the view holds; woken by large amounts rather than for each packet."""
    at, end = 0, len(view)
    while at < end:
        stream.wake_at(min(end - at, WAKE_BYTES))
        count = await stream.readinto(view[at:])
        if not count:
            raise ConnectionError("the stream ended")
        at += count
