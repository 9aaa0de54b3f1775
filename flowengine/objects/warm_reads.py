"""Mappings of files that are read again and again under new names: a page that is mapped once costs nothing later."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
import weakref

import numpy as np

from flowengine.objects import codec
from flowengine.objects.segments import BLOCK_BYTES

IDLE_S = 2.0  # a mapping keeps the memory of a file that its writer has removed
MADV_POPULATE_READ = 22  # of Linux 5.14; the kernel maps all pages at once instead of one after another


class WarmReads:
    """Reads objects whose writers use few files in turn; from any thread."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._mappings: dict[int, tuple[mmap.mmap, float]] = {}  # by inode, which is not given anew while it is mapped

    def open(self, name: str) -> memoryview | None:
        """The object read-only, safe from reuse for as long as any view of it lives; None if there is none."""
        try:
            descriptor = os.open(f"{self.folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            pages = np.frombuffer(self._mapping(name, os.fstat(descriptor).st_ino), np.uint8)
        except (BlockingIOError, FileNotFoundError):  # it is being written again, or was removed
            os.close(descriptor)
            return None
        weakref.finalize(pages, os.close, descriptor)  # the lock goes with the last view
        view = pages.data
        nbytes = codec.named_bytes(view, name.encode())
        return view[:nbytes] if nbytes else None

    def _mapping(self, name: str, inode: int) -> mmap.mmap:
        with self._lock:
            found = self._mappings.get(inode)
            mapping = found[0] if found is not None else self._map(name, inode)
            self._mappings[inode] = (mapping, time.monotonic())
            return mapping

    def _map(self, name: str, inode: int) -> mmap.mmap:
        # Not by the descriptor with the lock: a mapping keeps a duplicate, and with that the lock.
        descriptor = os.open(f"{self.folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if status.st_ino != inode:
                raise FileNotFoundError(name)
            mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            with contextlib.suppress(OSError):  # an older kernel: they are mapped one after another
                # Not what its writer has no memory for: that would be made, and counted nowhere.
                mapping.madvise(MADV_POPULATE_READ, 0, min(status.st_size, status.st_blocks * BLOCK_BYTES))
        finally:
            os.close(descriptor)
        return mapping

    def sweep(self) -> bool:
        """Forget what was not read lately; whether more is left."""
        with self._lock:
            before_s = time.monotonic() - IDLE_S
            self._mappings = {inode: pair for inode, pair in self._mappings.items() if pair[1] > before_s}
            return bool(self._mappings)
