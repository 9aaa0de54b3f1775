"""Actors on real processes: state, order and calls survive the loss of the actor, its callers, and both in turn."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest

import flowengine as flow
from tests.cluster.kit import until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def engine():
    with flow.init(num_workers=2):
        yield


@flow.remote
class Tally:
    def __init__(self) -> None:
        self.lines: list[object] = []

    def add(self, line: object) -> int:
        self.lines.append(line)
        return len(self.lines)

    def all(self) -> list[object]:
        return list(self.lines)

    def pid(self) -> int:
        return os.getpid()


def kill(actor) -> None:
    os.kill(flow.get(actor.pid.remote(), timeout=20), signal.SIGKILL)


@pytest.mark.parametrize("checkpoint", ["never", 3, "0.05s", "adaptive"])
def test_state_is_exact_after_many_deaths(checkpoint):
    tally = Tally.options(checkpoint=checkpoint).remote()
    seen = []
    for number in range(4):
        refs = [tally.add.remote(number) for _ in range(10)]
        kill(tally)
        seen += flow.get(refs, timeout=40)
    assert seen == list(range(1, 41))


def test_a_caller_that_runs_again_finds_its_calls_done(tmp_path):
    tally = Tally.remote()

    @flow.remote
    def caller(tally):
        first = flow.get(tally.add.remote("one"))
        second = flow.get(tally.add.remote("two"))
        if not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        third = flow.get(tally.add.remote("three"))
        return first, second, third

    assert flow.get(caller.remote(tally), timeout=40) == (1, 2, 3)
    assert flow.get(tally.all.remote(), timeout=20) == ["one", "two", "three"]


def test_a_caller_with_a_fresh_state_makes_calls_of_its_own():
    @flow.remote(recovery="restart")
    class Sender:
        def __init__(self, tally) -> None:
            self.tally = tally

        def send(self, line: int) -> int:
            return flow.get(self.tally.add.remote(line))

        def pid(self) -> int:
            return os.getpid()

    tally = Tally.remote()
    sender = Sender.remote(tally)
    assert flow.get([sender.send.remote(line) for line in range(3)], timeout=20) == [1, 2, 3]
    kill(sender)
    with contextlib.suppress(flow.ActorDied):  # it may have been sent to the dead one
        flow.get(sender.pid.remote(), timeout=20)
    assert flow.get([sender.send.remote(line) for line in range(3, 6)], timeout=20) == [4, 5, 6]
    assert flow.get(tally.all.remote(), timeout=20) == list(range(6))


def test_calls_of_a_caller_that_is_gone_are_replayed():
    tally = Tally.options(checkpoint="never").remote()

    @flow.remote
    def caller(tally, name):
        return flow.get([tally.add.remote((name, i)) for i in range(5)])[-1]

    flow.get([caller.remote(tally, name) for name in "ab"], timeout=20)
    before = flow.get(tally.all.remote())
    for worker in [w.worker_id for node in flow.nodes() for w in node.workers if w.state == "idle"]:
        flow.chaos.kill_worker(of=worker)
    kill(tally)
    assert flow.get(tally.all.remote(), timeout=30) == before


def test_refs_in_the_state_stay_alive_over_deaths():
    @flow.remote(checkpoint=1)
    class Keeper:
        def __init__(self):
            self.refs = []

        def keep(self, refs):
            self.refs += refs
            return len(self.refs)

        def total(self):
            return float(sum(flow.get(ref)[0] for ref in self.refs))

        def pid(self):
            return os.getpid()

    keeper = Keeper.remote()
    flow.get([keeper.keep.remote([flow.put(np.full(1 << 17, float(i)))]) for i in range(3)])
    for _ in range(2):
        kill(keeper)
        assert flow.get(keeper.total.remote(), timeout=30) == 3.0


def test_choices_inside_of_methods_are_repeated():
    @flow.remote(checkpoint="never")
    class Dice:
        def __init__(self):
            self.thrown = []

        def throw(self):
            self.thrown.append(flow.record(lambda: os.urandom(4)))
            return list(self.thrown)

        def pid(self):
            return os.getpid()

    dice = Dice.remote()
    before = flow.get([dice.throw.remote() for _ in range(3)])[-1]
    kill(dice)
    assert flow.get(dice.throw.remote(), timeout=30)[:3] == before


def test_two_threads_and_a_death_lose_nothing():
    tally = Tally.remote()

    def push(name):
        for i in range(40):
            flow.get(tally.add.remote((name, i)), timeout=40)

    threads = [threading.Thread(target=push, args=(name,)) for name in "xy"]
    for thread in threads:
        thread.start()
    for _ in range(2):
        kill(tally)
    for thread in threads:
        thread.join()
    lines = flow.get(tally.all.remote(), timeout=20)
    assert sorted(lines) == sorted((name, i) for name in "xy" for i in range(40))


def test_bad_options_are_refused_when_given():
    for bad in ({"checkpoint": 0}, {"checkpoint": "often"}, {"recovery": "maybe"}, {"lifetime": "for ever"},
                {"max_concurrency": 0}, {"num_returns": 2}, {"no_such": 1}):
        with pytest.raises((ValueError, TypeError)):
            Tally.options(**bad)
    with pytest.raises(ValueError, match="threads"):
        Tally.options(max_concurrency=2).remote()
    with pytest.raises(flow.ActorNotFound):
        flow.get_actor("nobody")
    with pytest.raises(TypeError):
        flow.kill("not an actor")
    with pytest.raises(flow.BadValue):
        flow.exit_actor()


def test_exit_ends_the_actor_after_the_call():
    @flow.remote
    class Quitter:
        def quit(self):
            flow.exit_actor()

    quitter = Quitter.remote()
    assert flow.get(quitter.quit.remote(), timeout=20) is None
    with pytest.raises(flow.ActorDied, match="exit_actor"):
        flow.get(quitter.quit.remote(), timeout=20)


def test_a_call_can_be_cancelled_and_the_next_runs():
    gate = threading.Event()

    @flow.remote
    class Slow:
        def nap(self):
            import time

            time.sleep(600)

        def ping(self):
            return "pong"

    slow = Slow.remote()
    assert flow.get(slow.ping.remote(), timeout=20) == "pong"
    running, waiting = slow.nap.remote(), slow.nap.remote()
    gate.wait(0.2)
    flow.cancel(waiting)
    flow.cancel(running)
    for ref in (running, waiting):
        with pytest.raises(flow.TaskCancelled):
            flow.get(ref, timeout=20)
    assert flow.get(slow.ping.remote(), timeout=20) == "pong"


def test_a_time_limit_of_a_call():
    @flow.remote
    class Slow:
        def nap(self):
            import time

            time.sleep(600)

        def ping(self):
            return "pong"

    slow = Slow.remote()
    with pytest.raises(flow.TaskTimeout):
        flow.get(slow.nap.options(timeout_s=0.3).remote(), timeout=20)
    assert flow.get(slow.ping.remote(), timeout=20) == "pong"


def test_large_arguments_of_tasks_that_are_gone_are_there_for_a_replay():
    @flow.remote(checkpoint="never")
    class Sums:
        def __init__(self):
            self.sums = []

        def add(self, array):
            self.sums.append(float(array.sum()))
            return list(self.sums)

        def pid(self):
            return os.getpid()

    @flow.remote
    def push(sums, number):
        return flow.get(sums.add.remote(np.full(20_000, float(number))))

    sums = Sums.remote()
    for number in range(3):
        before = flow.get(push.remote(sums, number), timeout=20)
    kill(sums)
    assert flow.get(sums.add.remote(np.zeros(1)), timeout=30) == [*before, 0.0]


def test_a_cancelled_call_stays_undone_after_a_death(tmp_path):
    @flow.remote(checkpoint="never")
    class Slow(Tally._class):
        def nap(self, path):
            import time

            path.touch()
            time.sleep(600)
            self.lines.append("nap")

    slow = Slow.remote()
    running, waiting, last = slow.nap.remote(tmp_path / "runs"), slow.add.remote(1), slow.add.remote(2)
    flow.cancel(waiting)
    while not (tmp_path / "runs").exists():
        flow.wait([last], timeout=0.05)
    flow.cancel(running)
    assert flow.get(last, timeout=20) == 1
    kill(slow)
    assert flow.get(slow.all.remote(), timeout=20) == [2]


@flow.remote
class Generous:
    def numbers(self, count):
        yield from range(count)

    def pid(self):
        return os.getpid()


@flow.remote
class GenerousLoop(Generous._class):
    async def slowly(self, count):
        import asyncio

        for number in range(count):
            await asyncio.sleep(0)
            yield number


@pytest.mark.parametrize(
    ("cls", "method"), [(Generous, "numbers"), (GenerousLoop, "numbers"), (GenerousLoop, "slowly")]
)
def test_a_generator_of_an_actor_is_read_by_the_program_and_by_tasks(cls, method):
    generous = cls.remote()

    @flow.remote
    def read(generous, count):
        items = getattr(generous, method).options(num_returns="stream").remote(count)
        return [flow.get(item) for item in items]

    items = getattr(generous, method).options(num_returns="stream").remote(300)
    assert [flow.get(item, timeout=20) for item in items] == list(range(300))
    assert flow.get(read.remote(generous, 5), timeout=20) == list(range(5))
    kill(generous)
    assert flow.get(read.remote(generous, 7), timeout=20) == list(range(7))


def test_coroutines_are_cancelled_and_limited_in_time():
    @flow.remote
    class Sleeper:
        async def nap(self):
            import asyncio

            await asyncio.sleep(600)

        async def ping(self):
            return "pong"

    sleeper = Sleeper.remote()
    nap = sleeper.nap.remote()
    assert flow.get(sleeper.ping.remote(), timeout=20) == "pong"
    for call in itertools.chain([nap], (sleeper.nap.remote() for _ in range(8))):  # also at once
        flow.cancel(call)
        with pytest.raises(flow.TaskCancelled):
            flow.get(call, timeout=20)
    with pytest.raises(flow.TaskTimeout):
        flow.get(sleeper.nap.options(timeout_s=0.2).remote(), timeout=20)


def test_a_task_that_is_retried_makes_no_call_twice(tmp_path):
    tally = Tally.remote()

    @flow.remote(retry_exceptions=True, max_retries=3)
    def caller(tally):
        globals()["kept"] = tally  # the worker has the handle when it runs the next attempt
        refs = [tally.add.remote(name) for name in "ab"]
        flow.get(refs[0])
        (tmp_path / str(len(list(tmp_path.iterdir())))).touch()
        if len(list(tmp_path.iterdir())) < 3:
            raise ValueError("again")
        return flow.get([*refs, tally.add.remote("c")])

    assert flow.get(caller.remote(tally), timeout=40) == [1, 2, 3]
    assert flow.get(tally.all.remote(), timeout=20) == ["a", "b", "c"]


def test_a_constructor_that_kills_its_process_is_given_up():
    @flow.remote
    class Deadly:
        def __init__(self):
            os.kill(os.getpid(), signal.SIGKILL)

        def ping(self):
            return "pong"

    with pytest.raises(flow.ActorDied, match="in its constructor"):
        flow.get(Deadly.remote().ping.remote(), timeout=40)


def test_many_who_want_a_named_actor_get_one():
    shared = Tally.options(name="shared", get_if_exists=True, lifetime="detached")

    @flow.remote
    def join(name):
        return flow.get(shared.remote().add.remote(name), timeout=20)

    keep = shared.remote()
    assert sorted(flow.get([join.remote(i) for i in range(4)], timeout=20)) == [1, 2, 3, 4]
    flow.kill(keep)


@flow.remote
class Gate:
    def __init__(self) -> None:
        self.done: list[int] = []

    def quick(self, number: int) -> int:
        self.done.append(number)
        return number

    def wait_for(self, path: str) -> int:
        while not os.path.exists(path):
            time.sleep(0.001)
        return len(self.done)

    def numbers(self) -> list[int]:
        return self.done


def test_an_answer_does_not_wait_for_a_long_call_behind_it(tmp_path):
    gate = Gate.remote()
    flow.get([gate.quick.remote(number) for number in range(200)])  # short calls are ordered ahead from here on
    quick, slow = gate.quick.remote(200), gate.wait_for.remote(str(tmp_path / "go"))
    behind = gate.quick.remote(201)
    assert flow.get(quick, timeout=20) == 200
    (tmp_path / "go").touch()
    assert flow.get([slow, behind]) == [201, 201]


def test_calls_that_wait_behind_a_long_one_are_cancelled_one_by_one(tmp_path):
    gate = Gate.remote()
    flow.get([gate.quick.remote(number) for number in range(200)])
    slow = gate.wait_for.remote(str(tmp_path / "go"))
    behind = [gate.quick.remote(200 + number) for number in range(5)]
    flow.cancel(behind[1])
    flow.cancel(behind[3])
    flow.cancel(slow)  # the last: what waits behind it may begin at once
    for ref in (slow, behind[1], behind[3]):
        with pytest.raises(flow.TaskCancelled):
            flow.get(ref, timeout=30)
    assert flow.get([behind[0], behind[2], behind[4]], timeout=30) == [200, 202, 204]
    assert flow.get(gate.numbers.remote()) == [*range(201), 202, 204]


@pytest.mark.parametrize("checkpoint", ["never", 1])
def test_a_call_that_a_caller_cancelled_in_an_earlier_run_stays_cancelled(checkpoint, tmp_path):
    @flow.remote
    class Slow(Tally._class):
        def nap(self, path):
            import time

            path.touch()
            time.sleep(600)

    @flow.remote(retry_exceptions=True)
    def caller(slow):
        ref = slow.nap.remote(tmp_path / "runs")
        while not (tmp_path / "runs").exists():
            flow.wait([ref], timeout=0.01)
        if not (tmp_path / "again").exists():
            flow.cancel(ref)
            (tmp_path / "again").touch()
            raise ValueError("again")
        with pytest.raises(flow.TaskCancelled):
            flow.get(ref, timeout=20)
        return flow.get(slow.add.remote(1))

    assert flow.get(caller.remote(Slow.options(checkpoint=checkpoint).remote()), timeout=40) == 1


@flow.remote
class Bell:
    def __init__(self) -> None:
        self.rung = asyncio.Event()

    async def wait(self) -> None:
        await self.rung.wait()

    async def ring(self, pipe: str) -> None:
        self.rung.set()
        os.close(os.open(pipe, os.O_WRONLY))


def test_a_call_goes_out_though_the_program_waits_for_something_else(tmp_path):
    bell = Bell.remote()
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    waiting = bell.wait.remote()
    flow.wait([waiting], timeout=0.1)
    bell.ring.remote(pipe)
    os.close(os.open(pipe, os.O_RDONLY))  # returns when the actor has opened it too
    assert flow.get(waiting) is None


def test_what_a_class_has_is_callable_through_its_handle():
    class Shelf:
        """Holds things."""

        def __init__(self):
            self.things = {}

        def __setitem__(self, name, thing):
            self.things[name] = thing

        def __getitem__(self, name):
            return self.things[name]

        def __len__(self):
            return len(self.things)

        def __call__(self, x, y=2):
            return x + y

        @classmethod
        def kind(cls):
            return cls.__name__

        @staticmethod
        def twice(x):
            return 2 * x

    remote_shelf = flow.remote(Shelf)

    class Larger(remote_shelf):
        def twice(self, x):
            return super().twice(x) + 1

    shelf = flow.remote(Larger).remote()
    shelf.__setitem__.remote("a", 1)
    refs = [shelf.__getitem__.remote("a"), shelf.__len__.remote(), shelf.__call__.remote(1), shelf.kind.remote()]
    assert flow.get([*refs, shelf.twice.remote(2)], timeout=20) == [1, 1, 3, "Larger", 5]
    assert {"twice", "kind", "__call__", "actor_id"} <= set(dir(shelf))
    assert (remote_shelf.__doc__, remote_shelf.__name__, remote_shelf.__module__) == (Shelf.__doc__, "Shelf", __name__)
    for wrong in (shelf.__call__.remote(), shelf.__call__.remote(1, z=3)):
        with pytest.raises(TypeError, match="argument"):
            flow.get(wrong, timeout=20)
    with pytest.raises(AttributeError):
        shelf.things = {}
    with pytest.raises(AttributeError, match="it has"):
        shelf.things
    with pytest.raises(TypeError):
        remote_shelf.options(placement=5)
    with pytest.raises(ValueError, match="name"):
        remote_shelf.options(get_if_exists=True).remote()


def test_an_actor_gives_others_a_handle_of_itself():
    @flow.remote
    class Member:
        def __init__(self):
            self.heard = []
            self.born_as = flow.current_actor()

        def greet(self, other):
            return flow.get(other.hear.remote(flow.current_actor(), "hello"))

        def hear(self, who, what):
            self.heard.append(what)
            return who

        def same(self):
            return self.born_as == flow.current_actor()

    one, other = Member.remote(), Member.remote()
    assert flow.get(one.greet.remote(other), timeout=20) == one
    assert flow.get(one.same.remote(), timeout=20)
    flow.chaos.kill_worker(of=one)
    assert flow.get([one.same.remote(), one.greet.remote(other)], timeout=20) == [True, one]
    with pytest.raises(flow.BadValue):
        flow.current_actor()


def test_calls_in_threads_are_answered_when_they_are_cancelled_or_out_of_time(tmp_path):
    @flow.remote(max_concurrency=2, recovery="restart")
    class Threads:
        def hold(self, name, value):
            (tmp_path / name).touch()
            until((tmp_path / "open").exists)
            return np.full(50_000, value)

        def ping(self):
            return "pong"

    threads = Threads.remote()
    cancelled, slow = threads.hold.remote("a", 1.0), threads.hold.options(timeout_s=0.2).remote("b", 2.0)
    until(lambda: (tmp_path / "a").exists() and (tmp_path / "b").exists())
    never_begun = threads.hold.remote("c", 3.0)
    flow.cancel(cancelled)
    flow.cancel(never_begun)
    for ref, error in ((cancelled, flow.TaskCancelled), (slow, flow.TaskTimeout), (never_begun, flow.TaskCancelled)):
        with pytest.raises(error):
            flow.get(ref, timeout=20)
    (tmp_path / "open").touch()  # the threads go on until then
    assert flow.get(threads.ping.remote(), timeout=20) == "pong"
    assert flow.get(threads.hold.remote("d", 4.0), timeout=20)[0] == 4.0
    assert not (tmp_path / "c").exists()


@flow.remote
class Sleeper:
    def sleep(self, seconds):
        time.sleep(seconds)
        return os.getpid()


def test_an_actor_is_killed_in_the_middle_of_a_call_too():
    sleeper = Sleeper.remote()
    pid = flow.get(sleeper.sleep.remote(0), timeout=30)
    running = sleeper.sleep.remote(2)
    until(lambda: "1 calls" in flow.explain(sleeper) or "2 calls begun" in flow.explain(sleeper))
    flow.kill(sleeper, restart=True)
    assert flow.get(running, timeout=30) != pid
