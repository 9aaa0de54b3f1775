"""Small workloads on flowengine and on peers that are installed, in turn in one run, with the ratios.

    python experiments/yardstick/run.py [--rounds 3] [--peers ray,dask] [--out experiments/yardstick/results.md]

Machines are shared and noisy: read the ratios of medians, not single numbers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ENGINES = ("flowengine", "ray", "dask")
WORKERS = 2
MIB_DOUBLES = 1 << 17  # float64 numbers in a MiB


def noop() -> None:
    """Do nothing."""


def increment(number: int) -> int:
    """The next number."""
    return number + 1


def total(*numbers: int) -> int:
    """The sum."""
    return sum(numbers)


def make(count: int) -> np.ndarray[Any, Any]:
    """A large array."""
    return np.ones(count)


def size(array: np.ndarray[Any, Any]) -> int:
    """Bytes of an array."""
    return int(array.nbytes)


class Counter:
    """An actor that counts."""

    def __init__(self) -> None:
        self.count = 0

    def increment(self) -> int:
        """The next number."""
        self.count += 1
        return self.count


class Engine:
    """The few verbs that the workloads need, of one engine."""

    def __init__(self, name: str) -> None:
        self.name = name
        if name == "flowengine":
            import flowengine

            flowengine.init(num_workers=WORKERS)
            self.get, self.put, self.end = flowengine.get, flowengine.put, flowengine.shutdown
            self.task: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: flowengine.remote(f).remote
            self.counter: Callable[[], Callable[[], Any]] = lambda: flowengine.remote(Counter).remote().increment.remote
        elif name == "ray":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            import ray

            ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, logging_level="error",
                     object_store_memory=4 << 30)
            self.get, self.put, self.end = ray.get, ray.put, ray.shutdown
            self.task = lambda f: ray.remote(f).remote
            self.counter = lambda: ray.remote(Counter).remote().increment.remote
        else:
            self._dask()

    def _dask(self) -> None:
        from distributed import Client, LocalCluster

        logging.getLogger("distributed").setLevel(logging.ERROR)
        cluster = LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None)
        client = Client(cluster)
        # What an actor gives is a future of another kind, which cannot be gathered.
        self.get = lambda refs: (
            refs.result() if not isinstance(refs, list)
            else client.gather(refs) if hasattr(refs[0], "key") else [ref.result() for ref in refs]
        )
        self.put = lambda value: client.scatter(value, hash=False)
        self.task = lambda f: lambda *args: client.submit(f, *args, pure=False)
        self.counter = lambda: client.submit(Counter, actor=True, pure=False).result().increment
        self.end = lambda: (client.close(), cluster.close())


def rate(engine: Engine, count: int, once: Callable[[], None]) -> float:
    """The best of three, per second."""
    best = 0.0
    for _ in range(3):
        began = time.perf_counter()
        once()
        best = max(best, count / (time.perf_counter() - began))
    return best


def tasks_async(engine: Engine) -> float:
    """3,000 empty tasks submitted in a loop, then gathered (tasks/s)"""
    task = engine.task(noop)
    return rate(engine, 3000, lambda: engine.get([task() for _ in range(3000)]))


def tasks_sync(engine: Engine) -> float:
    """one empty task at a time (microseconds, median)"""
    task = engine.task(noop)
    engine.get(task())
    return median_us(300, lambda: engine.get(task()))


def median_us(times: int, once: Callable[[], Any]) -> float:
    """Median duration."""
    durations = []
    for _ in range(times):
        began = time.perf_counter()
        once()
        durations.append(time.perf_counter() - began)
    return statistics.median(durations) * 1e6


def chain(engine: Engine) -> float:
    """a chain of 1,000 dependent tasks (tasks/s)"""
    task = engine.task(increment)

    def once() -> None:
        ref = task(0)
        for _ in range(999):
            ref = task(ref)
        assert engine.get(ref) == 1000

    return rate(engine, 1000, once)


def fan_in(engine: Engine) -> float:
    """1,000 tasks and one that takes all results (tasks/s)"""
    task, last = engine.task(increment), engine.task(total)

    def once() -> None:
        assert engine.get(last(*[task(i) for i in range(1000)])) == 500_500

    return rate(engine, 1000, once)


def actor_async(engine: Engine) -> float:
    """3,000 calls of one actor submitted in a loop, then gathered (calls/s)"""
    call = engine.counter()
    engine.get(call())
    return rate(engine, 3000, lambda: engine.get([call() for _ in range(3000)]))


def actor_sync(engine: Engine) -> float:
    """one call of an actor at a time (microseconds, median)"""
    call = engine.counter()
    engine.get(call())
    return median_us(300, lambda: engine.get(call()))


def put_gb(engine: Engine) -> float:
    """put of a 200 MB array (GB/s)"""
    array = np.random.default_rng(0).random(200 * MIB_DOUBLES)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        ref = engine.put(array)
        best = max(best, array.nbytes / (time.perf_counter() - began) / 1e9)
        del ref
    return best


def get_big(engine: Engine) -> float:
    """get of a 200 MB array made by a task (microseconds, median)"""
    maker, sizer = engine.task(make), engine.task(size)
    durations = []
    for _ in range(7):
        ref = maker(200 * MIB_DOUBLES)
        engine.get(sizer(ref))
        began = time.perf_counter()
        array = engine.get(ref)
        durations.append(time.perf_counter() - began)
        del array, ref
    return statistics.median(durations) * 1e6


def pass_big(engine: Engine) -> float:
    """one 100 MB array read by 20 tasks (GB/s over all reads)"""
    sizer = engine.task(size)
    ref = engine.put(np.random.default_rng(0).random(100 * MIB_DOUBLES))
    engine.get([sizer(ref) for _ in range(4)])
    return rate(engine, 20, lambda: engine.get([sizer(ref) for _ in range(20)])) * 100 / 1024


WORKLOADS: dict[str, tuple[Callable[[Engine], float], str, bool]] = {
    "tasks_async": (tasks_async, "tasks/s", True),
    "tasks_sync": (tasks_sync, "us", False),
    "chain": (chain, "tasks/s", True),
    "fan_in": (fan_in, "tasks/s", True),
    "actor_async": (actor_async, "calls/s", True),
    "actor_sync": (actor_sync, "us", False),
    "put_gb": (put_gb, "GB/s", True),
    "get_big": (get_big, "us", False),
    "pass_big": (pass_big, "GB/s", True),
}


def measure(name: str) -> dict[str, float]:
    """All workloads on one engine, in this process."""
    began = time.perf_counter()
    engine = Engine(name)
    engine.get(engine.task(noop)())
    found = {"start_to_first_result": time.perf_counter() - began}
    for workload, (run, _, _) in WORKLOADS.items():
        found[workload] = run(engine)
    engine.end()
    return found


def report(seen: dict[str, list[dict[str, float]]], rounds: int) -> str:
    """The medians as a Markdown table, with how many times better than each peer."""
    names = list(seen)
    peers = names[1:]
    lines = [
        f"Medians of {rounds} rounds in one run; {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{WORKERS} workers.",
        "",
        "| workload | unit | " + " | ".join(names) + " | " + " | ".join(f"x {peer}" for peer in peers) + " |",
        "|---|---|" + "---:|" * (len(names) + len(peers)),
    ]
    units = {"start_to_first_result": ("s", False), **{w: (unit, more) for w, (_, unit, more) in WORKLOADS.items()}}
    for workload, (unit, more_is_better) in units.items():
        middle = {name: statistics.median([one[workload] for one in seen[name]]) for name in names}
        ours = middle[names[0]]
        ratios = [ours / middle[peer] if more_is_better else middle[peer] / ours for peer in peers]
        cells = [f"{middle[name]:,.2f}" if middle[name] < 100 else f"{middle[name]:,.0f}" for name in names]
        row = [workload, unit, *cells, *[f"{ratio:.1f}" for ratio in ratios]]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default="ray,dask")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        sys.stdout.write("\n" + json.dumps(measure(options.engine)) + "\n")
        return 0
    modules = {"ray": "ray", "dask": "distributed"}
    peers = [peer for peer in options.peers.split(",") if importlib.util.find_spec(modules.get(peer, peer))]
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in ("flowengine", *peers)}
    for number in range(options.rounds):
        for name in seen:
            command = [sys.executable, __file__, "--engine", name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
            seen[name].append(json.loads(done.stdout.strip().splitlines()[-1]))
            sys.stderr.write(f"round {number + 1}: {name} done\n")
    table = report(seen, options.rounds)
    sys.stdout.write(table)
    if options.out:
        options.out.write_text(f"# Results\n\n{table}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
