"""Locks, semaphores, queues, events and variables: shared by name or passed on, and released when holders die."""
from __future__ import annotations

import asyncio
import os
import pickle
import queue
import signal
import threading

import pytest

import flowengine as flow
from flowengine.runtime.answers import explained
from tests.cluster.kit import until

pytestmark = pytest.mark.cluster
NOW_S = 10.0  # long enough for what comes at once


@pytest.fixture(scope="module", autouse=True)
def session():
    with flow.init(num_workers=2) as found:
        yield found


@flow.remote(max_retries=0)
def hold(lock, began):
    lock.acquire()
    flow.Variable("holder").set(flow.context().worker_id)
    began.set()
    flow.Event("never").wait()
    return "never"


@flow.remote
def add_up(lock, cell, count):
    for _ in range(count):
        with lock:
            cell.set(cell.get() + 1)


def waits_for(shared):
    """Whether somebody waits for it."""
    waits = flow.refs.Current.session.shared.keeper.machine.waits
    return any(wait.asked.name == shared.name for wait in list(waits.values()))


def test_a_lock_excludes_and_one_name_is_one_lock():
    lock, cell = flow.Lock("sum"), flow.Variable()
    cell.set(0)
    flow.get([add_up.remote(flow.Lock("sum") if turn % 2 else lock, cell, 20) for turn in range(4)])
    assert cell.get() == 80
    assert lock == flow.Lock("sum")
    assert not lock.locked()


def test_tokens_grow():
    lock, tokens = flow.Lock(), []
    for _ in range(3):
        with lock as held:
            tokens.append(held.token)
    assert tokens == sorted(set(tokens))
    with pytest.raises(flow.BadValue, match="not held"):
        _ = lock.token


def test_a_lock_is_not_reentrant():
    lock = flow.Lock("once")
    with lock, pytest.raises(flow.BadValue, match="not re-entrant"):
        lock.acquire(timeout=NOW_S)
    with pytest.raises(flow.BadValue, match="not held"):
        lock.release()


def test_another_thread_waits_for_the_lock():
    lock, got = flow.Lock(), []
    with lock:
        thread = threading.Thread(target=lambda: got.append(lock.acquire() and lock.release()))
        thread.start()
        assert lock.locked()
        assert not got
    thread.join(NOW_S)
    assert got == [None]


def test_a_time_limit():
    lock, began = flow.Lock(), flow.Event()
    held = hold.remote(lock, began)
    assert began.wait(NOW_S)
    assert lock.acquire(timeout=0.05) is False
    assert lock.acquire(blocking=False) is False
    flow.cancel(held)
    assert lock.acquire(timeout=NOW_S)
    lock.release()


def test_a_lock_is_free_when_its_holder_is_killed():
    lock, began = flow.Lock(), flow.Event()
    held = hold.remote(lock, began)
    assert began.wait(NOW_S)
    flow.chaos.kill_worker(of=held)
    assert lock.acquire(timeout=NOW_S)
    lock.release()
    with pytest.raises(flow.WorkerCrashed):
        flow.get(held)


def test_a_lock_is_free_when_its_task_ends():
    @flow.remote
    def careless(lock):
        return lock.acquire()

    lock = flow.Lock()
    token = flow.get(careless.remote(lock))
    assert lock.acquire(timeout=NOW_S) > token
    lock.release()


def test_a_task_of_a_task_that_is_killed_gives_the_lock_back():
    @flow.remote
    def outer(lock, began):
        return flow.get(hold.remote(lock, began))

    lock, began = flow.Lock(), flow.Event()
    ref = outer.remote(lock, began)
    assert began.wait(NOW_S)
    flow.chaos.kill_worker(of=flow.Variable("holder").get(NOW_S))
    assert lock.acquire(timeout=NOW_S)
    lock.release()
    with pytest.raises(flow.WorkerCrashed):
        flow.get(ref)


