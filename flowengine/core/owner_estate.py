"""The Owner's rules for what an actor's code owns: it goes along with the checkpoints and comes back with the actor.

A checkpoint covers the calls in which values were put and tasks and calls submitted, so no replay makes them again.
Therefore it brings the values that somebody holds, and what had not ended, which the next incarnation submits again by
the same names and numbers. Whoever holds a reference finds its new owner through the actor's owner, as its heir. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from . import commands as c
from . import messages as m
from . import owner_state as s
from .ids import TASK_ID_BYTES
from .owner_calls import kept_call, refs_of
from .owner_makers import MakerRules
from .owner_state import ENDED, Obj, Task

CALLS = msgspec.msgpack.Encoder()
CALLS_READ = msgspec.msgpack.Decoder(list[m.PushTask])


class Child(m.Record, frozen=True):
    """A task or call of an actor that had not ended."""

    spec: m.TaskSpec
    blob: bytes | None  # the pickled function of a task
    seq: int = -1  # the number of a call


class Owned(m.Record, frozen=True):
    """A value that an actor's code owns."""

    oid: bytes
    value: m.Value
    was_put: bool


class Estate(m.Record, frozen=True):
    """What the code of an actor owns at a checkpoint."""

    children: tuple[Child, ...] = ()
    values: tuple[Owned, ...] = ()
    calls: bytes = b""  # calls that had ended and refer to nothing, packed: their actors may have to do them again

    def refs(self) -> tuple[m.RefTo, ...]:
        """What has to live as long as the checkpoint."""
        found: dict[bytes, m.RefTo] = {}
        for child in self.children:
            actor = () if child.spec.actor is None else (child.spec.actor,)
            found.update({ref.oid: ref for ref in (*refs_of(child.spec), *actor)})
        for owned in self.values:
            found.update({ref.oid: ref for ref in owned.value.contained})
        return tuple(found.values())


class EstateTaken(m.Message, frozen=True):
    """A checkpoint of the actor in this process was pickled, with its estate."""


class EstateRestored(m.Message, frozen=True):
    """An actor goes on from a checkpoint in this process; seqs: the numbers of its next calls to others."""

    caller_key: bytes
    estate: Any
    seqs: tuple[tuple[bytes, int], ...]


class WardsSettled(m.Message, frozen=True):
    """Timer: the coroutines of an actor that has come back have had their time."""

    actor: bytes
    incarnation: int


class EstateLetGo(m.Message, frozen=True):
    """Timer: whoever holds a reference to these has had the time to say so."""

    oids: tuple[bytes, ...]


