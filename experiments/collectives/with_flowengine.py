"""The cases here, in a group or over references: -m experiments.collectives.with_flowengine WAY CASES SIZE [FILE]."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import flowengine as flow
from experiments.collectives.trial import Case, cases_of, check, durations, given, slowest, tell

JOIN_S = 120.0


class InGroup:
    """A member of a group, as the trial asks for it."""

    def __init__(self, name: str, size: int, rank: int) -> None:
        self.group = flow.collectives.join(name, size, rank, timeout_s=JOIN_S)
        self.rank, self.size = rank, size

    def barrier(self) -> None:
        """Return when all have come here."""
        self.group.barrier()

    def ready(self, op: str, x: Any) -> Callable[[], Any]:
        """What is timed."""
        if op == "broadcast":
            return lambda: self.group.broadcast(x if self.rank == 0 else None)
        if op == "reduce":
            return lambda: self.group.reduce(x)
        return lambda: self.group.allreduce(x)


@flow.remote(num_cpus=0)
class Member:
    """One process, or one host."""

    def join(self, name: str, size: int, rank: int) -> None:
        """Take a seat."""
        self.peer = InGroup(name, size, rank)

    def leave(self) -> None:
        """Give it up."""
        self.peer.group.leave()

    def run(self, case: Case) -> list[float]:
        """Seconds of each round."""
        return durations(self.peer, Case(*case))

    def make(self, case: Case, rank: int) -> Any:
        """An array that lies here."""
        return given(Case(*case), rank)

    def read(self, refs: list[Any], case: Case, rank: int, size: int) -> None:
        """Have the value here; what is checked is its ends, since this is timed."""
        [value] = flow.get(refs)
        check(Case(*case)._replace(nbytes=8), rank, size, value[[0, -1]])


def in_group(cases: list[Case], members: list[Any]) -> list[list[float]]:
    """All members call; how long each round took the last of them."""
    size, found = len(members), []
    for number, case in enumerate(cases):  # each in a group of its own: what is kept for members ends with theirs
        flow.get([one.join.remote(f"trial {number}", size, rank) for rank, one in enumerate(members)])
        found.append(slowest(flow.get([one.run.remote(case) for one in members])))
        flow.get([one.leave.remote() for one in members])
    return found


def round_of(case: Case, members: list[Any]) -> Callable[[], Any]:
    """What is timed, as one writes it with references; the program is on the first host."""
    size = len(members)

    def all_read(ref: Any, readers: list[Any]) -> None:
        flow.get([one.read.remote([ref], case, rank, size) for rank, one in enumerate(readers)])

    if case.op == "broadcast":
        source = flow.put(given(case, 0))
        return lambda: all_read(source, members[1:])
    refs = [one.make.remote(case, rank) for rank, one in enumerate(members)]
    flow.wait(refs, num_returns=size)
    if case.op == "reduce":
        return lambda: flow.get(flow.reduce(refs))
    return lambda: all_read(flow.allreduce(refs), members)


def over_refs(cases: list[Case], members: list[Any]) -> list[list[float]]:
    """The program calls; how long each round took it."""
    found = []
    for case in cases:
        times = []
        for _ in range(case.rounds + 1):
            run = round_of(case, members)
            began = time.perf_counter()
            result = run()
            times.append(time.perf_counter() - began)
            if result is not None:
                check(case, 0, len(members), result)
            del run, result
        found.append(times[1:])
    return found


WAYS = {"group": in_group, "refs": over_refs}


@contextmanager
def members_of(size: int, file: str = "") -> Iterator[list[Any]]:
    """Processes of this host, or one on each host of a cluster in the order of their addresses."""
    with flow.init(address=file) if file else flow.init(num_workers=2):
        if not file:
            yield [Member.remote() for _ in range(size)]
            return
        yield [Member.options(placement=place).remote() for place in places(size)]


def places(size: int) -> list[Any]:
    """The nodes of a cluster in the order of their addresses, when so many are there."""
    while len(nodes := flow.nodes()) < size:
        time.sleep(0.05)
    nodes.sort(key=lambda node: (tuple(map(int, node.host.split("."))), node.node_id))
    return [flow.scheduling.node(node.node_id) for node in nodes]


def main() -> None:
    """Run the cases and tell."""
    way, cases, size, *file = sys.argv[1:]
    with members_of(int(size), *file) as members:
        tell(WAYS[way](cases_of(cases), members))


if __name__ == "__main__":
    main()
