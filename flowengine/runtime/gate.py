"""How a process that reaches nothing but a Dask scheduler's port dials others through it, and is dialled by them.

The engine adds one handler to the scheduler (deploy/relay.py). A connection that asks it to `dial` is joined to one
that the scheduler makes; a connection that asks to `accept` waits until somebody dials the port that the scheduler
has opened for this process. What then goes over it is the same as over a connection of one's own, handshake included.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.runtime.handshake import (
    HANDSHAKE_S,
    BulkStream,
    Stranger,
    ask_server,
    connect,
    in_time,
    read_message,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

log = logging.getLogger(__name__)

RELAY_OP = "flowengine-link"  # of the handler
OPEN, REFUSED, FAILED = "open", "refused", "failed"  # first words of its answers
WAITING = 2  # connections that wait for others to dial: while one is taken, the next is there
AGAIN_S = 0.5

Tasks = set[asyncio.Task[Any]]


async def through(relay: str, location: str, security: Any, tasks: Tasks) -> BulkStream:
    """A connection to a location, made by the relay; errors as of handshake.connect()."""
    stream = await _asked(relay, security, tasks, {"ask": "dial", "to": location})
    async with in_time(stream, f"{location} was not reached through {relay}"):
        await _answer(stream)
    return stream


async def _asked(relay: str, security: Any, tasks: Tasks, question: dict[str, str]) -> BulkStream:
    stream = await connect(relay, security, tasks)
    async with in_time(stream, f"the relay {relay} did not answer"):
        await ask_server(stream, {"op": RELAY_OP, "reply": False, **question})
    return stream


async def _answer(stream: BulkStream) -> str:
    try:
        word, text = msgspec.msgpack.decode(await read_message(stream), type=tuple[str, str])
    except msgspec.MsgspecError as error:
        raise Stranger(f"not the answer of a relay: {error}") from None
    if word == OPEN:
        return text
    raise ConnectionRefusedError(text) if word == REFUSED else ConnectionError(text)


class Gate:
    """Where a process is dialled that cannot listen: takes the place of a listener."""

    contact_address = ""

    def __init__(self, relay: str, security: Any, welcome: Callable[[BulkStream], Coroutine[Any, Any, None]],
                 tasks: Tasks) -> None:
        self.relay = relay
        self.security = security
        self.welcome = welcome
        self.tasks = tasks
        self.name = secrets.token_hex(16)
        self.waiting: list[asyncio.Task[None]] = []

    async def open(self) -> Gate:
        """Return when others can dial."""
        first = await self._wait_here()
        self.waiting = [self._spawn(self._serve(first)), *(self._spawn(self._serve(None)) for _ in range(WAITING - 1))]
        return self

    def stop(self) -> None:
        """Nobody is let in any more."""
        for task in self.waiting:
            task.cancel()

    async def _wait_here(self) -> BulkStream:
        stream = await _asked(self.relay, self.security, self.tasks, {"ask": "accept", "to": self.name})
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                self.contact_address = await _answer(stream)
            return stream
        except BaseException:
            stream.abort()
            raise

    async def _serve(self, stream: BulkStream | None) -> None:
        while True:
            try:
                stream = stream or await self._wait_here()
                try:
                    await _answer(stream)  # somebody has dialled
                except BaseException:
                    stream.abort()
                    raise
                self._spawn(self._admit(stream))
            except OSError as error:
                log.debug("the relay %s: %s", self.relay, error)
                await asyncio.sleep(AGAIN_S)
            stream = None

    async def _admit(self, stream: BulkStream) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await self.welcome(stream)
        except Exception as error:
            log.info("refused a connection through the relay: %s", str(error) or "no answer in time")
            stream.abort()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task
