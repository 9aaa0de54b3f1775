"""The node beside a Dask worker: a child process of the worker's, with the worker's share of the host."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import msgspec

from flowengine.api import FILE_URL, check_folder, cpu_count, default_state_dir, memory_bytes, store_bytes
from flowengine.deploy.seeds import NodeSeed
from flowengine.errors import FlowError
from flowengine.options import resource_amounts
from flowengine.runtime import gpus
from flowengine.runtime.launched import Launched
from flowengine.runtime.settings import LauncherReady, LauncherSettings, Tls

log = logging.getLogger(__name__)

STARTS_MAX = 5  # of launchers that end at once
AGAIN_S = 0.5
QUICK_S = 5.0  # one that lived shorter counts as a failed start


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What a Dask worker has of its host."""

    host: str  # as other hosts reach it
    threads: int
    memory_bytes: int  # 0: no limit
    local_directory: str
    resources: dict[str, float]  # as `dask worker --resources`
    tls: Tls | None


def launcher_settings(share: Share, told: NodeSeed) -> LauncherSettings:
    """What the launcher of the node is told; raises BadValue when its folder is no use or it has fewer GPUs."""
    seed, config = told.seed, told.seed.config
    has_bytes = share.memory_bytes or int(memory_bytes() * min(1.0, share.threads / cpu_count()))
    folder = os.path.join(share.local_directory, "flowengine")
    check_folder(folder)
    resources = {name: amount for name, amount in share.resources.items() if name not in ("CPU", "memory")}
    gpu_count = resources.pop("GPU", 0.0)
    gpus.names_here(gpu_count)
    total = (("CPU", float(share.threads)), ("memory", float(has_bytes)), ("GPU", float(gpu_count)),
             *resource_amounts("resources of the worker", resources))
    return LauncherSettings(
        host=share.host, session=seed.session, secret=seed.secret,
        total=tuple(sorted((name, amount) for name, amount in total if amount > 0)), num_workers=share.threads,
        store_limit_bytes=store_bytes(int(has_bytes * config.store_fraction), has_bytes / memory_bytes()),
        state_dir=folder, durable_url=seed.durable_url or FILE_URL + default_state_dir(), tls=share.tls,
        head=told.head, config=config, log_to_driver=seed.log_to_driver)


class NodeBeside:
    """Keeps a launcher with a node running; tell(node_id, reason) is called from a thread of its own."""

    def __init__(self, settings: LauncherSettings, tell: Callable[[str, str], None]) -> None:
        self.settings = settings
        self.tell = tell
        self.ending = threading.Event()
        self.lock = threading.Lock()
        self.launched: Launched | None = None
        self.thread = threading.Thread(target=self._keep, name="flowengine-node", daemon=True)

    def start(self) -> None:
        """Return at once; what becomes of it is told."""
        self.thread.start()

    def _keep(self) -> None:
        failed, reason = 0, ""
        while not self.ending.is_set():
            if failed > STARTS_MAX:
                self.tell("", f"{reason}, {failed} times in a row; the log of the Dask worker tells more")
                return
            began_s = time.monotonic()
            try:
                reason = self._live_once()
            except (OSError, FlowError) as error:
                reason = str(error)
            failed = failed + 1 if time.monotonic() - began_s < QUICK_S else 0
            log.debug("the node beside this Dask worker: %s", reason)
            self.ending.wait(AGAIN_S)

    def _live_once(self) -> str:
        """One launcher from its start to its end; gives how it ended."""
        ended = threading.Event()
        with self.lock:
            if self.ending.is_set():
                return "it was told to end"
            launched = self.launched = Launched(self.settings)
        launched.on_ready = self._ready
        launched.on_end = lambda code: ended.set()
        self._ready(launched.first_ready())
        ended.wait()
        return f"the launcher ended with exit code {launched.process.returncode}"

    def _ready(self, ready: LauncherReady) -> None:
        self.tell(ready.node_id, "")

    def ask_to_end(self) -> None:
        """Have the node and all that it has started end soon, whatever becomes of this process."""
        self.ending.set()
        with self.lock:
            if self.launched is not None:
                self.launched.ask_to_end()

    def end(self) -> None:
        """The same; return when they are gone."""
        self.ask_to_end()
        if self.launched is not None:
            self.launched.end()
        self.thread.join()
