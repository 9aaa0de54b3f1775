"""Questions of people about the cluster: counters, nodes, resources, stories. Each goes to this host's node."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .errors import FlowError
from .observe.timeline import on_one_clock, trace
from .resources import job
from .scheduling.resources import APART, BESIDE

if TYPE_CHECKING:
    from .runtime.session import Session

CLOCK_TIMEOUT_S = 1.0
HEAD_TIMEOUT_S = 1.0
COUNTERS = (
    "tasks_submitted", "tasks_executed", "tasks_retried", "objects_rebuilt", "objects_inlined", "objects_stored",
    "objects_persisted",
    "bytes_stored", "bytes_spilled", "bytes_moved", "actors_started", "actors_alive", "actor_restarts",
    "calls_executed", "calls_replayed", "checkpoints_taken", "stash_entries_forwarded", "stash_entries_flushed",
    "head_messages", "leases_granted", "leases_spilled", "collectives_done", "collectives_early",
    "collectives_repaired",
)  # fmt: skip


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process."""

    worker_id: str
    pid: int
    state: str


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A node: a host's store, its slots and its workers."""

    node_id: str
    host: str
    address: str
    resources: dict[str, float]
    available: dict[str, float]
    workers: list[WorkerInfo]


def stats(session: Session) -> dict[str, int]:
    """Cluster-wide counters, those of this process included."""
    found = session.ask(session.node, "stats")
    return {**dict.fromkeys(COUNTERS, 0), **{name: int(count) for name, count in found.items()}}


def nodes(session: Session) -> list[NodeInfo]:
    """The nodes that are alive."""
    return [node_info(entry) for entry in session.ask(session.node, "nodes")]


def node_info(entry: dict[str, Any]) -> NodeInfo:
    """One node from its answer."""
    return NodeInfo(
        node_id=entry["node_id"],
        host=entry["host"],
        address=entry["address"],
        resources=dict(entry["total"]),
        available=dict(entry["available"]),
        workers=[
            WorkerInfo(worker_id=worker["worker_id"], pid=worker["pid"], state=worker["state"])
            for worker in entry["workers"]
        ],
    )


def explain(session: Session, name: str) -> str:
    """Why an actor was checkpointed or not, or an object written to durable storage or not."""
    texts = session.ask(session.node, "explain", name)
    return "\n".join(texts) or f"nobody knows {name}"


def page_url(session: Session) -> str:
    """The address of the head's live page, for a browser of the head's host; raises FlowError when there is none."""
    url, reason = session.ask_head("page", None)
    if not url:
        raise FlowError(f"the head has no page: {reason}")
    return str(url)


def resources(session: Session, which: str) -> dict[str, float]:
    """Sums over the nodes, with what this program made at run time, but not its policies: total or available."""
    sums: dict[str, float] = {}
    for entry in session.ask(session.node, "nodes"):
        for name, amount in dict(entry[which]).items():
            sums[name] = sums.get(name, 0.0) + amount
    with contextlib.suppress(FlowError):  # the head is being started anew
        made = session.ask(session.head, "resource.list", job(session), timeout_s=HEAD_TIMEOUT_S)
        for name, found in made.items():
            if name.startswith((BESIDE, APART)):
                continue
            sums[name] = sums.get(name, 0.0) + found[which]
    return sums


def clocks(session: Session) -> dict[str, int]:
    """How far the clocks of the nodes of other hosts are ahead of this host's, in microseconds."""
    ahead_us: dict[str, int] = {}
    for entry in session.all_nodes():
        try:
            for _ in range(2 if entry.host != session.host else 0):  # the first answer may wait for the link
                asked_s = time.monotonic()
                clock_us = int(session.ask(entry.address, "clock", scope="local", timeout_s=CLOCK_TIMEOUT_S))
                ahead_us[entry.node_id] = clock_us - round((asked_s + time.monotonic()) / 2 * 1e6)
        except FlowError:
            continue  # it has gone: its runs are shown as its clock told
    return ahead_us


def write_timeline(session: Session, path: str | os.PathLike[str]) -> int:
    """Write the runs of what this process has submitted as a Chrome trace; gives their number."""
    from .runtime.answers import runs  # here, as a program imports the runtime when it starts

    found = on_one_clock(runs(session), session.node_id, clocks(session))
    Path(path).write_bytes(msgspec.json.encode(trace(found)))
    return len(found)
