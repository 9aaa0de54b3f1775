"""The ledger of one node: what it has, what is taken. Exact: amounts are whole numbers of ten-thousandths."""

from __future__ import annotations

import functools

from flowengine.core.messages import Shape

SCALE = 10_000  # so 0.1 CPU ten times is 1 CPU, which binary fractions do not give
CPU = "CPU"

Units = tuple[tuple[str, int], ...]


@functools.lru_cache(maxsize=4096)
def units_of(shape: Shape) -> Units:
    """A shape in whole units; amounts of 0 are left out, the smallest amount above 0 is one unit."""
    return tuple((name, max(1, round(amount * SCALE))) for name, amount in shape if amount > 0)


def shape_of(units: Units) -> Shape:
    """Whole units as a shape, for messages and people."""
    return tuple((name, count / SCALE) for name, count in units)


def shown_amount(count: int) -> str:
    """An amount in words: 1 and not 1.0."""
    return f"{count / SCALE:g}"


def without_cpu(units: Units) -> Units:
    """What a task that waits in get still holds: all but its CPU."""
    return tuple(pair for pair in units if pair[0] != CPU)


def only_cpu(units: Units) -> Units:
    """What a task that waits in get gives to others."""
    return tuple(pair for pair in units if pair[0] == CPU)


class Ledger:
    """Amounts of a node; `take` never over-commits, `retake` and `resize` may."""

    __slots__ = ("_free", "_total")

    def __init__(self, total: Shape) -> None:
        self._total: dict[str, int] = dict(units_of(total))
        self._free: dict[str, int] = dict(self._total)

    def fits(self, units: Units) -> bool:
        """Whether these amounts are free now."""
        free = self._free
        for name, count in units:
            if free.get(name, 0) < count:
                return False
        return True

    def could_fit(self, units: Units) -> bool:
        """Whether these amounts would be free if nothing was taken."""
        total = self._total
        for name, count in units:
            if total.get(name, 0) < count:
                return False
        return True

    def times(self, units: Units, limit: int) -> int:
        """How often these amounts are free now, at most `limit`."""
        for name, count in units:
            limit = min(limit, self._free.get(name, 0) // count)
        return max(0, limit)

    def take(self, units: Units) -> None:
        """Takes the amounts; raises ValueError when they are not free."""
        if not self.fits(units):
            raise ValueError(f"{shape_of(units)} is not free: {self.available()}")
        self.retake(units)

    def retake(self, units: Units) -> None:
        """Takes the amounts even if that over-commits: a task that waited goes on and cannot be held up."""
        free = self._free
        for name, count in units:
            free[name] = free.get(name, 0) - count

    def give(self, units: Units) -> None:
        """Gives the amounts back."""
        free = self._free
        for name, count in units:
            free[name] = free.get(name, 0) + count

    def resize(self, name: str, amount: float) -> None:
        """Sets the total of one resource; below what is in use it leaves a backlog that releases pay first."""
        units = max(0, round(amount * SCALE))
        change = units - self._total.get(name, 0)
        self._total[name] = units
        self._free[name] = self._free.get(name, 0) + change
        if units == 0 and self._free[name] == 0:
            del self._total[name], self._free[name]

    def used(self, name: str) -> int:
        """Units of one resource that are taken."""
        return self._total.get(name, 0) - self._free.get(name, 0)

    def lacking(self, units: Units) -> str:
        """The first resource that is not free in this amount, or ""."""
        for name, count in units:
            if self._free.get(name, 0) < count:
                return name
        return ""

    def free(self, name: str) -> int:
        """Units of one resource that are free; below 0: over-committed."""
        return self._free.get(name, 0)

    def names(self) -> tuple[str, ...]:
        """All resources, sorted."""
        return tuple(sorted(self._free))

    def total(self) -> Shape:
        """All that the node has."""
        return tuple((name, self._total[name] / SCALE) for name in sorted(self._total))

    def available(self) -> Shape:
        """What is free, never below 0."""
        return tuple((name, max(0, self._free[name]) / SCALE) for name in sorted(self._free))
