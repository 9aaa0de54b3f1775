"""What the code of one program shares: locks, semaphores, queues, events, variables, by name. Pure.

It lives in the program's process, which outlives all others of its job. Whoever waits is answered when it is its turn;
time limits are those of the callers, who give up. What a dead process held is free again; an item that was handed to it
and that it did not take goes back to the front of its queue. A change with a key is made once, however often the code
that asks for it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .messages import ShareAsked, ShareEnded, ShareGivenUp, ShareTaken

CHANGES_KEPT_MAX = 100_000  # keys of changes that were made
OK, LATER = "ok", ""
DEFAULT_SIZES = {"lock": 1, "semaphore": 1, "queue": 0}
SIZED = ("semaphore", "queue")  # kinds in which one may differ from another by its size
WAITS_TOLD_MAX = 5


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, before the shell makes a message of it."""

    to: str
    number: int
    word: str
    count: int = 0
    items: Sequence[Any] = ()
    text: str = ""
    root: bytes = b""  # items are kept for what may get them again


@dataclass(slots=True, eq=False)
class Wait:
    """Somebody who asked and cannot have it yet."""

    peer: str
    asked: ShareAsked
    items: Sequence[Any]
    line: deque[Wait] | None = None  # where it stands


@dataclass(slots=True, eq=False)
class Hold:
    """A lock or a permit that somebody has."""

    peer: str
    number: int  # of the question that got it
    code: bytes
    who: str


class Entry:
    """What has a name; each kind answers its verbs with Reply, or lets the asker wait."""

    def __init__(self, commons: Commons, asked: ShareAsked) -> None:
        self.commons = commons
        self.name = asked.name
        self.kind = asked.kind
        self.size = asked.size if asked.size >= 0 else DEFAULT_SIZES.get(asked.kind, 0)
        self.line: deque[Wait] = deque()  # first come, first served

    def ask(self, wait: Wait) -> None:
        """Answer, or have it wait; serve whoever can go on by it."""
        raise NotImplementedError

    def why(self) -> str:
        """What whoever waits waits for."""
        return f"{self.kind} {shown(self.name)}"

    def is_idle(self) -> bool:
        """Whether a new one of this name and size would be the same."""
        return not self.line

    def reply(self, wait: Wait, word: str = OK, count: int = 0, items: Sequence[Any] = (), text: str = "") -> None:
        """Answer it."""
        self.leave(wait)
        root = wait.asked.root if items else b""
        self.commons.out.append(Reply(wait.peer, wait.asked.number, word, count, items, text, root))

    def leave(self, wait: Wait) -> None:
        """It waits no more."""
        if wait.line is not None:
            wait.line.remove(wait)
            wait.line = None
            del self.commons.waits[wait.peer, wait.asked.number]

    def queue_up(self, wait: Wait, line: deque[Wait], word: str) -> None:
        """It waits in line, or is told at once why it cannot have it."""
        if not wait.asked.waits:
            self.reply(wait, word)
            return
        wait.line = line
        line.append(wait)
        self.commons.waits[wait.peer, wait.asked.number] = wait

    def serve(self) -> None:
        """Answer those who can go on now."""


class Permits(Entry):
    """A lock (one permit) or a semaphore; each hold has a token, larger than all before."""

    def __init__(self, commons: Commons, asked: ShareAsked) -> None:
        super().__init__(commons, asked)
        self.holds: dict[int, Hold] = {}

    def ask(self, wait: Wait) -> None:
        asked = wait.asked
        if asked.verb == "acquire":
            self.queue_up(wait, self.line, "held") if self.is_taken() else self.grant(wait)
        elif asked.verb == "release":
            hold = self.holds.get(asked.count)
            if hold is None or hold.peer != wait.peer:
                self.reply(wait, "lost", text=self.why())
                return
            del self.holds[asked.count]
            self.reply(wait)
            self.serve()
        else:
            self.reply(wait, count=len(self.holds))

    def is_idle(self) -> bool:
        return not self.holds and super().is_idle()

    def is_taken(self) -> bool:
        return len(self.holds) >= self.size or bool(self.line)

    def grant(self, wait: Wait) -> None:
        commons, asked = self.commons, wait.asked
        commons.tokens += 1
        self.holds[commons.tokens] = Hold(wait.peer, asked.number, asked.code, asked.who)
        self.reply(wait, count=commons.tokens)

    def serve(self) -> None:
        while self.line and len(self.holds) < self.size:
            self.grant(self.line[0])

    def drop(self, peer: str, code: bytes | None = None, number: int = 0) -> None:
        """The holds of a process, of one task in it, or the one that a question got."""
        gone = [token for token, hold in self.holds.items() if hold.peer == peer
                and (code is None or hold.code == code) and (not number or hold.number == number)]
        for token in gone:
            del self.holds[token]
        self.serve()

    def why(self) -> str:
        holders = [f"{hold.who or 'somebody'} holds (token {token})" for token, hold in self.holds.items()]
        more = f" and {len(holders) - 3} more" if len(holders) > 3 else ""
        return f"{self.kind} {shown(self.name)}" + (f", which {', '.join(holders[:3])}{more}" if holders else "")


