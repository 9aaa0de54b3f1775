"""The Owner's rules for actors: those that it made, and calls of any actor.

An actor is a task that does not end: its owner keeps its spec, its last checkpoint and the turns (who called when),
and has it run again after a crash like any task. A caller keeps its calls, in order, until a checkpoint covers them,
and sends them to every new incarnation; the actor knows by their numbers which it has done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from ..errors import ActorDied, pack_error
from . import commands as c
from . import messages as m
from . import owner_state as s
from .ids import object_id, short, task_of
from .owner_base import OwnerBase
from .owner_state import Line, Made, State, Step, Target, Task

SAME_CALL_DEATHS_MAX = 3  # a call in which the actor dies so often in a row is not tried again


class ActorRules(OwnerBase):
    """Part of Owner: see owner_base for the state."""

    # --- making actors ---------------------------------------------------------------------------------

    def actor_made(self, task: Task) -> None:
        """User code made an actor: its task waits for a process of its own."""
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
        if made.state != "dead":
            made.watchers[sender] = None
        self.send(sender, self.actor_at(made))

    def actor_error(self, name: str, why: str, what_next: str) -> bytes:
        """A packed ActorDied."""
        return pack_error(ActorDied(why, who=name, what_next=what_next))

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
            call = self.call_name(death.running)
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

    def call_name(self, call: bytes) -> str:
        task = self.tasks.get(call)
        return task.spec.name if task is not None else short(call)

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
        made.kept_calls = {}
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

    def actor_unneeded(self, task: Task) -> bool:
        """No handle and no call is left: the actor ends, unless it is detached."""
        made = self.made.get(task.spec.id)
        life = task.spec.life
        if made is None or (life is not None and life.detached):
            return False
        made.ending = "its last handle is gone"
        self.actor_ends(made, self.actor_error(task.spec.name, made.ending, ""))
        self.made.pop(task.spec.id, None)
        return True

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

    def calls_kept(self, event: m.CallsKept, sender: str) -> None:
        """Calls of a dead caller, for a replay."""
        made = self.made.get(event.actor)
        if made is None or made.state == "dead":
            return
        made.kept_calls.update({push.spec.id: push for push in event.calls})
        if made.state == "alive" and sender != made.worker:
            for push in event.calls:
                self.send(made.worker, push)  # it may be at its replay and wait for them

    def turns_came(self, task: Task, sender: str, recorded: tuple[tuple[str, int, bytes], ...]) -> None:
        """The actor may let out what depends on these turns."""
        turns = [number for kind, number, _ in recorded if kind == "turn"]
        if turns:
            self.send(sender, m.TurnsKept(task.spec.id, max(turns)))

    # --- calling -----------------------------------------------------------------------------------------------

    def leaving(self, event: s.Leaving, sender: str) -> None:
        """This process ends: the owners of the actors that it called keep its calls for a replay."""
        for target in self.targets.values():
            self.hand_over(target)

    def hand_over(self, target: Target) -> None:
        """We will not send these calls again: the actor's owner keeps them until a checkpoint covers them."""
        if target.recovery != "exactly_once" or target.state == "dead" or target.owner == self.me:
            return
        kept = []
        for key, task in target.sent.items():
            if isinstance(task, m.PushTask):
                kept.append(task)
            elif task.state in (State.DONE, State.FAILED):
                values = tuple([obj.value or PENDING for obj in task.inputs])
                kept.append(m.PushTask(
                    task.spec, task.attempt, 0, values, seq=key[1], seen=True, stream_have=s.ALL_ITEMS,
                    stream_taken=s.ALL_ITEMS,
                ))  # fmt: skip
        if kept:
            self.send(target.owner, m.CallsKept(target.actor, tuple(kept)))

    def seqs_restored(self, event: s.SeqsRestored, sender: str) -> None:
        """This process is an actor that goes on from a checkpoint: its own calls are numbered on from there."""
        for actor, seq in event.seqs:
            self.seqs_before[actor, event.caller_key] = seq

    def actor_peer_died(self, address: str) -> None:
        """A caller or an owner of actors is dead."""
        for made in self.made.values():
            if made.watchers.pop(address, "") is None and made.state == "alive":
                self.send(made.worker, m.CallerGone(made.task.spec.id, address))
        for target in self.targets.values():
            if target.owner == address and target.state != "dead":
                self.maker_died(target)
                self.target_died(target)

    def maker_died(self, target: Target) -> None:
        """An actor lives no longer than the process that made it."""
        target.state = "dead"
        why = "the process that made it is dead, and it ends with that"
        target.error = self.actor_error(target.name, why, "nothing: make it in a process that lives longer")

    def target_of(self, ref: m.RefTo, call: str = "") -> Target:
        """The actor that a call is for; asked after when it is the first."""
        actor = task_of(ref.oid)
        target = self.targets.get(actor)
        if target is None:
            target = self.targets[actor] = Target(actor, ref.owner, call.partition(".")[0])
            if target.owner in self.dead:
                self.maker_died(target)
            else:
                self.send(target.owner, m.WatchActor(actor))
        return target

    def line_of(self, target: Target, caller: bytes) -> Line:
        """The calls of one caller."""
        line = target.lines.get(caller)
        if line is None:
            line = target.lines[caller] = Line(deque(), self.seqs_before.get((target.actor, caller), 0))
        return line

    def count_adopted(self, task: Task) -> None:
        """A call whose result an earlier attempt of its caller left: it had a number."""
        ref = task.spec.actor
        if ref is not None:
            self.line_of(self.target_of(ref, task.spec.name), task.spec.caller_key).next_seq += 1

    def called(self, task: Task) -> None:
        """User code calls a method: in the order of submission, behind the other calls of this caller."""
        ref = task.spec.actor
        assert ref is not None
        target = self.target_of(ref, task.spec.name)
        self.known(ref).pins += 1  # the actor lives at least until its calls are answered
        if target.state == "dead":
            self.end_badly(task, m.Failed(target.error, "actor"))
            return
        line = self.line_of(target, task.spec.caller_key)
        target.seqs[task.spec.id] = line.next_seq
        line.next_seq += 1
        line.waiting.append(task)
        if len(line.waiting) == 1:
            self.advance(target, line)

    def call_is_ready(self, task: Task) -> None:
        """The inputs of a call are there: it goes out when it is its turn."""
        ref = task.spec.actor
        target = self.targets.get(task_of(ref.oid)) if ref is not None else None
        if target is not None:
            line = target.lines.get(task.spec.caller_key)
            if line is not None and line.waiting and line.waiting[0] is task:
                self.advance(target, line)

    def advance(self, target: Target, line: Line) -> None:
        """Send what is at the front and has its inputs."""
        while line.waiting and target.state == "alive":
            task = line.waiting[0]
            if task.state in (State.DONE, State.FAILED):
                self.give_number_back(target, line, task)
                continue
            if task.state is not State.READY:
                return
            line.waiting.popleft()
            self.push_call(target, task)

    def give_number_back(self, target: Target, line: Line, task: Task) -> None:
        """A call that ended before it was sent (cancelled, a failed input): the actor must not wait for its number."""
        line.waiting.popleft()
        skip = self.left_out(target, task)
        self.send(target.worker, skip)

    def left_out(self, target: Target, task: Task) -> m.PushTask:
        """The call as it will be sent from now on: a number without anything to do."""
        seq = target.seqs.pop(task.spec.id)
        empty = msgspec.structs.replace(task.spec, function=b"", args=b"", args_object=None, deps=(), nested=())
        skip = target.sent[task.spec.caller_key, seq] = m.PushTask(empty, 1, 0, seq=seq)
        return skip

    def call_cut_short(self, task: Task) -> None:
        """A call was not done in full (cancelled, out of time): a new incarnation must not do it."""
        ref = task.spec.actor
        target = self.targets.get(task_of(ref.oid)) if ref is not None else None
        if target is not None and target.recovery == "exactly_once" and task.spec.id in target.seqs:
            self.left_out(target, task)

    def push_call(self, target: Target, task: Task) -> None:
        if task.state is State.READY:
            task.step(Step.PUSHED)
            task.attempt += 1
        seq = target.seqs[task.spec.id]
        target.sent[task.spec.caller_key, seq] = task
        values = tuple([obj.value or PENDING for obj in task.inputs])
        seen = task.state in (State.DONE, State.FAILED)
        have = taken = 0
        if task.stream is not None:
            lost = [index for index, obj in task.stream.items.items() if obj.value is None]
            have = s.ALL_ITEMS if seen else min(lost, default=task.stream.count)
            taken = s.ALL_ITEMS if seen or task.stream.dropped else task.stream.taken
        lazy = target.open > 0  # an answer will come, and what is queued goes out with it at the latest
        target.open += 1
        push = m.PushTask(
            task.spec, task.attempt, 0, values, seq=seq, seen=seen, stream_have=have, stream_taken=taken
        )
        self.send(target.worker, push, lazy)
        if not task.wanted:
            self.send(target.worker, m.CancelTask(task.spec.id, task.attempt, False))

    def actor_at_told(self, event: m.ActorAt, sender: str) -> None:
        """The actor's owner says where it is."""
        target = self.targets.get(event.actor)
        if target is None:
            if event.state == "alive":
                self.send(event.worker, m.CallsResent(event.actor))  # nothing: the actor need not wait for us
            return
        if event.incarnation < target.incarnation:
            return
        fresh = event.incarnation != target.incarnation
        if fresh:
            target.open = 0
        target.incarnation, target.state, target.worker = event.incarnation, event.state, event.worker
        target.recovery, target.error = event.recovery, event.error
        if event.state == "dead":
            self.target_died(target)
        elif event.state == "alive":
            if fresh:
                self.send_again(target)
                self.send(target.worker, m.CallsResent(target.actor))
            for line in target.lines.values():
                self.advance(target, line)

    def send_again(self, target: Target) -> None:
        """A new incarnation: it gets the calls that no checkpoint covers, or, without recovery, none of them."""
        if target.recovery != "exactly_once":
            why = "its process died while the call ran; it begins anew"
            error = self.actor_error(target.name, why, "later calls work")
            sent, target.sent = target.sent, {}
            for task in sent.values():
                if isinstance(task, Task) and task.state is State.SENT:
                    self.end_badly(task, m.Failed(error, "actor"))
            for line in target.lines.values():
                for number, task in enumerate(line.waiting):
                    target.seqs[task.spec.id] = number
                line.next_seq = len(line.waiting)
            return
        for task in list(target.sent.values()):
            if isinstance(task, m.PushTask):
                self.send(target.worker, task)
            else:
                self.push_call(target, task)

    def target_died(self, target: Target) -> None:
        """No call of the actor will be answered any more."""
        failed = m.Failed(target.error, "actor")
        lines, target.lines = target.lines, {}
        target.seqs = {}
        sent, target.sent = target.sent, {}
        for task in sent.values():
            if isinstance(task, Task):
                if task.state is State.SENT:
                    self.end_badly(task, failed)
                self.call_covered(task)
        for line in lines.values():
            for task in line.waiting:
                if task.state not in (State.DONE, State.FAILED):
                    self.end_badly(task, failed)

    def calls_covered(self, event: m.CallsCovered, sender: str) -> None:
        """A checkpoint covers calls: they are not needed for a replay."""
        made = self.made.get(event.actor)
        if made is not None and made.kept_calls:
            covered = [
                call for call, push in made.kept_calls.items()
                if push.spec.caller_key == event.caller_key and push.seq <= event.seq
            ]  # fmt: skip
            for call in covered:
                del made.kept_calls[call]
        target = self.targets.get(event.actor)
        line = target.lines.get(event.caller_key) if target is not None else None
        if target is None or line is None:
            return
        line.covered = max(line.covered, event.seq)
        gone = []
        for key in target.sent:
            if key[0] == event.caller_key:
                if key[1] > event.seq:
                    break
                gone.append(key)
        for key in gone:
            task = target.sent[key]
            if isinstance(task, Task) and task.state is State.SENT:
                continue  # its reply is still on the way, and it is dropped then
            del target.sent[key]
            target.seqs.pop(task.spec.id, None)
            if isinstance(task, Task):
                self.call_covered(task)

    def call_covered(self, task: Task) -> None:
        if task.pinned and task.state in (State.DONE, State.FAILED):
            self.unpin_task(task)

    def call_settled(self, task: Task) -> None:
        """A call has its reply: its inputs are held until a checkpoint covers it."""
        ref = task.spec.actor
        assert ref is not None
        target = self.targets.get(task_of(ref.oid))
        if target is not None:
            target.open = max(0, target.open - 1)
        seq = target.seqs.get(task.spec.id) if target is not None else None
        key = (task.spec.caller_key, seq if seq is not None else -1)
        if target is None or not self.is_kept(target, key):
            if target is not None and target.sent.pop(key, None) is task:
                target.seqs.pop(task.spec.id, None)  # else its turn has yet to come, or it was left out
            if task.pinned:
                self.unpin_task(task)
        for obj in task.results:
            obj.task = None
        if task.stream is None or (task.stream.dropped and not task.stream.items):
            self.erase(task)
        actor = self.objects.get(ref.oid)
        if actor is not None:
            actor.pins -= 1
            self.release(actor)
        if target is not None and task.state is State.FAILED:
            line = target.lines.get(task.spec.caller_key)
            if line is not None and line.waiting and line.waiting[0] is task:
                self.advance(target, line)
        for obj in list(task.results):
            if obj.local <= 0:
                self.release(obj)

    def is_kept(self, target: Target, key: tuple[bytes, int]) -> bool:
        """Whether a replay may need a call that has its reply."""
        line = target.lines.get(key[0])
        covered = line.covered if line is not None else -1
        return target.recovery == "exactly_once" and isinstance(target.sent.get(key), Task) and key[1] > covered

    def target_gone(self, actor: bytes) -> None:
        """No handle of a foreign actor is left here."""
        target = self.targets.pop(actor, None)
        if target is not None:
            self.hand_over(target)
            for task in target.sent.values():
                if isinstance(task, Task):
                    self.call_covered(task)

    def worker_with(self, task: Task) -> str:
        """The process that runs the task or the call, if it was sent to one."""
        if task.state is not State.SENT:
            return ""
        if task.spec.actor is None:
            return task.lease.worker if task.lease is not None else ""
        target = self.targets.get(task_of(task.spec.actor.oid))
        return target.worker if target is not None and target.state == "alive" else ""

    def why_call(self, task: Task) -> str:
        """One line: what a call waits for."""
        ref = task.spec.actor
        target = self.targets.get(task_of(ref.oid)) if ref is not None else None
        if target is None:
            return f"{task.spec.name}: {task.state.name.lower()}"
        made = self.made.get(target.actor)
        if target.state != "alive" and made is not None:
            return f"{task.spec.name}: waits for its actor ({self.why_task(made.task)})"
        if target.state != "alive":
            return f"{task.spec.name}: waits for its actor, which is {target.state}"
        return f"{task.spec.name}: {'runs or waits at its actor' if task.state is State.SENT else 'waits for its turn'}"


PENDING = m.Pending()

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
