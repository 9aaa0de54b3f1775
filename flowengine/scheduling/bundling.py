"""Which nodes hold the bundles of a gang or placement group: all of them, or none is reserved."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from .resources import Units, shown_amount, shown_need

STEPS_MAX = 5_000  # of the search, when taking the best node for one bundle after the other does not do
DEPTH_MAX = 64  # bundles that the search is tried for
PACK, SPREAD, STRICT_PACK, STRICT_SPREAD = "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"

Table = dict[str, dict[str, int]]  # node id -> name -> units


def arrange(free: Table, bundles: Sequence[Units], strategy: str, fixed: Mapping[int, str]) -> dict[int, str] | None:
    """A node for each bundle that is not fixed on one already, or None when there is no way (or none was found)."""
    plan = Plan(free, bundles, strategy, fixed)
    if any(count > plan.sums.get(name, 0) for name, count in summed(bundles[index] for index in plan.missing)):
        return None
    if strategy == STRICT_PACK:
        return plan.on_one_node()
    if plan.greedily():
        return plan.chosen
    if len(plan.missing) <= DEPTH_MAX:
        plan = Plan(free, bundles, strategy, fixed)
        if plan.search(0):
            return plan.chosen
    return None


class Plan:
    """Some of the bundles have a node."""

    def __init__(self, free: Table, bundles: Sequence[Units], strategy: str, fixed: Mapping[int, str]) -> None:
        self.free = {node: dict(amounts) for node, amounts in free.items()}
        self.bundles = bundles
        self.strategy = strategy
        self.used: dict[str, int] = {}  # node -> how many bundles of the set it has
        for node in fixed.values():
            self.used[node] = self.used.get(node, 0) + 1
        sums: dict[str, int] = {}
        for amounts in self.free.values():
            for name, count in amounts.items():
                sums[name] = sums.get(name, 0) + max(0, count)
        self.sums = sums
        missing = [index for index in range(len(bundles)) if index not in fixed]
        self.missing = sorted(missing, key=lambda index: (-self.weight(bundles[index]), index))  # large ones first
        self.chosen: dict[int, str] = {}
        self.steps = 0

    def weight(self, units: Units) -> float:
        """The part of all that is free that these amounts are."""
        return sum(count / self.sums[name] if self.sums.get(name) else float(count) for name, count in units)

    def room(self, node: str) -> float:
        """What is free on the node, in the same measure."""
        return sum(count / self.sums[name] for name, count in self.free[node].items() if self.sums.get(name))

    def price(self, node: str) -> tuple[float, float, str]:
        """What the strategy likes best comes first."""
        used, room = self.used.get(node, 0), self.room(node)
        if self.strategy == SPREAD:
            return (used, -room, node)
        if self.strategy == STRICT_SPREAD:
            return (0, room, node)  # the large ones are kept for what needs them
        return (-used, -room, node)

    def able(self, units: Units) -> list[str]:
        """Nodes with room for a bundle."""
        return [node for node in self.free if self.fits(node, units)]

    def fits(self, node: str, units: Units) -> bool:
        """Whether the node has room for a bundle."""
        if self.strategy == STRICT_SPREAD and self.used.get(node):
            return False
        amounts = self.free[node]
        for name, count in units:
            if amounts.get(name, 0) < count:
                return False
        return True

    def put(self, index: int, node: str, sign: int = 1) -> None:
        """Give the bundle to the node, or take it away again (sign -1)."""
        amounts = self.free[node]
        for name, count in self.bundles[index]:
            amounts[name] = amounts.get(name, 0) - sign * count
        self.used[node] = self.used.get(node, 0) + sign
        if sign > 0:
            self.chosen[index] = node
        else:
            del self.chosen[index]

    def greedily(self) -> bool:
        """One bundle after the other to the node that is liked best; each changes the price of one node only."""
        for units, alike in groupby(self.missing, key=lambda index: self.bundles[index]):
            line = [(self.price(node), node) for node in self.able(units)]
            heapq.heapify(line)
            for index in alike:
                if not line:
                    return False
                node = heapq.heappop(line)[1]
                self.put(index, node)
                if self.fits(node, units):
                    heapq.heappush(line, (self.price(node), node))
        return True

    def search(self, depth: int) -> bool:
        """The same with going back; nodes that look the same are tried once."""
        if depth == len(self.missing):
            return True
        index = self.missing[depth]
        tried: dict[tuple[object, ...], None] = {}
        for node in sorted(self.able(self.bundles[index]), key=self.price):
            look = (self.used.get(node, 0), tuple(sorted(self.free[node].items())))
            if look in tried:
                continue
            tried[look] = None
            self.steps += 1
            if self.steps > STEPS_MAX:
                return False
            self.put(index, node)
            if self.search(depth + 1):
                return True
            self.put(index, node, -1)
        return False

    def on_one_node(self) -> dict[int, str] | None:
        """All on the node that has some already, else on the one with most room."""
        need = summed(self.bundles[index] for index in self.missing)
        for node in list(self.used) or sorted(self.free, key=self.price):
            amounts = self.free.get(node, {})
            if all(amounts.get(name, 0) >= count for name, count in need):
                return dict.fromkeys(self.missing, node)
        return None


def summed(bundles: Iterable[Units]) -> Units:
    """All amounts together."""
    sums: dict[str, int] = {}
    for units in bundles:
        for name, count in units:
            sums[name] = sums.get(name, 0) + count
    return tuple(sorted(sums.items()))


def shown(units: Units) -> str:
    """Amounts in words."""
    return " and ".join(shown_need(name, count) for name, count in units)


def why_never(total: Table, bundles: Sequence[Units], strategy: str) -> str:
    """Why nodes that were empty could not hold the bundles, or ""; total: what they have."""
    if arrange(total, bundles, strategy, {}) is not None:
        return ""
    need = summed(bundles)
    for index, units in enumerate(bundles):
        if not any(all(amounts.get(name, 0) >= count for name, count in units) for amounts in total.values()):
            return f"no node has {shown(units)} (bundle {index})"
    if strategy == STRICT_PACK:
        return f"no node has {shown(need)} together (STRICT_PACK)"
    if strategy == STRICT_SPREAD and len(bundles) > len(total):
        return f"its {len(bundles)} bundles want nodes of their own (STRICT_SPREAD) and there are {len(total)}"
    for name, count in need:
        have = sum(amounts.get(name, 0) for amounts in total.values())
        if have < count:
            return f"it needs {shown_need(name, count)} and all nodes have {shown_amount(have, name)}"
    return f"the nodes cannot hold {len(bundles)} such bundles at once ({strategy})"


def why_not_now(free: Table, bundles: Sequence[Units], rest: Sequence[int]) -> str:
    """What those that have no node wait for; rest: which these are."""
    names = ", ".join(str(index) for index in rest[:8]) + (", ..." if len(rest) > 8 else "")
    need = summed(bundles[index] for index in rest)
    for name, count in need:
        have = sum(max(0, amounts.get(name, 0)) for amounts in free.values())
        if have < count:
            return f"bundles {names} wait for {shown_need(name, count)}, free is {shown_amount(have, name)}"
    return f"bundles {names} wait: what is free lies on the wrong nodes"


def minus_units(free: Table, node: str, units: Units) -> None:
    """Take amounts away from what a node has in a table."""
    amounts = free.get(node)
    if amounts is not None:
        for name, count in units:
            amounts[name] = amounts.get(name, 0) - count
