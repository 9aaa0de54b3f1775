"""Whether two values are the same, and if not, where they differ first: what a replay gave against the record."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from flowengine.errors import TaskError
from flowengine.objects import codec

ADDRESS = re.compile(r"0x[0-9a-f]+")
SHOWN_CHARS_MAX = 200
DEPTH_MAX = 20


def difference(recorded: Any, replayed: Any, path: str = "", depth: int = 0) -> str:
    """Where they differ, in words; empty when they do not as far as anybody can tell."""
    if recorded is replayed:
        return ""
    differ = f"{path or 'it'} is {shown(replayed)}, the record says {shown(recorded)}"
    if type(recorded) is not type(replayed):
        if type(recorded).__qualname__ == type(replayed).__qualname__ and blobs_equal(recorded, replayed):
            return ""  # a class of the program itself, which was unpickled once for each
        return differ
    if isinstance(recorded, np.ndarray):
        same = arrays_equal(recorded, replayed)
        return "" if same else f"{path or 'it'} differs: {array_difference(recorded, replayed)}"
    if depth < DEPTH_MAX and isinstance(recorded, Mapping):
        if recorded.keys() != replayed.keys():
            return f"{path or 'it'} has the keys {shown(list(replayed))}, the record says {shown(list(recorded))}"
        pairs = ((f"{path}[{key!r}]", recorded[key], replayed[key]) for key in recorded)
        return first_difference(pairs, depth)
    if depth < DEPTH_MAX and isinstance(recorded, list | tuple):
        if len(recorded) != len(replayed):
            return f"{path or 'it'} has {len(replayed)} items, the record says {len(recorded)}"
        numbered = zip(itertools.count(), recorded, replayed, strict=False)
        return first_difference(((f"{path}[{index}]", one, other) for index, one, other in numbered), depth)
    with contextlib.suppress(Exception):  # code of the user
        if bool(recorded == replayed) or (recorded != recorded and replayed != replayed):
            return ""
    if blobs_equal(recorded, replayed):
        return ""
    fields = getattr(recorded, "__dict__", None)
    if fields and depth < DEPTH_MAX and "__eq__" not in dir_of(type(recorded)):
        return difference(fields, replayed.__dict__, f"{path}.__dict__".lstrip("."), depth + 1)
    return differ


def dir_of(kind: type) -> dict[str, None]:
    """What a class and its bases define, but for what every object has."""
    return dict.fromkeys(name for base in kind.__mro__ if base is not object for name in vars(base))


def first_difference(pairs: Any, depth: int) -> str:
    """The first among parts of two values."""
    return next((found for path, one, other in pairs if (found := difference(one, other, path, depth + 1))), "")


def blobs_equal(recorded: Any, replayed: Any) -> bool:
    """Whether they are pickled alike, both after one round, so that what is shared inside of them counts alike."""
    try:
        once, again = [codec.to_inline(codec.pack(value)) for value in (recorded, replayed)]
        if once == again:
            return True
        once, again = [codec.to_inline(codec.pack(codec.from_inline(blob))) for blob in (once, again)]
    except Exception:  # it cannot be pickled, or code of the user raises
        return False
    return once == again


def arrays_equal(recorded: np.ndarray[Any, Any], replayed: np.ndarray[Any, Any]) -> bool:
    """NaN counts as equal to itself."""
    if recorded.dtype != replayed.dtype or recorded.shape != replayed.shape:
        return False
    return np.array_equal(recorded, replayed, equal_nan=recorded.dtype.kind in "fc")


def array_difference(recorded: np.ndarray[Any, Any], replayed: np.ndarray[Any, Any]) -> str:
    """The first place where two arrays differ."""
    if recorded.dtype != replayed.dtype or recorded.shape != replayed.shape:
        return f"{replayed.dtype}{list(replayed.shape)}, the record says {recorded.dtype}{list(recorded.shape)}"
    unequal = np.argwhere(np.atleast_1d(recorded != replayed) & ~np.atleast_1d(is_nan(recorded) & is_nan(replayed)))
    place = tuple(int(index) for index in unequal[0])
    one, other = np.atleast_1d(recorded)[place], np.atleast_1d(replayed)[place]
    return f"at {list(place)} {other!r}, the record says {one!r} ({len(unequal)} of {recorded.size} items differ)"


def is_nan(array: np.ndarray[Any, Any]) -> Any:
    """Where it is no number."""
    return np.isnan(array) if array.dtype.kind in "fc" else np.zeros(array.shape, bool)


def error_difference(recorded: BaseException, raised: BaseException) -> str:
    """As `difference`, of the errors of user code."""
    one, other = (told_of(root_of(error)) for error in (recorded, raised))
    return "" if one == other else f"it raises {other}, the record says {one}"


def root_of(error: BaseException) -> BaseException:
    """What user code raised, in the innermost of the tasks that waited for each other."""
    while isinstance(error, TaskError) and error._origin[0] is not None:
        error = error._origin[0]
    return error


def told_of(error: BaseException) -> str:
    """Type and text; addresses in memory differ each time."""
    name = getattr(error, "type_name", None) or type(error).__qualname__
    return f"{name}: {ADDRESS.sub('0x..', str(error))}"


def shown(value: Any) -> str:
    """A value in words, cut short; never raises."""
    try:
        text = repr(value)
    except Exception:  # code of the user
        text = f"<{type(value).__qualname__}>"
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}..."
