"""The cluster as the live page and the metrics show it: one document, made of what nodes and processes told. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from flowengine.core.head_seen import AT_HEAD
from flowengine.core.owner_base import INTERRUPTED
from flowengine.core.owner_story import OUTCOMES

FUNCTIONS_MAX = 100
ACTORS_MAX = 300
QUEUES_MAX = 30
FAILURES_MAX = 60
STATES = ("waiting", "ready", "sent", "done", "failed")
RUN_COUNTS = ("runs", "failed_runs", "run_us")


class NodeTold(msgspec.Struct, kw_only=True):
    """What is known of a node: as the head lists it, and what it answered (None: nothing)."""

    listed: dict[str, Any]
    seen: list[dict[str, Any]] | None = None  # the node first, then its processes
    stats: dict[str, Any] | None = None
    host: dict[str, Any] | None = None
    ahead_us: int = 0  # how far its clock is before the head's


class HeadTold(msgspec.Struct, kw_only=True):
    """What the head knows itself."""

    session: str
    address: str
    host: str
    pid: int
    now_s: float
    started_s: float
    counters: dict[str, int]
    seekers: list[dict[str, Any]]  # demands that no node can serve now
    resources: list[dict[str, Any]]  # what programs made
    bundles: list[dict[str, Any]]  # gangs and placement groups
    failures: list[dict[str, Any]]


def document(head: HeadTold, told: Sequence[NodeTold], number: int) -> dict[str, Any]:
    """All that is shown, bounded; number: how many such were made."""
    processes = [one for node in told for one in (node.seen or ())[1:]]
    places = {worker["address"]: (node.listed["node_id"], worker["worker_id"])
              for node in told for worker in _own(node).get("workers", ()) if worker.get("address")}
    actors, actor_states = _actors(processes, places)
    names = {actor["worker"]: actor["name"] for actor in actors if actor["worker"]}
    ages_s = {(one.get("node_id"), one.get("pid"), one.get("code")): one.get("age_s", -1.0) for one in processes}
    nodes = [_node(node, names, ages_s) for node in told]
    return {
        "number": number,
        "now_ms": round(head.now_s * 1e3, 1),
        "session": head.session,
        "head": {"address": head.address, "host": head.host, "pid": head.pid,
                 "alive_s": round(head.now_s - head.started_s, 1)},
        "totals": {
            "nodes": len(told),
            "silent": sum(1 for node in told if node.seen is None),
            "programs": sum(len(_own(node).get("programs", ())) for node in told),
            "workers": dict(Counter(worker["state"] for node in nodes for worker in node["workers"])),
            "tasks": _task_totals(processes),
            "actors": actor_states,
            "objects": sum(one.get("objects", 0) for one in processes),
            "store": _sums([node["store"] for node in nodes]),
            "resources": _resources(nodes),
            "counters": counters(head, told),
        },
        "nodes": nodes,
        "resources": head.resources,
        "bundles": head.bundles,
        "functions": _functions(processes),
        "queues": _queues(head, processes),
        "actors": actors,
        "actors_more": max(0, sum(actor_states.values()) - len(actors)),
        "groups": [{**group, "node_id": node["node_id"]} for node in nodes for group in node.pop("groups")],
        "failures": sorted([*head.failures, *(one for process in processes for one in process.get("failures", ()))],
                           key=lambda one: float(one["age_s"]))[:FAILURES_MAX],
    }


def counters(head: HeadTold, told: Sequence[NodeTold]) -> dict[str, float]:
    """The sums of all counters."""
    return _sums([head.counters, *(node.stats or {} for node in told)])


def _own(node: NodeTold) -> Mapping[str, Any]:
    return node.seen[0] if node.seen else {}


def _sums(parts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for part in parts:
        for name, count in part.items():
            if isinstance(count, int | float):
                sums[name] = sums.get(name, 0) + count
    return dict(sorted(sums.items()))


def _task_totals(processes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    sums = _sums([process.get("tasks", {}) for process in processes])
    return {state: sums.get(state, 0) for state in (*STATES, "unlooked")}


def _resources(nodes: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """By name: what all have, and what is free."""
    total, free = _sums([node["total"] for node in nodes]), _sums([node["available"] for node in nodes])
    return {name: [amount, free.get(name, 0)] for name, amount in total.items()}


def _node(node: NodeTold, actors: Mapping[str, str], ages_s: Mapping[tuple[Any, ...], float]) -> dict[str, Any]:
    """A node with its workers; actors: the names of those that live, by worker; ages_s: of what runs."""
    listed, own, host = node.listed, _own(node), node.host or {}
    uses: Mapping[str, Sequence[float]] = host.get("processes", {})
    running: Mapping[str, Sequence[Any]] = host.get("running", {})
    workers = []
    for worker in own.get("workers", ()):
        pid, task, attempt, name = running.get(worker["worker_id"], (worker["pid"], "", 0, ""))
        share, resident_bytes = uses.get(str(pid), (-1.0, 0))
        workers.append({"worker_id": worker["worker_id"], "pid": pid, "state": worker["state"], "task": task,
                        "name": name, "attempt": attempt, "cpu_share": share, "memory_bytes": resident_bytes,
                        "age_s": ages_s.get((listed["node_id"], pid, task), -1.0),
                        "holds": worker.get("holds", {}), "actor": actors.get(worker["worker_id"], "")})
    return {
        "node_id": listed["node_id"], "host": listed["host"], "address": listed["address"],
        "answered": node.seen is not None,
        "total": dict(own.get("total") or listed["total"]),
        "available": dict(own.get("available") or listed["available"]),
        "queued": own.get("queued", listed["queued"]),
        "store": {**own.get("store", {}), "objects": (node.stats or {}).get("objects_stored", 0)},
        "spilled_bytes": (node.stats or {}).get("bytes_spilled", 0),
        "cpu_share": host.get("cpu_share", -1.0), "cpu_count": host.get("cpu_count", 0),
        "memory_used_bytes": host.get("memory_used_bytes", 0),
        "memory_total_bytes": host.get("memory_total_bytes", 0),
        "programs": list(own.get("programs", ())),
        "workers": workers, "workers_more": own.get("workers_more", 0),
        "groups": own.get("groups", []),
    }


def _functions(processes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Functions of all owners by name, those first of which most is under way."""
    rows: dict[str, dict[str, Any]] = {}
    for process in processes:
        for one in process.get("functions", ()):
            row = rows.setdefault(one["name"], {"name": one["name"], **dict.fromkeys((*STATES, *RUN_COUNTS), 0),
                                                "longest_us": 0})
            for name in (*STATES, *RUN_COUNTS):
                row[name] += one[name]
            row["longest_us"] = max(row["longest_us"], one["longest_us"])
    for row in rows.values():
        row["mean_us"] = round(row["run_us"] / row["runs"], 1) if row["runs"] else 0
    order = sorted(rows.values(), key=lambda row: (-(row["sent"] + row["ready"] + row["waiting"]), -row["runs"]))
    return order[:FUNCTIONS_MAX]


