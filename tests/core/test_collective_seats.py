"""A process's seats in groups, event by event: joining, steps, a ledger that moves, leaving."""
from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowengine.collectives.seats import (
    ALL_STEPS,
    FindLedger,
    Formed,
    LedgerFound,
    NodeTaken,
    SeatAsked,
    SeatLeft,
    Seats,
    SeekAgain,
    StepAsked,
    StepsDone,
    Tell,
)
from flowengine.config import Config
from flowengine.core.collective import (
    GroupFormed,
    GroupJoined,
    GroupLeft,
    Header,
    JoinRefused,
    Seating,
    StepDone,
    StepFailed,
    StepGiven,
    StepsPassed,
)
from flowengine.core.commands import Send, SetTimer
from flowengine.core.talk import PeerLost

JOINED = GroupJoined("g", 2, 0, b"key", "node", "host", 7, 30.0, "recover", True)
SEATING = Seating(b"G", 1, (0, 1), (0,), ("node", "node"), (b"key", b"other"))
FORMED = GroupFormed("g", 0, 2, SEATING, 0)
GIVEN = StepGiven(b"G", (-1, -1, 0), 0, Header("barrier"))
FIRST, SECOND = "tcp://a:1#1", "tcp://b:1#2"


def seats(*events: Any) -> tuple[Seats, list[Any]]:
    """A machine after these events, and what the last of them led to."""
    machine, out = Seats("me", "node", Config()), []
    for event in events:
        out = machine.handle(event, 0.0)
    return machine, out


def seated(*events: Any) -> tuple[Seats, list[Any]]:
    """The same for a member of a group whose ledger is at FIRST."""
    return seats(SeatAsked(1, 5, JOINED), LedgerFound("g", FIRST), FORMED, *events)


def test_who_joins_has_the_ledger_found_and_is_told_when_the_group_is_formed() -> None:
    assert seats(SeatAsked(1, 5, JOINED))[1] == [FindLedger("g")]
    assert seats(SeatAsked(1, 5, JOINED), LedgerFound("g", FIRST))[1] == [Send(FIRST, JOINED)]
    assert seated()[1] == [Formed(1, FORMED), Tell(5, FORMED)]


def test_a_second_seat_of_the_same_name_knows_the_ledger() -> None:
    other = GroupJoined("g", 2, 1, b"other", "node", "host", 7, 30.0, "recover", True)
    machine, out = seats(SeatAsked(1, 5, JOINED), LedgerFound("g", FIRST), SeatAsked(2, 6, other))
    assert out == [Send(FIRST, other)]
    assert machine.handle(FORMED, 0.0) == [Formed(1, FORMED), Tell(5, FORMED)]
    second = GroupFormed("g", 1, 2, SEATING, 0)
    assert machine.handle(second, 0.0) == [Formed(2, second), Tell(6, second)]
    machine.handle(StepAsked(1, 8, GIVEN), 0.0)
    machine.handle(StepAsked(2, 9, StepGiven(b"G", (-1, -1, 0), 1, Header("barrier"))), 0.0)
    one = StepDone(b"G", (-1, -1, 0), b"1", rank=1)
    assert machine.handle(one, 0.0) == [Tell(9, one)], "a result for one rank is not the other's"


def sitting(epoch: int, *keys: bytes) -> Seating:
    """Who sits where, all on one node."""
    ranks = tuple(range(len(keys)))
    return Seating(b"G", epoch, ranks, (0,), ("node",) * len(keys), keys)


def asking(rank: int, key: bytes) -> GroupJoined:
    return GroupJoined("g", rank + 1, rank, key, "node", "host", 7, 30.0, "shrink", False)


@pytest.mark.parametrize(("asked", "rank", "size"), [(3, 2, 3), (3, 1, 2), (2, 2, 3), (2, 3, 4), (1, 4, 5)])
def test_a_newcomer_may_be_taken_in_at_any_other_rank_than_it_asked_for(asked: int, rank: int, size: int) -> None:
    keys = [b"key" if at == rank else bytes([at]) for at in range(size)]
    taken = GroupFormed("g", rank, size, sitting(2, *keys), 5)
    machine, out = seats(SeatAsked(1, 5, asking(asked, b"key")), LedgerFound("g", FIRST), taken)
    assert out == [Formed(1, taken), Tell(5, taken)]
    assert machine.seats[1].rank == rank


