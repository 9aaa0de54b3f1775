"""The same counter, an actor, killed in the same way here and in peers: what is lost, and what does the caller see?

    python experiments/against_peers/run.py [--quick] [--calls 500] [--peers ray,dask]

Two callers make 500 calls each; in the middle the process of the actor gets SIGKILL. Peers that are not installed are
left out. Writes results.csv, picture.svg and the numbers in README.md; with --quick it prints only. The exit status is
1 when the counter here is not exact.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.pages import fill, table
from experiments.picture import Axis, Bars, bar_chart

HERE = Path(__file__).resolve().parent
CALLERS, WINDOW = 2, 4  # calls that a caller has under way
PACE_S = 0.001
ANSWER_S = 10.0  # then a call has failed
SILENT_MAX = 2  # calls of a caller without any answer; then it gives up
END_S = 240.0
BRANDS = {"flowengine": "flowengine", "ray": "ray", "dask": "distributed"}  # where each comes from


class Counter:
    """An actor: keeps the names of the calls that it has done."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def add(self, name: str) -> int:
        """One more."""
        self.done.append(name)
        return len(self.done)

    def read(self) -> list[str]:
        """All."""
        return self.done

    def pid(self) -> int:
        """Whom to kill."""
        return os.getpid()


class Log(NamedTuple):
    """What a caller has seen: answered calls with the time of the answer, errors, and when it killed."""

    answered: list[tuple[str, float]]
    errors: list[str]
    killed_s: float


def call(add: Callable[[str], Any], result: Callable[[Any], Any], caller: int, calls: int, victim: int) -> Log:
    """Calls with a few under way; the first caller kills the actor in the middle."""
    log, killed_s = Log([], [], 0.0), 0.0
    waiting: deque[tuple[str, Any]] = deque()

    def failed(error: Exception) -> None:
        log.errors.append(next(base.__name__ for base in type(error).__mro__ if "(" not in base.__name__))

    def settle() -> None:
        name, ref = waiting.popleft()
        try:
            result(ref)
            log.answered.append((name, time.time()))
        except Exception as error:
            failed(error)

    for number in range(calls):
        if number == calls // 2 and caller == 0:
            os.kill(victim, signal.SIGKILL)
            killed_s = time.time()
        name = f"{caller}.{number}"
        try:
            waiting.append((name, add(name)))
        except Exception as error:
            failed(error)
        if len(waiting) > WINDOW:
            settle()
        if sum("Timeout" in error for error in log.errors) >= SILENT_MAX:
            break
        time.sleep(PACE_S)
    while waiting and sum("Timeout" in error for error in log.errors) < SILENT_MAX:
        settle()
    return log._replace(killed_s=killed_s)


class Outcome(NamedTuple):
    """What one engine has left: the logs of the callers, and the names in the counter; None when it does not answer."""

    logs: list[Log]
    done: list[str] | None


def with_flowengine(calls: int, **options: Any) -> Outcome:
    """What a user writes here."""
    import flowengine as flow

    @flow.remote
    def caller(counter: Any, number: int, victim: int) -> Log:
        return call(counter.add.remote, lambda ref: flow.get(ref, timeout=ANSWER_S), number, calls, victim)

    with flow.init(num_workers=CALLERS):
        counter = flow.remote(Counter).options(**options).remote()
        victim = flow.get(counter.pid.remote())
        logs = flow.get([caller.remote(counter, number, victim) for number in range(CALLERS)])
        return Outcome(logs, last_of(lambda: flow.get(counter.read.remote(), timeout=ANSWER_S)))


def with_ray(calls: int, **options: Any) -> Outcome:
    """What a user writes with Ray."""
    import ray

    @ray.remote
    def caller(counter: Any, number: int, victim: int) -> Log:
        return call(counter.add.remote, lambda ref: ray.get(ref, timeout=ANSWER_S), number, calls, victim)

    ray.init(num_cpus=CALLERS, include_dashboard=False, log_to_driver=False, logging_level="error")
    counter = ray.remote(Counter).options(num_cpus=0, **options).remote()
    victim = ray.get(counter.pid.remote())
    logs = ray.get([caller.remote(counter, number, victim) for number in range(CALLERS)])
    found = Outcome(logs, last_of(lambda: ray.get(counter.read.remote(), timeout=ANSWER_S)))
    ray.shutdown()
    return found


def with_dask(calls: int) -> Outcome:
    """What a user writes with Dask: the callers are threads, since a task that holds the actor fails when it dies."""
    from distributed import Client, LocalCluster

    def caller(number: int) -> Log:
        return call(counter.add, lambda future: future.result(ANSWER_S), number, calls, victim)

    cluster = LocalCluster(n_workers=CALLERS, threads_per_worker=1, dashboard_address=None)
    with cluster, Client(cluster) as client, ThreadPoolExecutor(CALLERS) as threads:
        counter = client.submit(Counter, actor=True).result()
        victim = counter.pid().result()
        logs = list(threads.map(caller, range(CALLERS)))
        return Outcome(logs, last_of(lambda: counter.read().result(ANSWER_S)))


def last_of(read: Callable[[], list[str]]) -> list[str] | None:
    """What the counter holds at the end, or None when it does not answer."""
    try:
        return read()
    except Exception:
        return None


class Way(NamedTuple):
    """One engine with its options."""

    engine: str
    name: str
    program: Callable[..., Outcome]
    options: dict[str, Any]


