"""The Owner's rules for actors that code in a worker makes: they belong to the driver. Pure.

The maker says ActorMade and goes on. What it sends to others waits until the driver has noted the actor: so nobody asks
for it too early, and nobody has the handle of an actor that was never made. A maker that runs again asks for the same
name and gets the actor as it is; until it does, the actor is kept even if its last handle was lost with the maker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ..errors import unpack_error
from . import commands as c
from . import messages as m
from . import owner_state as s
from .ids import object_id
from .owner_actors import ActorRules
from .owner_calls import PENDING, refs_of
from .owner_state import ENDED, Made, Obj, Parent, Task


class MakerRules(ActorRules):
    """Part of Owner: see owner_base for the state."""

    # --- in the maker's process --------------------------------------------------------------------------

    def make_elsewhere(self, event: s.Submitted) -> None:
        """User code in a worker made an actor: the driver owns it, and we borrow it."""
        spec = event.spec
        driver, _, top = spec.driver.partition(" ")
        obj = self.known(m.RefTo(object_id(spec.id, 0), driver, m.HANDLE))
        obj.local += 1
        if obj.owner != driver or driver in self.dead:
            return
        self.introduce(obj)
        self.exported(s.Exported(refs_of(spec), driver), "")
        values = tuple([self.value_to_bring(ref) for ref in refs_of(spec)])
        spec = msgspec.structs.replace(spec, driver="")
        self.send(driver, m.ActorMade(spec, event.blob, values, bytes.fromhex(top)))
        self.unheard[spec.id] = driver
        self.gated = True
        parent = self.parents.get(spec.parent)
        if parent is not None:
            parent.made[spec.id] = driver

    def value_to_bring(self, ref: m.RefTo) -> m.Value | m.Pending:
        """An input's value, that the actor may begin again when this process is gone."""
        obj = self.objects.get(ref.oid)
        return obj.value if obj is not None and obj.value is not None and not obj.value.contained else PENDING

    def actor_noted(self, event: m.ActorNoted, sender: str) -> None:
        """Others may hear of the actor."""
        self.unheard.pop(event.actor, None)

    def driver_died(self, address: str) -> None:
        """Nobody will answer."""
        for actor in [actor for actor, driver in self.unheard.items() if driver == address]:
            del self.unheard[actor]
        if self.going_home:
            self.stay_no_longer([obj for obj in self.going_home if obj.owner in self.dead or not obj.owner])

    def gate(self, commands: list[Any]) -> list[Any]:
        """Hold back what goes to others while the driver has yet to hear of an actor; order per receiver stays."""
        if self.going_home:
            commands = [*commands, *self.left_for_home(commands)]
        if not self.unheard:
            held, self.held_back = self.held_back, []
            self.gated = bool(self.going_home)
            return [*held, *commands]
        waiting = dict.fromkeys(command.to for command in self.held_back)
        open_to = dict.fromkeys((self.node, *self.unheard.values()))
        out = []
        for command in commands:
            if type(command) is c.Send and (command.to not in open_to or command.to in waiting):
                self.held_back.append(command)
            else:
                out.append(command)
        return out

    def given_away(self, event: s.Exported, sender: str) -> None:
        """User code gives references away inside of a value: one that goes to its owner must come before we let go."""
        self.exported(event, sender)
        for ref in event.refs:
            obj = self.objects.get(ref.oid)
            if ref.owner != event.to or obj is None:
                continue
            if event.to == self.me and not obj.owner:
                obj.pins += 1
                self.coming_home.append(ref.oid)
            elif obj.owner == event.to:
                obj.pins += 1
                self.going_home.append(obj)
                self.gated = True

    def left_for_home(self, commands: list[Any]) -> list[Any]:
        """Let go of what is in the messages that leave now, and of all when what should have left has failed."""
        self.out = []
        for command in commands:
            kind = type(command.message) if type(command) is c.Send else None
            if kind in CARRYING:
                gone = {ref.oid: None for ref in refs_in(command.message)}
                leaving = [obj for obj in self.going_home if obj.oid in gone or kind in FAILING]
                self.stay_no_longer(leaving)
        return self.stash.attach(self.out)

    def come_home(self, event: Any) -> None:
        """A message to ourselves has come: what was in it is held by what it was in, and nothing for what failed."""
        kind = type(event)
        if kind not in CARRYING:
            return
        for oid in self.coming_home[:] if kind in FAILING else [ref.oid for ref in refs_in(event)]:
            if oid in self.coming_home:
                self.coming_home.remove(oid)
                obj = self.objects[oid]
                obj.pins -= 1
                self.release(obj)

    def stay_no_longer(self, leaving: list[Obj]) -> None:
        """These are not held for a value any more."""
        self.going_home = [obj for obj in self.going_home if not any(obj is other for other in leaving)]
        for obj in leaving:
            obj.pins -= 1
            self.release(obj)

    def parent_repeats(self, event: s.ParentRepeats, sender: str) -> None:
        """The task that runs here has failed and may be tried again: the actors that it made wait for that."""
        parent = self.parents.get(event.task)
        if parent is not None:
            self.makers_leave(parent)

    def makers_leave(self, parent: Parent) -> None:
        """The parent stops before its end."""
        for actor, driver in parent.made.items():
            self.send(driver, m.MakerLeft(actor))
        parent.made = {}

    # --- in the driver -------------------------------------------------------------------------------------

    def actor_asked(self, event: m.ActorMade, sender: str) -> None:
        """Code in a worker makes an actor, as if our own had; or a maker that runs again comes to it again."""
        spec = event.spec
        made = self.made.get(spec.id)
        if made is None or made.unmade:
            made = self.take_actor(event)
        elif any(obj.owner and obj.value is None for obj in (*made.task.inputs, *made.task.nested)):
            self.let_inputs_go(self.bring(event))  # those that were lost may have new owners
        else:
            self.take_leave(refs_of(spec))
        made.maker, made.top, made.bereft = sender, event.top, False
        self.tops.setdefault(event.top, {})[spec.id] = None
        actor = made.task.results[0]
        self.add_borrower(actor, sender, 1)
        self.send(sender, m.ActorNoted(spec.id))
        self.release(actor)

    def take_actor(self, event: m.ActorMade) -> Made:
        """It is ours; the maker's reference is the only one."""
        inputs = self.bring(event)
        self.submitted(s.Submitted(event.spec, event.blob), "")
        made = self.made[event.spec.id]
        made.task.results[0].local -= 1
        self.let_inputs_go(inputs)
        return made

    def bring(self, event: m.ActorMade) -> list[Obj]:
        """The inputs of an actor, pinned."""
        return [self.brought(ref, value) for ref, value in zip(refs_of(event.spec), event.values, strict=True)]

    def let_inputs_go(self, inputs: list[Obj]) -> None:
        """The actor holds them itself; values that we lack are asked for, since their owners may die."""
        for obj in inputs:
            obj.pins -= 1
            self.release(obj)
        self.want([obj for obj in inputs if obj.heir != m.HANDLE and (obj.owner or self.is_awaited(obj))])

    def brought(self, ref: m.RefTo, value: m.Value | m.Pending) -> Obj:
        """An input of an actor, pinned; the maker has introduced us to its owner."""
        obj = self.known(ref)
        obj.pins += 1
        if obj.owner and obj.owner != ref.owner and obj.value is None and ref.owner not in self.dead:
            self.turn_to(obj, ref)
        if ref.owner != self.me:
            self.introduced_by_maker(obj, ref)
        is_lost = type(obj.value) is m.Failed and not obj.owner
        if not isinstance(value, m.Pending) and (obj.value is None or is_lost):
            if is_lost:
                obj.value = None
            self.set_value(obj, value, "")
            if not obj.owner or obj.owner in self.dead:
                self.adopt(obj)
        return obj

    def turn_to(self, obj: Obj, ref: m.RefTo) -> None:
        """The maker runs again and makes what we ask a former owner, or its heir, for: he would wait for the maker."""
        if obj.introduced and obj.owner not in self.dead:
            self.send(obj.owner, m.BorrowDropped(obj.oid, obj.introduced))
        self.unannounced.pop(obj.oid, None)
        obj.owner, obj.heir, obj.introduced, obj.watched = ref.owner, ref.heir, 0, False

    def has_actor(self, actor: bytes) -> bool:
        """Whether the actor is ours and lives. Safe from any thread."""
        made = self.made.get(actor)
        return made is not None and made.state != "dead"

    def maker_left(self, event: m.MakerLeft, sender: str) -> None:
        """The maker will ask for the actor again."""
        made = self.made.get(event.actor)
        if made is not None and made.maker == sender:
            made.maker = ""

    def awaits_maker(self, made: Made) -> bool:
        """Whether code that made the actor or had its handle is to run again, and may come to it again."""
        if not made.top or (made.maker and not made.bereft and made.maker not in self.dead):
            return False
        top = self.tasks.get(made.top)
        return top is not None and top.state not in ENDED

    def made_under(self, top: bytes) -> list[Made]:
        """Actors that were made below one of our tasks or actors."""
        found = [self.made.get(actor) for actor in self.tops.get(top, ())]
        return [made for made in found if made is not None]

    def top_ended(self, task: Task) -> None:
        """Nobody below this task will run again."""
        for made in self.made_under(task.spec.id):
            self.release(made.task.results[0])

    def maker_is_back(self, actor: bytes, worker: str) -> None:
        """An actor that makes others has done again what it had done: it has asked for those that it still needs."""
        life = self.made[actor].task.spec.life
        begins_anew = life is not None and life.recovery != "exactly_once"  # then its tasks do not come again either
        for made in self.made_under(actor):
            if (begins_anew or made.task.spec.caller_key == actor) and self.awaits_maker(made):
                made.maker, made.bereft = worker, False
                self.release(made.task.results[0])

    def actor_settled(self, task: Task) -> None:
        """The task of an actor is over; if that is news, what its constructor needs is not to be had."""
        made, value = self.made.get(task.spec.id), task.results[0].value
        if made is not None and made.state != "dead" and type(value) is m.Failed:
            error = value.error
            if value.kind == "lost":
                why = f"an argument of its constructor is lost: {unpack_error(error)}"
                error = self.actor_error(task.spec.name, why, "nothing: make it again")
                made.unmade = not made.incarnation
            self.actor_ends(made, error)


FAILING = frozenset((m.TaskFailed, m.CheckpointFailed))
CARRYING = frozenset((m.TaskDone, m.StreamItem, m.CheckpointTaken, m.TaskFailed, m.CheckpointFailed))


def refs_in(message: Any) -> tuple[m.RefTo, ...]:
    """References in what user code has given: results, an item, a state."""
    if type(message) is m.TaskDone:
        return tuple([ref for value in message.values for ref in value.contained])
    if type(message) is m.StreamItem:
        return message.value.contained
    return message.checkpoint.value.contained if type(message) is m.CheckpointTaken else ()


HANDLERS: dict[type[Any], Callable[[Any, Any, str], None]] = {
    m.ActorMade: MakerRules.actor_asked,
    m.ActorNoted: MakerRules.actor_noted,
    m.MakerLeft: MakerRules.maker_left,
    s.ParentRepeats: MakerRules.parent_repeats,
}
