"""An executor driven by hand: threads that wait, and readers of streams that have not begun."""
from __future__ import annotations

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.executor import Executor, TaskBlocked, TaskEnded
from flowengine.recovery.stash import Stash

NODE, OWNER = "node", "owner"
A, B = b"a" * 16, b"b" * 16


class Scene:
    """An executor that knows one function; keeps what it sent."""

    def __init__(self) -> None:
        self.executor = Executor("me", NODE, "w1", Stash())
        self.commands: list = []
        self.step(m.PutFunction(b"f", b"blob"), OWNER)

    def step(self, event: m.Message, sender: str = "") -> list:
        self.commands = self.executor.handle(event, 1.0, sender)
        return [one.message for one in self.commands if isinstance(one, c.Send)]

    def push(self, task: bytes, attempt: int = 1, **options: object) -> None:
        self.step(m.PushTask(m.TaskSpec(task, b"f", "f", **options), attempt, 1), OWNER)

    def runs(self) -> list[m.PushTask]:
        return [one.push for one in self.commands if isinstance(one, c.RunTask)]


def ended(task: bytes, attempt: int = 1) -> TaskEnded:
    return TaskEnded(task, attempt, m.TaskDone(task, attempt, (m.Inline(b"x"),), 5))


def test_a_slot_is_taken_again_when_the_task_ends_while_a_thread_of_it_waits():
    scene = Scene()
    scene.push(A)
    assert m.WorkerBlocked("w1", True) in scene.step(TaskBlocked(True, A, 1))
    assert scene.step(TaskBlocked(True, A, 1)) == []
    assert m.WorkerBlocked("w1", False) in scene.step(ended(A))


def test_a_thread_of_an_earlier_task_blocks_nobody():
    scene = Scene()
    scene.push(A)
    scene.step(TaskBlocked(True, A, 1))
    scene.step(ended(A))
    scene.push(A, 2)
    assert scene.step(TaskBlocked(False, A, 1)) == []
    assert scene.step(TaskBlocked(True, A, 1)) == []
    assert scene.executor.blocked == 0
    assert m.WorkerBlocked("w1", True) in scene.step(TaskBlocked(True, A, 2))


def test_a_stream_that_has_not_begun_hears_how_far_its_reader_is():
    scene = Scene()
    scene.push(A)
    scene.push(B, 2, num_returns=-1)
    scene.step(m.StreamConsumed(B, 2, 70), OWNER)
    scene.step(m.StreamConsumed(B, 1, 90), OWNER)  # of an earlier attempt
    scene.step(ended(A))
    [push] = scene.runs()
    assert push.stream_taken == 70
    scene.step(m.StreamConsumed(B, 2, 71), OWNER)
    assert scene.commands == [c.StreamGo(B, 71)]


def test_an_owner_that_was_only_cut_off_is_answered_again():
    scene = Scene()
    scene.step(m.PeerLost(OWNER, "not reached"), OWNER)
    scene.step(m.PutFunction(b"f", b"blob"), OWNER)
    scene.push(A)
    assert [type(message) for message in scene.step(ended(A))] == [m.TaskDone]