def test_a_task_that_runs_again_takes_the_lock_again():
    @flow.remote
    def crash_once(lock, gone):
        with lock:
            token = lock.token
            if not gone.is_set():
                gone.set()
                os.kill(os.getpid(), signal.SIGKILL)
            return token

    lock, gone = flow.Lock(), flow.Event()
    first = lock.acquire()
    lock.release()
    assert flow.get(crash_once.remote(lock, gone)) > first + 1


def test_a_semaphore():
    semaphore = flow.Semaphore(2)
    assert [bool(semaphore.acquire(timeout=0)) for _ in range(3)] == [True, True, False]
    assert semaphore.held() == 2
    semaphore.release()
    semaphore.release()
    assert flow.Semaphore("named", 3) == flow.Semaphore("named")
    with pytest.raises(flow.BadValue, match="value=3 already"):
        flow.Semaphore("named", 4)


def test_waits_lend_their_cpu_even_with_one_slot():
    @flow.remote
    def waits(event, level):
        if level:
            ref = waits.remote(event, level - 1)
            return flow.get(ref) + 1 if event.wait(NOW_S) else -100
        event.set()
        return 0

    assert flow.get(waits.remote(flow.Event(), 4)) == 4


def test_a_queue_between_tasks():
    @flow.remote
    def produce(jobs, start):
        for number in range(start, start + 30):
            jobs.put(number)

    @flow.remote
    def consume(jobs):
        return list(jobs)

    jobs = flow.Queue(maxsize=4)
    consumers = [consume.remote(jobs) for _ in range(3)]
    flow.get([produce.remote(jobs, start) for start in (0, 100)])
    jobs.close()
    got = flow.get(consumers)
    assert sorted(number for one in got for number in one) == [*range(30), *range(100, 130)]
    for one in got:
        assert [number for number in one if number < 100] == sorted(number for number in one if number < 100)


def test_what_a_queue_raises():
    jobs = flow.Queue(2)
    with pytest.raises(queue.Empty):
        jobs.get_nowait()
    with pytest.raises(queue.Empty):
        jobs.get(timeout=0.01)
    jobs.put_many(["a", "b"])
    assert (jobs.qsize(), jobs.full(), jobs.empty()) == (2, True, False)
    with pytest.raises(queue.Full):
        jobs.put_nowait("c")
    with pytest.raises(queue.Full):
        jobs.put("c", timeout=0.01)
    with pytest.raises(flow.BadValue, match="never fit"):
        jobs.put_many(["a", "b", "c"])
    assert jobs.get_many(5) == ["a", "b"]
    jobs.close()
    with pytest.raises(flow.QueueClosed):
        jobs.put("d")
    with pytest.raises(flow.QueueClosed):
        jobs.get()


@pytest.mark.parametrize("make", [
    lambda: flow.Lock(3), lambda: flow.Lock(""), lambda: flow.Lock("~x"), lambda: flow.Queue(-1),
    lambda: flow.Lock("half a \udc80"),
    lambda: flow.Queue(1.5),
    lambda: flow.Queue(1, 2), lambda: flow.Semaphore(0), lambda: flow.Event(b"e"), lambda: flow.Variable(7),
    lambda: flow.Queue(maxsize="3"), lambda: flow.Lock().acquire(timeout=-1), lambda: flow.Queue().get(timeout="1"),
    lambda: flow.Queue().get_many(0), lambda: flow.Queue().put_many(5), lambda: flow.Queue().put(lambda: open)(),
])  # fmt: skip
def test_bad_input_is_refused_where_it_is_given(make):
    with pytest.raises((ValueError, TypeError)):
        make()


def test_names_are_those_of_their_kind():
    lock, jobs = flow.Lock("both"), flow.Queue("both", maxsize=3)
    with lock:
        jobs.put(1)
    with pytest.raises(flow.BadValue, match="maxsize=3 already"):
        flow.Queue("both", maxsize=4)
    assert flow.Queue("both").get() == 1


