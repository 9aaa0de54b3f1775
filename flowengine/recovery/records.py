"""Records of tasks that failed and actors that died as files: for replays when the program has ended. Shell.

They hold pickles: they are written for this user alone, and only such files of this user are read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.ids import short
from flowengine.errors import BadValue, FlowError
from flowengine.objects import codec
from flowengine.recovery.record import (
    ActorTold,
    ChildrenTold,
    Piece,
    TaskTold,
    decoded,
    encoded,
    inputs_in,
    with_values,
)

log = logging.getLogger(__name__)

FOLDER = "failed"
SUFFIX = ".record"
FILES_MAX = 100
FOLDER_BYTES_MAX = 1 << 30
COPY_BYTES_MAX = 64 << 20  # of stored values in one record
BETWEEN_S = 0.5  # between two times of writing: a storm of failures must not keep the program busy
CLOSE_TIMEOUT_S = 3.0


class Content(msgspec.Struct, array_like=True):
    """What a file holds."""

    name: str  # hex digits of the task or actor
    pieces: list[bytes]


class Waiting(msgspec.Struct):
    """A piece that is to be written, with views of the stored values in it."""

    name: bytes
    piece: Piece
    views: dict[bytes, memoryview]


class Records:
    """Writes what its owner machine wants to be kept, in a thread, the newest when there is too much."""

    def __init__(self, state_dir: str, view_of: Callable[[bytes], memoryview | None],
                 ask: Callable[[str], list[Piece]]) -> None:
        """view_of: a stored value of this host; ask: what others know of a task."""
        self.state_dir = state_dir
        self.folder = Path(state_dir, FOLDER)
        self.view_of = view_of
        self.ask = ask
        self.coming: deque[Waiting] = deque(maxlen=FILES_MAX)
        self.known: dict[bytes, list[Piece]] = {}  # that was written last
        self.news = threading.Event()
        self.closing = threading.Event()
        self.written = threading.Event()
        self.written.set()
        self.writer: threading.Thread | None = None

    def keep(self, command: c.KeepPiece) -> None:
        """Write it soon; values that are in the store of this host stay readable until then."""
        piece: Piece = command.piece
        found = [(oid, self.view_of(oid)) for oid, value in inputs_in(piece).items() if isinstance(value, m.Stored)]
        self.coming.append(Waiting(command.name, piece, {oid: view for oid, view in found if view is not None}))
        self.written.clear()
        if self.writer is None:
            self.writer = threading.Thread(target=self._write_all, name="flowengine-records", daemon=True)
            self.writer.start()
        self.news.set()

    def kept(self, digits: str) -> list[Piece]:
        """What is on disk of a task or an actor, what was to be written until now included."""
        self.written.wait(BETWEEN_S * 4)
        found = kept_record(self.state_dir, digits)
        return found[1] if found is not None else []

    def close(self) -> None:
        """Write what is under way."""
        self.closing.set()
        self.news.set()
        if self.writer is not None:
            self.writer.join(CLOSE_TIMEOUT_S)

    def _write_all(self) -> None:
        while not self.closing.is_set() or self.coming:
            self.news.wait()
            self.news.clear()
            try:
                while self.coming:
                    self._write(self.coming.popleft())
                self.written.set()
                prune(self.folder)
            except Exception as error:  # a replay is a convenience: the program goes on
                log.warning("records of failed tasks cannot be written to %s: %s", self.folder, error)
            self.closing.wait(BETWEEN_S)

    def _write(self, waiting: Waiting) -> None:
        piece = with_copies(waiting.piece, waiting.views)
        pieces = [*self.known.pop(waiting.name, []), piece]
        if isinstance(piece, TaskTold) and piece.children:
            with contextlib.suppress(FlowError):  # the process in which it ran may be dead
                pieces += [more for more in self.ask(waiting.name.hex())
                           if isinstance(more, ChildrenTold) and more.parent == waiting.name]
        self.known[waiting.name] = pieces
        if len(self.known) > FILES_MAX:
            del self.known[next(iter(self.known))]
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_record(self.folder / f"{waiting.name.hex()}{SUFFIX}", waiting.name.hex(), pieces)


def with_copies(piece: Piece, views: dict[bytes, memoryview]) -> Piece:
    """The piece with copies of these stored values, as far as they are not too much together."""
    copies: dict[bytes, m.Value] = {}
    left_bytes = COPY_BYTES_MAX
    for oid, value in inputs_in(piece).items():
        view = views.get(oid)
        if view is None or codec.object_bytes(view) > left_bytes:
            continue
        left_bytes -= codec.object_bytes(view)
        copies[oid] = m.Inline(bytes(view[: codec.object_bytes(view)]), value.contained)
    return with_values(piece, copies) if copies else piece


def write_record(path: str | os.PathLike[str], name: str, pieces: list[Piece]) -> None:
    """Write a file that only this user can read, complete or not at all."""
    part = f"{os.fspath(path)}.part-{os.getpid()}"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(msgspec.msgpack.encode(Content(name, encoded(pieces))))
    os.replace(part, path)


def read_record(path: str | os.PathLike[str]) -> tuple[str, list[Piece]]:
    """Name and pieces in a file; raises BadValue for one that others may have written, or that is no record."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            blob = file.read()
    except OSError as error:
        raise BadValue(f"the record {os.fspath(path)} cannot be read: {error.strerror}") from error
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise BadValue(f"{os.fspath(path)} can be written by others, and a replay runs what is in it: "
                       "chmod 600 it if it is yours")
    try:
        content = msgspec.msgpack.decode(blob, type=Content)
    except msgspec.MsgspecError as error:
        raise BadValue(f"{os.fspath(path)} is not the record of a task or an actor: {error}") from error
    return content.name, decoded(content.pieces)


def kept_record(state_dir: str, digits: str) -> tuple[str, list[Piece]] | None:
    """The record of this name among those that programs have left; raises BadValue when several begin like this."""
    found = sorted(Path(state_dir, FOLDER).glob(f"{digits}*{SUFFIX}")) if digits.isalnum() else []
    if len(found) > 1:
        names = ", ".join(path.stem[:12] for path in found[:5])
        raise BadValue(f"{digits} may be {names}: give more digits")
    return read_record(found[0]) if found else None


def newest(state_dir: str) -> list[str]:
    """In words, what has failed last."""
    words = []
    for _, path in by_age(Path(state_dir, FOLDER))[:5]:
        with contextlib.suppress(BadValue):
            name, pieces = read_record(path)
            named = [piece.spec.name for piece in pieces if isinstance(piece, TaskTold | ActorTold)]
            words += [f"{short(bytes.fromhex(name))} ({what})" for what in named[:1]]
    return words


def prune(folder: Path) -> None:
    """Remove the oldest files when there are too many, or they are too large together."""
    total_bytes = 0
    for place, (status, path) in enumerate(by_age(folder)):
        total_bytes += status.st_size
        if place >= FILES_MAX or total_bytes > FOLDER_BYTES_MAX:
            path.unlink(missing_ok=True)


def by_age(folder: Path) -> list[tuple[os.stat_result, Path]]:
    """The records in a folder that programs share, the newest first."""
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # another program has just removed it
            found.append((path.stat(), path))
    return sorted(found, key=lambda pair: -pair[0].st_mtime)
