"""Which member of a value is to blame when it cannot be pickled; a bounded walk, made only after a failure."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_PROBES_MAX = 2_000
_DEPTH_MAX = 64


def blame(value: object, fails: Callable[[object], bool]) -> str:
    """Follow the members for which fails is true, down to the last, and name it by its path from the value."""
    path = ""
    seen: dict[int, object] = {}
    probes_left = _PROBES_MAX
    for _ in range(_DEPTH_MAX):
        seen[id(value)] = value
        for label, member in _members(value):
            if probes_left == 0:
                break
            probes_left -= 1
            if id(member) not in seen and fails(member):
                path, value = _joined(path, label), member
                break
        else:
            break
    kind = type(value)
    called = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{path or 'the value'} is a {called}"


def _joined(path: str, label: str) -> str:
    return f"{path} -> {label}" if (path and label[0] not in "[.") or path.endswith("'") else path + label


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, member in list(value.items()):
            yield f"[{_short(key)}]", member
            yield f"key {_short(key)}", key
    elif isinstance(value, (list, tuple)):
        for index, member in enumerate(value):
            yield f"[{index}]", member
    elif isinstance(value, (set, frozenset)):
        for member in list(value):
            yield f"member {_short(member)}", member
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        for place in np.ndindex(value.shape):
            yield f"[{', '.join(map(str, place))}]", value[place]
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    yield from _function_members(value)
    yield from _attributes(value)


def _function_members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        value = value.__func__
    if not isinstance(value, types.FunctionType):
        return
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
        try:
            yield f"closure variable '{name}'", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in _global_names(value.__code__):
        if name in value.__globals__:
            yield f"global variable '{name}'", value.__globals__[name]
    for index, default in enumerate(value.__defaults__ or ()):
        yield f"default {index}", default
    for name, default in (value.__kwdefaults__ or {}).items():
        yield f"default of '{name}'", default


def _global_names(code: types.CodeType) -> list[str]:
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_global_names(constant)))
    return list(names)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    try:
        reduced = value.__reduce_ex__(5) if not isinstance(value, type) else ()
    except Exception:
        if any(name in vars(base) for base in kind.__mro__[:-1] for name in ("__reduce__", "__reduce_ex__")):
            return  # it refuses, whatever its members are
        reduced = ()
    state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
    if state is None:
        state = getattr(value, "__dict__", None)
    named: dict[str, Any] = {}
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, (dict, types.MappingProxyType)):
            named.update({str(name): member for name, member in part.items()})
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if hasattr(value, name):
                named.setdefault(name, getattr(value, name))
    for name, member in named.items():
        yield f".{name}", member
    if isinstance(reduced, tuple) and len(reduced) > 1 and isinstance(reduced[1], tuple):
        known = {id(member) for member in named.values()}
        for index, member in enumerate(reduced[1]):
            if id(member) not in known and not isinstance(member, type):
                yield f"argument {index} of its reduction", member


def _short(key: object) -> str:
    try:
        text = repr(key)
    except Exception:
        text = f"<{type(key).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."
