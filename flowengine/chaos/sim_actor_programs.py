"""Programs with actors, as data: who makes them, who calls them, and which calls call others.

An actor has a rank, and calls only those of a higher rank, so that no two wait for each other.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import msgspec

from .sim_programs import Body, Op
from .sim_settings import Scenario

STORED_BYTES = 500
CHECKPOINTS = ("1", "3", "never", "adaptive")


class Handle(NamedTuple):
    """The name of a handle in the code at hand, and the actor's rank."""

    name: str
    rank: int


class ActorWriter:
    """Draws a program."""

    def __init__(self, dice: Random, scenario: Scenario) -> None:
        self.dice = dice
        self.scenario = scenario
        self.number = 0
        self.ranks = 0

    def program(self) -> Body:
        """A driver's code: it reads all histories when all is done."""
        dice = self.dice
        ops: list[Op] = []
        handles = [self.actor(f"a{index}", ops) for index in range(dice.randrange(1, self.scenario.actors + 1))]
        handles += self.steps(ops, handles, self.scenario.tasks, 0)
        self.looks(ops, handles)
        return self.body(ops)

    def body(self, ops: list[Op], deps: int = 0, size_bytes: int = 10, refs: tuple[str, ...] = ()) -> Body:
        self.number += 1
        run_s = self.dice.random() * 2 * self.scenario.run_s
        return Body(self.number, tuple(ops), run_s, deps=deps, size_bytes=size_bytes, refs=refs)

    def size(self) -> int:
        """Of a task's result."""
        return STORED_BYTES if self.scenario.stored and self.dice.random() < self.scenario.stored else 10

    def actor(self, name: str, ops: list[Op], arguments: float = 0.0) -> Handle:
        """The code makes an actor; arguments: how often its constructor gets the result of a task."""
        names: tuple[str, ...] = ()
        if arguments and self.dice.random() < arguments:
            names = (f"{name}.arg",)
            ops.append(Op("call", names[0], body=self.body([], 0, self.size())))
        ops.append(Op("actor", name, names, number=self.dice.randrange(len(CHECKPOINTS))))
        self.ranks += 1
        return Handle(name, self.ranks)

    def looks(self, ops: list[Op], handles: list[Handle]) -> None:
        """The code reads histories."""
        names = tuple(f"l{len(ops)}.{handle.name}" for handle in handles)
        ops += [Op("look", name, (handle.name,)) for name, handle in zip(names, handles, strict=True)]
        ops.append(Op("replies", names=names))

    def steps(self, ops: list[Op], given: list[Handle], budget: int, depth: int) -> list[Handle]:
        """Calls, tasks that call, waits, until nothing is left to wait for; gives handles that tasks have given."""
        dice = self.dice
        handles = list(given)
        results: list[str] = []
        tasks: list[str] = []
        promised: list[Handle] = []  # by the names of tasks that give handles
        for _ in range(budget):
            name, kind = f"x{len(ops)}", dice.random()
            if promised and dice.random() < 0.3:
                handles.append(self.redeem(ops, promised.pop()))
            if kind < 0.2 and depth < self.scenario.depth:
                op, gift = self.task(name, handles, depth)
                ops.append(op)
                if gift is not None:
                    promised.append(gift)
                else:
                    tasks.append(name)
            elif kind < 0.3 and results:
                names = tuple(dice.sample(results, dice.randrange(1, len(results) + 1)))
                ops.append(Op("replies", names=names))
                results = [name for name in results if name not in names]
            elif kind < 0.4:
                ops.append(Op("sleep", seconds=dice.random() * self.scenario.run_s))
            elif kind < 0.45:
                self.looks(ops, dice.sample(handles, 1))
            else:
                ops.append(self.act(name, handles, tasks))
                if dice.random() < self.scenario.unread:
                    ops[-1] = msgspec.structs.replace(ops[-1], flag=True)
                else:
                    results.append(name)
        dice.shuffle(results)
        if results:
            ops.append(Op("replies", names=tuple(results)))
        if tasks:
            ops.append(Op("get", names=tuple(tasks)))
        handles += [self.redeem(ops, gift) for gift in promised]
        return handles[len(given) :]

    def redeem(self, ops: list[Op], gift: Handle) -> Handle:
        """Wait for a task that gives the handle of an actor."""
        name = f"h{len(ops)}"
        ops.append(Op("handle", name, (gift.name,)))
        return Handle(name, gift.rank)

    def act(self, name: str, handles: list[Handle], tasks: list[str]) -> Op:
        """A call; handles of higher rank may go with it, and its code calls them."""
        dice = self.dice
        target = dice.choice(handles)
        higher = [handle for handle in handles if handle.rank > target.rank]
        given = dice.sample(higher, dice.randrange(len(higher) + 1))
        deps = tuple(dice.sample(tasks, 1)) if tasks and dice.random() < 0.3 else ()
        ops: list[Op] = []
        if self.scenario.own_actors and dice.random() < self.scenario.own_actors / 8:
            own = [self.actor("own", ops)]
            ops.append(self.act("y", own, []))
            ops.append(Op("replies", names=("y",)))
            self.looks(ops, own)
        if given:
            inner = [Handle(f"n{index}", handle.rank) for index, handle in enumerate(given)]
            names = [f"y{index}" for index in range(dice.randrange(1, 3))]
            ops += [self.act(inner_name, inner, []) for inner_name in names]
            ops.append(Op("replies", names=tuple(names)))
        nested = tuple(handle.name for handle in given)
        return Op("act", name, (target.name, *deps), nested, self.body(ops, len(deps)))

    def task(self, name: str, handles: list[Handle], depth: int) -> tuple[Op, Handle | None]:
        """A task that gets handles and calls; now and then it makes an actor of its own, and may give its handle."""
        dice = self.dice
        given = dice.sample(handles, dice.randrange(1, len(handles) + 1))
        inner = [handle._replace(name=f"n{index}") for index, handle in enumerate(given)]
        ops: list[Op] = []
        own: list[Handle] = []
        if dice.random() < self.scenario.own_actors:
            own.append(self.actor("own", ops, 0.5))
        gift = Handle(name, own[0].rank) if own and dice.random() < 0.5 else None
        own += self.steps(ops, [*inner, *own], dice.randrange(1, 5), depth + 1)
        if own:
            self.looks(ops, own)
        body = self.body(ops, 0, self.size(), ("own",) if gift is not None else ())
        return Op("call", name, (), tuple(handle.name for handle in given), body), gift
