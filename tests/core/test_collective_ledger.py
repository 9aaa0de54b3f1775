"""The ledger of a group by scenes: what members and nodes say, and what it answers."""

from __future__ import annotations

import numpy as np
import pytest

from flowengine.collectives.ledger_headers import EPOCH_STEPS, header_text, hidden_difference, step_text
from flowengine.config import Config
from flowengine.core import messages as m

from .ledger_stage import ME, OTHER, THIRD, WHOLE, Stage, arrays_of, header_of

ONES = np.ones(100, "f4")


# --- coming together ------------------------------------------------------------------------------


def test_a_group_forms_when_all_have_come_and_nodes_are_neighbours_in_its_order():
    stage = Stage()
    for rank in (3, 0, 2):
        stage.join(rank, 4)
    assert not stage.heard(m.GroupFormed)
    stage.join(1, 4)
    formed = stage.heard(m.GroupFormed, "p3")[0]
    assert (formed.rank, formed.size, formed.first_step) == (3, 4, 0)
    assert formed.seating.order == (0, 2, 1, 3)
    assert formed.seating.starts == (0, 2)
    assert formed.seating.nodes == (ME, OTHER, ME, OTHER)


def test_ranks_that_were_another_group_fold_as_that_did_wherever_they_sit_now():
    stage = Stage()
    stage.join(0, 4)  # it does not know: it died before that group was formed
    for rank in (1, 2, 3):
        stage.join(rank, 4, order=(0, 1, 2, 3), starts=(0,))
    seating = stage.heard(m.GroupFormed, "p0")[0].seating
    assert (seating.order, seating.starts) == ((0, 1, 2, 3), (0,))
    assert seating.nodes == (ME, OTHER, ME, OTHER)


@pytest.mark.parametrize(("fields", "what"), [
    ({"size": 3}, "the number of ranks"), ({"timeout_s": 9.0}, "timeout_s"), ({"on_failure": "raise"}, "on_failure")])
def test_ranks_that_do_not_agree_are_all_refused(fields, what):
    stage = Stage()
    stage.join(0)
    stage.join(1, **fields)
    told = stage.heard(m.JoinRefused)
    assert [(one.key, one.kind) for one in told] == [(b"key0", "usage"), (b"key1", "usage")]
    assert what in told[0].reason
    assert "rank 0: 2 ranks, timeout_s=4, on_failure=recover; rank 1: " in told[0].reason
    stage.form()


def test_a_rank_that_is_taken_is_refused_and_those_who_do_not_come_are_named():
    stage = Stage()
    stage.join(0, 4)
    stage.join(2, 4)
    stage.join(0, 4, key=b"other", address="q0")
    assert not stage.heard(m.JoinRefused)
    stage.sleep(4.1)
    assert "rank 0 of group 'g' is taken" in stage.heard(m.JoinRefused, "q0")[0].reason
    told = stage.heard(m.JoinRefused)
    assert [one.kind for one in told] == ["timeout", "timeout"]
    assert told[0].reason == "ranks 1, 3 of group 'g' did not come within 4 s; ranks 0, 2 came"


def test_a_member_that_dies_before_the_group_is_formed_makes_room():
    stage = Stage()
    stage.join(0)
    stage.lose("p0")
    stage.join(1)
    assert not stage.heard(m.GroupFormed)
    stage.join(0, key=b"other", address="q0")
    assert len(stage.heard(m.GroupFormed)) == 2


def test_who_finds_a_rank_taken_gets_it_when_that_process_turns_out_to_be_dead():
    stage = Stage()
    stage.join(0)
    stage.join(0, key=b"other", address="q0")
    stage.sleep(1.0)
    stage.lose("p0")
    stage.join(1)
    assert stage.heard(m.GroupFormed, "q0")[0].rank == 0
    assert not stage.heard(m.JoinRefused)


