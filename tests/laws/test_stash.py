"""Laws of the stash, after the invariants of Lineage Stash: what anybody has seen can be told by somebody alive.

A model of a few actors and one journal: each message takes along, outside of the engine, what its sender truly knows.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.ids import child_id
from flowengine.recovery.stash import Stash, StashDue

ACTORS = 4
JOURNAL = "journal"
NEWS = m.CancelObject(b"x" * 20, False, False)  # a message that tells something to its receiver


class Process:
    """An actor, what it holds, and what it truly knows of the others: how many of their calls have begun."""

    def __init__(self, number: int, holders_max: int) -> None:
        self.name, self.subject = f"p{number}", bytes([number]) * 16
        self.stash = Stash(holders_max=holders_max)
        self.log = self.stash.begin(self.subject, JOURNAL, 1)
        self.order: list[tuple[int, bytes]] = []  # turns: place, caller
        self.last = b""
        self.knows = dict.fromkeys(range(ACTORS), 0)
        self.alive = True


class World:
    """Processes, the journal, and links that keep their order."""

    def __init__(self, holders_max: int = 0) -> None:
        self.processes = [Process(number, holders_max) for number in range(ACTORS)]
        self.links: dict[tuple[str, str], deque[tuple[Any, dict[int, int]]]] = {}
        self.entries: dict[bytes, dict[tuple[str, int], bytes]] = {one.subject: {} for one in self.processes}
        self.reach = {one.subject: 0 for one in self.processes}
        self.knows = dict.fromkeys(range(ACTORS), 0)  # the journal's own process

    def call(self, number: int, caller: int) -> None:
        """An actor begins a call."""
        one = self.processes[number]
        key = bytes([caller]) * 16
        if key != one.last:
            one.order.append((one.log.reach, key))
            one.stash.add(one.log, ("turn", one.log.reach, key))
            one.last = key
        one.log.reach, one.log.holders = one.log.reach + 1, 1
        one.knows[number] = one.log.reach

    def say(self, one: Process, commands: list[Any]) -> None:
        """What a process sends, with what it knows."""
        for command in one.stash.attach(commands):
            if isinstance(command, c.Send):
                self.links.setdefault((one.name, command.to), deque()).append((command.message, dict(one.knows)))

    def tell(self, number: int, to: int) -> None:
        self.say(self.processes[number], [c.Send(JOURNAL if to == ACTORS else f"p{to}", NEWS)])

    def flush(self, number: int) -> None:
        one = self.processes[number]
        for command in [*one.stash.flush(), *one.stash.flush_old()]:
            self.links.setdefault((one.name, command.to), deque()).append((command.message, {}))

    def deliver(self, source: str, target: str) -> None:
        """The oldest message of a link comes."""
        link = self.links.get((source, target))
        if not link:
            return
        message, knowledge = link.popleft()
        if target == JOURNAL:
            for number, reach in knowledge.items() if message is NEWS else ():
                self.knows[number] = max(self.knows[number], reach)
            if isinstance(message, m.StashAdded):
                before = self.reach[message.task]
                self.write(message.task, message.recorded, message.reach)
                assert self.reach[message.task] >= before  # the journal never forgets
                kept = m.StashKept(message.task, message.attempt, message.mark, message.reach)
                self.links.setdefault((JOURNAL, source), deque()).append((kept, {}))
            return
        one = self.processes[int(target[1:])]
        if not one.alive:
            return
        if isinstance(message, m.StashCarried):
            one.stash.merge(message.owner, message.logs, source)
        elif isinstance(message, m.StashKept):
            one.stash.kept(message)
        else:
            for number, reach in knowledge.items():
                one.knows[number] = max(one.knows[number], reach)

    def write(self, subject: bytes, recorded: Any, reach: int) -> None:
        for kind, number, payload in recorded:
            assert self.entries[subject].get((kind, number), payload) == payload  # one place, one caller
            self.entries[subject][kind, number] = payload
        self.reach[subject] = max(self.reach[subject], reach)

    def recover(self, number: int) -> None:
        """An actor is dead: the journal asks all that live; then nobody has seen what it does not know."""
        dead = self.processes[number]
        for one in self.processes:
            if one.alive:
                self.write(dead.subject, *one.stash.given(dead.subject, 1))
        seen = max([self.knows[number], *[one.knows[number] for one in self.processes if one.alive]])
        assert self.reach[dead.subject] >= seen
        told = {place: key for (_, place), key in self.entries[dead.subject].items()}
        for place, key in dead.order:
            assert place >= seen or told.get(place) == key


step = st.tuples(st.sampled_from(["call", "tell", "deliver", "deliver"]), st.integers(0, 3), st.integers(0, ACTORS))
flushes = st.lists(st.integers(0, 3), max_size=3)


def run(world: World, steps: list[tuple[str, int, int]]) -> None:
    """Random life of the living."""
    for what, first, second in steps:
        if what == "deliver":
            links = [names for names, link in world.links.items() if link]
            if links:
                world.deliver(*links[(first * (ACTORS + 1) + second) % len(links)])
        elif world.processes[first].alive and first != second:
            getattr(world, what)(first, second)


@given(st.lists(step, min_size=10, max_size=120), flushes, st.sets(st.integers(0, 3), min_size=1), st.lists(step))
@settings(max_examples=300, deadline=None)
def test_whatever_the_living_have_seen_of_the_dead_can_be_told(steps, flushed, dying, more):
    world = World()
    run(world, steps)
    for number in flushed:
        world.flush(number)
    run(world, steps)
    for number in dying:
        world.processes[number].alive = False
    run(world, more)  # what the dead had sent still comes, and the living go on
    for number in sorted(dying):
        world.recover(number)


@given(st.lists(step, min_size=10, max_size=120), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_with_a_limit_one_failure_loses_nothing(steps, dying):
    world = World(holders_max=2)
    run(world, steps)
    one = world.processes[dying]
    one.alive = False
    for (source, target), link in list(world.links.items()):
        while source == one.name and link:  # what it had sent comes
            world.deliver(source, target)
    holders = [other for other in world.processes if other.alive and one.subject in other.stash.open]
    told = [other for other in world.processes if other.alive and other.knows[dying] > world.reach[one.subject]]
    assert not told or holders  # what somebody saw is held by more than the one that died


@given(st.lists(step, max_size=200))
@settings(max_examples=100, deadline=None)
def test_nothing_is_held_when_the_journal_has_all(steps):
    world = World()
    run(world, steps)
    for _ in range(4):
        for one in world.processes:
            world.flush(int(one.name[1:]))
        for source, target in list(world.links):
            while world.links[source, target]:
                world.deliver(source, target)
    for one in world.processes:
        assert list(one.stash.open) == [one.subject]
        assert not one.log.entries
        assert one.stash.bytes == 0
        assert not one.log.names


@given(st.lists(step, max_size=120))
@settings(max_examples=100, deadline=None)
def test_nobody_is_told_twice(steps):
    world = World()
    heard: dict[tuple[str, str], dict[bytes, set[Any]]] = {}
    run(world, steps)
    for (source, target), link in world.links.items():
        for message, _ in link:
            if isinstance(message, m.StashCarried):
                for log in message.logs:
                    known = heard.setdefault((source, target), {}).setdefault(log.subject, set())
                    names = {entry[:2] for entry in log.entries}
                    assert not names & known
                    known |= names


def test_a_full_stash_holds_messages_back_until_the_journal_has_room():
    stash = Stash(bytes_max=250)
    log = stash.begin(b"a" * 16, JOURNAL, 1)
    for number in range(3):
        stash.add(log, ("turn", number, b"caller"))
    out = stash.attach([c.Send("peer", NEWS)])
    assert [type(command) for command in out] == [c.SetTimer]
    assert isinstance(out[0].event, StashDue)
    (written,) = stash.flush()
    kept = m.StashKept(log.subject, 1, written.message.mark, written.message.reach)
    assert stash.kept(kept) == [c.Send("peer", NEWS)]
    assert stash.bytes == 0


def test_ids_of_what_a_replay_submits_are_those_of_before():
    assert [child_id(b"p" * 16, n) for n in range(3)] == [child_id(b"p" * 16, n) for n in range(3)]


def test_what_waited_for_a_journal_that_has_died_goes_out():
    stash = Stash()
    stash.insist(b"t" * 16, JOURNAL, 1, ("wait", 0, b"chosen"))
    assert stash.attach([c.Send("peer", NEWS)]) != [c.Send("peer", NEWS)]
    assert stash.peer_lost(JOURNAL) == [c.Send("peer", NEWS)]
    assert not stash.open


def test_what_the_journal_says_of_a_log_that_is_not_held_any_more_is_not_taken_for_what_came_since():
    stash = Stash()
    turns = [("turn", number, b"caller") for number in range(2)]
    stash.merge(JOURNAL, (m.Log(b"a" * 16, 1, (turns[0],), 1, 0, 2),), "peer")
    (late,) = stash.flush(everything=True)
    stash.merge(JOURNAL, (m.Log(b"a" * 16, 1, (), 1, 2, 2),), "peer")  # others know that already
    assert not stash.open
    stash.merge(JOURNAL, (m.Log(b"a" * 16, 1, (turns[1],), 2, 0, 2),), "peer")
    stash.kept(m.StashKept(b"a" * 16, 1, late.message.mark, 1))
    assert stash.given(b"a" * 16, 1) == ((turns[1],), 2)


def test_a_log_of_the_next_incarnation_takes_the_place_of_the_last():
    stash = Stash()
    for incarnation in (1, 2):
        stash.merge(JOURNAL, (m.Log(b"a" * 16, incarnation, (("turn", 0, b"caller"),), 1, 0, 2),), "peer")
    (written,) = stash.flush(everything=True)
    assert (written.message.attempt, len(written.message.recorded)) == (2, 1)
    stash.kept(m.StashKept(b"a" * 16, 2, written.message.mark, 1))
    assert stash.bytes == 0
