"""What a process that runs user code answers to questions of people and of other processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.core.ids import TASK_ID_BYTES
from flowengine.core.messages import Asked
from flowengine.observe.timeline import spans
from flowengine.runtime import process

if TYPE_CHECKING:
    from flowengine.runtime.session import Session

NAME_DIGITS_MIN = 8  # of a task or object that a story is asked of
STORY_OBJECTS_MAX = 20


def content(session: Session, question: Asked) -> Any:
    """The answer: JSON-like content, None for what is not known here."""
    owner = session.owner
    if question.topic == "stats":
        return dict(owner.counters)
    if question.topic == "stack":
        return {f"{session.role} {os.getpid()}": process.stacks()}
    if question.topic == "spans":
        return [msgspec.to_builtins(span) for span in spans(owner.spans)]
    if question.topic == "story":
        return story(session, question.argument)
    if question.topic == "worker_of":
        return owner.worker_of(question.argument)
    return True if question.topic == "commit" else None


def story(session: Session, name: Any) -> list[str]:
    """Lines about an object or task; the start of a name will do."""
    digits = (name.hex() if isinstance(name, bytes) else str(name)).partition(".")[0].lower()
    if len(digits) < NAME_DIGITS_MIN:
        return []
    owner = session.owner
    names = dict.fromkeys(oid[:TASK_ID_BYTES] for oid in list(owner.objects) if oid.hex().startswith(digits))
    names.update(dict.fromkeys(run[0].id for run in list(owner.spans) if run[0].id.hex().startswith(digits)))
    return [line for found in list(names)[:STORY_OBJECTS_MAX] for line in owner.story(found)]
