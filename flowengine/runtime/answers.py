"""What a process that runs user code answers to questions of people and of other processes."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.core.ids import TASK_ID_BYTES, task_of
from flowengine.core.memory_seen import owned
from flowengine.core.messages import Asked
from flowengine.core.owner_records import reply_told, told_by_host
from flowengine.core.owner_seen import hosted
from flowengine.observe.timeline import Span, spans
from flowengine.recovery.record import Piece, encoded
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
    if question.topic == "seen":
        return [seen(session, question.argument)]
    if question.topic == "memory":
        return [memory(session)]
    if question.topic == "spans":
        return [msgspec.to_builtins(span) for span in runs(session)]
    if question.topic == "stash":
        with session.drive.lock:
            return [owner.log_given(*question.argument)]
    if question.topic == "story":
        return story(session, question.argument)
    if question.topic == "explain":
        return explained(session, question.argument)
    if question.topic in ("record", "reply"):
        return encoded(pieces(session, question.topic, question.argument))
    if question.topic == "actor_known":
        return owner.has_actor(question.argument)
    if question.topic == "worker_of":
        return owner.worker_of(question.argument)
    return True if question.topic == "commit" else None


def runs(session: Session) -> list[Span]:
    """The last runs of what this process has submitted."""
    return spans((*session.owner.spans, *session.owner.call_spans), *submitter(session))


def submitter(session: Session) -> tuple[str, str]:
    """This process as one whose tasks are shown: its name, and for a worker its node."""
    if session.role == "worker":
        return session.settings.worker_id, session.node_id  # type: ignore[attr-defined]
    return f"program {os.getpid()}", ""


def seen(session: Session, reader: Any) -> dict[str, Any]:
    """What this process tells those who look at the cluster; reader: who is told the runs since it asked last."""
    executor = getattr(session, "executor", None)
    host = executor.host if executor is not None else None
    with session.drive.lock:
        told = session.sight.look(session.owner, time.monotonic(), reader if isinstance(reader, str) else "")
        actor = hosted(host) if host is not None else None
    running = session.context
    age_s = time.monotonic() - running.began_us / 1e6 if running.began_us else -1.0
    return {"role": session.role, "pid": os.getpid(), "node_id": session.node_id, "hosted": actor, **told,
            "code": running.task.hex(), "age_s": age_s}


def memory(session: Session) -> dict[str, Any]:
    """Which objects this process owns, and who holds them."""
    with session.drive.lock:
        return {"role": session.role, "pid": os.getpid(), "node_id": session.node_id, **owned(session.owner)}


def pieces(session: Session, topic: str, argument: Any) -> list[Piece]:
    """What this process knows that a replay may need."""
    executor = getattr(session, "executor", None)
    host = executor.host if executor is not None else None
    with session.drive.lock:
        if topic == "reply":
            return reply_told(host, argument) if host is not None and isinstance(argument, bytes) else []
        digits = str(argument).lower()
        if len(digits) < NAME_DIGITS_MIN:
            return []
        return [*session.owner.told(digits), *(told_by_host(host, digits) if host is not None else ())]


def explained(session: Session, name: Any) -> list[str]:
    """One text for each object or actor of this name that is known here; the start of a name will do."""
    digits = str(name).partition(".")[0].lower()
    if len(digits) < NAME_DIGITS_MIN:
        return []
    executor = getattr(session, "executor", None)
    host = executor.host if executor is not None else None
    with session.drive.lock:
        names = [oid for oid in session.owner.objects if oid.hex().startswith(digits)][:STORY_OBJECTS_MAX]
        texts = [session.owner.explain(oid) for oid in names]
        if host is not None and host.id.hex().startswith(digits[: 2 * TASK_ID_BYTES]):
            host.now = time.monotonic()
            texts.append(host.explain())
    for oid, lines in zip(names, texts, strict=False):
        lines += [f"waits for {told}" for told in session.waits_of(task_of(oid))]
    return ["\n  ".join(lines) for lines in texts if lines]


def story(session: Session, name: Any) -> list[str]:
    """Lines about an object or task, of which the start of a name will do, or a worker."""
    digits = (name.hex() if isinstance(name, bytes) else str(name)).partition(".")[0].lower()
    if len(digits) < NAME_DIGITS_MIN:
        return []
    owner = session.owner
    if isinstance(name, str) and name.partition(".")[2].startswith("w"):
        return owner.story_of_worker(name)
    names = dict.fromkeys(oid[:TASK_ID_BYTES] for oid in list(owner.objects) if oid.hex().startswith(digits))
    ran = (*owner.spans, *owner.call_spans)
    names.update(dict.fromkeys(run[0].id for run in ran if run[0].id.hex().startswith(digits)))
    return [line for found in list(names)[:STORY_OBJECTS_MAX] for line in owner.story(found)]
