"""The Owner's rules for calls of actors: their order and numbers, and who keeps them for a replay. Pure.

A caller keeps its calls with their inputs until a checkpoint covers them, and sends them to every new incarnation;
when it lets go of the actor before that, or dies, the actor's owner keeps them instead.
"""

from __future__ import annotations

from collections import deque

import msgspec

from ..errors import ActorDied, pack_error
from . import commands as c
from . import messages as m
from . import owner_state as s
from .ids import TASK_ID_BYTES, object_id, task_of
from .owner_base import INTERRUPTED, OwnerBase
from .owner_state import ENDED, ENDED_WELL, FAILED, PUSHED, READY, SENT, Line, Obj, QueueKey, Target, Task
from .past import without_much


class CallRules(OwnerBase):
    """Part of Owner: see owner_base for the state."""

    def actor_error(self, name: str, why: str, what_next: str) -> bytes:
        """A packed ActorDied."""
        return pack_error(ActorDied(why, who=name, what_next=what_next))

    # --- calls of those who are gone -------------------------------------------------------------------------

    def calls_kept(self, event: m.CallsKept, sender: str) -> None:
        """Calls of a caller that is dead or has no handle any more, for a replay; so are their inputs."""
        made = self.made.get(event.actor)
        if made is None or made.state == "dead":
            for push in event.calls if event.introduced else ():
                self.take_leave(refs_of(push.spec))
            return
        for push in event.calls:
            if push.spec.id not in made.kept_calls:
                self.keep_inputs(push, event.introduced)
            elif event.introduced:
                self.take_leave(refs_of(push.spec))
            made.kept_calls[push.spec.id] = push
            if made.state == "alive" and sender != made.worker:
                self.send(made.worker, push)  # it may be at its replay and wait for them

    def keep_inputs(self, push: m.PushTask, introduced: bool) -> None:
        """Hold the inputs of a call, also when their owner dies; introduced: their owners know of us."""
        values = dict(zip([ref.oid for ref in inputs_of(push.spec)], push.values, strict=False))
        if introduced:
            self.take_leave(brought_along(push))
        for ref in held_by(push):
            obj = self.known(ref)
            obj.pins += 1
            if obj.owner and introduced:
                self.introduce(obj)
            elif obj.owner and obj.owner not in self.dead:
                self.introduce(obj)
                self.send(obj.owner, m.BorrowAdded(obj.oid, self.me))
            value = values.get(ref.oid)
            lacking = obj.value is None or (type(obj.value) is m.Failed and not obj.owner)
            if lacking and type(value) is m.Stored and not value.contained:
                obj.value = value
                if obj.owner in self.dead or not obj.owner:
                    self.adopt(obj)

    def take_leave(self, refs: tuple[m.RefTo, ...]) -> None:
        """We were introduced to the owners of what we need not keep."""
        for ref in refs:
            if ref.owner != self.me and ref.owner not in self.dead:
                self.send(ref.owner, m.BorrowDropped(ref.oid, 1))

    def drop_kept(self, push: m.PushTask) -> None:
        """No replay will need the call."""
        for ref in held_by(push):
            obj = self.objects.get(ref.oid)
            if obj is not None:
                obj.pins -= 1
                self.release(obj)

    # --- calling -----------------------------------------------------------------------------------------------

    def leaving(self, event: s.Leaving, sender: str) -> None:
        """This process ends: the owners of the actors that it called keep its calls for a replay."""
        for target in self.targets.values():
            self.hand_over(target)

    def caller_ended(self, caller: bytes) -> None:
        """A task is done and will not run again, so its calls must outlive this process before its result is known."""
        for target in list(self.targets.values()):
            if caller in target.lines:
                target.lines[caller].over = True
                for key in self.hand_over(target, caller):
                    task = target.sent.pop(key)
                    target.seqs.pop(task.spec.id, None)
                    if isinstance(task, Task):
                        self.call_covered(task)

    def keep_late(self, target: Target, task: Task) -> None:
        """A call goes out whose caller has ended: with this process nobody would send it again."""
        if target.recovery == "exactly_once" and target.owner != self.me:
            self.exported(s.Exported(refs_of(task.spec), target.owner), "")
            self.send(target.owner, m.CallsKept(target.actor, (kept_call(task, target.seqs[task.spec.id]),), True))

    def hand_over(self, target: Target, caller: bytes = b"", bare: bool = True) -> list[tuple[bytes, int]]:
        """We will not send these calls again: the actor's owner keeps them until a checkpoint covers them.

        bare: also those without references.
        """
        if target.recovery != "exactly_once" or target.state == "dead" or target.owner == self.me:
            return []
        kept, keys = [], []
        for key, task in target.sent.items():
            if (caller and key[0] != caller) or (not bare and not refs_of(task.spec)):
                continue
            if isinstance(task, m.PushTask):
                kept.append(task)
            elif task.state in ENDED or (caller and task.state is SENT):  # nobody may wait for its reply
                self.exported(s.Exported(refs_of(task.spec), target.owner), "")
                kept.append(kept_call(task, key[1]))
            if isinstance(task, m.PushTask) or task.state in ENDED:
                keys.append(key)
        if kept:
            self.send(target.owner, m.CallsKept(target.actor, tuple(kept), True))
        for name, seq in {push.spec.caller_key: push.seq for push in kept}.items():
            parent = self.parents.get(name)
            if parent is not None and parent.caller not in ("", target.owner):  # that link keeps no order with this
                self.out.append(
                    self.stash.insist(name + target.actor, target.owner, parent.attempt, ("calls", seq, b""))
                )
        return keys

    def seqs_restored(self, event: s.SeqsRestored, sender: str) -> None:
        """This process is an actor that goes on from a checkpoint: its own calls are numbered on from there."""
        for actor, seq in event.seqs:
            self.seqs_before[actor, event.caller_key] = seq

    def actor_peer_died(self, address: str) -> None:
        """A caller or an owner of actors is dead."""
        for made in self.made.values():
            if made.watchers.pop(address, "") is None and made.state == "alive":
                self.send(made.worker, m.CallerGone(made.task.spec.id, address))
        self.repeats.pop(address, None)
        for target in list(self.targets.values()):
            if target.owner == address and target.state != "dead":
                self.maker_died(target)
                self.target_died(target)

    def maker_died(self, target: Target) -> None:
        """An actor lives no longer than its program."""
        target.state = "dead"
        why = "the program that it belongs to has ended"
        target.error = self.actor_error(target.name, why, "nothing: it stays dead")

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
        """A call whose result an earlier attempt of its caller left: it had a number, and a replay may need it."""
        ref = task.spec.actor
        assert ref is not None
        target = self.target_of(ref, task.spec.name)
        line = self.line_of(target, task.spec.caller_key)
        seq, line.next_seq = line.next_seq, line.next_seq + 1
        if target.state == "dead" or target.recovery != "exactly_once" or seq <= line.covered:
            return
        if (task.spec.caller_key, seq) in target.sent:
            return  # this process has sent it
        values = tuple([obj.value or PENDING for obj in task.inputs])
        push = m.PushTask(
            task.spec, 1, 0, values, seq=seq, seen=True, stream_have=s.ALL_ITEMS, stream_taken=s.ALL_ITEMS
        )
        target.sent[task.spec.caller_key, seq] = task
        target.seqs[task.spec.id] = seq
        if target.state == "alive":
            self.send(target.worker, push, True)

    def called_again(self, task: Task) -> None:
        """The caller runs again in this process, and the call is still under way."""
        ref = task.spec.actor
        assert ref is not None
        target = self.target_of(ref, task.spec.name)
        line = self.line_of(target, task.spec.caller_key)
        line.next_seq = max(line.next_seq, target.seqs.get(task.spec.id, line.next_seq) + 1)

    def number_anew(self, caller: bytes) -> None:
        """The caller begins anew: its calls have the numbers that they had."""
        self.forget_numbers(caller)
        for target in self.targets.values():
            line = target.lines.get(caller)
            if line is not None:
                line.next_seq, line.over = 0, False

    def forget_numbers(self, caller: bytes) -> None:
        """The caller calls no more, or from the beginning."""
        for key in [key for key in self.seqs_before if key[1] == caller]:
            del self.seqs_before[key]

    def hold_actor(self, task: Task) -> None:
        """The actor lives at least until its calls are answered."""
        ref = task.spec.actor
        assert ref is not None
        self.known(ref).pins += 1

    def called_at_once(self, spec: m.TaskSpec) -> bool:
        """Send a call without references, when its actor takes calls and none is ahead of it: most are such."""
        ref, call, caller = spec.actor, spec.id, spec.caller_key
        target = self.targets.get(ref.oid[:TASK_ID_BYTES]) if ref is not None else None
        if target is None or target.state != "alive" or spec.num_returns != 1 or spec.nested or inputs_of(spec):
            return False
        line = target.lines.get(caller)
        oid = object_id(call, 0)
        if line is None or line.waiting or line.over or self.left_children:
            return False
        seq = line.next_seq
        if oid in self.objects or call in self.tasks or (caller, seq) in target.sent:
            return False  # its caller runs again in this process
        target.seqs[call], line.next_seq = seq, seq + 1
        obj = self.objects[oid] = Obj(oid, local=1)
        task = Task(spec, NO_SLOT, (obj,), (), (), SENT, 1, submitted_at=self.now)
        obj.task = self.tasks[call] = target.sent[caller, seq] = task
        self.counters["tasks_submitted"] += 1
        self.hold_actor(task)
        self.out.append(c.Send(target.worker, m.PushTask(spec, 1, 0, seq=seq), target.open > 0))
        target.open += 1
        return True

    def called(self, task: Task) -> None:
        """User code calls a method: in the order of submission, behind the other calls of this caller."""
        ref = task.spec.actor
        assert ref is not None
        target = self.target_of(ref, task.spec.name)
        if target.state == "dead":
            self.end_badly(task, m.Failed(target.error, "actor"))
            return
        line = self.line_of(target, task.spec.caller_key)
        target.seqs[task.spec.id] = line.next_seq
        line.next_seq += 1
        line.waiting.append(task)

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
            if task.state in ENDED:
                self.give_number_back(target, line, task)
                continue
            if task.state is not READY:
                return
            line.waiting.popleft()
            self.push_call(target, task)
            if line.over:
                self.keep_late(target, task)

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
        if task.state is READY:
            task.step(PUSHED)
            task.attempt += 1
        spec = task.spec
        seq = target.seqs[spec.id]
        key = spec.caller_key, seq
        former, target.sent[key] = target.sent.get(key), task
        if former is not None and former is not task and isinstance(former, Task):
            self.call_covered(former)  # its caller runs again in this process
        values = tuple([obj.value or PENDING for obj in task.inputs]) if task.inputs else ()
        seen = task.state in ENDED
        have = taken = 0
        if task.stream is not None:
            lost = [index for index, obj in task.stream.items.items() if obj.value is None]
            have = s.ALL_ITEMS if seen else min(lost, default=task.stream.count)
            taken = s.ALL_ITEMS if seen or task.stream.dropped else task.stream.taken
        lazy = target.open > 0  # an answer will come, and what is queued goes out with it at the latest
        target.open += not seen
        push = m.PushTask(spec, task.attempt, 0, values, 1, have, (), (), seq, seen, None, taken)
        self.out.append(c.Send(target.worker, push, lazy))
        if not task.wanted:
            self.send(target.worker, m.CancelTask(task.spec.id, task.attempt, False))

    def actor_at_told(self, event: m.ActorAt, sender: str) -> None:
        """The actor's owner says where it is."""
        target = self.targets.get(event.actor)
        if target is None:
            if event.state == "alive":
                self.send(event.worker, m.CallsResent(event.actor))  # nothing: the actor need not wait for us
            elif event.state == "dead":
                self.beside_dead(event.actor, event.error)
                for key in [key for key in self.seqs_before if key[0] == event.actor]:
                    del self.seqs_before[key]  # should it be made again, its calls are numbered anew
            return
        if event.incarnation < target.incarnation:
            return
        if event.interrupted:
            self.call_interrupted(target, event.interrupted)
        fresh = event.incarnation != target.incarnation
        if fresh:
            target.open = 0
        if target.worker and event.worker != target.worker and event.recovery == "exactly_once":
            self.stash.fence_off(target.worker)  # a late reply would be taken for one of the next incarnation
        target.incarnation, target.state, target.worker = event.incarnation, event.state, event.worker
        target.recovery, target.error = event.recovery, event.error
        target.place = (event.worker_id, event.node_id) if event.worker_id else None
        if event.state == "dead":
            self.target_died(target)
            self.beside_dead(event.actor, event.error)
        elif event.state == "alive":
            if fresh:
                self.send_again(target)
                self.send(target.worker, m.CallsResent(target.actor))
            for line in target.lines.values():
                self.advance(target, line)

    def send_again(self, target: Target) -> None:
        """A new incarnation: it gets the calls that no checkpoint covers, or, without recovery, none of them."""
        if target.recovery != "exactly_once":
            error = target.error or self.actor_error(target.name, "it begins anew", "later calls work")
            sent, target.sent = target.sent, {}
            for task in sent.values():
                if isinstance(task, Task) and task.state is SENT:
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
            if isinstance(task, m.PushTask) or task.state in ENDED:
                self.note_repeat(target.worker, task.spec, target.place, target.incarnation)

    def target_died(self, target: Target) -> None:
        """No call of the actor will be answered any more."""
        if target.sent:
            self.keep_sent(target)
        failed = m.Failed(target.error, "actor")
        lines, target.lines = target.lines, {}
        target.seqs = {}
        sent, target.sent = target.sent, {}
        for task in sent.values():
            if isinstance(task, Task):
                if task.state is SENT:
                    self.end_badly(task, failed)
                self.call_covered(task)
        for line in lines.values():
            for task in line.waiting:
                if task.state not in ENDED:
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
                self.drop_kept(made.kept_calls.pop(call))
                self.repeats.get(made.worker, {}).pop(call, None)
        target = self.targets.get(event.actor)
        line = target.lines.get(event.caller_key) if target is not None else None
        if target is None or line is None:
            return
        line.covered = max(line.covered, event.seq)
        caller, last = event.caller_key, event.seq
        gone = [key for key in target.sent if key[1] <= last and key[0] == caller]
        for key in gone:
            task = target.sent[key]
            if isinstance(task, Task) and task.state is SENT:
                continue  # its reply is still on the way, and it is dropped then
            del target.sent[key]
            target.seqs.pop(task.spec.id, None)
            if self.repeats:
                self.repeats.get(target.worker, {}).pop(task.spec.id, None)
            if isinstance(task, Task):
                self.call_covered(task)

    def call_covered(self, task: Task) -> None:
        if task.pinned and not task.unconfirmed and task.state in ENDED:
            self.unpin_task(task)

    def answered_shortly(self, task: Task, done: m.TaskDone, sender: str) -> bool:
        """Take the reply of a call, when that is one small value without references: most are such."""
        if task.stream is not None or task.wards or task.claimed is not None or not task.wanted:
            return False
        if done.held or done.recorded or len(done.values) != 1 or len(task.results) != 1:
            return False
        value = done.values[0]
        if type(value) is not m.Inline or value.contained:
            return False
        self.counters["calls_executed"] += 1
        self.call_ran(task, done.began_us, done.run_us, "done")
        if done.place and task.spec.actor is not None:
            self.hear_place(task.spec.actor, done.place, sender)
        task.step(ENDED_WELL)
        self.set_value(task.results[0], value, sender)
        task.children = None
        self.call_settled(task)
        return True

    def call_ran(self, task: Task, began_us: int, run_us: int, outcome: str) -> None:
        """Remember the call for the timeline; without its arguments when these are large."""
        spec = task.spec
        target = self.targets.get(spec.actor.oid[:TASK_ID_BYTES]) if spec.actor is not None else None
        if target is None or target.place is None or run_us < 0:
            return
        worker, node = target.place
        ran = without_much(spec), worker, node, target.incarnation, int(task.submitted_at * 1e6), began_us, run_us
        self.call_spans.append((*ran, outcome))

    def call_interrupted(self, target: Target, call: bytes) -> None:
        """Remember for the timeline the call that its actor's death has ended; nobody knows when it began."""
        task = self.tasks.get(call)
        if task is not None and task.state is SENT and target.place is not None:
            ran = without_much(task.spec), *target.place, target.incarnation, round(task.submitted_at * 1e6)
            self.call_spans.append((*ran, round(self.now * 1e6), 0, INTERRUPTED))

    def note_repeat(self, worker: str, spec: m.TaskSpec, place: tuple[str, str] | None, life: int) -> None:
        """A call that was answered is sent to a new incarnation, which does it again."""
        if place is not None and spec.function:
            self.repeats.setdefault(worker, {})[spec.id] = (without_much(spec), *place, life)

    def repeated(self, event: m.TaskDone | m.TaskFailed, sender: str) -> None:
        """A reply that nobody waits for: of a call that was done again, it is remembered for the timeline."""
        repeat = self.repeats.get(sender, {}).pop(event.task, None)
        if repeat is not None and event.run_us >= 0:
            self.call_spans.append((*repeat, 0, event.began_us, event.run_us, REPEATED))

    def call_settled(self, task: Task) -> None:
        """A call has its reply: its inputs are held until a checkpoint covers it."""
        ref = task.spec.actor
        assert ref is not None
        target = self.targets.get(task_of(ref.oid))
        line = target.lines.get(task.spec.caller_key) if target is not None else None
        if target is None or line is None:
            self.call_covered(task)
        else:
            if target.open:
                target.open -= 1
            key = task.spec.caller_key, target.seqs.get(task.spec.id, -1)
            if not self.is_kept(target, line, key):
                if target.sent.pop(key, None) is task:
                    del target.seqs[task.spec.id]  # else its turn has yet to come, or it was left out
                self.call_covered(task)
        for obj in task.results:
            obj.task, obj.method = None, task.spec.name
        if task.stream is None or (task.stream.dropped and not task.stream.items):
            self.erase(task)
        actor = self.objects.get(ref.oid)
        if actor is not None:
            actor.pins -= 1
            if actor.pins <= 0:
                self.release(actor)
        if task.state is FAILED and target and line and line.waiting and line.waiting[0] is task:
            self.advance(target, line)
        for obj in list(task.results):
            if obj.local <= 0:
                self.release(obj)

    def is_kept(self, target: Target, line: Line, key: tuple[bytes, int]) -> bool:
        """Whether a replay may need a call that has its reply."""
        return target.recovery == "exactly_once" and key[1] > line.covered and type(target.sent.get(key)) is Task

    def is_held(self, task: Task) -> bool:
        """Whether it is a call that is kept with its inputs for a replay."""
        ref = task.spec.actor
        target = self.targets.get(task_of(ref.oid)) if ref is not None else None
        if target is None or task.spec.id not in target.seqs:
            return False
        return target.sent.get((task.spec.caller_key, target.seqs[task.spec.id])) is task

    def target_gone(self, actor: bytes) -> None:
        """No handle of a foreign actor is left here."""
        target = self.targets.pop(actor, None)
        if target is not None:
            self.hand_over(target)
            for caller, line in target.lines.items():
                self.seqs_before[actor, caller] = line.next_seq  # it may get another handle
            for task in target.sent.values():
                if isinstance(task, Task):
                    self.call_covered(task)

    def worker_with(self, task: Task) -> str:
        """The process that runs the task or the call, if it was sent to one."""
        if task.state is not SENT:
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
        return f"{task.spec.name}: {'runs or waits at its actor' if task.state is SENT else 'waits for its turn'}"


