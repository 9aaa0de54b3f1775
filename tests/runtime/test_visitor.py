"""Who only asks: what it is told when the one that it asks has ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowengine.config import Config
from flowengine.core.messages import Answered, Asked
from flowengine.errors import FlowError, HeadLost
from flowengine.runtime import process, visitor
from flowengine.runtime.connection import Connection
from flowengine.runtime.visitor import Visitor

SECRET = b"s" * 32
PLACE = process.Place(host="127.0.0.1", secret=SECRET, tls=None, config=Config())


class Answering:
    """Something that answers each question with its topic, but those about "silence"."""

    def __init__(self) -> None:
        self.endpoint = process.new_endpoint(PLACE, self._heard, lambda peer, reason: None)

    def _heard(self, peer: str, messages: list[Any]) -> None:
        for one in messages:
            if isinstance(one, Asked) and one.topic != "silence":
                self.endpoint.send(peer, Answered(one.request, one.topic, one.topic), True)


def test_who_has_ended_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(visitor, "ANSWER_TIMEOUT_S", 60.0)

    async def run() -> None:
        head, node = Answering(), Answering()
        await head.endpoint.start()
        await node.endpoint.start()
        connection = Connection(address=head.endpoint.address, secret=SECRET.hex(), session="one")
        async with asyncio.timeout(20), Visitor(connection) as asking:
            entry = {"address": node.endpoint.address}
            assert await asking.ask_head("nodes") == "nodes"
            assert await asking.ask_all([entry], "printed") == ["printed"]
            question = asyncio.create_task(asking.ask_head("silence"))
            await node.endpoint.close()
            assert await asking.ask_all([entry], "printed") == [None]
            assert not asking.session_is_over
            await head.endpoint.close()
            with pytest.raises(HeadLost, match="session one has ended"):
                await question
            with pytest.raises(FlowError, match="has ended"):
                await asking.ask_head("nodes")
            assert asking.session_is_over

    asyncio.run(run())
