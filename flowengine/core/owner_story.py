"""The Owner for people: why something waits, and the story of a task or an object."""

from __future__ import annotations

from ..recovery.stash import StashDue, StashOld
from ..scheduling.resources import shown_need, units_of
from . import messages as m
from . import owner_state as s
from .bundles import bundle_of, group_of, index_of
from .ids import short, task_of
from .journal import clock
from .owner_base import INTERRUPTED, OwnerBase
from .owner_state import ENDED, Made, State, Task

# Events of the way of every task: told from the list of runs instead, since they are many and hold values.
UNTOLD: frozenset[type] = frozenset((
    m.Asked, m.Answered,
    s.Submitted, s.ValuePut, s.ReadyAsked, s.WaiterGone, s.RefsMade, s.RefsDropped, s.InputsGiven, s.FetchAsked,
    s.IdleLooked, s.LateLooked, s.WaysLooked, s.StreamAsked, s.StreamTaken, s.Exported, s.ParentBegan, s.ParentEnded,
    m.TaskDone, m.StreamItem, m.ObjectReady, m.ObjectHere, m.StashAdded, m.WatchObject, m.Pong, m.CheckpointTaken,
    m.StashCarried, m.StashKept, StashDue, StashOld, s.Said,
))  # fmt: skip


BUSY = "busy"  # in the reason of a demand that is served when others are done
CAUSE_STEPS_MAX = 1_000
WORKER_RUNS_MAX = 200
OUTCOMES = {  # how a run ended, for people; others say it themselves
    "task": "failed", "timeout": "out of time", "store": "found no room", "args": "an input was lost",
    "function": "its function was missing", "repeated": "done again",
    INTERRUPTED: "interrupted",
}  # fmt: skip


