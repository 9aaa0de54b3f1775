"""The node shell's part for objects: spills, restores, pulls and removes what the machine orders, one event each."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from flowengine.core.commands import (
    ObjectPulled,
    ObjectRestored,
    ObjectSpilled,
    PullFailed,
    PullObject,
    RemoveObject,
    RestoreFailed,
    RestoreObject,
    SealedInVain,
    SpillFailed,
    SpillObject,
)
from flowengine.core.messages import Message, ObjectSealed
from flowengine.errors import StoreFull
from flowengine.objects import spill
from flowengine.objects.transfer import PullError, Transfers

if TYPE_CHECKING:
    from flowengine.config import Config
    from flowengine.objects.segments import Segments

log = logging.getLogger(__name__)

DISK_THREADS = 2  # one reads while the other writes; more only make the disk seek

Step = Callable[[Message], None]


class Objects:
    """Performs the store commands of a node; on its loop."""

    def __init__(self, segments: Segments, transfers: Transfers, folder: str, config: Config) -> None:
        self.segments = segments
        self.transfers = transfers
        self.step: Step
        self.look_at_memory: Callable[[], None] = lambda: None
        self._folder = folder
        self._chunk_bytes = config.spill_chunk_bytes
        self._threads = ThreadPoolExecutor(DISK_THREADS, "disk")
        self._tasks: set[asyncio.Task[None]] = set()

    def disk_path(self, oid: bytes) -> str:
        """Where the object lies when it is on disk."""
        return os.path.join(self._folder, f"{oid.hex()}.lz4")

    def spill(self, command: SpillObject) -> None:
        """Move an object to disk."""
        self._begin(self._spill(command))

    def restore(self, command: RestoreObject) -> None:
        """Bring an object back from disk."""
        self._begin(self._restore(command))

    def pull(self, command: PullObject) -> None:
        """Copy an object from another node."""
        self._begin(self._pull(command))

    def remove(self, command: RemoveObject) -> None:
        """Drop an object that no living writer may keep warm."""
        if command.on_disk:
            spill.remove(self.disk_path(command.oid))
        else:
            self.segments.free(command.oid.hex(), command.file)

    def looked_at(self, message: Message) -> Message:
        """The message; an object that a process has sealed may have been replaced since then by another life of it."""
        if not isinstance(message, ObjectSealed) or self.segments.holds(message.oid.hex(), message.file):
            return message
        return SealedInVain(message.oid, message.size_bytes, message.file)

    def close(self) -> None:
        """Drop what is under way and what is on disk."""
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _lacks_memory(self) -> None:
        asyncio.get_running_loop().call_soon(self.look_at_memory)  # when what has failed was told

    def _begin(self, work: Coroutine[Any, Any, Message]) -> None:
        task = asyncio.get_running_loop().create_task(self._report(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report(self, work: Coroutine[Any, Any, Message]) -> None:
        self.step(await work)

    async def _in_thread(self, work: Callable[..., Any], *arguments: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def _spill(self, command: SpillObject) -> Message:
        oid = command.oid
        try:
            disk_bytes = await self._in_thread(
                spill.spill, self.segments.path(oid.hex()), command.size_bytes, self.disk_path(oid), self._chunk_bytes,
                command.file)
        except spill.ReaderBusy:
            return ObjectSpilled(oid, 0, busy=True)
        except OSError as error:
            return SpillFailed(oid, f"{error}", disk_full=spill.is_disk_full(error))
        except Exception as error:
            log.exception("spilling %s failed", oid.hex())
            return SpillFailed(oid, f"{type(error).__name__}: {error}")
        return ObjectSpilled(oid, disk_bytes)

    async def _restore(self, command: RestoreObject) -> Message:
        try:
            await self._in_thread(self._restore_in_thread, command)
        except StoreFull as error:
            self._lacks_memory()
            return RestoreFailed(command.oid, f"{error}", self.segments.free_bytes())
        except (OSError, RuntimeError, EOFError) as error:
            return RestoreFailed(command.oid, f"{error}")
        except Exception as error:
            log.exception("reading %s back failed", command.oid.hex())
            return RestoreFailed(command.oid, f"{type(error).__name__}: {error}")
        return ObjectRestored(command.oid)

    def _restore_in_thread(self, command: RestoreObject) -> None:
        segment = self.segments.create(command.oid.hex(), command.size_bytes)
        try:
            spill.restore(self.disk_path(command.oid), segment.view, self._chunk_bytes)
        except BaseException:
            segment.abort()
            raise
        segment.seal_copy()

    async def _pull(self, command: PullObject) -> Message:
        try:
            source = await self.transfers.pull(command.oid, command.size_bytes, command.nodes)
        except PullError as error:
            if isinstance(error.__cause__, StoreFull):
                self._lacks_memory()
            return PullFailed(command.oid, command.nodes, f"{error}", error.silent)
        except Exception as error:
            log.exception("pulling %s failed", command.oid.hex())
            return PullFailed(command.oid, command.nodes, f"{type(error).__name__}: {error}", command.nodes)
        return ObjectPulled(command.oid, source)
