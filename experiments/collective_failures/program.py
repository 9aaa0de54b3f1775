"""Members of a group that come late or die: -m experiments.collective_failures.program ASKED SIZE [FILE]."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import flowengine as flow
from experiments.collectives.trial import tell
from experiments.collectives.with_flowengine import JOIN_S, places

HURT_STEP, STEPS = 2, 4  # the step in which somebody dies, of so many
COUNTERS = ("bytes_sent_again", "collectives_repaired", "actor_restarts")


class Late(NamedTuple):
    """Members that come one after the other; is_alone: only the last of them comes later, the others come at once."""

    op: str
    nbytes: int
    gap_s: float
    is_root_last: bool
    is_alone: bool = False

    def wait_s(self, rank: int, size: int) -> float:
        """How long a rank waits before it comes."""
        turn = size - 1 - rank if self.is_root_last else rank
        return self.gap_s * (turn == size - 1 if self.is_alone else turn)


class Killed(NamedTuple):
    """A member that dies after a part of a step; `folder` is where all hosts can write."""

    nbytes: int
    after_s: float  # from the start of the step
    folder: str
    by_itself: bool  # else somebody takes the power from its host


@flow.remote(num_cpus=0)
class Member:
    """One rank."""

    def __init__(self, name: str, size: int, rank: int) -> None:
        self.group = flow.collectives.join(name, size, rank, timeout_s=JOIN_S)
        self.rank, self.size = rank, size

    def late(self, asked: Late) -> tuple[float, float]:
        """When this rank came, and when it had its result, by the clock that all share."""
        x = np.full(asked.nbytes // 4, self.rank + 1, "f4")
        self.group.barrier()
        time.sleep(asked.wait_s(self.rank, self.size))
        came_s = time.monotonic()
        result = getattr(self.group, asked.op)(x)
        done_s = time.monotonic()
        expected = 1 if asked.op == "broadcast" else self.size * (self.size + 1) // 2
        if result is not None and not (result == expected).all():
            raise ValueError(f"rank {self.rank}: {result}")
        return came_s, done_s

    def make_late(self, asked: Late) -> Any:
        """An array that is there when it is this rank's turn; the reader is on the first host."""
        time.sleep(asked.wait_s(self.rank, self.size))
        return np.full(asked.nbytes // 4, self.rank + 1, "f4")

    def steps(self, asked: Killed | None, nbytes: int) -> tuple[list[tuple[float, float]], str]:
        """Begin and end of each step, and what came out; a member that comes again does them all once more."""
        victim = asked is not None and self.rank == self.size - 1
        if victim and asked is not None:
            note(asked.folder, "began")
        times, total = [], 0.0
        for step in range(STEPS):
            x = np.full(nbytes // 4, self.rank + step, "f4")
            began = time.monotonic()
            if asked is not None and step == HURT_STEP:
                prepare_harm(asked, self.rank, victim)
            total += float(self.group.allreduce(x)[-1])
            times.append((began, time.monotonic()))
        return times, repr(total)


def note(folder: str, what: str) -> None:
    """Write down that something happened now."""
    with open(f"{folder}/{what}", "a") as file:
        file.write(f"{time.monotonic()}\n")


def noted(folder: str, what: str) -> list[float]:
    """When it happened."""
    file = Path(folder, what)
    return [float(line) for line in file.read_text().split()] if file.exists() else []


def prepare_harm(asked: Killed, rank: int, victim: bool) -> None:
    """The step begins: the victim will die in it, once."""
    if rank == 0:
        note(asked.folder, "step")
    if victim and asked.by_itself and not noted(asked.folder, "killed"):
        timer = threading.Timer(asked.after_s, die, (asked.folder,))
        timer.start()


def die(folder: str) -> None:
    """As by the hand of somebody else."""
    note(folder, "killed")
    os.kill(os.getpid(), signal.SIGKILL)


def run_late(asked: Late, members: Sequence[Any]) -> float:
    """Seconds from the last arrival to the last result, in a group."""
    times = flow.get([one.late.remote(asked) for one in members])
    return max(done_s for _, done_s in times) - max(came_s for came_s, _ in times)


def refs_late(asked: Late, members: Sequence[Any]) -> float:
    """The same with references, at a reader on the first host."""
    refs = [one.make_late.remote(asked) for one in members]
    total = flow.reduce(refs)
    flow.wait(refs, num_returns=len(refs))
    came_s = time.monotonic()
    result = flow.get(total)
    took_s = time.monotonic() - came_s
    if not (result == len(refs) * (len(refs) + 1) // 2).all():
        raise ValueError(f"references: {result}")
    return took_s


def run_killed(asked: Killed, members: Sequence[Any]) -> dict[str, Any]:
    """How long the steps took without harm and with it, and what was counted."""
    calm, result = zip(*flow.get([one.steps.remote(None, asked.nbytes) for one in members]), strict=True)
    before = flow.stats()
    hurt, again = zip(*flow.get([one.steps.remote(asked, asked.nbytes) for one in members]), strict=True)
    after = flow.stats()
    if len({*result, *again}) != 1:
        raise ValueError(f"results differ: {result} {again}")
    killed_s, began_s = noted(asked.folder, "killed"), noted(asked.folder, "began")
    return {
        "calm_s": spans(calm), "hurt_s": spans(hurt),
        "restart_s": began_s[-1] - killed_s[0] if killed_s and len(began_s) > 1 else 0.0,
        **{name: after[name] - before[name] for name in COUNTERS},
    }  # fmt: skip


def spans(times: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Seconds of each step, for the members that were not harmed: from the first that begins to the last that ends."""
    return [
        max(member[step][1] for member in times[:-1]) - min(member[step][0] for member in times[:-1])
        for step in range(STEPS)
    ]


def measure(asked: dict[str, Any], size: int, file: str) -> dict[str, Any]:
    """All that is asked for, in one engine."""
    with flow.init(address=file) if file else flow.init(num_workers=2):
        soft, hard = [{}] * size, [{}] * size
        if file:
            found = places(size)
            hard = [{"placement": place} for place in found]
            soft = [{"placement": flow.scheduling.soft([place])} for place in found]
        answers: dict[str, Any] = {}
        members = [Member.options(**where).remote("late", size, rank) for rank, where in enumerate(hard)]
        answers["late"] = [
            [run_late(Late(*one), members) for _ in range(rounds)] for *one, rounds in asked.get("late", [])
        ]
        answers["refs"] = [
            [refs_late(Late(*one), members) for _ in range(rounds)] for *one, rounds in asked.get("refs", [])
        ]
        for member in members:
            flow.kill(member)
        answers["killed"] = []
        for number, one in enumerate(asked.get("killed", [])):
            members = [
                Member.options(**where).remote(f"killed {number}", size, rank) for rank, where in enumerate(soft)
            ]
            answers["killed"].append(run_killed(Killed(*one), members))
            for member in members:
                flow.kill(member)
        return answers


def main() -> None:
    """Measure and tell."""
    tell(measure(json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""))


if __name__ == "__main__":
    main()
