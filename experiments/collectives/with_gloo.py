"""The cases with Gloo: python -m experiments.collectives.with_gloo CASES, with RANK and so on in the environment."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from experiments.collectives.trial import cases_of, durations, slowest, tell


class Member:
    """One process; it works in place, on copies that are made before the time is taken."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def barrier(self) -> None:
        """Return when all have come here."""
        dist.barrier()

    def ready(self, op: str, x: Any) -> Callable[[], Any]:
        """What is timed."""
        tensor = torch.from_numpy(x.copy())

        def run() -> Any:
            if op == "broadcast":
                dist.broadcast(tensor, src=0)
            elif op == "reduce":
                dist.reduce(tensor, dst=0)
            else:
                dist.all_reduce(tensor)
            return tensor.numpy()

        return run


def main() -> None:
    """Run the cases; rank 0 tells."""
    member = Member()
    found = []
    for case in cases_of(sys.argv[1]):
        by_rank: list[Any] = [None] * member.size
        dist.all_gather_object(by_rank, durations(member, case))
        found.append(slowest(by_rank))
    if member.rank == 0:
        tell(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
