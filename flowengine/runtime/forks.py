"""What a process that user code forked off must not do: it has the engine's memory and sockets, but not its threads."""

from __future__ import annotations

import functools
import os
import signal
import sys
from typing import NoReturn

from flowengine.refs import Current
from flowengine.runtime.child import run_and_exit


@functools.cache
def guard_forks() -> None:
    """From now on whatever this process forks leaves the session at once; said once in a process."""
    os.register_at_fork(after_in_child=leave_session)


def leave_session() -> None:
    """In the child of a fork: the session belongs to the parent alone."""
    session = Current.session
    if session is None:
        return
    for number, handler in session.handlers.items():
        if signal.getsignal(number) is handler:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    Current.session = None
    Current.forked = True
    session.closed = True  # so that nothing is ended at exit
    launched = getattr(session, "launched", None)
    if launched is not None and launched.process.stdin is not None:
        # The engine ends when this pipe does: a child that outlives the program must not hold it open.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, launched.process.stdin.fileno(), inheritable=False)
        os.close(nothing)


def end_fork() -> NoReturn:
    """End a forked process whose code has left the task that forked it, with the status that Python would give."""
    error = sys.exc_info()[1]

    def outcome() -> None:
        if error is not None:
            raise error

    run_and_exit(outcome)
