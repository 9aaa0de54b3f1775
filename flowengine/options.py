"""Options of tasks: what they are, and the check when they are given.

Owns names, types and ranges. Does not own what a placement policy means or which nodes exist.
"""
from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, SupportsFloat, SupportsIndex

import msgspec

from flowengine.errors import BadType, BadValue
from flowengine.scheduling.policies import Policy, check_text, no_policy, share_of

NUM_RETURNS_MAX = 65_535        # the index of a return takes two bytes
RETRIES_MAX = 1_000_000
AMOUNT_MAX = 2.0**53            # beyond it a float does not count single units
NAME_CHARS_MAX = 1_000
BUILTIN_RESOURCES = ("CPU", "GPU", "memory")
INSTEAD = {  # of names that other engines have
    "concurrency_groups": "use async methods, max_concurrency or several actors; ",
    "max_calls": "processes are shared and live on; ",
    "max_task_retries": "calls are done again as recovery says; ",
    "memory": "use memory_bytes; ",
    "namespace": "names belong to the cluster; ",
    "runtime_env": "use env_vars and working_dir; ",
    "scheduling_strategy": "use placement; ",
}

Shape = tuple[tuple[str, float], ...]


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one task, checked; amounts are needed while it runs."""

    num_returns: int | Literal["stream"] = 1
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    memory_bytes: int = 0
    resources: Shape = ()                       # custom ones, sorted by name
    max_retries: int = 3                        # -1: no limit
    retry_exceptions: bool | tuple[type[BaseException], ...] = False
    timeout_s: float | None = None
    name: str = ""
    placement: Any = None                       # a policy; judged by the scheduler
    priority: float = 0.0                       # larger first
    env_vars: tuple[tuple[str, str], ...] = ()
    working_dir: str = ""


class ActorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one actor, checked."""

    task: TaskOptions = TaskOptions()            # what it takes from a node, and where
    max_concurrency: int = 1
    name: str = ""
    detached: bool = False
    get_if_exists: bool = False
    recovery: str = "exactly_once"
    checkpoint: str = "adaptive"
    max_restarts: int = -1


class Check(Protocol):
    """Turns what was given for an option into what is kept; raises BadValue or BadType naming the option."""

    def __call__(self, name: str, value: Any) -> Any: ...


def task_options(given: Mapping[str, Any], base: TaskOptions | None = None) -> TaskOptions:
    """`base` with the given options in place of its own; raises BadValue or BadType at once."""
    checked = {}
    for name, value in given.items():
        if name not in CHECKS:
            raise BadValue(unknown_name("option", name, CHECKS))
        checked[name] = CHECKS[name](name, value)
    return msgspec.structs.replace(base or DEFAULTS, **checked)


def actor_options(given: Mapping[str, Any], base: ActorOptions | None = None) -> ActorOptions:
    """`base` with the given options in place of its own; raises BadValue or BadType at once."""
    base = base or ActorOptions()
    for_task = {name: value for name, value in given.items() if name in ACTOR_TASK_OPTIONS}
    checked: dict[str, Any] = {"task": task_options(for_task, base.task)}
    for name, value in given.items():
        if name in for_task:
            continue
        if name not in ACTOR_CHECKS:
            raise BadValue(unknown_name("option of an actor", name, (*ACTOR_CHECKS, *ACTOR_TASK_OPTIONS)))
        checked["detached" if name == "lifetime" else name] = ACTOR_CHECKS[name](name, value)
    if given.get("placement") is not None and share_of(given["placement"]):
        raise BadValue("placement: an actor keeps what it has, so it has no fair share; the tasks that it calls may")
    return msgspec.structs.replace(base, **checked)


def shape(options: TaskOptions) -> Shape:
    """What a task takes from a node while it runs, sorted by name, without zeros."""
    amounts = (("CPU", options.num_cpus), ("GPU", options.num_gpus), ("memory", float(options.memory_bytes)))
    return tuple(sorted((name, amount) for name, amount in (*amounts, *options.resources) if amount > 0))


