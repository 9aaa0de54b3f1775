"""Groups of actors, tasks and the program: results, references to them, members that come again, leave and join."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

import flowengine as flow
from flowengine.refs import current_session
from tests.cluster.kit import two_workers, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90)]
LARGE = 1 << 15  # floats: 256 KiB, which goes through the stores
PATIENCE_S = 40


@pytest.fixture(scope="module", autouse=True)
def engine():
    yield from two_workers()


@flow.remote(num_cpus=0)
class Member:
    def __init__(self, name: str, size: int, rank: int, **options: Any) -> None:
        self.group = flow.collectives.join(name, size, rank, **options)
        self.count = 0

    def do(self, op: str, *args: Any, **options: Any) -> Any:
        return getattr(self.group, op)(*args, **options)

    def step(self, floats: int = 1) -> float:
        self.count += 1
        return float(self.group.allreduce(np.full(floats, float(self.count)))[-1])

    def ahead(self, floats: int, steps: int) -> list[flow.ObjectRef]:
        return [self.group.allreduce(np.full(floats, float(step)), wait=False) for step in range(steps)]

    def asks(self, floats: int, steps: int) -> int:
        values = current_session().values
        before = next(values.requests)
        for _ in range(steps):
            self.group.allreduce(np.ones(floats))
            self.group.barrier()
        return next(values.requests) - before - 1

    def overwrite(self, floats: int) -> float:
        given = np.ones(floats)
        result = self.group.allreduce(given, wait=False)
        given[:] = 100
        return float(flow.get(result)[0])

    def rows(self) -> Any:
        """Of as many as there are members: what is given follows from how many there are."""
        self.sizes = [*getattr(self, "sizes", []), self.group.size]
        return self.group.allreduce(np.ones(self.group.size)).tolist()

    def seen(self) -> list[int]:
        return list(self.sizes)

    def where(self) -> tuple[int, int, int]:
        return self.group.rank, self.group.size, self.group.epoch

    def pid(self) -> int:
        return os.getpid()

    def itself(self) -> Any:
        return self.group


class Unspeakable:
    def __repr__(self) -> str:
        raise ZeroDivisionError


def members(name: str, size: int, actor: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    return [Member.options(**actor or {}).remote(name, size, rank, **options) for rank in range(size)]


def each(group: list[Any], method: str, *args: Any) -> list[Any]:
    return flow.get([getattr(member, method).remote(*args) for member in group], timeout=PATIENCE_S)


def do(group: list[Any], op: str, given: list[Any], **options: Any) -> list[Any]:
    refs = [member.do.remote(op, value, **options) for member, value in zip(group, given, strict=True)]
    return flow.get(refs, timeout=PATIENCE_S)


def kill(member: Any) -> None:
    os.kill(flow.get(member.pid.remote(), timeout=PATIENCE_S), signal.SIGKILL)


def has_come_again(member: Any) -> bool:
    try:
        return flow.get(member.where.remote(), timeout=PATIENCE_S)[2] > 1
    except flow.ActorDied:
        return False


# --- what is given and what comes back ------------------------------------------------------------


def test_members_may_be_threads_of_one_program() -> None:
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        group = flow.collectives.join("threads", 3, rank)
        found[rank] = (
            group.allreduce(rank), group.alltoall([np.array([10 * rank + to]) for to in range(3)]),
            group.scatter([1.5, 2.5, 3.5] if rank == 1 else None, root=1), group.gather(rank, root=2),
            group.reduce_scatter(np.arange(7.0)), group.allgather(np.full(rank, rank)), group.reduce(rank, root=0),
        )  # fmt: skip
        group.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for rank in range(3):
        total, mine, item, gathered, rows, lists, reduced = found[rank]
        assert (total, item, reduced) == (3, rank + 1.5, 3 if rank == 0 else None)
        assert [int(one[0]) for one in mine] == [rank, 10 + rank, 20 + rank]
        assert gathered == ([0, 1, 2] if rank == 2 else None)
        assert rows.tolist() == [[0, 3, 6], [9, 12], [15, 18]][rank]
        assert [one.tolist() for one in lists] == [[], [1], [2, 2]]


@pytest.mark.parametrize("floats", [4, LARGE])
def test_sizes_may_differ_where_nothing_is_folded(floats: int) -> None:
    group = members(f"sizes {floats}", 2)
    given = [np.arange(3.0), np.arange(float(floats))]
    for lists in do(group, "allgather", given):
        assert [len(one) for one in lists] == [3, floats]
    mine = do(group, "alltoall", [[given[0], given[1]], [given[1], given[0]]])
    assert [[len(one) for one in row] for row in mine] == [[3, floats], [floats, 3]]
    assert [len(one) for one in do(group, "scatter", [given, None])] == [3, floats]
    assert do(group, "broadcast", [{"w": given[1], "n": 3}, None])[1]["n"] == 3


def test_the_program_is_a_member_as_well() -> None:
    @flow.remote(num_cpus=0)
    def other() -> tuple[Any, ...]:
        group = flow.collectives.join("program", 2, 1)
        return group.allreduce(np.ones(3)), group.broadcast(), group.recv(0)

    for _ in range(2):  # who joins again has given its seat up
        theirs = other.remote()
        group = flow.collectives.join("program", 2, 0)
        assert group.allreduce(np.ones(3)).tolist() == [2, 2, 2]
        group.broadcast(5)
        group.send([1, np.zeros(2)], 1)
        total, number, (one, zeros) = flow.get(theirs, timeout=PATIENCE_S)
        assert (total[0], number, one, len(zeros)) == (2, 5, 1, 2)


def test_room_for_what_is_given_is_asked_for_once() -> None:
    group = members("room", 2)
    assert each(group, "asks", LARGE, 10) == [1, 1]


@pytest.mark.parametrize("floats", [4, LARGE])
def test_references_to_results_are_as_any_other(floats: int) -> None:
    group = members(f"ahead {floats}", 2)
    first, second = each(group, "ahead", floats, 5)
    assert [float(flow.get(ref, timeout=PATIENCE_S)[-1]) for ref in first] == [0, 2, 4, 6, 8]
    assert flow.get(flow.remote(lambda array: float(array[0])).remote(second[3]), timeout=PATIENCE_S) == 6
    assert each(group, "overwrite", floats) == [2, 2]


def test_a_reference_has_the_error_of_its_step() -> None:
    group = members("ahead of an error", 2)
    refs = [
        group[0].do.remote("allreduce", np.ones(3), wait=False), group[1].do.remote("allreduce", np.ones(4), wait=False)
    ]
    for ref in flow.get(refs, timeout=PATIENCE_S):
        with pytest.raises(flow.CollectiveMismatch, match="shape"):
            flow.get(ref, timeout=PATIENCE_S)


def test_what_cannot_be_given_fails_for_all_at_once_and_the_next_step_works() -> None:
    group = members("nothing", 2)
    refs = [group[0].do.remote("broadcast", None), group[1].do.remote("broadcast")]
    with pytest.raises(TypeError, match="NoneType"):
        flow.get(refs[0], timeout=PATIENCE_S)
    with pytest.raises(flow.CollectiveMismatch, match="rank 0: nothing"):
        flow.get(refs[1], timeout=PATIENCE_S)
    refs = [group[0].do.remote("allreduce", Unspeakable()), group[1].do.remote("allreduce", np.ones(1))]
    with pytest.raises(ZeroDivisionError):
        flow.get(refs[0], timeout=PATIENCE_S)
    with pytest.raises(flow.CollectiveMismatch, match="rank 0: nothing"):
        flow.get(refs[1], timeout=PATIENCE_S)
    for op, value in (("min", np.ones(2) * 1j), ("sum", np.array(["a"])), ("sum", np.array([None]))):
        for ref in [member.do.remote("allreduce", value, op) for member in group]:
            with pytest.raises(flow.UsageError, match=r"not defined|no order"):
                flow.get(ref, timeout=PATIENCE_S)
    assert each(group, "step") == [2, 2]


@pytest.mark.parametrize(("arguments", "words"), [
    (("x", 0, 0), "world_size"), (("x", 2, 2), "rank"), (("x", 2, -1), "rank"), ((3, 1, 0), "name"),
    (("", 1, 0), "name"), (("half a \ud800", 1, 0), "printable"),
])  # fmt: skip
def test_seats_that_cannot_be(arguments: Any, words: str) -> None:
    with pytest.raises(flow.UsageError, match=words):
        flow.collectives.join(*arguments)


def test_options_of_operations_are_checked_at_the_call() -> None:
    group = flow.collectives.join("alone", 1, 0)
    with pytest.raises(ValueError, match="did you mean 'prod'"):
        group.allreduce(1, op="product")
    with pytest.raises(ValueError, match="root"):
        group.broadcast(1, root=1)
    with pytest.raises(ValueError, match="on_failure"):
        flow.collectives.join("alone", 1, 0, on_failure="hope")
    assert group.allreduce(2.5) == 2.5
    group.leave()
    group.leave()
    with pytest.raises(ValueError, match="has left"):
        group.barrier()


def test_a_rank_that_does_not_join_is_named() -> None:
    with pytest.raises(flow.CollectiveTimeout, match="rank 1"):
        flow.collectives.join("not all", 2, 0, timeout_s=0.3)


def test_who_cannot_be_made_after_it_has_joined_is_not_waited_for() -> None:
    @flow.remote(num_cpus=0)
    class Unmade:
        def __init__(self) -> None:
            self.group = flow.collectives.join("unmade", 2, 1)
            raise KeyError("no weights")

    one = Member.remote("unmade", 2, 0)
    other = Unmade.remote()
    with pytest.raises(flow.MemberLost, match="rank 1"):
        flow.get(one.step.remote(), timeout=PATIENCE_S / 2)  # less than the group's limit
    del other


def test_a_group_is_used_by_its_member_alone() -> None:
    [member] = members("mine", 1)
    group = flow.get(member.itself.remote(), timeout=PATIENCE_S)
    with pytest.raises(flow.BadValue, match="only the actor or task that joined"):
        group.barrier()


# --- members that come again ----------------------------------------------------------------------


@pytest.mark.parametrize("floats", [1, LARGE])
@pytest.mark.parametrize("checkpoint", [1, "never"])
def test_an_actor_goes_on_where_it_was(floats: int, checkpoint: Any) -> None:
    group = members(f"again {floats} {checkpoint}", 2, {"checkpoint": checkpoint})
    for count in range(1, 6):
        assert each(group, "step", floats) == [2 * count] * 2
    kill(group[1])
    assert each(group, "step", floats) == [12, 12]
    kill(group[0])
    kill(group[1])
    assert each(group, "step", floats) == [14, 14]


def test_references_of_an_actor_that_comes_again() -> None:
    group = members("ahead and again", 2, {"checkpoint": "never"})
    before = each(group, "ahead", LARGE, 3)
    kill(group[0])
    assert each(group, "step") == [2, 2]
    for refs in before:
        assert [float(flow.get(ref, timeout=PATIENCE_S)[0]) for ref in refs] == [0, 2, 4]


def test_an_actor_that_nothing_starts_again_is_not_waited_for() -> None:
    group = members("for good", 2, {"max_restarts": 0})
    each(group, "step")
    kill(group[1])
    with pytest.raises(flow.MemberLost, match="nothing repeats its steps"):
        flow.get(group[0].step.remote(), timeout=PATIENCE_S)


def test_a_task_that_runs_again_repeats_its_steps(tmp_path: Any) -> None:
    @flow.remote(num_cpus=0, max_retries=3, retry_exceptions=True)
    def train(name: str, rank: int, harm: str = "") -> Any:
        group = flow.collectives.join(name, 2, rank)
        x = np.zeros(1000)
        for step in range(12):
            if harm and step == 7 and not (tmp_path / harm).exists():
                (tmp_path / harm).touch()
                if harm == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise KeyError(step)
            x = x + group.allreduce(np.sin(np.arange(1000) * (rank + 1) + step), op="mean")
        return x

    calm = flow.get([train.remote("calm", rank) for rank in range(2)], timeout=PATIENCE_S)
    for harm in ("killed", "raised"):
        hurt = [train.remote(harm, 0), train.remote(harm, 1, harm)]
        for one, other in zip(calm, flow.get(hurt, timeout=PATIENCE_S), strict=True):
            assert np.array_equal(one, other)
        assert (tmp_path / harm).exists()


def test_an_actor_that_starts_afresh_takes_part_from_the_next_step_on() -> None:
    group = members("afresh", 2, {"recovery": "restart"})
    for _ in range(2):
        each(group, "step")
    kill(group[1])
    until(lambda: has_come_again(group[1]))
    assert sorted(each(group, "step")) == [4, 4]


def test_the_seat_of_a_task_is_free_when_it_has_ended() -> None:
    @flow.remote(num_cpus=0)
    def once(rank: int) -> flow.ObjectRef:
        return flow.collectives.join("once", 2, rank).allreduce(rank, wait=False)

    for _ in range(3):
        refs = flow.get([once.remote(rank) for rank in range(2)], timeout=PATIENCE_S)
        assert flow.get(refs, timeout=PATIENCE_S) == [1, 1]


def test_a_group_that_was_joined_again_leaves_its_seat_to_the_new_one() -> None:
    old = flow.collectives.join("twice", 1, 0)
    new = flow.collectives.join("twice", 1, 0)
    with pytest.raises(flow.BadValue, match="has joined again"):
        old.barrier()
    assert new.allreduce(3) == 3


@pytest.mark.parametrize("stop", ["cancel", "timeout"])
def test_a_task_that_waits_for_others_can_be_stopped(stop: str) -> None:
    @flow.remote(num_cpus=0)
    def wait(name: str) -> None:
        flow.collectives.join(name, 2, 0).recv(1)

    name = f"stopped by {stop}"
    other = Member.remote(name, 2, 1)
    ref = wait.options(timeout_s=1.0 if stop == "timeout" else None).remote(name)
    if stop == "cancel":
        flow.get(other.where.remote(), timeout=PATIENCE_S)
        flow.cancel(ref)
    with pytest.raises(flow.TaskTimeout if stop == "timeout" else flow.TaskCancelled):
        flow.get(ref, timeout=PATIENCE_S)


# --- more and fewer members -----------------------------------------------------------------------


def test_those_who_are_left_have_new_ranks() -> None:
    group = members("fewer", 4, on_failure="shrink")
    do(group, "allgather", [0, 1, 2, 3])
    flow.get(group[0].do.remote("allgather", 0, wait=False), timeout=PATIENCE_S)
    flow.kill(group[1])
    rest = [group[0], group[2], group[3]]
    until(lambda: all(where[1] == 3 for where in each(rest, "where")))
    assert [where[:2] for where in each(rest, "where")] == [(0, 3), (1, 3), (2, 3)]
    for rank, member in enumerate(rest[1:], 1):
        member.do.remote("allgather", rank)
    sent = rest[0].do.remote("send", 5, 2)
    assert flow.get(rest[2].do.remote("recv", 0), timeout=PATIENCE_S) == 5
    flow.get(sent, timeout=PATIENCE_S)
    assert do(rest, "allgather", [0, 1, 2])[0] == [0, 1, 2]


def test_those_who_join_later_are_taken_in_when_all_agree() -> None:
    group = members("more", 2)
    each(group, "step")
    late = Member.remote("more", 3, 2)
    until(lambda: each(group, "do", "admit") and each(group, "where")[0][1] == 3)
    assert each([*group, late], "where") == [(rank, 3, 2) for rank in range(3)]
    assert do([*group, late], "allreduce", [1, 2, 3]) == [6, 6, 6]


def test_a_member_that_repeats_what_it_did_before_the_group_grew_sees_the_size_of_then() -> None:
    group = members("repeats", 2, {"checkpoint": "never"})
    assert each(group, "rows") == [[2, 2]] * 2
    late = Member.options(checkpoint="never").remote("repeats", 3, 2)
    until(lambda: each(group, "do", "admit") and each(group, "where")[0][1] == 3)
    assert each([*group, late], "rows") == [[3, 3, 3]] * 3
    sizes = flow.get([group[1].seen.remote(), late.seen.remote()], timeout=PATIENCE_S)
    kill(group[1])
    until(lambda: has_come_again(group[1]))
    assert flow.get([group[1].seen.remote(), late.seen.remote()], timeout=PATIENCE_S) == sizes
    assert sizes[0] == [2, 3]
    assert each([*group, late], "rows") == [[3, 3, 3]] * 3


def test_newcomers_may_be_taken_in_in_another_order_than_that_of_the_ranks_they_asked_for() -> None:
    group = members("in turn", 2, on_failure="shrink")
    each(group, "where")  # formed: before that a newcomer would be one who does not agree
    for size, asked in ((3, 3), (4, 2)):
        newcomer = Member.remote("in turn", asked + 1, asked, on_failure="shrink")
        until(lambda size=size: each(group, "do", "admit") and each(group, "where")[0][1] == size)
        group.append(newcomer)
    assert [where[:2] for where in each(group, "where")] == [(rank, 4) for rank in range(4)]
    assert do(group, "allgather", [0, 1, 2, 3]) == [[0, 1, 2, 3]] * 4


@flow.remote(num_cpus=0, max_retries=1)
def joins_twice(path: str) -> list[Any]:
    """In what order the group folds that it joins, and in what order the attempt before knows that it did."""
    before = current_session().membership.order_of(0)
    group = flow.collectives.join("known", 1, 0)
    if not os.path.exists(path):
        flow.commit()
        open(path, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return [before, group.former]


def test_who_runs_again_knows_in_what_order_its_group_folded(tmp_path) -> None:
    before, now = flow.get(joins_twice.remote(str(tmp_path / "once")), timeout=PATIENCE_S)
    assert before == now == ((0,), (0,))


# --- what is told when a call is looked at again --------------------------------------------------


def test_a_replay_says_that_the_others_are_not_there() -> None:
    [member] = members("looked at", 1)
    call = member.step.remote()
    assert flow.get(call, timeout=PATIENCE_S) == 1
    with pytest.raises(flow.ReplayDiverged, match="has no other members"):
        flow.replay(call, debug=False)
