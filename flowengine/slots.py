"""Where the values of top-level references go in a call's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
