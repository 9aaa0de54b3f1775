"""What runs in workers for the interfaces of others: calls that bring their function along, and initializers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import secrets
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..objects.codec import found_by_name


class InitializerFailed(concurrent.futures.BrokenExecutor):
    """The initializer of an executor or pool raised in a worker."""


class Setup:
    """An initializer, which runs once in each process that has a call of its executor."""

    def __init__(self, initializer: Callable[..., object], initargs: tuple[Any, ...]) -> None:
        self.key = secrets.token_hex(16)
        self.initializer = initializer
        self.initargs = initargs

    def prepare(self, fn: Callable[..., Any]) -> None:
        """Run the initializer unless it has run in this process, and let a call's function see the globals that it has.

        Raises InitializerFailed.
        """
        if self.key not in _prepared:
            self._run()
        for own in copied_globals(fn):
            for its in _prepared[self.key]:
                if its is not own and its.get("__name__") == own.get("__name__"):
                    own.update(its)

    def _run(self) -> None:
        with _preparing:
            if self.key in _prepared:
                return
            try:
                self.initializer(*self.initargs)
            except Exception as error:
                raise InitializerFailed(f"the initializer raised {type(error).__name__}: {error}") from error
            _prepared[self.key] = list(copied_globals(self.initializer))


_prepared: dict[str, list[dict[str, Any]]] = {}  # the globals that the initializer left
_preparing = threading.RLock()  # an initializer may use an executor itself


def copied_globals(fn: Any) -> Iterator[dict[str, Any]]:
    """The globals of the functions that a callable is made of, where they are not those of a module of this process."""
    found: dict[int, dict[str, Any]] = {}
    left, seen = [fn], dict[int, object]()
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, functools.partial):
            left.append(part.func)
        elif isinstance(part, types.MethodType):
            left.append(part.__func__)
        elif isinstance(part, types.FunctionType):
            module = sys.modules.get(part.__globals__.get("__name__", ""))
            if module is None or part.__globals__ is not module.__dict__:
                found[id(part.__globals__)] = part.__globals__
            for cell in part.__closure__ or ():
                with contextlib.suppress(ValueError):  # nothing is in it yet
                    left.append(cell.cell_contents)
        elif not found_by_name(kind := part if isinstance(part, type) else type(part)):
            left += [member for member in vars(kind).values() if isinstance(member, types.FunctionType)]
    yield from found.values()


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
            self.setup.prepare(args[1] if args[0] is run_each else args[0])
        return self.fn(*args, **kwargs)


def run(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function."""
    return fn(*args, **kwargs)


def run_each(fn: Callable[..., Any], chunk: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Several calls of one function."""
    return [fn(*args) for args in chunk]
