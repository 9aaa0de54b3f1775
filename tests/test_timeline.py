"""The timeline as a Chrome trace: rows, slices, arrows from whoever submitted, marks of failures."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from flowengine.observe.timeline import Span, on_one_clock, trace

BY_PROGRAM = Span("t1", "f", "n.w1", "n", 1, 1_000, 2_000, 500, "done", "program 7")
NESTED = Span("t2", "g", "o.w1", "o", 1, 2_100, 2_200, 50, "done", "n.w1", "n")
CALL = Span("c1", "C.m", "n.w2", "n", 1, 1_500, 2_000, 100, "done", "program 7", "", "call", "main")
FAILED = Span("t3", "h", "n.w1", "n", 2, 0, 3_000, 10, "task", "program 7")


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == kind]


def rows(events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    processes = {event["pid"]: event["args"]["name"] for event in of(events, "M") if event["name"] == "process_name"}
    return {(event["pid"], event["tid"]): f"{processes[event['pid']]}, {event['args']['name']}"
            for event in of(events, "M") if event["name"] == "thread_name"}


def arrows(events: list[dict[str, Any]]) -> list[tuple[str, int, str, int]]:
    names, ends = rows(events), {event["id"]: event for event in of(events, "f")}
    return [(names[start["pid"], start["tid"]], start["ts"],
             names[ends[start["id"]]["pid"], ends[start["id"]]["tid"]], ends[start["id"]]["ts"])
            for start in of(events, "s")]


def test_arrows_lead_from_the_submitter_to_the_worker():
    assert arrows(trace([BY_PROGRAM, NESTED])["traceEvents"]) == [
        ("programs, program 7", 1_000, "node n, worker n.w1", 2_000),
        ("node n, worker n.w1", 2_100, "node o, worker o.w1", 2_200)]


def test_an_arrow_begins_and_ends_inside_of_slices():
    events = trace([BY_PROGRAM, NESTED])["traceEvents"]
    for end in (*of(events, "s"), *of(events, "f")):
        row = [one for one in of(events, "X") if (one["pid"], one["tid"]) == (end["pid"], end["tid"])]
        assert any(one["ts"] <= end["ts"] <= one["ts"] + one["dur"] for one in row)


def test_failures_are_marked():
    events = trace([BY_PROGRAM, FAILED])["traceEvents"]
    slices = {one["name"]: one for one in of(events, "X")}
    assert (slices["f"]["cat"], slices["h"]["cat"], slices["h"]["cname"]) == ("task", "task,failed", "terrible")
    assert [(mark["name"], mark["ts"]) for mark in of(events, "i")] == [("h: failed", 3_010)]
    assert slices["h"]["args"] == {"task": "t3", "attempt": 2, "outcome": "failed"}


def test_rows_have_distinct_numbers_and_every_event_has_a_row():
    events = trace([BY_PROGRAM, NESTED, FAILED])["traceEvents"]
    named = rows(events)
    assert len(named) == 3
    assert all((event["pid"], event["tid"]) in named for event in events if event["ph"] != "M")
    assert msgspec.json.decode(msgspec.json.encode(trace([])))["displayTimeUnit"] == "ms"


def test_a_run_is_never_before_its_submission_in_the_picture():
    early = msgspec.structs.replace(BY_PROGRAM, began_us=900)
    assert arrows(trace([early])["traceEvents"])[0][3] == 1_000


def slices(events: list[dict[str, Any]]) -> list[tuple[str, str, int, int]]:
    """row, name, from, to; without submissions"""
    names = rows(events)
    return [(names[one["pid"], one["tid"]].removeprefix("node n, worker "), one["name"], one["ts"],
             one["ts"] + one["dur"])
            for one in of(events, "X") if one["cat"] != "submit"]


def at(began_us: int, run_us: int, task: str = "c1", **more: Any) -> Span:
    return msgspec.structs.replace(CALL, began_us=began_us, run_us=run_us, task=task, submitted_us=0, **more)


def test_calls_have_slices_and_arrows_and_say_in_which_life_of_the_actor_they_ran():
    events = trace([CALL])["traceEvents"]
    assert slices(events) == [("n.w2", "C.m", 2_000, 2_100)]
    assert arrows(events) == [("programs, program 7", 1_500, "node n, worker n.w2", 2_000)]
    (slice_,) = [one for one in of(events, "X") if one["cat"] == "call"]
    assert slice_["args"] == {"call": "c1", "life": 1, "outcome": "done"}


def test_what_runs_at_once_in_a_worker_lies_in_rows_of_their_own():
    events = trace([at(0, 100), at(10, 20), at(15, 100), at(30, 10), at(100, 5), at(115, 5)])["traceEvents"]
    assert [(row, began) for row, _, began, _ in slices(events)] == [
        ("n.w2", 0), ("n.w2, at once 2", 10), ("n.w2, at once 3", 15), ("n.w2, at once 2", 30), ("n.w2", 100),
        ("n.w2", 115)]


def test_slices_of_a_row_do_not_lie_over_each_other_though_they_took_no_time():
    drawn = slices(trace([at(10, 0), at(10, 3), at(13, 0), at(13, 0), at(14, 9)])["traceEvents"])
    assert {row for row, *_ in drawn} == {"n.w2"}
    assert all(one[3] <= other[2] for one, other in itertools.pairwise(drawn))


def test_a_restart_and_a_replay_are_marked():
    again = at(50, 10, outcome="repeated", attempt=2)
    restart = at(0, 40, outcome="done", attempt=2, kind="actor", name="C.__init__")
    first = at(100, 10, attempt=2)
    events = trace([again, restart, first])["traceEvents"]
    assert [(name, one["cat"]) for (_, name, *_), one in zip(slices(events), of(events, "X"), strict=True)] == [
        ("C.__init__ (restart)", "actor,again"), ("C.m (replay)", "call,again"), ("C.m", "call")]
    assert not of(events, "i")  # they are no failures


def test_what_a_death_ended_is_named_so_and_ends_there():
    task = msgspec.structs.replace(BY_PROGRAM, outcome="crash")
    again = msgspec.structs.replace(BY_PROGRAM, began_us=9_000, attempt=2)
    events = trace([task, again])["traceEvents"]
    assert slices(events) == [("n.w1", "f (interrupted)", 2_000, 2_500), ("n.w1", "f", 9_000, 9_500)]
    assert [(mark["name"], mark["ts"]) for mark in of(events, "i")] == [("f: interrupted", 2_500)]


def test_a_call_that_a_death_ended_begins_when_the_worker_had_done_the_one_before():
    died = at(900, 0, "c2", outcome="crash")
    queued = msgspec.structs.replace(died, task="c3", submitted_us=250)
    assert slices(trace([died, at(0, 100), at(100, 500), at(100, 50, worker="n.w3")])["traceEvents"])[-1] == (
        "n.w2", "C.m (interrupted)", 600, 900)
    assert slices(trace([queued, at(0, 100)])["traceEvents"])[-1] == ("n.w2", "C.m (interrupted)", 250, 900)
    assert slices(trace([died, at(950, 10)])["traceEvents"])[0] == ("n.w2", "C.m (interrupted)", 900, 901)


def test_an_owner_tells_by_its_own_clock_when_a_death_ended_a_run():
    (moved,) = on_one_clock([msgspec.structs.replace(NESTED, outcome="crash")], "n", {"n": 100, "o": 1_000})
    assert (moved.submitted_us, moved.began_us) == (2_000, 2_100)


def test_an_arrow_begins_in_the_row_of_the_call_that_submitted():
    calls = [at(0, 100, "c1"), at(10, 80, "c2")]
    nested = msgspec.structs.replace(NESTED, submitted_us=50, began_us=60, submitter="n.w2", parent="c2")
    assert arrows(trace([*calls, nested])["traceEvents"])[0][:2] == ("node n, worker n.w2, at once 2", 50)


def test_times_are_put_on_one_clock():
    (moved,) = on_one_clock([NESTED], "n", {"n": 100, "o": 1_000})
    assert (moved.submitted_us, moved.began_us, moved.submitter) == (2_000, 1_200, "n.w1")


def test_spans_of_an_older_form_are_read():
    old = msgspec.json.encode(msgspec.to_builtins(BY_PROGRAM)[:9])
    assert msgspec.json.decode(old, type=Span).submitter == ""