def test_references_and_large_values_go_through_a_queue():
    @flow.remote
    def send(jobs):
        jobs.put(flow.put(b"r" * 300_000))
        jobs.put(b"v" * 300_000)
        jobs.put({"ref": flow.put("small"), "n": 1})

    @flow.remote
    def receive(jobs):
        first, second, third = jobs.get(), jobs.get(), jobs.get()
        return len(flow.get(first)), len(second), flow.get(third["ref"])

    jobs = flow.Queue()
    flow.get(send.remote(jobs))
    assert flow.get(receive.remote(jobs)) == (300_000, 300_000, "small")
    flow.get(send.remote(jobs))
    assert len(flow.get(jobs.get())) == len(jobs.get()) == 300_000
    assert flow.get(jobs.get()["ref"]) == "small"


def test_what_goes_through_a_queue_is_freed():
    jobs = flow.Queue()

    @flow.remote
    def get(jobs):
        return len(jobs.get())

    def used():
        session = flow.refs.Current.session
        return session.ask(session.node, "store")["used_bytes"]

    before = used()
    jobs.put(b"x" * 5_000_000)
    assert flow.get(get.remote(jobs)) == 5_000_000
    until(lambda: used() <= before)


def test_an_item_is_not_lost_when_its_getter_is_killed_while_it_waits():
    @flow.remote(max_retries=0)
    def get(jobs):
        return jobs.get()

    jobs = flow.Queue()
    waiting = get.remote(jobs)
    until(lambda: "waits for queue" in repr(waiting))
    flow.chaos.kill_worker(of=waiting)
    with pytest.raises(flow.WorkerCrashed):
        flow.get(waiting)
    jobs.put("item")
    assert jobs.get(timeout=NOW_S) == "item"


def test_a_task_that_runs_again_gets_the_same_items_and_puts_once():
    @flow.remote
    def double(inputs, outputs, gone):
        for _ in range(4):
            item = inputs.get()
            outputs.put(item * 2)
            if item == 3 and not gone.is_set():
                gone.set()
                os.kill(os.getpid(), signal.SIGKILL)
        return "done"

    inputs, outputs, gone = flow.Queue(), flow.Queue(), flow.Event()
    inputs.put_many([1, 2, 3, 4, 5])
    assert flow.get(double.remote(inputs, outputs, gone)) == "done"
    assert outputs.get_many(10) == [2, 4, 6, 8]
    assert inputs.get_many(10) == [5]


def test_an_actor_that_is_killed_has_what_it_took_and_puts_once():
    @flow.remote
    class Mover:
        def __init__(self):
            self.seen = []

        def move(self, inputs, outputs):
            with flow.Lock("mover"):
                self.seen.append(inputs.get())
                outputs.put(self.seen[-1])
            return len(self.seen)

        def all(self):
            return self.seen

    inputs, outputs, mover = flow.Queue(), flow.Queue(), Mover.remote()
    inputs.put_many(range(20))
    calls = [mover.move.remote(inputs, outputs) for _ in range(10)]
    flow.get(calls[5])
    flow.chaos.kill_worker(of=mover)
    with flow.Lock("mover"):  # what was done before is done again without it
        assert flow.get(calls[5]) == 6
    flow.get(calls)
    assert flow.get(mover.all.remote()) == list(range(10))
    assert outputs.get_many(100) == list(range(10))
    assert inputs.qsize() == 10


def test_an_actor_may_hold_a_lock_over_calls():
    @flow.remote
    class Owner:
        def take(self):
            return flow.Lock("kept").acquire()

        def give(self):
            flow.Lock("kept").release()

    owner = Owner.remote()
    assert flow.get(owner.take.remote())
    assert not flow.Lock("kept").acquire(timeout=0)
    flow.get(owner.give.remote())
    with flow.Lock("kept"):
        pass
    flow.get(owner.take.remote())
    flow.kill(owner)
    assert flow.Lock("kept").acquire(timeout=NOW_S)
    flow.Lock("kept").release()


