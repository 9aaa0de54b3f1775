"""What code that shares locks, queues, events and variables says to its program, which keeps them."""

from __future__ import annotations

from .parts import Inline, Message, Record, RefTo, Stored


class SharedItem(Record, frozen=True):
    """An item of a queue or variable: a small value itself, else an object, which is the program's."""

    blob: bytes = b""
    oid: bytes = b""  # not empty: a value that comes with it is put under this name
    value: Inline | Stored | None = None
    ref: RefTo | None = None  # to whoever gets it
    size_bytes: int = 0


class ShareAsked(Message, frozen=True):
    """Code to its program: do this with what has that name; each number is answered once."""

    number: int
    name: str
    kind: str  # lock, semaphore, queue, event or variable
    verb: str
    size: int = -1  # permits, or items at most; -1: as it is, or the default
    count: int = 1  # items that are wanted at most, or a token
    waits: bool = True  # for what cannot be done now
    items: tuple[SharedItem, ...] = ()
    code: bytes = b""  # the task or actor at whose end its holds end
    key: bytes = b""  # of a change: the same when the code runs again, so that it is made once
    root: bytes = b""  # the program's own task or actor under which it runs, which may run again
    who: str = ""  # in words
    call: bytes = b""  # of an actor: the one that asks


class ShareAnswered(Message, frozen=True):
    """The answer: "ok", or the word that says why not; count: a token or a number of items."""

    number: int
    word: str
    count: int = 0
    items: tuple[SharedItem, ...] = ()
    text: str = ""


class ShareGivenUp(Message, frozen=True):
    """Nobody waits for this any more; back: what was given upon it meanwhile is not taken."""

    number: int
    back: bool = False


class ShareTaken(Message, frozen=True):
    """The code has what it was given."""

    number: int


class ShareEnded(Message, frozen=True):
    """A task that holds something here has ended."""

    code: bytes
