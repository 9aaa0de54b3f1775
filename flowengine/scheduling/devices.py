"""The numbered GPUs of one node, or of a bundle: who holds which. Parts of one are shared, whole ones held alone."""

from __future__ import annotations

from collections.abc import Sequence

from flowengine.errors import BadValue

from .resources import SCALE, Units

GPU = "GPU"


def gpu_in(units: Units) -> str:
    """The name of GPUs among these amounts, also of those that were reserved for a bundle; "" for none."""
    return next((name for name, _ in units if name == GPU or name.startswith(f"{GPU}@")), "")


def gpus_in(units: Units) -> int:
    """Units of GPU among these."""
    name = gpu_in(units)
    return dict(units)[name] if name else 0


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
    """How much of each GPU is free, in units; size: of each to begin with, less than all of it for a part of one."""

    __slots__ = ("_free", "size")

    def __init__(self, names: tuple[str, ...], size: int = SCALE) -> None:
        self.size = size
        self._free = dict.fromkeys(names, size)

    def __bool__(self) -> bool:
        return bool(self._free)

    def pick(self, units: int) -> tuple[str, ...]:
        """GPUs that have so much free: whole ones, or one that is shared and then the fullest; () when none fit."""
        if units < SCALE:
            fitting = [name for name, free in self._free.items() if free >= units]
            return (min(fitting, key=self._free.__getitem__),) if fitting else ()
        whole = tuple([name for name, free in self._free.items() if free == SCALE][: units // SCALE])
        return whole if len(whole) == units // SCALE else ()

    def take_each(self, needs: Sequence[int]) -> list[tuple[str, ...]] | None:
        """Takes GPUs for each of these needs, () for 0; None, and nothing is taken, when they do not fit together."""
        found: list[tuple[str, ...]] = [()] * len(needs)
        for index in sorted(range(len(needs)), key=lambda index: -needs[index]):  # parts are put where whole ones end
            found[index] = self.pick(needs[index]) if needs[index] else ()
            if needs[index] and not found[index]:
                for names, units in zip(found, needs, strict=True):
                    self.give(names, units)
                return None
            self.take(found[index], needs[index])
        return found

    def held(self) -> dict[str, int]:
        """What is taken, by GPU."""
        return {name: self.size - free for name, free in self._free.items() if free != self.size}

    def take(self, names: tuple[str, ...], units: int) -> None:
        """They are held."""
        for name in names:
            self._free[name] -= min(units, SCALE)

    def give(self, names: tuple[str, ...], units: int) -> None:
        """They are free again."""
        for name in names:
            self._free[name] += min(units, SCALE)
