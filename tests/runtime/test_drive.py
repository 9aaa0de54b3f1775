"""The loop that all shells share, around a machine of a few lines."""
from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from flowengine.core.commands import Send, SetTimer
from flowengine.core.messages import WIRE, Asked, Inline, PeerLost, Ping, Pong, RefTo, TaskDone
from flowengine.runtime.drive import Drive, decode, encode
from flowengine.runtime.session import Session


class Machine:
    """Answers a ping with what `answers` says for its number; a list that is an exception is raised."""

    def __init__(self, answers=None):
        self.seen = []
        self.inside = 0
        self.answers = answers or {}

    def handle(self, event, now, sender=""):
        self.inside += 1
        assert self.inside == 1, "a machine has one door"
        self.seen.append((event, sender))
        answer = self.answers.get(getattr(event, "number", None), [])
        self.inside -= 1
        if isinstance(answer, Exception):
            raise answer
        return answer


class Post:
    """An endpoint that keeps what it is given, frame by frame."""

    def __init__(self):
        self.frames = []
        self.waiting = []
        self.flushed = threading.Event()

    def send(self, to, message, urgent):
        self.waiting.append((to, message))
        if urgent:
            self.flush()

    def flush(self):
        if self.waiting:
            self.frames.append(self.waiting)
            self.waiting = []
            self.flushed.set()


def driven(machine, scenario):
    async def run():
        bugs = []
        drive = Drive(machine, lambda event, error: bugs.append((event, error)))
        post = Post()
        drive.attach(post, asyncio.get_running_loop())
        async with asyncio.timeout(20):
            await scenario(drive, post)
        return bugs

    return asyncio.run(run())


def test_batches_travel():
    batch = [TaskDone(b"t" * 16, 1, (Inline(b"x", (RefTo(b"o", "a"),)),), 5), Ping(1), Asked(1, "stats", {"a": [1]})]
    assert decode(encode(batch)) == batch
    assert len(WIRE) == len({kind.__name__ for kind in WIRE})


def test_what_a_machine_says_to_itself_it_hears_after_the_step():
    machine = Machine({1: [Send("me", PeerLost("b", "")), Send("a", Pong(1))]})

    async def scenario(drive, post):
        drive.attach(post, asyncio.get_running_loop(), "me")
        drive.step(Ping(1), "a")
        assert machine.seen == [(Ping(1), "a"), (PeerLost("b", ""), "me")]
        assert post.frames == [[("a", Pong(1))]]

    assert driven(machine, scenario) == []


def test_a_batch_goes_in_one_by_one_and_its_answers_out_as_one_frame():
    machine = Machine({1: [Send("a", Pong(1))], 2: [Send("a", Pong(2)), Send("b", Pong(2))]})

    async def scenario(drive, post):
        drive.batch("peer", [Ping(1), Ping(2)])
        assert machine.seen == [(Ping(1), "peer"), (Ping(2), "peer")]
        assert post.frames == [[("a", Pong(1)), ("a", Pong(2)), ("b", Pong(2))]]

    assert driven(machine, scenario) == []


def test_a_step_within_a_step_comes_after_it():
    machine = Machine({1: [Send("a", Pong(1)), Pong(7), Send("a", Pong(2))], 9: [Send("a", Pong(9))]})

    async def scenario(drive, post):
        drive.perform[Pong] = lambda command: drive.step(Ping(9))
        drive.step(Ping(1))
        assert [event for event, _ in machine.seen] == [Ping(1), Ping(9)]
        assert post.frames == [[("a", Pong(1)), ("a", Pong(2)), ("a", Pong(9))]]

    assert driven(machine, scenario) == []


def test_a_machine_that_fails_is_told_and_goes_on():
    machine = Machine({1: ValueError("one"), 2: [Pong(2), Send("a", Pong(3))]})

    async def scenario(drive, post):
        drive.batch("peer", [Ping(1), Ping(2)])
        drive.step(Ping(1))
        assert post.frames == [[("a", Pong(3))]]

    bugs = driven(machine, scenario)
    assert [(event, type(error)) for event, error in bugs] == [
        (Ping(1), ValueError), (Ping(2), KeyError), (Ping(1), ValueError)]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_timers_come_back_as_events(elsewhere):
    machine = Machine({1: [SetTimer(0.01, Ping(2))]})

    async def scenario(drive, post):
        machine.answers[2] = [Pong(0)]
        fired = asyncio.Event()
        drive.perform[Pong] = lambda command: fired.set()
        if elsewhere:
            await asyncio.to_thread(drive.step, Ping(1))
        else:
            drive.step(Ping(1))
        await fired.wait()
        assert machine.seen[-1] == (Ping(2), "")

    assert driven(machine, scenario) == []


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_is_lazy_waits_but_not_for_ever(elsewhere):
    machine = Machine({1: [Send("a", Pong(1), lazy=True)], 2: [Send("b", Pong(2))]})

    async def scenario(drive, post):
        if elsewhere:
            await asyncio.to_thread(drive.step, Ping(1))
        else:
            drive.step(Ping(1))
            assert post.frames == []
        assert await asyncio.to_thread(post.flushed.wait, 10)
        drive.step(Ping(1))
        drive.step(Ping(2))
        assert post.frames == [[("a", Pong(1))], [("a", Pong(1)), ("b", Pong(2))]]

    assert driven(machine, scenario) == []


def test_threads_take_turns():
    machine = Machine()

    async def scenario(drive, post):
        await asyncio.gather(*(asyncio.to_thread(lambda: [drive.step(Ping(n)) for n in range(500)]) for _ in range(4)))
        drive.lost("peer", "gone")
        assert len(machine.seen) == 2001
        assert machine.seen[-1] == (PeerLost("peer", "gone"), "peer")

    assert driven(machine, scenario) == []


def test_who_waits_is_woken_once_however_often_the_end_is_told():
    woken = []
    session = SimpleNamespace(waits={})

    def waiter(number):
        def wake():
            woken.append(number)
            Session.wake_all(session)

        return wake

    session.waits.update({number: waiter(number) for number in range(3)})
    Session.wake_all(session)
    assert woken == [0, 1, 2]
