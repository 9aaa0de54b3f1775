"""How machines find the handler of an event, and where they put their commands: a table and a list, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from .commands import Command, Send, SetTimer
from .messages import Message

Handler = Callable[[Any, Any, float, str], None]  # (machine or part, event, now, sender)
Route = Callable[[Any, float, str], None]  # the same, bound

Method = TypeVar("Method", bound=Callable[..., None])


def on(*kinds: type[Message]) -> Callable[[Method], Method]:
    """Marks a method of a Part as the handler of these events; it is called with (event, now, sender)."""

    def mark(method: Method) -> Method:
        method.handles = kinds  # type: ignore[attr-defined]
        return method

    return mark


class Part:
    """A machine or a part of one; HANDLERS maps the type of an event to the function that takes it."""

    __slots__ = ()
    HANDLERS: ClassVar[dict[type, Handler]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        table: dict[type, Handler] = {}
        for base in reversed(cls.__mro__):
            for member in vars(base).values():
                for kind in getattr(member, "handles", ()):
                    table[kind] = member
        cls.HANDLERS = table


def routes(*parts: Part) -> dict[type, Route]:
    """One table over several parts; an event belongs to one part only."""
    table: dict[type, Route] = {}
    for part in parts:
        for kind, handler in type(part).HANDLERS.items():
            if kind in table:
                raise TypeError(f"{kind.__name__} has two handlers, one in {type(part).__name__}")
            table[kind] = handler.__get__(part)
    return table


class Outbox:
    """Commands in the order in which they were given."""

    __slots__ = ("commands",)

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def send(self, to: str, message: Message, lazy: bool = False) -> None:
        """Order to send a message."""
        self.commands.append(Send(to, message, lazy))

    def timer(self, delay_s: float, event: Message) -> None:
        """Order to hand the event back later."""
        self.commands.append(SetTimer(delay_s, event))

    def add(self, command: Command) -> None:
        """Any other order."""
        self.commands.append(command)

    def take(self) -> list[Command]:
        """All orders since the last call."""
        taken, self.commands = self.commands, []
        return taken
