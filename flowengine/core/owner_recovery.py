"""The Owner's rules after a loss: of a worker, a node, copies.

Crash retries, exception retries and rebuilds are counted apart. A push that did not begin costs nothing.
"""

from __future__ import annotations

from ..errors import ObjectLost, TaskCancelled, TaskTimeout, WorkerCrashed, pack_error
from ..recovery.lineage import closure
from . import commands as c
from . import messages as m
from . import owner_state as s
from .ids import TASK_ID_BYTES, object_id, short
from .owner_base import INTERRUPTED, OwnerBase
from .owner_state import Obj, State, Step, Task
from .past import without_much

DEAD_REMEMBERED_MAX = 10_000
SEEK_S = 0.5  # between looks for the last copy of what nobody can make again


class RecoveryRules(OwnerBase):
    """Part of Owner: see there for the state."""

    # --- lost workers and nodes -------------------------------------------------------------------

    def lease_lost(self, event: m.LeaseLost, sender: str) -> None:
        """The worker of a lease is dead: what it ran crashed, what waited there did not begin."""
        lease = self.leases.get((sender, event.lease))
        if lease is None:
            return
        self.drop_lease(lease)
        self.note_dead(lease.worker)
        tasks = list(lease.inflight.values())
        lease.inflight.clear()
        for task in tasks:
            task.lease = None
            if task.children:
                self.take_children(task)
        for task in tasks:
            if task.state is not State.SENT:
                continue
            if task.spec.life is not None:
                self.interrupted(task, lease, event.death)
                self.actor_lost(task, event.death)
                break
            if not event.death.running or event.death.running == task.spec.id:
                self.interrupted(task, lease, event.death)
                self.crashed(task, event.death)
                break
        for task in tasks:
            if task.state is State.SENT and task.lease is None:
                self.try_again(task)
        self.process_died(lease.worker, sender)
        self.fill(lease.queue)

    def interrupted(self, task: Task, lease: s.Lease, death: m.Death) -> None:
        """Remember for the timeline the run that a death has ended; it began at the last news of the worker.

        Of an actor that is its beginning; what is known of its calls their callers remember.
        """
        spec, runs = task.spec, self.spans
        number = 1 + task.crashes + task.failures + task.rebuilds
        if spec.life is not None:
            if death.running != spec.id or self.made[spec.id].incarnation == task.attempt:
                return
            runs, number = self.call_spans, task.attempt
        began_us, now_us = round(lease.progress_at * 1e6), round(self.now * 1e6)
        ran = without_much(spec), lease.worker_id, lease.node_id, number, round(task.submitted_at * 1e6), began_us
        runs.append((*ran, now_us - began_us, INTERRUPTED))

    def crashed(self, task: Task, death: m.Death) -> None:
        """The worker died while it ran this task."""
        if not task.wanted:
            self.end_badly(task, task.why_unwanted)
            return
        if death.overdue:
            name = f"task {task.spec.name} {short(task.spec.id)}"
            late = TaskTimeout(f"{name} ran longer than its limit of {task.spec.timeout_s:g} s and had to be killed")
            self.end_badly(task, m.Failed(pack_error(late), "timeout"))
            return
        limit = task.spec.max_retries
        task.crashes += 1
        self.lives.deaths += 1
        if limit >= 0 and task.crashes > limit:
            error = WorkerCrashed(
                death.reason,
                who=task.spec.name,
                host=death.host,
                pid=death.pid,
                exit_code=death.exit_code if death.pid else None,
                attempt=task.crashes,
                attempts_max=limit + 1,
                log_lines=death.log_lines,
                what_next=f"nothing: its retries are used up (option max_retries); flow replay {short(task.spec.id)} "
                "runs it again under pdb",
            )
            self.end_badly(task, m.Failed(pack_error(error), "crash"))
            return
        self.counters["tasks_retried"] += 1
        self.try_again(task)

    def note_dead(self, address: str) -> None:
        self.dead[address] = None
        if len(self.dead) > DEAD_REMEMBERED_MAX:
            del self.dead[next(iter(self.dead))]

    def peer_lost(self, event: m.PeerLost, sender: str) -> None:
        """A link says that a process is gone for good. A leased worker's end is told by its node, with the reason."""
        for key in [key for key in self.parked if key[1] == event.peer]:
            del self.parked[key]  # the totals were those of the link
        self.lose(event.peer, event.reason)

    def lose(self, peer: str, reason: str, may_return: bool = False) -> None:
        """A process or node is gone."""
        is_known = peer in self.dead  # then it may have granted something before its end that came after the news
        if not is_known:
            self.note_dead(peer)
            self.persisting.node_lost(peer, self.now)
            if may_return:
                self.park_demands(peer)
        for lease in [lease for lease in self.leases.values() if lease.node == peer]:
            death = m.Death(lease.worker_id, "", 0, 0, reason=f"its node is gone ({reason})")
            self.lease_lost(m.LeaseLost(lease.id, death), lease.node)
        if is_known:
            return
        for lease in self.leases.values():
            if lease.worker == peer:  # its node will tell how it ended, and what of its tasks had begun
                lease.unwanted = True
                if lease.open:
                    lease.open = False
                    lease.queue.rotation.remove(lease)
                self.out.append(c.SetTimer(self.config.suspect_after_s, s.LeaseSilent(lease.node, lease.id)))
        self.process_died(peer, "")

    def lease_silent(self, event: s.LeaseSilent, sender: str) -> None:
        """Its node finds nothing wrong with a worker that cannot be reached from here: what it runs would never end."""
        lease = self.leases.get((event.node, event.lease))
        if lease is not None and lease.worker in self.dead:
            self.send(lease.node, m.KillWorker(lease.id, b"", "its owner cannot reach it"))

    def park_demands(self, node: str) -> None:
        """The link to the node stands, and so do the totals at its other end."""
        for queue in self.queues.values():
            demand = queue.demand.pop(node, None)
            if demand is not None:
                queue.reason = ""  # it was the node that told it, perhaps
                if demand.outstanding:  # it may go on with what it was asked, and nobody would want that any more
                    self.tell_demand(queue, node, demand, 0)
                self.parked[queue.key, node] = demand

    def process_died(self, address: str, node: str) -> None:
        """Whatever a dead process held, owned or stored as a node."""
        self.sent_functions.pop(address, None)
        self.out.extend(self.stash.peer_lost(address))
        for obj in list(self.borrowed_by.pop(address, {}).values()):
            if obj.borrowers is not None:
                obj.borrowers.pop(address, None)
                if obj.oid[:TASK_ID_BYTES] in self.made:
                    self.made[obj.oid[:TASK_ID_BYTES]].bereft = True
                self.release(obj)
        for obj in list(self.objects.values()):
            if obj.watchers is not None:
                obj.watchers.pop(address, None)
            if obj.owner == address:
                self.owner_died(obj)
        for key in [key for key in self.unconfirmed if key[0] == address]:
            for task in self.unconfirmed.pop(key):
                self.confirmed(task)
        for queue in self.queues.values():
            if queue.demand.pop(address, None) is not None:
                queue.reason = "another node on this host: its own was lost" if address == self.node else ""
            if queue.count:
                self.ask(queue)
        self.actor_peer_died(address)
        self.driver_died(address)
        self.copies_died(address)
        if self.placing.ways:
            self.ways_anew()

    def nodes_changed(self, event: m.NodesChanged, sender: str) -> None:
        """The head says who is there."""
        self.persisting.nodes_seen([entry.address for entry in event.nodes], self.now)
        for node in event.dead:
            self.lose(node, "the head declared it dead", may_return=True)
        self.nodes_learnt(event)
        back = [entry.address for entry in event.nodes if entry.address in self.dead]  # they begin a new life
        for node in back:
            del self.dead[node]
        for queue in list(self.queues.values()) if back else ():
            if queue.count:
                self.ask(queue)

    def nodes_learnt(self, event: m.NodesChanged) -> None:
        """Keep what the policies of tasks need of it."""
        placing, ids = self.placing, {} if not event.more else self.placing.node_ids
        for address in event.dead:
            node_id = placing.node_ids.get(address)
            if node_id is not None:
                placing.lost[node_id] = None
                ids.pop(address, None)
        for entry in event.nodes:
            ids[entry.address] = entry.node_id
            placing.lost.pop(entry.node_id, None)
        placing.node_ids = ids
        placing.living = dict.fromkeys(ids.values())
        placing.knows_all = event.whole
        placing.asked = placing.asked and not event.whole
        self.nodes = tuple(ids)

    def copies_died(self, node: str) -> None:
        """A store is gone: every copy that was there, in one go."""
        needed: list[Obj] = []
        for obj in list(self.objects.values()):
            value = obj.value
            if type(value) is m.Stored and node in value.nodes and self.without_copies(obj, (node,)):
                needed.append(obj)
        if needed:
            self.want(needed)

    # --- lost copies ------------------------------------------------------------------------------

    def without_copies(self, obj: Obj, nodes: tuple[str, ...], silent: tuple[str, ...] = ()) -> bool:
        """Take these nodes off the object's list; True when it has no copy left and somebody waits for it."""
        value = obj.value
        if type(value) is not m.Stored:
            return obj.value is None and self.is_awaited(obj)
        rest = tuple(node for node in value.nodes if node not in nodes)
        if rest:
            obj.value = m.Stored(value.size_bytes, rest, value.contained, value.array)
            self.wake_fetchers(obj)
            return False
        obj.value = None
        if not obj.owner and not value.contained:
            obj.gone_bytes = value.size_bytes
        if obj.owner:
            obj.watched = False
            self.send(obj.owner, m.CopiesLost(obj.oid, nodes, silent))
        for ref in value.contained if not obj.owner else ():
            inner = self.objects.get(ref.oid)
            if inner is not None:
                inner.pins -= 1
                self.release(inner)
        return self.is_awaited(obj)

    def is_awaited(self, obj: Obj) -> bool:
        return bool(obj.fetchers or obj.waiters or obj.dependents or obj.watchers)

    def copies_lost(self, obj: Obj, nodes: tuple[str, ...], silent: tuple[str, ...] = ()) -> None:
        """These nodes do not have the object: take another copy, else make it again when somebody waits for it.

        What nobody can make again is asked for again while nodes that were silent are not dead.
        """
        hoped = self.hoped_for(obj, nodes, silent) if silent else ()
        gone = tuple([node for node in nodes if node not in hoped]) if hoped else nodes
        if not obj.owner:
            for node in gone:
                self.send(node, m.ObjectFreed((obj.oid,), True))  # a copy that cannot be had is no copy
        if gone and self.without_copies(obj, gone, silent):
            self.want([obj])
        if hoped and obj.oid not in self.sought:
            self.sought[obj.oid] = None
            self.out.append(c.SetTimer(SEEK_S, s.CopySought(obj.oid)))

    def hoped_for(self, obj: Obj, nodes: tuple[str, ...], silent: tuple[str, ...]) -> tuple[str, ...]:
        """Which of the silent nodes may have the last copies of what nobody can make again."""
        value = obj.value
        if type(value) is not m.Stored or obj.owner or obj.durable or self.has_maker(obj):
            return ()
        if any(node not in nodes for node in value.nodes):
            return ()
        return tuple([node for node in silent if node in value.nodes and node not in self.dead])

    def copy_sought(self, event: s.CopySought, sender: str) -> None:
        """Timer: whoever waits for the last copy asks for it again."""
        self.sought.pop(event.oid, None)
        obj = self.objects.get(event.oid)
        if obj is not None and obj.value is not None:
            self.answer_watchers(obj, obj.value)
            self.wake_fetchers(obj)

    def has_maker(self, obj: Obj) -> bool:
        """Whether a task of ours can make the object again."""
        task = obj.task
        return task is not None and task.state is not State.FAILED and task.spec.actor is None

    def copies_lost_told(self, event: m.CopiesLost, sender: str) -> None:
        """A borrower found copies gone."""
        obj = self.objects.get(event.oid)
        if obj is not None:
            self.copies_lost(obj, event.nodes, event.silent)

    def rebuild(self, lost: list[Obj]) -> None:
        """Make lost objects again: the producing tasks of the whole lost set, inputs before dependents."""
        makers: list[Task] = []
        for obj in lost:
            if obj.owner:
                self.owner_died(obj)
            elif obj.durable:
                self.restore(obj)
            elif obj.task is not None and self.has_maker(obj):
                makers.append(obj.task)
            elif obj.task is None and obj.oid in self.orphans:
                obj.owner = self.orphans.pop(obj.oid)  # its heir may bring it again
                self.owner_died(obj)
            elif obj.value is None:
                why = "it was put and its only copies are gone; flow.put(..., durable=True) survives this"
                if not obj.was_put and (obj.task is None or obj.task.spec.actor is not None):
                    why = "its copies are gone, and nothing can make it again (as with the results of actors' calls)"
                elif obj.task is not None:
                    why = f"its copies are gone, and its task {obj.task.spec.name} ended with an error"
                self.set_value(obj, self.lost_error(obj, why), "")
        for task in closure(makers, self.lost_inputs, lambda task: task.spec.id):
            if task.state is State.DONE:
                self.begin_rebuild(task)

    def resend(self, item: Obj) -> None:
        """An item of a stream that still runs was lost: its maker begins anew when it is past it, for it may wait."""
        task = item.task
        assert task is not None
        assert task.stream is not None
        stream, index = task.stream, int.from_bytes(item.oid[-4:], "big")
        if task.state is State.SENT and task.lease is not None and index < stream.seen and not stream.restarting:
            stream.restarting = True
            self.send(task.lease.worker, m.CancelTask(task.spec.id, task.attempt, True, True))

    def lost_inputs(self, task: Task) -> list[Task]:
        """The tasks that must run before this one can."""
        return [
            obj.task
            for obj in task.inputs
            if obj.value is None and obj.task is not None and not obj.owner and not obj.durable
            and obj.task.state is State.DONE
        ]

    def begin_rebuild(self, task: Task) -> None:
        if task.state is not State.DONE:
            return
        if task.rebuilds >= self.config.rebuilds_max:
            why = f"its task {task.spec.name} has run again {task.rebuilds} times for lost results"
            error = self.lost_error(task.spec.id, why)
            for obj in task.results:
                if obj.value is None:
                    self.set_value(obj, error, "")
            return
        task.step(Step.REBUILD)
        task.rebuilds += 1
        task.crashes = 0
        if not task.pinned:
            task.pinned = True
            for obj in task.inputs:
                obj.pins += 1
            for obj in task.nested:
                obj.pins += 1
        if task.stream is not None:
            task.stream.ended = False
        self.look_at_inputs(task)

    def lost_error(self, what: Obj | bytes, why: str) -> m.Failed:
        """The packed ObjectLost of an object that cannot be made again."""
        oid = what if isinstance(what, bytes) else what.oid
        return m.Failed(pack_error(ObjectLost(f"object {short(oid)} is gone: {why}")), "lost")

    def set_fetch_error(self, obj: Obj, reason: str) -> None:
        """The local store can never hold the object: readers here get the reason."""
        self.fetch_errors[obj.oid] = reason
        self.wake_fetchers(obj)

    def cancelled_error(self, task: Task, force: bool, again: bool) -> m.Failed:
        """The error of a task that is not wanted; again: not here, its parent will make it again elsewhere."""
        if again:
            return self.lost_error(object_id(task.spec.id, 0), "the task that made it had to stop, and runs again")
        how = " by force" if force else ""
        error = TaskCancelled(f"task {task.spec.name} {short(task.spec.id)} was cancelled{how}")
        return m.Failed(pack_error(error), "cancelled")

    def lose_asked(self, event: s.LoseAsked, sender: str) -> None:
        """Failure laboratory: every copy goes, lineage stays."""
        obj = self.objects.get(event.oid)
        if obj is None:
            return
        value = obj.value
        if type(value) is m.Stored:
            for node in value.nodes:
                self.send(node, m.LoseObject(obj.oid))
            if not obj.owner:
                obj.strays = dict.fromkeys(value.nodes, None)  # a node may hear later that it has it
                self.copies_lost(obj, value.nodes)
                return
        if obj.owner:
            obj.value = None
            obj.watched = False
            self.send(obj.owner, m.LoseObject(obj.oid))

    def lose_object(self, event: m.LoseObject, sender: str) -> None:
        """A borrower's laboratory."""
        self.lose_asked(s.LoseAsked(event.oid), sender)

    # --- the node of this host --------------------------------------------------------------------

    def node_moved(self, event: s.NodeMoved, sender: str) -> None:
        """The node of this host was restarted under another address: what it had is gone."""
        old, self.node, self.node_id = self.node, event.node, event.node_id
        self.lose(old, "it was started again")
        self.dead.pop(event.node, None)
        for gang in self.gangs.values():
            if gang.wanted:
                self.send(self.node, m.GangWanted(gang.described, True))
        for queue in self.queues.values():
            queue.demand.pop(old, None)
            if queue.count:
                self.ask(queue)
        for obj in list(self.objects.values()):
            self.wake_fetchers(obj)  # what the old node was asked for is asked of the new one
