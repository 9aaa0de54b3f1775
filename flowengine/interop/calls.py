"""What runs in workers for the interfaces of others: calls that bring their function along, and initializers."""

from __future__ import annotations

import concurrent.futures
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any


class InitializerFailed(concurrent.futures.BrokenExecutor):
    """The initializer of an executor or pool raised in a worker."""


class Setup:
    """An initializer, which runs once in each process that has a call of its executor."""

    def __init__(self, initializer: Callable[..., object], initargs: tuple[Any, ...]) -> None:
        self.key = secrets.token_hex(16)
        self.initializer = initializer
        self.initargs = initargs

    def prepare(self) -> None:
        """Run the initializer unless it has run in this process; raises InitializerFailed."""
        if self.key in _prepared:
            return
        with _preparing:
            if self.key in _prepared:
                return
            try:
                self.initializer(*self.initargs)
            except Exception as error:
                raise InitializerFailed(f"the initializer raised {type(error).__name__}: {error}") from error
            _prepared[self.key] = None


_prepared: dict[str, None] = {}
_preparing = threading.RLock()  # an initializer may use an executor itself


class Call:
    """A function of which each call may change its arguments, as it could in a process of its own."""

    owns_arguments = True

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


class CallOfEach(Call):
    """The same for a function that is called with each of many lists of arguments."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return run_each(self.fn, *args, **kwargs)


class CallOfAny(Call):
    """The same for a function that comes with each call, after an initializer if there is one."""

    def __init__(self, setup: Setup | None) -> None:
        super().__init__(run)
        self.setup = setup

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.setup is not None:
            self.setup.prepare()
        return self.fn(*args, **kwargs)


def run(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function."""
    return fn(*args, **kwargs)


def run_each(fn: Callable[..., Any], chunk: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Several calls of one function."""
    return [fn(*args) for args in chunk]
