"""Links between processes: order, resume, loss, strangers, bulk streams."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from typing import Any

import msgspec
import pytest

from flowengine.runtime import handshake
from flowengine.runtime.link import BulkStream, Endpoint, EndpointConfig, PeerGone, SecretRefused

SECRET = b"s" * 32
WAIT_S = 20.0


class Note(msgspec.Struct, tag=True):
    number: int
    sender: int = 0


class Blob(msgspec.Struct, tag=True):
    content: bytes


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(list[Note | Blob]).decode


class Party:
    """An endpoint that keeps what it is told, and lets a test wait for it."""

    def __init__(self, **settings: Any) -> None:
        self.got: list[Any] = []
        self.lost: list[tuple[str, str]] = []
        self.changed = asyncio.Event()
        self.reply = False
        settings = {"secret": SECRET, "encode": encode, "decode": decode, **settings}
        self.endpoint = Endpoint(EndpointConfig(on_batch=self._batch, on_lost=self._lost, **settings))

    def _batch(self, peer: str, messages: list[Any]) -> None:
        self.got.extend(messages)
        if self.reply:
            for message in messages:
                self.endpoint.send(peer, message, urgent=False)
            self.endpoint.flush()
        self.changed.set()

    def _lost(self, peer: str, reason: str) -> None:
        self.lost.append((peer, reason))
        self.changed.set()

    async def until(self, done: Any) -> None:
        async with asyncio.timeout(WAIT_S):
            while not done():
                self.changed.clear()
                await self.changed.wait()

    async def __aenter__(self) -> Party:
        await self.endpoint.start()
        self.address = self.endpoint.address
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.endpoint.close()


def numbers(party: Party, sender: int = 0) -> list[int]:
    return [m.number for m in party.got if isinstance(m, Note) and m.sender == sender]


def on_loop(test: Any) -> Any:
    @functools.wraps(test)
    def in_a_loop_of_its_own(*args: Any, **fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **fixtures), 60))

    return in_a_loop_of_its_own


CHILD = """
    import asyncio, sys
    sys.path.insert(0, {tests!r})
    from test_link import Note, Party

    async def main():
        party = Party({settings})
        party.reply = True
        async with party:
            print(party.address, flush=True)
            if {target!r}:
                party.endpoint.send({target!r}, Note(1))
            await asyncio.Event().wait()

    asyncio.run(main())
