"""What workers print, kept in a file for each on its host, bounded: for whoever asks later."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

LOGS = "logs"  # the folder below the state folder
ENDED_KEPT_MAX = 100  # files of workers that have ended
READ_BYTES_MAX = 1 << 20  # in one answer
TASK_DIGITS = 12


def logs_folder(state_dir: str, session: str, pid: int) -> str:
    """Where the node with that process id keeps what its workers print; made by the first line."""
    return os.path.join(state_dir, LOGS, f"{session}-{socket.gethostname()}-{pid}")


class WorkerLog:
    """One worker's file, and the one before; together they have at most `bytes_max`. Places count from its first byte.

    A line has the time, the stream, the task and the actor that printed it (or dashes), and the text.
    """

    def __init__(self, path: str, bytes_max: int) -> None:
        self.path = path
        self.half_bytes = max(1, bytes_max // 2)
        self.pid = 0
        self.ended = False
        self.end = 0  # the place behind the last byte
        self._began = 0  # of the file that is written
        self._first = 0  # of the oldest byte that is kept
        self._file: BinaryIO | None = None

    def write(self, stream: str, task_actor: tuple[str, str], lines: Sequence[str]) -> None:
        """Add lines that a task printed, perhaps a call of an actor."""
        now = time.time()
        head = f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now * 1000) % 1000:03d} {stream:3} "
        head += "".join([f"{one[:TASK_DIGITS] or '-' * TASK_DIGITS} " for one in task_actor])
        text = "".join([f"{head}{line}\n" for line in lines]).encode("utf-8", "backslashreplace")
        if self._file is not None and self.end - self._began + len(text) > self.half_bytes:
            self._file.close()
            os.replace(self.path, self.path + ".1")
            self._first, self._began, self._file = self._began, self.end, None
        if self._file is None:
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
            self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115 - as long as the worker lives
        self._file.write(text)
        self.end += len(text)

    def read(self, after: int, size_bytes: int) -> tuple[str, int]:
        """What lies behind a place, whole lines, and the place behind them; after < 0: so many of the last bytes."""
        start = max(self._first, self.end + after if after < 0 else after)
        found = b""
        if start < self._began:
            found = part(self.path + ".1", start - self._first, size_bytes)
        if start + len(found) >= self._began:
            found += part(self.path, start + len(found) - self._began, size_bytes - len(found))
        if after < 0 and start > self._first:
            cut = found.find(b"\n") + 1  # the line in which it begins is not whole
            start, found = start + cut, found[cut:]
        whole, newline, _ = found.rpartition(b"\n")
        return (whole + newline).decode("utf-8", "replace"), start + len(whole + newline)

    def close(self) -> None:
        """Nothing more is written."""
        self.ended = True
        if self._file is not None:
            self._file.close()

    def remove(self) -> None:
        """It is not kept any more."""
        for path in (self.path, self.path + ".1"):
            with contextlib.suppress(OSError):
                os.unlink(path)


def part(path: str, offset: int, size_bytes: int) -> bytes:
    """Bytes of a file; none when it is gone."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(max(0, size_bytes))
    except OSError:
        return b""


class WorkerLogs:
    """Those of one node."""

    def __init__(self, folder: str, bytes_max: int) -> None:
        self.folder = folder
        self.bytes_max = bytes_max
        self.logs: dict[str, WorkerLog] = {}

    def keep(
        self, worker_id: str, pid: int, task_actor: tuple[str, str], stream_lines: tuple[str, Sequence[str]]
    ) -> None:
        """Lines of a worker."""
        if not self.bytes_max:
            return
        log = self.logs.get(worker_id)
        if log is None:
            log = self.logs[worker_id] = WorkerLog(os.path.join(self.folder, f"{worker_id}.log"), self.bytes_max)
        log.pid = pid
        with contextlib.suppress(OSError):  # a full disk must not end the node
            log.write(stream_lines[0], task_actor, stream_lines[1])

    def ended(self, worker_id: str) -> None:
        """The worker has ended; of many that have, the oldest are not kept."""
        log = self.logs.get(worker_id)
        if log is None:
            return
        log.close()
        gone = [name for name, one in self.logs.items() if one.ended]
        for name in gone[: max(0, len(gone) - ENDED_KEPT_MAX)]:
            self.logs.pop(name).remove()

    def asked(self, argument: Any) -> list[dict[str, Any]]:
        """The answer to {places: {worker: place}, bytes, last}: the text of each from there on, and where to go on.

        last: of workers without a place, the last bytes instead of the first.
        """
        wanted = argument if isinstance(argument, dict) else {}
        places: dict[str, int] = wanted.get("places") or {}
        size_bytes = min(int(wanted.get("bytes") or READ_BYTES_MAX), READ_BYTES_MAX)
        found = []
        for worker_id, log in self.logs.items():
            after = places.get(worker_id, -size_bytes if wanted.get("last") else 0)
            text, place = log.read(int(after), size_bytes)
            if text:
                found.append({"worker_id": worker_id, "pid": log.pid, "text": text, "place": place})
        return found

    def close(self) -> None:
        """The session ends, and its files with it."""
        for log in self.logs.values():
            log.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self.folder))  # when no other node keeps any
