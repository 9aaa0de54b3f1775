"""One side has given a peer up and the other has not: they find out, and begin again without losing what is new."""
from __future__ import annotations

import asyncio

import pytest

from flowengine.config import Config
from flowengine.core.messages import Ping
from flowengine.runtime import process
from tests.runtime.kit import PATIENCE_S

SECRET = b"s" * 32


class Side:
    def __init__(self) -> None:
        self.arrived: asyncio.Queue[int] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        place = process.Place(host="127.0.0.1", secret=SECRET, tls=None, config=Config())
        self.endpoint = process.new_endpoint(place, self._on_batch, self._on_lost)

    def _on_batch(self, peer: str, messages: list[Ping]) -> None:
        for message in messages:
            self.arrived.put_nowait(message.number)

    def _on_lost(self, peer: str, reason: str) -> None:
        self.endpoint.forgive(peer)
        self.lost.put_nowait(reason)

    def send(self, to: Side, number: int) -> None:
        self.endpoint.send(to.endpoint.address, Ping(number))

    def give_up(self, peer: Side) -> None:
        link = self.endpoint._links[peer.endpoint.address]
        self.endpoint.lose(link, "given up")


async def both() -> tuple[Side, Side]:
    one, two = Side(), Side()
    await one.endpoint.start()
    await two.endpoint.start()
    for number in range(3):
        one.send(two, number)
        two.send(one, number)
    assert [await one.arrived.get() for _ in range(3)] == [0, 1, 2]
    assert [await two.arrived.get() for _ in range(3)] == [0, 1, 2]
    return one, two


@pytest.mark.parametrize("who_speaks_first", [0, 1])
def test_both_know_before_anything_is_lost_silently(who_speaks_first):
    async def scene() -> None:
        one, two = sides = await both()
        one.give_up(two)
        assert await one.lost.get() == "given up"
        first, second = sides[who_speaks_first], sides[1 - who_speaks_first]
        # What is sent now may be dropped, but then the sender is told.
        first.send(second, 7)
        got = asyncio.ensure_future(second.arrived.get())
        told = asyncio.ensure_future(first.lost.get())
        await asyncio.wait((got, told), return_when=asyncio.FIRST_COMPLETED)
        if not got.done():
            first.send(second, 8)
        assert await got in (7, 8)
        second.send(first, 9)
        assert await first.arrived.get() == 9
        told.cancel()
        await one.endpoint.close()
        await two.endpoint.close()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
