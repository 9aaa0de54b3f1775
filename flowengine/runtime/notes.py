"""What a worker notes of what it runs, for the account of its death and beside what it prints. Shell."""

from __future__ import annotations

import functools
import io
import mmap
import os
import time
from typing import TYPE_CHECKING, Any, TextIO

from flowengine.core import messages as m
from flowengine.core.executor import STOP_GRACE_S
from flowengine.runtime.node_workers import DEADLINE_BYTES, NAME_BYTES, RUNNING_BYTES

if TYPE_CHECKING:
    from flowengine.runtime.session import Session

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

    def __init__(self, fd: int, session: Session) -> None:
        super().__init__(fd, "w", closefd=False)
        self.session = session

    def write(self, content: Any, /) -> int:
        """Write all of it."""
        context = self.session.context
        push = context.push
        actor = context.actor or (context.task if push is not None and push.spec.life is not None else b"")
        name = context.name.encode("utf-8", "replace")[:NAME_BYTES]
        by = f"\x1e{context.task.hex()}.{actor.hex()}.{name.hex()}\x1e".encode() if context.caller else UNSIGNED
        whole = memoryview(b"".join((by, content, UNSIGNED)))
        done = super().write(whole)
        while done < len(whole):
            done += super().write(whole[done:])
        return len(content)


def signed(fd: int, session: Session) -> TextIO:
    """A standard stream of a worker that is written line by line and takes any text."""
    return io.TextIOWrapper(io.BufferedWriter(Signed(fd, session)), "utf-8", "backslashreplace", line_buffering=True)
