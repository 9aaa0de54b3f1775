"""The one loop that all shells share: an event goes into the machine, the commands that come out are performed.

Owns the lock of the machine. Does not own the endpoint: the shell opens and closes that.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from flowengine.core.commands import Command, Send, SetTimer
from flowengine.core.messages import WIRE, Message, PeerLost

log = logging.getLogger(__name__)

LAZY_S = 0.001  # what may wait for more waits so long at most
SHOWN_CHARS_MAX = 2_000  # of an event that a machine failed on

Perform = Callable[[Any], None]
OnBug = Callable[[Message, BaseException], None]

_ENCODER = msgspec.msgpack.Encoder()
_ANY_OF_WIRE: Any = functools.reduce(operator.or_, WIRE)
_DECODER: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list[_ANY_OF_WIRE])

encode: Callable[[Sequence[Message]], bytes] = _ENCODER.encode
"""A batch of messages as one frame."""


def decode(frame: bytes | bytearray | memoryview) -> list[Message]:
    """The batch in a frame; raises msgspec.DecodeError for what no process of this version has written."""
    return _DECODER.decode(frame)


class Machine(Protocol):
    """What Node, Head, Owner and Executor have in common."""

    def handle(self, event: Any, now: float, sender: str = "") -> list[Command]:
        """Decide what an event leads to."""


class Sender(Protocol):
    """What a drive needs of an endpoint."""

    def send(self, to: str, message: Message, urgent: bool) -> None:
        """Queue a message; any thread may call it."""

    def flush(self) -> None:
        """Write out what is queued."""


def log_bug(event: Message, error: BaseException) -> None:
    """What is done about an exception in a machine unless the shell knows better: tell it and go on."""
    log.error("a machine failed on %s", repr(event)[:SHOWN_CHARS_MAX], exc_info=error)


class Drive:
    """Hands events of any thread to one machine, one at a time, and performs its commands in their order."""

    def __init__(self, machine: Machine, on_bug: OnBug = log_bug, lazy_s: float | None = LAZY_S) -> None:
        """lazy_s: how long lazy messages wait at most; None: until the next batch, or a thread blocks and flushes."""
        self.machine = machine
        self._lazy_s = lazy_s
        self.lock = threading.RLock()
        self.perform: dict[type, Perform] = {Send: self._unattached, SetTimer: self._set_timer}
        self._handle = machine.handle
        self._on_bug = on_bug
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._flush: Callable[[], None] = _nothing
        self._queued = False  # something was sent in this step that should not wait
        self._lazily_queued = False  # something waits for the next flush, which is scheduled
        self._later: deque[tuple[Any, str]] = deque()
        self._stepping = False

    def attach(self, endpoint: Sender, loop: asyncio.AbstractEventLoop, me: str | None = None) -> None:
        """Say where messages and timers go; called on the thread of the loop, before the first step.

        What one step or batch sends to a peer goes out as one frame at its end. me: the address of a machine that
        says things to itself; it hears them after the step.
        """
        send = endpoint.send

        def perform_send(command: Send) -> None:
            if command.to == me:
                self._later.append((command.message, me))
                return
            send(command.to, command.message, False)
            if not command.lazy:
                self._queued = True
            elif not self._lazily_queued:
                self._lazily_queued = True
                if self._lazy_s is not None:
                    self._soon(self._lazy_s, self._flush_lazily)

        self.perform[Send] = perform_send
        self._flush = endpoint.flush
        self._loop = loop
        self._loop_thread = threading.get_ident()

    def step(self, event: Any, sender: str = "") -> None:
        """Hand one event to the machine; a step within a step (by a command or a finaliser) is done after it."""
        with self.lock:
            if self._stepping:
                self._later.append((event, sender))
                return
            self._stepping = True
            try:
                self._do(event, self._handle(event, time.monotonic(), sender))
            except Exception as error:
                self._on_bug(event, error)
            finally:
                self._stepping = False
            if self._later or self._queued:
                self._finish()

    def batch(self, peer: str, messages: Sequence[Any]) -> None:
        """Hand over what one peer sent: on_batch of the endpoint."""
        with self.lock:
            self._later.extend([(message, peer) for message in messages])
            if not self._stepping:
                self._queued = self._queued or self._lazily_queued
                self._finish()

    def begin(self, event: Any, commands: Sequence[Command]) -> None:
        """Perform commands that came from a machine otherwise than by an event (its start); event: for the log."""
        with self.lock:
            self._stepping = True
            try:
                self._do(event, commands)
            finally:
                self._stepping = False
            self._finish()

    def lost(self, peer: str, reason: str, ended: bool = False) -> None:
        """Hand over the end of a peer: on_lost of the endpoint; ended: as its has_ended()."""
        self.step(PeerLost(peer, reason, ended), peer)

    def _do(self, event: Any, commands: Sequence[Command]) -> None:
        perform, rest = self.perform, iter(commands)
        while True:
            try:
                for command in rest:
                    perform[type(command)](command)
                return
            except Exception as error:  # one command that fails must not take those after it with it
                self._on_bug(event, error)

    def _finish(self) -> None:
        while self._later:  # looked at after the flag was cleared: what a finaliser adds at any moment is not left
            self._stepping = True
            try:
                self._drain()
            finally:
                self._stepping = False
        if self._queued:
            self._queued = False
            if self._lazy_s is None:
                self._lazily_queued = False
            self._flush()

    def flush_lazily(self) -> None:
        """Write out what waits for more: a thread is about to block."""
        if self._lazily_queued:
            self._flush_lazily()

    def _drain(self) -> None:
        later, handle, clock = self._later, self._handle, time.monotonic
        while later:
            event, sender = later.popleft()
            try:
                self._do(event, handle(event, clock(), sender))
            except Exception as error:
                self._on_bug(event, error)

    def _set_timer(self, command: SetTimer) -> None:
        self._soon(command.delay_s, self.step, command.event)

    def _soon(self, delay_s: float, action: Callable[..., object], *arguments: object) -> None:
        loop = self._loop
        if loop is None:
            raise RuntimeError("a drive must be attached to a loop before its machine sets timers")
        if threading.get_ident() == self._loop_thread:
            loop.call_later(delay_s, action, *arguments)
            return
        try:
            loop.call_soon_threadsafe(loop.call_later, delay_s, action, *arguments)
        except RuntimeError:  # the loop is closed, so the process is about to end
            log.debug("no timer for %r", arguments)

    def _flush_lazily(self) -> None:
        self._lazily_queued = False
        self._flush()

    def _unattached(self, command: Send) -> None:
        raise RuntimeError(f"a drive must be attached to an endpoint before it sends {command.message!r}")


def _nothing() -> None:
    """Before there is an endpoint nothing is queued."""
