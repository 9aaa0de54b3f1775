"""The copy into shared memory: one call for small buffers, two threads for large ones."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import numpy as np

MIB = 1 << 20

# Copying 200 MB into a segment that is mapped and warm, as multiples of one thread's plain slice assignment:
#   one thread: memoryview slice 1.0, np.copyto 1.0, memcpy 0.95; in chunks of 256 KiB to 16 MiB 0.55
#   two threads: halves by np.copyto 1.85, by memcpy 1.75; in chunks of any of these sizes 1.0 to 1.1
# One large call per thread wins because only above a size near the cache's does the C library write around the cache.
PAIR_BYTES_MIN = 4 * MIB
# Below this the GIL is not worth giving up.
NUMPY_BYTES_MIN = MIB


class _SecondThread:
    """One thread that copies the other half; it lives as long as the process, and not in a fork of it."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="flowengine-copy", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        """False in a child process, which inherits the object but not the thread."""
        return self._thread.is_alive()

    def start(self, target: Any, source: Any) -> None:
        """Begin to copy; finish() must follow."""
        self._jobs.put((target, source))

    def finish(self) -> None:
        """Wait until the copy is done, even if interrupted: nobody may get the memory while it is written."""
        try:
            failure = self._done.get()
        except BaseException:
            self._done.get()
            raise
        if failure is not None:
            raise failure

    def _run(self) -> None:
        while True:
            target, source = self._jobs.get()
            failure: BaseException | None = None
            try:
                np.copyto(target, source)
            except BaseException as error:
                failure = error
            # The views must be gone before the caller goes on and releases what they look at.
            del target, source
            self._done.put(failure)


# Taken without waiting: whoever finds it busy copies alone. So a fork in the middle can slow a child down, not stop it.
_pair_lock = threading.Lock()
_second: _SecondThread | None = None


def copy_buffer(target: memoryview, source: memoryview) -> None:
    """Copy source into the equally long target, with two threads where that pays."""
    global _second
    count = source.nbytes
    if count < NUMPY_BYTES_MIN:
        target[:] = source
        return
    to, from_ = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if count < PAIR_BYTES_MIN or not _pair_lock.acquire(blocking=False):
        np.copyto(to, from_)
        return
    try:
        if _second is None or not _second.alive():
            _second = _SecondThread()
        half = count // 2 // 4096 * 4096
        _second.start(to[half:], from_[half:])
        try:
            np.copyto(to[:half], from_[:half])
        finally:
            _second.finish()
    finally:
        _pair_lock.release()
