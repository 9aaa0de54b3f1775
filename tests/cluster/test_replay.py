"""Time travel: tasks and actors run again in this process as they did then, and what differs is told."""

from __future__ import annotations

import asyncio
import io
import os
import pdb
import time

import numpy as np
import pytest

import flowengine as flow
from flowengine.scheduling import Policy
from tests.cluster.kit import two_workers, until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory):
    yield from two_workers(state_dir=tmp_path_factory.mktemp("state"))


def again(target, **options):
    return flow.replay(target, debug=False, **options)


@flow.remote
def square(number: int) -> int:
    return number * number


@flow.remote
def cube(number: int) -> int:
    return number**3


@flow.remote
def unlucky(number: int) -> float:
    drawn = float(flow.rng().random())
    raise ValueError(f"{drawn} {number} {flow.context().task_id} {flow.context().attempt}")


@flow.remote
def choosing(count: int) -> tuple[int, float, list[str]]:
    refs = [square.remote(number) for number in range(count)]
    ready, _ = flow.wait(refs, num_returns=2)
    order = [ref.hex() for ref in flow.wait(refs, num_returns=count)[0]]
    moment = flow.record(time.time_ns)
    return sum(flow.get(refs)), moment, [*order, *[ref.hex() for ref in ready]]


def test_a_task_that_failed_fails_again_with_the_same_numbers():
    ref = unlucky.remote(7)
    with pytest.raises(ValueError) as then:
        flow.get(ref)
    with pytest.raises(ValueError) as now:
        again(ref)
    assert str(then.value).splitlines()[0] == str(now.value)
    assert "7" in str(now.value)


def test_a_failed_task_is_known_by_its_id_when_its_refs_are_gone():
    ref = unlucky.remote(8)
    flow.wait([ref])
    name = ref.hex()[:16]
    del ref
    with pytest.raises(ValueError, match=" 8 "):
        again(name)


def test_choices_and_results_of_children_are_those_of_the_record():
    ref = choosing.remote(5)
    before = flow.get(ref)
    submitted = flow.stats()["tasks_submitted"]
    assert again(ref) == before
    assert flow.stats()["tasks_submitted"] == submitted


def test_inputs_that_are_gone_are_made_again_here():
    ref = square.remote(square.remote(square.remote(2)))
    assert flow.get(ref) == 256
    assert again(ref) == 256


@flow.remote(num_cpus=0)
def placing(given: tuple[flow.ObjectRef]) -> list[object]:
    beside = flow.scheduling.affinity(given[0])
    policies = [beside, flow.scheduling.spread(), flow.scheduling.anti_affinity("replayed"), beside & Policy()]
    shares = [flow.scheduling.fair_share("a"), flow.scheduling.pack() | flow.scheduling.node("none")]
    return flow.get([square.options(placement=policy).remote(3) for policy in (*policies, *shares)])


def test_policies_do_not_disturb_a_replay():
    first = square.remote(2)
    ref = placing.remote((first,))
    assert flow.get(ref) == [9] * 6
    assert again(ref) == [9] * 6
    beside = square.options(placement=flow.scheduling.affinity(first)).remote(4)
    assert flow.get(beside) == again(beside) == 16


def test_large_inputs_and_results_come_from_the_store():
    doubled = flow.remote(lambda array: array * 2).remote(flow.put(np.ones(200_000)))
    flow.get(doubled)
    assert again(doubled).sum() == 400_000


def test_a_task_that_failed_finds_its_large_inputs_on_disk():
    ref = flow.remote(lambda array: array[1_000_000]).remote(flow.put(np.ones(200_000)))
    with pytest.raises(IndexError):
        flow.get(ref)
    with pytest.raises(IndexError):
        again(ref)


def test_the_items_of_a_stream_are_a_list():
    @flow.remote(num_returns="stream")
    def count(number):
        yield from range(number)

    refs = list(count.remote(4))
    assert again(refs[2]) == flow.get(refs) == [0, 1, 2, 3]
    ref = square.remote(refs[3])
    assert flow.get(ref) == 9
    del refs
    assert again(ref) == 9


