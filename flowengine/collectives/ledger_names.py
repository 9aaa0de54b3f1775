"""The names of groups at the head that stand for this node: given back when no group uses them any more."""

from __future__ import annotations

from math import inf

from flowengine.core.collective import ENTRY
from flowengine.core.messages import Asked
from flowengine.core.node_desk import Desk

UNUSED_S = 60.0  # a name is often used again soon
DROPPED_MAX = 1_000


class Names:
    """A member may come by an entry that was just given back: then the name is claimed again before a group forms."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.unused: dict[str, float] = {}  # since when, or inf
        self.dropped: dict[str, None] = {}
        self.claims: dict[int, str] = {}  # that are not answered
        self._made = 0

    def used(self, name: str) -> None:
        """A ledger of this name is made here."""
        self.unused.pop(name, None)
        if name in self.dropped:
            del self.dropped[name]
            self._made += 1
            self.claims[self._made] = name
            self._claim(self._made)

    def _claim(self, number: int) -> None:
        self.desk.out.send(self.desk.head, Asked(number, "name.claim", [ENTRY + self.claims[number], [self.desk.me]]))

    def claimed(self, number: int, is_ours: bool) -> str:
        """Which name the head has told of."""
        name = self.claims.pop(number, "")
        if name and not is_ours:
            self.dropped[name] = None
        return name

    def claim_again(self) -> None:
        """The head is new: it may not have heard of what was asked."""
        for number in self.claims:
            self._claim(number)

    def is_claimed(self, name: str) -> bool:
        """Whether the name stands for this node, as far as is known."""
        return name not in self.claims.values()

    def drop_unused(self, now: float) -> None:
        """Give back what has not been used for some time."""
        if not self.desk.head_up:
            return
        for name, since_s in list(self.unused.items()):
            if since_s == inf:
                self.unused[name] = now
            if self.unused[name] > now - UNUSED_S:
                continue
            del self.unused[name]
            self.dropped[name] = None
            self.desk.out.send(self.desk.head, Asked(0, "name.drop", [ENTRY + name, self.desk.me]))
        while len(self.dropped) > DROPPED_MAX:
            del self.dropped[next(iter(self.dropped))]
