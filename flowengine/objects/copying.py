"""Large work on memory in two threads, and the copy into shared memory: one call for small buffers, two for large."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

MIB = 1 << 20
PAGE_BYTES = 4096

# Copying 200 MB into a segment that is mapped and warm, as multiples of one thread's plain slice assignment:
#   one thread: memoryview slice 1.0, np.copyto 1.0, memcpy 0.95; in chunks of 256 KiB to 16 MiB 0.55
#   two threads: halves by np.copyto 1.85, by memcpy 1.75; in chunks of any of these sizes 1.0 to 1.1
# One large call per thread wins because only above a size near the cache's does the C library write around the cache.
PAIR_BYTES_MIN = 4 * MIB
# Below this the GIL is not worth giving up.
NUMPY_BYTES_MIN = MIB

Work = Callable[[int, int], None]  # on a range: from, to


class _SecondThread:
    """One thread that does the other half of something; it lives as long as the process, and not in a fork of it."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Work, int, int]] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="flowengine-half", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        """False in a child process, which inherits the object but not the thread."""
        return self._thread.is_alive()

    def start(self, work: Work, begin: int, end: int) -> None:
        """Begin with that range; finish() must follow."""
        self._jobs.put((work, begin, end))

    def finish(self) -> None:
        """Wait until it is done, even if interrupted: nobody may get the memory while it is written."""
        try:
            failure = self._done.get()
        except BaseException:
            self._done.get()
            raise
        if failure is not None:
            raise failure

    def _run(self) -> None:
        while True:
            work, begin, end = self._jobs.get()
            failure: BaseException | None = None
            try:
                work(begin, end)
            except BaseException as error:
                failure = error
            # The views must be gone before the caller goes on and releases what they look at.
            del work
            self._done.put(failure)


# Taken without waiting: whoever finds it busy works alone. So a fork in the middle can slow a child down, not stop it.
_pair_lock = threading.Lock()
_second: _SecondThread | None = None


def in_two(work: Work, size: int, step: int) -> None:
    """Do it for both halves of a range, parted at a multiple of `step`, one in a thread of its own if that is free."""
    global _second
    if not _pair_lock.acquire(blocking=False):
        work(0, size)
        return
    try:
        if _second is None or not _second.alive():
            _second = _SecondThread()
        half = size // 2 // step * step
        _second.start(work, half, size)
        try:
            work(0, half)
        finally:
            _second.finish()
    finally:
        _pair_lock.release()


def copy_buffer(target: memoryview, source: memoryview) -> None:
    """Copy source into the equally long target, with two threads where that pays."""
    count = source.nbytes
    if count < NUMPY_BYTES_MIN:
        target[:] = source
        return
    to, from_ = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if count < PAIR_BYTES_MIN:
        np.copyto(to, from_)
        return
    in_two(lambda begin, end: np.copyto(to[begin:end], from_[begin:end]), count, PAGE_BYTES)
