"""The timeline of a program's tasks in the Chrome trace format, which Perfetto and chrome://tracing show. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from flowengine.core.ids import short
from flowengine.core.messages import TaskSpec

Run = tuple[TaskSpec, str, str, int, int, int, int, str]  # as an owner keeps it


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One run of a task: where, when (microseconds), how it ended."""

    task: str
    name: str
    worker: str
    node: str
    attempt: int
    submitted_us: int
    began_us: int
    run_us: int
    outcome: str


def spans(runs: Iterable[Run]) -> list[Span]:
    """Runs as an owner keeps them, for people."""
    return [
        Span(short(spec.id), spec.name, worker, node, attempt, submitted_us, began_us, run_us, outcome)
        for spec, worker, node, attempt, submitted_us, began_us, run_us, outcome in list(runs)
    ]


def on_one_clock(spans: Iterable[Span], owner_node: str, ahead_us: Mapping[str, int]) -> list[Span]:
    """The spans of an owner on that node, with times on one clock; ahead_us: how far each node's clock is ahead."""
    owner_us = ahead_us.get(owner_node, 0)
    return [
        msgspec.structs.replace(
            span,
            submitted_us=span.submitted_us - owner_us if span.submitted_us else 0,
            began_us=span.began_us - ahead_us.get(span.node, owner_us),
        )
        for span in spans
    ]


def trace(spans: Iterable[Span]) -> dict[str, Any]:
    """Nodes as processes, workers as threads, runs as slices; an arrow from the submission to the run."""
    events: list[dict[str, Any]] = []
    rows: dict[tuple[str, str], tuple[int, int]] = {}
    nodes: dict[str, int] = {"": 1}
    events.append(_named("process_name", 1, 0, "program"))
    events.append(_named("thread_name", 1, 1, "submissions"))
    for number, span in enumerate(spans):
        place = rows.get((span.node, span.worker))
        if place is None:
            if span.node not in nodes:
                nodes[span.node] = len(nodes) + 1
                events.append(_named("process_name", nodes[span.node], 0, f"node {span.node}"))
            place = rows[span.node, span.worker] = (nodes[span.node], len(rows) + 2)
            events.append(_named("thread_name", *place, f"worker {span.worker}"))
        pid, tid = place
        details = {"task": span.task, "attempt": span.attempt, "outcome": span.outcome}
        events.append({"ph": "X", "name": span.name, "cat": span.outcome, "pid": pid, "tid": tid, "ts": span.began_us,
                       "dur": max(span.run_us, 1), "args": details})
        if span.submitted_us:
            flow = {"cat": "submit", "name": "submit", "id": number}
            events.append({"ph": "X", "name": f"submit {span.name}", "cat": "submit", "pid": 1, "tid": 1,
                           "ts": span.submitted_us, "dur": 1})
            events.append({"ph": "s", "pid": 1, "tid": 1, "ts": span.submitted_us, **flow})
            arrived_us = max(span.began_us, span.submitted_us)
            events.append({"ph": "f", "bp": "e", "pid": pid, "tid": tid, "ts": arrived_us, **flow})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
