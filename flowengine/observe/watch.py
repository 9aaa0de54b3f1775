"""`flow top`, `flow memory` and `flow logs`: what a cluster does now, what takes its memory, what its workers print."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live

from flowengine.errors import BadValue, HeadLost
from flowengine.observe import tables
from flowengine.observe.view import HeadTold, NodeTold, document, objects_of
from flowengine.runtime.connection import Connection
from flowengine.runtime.visitor import Visitor
from flowengine.runtime.worker_logs import TASK_DIGITS

FIRST_LOOK_S = 0.5  # between the two looks that shares and rates take
FOLLOW_S = 0.3
INTERVAL_S_MIN = 0.1
NAME_DIGITS_MIN = 4
LINES_MAX = 1_000_000
DONE = ("tasks_executed", "calls_executed")


# --- top ----------------------------------------------------------------------------------------------------------


def top(connection: Connection, interval_s: float, once: bool, plain: bool) -> int:
    """Show the cluster again and again until q or ctrl-c, or once."""
    if not interval_s >= INTERVAL_S_MIN:
        raise BadValue(f"--interval must be at least {INTERVAL_S_MIN:g} s, not {interval_s:g}")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_top(connection, interval_s, once, plain))
    return 0


async def _top(connection: Connection, interval_s: float, once: bool, plain: bool) -> None:
    out = Console(highlight=False)
    async with Visitor(connection) as visitor:
        before = await look(visitor)
        await asyncio.sleep(FIRST_LOOK_S)
        now = with_rates(await look(visitor), before)
        if plain:
            print(as_json(now))
            return
        if once or not out.is_terminal:
            out.print(tables.top(now, out.width))
            return
        with keys() as pressed, Live(tables.top(now, out.width), console=out, screen=True, auto_refresh=False) as live:
            while not await pressed.wait_for_q(interval_s):
                before, now = now, await look(visitor)
                now = with_rates(now, before)
                live.update(tables.top(now, out.width), refresh=True)


async def looked(connection: Connection) -> dict[str, Any]:
    """One document of a cluster."""
    async with Visitor(connection) as visitor:
        return await look(visitor)


def as_json(found: Any) -> str:
    """A document for scripts."""
    return msgspec.json.encode(found).decode()


async def look(visitor: Visitor) -> dict[str, Any]:
    """One document of the cluster as the live page has it."""
    nodes: list[dict[str, Any]] = await visitor.ask_head("nodes")
    counters, waiting, hosts, seen, stats = await asyncio.gather(
        visitor.ask_head("stats"), visitor.ask_head("bundles.waiting"), visitor.ask_all(nodes, "host"),
        visitor.ask_all(nodes, "seen"), visitor.ask_all(nodes, "stats"))
    told = [NodeTold(listed=entry, host=host, seen=one, stats=counted)
            for entry, host, one, counted in zip(nodes, hosts, seen, stats, strict=True)]
    connection, now_s = visitor.connection, time.time()
    head = HeadTold(
        session=connection.session, address=connection.address, host="", pid=0, now_s=now_s, started_s=now_s,
        counters=counters or {}, seekers=waiting or [], resources=[], bundles=[], failures=[])
    return document(head, told, 0)


def with_rates(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The newer of two documents, with how much was done between them per second."""
    took_s = max(1e-3, (now["now_ms"] - before["now_ms"]) / 1e3)
    counters = now["totals"]["counters"], before["totals"]["counters"]
    now["rates"] = {name: max(0.0, counters[0].get(name, 0) - counters[1].get(name, 0)) / took_s for name in DONE}
    runs = {row["name"]: row["runs"] for row in before["functions"]}
    for row in now["functions"]:
        row["rate"] = max(0.0, row["runs"] - runs.get(row["name"], row["runs"])) / took_s
    return now


class Keys:
    """What was typed while a screen is shown."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    def typed(self) -> None:
        """Something was."""
        if sys.stdin.read(1) in ("q", "Q", "\x1b", ""):
            self.left.set()

    async def wait_for_q(self, limit_s: float) -> bool:
        """Whether q was typed within this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.left.wait()
        return self.left.is_set()


@contextlib.contextmanager
def keys() -> Iterator[Keys]:
    """While the block runs keys are read one by one, where there are any."""
    found = Keys()
    if not sys.stdin.isatty():
        yield found
        return
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, found.typed)
    try:
        yield found
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