def test_who_finds_a_rank_taken_waits_for_the_next_formation_when_the_group_forms():
    stage = Stage()
    stage.join(0)
    stage.join(0, key=b"other", address="q0")
    stage.join(1)
    assert [to for to, told in stage.said if isinstance(told, m.GroupFormed)] == ["p0", "p1"]
    stage.sleep(4.1)
    assert "is in use by" in stage.heard(m.JoinRefused, "q0")[0].reason


def test_a_name_is_used_again_when_its_members_are_gone():
    stage = Stage()
    first = stage.form()
    for rank in (0, 1):
        stage.join(rank, key=b"new%d" % rank, address=f"q{rank}")
    assert not stage.heard(m.GroupFormed)
    stage.lose("p0")
    assert not stage.heard(m.GroupFormed)
    stage.lose("p1")
    formed = stage.heard(m.GroupFormed, "q0")[0]
    assert formed.seating.group != first.seating.group
    assert m.StepsForgotten(first.seating.group, -1) in [told for _, told in stage.said]
    stage.give(first, 0, 0, ONES)
    assert stage.heard(m.StepFailed, "p0")[0].kind == "lost"


def test_a_name_in_use_is_refused_after_a_while():
    stage = Stage()
    stage.form()
    stage.join(0, key=b"new", address="q0")
    stage.sleep(4.1)
    told = stage.heard(m.JoinRefused, "q0")[0]
    assert told.kind == "usage"
    assert "group 'g' is in use by rank 0 (host-n1" in told.reason.replace("host host", "host")


# --- steps ----------------------------------------------------------------------------------------


def test_a_small_step_is_done_at_once_and_told_by_nodes():
    stage = Stage()
    formed = stage.form()
    stage.give(formed, 0, 0, ONES)
    assert not stage.heard(m.BlobsReady)
    stage.give(formed, 1, 0, 2 * ONES)
    [here] = stage.heard(m.BlobsReady, ME)
    [there] = stage.heard(m.BlobsReady, OTHER)
    assert here.takers == ((0, "p0"),)
    assert there.takers == ((1, "p1"),)
    assert here.results == there.results
    np.testing.assert_array_equal(np.frombuffer(dict(here.results)[WHOLE], "f4"), 3 * ONES)
    assert stage.desk.counters["collectives_done"] == 1


def test_results_of_one_rank_each_are_on_two_nodes_when_they_are_too_much_for_all():
    stage = Stage(Config(collective_inline_bytes_max=ONES.nbytes))
    for rank, node in enumerate((ME, OTHER, THIRD)):
        stage.join(rank, 3, node=node)
    formed = stage.heard(m.GroupFormed, "p0")[0]
    for rank in range(3):
        stage.give(formed, rank, 0, [ONES, ONES, ONES], op="alltoall")
    for node, ranks, taker in ((ME, [0, 2], 0), (OTHER, [0, 1], 1), (THIRD, [1, 2], 2)):
        [ready] = stage.heard(m.BlobsReady, node)
        assert [rank for rank, _ in ready.results] == ranks
        assert ready.takers == ((taker, f"p{taker}"),)


def test_a_barrier_has_no_results_and_a_step_that_is_repeated_is_answered_and_changes_nothing():
    stage = Stage()
    formed = stage.form()
    for rank in (0, 1):
        stage.give(formed, rank, 0, op="barrier")
        stage.give(formed, rank, 1, ONES)
    ready = stage.heard(m.BlobsReady, ME)
    assert [one.results == () for one in ready] == [True, False]
    stage.heard(m.BlobsReady)
    stage.give(formed, 1, 0, op="barrier")
    stage.give(formed, 1, 1, ONES)
    empty, done = stage.heard(m.StepDone, "p1")
    assert empty.empty
    assert done.blob == dict(ready[1].results)[WHOLE]
    assert not stage.heard(m.BlobsReady)


