"""The head as a process of its own, and its journal file."""
from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import textwrap

import pytest

from flowengine.errors import BadValue
from flowengine.runtime import head
from flowengine.runtime.connection import head_settings, read_connection
from flowengine.runtime.head import JournalFile
from tests.runtime.kit import PATIENCE_S, PROJECT, gone


def test_rows_are_there_after_the_end(tmp_path):
    faults = []
    path = tmp_path / "state" / "journal.sqlite"
    journal = JournalFile(path, faults.append)
    assert journal.open() == {}
    journal.write((("a", b"1"), ("b", b"2")))
    journal.write((("a", None), ("c", b"3"), ("b", b"4")))
    journal.write((("d", b"5"), ("d", None)))
    journal.close()
    again = JournalFile(path, faults.append)
    assert again.open() == {"b": b"4", "c": b"3"}
    again.close()
    assert faults == []
    assert os.stat(path).st_mode & 0o077 == 0


@pytest.mark.parametrize("gone_too", ["the file", "its folder"])
def test_a_journal_that_is_removed_is_made_again(tmp_path, monkeypatch, gone_too):
    monkeypatch.setattr(head, "JOURNAL_LOOK_S", 0.01)
    told, numbers, path = queue.SimpleQueue(), queue.SimpleQueue(), tmp_path / "state" / "journal.sqlite"
    journal = JournalFile(path, told.put)
    journal.on_made_again = lambda: told.put("again")
    journal.on_written = numbers.put
    journal.open()
    journal.write((("a", b"1"), ("b", b"2")), 1)
    assert numbers.get(timeout=PATIENCE_S) == [1]
    if gone_too == "the file":
        path.unlink()  # what sqlite has beside it stays
    else:
        path.parent.rename(tmp_path / "elsewhere")
    assert "was removed while the head runs; it was made again" in told.get(timeout=PATIENCE_S)
    assert told.get(timeout=PATIENCE_S) == "again"
    journal.write((("c", b"3"), ("a", None)), 2)
    assert numbers.get(timeout=PATIENCE_S) == [2]
    journal.close()
    again = JournalFile(path, pytest.fail)
    assert again.open() == {"b": b"2", "c": b"3"}
    again.close()


def test_a_journal_that_cannot_be_made_again_is_told_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(head, "JOURNAL_LOOK_S", 0.01)
    monkeypatch.setattr(head, "JOURNAL_RETRY_S", 0.01)
    told, numbers, path = queue.SimpleQueue(), queue.SimpleQueue(), tmp_path / "journal.sqlite"
    journal = JournalFile(path, told.put)
    journal.on_written = numbers.put
    journal.open()
    journal.write((("a", b"1"),), 1)
    assert numbers.get(timeout=PATIENCE_S) == [1]

    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    connect = journal._connect
    said = "cannot be made again ([Errno 28] No space left on device); trying again"
    monkeypatch.setattr(journal, "_connect", full)
    path.unlink()
    assert said in told.get(timeout=PATIENCE_S)
    monkeypatch.setattr(journal, "_connect", connect)
    assert "it was made again" in told.get(timeout=PATIENCE_S)
    monkeypatch.setattr(journal, "_connect", full)
    path.unlink()
    assert said in told.get(timeout=PATIENCE_S)
    journal.close()
    assert "what it held is lost" in told.get(timeout=PATIENCE_S)


def test_a_head_that_was_killed_is_found_under_the_same_address(tmp_path):
    code = textwrap.dedent("""
        import os, sys
        from flowengine.runtime.connection import head_settings
        from flowengine.runtime.launcher import run_head
        from flowengine.runtime import head
        announce = head.HeadShell._announce
        def announce_and_tell(self):
            announce(self)
            os.write(1, b"listens\\n")
        head.HeadShell._announce = announce_and_tell
        sys.exit(run_head(head_settings("127.0.0.1", sys.argv[1], sys.argv[2], tls=False)))
    """)
    file = tmp_path / "cluster.json"

    def start():
        child = subprocess.Popen([sys.executable, "-c", code, str(file), str(tmp_path / "state")], cwd=PROJECT,
                                 stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(PROJECT)})
        assert child.stdout is not None
        assert child.stdout.readline() == b"listens\n"
        return child, read_connection(file)

    def end(child, number):
        child.send_signal(number)
        status = child.wait(timeout=20)
        child.stdout.close()
        return status

    first, before = start()
    assert end(first, signal.SIGKILL) == -signal.SIGKILL
    second, after = start()
    assert after == before
    assert end(second, signal.SIGTERM) == 0
    assert gone([second.pid])


def test_a_file_that_is_no_journal(tmp_path):
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"garbage" * 1_000)
    with pytest.raises(BadValue, match=f"{path}.*not a database"):
        JournalFile(path, pytest.fail).open()


def test_a_port_that_stays_in_use(tmp_path, monkeypatch):
    class Taken:
        async def start(self):
            raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(head, "PORT_PATIENCE_S", 0.0)
    monkeypatch.setattr(head.process, "new_endpoint", lambda *rest: Taken())
    shell = head.HeadShell(head_settings("127.0.0.1", "c.json", str(tmp_path), tls=False, port=4321), -1)
    with pytest.raises(BadValue, match=r"port 4321 of 127\.0\.0\.1 is in use"):
        asyncio.run(shell._listen())


def test_rows_are_on_disk_when_the_journal_says_so(tmp_path):
    path, told = tmp_path / "journal.sqlite", queue.Queue()
    journal = JournalFile(path, pytest.fail)

    def look(numbers):
        with contextlib.closing(sqlite3.connect(path)) as database:
            told.put((numbers, dict(database.execute("SELECT key, value FROM rows"))))

    journal.on_written = look
    assert journal.open() == {}
    journal.write((("a", b"1"),))
    journal.write((("a", None), ("b", b"2")), 7)
    assert told.get(timeout=PATIENCE_S) == ([7], {"b": b"2"})
    journal.close()
    assert told.empty()


def test_a_journal_on_a_full_disk_waits_for_room_and_does_not_hold_up_the_end(tmp_path):
    class Small(JournalFile):
        def _connect(self):
            database = super()._connect()
            database.execute("PRAGMA max_page_count=4")
            return database

    told = queue.Queue()
    journal = Small(tmp_path / "journal.sqlite", told.put)
    journal.on_written = pytest.fail
    assert journal.open() == {}
    journal.write((("a", bytes(100_000)),), 1)
    assert "trying again" in told.get(timeout=PATIENCE_S)
    journal.close()
    assert "not in it" in told.get(timeout=PATIENCE_S)
