"""Trees that fold inputs on their way: of which degree, and which slot is above which.

Slots are numbered by a walk that visits a slot behind its first child and before its others, so that what is folded is
folded in the order of the slots.
"""

from __future__ import annotations

from ..core.collective import WHOLE

NO_STEP = (WHOLE, WHOLE, 0)  # of no group
Shape = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]  # the inputs that each slot gives, and the slot above each


def levels(count: int, degree: int) -> int:
    """Hops from the farthest of so many inputs to where their fold is wanted."""
    if degree == 1:
        return count
    found, reach = 1, degree
    while reach < count:
        found, reach = found + 1, reach * degree
    return found


def fold_s(count: int, degree: int, nbytes: int, latency_s: float, bytes_per_s: float) -> float:
    """How long a pipelined fold takes: a hop costs its latency, and a slot gets the bytes of each slot below it."""
    return levels(count, degree) * latency_s + min(degree, count) * nbytes / bytes_per_s


def degree(count: int, nbytes: int, latency_s: float, bytes_per_s: float) -> int:
    """The degree of the tree that is soonest done: 1 is a chain, best for much; count a star, best for little."""
    return min(range(1, max(count, 1) + 1), key=lambda each: fold_s(count, each, nbytes, latency_s, bytes_per_s))


def upwards(above: tuple[int, ...]) -> list[int]:
    """The slots of a tree, each behind all that are below it."""
    order = [above.index(-1)]
    for slot in order:
        order += [child for child, parent in enumerate(above) if parent == slot]
    return order[::-1]


def parents(slots: int, degree: int) -> tuple[int, ...]:
    """For each slot that above it, -1 for the root's: a tree that is as flat as the degree lets it be."""
    above = [-1] * slots
    open_trees = [(0, slots, -1)]  # (first slot, slots, that above)
    while open_trees:
        first, size, parent = open_trees.pop()
        each, more = divmod(size - 1, degree)
        root = first + each + (more > 0)
        above[root] = parent
        begin = first
        for number in range(degree):
            below = each + (number < more)
            if not below:
                break
            open_trees.append((begin, below, root))
            begin += below + (number == 0)
    return tuple(above)