@pytest.mark.parametrize(("one", "other", "differ"), [
    ({"value": ONES}, {"value": ONES[:98]}, "shape"),
    ({"value": ONES}, {"value": ONES.astype("i8")}, "dtype"),
    ({"value": ONES}, {"value": ONES, "fold": "max"}, "reduction"),
    ({"value": ONES}, {"value": [ONES]}, "form"),
    ({"value": ONES}, {"value": ONES, "op": "broadcast", "root": 0}, "operation"),
    ({"value": ONES, "op": "broadcast", "root": 0}, {"value": ONES, "op": "broadcast", "root": 1}, "root"),
    ({"value": ONES, "op": "broadcast", "root": 0}, {"value": ONES[:9], "op": "broadcast", "root": 0}, "shape"),
])
def test_a_mismatch_is_one_error_for_all_and_the_next_step_works(one, other, differ):
    stage = Stage()
    formed = stage.form()
    stage.give(formed, 0, 0, **one)
    stage.give(formed, 1, 0, **other)
    first, second = stage.heard(m.StepFailed)
    assert first.kind == "mismatch"
    assert first.reason == second.reason
    assert first.reason.endswith(f"they differ in {differ}")
    stage.give(formed, 1, 0, **other)
    assert stage.heard(m.StepFailed, "p1")[0].reason == first.reason
    for rank in (0, 1):
        stage.give(formed, rank, 1, ONES)
    assert stage.heard(m.BlobsReady, ME)[-1].results


def test_the_text_of_a_mismatch_groups_equal_ranks():
    stage = Stage()
    formed = stage.form(8)
    for rank in range(8):
        stage.give(formed, rank, 12, ONES if rank < 7 else ONES[:98])
    assert stage.heard(m.StepFailed, "p3")[0].reason == (
        "ranks of group 'g' did not ask for the same at step 12: ranks 0-6: allreduce(sum) of float32 (100,); "
        "rank 7: allreduce(sum) of float32 (98,): they differ in shape")


def test_the_text_of_a_mismatch_of_many_arrays_is_short_and_says_where_they_differ():
    stage = Stage()
    formed = stage.form()
    stage.give(formed, 0, 0, [ONES] * 1000)
    stage.give(formed, 1, 0, [ONES] * 777 + [ONES[:98]] * 223)
    told = stage.heard(m.StepFailed, "p0")[0].reason
    assert told.endswith("they differ in shape (array 777 is float32 (100,) and float32 (98,))")
    assert len(told) < 1000


def test_where_long_forms_differ_is_said():
    one, other = (m.Header("allreduce", "sum", form=repr({f"w{at}": "*" for at in (*range(99), key)})) for key in "ab")
    where = hidden_difference(one, other)
    assert where.endswith("... and ...'w95': '*', 'w96': '*', 'w97': '*', 'w98': '*', 'wb': '*'}...")
    assert len(header_text(one)) < 300
    assert not hidden_difference(m.Header("allgather", form="['*']"), m.Header("allgather", form="('*',)"))


@pytest.mark.parametrize(("value", "fields", "text"), [
    (ONES.astype("c8"), {"fold": "min"}, "complex numbers have no order"),
    (ONES.astype("U3"), {}, "not defined"),
    (ONES, {"fold": "median"}, "no reduction 'median'"),
    (ONES, {"op": "dance"}, "no operation 'dance'"),
    (ONES, {"op": "reduce", "root": 2}, "root of 0 to 1"),
    (np.ones(()), {"op": "reduce_scatter"}, "first axis"),
    ([ONES], {"op": "alltoall"}, "needs 2 items, one for each rank; rank 0 gave 1"),
])
def test_what_cannot_be_done_is_refused_on_all_ranks(value, fields, text):
    stage = Stage()
    formed = stage.form()
    for rank in (0, 1):
        stage.give(formed, rank, 0, value, **fields)
    first, second = stage.heard(m.StepFailed)
    assert (first.kind, second.kind) == ("refused", "refused")
    assert text in first.reason == second.reason


