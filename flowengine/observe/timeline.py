"""The timeline of a program's tasks and calls in the Chrome trace format, for Perfetto and chrome://tracing. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from flowengine.core.ids import short
from flowengine.core.messages import TaskSpec
from flowengine.core.owner_base import INTERRUPTED, Run
from flowengine.core.owner_calls import REPEATED
from flowengine.core.owner_story import OUTCOMES

DONE = "done"
BAD_COLOUR = "terrible"  # one of the names that chrome://tracing has for colours
LANES_MAX = 1_000  # of a worker


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One run of a task: where, when (microseconds), how it ended, and whose task it was."""

    task: str
    name: str
    worker: str
    node: str
    attempt: int  # of an actor and its calls: which life of the actor
    submitted_us: int
    began_us: int
    run_us: int
    outcome: str
    submitter: str = ""  # a worker, or a program
    home: str = ""  # the node of the submitter, when that is a worker
    kind: str = "task"  # or call, or actor: the beginning of one
    parent: str = ""  # the task or call that submitted it


def spans(runs: Iterable[Run], submitter: str = "", home: str = "") -> list[Span]:
    """Runs as an owner keeps them, for people; home: the node of an owner that is a worker."""
    return [
        Span(short(spec.id), f"{spec.name}.__init__" if spec.life is not None else spec.name, worker, node, attempt,
             submitted_us, began_us, run_us, outcome, submitter, home,
             kind_of(spec), short(spec.parent))
        for spec, worker, node, attempt, submitted_us, began_us, run_us, outcome in runs
    ]


def kind_of(spec: TaskSpec) -> str:
    """What a run was."""
    if spec.actor is not None:
        return "call"
    return "actor" if spec.life is not None else "task"


def on_one_clock(spans: Iterable[Span], owner_node: str, ahead_us: Mapping[str, int]) -> list[Span]:
    """The spans of an owner on that node, with times on one clock; ahead_us: how far each node's clock is ahead."""
    owner_us = ahead_us.get(owner_node, 0)
    return [
        msgspec.structs.replace(
            span,
            submitted_us=span.submitted_us - owner_us if span.submitted_us else 0,
            began_us=span.began_us - (owner_us if span.outcome == INTERRUPTED else ahead_us.get(span.node, owner_us)),
        )
        for span in spans
    ]


def trace(spans: Iterable[Span]) -> dict[str, Any]:
    """Nodes as processes, workers as threads, runs as slices; an arrow from each submission to the run."""
    drawn = Trace(sorted(with_beginnings(list(spans)), key=lambda span: span.began_us))
    for number in range(len(drawn.spans)):
        drawn.run(number)
    for number, span in enumerate(drawn.spans):
        if span.submitted_us:
            drawn.arrow(number)
    return {"traceEvents": drawn.events, "displayTimeUnit": "ms"}


def with_beginnings(spans: list[Span]) -> list[Span]:
    """The spans, in which interrupted calls begin where the last run before them in that worker has ended."""
    ends: dict[str, list[int]] = {}
    for span in spans:
        if span.outcome != INTERRUPTED:
            ends.setdefault(span.worker, []).append(span.began_us + span.run_us)
    return [_with_beginning(span, ends) if span.outcome == INTERRUPTED and not span.run_us else span for span in spans]


def _with_beginning(span: Span, ends: Mapping[str, list[int]]) -> Span:
    """A call of which only its submission and the death that ended it are known."""
    died_us = span.began_us
    before = [end_us for end_us in (*ends.get(span.worker, ()), span.submitted_us) if 0 < end_us <= died_us]
    began_us = max(before, default=died_us)
    return msgspec.structs.replace(span, began_us=began_us, run_us=died_us - began_us)


def lanes_of(spans: Sequence[Span]) -> list[int]:
    """For each span, in the order in which they began: in which row of its worker it lies over nothing else."""
    busy: dict[str, list[tuple[int, int]]] = {}  # worker -> heap of ends and lanes
    free: dict[str, list[int]] = {}
    found = []
    for span in spans:
        running, idle = busy.setdefault(span.worker, []), free.setdefault(span.worker, [])
        while running and running[0][0] <= span.began_us:
            heapq.heappush(idle, heapq.heappop(running)[1])
        lane = heapq.heappop(idle) if idle else min(len(running), LANES_MAX - 1)
        heapq.heappush(running, (span.began_us + span.run_us, lane))
        found.append(lane)
    return found