def test_a_result_that_differs_is_told(tmp_path):
    source = tmp_path / "source.txt"
    source.write_text("one")
    ref = flow.remote(lambda: {"text": source.read_text()}).remote()
    flow.get(ref)
    source.write_text("two")
    with pytest.raises(flow.ReplayDiverged, match=r"the result\['text'\] is 'two', the record says 'one'"):
        again(ref)


def test_a_child_that_differs_is_told(tmp_path):
    switch = tmp_path / "switch"

    @flow.remote
    def parent():
        children = [square.remote(2), square.remote(3)]
        children.append((cube if switch.exists() else square).remote(4))
        return flow.get(children)

    ref = parent.remote()
    assert flow.get(ref) == [4, 9, 16]
    assert again(ref) == [4, 9, 16]
    switch.touch()
    with pytest.raises(flow.ReplayDiverged, match=r"child 2: the record says square\(...\), the replay called cube"):
        again(ref)


def test_a_child_with_a_large_result_runs_again_here():
    @flow.remote
    def ones(number):
        return np.ones(number)

    @flow.remote
    def parent():
        return float(flow.get(ones.remote(200_000)).sum())

    ref = parent.remote()
    assert flow.get(ref) == again(ref) == 200_000


def test_a_divergence_is_told_though_the_code_catches_it(tmp_path):
    switch = tmp_path / "switch"

    @flow.remote
    def parent():
        try:
            return flow.get((cube if switch.exists() else square).remote(4))
        except Exception:
            return 16

    ref = parent.remote()
    flow.get(ref)
    switch.touch()
    with pytest.raises(flow.ReplayDiverged, match="child 0"):
        again(ref)


def test_another_number_of_choices_is_told(tmp_path):
    count = tmp_path / "count"
    count.write_text("3")

    @flow.remote
    def chooser():
        for _ in range(int(count.read_text())):
            flow.record(time.time_ns)

    ref = chooser.remote()
    flow.get(ref)
    for other in ("4", "2"):
        count.write_text(other)
        with pytest.raises(flow.ReplayDiverged, match=r"flow\.record"):
            again(ref)


def test_a_task_whose_worker_died_can_be_tried_here(tmp_path):
    switch = tmp_path / "switch"

    @flow.remote(max_retries=0)
    def dies():
        if not switch.exists():
            os._exit(1)
        return "survived"

    ref = dies.remote()
    with pytest.raises(flow.WorkerCrashed, match=f"flow replay {ref.hex()[:12]}"):
        flow.get(ref)
    switch.touch()
    assert again(ref) == "survived"


