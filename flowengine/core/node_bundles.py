"""The node's part for gangs and placement groups: it takes amounts out of its ledger and offers them as a bundle's.

The amounts of an open bundle have names of their own in the ledger, so whoever asks for these gets a lease as always.
A member that waits in get lends its CPU: to others of its bundle, or as plain CPU to anybody, its children perhaps.
So does a gang's bundle that nobody uses for long: what its member waits for may have to run first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowengine.scheduling.devices import GPU, Devices, gpus_in
from flowengine.scheduling.resources import CPU, LIMITLESS, SCALE, Units, only_cpu, plain, resolve, units_of

from .bundles import GONE, SPLIT, bundle_name, is_gang, mark_of, renamed
from .dispatch import Part, on
from .messages import (
    BundlesAsked,
    BundlesDropped,
    BundleSet,
    BundlesGiven,
    BundlesKept,
    BundlesOpened,
    BundlesTaken,
    BundlesTold,
    GangSought,
    GangWanted,
    HeldBundle,
    Message,
    Shape,
)
from .node_amounts import Lease
from .node_desk import NEVER_S, Desk
from .node_leases import Leases
from .node_pool import Pool


@dataclass(slots=True, eq=False)
class Bundle:
    """Amounts that are out of the ledger."""

    group: str
    index: int
    shape: Shape
    units: Units
    turn: int
    devices: tuple[str, ...] = ()  # its GPUs, or the one of which it has a part
    is_open: bool = False  # its amounts are on offer
    ending: bool = False  # it goes when the last lease of it is closed
    lent: int = 0  # of its CPU, as plain CPU
    idle_s: float = NEVER_S  # since when nobody has a lease in it; never: somebody has

    @property
    def name(self) -> str:
        """Its name in shapes."""
        return bundle_name(self.group, self.index)

    def offers(self) -> Units:
        """What members may take of it."""
        mark = SCALE if is_gang(self.group) else LIMITLESS
        return ((mark_of(self.name), mark), *((renamed(plain(name), self.name), count) for name, count in self.units))


@dataclass(slots=True, eq=False)
class Asking:
    """Bundles that the head has asked for and that do not fit yet."""

    asked: BundlesAsked
    units: Units
    until_s: float


@dataclass(slots=True, eq=False)
class Want:
    """A process here has members of a gang."""

    described: BundleSet
    since_s: float


class HoldEnded(Message, frozen=True):
    """What was waited for has not come in time."""

    group: str
    turn: int


class Bundles(Part):
    """Bundles of this node; law N-10."""

    def __init__(self, desk: Desk, pool: Pool, leases: Leases) -> None:
        self.desk = desk
        self.pool = pool
        self.leases = leases
        self.held: dict[str, Bundle] = {}  # by name
        self.asking: dict[str, Asking] = {}  # by set
        self.wants: dict[tuple[str, str], Want] = {}  # (process, gang)

    # --- what processes here want -----------------------------------------------------------------

    @on(GangWanted)
    def _wanted(self, event: GangWanted, now: float, sender: str) -> None:
        key = (sender, event.described.id)
        if not event.wanted:
            self._want_no_more(key)
        elif self.desk.is_alive(sender):
            self.wants[key] = Want(event.described, now)
            if self.desk.head_up:
                self.desk.out.send(self.desk.head, GangSought(sender, event.described, True))

    def _want_no_more(self, key: tuple[str, str]) -> None:
        want = self.wants.pop(key, None)
        if want is not None and self.desk.head_up:
            self.desk.out.send(self.desk.head, GangSought(key[0], want.described, False))

    def process_gone(self, address: str) -> None:
        """Who is dead has no members."""
        for key in [key for key in self.wants if key[0] == address]:
            self._want_no_more(key)

    def head_found(self, now: float) -> None:
        """A head has accepted this node, perhaps one that knows nothing: what was half done is not gone on with."""
        self.asking = {}
        self.leases.kept = {}
        for bundle in list(self.held.values()):
            if not bundle.is_open:
                self._close(bundle)
        self.settle(now)
        held = tuple(
            HeldBundle(bundle.group, bundle.index, bundle.shape) for bundle in self.held.values() if not bundle.ending
        )
        wanted = tuple(
            GangSought(owner, want.described, True, now - want.since_s) for (owner, _), want in self.wants.items()
        )
        self.desk.out.send(self.desk.head, BundlesTold(held, wanted))

    def clear(self, now: float) -> None:
        """A new life begins: what ran in bundles is being killed."""
        self.asking = {}
        self.leases.kept = {}
        for bundle in list(self.held.values()):
            self._close(bundle)
        self.settle(now)

    # --- taking -----------------------------------------------------------------------------------

    @on(BundlesAsked)
    def _asked(self, event: BundlesAsked, now: float, sender: str) -> None:
        sums: dict[str, int] = {}
        for _, shape in event.bundles:
            for name, count in resolve(units_of(shape), self.leases.ledger.static):
                sums[name] = sums.get(name, 0) + count
        asking = Asking(event, tuple(sorted(sums.items())), now + event.hold_s)
        if any(bundle_name(event.group, index) in self.held for index, _ in event.bundles):
            self._refuse(asking, "is being given back")
        elif self.leases.kept and any(name in self.leases.kept for name in sums):
            self._refuse(asking, "is held free for others")
        elif not self._take(asking):
            if event.hold_s and self.leases.ledger.could_fit(asking.units):
                self.asking[event.group] = asking
                self.desk.leases_due = True
                self.desk.out.timer(event.hold_s, HoldEnded(event.group, event.turn))
            else:
                self._refuse(asking, self._lacks(asking))

    def _take(self, asking: Asking) -> bool:
        ledger, event = self.leases.ledger, asking.asked
        if not ledger.fits(asking.units):
            return False
        each = [resolve(units_of(shape), ledger.static) for _, shape in event.bundles]
        devices = self._take_devices(each)
        if devices is None:
            return False
        ledger.take(asking.units)
        for (index, shape), units, its in zip(event.bundles, each, devices, strict=True):
            bundle = Bundle(event.group, index, shape, units, event.turn, its)
            self.held[bundle.name] = bundle
            if its:
                self.leases.devices[bundle.name] = Devices(its, min(gpus_in(units), SCALE))
        self.desk.report_due = True
        self.desk.out.send(self.desk.head, BundlesTaken(event.group, event.turn, "", ledger.available()))
        return True

    def _take_devices(self, each: list[Units]) -> list[tuple[str, ...]] | None:
        """GPUs for each bundle; None when what is free of them lies in parts of too many."""
        devices = self.leases.devices[""]
        return devices.take_each([gpus_in(units) for units in each]) if devices else [()] * len(each)

    def _lacks(self, asking: Asking) -> str:
        lacking = self.leases.ledger.lacking(asking.units)
        return f"lacks {lacking}" if lacking else SPLIT

    def _refuse(self, asking: Asking, why: str) -> None:
        event = asking.asked
        answer = BundlesTaken(event.group, event.turn, why, self.leases.ledger.available())
        self.desk.out.send(self.desk.head, answer)

    def serve(self, now: float) -> None:
        """Settles what has changed, and takes what was waited for; what lacks is kept from others and called back."""
        self.settle(now)
        if not self.asking:
            return
        self.leases.kept = {}
        for group, asking in list(self.asking.items()):
            if self._take(asking):
                del self.asking[group]
                continue
            if self.leases.ledger.fits(asking.units):
                self.leases.kept[GPU] = None
                self._call_back_parts()
            for name, count in asking.units:
                short = count - self.leases.ledger.free(name)
                if short > 0:
                    self.leases.kept[name] = None
                    self._call_back(name, short)

    def _call_back(self, name: str, short: int) -> None:
        """Asks for leases until what comes back is enough."""
        for lease in self.leases.leases.values():
            if short <= 0:
                return
            units = dict(lease.taken).get(name, 0)
            if units and lease.worker.state == "leased":
                short -= units
                if not lease.asked_back:
                    self.leases.ask_back(lease)

    def _call_back_parts(self) -> None:
        """Asks for the leases of parts of GPUs: whole ones are to come free."""
        for lease in self.leases.leases.values():
            is_part = not lease.bundle and 0 < gpus_in(lease.units) < SCALE
            if is_part and lease.worker.state == "leased" and not lease.asked_back:
                self.leases.ask_back(lease)

    @on(HoldEnded)
    def _hold_ended(self, event: HoldEnded, now: float, sender: str) -> None:
        asking = self.asking.get(event.group)
        if asking is not None and asking.asked.turn == event.turn:
            self._ask_no_more(event.group)
            self._refuse(asking, self._lacks(asking))

    def _ask_no_more(self, group: str) -> None:
        if self.asking.pop(group, None) is not None:
            self.leases.kept = {}
            self.desk.leases_due = True

    @on(BundlesOpened)
    def _opened(self, event: BundlesOpened, now: float, sender: str) -> None:
        ledger = self.leases.ledger
        mine = [bundle for bundle in self._of(event.group) if bundle.turn == event.turn and not bundle.ending]
        for bundle in mine:
            bundle.is_open = True
            self.leases.moved[bundle.name] = None
            for name, count in bundle.offers():
                ledger.resize_units(name, count)
        if not mine:
            self.desk.out.send(self.desk.head, BundlesTaken(event.group, event.turn, GONE, ledger.available()))
        self.desk.leases_due = True

    def _of(self, group: str) -> list[Bundle]:
        return [bundle for bundle in self.held.values() if bundle.group == group]

    # --- giving back ------------------------------------------------------------------------------

    @on(BundlesDropped)
    def _dropped(self, event: BundlesDropped, now: float, sender: str) -> None:
        asking = self.asking.get(event.group)
        if asking is not None and event.turn in (0, asking.asked.turn):
            self._ask_no_more(event.group)
        mine = [bundle for bundle in self._of(event.group) if event.turn in (0, bundle.turn)]
        if event.unless_used and any(self._is_used(bundle) for bundle in mine):
            kept = tuple([bundle.index for bundle in mine if bundle.is_open and not bundle.ending])
            self.desk.out.send(self.desk.head, BundlesKept(event.group, kept))
            return
        for bundle in mine:
            self._close(bundle, event.why, now)
        self.settle(now)

    def _is_used(self, bundle: Bundle) -> bool:
        """Whether a member has a slot in it, and it is to stay."""
        if bundle.ending:
            return False
        return any(lease.bundle == bundle.name for lease in self.leases.leases.values())

    def _close(self, bundle: Bundle, why: str = "", now: float = 0.0) -> None:
        """Nothing of it is on offer any more; why: members that run are ended."""
        if bundle.is_open and not bundle.ending:
            for name, _ in bundle.offers():
                self.leases.ledger.resize_units(name, 0)
        bundle.ending = True
        for lease in list(self.leases.leases.values()):
            if lease.bundle == bundle.name and lease.worker.state != "dying":
                if why:
                    self.pool.kill(lease.worker, why, now)
                elif not lease.asked_back:
                    self.leases.ask_back(lease)
        self.leases.moved[bundle.name] = None

    def settle(self, now: float) -> None:
        """After changes of leases in bundles: CPU that members lend is in the ledger, and what has ended is free."""
        moved, self.leases.moved = self.leases.moved, {}
        for name in moved:
            bundle = self.held.get(name)
            if bundle is None:
                continue
            inside = [lease for lease in self.leases.leases.values() if lease.bundle == name]
            if inside or not bundle.is_open:
                bundle.idle_s = NEVER_S
            elif bundle.idle_s == NEVER_S:
                bundle.idle_s = now
            self._lend(bundle, self._to_lend(bundle, inside, now))
            if bundle.ending and not inside:
                self._give(bundle)

    def _to_lend(self, bundle: Bundle, inside: list[Lease], now: float) -> int:
        """CPU that nobody in the bundle uses: others may have to run before anybody will."""
        if bundle.ending:
            return 0
        unused = max(0, self.leases.ledger.free(renamed(CPU, bundle.name)))
        if is_gang(bundle.group) and bundle.idle_s > NEVER_S and now - bundle.idle_s >= self.desk.config.starve_s:
            return unused
        return min(unused, sum(_cpu_of(lease, bundle.name) for lease in inside if lease.cpu_lent))

    def beat(self) -> None:
        """Looks after bundles that nobody uses."""
        for bundle in self.held.values():
            if bundle.idle_s > NEVER_S and not bundle.lent and is_gang(bundle.group):
                self.leases.moved[bundle.name] = None

    def _lend(self, bundle: Bundle, lent: int) -> None:
        if lent > bundle.lent:
            self.leases.ledger.give(((CPU, lent - bundle.lent),))
            self.desk.leases_due = True
        elif lent < bundle.lent:
            self.leases.ledger.retake(((CPU, bundle.lent - lent),))
        bundle.lent = lent

    def _give(self, bundle: Bundle) -> None:
        del self.held[bundle.name]
        self.leases.ledger.give(bundle.units)
        if bundle.devices:
            del self.leases.devices[bundle.name]
            self.leases.devices[""].give(bundle.devices, gpus_in(bundle.units))
        self.desk.leases_due = self.desk.report_due = True
        if self.desk.head_up and not any(other.ending for other in self._of(bundle.group)):
            self.desk.out.send(self.desk.head, BundlesGiven(bundle.group, self.leases.ledger.available()))

    def taken(self) -> Iterator[tuple[str, int]]:
        """What the bundles hold of the ledger, less what is lent."""
        for bundle in self.held.values():
            for name, count in bundle.units:
                yield name, count - (bundle.lent if name == CPU else 0)


def _cpu_of(lease: Lease, bundle: str) -> int:
    """The bundle's CPU that a lease lends while its task waits."""
    return dict(only_cpu(lease.units)).get(renamed(CPU, bundle), 0)
