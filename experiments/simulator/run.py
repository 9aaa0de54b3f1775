"""How messages per task, the head's load and the time per decision grow with nodes: real machines, virtual hosts."""
from __future__ import annotations

import argparse
import csv
import gc
import pathlib
import resource
import sys
import time
from array import array

from experiments.picture import Axis, Series, line_chart
from flowengine.chaos.sim import Scenario, run
from flowengine.chaos.sim_world import World
from flowengine.config import Config

HERE = pathlib.Path(__file__).parent
NODES = (10, 30, 100, 300, 1000)
TASKS = 100_000
NODES_EACH = (10, 30, 100, 300, 1000, 3000, 10_000)
TASKS_EACH = 100  # for each node
WATCHED_MAX = 200  # nodes whose decisions are timed
LIVENESS = (
    "NodeReport", "NodeJoined", "NodeAccepted", "NodesChanged", "NodesWanted", "Joined", "Welcome", "WorkerStarted",
    "BundlesTold",
)
DECISIONS = {"head": ("Head", "SlotsSought"), "node": ("Node", "LeaseDemand"), "owner": ("Owner", "TaskDone")}
COLUMNS = (
    "nodes", "tasks", "virtual_s", "cpu_s", "memory_mib", "events", "messages_per_task", "head_per_task",
    "reports_per_node_s", "joining_per_node", "head_us", "head_us_99", "node_us", "node_us_99", "owner_us",
    "owner_us_99", "owner_us_per_task",
)


class Stopwatch:
    """CPU time between an event at the door of a machine and its commands, by kind of machine and event."""

    def __init__(self) -> None:
        self.taken_ns: dict[tuple[str, str], array[int]] = {}

    def watch(self, machine: object) -> None:
        """From now on this machine's events are timed."""
        handle, taken_ns, clock = machine.handle, self.taken_ns, time.thread_time_ns
        machine_kind = type(machine).__name__

        def timed(event, now, sender=""):
            began = clock()
            commands = handle(event, now, sender)
            taken = clock() - began
            key = machine_kind, type(event).__name__
            if key not in taken_ns:
                taken_ns[key] = array("q")
            taken_ns[key].append(taken)
            return commands

        machine.handle = timed

    def mean_us(self, machine: str, event: str) -> float:
        """Of one kind of event."""
        taken = self.taken_ns.get((machine, event), array("q", [0]))
        return round(sum(taken) / len(taken) / 1000, 1)

    def high_us(self, machine: str, event: str) -> float:
        """So much or less it is in 99 % of the cases."""
        taken = sorted(self.taken_ns.get((machine, event), [0]))
        return round(taken[int(0.99 * (len(taken) - 1))] / 1000, 1)

    def sum_us(self, machine: str) -> float:
        """Of all events of a kind of machine."""
        return sum(sum(taken) for (kind, _), taken in self.taken_ns.items() if kind == machine) / 1000


class Watched(World):
    """A world whose head, program and some of whose nodes are timed."""

    watch: Stopwatch

    def start(self) -> None:
        """The cluster comes up and the program begins."""
        super().start()
        self.watch = Stopwatch()
        self.watch.watch(self.head.machine)
        self.watch.watch(self.driver.owner)
        nodes = list(self.nodes.values())
        for node in nodes[:: 1 + len(nodes) // WATCHED_MAX]:
            self.watch.watch(node.machine)


def scenario(nodes: int, tasks: int) -> Scenario:
    """Equal tasks of 0.2 s (on average) on hosts of 4 slots; laws are looked at now and then."""
    config = Config(heartbeat_s=1.0, suspect_after_s=10.0, story_lines_max=1)
    return Scenario(
        name=f"flat-{nodes}", nodes=nodes, workers=4, tasks=tasks, flat=True, run_s=0.2,
        check_every=max(50_000, tasks), config=config, end_s=10_000.0,
    )


def measure(nodes: int, tasks: int) -> dict[str, float]:
    """One row of the table; raises when the run was not right."""
    world = Watched(scenario(nodes, tasks), seed=nodes)
    gc.collect()
    gc.disable()  # else some decisions are charged with looking for garbage in the whole simulation
    began = time.process_time()
    lines = run(world)
    gc.enable()
    if lines:
        raise SystemExit("\n".join(lines[:10]))
    counts, head, watch = world.net.counts, world.head.machine, world.watch
    joining = sum(counts.get(kind, 0) for kind in LIVENESS[1:])
    steady = sum(counts.values()) - joining - counts.get("NodeReport", 0)
    heard = head.counters["head_messages"] - sum(head.kinds.get(kind, 0) for kind in LIVENESS)
    times = [timing(*decision) for decision in DECISIONS.values() for timing in (watch.mean_us, watch.high_us)]
    return dict(zip(COLUMNS, (
        nodes, tasks, round(world.clock.now, 1), round(time.process_time() - began, 1),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, world.events,
        round(steady / tasks, 3), round(heard / tasks, 5),
        round(counts.get("NodeReport", 0) / nodes / world.clock.now, 2), round(joining / nodes, 1),
        *times, round(watch.sum_us("Owner") / tasks, 1),
    ), strict=True))


def picture(rows: list[dict[str, float]]) -> str:
    """Time per decision over the nodes."""
    most = max(row["head_us_99"] for row in rows)
    x = Axis("nodes (100 tasks each)", rows[0]["nodes"], rows[-1]["nodes"], is_log=True)
    y = Axis("CPU time of a decision, microseconds", 0, most)
    names = {"head_us": "head: where is a slot", "node_us": "node: a lease", "owner_us_per_task": "owner: a task"}
    names["head_us_99"] = "head, 99 %"
    series = [
        Series(name, [(row["nodes"], row[column]) for row in rows], column.endswith("99"))
        for column, name in names.items()
    ]
    return line_chart("A decision costs the same in a large cluster", x, y, series)


def write(name: str, rows: list[dict[str, float]]) -> None:
    """Store a table."""
    with (HERE / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    """Measure all sizes, print and store the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, help=f"of all nodes together; else {TASKS_EACH} a node")
    parser.add_argument("--nodes", help="sizes, with commas between")
    parser.add_argument("--out", help="a name for the table instead of the usual one")
    args = parser.parse_args()
    sizes = tuple(map(int, args.nodes.split(","))) if args.nodes else NODES if args.tasks else NODES_EACH
    rows = []
    print("  ".join(f"{name:>10}" for name in COLUMNS))
    for nodes in sizes:
        rows.append(measure(nodes, args.tasks or nodes * TASKS_EACH))
        print("  ".join(f"{cell:>{max(10, len(name))}}" for name, cell in rows[-1].items()), flush=True)
    if not args.nodes or args.out:
        write(args.out or ("results.csv" if args.tasks else "scaling.csv"), rows)
    if not args.nodes and not args.tasks:
        (HERE / "picture.svg").write_text(picture(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