def test_of_two_newcomers_here_each_hears_its_own_rank_though_the_other_has_asked_for_it() -> None:
    machine, _ = seats(SeatAsked(1, 5, asking(2, b"c")), SeatAsked(2, 6, asking(3, b"d")), LedgerFound("g", FIRST))
    late = GroupFormed("g", 2, 3, sitting(2, b"a", b"b", b"d"), 1)
    assert machine.handle(late, 0.0) == [Formed(2, late), Tell(6, late)]
    later = [GroupFormed("g", rank, 4, sitting(3, b"a", b"b", b"d", b"c"), 2) for rank in (2, 3)]
    assert machine.handle(later[0], 0.0) == [Formed(2, later[0])]
    assert machine.handle(later[1], 0.0) == [Formed(1, later[1]), Tell(5, later[1])]
    fewer = [GroupFormed("g", rank, 3, sitting(4, b"b", b"d", b"c"), 0) for rank in (1, 2)]
    assert [machine.handle(news, 0.0) for news in fewer] == [[Formed(2, fewer[0])], [Formed(1, fewer[1])]]


def test_a_refusal_is_for_who_has_asked_not_for_who_got_that_rank() -> None:
    machine, _ = seats(SeatAsked(1, 5, asking(2, b"c")), SeatAsked(2, 6, asking(3, b"d")), LedgerFound("g", FIRST))
    machine.handle(GroupFormed("g", 2, 3, sitting(2, b"a", b"b", b"d"), 1), 0.0)
    refused = JoinRefused("g", b"c", "usage", "nobody admitted it")
    assert machine.handle(refused, 0.0) == [Tell(5, refused)]
    assert list(machine.seats) == [2]


@pytest.mark.parametrize("rank", [0, 1])
def test_news_for_a_seat_that_was_given_up_is_for_nobody_else(rank: int) -> None:
    machine, _ = seats(SeatAsked(1, 5, asking(rank, b"next")), LedgerFound("g", FIRST))
    assert machine.handle(GroupFormed("g", 1, 2, SEATING, 0), 0.0) == []
    assert machine.handle(JoinRefused("g", b"other", "lost", "it is over"), 0.0) == []


def test_whoever_asks_for_a_seat_that_is_taken_here_is_told_at_once_or_waits_too() -> None:
    waiting, out = seats(SeatAsked(1, 0, JOINED), LedgerFound("g", FIRST), SeatAsked(1, 6, JOINED))
    assert out == []
    assert waiting.handle(FORMED, 0.0) == [Formed(1, FORMED), Tell(6, FORMED)]
    assert waiting.handle(SeatAsked(1, 7, JOINED), 0.0) == [Tell(7, FORMED)]


def test_a_member_that_the_next_ledger_does_not_take_hears_it_at_its_open_step() -> None:
    machine, _ = seated(StepAsked(1, 8, GIVEN), PeerLost(FIRST, ""), LedgerFound("g", SECOND))
    out = machine.handle(JoinRefused("g", b"key", "lost", "it is over"), 0.0)
    assert out == [Tell(8, StepFailed(b"G", (-1, -1, 0), "lost", "it is over", 0))]
    assert not machine.seats


def test_who_comes_to_a_node_that_keeps_the_ledger_no_more_has_it_found_again() -> None:
    moved = JoinRefused("g", b"key", "moved", "another node keeps it")
    machine, out = seats(SeatAsked(1, 5, JOINED), LedgerFound("g", FIRST), moved)
    assert out == [FindLedger("g")]
    assert machine.handle(moved, 0.0) == []
    assert machine.handle(LedgerFound("g", SECOND), 0.0) == [Send(SECOND, JOINED)]


@pytest.mark.parametrize("kind", ["usage", "timeout", "lost"])
def test_a_refused_join_is_told_and_the_seat_is_gone(kind: str) -> None:
    refused = JoinRefused("g", b"key", kind, "why")
    machine, out = seats(SeatAsked(1, 5, JOINED), LedgerFound("g", FIRST), refused)
    assert out == [Tell(5, refused)]
    assert not machine.seats


