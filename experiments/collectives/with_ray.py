"""The cases with Ray, over references: python -m experiments.collectives.with_ray CASES HOSTS ADDRESS."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from experiments.collectives.trial import Case, cases_of, check, given, tell


@ray.remote(num_cpus=0)
class Member:
    """One host."""

    def make(self, case: Case, rank: int) -> Any:
        """An array that lies here."""
        return given(case, rank)

    def read(self, refs: list[Any], case: Case, rank: int, size: int) -> None:
        """Have the value here; what is checked is its ends, since this is timed."""
        [value] = ray.get(refs)
        check(case._replace(nbytes=8), rank, size, value[[0, -1]])


def round_of(case: Case, members: list[Any]) -> Callable[[], Any]:
    """What is timed, as one writes it with references; the program is on the first host."""
    size = len(members)

    def all_read(ref: Any, readers: list[Any]) -> None:
        ray.get([one.read.remote([ref], case, rank, size) for rank, one in enumerate(readers)])

    if case.op == "broadcast":
        source = ray.put(given(case, 0))
        return lambda: all_read(source, members[1:])
    refs = [one.make.remote(case, rank) for rank, one in enumerate(members)]
    ray.wait(refs, num_returns=size, fetch_local=False)

    def fold() -> Any:
        total = 0
        for value in ray.get(refs):
            total = total + value
        return total

    if case.op == "reduce":
        return fold
    return lambda: all_read(ray.put(fold()), members)


def places(hosts: int) -> list[Any]:
    """The nodes in the order of their addresses, when so many are there."""
    while len(nodes := [node for node in ray.nodes() if node["Alive"]]) < hosts:
        time.sleep(0.1)
    nodes.sort(key=lambda node: tuple(map(int, node["NodeManagerAddress"].split("."))))
    return [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]


def main() -> None:
    """Run the cases and tell."""
    cases, size, address = cases_of(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    ray.init(address=address, log_to_driver=False, logging_level="error")
    members = [Member.options(scheduling_strategy=place).remote() for place in places(size)]
    found = []
    for case in cases:
        times = []
        for _ in range(case.rounds + 1):
            run = round_of(case, members)
            began = time.perf_counter()
            result = run()
            times.append(time.perf_counter() - began)
            if result is not None:
                check(case, 0, size, result)
            del run, result
        found.append(times[1:])
    tell(found)


if __name__ == "__main__":
    main()