def results(ready: m.BlobsReady, rank: int) -> list[np.ndarray]:
    found = dict(ready.results)
    blob = found.get(rank, found.get(WHOLE, b""))
    parts = [part for part in ready.layout if part.taker in (WHOLE, rank)]
    return [array for part in parts for array in arrays_of(blob, part.header, part.offset)]


def test_small_moves():
    stage = Stage()
    formed = stage.form(3)
    x = [np.arange(rank + 1.0) + rank for rank in range(3)]
    table = [[np.array([10 * rank + to]) for to in range(3)] for rank in range(3)]
    for number, (op, root) in enumerate([("allgather", -1), ("gather", 1), ("broadcast", 2), ("scatter", 0)]):
        for rank in range(3):
            value = table[rank] if op == "scatter" and rank == root else None if op == "scatter" else x[rank]
            value = value if op != "broadcast" or rank == root else None
            stage.give(formed, rank, number, value, op=op, root=root)
    for rank in range(3):
        stage.give(formed, rank, 4, table[rank], op="alltoall")
        stage.give(formed, rank, 5, np.arange(7), op="reduce_scatter")
        stage.give(formed, rank, 6, np.arange(3), op="reduce", root=1)
    gathered, at_root, copied, dealt, crossed, cut, reduced = stage.heard(m.BlobsReady, OTHER)
    for made in (results(gathered, 1), results(at_root, 1)):
        for mine, want in zip(made, x, strict=True):
            np.testing.assert_array_equal(mine, want)
    np.testing.assert_array_equal(results(copied, 1)[0], x[2])
    assert [int(v[0]) for v in results(dealt, 1)] == [1]
    assert [int(v[0]) for v in results(crossed, 1)] == [1, 11, 21]
    np.testing.assert_array_equal(results(cut, 1)[0], 3 * np.array([3, 4]))
    np.testing.assert_array_equal(np.frombuffer(dict(reduced.results)[1], "i8"), 3 * np.arange(3))
    assert WHOLE not in dict(reduced.results)


@pytest.mark.parametrize("fold", ["sum", "prod", "min", "max", "mean"])
@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i4", "u8", "f2", "f4", "f8", "c8", "c16"])
def test_numpys_answer_for_every_dtype(dtype, fold):
    if fold == "mean" and np.dtype(dtype).kind in "biu":
        pytest.skip("members convert these before")
    if fold in ("min", "max") and np.dtype(dtype).kind == "c":
        pytest.skip("refused")
    ufunc = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "mean": np.add}[fold]
    x = [np.linspace(-3, 120, 7).astype(dtype) * np.array(rank + 1, dtype) for rank in range(3)]
    if np.dtype(dtype).kind == "f":
        x[1][2] = np.nan
    stage = Stage()
    formed = stage.form(3)
    for rank in range(3):
        stage.give(formed, rank, 0, x[rank], fold=fold)
    [ready] = stage.heard(m.BlobsReady, ME)
    want = x[0]
    with np.errstate(all="ignore"):
        for rank in formed.seating.order[1:]:
            want = ufunc(want, x[rank])
        want = np.true_divide(want, 3, dtype=dtype) if fold == "mean" else want
    assert dict(ready.results)[WHOLE] == want.tobytes()


def test_send_needs_two():
    stage = Stage()
    formed = stage.form(3)
    stage.give(formed, 0, (0, 2, 0), ONES, op="send")
    assert not stage.heard(m.BlobsReady)
    stage.give(formed, 1, (0, 2, 0), op="send")
    [told] = stage.heard(m.StepFailed, "p1")
    assert told.reason == "rank 1 of group 'g' has no part in step 0 from rank 0 to rank 2"
    stage.give(formed, 2, (0, 2, 0), op="send")
    [ready] = stage.heard(m.BlobsReady, ME)
    assert ready.takers == ((0, "p0"), (2, "p2"))
    assert dict(ready.results) == {2: ONES.tobytes()}


