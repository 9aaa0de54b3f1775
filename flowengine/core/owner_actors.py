"""The Owner's rules for actors: those that it made, and calls of any actor.

An actor is a task that does not end: its owner keeps its spec, its last checkpoint and the turns (who called when),
and has it run again after a crash like any task. A caller keeps its calls, in order, until a checkpoint covers them,
and sends them to every new incarnation; the actor knows by their numbers which it has done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ActorDied, pack_error
from ..recovery.stash import place_of
from . import commands as c
from . import messages as m
from . import owner_state as s
from .ids import object_id, short
from .owner_calls import CallRules
from .owner_cycles import Trial
from .owner_state import Made, State, Task

LEAVE_S_MAX = 2.0  # for the process of an actor that nobody needs to say what others need of it
LOOK_S = 1.0  # between looks at an actor that nobody can call but tasks that would run again
UNNEEDED = "its last handle is gone"
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
        self.began(task, event)
        if event.error:
            self.actor_ends(made, event.error)
            return
        made.unborn = 0
        made.born_at = made.born_at if made.born_at >= 0 else self.now
        made.incarnation = event.attempt
        if made.checkpoint is not None and made.fallback is not None and event.restored < made.checkpoint.calls:
            self.drop_checkpoint(made, made.checkpoint)  # it turned out to be bad
            made.checkpoint = made.fallback if made.fallback.calls else None
            made.fallback = None
        made.worker = event.worker
        made.state = "alive"
        self.tell_watchers(made)
        for push in made.kept_calls.values():
            self.send(made.worker, push)
            self.note_repeat(made.worker, push.spec, self.place_of(made), made.incarnation)
        if event.attempt > 1 and not made.poll:
            self.tell_callers_known(made)
        life = task.spec.life
        made.settled = event.attempt == 1 or (life is not None and life.recovery != "exactly_once")
        if task.wards:
            self.bring_wards(task, made.settled)
        if life is not None and life.recovery != "exactly_once":
            self.maker_is_back(event.actor, sender)

    def actor_recovered(self, event: m.ActorRecovered, sender: str) -> None:
        """The replay is over."""
        made = self.made.get(event.actor)
        if made is not None and made.incarnation == event.attempt:
            self.counters["calls_replayed"] += event.replayed
            self.actor_settles(made)
            life = made.task.spec.life
            if life is not None and not life.is_async:  # of coroutines some may still be at it
                self.maker_is_back(event.actor, sender)

    def tell_watchers(self, made: Made) -> None:
        for to in made.watchers:
            self.send(to, self.actor_at(made))

    def actor_at(self, made: Made) -> m.ActorAt:
        life = made.task.spec.life
        recovery = life.recovery if life is not None else ""
        place = self.place_of(made) or ("", "")
        ran, actor = made.died_in if made.state != "alive" else b"", made.task.spec.id
        return m.ActorAt(actor, made.incarnation, made.state, made.worker, recovery, made.error, *place, ran)

    def place_of(self, made: Made) -> tuple[str, str] | None:
        """The worker and the node of an actor, as people know them."""
        lease = made.task.lease
        return (lease.worker_id, lease.node_id) if lease is not None else None

    def began(self, task: Task, event: m.ActorReady) -> None:
        """Remember for the timeline that an actor was constructed or restored."""
        lease = task.lease
        if lease is not None and event.run_us >= 0:
            submitted_us = int(task.submitted_at * 1e6) if event.attempt == 1 else 0
            outcome = "task" if event.error else "done"
            self.call_spans.append((task.spec, lease.worker_id, lease.node_id, event.attempt, submitted_us,
                                    event.began_us, event.run_us, outcome))

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
            if life.recovery == "restart":
                why = "its process died while the call ran or waited there; it begins anew"
                made.error = self.death_error(task, death, why, "later calls work")
            made.restarts += 1
            self.lives.deaths += 1
            if life.recovery == "exactly_once":
                self.poll(made, made.worker)
            made.state = "restarting"
            made.worker = ""
            self.counters["actor_restarts"] += 1
            self.tell_watchers(made)
            if life.recovery == "restart":
                task.recorded = None
            task.crashes += 1
            self.try_again(task)

    def death_error(self, task: Task, death: m.Death, why: str, what_next: str = "nothing: it stays dead") -> bytes:
        made = self.made[task.spec.id]
        life = task.spec.life
        if life is not None and life.recovery == "exactly_once":
            what_next += f"; flow replay {short(task.spec.id)} runs its last calls again under pdb"
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
            what_next=what_next,
        )
        return pack_error(error)

    def actor_ends(self, made: Made, error: bytes) -> None:
        """The actor is dead for good: everybody who waits for it hears why."""
        task = made.task
        if made.state == "dead":
            return
        leaves = made.state == "alive" and made.ending == UNNEEDED
        made.state = "dead"
        made.error = error
        if made.ending != UNNEEDED:
            self.keep_dead(made)
        checkpoints, made.checkpoint, made.fallback = (made.checkpoint, made.fallback), None, None
        if made.ending == UNNEEDED and made.folder:
            self.out.append(c.DropState(made.folder))
        for checkpoint in checkpoints:
            self.drop_checkpoint(made, checkpoint)
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
            if leaves:
                self.send(made.worker, m.ActorUnneeded(task.spec.id))
                self.out.append(c.SetTimer(LEAVE_S_MAX, s.ActorOverdue(task.spec.id, lease.node, lease.id)))
            else:
                self.end_process(lease)
            task.wanted = False
        if task.state in (State.WAITING, State.READY, State.SENT):
            self.end_later(task, m.Failed(error, "actor"))
        self.beside_dead(task.spec.id, error)

    def end_process(self, lease: s.Lease) -> None:
        """Nobody needs the process in which the actor lived."""
        self.send(lease.node, m.KillWorker(lease.id, b"", "its actor has ended"))

    def actor_unwanted(self, event: m.ActorUnneeded, sender: str) -> None:
        """The actor of this process ends: calls that it made may have to be made again for others."""
        self.leaving(s.Leaving(), "")
        self.send(sender, m.ActorLeft(event.actor))

    def actor_left(self, event: m.ActorLeft, sender: str) -> None:
        """All that others need of the actor is here."""
        for lease in self.leases.values():
            if lease.worker == sender and event.actor in lease.inflight:
                self.end_process(lease)

    def actor_overdue(self, event: s.ActorOverdue, sender: str) -> None:
        """Timer: the process of an actor that has ended does not answer."""
        lease = self.leases.get((event.node, event.lease))
        if lease is not None and event.actor in lease.inflight:
            self.end_process(lease)

    def drop_checkpoint(self, made: Made, checkpoint: m.Checkpoint | None) -> None:
        """What is inside of this state is not needed any more."""
        if checkpoint is not None:
            self.discard(checkpoint.value, [object_id(made.task.spec.id, checkpoint.calls)])

    def kill_actor(self, event: m.KillActor, sender: str) -> None:
        """Somebody ends the actor."""
        made = self.made.get(event.actor)
        if made is None or made.state == "dead":
            return
        task = made.task
        lease = task.lease
        if event.restart:
            if lease is not None and task.state is State.SENT:
                self.send(lease.node, m.KillWorker(lease.id, b"", event.reason))
            return
        made.ending = event.reason
        self.actor_ends(made, self.actor_error(task.spec.name, event.reason, "nothing: it stays dead"))

    def actor_cancelled(self, task: Task) -> bool:
        """Whether the cancelled task is an actor, which ends before it began; who called it hears of that."""
        made = self.made.get(task.spec.id)
        if made is None:
            return False
        self.actor_ends(made, task.why_unwanted.error)
        return True

    def actor_unneeded(self, task: Task) -> bool:
        """No handle and no call is left: the actor ends, unless it is detached."""
        made = self.made.get(task.spec.id)
        life = task.spec.life
        if made is None or (life is not None and life.detached) or self.awaits_maker(made):
            return False
        actor = task.results[0]
        if (actor.lineage or actor.pins) and not Trial(self).ends(actor):
            self.look_later(made)
            return False
        made.ending = UNNEEDED
        self.actor_ends(made, self.actor_error(task.spec.name, made.ending, ""))
        self.forget_actor(task.spec.id)
        return True

    def actor_pinned(self, task: Task) -> None:
        """No handle of the actor is left here; what pins it may be there for the actor alone."""
        made = self.made.get(task.spec.id)
        if made is not None and made.state != "dead":
            self.look_later(made)

    def look_later(self, made: Made) -> None:
        """Only what is kept for a repetition may hold the actor: what holds that is not told here."""
        if not made.looking:
            made.looking = True
            self.out.append(c.SetTimer(LOOK_S, s.ActorLooked(made.task.spec.id)))

    def actor_looked(self, event: s.ActorLooked, sender: str) -> None:
        """Timer: does anybody need the actor?"""
        made = self.made.get(event.actor)
        if made is None:
            return
        made.looking = False
        actor = made.task.results[0]
        if actor.pins > 0 and made.state != "dead" and actor.local <= 0 and not self.is_borrowed(actor):
            self.actor_unneeded(made.task)
        else:
            self.release(actor)

    def forget_actor(self, actor: bytes) -> None:
        """No handle of an actor that was made here is left."""
        made = self.made.pop(actor, None)
        if made is not None and made.top:
            siblings = self.tops.get(made.top, {})
            siblings.pop(actor, None)
            if not siblings:
                self.tops.pop(made.top, None)
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
            self.refuse(oid, event.checkpoint.value)
            return
        if event.checkpoint.value.contained:
            for ref in event.checkpoint.value.contained:
                inner = self.known(ref)
                inner.pins += 1
                if inner.owner:
                    self.introduce(inner)
        former, made.checkpoint, made.unsaved = made.checkpoint, event.checkpoint, ""
        self.drop_checkpoint(made, made.fallback)
        made.fallback = None
        if event.checkpoint.path:
            made.fallback = former or m.BEGINNING
        else:
            self.drop_checkpoint(made, former)
        self.counters["checkpoints_taken"] += 1
        told = m.Checkpoint(event.checkpoint.calls, m.Inline(b""), event.checkpoint.path)
        self.journal.event(self.now, sender, m.CheckpointTaken(event.actor, event.attempt, told))
        needed_from = made.needed_from
        self.keep_older(made, former)
        if task.recorded:
            task.recorded = {key: payload for key, payload in task.recorded.items() if place_of(*key) >= needed_from}
        self.send(sender, m.CheckpointKept(event.actor, needed_from, self.lives.rate_per_s(self.now)))

    def checkpoints_at(self, event: m.CheckpointsAt, sender: str) -> None:
        """The actor begins to write files."""
        made = self.made.get(event.actor)
        if made is None or made.state == "dead":
            self.out.append(c.DropState(event.url))
        else:
            made.folder = event.url

    def checkpoint_failed(self, event: m.CheckpointFailed, sender: str) -> None:
        """A state could not be kept, or not be read again: the program is told, once for each reason."""
        made = self.made.get(event.actor)
        if self.current(event.actor, event.attempt) is None or made is None or made.unsaved == event.reason:
            return
        made.unsaved = event.reason
        self.out.append(c.Warn(f"actor {made.task.spec.name} {short(event.actor)}: {event.reason}"))


HANDLERS: dict[type[Any], Callable[[Any, Any, str], None]] = {
    m.ActorReady: ActorRules.actor_ready,
    m.ActorRecovered: ActorRules.actor_recovered,
    m.WatchActor: ActorRules.watch_actor,
    m.ActorAt: ActorRules.actor_at_told,
    m.CheckpointTaken: ActorRules.checkpoint_taken,
    m.CheckpointsAt: ActorRules.checkpoints_at,
    m.CheckpointFailed: ActorRules.checkpoint_failed,
    m.CallsKept: ActorRules.calls_kept,
    m.CallsCovered: ActorRules.calls_covered,
    m.KillActor: ActorRules.kill_actor,
    s.SeqsRestored: ActorRules.seqs_restored,
    s.Leaving: ActorRules.leaving,
    s.ActorLooked: ActorRules.actor_looked,
    m.ActorUnneeded: ActorRules.actor_unwanted,
    m.ActorLeft: ActorRules.actor_left,
    s.ActorOverdue: ActorRules.actor_overdue,
}
