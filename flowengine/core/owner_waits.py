"""The Owner's rules for waits that would never end: calls that wait for each other in a circle. Pure.

A thread that has waited long has probes sent along what it waits for, from process to process; each carries the waits
that it has passed (edge chasing: Chandy, Misra and Haas 1983). A probe that meets a wait which it has passed has found
a circle. Only waits that cannot end by themselves are passed on: for all of what is missing, without a time limit. The
circle is broken by its youngest wait, when it was found twice in a row with the same waits in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import commands as c
from . import messages as m
from .ids import task_of
from .owner_base import OwnerBase
from .owner_state import READY, SENT, WAITING, LongWait, Obj, Task, Waiter

PROBE_LAST_S = 30.0
CONFIRM_S = 0.2
WANTED_MAX = 100  # of the values that one wait is for, so many are looked at
STEPS_MAX = 1_000  # records looked at for one probe


class WaitIsLong(m.Message, frozen=True):
    """A thread has waited long, without a time limit; alone: the actor here runs no other call until it goes on."""

    waiter: int
    code: bytes  # the task or call that waits
    name: str
    depth: int
    alone: bool


class WaitLooked(m.Message, frozen=True):
    """Timer: look at a long wait again."""

    waiter: int


class WaitTraced(m.Message, frozen=True):
    """A probe has come; here: this process has the call or task, so that its code may be what waits."""

    probe: m.WaitProbe
    here: bool


class WaitRules(OwnerBase):
    """Part of Owner: see owner_base for the state."""

    def wait_is_long(self, event: WaitIsLong, sender: str) -> None:
        """Find out whether it can end."""
        if event.waiter in self.waiters:
            wait = LongWait(event.waiter, event.code, event.name, event.depth, event.alone)
            self.long_waits[event.waiter] = wait
            self.look_at_wait(wait)

    def wait_looked(self, event: WaitLooked, sender: str) -> None:
        """Again."""
        wait = self.long_waits.get(event.waiter)
        if wait is not None:
            self.look_at_wait(wait)

    def look_at_wait(self, wait: LongWait) -> None:
        if wait.waiter not in self.waiters:
            del self.long_waits[wait.waiter]
            return
        self.out.append(c.SetTimer(CONFIRM_S if wait.suspected else wait.period_s, WaitLooked(wait.waiter)))
        wait.period_s = min(wait.period_s * 2, PROBE_LAST_S)
        self.follow(wait, ())

    def wait_probed(self, event: m.WaitProbe, sender: str) -> None:
        """A wait elsewhere is for a task of ours, or for code that may wait here."""
        self.wait_traced(WaitTraced(event, False), "")

    def wait_traced(self, event: WaitTraced, sender: str) -> None:
        """Go on with the code's own wait, or with what holds up the call, or with what our task waits for."""
        probe, path = event.probe, event.probe.path
        waits = [wait for wait in self.long_waits.values() if wait.waiter in self.waiters] if event.here else []
        own = [wait for wait in waits if wait.code == probe.task]
        alone = [wait for wait in waits if wait.alone]
        if len(own) == 1:
            self.pass_on(own[0], path)
        elif alone and not own:
            self.pass_on(alone[0], (*path, m.Hop(probe.task, probe.name)))
        elif not waits and probe.task in self.tasks:
            self.chase([self.tasks[probe.task]], path)

    def pass_on(self, wait: LongWait, path: tuple[m.Hop, ...]) -> None:
        """The probe has come to a wait: is it one that it has passed?"""
        passed = [number for number, hop in enumerate(path) if (hop.code, hop.wait) == (wait.code, wait.waiter)]
        if not passed:
            self.follow(wait, path)
        elif passed[0] == 0:  # else the wait that began the probe is not in the circle
            self.circle_found(wait, path)

    def follow(self, wait: LongWait, path: tuple[m.Hop, ...]) -> None:
        """Send the probe on to all that the wait is for; where a part is enough, others may end it."""
        waiter: Waiter = self.waiters[wait.waiter]
        missing = [obj for obj in waiter.objects if obj.value is None]
        if waiter.missing < len(missing):
            return
        self.chase(missing[:WANTED_MAX], (*path, m.Hop(wait.code, wait.name, wait.waiter, wait.depth)))

    def chase(self, what: list[Any], path: tuple[m.Hop, ...]) -> None:
        """Walk over what the objects and tasks need to the processes where it runs."""
        seen: dict[bytes, None] = {}
        stack = list(what)
        while stack and len(seen) < STEPS_MAX:
            item = stack.pop()
            if isinstance(item, Obj):
                task = item.task if item.task is not None else self.tasks.get(task_of(item.oid))
                if item.owner and item.owner not in self.dead:
                    self.send(item.owner, m.WaitProbe(task_of(item.oid), "", path))
                elif not item.owner and task is not None:
                    stack.append(task)
            elif item.spec.id not in seen:
                seen[item.spec.id] = None
                stack += self.needs(item, path)

    def needs(self, task: Task, path: tuple[m.Hop, ...]) -> list[Any]:
        """What has to end before the task does; a probe goes where it runs."""
        spec = task.spec
        if task.state is WAITING:
            missing = [obj for obj in task.inputs if obj.value is None]
            return missing if not spec.enough or task.missing == len(missing) else []
        if spec.actor is None:
            if task.state is SENT and task.lease is not None:
                self.send(task.lease.worker, m.WaitProbe(spec.id, spec.name, path))
            return []
        target = self.targets.get(task_of(spec.actor.oid))
        if target is None or task.state not in (READY, SENT):
            return []
        if target.state != "alive":
            made = self.made.get(target.actor)
            if made is None and target.owner not in self.dead and target.state != "dead":
                self.send(target.owner, m.WaitProbe(target.actor, "", (*path, m.Hop(spec.id, spec.name))))
            return [made.task] if made is not None and target.incarnation == 0 else []
        if task.state is SENT:
            self.send(target.worker, m.WaitProbe(spec.id, spec.name, path))
            return []
        line = target.lines.get(spec.caller_key)
        return [line.waiting[0]] if line is not None and line.waiting and line.waiting[0] is not task else []

    def circle_found(self, wait: LongWait, path: tuple[m.Hop, ...]) -> None:
        """The wait is in a circle: its youngest member gives up, once it was found again."""
        youngest = max((hop for hop in path if hop.wait), key=lambda hop: (hop.depth, hop.code))
        circle = tuple([(hop.code, hop.wait) for hop in path])
        if youngest.code != wait.code:
            return
        if wait.suspected != circle:
            wait.suspected = circle
            self.out.append(c.SetTimer(CONFIRM_S, WaitLooked(wait.waiter)))
            return
        del self.long_waits[wait.waiter]
        self.circles[wait.waiter] = told(path)
        waiter = self.waiters.pop(wait.waiter)
        self.unhook(waiter)
        self.out.append(c.Resolve(wait.waiter))


def told(path: tuple[m.Hop, ...]) -> str:
    """The circle in words."""
    names = [hop.name for hop in path]
    text = names[0]
    for number, hop in enumerate(path):
        which = "" if number == 0 else ", which"
        after = names[(number + 1) % len(names)]
        text += f"{which} waits for {after}" + ("" if hop.wait else " to end")
    return text


HANDLERS: dict[type[Any], Callable[[Any, Any, str], None]] = {
    WaitIsLong: WaitRules.wait_is_long,
    WaitLooked: WaitRules.wait_looked,
    WaitTraced: WaitRules.wait_traced,
    m.WaitProbe: WaitRules.wait_probed,
}