class Line(Entry):
    """A queue; `items` are pairs of a number in the order of the puts, and the item."""

    def __init__(self, commons: Commons, asked: ShareAsked) -> None:
        super().__init__(commons, asked)
        self.items: deque[tuple[int, Any]] = deque()
        self.putters: deque[Wait] = deque()
        self.count = 0
        self.handed = 0  # gets whose items may come back
        self.closed = False

    def ask(self, wait: Wait) -> None:
        verb = wait.asked.verb
        if verb == "put":
            self.put(wait)
        elif verb == "get":
            self.get(wait)
        elif verb == "close":
            self.closed = True
            self.reply(wait)
            self.serve()
        elif verb == "full":
            self.reply(wait, count=int(0 < self.size <= len(self.items)))
        else:
            self.reply(wait, count=len(self.items))

    def put(self, wait: Wait) -> None:
        if self.closed:
            self.reply(wait, "closed")
        elif self.size and len(wait.items) > self.size:
            self.reply(wait, "never", self.size)
        elif not self.putters and self.fits(wait):
            self.add(wait)
            self.serve()
        else:
            self.queue_up(wait, self.putters, "full")

    def fits(self, wait: Wait) -> bool:
        return not self.size or len(self.items) + len(wait.items) <= self.size

    def add(self, wait: Wait) -> None:
        for item in wait.items:
            self.count += 1
            self.items.append((self.count, item))
        self.commons.changed(wait.asked.key)
        self.reply(wait)

    def get(self, wait: Wait) -> None:
        if self.items and not self.line:
            self.hand(wait)
            self.serve()
        elif self.closed and not self.items:
            self.reply(wait, "closed")
        else:
            self.queue_up(wait, self.line, "empty")

    def hand(self, wait: Wait) -> None:
        taken = [self.items.popleft() for _ in range(min(wait.asked.count, len(self.items)))]
        self.commons.hand(wait, self, taken)
        self.reply(wait, count=len(taken), items=[item for _, item in taken])

    def is_idle(self) -> bool:
        return not (self.items or self.putters or self.handed or self.closed) and super().is_idle()

    def give_back(self, taken: list[tuple[int, Any]]) -> None:
        """Items that nobody took come first again."""
        self.items = deque(sorted([*taken, *self.items], key=lambda item: item[0]))
        self.serve()

    def serve(self) -> None:
        moved = True
        while moved:
            moved = False
            while self.items and self.line:
                self.hand(self.line[0])
                moved = True
            while not self.closed and self.putters and self.fits(self.putters[0]):
                self.add(self.putters[0])
                moved = True
        if self.closed:
            for wait in [*self.putters, *(() if self.items else self.line)]:
                self.reply(wait, "closed")

    def why(self) -> str:
        return f"queue {shown(self.name)}, which has {len(self.items)} items"


class Flag(Entry):
    """An event."""

    def __init__(self, commons: Commons, asked: ShareAsked) -> None:
        super().__init__(commons, asked)
        self.is_set = False

    def is_idle(self) -> bool:
        return not self.is_set and super().is_idle()

    def ask(self, wait: Wait) -> None:
        verb = wait.asked.verb
        if verb == "wait" and not self.is_set:
            self.queue_up(wait, self.line, "unset")
            return
        if verb in ("set", "clear"):
            self.is_set = verb == "set"
            self.commons.changed(wait.asked.key)
        self.reply(wait, count=int(self.is_set))
        self.serve()

    def serve(self) -> None:
        while self.is_set and self.line:
            self.reply(self.line[0], count=1)

    def why(self) -> str:
        return f"event {shown(self.name)}, which nobody has set"


class Cell(Entry):
    """A variable: one item, or none."""

    def __init__(self, commons: Commons, asked: ShareAsked) -> None:
        super().__init__(commons, asked)
        self.items: Sequence[Any] = ()

    def is_idle(self) -> bool:
        return not self.items and super().is_idle()

    def ask(self, wait: Wait) -> None:
        verb = wait.asked.verb
        if verb == "get":
            self.hand(wait) if self.items else self.queue_up(wait, self.line, "unset")
            return
        self.items = tuple(wait.items) if verb == "set" else ()
        self.commons.changed(wait.asked.key)
        self.reply(wait)
        self.serve()

    def hand(self, wait: Wait) -> None:
        self.commons.hand(wait, None, [(0, item) for item in self.items])
        self.reply(wait, items=self.items)

    def serve(self) -> None:
        while self.items and self.line:
            self.hand(self.line[0])

    def why(self) -> str:
        return f"variable {shown(self.name)}, which nobody has set"


KINDS: dict[str, type[Entry]] = {"lock": Permits, "semaphore": Permits, "queue": Line, "event": Flag, "variable": Cell}


