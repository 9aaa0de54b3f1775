"""What a node's leases are made of, and amounts that come and go while they are held."""

from __future__ import annotations

from dataclasses import dataclass

from flowengine.scheduling.resources import ACTOR, LIMITLESS, Ledger, Units, is_own, without_cpu

from .dispatch import Part, on
from .messages import ActorHere, AmountsDone, AmountsSet, LeaseWanted, Shape
from .node_desk import NEVER_S, Desk, Worker

Key = tuple[str, Shape, tuple[str, ...]]  # owner, shape, placement


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
    began_s: float = 0.0  # when it last began to wait
    since_s: float = 0.0  # the same, or when it was granted something
    look_s: float = 0.0  # its wait is not looked into again before
    preferred_s: float = NEVER_S  # when a better liked node was proposed
    sought_s: float = NEVER_S  # when the head was asked; never: it does not know the demand
    told: str = ""  # the last reason that the owner heard
    bundle: str = ""  # that it is to be served from
    gpus: int = 0  # units of GPU among what it needs

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
    asked_when_idle: bool = False
    asked_below: float = NEVER_S  # the priority that its owner knows to wait for it
    cpu_lent: bool = False  # its task waits in get; the CPU is in the ledger
    bundle: str = ""
    devices: tuple[str, ...] = ()  # its GPUs

    @property
    def taken(self) -> Units:
        """What it holds of the ledger."""
        return without_cpu(self.units) if self.cpu_lent else self.units


class Amounts(Part):
    """Part of Leases: amounts that the head sets, or that an actor brings; what is over-committed is asked back."""

    desk: Desk
    ledger: Ledger
    leases: dict[int, Lease]
    asked_back: int

    @on(ActorHere)
    def _actor_here(self, event: ActorHere, now: float, sender: str) -> None:
        worker = self.desk.by_address.get(sender)
        if worker is not None:
            worker.actor = ACTOR + event.actor.hex()
            self.ledger.resize_units(worker.actor, LIMITLESS)
            self.desk.leases_due = self.desk.report_due = True

    @on(AmountsSet)
    def _amounts_set(self, event: AmountsSet, now: float, sender: str) -> None:
        if event.epoch != self.desk.epoch:
            return  # of another life of this node
        if event.whole:
            told = dict(event.amounts)
            self._drop_amounts([name for name in self.ledger.names() if name not in told])
        for name, units in event.amounts:
            if is_own(name):
                self.ledger.resize_units(name, units)
        self._reclaim()
        self.desk.leases_due = self.desk.report_due = True
        if event.order:
            self.desk.out.send(sender, AmountsDone(event.order))

    def actor_gone(self, worker: Worker) -> None:
        """No actor lives there any more."""
        key, worker.actor = worker.actor, ""
        if key and not any(other.actor == key for other in self.desk.workers.values()):
            self.ledger.resize_units(key, 0)
            self._reclaim()  # what is to be beside it goes where it is next
            self.desk.report_due = True

    def new_life(self) -> None:
        """What programs made here is the head's to give anew."""
        self._drop_amounts(list(self.ledger.names()))

    def _drop_amounts(self, names: list[str]) -> None:
        for name in names:
            if is_own(name):
                self.ledger.resize_units(name, 0)

    def _reclaim(self) -> None:
        for name in self.ledger.over:
            self.reclaim(name)

    def reclaim(self, name: str) -> None:
        """As many leases are asked back as it takes to make up for what is over-committed: owners would keep them."""
        lacking = -self.ledger.free(name)
        if lacking <= 0:
            return
        holders = [lease for lease in self.leases.values() if has_some(lease.taken, name)]
        lacking -= sum(dict(lease.taken)[name] for lease in holders if lease.asked_back)
        for lease in reversed(holders):
            if lacking <= 0:
                break
            if not lease.asked_back:
                lacking -= dict(lease.taken)[name]
                self.ask_back(lease)

    def ask_back(self, lease: Lease) -> None:
        """Its owner is to return it."""
        lease.asked_back = True
        self.asked_back += 1
        self.desk.out.send(lease.owner, LeaseWanted(lease.number))


def has_some(units: Units, name: str) -> bool:
    """Whether these amounts hold some of the name; "": of any."""
    return not name or any(mine == name for mine, _ in units)
