"""Records: how pieces are put together, in which order a dead actor ran its calls, and what is kept of the past."""
from __future__ import annotations

import msgspec
import pytest

from flowengine.config import Config
from flowengine.core import actor_saving
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.actor_calls import Arrived
from flowengine.core.owner import Owner
from flowengine.core.past import Kept
from flowengine.errors import BadValue, pack_error
from flowengine.recovery import record as r

ACTOR, A, B = b"actor-name-16-by", b"caller-a-16-byte", b"caller-b-16-byte"


def push(caller: bytes, seq: int, seen: bool = True) -> m.PushTask:
    name = caller[7:8] + seq.to_bytes(15, "big")
    spec = m.TaskSpec(name, b"add", "Counter.add", actor=m.RefTo(ACTOR + bytes(4), "o"), caller_key=caller)
    return m.PushTask(spec, 1, 0, seq=seq, seen=seen)


def turn(number: int, caller: bytes, seq: int) -> tuple[str, int, bytes]:
    return "turn", number, caller + seq.to_bytes(8, "big")


def told(**fields) -> r.ActorTold:
    spec = m.TaskSpec(ACTOR, b"class", "Counter", life=m.ActorLife())
    made = r.ActorTold(spec, b"pickled", (), 1, (m.BEGINNING,), (), (), 1000)
    return msgspec.structs.replace(made, **fields)


def dead(sent, recorded=(), **fields) -> r.ActorRecord:
    return r.ActorRecord(told(error=b"x", **fields), (), tuple((one, None) for one in sent), tuple(recorded))


def order(record, frontiers=None, last=b"", number=0):
    return [(call.number, call.push.spec.caller_key, call.push.seq)
            for call in r.in_order(record, frontiers or {}, last, number)]


def test_calls_of_a_dead_actor_are_in_the_order_of_its_turns():
    record = dead([push(A, 0), push(A, 1), push(B, 0)], [turn(0, A, 0), turn(1, B, 0), turn(2, A, 1)])
    assert order(record) == [(0, A, 0), (1, B, 0), (2, A, 1)]


def test_between_turns_one_caller_goes_on():
    record = dead([push(A, 0), push(A, 1), push(A, 2)], [turn(0, A, 0)])
    assert order(record) == [(0, A, 0), (1, A, 1), (2, A, 2)]


def test_behind_a_checkpoint_the_caller_before_it_goes_on():
    record = dead([push(A, 4), push(A, 5)])
    assert order(record, {A: 3}, A, 4) == [(4, A, 4), (5, A, 5)]


def test_calls_that_nobody_saw_are_left_out_but_for_the_one_in_which_it_died():
    fatal = push(A, 2, seen=False)
    calls = [push(A, 0), push(A, 1), fatal, push(A, 3, seen=False)]
    assert order(dead(calls, [turn(0, A, 0)]))[-1] == (1, A, 1)
    assert order(dead(calls, [turn(0, A, 0)], died_in=fatal.spec.id))[-1] == (2, A, 2)


def test_the_fatal_call_comes_last_even_when_its_turn_was_lost():
    fatal = push(B, 0, seen=False)
    assert order(dead([push(A, 0), fatal], [turn(0, A, 0)], died_in=fatal.spec.id)) == [(0, A, 0), (1, B, 0)]


def test_a_call_that_is_gone_leaves_its_place():
    record = dead([push(A, 0), push(B, 1)], [turn(0, A, 0), turn(1, B, 0), turn(2, B, 1)])
    assert order(record) == [(0, A, 0), (2, B, 1)]


def live(first: int, last: int, *starts: int) -> r.ActorRecord:
    numbers = tuple(range(first, last))
    calls = r.CallsTold(ACTOR, numbers, tuple(push(A, number) for number in numbers), (None,) * len(numbers))
    points = tuple(m.Checkpoint(start, m.Inline(b"state")) if start else m.BEGINNING for start in starts)
    record = r.actor_record([told(starts=points), calls], ACTOR)
    assert record is not None
    return record


def test_a_replay_begins_where_all_calls_since_are_known():
    record = live(3, 10, 0, 2, 4, 8)
    assert [start.calls for start in record.told.starts] == [4, 8]
    assert (record.first, record.start(5).calls, record.start(9).calls) == (4, 4, 8)
    assert live(0, 10, 0, 4).start(2) == m.BEGINNING


@pytest.mark.parametrize(("count", "numbers"), [(5, [4]), (4, []), (7, [4, 5, 6]), (None, [4, 5, 6])])
def test_calls_up_to_a_number(count, numbers):
    record = live(4, 7, 4)
    assert [call.number for call in r.upto(record, record.calls, count, b"")] == numbers


@pytest.mark.parametrize("count", [3, 8])
def test_what_is_not_known_is_told_with_the_numbers(count):
    record = live(4, 7, 4)
    with pytest.raises(BadValue, match="taken after 4 calls, and the calls from there up to 7 are known"):
        r.upto(record, record.calls, count, b"")


def test_a_call_is_found_among_the_others():
    record = live(4, 7, 4)
    assert len(r.upto(record, record.calls, None, push(A, 5).spec.id)) == 2
    with pytest.raises(BadValue, match="cannot be replayed up to the call"):
        r.upto(record, record.calls, None, b"another")


