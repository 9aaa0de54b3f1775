"""What makers of actors and the driver to which these belong say to each other."""

from __future__ import annotations

from .parts import Message, Pending, TaskSpec, Value


class ActorMade(Message, frozen=True):
    """Maker to the driver of its program: my code made this actor, perhaps again; it is yours.

    The maker is a borrower of it from here on, and the owners of what its constructor gets count the driver as one.
    """

    spec: TaskSpec
    blob: bytes | None
    values: tuple[Value | Pending, ...]  # of all that its constructor refers to, as far as they are known
    top: bytes  # the driver's own task or actor under which it was made


class ActorNoted(Message, frozen=True):
    """The driver's answer: whoever asks for the actor now will be told."""

    actor: bytes


class MakerLeft(Message, frozen=True):
    """Maker to the driver: the code that made the actor stops here, and will run again."""

    actor: bytes


class ActorUnneeded(Message, frozen=True):
    """Owner to an actor's process: it ends, so hand over what others may need of it."""

    actor: bytes


class ActorLeft(Message, frozen=True):
    """The answer, after all that."""

    actor: bytes
