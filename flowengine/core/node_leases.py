"""Leases of a node's worker slots: owners' demands, who is next, and where to send those that cannot be served here."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from operator import itemgetter

from flowengine.scheduling.devices import Devices, gpu_in, gpus_in
from flowengine.scheduling.placement import allows, candidates, preferred, rank_of, why_not
from flowengine.scheduling.resources import (
    Ledger,
    only_cpu,
    resolve,
    shown_amount,
    shown_name,
    shown_need,
    units_of,
)

from .bundles import bundle_of
from .dispatch import on
from .messages import (
    Death,
    KillWorker,
    LeaseDelayed,
    LeaseDemand,
    LeaseGranted,
    LeaseLost,
    LeaseRedirected,
    LeaseRefused,
    LeaseReturned,
    LeaseWanted,
    NodeEntry,
    Shape,
    SlotsFound,
    SlotsSought,
    WorkerBlocked,
)
from .node_amounts import Amounts, Demand, Key, Lease, has_some
from .node_desk import NEVER_S, Desk, Worker
from .node_pool import Pool

PREFER_S = 0.5  # a node that is liked better is given so long to serve a demand
PREFER_AGAIN_S = 5.0  # and is not proposed again sooner than this: it may send the demand back
PREFER_S_MAX = 5.0  # that is added when its inputs would have to move
SLOW_BYTES_PER_S = 25e6  # of a link that is worth waiting for
PREFER_BRIEFLY_S = 0.1  # meanwhile it has been asked too, and is first if it has room
SEEK_AGAIN_S = 5.0  # the head keeps what is sought; told again in case it forgot
SHORT_MAX = 256  # idle workers that are missing: more are not started at a time
WAIT_NOTICE_S = 1.0  # a shorter wait needs no reason
HELD, TURN = 4, 5  # starve_s that slots are held free for urgent work, of so many; twice as many in each turn


class Leases(Amounts):
    """Demands and leases of this node; laws N-1, N-2, N-3, N-5, N-6."""

    def __init__(self, desk: Desk, pool: Pool) -> None:
        self.desk = desk
        self.pool = pool
        self.ledger = Ledger(desk.settings.total)
        self.devices = {"": Devices(desk.settings.gpus)}  # and those of each bundle
        self.demands: dict[Key, Demand] = {}
        self.waiting: dict[Key, Demand] = {}  # those with something outstanding
        self.fresh: dict[Key, Demand] = {}  # those that were told since anything was granted
        self.reserved: dict[str, float] = {}  # amounts kept from what is less urgent, as of when all were looked at
        self.coming: dict[str, int] | None = None  # what leases hold that end by themselves; None: to be summed up
        self.leases: dict[int, Lease] = {}
        self.held: dict[str, int] = {}  # owner -> how many leases
        self.asked_back = 0
        self.kept: dict[str, None] = {}  # amounts that are held free for bundles
        self.moved: dict[str, None] = {}  # bundles of which leases were granted, closed, or have lent something
        self.ranked = False  # whether any demand is more urgent than others
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
                resolve(units_of(event.shape), self.ledger.static),
                allows(event.placement, node_id),
                rank_of(event.placement, node_id) if allows(event.placement, node_id) else 0,
                bundle=bundle_of(event.shape),
            )
            demand.gpus = gpus_in(demand.units)
        demand.wanted_total, demand.depth, demand.priority = event.wanted_total, event.depth, event.priority
        demand.run_us, demand.held = event.run_us, event.held
        self.ranked = self.ranked or event.priority != 0
        if demand.outstanding <= 0:
            self._stop_waiting(demand)
            return
        if key not in self.waiting:
            self.waiting[key] = demand
            demand.since_s, demand.look_s, demand.told = now, 0.0, ""
            demand.began_s = now
        self.fresh[key] = demand
        self.desk.report_due = True

    def _stop_waiting(self, demand: Demand) -> None:
        if self.waiting.pop(demand.key, None) is not None:
            self.desk.report_due = True
            self.desk.leases_due = self.desk.leases_due or bool(self.reserved)  # perhaps for this one
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
        self.reserved = {}
        self._serve(list(self.waiting.values()), now)

    def serve_fresh(self, now: float) -> None:
        """The same for what was asked for since: nothing has come free, so the others wait on."""
        self._serve([demand for key, demand in self.fresh.items() if key in self.waiting], now)

    def _serve(self, demands: list[Demand], now: float) -> None:
        self.fresh = {}
        self.coming = None
        queue: list[tuple[float, int, int, float, Key, Demand]] = []
        stuck: list[Demand] = []
        for demand in demands:
            in_line = self._starves(demand, now) or (demand.allowed and self.has_room(demand))
            if in_line or (self.ranked and self._is_held_for(demand, now)):
                queue.append(self._place_in_line(demand))
            else:
                stuck.append(demand)
        heapq.heapify(queue)
        short = 0  # idle workers that are missing
        reserved = self.reserved
        while queue:
            demand = heapq.heappop(queue)[-1]
            if not self._may_grant(demand, reserved, now):
                stuck.append(demand)
                self._reserve(demand, reserved, now)
            elif not self.has_worker(demand):
                stuck.append(demand)
                short += self.ledger.times(demand.units, demand.outstanding)
                if short >= SHORT_MAX and not self.pool.idle:
                    stuck += [entry[-1] for entry in queue]
                    break
            else:
                self._grant(demand, now)
                if demand.outstanding > 0:
                    heapq.heappush(queue, self._place_in_line(demand))
        bounded = short > 0 and not self.pool.want(short, now)
        for demand in stuck:
            if now >= demand.look_s:
                self._look_after(demand, now, bounded)
        if self.ranked and stuck:
            self._outrank(stuck)

    def _outrank(self, stuck: list[Demand]) -> None:
        """Who holds what others lack hears how urgent these are: what it would run next may be less so."""
        lacking: dict[str, dict[tuple[str, Shape], float]] = {}
        for demand in stuck:
            name = self.lacking(demand) if demand.allowed and self.ledger.could_fit(demand.units) else ""
            if name:
                lines = lacking.setdefault(name, {})
                line = demand.owner, demand.shape
                lines[line] = max(demand.priority, lines.get(line, NEVER_S))
        first = {name: heapq.nlargest(2, lines.items(), key=itemgetter(1)) for name, lines in lacking.items()}
        for lease in self.leases.values():
            mine = lease.owner, lease.shape
            below = max(
                (priority for name, _ in lease.taken for line, priority in first.get(name, ()) if line != mine),
                default=NEVER_S,
            )
            if below > lease.asked_below and not lease.asked_back:
                lease.asked_below = below
                self.desk.out.send(lease.owner, LeaseWanted(lease.number, below=below))

    def _place_in_line(self, demand: Demand) -> tuple[float, int, int, float, Key, Demand]:
        # Children go before new roots: that bounds how many processes wait in get at the same time.
        turn = self.turns.get(demand.owner, 0)
        return (-demand.priority, -demand.depth, turn, demand.since_s, demand.key, demand)

    def _may_grant(self, demand: Demand, reserved: dict[str, float], now: float) -> bool:
        if not demand.allowed or not self.has_room(demand):
            return False
        if (reserved or self.kept) and self._held_back(demand, reserved):
            return False
        return not demand.rank or not self._better_elsewhere(demand, now)

    def has_room(self, demand: Demand) -> bool:
        """Whether its amounts are free now, those of GPUs on few enough of them."""
        if not self.ledger.fits(demand.units):
            return False
        return not demand.gpus or not self.devices[""] or bool(self._pick(demand))

    def lacking(self, demand: Demand) -> str:
        """The first of its amounts that is not free, or not on few enough GPUs; "" when it has room."""
        name = self.ledger.lacking(demand.units)
        return name or ("" if self.has_room(demand) else gpu_in(demand.units))

    def _pick(self, demand: Demand) -> tuple[str, ...]:
        """The GPUs that it would get: those of its bundle, or such as no bundle has."""
        devices = self.devices.get(demand.bundle)
        return devices.pick(demand.gpus) if devices is not None else ()

    def has_worker(self, demand: Demand) -> bool:
        """Whether a process is idle that could serve it."""
        return self.pool.has_for(self._pick(demand) if demand.gpus else ())

    def _better_elsewhere(self, demand: Demand, now: float) -> bool:
        """Proposes a node that is liked better, once, and gives it a while."""
        if now - demand.preferred_s > PREFER_AGAIN_S:
            best = preferred(self.desk.nodes, demand.placement[: demand.rank], units_of(demand.shape))
            if best is None:
                self.desk.want_nodes()
                return not self.desk.knows_all and now - demand.began_s < PREFER_BRIEFLY_S
            demand.preferred_s = now
            self._redirect(demand, best.address)
        there = max((size for _, size in demand.held), default=0) - dict(demand.held).get(self.desk.me, 0)
        move_s = min(PREFER_S_MAX, max(0, there) / SLOW_BYTES_PER_S)  # what it would take to have its inputs here
        return now - demand.preferred_s < PREFER_S + move_s or now - demand.began_s < PREFER_BRIEFLY_S + move_s

    def _held_back(self, demand: Demand, reserved: dict[str, float]) -> str:
        """What it needs that is free and kept for others."""
        priority = demand.priority
        held = (name for name, _ in demand.units if name in self.kept or priority < reserved.get(name, NEVER_S))
        return next(held, "")

    def _reserve(self, demand: Demand, reserved: dict[str, float], now: float) -> None:
        # A demand for many slots at once would starve behind small ones. What it lacks is held free for it, but only
        # in every other period: its turn may depend on a smaller task that holds something else meanwhile.
        if self._starves(demand, now) and self.ledger.could_fit(demand.units):
            below = math.inf
        elif self.ranked and self._is_held_for(demand, now):
            below = demand.priority
        else:
            return
        lacking = [name for name, count in demand.units if self.ledger.free(name) < count]
        for name in lacking or filter(None, (self.lacking(demand),)):
            reserved[name] = max(below, reserved.get(name, NEVER_S))

    def _is_held_for(self, demand: Demand, now: float) -> bool:
        """Whether what it lacks is kept from less urgent work: when all that it needs comes free by itself.

        It may come free late or never, and others wait meanwhile. So they have a turn now and then; the times between
        double, since a time shorter than what runs would be in vain.
        """
        waited = (now - demand.since_s) / self.desk.config.starve_s
        if not demand.allowed or math.frexp(1 + waited / TURN)[0] >= (1 + HELD / TURN) / 2:
            return False  # it may not run here, or the last part of a turn has come
        if self.coming is None:
            self.coming = {}
            for lease in self.leases.values():
                if lease.worker.state != "blocked" and not lease.worker.actor:
                    for name, count in lease.taken:
                        self.coming[name] = self.coming.get(name, 0) + count
        return all(self.ledger.free(name) + self.coming.get(name, 0) >= count for name, count in demand.units)

    def _starves(self, demand: Demand, now: float) -> bool:
        return demand.allowed and int((now - demand.since_s) / self.desk.config.starve_s) % 2 == 1

    def _grant(self, demand: Demand, now: float) -> None:
        self.ledger.take(demand.units)
        self.coming = None
        self._number += 1
        root = self.desk.root_of(demand.owner)
        devices = self._pick(demand) if demand.gpus else ()
        if devices:
            self.devices[demand.bundle].take(devices, demand.gpus)
        worker = self.pool.lend(self._number, root, devices)
        self.leases[self._number] = Lease(
            self._number, demand.owner, demand.shape, demand.units, worker, root, demand.priority, bundle=demand.bundle,
            devices=devices,
        )  # fmt: skip
        if demand.bundle:
            self.moved[demand.bundle] = None
        self.held[demand.owner] = self.held.get(demand.owner, 0) + 1
        self.turn += 1
        self.turns[demand.owner] = self.turn
        demand.granted_total += 1
        demand.since_s, demand.told = now, ""
        self.desk.counters["leases_granted"] += 1
        self.desk.out.send(
            demand.owner,
            LeaseGranted(
                self._number, demand.shape, demand.placement, worker.address, worker.worker_id, self.desk.node_id,
                devices,
            ),
        )  # fmt: skip
        if demand.outstanding <= 0:
            self._stop_waiting(demand)

    # --- what cannot be granted -------------------------------------------------------------------

    def _look_after(self, demand: Demand, now: float, bounded: bool) -> None:
        """A demand waits: call back leases of others, seek elsewhere, tell why."""
        demand.look_s = now + self.desk.config.seek_interval_s
        here = demand.allowed and self.ledger.could_fit(demand.units)
        if here:
            self.reclaim(self.ledger.lacking(demand.units))  # tasks that had waited go on beside those that came then
            self._call_back(demand, now)
            if now - demand.since_s >= WAIT_NOTICE_S:
                self._delay(demand, self._busy_reason(demand, bounded))
        sole = preferred(self.desk.nodes, demand.placement, demand.units) if len(demand.placement) == 1 else None
        if not here and sole is not None and sole.node_id != self.desk.node_id:
            self._redirect(demand, sole.address)
            demand.look_s = now + SEEK_AGAIN_S
        elif not self.desk.head_up:
            if not here:
                self._without_head(demand, now)
        elif not here or len(self.desk.nodes) > 1 or not self.desk.knows_all:
            self._seek(demand, now)

    def _without_head(self, demand: Demand, now: float) -> None:
        """What was last known of the others has to do."""
        settings, total = self.desk.settings, self.ledger.total()
        here = NodeEntry(settings.node_id, settings.me, settings.host, total, total)
        nodes = [here, *self.desk.others()]
        able = candidates(nodes, demand.shape, demand.placement)
        if able:
            self._redirect(demand, able[0].address)
            demand.look_s = now + SEEK_AGAIN_S
        else:
            self._delay(demand, f"{why_not(nodes, demand.shape, demand.placement)}; the head is not there to be asked")

    def _busy_reason(self, demand: Demand, bounded: bool) -> str:
        name = self.ledger.lacking(demand.units)
        if name:
            free = shown_amount(max(0, self.ledger.free(name)), name)
            need, total = shown_need(name, dict(demand.units)[name]), shown_amount(self.ledger.size(name), name)
            return f"node {self.desk.node_id} is busy: needs {need}, free {free} of {total}"
        if not self.has_room(demand):
            need = shown_amount(demand.gpus)
            return f"node {self.desk.node_id} has GPU: {need} free only in parts of several, which others share"
        held = self._held_back(demand, self.reserved)
        if held:
            return f"node {self.desk.node_id} keeps {shown_name(held)} free for what is more urgent or waits for long"
        if bounded:
            count = self.pool.alive()
            return f"node {self.desk.node_id} runs {count} workers and may start no more (workers_extra_max)"
        if self.pool.cannot_start:
            return f"node {self.desk.node_id} cannot start a worker: {self.pool.cannot_start}"
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
        if event.refused:
            self._stop_waiting(demand)
            demand.wanted_total = demand.granted_total
            self.desk.out.send(demand.owner, LeaseRefused(demand.shape, demand.placement, event.reason))
            return
        if not event.node:
            if not (demand.allowed and self.ledger.could_fit(demand.units)):  # else this node tells more
                self._delay(demand, event.reason)
            return
        demand.sought_s = NEVER_S  # answered: the head has forgotten it
        demand.look_s = now + (SEEK_AGAIN_S if event.reason else self.desk.config.seek_interval_s)
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

    def _call_back(self, demand: Demand, now: float) -> None:
        """Asks owners that hold more of what is lacking than the one that waits, most first, each lease at most once.

        Its own owner is asked too for those of another shape: at first when they are idle, at length in any case, since
        it would keep them as long as it has work for them.
        """
        lacking = self.lacking(demand)
        starves = now - demand.since_s >= self.desk.config.starve_s
        counts: dict[str, int] = {}
        spare: dict[str, list[Lease]] = {}
        for lease in self.leases.values():
            if lease.asked_back or not has_some(lease.units, lacking):
                continue
            counts[lease.owner] = counts.get(lease.owner, 0) + 1
            if lease.owner == demand.owner and lease.shape == demand.shape:
                continue
            if lease.owner == demand.owner and not starves and lease.priority >= demand.priority:
                if not lease.asked_when_idle:
                    lease.asked_when_idle = True
                    self.desk.out.send(lease.owner, LeaseWanted(lease.number, when_idle=True))
            elif lease.worker.state == "leased":
                spare.setdefault(lease.owner, []).append(lease)
        held = counts.get(demand.owner, 0)
        for _ in range(demand.outstanding - self.asked_back):
            best = _richest(spare, counts, held, demand)
            if best is None:
                return
            spare[best.owner].remove(best)
            counts[best.owner] -= 1
            held += best.owner != demand.owner
            self.ask_back(best)

    # --- ends -------------------------------------------------------------------------------------

    def _close(self, lease: Lease) -> None:
        """Forgets a lease; its amounts are free again."""
        if lease.devices:
            self.devices[lease.bundle].give(lease.devices, gpus_in(lease.units))
        self.ledger.give(lease.taken)
        del self.leases[lease.number]
        if lease.bundle:
            self.moved[lease.bundle] = None
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
            self.actor_gone(lease.worker)
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
        if lease.bundle:
            self.moved[lease.bundle] = None
        self.pool.block(worker, event.blocked)

    def worker_ended(self, worker: Worker, death: Death) -> None:
        """The process of a lease is gone: its owner hears how."""
        self.actor_gone(worker)
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


def _richest(spare: dict[str, list[Lease]], counts: dict[str, int], held: int, demand: Demand) -> Lease | None:
    """A lease of the owner that holds most, if that is more than the one that waits holds, or of lower priority."""
    best: Lease | None = None
    for owner, leases in spare.items():
        for lease in leases:
            fair = counts[owner] > held or lease.priority < demand.priority or owner == demand.owner
            if fair and (best is None or counts[owner] > counts[best.owner]):
                best = lease
    return best