class Trace:
    """Events in the Chrome trace format, and the rows that they lie on."""

    def __init__(self, spans: list[Span]) -> None:
        """spans: in the order in which they began."""
        self.spans = spans
        self.events: list[dict[str, Any]] = []
        self._lanes = lanes_of(spans)
        self._nodes: dict[str, int] = {}
        self._rows: dict[tuple[str, str, int], tuple[int, int]] = {}
        self._drawn_to: dict[tuple[int, int], int] = {}  # row -> where its last slice ends
        self._starts: dict[int, int] = {}  # span -> where its slice begins
        self._by_task: dict[tuple[str, str], list[int]] = {}  # task and worker -> spans
        for span in spans:
            if span.submitted_us and not span.home:
                self._row(span.home, span.submitter, 0)
        rows = dict.fromkeys((span.node, span.worker, lane) for span, lane in zip(spans, self._lanes, strict=True))
        for row in sorted(rows, key=lambda row: (row[0], len(row[1]), row)):
            self._row(*row)
        for number, span in enumerate(spans):
            self._by_task.setdefault((span.task, span.worker), []).append(number)

    def run(self, number: int) -> None:
        """A slice; what did not end well is marked, and what an actor does again after its restart."""
        span = self.spans[number]
        pid, tid = self._row(span.node, span.worker, self._lanes[number])
        start_us = self._starts[number] = max(span.began_us, self._drawn_to.get((pid, tid), span.began_us))
        long_us = max(span.began_us + span.run_us - start_us, 1)
        self._drawn_to[pid, tid] = start_us + long_us
        details = {span.kind: span.task, "attempt" if span.kind == "task" else "life": span.attempt,
                   "outcome": OUTCOMES.get(span.outcome, span.outcome)}
        is_again = span.outcome == REPEATED or (span.kind == "actor" and span.attempt > 1)
        is_bad = span.outcome not in (DONE, REPEATED)
        name = f"{span.name} ({'replay' if span.kind == 'call' else 'restart'})" if is_again else span.name
        if span.outcome == INTERRUPTED:
            name = f"{span.name} ({details['outcome']})"
        category = span.kind + ",again" * is_again + ",failed" * is_bad
        slice_: dict[str, Any] = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start_us,
                                  "dur": long_us, "args": details}
        if is_bad:
            slice_["cname"] = BAD_COLOUR
            self.events.append({"ph": "i", "s": "t", "name": f"{span.name}: {details['outcome']}", "cat": "failed",
                                "pid": pid, "tid": tid, "ts": start_us + long_us, "args": details})
        self.events.append(slice_)

    def arrow(self, number: int) -> None:
        """From where and when the task was submitted to where and when it began."""
        span = self.spans[number]
        pid, tid = self._row(span.home, span.submitter, self._lane_of_submitter(span))
        flow = {"cat": "submit", "name": "submit", "id": number}
        self.events.append({"ph": "X", "name": f"submit {span.name}", "cat": "submit", "pid": pid, "tid": tid,
                            "ts": span.submitted_us, "dur": 1, "args": {span.kind: span.task}})
        self.events.append({"ph": "s", "pid": pid, "tid": tid, "ts": span.submitted_us, **flow})
        pid, tid = self._row(span.node, span.worker, self._lanes[number])
        arrived_us = max(self._starts[number], span.submitted_us)
        self.events.append({"ph": "f", "bp": "e", "pid": pid, "tid": tid, "ts": arrived_us, **flow})

    def _lane_of_submitter(self, span: Span) -> int:
        """Where the task or call lies that submitted it."""
        for number in self._by_task.get((span.parent, span.submitter), ()):
            parent = self.spans[number]
            if parent.began_us <= span.submitted_us <= parent.began_us + parent.run_us:
                return self._lanes[number]
        return 0

    def _row(self, node: str, thread: str, lane: int) -> tuple[int, int]:
        """The numbers of a row, which is named when it is new; node "" has the programs."""
        place = self._rows.get((node, thread, lane))
        if place is not None:
            return place
        if node not in self._nodes:
            self._nodes[node] = len(self._nodes) + 1
            self._name("process_name", (self._nodes[node], 0), f"node {node}" if node else "programs")
        place = self._rows[node, thread, lane] = (self._nodes[node], len(self._rows) + 1)
        name = f"worker {thread}" if node else thread or "submissions"
        self._name("thread_name", place, f"{name}, at once {lane + 1}" if lane else name)
        return place

    def _name(self, kind: str, place: tuple[int, int], name: str) -> None:
        pid, tid = place
        self.events.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})
