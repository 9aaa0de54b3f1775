"""How two processes meet: Dask's comm opens the connection, then both prove that they know the cluster's secret.

Owns the only contact with `distributed.comm`. Nothing that a stranger sends is unpickled: Dask's reader unpickles
even with deserialize=False (a map with the key "__Pickled__"), and its handshake uses that reader. So the handshake
of Dask is spoken here by hand: its framing, plain bytes inside, lengths bounded, a deadline for all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copyreg
import hashlib
import hmac
import logging
import secrets
import socket
import ssl
import struct
import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import msgspec
from distributed.comm.addressing import parse_address, parse_host_port, unparse_host_port
from distributed.comm.core import FatalCommClosedError
from distributed.comm.core import listen as _listen
from distributed.comm.registry import get_backend

from flowengine.errors import FlowError
from flowengine.runtime.wire import READ_BYTES, Buffer, SocketWire, Wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from flowengine.runtime.wire import Link

logger = logging.getLogger(__name__)
comm_listen: Any = _listen  # without types, as is all that follows from it

VERSION = 1
HANDSHAKE_S = 5.0
MESSAGE_BYTES_MAX = 64 * 1024
NONCE_BYTES = 32
_PRELUDE = struct.Struct("<QQQ")  # Dask's framing: bytes that follow, number of frames, bytes of the only frame


def keep_own_pickling() -> None:
    """Have our errors pickle themselves: tblib, which Dask installs, took over all exception classes that it found."""
    kinds: list[type[FlowError]] = [FlowError]
    for kind in kinds:
        copyreg.dispatch_table.pop(kind, None)
        kinds.extend(kind.__subclasses__())


keep_own_pickling()


class BulkStream(ABC):
    """An authenticated connection for plain bytes; one reader and one writer at a time, on the loop."""

    peer: str = ""
    gate: Callable[[str], Awaitable[None]] | None = None

    async def readinto(self, view: memoryview) -> int:
        """Fill the start of `view` with what has arrived; the number of bytes, 0 at the end of the stream."""
        if self.gate is not None:
            await self.gate(self.peer)
        return await self._readinto(view)

    async def write(self, view: Buffer) -> None:
        """Return when all of `view` was handed to the kernel; it may be reused then."""
        if self.gate is not None:
            await self.gate(self.peer)
        await self._write(view)

    async def read_exactly(self, size_bytes: int) -> bytearray:
        """Exactly that many bytes; ConnectionError when the stream ends before."""
        data = bytearray(size_bytes)
        view = memoryview(data)
        filled = 0
        while filled < size_bytes:
            count = await self.readinto(view[filled:])
            if count == 0:
                raise ConnectionError("the connection ended")
            filled += count
        return data

    async def close(self) -> None:
        """Close the connection; what was written still arrives."""
        self.abort()

    def wake_at(self, size_bytes: int) -> None:
        """Wake the reader for so many bytes, which are sure to come, rather than for fewer; a stream may ignore it."""
        del size_bytes

    @abstractmethod
    async def _readinto(self, view: memoryview) -> int: ...

    @abstractmethod
    async def _write(self, view: Buffer) -> None: ...

    @abstractmethod
    def abort(self) -> None:
        """Close at once; a pending operation on the loop ends with an error or with 0 bytes."""


class SocketStream(BulkStream):
    """A bulk stream straight on a non-blocking TCP socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._pending = 0
        self._closing = False

    def wake_at(self, size_bytes: int) -> None:
        """The kernel does that."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)

    async def _readinto(self, view: memoryview) -> int:
        with _Operation(self):
            return await asyncio.get_running_loop().sock_recv_into(self.sock, view)

    async def _write(self, view: Buffer) -> None:
        with _Operation(self):
            await asyncio.get_running_loop().sock_sendall(self.sock, view)

    def abort(self) -> None:
        if self._closing:
            return
        self._closing = True
        if not self._pending:
            self.sock.close()
            return
        # A pending operation still has its descriptor registered with the loop: wake it, it closes at its end.
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


class _Operation:
    __slots__ = ("stream",)

    def __init__(self, stream: SocketStream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream._closing:
            raise ConnectionError("the stream is closed")
        self.stream._pending += 1

    def __exit__(self, *_: object) -> None:
        self.stream._pending -= 1
        if self.stream._closing and not self.stream._pending:
            self.stream.sock.close()


class TlsStream(BulkStream):
    """A bulk stream over the tornado stream of a Dask TLS comm."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm  # kept alive: a collected comm closes its stream
        self.stream = comm.stream

    async def _readinto(self, view: memoryview) -> int:
        if self.stream.closed():
            return 0
        try:
            count: int = await self.stream.read_into(view, partial=True)
        except OSError as error:  # tornado's StreamClosedError is one
            real = getattr(error, "real_error", None)
            if real is None:
                return 0
            raise ConnectionError(str(real)) from error
        return count

    async def _write(self, view: Buffer) -> None:
        await self.stream.write(view)

    def abort(self) -> None:
        self.comm.abort()