class Commons:
    """One door, `handle`; gives replies. What is handed out is remembered until it was taken."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str], Entry] = {}  # by kind and name
        self.waits: dict[tuple[str, int], Wait] = {}
        self.handed: dict[tuple[str, int], tuple[Line | None, list[tuple[int, Any]]]] = {}
        self.changes: dict[bytes, None] = {}
        self.tokens = 0
        self.out: list[Reply] = []

    def handle(self, event: Any, sender: str, items: Sequence[Any] = ()) -> list[Reply]:
        """Takes in what a process said; items: those of a ShareAsked, as the shell keeps them."""
        if isinstance(event, ShareAsked):
            self._asked(Wait(sender, event, items))
        elif isinstance(event, ShareGivenUp):
            self._given_up(sender, event)
        elif isinstance(event, ShareTaken):
            self._hand_over(sender, event.number, True)
        elif isinstance(event, ShareEnded):
            self._drop_holds(sender, event.code)
        return self._replies()

    def lost(self, peer: str) -> list[Reply]:
        """A process is gone for good."""
        for wait in [wait for key, wait in self.waits.items() if key[0] == peer]:
            self._forget(wait)
        for number in [number for to, number in self.handed if to == peer]:
            self._hand_over(peer, number, False)
        self._drop_holds(peer, None)
        return self._replies()

    def forget(self, kind: str, name: str) -> bool:
        """Nobody has a handle any more, so what it holds goes; False while somebody still waits for it."""
        entry = self.entries.get((kind, name))
        if entry is not None and any(self.entry_of(wait) is entry for wait in self.waits.values()):
            return False
        self.entries.pop((kind, name), None)
        return True

    def why(self, peer: str, number: int) -> str:
        """What a question waits for, in words; "" when it does not wait."""
        wait = self.waits.get((peer, number))
        return "" if wait is None else self.entry_of(wait).why()

    def waits_of(self, code: bytes) -> list[str]:
        """What the code of a task, call or actor waits for, and that of the tasks under it."""
        found = [wait for wait in self.waits.values() if code in (wait.asked.code, wait.asked.call, wait.asked.root)]
        return [self.entry_of(wait).why() + ("" if code in (wait.asked.code, wait.asked.call) else
                                             f" (in {wait.asked.who})") for wait in found[:WAITS_TOLD_MAX]]

    def _asked(self, wait: Wait) -> None:
        asked = wait.asked
        entry = self.entries.get((asked.kind, asked.name))
        if entry is None:
            entry = self.entries[asked.kind, asked.name] = KINDS[asked.kind](self, asked)
        elif asked.size >= 0 and asked.size != entry.size:
            entry.reply(wait, "size", entry.size)
            return
        if asked.verb == "open" or (asked.key and asked.key in self.changes):
            entry.reply(wait)
        else:
            entry.ask(wait)
        self._tidy(entry)

    def entry_of(self, wait: Wait) -> Entry:
        """What somebody waits for."""
        return self.entries[wait.asked.kind, wait.asked.name]

    def changed(self, key: bytes) -> None:
        """A change was made; it is not made again."""
        if key:
            self.changes[key] = None
            if len(self.changes) > CHANGES_KEPT_MAX:
                del self.changes[next(iter(self.changes))]

    def hand(self, wait: Wait, line: Line | None, taken: list[tuple[int, Any]]) -> None:
        """Items are on their way; those of a queue go back if they do not arrive."""
        self.handed[wait.peer, wait.asked.number] = line, taken
        if line is not None:
            line.handed += 1

    def _given_up(self, peer: str, event: ShareGivenUp) -> None:
        wait = self.waits.get((peer, event.number))
        if wait is not None:
            self._forget(wait)
            if not event.back:
                self.out.append(Reply(peer, event.number, "late"))
        elif event.back:
            self._hand_over(peer, event.number, False)
            self._drop_holds(peer, None, event.number)

    def _forget(self, wait: Wait) -> None:
        """Who waits no more may have held up those behind."""
        entry = self.entry_of(wait)
        entry.leave(wait)
        entry.serve()
        self._tidy(entry)

    def _hand_over(self, peer: str, number: int, is_taken: bool) -> None:
        """What was handed out was taken, or goes back."""
        line, items = self.handed.pop((peer, number), (None, []))
        if line is None:
            return
        line.handed -= 1
        if not is_taken:
            line.give_back(items)
        self._tidy(line)

    def _tidy(self, entry: Entry) -> None:
        """Programs use any number of names; what is idle is not kept, unless its size is known by its name only."""
        if entry.is_idle() and (entry.name.startswith("~") or entry.kind not in SIZED):
            self.entries.pop((entry.kind, entry.name), None)

    def _drop_holds(self, peer: str, code: bytes | None, number: int = 0) -> None:
        for entry in list(self.entries.values()):
            if isinstance(entry, Permits):
                entry.drop(peer, code, number)
                self._tidy(entry)

    def _replies(self) -> list[Reply]:
        out, self.out = self.out, []
        return out


def shown(name: str) -> str:
    """A name as people read it."""
    return "without a name" if name.startswith("~") else repr(name)
