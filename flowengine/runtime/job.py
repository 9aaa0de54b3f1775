"""The journal of a resumable job: what the program's tasks gave, so that a program that is run again continues.

One SQLite file per job in the state directory, written behind the program's back in batches; large results go to
durable storage first. A job that ended well leaves nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.errors import BadValue, OutOfDisk

log = logging.getLogger(__name__)

BATCH_MAX = 1_000
CLOSE_TIMEOUT_S = 10.0
RETRY_S = 0.5

Values = m.Inline | m.Stored
Durable = tuple[Callable[[bytes], None], Callable[[bytes], None]]
Keep = c.KeepResult | c.KeepNote


class Left(msgspec.Struct):
    """What an earlier run of the job left."""

    results: tuple[tuple[bytes, Values], ...]
    notes: dict[tuple[str, int], bytes]


class JobJournal:
    """Reads what is left, then keeps what comes, from any thread."""

    def __init__(self, job: str, state_dir: str, durable: Durable) -> None:
        """durable: how a stored result is copied to durable storage, and how it is dropped there."""
        folder = Path(state_dir, "jobs")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        safe = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in job)[:60]
        self.path = folder / f"{safe}-{hashlib.blake2b(job.encode(), digest_size=6).hexdigest()}.sqlite"
        self.lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.lock)
            raise BadValue(f"job {job!r} is running already in {state_dir}") from None
        self.make_durable, self.drop_durable = durable
        try:
            self.database = self._open()
        except (OSError, sqlite3.Error) as error:
            os.close(self.lock)
            raise BadValue(f"the journal of job {job!r} cannot be used: {self.path}: {error}") from error
        self.coming: queue.SimpleQueue[Keep | Future[str] | None] = queue.SimpleQueue()
        self.writer = threading.Thread(target=self._write, name="flowengine-job", daemon=True)
        self.writer.start()

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
        os.chmod(self.path, 0o600)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute("CREATE TABLE IF NOT EXISTS results (oid BLOB PRIMARY KEY, value BLOB)")
        database.execute("CREATE TABLE IF NOT EXISTS notes (kind TEXT, number INTEGER, payload BLOB)")
        return database

    def left(self, node: str) -> Left:
        """What an earlier run left; large results are said to be at this node, where they are restored when read."""
        decode = msgspec.msgpack.Decoder(m.Inline | m.Stored).decode
        results = []
        for oid, blob in self.database.execute("SELECT oid, value FROM results"):
            value = decode(blob)
            results.append((oid, m.Stored(value.size_bytes, (node,)) if isinstance(value, m.Stored) else value))
        notes = {(kind, number): payload for kind, number, payload in self.database.execute("SELECT * FROM notes")}
        return Left(tuple(results), notes)

    def keep(self, command: Keep) -> None:
        """Write it soon."""
        self.coming.put(command)

    def flush(self) -> None:
        """Return when all that was kept so far is on disk; raises OutOfDisk when the disk does not take it now."""
        written: Future[str] = Future()
        self.coming.put(written)
        if failure := written.result():
            raise OutOfDisk(f"the journal of the job cannot be written: {failure}", path=str(self.path))

    def close(self, done: bool) -> None:
        """Write what is under way; done: the job ended well, so nothing of it is needed."""
        self.coming.put(None)
        self.writer.join(CLOSE_TIMEOUT_S)
        large = self._large() if done else []
        self.database.close()
        if done:
            for oid in large:
                self.drop_durable(oid)
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        os.close(self.lock)

    def _large(self) -> list[bytes]:
        decode = msgspec.msgpack.Decoder(m.Inline | m.Stored).decode
        rows = self.database.execute("SELECT oid, value FROM results")
        return [oid for oid, blob in rows if isinstance(decode(blob), m.Stored)]

    def _write(self) -> None:
        kept: list[Keep] = []  # what the disk has not taken yet; nothing may be there that followed from what is not
        failure, ended = "", False
        while not ended:
            batch: list[Any] = [] if kept else [self.coming.get()]
            while len(batch) < BATCH_MAX and not self.coming.empty():
                batch.append(self.coming.get())
            ended = None in batch
            kept += [command for command in batch if isinstance(command, Keep)]
            failure = self._tried(kept, failure)
            for waiting in batch:
                if isinstance(waiting, Future):
                    waiting.set_result(failure)
            if failure and not ended:
                time.sleep(RETRY_S)

    def _tried(self, kept: list[Keep], failed: str) -> str:
        """Write it, and empty the list; else why that failed, which is told once. failed: the same, last time."""
        try:
            self._write_batch(kept)
        except (OSError, sqlite3.Error) as error:
            if self.database.in_transaction:
                self.database.execute("ROLLBACK")
            if not failed:
                log.error("the journal of the job cannot be written to %s (%s); trying again", self.path, error)
            return str(error)
        kept.clear()
        return ""

    def _write_batch(self, batch: list[Keep]) -> None:
        results, notes = [], []
        for command in batch:
            if isinstance(command, c.KeepNote):
                notes.append((command.kind, command.number, command.payload))
                continue
            if isinstance(command.value, m.Stored):
                try:
                    self.make_durable(command.oid)
                except OSError as error:  # its value was dropped meanwhile: the task would run again
                    log.debug("a result is not journaled: %s", error)
                    continue
            results.append((command.oid, msgspec.msgpack.encode(command.value)))
        self.database.execute("BEGIN")
        self.database.executemany("INSERT OR REPLACE INTO results VALUES (?, ?)", results)
        self.database.executemany("INSERT INTO notes VALUES (?, ?, ?)", notes)
        self.database.execute("COMMIT")
