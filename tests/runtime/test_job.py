"""The journal of a job on a disk that is full for a while, or is of no use."""
from __future__ import annotations

import sqlite3

import pytest

import flowengine as flow
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.runtime.job import JobJournal

LARGE = bytes(50_000)


def journal_in(folder):
    return JobJournal("job", str(folder), (lambda oid: None, lambda oid: None))


def test_what_a_full_disk_did_not_take_is_written_when_there_is_room(tmp_path, caplog):
    """And nothing before it that came later: a run that finds later choices without earlier ones goes astray."""
    journal = journal_in(tmp_path)
    journal.keep(c.KeepNote("wait", 0, b"first"))
    journal.flush()
    (pages,) = journal.database.execute("PRAGMA page_count").fetchone()
    journal.database.execute(f"PRAGMA max_page_count={pages + 2}")
    journal.keep(c.KeepNote("wait", 1, LARGE))
    for number in range(2, 5):
        journal.keep(c.KeepNote("wait", number, b"small"))
        with pytest.raises(flow.OutOfDisk, match=r"full.*path"):
            journal.flush()
    rows = sqlite3.connect(journal.path).execute("SELECT number FROM notes").fetchall()
    assert rows == [(0,)]
    assert len(caplog.records) == 1
    journal.database.execute("PRAGMA max_page_count=10000")
    journal.flush()
    journal.close(done=False)
    again = journal_in(tmp_path)
    assert again.left("n").notes == {("wait", 0): b"first", ("wait", 1): LARGE,
                                     **{("wait", number): b"small" for number in range(2, 5)}}
    again.close(done=True)


def test_a_job_that_ends_on_a_full_disk_ends(tmp_path):
    journal = journal_in(tmp_path)
    (pages,) = journal.database.execute("PRAGMA page_count").fetchone()
    journal.database.execute(f"PRAGMA max_page_count={pages}")
    journal.keep(c.KeepResult(b"o" * 20, m.Inline(LARGE)))
    journal.close(done=False)
    assert not journal.writer.is_alive()


def test_a_file_that_is_no_journal_is_told_and_the_job_is_not_left_locked(tmp_path):
    journal = journal_in(tmp_path)
    journal.close(done=False)
    journal.path.write_bytes(b"garbage" * 1_000)
    for _ in range(2):
        with pytest.raises(flow.BadValue, match=rf"'job'.*{journal.path}.*not a database"):
            journal_in(tmp_path)