def test_a_step_is_given_once_and_its_first_result_counts() -> None:
    machine, out = seated(StepAsked(1, 8, GIVEN))
    assert out == [Send(FIRST, GIVEN)]
    done = StepDone(b"G", (-1, -1, 0), b"x")
    assert machine.handle(done, 0.0) == [Tell(8, done)]
    assert machine.handle(done, 0.0) == []
    assert machine.handle(StepFailed(b"G", (-1, -1, 0), "lost", ""), 0.0) == []


def test_results_of_other_groups_and_steps_are_not_taken() -> None:
    machine, _ = seated(StepAsked(1, 8, GIVEN))
    for other in (StepDone(b"H", (-1, -1, 0)), StepDone(b"G", (-1, -1, 1))):
        assert machine.handle(other, 0.0) == []


def test_when_the_ledger_is_lost_the_next_gets_the_seat_as_it_is_known_and_what_is_open() -> None:
    machine, out = seated(StepAsked(1, 8, GIVEN), PeerLost(FIRST, ""))
    assert out == [FindLedger("g", FIRST)]
    later = StepGiven(b"G", (-1, -1, 1), 0, Header("barrier"))
    assert machine.handle(StepAsked(1, 9, later), 0.0) == [], "there is nobody to give it to"
    machine.handle(StepsDone(1, 1), 0.0)
    again = GroupJoined("g", 2, 0, b"key", "node", "host", 7, 30.0, "recover", True, SEATING, 2)
    assert machine.handle(LedgerFound("g", SECOND), 0.0) == [
        Send(SECOND, again), Send(SECOND, StepsPassed(b"G", 0, 1)),
        *[Send(SECOND, msgspec.structs.replace(given, epoch=1)) for given in (GIVEN, later)],
    ]  # fmt: skip


def test_a_loss_of_others_changes_nothing() -> None:
    assert seated(PeerLost(SECOND, ""))[1] == []


def test_a_ledger_that_is_not_found_is_sought_for_a_while() -> None:
    machine, _ = seated(StepAsked(1, 8, GIVEN), PeerLost(FIRST, ""))
    assert machine.handle(LedgerFound("g", "", "no head"), 1.0) == [
        SetTimer(Config().seek_interval_s, SeekAgain("g"))
    ]
    assert machine.handle(SeekAgain("g"), 1.0) == [FindLedger("g", FIRST)]
    out = machine.handle(LedgerFound("g", "", "no head"), Config().link_lost_after_s + 1)
    assert out == [Tell(8, StepFailed(b"G", (-1, -1, 0), "lost", "no head", 0))]
    assert not machine.seats


def test_a_rank_that_has_another_number_after_a_shrink_gives_by_that() -> None:
    smaller = GroupFormed("g", 0, 1, Seating(b"G", 2, (0,), (0,), ("node",), (b"other",)), 0)
    second = GroupJoined("g", 2, 1, b"other", "node", "host", 7, 30.0, "shrink", True)
    events = (SeatAsked(1, 5, second), LedgerFound("g", FIRST), GroupFormed("g", 1, 2, SEATING, 0), smaller)
    machine, out = seats(*events)
    assert out == [Formed(1, smaller)]
    assert (machine.seats[1].rank, machine.seats[1].joined.size) == (0, 1)
    assert machine.handle(GroupFormed("g", 1, 2, SEATING, 0), 0.0) == [], "an older epoch that came late"


