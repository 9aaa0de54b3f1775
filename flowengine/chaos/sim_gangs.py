"""Virtual user code of gangs: members that are submitted together and go on only when all of them run."""

from __future__ import annotations

from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.bundles import GANG, bundle_name, bundle_of, group_of, in_bundle, index_of
from flowengine.core.ids import object_id

from . import sim_process as p
from .sim_programs import Body, Op

MEET_S = 0.02  # between looks whether all are there
ONE = (("CPU", 1.0),)


class Meetings:
    """Which members wait for the others; a gang that has met once need not meet again."""

    def __init__(self) -> None:
        self.waiting: dict[str, dict[int, p.Process]] = {}
        self.done: dict[str, None] = {}

    def all_there(self, bundle: str, process: p.Process, size: int) -> bool:
        """The member in this bundle is there; whether all are, in living processes that run them."""
        gang = group_of(bundle)
        if gang in self.done:
            return True
        there = self.waiting.setdefault(gang, {})
        there[index_of(bundle)] = process
        for index, other in list(there.items()):
            if not other.alive or running_bundle(other) != bundle_name(gang, index):
                del there[index]
        if len(there) == size:
            self.done[gang] = None
        return len(there) == size


def running_bundle(process: p.Process) -> str:
    """The bundle that the process's task runs in."""
    running = process.executor.running if process.executor is not None else None
    return bundle_of(running.push.spec.shape) if running is not None else ""


class GangSteps:
    """Part of Frame: gangs and what their members do."""

    process: p.Process
    thread: p.Thread
    context: p.Context
    env: dict[str, p.Ref]

    def function(self, body: Body) -> tuple[bytes, bytes]:
        """Name and pickled form of a body's function."""
        raise NotImplementedError

    def do_gang(self, op: Op) -> p.Code:
        """Submit a gang, one member to each bundle."""
        process, context, body = self.process, self.context, op.body
        assert body is not None
        described = m.BundleSet(GANG + process.new_child().hex()[:16], (ONE,) * len(op.names), "PACK")
        process.step(m.GangNamed(described, context.driver.partition(" ")[0]))
        function, blob = self.function(body)
        for index, name in enumerate(op.names):
            shape = in_bundle(ONE, bundle_name(described.id, index))
            spec = m.TaskSpec(
                process.new_child(), function, f"f{body.number}", shape=shape,
                max_retries=body.retries, depth=context.depth, parent=context.task, driver=context.driver,
            )  # fmt: skip
            process.begin_parent()
            process.step(s.Submitted(spec, blob))
            self.env[name] = process.made_ref(context, object_id(spec.id, 0))
            process.world.tasks_submitted += 1
        yield from ()

    def do_meet(self, op: Op) -> p.Code:
        """Go on when all members run."""
        bundle = running_bundle(self.process)
        while not self.process.world.meetings.all_there(bundle, self.process, op.number):
            yield from self.process.pause(self.thread, MEET_S)
