"""What the head tells the plugin beside a Dask scheduler, and how many workers that calls for."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from flowengine.core.messages import Shape


class NodeSeen(msgspec.Struct, frozen=True):
    """A node as the plugin beside the scheduler needs to know it; one without anything to offer is a program's."""

    total: Shape
    is_used: bool


class Waiting(msgspec.Struct, frozen=True):
    """Tasks that no node has room for: so many, each of which needs so much; run_s 0: not known how long they run."""

    shape: Shape
    count: int
    run_s: float


class Report(msgspec.Struct, frozen=True):
    """What the head tells when it has changed."""

    address: str
    nodes: dict[str, NodeSeen] = {}
    waiting: list[Waiting] = []


def workers_wanted(waiting: Iterable[Waiting], totals: list[dict[str, float]], target_s: float) -> int:
    """How many more workers like those there are would serve all that waits in target_s."""
    found = 0
    for one in waiting:
        need = [(name, amount) for name, amount in one.shape if amount > 0]
        fits = [min((total.get(name, 0.0) / amount for name, amount in need), default=1.0) for total in totals]
        at_once = max(1, math.floor(max(fits, default=1.0)))
        if fits and max(fits) < 1:
            continue  # more of the same would not help
        wanted = math.ceil(one.count / at_once)
        found += min(wanted, max(1, math.ceil(wanted * one.run_s / target_s))) if one.run_s else wanted
    return found
