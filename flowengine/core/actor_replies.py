"""Answers of an actor that are kept: for callers that run again, and for those whose reply was lost. Pure."""

from __future__ import annotations

from typing import Any

from ..errors import ObjectLost, TaskCancelled, pack_error
from . import messages as m
from .ids import object_id, short


def reply_lost(push: m.PushTask) -> m.TaskFailed:
    """The call was done once, and must not be done again; its answer is gone with the process that made it."""
    name = f"call {push.spec.name} {short(push.spec.id)}"
    error = pack_error(ObjectLost(f"{name} was done before its actor came back, and its reply is lost"))
    return m.TaskFailed(push.spec.id, push.attempt, error, "lost", False, -1)


def never_done(push: m.PushTask) -> m.TaskFailed:
    """The answer to a call whose number was given back: for its caller, when that runs again and makes the call."""
    name = f"call {push.spec.name} {short(push.spec.id)}"
    error = pack_error(TaskCancelled(f"{name} was cancelled, or did not begin, in an earlier run of its caller"))
    return m.TaskFailed(push.spec.id, push.attempt, error, "cancelled", False, -1)


def stored_in(answer: Any) -> list[tuple[str, bytes]]:
    """Nodes that have large results of the answer, each with the object."""
    values = answer.values if type(answer) is m.TaskDone else ()
    large = [(index, value) for index, value in enumerate(values) if type(value) is m.Stored]
    return [(node, object_id(answer.task, index)) for index, value in large for node in value.nodes]


def size_of(answer: Any) -> int:
    """What keeping an answer takes."""
    if type(answer) is m.TaskFailed:
        return len(answer.error)
    size = 0
    for value in answer.values:
        size += len(value.blob) if type(value) is m.Inline else 64
    return size
