"""What owners, nodes and heads tell those who look: counted when asked, once for each run, and bounded."""

from __future__ import annotations

from flowengine.core import commands as c
from flowengine.core import head_seen
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.ids import child_id
from flowengine.core.node_questions import merged
from flowengine.core.node_seen import group
from flowengine.core.owner_seen import FAILURES_MAX, FUNCTIONS_MAX, RUNS_MAX, TASKS_LOOKED_AT_MAX, Sight
from flowengine.errors import error_line, pack_error
from tests.core.ledger_stage import Stage
from tests.core.test_collective_courses import give_large
from tests.core.test_head import Kit as HeadKit
from tests.core.test_node import Kit as NodeKit
from tests.core.test_node import sent
from tests.core.test_owner import ME, WORKER, Scene, with_worker


def done(scene: Scene, number: int, run_us: int = 10) -> None:
    task = scene.submit(number)
    scene.step(m.TaskDone(task, 1, (m.Inline(b"x"),), run_us, began_us=number), WORKER)


def failed(scene: Scene, number: int, text: str = "no") -> bytes:
    task = scene.submit(number, max_retries=0)
    error = pack_error(ValueError(text), "f")
    scene.step(m.TaskFailed(task, 1, error, "task", False, 5, began_us=1), WORKER)
    return task


def test_each_run_is_counted_once():
    scene, sight = with_worker(), Sight()
    done(scene, 1, 30)
    (row,) = sight.look(scene.owner, 1.0)["functions"]
    assert (row["name"], row["runs"], row["run_us"], row["longest_us"]) == ("f", 2, 40, 30)
    failed(scene, 2)
    for _ in range(2):
        (row,) = sight.look(scene.owner, 1.0)["functions"]
    assert (row["runs"], row["failed_runs"]) == (3, 1)


def test_tasks_are_told_by_state():
    scene, sight = with_worker(), Sight()
    scene.submit(1)
    scene.step(s.Submitted(m.TaskSpec(child_id(b"", 2), b"g", "g", deps=(m.RefTo(b"x" * 20, "elsewhere", ""),)), b"b"))
    told = sight.look(scene.owner, 1.0)
    assert told["tasks"] == {"waiting": 1, "ready": 0, "sent": 1, "done": 0, "failed": 0, "unlooked": 0}
    assert {row["name"]: row["sent"] for row in told["functions"]} == {"f": 1, "g": 0}


def test_of_very_many_tasks_those_that_run_are_told_although_they_are_the_oldest():
    scene, sight = with_worker(), Sight()
    for number in range(1, TASKS_LOOKED_AT_MAX + 1_001):
        scene.now = 0.0  # at one moment: the worker is not late
        scene.submit(number)
    told = sight.look(scene.owner, 1.0)
    (row,) = told["functions"]
    assert told["tasks"]["unlooked"] == 1_000
    assert told["tasks"]["sent"] == row["sent"] == 256
    assert told["tasks"]["ready"] == TASKS_LOOKED_AT_MAX + 1_000 - 256
    assert [(queue["shape"], queue["count"]) for queue in told["queues"]] == [({"CPU": 1.0}, told["tasks"]["ready"])]


def test_each_reader_is_told_the_runs_that_are_new_to_it():
    scene, sight = with_worker(), Sight()
    done(scene, 1)
    assert [run[5] for run in sight.look(scene.owner, 1.0, "a")["runs"]] == [1, 0]
    done(scene, 2)
    assert [run[5] for run in sight.look(scene.owner, 1.0, "a")["runs"]] == [2]
    assert sight.look(scene.owner, 1.0, "a")["runs"] == []
    assert len(sight.look(scene.owner, 1.0, "b")["runs"]) == 3
    assert sight.look(scene.owner, 1.0)["runs"] == []


def test_of_many_runs_a_sample_is_told():
    scene, sight = with_worker(), Sight()
    for number in range(1, 3 * RUNS_MAX):
        done(scene, number)
    found = sight.look(scene.owner, 1.0, "a")["runs"]
    assert RUNS_MAX / 2 < len(found) <= RUNS_MAX
    assert found[0][5] - found[-1][5] > 2 * RUNS_MAX  # of all the time, not of its end


def test_failures_have_a_name_a_text_and_an_id():
    scene, sight = with_worker(), Sight()
    task = failed(scene, 1, "two\nlines")
    (told,) = sight.look(scene.owner, scene.now + 2.0)["failures"]
    assert (told["id"], told["name"], told["text"], told["kind"]) == (task.hex(), "f", "ValueError: two lines", "task")
    assert 1.9 < told["age_s"] < 2.1


def test_a_worker_that_died_is_a_failure_with_its_signal_and_what_it_ran():
    scene, sight = with_worker(), Sight()
    task = scene.submit(1)
    scene.crash(task, running_name="f", log_lines=("bang",))
    (told,) = sight.look(scene.owner, scene.now)["failures"]
    assert (told["kind"], told["name"], told["id"]) == ("worker", "w1", task.hex())
    assert told["text"] == "pid 7 on h ended, killed by SIGKILL, while it ran f; it printed last: bang"


