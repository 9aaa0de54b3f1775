"""Folders of sessions: private, and swept when the process that made them is gone."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from flowengine.objects import session_folders


@pytest.fixture
def base(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / f"flowengine-{os.getuid()}"


def gone_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_session_folders_are_private(tmp_path: pathlib.Path, base: pathlib.Path) -> None:
    folder = session_folders.session_folder("s1", os.getpid(), str(tmp_path))
    assert folder == str(base / f"s1-{os.getpid()}")
    assert session_folders.session_folder("s1", os.getpid(), str(tmp_path)) == folder
    base.chmod(0o755)
    session_folders.session_folder("s2", os.getpid(), str(tmp_path))
    for path in (base, base / f"s1-{os.getpid()}"):
        assert path.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_could_be_someone_elses_is_refused(
    tmp_path: pathlib.Path, base: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    base.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not a folder"):
        session_folders.session_folder("s", 1, str(tmp_path))
    with pytest.raises(PermissionError, match="not a folder"):
        session_folders.sweep(str(tmp_path))
    base.unlink()
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    (tmp_path / f"flowengine-{other}").mkdir()
    with pytest.raises(PermissionError, match="belongs to user"):
        session_folders.session_folder("s", 1, str(tmp_path))


def test_sweep_removes_what_dead_processes_left_and_nothing_else(tmp_path: pathlib.Path, base: pathlib.Path) -> None:
    root = str(tmp_path)
    assert session_folders.sweep(root) == []
    alive = session_folders.session_folder("alive", os.getpid(), root)
    dead = session_folders.session_folder("dead", gone_pid(), root)
    again = session_folders.session_folder("pid-used-again", os.getpid(), root)
    space = os.readlink("/proc/self/ns/pid")
    pathlib.Path(again, session_folders.OWNER_FILE).write_text(f"1 {space}")
    foreign = session_folders.session_folder("other-container", gone_pid(), root)
    pathlib.Path(foreign, session_folders.OWNER_FILE).write_text("1 pid:[1]")
    young = base / f"young-{os.getpid()}"
    young.mkdir()
    unowned = base / f"unowned-{gone_pid()}"
    unowned.mkdir()
    (base / "note").mkdir()
    pathlib.Path(dead, "object").write_bytes(b"x" * 100)
    assert session_folders.sweep(root) == sorted([dead, again, str(unowned)])
    assert sorted(os.listdir(base)) == sorted(
        [os.path.basename(alive), os.path.basename(foreign), young.name, "note"]
    )


def test_a_process_that_ended_but_is_not_reaped_is_gone(tmp_path: pathlib.Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        folder = session_folders.session_folder("s", process.pid, str(tmp_path))
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert session_folders.sweep(str(tmp_path)) == [folder]