# --- memory -------------------------------------------------------------------------------------------------------


def memory(connection: Connection, group: str, limit: int, plain: bool) -> int:
    """Show which objects take the memory and who holds them."""
    if limit < 1:
        raise BadValue(f"--limit must be at least 1, not {limit}")
    found = asyncio.run(_memory(connection))
    if plain:
        found["not_listed"] += len(found["objects"][limit:])
        found["objects"] = found["objects"][:limit]
        print(as_json(found))
    else:
        out = Console(highlight=False)
        out.print(tables.memory(found, group, limit, out.width))
    return 0


async def _memory(connection: Connection) -> dict[str, Any]:
    async with Visitor(connection) as visitor:
        nodes: list[dict[str, Any]] = await visitor.ask_head("nodes")
        told = await visitor.ask_all(nodes, "memory")
    return objects_of(told)


# --- logs ---------------------------------------------------------------------------------------------------------


def logs(connection: Connection, name: str, lines_max: int, follow: bool, plain: bool) -> int:
    """Print what workers have printed: of all, or of one worker, actor or task."""
    if not 0 <= lines_max <= LINES_MAX:
        raise BadValue(f"--lines must be from 0 to {LINES_MAX}, not {lines_max}")
    if name and len(name) < NAME_DIGITS_MIN:
        raise BadValue(f"{name!r} is too short to name a worker, an actor or a task: give at least {NAME_DIGITS_MIN} "
                       "characters")
    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(_logs(connection, name.lower(), lines_max, follow, plain))
    return 0


async def _logs(connection: Connection, name: str, lines_max: int, follow: bool, plain: bool) -> int:
    places: dict[str, int] = {}
    found: list[dict[str, Any]] = []
    async with Visitor(connection) as visitor:
        meant = await meant_by(visitor, name)
        is_known = bool(meant)
        first = True
        while True:
            try:
                nodes = await visitor.ask_head("nodes")
            except HeadLost:
                if first or not visitor.session_is_over:
                    raise
                break
            told = await visitor.ask_all(nodes, "printed", {"places": places, "last": first})
            found = [line for answer in told for one in answer or () for line in lines_of(one, places)]
            found = [line for line in found if is_meant(line, name, meant)]
            found.sort(key=lambda line: str(line["time"]))
            is_known = is_known or bool(found)
            show(found[-lines_max:] if first and lines_max else [] if first else found, plain)
            first = False
            if not follow:
                break
            await asyncio.sleep(FOLLOW_S)
    if name and not is_known:
        print(f"nothing is known of a worker, actor or task {name}, or it has printed nothing", file=sys.stderr)
        return 1
    return 0


async def meant_by(visitor: Visitor, name: str) -> list[str]:
    """The actors and workers of this name, as lines tell them."""
    if not name:
        return []
    found = await look(visitor)
    actors = [one["id"][:TASK_DIGITS] for one in found["actors"]
              if one["id"].startswith(name) or name in (one["name"].lower(), one["named"].lower())]
    named = [worker["worker_id"] for node in found["nodes"] for worker in node["workers"]
             if worker["worker_id"].startswith(name) or str(worker["pid"]) == name]
    return [*actors, *named]


def lines_of(one: dict[str, Any], places: dict[str, int]) -> Iterator[dict[str, Any]]:
    """The lines in a node's answer about one worker; where to go on is noted."""
    places[one["worker_id"]] = one["place"]
    for line in one["text"].removesuffix("\n").split("\n"):
        yield {"worker_id": one["worker_id"], "pid": one["pid"], "time": line[:12], "stream": line[13:16].strip(),
               "task": line[17:29], "actor": line[30:42], "text": line[43:]}


def is_meant(line: dict[str, Any], name: str, meant: list[str]) -> bool:
    """Whether the line is of what was named."""
    return (not name or line["actor"] in meant or str(line["pid"]) == name
            or str(line["worker_id"]).startswith(name)
            or any(str(line[one]).startswith(name[:TASK_DIGITS]) for one in ("task", "actor")))


def show(lines: list[dict[str, Any]], plain: bool) -> None:
    """Print lines, whole, however long they are."""
    for line in lines:
        task = "" if line["task"].startswith("-") else f" {line['task']}"
        print(as_json(line) if plain else f"{line['time']} {line['worker_id']}{task} {line['text']}")
    sys.stdout.flush()
