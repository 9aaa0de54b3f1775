"""The Owner's rules for which of its slots takes the next task: none that is late, none that is for more urgent ones.

The run time of a function is a guess. What was sent behind a task that turns out to be long is taken back.
"""

from __future__ import annotations

from ..scheduling.placement import FEW
from . import commands as c
from . import owner_state as s
from .owner_state import Lease, Queue, Task
from .owner_ways import WayRules, lease_given_up

LATE_S = 0.05  # beyond what was expected: then nothing more is to wait behind a task
LATE_LOOK_S = 0.05  # between looks while tasks wait at workers


class TurnRules(WayRules):
    """Part of Owner: see owner_base for the state."""

    def next_lease(self, queue: Queue, task: Task | None = None) -> Lease | None:
        """The worker that takes the next task: none that is late with what it has, or is for more urgent ones."""
        rotation = queue.rotation
        while rotation:
            lease = rotation[0]
            if lease.inflight and self.is_late(lease):
                lease.open = False
                rotation.popleft()
            elif lease.below > s.NO_PRIORITY and self.is_outranked(lease, task):
                self.tell_priority(queue, lease.node)
                lease_given_up(lease)
                if not lease.inflight:
                    self.return_lease(lease)
            else:
                return lease
        return None

    def is_outranked(self, lease: Lease, task: Task | None) -> bool:
        """Whether more urgent tasks than the next of its queue wait for the slot; tenants have their shares instead."""
        queue = lease.queue
        if queue.tenants:
            return False
        return (task or self.next_in_line(queue)).spec.priority < lease.below

    def tell_priority(self, queue: Queue, node: str) -> None:
        """A node that owes slots hears how urgent the queue is now."""
        demand = queue.demand.get(node)
        if demand is not None and demand.wanted_total > demand.granted:
            self.tell_demand(queue, node, demand, demand.outstanding)

    def is_late(self, lease: Lease) -> bool:
        """Whether it should have ended all that it has."""
        return self.now - lease.progress_at > lease.load_us / 1e6 + LATE_S

    def look_for_late(self, queue: Queue) -> None:
        """Tasks wait at a worker: see to it soon that they do not wait long."""
        queue.late_timer = True
        self.out.append(c.SetTimer(LATE_LOOK_S, s.LateLooked(*queue.key)))

    def late_looked(self, event: s.LateLooked, sender: str) -> None:
        """Timer: what waits behind a task that runs longer than expected is taken back, and finds another slot."""
        queue = self.queues.get((event.shape, event.placement))
        if queue is None:
            return
        queue.late_timer = False
        waits = [lease for lease in queue.leases.values() if len(lease.inflight) > 1]
        for lease in waits:
            if not lease.taking_back and self.is_late(lease):
                self.take_back(lease, list(lease.inflight)[1:])
        if queue.count and FEW in queue.key[1]:
            self.ask(queue)
        if waits and not queue.late_timer:
            self.look_for_late(queue)


def most_urgent(queue: Queue) -> float:
    """The priority of the next task in line; 0 for those of tenants."""
    return next((priority for priority in queue.priorities if queue.ready[priority]), 0)