def test_what_is_told_is_bounded():
    scene, sight = with_worker(), Sight()
    for number in range(1, 2 * FAILURES_MAX):
        failed(scene, number, "long " * 1_000)
    for number in range(2_000, 2_000 + 2 * FUNCTIONS_MAX):
        scene.step(s.Submitted(m.TaskSpec(child_id(b"", number), b"%d" % number, f"f{number}" * 100), b"b"))
    told = sight.look(scene.owner, 1.0)
    assert len(told["functions"]) == FUNCTIONS_MAX
    assert len(told["failures"]) == FAILURES_MAX
    assert max(len(row["name"]) for row in told["functions"]) < 200
    assert max(len(one["text"]) for one in told["failures"]) < 500


def test_an_actor_is_told_with_its_state_and_checkpoint():
    scene, sight = Scene(), Sight()
    life = m.ActorLife(name="bank")
    task = child_id(b"", 1)
    scene.step(s.Submitted(m.TaskSpec(task, b"c", "Account", life=life), b"blob"))
    (told,) = sight.look(scene.owner, 1.0)["actors"]
    assert (told["id"], told["name"], told["named"], told["state"]) == (task.hex(), "Account", "bank", "pending")
    assert (told["checkpoint_calls"], told["alive_s"]) == (-1, -1.0)


def test_a_line_about_an_error_is_made_without_the_error():
    assert error_line(pack_error(KeyError("x"), "f")) == "KeyError: 'x'"
    assert error_line(b"nothing").startswith("an error that cannot be read")


def test_a_node_tells_of_itself_and_gathers_what_its_processes_tell():
    kit = NodeKit()
    kit.demand(ME, 1)
    asked = kit.says(m.Asked(5, "seen", "reader", "local"), "viewer")
    to = sorted(command.to for command in asked if isinstance(command, c.Send))
    assert to == ["w1", "w2"]
    (question,) = {(one.topic, one.argument, one.scope) for one in sent(asked, m.Asked)}
    assert question == ("seen", "reader", "local")
    number = sent(asked, m.Asked)[0].request
    kit.says(m.Answered(number, "seen", [{"pid": 1}]), "w1")
    (answer,) = sent(kit.says(m.Answered(number, "seen", [{"pid": 2}]), "w2"), m.Answered, "viewer")
    own, *processes = answer.content
    assert processes == [{"pid": 1}, {"pid": 2}]
    assert (own["node_id"], own["total"], own["store"]["limit_bytes"], own["groups"]) \
        == ("n1", {"CPU": 2.0, "GPU": 1.0}, 100, [])
    assert sorted(len(worker["holds"]) for worker in own["workers"]) == [0, 1]


def test_a_group_is_told_with_who_is_missed_and_the_way_of_the_values():
    stage = Stage()
    formed = stage.form()
    (ledger,) = stage.ledgers.seats.by_name["g"]
    give_large(stage, formed, [0])
    told = group(ledger, stage.now + 3.0)
    assert (told["name"], told["size"], told["formed"], told["away"]) == ("g", 2, True, "")
    assert [(seat["rank"], seat["host"], seat["state"]) for seat in told["seats"]] \
        == [(0, "host-n1", "here"), (1, "host-n2", "here")]
    (step,) = told["steps"]
    assert "step 0 (allreduce) waits for rank 1" in step["text"]
    assert (step["course"], 2.9 < step["age_s"] < 3.1) == ("", True)
    give_large(stage, formed, [1])
    (step,) = group(ledger, stage.now)["steps"]
    assert step["state"] == "running"
    assert "n1[0]" in step["course"]
    stage.lose("p1")
    assert group(ledger, stage.now)["away"] == "rank 1"


def test_a_group_that_gathers_is_told():
    stage = Stage()
    stage.join(0)
    (ledger,) = stage.ledgers.seats.by_name["g"]
    told = group(ledger, stage.now)
    assert (told["formed"], told["steps"][0]["text"]) == (False, "group 'g': rank 0 of 2 ranks wait for rank 1")


def test_what_has_the_wrong_form_is_left_out():
    assert merged("seen", [1], "nonsense", "w1") == [1]


def test_a_head_tells_who_waits_and_which_nodes_died():
    kit = HeadKit()
    kit.joins("a")
    kit.says(m.SlotsSought("owner", (("GPU", 1.0),), (), 1), "a#1")
    (waits,) = head_seen.seekers(kit.head)
    assert waits["shape"] == {"GPU": 1.0}
    assert "GPU" in waits["reason"]
    assert head_seen.failures(kit.head, kit.now) == []
    kit.says(m.Goodbye(), "a#1")
    (died,) = head_seen.failures(kit.head, kit.now + 3.0)
    assert (died["kind"], died["id"], died["age_s"]) == ("node", "a", 3.0)