def test_the_root_of_an_open_step_is_the_same_member_after_ranks_got_other_numbers() -> None:
    before, after = sitting(1, b"a", b"b", b"key"), sitting(4, b"b", b"key")
    machine, _ = seats(SeatAsked(1, 5, asking(2, b"key")), LedgerFound("g", FIRST), GroupFormed("g", 2, 3, before, 0))
    machine.handle(GroupFormed("g", 2, 3, msgspec.structs.replace(before, epoch=3), 0), 0.0)
    given = StepGiven(b"G", (-1, -1, 0), 2, Header("reduce", "sum", 1, "*"), epoch=2)
    machine.handle(StepAsked(1, 8, given), 0.0)
    machine.handle(GroupFormed("g", 1, 2, after, 0), 0.0)
    for ledger, next_ledger in ((FIRST, SECOND), (SECOND, FIRST)):
        machine.handle(PeerLost(ledger, ""), 0.0)
        said = machine.handle(LedgerFound("g", next_ledger), 0.0)[-1].message
        assert (said.rank, said.epoch, said.header.root) == (1, 4, 0)


def test_open_steps_of_a_formation_that_is_gone_fail() -> None:
    anew = GroupFormed("g", 0, 2, Seating(b"H", 1, (0, 1), (0,), ("node", "node"), (b"key", b"other")), 0)
    _, out = seated(StepAsked(1, 8, GIVEN), anew)
    assert [type(command) for command in out] == [Tell, Formed]
    assert out[0].outcome.kind == "lost"
    assert "formed anew" in out[0].outcome.reason


def test_a_seat_that_is_given_up_is_told_and_what_is_open_fails() -> None:
    machine, out = seated(StepAsked(1, 8, GIVEN), SeatLeft(1))
    assert out[:2] == [Send(FIRST, StepsPassed(b"G", 0, ALL_STEPS)), Send(FIRST, GroupLeft(b"G", 0))]
    assert out[2].ticket == 8
    assert out[2].outcome.kind == "usage"
    assert not machine.seats
    assert not machine.ledgers
    assert machine.handle(SeatLeft(1), 0.0) == []


def test_a_task_that_has_ended_leaves_when_its_steps_are_done() -> None:
    machine, out = seated(StepAsked(1, 8, GIVEN), SeatLeft(1, at_once=False))
    assert out == []
    assert 1 in machine.seats
    done = StepDone(b"G", (-1, -1, 0), b"x")
    assert machine.handle(done, 0.0) == [
        Tell(8, done), Send(FIRST, StepsPassed(b"G", 0, ALL_STEPS)), Send(FIRST, GroupLeft(b"G", 0)),
    ]  # fmt: skip


def test_who_leaves_while_the_ledger_moves_is_told_to_the_next() -> None:
    machine, out = seated(PeerLost(FIRST, ""), SeatLeft(1))
    assert out == []
    assert machine.handle(LedgerFound("g", SECOND), 0.0) == [
        Send(SECOND, StepsPassed(b"G", 0, ALL_STEPS)), Send(SECOND, GroupLeft(b"G", 0)),
    ]  # fmt: skip


def test_a_seat_whose_code_will_come_again_goes_without_a_word() -> None:
    machine, out = seated(SeatLeft(1, kept=True))
    assert out == []
    assert not machine.seats


def test_a_step_of_a_seat_that_is_gone_fails() -> None:
    _, out = seated(SeatLeft(1), StepAsked(1, 8, GIVEN))
    assert out == [Tell(8, StepFailed(b"G", (-1, -1, 0), "usage", "the seat was given up"))]


def test_a_member_that_was_restored_tells_what_it_knew() -> None:
    known = GroupJoined("g", 2, 0, b"key", "old", "host", 7, 30.0, "recover", True, SEATING, 4)
    _, out = seats(NodeTaken("new"), SeatAsked(1, 0, known), LedgerFound("g", FIRST))
    assert out == [Send(FIRST, GroupJoined("g", 2, 0, b"key", "new", "host", 7, 30.0, "recover", True, SEATING, 4))]


def test_a_ledger_that_nobody_here_needs_is_forgotten_when_it_is_lost() -> None:
    machine, out = seated(SeatLeft(1, kept=True), PeerLost(FIRST, ""))
    assert out == []
    assert not machine.ledgers


def test_a_step_of_two_that_was_read_is_said_though_no_step_of_all_was_passed() -> None:
    pair = (0, 1, 0)
    assert seated(StepsDone(1, 0, pair))[1] == [Send(FIRST, StepsPassed(b"G", 0, 0, pair))]
    assert seated(StepsDone(1, 0))[1] == []
