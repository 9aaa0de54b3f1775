"""Reductions over the hosts of a cluster by trees of given degrees: -m experiments.reduce_degree.program ASKED FILE."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

import flowengine as flow
from experiments.collectives.trial import tell
from experiments.collectives.with_flowengine import places
from flowengine.collectives import across
from flowengine.collectives.refs import Reduction
from flowengine.collectives.tree import degree

CHOSEN = 0  # the engine decides
WARM_UP_ROUNDS = 2


class Fixed(Reduction):
    """A reduction whose tree has a degree that was decided beforehand."""

    def __init__(self, each: int) -> None:
        super().__init__("sum")
        self.each = each
        self.__name__ = self.__qualname__ = f"reduce by {each}"

    def __call__(self, *inputs: Any) -> Any:
        if self.each != CHOSEN:
            across.degree = lambda *_: self.each
        try:
            return super().__call__(*inputs)
        finally:
            across.degree = degree


def make(nbytes: int, number: int) -> Any:
    """An array that lies where it is made."""
    return np.full(nbytes // 4, number + 1, "f4")


def timed(refs: list[Any], each: int, here: Any) -> float:
    """Seconds of one reduction."""
    began = time.perf_counter()
    total = flow.get(flow.remote(Fixed(each)).options(num_cpus=0, placement=here).remote(*refs))
    took_s = time.perf_counter() - began
    if not (total == len(refs) * (len(refs) + 1) // 2).all():
        raise ValueError(f"a reduction by {each} gave {total}")
    return took_s


def main() -> None:
    """Measure each size with each degree, in turns; tell seconds by size and degree."""
    hosts, degrees, sizes = json.loads(sys.argv[1])
    found = []
    with flow.init(address=sys.argv[2]):
        here, *others = places(hosts)
        for nbytes, rounds in sizes:
            makers = [flow.remote(make).options(num_cpus=0, placement=place) for place in others]
            refs = [maker.remote(nbytes, number) for number, maker in enumerate(makers)]
            flow.wait(refs, num_returns=len(refs))
            times: dict[int, list[float]] = {each: [] for each in (CHOSEN, *degrees)}
            for number in range(WARM_UP_ROUNDS + rounds):
                for each, taken in times.items():
                    took_s = timed(refs, each, here)
                    if number >= WARM_UP_ROUNDS:
                        taken.append(took_s)
            found.append(list(times.values()))
    tell(found)


if __name__ == "__main__":
    main()
