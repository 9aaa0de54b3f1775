"""What a process does right after it was forked from the launcher, before its own main runs."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Collection
from typing import NoReturn, TextIO

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
STDERR = 2

_libc = ctypes.CDLL(None, use_errno=True)  # loaded before any fork


def become_child(name: str, parent: int, keep: Collection[int], streams: tuple[int, int] = (STDERR, STDERR)) -> None:
    """Cut what ties the new process to the launcher: descriptors, signals, random state; it dies when that does.

    streams: the descriptors that become its stdout and stderr.
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the launcher died before the line above
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()  # the keys of the terminal are the driver's
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(streams[0], 1)
    os.dup2(streams[1], STDERR)
    close_others(keep)
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    # The old ones hold what the launcher had buffered.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = text_stream(1), text_stream(STDERR)


def text_stream(fd: int) -> TextIO:
    """A standard stream that is written line by line and takes any text."""
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def close_others(keep: Collection[int]) -> None:
    """Close every descriptor but the standard ones and these."""
    with os.scandir("/proc/self/fd") as entries:
        fds = [int(entry.name) for entry in entries]
    for fd in fds:
        if fd > STDERR and fd not in keep:
            try:
                os.close(fd)
            except OSError:
                continue  # the one that listed them


def run_and_exit(main: Callable[[], int | None]) -> NoReturn:
    """Run the main function of a process and end it; nothing of the launcher's stack is unwound."""
    code = 1
    try:
        code = main() or 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
