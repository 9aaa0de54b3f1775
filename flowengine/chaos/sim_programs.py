"""Programs as data: what user code does, drawn from a seed, and what each must give, worked out without the engine.

A value is a number and references. The number of a task is a hash of its own number and of all that it got, so a
wrong, missing or doubled input shows in the driver's result.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from .sim_settings import Scenario

STREAM = -1
PRIME = (1 << 61) - 1


def mix(first: int, second: int) -> int:
    """A number in which both show, and their order."""
    return (first * 1_000_003 + second + 12_345) % PRIME


class Op(msgspec.Struct, frozen=True):
    """One step of user code; kind is the name of a method of sim_code.Code (do_KIND) and of Oracle."""

    kind: str
    name: str = ""  # of what is made, or used
    names: tuple[str, ...] = ()  # of references
    nested: tuple[str, ...] = ()  # references passed inside of arguments
    body: Body | None = None
    number: int = 0  # a value, or how many
    size_bytes: int = 0
    seconds: float = 0.0
    flag: bool = False
    asks: tuple[tuple[str, float], ...] = ()  # resources that a task needs besides its CPU


class Body(msgspec.Struct, frozen=True):
    """The code of a task: its steps, then what it gives."""

    number: int
    ops: tuple[Op, ...] = ()
    run_s: float = 0.01
    size_bytes: int = 10
    refs: tuple[str, ...] = ()  # references in the result
    error: bool = False
    items: int = STREAM  # of a stream; STREAM: it is none
    retries: int = -1
    deps: int = 0  # how many dependencies and nested references the code expects
    nested: int = 0


class Writer:
    """Draws a program."""

    def __init__(self, dice: Random, scenario: Scenario) -> None:
        self.dice = dice
        self.scenario = scenario
        self.left = scenario.tasks
        self.number = 0

    def has(self, feature: str, chance: float) -> bool:
        """Whether to use a feature here."""
        return feature in self.scenario.features and self.dice.random() < chance

    def program(self) -> Body:
        """A driver's code."""
        if self.scenario.flat:
            return self.flat()
        return self.body(0, 0, 0, self.scenario.tasks)

    def flat(self) -> Body:
        """Many equal tasks."""
        task = Body(7, run_s=self.scenario.run_s)
        names = tuple(f"t{index}" for index in range(self.scenario.tasks))
        calls = tuple(Op("call", name, body=task) for name in names)
        gets = tuple(Op("get", names=names[first : first + 1000]) for first in range(0, len(names), 1000))
        return Body(1, (*calls, *gets))

    def body(self, depth: int, deps: int, nested: int, budget: int) -> Body:
        """Code with about so many calls in it."""
        dice = self.dice
        self.number += 1
        number = self.number
        refs = [f"n{index}" for index in range(nested)]
        streams: list[str] = []
        cancelled: list[str] = []
        ops: list[Op] = []
        calls = 0
        while calls < budget and self.left > 0:
            kind = self.pick(depth)
            name = f"x{len(ops)}"
            if kind in ("call", "stream"):
                calls += 1
                self.left -= 1
                ops.append(self.call(kind, name, depth, refs, budget - calls))
                (streams if kind == "stream" else refs).append(name)
                if kind == "call" and self.has("cancel", 0.05):
                    ops.append(Op("cancel", name, flag=dice.random() < 0.3))
                    refs.remove(name)
                    cancelled.append(name)
            elif kind == "gang":
                op = self.gang(name, depth, min(self.scenario.gang_max, max(1, budget - calls)))
                calls += len(op.names)
                self.left -= len(op.names)
                ops.append(op)
                refs += op.names
            elif kind == "put":
                ops.append(Op("put", name, number=dice.randrange(1000), size_bytes=self.size()))
                refs.append(name)
            elif kind == "sleep":
                ops.append(Op("sleep", seconds=dice.random() * self.scenario.run_s))
            elif streams and kind == "read":
                ops.append(Op("read", streams.pop(), number=dice.choice((-1, -1, 1))))
            elif refs:
                self.use(kind, refs, ops)
        ops += [Op("read", name, number=-1) for name in streams]
        ops += [Op("settle", name) for name in cancelled]
        return self.ending(depth, (number, deps, nested), refs, ops)

    def pick(self, depth: int) -> str:
        kinds = ["call"] * 6 + ["get", "drop", "sleep"]
        for feature, kind in (("put", "put"), ("wait", "wait"), ("keep", "keep")):
            if feature in self.scenario.features:
                kinds.append(kind)
        if "streams" in self.scenario.features:
            kinds += ["stream", "read"]
        if "gangs" in self.scenario.features:
            kinds += ["gang"] * 3
        return self.dice.choice(kinds)

    def use(self, kind: str, refs: list[str], ops: list[Op]) -> None:
        dice = self.dice
        names = tuple(dice.sample(refs, min(len(refs), dice.randrange(1, 4))))
        if kind == "wait":
            ops.append(Op("wait", names=names, number=dice.randrange(1, len(names) + 1)))
        elif kind == "get":
            ops.append(Op("get", names=names))
        elif kind == "drop":
            refs.remove(names[0])
            ops.append(Op("drop", names[0]))
        elif kind == "keep":
            ops.append(Op("keep", names[0], seconds=dice.random()))

    def call(self, kind: str, name: str, depth: int, refs: list[str], budget: int) -> Op:
        dice = self.dice
        deps = tuple(dice.sample(refs, min(len(refs), dice.choice((0, 0, 1, 1, 2, 3)))))
        nested: tuple[str, ...] = ()
        if self.has("refs", 0.3):
            nested = tuple(dice.sample(refs, min(len(refs), dice.choice((1, 2)))))
        inner = 0
        if depth < self.scenario.depth and self.has("nested", 0.35):
            inner = dice.randrange(1, 5)
        body = self.body(depth + 1, len(deps), len(nested), min(inner, budget + 1))
        if kind == "stream":
            body = msgspec.structs.replace(body, items=dice.randrange(0, 6), refs=(), error=False)
        return Op("call", name, deps, nested, body, flag=self.has("args", 0.2))

    def gang(self, name: str, depth: int, most: int) -> Op:
        """Members that meet before they go on."""
        size = self.dice.randrange(1, most + 1)
        inner = self.dice.randrange(1, 3) if depth < self.scenario.depth and self.has("nested", 0.3) else 0
        body = self.body(depth + 1, 0, 0, inner)
        body = msgspec.structs.replace(body, ops=(Op("meet", number=size), *body.ops))
        return Op("gang", name, tuple(f"{name}.g{index}" for index in range(size)), body=body)

    def size(self) -> int:
        """Of a value: inline or stored."""
        return self.dice.randrange(200, 5_000) if self.has("stored", 0.5) else 10

    def ending(self, depth: int, head: tuple[int, int, int], refs: list[str], ops: list[Op]) -> Body:
        dice = self.dice
        if refs and (depth == 0 or dice.random() < 0.7):
            ops.append(Op("get", names=tuple(refs)))
        given: tuple[str, ...] = ()
        if depth and refs and self.has("refs", 0.4):
            given = tuple(dice.sample(refs, 1))
        error = depth > 0 and self.has("errors", 0.03)
        run_s = dice.random() * 2 * self.scenario.run_s
        number, deps, nested = head
        return Body(number, tuple(ops), run_s, self.size(), given, error, deps=deps, nested=nested)


