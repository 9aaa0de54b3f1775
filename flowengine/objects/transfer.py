"""Objects between hosts: bytes go from the socket straight into the receiving segment, and on from there.

Who wants an object that is being sent to somebody else already is sent on to the one who came last: receivers form
a chain in which every link is busy at once, so a broadcast takes hardly longer than one transfer. A transfer that
breaks goes on at its byte offset from another node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.errors import StoreFull
from flowengine.objects import spill

if TYPE_CHECKING:
    from flowengine.config import Config
    from flowengine.objects.segments import Segments
    from flowengine.runtime.link import BulkStream

log = logging.getLogger(__name__)

SERVE_PARALLEL_MAX = 1  # receivers of one object from one node at a time: more share a link, a chain does not
ASKS_MAX = 256  # redirects and new attempts with one origin
WRITE_PATIENCE = 4  # a whole chunk may take that much longer to be taken than its first byte to come
ANSWER_BYTES_MAX = 65_536
LENGTH_BYTES = 4

OpenStream = Callable[[str, dict[str, Any]], "Awaitable[BulkStream]"]


class Ask(msgspec.Struct, frozen=True):
    """What a receiver opens a stream with."""

    oid: bytes
    offset: int
    avoid: tuple[str, ...] = ()  # nodes that did not deliver


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """The bytes follow; path: the nodes through which they come, the origin first."""

    size_bytes: int
    path: tuple[str, ...]


class Redirected(msgspec.Struct, frozen=True, tag=True):
    """Ask that node: it has or receives the object."""

    node: str


class Absent(msgspec.Struct, frozen=True, tag=True):
    """Not from here."""

    reason: str


Answer = Admitted | Redirected | Absent
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class PullError(Exception):
    """None of the nodes gave the object; silent: those that did not say that they do not have it."""

    def __init__(self, reason: str, silent: tuple[str, ...]) -> None:
        super().__init__(reason)
        self.silent = silent


class NotThere(ConnectionError):
    """That node does not give the object."""


class Arriving:
    """An object on its way into a segment of this host; others read what is there already."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.size_bytes = len(view)
        self.received_bytes = 0
        self.path: tuple[str, ...] = ()
        self.failed = False
        self._waiters: list[asyncio.Future[None]] = []

    def advance(self, count: int) -> None:
        """More bytes are there."""
        self.received_bytes += count
        self._wake()

    def finish(self, sealed: memoryview | None) -> None:
        """It is whole; sealed: the object as a reader sees it, whose lock keeps it in memory while it is passed on."""
        if sealed is None:
            self.fail()
        else:
            self.view = sealed
            self._wake()

    def fail(self) -> None:
        """It will not become whole."""
        self.failed = True
        self._wake()

    async def beyond(self, offset: int) -> int:
        """Wait until more than `offset` bytes are there; how many."""
        while self.received_bytes <= offset and not self.failed:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        if self.failed:
            raise ConnectionError("the object that was passed on did not arrive")
        return self.received_bytes

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Chain:
    """Who receives an object from this node now, and who was sent on, in the order of their coming."""

    def __init__(self) -> None:
        self.active: dict[str, int] = {}
        self.order: dict[str, None] = {}

    def last(self, avoid: Sequence[str]) -> str | None:
        """Who came last, but for these."""
        for node in reversed(self.order):
            if node not in avoid:
                return node
        return None

    def join(self, node: str) -> None:
        """This node is the last of the chain now."""
        self.order.pop(node, None)
        self.order[node] = None

    def begin(self, node: str) -> None:
        """A transfer to this node begins."""
        self.active[node] = self.active.get(node, 0) + 1

    def end(self, node: str) -> None:
        """A transfer to this node ended."""
        self.active[node] -= 1
        if not self.active[node]:
            del self.active[node]