class StoryRules(OwnerBase):
    """Part of Owner: see owner_base for the state."""

    def worker_of(self, oid: bytes) -> str:
        """The worker_id that runs or ran the object's task; empty when none did or it is forgotten."""
        task = self.tasks.get(task_of(oid))
        if task is not None and task.lease is not None:
            return task.lease.worker_id
        obj = self.objects.get(oid)
        return obj.maker if obj is not None else ""

    def is_needed(self) -> bool:
        """Whether others would miss this process: its actors, what it owns and others hold, its tasks under way."""
        return (
            bool(self.held_back)
            or any(made.state != "dead" for made in self.made.values())
            or any(obj.borrowers for obj in self.objects.values())
            or any(task.state not in ENDED for task in self.tasks.values())
        )

    def why(self, oid: bytes) -> str:
        """One line: what the object is and what it waits for."""
        obj = self.objects.get(oid)
        if obj is None:
            return f"{short(oid)} is not known here"
        if obj.owner:
            state = "ready" if obj.value is not None else "pending"
            return f"{short(oid)} {state}, owned by {obj.owner}"
        task = obj.task if obj.task is not None else self.tasks.get(task_of(oid))
        if obj.value is not None:
            kind = {m.Inline: "ready", m.Stored: "ready", m.Failed: "failed"}[type(obj.value)]
            return f"{short(oid)} {kind}" + (f" ({task.spec.name})" if task else "")
        if task is None and oid in self.promised:
            return f"{short(oid)} waits for the members of a group"
        return f"{short(oid)} " + (self.why_task(task) if task is not None else "was lost")

    def name_of(self, oid: bytes) -> str:
        """The name of the task that makes an object."""
        task = self.tasks.get(task_of(oid))
        return task.spec.name if task is not None else ""

    def cause(self, oid: bytes) -> tuple[bytes, bool]:
        """The object for which this one waits in the end, and whether that one waits without hope as things are."""
        task = self.tasks.get(task_of(oid))
        for _ in range(CAUSE_STEPS_MAX):
            if task is None or task.state is not State.WAITING:
                break
            first = next((obj for obj in task.inputs if obj.value is None), None)
            if first is None:
                break
            oid, task = first.oid, self.tasks.get(task_of(first.oid)) if not first.owner else None
        if task is not None and task.spec.actor is not None:
            made = self.made.get(task_of(task.spec.actor.oid))
            task = made.task if made is not None else None
        if task is None or task.state is not State.READY or task.spec.actor is not None:
            return oid, False
        reason = self.queues[task.key].reason
        return oid, bool(reason) and BUSY not in reason

    def why_task(self, task: Task) -> str:
        """One line: where the task is and what it waits for."""
        name = task.spec.name
        if task.spec.actor is not None and task.state is not State.WAITING:
            return self.why_call(task)
        if task.state is State.WAITING:
            first = next((obj for obj in task.inputs if obj.value is None), None)
            by = f", among them {short(first.oid)}" if first is not None else ""
            if first is not None and first.task is not None:
                by += f" ({first.task.spec.name}, {first.task.state.name.lower()})"
            return f"{name}: waits for {task.missing} input(s){by}"
        if task.state is State.READY:
            queue = self.queues[task.key]
            bundle = bundle_of(task.spec.shape)
            needs = ", ".join(shown_need(name, count) for name, count in units_of(task.key[0])) or "nothing"
            what = f"bundle {index_of(bundle)} of {group_of(bundle)}" if bundle else needs
            return f"{name}: waits for {queue.reason or f'a slot with {what}'}"
        if task.state is State.SENT and task.lease is not None:
            ahead, again = len(task.lease.inflight) - 1, f" for run {task.attempt}" if task.attempt > 1 else ""
            others = f", which has {ahead} more" if ahead else ""
            made = self.made.get(task.spec.id)
            unsaved = f"; no checkpoint: {made.unsaved}" if made is not None and made.unsaved else ""
            return f"{name}: sent to {task.lease.worker_id}{again}{others}{unsaved}"
        return f"{name}: {task.state.name.lower()}"

    def explain(self, oid: bytes) -> list[str]:
        """Why the object is in durable storage or not; of an actor, what is held to bring it back."""
        obj, made = self.objects.get(oid), self.made.get(task_of(oid))
        if made is not None:
            return self.explain_actor(made)
        if obj is None or obj.owner:
            return []
        return [self.why(oid), *self.why_persisted(obj)]

    def explain_actor(self, made: Made) -> list[str]:
        """The owner's side of an actor."""
        checkpoint, name = made.checkpoint, made.task.spec.name
        held = "no checkpoint: it would be constructed, and do all its calls again"
        if checkpoint is not None:
            value = checkpoint.value
            size = f"{len(value.blob)} bytes" if isinstance(value, m.Inline) and not checkpoint.path else "in a file"
            held = f"the checkpoint after {checkpoint.calls} calls is held here, {size}"
        unsaved = f"; the last try failed: {made.unsaved}" if made.unsaved else ""
        state = f"{made.state}, came back {made.restarts} times"
        return [f"actor {name} {short(made.task.spec.id)} {state}; as its owner sees it", held + unsaved]

    def story_of_worker(self, worker_id: str) -> list[str]:
        """The last runs at a worker of what was submitted here, oldest first."""
        runs = sorted([run for run in (*self.spans, *self.call_spans) if run[1] == worker_id], key=lambda run: run[5])
        return [
            f"{clock(began_us / 1e6 + self.journal.wall_offset_s)}  {'ran':<16} {spec.name} {short(spec.id)}: "
            f"{OUTCOMES.get(outcome, outcome)} after {run_us / 1e3:.1f} ms"
            for spec, _, _, _, _, began_us, run_us, outcome in runs[-WORKER_RUNS_MAX:]
        ]

    def story(self, name: bytes) -> list[str]:
        """What is known of a task or an object (a task's name also tells of its objects), oldest first."""
        told: list[tuple[float, str]] = []
        task = self.tasks.get(task_of(name))
        offset_s = self.journal.wall_offset_s
        if task is not None:
            told.append((task.submitted_at, f"{'submitted':<16} {task.spec.name} by {short(task.spec.parent)}"))
        for spec, worker, node, run, submitted_us, began_us, run_us, outcome in (*self.spans, *self.call_spans):
            if spec.id == task_of(name):
                if task is None:
                    told.append((submitted_us / 1e6, f"{'submitted':<16} {spec.name} by {short(spec.parent)}"))
                took = f"{OUTCOMES.get(outcome, outcome)} after {run_us / 1e3:.1f} ms"
                which = f"{'run' if spec.actor is None and spec.life is None else 'in life'} {run}"
                told.append((began_us / 1e6, f"{which:<16} on {worker} of node {node}: {took}"))
        lines = [(at, f"{clock(at + offset_s)}  {text}") for at, text in told]
        lines += self.journal.timed_story(name)
        lines.sort(key=lambda line: line[0])
        if task is not None or name in self.objects:
            now = self.why(name) if name in self.objects else self.why_task(task) if task is not None else ""
            lines.append((self.now, f"{clock(self.now + offset_s)}  {'now':<16} {now}"))
        return [text for _, text in lines]
