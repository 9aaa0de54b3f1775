"""The timeline as a Chrome trace: rows, slices, arrows from whoever submitted, marks of failures."""

from __future__ import annotations

from typing import Any

import msgspec

from flowengine.observe.timeline import Span, on_one_clock, trace

BY_PROGRAM = Span("t1", "f", "n.w1", "n", 1, 1_000, 2_000, 500, "done", "program 7")
NESTED = Span("t2", "g", "o.w1", "o", 1, 2_100, 2_200, 50, "done", "n.w1", "n")
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
    assert [(mark["name"], mark["ts"]) for mark in of(events, "i")] == [("h: task", 3_010)]
    assert slices["h"]["args"] == {"task": "t3", "attempt": 2, "outcome": "task"}


def test_rows_have_distinct_numbers_and_every_event_has_a_row():
    events = trace([BY_PROGRAM, NESTED, FAILED])["traceEvents"]
    named = rows(events)
    assert len(named) == 3
    assert all((event["pid"], event["tid"]) in named for event in events if event["ph"] != "M")
    assert msgspec.json.decode(msgspec.json.encode(trace([])))["displayTimeUnit"] == "ms"


def test_a_run_is_never_before_its_submission_in_the_picture():
    early = msgspec.structs.replace(BY_PROGRAM, began_us=900)
    assert arrows(trace([early])["traceEvents"])[0][3] == 1_000


def test_times_are_put_on_one_clock():
    (moved,) = on_one_clock([NESTED], "n", {"n": 100, "o": 1_000})
    assert (moved.submitted_us, moved.began_us, moved.submitter) == (2_000, 1_200, "n.w1")


def test_spans_of_an_older_form_are_read():
    old = msgspec.json.encode(msgspec.to_builtins(BY_PROGRAM)[:9])
    assert msgspec.json.decode(old, type=Span).submitter == ""
