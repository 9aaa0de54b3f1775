"""The Owner's rules for actors: those that it made, and calls of any actor.

An actor is a task that does not end: its owner keeps its spec, its last checkpoint and the turns (who called when),
and has it run again after a crash like any task. A caller keeps its calls, in order, until a checkpoint covers them,
and sends them to every new incarnation; the actor knows by their numbers which it has done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ActorDied, pack_error
from . import commands as c
from . import messages as m
from . import owner_state as s
from .ids import object_id, short
from .owner_calls import CallRules
from .owner_state import Made, State, Task

SAME_CALL_DEATHS_MAX = 3  # a call in which the actor dies so often in a row is not tried again


class ActorRules(CallRules):
    """Part of Owner: see owner_base for the state."""

    # --- making actors ---------------------------------------------------------------------------------

    def actor_made(self, task: Task) -> None:
        """User code made an actor: its task waits for a process of its own."""
        former = self.targets.pop(task.spec.id, None)
        if former is not None:
            former.error = former.error or self.actor_error(former.name, "the task that made it runs again", "")
            self.target_died(former)  # of the actor that an earlier run of its maker made
        self.made[task.spec.id] = Made(task)
        self.counters["actors_started"] += 1
        self.counters["actors_alive"] += 1

    def actor_ready(self, event: m.ActorReady, sender: str) -> None:
        """The actor takes calls."""
        task = self.current(event.actor, event.attempt)
        made = self.made.get(event.actor)
        if task is None or made is None:
            return
        if event.error:
            self.actor_ends(made, event.error)
            return
        made.unborn = 0
        made.incarnation = event.attempt
        made.worker = event.worker
        made.state = "alive"
        self.tell_watchers(made)
        for push in made.kept_calls.values():
            self.send(made.worker, push)
        if event.attempt > 1:
            self.send(made.worker, m.CallersKnown(event.actor, tuple(made.watchers)))

    def actor_recovered(self, event: m.ActorRecovered, sender: str) -> None:
        """The replay is over."""
        made = self.made.get(event.actor)
        if made is not None and made.incarnation == event.attempt:
            self.counters["calls_replayed"] += event.replayed

    def tell_watchers(self, made: Made) -> None:
        for to in made.watchers:
            self.send(to, self.actor_at(made))

    def actor_at(self, made: Made) -> m.ActorAt:
        life = made.task.spec.life
        recovery = life.recovery if life is not None else ""
        return m.ActorAt(made.task.spec.id, made.incarnation, made.state, made.worker, recovery, made.error)

    def watch_actor(self, event: m.WatchActor, sender: str) -> None:
        """A caller asks where the actor is."""
        made = self.made.get(event.actor)
        if made is None:
            error = self.actor_error("", "it has ended", "")
            self.send(sender, m.ActorAt(event.actor, 1 << 60, "dead", error=error))
            return
        if made.state != "dead" and sender not in self.dead:
            made.watchers[sender] = None
        self.send(sender, self.actor_at(made))

    # --- the end of an actor ---------------------------------------------------------------------------------

    def actor_lost(self, task: Task, death: m.Death) -> None:
        """The actor's process is dead: run it again, or not."""
        made = self.made[task.spec.id]
        life = task.spec.life
        assert life is not None
        if made.ending:
            self.actor_ends(made, self.actor_error(task.spec.name, made.ending, ""))
            return
        if death.running and death.running != task.spec.id and death.running == made.died_in:
            made.died_in_times += 1
        else:
            made.died_in, made.died_in_times = death.running, 1
        limit = 0 if life.recovery == "none" else life.max_restarts
        made.unborn += death.running == task.spec.id and made.incarnation != task.attempt
        if made.unborn >= SAME_CALL_DEATHS_MAX:
            why = f"its process died {made.unborn} times before it took calls, in its constructor"
            self.actor_ends(made, self.death_error(task, death, why))
        elif made.died_in_times >= SAME_CALL_DEATHS_MAX and death.running and death.running != task.spec.id:
            call = death.running_name or short(death.running)
            why = f"its process died {made.died_in_times} times in the call {call}"
            self.actor_ends(made, self.death_error(task, death, why))
        elif 0 <= limit <= made.restarts:
            self.actor_ends(made, self.death_error(task, death, "its process died"))
        else:
            made.restarts += 1
            made.state = "restarting"
            made.worker = ""
            self.counters["actor_restarts"] += 1
            self.tell_watchers(made)
            if life.recovery == "restart":
                task.recorded = None
            task.crashes += 1
            self.try_again(task)

    def death_error(self, task: Task, death: m.Death, why: str) -> bytes:
        made = self.made[task.spec.id]
        life = task.spec.life
        limit = life.max_restarts if life is not None and life.recovery != "none" else 0
        error = ActorDied(
            f"{why}{': ' + death.reason if death.reason else ''}",
            who=task.spec.name,
            host=death.host,
            pid=death.pid,
            exit_code=death.exit_code if death.pid else None,
            attempt=made.restarts + 1,
            attempts_max=limit + 1 if limit >= 0 else 0,
            log_lines=death.log_lines,
            what_next="nothing: it stays dead",
        )
        return pack_error(error)

    def actor_ends(self, made: Made, error: bytes) -> None:
        """The actor is dead for good: everybody who waits for it hears why."""
        task = made.task
        if made.state == "dead":
            return
        made.state = "dead"
        made.error = error
        self.drop_checkpoint(made)
        if made.checkpoint is not None and made.checkpoint.path:
            self.out.append(c.DropState(made.checkpoint.path))
        made.checkpoint = None
        kept, made.kept_calls = made.kept_calls, {}
        for push in kept.values():
            self.drop_kept(push)
        self.counters["actors_alive"] -= 1
        life = task.spec.life
        if life is not None and life.name:
            self.send(self.head, m.Asked(0, "name.drop", [life.name, task.spec.id.hex()]))
        self.tell_watchers(made)
        if task.state is State.SENT and task.lease is not None:
            lease = task.lease
            self.send(lease.node, m.KillWorker(lease.id, task.spec.id, "its actor has ended"))
            task.wanted = False
        if task.state in (State.WAITING, State.READY, State.SENT):
            self.end_later(task, m.Failed(error, "actor"))

    def drop_checkpoint(self, made: Made) -> None:
        if made.checkpoint is not None:
            self.discard(made.checkpoint.value, [object_id(made.task.spec.id, made.checkpoint.calls)])

    def kill_actor(self, event: m.KillActor, sender: str) -> None:
        """Somebody ends the actor."""
        made = self.made.get(event.actor)
        if made is None or made.state == "dead":
            return
        task = made.task
        lease = task.lease
        if event.restart:
            if lease is not None and task.state is State.SENT:
                self.send(lease.node, m.KillWorker(lease.id, task.spec.id, event.reason))
            return
        made.ending = event.reason
        self.actor_ends(made, self.actor_error(task.spec.name, event.reason, "nothing: it stays dead"))

    def actor_cancelled(self, task: Task) -> bool:
        """Whether the cancelled task is an actor, which ends before it began; who called it hears of that."""
        made = self.made.get(task.spec.id)
        if made is None:
            return False
        self.actor_ends(made, task.why_unwanted)
        return True

    def actor_unneeded(self, task: Task) -> bool:
        """No handle and no call is left: the actor ends, unless it is detached."""
        made = self.made.get(task.spec.id)
        life = task.spec.life
        if made is None or (life is not None and life.detached):
            return False
        made.ending = "its last handle is gone"
        self.actor_ends(made, self.actor_error(task.spec.name, made.ending, ""))
        self.forget_actor(task.spec.id)
        return True

    def forget_actor(self, actor: bytes) -> None:
        """No handle of an actor that was made here is left."""
        self.made.pop(actor, None)
        target = self.targets.pop(actor, None)
        for task in target.sent.values() if target is not None else ():
            if isinstance(task, Task):
                self.call_covered(task)

    # --- what a next incarnation will need ---------------------------------------------------------------------

    def checkpoint_taken(self, event: m.CheckpointTaken, sender: str) -> None:
        """The actor's owner holds the newest state; older turns are not needed for a replay."""
        task = self.current(event.actor, event.attempt)
        made = self.made.get(event.actor)
        oid = object_id(event.actor, event.checkpoint.calls)
        if task is None or made is None or made.state == "dead":
            self.discard(event.checkpoint.value, [oid])
            return
        if event.checkpoint.value.contained:
            for ref in event.checkpoint.value.contained:
                inner = self.known(ref)
                inner.pins += 1
                if inner.owner:
                    inner.introduced += 1
                    self.unannounced.pop(inner.oid, None)
        self.drop_checkpoint(made)
        made.checkpoint = event.checkpoint
        self.counters["checkpoints_taken"] += 1
        if task.recorded:
            task.recorded = {key: payload for key, payload in task.recorded.items() if key[1] >= event.checkpoint.calls}
        self.send(sender, m.CheckpointKept(event.actor, event.checkpoint.calls))

    def turns_came(self, task: Task, sender: str, recorded: tuple[tuple[str, int, bytes], ...]) -> None:
        """The actor may let out what depends on these turns."""
        turns = [number for kind, number, _ in recorded if kind == "turn"]
        if turns:
            self.send(sender, m.TurnsKept(task.spec.id, max(turns)))


HANDLERS: dict[type[Any], Callable[[Any, Any, str], None]] = {
    m.ActorReady: ActorRules.actor_ready,
    m.ActorRecovered: ActorRules.actor_recovered,
    m.WatchActor: ActorRules.watch_actor,
    m.ActorAt: ActorRules.actor_at_told,
    m.CheckpointTaken: ActorRules.checkpoint_taken,
    m.CallsKept: ActorRules.calls_kept,
    m.CallsCovered: ActorRules.calls_covered,
    m.KillActor: ActorRules.kill_actor,
    s.SeqsRestored: ActorRules.seqs_restored,
    s.Leaving: ActorRules.leaving,
}