# --- late and dead --------------------------------------------------------------------------------


def test_who_does_not_come_in_time_is_named_on_every_rank_and_hears_it_late():
    stage = Stage()
    formed = stage.form(3, "late")
    for rank in range(3):
        stage.give(formed, rank, 0, ONES)
    stage.sleep(2)
    for rank in (0, 1):
        stage.give(formed, rank, 1, ONES)
    stage.sleep(3.9)
    assert not stage.heard(m.StepFailed)
    stage.sleep(0.2)
    first, second = stage.heard(m.StepFailed)
    assert first.kind == "timeout"
    assert first.reason == second.reason == (
        "rank 2 of group 'late' did not come to step 1 (allreduce) within 4 s; it is alive on host host-n1 (pid 102) "
        "and its last step was 0")
    stage.give(formed, 2, 1, ONES)
    assert stage.heard(m.StepFailed, "p2")[0].reason == first.reason


def test_a_rank_that_repeats_steps_is_waited_for():
    stage = Stage()
    formed = stage.form()
    for number in range(3):
        for rank in (0, 1):
            stage.give(formed, rank, number, ONES)
    stage.lose("p1")
    stage.give(formed, 0, 3, ONES)
    stage.sleep(3)
    stage.join(1, address="q1")
    for number in range(3):
        stage.sleep(3)
        stage.give(formed, 1, number, ONES, address="q1")
    assert len(stage.heard(m.StepDone, "q1")) == 3
    stage.sleep(3)
    assert not stage.heard(m.StepFailed)
    stage.heard(m.BlobsReady)
    stage.give(formed, 1, 3, ONES, address="q1")
    assert [one.takers for one in stage.heard(m.BlobsReady)] == [((0, "p0"),), ((1, "q1"),)]


def test_who_comes_back_is_told_of_to_all():
    stage = Stage()
    stage.form()
    stage.lose("p1")
    stage.join(1, address="q1", node=ME)
    assert [one.seating.epoch for one in stage.heard(m.GroupFormed)] == [2, 2]
    stage.lose_node(OTHER)
    assert not stage.heard(m.GroupFormed)


def test_a_member_that_does_not_come_back_is_lost_to_all():
    stage = Stage()
    formed = stage.form()
    stage.lose("p1")
    stage.join(1, address="q1")
    stage.lose("q1", "exit code 3")
    stage.give(formed, 0, 0, ONES)
    stage.sleep(4.1)
    [told] = stage.heard(m.StepFailed)
    assert (told.kind, told.reason) == ("lost", "rank 1 of group 'g' died (host host-n2, pid 101, attempt 2): "
                                        "exit code 3; it did not come back within 4 s")
    stage.give(formed, 0, 1, ONES)
    assert stage.heard(m.StepFailed, "p0")[0].kind == "lost"


def test_nobody_waits_for_a_program_that_is_not_started_again():
    stage = Stage()
    formed = stage.form(restorable=False)
    stage.give(formed, 0, 0, ONES)
    stage.lose("p1")
    assert "nothing repeats its steps" in stage.heard(m.StepFailed, "p0")[0].reason


def test_raise_names_the_dead_at_once_and_for_later_steps():
    stage = Stage()
    formed = stage.form(3, "raises", on_failure="raise")
    for rank in (0, 1):
        stage.give(formed, rank, 0, ONES)
    stage.lose("p2", "killed by signal 9")
    told = stage.heard(m.StepFailed)
    assert [one.reason for one in told] == [
        "rank 2 of group 'raises' died (host host-n1, pid 102): killed by signal 9"] * 2
    stage.give(formed, 0, 1, ONES)
    assert stage.heard(m.StepFailed, "p0")[0].kind == "lost"


def test_what_the_dead_gave_counts_in_a_group_that_raises():
    stage = Stage()
    formed = stage.form(on_failure="raise")
    stage.give(formed, 1, 0, ONES)
    stage.lose("p1")
    stage.give(formed, 0, 0, ONES)
    assert stage.heard(m.BlobsReady, ME)


