"""What must be true of a run, judged from outside of the machines: its result, its end, and that nothing is left."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING

from flowengine.core.ids import short
from flowengine.core.invariants import check as laws_of

from .sim_actors import ActorBook, MadeCall, digest_of
from .sim_programs import expected

if TYPE_CHECKING:
    from .sim_process import Process
    from .sim_world import World


def wrong_outcome(world: World) -> list[str]:
    """Lines about a driver's result that is not the one that its program must give."""
    outcome, wanted = world.driver.outcome, expected(world.program)
    if outcome == wanted:
        return []
    if outcome is None:
        return ["the program did not end", *stuck(world)]
    text = str(outcome)
    if isinstance(wanted, str) and text.startswith("error "):
        return []  # of several inputs that are errors, the one that comes first counts
    if world.scenario.actors and "times in the call" in text:
        return []  # a call in which its actor dies again and again is not tried for ever
    if world.put_lost and "an argument of its constructor is lost" in text:
        return []  # its maker had died, and so has its store
    if world.put_lost and not world.scenario.actors and ("is gone" in text or "lost" in text):
        return []  # a value that was only put may die with its store
    return [f"the program gave {text[:600]}, it must give {wanted}"]


def wrong_actors(world: World) -> list[str]:
    """Lines about actors whose history is not that of one sequential run in which each call was done exactly once.

    Each caller's calls are in the order in which it made them, and what anybody saw is a part of the history. An actor
    may be made again only by a maker that had come to its end, whose calls are then all done again.
    """
    book = world.actors
    if type(world.driver.outcome) is not int:
        return []  # the program ended before all was done
    lines = [f"actor {short(actor)} was made again before its maker had ended" for actor in book.too_early]
    calls: dict[bytes, list[tuple[bytes, MadeCall]]] = {}
    for call, made in book.made.items():
        calls.setdefault(made.actor, []).append((call, made))
    looks = book.looks
    places: dict[bytes, int] = {}  # where a call came among those of its actor, in the longest of its lives
    for lives in book.lives.values():
        longest = max((look for life in lives for look in looks.get(life, ())), key=len, default=())
        places.update({call: place for place, call in enumerate(longest)})
    done = dict.fromkeys([*places, *(call for look in book.unsure for call in look.history)])
    for actor, lives in book.lives.items():
        made_calls = calls.get(actor, [])
        seen = [life for life in lives if life in looks]
        wrong = [f"calls of {short(caller)} are out of order" for caller in out_of_order(made_calls, places)]
        wrong += [
            f"call {short(call)} was never done"
            for call, _ in made_calls if seen and call not in done and is_awaited(book, call)
        ]  # fmt: skip
        for life in seen:
            wrong += wrong_life(book, (life, looks[life]), made_calls, len(lives) == 1 and book.is_whole(life))
        lines += [f"actor {short(actor)}: {line}" for line in wrong]
    return lines


def wrong_life(
    book: ActorBook, read: tuple[bytes, list[tuple[bytes, ...]]], made: list[tuple[bytes, MadeCall]], whole: bool
) -> list[str]:
    """What is wrong with an actor's history from its beginning to its end; whole: its end was waited for."""
    life, looks = read
    history = looks[-1] if whole else max(looks, key=len)
    calls, places = dict.fromkeys(history), {call: place for place, call in enumerate(history)}
    lines = [f"{len(history) - len(calls)} calls were done twice"] if len(calls) != len(history) else []
    known = dict.fromkeys(call for call, _ in made)
    if any(call not in known for call in history):
        lines.append("it did calls that nobody made")
    lines += [
        f"somebody read {len(seen)} calls that are not a beginning of its history"
        for seen in looks if seen != history[: len(seen)]
    ]  # fmt: skip
    digests = [digest_of(list(history[: place + 1])) for place in range(len(history))]
    for reply in book.replies:
        unseen = reply.position >= len(history) and not (whole and is_awaited(book, reply.call))
        if reply.life == life and not unseen:
            place = places.get(reply.call)
            if place != reply.position or digests[reply.position] != reply.digest:
                lines.append(f"call {short(reply.call)} was told place {reply.position}, it has {place}")
    return lines


def is_awaited(book: ActorBook, call: bytes) -> bool:
    """Whether the program does not end before the call does."""
    made = book.made.get(call)
    while made is not None:
        if not made.awaited:
            return False
        made = book.made.get(made.parent)
    return True


