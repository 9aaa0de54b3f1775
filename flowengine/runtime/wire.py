"""Frames between two processes: `FrameReader`, the `SocketWire` that carries them, and the `Link` that owns them.

A `Link` owns sequence numbers, acknowledgement and retransmission. How connections come to be, and whether a peer
is gone, is not decided here: handshake.py and link.py do.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowengine.runtime.link import Endpoint

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<BQQQ")  # kind, payload bytes, sequence number, last sequence number received
HEADER_BYTES = HEADER.size
BATCH, ACK, BYE = 0, 1, 2
READ_BYTES = 256 * 1024
# Below this a frame is joined with its header and copied out of the read buffer; above, the copies cost more.
SMALL_BYTES = 16 * 1024
CHUNKS_PER_WRITE = 64
FRAME_BYTES = 1024 * 1024
QUEUE_BYTES = 64 * 1024
QUEUE_MESSAGES = 128
CLOSED = "closed"  # why a peer is lost that has said goodbye
FRAME_MESSAGES = 4096

Buffer = bytes | bytearray | memoryview
Frame = tuple[int, int, int, Buffer]


class FrameReader:
    """Cuts a byte stream into frames; a large frame is received straight into memory of its own."""

    __slots__ = ("_body", "_filled", "_head", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._body: bytearray | None = None
        self._filled = 0
        self._head = (0, 0, 0)

    def space(self, scratch: memoryview) -> memoryview:
        """Where the next bytes should be read to: the large frame under way, else `scratch`."""
        return scratch if self._body is None else memoryview(self._body)[self._filled :]

    def took(self, count: int, scratch: memoryview) -> list[Frame]:
        """The frames completed by `count` more bytes at the start of `space`; payloads are never reused."""
        if self._body is not None:
            self._filled += count
            if self._filled < len(self._body):
                return []
            body, self._body = self._body, None
            return [(*self._head, memoryview(body))]
        data = scratch[:count]
        if self._rest:
            data = memoryview(self._rest + bytes(data))
            self._rest = b""
        return self._cut(data)

    def _cut(self, data: memoryview) -> list[Frame]:
        frames: list[Frame] = []
        at, end = 0, len(data)
        while end - at >= HEADER_BYTES:
            kind, size_bytes, seq, ack = HEADER.unpack_from(data, at)
            start = at + HEADER_BYTES
            if end - start >= size_bytes:
                at = start + size_bytes
                frames.append((kind, seq, ack, bytes(data[start:at])))
            elif size_bytes > SMALL_BYTES:
                self._begin_body(size_bytes, (kind, seq, ack), data[start:])
                return frames
            else:
                break
        if at < end:
            self._rest = bytes(data[at:])
        return frames

    def _begin_body(self, size_bytes: int, head: tuple[int, int, int], first: memoryview) -> None:
        self._body = bytearray(size_bytes)
        self._filled = len(first)
        self._body[: self._filled] = first
        self._head = head


class Wire(ABC):
    """One connection that carries frames; `write` under the owner's lock from any thread, the rest on the loop."""

    def __init__(self, owner: Link, loop: asyncio.AbstractEventLoop) -> None:
        self.owner = owner
        self.scratch = owner.scratch
        self.loop = loop
        self.thread_id = threading.get_ident()
        self.pending: deque[Buffer] = deque()  # what is written before the wire takes another frame
        self.paused = False
        self.closed = False
        self.reader = FrameReader()
        self.heard = self.wrote = True  # since the last tick
        self.heard_at = self.wrote_at = loop.time()

    @abstractmethod
    def write(self, header: bytes, payload: Buffer) -> None: ...

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def pause(self) -> None:
        """Carry nothing until `resume`."""

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def sever(self) -> None:
        """Break the connection under both sides, as a network failure would."""

    @abstractmethod
    def close(self) -> None: ...

    def _on_loop(self, callback: Callable[[], None]) -> None:
        if threading.get_ident() == self.thread_id:
            callback()
        else:
            self.loop.call_soon_threadsafe(callback)

    def _took(self, count: int) -> None:
        self.heard = True
        for frame in self.reader.took(count, self.scratch):
            if self.closed:
                return
            self.owner.receive(self, frame)