def test_a_group_shrinks_and_does_what_is_open_with_new_numbers():
    stage = Stage()
    formed = stage.form(4, on_failure="shrink")
    for rank in (0, 2):
        stage.give(formed, rank, 0, ONES, op="reduce", root=3)
    stage.lose("p1")
    told = [stage.heard(m.GroupFormed, f"p{rank}")[0] for rank in (0, 2, 3)]
    assert [(one.rank, one.size) for one in told] == [(0, 3), (1, 3), (2, 3)]
    assert told[0].seating.order == (0, 1, 2)
    assert told[0].seating.starts == (0, 2)
    stage.give(formed, 3, 0, ONES, op="reduce", root=3, epoch=1)
    [ready] = stage.heard(m.BlobsReady, OTHER)
    assert ready.takers == ((2, "p3"),)
    assert dict(ready.results) == {2: (3 * ONES).tobytes()}
    stage.give(formed, 1, 1, ONES, address="p1", epoch=1)
    assert stage.heard(m.StepFailed, "p1")
    for rank in range(3):
        stage.give(formed, rank, 1, ONES, address=f"p{(0, 2, 3)[rank]}", epoch=2)
    assert dict(stage.heard(m.BlobsReady, ME)[-1].results)[WHOLE] == (3 * ONES).tobytes()


@pytest.mark.parametrize("op", ["alltoall", "scatter"])
def test_what_was_dealt_before_a_group_shrank_is_dealt_to_those_who_are_left(op):
    stage = Stage()
    formed = stage.form(3, on_failure="shrink")
    items = [[np.full(2, 10 * rank + to, "i4") for to in range(3)] for rank in range(3)]
    root = 0 if op == "scatter" else -1
    stage.give(formed, 0, 0, items[0], op=op, root=root, epoch=1)
    stage.lose("p1")
    stage.give(formed, 2, 0, items[2] if op == "alltoall" else None, op=op, root=root, epoch=1)
    ready = stage.heard(m.BlobsReady, ME)[-1]
    told = [arrays_of(dict(ready.results)[part.taker], part.header) for part in ready.layout]
    givers = (0, 2) if op == "alltoall" else (0,)
    assert [[int(array[0]) for array in arrays] for arrays in told] == [
        [10 * rank + to for rank in givers] for to in (0, 2)]


def test_a_group_grows_at_an_admission():
    stage = Stage()
    formed = stage.form()
    stage.join(2, 3)
    stage.sleep(1)
    for rank in (0, 1):
        stage.give(formed, rank, 0, op="admit")
    kinds = [type(told) for to, told in stage.said if to == "p1"]
    assert kinds == [m.GroupFormed, m.StepDone]
    new = stage.heard(m.GroupFormed, "p2")[0]
    assert (new.rank, new.size, new.first_step, new.seating.epoch) == (2, 3, 1, 2)
    assert [new.seating.size_at(step, new.size) for step in range(3)] == [2, 3, 3]
    for rank in range(3):
        stage.give(formed, rank, 1, ONES)
    assert dict(stage.heard(m.BlobsReady, ME)[-1].results)[WHOLE] == (3 * ONES).tobytes()


def test_who_comes_too_late_for_an_admission_is_taken_in_by_the_next_whatever_rank_it_wished_for():
    stage = Stage()
    formed = stage.form(1)
    for rank in (3, 5, 4):
        stage.join(rank, rank + 1)
    stage.give(formed, 0, 0, op="admit")
    assert [stage.heard(m.GroupFormed, f"p{rank}")[0].rank for rank in (3, 4, 5)] == [1, 2, 3]
    for rank in (2, 1):
        stage.join(rank, rank + 1)
    for rank, address in enumerate(("p0", "p3", "p4", "p5")):
        stage.give(formed, rank, 1, op="admit", address=address)
    assert [stage.heard(m.GroupFormed, f"p{rank}")[0].rank for rank in (1, 2)] == [4, 5]
    assert not stage.heard(m.JoinRefused)


