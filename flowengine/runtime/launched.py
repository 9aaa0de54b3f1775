"""The launcher process of a local engine, as its driver holds it. Light to import: it starts before all else."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from flowengine.config import Config
from flowengine.core.messages import Shape
from flowengine.errors import HeadLost
from flowengine.runtime.open_files import check_open_files
from flowengine.runtime.settings import LauncherReady, LauncherSettings, Tls

log = logging.getLogger(__name__)

END_TIMEOUT_S = 4.0
# The launcher imports what the program would import, and nothing else that lies in the working directory; the
# environment stays the user's own, since tasks may start other Pythons. Without the collector imports take a seventh
# less time; the launcher turns it on again when all is loaded.
BEGIN = """
import gc, json, sys
gc.disable()
sys.path[:] = json.loads(sys.argv.pop())
from importlib import import_module
sys.exit(import_module(sys.argv.pop()).main())
"""
LAUNCHER = "flowengine.runtime.launcher"


def command_of(module: str) -> list[str]:
    """How a process is started that runs main() of a module of ours."""
    return [sys.executable, "-P", "-c", BEGIN, module, json.dumps([path or os.getcwd() for path in sys.path])]


class DriverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What init() was asked for, checked."""

    config: Config
    total: Shape
    num_workers: int
    store_limit_bytes: int
    state_dir: str
    durable_url: str  # where what must outlive processes goes: state_dir, or the URL that was given for it
    secret: bytes
    log_to_driver: bool = True
    host: str = "127.0.0.1"
    job: str = ""  # the name of a resumable job
    relay: str = ""  # as Place.relay


class Launched:
    """The launcher process of a local engine (or, in a cluster, of a node without workers for this host's store)."""

    def __init__(self, settings: LauncherSettings) -> None:
        self.on_ready: Callable[[LauncherReady], None] | None = None
        self.on_end: Callable[[int], None] | None = None
        check_open_files(settings.num_workers, settings.extra_workers)
        self.process = subprocess.Popen(
            command_of(LAUNCHER), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: first_ready() tells
            self.process.stdin.write(msgspec.json.encode(settings) + b"\n")
            self.process.stdin.flush()

    def first_ready(self) -> LauncherReady:
        """Wait for the first line; raises HeadLost when the process ended instead."""
        line = self.process.stdout.readline() if self.process.stdout is not None else b""
        if not line:
            code = self.process.wait(timeout=END_TIMEOUT_S)
            raise HeadLost("the local engine ended while it started", exit_code=code)
        ready = msgspec.json.decode(line, type=LauncherReady)
        threading.Thread(target=self._watch, name="flowengine-launcher", daemon=True).start()
        return ready

    def _watch(self) -> None:
        """Later lines: the node was started again under another address."""
        stdout = self.process.stdout
        if stdout is None:
            return
        for line in stdout:
            try:
                ready = msgspec.json.decode(line, type=LauncherReady)
                if self.on_ready is not None:
                    self.on_ready(ready)
            except Exception:
                log.exception("the launcher said what cannot be read: %r", line)
        code = self.process.wait()
        if self.on_end is not None:
            self.on_end(code)

    def ask_to_end(self) -> None:
        """Its stdin reaches EOF."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def end(self) -> None:
        """Ask it to end, wait, kill what is left."""
        self.ask_to_end()
        try:
            self.process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def launch(settings: DriverSettings, session: str = "", head: str = "", tls: Tls | None = None) -> Launched:
    """Start a launcher: a whole local engine, or with `head` a node without workers for this host's store."""
    return Launched(
        LauncherSettings(
            host=settings.host,
            session=session or secrets.token_hex(4),
            secret=settings.secret,
            total=settings.total if not head else (),
            num_workers=settings.num_workers if not head else 0,
            store_limit_bytes=settings.store_limit_bytes,
            state_dir=settings.state_dir,
            durable_url=settings.durable_url,
            tls=tls,
            head=head,
            config=settings.config,
            log_to_driver=settings.log_to_driver,
            relay=settings.relay,
        )
    )