@pytest.mark.parametrize("checkpoint", ["never", 1])
def test_an_actor_that_comes_back_has_lost_its_lock(checkpoint):
    """Whether a checkpoint came between or not; and it sees the same when it comes back once more."""

    @flow.remote(checkpoint=checkpoint)
    class Owner:
        def __init__(self):
            self.lock, self.lost = flow.Lock("lost with its process"), 0

        def take(self):
            return self.lock.acquire()

        def give(self):
            try:
                self.lock.release()
            except flow.LockLost:
                self.lost += 1
            return self.lost

    owner, lock = Owner.remote(), flow.Lock("lost with its process")
    token = flow.get(owner.take.remote())
    for number in (1, 2, 3):
        flow.chaos.kill_worker(of=owner)
        with lock:
            assert lock.token > token
        assert flow.get(owner.give.remote()) == number
        token = flow.get(owner.take.remote())
    assert flow.get(owner.give.remote()) == 3


def test_events_and_variables():
    @flow.remote
    def relay(event, cell):
        assert event.wait(NOW_S)
        return cell.get(timeout=NOW_S)

    event, cell = flow.Event(), flow.Variable()
    refs = [relay.remote(event, cell) for _ in range(5)]
    assert not event.wait(timeout=0)
    with pytest.raises(flow.GetTimeout):
        cell.get(timeout=0.01)
    event.set()
    cell.set("news")
    assert flow.get(refs) == ["news"] * 5
    event.clear()
    cell.delete()
    assert not event.is_set()
    with pytest.raises(flow.GetTimeout):
        cell.get(timeout=0)


def test_on_an_event_loop():
    async def all_of_it():
        lock, jobs, event, cell = flow.Lock(), flow.Queue(1), flow.Event(), flow.Variable()
        total = []

        async def add(number):
            async with lock:
                before = len(total)
                await asyncio.sleep(0)
                assert len(total) == before
                total.append(number)

        await asyncio.gather(*[add(number) for number in range(5)])
        await jobs.put_async("x")
        with pytest.raises(queue.Full):
            await jobs.put_async("y", timeout=0.01)
        assert await jobs.get_async() == "x"
        waiting = asyncio.create_task(event.wait_async(NOW_S))
        await asyncio.to_thread(event.set)
        assert await waiting
        assert not await flow.Event().wait_async(0.01)
        waiting = asyncio.create_task(cell.get_async())
        await asyncio.sleep(0)
        cell.set(3)
        assert await waiting == 3
        abandoned = asyncio.create_task(jobs.get_async())
        await asyncio.to_thread(until, lambda: waits_for(jobs))
        abandoned.cancel()
        with pytest.raises(asyncio.CancelledError):
            await abandoned
        jobs.put("kept")
        assert await jobs.get_async(NOW_S) == "kept"
        return total

    assert asyncio.run(all_of_it()) == list(range(5))


def test_calls_of_an_async_actor_take_turns():
    @flow.remote
    class Turns:
        def __init__(self):
            self.inside = 0
            self.most = 0

        async def visit(self, lock):
            async with lock:
                self.inside += 1
                self.most = max(self.most, self.inside)
                await asyncio.sleep(0)
                self.inside -= 1
            return self.most

    turns = Turns.remote()
    assert flow.get([turns.visit.remote(flow.Lock("turns")) for _ in range(8)]) == [1] * 8


def test_a_cancelled_wait_takes_nothing():
    @flow.remote
    def get(jobs):
        return jobs.get()

    jobs = flow.Queue()
    waiting = get.remote(jobs)
    until(lambda: "waits for queue" in repr(waiting))
    flow.cancel(waiting)
    with pytest.raises(flow.TaskCancelled):
        flow.get(waiting)
    jobs.put(1)
    assert jobs.get(timeout=NOW_S) == 1