def out_of_order(calls: list[tuple[bytes, MadeCall]], places: dict[bytes, int]) -> list[bytes]:
    """Callers whose calls were not done in the order in which they were made."""
    rows: dict[bytes, list[tuple[int, int, int]]] = {}
    for call, made in calls:
        if call in places:
            rows.setdefault(made.caller, []).append((places.get(made.parent, -1), made.number, places[call]))
    wrong = []
    for caller, row in rows.items():
        order = [place for _, _, place in sorted(row)]
        if order != sorted(order):
            wrong.append(caller)
    return wrong


def stuck(world: World) -> list[str]:
    """What each process waits for."""
    lines = []
    for process in (world.driver, *world.workers.values()):
        owner = process.owner
        for thread in process.waits.values():
            lines.append(f"{process.address}: a thread waits for {thread.wait}")
        lines += [f"{process.address} fetches {owner.why(oid)}" for oid, obj in owner.objects.items() if obj.fetchers]
        for waiter in owner.waiters.values():
            lines += [f"{process.address} waits: {owner.why(obj.oid)}" for obj in waiter.objects if obj.value is None]
        lines += [f"{process.address}: {owner.why_task(task)}" for task in owner.tasks.values() if task.state < 3]
        if process.executor is not None and process.executor.running is not None:
            lines.append(f"{process.address} runs {short(process.executor.running.push.spec.id)}")
    return lines[:40]


def left_over(world: World) -> list[str]:
    """What is still there though nobody refers to anything."""
    lines = []
    for process in (world.driver, *world.workers.values()):
        lines += [f"{process.address}: {line}" for line in left_in(process)]
    for node in world.nodes.values():
        if not node.alive:
            continue
        store, leases = node.machine.store, node.machine.leases
        books = {
            "objects": len(store.entries), "granted bytes": store.granted_bytes, "used bytes": store.used_bytes,
            "asks": len(store.asks), "leases": len(leases.leases), "waiting demands": len(leases.waiting),
            # What a worker sealed and did not come to tell of is not known to any machine.
            "bundles": len(node.machine.bundles.held), "wanted gangs": len(node.machine.bundles.wants),
            "segments": sum(node.writers[oid] in world.workers for oid in node.memory), "files": len(node.disk),
        }
        lines += [f"{node.address}: {count} {what}" for what, count in books.items() if count]
        if leases.ledger.available() != leases.ledger.total():
            lines.append(f"{node.address}: only {leases.ledger.available()} free")
        states = [worker.state for worker in node.machine.desk.workers.values()]
        if any(state != "idle" for state in states):
            lines.append(f"{node.address}: workers {states}")
        lines += laws_of(node.machine)
    lines += [f"the head has {group}" for group in world.head.machine.bundles.groups]
    return [*lines, *laws_of(world.head.machine)]


def left_in(process: Process) -> list[str]:
    """What the machines of a process still hold."""
    owner = process.owner
    lines = [
        f"object {owner.why(oid)}: local {obj.local}, pins {obj.pins}, lineage {obj.lineage}, "
        f"borrowers {obj.borrowers}, owner {obj.owner!r}, via {obj.via is not None}"
        for oid, obj in owner.objects.items()
    ]
    lines += [f"task {owner.why_task(task)}" for task in owner.tasks.values()]
    books: dict[str, Sized] = {
        "waiters": owner.waiters, "leases": owner.leases, "unannounced": owner.unannounced, "parents": owner.parents,
        "left children": owner.left_children, "unconfirmed": owner.unconfirmed, "fetch errors": owner.fetch_errors,
        "wanted gangs": [gang for gang in owner.gangs.values() if gang.wanted],
        "actors": owner.made, "actors called": owner.targets,
        "ending": owner.ending, "waits of threads": process.waits, "functions in use": owner.functions.users,
    }
    borrowed = {peer: held for peer, held in owner.borrowed_by.items() if held}
    lines += [f"{len(book)} {what}" for what, book in books.items() if book]
    lines += [f"borrowed by {peer}: {len(held)}" for peer, held in borrowed.items()]
    lines += [f"{queue.count} tasks queued" for queue in owner.queues.values() if queue.count]
    if process.executor is not None and (process.executor.running is not None or process.executor.queue):
        lines.append("the executor has work")
    return [*lines, *laws_of(owner)]
