"""The cases with OpenMPI, started by mpirun: python -m experiments.collectives.with_openmpi CASES."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from experiments.collectives.trial import cases_of, durations, slowest, tell


class Member:
    """One process; buffers of results are touched before the time is taken."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size

    def barrier(self) -> None:
        """Return when all have come here."""
        self.comm.Barrier()

    def ready(self, op: str, x: Any) -> Callable[[], Any]:
        """What is timed."""
        out = x.copy() if op == "broadcast" else np.ones_like(x)

        def run() -> Any:
            if op == "broadcast":
                self.comm.Bcast(out, root=0)
            elif op == "reduce":
                self.comm.Reduce(x, out, op=MPI.SUM, root=0)
            else:
                self.comm.Allreduce(x, out, op=MPI.SUM)
            return out

        return run


def main() -> None:
    """Run the cases; rank 0 tells."""
    member = Member()
    found = []
    for case in cases_of(sys.argv[1]):
        by_rank = member.comm.gather(durations(member, case))
        found.append(slowest(by_rank) if by_rank else [])
    if member.rank == 0:
        tell(found)


if __name__ == "__main__":
    main()
