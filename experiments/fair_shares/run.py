"""Do tenants get their shares? Two organisations, one with two users of weights 2 and 3, who come one after the other.

    python experiments/fair_shares/run.py [--quick] [--phase-s 12]

Writes results.json, picture.svg and the numbers in README.md; with --quick it prints only. The exit status is 1 when a
share is further from max-min than 3 % of the whole, or when the shares cost throughput.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import flowengine as flow
from experiments.pages import fill, table
from experiments.picture import Axis, Series, line_chart

HERE = Path(__file__).resolve().parent
WORKERS = 2
WAITING = 12  # tasks that each user keeps waiting or running
RUN_S = {"A": 0.02, "B": 0.05, "C": 0.03}  # of one task: users with longer tasks get no more
SETTLE_SHARE = 0.15  # of a phase at its begin that is not counted: running tasks are not stopped
ERROR_MAX, THROUGHPUT_MIN = 0.03, 0.95
WINDOW_S = 1.0
MAX_MIN = [{"A": 1.0, "B": 0.0, "C": 0.0}, {"A": 0.4, "B": 0.6, "C": 0.0}, {"A": 0.2, "B": 0.3, "C": 0.5}]


class Run(NamedTuple):
    """One task: whose, and when it ran, in seconds."""

    user: str
    began_s: float
    ended_s: float


@flow.remote
def work(user: str, run_s: float) -> Run:
    """Keep a slot for a while."""
    began_s = time.monotonic()
    time.sleep(run_s)
    return Run(user, began_s, time.monotonic())


class User:
    """Someone who always has tasks waiting, until the end."""

    def __init__(self, name: str, share: object, ended: threading.Event) -> None:
        self.name, self.ended = name, ended
        self.call = work.options(placement=share) if share is not None else work
        self.runs: list[Run] = []
        self.thread = threading.Thread(target=self.go)
        self.thread.start()

    def go(self) -> None:
        """Submit one for each that ends."""
        waiting = [self.submit() for _ in range(WAITING)]
        while waiting:
            ready, waiting = flow.wait(waiting)
            self.runs += [Run(*found) for found in flow.get(ready)]
            if not self.ended.is_set():
                waiting += [self.submit() for _ in ready]

    def submit(self) -> flow.ObjectRef:
        """One more task."""
        found: flow.ObjectRef = self.call.remote(self.name, RUN_S[self.name])
        return found


def measure(phase_s: float, with_shares: bool) -> tuple[float, list[Run]]:
    """When it began, and all that ran."""
    shares: dict[str, object] = dict.fromkeys(RUN_S)
    if with_shares:
        first, second = (flow.scheduling.fair_share(name) for name in ("org1", "org2"))
        shares = {
            "A": flow.scheduling.fair_share("A", weight=2, parent=first),
            "B": flow.scheduling.fair_share("B", weight=3, parent=first),
            "C": flow.scheduling.fair_share("C", parent=second),
        }
    flow.get([work.remote("A", 0.0) for _ in range(200)])
    ended = threading.Event()
    began_s = time.monotonic()
    users = []
    for number, name in enumerate(RUN_S):
        time.sleep(max(0.0, began_s + number * phase_s - time.monotonic()))
        users.append(User(name, shares[name], ended))
    time.sleep(max(0.0, began_s + len(RUN_S) * phase_s - time.monotonic()))
    ended.set()
    for user in users:
        user.thread.join()
    return began_s, [run for user in users for run in user.runs]


def within(runs: Sequence[Run], begin_s: float, end_s: float) -> dict[str, float]:
    """Seconds that each user's tasks ran in a stretch of time."""
    sums = dict.fromkeys(RUN_S, 0.0)
    for run in runs:
        sums[run.user] += max(0.0, min(end_s, run.ended_s) - max(begin_s, run.began_s))
    return sums


def shares_of(sums: dict[str, float]) -> dict[str, float]:
    """Of the whole."""
    whole = sum(sums.values()) or 1.0
    return {user: each / whole for user, each in sums.items()}


def phases(began_s: float, runs: Sequence[Run], phase_s: float) -> list[dict[str, float]]:
    """The shares in each phase."""
    return [shares_of(within(runs, began_s + (number + SETTLE_SHARE) * phase_s, began_s + (number + 1) * phase_s))
            for number in range(len(RUN_S))]


def used(began_s: float, runs: Sequence[Run], phase_s: float) -> float:
    """How much of the slots was used, over all phases."""
    return sum(within(runs, began_s, began_s + len(RUN_S) * phase_s).values()) / (WORKERS * len(RUN_S) * phase_s)


def draw(began_s: float, runs: Sequence[Run], phase_s: float) -> str:
    """Shares over time; dashed: max-min."""
    end_s = len(RUN_S) * phase_s
    windows = [number * WINDOW_S for number in range(int(end_s / WINDOW_S))]
    found = [shares_of(within(runs, began_s + at, began_s + at + WINDOW_S)) for at in windows]
    series = [Series(user, [(at + WINDOW_S / 2, one[user]) for at, one in zip(windows, found, strict=True)])
              for user in RUN_S]
    for user in RUN_S:
        steps = [(at * phase_s, one[user]) for number, one in enumerate(MAX_MIN) for at in (number, number + 1)]
        series.append(Series(f"max-min {user}", steps, is_dashed=True))
    marks = [(number * phase_s, f"{user} comes") for number, user in enumerate(RUN_S) if number]
    return line_chart("Shares of two slots", Axis("seconds", 0, end_s), Axis("share", 0, 1.05), series, marks)


def report(found: list[dict[str, float]], use: tuple[float, float]) -> str:
    """The tables."""
    rows = []
    for number, (shares, fair) in enumerate(zip(found, MAX_MIN, strict=True)):
        who = " and ".join(list(RUN_S)[:number + 1])
        rows.append((who, *(f"{shares[user]:.3f} ({fair[user]:.3f})" for user in RUN_S),
                     f"{max(abs(shares[user] - fair[user]) for user in RUN_S):.3f}"))
    return (table(("who has work", *(f"{user}: share (max-min)" for user in RUN_S), "largest error"), rows)
            + f"\nOf the slots {use[0]:.3f} were used with shares, {use[1]:.3f} without.\n")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seconds a phase; writes nothing")
    parser.add_argument("--phase-s", type=float, default=12.0)
    chosen = parser.parse_args()
    phase_s = 2.0 if chosen.quick else chosen.phase_s
    with flow.init(num_workers=WORKERS):
        without = [used(*measure(phase_s / 4, False), phase_s / 4)]
        began_s, runs = measure(phase_s, True)
    found, use = phases(began_s, runs, phase_s), (used(began_s, runs, phase_s), median(without))
    text = report(found, use)
    sys.stdout.write(text)
    if not chosen.quick:
        (HERE / "results.json").write_text(json.dumps({"phases": found, "used": use}, indent=1) + "\n")
        (HERE / "picture.svg").write_text(draw(began_s, runs, phase_s))
        fill(HERE / "README.md", text)
    error = max(abs(one[user] - fair[user]) for one, fair in zip(found, MAX_MIN, strict=True) for user in RUN_S)
    missed = [f"a share is {error:.3f} from max-min"] if error > ERROR_MAX else []
    if use[0] < THROUGHPUT_MIN * use[1]:
        missed.append("shares cost throughput")
    sys.stdout.write("\n" + "\n".join(missed or ["all holds"]) + "\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
