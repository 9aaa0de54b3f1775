"""What people read in stories and explanations: words, and not what only machines know."""

from __future__ import annotations

from flowengine.core import messages as m
from flowengine.core.ids import child_id, object_id
from flowengine.core.journal import Journal
from flowengine.errors import pack_error
from tests.core.test_owner import WORKER, with_worker


def test_an_error_is_told_by_its_text_and_a_resource_by_its_own_name():
    journal, task = Journal(10), child_id(b"", 1)
    journal.event(0.0, "w", m.TaskFailed(task, 1, pack_error(ValueError("not\nthis"), "f"), "task", False, 5))
    journal.event(0.0, "n", m.LeaseGranted(1, (("disk\x1ftcp://h:1#me", 1.0),), (), "tcp://h:3#w", "n.w1", "n"))
    assert "error=ValueError: not this kind=task" in journal.story(task)[0]
    (line,) = journal.story("n.w1")
    assert "shape=((disk, 1.0))" in line


def test_what_is_not_made_yet_has_no_size():
    scene = with_worker()
    task = scene.submit(1)
    told = "\n".join(scene.owner.explain(object_id(task, 0)))
    assert "no value yet" in told
    assert "MB" not in told
    scene.step(m.TaskFailed(task, 1, pack_error(ValueError("no"), "f"), "task", False, 5), WORKER)
    assert "it is an error" in "\n".join(scene.owner.explain(object_id(task, 0)))


def test_a_run_that_failed_is_said_to_have_failed_also_in_the_story_of_its_worker():
    scene = with_worker()
    task = scene.submit(1)
    failed = m.TaskFailed(task, 1, pack_error(ValueError("no"), "f"), "task", False, 5_000, began_us=9_000_000)
    scene.step(failed, WORKER)
    assert any("failed after 5.0 ms" in line for line in scene.owner.story(task))
    *_, last = scene.owner.story_of_worker("w1")
    assert last.split("  ")[-1].strip() == f"f {task.hex()[:12]}: failed after 5.0 ms"
    assert scene.owner.story_of_worker("w2") == []
