"""The head as a child of a Dask scheduler: it tells the scheduler who is there and who waits, and ends with it.

    python -m flowengine.deploy.beside < SETTINGS > REPORTS      one JSON line of settings, one a report
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import sys

import msgspec

from flowengine.core.messages import Answered, Asked, Message, NodeEntry
from flowengine.deploy.reports import NodeSeen, Report, Waiting
from flowengine.runtime import process
from flowengine.runtime.head import HeadShell
from flowengine.runtime.settings import HeadProcessSettings

REPORT_EVERY_S = 0.1
READ_BYTES = 65_536
ASK_EVERY_S = 1.0
STORED_TOPIC = "store"
STORED_BYTES = ("used_bytes", "disk_bytes")
BUSY_STATES = ("leased", "blocked")


def is_busy(entry: NodeEntry) -> bool:
    """A node is busy while anybody has a worker of it, as an actor has all its life."""
    return entry.queued > 0 or any(state in BUSY_STATES for _, _, state, _ in entry.workers)


class BesideHead(HeadShell):
    """The head, with reports on stdout."""

    def _announce(self) -> None:
        super()._announce()
        self.stored: dict[str, bool] = {}  # address of a node: whether it has values that somebody refers to
        self.asked_s = 0.0
        loop = asyncio.get_running_loop()
        loop.add_reader(0, self._stdin_moved)
        with contextlib.suppress(OSError):  # a fork of the parent may hold the other end of stdin open
            loop.add_reader(os.pidfd_open(os.getppid()), self.ended.set)
        self.reporting = loop.create_task(self._report())

    def _stdin_moved(self) -> None:
        if not os.read(0, READ_BYTES):
            asyncio.get_running_loop().remove_reader(0)
            self.ended.set()

    async def _report(self) -> None:
        told = b""
        with contextlib.suppress(OSError):  # the parent is gone, or reads no more
            while True:
                self._ask_idle()
                line = msgspec.json.encode(self.now())
                if line != told:
                    told = line
                    await asyncio.to_thread(write_all, line + b"\n")
                await asyncio.sleep(REPORT_EVERY_S)

    def now(self) -> Report:
        """The state of the machine."""
        machine = self.machine
        nodes = {entry.node_id: NodeSeen(entry.total, is_busy(entry) or self.stored.get(entry.address, False))
                 for entry in machine.nodes()}
        waiting = [Waiting(one.sought.shape, one.sought.count, one.sought.run_us / 1e6)
                   for one in machine.slots.seekers.values()]
        return Report(self.endpoint.address, nodes, waiting)


    def _ask_idle(self) -> None:
        """Nodes do not tell the head what they store, so those that do nothing are asked now and then."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self.asked_s < ASK_EVERY_S:
            return
        self.asked_s = now_s
        entries = self.machine.nodes()
        self.stored = {entry.address: self.stored.get(entry.address, False) for entry in entries}
        for entry in entries:
            if entry.total and not is_busy(entry):
                self.endpoint.send(entry.address, Asked(0, STORED_TOPIC, None, "local"))

    def _on_batch(self, peer: str, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Answered) and message.topic == STORED_TOPIC:
                self.stored[peer] = any(amount for name, amount in message.content.items() if name in STORED_BYTES)
        super()._on_batch(peer, messages)


def write_all(line: bytes) -> None:
    """Write a line to stdout, however long."""
    while line:
        line = line[os.write(1, line) :]


def main() -> int:
    """Entry point of the process that the plugin starts."""
    logging.basicConfig(level=logging.WARNING, format="flowengine %(process)d %(levelname)s %(name)s: %(message)s")
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # lost peers are news for the machine alone
    gc.enable()
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, READ_BYTES)
        if not part:
            return 0
        line += part
    settings = msgspec.json.decode(line, type=HeadProcessSettings)
    code = process.run(BesideHead(settings, -1).run())
    shutil.rmtree(settings.state_dir, ignore_errors=True)  # it was told to end, so it is not started again
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
