"""The numbered GPUs of one node: who holds which. Parts of one are shared, whole ones are held alone."""

from __future__ import annotations

from flowengine.errors import BadValue

from .resources import SCALE, Units

GPU = "GPU"


def gpus_in(units: Units) -> int:
    """Units of GPU among these, also of those that were reserved for a bundle."""
    return sum(count for name, count in units if name == GPU or name.startswith(f"{GPU}@"))


def names_of(count: float, visible: str | None) -> tuple[str, ...]:
    """Names of so many GPUs: numbers from 0, or the first ones of what CUDA_VISIBLE_DEVICES lists; raises BadValue."""
    whole = int(count)
    if whole != count:
        raise BadValue(f"GPU: a node has whole ones, not {count:g}")
    if visible is None or not whole:
        return tuple(map(str, range(whole)))
    listed = listed_in(visible)
    if len(listed) < whole:
        raise BadValue(f"GPU: {whole} of them, but CUDA_VISIBLE_DEVICES={visible!r} lists {len(listed)}")
    return listed[:whole]


def listed_in(visible: str) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES lists; as CUDA does it, nothing counts from the first -1 on."""
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return tuple(names[: names.index("-1")] if "-1" in names else names)


class Devices:
    """How much of each GPU is free, in units."""

    __slots__ = ("_free",)

    def __init__(self, names: tuple[str, ...]) -> None:
        self._free = dict.fromkeys(names, SCALE)

    def __bool__(self) -> bool:
        return bool(self._free)

    def pick(self, units: int) -> tuple[str, ...]:
        """GPUs that have so much free: whole ones, or one that is shared and then the fullest; () when none fit."""
        if units < SCALE:
            fitting = [name for name, free in self._free.items() if free >= units]
            return (min(fitting, key=self._free.__getitem__),) if fitting else ()
        whole = tuple([name for name, free in self._free.items() if free == SCALE][: units // SCALE])
        return whole if len(whole) == units // SCALE else ()

    def take(self, names: tuple[str, ...], units: int) -> None:
        """They are held."""
        for name in names:
            self._free[name] -= min(units, SCALE)

    def give(self, names: tuple[str, ...], units: int) -> None:
        """They are free again."""
        for name in names:
            self._free[name] += min(units, SCALE)
