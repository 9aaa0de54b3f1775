"""The Owner's rules for gangs: one is wanted from when a member is ready until none is, and none runs.

Also what ends because it can never get a slot: of a gang that is no more, beside an actor that is dead.

Members are tasks like any other, whose amounts have the names of bundles (core/bundles.py). Here only their queues are
watched: what the node is told is that the gang is wanted, or is not any more.
"""

from __future__ import annotations

from abc import abstractmethod

from ..errors import ActorDied, TaskCancelled, pack_error
from ..scheduling.resources import ACTOR
from . import commands as c
from . import messages as m
from . import owner_state as s
from .bundles import bundle_of, group_of
from .ids import object_id, short
from .owner_base import OwnerBase
from .owner_state import Gang, Queue, QueueKey, State, Task

GANGS_KEPT_MAX = 10_000  # also those without members
REST_S = 0.005  # what the end of a member leads to may be another member


class GangRules(OwnerBase):
    """Part of Owner: see owner_base for the state."""

    @abstractmethod
    def amount_lessened(self, event: s.AmountLessened, sender: str) -> None:
        """Slots that hold some of it run nothing more until they are given anew."""

    def gang_named(self, event: m.GangNamed, sender: str) -> None:
        """Members of the gang may come; the driver hears it too, since it owns those that are actors."""
        gangs, described = self.gangs, event.described
        if described.id not in gangs:
            gangs[described.id] = Gang(described)
            if len(gangs) > GANGS_KEPT_MAX:
                idle = next((gang for gang in gangs.values() if not gang.wanted and not gang.looks), None)
                if idle is not None:
                    del gangs[idle.described.id]
        if event.driver and event.driver != self.me and event.driver not in self.dead:
            self.send(event.driver, m.GangNamed(described))

    def new_queue(self, key: QueueKey) -> Queue:
        """A queue; one of members of a gang is known to it."""
        queue = Queue(key)
        bundle = bundle_of(key[0])
        gang = self.gangs.get(group_of(bundle)) if bundle else None
        if gang is not None:
            queue.gang = gang
            gang.queues[key] = queue
        return queue

    def gang_wanted(self, gang: Gang) -> None:
        """A member is ready: its node is told, once."""
        if not gang.wanted:
            gang.wanted = True
            self.send(self.node, m.GangWanted(gang.described, True))

    def gang_rests(self, gang: Gang) -> None:
        """A queue of the gang has come to rest: perhaps all have."""
        if not gang.looks:
            gang.looks = True
            self.out.append(c.SetTimer(REST_S, s.GangLooked(gang.described.id)))

    def gang_looked(self, event: s.GangLooked, sender: str) -> None:
        """Timer: is the gang at rest?"""
        gang = self.gangs.get(event.gang)
        if gang is None:
            return
        gang.looks = False
        leases = [lease for queue in gang.queues.values() for lease in queue.leases.values()]
        if any(queue.count for queue in gang.queues.values()) or any(lease.inflight for lease in leases):
            return  # looked at again when they rest
        for lease in leases:
            self.return_lease(lease)
        if gang.wanted:
            gang.wanted = False
            self.send(self.node, m.GangWanted(gang.described, False))

    def lease_refused(self, event: m.LeaseRefused, sender: str) -> None:
        """There will never be a slot: what waits for one ends, unless it may be placed in another way."""
        for task in self.waiting_only_in((event.shape, event.placement)):
            name = f"{task.spec.name} {short(task.spec.id)}"
            if task.spec.life is not None:
                self.end_unplaced(task, m.Failed(pack_error(ActorDied(event.reason, who=name)), "actor"))
            else:
                error = pack_error(TaskCancelled(f"task {name}: {event.reason}"))
                self.end_unplaced(task, m.Failed(error, "cancelled"))

    def waiting_only_in(self, key: QueueKey) -> list[Task]:
        """Tasks of the queue that may not be placed in another way."""
        found = [task for task in self.tasks.values() if task.key == key and task.state is State.READY]
        return [task for task in found if task.spec.choice is None or len(task.spec.choice.ways) < 2]

    def end_unplaced(self, task: Task, why: m.Failed) -> None:
        """The task, or actor, will never get a slot."""
        task.why_unwanted = why
        if not self.actor_cancelled(task):
            self.end_later(task, why)

    # --- beside actors ----------------------------------------------------------------------------

    def look_beside(self, queue: Queue) -> None:
        """No slot comes; none ever will beside an actor that is dead for good."""
        for name, _ in queue.key[0]:
            if not name.startswith(ACTOR):
                continue
            actor = bytes.fromhex(name.removeprefix(ACTOR))
            known = self.made.get(actor) or self.targets.get(actor)
            obj = self.objects.get(object_id(actor, 0))
            if known is not None:
                if known.state == "dead":
                    self.beside_dead(actor, known.error)
            elif obj is not None and type(obj.value) is m.Failed:
                self.beside_dead(actor, obj.value.error)
            elif obj is not None and obj.owner and obj.owner not in self.dead:
                self.send(obj.owner, m.WatchActor(actor))  # which tells, now or when it dies

    def beside_dead(self, actor: bytes, error: bytes) -> None:
        """The actor is dead for good: what can run only beside it ends."""
        name = ACTOR + actor.hex()
        queues = [queue for queue in self.queues.values() if any(name == key for key, _ in queue.key[0])]
        for queue in queues:
            for task in self.waiting_only_in(queue.key) if queue.count else ():
                self.end_unplaced(task, m.Failed(error, "actor"))
        if queues:
            self.amount_lessened(s.AmountLessened(name), "")
