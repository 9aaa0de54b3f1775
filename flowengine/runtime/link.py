"""Typed messages between processes: one `Endpoint` a process, one ordered, acknowledged, resumable `Link` a peer.

Owns sequence numbers, acknowledgement, retransmission, reconnecting and the verdict that a peer is gone.
A peer is named `tcp://HOST:PORT#NONCE`: the nonce is of that one process, so sequence numbers never start again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from flowengine.runtime import handshake
from flowengine.runtime.gate import Gate, through
from flowengine.runtime.handshake import BulkStream, Hello, LinkError, PeerGone, Refused, Replaced, SecretRefused
from flowengine.runtime.tls_stream import for_bulk
from flowengine.runtime.wire import READ_BYTES, Link

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distributed import Security

__all__ = ["BulkStream", "Endpoint", "EndpointConfig", "LinkError", "LinkStats", "PeerGone", "SecretRefused"]

logger = logging.getLogger(__name__)

DEAD_PEERS_KEPT = 10_000
RETRY_FIRST_S = 0.02
RETRY_MOST_S = 0.5
CLOSE_GRACE_S = 1.0
CODE = "code-"  # begins the nonce of a process that runs code of programs


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """What an endpoint is made of; `encode` and `decode` translate one batch of messages."""

    secret: bytes = field(repr=False)
    encode: Callable[[list[Any]], bytes]
    decode: Callable[[Any], list[Any]]
    #: (peer address, messages in order) on the loop thread.
    on_batch: Callable[[str, list[Any]], None]
    #: (peer address, reason) on the loop thread, exactly once in the life of a peer.
    on_lost: Callable[[str, str], None]
    #: (peer address, hello, stream); the stream is closed when the awaitable ends.
    on_stream: Callable[[str, dict[str, Any], BulkStream], Awaitable[None]] | None = None
    host: str = "127.0.0.1"
    port: int = 0
    security: Security | None = None
    relay: str = ""  # as Place.relay
    runs_code: bool = False  # of programs: it may keep the interpreter for long
    unacked_bytes_max: int = 64 * 1024 * 1024
    lost_after_s: float = 10.0
    ping_every_s: float = 2.0
    silent_after_s: float = 8.0
    ack_every_frames: int = 64
    ack_every_bytes: int = 4 * 1024 * 1024
    ack_after_s: float = 0.1


class LinkStats(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the links that live now, and counts over the life of the endpoint."""

    links: int
    wires: int
    messages_sent: int
    messages_received: int
    frames_sent: int
    frames_received: int
    unacked_bytes: int
    waiting_messages: int
    reconnects: int
    peers_lost: int


class Loss(NamedTuple):
    """Why a peer was given up, and whether it has ended for certain."""

    reason: str
    ended: bool