"""


class Child:
    """A process with an endpoint that sends back what it gets."""

    def __init__(self, settings: str = "", target: str = "") -> None:
        code = CHILD.format(tests=os.path.dirname(__file__), settings=settings, target=target)
        command = [sys.executable, "-c", textwrap.dedent(code)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@on_loop
async def test_messages_arrive_in_order_and_answers_come_over_the_same_connection() -> None:
    async with Party() as a, Party() as b:
        b.reply = True
        for number in range(5000):
            a.endpoint.send(b.address, Note(number), urgent=number % 3 == 0)
        a.endpoint.flush()
        await a.until(lambda: len(a.got) == 5000)
        assert numbers(b) == numbers(a) == list(range(5000))
        assert a.endpoint.stats.wires == b.endpoint.stats.wires == 1
        assert a.lost == b.lost == []


@on_loop
async def test_sends_that_are_not_urgent_wait_for_a_flush_or_a_full_queue() -> None:
    async with Party() as a, Party() as b:
        await a.endpoint.connect(b.address)
        for number in range(10):
            a.endpoint.send(b.address, Note(number), urgent=False)
        assert a.endpoint.stats.waiting_messages == 10
        assert a.endpoint.stats.frames_sent == 0
        a.endpoint.flush_to(b.address)
        assert a.endpoint.stats.frames_sent == 1
        await b.until(lambda: len(b.got) == 10)
        for number in range(128):
            a.endpoint.send(b.address, Note(number), urgent=False)
        assert a.endpoint.stats.waiting_messages == 0


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
@on_loop
async def test_nothing_is_lost_or_doubled_when_connections_break(seed: int, tls: bool) -> None:
    rng = random.Random(seed)
    settings = {"security": handshake_security()} if tls else {}
    async with Party(**settings) as a, Party(**settings) as b:
        total = 3000
        for number in range(total):
            a.endpoint.send(b.address, Note(number), urgent=rng.random() < 0.5)
            b.endpoint.send(a.address, Note(number), urgent=rng.random() < 0.5)
            if rng.random() < 0.01:
                side, other = rng.choice([(a, b), (b, a)])
                side.endpoint.sever(other.address)
            if rng.random() < 0.05:
                await asyncio.sleep(0)
            if rng.random() < 0.005:
                await b.until(lambda number=number: len(b.got) > number // 2)
        a.endpoint.flush()
        b.endpoint.flush()
        await b.until(lambda: len(b.got) >= total)
        await a.until(lambda: len(a.got) >= total)
        assert numbers(a) == numbers(b) == list(range(total))
        assert a.lost == b.lost == []
        assert a.endpoint.stats.reconnects > 0


def handshake_security() -> Any:
    pytest.importorskip("cryptography")
    from distributed import Security

    return Security.temporary()


@on_loop
async def test_large_frames_that_are_broken_in_the_middle_are_sent_again() -> None:
    async with Party() as a, Party() as b:
        content = os.urandom(30_000_000)
        await a.endpoint.connect(b.address)
        for _ in range(3):
            a.endpoint.send(b.address, Blob(content))
            a.endpoint.sever(b.address)
        await b.until(lambda: len(b.got) == 3)
        assert all(m.content == content for m in b.got)


@on_loop
async def test_a_severed_tls_connection_is_still_deciphered() -> None:
    # What lies in the socket when the connection breaks is read after that: as plain bytes it would be garbage.
    settings = {"security": handshake_security()}
    async with Party(**settings) as a, Party(**settings) as b:
        await a.endpoint.connect(b.address)
        (wire,) = a.endpoint._links[b.address].wires
        cipher = wire.stream.socket.version()
        a.endpoint.sever(b.address)
        assert wire.stream.socket.version() == cipher is not None


@on_loop
async def test_both_sides_may_connect_at_the_same_time() -> None:
    for _ in range(10):
        async with Party() as a, Party() as b:
            for number in range(200):
                a.endpoint.send(b.address, Note(number))
                b.endpoint.send(a.address, Note(number))
                if number == 100:
                    await asyncio.gather(a.endpoint.connect(b.address), b.endpoint.connect(a.address))
            await a.until(lambda: len(a.got) == 200)
            await b.until(lambda: len(b.got) == 200)
            assert numbers(a) == numbers(b) == list(range(200))


@on_loop
async def test_threads_may_send_at_the_same_time() -> None:
    async with Party() as a, Party() as b:

        def sender(index: int) -> None:
            for number in range(2000):
                a.endpoint.send(b.address, Note(number, index), urgent=number % 2 == 0)
            a.endpoint.flush()

        threads = [threading.Thread(target=sender, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        await b.until(lambda: len(b.got) == 8000)
        for thread in threads:
            thread.join()
        for index in range(4):
            assert numbers(b, index) == list(range(2000))


@pytest.mark.parametrize("tls", [False, True])
@on_loop
async def test_a_message_of_fifty_mebibytes(tls: bool) -> None:
    settings = {"security": handshake_security()} if tls else {}
    async with Party(**settings) as a, Party(**settings) as b:
        content = os.urandom(50 * 1024 * 1024)
        a.endpoint.send(b.address, Note(1))
        a.endpoint.send(b.address, Blob(content))
        a.endpoint.send(b.address, Note(2))
        await b.until(lambda: len(b.got) == 3)
        assert b.got[1].content == content
        assert numbers(b) == [1, 2]


@on_loop
async def test_what_is_not_acknowledged_is_bounded() -> None:
    async with Party(unacked_bytes_max=100_000) as a, Party() as b:
        await a.endpoint.connect(b.address)
        b.endpoint.cut()
        for _ in range(100):
            a.endpoint.send(b.address, Blob(b"x" * 10_000))
        stats = a.endpoint.stats
        assert stats.unacked_bytes <= 120_000
        assert stats.waiting_messages > 80
        b.endpoint.heal()
        await b.until(lambda: len(b.got) == 100)


@on_loop
async def test_a_killed_process_is_lost_at_once_and_once() -> None:
    with Child() as child:
        async with Party(lost_after_s=60) as a:
            a.endpoint.send(child.address, Note(7))
            await a.until(lambda: a.got)
            os.kill(child.process.pid, signal.SIGKILL)
            await a.until(lambda: a.lost)
            assert (a.lost[0][0], a.endpoint.has_ended(child.address)) == (child.address, True)
            a.endpoint.send(child.address, Note(8))
            with pytest.raises(PeerGone):
                await a.endpoint.connect(child.address)
            assert len(a.lost) == 1


@on_loop
async def test_the_acceptor_also_finds_out_that_the_connector_was_killed() -> None:
    async with Party(lost_after_s=60) as a:
        with Child(target=a.address) as child:
            await a.until(lambda: a.got)
            assert a.lost == []
            os.kill(child.process.pid, signal.SIGKILL)
            await a.until(lambda: a.lost)
            assert [(peer, a.endpoint.has_ended(peer)) for peer, _ in a.lost] == [(child.address, True)]


@on_loop
async def test_messages_survive_breaks_between_two_processes() -> None:
    rng = random.Random(5)
    with Child() as child:
        async with Party() as a:
            for number in range(2000):
                a.endpoint.send(child.address, Note(number), urgent=rng.random() < 0.5)
                if rng.random() < 0.01:
                    a.endpoint.sever(child.address)
                    a.endpoint.send(child.address, Note(number, 1))
                    await asyncio.sleep(0)
            a.endpoint.flush()
            await a.until(lambda: len(numbers(a)) == 2000)
            assert numbers(a) == list(range(2000))


@on_loop
async def test_another_process_on_the_same_port_is_not_taken_for_the_old_one() -> None:
    async with Party() as a, Party() as b:
        gone = b.address.split("#")[0] + "#00000000"
        a.endpoint.send(gone, Note(1))
        await a.until(lambda: a.lost)
        assert (a.lost[0][0], a.endpoint.has_ended(gone)) == (gone, True)
        assert b.got == []


@on_loop
async def test_closing_says_goodbye_and_delivers_what_was_sent() -> None:
    async with Party(lost_after_s=60) as a:
        async with Party() as b:
            await b.endpoint.connect(a.address)
            for number in range(500):
                b.endpoint.send(a.address, Note(number), urgent=False)
        await a.until(lambda: a.lost)
        assert a.lost == [(b.address, "closed")]
        assert numbers(a) == list(range(500))


@on_loop
async def test_closing_waits_for_a_link_that_is_not_up_yet() -> None:
    async with Party(lost_after_s=60) as a:
        async with Party() as b:
            b.endpoint.send(a.address, Note(1))
        await a.until(lambda: a.lost)
        assert numbers(a) == [1]
        assert a.lost == [(b.address, "closed")]


@on_loop
async def test_an_endpoint_may_send_to_itself() -> None:
    async with Party() as a:
        for number in range(300):
            a.endpoint.send(a.address, Note(number))
        await a.until(lambda: len(a.got) == 300)
        assert numbers(a) == list(range(300))


@on_loop
async def test_threads_may_send_while_connections_break() -> None:
    rng = random.Random(11)
    async with Party() as a, Party() as b:

        def sender(party: Party, to: str, index: int) -> None:
            for number in range(3000):
                party.endpoint.send(to, Note(number, index), urgent=number % 4 == 0)
            party.endpoint.flush()

        threads = [threading.Thread(target=sender, args=(a, b.address, i)) for i in range(2)]
        threads += [threading.Thread(target=sender, args=(b, a.address, i)) for i in range(2)]
        for thread in threads:
            thread.start()
        for goal in range(500, 6001, 500):
            await b.until(lambda goal=goal: len(b.got) >= goal)
            side, other = rng.choice([(a, b), (b, a)])
            side.endpoint.sever(other.address)
        await a.until(lambda: len(a.got) == 6000)
        for thread in threads:
            thread.join()
        for party in (a, b):
            assert [numbers(party, i) for i in range(2)] == [list(range(3000))] * 2


@on_loop
async def test_the_wrong_secret_is_refused_with_that_word() -> None:
    async with Party() as a, Party(secret=b"w" * 32) as b:
        with pytest.raises(SecretRefused, match="secret"):
            await b.endpoint.connect(a.address)
        assert len(b.lost) == 1
        assert a.lost == []
        assert a.endpoint.stats.links == 0


@on_loop
async def test_an_acceptor_that_does_not_know_the_secret_is_not_believed() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accepts any proof, and answers with one of its own making."""

        async def read() -> bytes:
            return await reader.readexactly(int.from_bytes(await reader.readexactly(8), "little"))

        def message(reply: Any) -> bytes:
            return handshake._framed(msgspec.msgpack.encode(reply))

        await read()
        await read()
        address = f"tcp://127.0.0.1:{port}#0badcafe"
        writer.write(handshake._dask_greeting() + message(handshake.Challenge(address=address, nonce=b"n" * 32)))
        proof = msgspec.msgpack.decode(msgspec.msgpack.decode((await read())[16:]), type=handshake.Proof)
        writer.write(message(handshake.Welcome(mac=proof.mac, received=0)))  # the connector's own proof, sent back
        await reader.read()
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Party() as a:
        with pytest.raises(SecretRefused, match="secret"):
            await a.endpoint.connect(f"tcp://127.0.0.1:{port}#0badcafe")