class SocketWire(Wire):
    """Frames straight on a non-blocking TCP socket: written by the sending thread itself while nothing is pending."""

    def __init__(self, sock: socket.socket, owner: Link, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(owner, loop)
        self.sock = sock
        self._fd = sock.fileno()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def write(self, header: bytes, payload: Buffer) -> None:
        self.wrote = True
        if self.pending or self.paused:
            self.pending.extend((header, payload) if len(payload) else (header,))
            return
        try:
            if len(payload) <= SMALL_BYTES:
                chunks: tuple[Buffer, ...] = (header + payload,)
                sent = self.sock.send(chunks[0])
            else:
                chunks = (header, payload)
                sent = self.sock.sendmsg(chunks)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self.pending.append(header)  # so that nothing more is written here
            self.loop.call_soon_threadsafe(self._fail, f"write failed: {error}")
            return
        for chunk in chunks:
            if sent >= len(chunk):
                sent -= len(chunk)
            else:
                self.pending.append(memoryview(chunk)[sent:])
                sent = 0
        if self.pending:
            self._on_loop(self._arm)

    def start(self) -> None:
        self.resume()

    def pause(self) -> None:
        with self.owner.lock:
            self.paused = True
            self.loop.remove_reader(self._fd)
            self.loop.remove_writer(self._fd)

    def resume(self) -> None:
        with self.owner.lock:
            self.paused = False
            if not self.closed:
                self.loop.add_reader(self._fd, self._readable)
                self._arm()

    def sever(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        with self.owner.lock:
            if self.closed:
                return
            self.closed = True
            self.loop.remove_reader(self._fd)
            self.loop.remove_writer(self._fd)
            self.pending.clear()
            self.sock.close()

    def _arm(self) -> None:
        if self.pending and not self.closed and not self.paused:
            self.loop.add_writer(self._fd, self._writable)

    def _fail(self, reason: str) -> None:
        if not self.closed:
            self.owner.broken(self, reason)

    def _readable(self) -> None:
        try:
            count = self.sock.recv_into(self.reader.space(self.scratch))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(f"read failed: {error}")
            return
        if count:
            self._took(count)
        else:
            self._fail("the other side closed the connection")

    def _writable(self) -> None:
        owner = self.owner
        with owner.lock:
            # Sends that a finaliser makes in here only queue: a frame must not land inside another.
            was, owner.pumping = owner.pumping, True
            try:
                self._write_pending()
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                self.loop.call_soon(self._fail, f"write failed: {error}")
                self.loop.remove_writer(self._fd)
            finally:
                owner.pumping = was
            if self.pending:
                return
            self.loop.remove_writer(self._fd)
        owner.drained(self)

    def _write_pending(self) -> None:
        pending = self.pending
        while pending:
            sent = self.sock.sendmsg(list(islice(pending, CHUNKS_PER_WRITE)))
            self.wrote = True
            while pending and sent >= len(pending[0]):
                sent -= len(pending.popleft())
            if sent:
                pending[0] = memoryview(pending[0])[sent:]


class Link:
    """What is owed to one peer and what came from it, whatever connections carry it.

    Each direction has one number sequence for the life of the peer. A frame stays in `unacked` until the peer has
    acknowledged it; when `out` breaks, all of `unacked` goes over the next wire and the peer drops what it knows.
    """

    def __init__(self, peer: str, endpoint: Endpoint) -> None:
        self.peer = peer
        self.endpoint = endpoint
        self.config = endpoint.config
        self.scratch = endpoint.scratch
        # A finaliser may send while this thread is inside: so re-entrant, and `pumping` keeps frames apart.
        self.lock = threading.RLock()
        self.pumping = False
        self.outbox: list[Any] = []
        self.unacked: deque[tuple[int, bytes]] = deque()
        self.unacked_bytes = 0
        self.sent = 0  # last sequence number given to a frame
        self.received = 0  # last sequence number received; only the loop writes it
        self.owed_frames = self.owed_bytes = 0  # received, not yet acknowledged
        self.out: Wire | None = None  # the wire of this direction: the first one up, until it breaks
        self.wires: dict[Wire, bool] = {}  # wire -> whether this side dialled; at most one of each
        self.lost: str | None = None
        self.closing = False
        self.queued = False
        self.batch_max = QUEUE_MESSAGES
        self.frame_max = FRAME_MESSAGES
        self.failure: tuple[Any, Exception] | None = None
        self.waiters: list[asyncio.Future[None]] = []
        self.gone: asyncio.Future[None] | None = None  # done when the peer has taken the goodbye
        self.dialling: asyncio.Task[None] | None = None
        self.ack_timer: asyncio.TimerHandle | None = None
        self.messages_sent = self.messages_received = self.frames_received = self.attached = 0

    # --- any thread ---

    def send(self, message: Any, urgent: bool) -> None:
        with self.lock:
            if self.lost is not None or self.closing:
                return
            self.outbox.append(message)
            if urgent or len(self.outbox) >= self.batch_max:
                self.pump()
                if self.failure is not None:
                    (bad, error), self.failure = self.failure, None
                    if bad is message:
                        raise error
            elif not self.queued:
                self.queued = True
                self.endpoint.queued_links.add(self)

    def flush(self) -> None:
        with self.lock:
            self.pump()

    def pump(self) -> None:
        """Turn what waits in the outbox into frames while the wire takes them; under the lock."""
        wire = self.out
        if wire is None or self.pumping:
            return
        self.pumping = True
        try:
            limit_bytes = self.config.unacked_bytes_max
            while self.outbox and not wire.pending and (self.unacked_bytes < limit_bytes or self.closing):
                payload = self._encode_next()
                if payload is None:
                    continue
                self.sent += 1
                self.unacked.append((self.sent, payload))
                self.unacked_bytes += len(payload)
                self._write(wire, BATCH, self.sent, payload)
        finally:
            self.pumping = False
        if not self.outbox:
            self.queued = False

    def _encode_next(self) -> bytes | None:
        outbox = self.outbox
        if len(outbox) <= self.frame_max:
            batch, self.outbox = outbox, []
        else:
            batch = outbox[: self.frame_max]
            del outbox[: self.frame_max]
        try:
            payload = self.config.encode(batch)
            if len(payload) > FRAME_BYTES and len(batch) > 1:
                keep = max(1, len(batch) * FRAME_BYTES // len(payload))
                self.outbox[:0] = batch[keep:]
                del batch[keep:]
                payload = self.config.encode(batch)
        except Exception:
            logger.exception("a message to %s cannot be encoded", self.peer)
            self.outbox[:0] = self._encodable(batch)
            return None
        self.messages_sent += len(batch)
        # Messages are not measured before they are encoded: the last frame's mean size sets the next bounds.
        message_bytes = len(payload) // len(batch) + 1
        self.batch_max = max(1, min(QUEUE_MESSAGES, QUEUE_BYTES // message_bytes))
        self.frame_max = max(1, min(FRAME_MESSAGES, FRAME_BYTES // message_bytes))
        return payload

    def _encodable(self, batch: list[Any]) -> list[Any]:
        good = []
        for message in batch:
            try:
                self.config.encode([message])
                good.append(message)
            except Exception as error:
                self.failure = (message, error)
        return good

    def _write(self, wire: Wire, kind: int, seq: int, payload: bytes = b"") -> None:
        self.owed_frames = self.owed_bytes = 0
        wire.write(HEADER.pack(kind, len(payload), seq, self.received), payload)

    def control(self, wire: Wire, kind: int) -> None:
        """Send a frame without messages, which carries the acknowledgement."""
        with self.lock:
            if wire.closed or self.pumping:
                return
            self.pumping = True
            try:
                self._write(wire, kind, 0)
            finally:
                self.pumping = False
            self.pump()

    # --- the loop thread ---

    def attach(self, wire: Wire, dialled: bool, peer_received: int) -> None:
        """Take a proven connection into service."""
        for old, was_dialled in list(self.wires.items()):
            if was_dialled == dialled:  # the peer has given the old one up, or it would not have come again
                self._drop(old, "replaced")
        with self.lock:
            self.attached += 1
            self.wires[wire] = dialled
            self._acknowledged(peer_received)
            wire.start()
            if self.out is None:
                self._adopt(wire)
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()
        if self.closing:
            self.say_goodbye()

    def receive(self, wire: Wire, frame: Frame) -> None:
        """One frame from the peer, over whichever wire."""
        kind, seq, ack, payload = frame
        if self.unacked and ack >= self.unacked[0][0]:
            with self.lock:
                self._acknowledged(ack)
                if self.outbox:
                    self.pump()
        if kind == BATCH:
            if seq == self.received + 1:
                self.received = seq
                self.frames_received += 1
                if not self.closing:
                    self._deliver(payload)
            elif seq > self.received:
                logger.error("%s skipped from frame %d to %d", self.peer, self.received, seq)
                self.broken(wire, "frames are missing")
                return
            self._owe(len(payload))
        elif kind == BYE:
            self.endpoint.lose(self, CLOSED, ended=True)

    def broken(self, wire: Wire, reason: str) -> None:
        """A wire failed: carry on over another one, or find out whether the peer still lives."""
        if wire in self.wires:
            self._drop(wire, reason)
            if not self.wires:
                self.endpoint.unlinked(self)

    def say_goodbye(self) -> None:
        """The last frame: it tells the peer that nothing follows and nobody comes back."""
        if self.out is not None:
            self.control(self.out, BYE)

    def drained(self, wire: Wire) -> None:
        """The wire has written all that was pending."""
        with self.lock:
            if wire is self.out:
                self.pump()

    def tick(self, now: float, forgive: bool) -> None:
        """Ping where nothing was written for long, and break a wire over which nothing was heard."""
        for wire in list(self.wires):
            if wire.heard or forgive:
                wire.heard, wire.heard_at = False, now
            elif now - wire.heard_at > self.config.silent_after_s:
                self.broken(wire, f"silent for {now - wire.heard_at:.1f} s")
                continue
            if wire.wrote:
                wire.wrote, wire.wrote_at = False, now
            elif now - wire.wrote_at >= self.config.ping_every_s and not wire.pending:
                self.control(wire, ACK)

    def end(self, reason: str) -> None:
        """Close all and forget what is owed; later sends are dropped."""
        with self.lock:
            self.lost = reason
            self.outbox, self.out = [], None
            self.unacked.clear()
            self.unacked_bytes = 0
            wires, self.wires = list(self.wires), {}
        if self.ack_timer is not None:
            self.ack_timer.cancel()
        for wire in wires:
            wire.close()

    def _drop(self, wire: Wire, reason: str) -> None:
        logger.debug("connection to %s ended: %s", self.peer, reason)
        with self.lock:
            del self.wires[wire]
            wire.close()
            if self.out is wire:
                self.out = None
                if self.wires:
                    self._adopt(next(iter(self.wires)))

    def _adopt(self, wire: Wire) -> None:
        self.out = wire
        was, self.pumping = self.pumping, True
        try:
            for seq, payload in self.unacked:
                self._write(wire, BATCH, seq, payload)
        finally:
            self.pumping = was
        self.pump()

    def _acknowledged(self, ack: int) -> None:
        unacked = self.unacked
        while unacked and unacked[0][0] <= ack:
            self.unacked_bytes -= len(unacked.popleft()[1])

    def _deliver(self, payload: Any) -> None:
        try:
            messages = self.config.decode(payload)
            self.messages_received += len(messages)
            self.config.on_batch(self.peer, messages)
        except Exception:
            logger.exception("a batch from %s was not handled", self.peer)

    def _owe(self, size_bytes: int) -> None:
        self.owed_frames += 1
        self.owed_bytes += size_bytes
        if self.owed_frames >= self.config.ack_every_frames or self.owed_bytes >= self.config.ack_every_bytes:
            self._pay()
        elif self.ack_timer is None:
            self.ack_timer = self.endpoint.loop.call_later(self.config.ack_after_s, self._ack_due)

    def _ack_due(self) -> None:
        self.ack_timer = None
        if self.owed_frames:
            self._pay()

    def _pay(self) -> None:
        wire = self.out
        if wire is not None:
            self.control(wire, ACK)
