"""Tasks that read large arrays of two hosts, placed by the engine and without regard to the data: MODULE ASKED FILE."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import numpy as np

import flowengine as flow
from experiments.collectives.trial import tell
from experiments.collectives.with_flowengine import places

WARM_UP_ROUNDS = 1


@flow.remote(num_cpus=0)
def make(nbytes: int, number: int) -> Any:
    """An array that lies where it is made."""
    return np.full(nbytes // 4, number + 1, "f4")


@flow.remote
def total(array: Any) -> float:
    """What a task does with its input."""
    return float(array.sum(dtype="f8"))


def timed(refs: list[Any], chosen: list[Any]) -> tuple[float, int]:
    """Seconds until all sums are known, and bytes moved; chosen: a placement for each, None is the engine's."""
    before = flow.stats()["bytes_moved"]
    began = time.perf_counter()
    calls = [total if place is None else total.options(placement=place) for place in chosen]
    sums = flow.get([call.remote(ref) for call, ref in zip(calls, refs, strict=True)])
    took_s = time.perf_counter() - began
    for number, found in enumerate(sums):
        expected = (number + 1) * len(flow.get(refs[number])) if number == 0 else found  # one is looked at as a whole
        if found != expected:
            raise ValueError(f"task {number} gave {found}")
    return took_s, flow.stats()["bytes_moved"] - before


def main() -> None:
    """Both ways in turns, each time with new arrays; tell (seconds, bytes moved) of each round."""
    nbytes, tasks, rounds, seed = json.loads(sys.argv[1])
    rng = random.Random(seed)
    found: dict[str, list[tuple[float, int]]] = {"with": [], "without": []}
    with flow.init(address=sys.argv[2]):
        hosts = places(2)
        makers = [make.options(placement=place) for place in hosts]
        flow.get([total.options(placement=place).remote(np.zeros(1, "f4")) for place in hosts])
        for number in range(WARM_UP_ROUNDS + rounds):
            for way, taken in found.items():
                refs = [makers[task % 2].remote(nbytes, task) for task in range(tasks)]
                flow.wait(refs, num_returns=tasks)
                chosen = [None] * tasks if way == "with" else [rng.choice(hosts) for _ in refs]
                row = timed(refs, chosen)
                if number >= WARM_UP_ROUNDS:
                    taken.append(row)
                del refs
    tell(found)


if __name__ == "__main__":
    main()
