"""How documents of the page are gathered: once for all viewers, while somebody looks, not held up by the silent."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from flowengine.observe import gather
from flowengine.observe.gather import Gatherer
from tests.test_view import head, node, owner

NODE_S = 0.2


class FakeAsker:
    """Nodes that answer at once, but for those that are silent."""

    def __init__(self, *names: str) -> None:
        self.nodes = {name: node(name) for name in names}
        self.silent: set[str] = set()
        self.broken = 0  # so many rounds get nonsense
        self.asked: list[tuple[str, str]] = []

    async def ask_all(self, nodes: list[dict[str, Any]], topic: str, argument: Any = None) -> list[Any]:
        found = []
        for entry in nodes:
            name = entry["node_id"]
            self.asked.append((name, topic))
            if name in self.silent:
                await asyncio.Event().wait()
            told = self.nodes[name]
            lines = [f"{argument} was here"] if topic in ("story", "explain") else None
            nonsense, self.broken = topic == "seen" and self.broken > 0, self.broken - (topic == "seen")
            answers = {"seen": [{"workers": 5}] if nonsense else told.seen, "stats": told.stats,
                       "host": {**(told.host or {}), "clock_us": 5}}
            found.append(lines or answers.get(topic))
        return found


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(gather, "EVERY_S", 0.05)
    monkeypatch.setattr(gather, "UNWATCHED_S", 0.3)
    monkeypatch.setattr(gather, "NODE_S", NODE_S)


def gatherer(asker: FakeAsker) -> Gatherer:
    listed = [told.listed for told in asker.nodes.values()]
    return Gatherer(asker, lambda: (head(), listed), "me")  # type: ignore[arg-type]


def test_all_viewers_share_one_document():
    async def scene() -> None:
        asker = FakeAsker("n", "o")
        pages = gatherer(asker)
        found = await asyncio.gather(*(pages.latest() for _ in range(50)))
        assert {snapshot.number for snapshot in found} == {1}
        assert sorted(asker.asked) == sorted((name, topic) for name in "no" for topic in ("seen", "stats", "host"))
        pages.close()

    asyncio.run(scene())


def test_nothing_is_asked_when_nobody_looks_any_more(monkeypatch):
    async def scene() -> None:
        asker = FakeAsker("n")
        pages = gatherer(asker)
        assert asker.asked == []
        await pages.latest()
        assert pages._task is not None
        await asyncio.wait_for(pages._task, 5)
        count = pages.rounds
        assert len(asker.asked) == 3 * count
        monkeypatch.setattr(gather, "STALE_S", 0.0)
        assert (await pages.latest()).number == count + 1  # and again when somebody comes
        pages.close()

    asyncio.run(scene())


def test_a_silent_node_holds_nobody_up_and_is_shown_as_silent():
    async def scene() -> None:
        asker = FakeAsker("n", "o")
        asker.silent = {"o"}
        pages = gatherer(asker)
        began_s = time.monotonic()
        page = (await pages.latest()).page
        assert time.monotonic() - began_s < 5 * NODE_S
        assert [one["answered"] for one in page["nodes"]] == [True, False]
        assert page["totals"]["silent"] == 1
        began_s = time.monotonic()
        await pages.latest()
        assert time.monotonic() - began_s < NODE_S / 2  # from what is there
        pages.close()

    asyncio.run(scene())


def test_a_round_that_fails_is_not_the_last_one(caplog):
    async def scene() -> None:
        asker = FakeAsker("n")
        pages = gatherer(asker)
        asker.broken = 1
        assert (await asyncio.wait_for(pages.latest(), 5)).page["nodes"][0]["answered"]
        pages.close()

    asyncio.run(scene())
    assert "cannot be renewed" in caplog.text


def test_what_runs_for_long_has_the_time_since_it_was_first_seen():
    async def scene() -> None:
        asker = FakeAsker("n")
        pages = gatherer(asker)
        first = (await pages.latest()).page["nodes"][0]["workers"][0]["since_ms"]
        assert first == 100_000.0
        async with pages._came:
            await pages._came.wait_for(lambda: pages.rounds > 2)
        assert (await pages.latest()).page["nodes"][0]["workers"][0]["since_ms"] == first
        pages.close()

    asyncio.run(scene())


def test_what_ran_before_anybody_looked_is_shown_from_its_start():
    async def scene() -> None:
        asker = FakeAsker("n")
        asker.nodes["n"] = node("n", owner(node_id="n", pid=11, code="ab" * 16, age_s=70.0))
        pages = gatherer(asker)
        assert (await pages.latest()).page["nodes"][0]["workers"][0]["since_ms"] == 30_000.0
        pages.close()

    asyncio.run(scene())


def test_stories_of_all_nodes_are_put_together():
    async def scene() -> None:
        pages = gatherer(FakeAsker("n", "o"))
        assert await pages.story(" 12345678 ") == [
            "12345678 was here  (node n)", "12345678 was here  (node o)", *["12345678 was here"] * 2]
        assert await pages.story("1") == await pages.story("1" * 1_000) == []

    asyncio.run(scene())
