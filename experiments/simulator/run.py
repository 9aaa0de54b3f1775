"""How messages per task and the head's load grow with the number of nodes: the real machines on virtual hosts."""
from __future__ import annotations

import csv
import pathlib
import sys
import time

from flowengine.chaos.sim import Scenario, run
from flowengine.chaos.sim_world import World
from flowengine.config import Config

HERE = pathlib.Path(__file__).parent
NODES = (10, 30, 100, 300, 1000)
TASKS = 100_000
LIVENESS = ("NodeReport", "NodeJoined", "NodeAccepted", "NodesChanged", "Joined", "Welcome", "WorkerStarted")
COLUMNS = (
    "nodes", "tasks", "virtual_s", "real_s", "events", "messages_per_task", "head_per_task", "reports_per_node_s",
    "joining_per_node",
)


def scenario(nodes: int, tasks: int) -> Scenario:
    """Equal tasks of 0.2 s (on average) on hosts of 4 slots; laws are looked at now and then."""
    config = Config(heartbeat_s=1.0, suspect_after_s=10.0, story_lines_max=1)
    return Scenario(
        name=f"flat-{nodes}", nodes=nodes, workers=4, tasks=tasks, flat=True, run_s=0.2, check_every=50_000,
        config=config, end_s=10_000.0,
    )


def measure(nodes: int, tasks: int) -> dict[str, float]:
    """One row of the table; raises when the run was not right."""
    world = World(scenario(nodes, tasks), seed=nodes)
    began = time.monotonic()
    lines = run(world)
    if lines:
        raise SystemExit("\n".join(lines[:10]))
    counts, head = world.net.counts, world.head.machine
    joining = sum(counts.get(kind, 0) for kind in LIVENESS[1:])
    steady = sum(counts.values()) - joining - counts.get("NodeReport", 0)
    heard = head.counters["head_messages"] - head.kinds.get("NodeReport", 0) - head.kinds.get("NodeJoined", 0)
    return dict(zip(COLUMNS, (
        nodes, tasks, round(world.clock.now, 1), round(time.monotonic() - began, 1), world.events,
        round(steady / tasks, 3), round(heard / tasks, 5),
        round(counts.get("NodeReport", 0) / nodes / world.clock.now, 2), round(joining / nodes, 1),
    ), strict=True))


def main() -> int:
    """Measure all sizes, print and store the table."""
    tasks = int(sys.argv[1]) if len(sys.argv) > 1 else TASKS
    sizes = tuple(int(word) for word in sys.argv[2].split(",")) if len(sys.argv) > 2 else NODES
    rows = []
    print("  ".join(f"{name:>18}" for name in COLUMNS))
    for nodes in sizes:
        row = measure(nodes, tasks)
        rows.append(row)
        print("  ".join(f"{row[name]:>18}" for name in COLUMNS), flush=True)
    if len(sys.argv) <= 2:
        with (HERE / "results.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