JUNK = [
    b"",
    b"GET / HTTP/1.0\r\n\r\n",
    b"\xff" * 64,
    struct.pack("<Q", 1 << 62) + b"x" * 100,
    struct.pack("<QQQ", 20, 1, 4) + b"\x80\x04\x95.",
    struct.pack("<QQQQ", 40, 2, 4, 4) + b"x" * 16,
]


@pytest.mark.parametrize("junk", JUNK)
@on_loop
async def test_garbage_is_closed_and_changes_nothing(junk: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.3)
    async with Party() as a, Party() as b:
        host, port = a.address.split("#")[0].removeprefix("tcp://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(junk)
        try:
            while await reader.read(4096):
                pass
        except ConnectionError:
            pass
        writer.close()
        a.endpoint.send(b.address, Note(1))
        await b.until(lambda: b.got)
        assert a.endpoint.stats.links == 1


class Bomb:
    """Tells when it was unpickled."""

    def __reduce__(self) -> Any:
        return (exec, ("import test_link; test_link.exploded.append(1)",))


exploded: list[int] = []


@on_loop
async def test_a_dask_client_gets_a_challenge_and_nothing_of_it_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed.comm import connect
    from distributed.protocol import ToPickle, dumps, loads

    monkeypatch.setattr(handshake, "HANDSHAKE_S", 2.0)
    monkeypatch.setitem(sys.modules, "test_link", sys.modules[__name__])
    loads(dumps(ToPickle(Bomb())), deserialize=False)
    assert exploded == [1], "Dask's own reader does unpickle, or this test shows nothing"
    exploded.clear()
    async with Party() as a:
        where = a.address.split("#")[0]
        for overrides in ({}, {"bomb": ToPickle(Bomb())}):
            try:
                comm = await connect(where, timeout=5, handshake_overrides=overrides)
            except OSError:
                assert overrides
                continue
            await comm.write({"op": "register", "bomb": ToPickle(Bomb())})
            with pytest.raises(OSError):
                while True:
                    await comm.read()
            comm.abort()
        assert a.endpoint.stats.links == 0
    assert exploded == []


@on_loop
async def test_tls_both_ways_and_plain_connections_do_not_get_in() -> None:
    security = handshake_security()
    async with Party(security=security) as a, Party(security=security) as b, Party(lost_after_s=0.5) as plain:
        assert a.address.startswith("tls://")
        b.reply = True
        for number in range(1000):
            a.endpoint.send(b.address, Note(number))
        await a.until(lambda: len(a.got) == 1000)
        assert numbers(a) == list(range(1000))
        with pytest.raises(PeerGone):
            await plain.endpoint.connect(b.address.replace("tls://", "tcp://"))


@pytest.mark.parametrize("tls", [False, True])
@on_loop
async def test_bulk_streams_carry_bytes_both_ways(tls: bool) -> None:
    content = os.urandom(8_000_000)
    seen: list[Any] = []

    async def serve(peer: str, hello: dict[str, Any], stream: BulkStream) -> None:
        seen.append((peer, hello))
        assert bytes(await stream.read_exactly(4)) == b"give"
        await stream.write(memoryview(content))
    settings = {"security": handshake_security()} if tls else {}
    async with Party(on_stream=serve, **settings) as a, Party(**settings) as b:
        stream = await b.endpoint.open_stream(a.address, {"object": b"id", "offset": 3})
        await stream.write(b"give")
        into = bytearray(len(content) + 10)
        filled = 0
        while count := await stream.readinto(memoryview(into)[filled:]):
            filled += count
        assert bytes(into[:filled]) == content
        assert seen == [(b.address, {"object": b"id", "offset": 3})]
        await stream.close()
        with pytest.raises(OSError, match="no streams"):
            await a.endpoint.open_stream(b.address, {})


@on_loop
async def test_a_cut_holds_everything_until_it_is_healed() -> None:
    async with Party() as a, Party() as b:
        a.endpoint.send(b.address, Note(0))
        await b.until(lambda: b.got)
        a.endpoint.cut({b.address})
        a.endpoint.send(b.address, Note(1))
        b.endpoint.send(a.address, Note(2))
        assert a.got == []
        a.endpoint.heal()
        await b.until(lambda: len(b.got) == 2)
        await a.until(lambda: len(a.got) == 1)


@on_loop
async def test_a_cut_that_lasts_is_a_loss_on_both_sides() -> None:
    settings = {"ping_every_s": 0.05, "silent_after_s": 0.3, "lost_after_s": 0.5}
    async with Party(**settings) as a, Party(**settings) as b:
        await a.endpoint.connect(b.address)
        a.endpoint.cut()
        await a.until(lambda: a.lost)
        await b.until(lambda: b.lost)
        assert [(peer, a.endpoint.has_ended(peer)) for peer, _ in a.lost] == [(b.address, False)]
        assert [(peer, b.endpoint.has_ended(peer)) for peer, _ in b.lost] == [(a.address, False)]


@on_loop
async def test_a_process_that_stands_still_is_lost() -> None:
    with Child() as child:
        async with Party(ping_every_s=0.05, silent_after_s=0.4, lost_after_s=0.5) as a:
            a.endpoint.send(child.address, Note(1))
            await a.until(lambda: a.got)
            os.kill(child.process.pid, signal.SIGSTOP)
            try:
                await a.until(lambda: a.lost)
            finally:
                os.kill(child.process.pid, signal.SIGCONT)


@on_loop
async def test_an_idle_link_lives_on_pings() -> None:
    settings = {"ping_every_s": 0.05, "silent_after_s": 0.2}
    async with Party(**settings) as a, Party(**settings) as b:
        await a.endpoint.connect(b.address)
        ticked = asyncio.Event()
        asyncio.get_running_loop().call_later(0.8, ticked.set)
        await ticked.wait()
        assert a.endpoint.stats.reconnects == b.endpoint.stats.reconnects == 0
        assert a.lost == b.lost == []


@on_loop
async def test_a_message_that_cannot_be_encoded_raises_where_it_is_sent_and_harms_no_other() -> None:
    async with Party() as a, Party() as b:
        await a.endpoint.connect(b.address)
        a.endpoint.send(b.address, Note(1), urgent=False)
        with pytest.raises(TypeError):
            a.endpoint.send(b.address, object())
        a.endpoint.send(b.address, Note(2))
        await b.until(lambda: len(b.got) == 2)
        assert numbers(b) == [1, 2]


@on_loop
async def test_a_dead_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}#0badcafe"
        async with Party(lost_after_s=60) as a:
            with pytest.raises(PeerGone, match="nobody listens"):
                await a.endpoint.connect(address)
            a.endpoint.send(address, Note(1))
            assert a.endpoint.stats.links == 0
