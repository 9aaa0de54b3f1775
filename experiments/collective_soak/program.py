"""What soaks: members whose results are compared bit by bit, and what processes hold."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

import flowengine as flow

SHARED = Path("/dev/shm")
JOIN_S = 60.0


@flow.remote(num_cpus=0)
class Member:
    """One rank. Its arrays follow from rank and dtype, so each run has the same answer."""

    def __init__(self, name: str, size: int, rank: int) -> None:
        self.group = flow.collectives.join(name, size, rank, timeout_s=JOIN_S)
        self.rank = rank

    def digest(self, dtype: str, nbytes: int, delay_s: float) -> str:
        """Come after a while, take part, and say what the bits of the result are."""
        x = array_of(self.rank, dtype, nbytes)
        time.sleep(delay_s)
        return hashlib.sha256(self.group.allreduce(x).tobytes()).hexdigest()

    def repeat(self, nbytes: int, count: int) -> None:
        """So many steps."""
        x = np.full(nbytes // 4, 1.0, "f4")
        for _ in range(count):
            result = self.group.allreduce(x)
        if not (result == self.group.size).all():
            raise ValueError(f"rank {self.rank}: {result}")

    def whom(self) -> tuple[int, str]:
        """Process and node."""
        return os.getpid(), flow.context().node_id

    def leave(self) -> None:
        """Give the seat up."""
        self.group.leave()


@functools.cache
def array_of(rank: int, dtype: str, nbytes: int) -> Any:
    """Numbers of very different sizes, so that each order of adding them gives other bits."""
    rng = np.random.default_rng(rank)
    count = nbytes // np.dtype(dtype).itemsize
    return (rng.standard_normal(count) * 2.0 ** rng.integers(-6, 6, count)).astype(dtype)


# --- the same bits ------------------------------------------------------------------------------------


class Harm(NamedTuple):
    """What happens in a run: when members come, and who is killed how long after the start."""

    delays_s: tuple[float, ...]
    member: int  # NOBODY, or a rank whose process is killed
    node: int  # NOBODY, or a host that is killed, never that of the program
    after_s: float


NOBODY = -1


def harms(seed: int, runs: int, size: int, hosts: int) -> Iterator[Harm]:
    """One for each run: a member dies in every fourth, a host in every tenth."""
    dice = random.Random(seed)
    for run in range(runs):
        delays_s = tuple(dice.uniform(0, 0.03) for _ in range(size))
        node = dice.randrange(1, hosts) if run % 10 == 7 and hosts > 1 else NOBODY
        member = dice.randrange(size) if run % 4 == 1 and node == NOBODY else NOBODY
        yield Harm(delays_s, member, node, dice.uniform(0.0, 0.06))


# --- what processes hold --------------------------------------------------------------------------------


class Held(NamedTuple):
    """What the engine has: resident bytes and open files of its processes, files and bytes in shared memory."""

    resident: int
    files: int
    shared_files: int
    shared_bytes: int


def held() -> Held:
    """Now, by the program and all that it has started."""
    me = psutil.Process()
    processes = [me, *me.children(recursive=True)]
    folders = [folder for one in processes for folder in SHARED.glob(f"flowengine-{os.getuid()}/*-{one.pid}")]
    found = [entry for folder in folders for entry in os.scandir(folder) if entry.is_file()]
    resident, files = zip(*map(own, processes), strict=True)
    return Held(sum(resident), sum(files), len(found), sum(map(shared_bytes, found)))


def shared_bytes(entry: os.DirEntry[str]) -> int:
    """What a file takes."""
    try:
        return entry.stat().st_blocks * 512
    except FileNotFoundError:  # it was just removed
        return 0


def own(process: psutil.Process) -> tuple[int, int]:
    """Memory that a process has for itself (what it shares is counted where it lies), and its open files."""
    try:
        return process.memory_full_info().uss, process.num_fds()
    except psutil.NoSuchProcess:  # it has just ended
        return 0, 0