WAYS = {
    "flowengine": Way("flowengine", "flowengine", with_flowengine, {}),
    "flowengine-restart": Way("flowengine", "flowengine, recovery=restart", with_flowengine, {"recovery": "restart"}),
    "ray": Way("ray", "Ray, defaults", with_ray, {}),
    "ray-retries": Way("ray", "Ray, restarts and retries without limit", with_ray,
                       {"max_restarts": -1, "max_task_retries": -1}),
    "dask": Way("dask", "Dask", with_dask, {}),
}  # fmt: skip


class Verdict(NamedTuple):
    """Figures of one engine."""

    way: str
    name: str
    answered: int
    value: int  # -1: the actor does not answer
    lost: int
    doubled: int
    errors: dict[str, int]
    silent_s: float  # -1: it never answered again
    lines: int


def judge(key: str, outcome: Outcome) -> Verdict:
    """From what callers and counter say."""
    way = WAYS[key]
    answered = [name for log in outcome.logs for name, _ in log.answered]
    times = Tally(outcome.done or ())
    killed_s = max(log.killed_s for log in outcome.logs)
    return Verdict(
        key,
        way.name,
        len(answered),
        -1 if outcome.done is None else len(outcome.done),
        sum(name not in times for name in answered),
        sum(count - 1 for count in times.values()),
        dict(Tally(error for log in outcome.logs for error in log.errors)),
        silence(sorted(at_s for log in outcome.logs for _, at_s in log.answered), killed_s, outcome.done is None),
        sum(bool(line.strip()) for line in inspect.getsource(way.program).splitlines()[2:]),
    )


def silence(answers_s: Sequence[float], killed_s: float, is_gone: bool) -> float:
    """The longest time without an answer to anybody that ended after the kill; -1 when it did not end."""
    gaps = [later - at for at, later in itertools.pairwise(answers_s) if later >= killed_s]
    return -1.0 if is_gone or not gaps else max(gaps)


def measure(key: str, calls: int) -> Verdict:
    """One engine, in this process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    way = WAYS[key]
    return judge(key, way.program(calls, **way.options))


def report(verdicts: Sequence[Verdict], calls: int) -> str:
    """The table."""
    rows = []
    for one in verdicts:
        errors = ", ".join(f"{count} {name}" for name, count in one.errors.items())
        rows.append((
            one.name, f"{one.answered:,}", "gone" if one.value < 0 else f"{one.value:,}", f"{one.lost:,}",
            f"{one.doubled:,}", errors or "none", "never" if one.silent_s < 0 else f"{one.silent_s:.2f}", one.lines,
        ))  # fmt: skip
    heads = ("engine", "answered", "final value", "answered, but lost", "counted twice", "errors at the callers",
             "silent for (s)", "lines")  # fmt: skip
    versions = ", ".join(
        f"{brand} {importlib.metadata.version(module)}" for brand, module in BRANDS.items() if is_there(brand)
    )
    return f"{CALLERS * calls:,} calls; {versions}.\n\n{table(heads, rows)}"


def is_there(brand: str) -> bool:
    """Whether an engine is installed."""
    return importlib.util.find_spec(BRANDS[brand]) is not None


def write(verdicts: Sequence[Verdict], text: str) -> None:
    """Results, picture, and the numbers in the README."""
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Verdict._fields)
        writer.writerows([*one[:6], json.dumps(one.errors), *one[7:]] for one in verdicts)
    bars = [
        Bars("in the counter at the end", [max(0, one.value) for one in verdicts]),
        Bars("answered, but lost", [one.lost for one in verdicts]),
        Bars("errors at the callers", [sum(one.errors.values()) for one in verdicts]),
    ]
    highest = max(height or 0 for one in bars for height in one.heights)
    title = "A counter killed in the middle of its calls"
    groups = [one.way for one in verdicts]
    (HERE / "picture.svg").write_text(bar_chart(title, groups, Axis("calls", 0, highest * 1.1), bars))
    fill(HERE / "README.md", text)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 calls each, without peers; writes nothing")
    parser.add_argument("--calls", type=int, default=500, help="of each caller")
    parser.add_argument("--peers", default="ray,dask")
    parser.add_argument("--engine", choices=list(WAYS), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.calls, chosen.peers = 100, ""
    if chosen.engine:
        sys.stdout.write("\n" + json.dumps(measure(chosen.engine, chosen.calls)) + "\n")
        return 0
    verdicts = []
    for key, way in WAYS.items():
        if way.engine != "flowengine" and way.engine not in chosen.peers.split(","):
            continue
        if not is_there(way.engine):
            sys.stderr.write(f"{way.name}: not installed, left out\n")
            continue
        command = [sys.executable, __file__, "--engine", key, "--calls", str(chosen.calls)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=END_S)
        if done.returncode:
            sys.stderr.write(done.stderr)
            return 2
        verdicts.append(Verdict(*json.loads(done.stdout.strip().splitlines()[-1])))
        sys.stderr.write(f"{way.name}: done\n")
    text = report(verdicts, chosen.calls)
    sys.stdout.write(text)
    if not chosen.quick:
        write(verdicts, text)
    ours = verdicts[0]
    return int(ours.value != CALLERS * chosen.calls or ours.lost > 0 or ours.doubled > 0 or bool(ours.errors))


if __name__ == "__main__":
    sys.exit(main())