def test_actors_without_a_record_say_so():
    spec = m.TaskSpec(ACTOR, b"class", "Counter", life=m.ActorLife(recovery="restart"))
    with pytest.raises(BadValue, match="exactly_once"):
        r.actor_record([told(spec=spec)], ACTOR)
    with pytest.raises(BadValue, match="does not have its class"):
        r.actor_record([told(function=b"")], ACTOR)
    assert r.actor_record([], ACTOR) is None


def test_choices_belong_to_a_task_or_to_a_call():
    recorded = (("wait", 0, b"t"), (f"wait:{A.hex()}:7", 0, b"a"), (f"record:{A.hex()}:7", 1, b"b"), ("turn", 0, b"x"))
    assert r.choices_of(recorded, A) == {("wait", 0): b"a", ("record", 1): b"b"}
    assert r.choices_of(recorded)["wait", 0] == b"t"


def task(**fields) -> r.TaskTold:
    spec = m.TaskSpec(A, b"f", "square", deps=(m.RefTo(B + bytes(4), "o"),))
    made = r.TaskTold(spec, b"pickled", (m.Stored(10, ("n",)),), (m.Inline(b"9"),))
    return msgspec.structs.replace(made, **fields)


def test_the_best_piece_makes_the_record():
    pieces = [task(ended=False), task(), r.ChildrenTold(A, ((B, "cube"),)), r.ChildrenTold(B, ((A, "other"),))]
    record = r.task_record(pieces, A)
    assert record is not None
    assert record.told.ended
    assert record.names == ((B, "cube"),)


@pytest.mark.parametrize(("piece", "why"), [(task(ended=False), "has not ended"), (task(function=b""), "function")])
def test_tasks_that_cannot_be_replayed(piece, why):
    with pytest.raises(BadValue, match=why):
        r.task_record([piece], A)


def test_copies_take_the_place_of_stored_values():
    copied = r.with_values(task(), {B + bytes(4): m.Inline(b"copy")})
    assert r.inputs_in(copied) == {B + bytes(4): m.Inline(b"copy")}
    assert r.decoded(r.encoded([copied])) == [copied]


@pytest.mark.parametrize("blobs", [[b"nothing"], [b"\x91\x01"], [1]])
def test_what_is_no_piece_is_refused(blobs):
    with pytest.raises(BadValue, match="not the record"):
        r.decoded(blobs)


def test_a_record_that_is_too_large_is_not_sent(monkeypatch):
    monkeypatch.setattr(r, "SENT_BYTES_MAX", 10)
    with pytest.raises(BadValue, match="too large"):
        r.decoded(r.encoded([task()]))


def test_the_calls_that_an_actor_looks_back_to_are_bounded(monkeypatch):
    monkeypatch.setattr(actor_saving, "HISTORY_MAX", 3)
    history = actor_saving.History()
    for number in range(5):
        history.add(Arrived(push(A, number), "caller", number=number))
    assert [item.number for item in history.calls] == [2, 3, 4]
    monkeypatch.setattr(actor_saving, "HISTORY_BYTES_MAX", 50)
    large = msgspec.structs.replace(push(A, 5).spec, args=bytes(40))
    history.add(Arrived(m.PushTask(large, 1, 0, seq=5), "caller", number=5))
    assert history.bytes <= 50
    assert history.calls[-1].number == 5


def failing_owner(keeps_records: bool) -> tuple[Owner, list[object]]:
    """An owner whose one task has been tried, and fails."""
    owner = Owner("tcp://h:1#me", "tcp://h:2#node", "node", Config())
    owner.keeps_records = keeps_records
    spec = m.TaskSpec(A, b"f", "square", max_retries=0)
    owner.handle(s.Submitted(spec, b"pickled"), 0.0)
    granted = m.LeaseGranted(1, spec.shape, (), "tcp://h:3#w", "w1", "node")
    owner.handle(granted, 0.1, owner.node)
    failed = m.TaskFailed(A, 1, pack_error(ValueError("no"), "square"), "task", False, 5)
    return owner, owner.handle(failed, 0.2, "tcp://h:3#w")


@pytest.mark.parametrize("keeps_records", [False, True])
def test_a_task_that_failed_is_kept_without_references(keeps_records):
    owner, out = failing_owner(keeps_records)
    assert [type(command) for command in out].count(c.KeepPiece) == keeps_records
    owner.handle(s.RefsDropped((A + bytes(4),)), 0.3)
    assert A not in owner.tasks
    (piece,) = owner.told(A.hex()[:8])
    assert isinstance(piece, r.TaskTold)
    assert (piece.function, piece.kind, piece.run, piece.ended) == (b"pickled", "task", 1, True)
    assert owner.told("00000000") == []


def test_what_is_kept_of_the_past_is_bounded():
    kept = Kept[str](2, 100)
    assert kept.put(b"a", "a", 10) == kept.put(b"b", "b", 10) == []
    assert kept.put(b"c", "c", 10) == ["a"]
    assert kept.put(b"d", "d", 95) == ["b", "c"]
    assert kept.put(b"e", "e", 101) == ["e"]
    assert (kept.things, kept.bytes) == ({b"d": "d"}, 95)
    assert kept.put(b"d", "newer", 5) == []
    assert kept.bytes == 5
