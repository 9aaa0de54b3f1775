"""A million small tasks: does any process grow, and how often is the head spoken to?

    python experiments/soak/run.py [--tasks 1000000] [--out experiments/soak/results.md]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import psutil

import flowengine as flow

BATCH = 1_000
WARM_UP = 30_000  # tasks before the first reading: caches and pools fill
GROWTH_MIB_MAX = 50
MIB = 1 << 20


@flow.remote
def echo(number: int) -> int:
    """The number."""
    return number


def run(tasks: int) -> None:
    """Submit and gather in batches; every value is checked."""
    for _ in range(tasks // BATCH):
        assert sum(flow.get([echo.remote(number) for number in range(BATCH)])) == BATCH * (BATCH - 1) // 2


def processes() -> dict[str, psutil.Process]:
    """The driver, and the engine's processes by what they are."""
    me = psutil.Process()
    found = {"driver": me}
    for child in me.children(recursive=True):
        name = child.name() if child.name().startswith("flow-") else "launcher"
        found[f"{name} {child.pid}" if name == "flow-worker" else name] = child
    return found


def main() -> int:
    """Measure and print; exit status 1 when something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with flow.init(num_workers=2):
        run(WARM_UP)
        engine = processes()
        before = {name: process.memory_info().rss for name, process in engine.items()}
        messages, began = flow.stats()["head_messages"], time.perf_counter()
        for part in range(10):
            run(options.tasks // 10)
            sys.stderr.write(f"{(part + 1) * options.tasks // 10:,} tasks in {time.perf_counter() - began:.0f} s\n")
        took_s = time.perf_counter() - began
        messages = flow.stats()["head_messages"] - messages
        after = {name: process.memory_info().rss for name, process in engine.items()}
    lines = [
        f"{options.tasks:,} tasks in {took_s:.0f} s ({options.tasks / took_s:,.0f} per second); "
        f"{messages} messages to the head, {1000 * messages / options.tasks:.2f} per 1,000 tasks.",
        "",
        "| process | resident before (MiB) | after | growth |",
        "|---|---:|---:|---:|",
    ]
    for name in engine:
        first, last = before[name] / MIB, after[name] / MIB
        lines.append(f"| {name.split()[0]} | {first:.0f} | {last:.0f} | {last - first:+.1f} |")
    table = "\n".join(lines) + "\n"
    sys.stdout.write(table)
    if options.out:
        options.out.write_text(f"# Results\n\n{table}")
    grown = any(after[name] - before[name] > GROWTH_MIB_MAX * MIB for name in engine)
    return int(grown or messages * 1000 > options.tasks)


if __name__ == "__main__":
    sys.exit(main())
