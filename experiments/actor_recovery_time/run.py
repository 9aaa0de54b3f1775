"""How long a caller waits when its actor is killed, by the size of the actor's state.

    python experiments/actor_recovery_time/run.py [--kills 20]

Writes results.md; the exit status is 1 when a reply was wrong or the median for 1 MB is over 1 s.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import flowengine as flow
from experiments.pages import percentile, table

HERE = Path(__file__).resolve().parent
SIZES = {"1 KB": 1_000, "1 MB": 1_000_000, "64 MB": 64_000_000}
ASKED_S = {"1 MB": 1.0}
INTERVAL = 10  # calls between checkpoints
TOLD_EVERY = 4
LONG_S = 60.0


class Recovery(NamedTuple):
    """One kill: seconds from the signal until the next answer, and for some kills its parts."""

    whole_s: float
    parts_s: tuple[float, ...]


@flow.remote(checkpoint=INTERVAL)
class Counter:
    """Counts its calls in a state of some size, of which each call changes a little."""

    def __init__(self, size_bytes: int) -> None:
        self.calls = 0
        self.state = np.zeros(size_bytes // 8)

    def add(self) -> int:
        """One more."""
        self.calls += 1
        self.state[self.calls % len(self.state)] = self.calls
        return self.calls

    def pid(self) -> int:
        """Whom to kill."""
        return os.getpid()


def main() -> int:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="for each size")
    options = parser.parse_args()
    found = {name: recoveries(size_bytes, options.kills) for name, size_bytes in SIZES.items()}
    text = report(found)
    (HERE / "results.md").write_text(text)
    sys.stdout.write(text)
    return int(any(median(one.whole_s for one in found[name]) > limit_s for name, limit_s in ASKED_S.items()))


def recoveries(size_bytes: int, kills: int) -> list[Recovery]:
    """Kill an actor so often, each time after its next checkpoint and a few calls more."""
    with tempfile.TemporaryDirectory() as folder, flow.init(num_workers=2, state_dir=folder):
        actor, found = Counter.remote(size_bytes), []
        for number in range(kills):
            calls = past_a_checkpoint(actor)
            pid = flow.get(actor.pid.remote())
            killed_s = time.time()
            os.kill(pid, signal.SIGKILL)
            answer = flow.get(actor.add.remote(), timeout=LONG_S)
            answered_s = time.time()
            if answer != calls + 1:
                raise ValueError(f"the answer is {answer} and not {calls + 1}")
            parts_s: tuple[float, ...] = ()
            if number % TOLD_EVERY == 0:  # asking takes longer than a recovery
                lost_s, ready_s = told(actor.actor_id, folder, killed_s)
                parts_s = (lost_s - killed_s, ready_s - lost_s, answered_s - ready_s)
            found.append(Recovery(answered_s - killed_s, parts_s))
        return found


def past_a_checkpoint(actor: Any) -> int:
    """Call until another checkpoint is taken, and half an interval more; how many calls there were in all."""
    before = flow.stats()["checkpoints_taken"]
    while flow.stats()["checkpoints_taken"] == before:
        flow.get(actor.add.remote())
    return int(flow.get([actor.add.remote() for _ in range(INTERVAL // 2)])[-1])


def told(name: str, state_dir: str, day_of_s: float) -> tuple[float, float]:
    """When the actor was known to be dead, and when it was there again, as `flow story` tells it."""
    command = [sys.executable, "-m", "flowengine.cli", "story", name, "--state-dir", state_dir]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    lost_s, ready_s = (last_time(lines, word, day_of_s) for word in ("state=restarting", "ActorReady"))
    return lost_s, ready_s


def last_time(lines: Sequence[str], word: str, day_of_s: float) -> float:
    """When the last line with the word was told; lines begin with the time of the day."""
    found = [match for line in lines if word in line and (match := re.match(r"(\d+):(\d+):(\d+\.\d+)", line))]
    if not found:
        raise LookupError(f"the story tells nothing of {word}:\n" + "\n".join(lines))
    hours, minutes, seconds = found[-1].groups()
    return day_of_s - day_of_s % 86_400 + int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def report(found: dict[str, list[Recovery]]) -> str:
    """The page of results."""
    rows = []
    for name, many in found.items():
        whole_s = [one.whole_s for one in many]
        parts = [median(part) for part in zip(*(one.parts_s for one in many if one.parts_s), strict=True)]
        rows.append((name, *(f"{seconds * 1e3:,.0f}" for seconds in (
            median(whole_s), percentile(whole_s, 90), max(whole_s), *parts))))  # fmt: skip
    kills = len(next(iter(found.values())))
    heads = ("state", "median (ms)", "90 % (ms)", "longest (ms)", "detect (ms)", "load (ms)", "replay (ms)")
    return f"# Results\n\n{kills} kills for each size.\n\n{table(heads, rows)}"


if __name__ == "__main__":
    sys.exit(main())