def unknown_name(kind: str, name: object, known: Iterable[str]) -> str:
    """The text of an error about a name that does not exist, with the nearest that does."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    meant = INSTEAD.get(str(name)) or (f"did you mean {near[0]!r}? " if near else "")
    return f"there is no {kind} {name!r}: {meant}known are {', '.join(names) or 'none'}"


def real(name: str, value: Any, low: float, high: float) -> float:
    """A finite number within bounds; bools are refused."""
    if isinstance(value, (bool, str, bytes)) or not isinstance(value, (SupportsFloat, SupportsIndex)):
        raise BadType(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadType(f"{name} must be a number, not {value!r}") from error
    if not math.isfinite(number) or not low <= number <= high:
        raise BadValue(f"{name} must be a finite number from {low:g} to {high:g}, not {value!r}")
    return number


def whole(name: str, value: Any, low: int, high: int) -> int:
    """A whole number within bounds; bools and floats are refused."""
    if isinstance(value, bool):
        raise BadType(f"{name} must be a whole number, not {value!r}")
    try:
        number = operator.index(value)
    except TypeError as error:
        raise BadType(f"{name} must be a whole number, not {value!r}") from error
    if not low <= number <= high:
        raise BadValue(f"{name} must be a whole number from {low} to {high}, not {value!r}")
    return number


def resource_amounts(name: str, value: Any) -> Shape:
    """Custom resources as sorted pairs; the built-in ones have options of their own."""
    if not isinstance(value, Mapping):
        raise BadType(f"{name} must be a dict of names and amounts, not {value!r}")
    for resource in value:
        if not isinstance(resource, str):
            raise BadType(f"{name} must have strings as names, not {resource!r}")
        if not resource or len(resource) > NAME_CHARS_MAX:
            raise BadValue(f"{name} must have names of 1 to {NAME_CHARS_MAX} characters, not {resource[:40]!r}")
        if not resource.isprintable():
            raise BadValue(f"{name} must have names of printable characters, not {resource[:40]!r}")
        if "@" in resource or "\x1f" in resource:
            raise BadValue(f"{name} cannot hold {resource!r}: names with '@' are those that the engine makes")
        if resource in BUILTIN_RESOURCES:
            raise BadValue(f"{name} cannot hold {resource!r}: use num_cpus, num_gpus or memory_bytes")
    pairs = ((resource, real(f"{name}[{resource!r}]", amount, 0, AMOUNT_MAX)) for resource, amount in value.items())
    return tuple(sorted(pairs))


def gpus(name: str, value: Any) -> float:
    """A number of GPUs: whole ones, or a part of one."""
    number = real(name, value, 0, AMOUNT_MAX)
    if number > 1 and number != int(number):
        raise BadValue(f"{name} must be a whole number, or below 1 for a part of one GPU, not {value!r}")
    return number


def _returns(name: str, value: Any) -> int | str:
    if isinstance(value, str):
        if value != "stream":
            raise BadValue(f'{name} must be a whole number or "stream", not {value!r}')
        return value
    return whole(name, value, 0, NUM_RETURNS_MAX)


def _exceptions(name: str, value: Any) -> bool | tuple[type[BaseException], ...]:
    if isinstance(value, bool):
        return value
    kinds = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise BadType(f"{name} must be True, False or exception classes, not {kind!r}")
    return kinds


def _limit_s(name: str, value: Any) -> float | None:
    if value is None:
        return None
    limit_s = real(name, value, 0, 1e9)
    if limit_s == 0:
        raise BadValue(f"{name} must be more than 0, or None for no limit")
    return limit_s


def _label(name: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadType(f"{name} must be a string, not {value!r}")
    if len(value) > NAME_CHARS_MAX:
        raise BadValue(f"{name} must have at most {NAME_CHARS_MAX} characters, not {len(value)}")
    return check_text(name, value)


def _policy(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, Policy):
        raise BadType(f"{name} must be a policy of flowengine.scheduling, not {no_policy(value)}")
    if value is not None:
        share_of(value)
    return value


def _env_vars(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise BadType(f"{name} must be a dict of names and texts, not {value!r}")
    for variable, text in value.items():
        if not isinstance(variable, str) or not isinstance(text, str):
            raise BadType(f"{name} must have strings as names and values, not {variable!r}: {text!r}")
        if not variable or "=" in variable or "\0" in variable + text:
            raise BadValue(f"{name} cannot hold {variable!r}: {text!r}")
        check_text(name, variable + text)
    return tuple(value.items())


def _folder(name: str, value: Any) -> str:
    folder = value.__fspath__() if hasattr(value, "__fspath__") else value
    if folder is None:
        return ""
    if not isinstance(folder, str):
        raise BadType(f"{name} must be the path of a folder, not {value!r}")
    if not folder or "\0" in folder:
        raise BadValue(f"{name} must be the path of a folder, not {value!r}")
    if "://" in folder:
        raise BadValue(f"{name} must be the path of a folder on the host where the code runs, not the URL {value!r}")
    return check_text(name, folder)


def _whole(low: int, high: int) -> Check:
    return _bounded(whole, low, high)


def _real(low: float, high: float) -> Check:
    return _bounded(real, low, high)


def _bounded(check: Callable[..., Any], low: float, high: float) -> Check:
    return lambda name, value: check(name, value, low, high)


CHECKS: dict[str, Check] = {
    "num_returns": _returns,
    "num_cpus": _real(0, AMOUNT_MAX),
    "num_gpus": gpus,
    "memory_bytes": _whole(0, int(AMOUNT_MAX)),
    "resources": resource_amounts,
    "max_retries": _whole(-1, RETRIES_MAX),
    "retry_exceptions": _exceptions,
    "timeout_s": _limit_s,
    "name": _label,
    "placement": _policy,
    "priority": _real(-1e9, 1e9),
    "env_vars": _env_vars,
    "working_dir": _folder,
}
DEFAULTS = TaskOptions()


def _one_of(*allowed: str) -> Check:
    def check(name: str, value: Any) -> str:
        if value not in allowed:
            raise BadValue(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
        return str(value)

    return check


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadType(f"{name} must be True or False, not {value!r}")
    return value


def _lifetime(name: str, value: Any) -> bool:
    if value not in (None, "detached"):
        raise BadValue(f'{name} must be None or "detached", not {value!r}')
    return bool(value == "detached")


def _checkpoint(name: str, value: Any) -> str:
    if isinstance(value, str):
        if value in ("adaptive", "never"):
            return value
        if value.endswith("s"):
            try:
                return f"{real(name, float(value[:-1]), 1e-6, 1e9):g}s"
            except ValueError as error:
                raise BadValue(f'{name} must be a number of seconds as "30s", not {value!r}') from error
        raise BadValue(f'{name} must be "adaptive", "never", a number of calls, or seconds as "30s", not {value!r}')
    return str(whole(name, value, 1, 1 << 40))


ACTOR_TASK_OPTIONS = ("num_cpus", "num_gpus", "memory_bytes", "resources", "placement", "priority", "env_vars",
                      "working_dir")
ACTOR_CHECKS: dict[str, Check] = {
    "max_concurrency": _whole(1, 10_000),
    "name": _label,
    "lifetime": _lifetime,
    "get_if_exists": _flag,
    "recovery": _one_of("exactly_once", "restart", "none"),
    "checkpoint": _checkpoint,
    "max_restarts": _whole(-1, RETRIES_MAX),
}
