"""Threads for what must not run inside of the engine: code of the user that is called when a value has come."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

THREADS_MAX = 32  # callbacks may block each other, so there are several


class Callbacks:
    """Runs calls soon, each on a thread that may block; threads are started as they are needed and end with close()."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads = 0

    def run(self, call: Callable[[], None]) -> None:
        """Have a thread call it; called under the lock of the engine. The call deals with its own errors."""
        self._calls.put(call)
        if not self._idle.acquire(blocking=False) and self._threads < THREADS_MAX:
            self._threads += 1
            # A daemon: what blocks in it must not keep a program from ending.
            threading.Thread(target=self._work, name="flowengine-callback", daemon=True).start()

    def close(self) -> None:
        """No more calls: the threads end when they are through."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _work(self) -> None:
        calls, idle = self._calls, self._idle
        while True:
            try:
                call = calls.get_nowait()
            except queue.Empty:
                idle.release()
                call = calls.get()
            if call is None:
                return
            call()
            del call  # it holds a value
