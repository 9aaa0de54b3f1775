"""Laws of the machines: numbered, written once, checked after every event in tests and simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from flowengine.scheduling.resources import CPU, SCALE

from .ids import short
from .node_objects import RUNS

if TYPE_CHECKING:
    from .head import Head
    from .node import Node

Check = Callable[[Any], Iterator[str]]


class Law(NamedTuple):
    """A law of one kind of machine."""

    label: str
    text: str
    check: Check


LAWS: dict[str, list[Law]] = {}  # name of the machine's class -> its laws


def law(label: str, text: str, machine: str) -> Callable[[Check], Check]:
    """Registers a law: the function yields one line for each breach."""

    def register(check: Check) -> Check:
        LAWS.setdefault(machine, []).append(Law(label, text, check))
        return check

    return register


def check(machine: object) -> list[str]:
    """All breaches of the laws of this machine; [] when it is well."""
    return [
        f"{entry.label} ({entry.text}): {breach}"
        for entry in LAWS.get(type(machine).__name__, [])
        for breach in entry.check(machine)
    ]


# --- Node: slots and workers ----------------------------------------------------------------------


@law("N-1", "no node is over-allocated, but in CPU by tasks that go on after they waited", "Node")
def _ledger_is_sound(node: Node) -> Iterator[str]:
    ledger = node.leases.ledger
    taken = dict(node.leases.taken())
    for name in sorted({*ledger.names(), *taken}):
        if ledger.used(name) != taken.get(name, 0):
            yield f"{name}: the ledger says {ledger.used(name) / SCALE}, the leases hold {taken.get(name, 0) / SCALE}"
        if name != CPU and ledger.free(name) < 0:
            yield f"{name}: {ledger.free(name) / SCALE} is free"


@law("N-2", "a lease has one living or dying process, a leased process has one lease", "Node")
def _leases_match_workers(node: Node) -> Iterator[str]:
    for number, lease in node.leases.leases.items():
        worker = lease.worker
        if worker.lease != number or node.desk.workers.get(worker.worker_id) is not worker:
            yield f"lease {number} says {worker.worker_id}, which says lease {worker.lease}"
        if worker.state not in ("leased", "blocked", "dying"):
            yield f"lease {number}: {worker.worker_id} is {worker.state}"
        if worker.state in ("leased", "blocked") and lease.cpu_lent != (worker.state == "blocked"):
            yield f"lease {number}: cpu_lent={lease.cpu_lent} while {worker.worker_id} is {worker.state}"
    for worker in node.desk.workers.values():
        if worker.state in ("leased", "blocked") and worker.lease not in node.leases.leases:
            yield f"{worker.worker_id} is {worker.state} without a lease"


@law("N-3", "a demand waits exactly when something of it is outstanding", "Node")
def _waiting_is_outstanding(node: Node) -> Iterator[str]:
    for key, demand in node.leases.demands.items():
        if (demand.outstanding > 0) != (key in node.leases.waiting):
            yield f"{key}: {demand.outstanding} outstanding, waiting: {key in node.leases.waiting}"
    for key in node.leases.waiting:
        if key not in node.leases.demands:
            yield f"{key} waits and is no demand"


@law("N-4", "the pool's sums are right and the number of processes is bounded", "Node")
def _pool_is_sound(node: Node) -> Iterator[str]:
    pool, workers = node.pool, node.desk.workers.values()
    states = [worker.state for worker in workers]
    if states.count("starting") != pool.starting or states.count("dying") != pool.dying:
        yield f"starting {pool.starting}, dying {pool.dying}, but {states}"
    if sorted(pool.idle) != sorted(worker.worker_id for worker in workers if worker.state == "idle"):
        yield f"idle: {sorted(pool.idle)}"
    if pool.alive() > node.settings.num_workers + node.config.workers_extra_max:
        yield f"{pool.alive()} processes"


@law("N-5", "nobody waits for what is free: a demand that fits and has an idle worker is granted", "Node")
def _nothing_is_held_back(node: Node) -> Iterator[str]:
    leases = node.leases
    if not node.pool.idle:
        return
    # While some demand could be starving, what it lacks may be held free for it; where ranks matter, others come first.
    if any(not leases.ledger.fits(demand.units) for demand in leases.waiting.values()):
        return
    for key, demand in leases.waiting.items():
        if demand.allowed and not demand.rank and leases.ledger.fits(demand.units):
            yield f"{key} waits while {len(node.pool.idle)} workers are idle"


@law("N-6", "what is counted of leases is so: per owner, and asked back", "Node")
def _counts_are_right(node: Node) -> Iterator[str]:
    held: dict[str, int] = {}
    for lease in node.leases.leases.values():
        held[lease.owner] = held.get(lease.owner, 0) + 1
    if held != node.leases.held:
        yield f"held {node.leases.held}, really {held}"
    asked = sum(lease.asked_back for lease in node.leases.leases.values())
    if asked != node.leases.asked_back:
        yield f"{node.leases.asked_back} asked back, really {asked}"


# --- Node: store ----------------------------------------------------------------------------------


@law("S-1", "what is used and granted fits the limit", "Node")
def _store_keeps_its_limit(node: Node) -> Iterator[str]:
    store = node.store
    if store.used_bytes + store.granted_bytes > store.limit_bytes:
        yield f"used {store.used_bytes} + granted {store.granted_bytes} > {store.limit_bytes}"


@law("S-2", "every sum of bytes is the sum of its parts", "Node")
def _store_sums(node: Node) -> Iterator[str]:
    store, entries = node.store, node.store.entries.values()
    arriving = sum(entry.size_bytes for entry in entries if entry.ordered and entry.running in ("pull", "restore"))
    used = sum(entry.size_bytes for entry in store.memory.values()) + arriving + sum(store.freeing.values())
    leaving = sum(entry.size_bytes for entry in entries if entry.running == "spill") + sum(store.freeing.values())
    sums = (
        ("used", store.used_bytes, used),
        ("leaving", store.leaving_bytes, leaving),
        ("granted", store.granted_bytes, sum(store.granted.values())),
        ("pool", store.pool_bytes, sum(store.pools.values())),
        ("disk", store.disk_bytes, sum(entry.disk_bytes for entry in entries)),
    )
    for name, said, really in sums:
        if said != really or said < 0:
            yield f"{name}: {said}, really {really}"


@law("S-3", "where an object is and what is under way fit together, and it is listed where it belongs", "Node")
def _entries_are_sound(node: Node) -> Iterator[str]:
    store = node.store
    for oid, entry in store.entries.items():
        name = short(oid)
        if entry.running not in RUNS[entry.place]:
            yield f"{name}: {entry.running or 'nothing'} under way while it is in {entry.place or 'no place'}"
        if (entry.place == "memory") != (oid in store.memory):
            yield f"{name}: in {entry.place or 'no place'}, listed in memory: {oid in store.memory}"
        if not entry.owners or any(oid not in store.by_owner.get(owner, {}) for owner in entry.owners):
            yield f"{name}: not listed under its owners {list(entry.owners)}"
        if entry.doomed and not (entry.running and entry.ordered):
            yield f"{name}: doomed, and nothing is under way"
    listed = sum(len(owned) for owned in store.by_owner.values())
    claims = sum(len(entry.owners) for entry in store.entries.values())
    if listed != claims:
        yield f"{listed} objects are listed under owners, which have {claims}"


@law("S-4", "who waits for an object waits for something that is under way", "Node")
def _waiters_have_hope(node: Node) -> Iterator[str]:
    store = node.store
    queued = [ask.entry for ask in store.asks if ask.entry is not None] + list(store.pulls)
    for oid, entry in store.entries.items():
        if entry.waiters and not entry.running:
            yield f"{short(oid)}: {list(entry.waiters)} wait for nothing"
        in_line = sum(other is entry for other in queued)
        if in_line != (bool(entry.running) and not entry.ordered):
            yield f"{short(oid)}: {in_line} times in a queue while {entry.running or 'nothing'} is under way"


@law("S-5", "what runs at once is counted and bounded", "Node")
def _store_bounds(node: Node) -> Iterator[str]:
    store = node.store
    pulls = sum(entry.running == "pull" for entry in store.entries.values()) - len(store.pulls)
    if store.pulling != pulls or pulls > node.config.pull_parallel_max:
        yield f"{store.pulling} pulls, really {pulls}"
    spills = sum(entry.running == "spill" for entry in store.entries.values())
    if store.spilling != spills or spills > node.config.spill_parallel_max:
        yield f"{store.spilling} spills, really {spills}"
    if store.pulls and store.pulling < node.config.pull_parallel_max:
        yield f"{len(store.pulls)} pulls wait while {store.pulling} run"


@law("S-6", "nobody waits for room that is there", "Node")
def _no_idle_room(node: Node) -> Iterator[str]:
    store = node.store
    room = store.limit_bytes - store.used_bytes - store.granted_bytes
    if store.asks and store.asks[0].size_bytes <= room:
        yield f"the first waits for {store.asks[0].size_bytes} bytes, {room} are free"


# --- Head -----------------------------------------------------------------------------------------


@law("H-1", "a node id has at most one life, under the epoch that the journal holds", "Head")
def _one_life(head: Head) -> Iterator[str]:
    for node_id, member in head.members.items():
        row = head.rows.get(node_id)
        if row is None or row.dead or row.epoch != member.entry.epoch or row.address != member.entry.address:
            yield f"{node_id}: lives under {member.entry.epoch} at {member.entry.address}, the journal says {row}"
    if sorted(head.by_address.values()) != sorted(head.members):
        yield f"addresses: {sorted(head.by_address)}"


@law("H-2", "who is declared dead is no member", "Head")
def _dead_are_gone(head: Head) -> Iterator[str]:
    for address in head.by_address:
        if address in head.dead:
            yield f"{address} lives and is dead"
    for node_id, row in head.rows.items():
        if row.dead and (node_id in head.expected or node_id in head.members):
            yield f"{node_id} is dead in the journal"


@law("H-3", "promises stay within what a node has", "Head")
def _promises_are_covered(head: Head) -> Iterator[str]:
    for node_id, member in head.members.items():
        total = dict(member.entry.total)
        for name, amount in member.entry.available:
            if not 0 <= amount <= total.get(name, 0.0):
                yield f"{node_id}: {amount} of {total.get(name, 0.0)} {name} is free"


@law("H-4", "no seeker waits while a node has room for it", "Head")
def _seekers_are_served(head: Head) -> Iterator[str]:
    for key, seeker in head.seekers.items():
        if seeker.node not in head.by_address:
            yield f"{key} belongs to no living node"
        elif head.could_serve(seeker):
            yield f"{key} waits"


@law("H-5", "nobody is both a member and expected to come back", "Head")
def _expected_are_absent(head: Head) -> Iterator[str]:
    for node_id in head.expected:
        if node_id in head.members:
            yield node_id
