"""Folders in shared memory that hold the objects of a session: made for their user alone, and swept."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat

OWNER_FILE = ".owner"


def session_folder(session: str, pid: int, root: str = "/dev/shm") -> str:
    """Make and return the folder of a session led by that process; PermissionError if it could be someone else's."""
    base = _base(root)
    _make_own(base)
    folder = f"{base}/{session}-{pid}"
    _make_own(folder)
    draft = f"{folder}/{OWNER_FILE}.{os.getpid()}"
    with open(draft, "w") as file:
        file.write(f"{_started(pid)} {_pid_space()}")
    os.rename(draft, f"{folder}/{OWNER_FILE}")
    return folder


def sweep(root: str = "/dev/shm") -> list[str]:
    """Remove the session folders of this user whose leading process is gone; their paths."""
    base = _base(root)
    try:
        _check_own(base)
    except FileNotFoundError:
        return []
    removed = []
    for entry in sorted(os.scandir(base), key=lambda entry: entry.name):
        match = re.search(r"-(\d+)$", entry.name)
        if match and entry.is_dir(follow_symlinks=False) and _abandoned(entry.path, int(match[1])):
            shutil.rmtree(entry.path, ignore_errors=True)
            removed.append(entry.path)
    return removed


def _base(root: str) -> str:
    return f"{root}/flowengine-{os.getuid()}"


def _make_own(folder: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    _check_own(folder)


def _check_own(folder: str) -> None:
    # /dev/shm is open to everyone: whoever makes this folder first could otherwise read or replace our objects.
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{folder} is not a folder; remove it")
    if status.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to user {status.st_uid}, not to {os.getuid()}")
    if status.st_mode & 0o077:
        os.chmod(folder, 0o700)


def _abandoned(folder: str, pid: int) -> bool:
    try:
        with open(f"{folder}/{OWNER_FILE}") as file:
            started, pid_space = file.read().split()
    except (FileNotFoundError, ValueError):
        return _started(pid) == ""  # its maker may be about to write it
    # A process in another container may use the same shared memory; its pid means nothing here.
    return pid_space == _pid_space() and _started(pid) != started


def _started(pid: int) -> str:
    """When the process started, in the kernel's ticks; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def _pid_space() -> str:
    return os.readlink("/proc/self/ns/pid")


def is_session_here(session: str, root: str = "/dev/shm") -> bool:
    """Whether a living process of this user has made a folder for that session."""
    pattern = re.compile(rf"{re.escape(session)}-(\d+)$")
    with contextlib.suppress(FileNotFoundError, PermissionError):
        for entry in os.scandir(_base(root)):
            match = pattern.match(entry.name)
            if match and not _abandoned(entry.path, int(match[1])):
                return True
    return False
