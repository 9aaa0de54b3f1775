"""The ledger of one node: what it has, what is taken. Exact: amounts are whole numbers of ten-thousandths.

Names that a program makes at run time belong to it: in shapes, ledgers and at the head they are keys, NAME + SEP + JOB,
where the job is the address of the program's driver. Names with "@" are made by the engine and used as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Container

from flowengine.core.bundles import MARKS
from flowengine.core.messages import Shape

SCALE = 10_000  # so 0.1 CPU ten times is 1 CPU, which binary fractions do not give
CPU, MEMORY = "CPU", "memory"
BUILTIN = (CPU, "GPU", MEMORY)
SEP = "\x1f"  # between a name and the job that it belongs to
AT = "@"  # in names that the engine makes
ACTOR = "@actor:"  # and its id: what there is of without limit on the node where the actor lives
BESIDE, APART = "affinity ", "anti-affinity "  # and a label: what policies make
SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1, "bytes"))
NARROW_MAX = 8  # names; what is said for each task is not said for more
LIMITLESS = 1 << 61  # units of an amount without limit
LENT = (CPU + AT, *MARKS)  # beginnings of names of bundles that a task which waits lends, as it lends CPU

Units = tuple[tuple[str, int], ...]


def key_of(name: str, job: str) -> str:
    """What the name stands for in a program: itself if it is the engine's, else the program's own."""
    return name if name in BUILTIN or AT in name or SEP in name else f"{name}{SEP}{job}"


def program_of(driver: str, me: str) -> str:
    """The job of running code: driver as in TaskSpec, me: the address of the process."""
    return driver.partition(" ")[0] or me


def is_own(key: str) -> bool:
    """Whether a program made what the key stands for; the head says how much of it there is."""
    return SEP in key and AT not in key


def plain(key: str) -> str:
    """The name as people know it."""
    return key.partition(SEP)[0]


def job_of(key: str) -> str:
    """The job that the key belongs to, or ""."""
    return key.partition(SEP)[2]


class Wide(tuple[tuple[str, float], ...]):
    """A shape of many names: what is needed of it for each task is worked out once."""

    code: int  # its hash: it is part of the name of a queue
    brief: Shape

    def __hash__(self) -> int:
        return self.code


def of_job(shape: Shape, job: str) -> Shape:
    """A shape with the names as keys of a program."""
    keys = tuple((key_of(name, job), amount) for name, amount in shape)
    if len(keys) <= NARROW_MAX:
        return keys
    wide = Wide(keys)
    wide.code, wide.brief = tuple.__hash__(keys), brief(keys)
    return wide


def brief(shape: Shape) -> Shape:
    """What a worker has to know of the shape of what it runs: not what programs made, of which there may be much."""
    return shape.brief if type(shape) is Wide else tuple(pair for pair in shape if not is_own(pair[0]))


def resolve(units: Units, static: Container[str]) -> Units:
    """The amounts under the keys of a node: what it has by itself (static) goes before what a program made."""
    for name, _ in units:
        if is_own(name) and plain(name) in static:
            return tuple((plain(key) if is_own(key) and plain(key) in static else key, count) for key, count in units)
    return units


@functools.lru_cache(maxsize=4096)
def units_of(shape: Shape) -> Units:
    """A shape in whole units; amounts of 0 are left out, the smallest amount above 0 is one unit."""
    return tuple((name, max(1, round(amount * SCALE))) for name, amount in shape if amount > 0)


def shape_of(units: Units) -> Shape:
    """Whole units as a shape, for messages and people."""
    return tuple((name, count / SCALE) for name, count in units)


def shown_amount(count: int, key: str = "") -> str:
    """An amount in words: 1 and not 1.0; of memory (its key tells) in GiB, MiB or bytes."""
    if key.partition(AT)[0] == MEMORY:
        unit, name = next((pair for pair in SIZES if count >= pair[0] * SCALE), SIZES[-1])
        return f"{count / SCALE / unit:,.{1 if unit > 1 else 0}f} {name}"
    return "any amount" if LIMITLESS // 2 <= count <= LIMITLESS else f"{count / SCALE:g}"


def shown_name(key: str) -> str:
    """What a key stands for, as people know it."""
    if key.startswith(ACTOR):
        return f"actor {key.removeprefix(ACTOR)[:12]}"
    name, _, bundle = key.partition(AT)
    if not bundle:
        return plain(key)
    group, _, index = bundle.rpartition(".")
    return f"{plain(name)} of bundle {index} of {group}" if name else f"bundle {index} of {group}"


def shown_need(key: str, count: int) -> str:
    """How much of what, in words."""
    return f"{shown_name(key)}: {shown_amount(count, key)}"


def without_cpu(units: Units) -> Units:
    """What a task that waits in get still holds: all but its CPU."""
    return tuple(pair for pair in units if not _is_lent(pair[0]))


def only_cpu(units: Units) -> Units:
    """What a task that waits in get gives to others: CPU, and in a bundle its place there."""
    return tuple(pair for pair in units if _is_lent(pair[0]))


def _is_lent(name: str) -> bool:
    return name == CPU or name.startswith(LENT)


class Ledger:
    """Amounts of a node; `take` never over-commits, `retake` and `resize` may.

    What the node was started with is static. The rest came at run time (see the top of the file); nobody walks over it.
    """

    __slots__ = ("_free", "_total", "changed", "over", "static")

    def __init__(self, total: Shape) -> None:
        self._total: dict[str, int] = dict(units_of(total))
        self._free: dict[str, int] = dict(self._total)
        self.static = dict.fromkeys(sorted(self._total))
        self.changed: dict[str, None] = {}  # keys that came at run time and changed since `news`
        self.over: dict[str, None] = {}  # those of which more is taken than there is

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
            if name not in self.static:
                self._moved(name)

    def give(self, units: Units) -> None:
        """Gives the amounts back."""
        free = self._free
        for name, count in units:
            free[name] = free.get(name, 0) + count
            if name not in self.static:
                self._moved(name)

    def resize(self, name: str, amount: float) -> None:
        """Sets the total of one resource; below what is in use it leaves a backlog that releases pay first."""
        self.resize_units(name, max(0, round(amount * SCALE)))

    def resize_units(self, name: str, units: int) -> None:
        """The same in whole units; 0: it is gone when nobody holds any more of it."""
        change = units - self._total.get(name, 0)
        if not change:
            return
        self._total[name] = units
        self._free[name] = self._free.get(name, 0) + change
        if name not in self.static:
            self._moved(name)

    def _moved(self, name: str) -> None:
        self.changed[name] = None
        if self._free[name] < 0:
            self.over[name] = None
            return
        self.over.pop(name, None)
        if not self._total.get(name) and not self._free[name]:
            self._total.pop(name, None)
            del self._free[name]

    def news(self) -> tuple[tuple[str, int, int], ...]:
        """Key, total and free amount of what came at run time and changed since the last call."""
        if not self.changed:
            return ()
        changed, self.changed = self.changed, {}
        return tuple((name, self._total.get(name, 0), self._free.get(name, 0)) for name in changed)

    def all_changed(self) -> None:
        """The next news tells of all that came at run time."""
        self.changed.update(dict.fromkeys(name for name in self._free if name not in self.static))

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

    def size(self, name: str) -> int:
        """Units of one resource that the node has."""
        return self._total.get(name, 0)

    def names(self) -> tuple[str, ...]:
        """All resources, sorted: also what came at run time."""
        return tuple(sorted(self._free))

    def total(self) -> Shape:
        """What the node was started with."""
        return tuple((name, self._total[name] / SCALE) for name in self.static)

    def available(self) -> Shape:
        """What is free of that, never below 0."""
        return tuple((name, max(0, self._free[name]) / SCALE) for name in self.static)
