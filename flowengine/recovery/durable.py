"""Durable storage: whole files with a checksum, in a folder of any file system that fsspec knows. Shell.

A file is written under another name and renamed, and begins with its length and a checksum, so one that a killed
writer, a full disk or a power failure has torn is not there or is found out. It is not forced to the disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from flowengine.errors import BadValue

log = logging.getLogger(__name__)

HEADER = struct.Struct("<8sIQ")  # magic, checksum of the rest, its length
MAGIC = b"flowkeep"
DROP_PATIENCE_S = (0.1, 0.5, 0.0)
PART = ".part-"  # what follows the name of a file that is being written


class Torn(OSError):
    """The file is not what was written."""


class Durable:
    """A folder of durable storage. Names may have folders in them; all methods may be called from any thread."""

    def __init__(self, url: str) -> None:
        """url: of any file system that fsspec knows; a plain path is a local folder."""
        self.url = url
        self.fs, self.root = fsspec.core.url_to_fs(url)
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.root = self.root.rstrip("/")

    def path(self, name: str) -> str:
        """Where the file system has a file."""
        return f"{self.root}/{name}" if name else self.root

    def make_folder(self, name: str = "") -> None:
        """Make a folder with those above it, for this user alone."""
        if self.is_local:
            os.makedirs(self.path(name), mode=0o700, exist_ok=True)
        else:
            self.fs.makedirs(self.path(name), exist_ok=True)

    def write(self, name: str, *parts: Any) -> int:
        """Write a file of these buffers, complete or not at all, into a folder that exists; its size in bytes."""
        checksum = nbytes = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
            nbytes += memoryview(part).nbytes
        path = self.path(name)
        written = f"{path}{PART}{os.getpid()}-{secrets.token_hex(4)}"
        with as_os_errors(path):
            try:
                with self.fs.open(written, "wb") as file:
                    file.write(HEADER.pack(MAGIC, checksum, nbytes))
                    for part in parts:
                        file.write(part)
                self.fs.mv(written, path)
            except BaseException:
                with contextlib.suppress(OSError):  # what failed first is told
                    self._remove(written)
                raise
        return HEADER.size + nbytes

    def read(self, name: str) -> memoryview:
        """The bytes of a file, writable; raises Torn when they are not those that were written, OSError without it."""
        path = self.path(name)
        with as_os_errors(path), self.fs.open(path, "rb") as file:
            head = file.read(HEADER.size)
            if len(head) < HEADER.size or not head.startswith(MAGIC):
                raise Torn(f"{path} is torn: its first bytes are not those of a checkpoint or durable value")
            _, checksum, nbytes = HEADER.unpack(head)
            size = self.fs.size(path)
            if size != HEADER.size + nbytes:
                raise Torn(f"{path} is torn: it has {size} bytes instead of {HEADER.size + nbytes}")
            view = np.empty(nbytes, np.uint8).data  # not filled with zeros first
            at = 0
            while at < nbytes:
                count = file.readinto(view[at:])
                if not count:
                    raise Torn(f"{path} is torn: it ends after {at} of {nbytes} bytes")
                at += count
        if zlib.crc32(view) != checksum:
            raise Torn(f"{path} is corrupt: its checksum is another")
        return view

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        with as_os_errors(self.path(name)):
            found: bool = self.fs.exists(self.path(name))
        return found

    def names(self, folder: str = "") -> list[str]:
        """The files in a folder; none when there is no such folder."""
        try:
            with as_os_errors(self.path(folder)):
                found = self.fs.ls(self.path(folder), detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return [str(path).rpartition("/")[2] for path in found]

    def delete(self, *names: str) -> None:
        """Remove files; those that are not there are no fault."""
        for name in names:
            self._remove(self.path(name))

    def delete_folder(self, name: str = "") -> None:
        """Remove a folder with all that is in it; when it is not there, that is no fault."""
        with contextlib.suppress(FileNotFoundError), as_os_errors(self.path(name)):
            self.fs.rm(self.path(name), recursive=True)

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), as_os_errors(path):
            self.fs.rm_file(path)


@contextlib.contextmanager
def as_os_errors(path: str) -> Iterator[None]:
    """What fails in the block is an OSError, though each file system has errors of its own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error


def split(url: str) -> tuple[Durable, str]:
    """The folder and the name of the file with this URL."""
    folder, _, name = url.rpartition("/")
    return Durable(folder), name


def check(url: str) -> None:
    """Raise BadValue, which says why, when nothing can be written there."""
    try:
        store, name = Durable(url), f"check-{secrets.token_hex(4)}"
        store.make_folder()
        store.write(name, b"")
        store.delete(name)
    except ImportError as error:
        raise BadValue(f"state_dir {url} needs a package that is not installed: {error}") from error
    except (OSError, ValueError) as error:  # ValueError: nothing that it knows
        raise BadValue(f"state_dir {url} cannot be used: {error}") from error


def live_url(url: str, session: str, pid: int = 0) -> str:
    """The folder below this URL for what is of no use when the session has ended, or that process of this host."""
    owner = f"-{socket.gethostname()}-{pid}" if pid else ""
    return f"{url}/live/{session}{owner}"


def drop(url: str) -> None:
    """Remove a folder with all that is in it; that it cannot be removed is told and no fault."""
    for wait_s in DROP_PATIENCE_S:
        try:
            Durable(url).delete_folder()
            return
        except (OSError, ImportError) as error:  # somebody may be writing yet
            failure = error
        time.sleep(wait_s)
    log.warning("%s cannot be removed: %s", url, failure)


def sweep(url: str) -> None:
    """Remove what ended processes of this host left beside this folder; ids of other hosts mean nothing here."""
    folder = url.rpartition("/")[0]
    pattern = re.compile(rf"-{re.escape(socket.gethostname())}-(\d+)$")
    try:
        names = Durable(folder).names()
    except (OSError, ImportError) as error:
        log.warning("%s cannot be read: %s", folder, error)
        return
    for name in names:
        match = pattern.search(name)
        if match and not os.path.exists(f"/proc/{match[1]}"):
            drop(f"{folder}/{name}")
