"""The Owner's rules for what a re-run needs to take the same way again: who notes it, who keeps it, who is asked. Pure.

For a task its owner keeps choices and children's results; what the task says to others waits until it has them. For an
actor its owner is the journal of its log, which others carry along meanwhile (recovery/stash.py): when the actor dies,
every process is asked for what it holds of the log before anything is run again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..recovery.stash import StashDue, StashOld, entries_of, is_own, place_of
from . import commands as c
from . import messages as m
from . import owner_state as s
from .ids import task_of
from .owner_base import OwnerBase
from .owner_state import ENDED, Made, Obj

POLL_S_MAX = 2.0  # so long a process that does not answer keeps an actor from coming back
STASH = "stash"  # topic of the question


class StashRules(OwnerBase):
    """Part of Owner: see owner_base for the state."""

    # --- what runs here ----------------------------------------------------------------------------------

    def noted(self, event: s.Noted, sender: str) -> None:
        """Code that runs here made a choice: it is entered in the log of its task or actor."""
        parent = self.parents.get(event.task)
        if parent is None:
            return
        if not parent.caller:
            self.out.append(c.KeepNote(event.kind, event.number, event.payload))
            return
        if is_own(event.kind):
            if parent.caller in self.dead:
                return  # nobody keeps it, so nothing waits for that: this run ends, and another does not ask for it
            entry = (event.kind, event.number, event.payload)
            self.out.append(self.stash.insist(event.task, parent.caller, parent.attempt, entry))
            return
        held = self.stash.open.get(event.task)
        if held is not None:  # by the call that has begun last a checkpoint tells whether it covers the choice
            self.stash.add(held, (f"{event.kind}:{held.reach - 1}", event.number, event.payload))

    def stash_child(self, obj: Obj, value: m.Value) -> None:
        """A child's result: the parent's owner holds it until the parent has ended."""
        task = obj.task
        parent = self.parents.get(task.spec.parent) if task is not None else None
        if task is None or parent is None:
            return
        reached_out = task.recorded is not None and s.REACHED_OUT in task.recorded
        parent.reaches_out = parent.reaches_out or reached_out
        if type(value) is m.Failed or task.stream is not None or value.contained:
            return
        if not parent.caller:  # the program itself, as a resumable job; its actors live through all their calls again
            if task.spec.actor is None and task.spec.life is None and not reached_out:
                self.out.append(c.KeepResult(obj.oid, value))
            return
        size = len(value.blob) if type(value) is m.Inline else 64
        if parent.stashed_bytes + size > self.config.stash_bytes_max:
            return
        parent.stashed_bytes += size
        self.counters["stash_entries_forwarded"] += 1
        recorded = ((*s.REACHED_OUT, b""),) if reached_out else ()
        self.send(parent.caller, m.StashAdded(parent.task, parent.attempt, recorded, ((obj.oid, value),)), True)

    def stash_due(self, event: StashDue, sender: str) -> None:
        """Timer: what was not carried to its journal by other news goes there now."""
        self.out.extend(self.stash.flush())

    def stash_old(self, event: StashOld, sender: str) -> None:
        """Timer: copies of logs that their own processes did not speak of any more."""
        self.out.extend(self.stash.flush_old())

    def commit_asked(self, event: s.CommitAsked, sender: str) -> None:
        """Somebody outside is about to see something: the journals get all, also how far this actor came."""
        self.out.extend(self.stash.flush(everything=True))

    def said(self, event: s.Said, sender: str) -> None:
        """What code says to its program may depend on its choices."""
        self.send(event.to, event.message)

    def stash_kept(self, event: m.StashKept, sender: str) -> None:
        """A journal has what we sent."""
        self.out.extend(self.stash.kept(event))

    def stash_carried(self, event: m.StashCarried, sender: str) -> None:
        """Logs that a peer holds, and that what it says may depend on."""
        self.stash.merge(event.owner, event.logs, sender)

    def hear_place(self, actor: m.RefTo, place: int, sender: str) -> None:
        """A reply tells how far its actor came."""
        target = self.targets.get(task_of(actor.oid))
        if target is not None and target.owner != self.me:
            log = m.Log(target.actor, target.incarnation, (), place, 0, 2)
            self.stash.merge(target.owner, (log,), sender)

    def log_given(self, subject: bytes, incarnation: int, worker: str) -> tuple[Any, int]:
        """The answer to a poll: what is held of the log; the actor's process is not listened to any more."""
        self.stash.fence_off(worker)
        return self.stash.given(subject, incarnation)

    # --- journal of others -------------------------------------------------------------------------------

    def stash_added(self, event: m.StashAdded, sender: str) -> None:
        """What a task or actor of ours would need to take the same way again."""
        made = self.made.get(event.task)
        if made is not None:
            asked = event.attempt == made.polled_for  # who answered does not listen to it any more
            if made.poll if asked else event.attempt == made.task.attempt:
                self.enter(made, event.recorded, event.reach)
        else:
            self.keep_for_task(event)
        if event.mark:
            self.confirm(sender, m.StashKept(event.task, event.attempt, event.mark, event.reach))

    def keep_for_task(self, event: m.StashAdded) -> None:
        """What a running task of ours has chosen and has had made."""
        task = self.current(event.task, event.attempt)
        if task is None:
            return
        if event.recorded:
            if task.recorded is None:
                task.recorded = {}
            task.recorded.update({(kind, number): payload for kind, number, payload in event.recorded})
        if event.children:
            if task.children is None:
                task.children = {}
            task.children.update(event.children)
        self.keep_chosen(task, event)

    def confirm(self, to: str, kept: m.StashKept) -> None:
        """Tell that it is kept, after as long as the journal is said to take."""
        if self.config.journal_delay_s:
            self.out.append(c.SetTimer(self.config.journal_delay_s, s.JournalWritten(to, kept)))
        else:
            self.send(to, kept)

    def journal_written(self, event: s.JournalWritten, sender: str) -> None:
        """Timer: a slow journal has it now."""
        self.send(event.to, event.kept)

    def enter(self, made: Made, recorded: tuple[tuple[str, int, bytes], ...], reach: int) -> None:
        """Entries of an actor's log, those that no checkpoint covers."""
        task = made.task
        if task.recorded is None:
            task.recorded = {}
        for kind, number, payload in recorded:
            if place_of(kind, number) >= made.needed_from:
                task.recorded[kind, number] = payload
        made.reach = max(made.reach, reach)

    # --- an actor is dead: who knows what? ------------------------------------------------------------------

    def poll(self, made: Made, worker: str) -> None:
        """Ask every process what it holds of the dead actor's log."""
        self.polls += 1
        made.poll, made.polled_for = self.polls, made.task.attempt
        self.stash.fence_off(worker)
        asked = next((node for node in (self.node, *self.nodes) if node not in self.dead), self.node)
        self.send(asked, m.Asked(-self.polls, STASH, [made.task.spec.id, made.polled_for, worker]))
        self.out.append(c.SetTimer(POLL_S_MAX, s.PollOver(made.task.spec.id, made.poll)))

    def polled(self, event: m.Answered, sender: str) -> None:
        """All processes have answered."""
        for made in self.made.values():
            if made.poll == -event.request:
                for recorded, reach in event.content or ():
                    self.enter(made, tuple((kind, number, payload) for kind, number, payload in recorded), reach)
                self.poll_ends(made)

    def poll_over(self, event: s.PollOver, sender: str) -> None:
        """Timer: who has not answered is as good as dead."""
        made = self.made.get(event.actor)
        if made is not None and made.poll == event.poll:
            self.poll_ends(made)

    def poll_ends(self, made: Made) -> None:
        """What can be known of the log is known."""
        made.poll = 0
        if made.state == "alive":
            self.tell_callers_known(made)

    def tell_callers_known(self, made: Made) -> None:
        """The new incarnation may run calls again."""
        recorded = entries_of(made.task.recorded or {})
        known = m.CallersKnown(made.task.spec.id, tuple(made.watchers), recorded, made.reach)
        self.send(made.worker, known)

    def caller_sought(self, event: m.CallerSought, sender: str) -> None:
        """A replay waits for a call: will its caller make it again?"""
        task, made = self.tasks.get(event.caller_key), self.made.get(event.caller_key)
        coming = ""
        if made is not None:
            coming = "no" if made.state == "dead" else "yes"
        elif task is not None:
            coming = "no" if task.state in ENDED else "yes"
        elif event.caller_key in self.parents:
            coming = "no"  # it runs here, and has sent all that it has
        self.send(sender, m.CallerFound(event.actor, event.calls, coming))


HANDLERS: dict[type[Any], Callable[[Any, Any, str], None]] = {
    s.Noted: StashRules.noted,
    s.Said: StashRules.said,
    m.StashAdded: StashRules.stash_added,
    m.StashKept: StashRules.stash_kept,
    m.StashCarried: StashRules.stash_carried,
    StashDue: StashRules.stash_due,
    StashOld: StashRules.stash_old,
    s.CommitAsked: StashRules.commit_asked,
    s.JournalWritten: StashRules.journal_written,
    s.PollOver: StashRules.poll_over,
    m.Answered: StashRules.polled,
    m.CallerSought: StashRules.caller_sought,
}
