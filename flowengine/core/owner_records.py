"""The Owner's rules for replays in another process: what it keeps of what has ended, and what it tells of a name. Pure.

Nothing is kept for a task that only computed: its spec is in the list of runs, with large arguments in `Past.specs`;
its values are there as long as references are. More is kept, up to a bound, of tasks that failed, that chose or had
children, and of actors that died.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..recovery.record import (
    ActorTold,
    Answer,
    CallsSent,
    CallsTold,
    ChildrenTold,
    Piece,
    ReplyTold,
    TaskTold,
    inputs_of,
)
from ..recovery.stash import entries_of, place_of
from . import commands as c
from . import messages as m
from .actor_host import ActorHost
from .ids import object_id
from .owner_base import INTERRUPTED, OwnerBase
from .owner_state import ENDED, Made, Target, Task

RAN_AND_FAILED = ("task", "crash", "timeout")  # kinds of errors whose task has run
PENDING = m.Pending()


class RecordRules(OwnerBase):
    """Part of Owner: see owner_base for the state."""

    # --- what is kept ------------------------------------------------------------------------------------

    def keep_failed(self, task: Task, error: m.Failed) -> None:
        """The task has failed for good: what a replay needs outlives its references."""
        spec = task.spec
        if error.kind not in RAN_AND_FAILED or not task.attempt or spec.life is not None or spec.actor is not None:
            return
        run = task.crashes + task.failures + task.rebuilds + (error.kind != "crash")
        told = self.task_told(spec, run, error)
        self.past.failed.put(spec.id, told, size_of(told))
        if self.keeps_records:
            self.out.append(c.KeepPiece(spec.id, told))

    def keep_chosen(self, task: Task, event: m.StashAdded) -> None:
        """A running task has chosen, or a child of it has ended: its owner knows that for longer than it runs."""
        choices, children = task.recorded or {}, task.children or {}
        known = self.past.chosen.sizes.get(task.spec.id, 0)
        added = sum([len(payload) + 64 for _, _, payload in event.recorded])
        added += sum([value_bytes(value) for _, value in event.children])
        self.past.chosen.put(task.spec.id, (choices, children), known + added)

    def keep_older(self, made: Made, former: m.Checkpoint | None) -> None:
        """A newer checkpoint takes the place of this one: who looks back may begin from it."""
        actor, past = made.task.spec.id, self.past
        if former is not None and not former.path and not former.value.contained:
            past.starts.put(actor + former.calls.to_bytes(8, "big"), former, value_bytes(former.value))
        recorded = made.task.recorded or {}
        covered = {key: payload for key, payload in recorded.items()
                   if key[0] != "turn" and place_of(*key) < made.needed_from}
        if covered:
            older = {**past.choices.things.get(actor, {}), **covered}
            past.choices.put(actor, older, sum([len(payload) + 100 for payload in older.values()]))

    def keep_dead(self, made: Made) -> None:
        """The actor is dead for good, and somebody may want to see why."""
        told = self.actor_told(made)
        size = len(told.function) + sum([value_bytes(start.value) for start in told.starts])
        size += sum([push_bytes(push) for push in told.calls])
        for gone in self.past.dead.put(made.task.spec.id, told, size):
            paths = [start.path for start in gone.starts if start.path]
            if paths:
                self.out.append(c.DropState(paths[0].rpartition("/")[0]))
        if self.keeps_records:
            self.out.append(c.KeepPiece(made.task.spec.id, told))

    def keep_sent(self, target: Target) -> None:
        """An actor is dead that was called from here."""
        calls: list[m.PushTask] = []
        answers: list[Answer | None] = []
        for (_, seq), task in target.sent.items():
            if isinstance(task, m.PushTask):
                calls.append(task)
                answers.append(None)
                continue
            values = tuple([obj.value or PENDING for obj in task.inputs])
            seen = task.state in ENDED
            calls.append(m.PushTask(task.spec, task.attempt, 0, values, seq=seq, seen=seen))
            answers.append(self.answer_of(task.spec))
        sent = CallsSent(target.actor, tuple(calls), tuple(answers))
        self.past.sent.put(target.actor, sent, sum([push_bytes(push) for push in calls]))
        if self.keeps_records:
            self.out.append(c.KeepPiece(target.actor, sent))

    def answer_of(self, spec: m.TaskSpec) -> Answer | None:
        """What came of a call, when all of it is known here."""
        found: list[m.Value] = []
        for index in range(spec.num_returns):
            obj = self.objects.get(object_id(spec.id, index))
            if obj is None or obj.value is None:
                return None
            if type(obj.value) is m.Failed:
                if obj.value.kind != "task":
                    return None  # it died, or was not run
                return m.TaskFailed(spec.id, 0, obj.value.error, obj.value.kind, False, -1)
            found.append(obj.value)
        return m.TaskDone(spec.id, 0, tuple(found), -1) if found else None

    # --- what is told ------------------------------------------------------------------------------------

    def told(self, digits: str) -> list[Piece]:
        """All that is known here of tasks and actors whose names begin with these digits."""
        whole = self.past.specs.things
        ran = {run[0].id: (whole.get(run[0].id, run[0]), run[3]) for run in self.spans
               if run[0].id.hex().startswith(digits) and (run[0].function or run[0].id in whole)
               and run[7] != INTERRUPTED}
        found: list[Piece] = [kept for name, kept in self.past.failed.things.items() if name.hex().startswith(digits)]
        for task in [task for name, task in self.tasks.items() if name.hex().startswith(digits)]:
            if task.spec.actor is None and task.spec.life is None:
                ran.setdefault(task.spec.id, (task.spec, task.attempt))
        found += [self.task_told(spec, run) for name, (spec, run) in ran.items() if name not in self.past.failed.things]
        children: dict[bytes, dict[bytes, str]] = {}
        for spec in (*[run[0] for run in self.spans], *[task.spec for task in self.tasks.values()]):
            if spec.parent.hex().startswith(digits):
                children.setdefault(spec.parent, {})[spec.id] = spec.name
        found += [ChildrenTold(parent, tuple(names.items())) for parent, names in children.items()]
        found += [kept for name, kept in self.past.dead.things.items() if name.hex().startswith(digits)]
        for made in self.made.values():
            if made.task.spec.id.hex().startswith(digits) and made.state != "dead":
                found.append(self.actor_told(made))
        for sent in self.past.sent.things.values():
            names_of = [sent.actor, *[push.spec.id for push in sent.calls]]
            if any(name.hex().startswith(digits) for name in names_of):
                found.append(sent)
        return found

    def shown(self, spec: m.TaskSpec) -> m.TaskSpec:
        """How a task with large arguments stays for the timeline; for replays the last of such are kept whole."""
        self.past.specs.put(spec.id, spec, len(spec.args))
        return msgspec.structs.replace(spec, function=b"", args=b"")

    def task_told(self, spec: m.TaskSpec, run: int, error: m.Failed | None = None) -> TaskTold:
        """What is known of a task."""
        task = self.tasks.get(spec.id)
        count = spec.num_returns if task is None or task.stream is None else task.stream.count
        results = self.values_at([object_id(spec.id, index) for index in range(max(count, 0))])
        for value in results:
            if type(value) is m.Failed:
                error = error or value
        choices, children = self.past.chosen.things.get(spec.id, ({}, {}))
        ended = error is not None or task is None or task.state in ENDED
        return TaskTold(
            spec, self.functions.blobs.get(spec.function, b""), self.values_at([ref.oid for ref in inputs_of(spec)]),
            () if error is not None else results, error.error if error is not None else b"",
            error.kind if error is not None else "", run, entries_of(choices), tuple(children.items()),
            self.me, self.config.inline_bytes_max, ended,
        )  # fmt: skip

    def actor_told(self, made: Made) -> ActorTold:
        """What is known of an actor."""
        spec = made.task.spec
        starts = [start for start in (made.fallback, made.checkpoint) if start is not None] or [m.BEGINNING]
        recorded, calls = made.task.recorded or {}, tuple(made.kept_calls.values())
        if made.state != "dead":
            calls = ()  # its process has them
            older = [start for name, start in self.past.starts.things.items() if name.startswith(spec.id)]
            starts = [m.BEGINNING, *older, *[start for start in starts if start != m.BEGINNING]]
            recorded = {**self.past.choices.things.get(spec.id, {}), **recorded}
        return ActorTold(
            spec, self.functions.blobs.get(spec.function, b""), self.values_at([ref.oid for ref in inputs_of(spec)]),
            1 + made.restarts, tuple(starts), entries_of(recorded), calls,
            self.config.inline_bytes_max, made.reach, b"" if made.ending else made.died_in, made.error,
        )  # fmt: skip

    def values_at(self, oids: Iterable[bytes]) -> tuple[m.Value | m.Pending, ...]:
        """Values as far as they are here."""
        found = [self.objects.get(oid) for oid in oids]
        return tuple([PENDING if obj is None or obj.value is None else obj.value for obj in found])


def told_by_host(host: ActorHost, digits: str) -> list[Piece]:
    """What the process of an actor knows of its calls since the checkpoint."""
    asked = [call for call in (*host.uncovered, *host.replies) if call.hex().startswith(digits)]
    if not asked and not host.id.hex().startswith(digits):
        return []
    # One that runs is told of only when it is asked for: up to now the others have been done.
    calls = {
        item.number: item.push
        for item in (*host.history.calls, *host.uncovered.values())
        if item.number >= 0 and (item.push.spec.id not in host.running or item.push.spec.id in asked)
    }
    answers = tuple([host.replies.get(push.spec.id, (b"", None))[1] for push in calls.values()])
    log = tuple(host.log.entries) if host.log is not None else ()
    kept = dict.fromkeys(push.spec.id for push in calls.values())
    older = bool(asked) and not any(call in kept for call in asked)
    return [CallsTold(host.id, tuple(calls), tuple(calls.values()), answers, log, older)]


def reply_told(host: ActorHost, call: bytes) -> list[Piece]:
    """What an actor answered to a call."""
    known = host.replies.get(call)
    return [ReplyTold(call, known[1])] if known is not None else []


def value_bytes(value: m.Value | m.Pending) -> int:
    """What keeping a value takes, about."""
    if type(value) is m.Inline:
        return len(value.blob) + 64
    return len(value.error) if type(value) is m.Failed else 64


def push_bytes(push: m.PushTask) -> int:
    """What keeping a call takes, about."""
    return len(push.spec.args) + sum([value_bytes(value) for value in push.values]) + 200


def size_of(told: TaskTold) -> int:
    """What keeping the record of a task takes, about."""
    held = [*told.values, *[value for _, value in told.children]]
    return len(told.function) + len(told.spec.args) + len(told.error) + sum(map(value_bytes, held)) + 200
