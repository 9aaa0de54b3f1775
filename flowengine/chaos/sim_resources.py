"""Programs that make resources at run time: virtual code, how it is drawn, and what must hold when it has ended.

Names with an even number are on each node, others in one place; so whatever a task asks for is together somewhere.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from flowengine.core import messages as m
from flowengine.scheduling.resources import SCALE, is_own, key_of, plain

from . import sim_process as p
from .sim_programs import Body, Op, Writer

if TYPE_CHECKING:
    from .sim_world import World

ANSWER_S = 2.0  # then the head is asked again: it may be a new one
ENDS_S = 12.0  # after the program has gone, nothing of it may be left
KINDS = ("ask", "ask", "ask", "task", "signal", "make", "make", "size", "more", "unmake", "sleep")
ENOUGH = 2  # of each resource, in the end


class ResourceSteps:
    """Steps of code; part of sim_code.Frame."""

    process: p.Process
    thread: p.Thread
    context: p.Context

    def order(self, verb: str, *argument: Any) -> Generator[None, Any, str]:
        """As flow.resources: what is wrong about the order, when it is safe."""
        process, thread, head = self.process, self.thread, self.process.world.head_address
        answer: Any = None
        while answer is None:
            number = thread.wait = next(process.numbers)
            process.orders[number] = thread
            process.send(head, m.Asked(number, f"resource.{verb}", argument))
            process.world.clock.after(ANSWER_S, process.run, process.resume, thread, number)
            yield
            answer = process.answers.pop(number, None)
        process.send(head, m.OrderSeen(answer[0]))
        return str(answer[1])

    def key(self, op: Op) -> str:
        """The name as this program's."""
        return key_of(op.name, self.context.driver.partition(" ")[0] or self.process.address)

    def do_make(self, op: Op) -> p.Code:
        """Create: on each node, on one that is named, or anywhere."""
        node = op.names[0] if op.names else None
        yield from self.order(
            "create", self.key(op), op.number * SCALE, node, [] if op.flag else None, self.process.node.node_id
        )

    def do_size(self, op: Op) -> p.Code:
        """Set."""
        yield from self.order("set", self.key(op), op.number * SCALE)

    def do_more(self, op: Op) -> p.Code:
        """Add."""
        number = next(self.context.choices)
        yield from self.order("add", self.key(op), op.number * SCALE, f"{self.context.task.hex()}/{number}")

    def do_unmake(self, op: Op) -> p.Code:
        """Delete."""
        yield from self.order("delete", self.key(op))


class ResourceWriter(Writer):
    """Draws a program whose tasks ask for resources before, while and after they exist; in the end there is enough."""

    def program(self) -> Body:
        """A driver's code."""
        dice, ops, refs = self.dice, list[Op](), list[str]()
        names = [f"r{number}" for number in range(self.scenario.resources)]
        while self.left > 0:
            kind = dice.choice(KINDS)
            index = dice.randrange(len(names))
            if kind in ("ask", "task", "signal"):
                self.left -= 1
                refs.append(f"x{len(ops)}")
                ops.append(self.asking(kind, refs[-1], names))
            elif kind == "sleep":
                ops.append(Op("sleep", seconds=dice.random() * self.scenario.run_s))
            else:
                ops.append(self.change(kind, index))
        for index in range(len(names)):
            ops += [self.change("make", index), Op("size", names[index], number=ENOUGH)]
        ops.append(Op("get", names=tuple(refs)))
        self.number += 1
        return Body(self.number, tuple(ops))

    def change(self, kind: str, index: int) -> Op:
        """An order about a resource."""
        dice, name = self.dice, f"r{index}"
        if kind != "make":
            return Op(kind, name, number=dice.randrange(-1, 3) if kind == "more" else dice.randrange(4))
        named = index % 4 == 1
        node = (f"n{index % self.scenario.nodes}",) if named else ()
        return Op("make", name, node, number=dice.randrange(1, 4), flag=index % 2 == 0)

    def asking(self, kind: str, name: str, names: list[str]) -> Op:
        """A task: one that asks for resources, one that asks for none, or one that makes some."""
        dice, ops = self.dice, list[Op]()
        if kind == "signal":
            index = dice.randrange(len(names))
            ops = [self.change("make", index)]
            if dice.random() < 0.5:
                ops.append(Op("more", names[index], number=1))
        self.number += 1
        body = Body(self.number, tuple(ops), dice.random() * 2 * self.scenario.run_s, self.size())
        if kind != "ask":
            return Op("call", name, body=body)
        asked = [name for name in names[::2] if dice.random() < 0.3]
        if not asked or dice.random() < 0.5:
            asked.append(dice.choice(names[1::2]))
        return Op("call", name, body=body, asks=tuple((name, 1.0) for name in sorted(asked)))


def wrong_resources(world: World) -> list[str]:
    """Nodes that have something else than the head says; then the program goes, and what is still there of it."""
    lines = [f"settled: {line}" for line in unlike(world)]
    world.net.died(world.driver)
    until_s = world.clock.now + ENDS_S
    while world.clock.step(until_s):
        pass
    lines += [f"ended: {line}" for line in unlike(world)]
    return lines + [f"{plain(key)} is left" for key in world.head.machine.resources.made]


def unlike(world: World) -> list[str]:
    """Differences between what the head says and what nodes have."""
    head, lines = world.head.machine, list[str]()
    for node in world.living_nodes():
        ledger = node.machine.leases.ledger
        really = {name: ledger.size(name) for name in ledger.names() if is_own(name)}
        wanted = {key: made.given for key, made in head.resources.made.items()
                  if made.given and node.node_id in head.resources.nodes_of(made)}
        if really != wanted:
            lines.append(f"{node.address} has {really}, the head says {wanted}")
        if any(ledger.used(name) for name in really):
            lines.append(f"{node.address}: something is still taken")
    return lines