def test_who_is_not_admitted_is_told_why():
    stage = Stage()
    stage.form()
    stage.join(2, 3)
    stage.sleep(4.1)
    assert "did not admit rank 2 within 4 s" in stage.heard(m.JoinRefused, "p2")[0].reason


def test_the_name_of_a_group_that_has_ended_is_given_back_and_claimed_again_before_another_forms():
    stage = Stage()
    formed = stage.form()
    stage.desk.head_up = True
    for rank in (0, 1):
        stage.tell(m.GroupLeft(formed.seating.group, rank), f"p{rank}")
    for stage.now in (10.0, 60.0):
        stage.ledgers.beat(stage.now)
        stage.drain()
    assert not stage.heard(m.Asked)
    stage.ledgers.beat(80.0)
    stage.drain()
    assert stage.heard(m.Asked, "head") == [m.Asked(0, "name.drop", ["collective/g", ME])]
    stage.ledgers.beat(200.0)
    for _ in (0, 1):  # another node has claimed it; who comes by the old entry hears of that, however late
        stage.join(0)
        [asked] = stage.heard(m.Asked, "head")
        assert (asked.topic, asked.argument) == ("name.claim", ["collective/g", [ME]])
        stage.ledgers.name_claimed(asked.request, False, stage.now)
        stage.drain()
        assert stage.heard(m.JoinRefused, "p0")[0].kind == "moved"
    stage.join(0)
    stage.join(1)
    assert not stage.heard(m.GroupFormed)
    [asked] = stage.heard(m.Asked, "head")
    stage.ledgers.head_found()
    stage.drain()
    assert stage.heard(m.Asked, "head") == [asked]
    stage.ledgers.name_claimed(asked.request, True, stage.now)
    stage.drain()
    assert len(stage.heard(m.GroupFormed)) == 2


def test_a_member_whose_node_lives_on_in_a_new_life_hears_that_what_it_gave_is_lost():
    stage = Stage()
    formed = stage.form()
    stage.give(formed, 0, 0, ONES, oid=b"gift")
    stage.lose_node(ME)
    assert stage.heard(m.StepFailed, "p0")[0].kind == "lost"


def test_who_leaves_is_not_waited_for_and_the_last_one_ends_the_group():
    stage = Stage()
    formed = stage.form()
    stage.tell(m.GroupLeft(formed.seating.group, 1), "p1")
    stage.give(formed, 0, 0, ONES)
    assert "rank 1 of group 'g' has left it" in stage.heard(m.StepFailed, "p0")[0].reason
    stage.tell(m.GroupLeft(formed.seating.group, 0), "p0")
    assert {told.number for told in stage.heard(m.StepsForgotten)} == {-1}
    assert not stage.ledgers.seats.by_group
    stage.form()


def test_what_waits_is_told():
    stage = Stage()
    stage.join(0)
    assert stage.ledgers.waits("g") == ["group 'g': rank 0 of 2 ranks wait for rank 1"]
    stage.join(1)
    stage.give(stage.heard(m.GroupFormed)[0], 0, 0, ONES)
    assert stage.ledgers.waits("g") == ["group 'g': step 0 (allreduce) waits for rank 1, at most 4 s"]
    assert stage.ledgers.waits("other") == []


def test_headers_say_what_was_asked():
    header, _ = header_of([ONES, ONES.astype("i8")], op="broadcast", root=1)
    assert header_text(header) == "broadcast(root 1) of ['*', '*']: float32 (100,), int64 (100,)"


def test_steps_of_two_are_counted_anew_when_ranks_have_new_numbers():
    assert step_text((0, 1, 2 * EPOCH_STEPS + 3)) == "step 3 from rank 0 to rank 1"