class TlsWire(Wire):
    """Frames over the tornado stream of a Dask TLS comm: all of it on the loop thread."""

    def __init__(self, comm: Any, owner: Link, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(owner, loop)
        self.comm = comm  # kept alive: a collected comm closes its stream
        self.stream = comm.stream
        self.scratch = memoryview(bytearray(READ_BYTES))  # tornado fills it later, so no other wire may use it
        self._writing = False
        self._running = asyncio.Event()
        self._running.set()
        self._task: asyncio.Task[None] | None = None

    def write(self, header: bytes, payload: Buffer) -> None:
        self.wrote = True
        idle = not self.pending
        self.pending.extend((header, payload) if len(payload) else (header,))
        if idle and not self._writing:
            self.loop.call_soon_threadsafe(self._flush)

    def start(self) -> None:
        self._task = self.loop.create_task(self._read())

    def pause(self) -> None:
        self.paused = True
        self._running.clear()

    def resume(self) -> None:
        self.paused = False
        self._running.set()
        self._flush()

    def sever(self) -> None:
        # Not SSLSocket.shutdown: it drops the cipher, and the stream would then read ciphertext as plain bytes.
        try:
            socket.socket.shutdown(self.stream.socket, socket.SHUT_RDWR)
        except (OSError, TypeError):  # closed already
            pass

    def close(self) -> None:
        with self.owner.lock:
            if self.closed:
                return
            self.closed = True
            self.pending.clear()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self.comm.abort()

    def _flush(self) -> None:
        with self.owner.lock:
            if self.closed or self.paused or self._writing or not self.pending:
                return
            self._writing = True
            # The pending chunks stay until they are written: they tell the link to wait.
            chunks = b"".join(self.pending)
            count = len(self.pending)
        try:
            written = self.stream.write(chunks)
        except OSError as error:
            self.owner.broken(self, f"write failed: {error}")
            return
        written.add_done_callback(lambda _: self._wrote(count))

    def _wrote(self, count: int) -> None:
        with self.owner.lock:
            self._writing = False
            for _ in range(min(count, len(self.pending))):
                self.pending.popleft()
            more = bool(self.pending)
        if self.closed:
            return
        if more:
            self._flush()
        else:
            self.owner.drained(self)

    async def _read(self) -> None:
        try:
            while not self.closed:
                await self._running.wait()
                count = await self.stream.read_into(self.reader.space(self.scratch), partial=True)
                await self._running.wait()
                self._took(count)
        except OSError as error:
            if not self.closed:
                self.owner.broken(self, f"read failed: {error}")


def to_wire(stream: BulkStream, link: Link, loop: asyncio.AbstractEventLoop) -> Wire:
    """Hand the connection over to a wire; the stream must not be used after that."""
    if isinstance(stream, TlsStream):
        return TlsWire(stream.comm, link, loop)
    assert isinstance(stream, SocketStream)
    return SocketWire(stream.sock, link, loop)


class LinkError(ConnectionError):
    """No link to that peer, and trying again does not help."""


class SecretRefused(LinkError):
    """The two sides do not share the cluster's secret."""


class PeerGone(LinkError):
    """The process with that address no longer exists, or has given this one up."""


class Replaced(PeerGone):
    """Another process listens where that one did."""


class Stranger(LinkError):
    """What came over the connection is not this protocol."""


class Hello(msgspec.Struct, frozen=True):
    """The connector's first words; `oldest` is the first sequence number that it can still send again."""

    version: int
    kind: Literal["link", "stream"]
    sender: str
    to: str
    nonce: bytes = b""
    received: int = 0
    oldest: int = 1
    note: bytes = b""


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    address: str
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    mac: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    mac: bytes
    received: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Why the acceptor closes: "secret", "gone" or "version"."""

    why: str
    text: str


Reply = Challenge | Welcome | Refused
_encode = msgspec.msgpack.Encoder().encode
_decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_proof = msgspec.msgpack.Decoder(Proof).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode
_decode_bytes = msgspec.msgpack.Decoder(bytes).decode


def split_address(address: str) -> tuple[str, str]:
    """The location that Dask understands, and the nonce of the process that listened there."""
    location, _, nonce = address.partition("#")
    if "://" not in location or not nonce:
        raise ValueError(f"not the address of a process: {address!r}, expected tcp://HOST:PORT#NONCE")
    return location, nonce


async def listen(
    location: tuple[str, int], security: Any, welcome: Callable[[BulkStream], Coroutine[Any, Any, None]],
    tasks: set[asyncio.Task[Any]],
) -> Any:
    """A started Dask listener that gives each connection to `welcome`, which has HANDSHAKE_S to take it over."""
    scheme = "tcp" if security is None else "tls"
    arguments = {} if security is None else security.get_listen_args("worker")

    async def take(comm: Any) -> None:
        await welcome(take_over(comm))

    async def skip(comm: Any, handshake_overrides: Any = None) -> None:
        """Dask's own handshake would unpickle what a stranger sends."""

    listener: Any = comm_listen(f"{scheme}://{unparse_host_port(*location)}", take, deserialize=False, **arguments)
    listener.on_connection = skip
    await listener.start()
    handle: Callable[..., Awaitable[None]] = listener.tcp_server.handle_stream

    def admit(stream: Any, peer: Any) -> None:
        task = asyncio.get_running_loop().create_task(_admit(handle, stream, peer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener.tcp_server.handle_stream = admit
    return listener


async def is_listening(location: str) -> bool:
    """Whether a connection to this location is taken, whether or not anybody answers on it."""
    host, port = parse_host_port(location.partition("://")[2])
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # TimeoutError is one
        return False
    writer.transport.abort()
    return True


async def _admit(handle: Callable[..., Awaitable[None]], stream: Any, peer: Any) -> None:
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            await handle(stream, peer)
    except Exception as error:
        logger.info("refused a connection from %s: %s", peer, str(error) or "no answer in time")
        stream.close()
    except BaseException:
        stream.close()
        raise


def take_over(comm: Any) -> BulkStream:
    """The connection of a Dask comm that nobody else uses any more, and of which nothing was read ahead."""
    # On tcp nothing may have been read by tornado yet: the acceptor is called before its stream was ever polled,
    # and the acceptor is silent until the connector, which has taken over too by then, has spoken.
    if comm.stream is None:
        raise ConnectionError("the connection ended")
    if isinstance(comm.stream.socket, ssl.SSLSocket):
        return TlsStream(comm)
    sock = comm.stream.socket.dup()
    sock.setblocking(False)
    comm.abort()
    return SocketStream(sock)


def _dask_message(payload: bytes) -> bytes:
    return _PRELUDE.pack(16 + len(payload), 1, len(payload)) + payload


def _dask_greeting() -> bytes:
    python = list(sys.version_info[:3])
    return _dask_message(_encode({"compression": None, "python": python, "pickle-protocol": 5}))


async def read_message(stream: BulkStream) -> bytes:
    """A message of Dask's framing before or instead of our handshake, of one frame and bounded length."""
    first = await stream.read_exactly(8)
    size_bytes = int.from_bytes(first, "little")
    if not 16 < size_bytes <= MESSAGE_BYTES_MAX:
        raise Stranger(f"a message of {size_bytes} bytes before the handshake")
    rest = await stream.read_exactly(size_bytes)
    _, frames, frame_bytes = _PRELUDE.unpack(first + rest[:16])
    if frames != 1 or frame_bytes != size_bytes - 16:
        raise Stranger("a message of several frames before the handshake")
    return bytes(rest[16:])


async def _read_bytes(stream: BulkStream) -> bytes:
    try:
        return _decode_bytes(await read_message(stream))
    except msgspec.MsgspecError as error:
        raise Stranger(f"not a message of this protocol: {error}") from None


def _framed(message: bytes) -> bytes:
    return _dask_message(_encode(message))


def _mac(secret: bytes, role: bytes, *transcript: bytes) -> bytes:
    # The transcript holds both nonces, both addresses and all that was asked for; the role stops reflection.
    mac = hmac.new(secret, b"flowengine link\0" + role, hashlib.sha256)
    for part in transcript:
        mac.update(len(part).to_bytes(8, "little"))
        mac.update(part)
    return mac.digest()


async def accept(
    stream: BulkStream, address: str, secret: bytes, judge: Callable[[Hello], int | Refused]
) -> Hello:
    """The hello of a peer that has proved itself; `judge` gives the last sequence number received from it."""
    await read_message(stream)  # Dask's greeting: nothing in it is used
    await stream.write(_dask_greeting())
    said = await _read_bytes(stream)
    try:
        hello = _decode_hello(said)
    except msgspec.MsgspecError as error:
        raise Stranger(f"not a hello: {error}") from None
    if hello.version != VERSION:
        await _refuse(stream, "version", f"this side speaks version {VERSION}, the other {hello.version}")
    asked = _encode(Challenge(address=address, nonce=secrets.token_bytes(NONCE_BYTES)))
    await stream.write(_framed(asked))
    answer = await _read_bytes(stream)
    try:
        proof = _decode_proof(answer)
    except msgspec.MsgspecError as error:
        raise Stranger(f"not an answer to the challenge: {error}") from None
    if len(hello.nonce) != NONCE_BYTES or not hmac.compare_digest(proof.mac, _mac(secret, b"connector", said, asked)):
        await _refuse(stream, "secret", "the other side does not know the cluster's secret")
    if split_address(hello.to)[1] != split_address(address)[1]:
        await _refuse(stream, "gone", f"{hello.to} is gone, {address} listens there now")
    verdict = judge(hello)
    if isinstance(verdict, Refused):
        await _refuse(stream, verdict.why, verdict.text)
    mac = _mac(secret, b"acceptor", said, asked, verdict.to_bytes(8, "little"))
    await stream.write(_framed(_encode(Welcome(mac=mac, received=verdict))))
    return hello


async def _refuse(stream: BulkStream, why: str, text: str) -> NoReturn:
    await stream.write(_framed(_encode(Refused(why=why, text=text))))
    raise LinkError(text)


async def dial(hello: Hello, secret: bytes, reach: Callable[[str], Awaitable[BulkStream]]) -> tuple[BulkStream, int]:
    """A proven connection to `hello.to`, whose location `reach` connects to, and the last number received from here.

    LinkError when trying again does not help, ConnectionRefusedError when nobody listens, else OSError.
    """
    hello = msgspec.structs.replace(hello, nonce=secrets.token_bytes(NONCE_BYTES))
    stream = await reach(split_address(hello.to)[0])
    async with in_time(stream, f"{hello.to} did not answer the handshake"):
        return stream, await _introduce(stream, hello, secret)


@contextlib.asynccontextmanager
async def in_time(stream: BulkStream, late: str) -> AsyncIterator[None]:
    """Drop the connection if this fails; ConnectionError with these words when it takes too long."""
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            yield
    except TimeoutError:
        stream.abort()
        raise ConnectionError(f"{late} in {HANDSHAKE_S} s") from None
    except BaseException:
        stream.abort()
        raise


async def _introduce(stream: BulkStream, hello: Hello, secret: bytes) -> int:
    said = _encode(hello)
    await stream.write(_dask_greeting() + _framed(said))
    await read_message(stream)  # Dask's greeting
    asked = await _read_bytes(stream)
    challenge = _read_reply(asked)
    if not isinstance(challenge, Challenge):
        raise Stranger("no challenge came")
    if split_address(challenge.address)[1] != split_address(hello.to)[1]:
        raise Replaced(f"{hello.to} is gone, {challenge.address} listens there now")
    await stream.write(_framed(_encode(Proof(mac=_mac(secret, b"connector", said, asked)))))
    welcome = _read_reply(await _read_bytes(stream))
    if not isinstance(welcome, Welcome):
        raise Stranger("no welcome came")
    expected = _mac(secret, b"acceptor", said, asked, welcome.received.to_bytes(8, "little"))
    if not hmac.compare_digest(welcome.mac, expected):
        raise SecretRefused(f"{hello.to} does not know the cluster's secret")
    return welcome.received


def _read_reply(said: bytes) -> Reply:
    try:
        reply = _decode_reply(said)
    except msgspec.MsgspecError as error:
        raise Stranger(f"not a reply of this protocol: {error}") from None
    if isinstance(reply, Refused):
        raise {"secret": SecretRefused, "gone": PeerGone}.get(reply.why, LinkError)(f"refused: {reply.text}")
    return reply


async def ask_server(stream: BulkStream, question: dict[str, Any]) -> None:
    """Ask the Dask server at the other end; its answers are for read_message()."""
    await stream.write(_dask_greeting())
    await write_message(stream, _encode(question))
    await read_message(stream)  # Dask's greeting


async def write_message(stream: BulkStream, message: bytes) -> None:
    """What read_message() reads at the other end."""
    await stream.write(_dask_message(message))


async def connect(location: str, security: Any, tasks: set[asyncio.Task[Any]]) -> BulkStream:
    """A connection of which nothing is known yet, by Dask's connector; errors as of dial()."""
    scheme, where = parse_address(location)
    arguments = {} if security is None else security.get_connection_args("worker")
    backend: Any = get_backend(scheme)
    connector = backend.get_connector()

    async def attempt() -> BulkStream:
        # distributed.comm.connect would try again when refused, and unpickle the answer; its connector does neither.
        return take_over(await connector.connect(where, deserialize=False, **arguments))

    task = asyncio.get_running_loop().create_task(attempt())
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    try:
        # Not wait_for: cancelling tornado inside a connect would leave its socket open until it is collected.
        async with asyncio.timeout(HANDSHAKE_S):
            return await asyncio.shield(task)
    except TimeoutError:
        task.add_done_callback(_abandon)
        raise ConnectionError(f"{location} did not answer in {HANDSHAKE_S} s") from None
    except FatalCommClosedError as error:
        raise LinkError(f"TLS with {location} failed: {error}") from error
    except OSError as error:
        if isinstance(error.__cause__, ConnectionRefusedError):
            raise ConnectionRefusedError(f"nobody listens at {location}") from error
        raise
    except asyncio.CancelledError:
        task.add_done_callback(_abandon)
        raise


def _abandon(task: asyncio.Task[BulkStream]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().abort()
