"""The stash of a process: entries of logs that the journal does not have yet, and who was told of them. Pure.

After Lineage Stash (Wang et al., SOSP'19). An entry is a choice that a replay could make otherwise: which caller came
at which place, what wait returned, what was recorded. The journal of an actor is its owner. Nothing waits for it:
entries go there in batches, and until it has them every message that may depend on them carries them along to whoever
does not have them yet. So who has seen an effect can supply what it takes to repeat it. How far an actor came (its
reach) belongs to that: calls of one caller need no entry each, but that they were done must not be forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..core import commands as c
from ..core import messages as m

Entry = tuple[str, int, bytes]
COUNTERS = ("stash_entries_forwarded", "stash_entries_flushed")
FENCES_KEPT_MAX = 1_000
OLD_S = 1.0
NOTHING = (0, 0)
# What another process can learn something from that user code did; the rest moves no knowledge.
TELLING = frozenset((
    m.PushTask, m.TaskDone, m.TaskFailed, m.StreamItem, m.ObjectReady, m.CallsKept, m.StashAdded, m.CancelTask,
    m.CancelObject, m.FreeObject, m.KillActor, m.ActorMade, m.ActorReady, m.ActorRecovered, m.CheckpointTaken,
    m.ShareAsked, m.ShareTaken,
))  # fmt: skip
REPLIES = frozenset((m.TaskDone, m.TaskFailed, m.StreamItem))


class StashDue(m.Message, frozen=True):
    """Timer: entries have waited long enough for others to go to the journal with."""


class StashOld(m.Message, frozen=True):
    """Timer: look for logs of others of which nothing was heard for long."""


class Held(msgspec.Struct):
    """What this process holds of one log. Entries have numbers in the order in which they came here."""

    subject: bytes
    owner: str  # its journal
    incarnation: int
    mine: bool  # it runs in this process
    entries: list[Entry] = []
    first: int = 0  # the number of entries[0]
    names: dict[tuple[str, int], None] = {}
    reach: int = 0  # calls begun
    holders: int = 1  # processes known to hold the newest
    flushed: int = 0  # entries sent to the journal
    reach_flushed: int = 0
    reach_kept: int = 0  # the journal has it
    reach_told: int = 0  # somebody else knows it
    told: dict[str, tuple[int, int]] = {}  # peer -> entries and reach that it has
    old: bool = False  # of another process, which has not told that its journal has it for some time

    @property
    def end(self) -> int:
        """The number of the next entry."""
        return self.first + len(self.entries)

    def add(self, entry: Entry) -> None:
        """A new entry."""
        self.entries.append(entry)
        self.names[entry[0], entry[1]] = None
        self.holders = 1

    def kept(self, mark: int, reach: int) -> int:
        """The journal has the entries before this number, and knows how far the actor came; gives their size."""
        self.reach_kept = max(self.reach_kept, reach)
        gone = self.entries[: max(mark - self.first, 0)]
        for kind, number, _ in gone:
            del self.names[kind, number]
        del self.entries[: len(gone)]
        self.first += len(gone)
        return sum(map(size_of, gone))


class Stash:
    """Decides what goes along with what is sent; part of the machines of every process that runs user code."""

    def __init__(
        self, flush_s: float = 0.01, bytes_max: int = 16 << 20, holders_max: int = 0,
        calls_ahead_max: int = 1_000_000, counters: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        """holders_max: entries that so many processes hold are not carried on; 0: no limit.

        calls_ahead_max: calls that an actor begins before the journal has them; 0 is write-ahead logging.
        """
        self.flush_s = flush_s
        self.bytes_max = bytes_max
        self.holders_max = holders_max
        self.calls_ahead_max = calls_ahead_max
        self.counters = counters if counters is not None else dict.fromkeys(COUNTERS, 0)
        self.open: dict[bytes, Held] = {}
        self.waits_for: dict[bytes, int] = {}  # tasks -> entries that must be in the journal before others hear of them
        self.fences: dict[bytes, int] = {}  # actor -> its last incarnation whose log was given away
        self.fenced: dict[str, None] = {}  # its process, which is not listened to any more
        self.bytes = 0
        self.numbered = 0  # numbers of entries below this were given in logs that are not held any more
        self.timer = False
        self.news = False  # something of ours should go to a journal some time
        self.old_timer = False
        self.copies = False  # some logs are of others
        self.back: list[c.Send] = []  # what waits for the journal
        self.back_to: dict[str, None] = {}

    # --- what is entered ------------------------------------------------------------------------------------

    def begin(self, subject: bytes, owner: str, incarnation: int) -> Held:
        """The log of the actor that lives in this process."""
        return self.open_log(subject, owner, incarnation, True)

    def open_log(self, subject: bytes, owner: str, incarnation: int, mine: bool) -> Held:
        """A log of which nothing is held; no entry has a number that one before it had, which may yet be confirmed."""
        former = self.open.get(subject)
        if former is not None:  # of the incarnation before
            self.numbered = max(self.numbered, former.end)
            self.bytes -= sum(map(size_of, former.entries))
        held = Held(subject, owner, incarnation, mine, first=self.numbered, flushed=self.numbered)
        self.open[subject] = held
        return held

    def insist(self, subject: bytes, owner: str, incarnation: int, entry: Entry) -> c.Send:
        """An entry that others must not see the effects of before the journal has it; gives the message to that."""
        held = self.open.get(subject)
        if held is None or held.incarnation != incarnation:
            held = self.open_log(subject, owner, incarnation, False)
        self.add(held, entry)
        self.waits_for[subject] = held.end
        return c.Send(owner, self.written(held))

    def add(self, held: Held, entry: Entry) -> None:
        """A choice was made here."""
        held.add(entry)
        self.bytes += size_of(entry)
        self.news = True

    def merge(self, owner: str, logs: Sequence[m.Log], sender: str) -> None:
        """Logs that came along with what a peer says, and how much of them the journal is known to have."""
        self.copies = True
        for log in logs:
            held = self.open.get(log.subject)
            if log.incarnation <= self.fences.get(log.subject, 0):
                continue
            if held is None or held.incarnation < log.incarnation:
                held = self.open_log(log.subject, owner, log.incarnation, False)
            elif held.incarnation > log.incarnation:
                continue
            is_news = log.reach > held.reach
            for entry in log.entries:
                if entry[:2] not in held.names:
                    held.add(entry)
                    self.bytes += size_of(entry)
                    is_news = True
            if is_news:
                held.reach, held.holders, held.old = max(held.reach, log.reach), log.holders, False
            held.told[sender] = held.end, held.reach
            if log.kept:
                count = 0  # entries of which the journal has what came after them
                while count < len(held.entries) and place_of(*held.entries[count][:2]) < log.kept - 1:
                    count += 1
                self.let_go(held, held.first + count, log.kept)

    def let_go(self, held: Held, mark: int, reach: int) -> None:
        """The journal has so much of a log."""
        self.bytes -= held.kept(mark, reach)
        if not held.mine and not held.entries and held.reach <= held.reach_kept:
            del self.open[held.subject]
            self.numbered = max(self.numbered, held.end)

    # --- what goes along ------------------------------------------------------------------------------------

    def attach(self, commands: list[Any]) -> list[Any]:
        """The commands with the logs that others need before they hear what is sent to them."""
        if not self.open:
            return commands
        out: list[Any] = []
        for command in commands:
            if type(command) is c.Send:
                if (self.waits_for or self.bytes > self.bytes_max) and self.must_wait(command):
                    self.back.append(command)
                    self.back_to[command.to] = None
                    continue
                if type(command.message) in TELLING:
                    command = self.carry(command, out)
            out.append(command)
        if self.news and not self.timer:
            self.timer = True
            out.append(c.SetTimer(self.flush_s, StashDue()))
        if self.copies and not self.old_timer:
            self.old_timer = True
            out.append(c.SetTimer(OLD_S, StashOld()))
        return out

    def carry(self, command: c.Send, out: list[Any]) -> c.Send:
        """What the receiver lacks: to a journal as entries, to others as logs, in a call or before another message."""
        to = command.to
        logs: dict[str, list[m.Log]] = {}
        for held in self.open.values():
            if held.owner == to:
                # An actor's reply tells its caller itself how far the actor came, by the number of the call.
                said = held.mine and type(command.message) in REPLIES
                further = not said and held.reach > max(held.reach_flushed, held.reach_kept)
                if further or held.flushed < held.first + len(held.entries):
                    out.append(c.Send(to, self.written(held), command.lazy))
                continue
            reach, first = held.reach, held.first
            entries, reached = held.told.get(to, NOTHING)
            end = first + len(held.entries)
            if entries >= end or end == first:
                if reach <= reached or reach <= held.reach_kept:
                    continue
                if held.mine and type(command.message) is m.TaskDone and command.message.place:
                    held.told[to] = end, command.message.place
                    held.reach_told, self.news = reach, True
                    continue
            if 0 < self.holders_max <= held.holders:
                continue
            held.holders += 1
            lacking = tuple(held.entries[max(entries - first, 0) :]) if end > first else ()
            log = m.Log(held.subject, held.incarnation, lacking, reach, held.reach_kept, held.holders)
            logs.setdefault(held.owner, []).append(log)
            held.told[to] = end, reach
            if held.mine:
                held.reach_told = reach
                self.news = True
            self.counters["stash_entries_forwarded"] += len(lacking) + 1
        if not logs:
            return command
        carried = [m.StashCarried(owner, tuple(known)) for owner, known in logs.items()]
        if len(carried) == 1 and type(command.message) is m.PushTask and command.message.spec.actor is not None:
            return c.Send(to, msgspec.structs.replace(command.message, logs=carried[0]), command.lazy)
        out.extend(c.Send(to, one, command.lazy) for one in carried)
        return command

    def must_wait(self, command: c.Send) -> bool:
        """Whether it waits for the journal: the stash is full, or has an entry of which others are not asked."""
        if command.to in self.back_to:
            return True
        full = self.bytes > self.bytes_max
        return type(command.message) in TELLING and any(
            held.owner != command.to and held.entries and (full or held.subject in self.waits_for)
            for held in self.open.values()
        )

    # --- the journal ----------------------------------------------------------------------------------------

    def flush(self, everything: bool = False) -> list[c.Send]:
        """What others may depend on of our own log; everything: also what nobody has been told, and copies."""
        self.timer = self.news = False
        return [
            c.Send(held.owner, self.written(held))
            for held in self.open.values()
            if (held.mine or everything)
            and (held.flushed < held.end or (held.reach if everything else held.reach_told) > held.reach_flushed)
        ]  # fmt: skip

    def flush_old(self) -> list[c.Send]:
        """Copies whose own process is silent: asking the journal is the way to get rid of them."""
        self.old_timer = self.copies = False
        out: list[c.Send] = []
        for held in self.open.values():
            if not held.mine and held.subject not in self.waits_for:
                self.copies = True
                if held.old:
                    out.append(c.Send(held.owner, self.written(held)))
                held.old = not held.old
        return out

    def written(self, held: Held) -> m.StashAdded:
        """What goes to the journal of this log now."""
        entries = tuple(held.entries[max(held.flushed - held.first, 0) :])
        held.flushed, held.reach_flushed = held.end, held.reach
        self.counters["stash_entries_flushed"] += len(entries)
        return m.StashAdded(held.subject, held.incarnation, entries, (), held.reach, held.end)

    def kept(self, event: m.StashKept) -> list[c.Send]:
        """The journal has entries; gives what waited for that."""
        held = self.open.get(event.subject)
        if held is None or held.incarnation != event.incarnation:
            return []
        self.let_go(held, event.mark, event.reach)
        if event.subject in self.waits_for and self.waits_for[event.subject] <= event.mark:
            del self.waits_for[event.subject]
        return self.released()

    def released(self) -> list[c.Send]:
        """What waited for the journal and need not any more."""
        if self.waits_for or self.bytes > self.bytes_max:
            return []
        back, self.back, self.back_to = self.back, [], {}
        return back

    def given(self, subject: bytes, incarnation: int) -> tuple[tuple[Entry, ...], int]:
        """The actor is dead: all that is held of its log; what others still bring of this incarnation is refused."""
        self.fences[subject] = max(incarnation, self.fences.pop(subject, 0))
        if len(self.fences) > FENCES_KEPT_MAX:
            del self.fences[next(iter(self.fences))]
        held = self.open.get(subject)
        if held is None or held.incarnation > incarnation:
            return (), 0
        return tuple(held.entries), held.reach

    def fence_off(self, worker: str) -> None:
        """What the process of a dead actor says from now on comes too late."""
        if worker:
            self.fenced[worker] = None
            if len(self.fenced) > FENCES_KEPT_MAX:
                del self.fenced[next(iter(self.fenced))]

    # --- ends -----------------------------------------------------------------------------------------------

    def peer_lost(self, peer: str) -> list[c.Send]:
        """A process is dead: a journal with all that is written there, or somebody who had been told."""
        for held in list(self.open.values()):
            held.told.pop(peer, None)
            if held.owner == peer:
                del self.open[held.subject]
                self.bytes -= sum(map(size_of, held.entries))
                self.waits_for.pop(held.subject, None)
        self.back = [command for command in self.back if command.to != peer]
        self.back_to.pop(peer, None)
        return self.released()


def entries_of(recorded: dict[tuple[str, int], bytes]) -> tuple[Entry, ...]:
    """Entries as they travel."""
    return tuple([(kind, number, payload) for (kind, number), payload in recorded.items()])


def is_own(kind: str) -> bool:
    """Whether it is a choice of a task or a constructor, and neither a turn nor a choice of a call."""
    return kind != "turn" and ":" not in kind


def place_of(kind: str, number: int) -> int:
    """The call before which a checkpoint would cover the entry."""
    if is_own(kind):
        return 0
    return number if kind == "turn" else int(kind.rpartition(":")[2])


def size_of(entry: Entry) -> int:
    """What holding an entry takes, about."""
    return len(entry[2]) + 100
