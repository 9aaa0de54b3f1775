"""The cluster's document as families of Prometheus metrics. Pure: the text is made elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

PREFIX = "flowengine_"
# Counters of the engine that can fall, so they are gauges here.
GAUGES = ("actors_alive", "objects_stored", "bytes_stored")
TEXTS = {
    "tasks_submitted": "Tasks that were submitted.",
    "tasks_executed": "Runs of tasks that ended, well or with an error.",
    "tasks_retried": "Attempts that were made again.",
    "objects_rebuilt": "Values that were lost and made again.",
    "objects_stored": "Objects in the stores now.",
    "bytes_stored": "Bytes of objects in the stores now.",
    "bytes_spilled": "Bytes that were written to disk since stores were full.",
    "bytes_moved": "Bytes that were moved between hosts.",
    "workers_started": "Worker processes that were started.",
    "workers_lost": "Worker processes that ended without being told to.",
    "actors_alive": "Actors that live now.",
    "head_messages": "Messages that the head has got.",
}


class Family(msgspec.Struct, frozen=True):
    """One metric: kind is counter or gauge; samples are values by labels."""

    name: str
    kind: str
    text: str
    samples: list[tuple[dict[str, str], float]]


def counter_name(name: str) -> str:
    """A counter's name with its unit at the end, as Prometheus has it: bytes_moved is moved_bytes_total."""
    plain = f"{name.removeprefix('bytes_')}_bytes" if name.startswith("bytes_") else name
    return PREFIX + plain + ("" if name in GAUGES else "_total")


def families(page: Mapping[str, Any]) -> list[Family]:
    """All metrics of one document."""
    totals = page["totals"]
    return [
        Family(PREFIX + "info", "gauge", "Always 1; the session is its label.", [({"session": page["session"]}, 1.0)]),
        Family(PREFIX + "head_uptime_seconds", "gauge", "How long this head has run.",
               [({}, float(page["head"]["alive_s"]))]),
        *(_counter(name, count) for name, count in totals["counters"].items()),
        Family(PREFIX + "nodes", "gauge", "Nodes that are alive, and whether they answered.",
               [({"state": "answering"}, float(totals["nodes"] - totals["silent"])),
                ({"state": "silent"}, float(totals["silent"]))]),
        _by_state("tasks", "Tasks that their owners keep, by state.",
                  {name: count for name, count in totals["tasks"].items() if name != "unlooked"}),
        Family(PREFIX + "tasks_not_looked_at", "gauge", "Of very many tasks: those that are in no other count.",
               [({}, float(totals["tasks"]["unlooked"]))]),
        _by_state("actors", "Actors by state.", totals["actors"]),
        Family(PREFIX + "groups", "gauge", "Groups of collectives that have members.", [({}, len(page["groups"]))]),
        Family(PREFIX + "collectives_open", "gauge", "Collectives under way.",
               [({}, float(sum(len(group["steps"]) for group in page["groups"])))]),
        *_of_nodes(page["nodes"]),
        *_made(page["resources"]),
    ]


def _counter(name: str, count: float) -> Family:
    text = TEXTS.get(name, f"Sum over all processes: {name.replace('_', ' ')}.")
    return Family(counter_name(name), "gauge" if name in GAUGES else "counter", text, [({}, float(count))])


def _by_state(name: str, text: str, counts: Mapping[str, float]) -> Family:
    return Family(PREFIX + name, "gauge", text, [({"state": state}, float(count)) for state, count in counts.items()])


def _made(resources: Iterable[Mapping[str, Any]]) -> list[Family]:
    """Amounts that programs made, of all nodes; one without limit has no number."""
    limited = [row for row in resources if row["total"] is not None]
    rows = [({"program": row["program"], "resource": row["name"]}, row) for row in limited]
    return [Family(f"{PREFIX}made_resource_{name}", "gauge", text, [(label, float(row[key])) for label, row in rows])
            for name, key, text in (("capacity", "total", "Amounts that programs made at run time."),
                                    ("available", "free", "Of the amounts that programs made: what is free."))]


def _of_nodes(nodes: Iterable[Mapping[str, Any]]) -> list[Family]:
    """What is told of each node by itself."""
    workers, store, total, free, queued, cpu, memory = ([] for _ in range(7))
    for node in nodes:
        label = {"node": node["node_id"], "host": node["host"]}
        for state, count in sorted(Counter(worker["state"] for worker in node["workers"]).items()):
            workers.append(({**label, "state": state}, float(count)))
        for name, count in node["store"].items():
            if name.endswith("_bytes"):
                store.append(({**label, "kind": name.removesuffix("_bytes")}, float(count)))
        for name, amount in node["total"].items():
            total.append(({**label, "resource": name}, float(amount)))
            free.append(({**label, "resource": name}, float(node["available"].get(name, 0))))
        queued.append((label, float(node["queued"])))
        if node["cpu_share"] >= 0:
            cpu.append((label, float(node["cpu_share"])))
        if node["memory_total_bytes"]:
            memory.append((label, float(node["memory_used_bytes"])))
    return [
        Family(PREFIX + "workers", "gauge", "Worker processes by state.", workers),
        Family(PREFIX + "store_bytes", "gauge", "The store: its limit, what is used, granted, pooled, on disk.", store),
        Family(PREFIX + "resource_capacity", "gauge", "Amounts that nodes have; memory is in bytes.", total),
        Family(PREFIX + "resource_available", "gauge", "Amounts that are free; memory is in bytes.", free),
        Family(PREFIX + "queued_slots", "gauge", "Slots that are asked for and not granted.", queued),
        Family(PREFIX + "host_cpu_ratio", "gauge", "Share of the host's CPUs in use, from 0 to 1.", cpu),
        Family(PREFIX + "host_memory_used_bytes", "gauge", "Memory of the host in use.", memory),
    ]
