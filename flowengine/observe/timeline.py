"""The timeline of a program's tasks in the Chrome trace format, which Perfetto and chrome://tracing show. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from flowengine.core.ids import short
from flowengine.core.messages import TaskSpec

DONE = "done"
BAD_COLOUR = "terrible"  # one of the names that chrome://tracing has for colours
Run = tuple[TaskSpec, str, str, int, int, int, int, str]  # as an owner keeps it


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One run of a task: where, when (microseconds), how it ended, and whose task it was."""

    task: str
    name: str
    worker: str
    node: str
    attempt: int
    submitted_us: int
    began_us: int
    run_us: int
    outcome: str
    submitter: str = ""  # a worker, or a program
    home: str = ""  # the node of the submitter, when that is a worker


def spans(runs: Iterable[Run], submitter: str = "", home: str = "") -> list[Span]:
    """Runs as an owner keeps them, for people; home: the node of an owner that is a worker."""
    return [
        Span(short(spec.id), spec.name, worker, node, attempt, submitted_us, began_us, run_us, outcome, submitter, home)
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
    """Nodes as processes, workers as threads, runs as slices; an arrow from each submission to the run."""
    drawn = Trace()
    for number, span in enumerate(spans):
        drawn.run(span)
        if span.submitted_us:
            drawn.arrow(span, number)
    return {"traceEvents": drawn.events, "displayTimeUnit": "ms"}


class Trace:
    """Events in the Chrome trace format, and the rows that they lie on."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._nodes: dict[str, int] = {}
        self._rows: dict[tuple[str, str], tuple[int, int]] = {}

    def run(self, span: Span) -> None:
        """A slice; what did not end well is marked."""
        pid, tid = self._row(span.node, span.worker)
        details = {"task": span.task, "attempt": span.attempt, "outcome": span.outcome}
        is_bad = span.outcome != DONE
        slice_: dict[str, Any] = {"ph": "X", "name": span.name, "cat": "task,failed" if is_bad else "task", "pid": pid,
                                  "tid": tid, "ts": span.began_us, "dur": max(span.run_us, 1), "args": details}
        if is_bad:
            slice_["cname"] = BAD_COLOUR
            self.events.append({"ph": "i", "s": "t", "name": f"{span.name}: {span.outcome}", "cat": "failed",
                                "pid": pid, "tid": tid, "ts": span.began_us + max(span.run_us, 1), "args": details})
        self.events.append(slice_)

    def arrow(self, span: Span, number: int) -> None:
        """From where and when the task was submitted to where and when it began."""
        pid, tid = self._row(span.home, span.submitter)
        flow = {"cat": "submit", "name": "submit", "id": number}
        self.events.append({"ph": "X", "name": f"submit {span.name}", "cat": "submit", "pid": pid, "tid": tid,
                            "ts": span.submitted_us, "dur": 1, "args": {"task": span.task}})
        self.events.append({"ph": "s", "pid": pid, "tid": tid, "ts": span.submitted_us, **flow})
        pid, tid = self._row(span.node, span.worker)
        arrived_us = max(span.began_us, span.submitted_us)
        self.events.append({"ph": "f", "bp": "e", "pid": pid, "tid": tid, "ts": arrived_us, **flow})

    def _row(self, node: str, thread: str) -> tuple[int, int]:
        """The numbers of a row, which is named when it is new; node "" has the programs."""
        place = self._rows.get((node, thread))
        if place is not None:
            return place
        if node not in self._nodes:
            self._nodes[node] = len(self._nodes) + 1
            self._name("process_name", (self._nodes[node], 0), f"node {node}" if node else "programs")
        place = self._rows[node, thread] = (self._nodes[node], len(self._rows) + 1)
        self._name("thread_name", place, f"worker {thread}" if node else thread or "submissions")
        return place

    def _name(self, kind: str, place: tuple[int, int], name: str) -> None:
        pid, tid = place
        self.events.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})
