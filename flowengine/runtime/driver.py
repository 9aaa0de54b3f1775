"""The driver's session: starts the local engine or joins a cluster, shows what workers print, and ends it all."""

from __future__ import annotations

import asyncio
import atexit
import logging
import sys
import threading
import time
from typing import Any

import psutil

from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.errors import FlowError
from flowengine.refs import Current
from flowengine.runtime.connection import Connection
from flowengine.runtime.session import Session
from flowengine.runtime.launched import DriverSettings, Launched, launch
from flowengine.runtime.settings import LauncherReady

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0


class DriverSession(Session):
    """The engine inside of the user's program."""

    role = "driver"

    def __init__(self, settings: DriverSettings, connection: Connection | None, launched: Launched | None) -> None:
        self.settings = settings
        self.connection = connection
        self.launched = launched
        secret = connection.secret_bytes if connection is not None else settings.secret
        super().__init__(settings.config, secret, connection.tls if connection is not None else None, settings.host)
        if launched is not None:
            launched.on_ready = self.node_restarted
        if settings.log_to_driver:
            self.log_sink = show_log

    def start(self) -> None:
        """Bring the engine up and join it."""
        try:
            self.open(self._node_to_join())
        except BaseException:
            self.close()
            if self.launched is not None:
                self.launched.end()
            raise
        Current.session = self
        self.guard_interrupts()
        atexit.register(self.shutdown)

    def _node_to_join(self) -> str:
        if self.launched is not None:
            return self.launched.first_ready().node
        assert self.connection is not None
        return self._local_node(self.connection)

    def _local_node(self, connection: Connection) -> str:
        """The node of this host in a cluster; where there is none, one without workers is started for its store."""
        local = local_addresses()
        self.thread.start()
        nodes = self.ask_head(connection)
        for entry in nodes:
            if entry["host"] in local:
                return str(entry["address"])
        self.launched = launch(self.settings, connection.session, connection.address, connection.tls)
        self.launched.on_ready = self.node_restarted
        return self.launched.first_ready().node

    def ask_head(self, connection: Connection) -> list[dict[str, Any]]:
        """The nodes that the head knows; waits until there is one."""
        async def begin() -> None:
            await self.endpoint.start()
            await self.endpoint.connect(connection.address)

        asyncio.run_coroutine_threadsafe(begin(), self.loop).result(timeout=START_TIMEOUT_S)
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            nodes: list[dict[str, Any]] = self.ask(connection.address, "nodes")
            if nodes or time.monotonic() > end:
                return nodes
            threading.Event().wait(0.2)

    def open(self, node: str) -> None:
        """As every session; a thread and an endpoint may run already."""
        super().open(node)
        self.values.durable_url = f"file://{self.settings.state_dir}/durable"

    def node_restarted(self, ready: LauncherReady) -> None:
        """The launcher started the node or the head again."""
        self.head = ready.head
        if self.closed or ready.node == self.node:
            return
        self.node = ready.node
        self.joined = type(self.joined)()
        self.hello()
        welcome = self.joined.result(timeout=self.config.connect_timeout_s)
        old = self.values
        self.enter(welcome)
        self.values.durable_url = f"file://{self.settings.state_dir}/durable"
        self.step(s.NodeMoved(ready.node, ready.node_id))
        old.node_moved()

    def shutdown(self) -> None:
        """End the engine; harmless when it has ended."""
        if self.closed:
            return
        atexit.unregister(self.shutdown)
        self.unguard_interrupts()
        try:
            self.ask(self.node, "logs", scope="local", timeout_s=1.0)
        except FlowError:
            log.debug("the node did not answer before the end")
        self.close()
        if self.launched is not None:
            self.launched.end()


def local_addresses() -> set[str]:
    """Addresses of this host."""
    found = {"localhost"}
    for addresses in psutil.net_if_addrs().values():
        found.update(address.address for address in addresses)
    return found


def show_log(message: m.LogLines) -> None:
    """Print what a worker printed, on the same stream."""
    stream = sys.stdout if message.stream == "out" else sys.stderr
    try:
        stream.write("".join(f"({message.source}) {line}\n" for line in message.lines))
        stream.flush()
    except (OSError, ValueError):
        return  # the program has closed its stream
