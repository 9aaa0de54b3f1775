"""The Owner's rules for tasks with a policy: which way to be placed is tried, beside which objects, whose turn it is.

A task is in one queue at a time, so at most one of its ways is under way.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import deque

from ..errors import BadValue, pack_error
from ..scheduling.placement import allows
from ..scheduling.policies import meet
from ..scheduling.shares import OTHERS, Path
from . import commands as c
from . import messages as m
from . import owner_state as s
from .owner_base import OwnerBase
from .owner_state import Lease, Obj, Queue, State, Step, Task

WAY_S_MAX = 30.0  # a task that finds no slot tries its next way after a while, at most after this
DETOUR_BYTES = 1 << 20  # smaller inputs move faster than a decision about them
LOOK_S = 0.1  # between looks at tasks that have another way
MOVES_MAX = 500  # tasks that change their queue at one look
LEAD_S = 0.02  # CPU time by which a tenant may be ahead before a slot of another shape is given up for others
YIELD_S = 0.05  # between two slots that a queue gives up; twice as long each time that it helped nobody
YIELD_S_MAX = 1.6


class Way:
    """Which way a task that is in a queue has taken, and until when."""

    __slots__ = ("number", "patience_s", "until")

    def __init__(self, now: float, patience_s: float) -> None:
        self.number = 0
        self.patience_s = patience_s  # with each round it is twice as long
        self.until = now + patience_s

    def next(self, count: int, now: float) -> None:
        """The time of this one is over; count: of all ways."""
        self.number += 1
        if self.number >= count:
            self.number, self.patience_s = 0, min(2 * self.patience_s, WAY_S_MAX)
        self.until = now + self.patience_s


class TenantLine:
    """Tasks of one tenant that wait in a queue, by priority."""

    __slots__ = ("count", "ready")

    def __init__(self) -> None:
        self.ready: dict[float, deque[Task]] = {}
        self.count = 0

    def add(self, task: Task) -> None:
        """The task is the last of its priority."""
        self.ready.setdefault(task.spec.priority, deque()).append(task)
        self.count += 1

    def remove(self, task: Task) -> None:
        """It waits no more."""
        self.ready[task.spec.priority].remove(task)
        self.count -= 1

    def first(self) -> Task:
        """The next; there is one."""
        return self.ready[max(priority for priority, line in self.ready.items() if line)][0]


class WayRules(OwnerBase):
    """Part of Owner: see owner_base for the state."""

    @abstractmethod
    def enqueue(self, task: Task) -> None:
        """A READY task: push it, or queue it and ask for slots."""

    @abstractmethod
    def dequeue(self, task: Task) -> None:
        """The task is taken out of its queue."""

    @abstractmethod
    def take_back(self, lease: Lease, tasks: list[bytes]) -> None:
        """Ask the worker for those of these tasks that have not begun."""

    @abstractmethod
    def next_in_line(self, queue: Queue) -> Task:
        """The next of the tasks without a tenant; it stays in line."""

    @abstractmethod
    def run_us(self, task: Task) -> int:
        """Expected run time."""

    # --- ways -------------------------------------------------------------------------------------

    def take_way(self, task: Task) -> bool:
        """Set the queue of a READY task with a policy; False when no node may run it, and it has ended."""
        choice = task.spec.choice
        if choice is None or not choice.ways:
            return True
        way = self.placing.ways.get(task.spec.id)
        if way is None:
            way = self.placing.ways[task.spec.id] = Way(self.now, choice.patience_s)
            self.note_due(task.spec.id, way)
            self.look_at_ways_later()
        ways, best = choice.ways, -1
        nodes: tuple[str, ...] = ()
        for step in range(len(ways)):
            number = (way.number + step) % len(ways)
            met = ways[number][1]
            if choice.near and choice.near[number]:
                met = meet(self.nodes_beside(task, choice.near[number]), met)
                if not met:
                    continue  # no node may run it this way
            is_there = self.is_there(met)
            if is_there or best < 0:
                best, nodes = number, met
            if is_there:
                break
        if best < 0:
            allowed = ", ".join(ways[0][1])
            error = BadValue(f"task {task.spec.name}: its placement allows node {allowed}, where its objects are not")
            self.end_badly(task, m.Failed(pack_error(error), "task"))
            return False
        way.number = best
        task.key = ways[best][0], nodes if task.spec.life is None else (s.SOLE, *(nodes or ("*",)))
        return True

    def is_there(self, nodes: tuple[str, ...]) -> bool:
        """Whether one of these nodes lives, as far as that is known."""
        if not nodes or nodes[-1] == "*":
            return True
        return not self.placing.living or any([self.may_live(node_id) for node_id in nodes])

    def may_live(self, node_id: str) -> bool:
        """Whether the node lives, or may live as it is not known here."""
        placing = self.placing
        return node_id in placing.living or (not placing.knows_all and node_id not in placing.lost)

    def large_inputs(self, task: Task) -> dict[str, int]:
        """Bytes of inputs that are worth a detour, by the address of the node where they are."""
        held: dict[str, int] = {}
        for obj in task.inputs:
            value = obj.value
            if type(value) is m.Stored and value.size_bytes >= DETOUR_BYTES:
                for node in value.nodes:
                    held[node] = held.get(node, 0) + value.size_bytes
        return held

    def lean(self, task: Task) -> None:
        """A task that may run anywhere is liked best by a node that has most of its large inputs, unless all have."""
        spec = task.spec
        if spec.placement or spec.life is not None or (spec.choice is not None and spec.choice.ways):
            return
        held, ids = self.large_inputs(task), self.placing.node_ids
        least = max(held.values(), default=0) - DETOUR_BYTES
        best = [node for node, size in held.items() if size > least and node in ids]
        leans = best and len(best) < len(ids)
        task.key = (spec.shape, (ids[self.node if self.node in best else best[0]], "*") if leans else ())

    def move_idle(self, queue: Queue) -> None:
        """A slot of the same amounts that idles where the queue's tasks are liked best serves them."""
        shape, placement = queue.key
        for key, lease in self.leases.items():
            other = lease.queue
            if (
                not lease.inflight and lease.open and other.key[0] == shape and not other.count and other is not queue
                and lease.node_id == placement[0] and s.SOLE not in other.key[1]
            ):  # fmt: skip
                del other.leases[key]
                other.rotation.remove(lease)
                lease.queue = queue
                queue.leases[key] = lease
                queue.rotation.append(lease)
                return

    def nodes_beside(self, task: Task, beside: tuple[int, ...]) -> tuple[str, ...]:
        """The nodes that hold most of these inputs; a value inside of messages is where it was made."""
        choice = task.spec.choice
        assert choice is not None
        first = len(task.spec.deps) - choice.unread
        weights: dict[str, int] = {}
        for index in beside:
            obj = task.inputs[first + index]
            size = obj.value.size_bytes if type(obj.value) is m.Stored else 1
            for node_id in self.nodes_with(obj):
                weights[node_id] = weights.get(node_id, 0) + size
        most = max(weights.values(), default=0)
        return tuple([node_id for node_id, weight in weights.items() if weight == most])

    def nodes_with(self, obj: Obj) -> list[str]:
        """Ids of nodes where the object is."""
        if type(obj.value) is m.Stored:
            found = [self.placing.node_ids.get(address, "") for address in obj.value.nodes]
            if "" in found:
                self.want_nodes()
            return [node_id for node_id in found if node_id] or [self.node_id]
        made_at = obj.maker.rpartition(".")[0]
        return [made_at if made_at and self.may_live(made_at) else self.node_id]

    def want_nodes(self) -> None:
        """Where nodes are that are not known here: our node is asked once."""
        if not self.placing.knows_all and not self.placing.asked:
            self.placing.asked = True
            self.send(self.node, m.NodesWanted())

    def ways_looked(self, event: s.WaysLooked, sender: str) -> None:
        """Timer: tasks that have found no slot for long take their next way."""
        placing, moved = self.placing, 0
        placing.has_timer = False
        while placing.due and placing.due[0][0] <= self.now and moved < MOVES_MAX:
            task_id = heapq.heappop(placing.due)[-1]
            way, task = placing.ways.get(task_id), self.tasks.get(task_id)
            if way is None or way.until > self.now:
                continue
            if task is None or not self.waits(task):
                del placing.ways[task_id]
                continue
            moved += self.take_next_way(task, way)
        self.look_at_ways_later()

    def take_next_way(self, task: Task, way: Way) -> bool:
        """The time of this one is over; whether the task has changed its queue."""
        count = len(task.spec.choice.ways) if task.spec.choice is not None else 0
        way.next(count, self.now)
        self.note_due(task.spec.id, way)
        lease = task.lease
        if count < 2:
            return False
        if lease is not None:
            if not lease.taking_back:
                self.take_back(lease, [task.spec.id])
            return False
        self.dequeue(task)
        self.placing.ways[task.spec.id] = way
        self.enqueue(task)
        return True

    def note_due(self, task_id: bytes, way: Way) -> None:
        """When to look at the task; of those of one moment the oldest first."""
        self.placing.dues += 1
        heapq.heappush(self.placing.due, (way.until, self.placing.dues, task_id))

    def look_at_ways_later(self) -> None:
        """Have a timer run while there is something to look at."""
        if not self.placing.has_timer and self.placing.due:
            self.placing.has_timer = True
            self.out.append(c.SetTimer(LOOK_S, s.WaysLooked()))

    def waits(self, task: Task) -> bool:
        """Whether the task is queued, or was sent and others are ahead of it on its worker."""
        lease = task.lease
        return task.state is State.READY or (lease is not None and next(iter(lease.inflight)) != task.spec.id)

    def ways_anew(self) -> None:
        """A node is gone: tasks that were to run beside an object look where it is now."""
        for task_id in list(self.placing.ways):
            task = self.tasks.get(task_id)
            if task is None or task.state is not State.READY or task.spec.choice is None or not task.spec.choice.near:
                continue
            self.dequeue(task)
            task.step(Step.TRY_AGAIN)
            self.look_at_inputs(task)

    # --- tenants ----------------------------------------------------------------------------------

    def line_up(self, queue: Queue, task: Task) -> None:
        """The task of a tenant waits."""
        assert task.spec.choice is not None
        path = task.spec.choice.share
        line = queue.tenants.get(path)
        if line is None:
            line = queue.tenants[path] = TenantLine()
        line.add(task)
        self.placing.shares.came(path)
        if queue.key not in self.placing.shared:
            self.placing.shared[queue.key] = queue

    def waiting_tenants(self, queue: Queue) -> list[Path]:
        """Tenants with tasks in the queue; tasks without one count as one more."""
        paths = [path for path, line in queue.tenants.items() if line.count]
        others = queue.count > sum(line.count for line in queue.tenants.values())
        if others != queue.others:
            queue.others = others
            (self.placing.shares.came if others else self.placing.shares.went)(OTHERS)
        return [*paths, OTHERS] if others else paths

    def next_of_tenants(self, queue: Queue) -> Task | None:
        """The next task by shares; None: it is the turn of those without a tenant."""
        line = queue.tenants.get(self.placing.shares.first(self.waiting_tenants(queue)))
        return line.first() if line is not None else None

    def charge_others(self, queue: Queue) -> None:
        """A task without a tenant is served."""
        task = self.next_in_line(queue)
        self.placing.shares.began(OTHERS, self.run_us(task) / 1e6 * cpus_of(queue.key[0]))

    def leave_line(self, queue: Queue, task: Task) -> bool:
        """The task waits no more; False when it has no tenant."""
        choice = task.spec.choice
        if choice is None or not choice.share:
            return False
        queue.tenants[choice.share].remove(task)
        queue.count -= 1
        self.placing.shares.went(choice.share)
        return True

    def charge(self, task: Task) -> None:
        """The task was pushed: what it is expected to take is taken, and set right when it ends."""
        assert task.spec.choice is not None
        if task.lease is None or len(task.lease.inflight) == 1:
            self.placing.ways.pop(task.spec.id, None)
        if task.spec.choice.share:
            self.placing.shares.began(task.spec.choice.share, task.load_us / 1e6 * cpus_of(task.key[0]))

    def settle_share(self, task: Task, run_us: int) -> None:
        """The task has left its worker; below 0: it did not run there."""
        assert task.spec.choice is not None
        if task.spec.choice.share:
            amount = (max(run_us, 0) - task.load_us) / 1e6
            self.placing.shares.used(task.spec.choice.share, amount * cpus_of(task.key[0]))

    def yields(self, lease: Lease) -> bool:
        """Whether the slot should go back: tenants that are behind wait for slots of other amounts on that node."""
        queue = lease.queue
        if self.now < queue.yields_from or len(self.placing.shared) < 2:
            return False
        mine = self.waiting_tenants(queue)
        first = self.placing.shares.first(mine) if mine else None
        for other in self.placing.shared.values():
            if other is queue or not other.count or other.rotation or not allows(other.key[1], lease.node_id):
                continue
            theirs = self.placing.shares.first(self.waiting_tenants(other))
            if first is None or self.placing.shares.lead(first, theirs) > LEAD_S:
                queue.yield_s = min(2 * queue.yield_s, YIELD_S_MAX) if queue.yield_s else YIELD_S
                queue.yields_from = self.now + queue.yield_s
                return True
        return False

    def step_back(self, node: str) -> None:
        """A slot goes back to the node: of the queues of tenants, the one whose turn it is waits longest there."""
        queues = {path: queue for queue in self.placing.shared.values() for path in self.waiting_tenants(queue)}
        first = queues[self.placing.shares.first(queues)] if queues else None
        for queue in self.placing.shared.values():
            demand = queue.demand.get(node)
            if queue is not first and demand is not None and demand.wanted_total > demand.granted:
                outstanding = demand.outstanding
                self.tell_demand(queue, node, demand, 0)
                self.tell_demand(queue, node, demand, outstanding)

    def slot_came(self, queue: Queue) -> None:
        """A tenant's queue got a slot: what others gave up was of use."""
        for other in self.placing.shared.values():
            if other is not queue:
                other.yield_s = 0.0


def cpus_of(shape: m.Shape) -> float:
    """By how much the run time of a task of this shape counts."""
    amounts = dict(shape)
    return max(amounts.get("CPU", 0.0), amounts.get("GPU", 0.0)) or 1.0


def lease_given_up(lease: Lease) -> None:
    """No more is sent on it: it goes back when what was sent is done."""
    lease.unwanted = True
    if lease.open:
        lease.open = False
        lease.queue.rotation.remove(lease)
