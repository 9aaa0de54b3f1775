"""What every peer is asked to do, and how it is timed. Needs numpy alone: each peer has an environment of its own."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

OPS = ("broadcast", "reduce", "allreduce")


class Case(NamedTuple):
    """One operation on float32 arrays of a size, so many times."""

    op: str
    nbytes: int
    rounds: int


class Peer(Protocol):
    """One member of a group of some engine."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Return when all have come here."""

    def ready(self, op: str, x: Any) -> Callable[[], Any]:
        """What is timed: it returns the result, where there is one. What is prepared here is not timed."""


def given(case: Case, rank: int) -> Any:
    """The array of a rank."""
    return np.full(case.nbytes // 4, rank + 1, "f4")


def check(case: Case, rank: int, size: int, found: Any) -> None:
    """Raise when a result is wrong."""
    if case.op == "reduce" and rank:
        return
    expected = 1 if case.op == "broadcast" else size * (size + 1) // 2
    if found.size != case.nbytes // 4 or not (found == expected).all():
        raise ValueError(f"{case}: rank {rank} has {found}, not {expected}")


def durations(peer: Peer, case: Case) -> list[float]:
    """Seconds that each round took this rank, after one that is not counted."""
    x = given(case, peer.rank)
    found = []
    for _ in range(case.rounds + 1):
        run = peer.ready(case.op, x)
        peer.barrier()
        began = time.perf_counter()
        result = run()
        found.append(time.perf_counter() - began)
        check(case, peer.rank, peer.size, result)
    return found[1:]


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """How long each round took the last of the ranks."""
    return [max(one) for one in zip(*by_rank, strict=True)]


def cases_of(text: str) -> list[Case]:
    """What a program is asked for on its command line."""
    return [Case(*row) for row in json.loads(text)]


def tell(found: Any) -> None:
    """A program's answer: the last line of its output."""
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    sys.stdout.flush()
