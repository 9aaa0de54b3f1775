"""Leases of a node's worker slots: owners' demands, who is next, and where to send those that cannot be served here."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from flowengine.scheduling.placement import allows, candidates, rank_of, why_not
from flowengine.scheduling.resources import Ledger, Units, only_cpu, units_of, without_cpu

from .dispatch import Part, on
from .messages import (
    Death,
    KillWorker,
    LeaseDelayed,
    LeaseDemand,
    LeaseGranted,
    LeaseLost,
    LeaseRedirected,
    LeaseReturned,
    LeaseWanted,
    NodeEntry,
    Shape,
    SlotsFound,
    SlotsSought,
    WorkerBlocked,
)
from .node_desk import NEVER_S, Desk, Worker
from .node_pool import Pool

Key = tuple[str, Shape, tuple[str, ...]]  # owner, shape, placement

PREFER_S = 0.5  # a node that is liked better is given so long to serve a demand
PREFER_AGAIN_S = 5.0  # and is not proposed again sooner than this: it may send the demand back
SEEK_AGAIN_S = 5.0  # the head keeps what is sought; told again in case it forgot
WAIT_NOTICE_S = 1.0  # a shorter wait needs no reason


@dataclass(slots=True, eq=False)
class Demand:
    """What one owner wants in one shape and placement: running totals."""

    owner: str
    shape: Shape
    placement: tuple[str, ...]
    units: Units
    allowed: bool  # whether the placement admits this node
    rank: int  # of this node in the order of preference
    wanted_total: int = 0
    granted_total: int = 0
    depth: int = 0
    priority: float = 0
    run_us: int = 0
    held: tuple[tuple[str, int], ...] = ()
    since_s: float = 0.0  # when it last began to wait, or was granted something
    look_s: float = 0.0  # its wait is not looked into again before
    preferred_s: float = NEVER_S  # when a better liked node was proposed
    sought_s: float = NEVER_S  # when the head was asked; never: it does not know the demand
    told: str = ""  # the last reason that the owner heard

    @property
    def key(self) -> Key:
        """Its name among the demands."""
        return (self.owner, self.shape, self.placement)

    @property
    def outstanding(self) -> int:
        """Leases that are wanted and not granted."""
        return self.wanted_total - self.granted_total


@dataclass(slots=True, eq=False)
class Lease:
    """A worker slot in the hands of an owner."""

    number: int
    owner: str
    shape: Shape
    units: Units
    worker: Worker
    root: str
    priority: float
    asked_back: bool = False
    cpu_lent: bool = False  # its task waits in get; the CPU is in the ledger

    @property
    def taken(self) -> Units:
        """What it holds of the ledger."""
        return without_cpu(self.units) if self.cpu_lent else self.units


class Leases(Part):
    """Demands and leases of this node; laws N-1, N-2, N-3, N-5, N-6."""

    def __init__(self, desk: Desk, pool: Pool) -> None:
        self.desk = desk
        self.pool = pool
        self.ledger = Ledger(desk.settings.total)
        self.demands: dict[Key, Demand] = {}
        self.waiting: dict[Key, Demand] = {}  # those with something outstanding
        self.leases: dict[int, Lease] = {}
        self.held: dict[str, int] = {}  # owner -> how many leases
        self.asked_back = 0
        self.turn = 0
        self.turns: dict[str, int] = {}  # owner -> when it was served last
        self._number = 0

    # --- demands ----------------------------------------------------------------------------------

    @on(LeaseDemand)
    def _demanded(self, event: LeaseDemand, now: float, sender: str) -> None:
        if event.wanted_total and sender in self.desk.gone and not self.desk.is_alive(sender):
            self.desk.gone.pop(sender)  # of another host, and only its link was lost; or its death will be told again
        key = (sender, event.shape, event.placement)
        demand = self.demands.get(key)
        if demand is None:
            node_id = self.desk.node_id
            demand = self.demands[key] = Demand(
                sender,
                event.shape,
                event.placement,
                units_of(event.shape),
                allows(event.placement, node_id),
                rank_of(event.placement, node_id) if allows(event.placement, node_id) else 0,
            )
        demand.wanted_total, demand.depth, demand.priority = event.wanted_total, event.depth, event.priority
        demand.run_us, demand.held = event.run_us, event.held
        if demand.outstanding <= 0:
            self._stop_waiting(demand)
            return
        if key not in self.waiting:
            self.waiting[key] = demand
            demand.since_s, demand.look_s, demand.told = now, 0.0, ""
        self.desk.leases_due = True
        self.desk.report_due = True

    def _stop_waiting(self, demand: Demand) -> None:
        if self.waiting.pop(demand.key, None) is not None:
            self.desk.report_due = True
        if demand.sought_s > NEVER_S:
            demand.sought_s = NEVER_S
            if self.desk.head_up:
                sought = SlotsSought(demand.owner, demand.shape, demand.placement, 0)
                self.desk.out.send(self.desk.head, sought, lazy=True)

    def queued(self) -> int:
        """Leases that are wanted and not granted, over all owners."""
        return sum(demand.outstanding for demand in self.waiting.values())

    # --- granting ---------------------------------------------------------------------------------

    def serve(self, now: float) -> None:
        """Grants what can be granted, best first, and looks after what cannot."""
        queue = [self._place_in_line(demand) for demand in self.waiting.values()]
        heapq.heapify(queue)
        stuck: list[Demand] = []
        short = 0  # idle workers that are missing
        reserved: dict[str, None] = {}  # resources that are kept for a demand that starves
        while queue:
            demand = heapq.heappop(queue)[-1]
            if not self._may_grant(demand, reserved, now):
                stuck.append(demand)
                self._reserve(demand, reserved, now)
            elif not self.pool.idle:
                stuck.append(demand)
                short += self.ledger.times(demand.units, demand.outstanding)
            else:
                self._grant(demand, now)
                if demand.outstanding > 0:
                    heapq.heappush(queue, self._place_in_line(demand))
        bounded = short > 0 and not self.pool.want(short, now)
        for demand in stuck:
            if now >= demand.look_s:
                self._look_after(demand, now, bounded)

    def _place_in_line(self, demand: Demand) -> tuple[float, int, int, float, Key, Demand]:
        # Children go before new roots: that bounds how many processes wait in get at the same time.
        turn = self.turns.get(demand.owner, 0)
        return (-demand.priority, -demand.depth, turn, demand.since_s, demand.key, demand)

    def _may_grant(self, demand: Demand, reserved: dict[str, None], now: float) -> bool:
        if not demand.allowed or not self.ledger.fits(demand.units):
            return False
        if reserved and any(name in reserved for name, _ in demand.units):
            return False
        return not demand.rank or not self._better_elsewhere(demand, now)

    def _better_elsewhere(self, demand: Demand, now: float) -> bool:
        """Proposes a node that is liked better, once, and gives it a while."""
        if now - demand.preferred_s > PREFER_AGAIN_S:
            best = candidates(self._nodes(), demand.shape, demand.placement)[:1]
            if not best or best[0].node_id == self.desk.node_id:
                return False
            demand.preferred_s = now
            self._redirect(demand, best[0].address)
        return now - demand.preferred_s < PREFER_S

    def _reserve(self, demand: Demand, reserved: dict[str, None], now: float) -> None:
        # A demand for many slots at once would starve behind small ones. What it lacks is held free for it, but only
        # in every other period: its turn may depend on a smaller task that holds something else meanwhile.
        period_s = self.desk.config.starve_s
        if demand.allowed and int((now - demand.since_s) / period_s) % 2 and self.ledger.could_fit(demand.units):
            lacking = self.ledger.lacking(demand.units)
            if lacking:
                reserved[lacking] = None

    def _grant(self, demand: Demand, now: float) -> None:
        self.ledger.take(demand.units)
        self._number += 1
        root = self.desk.root_of(demand.owner)
        worker = self.pool.lend(self._number, root)
        self.leases[self._number] = Lease(
            self._number, demand.owner, demand.shape, demand.units, worker, root, demand.priority
        )
        self.held[demand.owner] = self.held.get(demand.owner, 0) + 1
        self.turn += 1
        self.turns[demand.owner] = self.turn
        demand.granted_total += 1
        demand.since_s, demand.told = now, ""
        self.desk.counters["leases_granted"] += 1
        self.desk.out.send(
            demand.owner,
            LeaseGranted(
                self._number, demand.shape, demand.placement, worker.address, worker.worker_id, self.desk.node_id
            ),
        )
        if demand.outstanding <= 0:
            self._stop_waiting(demand)

    # --- what cannot be granted -------------------------------------------------------------------

    def _nodes(self) -> list[NodeEntry]:
        settings = self.desk.settings
        total = self.ledger.total()
        here = NodeEntry(settings.node_id, settings.me, settings.host, total, total)
        return [here, *self.desk.others()]

    def _look_after(self, demand: Demand, now: float, bounded: bool) -> None:
        """A demand waits: call back leases of others, seek elsewhere, tell why."""
        demand.look_s = now + self.desk.config.seek_interval_s
        nodes = self._nodes()
        able = candidates(nodes, demand.shape, demand.placement)
        if not able:
            self._delay(demand, why_not(nodes, demand.shape, demand.placement))
            self._seek(demand, now)
            return
        elsewhere = [node for node in able if node.node_id != self.desk.node_id]
        if len(elsewhere) == len(able):
            if len(able) == 1 or not self.desk.head_up:
                self._redirect(demand, able[0].address)
                demand.look_s = now + SEEK_AGAIN_S
            else:
                self._seek(demand, now)
            return
        self._call_back(demand)
        if elsewhere:
            self._seek(demand, now)
        if now - demand.since_s >= WAIT_NOTICE_S:
            self._delay(demand, self._busy_reason(demand, bounded))

    def _busy_reason(self, demand: Demand, bounded: bool) -> str:
        name = self.ledger.lacking(demand.units)
        if name:
            free = max(0, self.ledger.free(name)) / 10_000
            total = dict(self.ledger.total()).get(name, 0.0)
            need = dict(demand.shape)[name]
            return f"node {self.desk.node_id} is busy: needs {name}: {need:g}, free {free:g} of {total:g}"
        if bounded:
            count = self.pool.alive()
            return f"node {self.desk.node_id} runs {count} workers, the most that it may (workers_extra_max)"
        return f"node {self.desk.node_id} starts a worker"

    def _delay(self, demand: Demand, reason: str) -> None:
        if reason != demand.told:
            demand.told = reason
            self.desk.out.send(demand.owner, LeaseDelayed(demand.shape, demand.placement, reason))

    def _seek(self, demand: Demand, now: float) -> None:
        if self.desk.head_up and now - demand.sought_s > SEEK_AGAIN_S:
            demand.sought_s = now
            sought = SlotsSought(
                demand.owner, demand.shape, demand.placement, demand.outstanding, demand.run_us, demand.held
            )
            self.desk.out.send(self.desk.head, sought)

    def _redirect(self, demand: Demand, address: str) -> None:
        self.desk.counters["leases_spilled"] += 1
        self.desk.out.send(demand.owner, LeaseRedirected(demand.shape, demand.placement, address))

    @on(SlotsFound)
    def _found(self, event: SlotsFound, now: float, sender: str) -> None:
        demand = self.waiting.get((event.owner, event.shape, event.placement))
        if demand is None:
            return
        if not event.node:
            self._delay(demand, event.reason)
            return
        demand.sought_s = NEVER_S  # answered: the head has forgotten it
        demand.look_s = now + self.desk.config.seek_interval_s
        if event.node == self.desk.me:
            self.desk.leases_due = True
        else:
            self._redirect(demand, event.node)

    def look_again(self, head_is_new: bool) -> None:
        """Other nodes are there now, or another head: what waits is looked into at once."""
        for demand in self.waiting.values():
            demand.look_s = 0.0
            if head_is_new:
                demand.sought_s = NEVER_S
        self.desk.leases_due = True

    def _call_back(self, demand: Demand) -> None:
        """Asks owners that hold more than the one that waits, most first, each lease at most once."""
        mine = self.held.get(demand.owner, 0)
        if mine == len(self.leases):
            return
        lacking = self.ledger.lacking(demand.units)
        counts = dict(self.held)
        spare: dict[str, list[Lease]] = {}
        for lease in self.leases.values():
            if lease.asked_back:
                counts[lease.owner] -= 1
            elif lease.owner != demand.owner and lease.worker.state == "leased" and _has(lease.units, lacking):
                spare.setdefault(lease.owner, []).append(lease)
        for _ in range(demand.outstanding - self.asked_back):
            best = _richest(spare, counts, mine, demand.priority)
            if best is None:
                return
            spare[best.owner].remove(best)
            counts[best.owner] -= 1
            mine += 1
            best.asked_back = True
            self.asked_back += 1
            self.desk.out.send(best.owner, LeaseWanted(best.number))

    # --- ends -------------------------------------------------------------------------------------

    def _close(self, lease: Lease) -> None:
        """Forgets a lease; its amounts are free again."""
        self.ledger.give(lease.taken)
        del self.leases[lease.number]
        self.held[lease.owner] -= 1
        if not self.held[lease.owner]:
            del self.held[lease.owner]
        self.asked_back -= lease.asked_back
        self.desk.leases_due = True
        self.desk.report_due = True

    def _release(self, lease: Lease, now: float) -> None:
        self._close(lease)
        self.pool.take_back(lease.worker, now)

    @on(LeaseReturned)
    def _returned(self, event: LeaseReturned, now: float, sender: str) -> None:
        lease = self.leases.get(event.lease)
        if lease is not None and lease.owner == sender and lease.worker.state != "dying":
            self._release(lease, now)

    @on(KillWorker)
    def _kill_ordered(self, event: KillWorker, now: float, sender: str) -> None:
        lease = self.leases.get(event.lease)
        if lease is not None and lease.owner == sender:
            lease.worker.killed_task = event.task
            self.pool.kill(lease.worker, event.reason or "cancelled by force", now)

    @on(WorkerBlocked)
    def _blocked(self, event: WorkerBlocked, now: float, sender: str) -> None:
        worker = self.desk.workers.get(event.worker_id)
        if worker is None or worker.state != ("leased" if event.blocked else "blocked"):
            return
        lease = self.leases[worker.lease]
        cpu = only_cpu(lease.units)
        lease.cpu_lent = event.blocked
        if event.blocked:
            self.ledger.give(cpu)
            self.desk.leases_due = True
        else:
            self.ledger.retake(cpu)
        self.pool.block(worker, event.blocked)

    def worker_ended(self, worker: Worker, death: Death) -> None:
        """The process of a lease is gone: its owner hears how."""
        lease = self.leases.get(worker.lease)
        if lease is None:
            return
        self._close(lease)
        self.desk.out.send(lease.owner, LeaseLost(lease.number, death))

    def owner_lost(self, owner: str, now: float) -> None:
        """An owner is gone: it wants nothing any more; what its slots run ends by itself or is adopted."""
        for demand in [demand for demand in self.demands.values() if demand.owner == owner]:
            self._stop_waiting(demand)
            del self.demands[demand.key]
        self.turns.pop(owner, None)
        for lease in [lease for lease in self.leases.values() if lease.owner == owner]:
            if lease.worker.state != "dying":
                self._release(lease, now)

    def root_lost(self, root: str, now: float) -> None:
        """A driver is gone: the workers that run its tasks are killed, for nobody can use the results."""
        for lease in list(self.leases.values()):
            if lease.root == root:
                self.pool.kill(lease.worker, f"its driver {root} is gone", now)
        self.owner_lost(root, now)

    def taken(self) -> Iterator[tuple[str, int]]:
        """What the leases hold, summed: (resource, units)."""
        sums: dict[str, int] = {}
        for lease in self.leases.values():
            for name, count in lease.taken:
                sums[name] = sums.get(name, 0) + count
        yield from sorted(sums.items())


def _has(units: Units, name: str) -> bool:
    return not name or any(mine == name for mine, _ in units)


def _richest(spare: dict[str, list[Lease]], counts: dict[str, int], mine: int, priority: float) -> Lease | None:
    """A lease of the owner that holds most, if that is more than the one that waits holds, or of lower priority."""
    best: Lease | None = None
    for owner, leases in spare.items():
        for lease in leases:
            fair = counts[owner] > mine or lease.priority < priority
            if fair and (best is None or counts[owner] > counts[best.owner]):
                best = lease
    return best