class EstateRules(MakerRules):
    """Part of Owner: see owner_base for the state."""

    # --- in the actor's process -----------------------------------------------------------------------------

    def estate(self) -> Estate:
        """What a checkpoint has to bring. Safe from any thread under the lock of the machines."""
        children = []
        for task in self.tasks.values():
            if task.state not in ENDED and task.wanted and task.stream is None and task.spec.life is None:
                blob = self.functions.blobs.get(task.spec.function) if task.spec.actor is None else None
                children.append(Child(task.spec, blob, self.number_of(task)))
        values = [
            Owned(obj.oid, obj.value, obj.was_put)
            for obj in self.objects.values()
            if not obj.owner and obj.value is not None and (obj.local > 0 or obj.pins > 0 or self.is_borrowed(obj))
        ]
        calls = [
            task if isinstance(task, m.PushTask) else kept_call(task, key[1])
            for target in self.targets.values() if target.recovery == "exactly_once"
            for key, task in target.sent.items()
            if not refs_of(task.spec) and (isinstance(task, m.PushTask) or task.state in ENDED)
        ]  # fmt: skip
        return Estate(tuple(children), tuple(values), CALLS.encode(calls) if calls else b"")

    def number_of(self, call: Task) -> int:
        """The number of a call among those of its caller to its actor; -1: it is none."""
        ref = call.spec.actor
        target = self.targets.get(ref.oid[:TASK_ID_BYTES]) if ref is not None else None
        return target.seqs.get(call.spec.id, -1) if target is not None else -1

    def estate_taken(self, event: EstateTaken, sender: str) -> None:
        """Calls that had ended, with references, do not go with the checkpoint: their actors' owners keep them."""
        for target in list(self.targets.values()):
            for key in self.hand_over(target, bare=False):
                task = target.sent.pop(key)
                target.seqs.pop(task.spec.id, None)
                if isinstance(task, Task):
                    self.call_covered(task)

    def estate_restored(self, event: EstateRestored, sender: str) -> None:
        """Own again what the last incarnation owned, and have made what it was waiting for."""
        estate: Estate = event.estate
        held = [self.take(owned) for owned in estate.values]
        handles = [self.call_restored(push) for push in CALLS_READ.decode(estate.calls)] if estate.calls else []
        for child in estate.children:
            if child.spec.actor is not None:
                if child.seq < 0:
                    continue
                self.number_next(child.spec.actor, child.spec, child.seq)
            self.submitted(s.Submitted(child.spec, child.blob), "")
            task = self.tasks.get(child.spec.id)
            held += task.results if task is not None else ()
        last = dict(event.seqs)
        for actor, target in self.targets.items():
            line = target.lines.get(event.caller_key)
            if line is not None and actor in last:
                line.next_seq = max(line.next_seq, last[actor])
        for handle in handles:
            self.release(handle)  # an actor that the state does not know gets its calls kept by its owner
        if held:
            self.out.append(c.SetTimer(self.config.link_lost_after_s, EstateLetGo(tuple([obj.oid for obj in held]))))

    def call_restored(self, push: m.PushTask) -> Obj:
        """A call that had ended: sent to a next incarnation of its actor until a checkpoint there covers it."""
        ref = push.spec.actor
        assert ref is not None
        handle, target = self.known(ref), self.target_of(ref, push.spec.name)
        self.line_of(target, push.spec.caller_key)
        target.sent[push.spec.caller_key, push.seq] = push
        target.seqs[push.spec.id] = push.seq
        return handle

    def number_next(self, actor: m.RefTo, spec: m.TaskSpec, seq: int) -> None:
        """The next call of this caller to the actor has this number."""
        self.line_of(self.target_of(actor, spec.name), spec.caller_key).next_seq = seq

    def take(self, owned: Owned) -> Obj:
        """The value is ours; held as if there was a reference until others have had the time to find us."""
        obj = self.objects.get(owned.oid)
        if obj is None:
            obj = self.objects[owned.oid] = Obj(owned.oid)
        if obj.owner:
            self.unward(obj)
            self.unannounced.pop(obj.oid, None)
            obj.owner, obj.introduced, obj.watched = "", 0, False
            self.leave_via(obj)
        obj.local += 1
        obj.was_put = owned.was_put
        if type(owned.value) is m.Stored:
            for node in owned.value.nodes:
                self.send(node, m.ObjectAdopted(obj.oid, self.me))
        self.set_value(obj, owned.value, "")
        for ref in owned.value.contained:
            self.ref_found(s.RefFound(ref.oid), "")
        return obj

    def estate_let_go(self, event: EstateLetGo, sender: str) -> None:
        """From now on the counts decide."""
        self.refs_dropped(s.RefsDropped(event.oids), "")

    # --- at the actor's owner ---------------------------------------------------------------------------------

    def bring_wards(self, task: Task, settled: bool) -> None:
        """The actor is back: it owns again what it owned, or will when its replay has come so far."""
        made = self.made.get(task.spec.id)
        if made is None or made.state != "alive" or made.worker in self.dead:
            return
        for obj in self.wards_of(task):
            if obj.owner in self.dead:
                obj.owner, obj.watched, obj.introduced = made.worker, False, 0
            elif obj.owner != made.worker:
                continue
            self.send(made.worker, m.HeirAsked(obj.oid, made.worker, b"" if settled else task.spec.id))
            if self.is_awaited(obj):
                self.want([obj])

    def actor_settles(self, made: s.Made) -> None:
        """The replay of an actor is over: what it has not made by now does not come, but from coroutines."""
        life = made.task.spec.life
        event = WardsSettled(made.task.spec.id, made.incarnation)
        if life is not None and life.is_async:
            self.out.append(c.SetTimer(self.config.link_lost_after_s, event))
        else:
            self.wards_settled(event, "")

    def wards_settled(self, event: WardsSettled, sender: str) -> None:
        """Whoever waits for what the actor has not made hears that it is lost."""
        made = self.made.get(event.actor)
        if made is not None and made.incarnation == event.incarnation:
            made.settled = True
            self.bring_wards(made.task, True)

    def asked_as_heir(self, event: m.HeirAsked, sender: str) -> Obj | None:
        """Code runs here again that made the object, or is about to; with its name the object may still come."""
        obj = self.objects.get(event.oid)
        if obj is None and event.parent:
            obj = self.objects[event.oid] = Obj(event.oid)
            self.expected[event.oid] = event.parent
        elif obj is not None and not event.parent:
            self.expected.pop(event.oid, None)
            if obj.value is None and (obj.task is None or obj.owner == sender) and obj.oid not in self.promised:
                obj.owner = ""
                self.set_value(obj, self.lost_error(obj, "the process that owned it died and left no value of it"), "")
        return obj


HANDLERS: dict[type[Any], Callable[[Any, Any, str], None]] = {
    EstateTaken: EstateRules.estate_taken,
    EstateRestored: EstateRules.estate_restored,
    EstateLetGo: EstateRules.estate_let_go,
    WardsSettled: EstateRules.wards_settled,
}
