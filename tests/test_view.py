"""The document of the page and the metrics made of it, from answers as nodes give them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flowengine.core.head_seen import AT_HEAD
from flowengine.observe import tables
from flowengine.observe.http import exposition, same, token_of
from flowengine.observe.metrics import counter_name, families
from flowengine.observe.view import FAILURES_MAX, RUN_COUNTS, STATES, HeadTold, NodeTold, document, runs

STORE = {"limit_bytes": 100, "used_bytes": 40, "granted_bytes": 0, "pool_bytes": 5, "disk_bytes": 7}


def head(**changes: object) -> HeadTold:
    plain = {"session": "s", "address": "tcp://h:1#head", "host": "h", "pid": 1, "now_s": 100.0, "started_s": 90.0,
             "counters": {"head_messages": 5}, "seekers": [], "resources": [], "bundles": [], "failures": []}
    return HeadTold(**{**plain, **changes})


def function(name: str, **counts: int) -> dict[str, object]:
    return {"name": name, **dict.fromkeys((*STATES, *RUN_COUNTS, "longest_us"), 0), **counts}


def owner(*functions: dict[str, object], **changes: object) -> dict[str, object]:
    return {"role": "driver", "tasks": {"sent": 2, "ready": 1}, "functions": list(functions), "objects": 3,
            "queues": [], "actors": [], "actor_states": {}, "failures": [], "runs": [], "hosted": None, **changes}


def node(name: str, *processes: dict[str, object], ahead_us: int = 0) -> NodeTold:
    total = {"CPU": 2.0}
    listed = {"node_id": name, "host": "h", "address": f"tcp://{name}", "total": [("CPU", 2.0)],
              "available": [("CPU", 1.0)], "queued": 0}
    worker = {"worker_id": f"{name}.w1", "pid": 11, "state": "leased", "address": f"tcp://{name}.w1", "holds": total}
    own = {"node_id": name, "workers": [worker], "workers_more": 0, "programs": [1], "total": total,
           "available": {"CPU": 0.0}, "queued": 4, "store": STORE, "groups": []}
    host = {"cpu_share": 0.5, "cpu_count": 2, "memory_used_bytes": 10, "memory_total_bytes": 20,
            "processes": {"11": [0.9, 77]}, "running": {f"{name}.w1": (11, "ab" * 16, 2, "f")}}
    return NodeTold(listed=listed, seen=[own, *processes], host=host, ahead_us=ahead_us,
                    stats={"tasks_executed": 7, "objects_stored": 2, "bytes_spilled": 9})


def silent(name: str) -> NodeTold:
    return NodeTold(listed=node(name).listed)


def actor(**changes: object) -> dict[str, object]:
    return {"id": "aa", "name": "A", "named": "", "recovery": "exactly_once", "state": "alive", "worker": "tcp://n.w1",
            "restarts": 0, "replaying": False, "checkpoint_calls": 3, "unsaved": "", "error": "", "alive_s": 1.0,
            **changes}


def test_functions_of_all_owners_are_added_up():
    page = document(head(), [node("n", owner(function("f", runs=2, run_us=10, longest_us=9))),
                             node("o", owner(function("f", runs=2, run_us=30, longest_us=20),
                                             function("g", sent=1)))], 4)
    assert [(row["name"], row["runs"], row["mean_us"], row["longest_us"]) for row in page["functions"]] \
        == [("g", 0, 0, 0), ("f", 4, 10.0, 20)]
    assert page["totals"]["tasks"] == {"waiting": 0, "ready": 2, "sent": 4, "done": 0, "failed": 0, "unlooked": 0}
    assert page["totals"]["counters"]["tasks_executed"] == 14
    assert (page["number"], page["totals"]["objects"], page["totals"]["programs"]) == (4, 6, 2)


def test_a_worker_is_shown_with_what_it_runs_and_uses():
    process = owner(node_id="n", pid=11, code="ab" * 16, age_s=7.0)
    (shown,) = document(head(), [node("n", process)], 1)["nodes"]
    (worker,) = shown["workers"]
    assert (worker["name"], worker["attempt"], worker["cpu_share"], worker["memory_bytes"]) == ("f", 2, 0.9, 77)
    assert worker["age_s"] == 7.0
    assert (shown["available"], shown["queued"], shown["store"]["objects"]) == ({"CPU": 0.0}, 4, 2)


def test_a_node_that_gives_no_answer_is_shown_as_the_head_knows_it():
    page = document(head(), [silent("n")], 1)
    (shown,) = page["nodes"]
    assert (shown["answered"], shown["total"], shown["workers"]) == (False, {"CPU": 2.0}, [])
    assert page["totals"]["silent"] == 1
    assert families(page)


def test_an_actor_is_shown_where_it_lives_with_what_its_process_tells():
    hosted = {"id": "aa", "calls": 5, "running": ["m"], "waiting": 2, "replaying": True, "replayed": 4, "saving": False}
    page = document(head(), [node("n", owner(actors=[actor()], actor_states={"alive": 1}), owner(hosted=hosted))], 1)
    (shown,) = page["actors"]
    assert (shown["node_id"], shown["worker"], shown["calls"], shown["waiting"]) == ("n", "n.w1", 5, 2)
    assert (shown["replaying"], shown["replayed"], page["totals"]["actors"]) == (True, 4, {"alive": 1})
    assert page["nodes"][0]["workers"][0]["actor"] == "A"


@pytest.mark.parametrize(("hosted", "is_shown"), [
    ({"id": "aa", "calls": 5, "running": []}, False), ({"id": "aa", "calls": 5, "running": ["m"]}, True),
    (None, True)])
def test_what_runs_has_actors_that_do_something_or_give_no_answer(hosted, is_shown):
    page = document(head(), [node("n", owner(actors=[actor()]), owner(hosted=hosted))], 1)
    for worker in page["nodes"][0]["workers"]:
        worker["age_s"] = 1.0
    assert tables.running(page["nodes"], page["actors"], 80).row_count == is_shown


def test_queues_that_wait_for_the_same_are_one_row():
    queue = {"shape": {"CPU": 1.0}, "placement": [], "count": 2, "leases": 1, "reason": ""}
    page = document(head(seekers=[{**queue, "reason": "busy", "leases": 0}]),
                    [node("n", owner(queues=[queue]), owner(queues=[queue, {**queue, "shape": {"GPU": 1.0}}]))], 1)
    assert [(row["shape"], row["count"], row["leases"], row["reason"]) for row in page["queues"]] \
        == [({"CPU": 1.0}, 4, 2, ""), ({"GPU": 1.0}, 2, 1, ""), ({"CPU": 1.0}, 2, 0, "busy")]


def test_what_the_head_says_of_a_demand_as_well_is_told_once():
    queue = {"shape": {"GPU": 1.0}, "placement": [], "count": 2, "leases": 0, "reason": "no node has GPU: 1"}
    seekers = [{**queue, "reason": AT_HEAD + queue["reason"]}, {**queue, "reason": f"{AT_HEAD}a node is sought"}]
    page = document(head(seekers=seekers), [node("n", owner(queues=[queue]))], 1)
    assert [row["reason"] for row in page["queues"]] == ["no node has GPU: 1", "at the head: a node is sought"]


def test_dead_actors_come_last_and_what_is_left_out_is_counted():
    dead = actor(id="bb", name="0", state="dead", worker="")
    page = document(head(), [node("n", owner(actors=[dead, actor()], actor_states={"alive": 9, "dead": 1}))], 1)
    assert [one["id"] for one in page["actors"]] == ["aa", "bb"]
    assert page["actors_more"] == 8


def test_the_newest_failures_come_first_and_are_bounded():
    many = [{"kind": "task", "id": str(age), "name": "f", "text": "", "age_s": age} for age in range(100)]
    page = document(head(failures=[{"kind": "node", "id": "n", "name": "", "text": "", "age_s": 0.5}]),
                    [node("n", owner(failures=many))], 1)
    assert [one["id"] for one in page["failures"]][:3] == ["0", "n", "1"]
    assert len(page["failures"]) == FAILURES_MAX


def test_runs_are_put_on_the_clock_of_the_head():
    far = ("t", "f", "o.w1", "o", 1, 9_000_000, 1_000, "done")
    near = ("t", "f", "n.w1", "n", 1, 2_000_000, 1_000, "done")
    lost = ("t", "f", "x.w1", "x", 1, 2_000_000, 1_000, "task")
    found = runs([node("n", owner(runs=[far, near, lost]), ahead_us=500_000), node("o", ahead_us=7_000_000)])
    assert [run[0] for run in found] == [2_000.0, 1_500.0, 1_500.0]
    assert found[0][1:] == (1.0, "f", "o", "o.w1", "done", "t", 1)


def test_metrics_are_what_prometheus_reads():
    made = [{"name": "licence", "program": "ab", "total": 3.0, "free": 1.0, "nodes": ["n"], "nodes_more": 0},
            {"name": "any", "program": "ab", "total": None, "free": None, "nodes": ["n"], "nodes_more": 0}]
    page = document(head(resources=made), [node("n", owner()), silent("o")], 1)
    read = {family.name: family for family in text_string_to_metric_families(exposition(page).decode())}
    executed = read["flowengine_tasks_executed"]
    assert (executed.type, executed.samples[0].name, executed.samples[0].value) \
        == ("counter", "flowengine_tasks_executed_total", 7)
    assert {(sample.labels["state"], sample.value) for sample in read["flowengine_nodes"].samples} \
        == {("answering", 1), ("silent", 1)}
    assert {(sample.labels["node"], sample.labels["kind"]): sample.value
            for sample in read["flowengine_store_bytes"].samples}["n", "used"] == 40
    assert {(sample.labels["state"], sample.value) for sample in read["flowengine_workers"].samples} == {("leased", 1)}
    assert read["flowengine_tasks"].samples
    assert {sample.name for sample in read["flowengine_resource_capacity"].samples} == {"flowengine_resource_capacity"}
    for name, amount in (("capacity", 3), ("available", 1)):
        (sample,) = read[f"flowengine_made_resource_{name}"].samples
        assert (sample.labels, sample.value) == ({"program": "ab", "resource": "licence"}, amount)
    assert not any(family.name.endswith("_total") for family in families(page) if family.kind == "gauge")
    assert all(name.startswith("flowengine_") for name in read)


@pytest.mark.parametrize(("name", "metric"), [
    ("bytes_moved", "flowengine_moved_bytes_total"), ("bytes_stored", "flowengine_stored_bytes"),
    ("actors_alive", "flowengine_actors_alive"), ("tasks_retried", "flowengine_tasks_retried_total")])
def test_names_of_counters_end_in_their_unit(name, metric):
    assert counter_name(name) == metric


def test_labels_cannot_break_out():
    page = document(head(session='a"b\n\\'), [], 1)
    found = text_string_to_metric_families(exposition(page).decode())
    (info,) = [family for family in found if family.name == "flowengine_info"]
    assert info.samples[0].labels == {"session": 'a"b\n\\'}


def test_the_token_is_the_same_in_every_life_and_tells_no_secret():
    assert token_of(b"k" * 32) == token_of(b"k" * 32) != token_of(b"l" * 32)
    assert (b"k" * 32).hex() not in token_of(b"k" * 32)
    assert len(token_of(b"k")) == 40


@pytest.mark.parametrize(("given", "is_same"), [
    ("abc", True), ("ab", False), ("", False), ("äbc", False), ("\ud800", False)])
def test_tokens_are_compared_whatever_is_given(given, is_same):
    assert same(given, "abc") is is_same


def test_what_waits_is_told_from_what_runs():
    worker = {"worker_id": "n.w1", "task": "ab" * 16, "name": "f", "actor": "", "attempt": 1, "age_s": 2.0, "pid": 7,
              "cpu_share": 0.0, "memory_bytes": 0}
    workers = [{**worker, "state": "blocked"}, {**worker, "state": "leased", "worker_id": "n.w2"}]
    made = tables.running([{"workers": workers}], [], 100)
    assert [str(cell) for cell in made.columns[0].cells] == ["f (waits)", "f"]
