"""The Owner's rules for gangs: a gang is wanted from when a member is ready until none is, and none runs.

Members are tasks like any other, whose amounts have the names of bundles (core/bundles.py). Here only their queues are
watched: what the node is told is that the gang is wanted, or is not any more.
"""

from __future__ import annotations

from ..errors import ActorDied, TaskCancelled, pack_error
from . import commands as c
from . import messages as m
from . import owner_state as s
from .bundles import bundle_of, group_of
from .ids import short
from .owner_base import OwnerBase
from .owner_state import Gang, Queue, QueueKey, State

GANGS_KEPT_MAX = 10_000  # also those without members
REST_S = 0.005  # what the end of a member leads to may be another member


class GangRules(OwnerBase):
    """Part of Owner: see owner_base for the state."""

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
        key = (event.shape, event.placement)
        for task in [task for task in self.tasks.values() if task.key == key and task.state is State.READY]:
            if task.spec.choice is not None and len(task.spec.choice.ways) > 1:
                continue
            name = f"{task.spec.name} {short(task.spec.id)}"
            if task.spec.life is not None:
                task.why_unwanted = m.Failed(pack_error(ActorDied(event.reason, who=name)), "actor")
            else:
                task.why_unwanted = m.Failed(pack_error(TaskCancelled(f"task {name}: {event.reason}")), "cancelled")
            if not self.actor_cancelled(task):
                self.end_later(task, task.why_unwanted)
