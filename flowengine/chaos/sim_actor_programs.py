"""Programs with actors, as data: who makes them, who calls them, and which calls call others.

An actor has a rank, and calls only those of a higher rank, so that no two wait for each other.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import msgspec

from .sim_programs import Body, Op
from .sim_settings import Scenario

CHECKPOINTS = ("1", "3", "never", "adaptive")


class Handle(NamedTuple):
    """The name of a handle in the code at hand, and the actor's rank."""

    name: str
    rank: int
    lasting: bool = True  # its maker lives as long as the program


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
        self.steps(ops, handles, self.scenario.tasks, 0)
        self.looks(ops, handles)
        return self.body(ops)

    def body(self, ops: list[Op], deps: int = 0) -> Body:
        self.number += 1
        run_s = self.dice.random() * 2 * self.scenario.run_s
        return Body(self.number, tuple(ops), run_s, deps=deps)

    def actor(self, name: str, ops: list[Op]) -> Handle:
        """The code makes an actor."""
        ops.append(Op("actor", name, number=self.dice.randrange(len(CHECKPOINTS))))
        self.ranks += 1
        return Handle(name, self.ranks)

    def looks(self, ops: list[Op], handles: list[Handle]) -> None:
        """The code reads histories."""
        names = tuple(f"l{len(ops)}.{handle.name}" for handle in handles)
        ops += [Op("look", name, (handle.name,)) for name, handle in zip(names, handles, strict=True)]
        ops.append(Op("replies", names=names))

    def steps(self, ops: list[Op], handles: list[Handle], budget: int, depth: int) -> None:
        """Calls, tasks that call, waits; in the end nothing is left to wait for."""
        dice = self.dice
        results: list[str] = []
        tasks: list[str] = []
        for _ in range(budget):
            name, kind = f"x{len(ops)}", dice.random()
            if kind < 0.2 and depth < self.scenario.depth:
                ops.append(self.task(name, handles, depth))
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

    def act(self, name: str, handles: list[Handle], tasks: list[str]) -> Op:
        """A call; handles of higher rank may go with it, and its code calls them."""
        dice = self.dice
        target = dice.choice(handles)
        higher = [handle for handle in handles if handle.lasting and handle.rank > target.rank]
        given = dice.sample(higher, dice.randrange(len(higher) + 1))
        deps = tuple(dice.sample(tasks, 1)) if tasks and dice.random() < 0.3 else ()
        ops: list[Op] = []
        if given:
            inner = [Handle(f"n{index}", handle.rank) for index, handle in enumerate(given)]
            names = [f"y{index}" for index in range(dice.randrange(1, 3))]
            ops += [self.act(inner_name, inner, []) for inner_name in names]
            ops.append(Op("replies", names=tuple(names)))
        nested = tuple(handle.name for handle in given)
        return Op("act", name, (target.name, *deps), nested, self.body(ops, len(deps)))

    def task(self, name: str, handles: list[Handle], depth: int) -> Op:
        """A task that gets handles and calls; now and then it makes an actor of its own."""
        dice = self.dice
        given = dice.sample(handles, dice.randrange(1, len(handles) + 1))
        inner = [handle._replace(name=f"n{index}") for index, handle in enumerate(given)]
        ops: list[Op] = []
        own: list[Handle] = []
        if dice.random() < self.scenario.own_actors:
            own.append(self.actor("own", ops)._replace(lasting=False))
        self.steps(ops, [*inner, *own], dice.randrange(1, 5), depth + 1)
        if own:
            self.looks(ops, own)
        return Op("call", name, (), tuple(handle.name for handle in given), self.body(ops))
