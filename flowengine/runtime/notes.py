"""What a worker notes of what it runs, for the account of its death and beside what it prints. Shell."""

from __future__ import annotations

import functools
import io
import mmap
import os
import time
from typing import TYPE_CHECKING, Any

from flowengine.core import messages as m
from flowengine.core.executor import STOP_GRACE_S
from flowengine.runtime.node_workers import DEADLINE_BYTES, NAME_BYTES, RUNNING_BYTES

if TYPE_CHECKING:
    from flowengine.runtime.context import Context
    from flowengine.runtime.worker import WorkerSession

UNSIGNED = b"\x1e..\x1e"


def open_note(path: str) -> mmap.mmap:
    """The small file where the worker notes what it runs, so that its node can tell after a crash."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, RUNNING_BYTES)
        return mmap.mmap(descriptor, RUNNING_BYTES)
    finally:
        os.close(descriptor)


def note_running(note: mmap.mmap, spec: m.TaskSpec, attempt: int) -> None:
    """Write what runs and by when it has to end. It stays noted until the next begins: its owner knows better by then.

    The limit is for the node: code that never lets go of the interpreter keeps this process from minding it.
    """
    note[:] = noted(spec, attempt)


def noted(spec: m.TaskSpec, attempt: int) -> bytes:
    """The note of an attempt that begins now."""
    until_ms = int((time.monotonic() + spec.timeout_s + STOP_GRACE_S) * 1000) if spec.timeout_s else 0
    return spec.id + attempt.to_bytes(4, "big") + padded(spec.name, until_ms)


@functools.lru_cache(maxsize=100)
def padded(name: str, until_ms: int) -> bytes:
    """A name and a limit as they are noted."""
    return name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0") + until_ms.to_bytes(DEADLINE_BYTES, "big")


class Signed(io.FileIO):
    """A standard stream of a worker: around all that is written it says who does, for the node that reads it.

    Code that writes to the descriptor in another way does not, and processes that it starts.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)
        self.by: Context | None = None

    def write(self, content: Any, /) -> int:
        """Write all of it."""
        whole = memoryview(b"".join((self._signature(), content, UNSIGNED)))
        done = super().write(whole)
        while done < len(whole):
            done += super().write(whole[done:])
        return len(content)

    def _signature(self) -> bytes:
        context = self.by
        if context is None or not context.caller:
            return UNSIGNED
        push = context.push
        actor = context.actor or (context.task if push is not None and push.spec.life is not None else b"")
        name = context.name.encode("utf-8", "replace")[:NAME_BYTES]
        return f"\x1e{context.task.hex()}.{actor.hex()}.{name.hex()}\x1e".encode()


class Printed(io.BufferedWriter):
    """What a worker's code prints: a line that one task or call has begun is ended before another writes."""

    def __init__(self, fd: int, session: WorkerSession) -> None:
        self.signed = Signed(fd)
        super().__init__(self.signed)
        self.session = session
        self.of: Context | None = None  # whose text is written, when that is not the running code's
        self.is_half = False  # what was written last has no end of line

    def write(self, content: Any, /) -> int:
        """Keep it until the end of the line."""
        by = self.of or self.session.context
        if by is not self.signed.by:
            self.end_line()
            self.signed.by = by
        if len(content):
            self.is_half = content[-1:] != b"\n"
        self.session.prints = True
        return super().write(content)

    def end_line(self) -> None:
        """Nothing more is written by whoever wrote last."""
        if self.closed:
            return
        if self.is_half:
            self.is_half = False
            super().write(b"\n")
        self.flush()
        self.signed.by = None


class Lines(io.TextIOWrapper):
    """A standard stream of a worker that is written line by line and takes any text."""

    def __init__(self, fd: int, session: WorkerSession) -> None:
        self.printed = Printed(fd, session)
        super().__init__(self.printed, "utf-8", "backslashreplace", line_buffering=True)
        self.session = session
        self.by: Context | None = None  # where calls run at once: whose text has no end of line yet

    def write(self, text: str, /) -> int:
        """Keep it until the end of the line."""
        self.session.prints = True
        if self.session.calls_at_once:
            self._turn_to(self.session.context)
        return write_text(self, text)

    def _turn_to(self, by: Context | None) -> None:
        if self.by is not None and by is not self.by:
            self.printed.of, self.by = self.by, None
            self.flush()
            self.printed.of = None
        self.by = by

    def code_ended(self, context: Context) -> bool:
        """What this code has printed without an end of line is a line; whether nothing of others is left."""
        if self.by is None or self.by is context:
            self.flush()
            self.by = None
        if self.printed.signed.by is context:
            self.printed.end_line()
        return self.by is None and self.printed.signed.by is None


write_text = io.TextIOWrapper.write