def test_a_child_without_a_record_runs_here_and_so_does_an_actor_of_the_task():
    @flow.remote
    class Sum:
        def __init__(self):
            self.total = 0

        def add(self, number):
            self.total += number
            return self.total

    @flow.remote
    def parent():
        own = Sum.remote()
        flow.get([own.add.remote(number) for number in range(4)])
        with pytest.raises(ZeroDivisionError):
            flow.get(flow.remote(lambda: 1 // 0).remote())
        return flow.get(own.add.remote(0)), flow.get(flow.put([1, 2]))

    ref = parent.remote()
    assert flow.get(ref) == (6, [1, 2])
    assert again(ref) == (6, [1, 2])


# --- actors -----------------------------------------------------------------------------------------------------


@flow.remote
class Counter:
    def __init__(self, start: int) -> None:
        self.number = start

    def add(self, more: int) -> int:
        self.number += more
        return self.number

    def add_other(self, other, more: int) -> int:
        return self.add(flow.get(other.add.remote(more)))

    def drift(self, path: str) -> int:
        with open(path) as file:
            return self.add(int(file.read()))

    def fail(self) -> None:
        raise KeyError(self.number)

    def chosen(self) -> int:
        return flow.record(time.time_ns)

    def end(self, path: str) -> int:
        if not os.path.exists(path):
            os._exit(1)
        return self.number


@pytest.mark.parametrize("checkpoint", ["never", 3])
def test_an_actor_is_replayed_up_to_a_call(checkpoint):
    counter = Counter.options(checkpoint=checkpoint).remote(10)
    refs = [counter.add.remote(1) for _ in range(8)]
    failed = counter.fail.remote()
    with pytest.raises(KeyError):
        flow.get(failed)
    assert flow.get(refs) == list(range(11, 19))
    assert again(refs[4]) == 15
    assert again(counter, call=3).number == 13
    assert again(counter, call=0).number == 10
    assert again(counter).number == 18
    with pytest.raises(KeyError, match="18"):
        again(failed)
    with pytest.raises(flow.BadValue, match="its first 9 calls are known"):
        again(counter, call=10)


def test_calls_of_several_callers_are_replayed_in_their_order():
    counter = Counter.remote(0)

    @flow.remote
    def caller(counter, numbers):
        return flow.get([counter.add.remote(number) for number in numbers])

    seen = flow.get([caller.remote(counter, range(5)), caller.remote(counter, range(10, 15))])
    own = counter.add.remote(100)
    assert again(own) == flow.get(own) == 170
    assert again(counter).number == 170
    assert len(seen) == 2


def test_replies_of_other_actors_and_choices_are_those_of_the_record():
    counter, other = Counter.remote(0), Counter.remote(5)
    moment = counter.chosen.remote()
    ref = counter.add_other.remote(other, 3)
    last = counter.chosen.remote()
    assert flow.get(ref) == 8
    flow.get([moment, last])
    assert again(ref) == 8
    assert again(last) == flow.get(last)
    assert flow.get(other.add.remote(0)) == 8  # it was not called again


def test_a_reply_that_differs_is_told_with_the_number_of_its_call(tmp_path):
    source = tmp_path / "number"
    source.write_text("5")
    counter = Counter.remote(0)
    refs = [counter.add.remote(1), counter.drift.remote(str(source)), counter.add.remote(1)]
    assert flow.get(refs) == [1, 6, 7]
    source.write_text("6")
    with pytest.raises(flow.ReplayDiverged, match="call 2 drift: the result is 7, the record says 6"):
        again(refs[2])


def test_the_call_in_which_an_actor_died_is_run_here(tmp_path):
    switch = tmp_path / "switch"
    counter = Counter.options(checkpoint=2).remote(0)
    refs = [counter.add.remote(1) for _ in range(5)]
    flow.get(refs)
    fatal = counter.end.remote(str(switch))
    behind = counter.add.remote(1)
    with pytest.raises(flow.ActorDied, match="flow replay"):
        flow.get(fatal)
    switch.touch()
    assert again(fatal) == 5
    assert again(counter).number == 5
    assert again(refs[4]) == 5
    with pytest.raises(flow.BadValue, match="cannot be replayed up to the call"):
        again(behind)


def test_a_large_state_is_read_from_its_files(tmp_path):
    switch = tmp_path / "switch"

    @flow.remote(checkpoint=3)
    class Large:
        def __init__(self):
            self.array = np.zeros(1_000_000)

        def add(self, number):
            self.array += number
            return float(self.array[-1])

        def end(self):
            if not switch.exists():
                os._exit(1)
            return float(self.array.sum())

    large = Large.remote()
    refs = [large.add.remote(1) for _ in range(5)]
    assert flow.get(refs) == [1, 2, 3, 4, 5]
    assert again(refs[4]) == 5
    fatal = large.end.remote()
    with pytest.raises(flow.ActorDied):
        flow.get(fatal)
    switch.touch()
    assert again(fatal) == 5_000_000


def test_a_killed_actor_and_one_whose_constructor_raised():
    @flow.remote
    class Fails:
        def __init__(self, why):
            raise ValueError(why)

        def method(self):
            pass

    fails = Fails.remote("no way")
    with pytest.raises(ValueError, match="no way"):
        flow.get(fails.method.remote())
    with pytest.raises(ValueError, match="no way"):
        again(fails)
    counter = Counter.remote(0)
    refs = [counter.add.remote(1) for _ in range(7)]
    flow.get(refs)
    flow.kill(counter)
    with pytest.raises(flow.ActorDied):
        flow.get(counter.add.remote(1))
    assert again(refs[2]) == 3
    assert again(counter).number == 7


def test_coroutines_begin_in_their_order():
    @flow.remote
    class Mailbox:
        def __init__(self):
            self.letters: asyncio.Queue[int] = asyncio.Queue()
            self.sent = 0

        async def take(self):
            return await self.letters.get()

        async def send(self, letter):
            self.sent += letter
            await self.letters.put(letter)
            return self.sent

    mailbox = Mailbox.options(checkpoint="never").remote()
    taken = [mailbox.take.remote() for _ in range(2)]
    sent = [mailbox.send.remote(number) for number in (3, 4)]
    assert flow.get(taken) == [3, 4]
    assert again(sent[1]) == 7
    assert again(mailbox).sent == 7


def test_an_actor_that_is_not_brought_back_has_no_record():
    counter = Counter.options(recovery="restart").remote(0)
    flow.get(counter.add.remote(1))
    with pytest.raises(flow.BadValue, match="exactly_once"):
        again(counter)


# --- under a debugger, and what is refused --------------------------------------------------------------------------


def debugger(*commands: str) -> tuple[pdb.Pdb, io.StringIO]:
    out = io.StringIO()
    return pdb.Pdb(stdin=io.StringIO("\n".join([*commands, ""])), stdout=out, readrc=False), out


def test_the_debugger_stops_in_the_code_and_where_it_raises():
    ref = unlucky.remote(9)
    flow.wait([ref])
    stops, out = debugger("p number * 100", "continue", "p drawn", "quit")
    with pytest.raises(ValueError, match=" 9 "):
        flow.replay(ref, debug=stops)
    shown = out.getvalue()
    assert "drawn = float(flow.rng().random())" in shown
    assert "breakpoint" not in shown
    assert "900" in shown
    assert "raise ValueError" in shown
    assert "0." in shown.rpartition("raise ValueError")[2]


def test_the_debugger_stops_in_the_last_call_of_an_actor():
    counter = Counter.remote(0)
    refs = [counter.add.remote(number) for number in range(5)]
    flow.get(refs)
    stops, out = debugger("p ('stopped', self.number, more)", "continue")
    assert flow.replay(refs[3], debug=stops) == 6
    assert "('stopped', 3, 3)" in out.getvalue()


def test_code_without_its_source_is_stopped_in_too():
    scope: dict[str, object] = {"__name__": "__main__"}
    exec("def nameless(number):\n    half = number / 2\n    return half\n", scope)
    ref = flow.remote(scope["nameless"]).remote(8)
    flow.get(ref)
    stops, out = debugger("p ('stopped', number)", "continue")
    assert flow.replay(ref, debug=stops) == 4
    assert "('stopped', 8)" in out.getvalue()


def test_a_debugger_that_is_left_ends_the_replay():
    ref = square.remote(3)
    flow.get(ref)
    stops, _ = debugger("quit")
    assert flow.replay(ref, debug=stops) is None
    assert flow.get(square.remote(4)) == 16


def test_without_a_terminal_a_debugger_is_refused(monkeypatch):
    ref = square.remote(3)
    flow.get(ref)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(flow.BadValue, match="debug=False"):
        flow.replay(ref)


def test_what_cannot_be_replayed(tmp_path):
    switch = tmp_path / "switch"

    @flow.remote
    def waits():
        until(switch.exists)

    ref = waits.remote()
    with pytest.raises(flow.BadValue, match="has not ended"):
        again(ref.hex()[:32])
    switch.touch()
    flow.get(ref)
    with pytest.raises(flow.BadValue, match="nobody has a record of 0123456789ab"):
        again("0123456789ab")
    with pytest.raises(flow.BadValue, match="call is for actors"):
        again(ref, call=3)
    with pytest.raises(flow.BadType, match="a ref, an actor's handle or an id"):
        again(3)
    with pytest.raises(flow.BadValue, match="for the program"):
        flow.get(flow.remote(lambda: flow.replay("0123456789ab", debug=False)).remote())
