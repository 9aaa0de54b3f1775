"""Messages for people and of processes about themselves: questions, answers, log lines, harm on purpose, ends."""

from __future__ import annotations

from typing import Any

from .parts import Message, Record


class Asked(Message, frozen=True):
    """A question (stats, nodes, story, stack ...) with a number that the answer repeats; scope: local or cluster."""

    request: int
    topic: str
    argument: Any = None
    scope: str = "cluster"


class Answered(Message, frozen=True):
    """The answer to a question: JSON-like content."""

    request: int
    topic: str
    content: Any


class LogLines(Message, frozen=True):
    """Lines that a task printed, for the driver; stream is out or err."""

    source: str
    stream: str
    lines: tuple[str, ...]


class ChaosOrdered(Message, frozen=True):
    """Failure laboratory: do this harm here (kill, freeze, thaw, cut, heal, arm a named point)."""

    action: str
    target: str
    argument: Any = None


class Ping(Message, frozen=True):
    """Are you there? The answer is Pong."""

    number: int


class Pong(Message, frozen=True):
    """Still here."""

    number: int


class Hop(Record, frozen=True):
    """One step of a probe: code that waits, or (without the number of a wait) a call that another one holds up."""

    code: bytes
    name: str
    wait: int = 0
    depth: int = 0


class WaitProbe(Message, frozen=True):
    """Somebody waits for this task or call: does it wait itself? With the waits on the way, to see a circle."""

    task: bytes
    name: str
    path: tuple[Hop, ...]


class Goodbye(Message, frozen=True):
    """The sender ends on purpose."""

    reason: str = ""


class PeerLost(Message, frozen=True):
    """From the link to its own machine: that process is gone for good."""

    peer: str
    reason: str
    ended: bool = False  # nobody answers to its name any more, so it was not only cut off; told to the head alone
