"""What an owner tells people of itself again and again while they look: bounded, and counted when they ask.

Nothing is counted for it while a task runs. How often a function ran is counted from the list of runs, from the last
one that was seen on; what ran before anybody looked is known as far as that list goes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..errors import error_line, signal_of
from .ids import object_id, short
from .messages import LeaseLost, TaskFailed, TaskSpec
from .owner_state import Made, State

if TYPE_CHECKING:
    from .actor_host import ActorHost
    from .owner_base import OwnerBase, Run

FUNCTIONS_MAX = 100  # names that are told
NAMES_MAX = 1_000  # names that are counted
OTHERS = "(others)"
TASKS_LOOKED_AT_MAX = 10_000
ACTORS_MAX = 200
QUEUES_MAX = 20
FAILURES_MAX = 30
RUNS_MAX = 400  # of tasks, and as many of calls, since the reader asked last: of more a sample
READERS_MAX = 8
NAME_CHARS_MAX = 120
TEXT_CHARS_MAX = 400
UNTOLD_KINDS = frozenset(("args", "function"))  # of attempts that failed: they are part of a recovery
BAD_ENDS = frozenset(("task", "timeout", "store"))
FAILURES: frozenset[type] = frozenset((TaskFailed, LeaseLost))
STATES = tuple(state.name.lower() for state in State)


@dataclass(slots=True, eq=False)
class Tally:
    """Runs of one function."""

    runs: int = 0
    failed: int = 0
    run_us: int = 0
    longest_us: int = 0


class Sight:
    """Asked once a second or less; keeps what was counted before."""

    def __init__(self) -> None:
        self.tallies: dict[str, Tally] = {}
        self._last: list[Any] = [None, None]  # the newest run that was counted, of tasks and of calls
        self._read: dict[str, list[Any]] = {}  # the newest runs that each reader was told
        self.failed_names: dict[bytes, str] = {}  # of tasks that failed, the newest last

    def look(self, owner: OwnerBase, now: float, reader: str = "") -> dict[str, Any]:
        """All that one process tells as an owner; a reader with a name is told the runs since it asked last."""
        rings = (owner.spans, owner.call_spans)
        self._count(rings)
        totals, functions = self._functions(owner)
        return {
            "address": owner.me,
            "tasks": totals,
            "functions": functions,
            "objects": len(owner.objects),
            "queues": queues(owner),
            "actors": [actor(made, now) for made in islice(reversed(owner.made.values()), ACTORS_MAX)],
            "actor_states": dict(Counter(made.state for made in owner.made.values())),
            "failures": failures(owner, now, self.failed_names),
            "runs": self._runs(rings, reader) if reader else [],
        }

    def _count(self, rings: tuple[deque[Run], ...]) -> None:
        tallies = self.tallies
        bad: list[TaskSpec] = []
        for span in newer(rings, self._last):
            name, run_us = span[0].name, span[6]
            tally = tallies.get(name)
            if tally is None:
                tally = tallies.setdefault(name if len(tallies) < NAMES_MAX else OTHERS, Tally())
            tally.runs += 1
            tally.run_us += run_us
            if run_us > tally.longest_us:
                tally.longest_us = run_us
            if span[7] in BAD_ENDS:
                tally.failed += 1
                if len(bad) < NAMES_MAX:
                    bad.append(span[0])
        for spec in reversed(bad):
            self.failed_names[spec.id] = spec.name
        while len(self.failed_names) > NAMES_MAX:
            del self.failed_names[next(iter(self.failed_names))]
        self._last = newest(rings)

    def _runs(self, rings: tuple[deque[Run], ...], reader: str) -> list[tuple[Any, ...]]:
        """The runs that are new to a reader, newest first, of many a sample: task, name, where, when, its end."""
        last = self._read.pop(reader, [None, None])
        found = []
        for ring, seen in zip(rings, last, strict=True):
            new = list(newer((ring,), [seen]))
            found += new[:: max(1, -(-len(new) // RUNS_MAX))]
        self._read[reader] = newest(rings)
        while len(self._read) > READERS_MAX:
            del self._read[next(iter(self._read))]
        return [(short(spec.id), spec.name[:NAME_CHARS_MAX], worker, node, run, began_us, run_us, outcome)
                for spec, worker, node, run, _, began_us, run_us, outcome in found]

    def _functions(self, owner: OwnerBase) -> tuple[dict[str, int], list[dict[str, Any]]]:
        """Tasks by state, and by function; what is sent is exact, of very many tasks that wait the newest are told."""
        open_now: dict[str, list[int]] = {}
        looked = 0
        for task in islice(reversed(owner.tasks.values()), TASKS_LOOKED_AT_MAX):
            row = open_now.get(task.spec.name)
            if row is None:
                row = open_now[task.spec.name] = [0] * len(STATES)
            row[task.state] += 1
            looked += 1
        totals = {state: sum(row[index] for row in open_now.values()) for index, state in enumerate(STATES)}
        totals["unlooked"] = len(owner.tasks) - looked
        if totals["unlooked"]:  # the oldest are not among those looked at, and they are the ones that run
            sent = Counter(task.spec.name for lease in owner.leases.values() for task in lease.inflight.values())
            for name, count in sent.items():
                row = open_now.setdefault(name, [0] * len(STATES))
                row[State.SENT] = max(row[State.SENT], count)
            totals["sent"] = sum(row[State.SENT] for row in open_now.values())
            totals["ready"] = max(totals["ready"], sum(queue.count for queue in owner.queues.values()))
        names = sorted({**open_now, **self.tallies}, key=lambda name: -self._weight(name, open_now.get(name)))
        return totals, [self._row(name, open_now.get(name)) for name in names[:FUNCTIONS_MAX]]

    def _weight(self, name: str, row: list[int] | None) -> int:
        tally = self.tallies.get(name)
        return (sum(row) if row else 0) + (tally.runs if tally else 0)

    def _row(self, name: str, row: list[int] | None) -> dict[str, Any]:
        tally = self.tallies.get(name) or Tally()
        counts = dict(zip(STATES, row or [0] * len(STATES), strict=True))
        return {"name": name[:NAME_CHARS_MAX], **counts, "runs": tally.runs, "failed_runs": tally.failed,
                "run_us": tally.run_us, "longest_us": tally.longest_us}


def newer(rings: Iterable[deque[Run]], seen: Iterable[Any]) -> Iterator[Run]:
    """The runs in each ring that came after the one that was seen there last, newest first."""
    for ring, last in zip(rings, seen, strict=True):
        for run in reversed(ring):
            if run is last:
                break
            yield run


def newest(rings: Iterable[deque[Run]]) -> list[Any]:
    """The last run of each ring."""
    return [ring[-1] if ring else None for ring in rings]


def queues(owner: OwnerBase) -> list[dict[str, Any]]:
    """What waits for slots, the longest queues first."""
    waiting = sorted((queue for queue in owner.queues.values() if queue.count), key=lambda queue: -queue.count)
    return [{"shape": dict(queue.key[0]), "placement": list(queue.key[1]), "count": queue.count,
             "leases": len(queue.leases), "reason": queue.reason[:TEXT_CHARS_MAX]} for queue in waiting[:QUEUES_MAX]]


def actor(made: Made, now: float) -> dict[str, Any]:
    """An actor as the one that made it knows it; its worker is an address."""
    spec, life = made.task.spec, made.task.spec.life
    return {
        "id": spec.id.hex(),
        "name": spec.name[:NAME_CHARS_MAX],
        "named": life.name if life is not None else "",
        "recovery": life.recovery if life is not None else "",
        "state": made.state,
        "worker": made.worker,
        "restarts": made.restarts,
        "replaying": made.state == "alive" and not made.settled,
        "checkpoint_calls": made.checkpoint.calls if made.checkpoint is not None else -1,
        "unsaved": made.unsaved[:TEXT_CHARS_MAX],
        "error": error_line(made.error)[:TEXT_CHARS_MAX] if made.state == "dead" else made.ending[:TEXT_CHARS_MAX],
        "alive_s": now - made.born_at if made.born_at >= 0 else -1.0,
    }


def hosted(host: ActorHost) -> dict[str, Any]:
    """An actor as its own process knows it."""
    return {
        "id": host.id.hex(),
        "calls": host.calls,
        "running": [item.push.spec.name[:NAME_CHARS_MAX] for item in islice(host.running.values(), 3)],
        "waiting": sum(len(line) for line in host.waiting.values()),
        "replaying": host.recovering,
        "replayed": host.replayed,
        "saving": bool(host.writing),
    }


def failures(owner: OwnerBase, now: float, names: Mapping[bytes, str]) -> list[dict[str, Any]]:
    """What went wrong lately here, newest first: attempts that failed, workers that died; names: of failed tasks."""
    found = []
    for at, _, event in owner.journal.latest(FAILURES, FAILURES_MAX):
        if isinstance(event, LeaseLost):
            death = event.death
            how = f"killed by {signal_of(death.exit_code)}" if death.exit_code < 0 else f"exit code {death.exit_code}"
            ran = f", while it ran {death.running_name or short(death.running)}" if death.running else ""
            why = f": {death.reason}" if death.reason else ""
            last = f"; it printed last: {death.log_lines[-1]}" if death.log_lines else ""
            found.append({"kind": "worker", "id": death.running.hex() or death.worker_id, "name": death.worker_id,
                          "age_s": now - at,
                          "text": f"pid {death.pid} on {death.host} ended, {how}{why}{ran}{last}"[:TEXT_CHARS_MAX]})
        elif event.kind not in UNTOLD_KINDS:
            task = owner.tasks.get(event.task)
            obj = owner.objects.get(object_id(event.task, 0))
            known = task or (obj.task if obj is not None else None)
            name = known.spec.name if known is not None else names.get(event.task, "")
            again = "; it is tried again" if known is not None and known.state is not State.FAILED else ""
            found.append({"kind": event.kind, "id": event.task.hex(), "name": name[:NAME_CHARS_MAX], "age_s": now - at,
                          "text": error_line(event.error)[:TEXT_CHARS_MAX] + again})
    return found
