"""What every process of the engine starts with: a loop, an endpoint for its messages, a way to be told to end."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.runtime import drive
from flowengine.runtime.child import run_and_exit
from flowengine.runtime.link import Endpoint, EndpointConfig, make_security

if TYPE_CHECKING:
    from flowengine.config import Config
    from flowengine.runtime.link import BulkStream
    from flowengine.runtime.settings import Tls, WorkerSettings

END_TOPIC = "end"  # asked of a node or a head: end, and all that you have started

OnBatch = Callable[[str, list[Any]], None]
OnLost = Callable[[str, str], None]
OnStream = Callable[[str, dict[str, Any], "BulkStream"], Awaitable[None]]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process listens, and what it shows to others."""

    host: str
    secret: bytes
    tls: Tls | None
    config: Config
    port: int = 0
    runs_code: bool = False  # of programs
    relay: str = ""  # scheme://host:port of a Dask scheduler that passes all on, where nothing else is reached


def place_of(settings: WorkerSettings) -> Place:
    """Where a worker listens."""
    return Place(host=settings.host, secret=settings.secret, tls=settings.tls, config=settings.config)


def new_endpoint(place: Place, on_batch: OnBatch, on_lost: OnLost, on_stream: OnStream | None = None) -> Endpoint:
    """An endpoint for the engine's messages, not started yet."""
    config = place.config
    return Endpoint(EndpointConfig(
        secret=place.secret,
        encode=drive.encode,
        decode=drive.decode,
        on_batch=on_batch,
        on_lost=on_lost,
        on_stream=on_stream,
        host=place.host,
        port=place.port,
        security=make_security(place.tls.certificate, place.tls.key, place.tls.authority) if place.tls else None,
        relay=place.relay,
        runs_code=place.runs_code,
        unacked_bytes_max=config.link_unacked_bytes_max,
        lost_after_s=config.link_lost_after_s,
        ping_every_s=max(config.heartbeat_s, config.suspect_after_s / 5),
        silent_after_s=config.suspect_after_s,
    ))


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run a process's main coroutine on the fastest loop there is; a second word to end does not disturb the end."""

    async def to_the_end() -> int:
        code = await main
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
        return code

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(to_the_end())


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop: uvloop's where that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def end_event() -> asyncio.Event:
    """Set when the process is told to end; SIGINT is the terminal's and means the same."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) == signal.SIG_IGN:  # a background job of a script
            continue
        loop.add_signal_handler(number, ended.set)
    return ended


def stacks() -> list[str]:
    """What each thread of this process does, as text; the main thread, which runs tasks, is the first.

    The frames of the launcher that it was forked from are left out.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    frames = sys._current_frames().items()
    for ident, frame in sorted(frames, key=lambda one: (one[0] != threading.main_thread().ident, one[0])):
        calls = traceback.extract_stack(frame)
        begin = max((at for at, call in enumerate(calls, 1) if call.name == run_and_exit.__name__), default=0)
        found.append(f"thread {names.get(ident, '?')}\n{''.join(traceback.format_list(calls[begin:]))}")
    return found


def wall_offset_s() -> float:
    """What turns the monotonic clock into the local time of day."""
    return time.time() - time.monotonic() + time.localtime().tm_gmtoff