def _queues(head: HeadTold, processes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What waits for slots, the longest queues first, and what the head seeks a node for, unless its reason is told by
    those who wait; the same are one row."""
    found: dict[str, dict[str, Any]] = {}
    own = [one for process in processes for one in process.get("queues", ())]
    told = {(str(one["shape"]), str(one["placement"]), AT_HEAD + one["reason"]) for one in own}
    for one in (*own, *head.seekers):
        what = str(one["shape"]), str(one["placement"]), one["reason"]
        if what in told:
            continue
        row = found.setdefault(" ".join(what), {**one, "count": 0, "leases": 0})
        row["count"] += one["count"]
        row["leases"] += one["leases"]
    return sorted(found.values(), key=lambda row: -int(row["count"]))[:QUEUES_MAX]


def _actors(
    processes: Sequence[Mapping[str, Any]], places: Mapping[str, tuple[str, str]]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """All actors: as their owners know them, with what their own processes tell; and how many are in which state."""
    hosted = {one["hosted"]["id"]: one["hosted"] for one in processes if one.get("hosted")}
    found, states = [], Counter[str]()
    for process in processes:
        states.update(process.get("actor_states", {}))
        for one in process.get("actors", ()):
            node_id, worker_id = places.get(one["worker"], ("", ""))
            own = hosted.get(one["id"], {}) if one["state"] != "dead" else {}
            found.append({**one, "node_id": node_id, "worker": worker_id, "calls": own.get("calls", -1),
                          "running": own.get("running", []), "waiting": own.get("waiting", 0),
                          "replaying": bool(one["replaying"] or own.get("replaying")),
                          "replayed": own.get("replayed", 0), "saving": bool(own.get("saving"))})
    found.sort(key=lambda one: (one["state"] == "dead", one["name"], one["id"]))
    return found[:ACTORS_MAX], dict(sorted(states.items()))


def runs(told: Sequence[NodeTold]) -> list[tuple[Any, ...]]:
    """New runs of all owners on the head's clock: when (ms), how long (ms), name, node, worker, outcome, task, run."""
    ahead_us = {node.listed["node_id"]: node.ahead_us for node in told}
    found = []
    for node in told:
        for process in (node.seen or ())[1:]:
            for task, name, worker, at, number, began_us, run_us, outcome in process.get("runs", ()):
                ahead = node.ahead_us if outcome == INTERRUPTED else ahead_us.get(at, node.ahead_us)
                began_ms = (began_us - ahead) / 1e3
                end = OUTCOMES.get(outcome, outcome)
                found.append((round(began_ms, 2), round(run_us / 1e3, 2), name, at, worker, end, task, number))
    return found


def objects_of(told: Sequence[Sequence[Any] | None]) -> dict[str, Any]:
    """Objects of all owners, the largest first, each with where it lies; sums by function; stores.

    told: what nodes answer about `memory`, each its store first and then its processes.
    """
    stores = [answer[0] for answer in told if answer]
    owners = [one for answer in told for one in (answer or ())[1:] if isinstance(one, dict)]
    places: dict[str, list[str]] = {}
    for store in stores:
        for oid, _, place in store.pop("objects"):
            places.setdefault(oid, []).append(place)
    objects, sums = [], dict[tuple[str, str], list[int]]()
    for owner in owners:
        who = f"{'program' if owner['role'] == 'driver' else 'worker'} {owner['pid']}"
        for one in owner["objects"]:
            objects.append({**one, "owner": who, "places": places.get(one["id"], [])})
        for name, count, size_bytes in owner["functions"]:
            row = sums.setdefault((name, who), [0, 0])
            row[0] += count
            row[1] += size_bytes
    known = {one["id"] for one in objects}
    unowned = [oid for oid in places if oid not in known]
    return {
        "stores": stores,
        "functions": [{"name": name, "owner": who, "count": count, "size_bytes": size_bytes}
                      for (name, who), (count, size_bytes) in sorted(sums.items(), key=lambda row: -row[1][1])],
        "objects": sorted(objects, key=lambda one: (-one["size_bytes"], one["id"])),
        "not_listed": sum(owner["count"] for owner in owners) - len(objects),
        "without_owner": len(unowned),
    }
