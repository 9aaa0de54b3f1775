"""Two scenes in which processes are killed at named points, and the judges of what became of the calls in them."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import flowengine as flow

CALLS = 8  # of each caller
LARGE = 40_000  # numbers: a value that goes to the store
PATIENCE_S = 60.0
Entry = tuple[str, int]

# Where a process is killed: a named point, and who passes it (the counter or the task that calls it).
PLACES: tuple[tuple[str, str], ...] = (
    ("task.before_run", "caller"),
    ("task.after_run", "caller"),
    ("task.reply.before_send", "caller"),
    ("object.before_seal", "caller"),
    ("object.after_seal", "caller"),
    ("object.before_seal", "counter"),
    ("object.after_seal", "counter"),
    ("actor.constructor.before_run", "counter"),
    ("actor.restored", "counter"),
    ("actor.replay.before_call", "counter"),
    ("actor.call.before_run", "counter"),
    ("actor.call.after_run", "counter"),
    ("actor.reply.before_send", "counter"),
    ("actor.checkpoint.before_write", "counter"),
    ("actor.checkpoint.after_write", "counter"),
    ("actor.restored", "relay"),
    ("actor.replay.before_call", "relay"),
    ("actor.call.before_run", "relay"),
    ("actor.reply.before_send", "relay"),
)
RING_PLACES: tuple[tuple[str, str], ...] = tuple(
    (point, who)
    for who in ("first", "second")
    for point in (
        "actor.constructor.before_run", "actor.restored", "actor.replay.before_call", "actor.call.before_run",
        "actor.call.after_run", "actor.reply.before_send", "actor.checkpoint.before_write",
        "actor.checkpoint.after_write",
    )
)  # fmt: skip
BIRTH = "actor.constructor.before_run"
CLASSES = {"counter": "Counter", "relay": "Relay", "first": "Member", "second": "Member"}
AFTER_A_DEATH = ("actor.restored", "actor.replay.before_call")  # points that only a new process passes
Place = tuple[str, str, int]  # point, who passes it, which passage


@flow.remote(checkpoint=5)
class Counter:
    """Its state is the list of its calls, and each reply is the whole list so far."""

    def __init__(self) -> None:
        self.calls: list[Entry] = []

    def add(self, caller: str, number: int) -> list[Entry]:
        self.calls.append((caller, number))
        return list(self.calls)

    def add_large(self, caller: str, number: int) -> tuple[list[Entry], np.ndarray]:
        return self.add(caller, number), np.zeros(LARGE)


@flow.remote(checkpoint=5)
class Relay:
    """An actor that calls the counter."""

    def __init__(self, counter: flow.ActorHandle) -> None:
        self.counter = counter

    def add(self, number: int) -> list[Entry]:
        return flow.get(self.counter.add.remote("relay", number))


@flow.remote
def caller(counter: flow.ActorHandle) -> tuple[list[list[Entry]], np.ndarray]:
    """A task that calls the counter, one call after the other; its result goes to the store."""
    return [flow.get(counter.add.remote("task", number)) for number in range(CALLS)], np.zeros(LARGE)


@flow.remote(checkpoint=4)
class Member:
    """One of a ring: it notes each token that passes and sends it on."""

    def __init__(self) -> None:
        self.passed: list[Entry] = []
        self.next: flow.ActorHandle | None = None

    def follow(self, member: flow.ActorHandle) -> None:
        self.next = member

    def take(self, token: str, hops: int) -> list[Entry]:
        self.passed.append((token, hops))
        if hops and self.next is not None:
            self.next.take.remote(token, hops - 1)
        return list(self.passed)

    def all(self) -> list[Entry]:
        return list(self.passed)


@dataclass
class Outcome:
    """What a scene has shown."""

    armed: tuple[Place, ...]
    fired: tuple[bool, ...]  # for each of them
    took_s: float
    faults: list[str]

    def __str__(self) -> str:
        shown = [f"{point} of {who} #{nth}{'' if fired else ' (not passed)'}"
                 for (point, who, nth), fired in zip(self.armed, self.fired, strict=True)]
        return "; ".join([f"{self.took_s:.2f} s: {', '.join(shown)}", *self.faults])


def play(places: list[Place]) -> Outcome:
    """Arm the places, have 25 calls of one counter made by the program, a task and an actor, and judge its history."""

    def make() -> dict[str, Any]:
        counter = Counter.remote()
        return {"counter": counter, "relay": Relay.remote(counter), "caller": caller}

    def calls(who: dict[str, Any]) -> list[str]:
        counter, relay = who["counter"], who["relay"]
        seen: list[list[Entry]] = []
        refs = [counter.add.remote("program", number) for number in range(2)]
        task = caller.remote(counter)
        relayed = [relay.add.remote(number) for number in range(CALLS)]
        refs += [counter.add.remote("program", number) for number in range(2, CALLS - 2)]
        large = counter.add_large.remote("program", CALLS - 2)
        seen += flow.get([*refs, *relayed], timeout=PATIENCE_S)
        seen += flow.get(task, timeout=PATIENCE_S)[0]
        seen.append(flow.get(large, timeout=PATIENCE_S)[0])
        seen.append(flow.get(counter.add.remote("program", CALLS - 1), timeout=PATIENCE_S))
        return wrong(flow.get(counter.add.remote("end", 0), timeout=PATIENCE_S), seen)

    return staged(places, make, calls)


def play_ring(places: list[Place]) -> Outcome:
    """Arm the places, send four tokens six hops around a ring of three actors, and judge what each has noted."""

    def make() -> dict[str, Any]:
        return {name: Member.remote() for name in ("first", "second", "third")}

    def calls(who: dict[str, Any]) -> list[str]:
        members = list(who.values())
        flow.get([member.follow.remote(members[at - 2]) for at, member in enumerate(members)], timeout=PATIENCE_S)
        tokens = "abcd"
        told = flow.get([members[0].take.remote(token, 6) for token in tokens], timeout=PATIENCE_S)
        wanted = [sorted(itertools.product(tokens, range(6 - at, -1, -3))) for at in range(3)]
        seen: list[list[list[Entry]]] = [told, [], []]
        end = time.monotonic() + PATIENCE_S
        while True:
            looks = flow.get([member.all.remote() for member in members], timeout=PATIENCE_S)
            for look, before in zip(looks, seen, strict=True):
                if look not in before:
                    before.append(look)
            if all(len(look) >= len(row) for look, row in zip(looks, wanted, strict=True)) or time.monotonic() > end:
                break
        faults = []
        for look, before, row in zip(looks, seen, wanted, strict=True):
            faults += judged(look, before, row)
            hops = [[left for name, left in look if name == token] for token in tokens]
            faults += [f"a token went round in the order {row}" for row in hops if row != sorted(row, reverse=True)]
        return faults

    return staged(places, make, calls)


def staged(
    places: list[Place], make: Callable[[], dict[str, Any]], calls: Callable[[dict[str, Any]], list[str]]
) -> Outcome:
    """Run the calls with the places armed; a place that only a new process passes gets a death before it."""
    began = time.monotonic()
    late = [name for point, name, _ in places if point in AFTER_A_DEATH and len(places) <= 2]
    first_deaths = {name: ("actor.call.after_run", name, 7) for name in late}
    armed = [*places, *(place for place in first_deaths.values() if place not in places)]
    early = [place for place in armed if place[0] == BIRTH]  # passed before there is a handle: by the name of the class
    armed = [*early, *(place for place in armed if place[0] != BIRTH)]
    arms = [flow.chaos.at(point, flow.chaos.kill, of=CLASSES[name], nth=nth) for point, name, nth in early]
    who = make()
    arms += [flow.chaos.at(point, flow.chaos.kill, of=who[name], nth=nth) for point, name, nth in armed[len(early):]]
    try:
        faults = calls(who)
    except flow.FlowError as error:
        faults = [f"{type(error).__name__}: {error}"[:2000]]
    fired = tuple(arm.fired for arm in arms)
    for arm in arms:
        arm.disarm()
    for actor in who.values():
        if isinstance(actor, flow.ActorHandle):
            flow.kill(actor)  # those of a ring hold each other's handles
    return Outcome(tuple(armed), fired, time.monotonic() - began, faults)


def wrong(final: list[Entry], seen: list[list[Entry]]) -> list[str]:
    """Faults in the history of the counter."""
    callers = ("program", "task", "relay")
    faults = judged(final, seen, sorted([*itertools.product(callers, range(CALLS)), ("end", 0)]))
    if len({len(reply) for reply in seen}) != len(seen):
        faults.append("two calls were told the same place")
    for name in callers:
        numbers = [number for caller, number in final if caller == name]
        if numbers != sorted(numbers):
            faults.append(f"calls of {name} are out of order: {numbers}")
    return faults


def judged(final: list[Entry], seen: list[list[Entry]], wanted: list[Entry]) -> list[str]:
    """How a history is not that of one run in which each call was done once and all saw a beginning of it."""
    faults = []
    if sorted(final) != wanted:
        faults.append(f"the calls that were done: {final}")
    faults += [f"a reply {reply} is not a beginning of {final}" for reply in seen if final[: len(reply)] != reply]
    return faults


def pairs(places: tuple[tuple[str, str], ...], nths: tuple[int, ...]) -> list[list[Place]]:
    """Every single place, and every ordered pair of places, the second at each of these passages."""
    alone = [[(*place, nth)] for place in places for nth in nths]
    both = [[(*first, 1), (*second, nth)] for first, second in itertools.product(places, repeat=2) for nth in nths]
    return [*alone, *both]


def storm(places: tuple[tuple[str, str], ...], seed: int) -> list[Place]:
    """Two places of each kind of process at random passages; a third death in the same call would end an actor."""
    chance = random.Random(seed)
    kinds = {who: [place for place in places if place[1] == who] for _, who in places}
    return [(*place, chance.randint(1, 7)) for own in kinds.values() for place in chance.sample(own, 2)]