PENDING = m.Pending()
REPEATED = "repeated"
NO_SLOT: QueueKey = ((), ())


def kept_call(task: Task, seq: int) -> m.PushTask:
    """The call as it is sent for a replay alone: nobody here waits for its reply."""
    values = tuple([obj.value or PENDING for obj in task.inputs])
    return m.PushTask(
        task.spec, task.attempt, 0, values, seq=seq, seen=True, stream_have=s.ALL_ITEMS, stream_taken=s.ALL_ITEMS
    )


def inputs_of(spec: m.TaskSpec) -> tuple[m.RefTo, ...]:
    """The references whose values a call gets."""
    return spec.deps if spec.args_object is None else (*spec.deps, spec.args_object)


def refs_of(spec: m.TaskSpec) -> tuple[m.RefTo, ...]:
    """All references that a call needs."""
    return (*inputs_of(spec), *spec.nested)


def brought_along(push: m.PushTask) -> tuple[m.RefTo, ...]:
    """Inputs of a call whose values are in the call itself."""
    return tuple(
        ref
        for ref, value in zip(inputs_of(push.spec), push.values, strict=False)
        if type(value) is m.Inline and not value.contained
    )


def held_by(push: m.PushTask) -> tuple[m.RefTo, ...]:
    """References that a call needs which is kept for a replay."""
    inputs, brought = inputs_of(push.spec), brought_along(push)
    return (*[ref for ref in inputs if ref not in brought], *push.spec.nested)
