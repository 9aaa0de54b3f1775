"""The live page as the head process has it: opened when it is first asked for, or at once where a port is given."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.core import head_seen
from flowengine.core.head import Head
from flowengine.errors import FlowError
from flowengine.observe.gather import Gatherer
from flowengine.observe.http import PageServer, token_of
from flowengine.observe.view import HeadTold
from flowengine.runtime.connection import page_path, write_private
from flowengine.runtime.visitor import Asker

if TYPE_CHECKING:
    from flowengine.runtime.link import Endpoint
    from flowengine.runtime.settings import HeadProcessSettings

log = logging.getLogger(__name__)


class PageFile(msgspec.Struct, frozen=True):
    """What the file of the page holds."""

    url: str
    port: int


class Page:
    """The page of one head; on the head's loop, and beside its machine."""

    def __init__(self, settings: HeadProcessSettings, endpoint: Endpoint, machine: Head) -> None:
        self.settings = settings
        self.asker = Asker(endpoint)
        self.machine = machine
        self.started_s = time.monotonic()
        self.gatherer = Gatherer(self.asker, self._tell, f"page of {endpoint.address}")
        self.server = PageServer(self.gatherer, token_of(settings.secret))
        self.metrics = PageServer(self.gatherer, "")

    def begin(self) -> None:
        """Open what the configuration asks for, and the page that an earlier life of this head had open."""
        config, before = self.settings.config, self._noted_port()
        if config.page_port or before:
            self._try(self.url)
        if config.metrics_port:
            self._try(lambda: self.metrics.open(config.metrics_port))

    def url(self) -> str:
        """The page's address with its token; opens it. Raises FlowError when the port cannot be had."""
        if not self.server.port:
            self._open()
            url = self.server.url
            write_private(self._path(), msgspec.json.encode(PageFile(url, self.server.port)))
            log.info("the page of session %s is served at port %d", self.settings.session, self.server.port)
        return self.server.url

    async def close(self) -> None:
        """Serve no more."""
        self.gatherer.close()
        await self.server.close()
        await self.metrics.close()

    def _open(self) -> None:
        port = self.settings.config.page_port
        before = self._noted_port()
        if port or not before:
            self.server.open(port)
            return
        try:
            self.server.open(before)
        except FlowError:
            self.server.open(0)  # somebody else has the port of the last life: better another than none

    def _path(self) -> Path:
        return page_path(self.settings.state_dir, self.settings.session)

    def _noted_port(self) -> int:
        try:
            return msgspec.json.decode(self._path().read_bytes(), type=PageFile).port
        except (OSError, msgspec.MsgspecError):
            return 0

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (FlowError, OSError) as error:  # the head does without
            log.warning("%s", error)

    def _tell(self) -> tuple[HeadTold, list[dict[str, Any]]]:
        """What the head knows now, and its nodes."""
        machine, now = self.machine, time.monotonic()
        head = HeadTold(
            session=self.settings.session, address=machine.settings.me, host=self.settings.host, pid=os.getpid(),
            now_s=now, started_s=self.started_s, counters=dict(machine.counters), seekers=head_seen.seekers(machine),
            resources=head_seen.resources(machine), bundles=head_seen.bundles(machine),
            failures=head_seen.failures(machine, now))
        return head, [msgspec.to_builtins(msgspec.structs.asdict(entry)) for entry in machine.nodes()]
