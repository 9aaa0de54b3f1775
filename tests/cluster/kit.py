"""What the tests on a live engine share: an engine of two workers, waiting for an event, programs of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

import flowengine as flow
from tests.runtime.kit import PROJECT

PATIENCE_S = 30.0


def two_workers(**options: object) -> Iterator[flow.Session]:
    """An engine for the tests of one module; at the end nothing runs and every slot is free again."""
    with flow.init(num_workers=2, **options) as session:
        yield session
        until(all_free)


def all_free() -> bool:
    """Whether nothing is taken from any node."""
    return flow.available_resources() == flow.cluster_resources()


@flow.remote
def meet(name: str, size: int) -> int | None:
    """Wait at a barrier for the other members of a gang; the own number."""
    rank = flow.context().gang_rank
    flow.collectives.join(name, size, rank).barrier()
    return rank


def members(gang: Any, function: Any, *args: object) -> list[flow.ObjectRef]:
    """One call in each bundle."""
    return [function.options(placement=place).remote(*args) for place in gang]


def until(check: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Wait for what no event of the interface tells."""
    end = time.monotonic() + patience_s
    while not check():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """The process has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def python(*arguments: str, cwd: object = PROJECT, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """A program of its own, which finds the package wherever it is started."""
    begin = f"import sys; sys.path.append({str(PROJECT)!r}); "
    if arguments[0] == "-c":
        arguments = ("-c", begin + "\n" + arguments[1], *arguments[2:])
    return subprocess.run(
        [sys.executable, *arguments], cwd=str(cwd), input=stdin, capture_output=True, text=True, timeout=PATIENCE_S
    )


def overlap(spans: list[tuple[float, float]]) -> int:
    """How many of the spans lie over each other at most."""
    edges = sorted([(began, 1) for began, _ in spans] + [(ended, -1) for _, ended in spans])
    running = most = 0
    for _, step in edges:
        running += step
        most = max(most, running)
    return most
