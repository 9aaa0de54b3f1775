"""What the tests of processes share: a launcher, and a driver of a few lines that talks to its node."""
from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from flowengine.config import Config
from flowengine.core.messages import Answered, Asked, Joined, LeaseDemand, LeaseGranted, Message, Welcome
from flowengine.runtime import process
from flowengine.runtime.settings import LauncherReady, LauncherSettings, Tls

PROJECT = pathlib.Path(__file__).resolve().parents[2]
PATIENCE_S = 30.0
ONE_CPU = (("CPU", 1.0),)

M = TypeVar("M", bound=Message)
T = TypeVar("T")


def run(scenario: Callable[[], Awaitable[T]]) -> T:
    """Play a scenario on a loop of its own, for a minute at most."""

    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await scenario()

    return asyncio.run(bounded())


def launcher_settings(state_dir: pathlib.Path, **changes: Any) -> LauncherSettings:
    defaults: dict[str, Any] = {
        "host": "127.0.0.1", "session": os.urandom(4).hex(), "secret": os.urandom(32), "total": (("CPU", 2.0),),
        "num_workers": 2, "store_limit_bytes": 64 << 20, "state_dir": str(state_dir), "config": Config(),
        "worker_module": "tests.runtime.stub_worker"}
    return LauncherSettings(**{**defaults, **changes})


class Launched:
    """A launcher as a child of the test, and what it says."""

    def __init__(self, settings: LauncherSettings) -> None:
        self.settings = settings
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flowengine.runtime.launcher"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(PROJECT)}, cwd=PROJECT)
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(settings) + b"\n")
        self.process.stdin.flush()

    def ready(self) -> LauncherReady:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the launcher ended with {self.process.wait()}"
        return msgspec.json.decode(line, type=LauncherReady)

    def close_stdin(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout=PATIENCE_S)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.close_stdin()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.wait(timeout=PATIENCE_S)


class Driver:
    """Joins a node as a driver does; `next(kind)` is the next message of that kind."""

    def __init__(self, settings: LauncherSettings) -> None:
        self.settings = settings
        self.arrived: asyncio.Queue[Message] = asyncio.Queue()
        self.kept: list[Message] = []
        self.lost: asyncio.Queue[str] = asyncio.Queue()

    async def join(self, node: str, tls: Tls | None = None) -> Welcome:
        self.node = node
        place = process.Place(host="127.0.0.1", secret=self.settings.secret, tls=tls, config=self.settings.config)
        self.endpoint = process.new_endpoint(place, self._on_batch, lambda peer, reason: self.lost.put_nowait(peer))
        await self.endpoint.start()
        self.tell(Joined(self.endpoint.address, os.getpid(), "driver"))
        return await self.next(Welcome)

    def tell(self, message: Message, to: str = "") -> None:
        self.endpoint.send(to or self.node, message, True)

    async def next(self, kind: type[M]) -> M:
        for at, message in enumerate(self.kept):
            if isinstance(message, kind):
                del self.kept[at]
                return message
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self.arrived.get()
                if isinstance(message, kind):
                    return message
                self.kept.append(message)

    async def lease(self, wanted_total: int) -> LeaseGranted:
        self.tell(LeaseDemand(ONE_CPU, (), wanted_total, 0, 0))
        return await self.next(LeaseGranted)

    async def ask(self, topic: str, argument: Any = None, scope: str = "cluster") -> Any:
        self.tell(Asked(1, topic, argument, scope))
        return (await self.next(Answered)).content

    def _on_batch(self, peer: str, messages: list[Message]) -> None:
        for message in messages:
            self.arrived.put_nowait(message)


def gone(pids: list[int]) -> bool:
    """Whether these processes end within the patience of a test; not being their parent, it has to look."""
    end = time.monotonic() + PATIENCE_S
    watched = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            watched.append(os.pidfd_open(pid))
    import select

    try:
        return all(select.select([fd], [], [], max(0.0, end - time.monotonic()))[0] for fd in watched)
    finally:
        for fd in watched:
            os.close(fd)
