"""The environment of one task in a process that others use as well: variables, working folder, modules from there."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import TracebackType

from flowengine.core.messages import Environment
from flowengine.errors import BadValue


class Within:
    """Inside of this block the process has the environment; afterwards it is as it was. For one thread at a time.

    Raises BadValue when the working folder is not on this host. Modules that were imported from there are forgotten at
    the end, so that the code of another folder does not find them.
    """

    def __init__(self, environment: Environment, host: str) -> None:
        self.environment = environment
        self.host = host
        self.variables: dict[str, str | None] = {}
        self.folder = ""
        self.modules: Mapping[str, object] = {}

    def __enter__(self) -> None:
        given = self.environment
        if given.working_dir:
            self.folder = os.getcwd()
            try:
                os.chdir(given.working_dir)
            except OSError as error:
                raise BadValue(f"working_dir {given.working_dir!r} cannot be used on host {self.host}: "
                               f"{error.strerror}") from error
            sys.path.insert(0, given.working_dir)
            self.modules = dict(sys.modules)
        for name, value in given.env_vars:
            self.variables[name] = os.environ.get(name)
            os.environ[name] = value

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name, value in self.variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self.environment.working_dir:
            self._forget_modules()  # while the folder is in sys.path, from which packages without a file know theirs
            if self.environment.working_dir in sys.path:
                sys.path.remove(self.environment.working_dir)
            os.chdir(self.folder)

    def _forget_modules(self) -> None:
        tops = [name for name, module in list(sys.modules.items()) if name not in self.modules and "." not in name
                and is_of(module, self.environment.working_dir)]
        for name in list(sys.modules):
            if name.partition(".")[0] in tops and name not in self.modules:
                del sys.modules[name]


def is_of(module: object, folder: str) -> bool:
    """Whether a module, or a package with or without a file of its own, lies right in the folder."""
    places = (getattr(module, "__file__", None), *(getattr(module, "__path__", None) or ()))
    return folder in [os.path.dirname(place) for place in places if isinstance(place, str)]


def inherited(own: Environment | None, outer: Environment | None) -> Environment | None:
    """What a task gets that was given `own` by code that runs in `outer`: variables add up, its own come first."""
    if own is None or outer is None:
        return own or outer
    variables = {**dict(outer.env_vars), **dict(own.env_vars)}
    return Environment(tuple(variables.items()), own.working_dir or outer.working_dir)


def environment_of(env_vars: tuple[tuple[str, str], ...], working_dir: str) -> Environment | None:
    """The environment that options ask for; a relative folder is one of this process. None: no other than others."""
    if not env_vars and not working_dir:
        return None
    return Environment(env_vars, os.path.abspath(os.path.expanduser(working_dir)) if working_dir else "")