class Endpoint:
    """Sends messages to other processes and receives theirs; made anywhere, started on the loop that serves it."""

    address: str = ""

    def __init__(self, config: EndpointConfig) -> None:
        if not config.secret:
            raise ValueError("the cluster's secret is empty")
        self.config = config
        self.scratch = memoryview(bytearray(READ_BYTES))  # what arrives on any socket, until it is cut into frames
        self.queued_links: set[Link] = set()
        self.loop: asyncio.AbstractEventLoop
        self._lock = threading.RLock()
        self._links: dict[str, Link] = {}
        self._dead: OrderedDict[str, Loss] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listener: Any = None
        self._ticker: asyncio.TimerHandle | None = None
        self._ticked_at = 0.0
        self._closed = False
        self._cut_all = False
        self._cut_peers: frozenset[str] = frozenset()
        self._healed: asyncio.Event
        self._reconnects = self._peers_lost = 0

    async def start(self) -> None:
        """Listen; then `address` is set."""
        self.loop = asyncio.get_running_loop()
        self._healed = asyncio.Event()
        self._healed.set()
        self._listener = await self._listen()
        nonce = f"{CODE if self.config.runs_code else ''}{secrets.token_hex(4)}"
        self.address = f"{self._listener.contact_address}#{nonce}"
        self._ticked_at = self.loop.time()
        self._ticker = self.loop.call_later(self._tick_s, self._tick)

    async def _listen(self) -> Any:
        config = self.config
        if config.relay:
            return await Gate(config.relay, config.security, self._welcome, self._tasks).open()
        return await handshake.listen((config.host, config.port), config.security, self._welcome, self._tasks)

    # --- any thread ---

    def send(self, to: str, message: Any, urgent: bool = True) -> None:
        """Queue a message for a peer, and write it now if `urgent`; dropped when the peer is gone. Never blocks."""
        link = self._links.get(to) or self._link(to)
        if link is not None:
            link.send(message, urgent)

    def flush(self) -> None:
        """Write out what sends that were not urgent have queued."""
        queued = self.queued_links
        while queued:
            try:
                link = queued.pop()
            except KeyError:
                return
            link.flush()

    def flush_to(self, to: str) -> None:
        """The same for one peer."""
        link = self._links.get(to)
        if link is not None:
            link.flush()

    @property
    def stats(self) -> LinkStats:
        with self._lock:
            links = list(self._links.values())
        return LinkStats(
            links=len(links),
            wires=sum(len(link.wires) for link in links),
            messages_sent=sum(link.messages_sent for link in links),
            messages_received=sum(link.messages_received for link in links),
            frames_sent=sum(link.sent for link in links),
            frames_received=sum(link.frames_received for link in links),
            unacked_bytes=sum(link.unacked_bytes for link in links),
            waiting_messages=sum(len(link.outbox) for link in links),
            reconnects=self._reconnects,
            peers_lost=self._peers_lost,
        )

    def _link(self, to: str) -> Link | None:
        with self._lock:
            link = self._links.get(to)
            if link is not None or self._closed or to in self._dead:
                return link
            link = self._links[to] = Link(to, self)
        try:
            self.loop.call_soon_threadsafe(self.unlinked, link)
        except RuntimeError:  # the loop is closed, so the process is about to end
            return None
        return link

    # --- the loop thread ---

    async def connect(self, to: str) -> None:
        """Return when the link to a peer is up; SecretRefused, PeerGone or LinkError when it cannot be."""
        link = self._links.get(to) or self._link(to)
        if link is None:
            raise PeerGone(f"{to} is gone: {self._why_gone(to)}")
        if link.out is None:
            waiter: asyncio.Future[None] = self.loop.create_future()
            link.waiters.append(waiter)
            await waiter

    async def open_stream(self, to: str, hello: dict[str, Any]) -> BulkStream:
        """A connection of its own for bulk bytes; the peer's `on_stream` gets `hello`. OSError when it fails."""
        await self._gate(to)
        if self._closed or to in self._dead:
            raise PeerGone(f"{to} is gone: {self._why_gone(to)}")
        first = self._hello(to, "stream", note=msgspec.msgpack.encode(hello))
        dialled, _ = await self._dialled(first)
        stream = for_bulk(dialled)
        stream.peer, stream.gate = to, self._gate
        return stream

    def _why_gone(self, peer: str) -> str:
        return self.why_lost(peer) or "this endpoint is closed"

    def has_ended(self, peer: str) -> bool:
        """Whether a peer that was lost has ended for certain: nobody answers to its name where it listened."""
        loss = self._dead.get(peer)
        return loss is not None and loss.ended

    def why_lost(self, peer: str) -> str:
        """Why a peer was given up; empty when it was not."""
        loss = self._dead.get(peer)
        return loss.reason if loss is not None else ""

    def forgive(self, peer: str) -> None:
        """Let a peer that was given up come back under its address: the next message to it dials anew."""
        with self._lock:
            self._dead.pop(peer, None)

    def cut(self, peers: set[str] | None = None) -> None:
        """Carry nothing from or to these peers, or anybody, until `heal`; nobody is told."""
        self._cut_all = peers is None
        self._cut_peers = frozenset(peers or ())
        self._healed.clear()
        for link in list(self._links.values()):
            if self._is_cut(link.peer):
                for wire in list(link.wires):
                    wire.pause()

    def heal(self) -> None:
        """End `cut`; what waited goes on."""
        self._cut_all, self._cut_peers = False, frozenset()
        self._healed.set()
        for link in list(self._links.values()):
            for wire in list(link.wires):
                if wire.paused:
                    wire.resume()
            link.flush()

    def sever(self, to: str) -> None:
        """Break the connections to a peer as a network failure would; the link resumes."""
        link = self._links.get(to)
        for wire in list(link.wires) if link is not None else ():
            wire.sever()

    async def close(self) -> None:
        """Deliver what is queued, say goodbye and leave nothing behind; waits for dead peers only briefly."""
        if self._closed or self._listener is None:
            return
        with self._lock:
            self._closed = True
        self._listener.stop()
        if self._ticker is not None:
            self._ticker.cancel()
        links = list(self._links.values())
        waiting = [self._farewell(link) for link in links if link.wires or link.outbox]
        if waiting:
            await asyncio.wait(waiting, timeout=CLOSE_GRACE_S)
        for link in links:
            self._end(link, "this endpoint is closed")
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _farewell(self, link: Link) -> asyncio.Future[None]:
        # The peer closes its end when it reads the goodbye, after all that was sent before; that wakes the waiter.
        link.gone = self.loop.create_future()
        with link.lock:
            link.closing = True
            link.pump()
        link.say_goodbye()
        return link.gone

    def unlinked(self, link: Link) -> None:
        """No wire carries this link: dial, from either side, since only a refused connection tells who is gone."""
        if link.lost is not None:
            return
        if self._closed and (link.attached or not link.closing):
            self._end(link, "this endpoint is closed")
        elif link.dialling is None:
            link.dialling = self._spawn(self._dial(link))

    async def _dial(self, link: Link) -> None:
        give_up_at = self.loop.time() + self.config.lost_after_s
        retry_s, reason = RETRY_FIRST_S, "cut off"
        try:
            while not link.wires and link.lost is None:
                try:
                    async with asyncio.timeout_at(give_up_at):
                        if not self._is_cut(link.peer):
                            await self._dial_once(link)
                            return
                except LinkError as error:
                    self.lose(link, str(error), error, ended=isinstance(error, Replaced))
                    return
                except ConnectionRefusedError as error:
                    self.lose(link, str(error), ended=not self.config.relay)  # the relay itself may have refused
                    return
                except OSError as error:
                    reason = str(error) or reason
                except Exception as error:  # a malformed address, TLS without certificates: it fails every time
                    self.lose(link, f"cannot be dialled: {error!r}")
                    return
                if self.loop.time() >= give_up_at:
                    if await self._stands_still(link.peer):
                        give_up_at = self.loop.time() + self.config.lost_after_s
                        continue
                    if not link.wires:
                        self.lose(link, f"not reached for {self.config.lost_after_s:g} s: {reason}")
                    return
                await asyncio.sleep(min(retry_s * random.uniform(0.5, 1.0), give_up_at - self.loop.time()))
                retry_s = min(RETRY_MOST_S, retry_s * 2)
        finally:
            link.dialling = None
            if not link.wires and link.lost is None and not self._closed:
                self.unlinked(link)

    async def _stands_still(self, peer: str) -> bool:
        """Whether a process that does not answer is there: code of programs may keep the interpreter for long.

        Its kernel takes connections meanwhile. Its node judges whether it works or hangs; nodes and heads run none.
        """
        location, nonce = handshake.split_address(peer)
        if not nonce.startswith(CODE) or self.config.relay or self._is_cut(peer):
            return False
        return await handshake.is_listening(location)

    async def _dial_once(self, link: Link) -> None:
        hello = self._hello(link.peer, "link", link)
        stream, peer_received = await self._dialled(hello)
        self._attach(link, stream, dialled=True, peer_received=peer_received)

    async def _dialled(self, hello: Hello) -> tuple[BulkStream, int]:
        return await handshake.dial(hello, self.config.secret, self._reach)

    async def _reach(self, location: str) -> BulkStream:
        relay, security = self.config.relay, self.config.security
        if relay:
            return await through(relay, location, security, self._tasks)
        return await handshake.connect(location, security, self._tasks)

    def _hello(self, to: str, kind: Literal["link", "stream"], link: Link | None = None, note: bytes = b"") -> Hello:
        received, oldest = (0, 1) if link is None else (link.received, link.sent - len(link.unacked) + 1)
        return Hello(handshake.VERSION, kind, self.address, to, received=received, oldest=oldest, note=note)

    async def _welcome(self, stream: BulkStream) -> None:
        try:
            hello = await handshake.accept(stream, self.address, self.config.secret, self._judge)
            if hello.kind == "link":
                with self._lock:
                    link = self._links.get(hello.sender)
                    if link is None and hello.sender not in self._dead:
                        link = self._links[hello.sender] = Link(hello.sender, self)
                if link is None:
                    raise ConnectionError("the link ended meanwhile")
                self._attach(link, stream, dialled=False, peer_received=hello.received)
            else:
                stream = for_bulk(stream)
                stream.peer, stream.gate = hello.sender, self._gate
                self._spawn(self._serve(hello, stream))
        except BaseException:
            stream.abort()
            raise

    def _judge(self, hello: Hello) -> int | Refused:
        peer = hello.sender
        if self._closed or self._is_cut(peer):
            raise ConnectionError("closed or cut off")
        handshake.split_address(peer)
        if peer in self._dead:
            return Refused("gone", f"{peer} was given up: {self._dead[peer].reason}")
        if hello.kind != "link":
            return Refused("stream", "no streams are served here") if self.config.on_stream is None else 0
        link = self._links.get(peer)
        sent, received = (0, 0) if link is None else (link.sent, link.received)
        if hello.oldest > received + 1 or hello.received > sent:
            return Refused("gone", f"{peer} and {self.address} disagree on what was sent")
        return received

    def _attach(self, link: Link, stream: BulkStream, dialled: bool, peer_received: int) -> None:
        if link.lost is not None or (self._closed and not link.closing):
            raise ConnectionError("the link ended meanwhile")
        if peer_received > link.sent:  # it remembers more than was sent on this link: one side has given the other up
            stream.abort()
            raise PeerGone(f"{link.peer} and {self.address} disagree on what was sent")
        self._reconnects += link.attached > 0
        wire = handshake.to_wire(stream, link, self.loop)
        link.attach(wire, dialled, peer_received)
        if self._is_cut(link.peer):
            wire.pause()

    async def _serve(self, hello: Hello, stream: BulkStream) -> None:
        assert self.config.on_stream is not None
        try:
            await self.config.on_stream(hello.sender, msgspec.msgpack.decode(hello.note), stream)
        except Exception:
            logger.exception("the stream from %s failed", hello.sender)
        finally:
            stream.abort()

    def lose(self, link: Link, reason: str, error: LinkError | None = None, ended: bool = False) -> None:
        """The peer is gone for good; ended: that is certain, not a guess from its silence."""
        if link.lost is not None:
            return
        told = not self._closed
        self._end(link, reason, error, ended)
        if told:
            self._peers_lost += 1
            try:
                self.config.on_lost(link.peer, reason)
            except Exception:
                logger.exception("the loss of %s was not handled", link.peer)

    def _end(self, link: Link, reason: str, error: LinkError | None = None, ended: bool = False) -> None:
        with self._lock:
            self._links.pop(link.peer, None)
            self._dead[link.peer] = Loss(reason, ended)
            while len(self._dead) > DEAD_PEERS_KEPT:
                self._dead.popitem(last=False)
        link.end(reason)
        self.queued_links.discard(link)
        if link.dialling is not None and link.dialling is not asyncio.current_task():
            link.dialling.cancel()
        if link.gone is not None and not link.gone.done():
            link.gone.set_result(None)
        for waiter in link.waiters:
            if not waiter.done():
                waiter.set_exception(error or PeerGone(f"{link.peer} is gone: {reason}"))
        link.waiters.clear()

    @property
    def _tick_s(self) -> float:
        return min(self.config.ping_every_s / 2, self.config.silent_after_s / 4)

    def _tick(self) -> None:
        now = self.loop.time()
        # When this process itself stood still, the silence is not the peers'.
        forgive = now - self._ticked_at > self._tick_s + self.config.silent_after_s / 4
        self._ticked_at = now
        for link in list(self._links.values()):
            link.tick(now, forgive)
        self._ticker = self.loop.call_later(self._tick_s, self._tick)

    def _is_cut(self, peer: str) -> bool:
        return self._cut_all or peer in self._cut_peers

    async def _gate(self, peer: str) -> None:
        while self._is_cut(peer):
            await self._healed.wait()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def make_security(certificate: str, key: str, authority: str = "") -> Security:
    """TLS with the one certificate of the cluster, both PEM, which every process shows; or with an authority's."""
    from distributed import Security as DaskSecurity  # only clusters with TLS need it

    shown = {f"tls_{role}_{part}": pem for role in ("client", "scheduler", "worker")
             for part, pem in (("cert", certificate), ("key", key or None))}
    return DaskSecurity(  # type: ignore[no-untyped-call]
        tls_ca_file=authority or certificate, require_encryption=True, **shown
    )


def new_certificate() -> tuple[str, str]:
    """A self-made certificate for a new cluster and its key, both PEM."""
    from distributed import Security as DaskSecurity

    made: Any = DaskSecurity.temporary()  # type: ignore[no-untyped-call]
    return made.tls_ca_file, made.tls_client_key