def test_they_outlive_the_head_and_the_node():
    lock, jobs = flow.Lock("outlives"), flow.Queue("outlives too")
    lock.acquire()
    jobs.put("before")
    flow.chaos.kill_head()
    flow.chaos.kill_node(flow.nodes()[0].node_id)

    @flow.remote
    def ask():
        return flow.Lock("outlives").acquire(timeout=0), flow.Queue("outlives too").get()

    assert flow.get(ask.remote()) == (False, "before")
    lock.release()


def test_a_frozen_holder_that_comes_back_releases_nothing_of_others():
    """Its process was taken for dead: the lock is another's, and it is told so."""
    lock, session = flow.Lock(), flow.refs.Current.session

    @flow.remote
    def opened(gate):
        return gate.wait(NOW_S)

    @flow.remote
    def lose_it(lock, began, go_on):
        lock.acquire()
        began.set()
        assert flow.get(go_on[0])  # another process waits: what this one waits for is forgotten with it
        try:
            lock.release()
        except flow.LockLost as error:
            return str(error)
        return ""

    began, go_on = flow.Event(), flow.Event()
    ref = lose_it.remote(lock, began, [opened.remote(go_on)])
    assert began.wait(NOW_S)
    holder = next(iter(session.shared.keeper.machine.entries["lock", lock.name].holds.values()))
    session.shared.keeper.lost(holder.peer)
    with lock:
        go_on.set()
        assert "was taken from this code" in flow.get(ref)
        assert lock.locked()


def test_the_replay_of_a_task_that_uses_them():
    @flow.remote
    def work(lock, jobs, out):
        with lock:
            item = jobs.get()
            out.put(item + 1)
            return item + 1

    lock, jobs, out = flow.Lock(), flow.Queue(), flow.Queue()
    jobs.put_many([5, 6])
    ref = work.remote(lock, jobs, out)
    assert flow.get(ref) == 6
    assert flow.replay(ref, debug=False) == 6
    assert (jobs.qsize(), out.qsize()) == (1, 1)


def test_a_replay_uses_the_handles_of_its_program(monkeypatch):
    monkeypatch.setattr(flow, "jobs_of_all", flow.Queue("jobs of all"), raising=False)

    @flow.remote
    def work():
        jobs = getattr(flow, "jobs_of_all", None) or flow.Queue("jobs of all")
        return jobs.get()

    flow.jobs_of_all.put_many([4, 5])
    ref = work.remote()
    assert flow.get(ref) == flow.replay(ref, debug=False) == 4
    assert flow.jobs_of_all.get() == 5


def test_it_is_clear_why_a_task_waits():
    lock, began = flow.Lock("told"), flow.Event()
    held = hold.remote(lock, began)
    assert began.wait(NOW_S)

    @flow.remote
    def late():
        with flow.Lock("told"):
            pass

    ref = late.remote()
    until(lambda: "lock 'told', which hold" in repr(ref))
    (text,) = explained(flow.refs.Current.session, ref.hex())
    assert "waits for lock 'told', which hold" in text
    flow.cancel(held)
    flow.get(ref)


def test_without_a_name_each_is_another():
    assert flow.Lock() != flow.Lock()
    assert flow.Queue().name != flow.Queue().name


def test_what_belongs_to_a_session_ends_with_it():
    flow.shutdown()
    early = flow.Queue("early")
    try:
        with flow.init(num_workers=1):
            made = flow.Queue(), flow.Event(), flow.Lock("named"), flow.Variable(), flow.Semaphore(2)
            early.put(1)
            kept = pickle.dumps(made[0])
        jobs, event, lock, cell, permits = made
        for use in (lambda: jobs.get(timeout=1), event.set, lock.acquire, lambda: cell.set(1), permits.acquire,
                    early.qsize, lambda: pickle.dumps(jobs)):
            with pytest.raises(flow.StaleSession, match="its session has ended: make it anew"):
                use()
        assert flow.refs.Current.session is None
    finally:
        flow.init(num_workers=2)
    with pytest.raises(flow.StaleSession):
        lock.acquire()
    assert flow.Lock("named").acquire()
    assert pickle.loads(kept).empty()
