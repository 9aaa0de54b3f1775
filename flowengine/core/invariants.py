"""Laws of the machines: numbered, written once, checked after every event in tests and simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from flowengine.collectives.posts_pieces import LANE_PIECES_MAX
from flowengine.scheduling.resources import CPU, SCALE, is_own, job_of, plain
from flowengine.scheduling.rooms import EVERY

from .bundle_laws import fitting, offered, placed, shared
from .executor import RECENT_BYTES_MAX, RECENT_MAX, size_of
from .head_resources import ANY, EACH
from .ids import short
from .node_objects import RUNS
from .owner_calls import held_by
from .owner_state import ENDED, State, Task

if TYPE_CHECKING:
    from .executor import Executor
    from .head import Head
    from .node import Node
    from .owner import Owner
    from .parts import RefTo

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
    for name, count in node.bundles.taken():
        taken[name] = taken.get(name, 0) + count
    for name in sorted({*ledger.names(), *taken}):
        if ledger.used(name) != taken.get(name, 0):
            yield f"{name}: the ledger says {ledger.used(name) / SCALE}, the leases hold {taken.get(name, 0) / SCALE}"
        if name != CPU and ledger.free(name) < 0 and name not in ledger.over:
            yield f"{name}: {ledger.free(name) / SCALE} is free"
        if (ledger.free(name) < 0 and name not in ledger.static) != (name in ledger.over):
            yield f"{name}: over-committed, and {'' if name in ledger.over else 'not '}listed as such"


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
    if pool.startable() < 0:
        yield f"{pool.alive()} processes, {-pool.startable()} too many"


@law("N-5", "nobody waits for what is free: a demand that fits and has an idle worker is granted", "Node")
def _nothing_is_held_back(node: Node) -> Iterator[str]:
    leases = node.leases
    if not node.pool.idle:
        return
    # While some demand could be starving, what it lacks may be held free for it; where ranks matter, others come first.
    if leases.kept or any(leases.lacking(demand) for demand in leases.waiting.values()):
        return
    for key, demand in leases.waiting.items():
        if demand.allowed and not demand.rank and leases.has_room(demand) and leases.has_worker(demand):
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


@law("S-1", "what is used and granted fits the limit, but for what was written unasked", "Node")
def _store_keeps_its_limit(node: Node) -> Iterator[str]:
    store = node.store
    if store.used_bytes + store.granted_bytes > store.limit_bytes + store.unasked_bytes:
        yield f"used {store.used_bytes} + granted {store.granted_bytes} > {store.limit_bytes} + {store.unasked_bytes}"


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
        if entry.late and not entry.doomed:
            yield f"{name}: asked for while it was doomed, and forgotten"
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
    if store.asks and store.asks[0].size_bytes <= store.left_bytes:
        yield f"the first waits for {store.asks[0].size_bytes} bytes, {store.left_bytes} are free"


@law("P-1", "results that are being made have their room, and what is left of a step is counted", "Node")
def _posts_are_sound(node: Node) -> Iterator[str]:
    posts, store = node.posts, node.store
    made = [result for work in posts.works.values() for result in work.results.values()
            if result.state in ("granted", "open")]
    room, granted = sum(result.object_bytes for result in made), store.granted.get(node.desk.me, 0)
    if room > granted:
        yield f"results of {room} bytes are being made, with {granted} granted"
    for work in posts.works.values():
        if work.left < 0 or any(result.left < 0 for result in work.results.values()):
            yield f"{short(work.course.op)}: {work.left} pieces are left"
        if any(stop.under_way < 0 for stop in work.stops.values()):
            yield f"{short(work.course.op)}: more pieces ended than began"
    for peer, lane in posts.lanes.items():
        if len(lane.under_way) > LANE_PIECES_MAX:
            yield f"{len(lane.under_way)} pieces are on their way to {peer}"


@law("P-2", "what is kept for groups is counted", "Node")
def _kept_is_counted(node: Node) -> Iterator[str]:
    for group, known in node.posts.kept.groups.items():
        steps = known.steps.values()
        really = [sum(nbytes for _, nbytes in kept.objects.values()) + sum(kept.gifts.values())
                  + sum(len(blob) for blob in kept.blobs.values()) for kept in steps]
        if [kept.nbytes for kept in steps] != really or known.nbytes != sum(really):
            yield f"{short(group)}: {known.nbytes} bytes, really {sum(really)}"


# --- Head -----------------------------------------------------------------------------------------


law("N-11", "what is taken of a GPU is what leases and bundles have of it, and not more than there is", "Node")(shared)


law("N-10", "a bundle's amounts are on offer exactly while it is open; its CPU is lent at most once", "Node")(offered)


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
    for node_id, room in head.rooms.nodes.items():
        for name in room.total:
            free, total = room.free[name], room.total[name]
            if free > total or (free < 0 and name in room.static):
                yield f"{node_id}: {free / SCALE} of {total / SCALE} {plain(name)} is free"


@law("H-4", "no seeker waits while a node has room for it", "Head")
def _seekers_are_served(head: Head) -> Iterator[str]:
    slots = head.slots
    for key, seeker in slots.seekers.items():
        if seeker.node not in head.by_address:
            yield f"{key} belongs to no living node"
        elif slots.could_serve(seeker):
            yield f"{key} waits"
    grouped = {key: seeker for group in slots.groups.values() for key, seeker in group.seekers.items()}
    watched = [group for groups in slots.watched.values() for group in groups.values()]
    if grouped != slots.seekers or len(watched) != len(slots.groups):
        yield f"{len(slots.seekers)} seek, {len(grouped)} are in {len(slots.groups)} groups, {len(watched)} watched"


@law("H-5", "nobody is both a member and expected to come back", "Head")
def _expected_are_absent(head: Head) -> Iterator[str]:
    for node_id in head.expected:
        if node_id in head.members:
            yield node_id


@law("H-6", "what programs made is listed where it is, and living nodes have all of it that they should", "Head")
def _made_is_placed(head: Head) -> Iterator[str]:
    resources = head.resources
    under_way = resources.under_way()
    where: dict[str, dict[str, None]] = {}
    for key, made in resources.made.items():
        if made.place != EACH:
            where.setdefault(made.node, {})[key] = None
        if key not in resources.jobs.get(job_of(key), ()) or (made.place == EACH) != (key in resources.each):
            yield f"{plain(key)} is not listed"
        if made.place == ANY and made.node not in head.members and made.node not in head.expected and head.members:
            yield f"{plain(key)} is at {made.node or 'no node'}, which is dead"
        for node_id in resources.nodes_of(made) if key not in under_way else ():
            if head.rooms.nodes[node_id].total.get(key, 0) != made.given:
                yield f"{node_id} has {head.rooms.nodes[node_id].total.get(key, 0)} of {plain(key)}, not {made.given}"
    if {node_id: dict(keys) for node_id, keys in resources.at.items()} != where:
        yield f"listed at {sorted(resources.at)}, really at {sorted(where)}"
    for number, (_, _, places) in resources.undone.items():
        if not places or any(node_id not in head.members for node_id in places):
            yield f"order {number} waits for {sorted(places)}, of which one is not there"
    for node_id, room in head.rooms.nodes.items():
        for key, total in room.total.items():
            made_of = resources.made.get(key)
            right = made_of is not None and node_id in resources.nodes_of(made_of)
            if is_own(key) and total and not right and key not in under_way:
                yield f"{node_id} has {plain(key)}, which is not there"


@law("H-7", "nodes are found by each name that they have, and by those of which some is free", "Head")
def _rooms_are_indexed(head: Head) -> Iterator[str]:
    rooms = head.rooms
    if sorted(rooms.nodes) != sorted(head.members) or len(rooms.has[EVERY]) != len(rooms.nodes):
        yield f"rooms of {sorted(rooms.nodes)}"
    for which, index in (("total", rooms.has), ("free", rooms.open)):
        really = sorted((name, node_id) for node_id, room in rooms.nodes.items()
                        for name, units in getattr(room, which).items() if units > 0)
        listed = sorted((name, node_id) for name, nodes in index.items() if name != EVERY for node_id in nodes)
        if really != listed:
            yield f"{which}: listed {listed}, really {really}"


law("H-8", "a set of bundles waits exactly when one has no place, and all places are on living nodes", "Head")(placed)
law("H-9", "no node holds more open bundles than it has room for", "Head")(fitting)


# --- Owner: references ---------------------------------------------------------------------------------------------


@law("O-1", "an object is pinned as often as runs, containers, streams and confirmations under way need it", "Owner")
def _pins_are_counted(owner: Owner) -> Iterator[str]:
    pins: dict[bytes, int] = {}
    ended: list[Task] = []  # forgotten, but holding their inputs until an owner has confirmed a borrower
    for tasks in owner.unconfirmed.values():
        for task in tasks:
            if owner.tasks.get(task.spec.id) is not task and not any(task is other for other in ended):
                ended.append(task)
    ended += [task for task in kept_for_replay(owner) if not any(task is other for other in ended)]
    for task in (*owner.tasks.values(), *ended):
        if task.pinned:
            for obj in (*task.inputs, *task.nested):
                pins[obj.oid] = pins.get(obj.oid, 0) + 1
        if task.stream is not None and not task.stream.dropped:
            for index, obj in task.stream.items.items():
                if index >= task.stream.taken:
                    pins[obj.oid] = pins.get(obj.oid, 0) + 1
    for oid in (*(obj.oid for obj in owner.going_home), *owner.coming_home):
        pins[oid] = pins.get(oid, 0) + 1
    for ref in held_for_actors(owner):
        pins[ref.oid] = pins.get(ref.oid, 0) + 1
    for obj in owner.objects.values():
        if obj.via is not None:
            pins[obj.via.oid] = pins.get(obj.via.oid, 0) + 1
        if obj.value is not None and not obj.owner:
            for ref in obj.value.contained:
                pins[ref.oid] = pins.get(ref.oid, 0) + 1
    for oid, obj in owner.objects.items():
        if obj.pins != pins.get(oid, 0):
            yield f"{short(oid)}: pinned {obj.pins} times, really {pins.get(oid, 0)}"
    yield from (f"{short(oid)}: pinned and not known" for oid in pins if oid not in owner.objects)


def kept_for_replay(owner: Owner) -> Iterator[Task]:
    """Calls that are answered and forgotten, but may have to be sent again."""
    for target in owner.targets.values():
        for task in target.sent.values():
            if isinstance(task, Task) and owner.tasks.get(task.spec.id) is not task:
                yield task


def held_for_actors(owner: Owner) -> Iterator[RefTo]:
    """References that calls under way, calls of callers that are gone, and checkpoints hold."""
    for task in owner.tasks.values():
        if task.spec.actor is not None and task.state not in ENDED:
            yield task.spec.actor
    for made in owner.made.values():
        for push in made.kept_calls.values():
            yield from held_by(push)
        for checkpoint in (made.checkpoint, made.fallback):
            yield from checkpoint.value.contained if checkpoint is not None else ()


@law("O-2", "an object is held as lineage as often as tasks would need it to run again", "Owner")
def _lineage_is_counted(owner: Owner) -> Iterator[str]:
    lineage: dict[bytes, int] = {}
    wards: dict[bytes, int] = {}
    for task in owner.tasks.values():
        if task.lineage:
            for obj in (*task.inputs, *task.nested):
                lineage[obj.oid] = lineage.get(obj.oid, 0) + 1
    for oid, obj in owner.objects.items():
        if obj.lineage != lineage.get(oid, 0):
            yield f"{short(oid)}: held {obj.lineage} times, really {lineage.get(oid, 0)}"
        if obj.owner and obj.task is not None:
            wards[obj.task.spec.id] = wards.get(obj.task.spec.id, 0) + 1
            if owner.tasks.get(obj.task.spec.id) is not obj.task:
                yield f"{short(oid)}: its parent task is forgotten"
    for task_id, task in owner.tasks.items():
        if task.wards != wards.get(task_id, 0):
            yield f"{task.spec.name}: {task.wards} wards, really {wards.get(task_id, 0)}"


@law("O-3", "nothing is kept that nobody needs", "Owner")
def _nothing_is_left_over(owner: Owner) -> Iterator[str]:
    for oid, obj in owner.objects.items():
        task = obj.task
        under_way = not obj.owner and task is not None and task.state not in ENDED
        borrowed = any(count > 0 for count in (obj.borrowers or {}).values())
        if obj.local <= 0 and obj.pins <= 0 and not borrowed and obj.lineage <= 0 and not under_way:
            yield f"{short(oid)} is kept for nobody"
        if obj.oid != oid:
            yield f"{short(oid)} is listed as {short(obj.oid)}"
    for peer, held in owner.borrowed_by.items():
        for oid, obj in held.items():
            if owner.objects.get(oid) is obj and peer not in (obj.borrowers or ()):
                yield f"{short(oid)} is listed under {peer}, which is no borrower"


@law("O-4", "who waits for a value waits for something that is under way", "Owner")
def _who_waits_has_hope(owner: Owner) -> Iterator[str]:
    for oid, obj in owner.objects.items():
        if obj.value is not None or not (obj.waiters or obj.dependents or obj.watchers):
            continue
        task = obj.task
        if task is not None and task.state not in ENDED:
            continue
        if obj.owner and obj.watched and obj.owner not in owner.dead:
            continue
        if oid in owner.expected or oid in owner.promised:
            continue
        if not obj.durable:
            yield f"{short(oid)} is awaited, owner {obj.owner or 'here'}, task {task and task.state.name}"
    for number, waiter in owner.waiters.items():
        if waiter.missing <= 0:
            yield f"waiter {number} waits for nothing"


# --- Owner: tasks and slots ----------------------------------------------------------------------------------------


@law("O-5", "a task is on a lease exactly when it is sent", "Owner")
def _sent_is_on_a_lease(owner: Owner) -> Iterator[str]:
    for task in owner.tasks.values():
        if task.spec.actor is not None:
            continue
        lease = task.lease
        if (lease is not None) != (task.state is State.SENT):
            yield f"{task.spec.name} is {task.state.name}, on a lease: {lease is not None}"
        elif lease is not None and lease.inflight.get(task.spec.id) is not task:
            yield f"{task.spec.name} is not listed by its lease"
    for (node, number), lease in owner.leases.items():
        for task in lease.inflight.values():
            if task.lease is not lease:
                yield f"lease {number} of {node} lists {task.spec.name}, which is elsewhere"


@law("O-6", "a queue holds the tasks that are ready, and counts them", "Owner")
def _queues_hold_the_ready(owner: Owner) -> Iterator[str]:
    ready = 0
    for queue in owner.queues.values():
        tasks = [task for line in queue.ready.values() for task in line]
        tasks += [task for line in queue.tenants.values() for ready in line.ready.values() for task in ready]
        ready += len(tasks)
        if queue.count != len(tasks):
            yield f"{queue.key}: counts {queue.count}, holds {len(tasks)}"
        wrong = [task for task in tasks if task.state is not State.READY]
        yield from (f"{task.spec.name} is queued and {task.state.name}" for task in wrong)
    really = sum(task.state is State.READY for task in owner.tasks.values() if task.spec.actor is None)
    if really != ready:
        yield f"{really} tasks are ready, {ready} are queued"


@law("O-7", "a waiting task lacks an input, which knows it", "Owner")
def _waiting_lacks_an_input(owner: Owner) -> Iterator[str]:
    for task in owner.tasks.values():
        if task.state is State.WAITING and not any(
            obj.value is None and obj.dependents is not None and task in obj.dependents for obj in task.inputs
        ):
            yield f"{task.spec.name} waits for no input"


@law("O-8", "leases are listed once, and in the rotation exactly while they take more", "Owner")
def _rotation_is_right(owner: Owner) -> Iterator[str]:
    for queue in owner.queues.values():
        times = Counter([(lease.node, lease.id) for lease in queue.rotation])
        for key, lease in queue.leases.items():
            if owner.leases.get(key) is not lease or lease.queue is not queue:
                yield f"lease {key} is not known"
            if times[key] != lease.open:
                yield f"lease {key}: open {lease.open}, {times[key]} times in the rotation"
        if len(queue.rotation) != sum(lease.open for lease in queue.leases.values()):
            yield f"{queue.key}: {len(queue.rotation)} in the rotation"
        if any(not lease.inflight for lease in queue.leases.values()) and not queue.idle_timer:
            yield f"{queue.key}: an idle lease is not looked after"
    if len(owner.leases) != sum(len(queue.leases) for queue in owner.queues.values()):
        yield f"{len(owner.leases)} leases, of which some are in no queue"


@law("O-9", "what is ready and cannot be pushed is asked for", "Owner")
def _ready_is_asked_for(owner: Owner) -> Iterator[str]:
    if owner.node in owner.dead:
        return  # its supervisor will name the next one
    for queue in owner.queues.values():
        outstanding = sum(demand.outstanding for demand in queue.demand.values())
        if queue.count and not outstanding:
            yield f"{queue.key}: {queue.count} are ready and nothing is asked for"
        if not queue.count and outstanding:
            yield f"{queue.key}: {outstanding} slots are asked for and nothing is ready"


@law("O-10", "a function is used by as many tasks as name it", "Owner")
def _functions_are_counted(owner: Owner) -> Iterator[str]:
    users: dict[bytes, int] = {}
    for task in owner.tasks.values():
        if task.spec.actor is None:
            users[task.spec.function] = users.get(task.spec.function, 0) + 1
    if users != owner.functions.users:
        yield f"{len(users)} functions in use, {len(owner.functions.users)} counted"


# --- Executor ------------------------------------------------------------------------------------------------------


@law("E-1", "nothing is queued while nothing runs, or while what runs waits in get", "Executor")
def _queue_is_behind_work(executor: Executor) -> Iterator[str]:
    if executor.queue and (executor.running is None or executor.blocked > 0):
        yield f"{len(executor.queue)} queued, blocked {executor.blocked}, running {executor.running is not None}"
    if executor.running is None and executor.blocked:
        yield f"nothing runs and it waits {executor.blocked} times"
    if executor.blocked < 0:
        yield f"blocked {executor.blocked}"


@law("E-2", "nothing is queued for an owner that is gone", "Executor")
def _queue_is_for_the_living(executor: Executor) -> Iterator[str]:
    for task, item in executor.queue.items():
        if item.caller in executor.gone:
            yield f"{short(task)} is for {item.caller}"
        if task != item.push.spec.id:
            yield f"{short(task)} is listed wrongly"


@law("E-3", "the last results are counted and bounded", "Executor")
def _recent_is_counted(executor: Executor) -> Iterator[str]:
    really = sum(size_of(value) for value in executor.recent.values())
    if executor.recent_bytes != really:
        yield f"{executor.recent_bytes} bytes, really {really}"
    if really > RECENT_BYTES_MAX or len(executor.recent) > RECENT_MAX:
        yield f"{len(executor.recent)} results of {really} bytes"
