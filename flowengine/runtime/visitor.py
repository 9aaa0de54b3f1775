"""A process that asks a cluster and owns nothing in it; and how anybody first reaches a head."""

from __future__ import annotations

import asyncio
import itertools
import os
from types import TracebackType
from typing import Any

from flowengine.config import Config, from_environment, make_config
from flowengine.core.messages import Answered, Asked
from flowengine.errors import BadValue, FlowError, HeadLost
from flowengine.runtime import process
from flowengine.runtime.connection import Connection, own_host
from flowengine.runtime.link import Endpoint, LinkError, PeerGone, SecretRefused
from flowengine.runtime.wire import CLOSED

REFUSED_PATIENCE_S = 5.0  # a head that is being started again does not listen for a moment
RETRY_S = 0.2
ANSWER_TIMEOUT_S = 5.0


async def reach(endpoint: Endpoint, head: str, timeout_s: float) -> None:
    """Have a link to the head; raises BadValue when it does not take our secret, HeadLost when it is not there."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    where = head.partition("#")[0]
    while True:
        endpoint.forgive(head)
        try:
            async with asyncio.timeout_at(began_s + timeout_s):
                await endpoint.connect(head)
            return
        except TimeoutError:
            raise HeadLost(f"the head at {where} cannot be reached: no answer within {timeout_s:g} s") from None
        except SecretRefused as error:
            raise BadValue(f"the head at {where} does not take the secret of this connection file: {error}") from error
        except PeerGone as error:
            reason = str(error)
        except LinkError as error:
            raise HeadLost(f"the head at {where} cannot be reached: {error}") from error
        if loop.time() - began_s > min(timeout_s, REFUSED_PATIENCE_S):
            raise HeadLost(f"the head at {where} cannot be reached: {reason}")
        await asyncio.sleep(RETRY_S)


class Asker:
    """Questions of this process to others, many at a time; the answers come on the loop of its endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._questions: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._numbers = itertools.count(1)

    async def ask(self, to: str, topic: str, argument: Any = None) -> Any:
        """What the process itself (and, of a node, its processes) answers; raises FlowError when it does not."""
        reason = self.endpoint.why_lost(to)
        if reason:
            raise FlowError(f"{to} is gone: {reason}")
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._questions[number] = to, future
        self.endpoint.send(to, Asked(number, topic, argument, "local"))
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await future
        except TimeoutError:
            raise FlowError(f"no answer about {topic} from {to} within {ANSWER_TIMEOUT_S:g} s") from None
        finally:
            del self._questions[number]

    async def ask_all(self, nodes: list[dict[str, Any]], topic: str, argument: Any = None) -> list[Any]:
        """Answers in the order of the nodes; None stands for one that did not answer."""
        asked = [self.ask(entry["address"], topic, argument) for entry in nodes]
        found = await asyncio.gather(*asked, return_exceptions=True)
        for answer in found:
            if isinstance(answer, BaseException) and not isinstance(answer, FlowError):
                raise answer
        return [None if isinstance(answer, FlowError) else answer for answer in found]

    def heard(self, peer: str, messages: list[Any]) -> None:
        """What a process has said: answers are taken from it."""
        for message in messages:
            if isinstance(message, Answered) and message.request in self._questions:
                asked, future = self._questions[message.request]
                if asked == peer and not future.done():
                    future.set_result(message.content)

    def missed(self, peer: str, reason: str) -> None:
        """Who is gone does not answer."""
        for asked, future in self._questions.values():
            if asked == peer and not future.done():
                future.set_exception(FlowError(f"{peer} is gone: {reason}"))


class Visitor(Asker):
    """Asks processes of a cluster: `async with Visitor(connection) as visitor`."""

    def __init__(self, connection: Connection, config: Config | None = None) -> None:
        self.connection = connection
        self.config = config or make_config(from_environment(os.environ))
        self.lost: dict[str, str] = {}  # who is gone, and why
        place = process.Place(host=own_host(connection.address), secret=connection.secret_bytes, tls=connection.tls,
                              config=self.config)
        super().__init__(process.new_endpoint(place, self.heard, self._on_lost))

    async def __aenter__(self) -> Visitor:
        await self.endpoint.start()
        try:
            await reach(self.endpoint, self.connection.address, self.config.connect_timeout_s)
        except BaseException:
            await self.endpoint.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.endpoint.close()

    async def ask_head(self, topic: str, argument: Any = None) -> Any:
        """The same of the head, also when it is started again meanwhile; raises HeadLost when it has ended."""
        head = self.connection.address
        while True:
            reason = self.lost.get(head)
            if reason == CLOSED:
                raise HeadLost(f"session {self.connection.session} has ended")
            if reason is not None:
                await reach(self.endpoint, head, self.config.connect_timeout_s)
                del self.lost[head]
            try:
                return await self.ask(head, topic, argument)
            except FlowError:
                if head not in self.lost:
                    raise

    @property
    def session_is_over(self) -> bool:
        """Whether the head has said that it ends."""
        return self.lost.get(self.connection.address) == CLOSED

    def _on_lost(self, peer: str, reason: str) -> None:
        self.lost[peer] = reason
        self.missed(peer, reason)


async def check_secret(connection: Connection, timeout_s: float) -> None:
    """Raise BadValue when the head is there and does not take the secret; a head that is away is no error."""
    visitor = Visitor(connection)
    await visitor.endpoint.start()
    try:
        await reach(visitor.endpoint, connection.address, timeout_s)
    except HeadLost:
        return
    finally:
        await visitor.endpoint.close()
