"""Where values go: those of top-level references in a call's arguments, what a task returns among its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import BadValue


class Slot:
    """Stands in pickled arguments for the value of the index-th reference."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> tuple[type[Slot], tuple[int]]:
        return Slot, (self.index,)


def fill_slots(
    args: Sequence[Any], kwargs: dict[str, Any], values: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with values in place of slots."""
    if not values:
        return tuple(args), kwargs
    filled = tuple([values[arg.index] if type(arg) is Slot else arg for arg in args])
    named = {name: values[arg.index] if type(arg) is Slot else arg for name, arg in kwargs.items()}
    return filled, named


def as_results(result: Any, count: int, name: str) -> list[Any]:
    """What a task with several returns gave, as so many values; a wrong number is the caller's mistake."""
    try:
        results = list(result) if not isinstance(result, (dict, str, bytes)) else None
    except TypeError:
        results = None
    if results is None:
        raise BadValue(f"{name} must return {count} values (num_returns={count}), not {type(result).__name__}")
    if len(results) != count:
        raise BadValue(f"{name} must return {count} values (num_returns={count}), not {len(results)}")
    return results
