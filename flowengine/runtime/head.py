"""The head process: the Head machine with a socket and a journal on disk.

It keeps its address over its lives: the same port, and a name made of the session, so that nodes find it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowengine.core.commands import JournalWritten, WriteJournal
from flowengine.core.head import Head
from flowengine.core.head import HeadSettings as MachineSettings
from flowengine.core.messages import Answered, Asked, Message
from flowengine.errors import BadValue, FlowError
from flowengine.runtime import process
from flowengine.runtime.connection import Connection, page_path, port_of, write_connection
from flowengine.runtime.drive import Drive
from flowengine.runtime.settings import HeadProcessSettings

if TYPE_CHECKING:
    from flowengine.observe.served import Page

log = logging.getLogger(__name__)

PORT_PATIENCE_S = 5.0  # the port of the last life may be busy for a moment
PORT_RETRY_S = 0.05
JOURNAL_RETRY_S = 0.5
JOURNAL_LOOK_S = 2.0  # between looks whether the file is still there, when nothing is written
SESSION_CHARS = 12  # of the session, in the head's address
ALL_ROWS, INSERT_ROW = "SELECT key, value FROM rows ORDER BY key", "INSERT OR REPLACE INTO rows VALUES (?, ?)"
PAGE_TOPIC = "page"  # asked of a head: where its live page is

Row = tuple[str, bytes | None]
Rows = tuple[tuple[Row, ...], int]  # and the number under which the machine waits for them; 0: none


class JournalFile:
    """Rows on disk, by key; written in batches by a thread, so that nobody waits for the disk."""

    def __init__(self, path: Path, on_error: Callable[[str], None]) -> None:
        self.on_written: Callable[[list[int]], None] = lambda numbers: None
        self.on_made_again: Callable[[], None] = lambda: None
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = path
        self._on_error = on_error
        self._rows: queue.SimpleQueue[Rows | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)

    def open(self) -> dict[str, bytes]:
        """Read what is there, then be ready for more; raises BadValue when the file is no use."""
        try:
            with contextlib.closing(self._connect()) as database:
                rows = dict(database.execute(ALL_ROWS))
        except sqlite3.Error as error:
            raise BadValue(f"the journal {self._path} cannot be used: {error}") from error
        self._thread.start()
        return rows

    def write(self, rows: Iterable[Row], number: int = 0) -> None:
        """Put rows on disk soon, in this order; None deletes. on_written is called with the number when they are."""
        self._rows.put((tuple(rows), number))

    def close(self) -> None:
        """Return when all is on disk, or the disk does not take it."""
        self._closing = True
        self._rows.put(None)
        self._thread.join()

    def _connect(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        database = sqlite3.connect(self._path, isolation_level="IMMEDIATE")
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")  # a power cut may cost the last rows, never the file
        database.execute("CREATE TABLE IF NOT EXISTS rows (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
        return database

    def _write_all(self) -> None:
        database = self._connect()
        more = True
        while more:
            batch = self._batch()
            more = batch[-1] is not None
            if not self._path.exists():
                again = self._made_again(database)
                if again is None:
                    return
                database = again
            rows = [row for part in batch if part is not None for row in part[0]]
            if rows and not self._write(database, rows):
                break
            numbers = [part[1] for part in batch if part is not None and part[1]]
            if numbers:
                self.on_written(numbers)
        database.close()

    def _batch(self) -> list[Rows | None]:
        """What is to be written next, or nothing after a while."""
        try:
            batch = [self._rows.get(timeout=JOURNAL_LOOK_S)]
        except queue.Empty:
            return [((), 0)]
        while not self._rows.empty():
            batch.append(self._rows.get())
        return batch

    def _made_again(self, nameless: sqlite3.Connection) -> sqlite3.Connection | None:
        """Somebody has removed the file: its rows, which can still be read, go into a new one; None: the end came."""
        rows = nameless.execute(ALL_ROWS).fetchall()
        nameless.close()  # before there is a new one, whose log it would remove
        told = False
        while True:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                for rest in self._path.parent.glob(f"{self._path.name}-*"):
                    rest.unlink()
                database = self._connect()
                with database:
                    database.executemany(INSERT_ROW, rows)
                break
            except (OSError, sqlite3.Error) as error:
                if self._closing or not told:
                    end = "what it held is lost" if self._closing else "trying again"
                    self._on_error(f"the journal {self._path} was removed and cannot be made again ({error}); {end}")
                if self._closing:
                    return None
                told = True
                time.sleep(JOURNAL_RETRY_S)
        self._on_error(f"the journal {self._path} was removed while the head runs; it was made again from what it held")
        self.on_made_again()
        return database

    def _write(self, database: sqlite3.Connection, rows: list[Row]) -> bool:
        # The newest value of a key is all that matters, so a batch is one pass, and deleting comes first.
        latest = dict(rows)
        deleted = [(key,) for key, value in latest.items() if value is None]
        kept = [(key, value) for key, value in latest.items() if value is not None]
        told = False
        while True:
            try:
                with database:
                    database.executemany("DELETE FROM rows WHERE key = ?", deleted)
                    database.executemany(INSERT_ROW, kept)
                return True
            except sqlite3.Error as error:  # a full or slow disk: the rows stay here until it takes them
                if self._closing:
                    text = f"the journal {self._path} cannot be written ({error}): the last changes are not in it"
                    self._on_error(text)
                    return False
                if not told:
                    self._on_error(f"the journal {self._path} cannot be written ({error}); trying again")
                    told = True
                time.sleep(JOURNAL_RETRY_S)


class HeadShell:
    """Carries events to the Head machine and its commands out; decides nothing."""

    def __init__(self, settings: HeadProcessSettings, report_fd: int) -> None:
        self.settings = settings
        self.report_fd = report_fd
        self.journal = JournalFile(Path(settings.state_dir, f"head-{settings.session}.sqlite"), log.error)
        self.drive: Drive | None = None
        self.page: Page | None = None
        self.machine: Head
        self.ended: asyncio.Event

    async def run(self) -> int:
        """Serve until told to end."""
        ended = self.ended = process.end_event()
        rows = self.journal.open()
        await self._listen()
        me = self.endpoint.address
        about = MachineSettings(me, self.settings.session, self.settings.host, port_of(me))
        machine = self.machine = Head(about, self.settings.config, rows)
        machine.journal.wall_offset_s = process.wall_offset_s()
        drive = self.drive = Drive(machine)
        loop = asyncio.get_running_loop()
        drive.attach(self.endpoint, loop)
        drive.perform[WriteJournal] = self._write
        self.journal.on_written = lambda numbers: self._call_soon(loop, self._written, numbers)
        self.journal.on_made_again = lambda: self._call_soon(loop, self._leave_connections)
        drive.begin("the start", machine.start(time.monotonic()))
        self._announce()
        self._serve_at_once()
        await ended.wait()
        if self.page is not None:
            await self.page.close()
        await self.endpoint.close()
        self.journal.close()
        return 0

    async def _listen(self) -> None:
        settings = self.settings
        give_up_at = time.monotonic() + PORT_PATIENCE_S
        while True:
            place = process.Place(host=settings.host, port=settings.port, secret=settings.secret, tls=settings.tls,
                                  config=settings.config)
            self.endpoint = process.new_endpoint(place, self._on_batch, self._on_lost)
            try:
                await self.endpoint.start()
            except OSError as error:
                if not settings.port or error.errno != errno.EADDRINUSE:
                    raise
                if time.monotonic() > give_up_at:
                    raise BadValue(f"port {settings.port} of {settings.host} is in use: "
                                   "does this head run already, or another one?") from error
                await asyncio.sleep(PORT_RETRY_S)
                continue
            location = self.endpoint.address.partition("#")[0]
            self.endpoint.address = f"{location}#head-{settings.session[:SESSION_CHARS]}"
            return

    def _announce(self) -> None:
        settings = self.settings
        self._leave_connections()
        log.info("the head of session %s listens at %s", settings.session, self.endpoint.address)
        if self.report_fd >= 0:
            os.write(self.report_fd, f"{self.endpoint.address}\n".encode())
            os.close(self.report_fd)

    def _leave_connections(self) -> None:
        """The identity of this cluster, for the next life of the head, for nodes and for programs."""
        settings, tls = self.settings, self.settings.tls
        connection = Connection(address=self.endpoint.address, secret=settings.secret.hex(), session=settings.session,
                                certificate=tls.certificate if tls else None, key=tls.key if tls else None)
        for path in settings.connection_paths:
            write_connection(path, connection)

    def _serve_at_once(self) -> None:
        """The page, where a port is given for it or an earlier life of this head had it open."""
        settings = self.settings
        noted = page_path(settings.state_dir, settings.session).exists()
        if noted or settings.config.page_port or settings.config.metrics_port:
            self._page().begin()

    def _page(self) -> Page:
        if self.page is None:
            from flowengine.observe.served import Page  # here, since most heads are never looked at

            self.page = Page(self.settings, self.endpoint, self.machine)
        return self.page

    def _page_url(self) -> list[str]:
        """The address of the page, opened now if it is not yet, or why there is none."""
        try:
            return [self._page().url(), ""]
        except (FlowError, OSError) as error:
            return ["", str(error)]

    def _write(self, command: WriteJournal) -> None:
        self.journal.write(command.rows, command.number)

    @staticmethod
    def _call_soon(loop: asyncio.AbstractEventLoop, action: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(action, *arguments)

    def _written(self, numbers: list[int]) -> None:
        assert self.drive is not None
        for number in numbers:
            self.drive.step(JournalWritten(number))

    def _on_batch(self, peer: str, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Asked) and message.topic == process.END_TOPIC:
                self.endpoint.send(peer, Answered(message.request, message.topic, None))
                self.ended.set()
        if self.drive is None:
            return
        if self.page is not None:
            self.page.asker.heard(peer, messages)
        for question in messages:
            if isinstance(question, Asked) and question.topic == PAGE_TOPIC:
                self.endpoint.send(peer, Answered(question.request, PAGE_TOPIC, self._page_url()))
        self.drive.batch(peer, [one for one in messages if type(one) is not Asked or one.topic != PAGE_TOPIC])

    def _on_lost(self, peer: str, reason: str) -> None:
        if self.page is not None:
            self.page.asker.missed(peer, reason)
        ended = self.endpoint.has_ended(peer)
        self.endpoint.forgive(peer)  # a node that was cut off comes back under its own address; epochs tell its lives
        if self.drive is not None:
            self.drive.lost(peer, reason, ended)


def main(settings: HeadProcessSettings, report_fd: int) -> int:
    """Be the head process; report_fd: where its address goes as one line, -1 for nowhere."""
    result: Any = process.run(HeadShell(settings, report_fd).run())
    return int(result)
