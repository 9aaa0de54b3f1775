"""What happened lately in a machine, kept as it was said and put into words only when somebody asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from ..errors import error_line
from ..scheduling.resources import plain
from .commands import Command, Send, SetTimer
from .ids import short
from .messages import Answered, Asked, Message, NodeReport, Ping, Pong

Entry = tuple[float, str, Any]  # (now, "<-" and the sender, or "->", what)

NOISE: frozenset[type] = frozenset((Asked, Answered, Ping, Pong, NodeReport))
HEX_DIGITS_MIN = 8  # shorter texts are not taken for names in hex
DAY_S = 86_400


class Journal:
    """A bounded ring of events and commands; `wall_offset_s` turns the machine's time into the time of day."""

    __slots__ = ("_entries", "noise", "wall_offset_s")

    def __init__(self, limit: int, noise: frozenset[type] = NOISE) -> None:
        self._entries: deque[Entry] = deque(maxlen=limit)
        self.noise = noise
        self.wall_offset_s = 0.0

    def event(self, now: float, sender: str, event: Message) -> None:
        """Keeps an event."""
        if type(event) not in self.noise:
            self._entries.append((now, sender, event))

    def commands(self, now: float, commands: list[Command]) -> None:
        """Keeps what a machine ordered."""
        keep = self._entries.append
        for command in commands:
            kind = type(command)
            if kind is SetTimer or kind in self.noise or (
                kind is Send and type(command.message) in self.noise  # type: ignore[attr-defined]
            ):
                continue
            keep((now, "->", command))

    def __len__(self) -> int:
        return len(self._entries)

    def latest(self, kinds: frozenset[type], limit: int) -> list[Entry]:
        """The last events and commands of some kinds, newest first."""
        return list(islice((entry for entry in reversed(self._entries) if type(entry[2]) in kinds), limit))

    def story(self, name: bytes | str, lines_max: int = 1000) -> list[str]:
        """The last lines that mention a task, object, worker or process, oldest first."""
        return [text for _, text in self.timed_story(name, lines_max)]

    def timed_story(self, name: bytes | str, lines_max: int = 1000) -> list[tuple[float, str]]:
        """The same with the machine's time of each line."""
        lines: deque[tuple[float, str]] = deque(maxlen=lines_max)
        for now, where, what in self._entries:
            if mentions(what, name):
                lines.append((now, self._line(now, where, what)))
        return list(lines)

    def _line(self, now: float, where: str, what: Any) -> str:
        moment = clock(now + self.wall_offset_s)
        if isinstance(what, Send):
            return f"{moment}  {type(what.message).__name__:<16} to {what.to}  {_words(what.message)}"
        if where == "->":
            return f"{moment}  {type(what).__name__:<16} ordered  {_words(what)}"
        return f"{moment}  {type(what).__name__:<16} {'from ' + where if where else 'here'}  {_words(what)}"


def mentions(what: Any, name: bytes | str) -> bool:
    """Whether a name occurs in a struct; a task's name occurs in those of its objects."""
    if isinstance(name, str) and _is_hex(name):
        digits = name.partition(".")[0].lower()
        return any(
            leaf.hex().startswith(digits) if isinstance(leaf, bytes) else leaf == name for leaf in _leaves(what)
        )
    if isinstance(name, bytes):
        return any(isinstance(leaf, bytes) and name != b"" and leaf.startswith(name) for leaf in _leaves(what))
    return any(leaf == name for leaf in _leaves(what))


def _is_hex(name: str) -> bool:
    digits = name.partition(".")[0]
    return len(digits) >= HEX_DIGITS_MIN and all(digit in "0123456789abcdefABCDEF" for digit in digits)


def _leaves(what: Any) -> Iterator[bytes | str]:
    if isinstance(what, bytes | str):
        yield what
    elif isinstance(what, msgspec.Struct):
        for field in what.__struct_fields__:
            yield from _leaves(getattr(what, field))
    elif isinstance(what, tuple | list):
        for part in what:
            yield from _leaves(part)


def _words(what: msgspec.Struct) -> str:
    fields = {field: getattr(what, field) for field in what.__struct_fields__}
    words = {field: error_line(value) if field == "error" and value and isinstance(value, bytes) else _word(value)
             for field, value in fields.items()}
    return " ".join(f"{field}={word}" for field, word in words.items())[:400]


def _word(value: Any) -> str:
    if isinstance(value, bytes):
        return short(value) if len(value) in (16, 20) else f"<{len(value)} bytes>"
    if isinstance(value, tuple):
        return "(" + ", ".join(_word(part) for part in value[:8]) + (", ..." if len(value) > 8 else "") + ")"
    if isinstance(value, msgspec.Struct):
        return f"{type(value).__name__}({_words(value)})"
    return plain(value) if isinstance(value, str) else str(value)


def clock(moment_s: float) -> str:
    """Seconds as the time of day."""
    seconds = moment_s % DAY_S
    return f"{int(seconds // 3600):02d}:{int(seconds // 60) % 60:02d}:{seconds % 60:06.3f}"
