"""Who is told of which nodes: in a small cluster all of all, in a large one each node only to those who want to know.

That N nodes know of N nodes costs N x N entries at the start of a cluster, in messages and in memory. So in a large one
a node knows itself and those that it has to do with, and the head finds the rest; a program's node knows all. That
nodes have died is told to everybody: that is rare, and who waits for them must hear it.
"""

from __future__ import annotations

from collections.abc import Iterable

from .dispatch import Outbox
from .membership import NodeEntry, NodesChanged

KNOWN_TO_ALL_MAX = 64  # nodes; in a larger cluster only who wants it is told of every one


class Telling:
    """Those that one process tells of nodes, and what they know."""

    def __init__(self) -> None:
        self.curious: dict[str, None] = {}  # addresses that want to know of every node
        self.all_know = False  # everybody was told of every node

    def tell_all(self, out: Outbox, to: Iterable[str], known: NodesChanged) -> None:
        """In a small cluster: these are all."""
        self.all_know = True
        for address in to:
            out.send(address, known)

    def tell(self, out: Outbox, to: Iterable[str], news: NodesChanged, back: tuple[NodeEntry, ...]) -> None:
        """In a large one: the news to the curious; to others who died, and who is back that was said to be dead."""
        rest = NodesChanged(back, news.dead, more=True, whole=False)
        everybody = bool(back or news.dead or self.all_know)
        self.all_know = False
        for address in to if everybody else self.curious:
            out.send(address, news if address in self.curious else rest)


def known_after(known: tuple[NodeEntry, ...], news: NodesChanged) -> tuple[NodeEntry, ...]:
    """The nodes that one knows after these news, by id."""
    if not news.more:
        return news.nodes
    dead = dict.fromkeys(news.dead)
    entries = {entry.node_id: entry for entry in known if entry.address not in dead}
    entries.update((entry.node_id, entry) for entry in news.nodes)
    return tuple([entries[node_id] for node_id in sorted(entries)])
