"""Exceptions taken apart and made again: their fields, their texts, and instances made without any code of the user."""
from __future__ import annotations

import pickle
import signal
import types
from collections.abc import Callable

import cloudpickle

SHOWN_CHARS_MAX = 4_096         # of one repr in a record
HEAP_TYPE_FLAG = 1 << 9         # Py_TPFLAGS_HEAPTYPE: made by a class statement, not in C

# KeyboardInterrupt stays out: it is the user at the keyboard, and must come through.
BROKEN = (Exception, SystemExit, GeneratorExit)


def signal_of(exit_code: int | None) -> str:
    """Name of the signal that ended a process, "" when it ended by itself (exit codes as in subprocess)."""
    if exit_code is None or exit_code >= 0:
        return ""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def shown_bytes(size_bytes: int) -> str:
    """A size in words: 1.5 MiB."""
    power = min(max(int(abs(size_bytes)).bit_length() - 1, 0) // 10, 3)
    return f"{size_bytes / 1024**power:.1f} {('', 'KiB', 'MiB', 'GiB')[power]}" if power else f"{size_bytes:.0f} bytes"


def bare(kind: type[BaseException], args: tuple[object, ...]) -> BaseException:
    """An instance made by the C base alone: neither __new__ nor __init__ of the user runs."""
    for base in kind.__mro__:
        if issubclass(base, BaseException) and not base.__flags__ & HEAP_TYPE_FLAG and _is_layout_of(base, kind):
            made: BaseException = base.__new__(kind, *args)
            return made
    raise TypeError(f"{kind.__name__} has no base that can make it")


def _is_layout_of(base: type, kind: type) -> bool:
    """Whether `base` is the C class that lays out instances of `kind` (OSError before Exception)."""
    solid: type | None = kind
    while solid is not None and solid.__flags__ & HEAP_TYPE_FLAG:
        solid = solid.__base__
    return solid is base


def fill(error: BaseException, args: tuple[object, ...], state: dict[str, object]) -> None:
    """Give it the args and the fields of another."""
    error.args = args
    for name, value in state.items():
        try:
            object.__setattr__(error, name, value)
        except (AttributeError, TypeError):
            error.__dict__[name] = value


def state_of(error: BaseException) -> dict[str, object]:
    """All that an exception carries beside its args: fields laid out in C, slots, and its __dict__."""
    state: dict[str, object] = {}
    for kind in type(error).__mro__:
        if kind in (BaseException, object):
            continue
        for name, member in vars(kind).items():
            if name.startswith("__") or (kind, name) == (AttributeError, "obj"):
                continue            # obj is whatever the attribute was asked of: not part of the message, any size
            if isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType)):
                try:
                    value = member.__get__(error)
                except (AttributeError, TypeError):
                    continue        # never set
                if value is not None:
                    state.setdefault(name, value)
    if isinstance(error, BaseExceptionGroup):
        state = {}                  # __new__ sets what a group has
    state.update(error.__dict__)
    return state


def portable(value: object) -> object:
    """The value, or its repr when it cannot be pickled."""
    try:
        pickle.loads(dumps(value))
    except BROKEN:
        return safe(repr, value)
    return value


def dumps(value: object) -> bytes:
    """Pickled, also what is defined in the program itself."""
    blob: bytes = cloudpickle.dumps(value, protocol=5)
    return blob


def notes_of(error: BaseException) -> list[object]:
    """What was added to the error with add_note."""
    notes = getattr(error, "__notes__", None)
    return list(notes) if isinstance(notes, list) else []


def safe(show: Callable[[object], str], value: object) -> str:
    """str or repr of anything, cut to a bound; never raises."""
    try:
        return clean(show(value))[:SHOWN_CHARS_MAX]
    except BROKEN as broken:
        return f"<{type(value).__name__} whose {show.__name__} raises {type(broken).__name__}>"


def clean(text: str) -> str:
    """The text as it can be encoded."""
    return text.encode("utf-8", "backslashreplace").decode()    # lone surrogates do not travel
