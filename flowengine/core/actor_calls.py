"""A call that has come to an actor, the same call again (from its caller's next run, or who keeps it), and its end."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import ObjectLost, pack_error
from . import messages as m
from .ids import short


class CallEnded(m.Message, frozen=True):
    """The shell has run a call."""

    call: bytes
    answer: Any
    leaving: bool = False  # it called exit_actor


class CallsEnded(m.Message, frozen=True):
    """The shell has run calls, in this order; unbegun: calls that were ordered behind them, and that it gives back."""

    ended: tuple[CallEnded, ...]
    unbegun: tuple[bytes, ...] = ()


class CallDeadline(m.Message, frozen=True):
    """Timer: the time limit of a call is over."""

    task: bytes
    attempt: int
    killing: bool = False


class CallMissed(m.Message, frozen=True):
    """Timer: a replay has waited for a call that should have come again."""

    calls: int


class Arrived(msgspec.Struct):
    """A call that waits or runs."""

    push: m.PushTask
    sender: str
    ran_for: str = ""  # who its large results are registered for
    former: dict[str, int] = {}  # processes in which its caller ran before, with the attempt that each waits for
    orphan: bool = False  # the process that sent it is dead
    waits: bool = True  # the sender has no reply; push.seen: somebody has one
    number: int = -1  # calls of the actor before it


def is_plain(spec: m.TaskSpec) -> bool:
    """A call that needs no attention while it runs: no time limit, no reader of its items."""
    return not spec.timeout_s and spec.num_returns >= 0


def kept_bytes(push: m.PushTask) -> int:
    """What keeping the arguments of a call takes."""
    size = len(push.spec.args)
    for value in push.values:
        if type(value) is m.Stored:
            size += value.size_bytes
        elif type(value) is m.Inline:
            size += len(value.blob)
    return size


def joined(old: Arrived, push: m.PushTask, sender: str) -> Arrived:
    """The call that waits, when it has come again: nobody who waits for the reply is forgotten."""
    if sender == old.sender:
        return Arrived(push, sender, former=old.former, waits=not push.seen)
    if not push.spec.function:
        return old  # a former run of the caller did not come to it
    if not old.push.spec.function:
        return Arrived(push, sender, waits=not push.seen)
    if push.seen:
        old.push = msgspec.structs.replace(old.push, seen=True)
        return old
    item = Arrived(msgspec.structs.replace(push, seen=old.push.seen), sender, former=old.former)
    if old.waits:
        item.former = {**old.former, old.sender: old.push.attempt}
    return item


def made_again(running: Arrived, push: m.PushTask, sender: str) -> None:
    """The call runs, and its caller's next run makes it too."""
    if not push.seen:
        if sender != running.sender:
            running.former[running.sender] = running.push.attempt
        running.sender = sender
        running.push = msgspec.structs.replace(running.push, attempt=push.attempt)


def for_former(item: Arrived, answer: Any, attempt: int) -> Any:
    """The answer for a process in which the caller ran before: what only one process may own is not for it."""
    done = type(answer) is m.TaskDone
    if not done and not answer.contained:
        return msgspec.structs.replace(answer, attempt=attempt)
    if done and all(type(value) is m.Inline and not value.contained for value in answer.values):
        return msgspec.structs.replace(answer, attempt=attempt, held=())
    spec = item.push.spec
    error = pack_error(ObjectLost(f"call {spec.name} {short(spec.id)}: another run of its caller has the reply"))
    return m.TaskFailed(spec.id, attempt, error, "lost", False, -1)
