"""The Owner's rules for slots: which nodes to ask, what to push to which leased worker, what to take back.

How much may wait at a worker follows from the measured run time of the function: as much as fills
config.pipeline_s_max, so hundreds of microsecond tasks and one long one.
"""

from __future__ import annotations

from collections import deque

import msgspec

from ..recovery.stash import is_own
from ..scheduling.placement import FEW
from ..scheduling.resources import NARROW_MAX, brief
from . import commands as c
from . import messages as m
from . import owner_state as s
from .ids import task_of
from .owner_gangs import GangRules
from .owner_state import Cost, Demand, Lease, Made, Obj, Queue, State, Step, Task
from .owner_turns import TurnRules, most_urgent
from .owner_ways import lease_given_up

LEASES_ASKED_MAX = 256
LEASES_OF_FEW_MAX = 8  # held at once for tasks that ask to be few, however many are ready;
FEW_PATIENCE_S = 2.0  # one that has ended no task for so long does not count
NODES_ASKED_MAX = 64  # nodes that are asked at once when tasks come again after there were none
FUNCTIONS_COSTED_MAX = 10_000
PENDING = m.Pending()
SOLE_PLACE = (s.SOLE,)


class LeaseRules(TurnRules, GangRules):
    """Part of Owner: see there for the state."""

    # --- what is ready ----------------------------------------------------------------------------

    def enqueue(self, task: Task) -> None:
        """A READY task: push it if a leased worker takes more, else queue it and ask for slots."""
        choice = task.spec.choice
        if choice is not None and not self.take_way(task):
            return
        if task.inputs and len(self.nodes) > 1:
            self.lean(task)
        queue = self.queues.get(task.key)
        if queue is None:
            queue = self.queues[task.key] = self.new_queue(task.key)
        if not queue.rotation and task.key[1]:
            self.move_idle(queue)
        if queue.count == 0 and (lease := self.next_lease(queue, task)):
            self.push(lease, task)
            return
        if choice is not None and choice.share:
            self.line_up(queue, task)
        else:
            self.stand_in_line(queue, task)
        queue.count += 1
        self.fill(queue)

    def stand_in_line(self, queue: Queue, task: Task) -> None:
        """The task is the last of its priority."""
        priority = task.spec.priority
        line = queue.ready.get(priority)
        if line is None:
            line = queue.ready[priority] = deque()
            queue.priorities = sorted(queue.ready, reverse=True)
        if task.spec.life is not None and task.crashes:
            line.appendleft(task)  # an actor that comes back has what it held before those that never had it
        else:
            line.append(task)

    def dequeue(self, task: Task) -> None:
        """The task is not wanted any more: take it out of its queue."""
        queue = self.queues[task.key]
        self.placing.ways.pop(task.spec.id, None)
        if not self.leave_line(queue, task):
            queue.ready[task.spec.priority].remove(task)
            queue.count -= 1
        if queue.count == 0:
            self.withdraw(queue)

    def next_in_line(self, queue: Queue) -> Task:
        """The next of the tasks without a tenant; it stays in line."""
        return next(line[0] for line in (queue.ready[priority] for priority in queue.priorities) if line)

    def next_ready(self, queue: Queue) -> Task:
        if queue.tenants:
            task = self.next_of_tenants(queue)
            if task is not None:
                self.leave_line(queue, task)
                return task
            self.charge_others(queue)
        for priority in queue.priorities:
            line = queue.ready[priority]
            if line:
                queue.count -= 1
                return line.popleft()
        raise LookupError("count says that a task is ready")

    def fill(self, queue: Queue) -> None:
        """Push what is ready to workers that take more; then ask for more slots, or give up what is too much."""
        while queue.count and (lease := self.next_lease(queue)):
            self.push(lease, self.next_ready(queue))
        if queue.count:
            self.ask(queue)
        elif queue.demand:
            self.withdraw(queue)

    # --- pushing ----------------------------------------------------------------------------------

    def run_us(self, task: Task) -> int:
        """Expected run time; an unknown function fills a pipeline, as it may take long and another slot may be free."""
        cost = self.costs.get(task.spec.function)
        if cost is None or cost.run_us < 0:
            return self.pipeline_us_max
        return int(cost.run_us) + 5

    def push(self, lease: Lease, task: Task) -> None:
        """Send the task to the worker, and behind it what waits for it alone: a chain then costs no round trips."""
        self.push_one(lease, task)
        front = [task]
        while front and lease.open:
            waiting = [dep for obj in front.pop().results if obj.dependents for dep in obj.dependents]
            for dep in waiting:
                missing = [obj for obj in dep.inputs if obj.value is None]
                if dep.state is State.WAITING and self.lease_to_follow(dep, missing) is lease:
                    for obj in missing:
                        if obj.dependents is not None and dep in obj.dependents:
                            obj.dependents.remove(dep)
                    dep.missing = 0
                    dep.step(Step.INPUTS_CAME)
                    self.push_one(lease, dep)
                    front.append(dep)

    def lease_to_follow(self, task: Task, missing: list[Obj]) -> Lease | None:
        """The worker on which all missing inputs are under way, if it takes more."""
        maker = missing[0].task
        lease = maker.lease if maker is not None else None
        spec = task.spec
        if lease is None or not lease.open or lease.queue.key != task.key or spec.actor is not None or spec.enough:
            return None
        for obj in missing:
            if obj.owner or obj.task is None or obj.task.lease is not lease:
                return None
        return lease

    def push_one(self, lease: Lease, task: Task) -> None:
        """Send the task; at once when the worker is idle, else with what follows."""
        spec = task.spec
        task.step(Step.PUSHED)
        task.attempt += 1
        task.lease = lease
        if spec.function not in self.sent_functions.setdefault(lease.worker, {}):
            self.sent_functions[lease.worker][spec.function] = None
            self.send(lease.worker, m.PutFunction(spec.function, self.functions.blobs[spec.function]), True)
        values = tuple([obj.value or PENDING for obj in task.inputs]) if task.inputs else ()
        idle = not lease.inflight
        if idle:
            lease.progress_at = self.now
        elif not lease.queue.late_timer:
            self.look_for_late(lease.queue)
        lease.inflight[spec.id] = task
        task.load_us = self.run_us(task)
        lease.load_us += task.load_us
        if spec.choice is not None:
            self.charge(task)
        first = task.attempt == 1 and spec.life is None
        if len(spec.shape) > NARROW_MAX:
            spec = msgspec.structs.replace(spec, shape=brief(spec.shape))
        message = m.PushTask(spec, 1, lease.id, values) if first else self.push_again(lease, task, values)
        if lease.devices:
            message = msgspec.structs.replace(message, devices=lease.devices)
        self.out.append(c.Send(lease.worker, message, not idle))
        if task.wards and spec.life is None:
            self.bring_from_run(task, lease.worker)
        rotation = lease.queue.rotation
        if not self.takes_more(lease):
            lease.open = False
            rotation.remove(lease)
        elif len(rotation) > 1 and rotation[0] is lease:
            rotation.rotate(-1)

    def push_again(self, lease: Lease, task: Task, values: tuple[m.Value | m.Pending, ...]) -> m.PushTask:
        """A push that is not the first brings what earlier attempts left."""
        stream_have = stream_taken = 0
        if task.stream is not None:
            lost = [index for index, obj in task.stream.items.items() if obj.value is None]
            stream_have = 0 if task.rebuilds else min(lost, default=task.stream.count)
            task.stream.seen = stream_have
            task.stream.restarting = False
            stream_taken = s.ALL_ITEMS if task.stream.dropped or task.rebuilds else task.stream.taken
        recorded = tuple([
            (kind, n, payload) for (kind, n), payload in task.recorded.items() if is_own(kind)
        ]) if task.recorded else ()  # fmt: skip
        children = tuple(task.children.items()) if task.children else ()
        run = 1 + task.crashes + task.failures + task.rebuilds
        made = self.made.get(task.spec.id)
        return m.PushTask(
            task.spec, task.attempt, lease.id, values, run, stream_have, recorded, children, stream_taken=stream_taken,
            checkpoint=made.checkpoint if made is not None else None,
            fallback=made.fallback if made is not None else None,
            odds=self.odds_of(made) if made is not None else None,
        )  # fmt: skip

    def odds_of(self, made: Made) -> m.Odds:
        """What is known of failures here, for an actor to decide by when to checkpoint."""
        lived_s = self.now - made.born_at if made.born_at >= 0 else 0.0
        return m.Odds(made.restarts, lived_s, self.lives.rate_per_s(self.now))

    def takes_more(self, lease: Lease) -> bool:
        waiting = len(lease.inflight)
        if lease.unwanted or lease.taking_back or (waiting and lease.queue.key[1][:1] == SOLE_PLACE):
            return False
        if waiting == 0:
            return True
        if lease.load_us >= self.pipeline_us_max or waiting >= self.config.pipeline_tasks_max:
            return False
        return not self.is_late(lease)

    def left_lease(self, task: Task, run_us: int) -> None:
        """The attempt is off its worker: learn its cost, then give the worker more or the node its slot."""
        lease = task.lease
        task.lease = None
        if lease is None:
            return
        for obj in task.results:
            obj.maker = lease.worker_id
        inflight = lease.inflight
        inflight.pop(task.spec.id, None)
        lease.progress_at = self.now
        if inflight:
            self.kill_forced(lease)
        if run_us >= 0:
            self.learn(task.spec.function, run_us)
        if task.spec.choice is not None:
            self.settle_share(task, run_us)
        lease.load_us = lease.load_us - task.load_us if inflight else 0
        if not lease.open or not inflight or lease.queue.count:
            self.reopen(lease)

    def kill_forced(self, lease: Lease) -> None:
        """A task that was cancelled by force is killed with its worker, not before what was ahead of it has ended."""
        first = next(iter(lease.inflight.values()))
        if first.forced:
            self.send(lease.node, m.KillWorker(lease.id, first.spec.id, "cancelled by force"))

    def learn(self, function: bytes, run_us: int) -> None:
        cost = self.costs.get(function)
        if cost is None:
            if len(self.costs) >= FUNCTIONS_COSTED_MAX:
                del self.costs[next(iter(self.costs))]
            self.costs[function] = Cost(float(run_us))
        elif run_us > cost.run_us:
            cost.run_us += (run_us - cost.run_us) * 0.3
        else:
            cost.run_us += (run_us - cost.run_us) * 0.1

    def reopen(self, lease: Lease) -> None:
        queue = lease.queue
        if queue.tenants and self.yields(lease):
            lease_given_up(lease)
        elif not lease.open and self.takes_more(lease):
            lease.open = True
            queue.rotation.append(lease)
        if queue.count:
            self.fill(queue)
        if not lease.inflight:
            if lease.unwanted:
                self.return_lease(lease)
            else:
                self.idle(lease)

    # --- idle workers -----------------------------------------------------------------------------

    def idle(self, lease: Lease) -> None:
        """Nothing to do for the worker: take back what waits behind others, or give it up after a while."""
        queue = lease.queue
        lease.idle_since = self.now
        if queue.gang is not None:
            self.gang_rests(queue.gang)
        if lease.fleeting:
            self.return_lease(lease)
            return
        if not queue.idle_timer:
            queue.idle_timer = True
            busy = any(len(other.inflight) > 1 for other in queue.leases.values())
            delay_s = 0.002 if busy else self.config.lease_idle_s
            self.out.append(c.SetTimer(delay_s, s.IdleLooked(*queue.key)))

    def idle_looked(self, event: s.IdleLooked, sender: str) -> None:
        """Timer: are there idle workers of ours?"""
        queue = self.queues.get((event.shape, event.placement))
        if queue is None:
            return
        queue.idle_timer = False
        idle = [lease for lease in queue.leases.values() if not lease.inflight]
        victims = [
            lease
            for lease in queue.leases.values()
            if len(lease.inflight) > 1 and not lease.taking_back and self.is_slow(lease)
        ]
        if idle and victims:
            victim = max(victims, key=lambda lease: lease.load_us)
            tasks = list(victim.inflight)
            self.take_back(victim, tasks[(len(tasks) + 1) // 2 :] if len(tasks) > 2 else tasks[1:])
        for lease in idle:
            if self.now - lease.idle_since >= self.config.lease_idle_s * 0.99:
                self.return_lease(lease)
        rest = [lease for lease in queue.leases.values() if not lease.inflight]
        if rest:
            queue.idle_timer = True
            busy = any(len(lease.inflight) > 1 for lease in queue.leases.values())
            oldest_s = max(self.now - lease.idle_since for lease in rest)
            delay_s = 0.005 if busy else max(0.005, self.config.lease_idle_s - oldest_s)
            self.out.append(c.SetTimer(delay_s, s.IdleLooked(*queue.key)))
        elif not queue.leases and not queue.count:
            self.forget_queue(queue)

    def forget_queue(self, queue: Queue) -> None:
        if all(demand.granted == demand.wanted_total for demand in queue.demand.values()) and len(self.queues) > 64:
            del self.queues[queue.key]
            for node, demand in queue.demand.items():
                self.parked[queue.key, node] = demand  # the node goes on counting from these totals
            if queue.gang is not None:
                queue.gang.queues.pop(queue.key, None)
            self.placing.shared.pop(queue.key, None)

    def is_slow(self, lease: Lease) -> bool:
        return lease.load_us > 2_000 or self.now - lease.progress_at > 0.002

    def take_back(self, lease: Lease, tasks: list[bytes]) -> None:
        lease.taking_back = True
        if lease.open:
            lease.open = False
            lease.queue.rotation.remove(lease)
        self.send(lease.worker, m.TakeBack(tuple(tasks), lease.id))

    def withdraw_asked(self, event: s.WithdrawAsked, sender: str) -> None:
        """End a task that has not begun; whether one that was sent has begun, only its worker knows."""
        task = self.tasks.get(task_of(event.oid))
        if task is None or task.lease is None or task.spec.id in self.withdrawn:
            if task is not None and task.lease is None and task.spec.actor is None:
                self.cancel(task, False, True)
            self.out.append(c.Resolve(event.waiter))
            return
        self.withdrawn[task.spec.id] = event.waiter
        self.take_back(task.lease, [task.spec.id])

    def withdrawals_answered(self, lease: Lease | None, given_back: list[Task]) -> None:
        """The worker gave back what it could: the threads that wait for it look at what became of their tasks."""
        for task in given_back:
            if task.spec.id in self.withdrawn:
                task.wanted, task.why_unwanted = False, self.cancelled_error(task, False, False)
        for task_id, waiter in list(self.withdrawn.items()):
            asked = self.tasks.get(task_id)
            if asked is None or asked.lease is None or asked.lease is lease:
                del self.withdrawn[task_id]
                self.out.append(c.Resolve(waiter))

    def taken_back(self, event: m.TakenBack, sender: str) -> None:
        """The worker gave back tasks that had not begun."""
        lease = self.lent.get((sender, event.lease))
        again: list[Task] = []
        for task_id in event.tasks:
            task = self.tasks.get(task_id)
            if task is None or task.state is not State.SENT or task.lease is not lease or lease is None:
                continue
            lease.inflight.pop(task_id)
            lease.load_us = lease.load_us - task.load_us if lease.inflight else 0
            task.lease = None
            if task.spec.choice is not None:
                self.settle_share(task, -1)
            again.append(task)
        if lease is not None:
            lease.taking_back = False
            if event.blocked:
                if lease.open:
                    lease.open = False
                    lease.queue.rotation.remove(lease)
            elif not lease.open and self.takes_more(lease):
                lease.open = True
                lease.queue.rotation.append(lease)
        if self.withdrawn:
            self.withdrawals_answered(lease, again)
        for task in again:
            self.try_again(task)
        if lease is not None:
            self.balance(lease.queue)
            if not lease.inflight and (lease.node, lease.id) in self.leases:
                self.idle(lease)  # what blocks there is not ours

    def balance(self, queue: Queue) -> None:
        """After a taking back: idle workers come first in the rotation."""
        if len(queue.rotation) > 1:
            queue.rotation = deque(sorted(queue.rotation, key=lambda lease: lease.load_us))
        self.fill(queue)

    # --- asking for slots and giving them up ------------------------------------------------------

    def ask(self, queue: Queue) -> None:
        """Tell the home node (and whom it named) how many slots would be of use."""
        if self.node not in queue.demand and self.node not in self.dead:
            self.demand_at(queue, self.node)
        if queue.priorities and queue.priorities[0] > queue.told and most_urgent(queue) > queue.told:
            for node in queue.demand:
                self.tell_priority(queue, node)
        target, least = self.useful(queue), LEASES_ASKED_MAX
        if target <= 0 and not queue.late_timer:
            self.look_for_late(queue)
        if target < max(1, 2 * queue.least):
            return
        for node, demand in queue.demand.items():
            outstanding = demand.outstanding
            if outstanding == 0 or target >= 2 * outstanding:
                self.tell_demand(queue, node, demand, target)
                outstanding = target
            least = min(least, outstanding)
        queue.least = least

    def useful(self, queue: Queue) -> int:
        """How many more slots its tasks could use; a slot without progress may wait for others of the queue."""
        if FEW not in queue.key[1]:
            return min(queue.count, LEASES_ASKED_MAX)
        going_on = sum(self.now - lease.progress_at < FEW_PATIENCE_S for lease in queue.leases.values())
        return min(queue.count, LEASES_OF_FEW_MAX - going_on)

    def withdraw(self, queue: Queue) -> None:
        """Nothing waits: more slots are not needed."""
        queue.reason = ""
        if queue.gang is not None:
            self.gang_rests(queue.gang)
        for place, (node, demand) in enumerate(list(queue.demand.items())):
            if demand.wanted_total != demand.granted:
                self.tell_demand(queue, node, demand, 0)
            if place >= NODES_ASKED_MAX and node != self.node:
                self.parked[queue.key, node] = queue.demand.pop(node)  # found anew when more than the rest is needed

    def tell_demand(self, queue: Queue, node: str, demand: Demand, outstanding: int) -> None:
        demand.wanted_total = demand.granted + outstanding
        queue.least = min(queue.least, outstanding)
        shape, placement = queue.key
        if queue.gang is not None and outstanding:
            self.gang_wanted(queue.gang)
        priority = queue.told = most_urgent(queue)
        run_us, held = self.next_cost(queue) if outstanding else (0, ())
        self.send(node, m.LeaseDemand(shape, placement, demand.wanted_total, self.depth, priority, run_us, held))

    def next_cost(self, queue: Queue) -> tuple[int, tuple[tuple[str, int], ...]]:
        """What a placement of the next task is judged by: its expected run time, and where its large inputs are."""
        task = (self.next_of_tenants(queue) if queue.tenants else None) or self.next_in_line(queue)
        cost = self.costs.get(task.spec.function)
        return (int(cost.run_us) if cost is not None else 0), tuple(self.large_inputs(task).items())

    def lease_granted(self, event: m.LeaseGranted, sender: str) -> None:
        """A worker is ours for a while."""
        queue = self.queues.get((event.shape, event.placement))
        if queue is None:
            queue = self.queues[event.shape, event.placement] = self.new_queue((event.shape, event.placement))
        self.dead.pop(event.worker, None)  # it was only cut off
        if not self.placing.knows_all:
            self.placing.node_ids.setdefault(sender, event.node_id)
        demand = self.demand_at(queue, sender)
        demand.granted += 1
        demand.wanted_total = max(demand.wanted_total, demand.granted)
        queue.least = min(queue.least, demand.outstanding)
        lease = Lease(event.lease, event.worker, event.worker_id, sender, event.node_id, queue)
        lease.devices = event.devices
        lease.idle_since = lease.began_at = self.now
        self.lives.begin(self.now)
        self.leases[sender, event.lease] = self.lent[event.worker, event.lease] = lease
        queue.leases[sender, event.lease] = lease
        queue.rotation.appendleft(lease)
        queue.reason = ""
        if queue.tenants:
            self.slot_came(queue)
        self.fill(queue)
        if not lease.inflight:
            self.idle(lease)

    def lease_redirected(self, event: m.LeaseRedirected, sender: str) -> None:
        """The node cannot serve us soon; another one can."""
        queue = self.queues.get((event.shape, event.placement))
        if queue is None or not queue.count:
            return
        least = queue.least
        demand = self.demand_at(queue, event.node)
        # What was wanted is said again: the node may have been cut off from us, and have forgotten.
        outstanding = demand.outstanding or max(0, self.useful(queue))
        self.tell_demand(queue, event.node, demand, outstanding)
        queue.least = min(least, outstanding)
        self.ask(queue)

    def demand_at(self, queue: Queue, node: str) -> Demand:
        """What was asked of a node; one that comes back after it was declared dead still has its totals."""
        demand = queue.demand.get(node)
        if demand is None:
            queue.least = 0
            parked = self.parked.pop((queue.key, node), None)
            demand = queue.demand[node] = parked if parked is not None else Demand()
        return demand

    def lease_delayed(self, event: m.LeaseDelayed, sender: str) -> None:
        """Why no slot comes, for people."""
        queue = self.queues.get((event.shape, event.placement))
        if queue is not None:
            queue.reason = event.reason
            self.look_beside(queue)

    def lease_wanted(self, event: m.LeaseWanted, sender: str) -> None:
        """Others wait for such a slot: finish what was sent, then return it."""
        lease = self.leases.get((sender, event.lease))
        if lease is None:
            return
        if not event.when_idle and event.below is None:
            self.give_up(lease)
            return
        lease.fleeting = lease.fleeting or event.when_idle
        if event.below is not None:
            lease.below = max(lease.below, event.below)
        if not lease.inflight:
            if lease.fleeting:
                self.return_lease(lease)
            return
        less = [task_id for task_id, task in lease.inflight.items() if task.spec.priority < lease.below]
        behind = [task_id for task_id in less if task_id != next(iter(lease.inflight))]
        if behind and not lease.taking_back:
            self.take_back(lease, behind)

    def amount_lessened(self, event: s.AmountLessened, sender: str) -> None:
        """The program has less of a resource: slots that hold some of it run nothing more until they are given anew."""
        for lease in list(self.leases.values()):
            if any(name == event.key for name, _ in lease.queue.key[0]):
                self.give_up(lease)

    def give_up(self, lease: Lease) -> None:
        """Nothing more is sent on it; it goes back when what runs there is done."""
        lease_given_up(lease)
        if not lease.inflight:
            self.return_lease(lease)
        elif len(lease.inflight) > 1 and not lease.taking_back:
            self.take_back(lease, list(lease.inflight)[1:])

    def return_lease(self, lease: Lease) -> None:
        """The worker is not ours any more."""
        if (lease.node, lease.id) not in self.leases:
            return
        self.drop_lease(lease)
        if lease.queue.tenants and len(self.placing.shared) > 1:
            self.step_back(lease.node)
        self.send(lease.node, m.LeaseReturned(lease.id))
        if lease.queue.count:
            self.ask(lease.queue)

    def drop_lease(self, lease: Lease) -> None:
        queue = lease.queue
        if self.leases.pop((lease.node, lease.id), None) is not None:
            self.lives.end(lease.began_at, self.now)
            self.lent.pop((lease.worker, lease.id), None)
        queue.leases.pop((lease.node, lease.id), None)
        if lease.open:
            lease.open = False
            queue.rotation.remove(lease)
        if queue.gang is not None:
            self.gang_rests(queue.gang)

    def forget_function(self, function: bytes) -> None:
        """The function's pickled form is gone here; a worker that still has it would do no harm."""
        for functions in self.sent_functions.values():
            functions.pop(function, None)