# --- what a program must give ---------------------------------------------------------------------


class Raised(Exception):
    """User code raised, or got an error; the number says which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Thing:
    """What a reference stands for: worked out when it is first asked for."""

    def __init__(self, body: Body | None, inputs: tuple[Thing, ...] = (), nested: tuple[Thing, ...] = ()) -> None:
        self.body = body
        self.inputs = inputs
        self.nested = nested
        self.outcome: Any = None  # (number, things) or Raised

    def get(self) -> tuple[int, tuple[Thing, ...]]:
        """Number and references; raises Raised."""
        if self.outcome is None:
            assert self.body is not None
            try:
                self.outcome = Oracle(self.body, self.inputs, self.nested).run()
            except Raised as raised:
                self.outcome = raised
        if isinstance(self.outcome, Raised):
            raise self.outcome
        return self.outcome  # type: ignore[no-any-return]


class Oracle:
    """Runs code without any engine, depth first; mirrors sim_code.Code."""

    def __init__(self, body: Body, inputs: tuple[Thing, ...] = (), nested: tuple[Thing, ...] = ()) -> None:
        self.body = body
        self.env: dict[str, Thing] = {f"n{index}": thing for index, thing in enumerate(nested)}
        self.acc = body.number
        self.inputs = inputs

    def run(self) -> tuple[int, tuple[Thing, ...]]:
        """Number and references that the code gives; raises Raised."""
        for index, thing in enumerate(self.inputs):
            self.take(f"d{index}", thing)
        for op in self.body.ops:
            getattr(self, f"do_{op.kind}")(op)
        if self.body.error:
            raise Raised(self.body.number)
        return self.acc, tuple(self.env[name] for name in self.body.refs)

    def take(self, name: str, thing: Thing) -> None:
        number, inner = thing.get()
        self.acc = mix(self.acc, number)
        if number % 2 == 0:  # half of all references inside of values are read
            for index, other in enumerate(inner):
                self.take(f"{name}.{index}", other)

    def do_call(self, op: Op) -> None:
        """As Code."""
        inputs = tuple(self.env[name] for name in op.names)
        self.env[op.name] = Thing(op.body, inputs, tuple(self.env[name] for name in op.nested))

    def do_put(self, op: Op) -> None:
        """As Code."""
        thing = self.env[op.name] = Thing(None)
        thing.outcome = (op.number, ())

    def do_get(self, op: Op) -> None:
        """As Code."""
        for name in op.names:
            self.take(name, self.env[name])

    def do_read(self, op: Op) -> None:
        """As Code: the number of a stream's item follows from what its maker gives."""
        thing = self.env[op.name]
        assert thing.body is not None
        number, _ = thing.get()
        count = thing.body.items if op.number < 0 else min(op.number, thing.body.items)
        for index in range(count):
            self.acc = mix(self.acc, mix(number, index))

    def do_nothing(self, op: Op) -> None:
        """What changes no value."""

    def do_actor(self, op: Op) -> None:
        """A handle: what is read of it does not depend on what the actor does."""
        thing = self.env[op.name] = Thing(None)
        thing.outcome = (0, ())

    def do_handle(self, op: Op) -> None:
        """A handle that a task gives."""
        self.env[op.name] = self.env[op.names[0]].get()[1][0]

    def do_gang(self, op: Op) -> None:
        """As Code: members are tasks without arguments."""
        for name in op.names:
            self.env[name] = Thing(op.body)

    do_meet = do_nothing
    do_make = do_size = do_more = do_unmake = do_nothing
    do_drop = do_wait = do_keep = do_sleep = do_cancel = do_settle = do_nothing
    do_act = do_look = do_replies = do_nothing


def expected(body: Body) -> int | str:
    """What a driver's program must give: its number, or the error that it ends with."""
    try:
        return Oracle(body).run()[0]
    except Raised as raised:
        return f"error {raised.number}"
