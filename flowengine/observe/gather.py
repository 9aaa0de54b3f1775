"""Gathers what the page shows, once a second and only while somebody looks; all who look share it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.observe.view import HeadTold, NodeTold, document, objects_of, runs

if TYPE_CHECKING:
    from flowengine.runtime.visitor import Asker

log = logging.getLogger(__name__)

EVERY_S = 1.0
UNWATCHED_S = 5.0  # nobody looked for so long: then nothing is asked any more
PATIENCE_S = 10.0
NODE_S = 2.0  # within which a node has to answer
STALE_S = 3.5  # an older document is not shown to somebody who comes now
BATCHES_KEPT = 60  # of runs, one a second
STORY_LINES_MAX = 500
OBJECTS_MAX = 30
ID_CHARS = (8, 200)

HeadTells = Callable[[], tuple[HeadTold, list[dict[str, Any]]]]
Open = dict[tuple[str, str, int], float]  # worker, task, attempt -> since when it was seen, ms


class Snapshot(msgspec.Struct, kw_only=True):
    """One document, and its form on the wire."""

    number: int
    made_s: float
    page: dict[str, Any]
    blob: bytes


class Gatherer:
    """Asks the nodes on behalf of all viewers; on one loop."""

    def __init__(self, asker: Asker, head_tells: HeadTells, reader: str) -> None:
        self.asker = asker
        self.head_tells = head_tells
        self.reader = reader
        self.rounds = 0
        self._snapshot: Snapshot | None = None
        self._batches: deque[tuple[int, list[tuple[Any, ...]]]] = deque(maxlen=BATCHES_KEPT)
        self._open: Open = {}
        self._looked_s = 0.0
        self._came = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def latest(self) -> Snapshot:
        """The newest document; waits only when there is none that is fresh."""
        self._looked_s = time.monotonic()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        found = self._snapshot
        if found is not None and time.monotonic() - found.made_s < STALE_S:
            return found
        async with asyncio.timeout(PATIENCE_S), self._came:
            await self._came.wait_for(lambda: self._snapshot is not None and self._snapshot is not found)
        assert self._snapshot is not None
        return self._snapshot

    def runs_after(self, number: int) -> tuple[int, list[tuple[Any, ...]]]:
        """The runs that came with documents after this one, and the number of the last."""
        found = [run for at, batch in self._batches if at > number for run in batch]
        return self.rounds, found

    async def story(self, name: str) -> list[str]:
        """What is known of a task, object, actor, worker, node or group; empty when that is nothing."""
        name = name.strip()
        if not ID_CHARS[0] <= len(name) <= ID_CHARS[1]:
            return []
        _, listed = self.head_tells()
        told, why = await asyncio.gather(self.asker.ask_all(listed, "story", name),
                                         self.asker.ask_all(listed, "explain", name))
        lines = [f"{line}  (node {entry['node_id']})" for entry, lines in zip(listed, told, strict=True)
                 for line in lines or ()]
        texts = [text for texts in why for text in texts or ()]
        return [*sorted(dict.fromkeys(lines))[-STORY_LINES_MAX:], *texts]

    async def objects(self) -> dict[str, Any]:
        """The largest objects; every process looks through all that it owns, so this is asked for by hand only."""
        _, listed = self.head_tells()
        found = objects_of(await self.asker.ask_all(listed, "memory"))
        return {"objects": found["objects"][:OBJECTS_MAX], "functions": found["functions"][:OBJECTS_MAX]}

    def close(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while time.monotonic() - self._looked_s < UNWATCHED_S:
            began_s = time.monotonic()
            try:
                await self._gather()
            except Exception:  # the next round may do better, and whoever waits is told by the time limit
                log.exception("the page cannot be renewed")
            await asyncio.sleep(max(EVERY_S / 10, EVERY_S - (time.monotonic() - began_s)))

    async def _gather(self) -> None:
        _, listed = self.head_tells()
        told = await asyncio.gather(*(self._node(entry) for entry in listed))
        head, now_listed = self.head_tells()  # who was lost meanwhile is not shown
        alive = {entry["address"] for entry in now_listed}
        told = [node for node in told if node.listed["address"] in alive]
        self.rounds += 1
        page = document(head, told, self.rounds)
        self._note_open(page)
        self._batches.append((self.rounds, runs(told)))
        snapshot = Snapshot(number=self.rounds, made_s=time.monotonic(), page=page, blob=msgspec.json.encode(page))
        async with self._came:
            self._snapshot = snapshot
            self._came.notify_all()

    async def _node(self, entry: dict[str, Any]) -> NodeTold:
        try:
            async with asyncio.timeout(NODE_S):
                (host, ahead_us), (seen,), (stats,) = await asyncio.gather(
                    self._host(entry), self.asker.ask_all([entry], "seen", self.reader),
                    self.asker.ask_all([entry], "stats"))
        except TimeoutError:  # it is shown as silent, and holds nobody up
            return NodeTold(listed=entry)
        return NodeTold(listed=entry, seen=seen, stats=stats, host=host, ahead_us=ahead_us)

    async def _host(self, entry: dict[str, Any]) -> tuple[dict[str, Any] | None, int]:
        """What a node's host is used for, and how far its clock is ahead of this one."""
        asked_s = time.monotonic()
        (host,) = await self.asker.ask_all([entry], "host")
        return host, round(host["clock_us"] - (asked_s + time.monotonic()) / 2 * 1e6) if host else 0

    def _note_open(self, page: dict[str, Any]) -> None:
        """Since when each worker is in its task, or was seen in it: what runs long is not among the runs that ended."""
        before, self._open = self._open, {}
        for node in page["nodes"]:
            for worker in node["workers"]:
                worker["since_ms"] = 0.0
                if worker["task"]:
                    key = worker["worker_id"], worker["task"], worker["attempt"]
                    began_ms = page["now_ms"] - 1e3 * max(0.0, worker["age_s"])
                    worker["since_ms"] = self._open[key] = before.get(key, began_ms)