class Transfers:
    """Both sides of all transfers of one node; on its loop."""

    def __init__(self, segments: Segments, open_stream: OpenStream, config: Config) -> None:
        self.me = ""  # the address of this node, known when its endpoint listens
        self._segments = segments
        self._open_stream = open_stream
        self._timeout_s = config.transfer_timeout_s
        self._chunk_bytes = config.chunk_bytes
        self.disk_path: Callable[[bytes], str] = _nowhere  # where an object lies when it is on disk
        self._arriving: dict[bytes, Arriving] = {}
        self._chains: dict[bytes, Chain] = {}

    # --- receiving --------------------------------------------------------------------------------

    async def pull(self, oid: bytes, size_bytes: int, nodes: Sequence[str]) -> str:
        """Copy an object into the local store; the node that it came from. Raises PullError."""
        name = oid.hex()
        try:
            segment = self._segments.create(name, size_bytes)
        except (StoreFull, OSError) as error:
            raise PullError(str(error), tuple(nodes)) from error
        arriving = self._arriving[oid] = Arriving(segment.view[:])
        try:
            source = await self._fill(oid, arriving, nodes)
        except BaseException:
            arriving.fail()
            segment.abort()
            raise
        finally:
            del self._arriving[oid]
        segment.seal_copy()
        arriving.finish(self._segments.open(name))
        return source

    async def _fill(self, oid: bytes, arriving: Arriving, nodes: Sequence[str]) -> str:
        failures: list[str] = []
        silent: list[str] = []
        for origin in nodes:
            if origin == self.me:
                continue
            try:
                return await self._fill_from(oid, arriving, origin)
            except OSError as error:
                failures.append(f"{origin}: {error or type(error).__name__}")
                if not isinstance(error, NotThere):
                    silent.append(origin)
        raise PullError("; ".join(failures) or "no other node is known to have it", tuple(silent))

    async def _fill_from(self, oid: bytes, arriving: Arriving, origin: str) -> str:
        """Receive from the origin or from whom it names; whoever fails is avoided and the origin is asked again."""
        avoid: dict[str, None] = {}
        node = origin
        for _ in range(ASKS_MAX):
            before = arriving.received_bytes
            try:
                next_node = await self._receive(oid, arriving, node, tuple(avoid))
            except OSError as error:
                log.debug("%s did not give all of %s: %s", node, oid.hex(), error)
                if node == origin and arriving.received_bytes == before:
                    raise
                if node != origin:
                    avoid[node] = None
                node = origin
                continue
            if next_node is None:
                return node
            node = next_node
        raise ConnectionError(f"{ASKS_MAX} attempts led nowhere")

    async def _receive(self, oid: bytes, arriving: Arriving, node: str, avoid: tuple[str, ...]) -> str | None:
        """Receive the rest from a node: None when all is there, else the node to ask. Raises OSError."""
        ask = Ask(oid, arriving.received_bytes, avoid)
        async with asyncio.timeout(self._timeout_s):
            stream = await self._open_stream(node, msgspec.structs.asdict(ask))
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await _read_answer(stream)
            if isinstance(answer, Redirected):
                return answer.node
            if isinstance(answer, Absent):
                raise NotThere(answer.reason)
            if answer.size_bytes != arriving.size_bytes:
                raise NotThere(f"it has {answer.size_bytes} bytes there, {arriving.size_bytes} were expected")
            arriving.path = answer.path
            await self._read_rest(stream, arriving)
        finally:
            stream.abort()
        return None

    async def _read_rest(self, stream: BulkStream, arriving: Arriving) -> None:
        view, size_bytes, chunk_bytes = arriving.view, arriving.size_bytes, self._chunk_bytes
        while (at := arriving.received_bytes) < size_bytes:
            try:
                async with asyncio.timeout(self._timeout_s):
                    count = await stream.readinto(view[at : at + chunk_bytes])
            except TimeoutError:
                raise ConnectionError(f"nothing came for {self._timeout_s:g} s") from None
            if not count:
                raise ConnectionError(f"the stream ended at {at} of {size_bytes} bytes")
            arriving.advance(count)

    # --- sending ----------------------------------------------------------------------------------

    async def serve(self, peer: str, hello: dict[str, Any], stream: BulkStream) -> None:
        """Give an object to another node, or say who will: on_stream of the endpoint."""
        try:
            await self._serve(peer, msgspec.convert(hello, Ask), stream)
        except (OSError, msgspec.ValidationError) as error:
            log.debug("a transfer to %s ended: %s", peer, error)

    async def _serve(self, peer: str, ask: Ask, stream: BulkStream) -> None:
        arriving = self._arriving.get(ask.oid)
        if arriving is not None and peer in arriving.path:
            await _write_answer(stream, Absent("it comes from the asking node"))
            return
        chain = self._chains.get(ask.oid)
        if chain is None:
            chain = self._chains[ask.oid] = Chain()
        avoid = (*ask.avoid, peer, *(arriving.path if arriving is not None else ()))
        busy = len(chain.active) >= SERVE_PARALLEL_MAX and peer not in chain.active
        instead = chain.last(avoid) if busy else None
        chain.join(peer)
        if instead is not None:
            await _write_answer(stream, Redirected(instead))
            return
        chain.begin(peer)
        try:
            await self._send(ask, arriving, stream)
        finally:
            chain.end(peer)
            if not chain.active:
                self._chains.pop(ask.oid, None)

    async def _send(self, ask: Ask, arriving: Arriving | None, stream: BulkStream) -> None:
        if arriving is not None:
            await _write_answer(stream, Admitted(arriving.size_bytes, (*arriving.path, self.me)))
            await self._pass_on(arriving, ask.offset, stream)
            return
        view = self._segments.open(ask.oid.hex())
        if view is not None:
            await _write_answer(stream, Admitted(len(view), (self.me,)))
            for at in range(ask.offset, len(view), self._chunk_bytes):
                await self._write(stream, view[at : at + self._chunk_bytes])
            return
        await self._send_from_disk(ask, stream)

    async def _pass_on(self, arriving: Arriving, offset: int, stream: BulkStream) -> None:
        while offset < arriving.size_bytes:
            there = await arriving.beyond(offset)
            end = min(there, offset + self._chunk_bytes)
            await self._write(stream, arriving.view[offset:end])
            offset = end

    async def _send_from_disk(self, ask: Ask, stream: BulkStream) -> None:
        path = self.disk_path(ask.oid)
        try:
            size_bytes = await asyncio.to_thread(spill.object_size, path)
        except (OSError, RuntimeError):
            await _write_answer(stream, Absent("it is not here"))
            return
        await _write_answer(stream, Admitted(size_bytes, (self.me,)))
        async for part in _in_thread(spill.chunks(path, self._chunk_bytes, ask.offset)):
            await self._write(stream, part)

    async def _write(self, stream: BulkStream, part: memoryview) -> None:
        # A receiver that stands still must not keep its place.
        async with asyncio.timeout(WRITE_PATIENCE * self._timeout_s):
            await stream.write(part)


def _nowhere(oid: bytes) -> str:
    """A node that spills nothing."""
    return f"/nonexistent/{oid.hex()}"


async def _in_thread(parts: Any) -> AsyncIterator[memoryview]:
    while (part := await asyncio.to_thread(next, parts, None)) is not None:
        yield part


async def _write_answer(stream: BulkStream, answer: Answer) -> None:
    said = msgspec.msgpack.encode(answer)
    await stream.write(len(said).to_bytes(LENGTH_BYTES, "little") + said)


async def _read_answer(stream: BulkStream) -> Answer:
    size_bytes = int.from_bytes(await stream.read_exactly(LENGTH_BYTES), "little")
    if size_bytes > ANSWER_BYTES_MAX:
        raise ConnectionError(f"an answer of {size_bytes} bytes")
    try:
        return _ANSWER.decode(await stream.read_exactly(size_bytes))
    except msgspec.MsgspecError as error:
        raise ConnectionError(f"an answer that cannot be read: {error}") from error
