"""Messages of nodes and the head: who is there, with what capacity, and where a demand could be served."""

from __future__ import annotations

from .parts import Message, Record, Shape


class NodeEntry(Record, frozen=True):
    """A node as others see it."""

    node_id: str
    address: str
    host: str
    total: Shape
    available: Shape
    workers: tuple[tuple[str, int, str, str], ...] = ()  # (worker_id, pid, state, address)
    queued: int = 0
    epoch: int = 0


class NodeJoined(Message, frozen=True):
    """A node registers, for the first time or again after the head or the link was lost."""

    entry: NodeEntry


class NodeAccepted(Message, frozen=True):
    """The head's answer: the epoch under which the node now lives, and its peers."""

    epoch: int
    nodes: tuple[NodeEntry, ...]


class NodeFenced(Message, frozen=True):
    """The head had declared this node dead: it must begin a new life (kill its workers, new epoch)."""

    epoch: int


class NodeReport(Message, frozen=True):
    """Spare capacity and queue of a node, sent when it changed (not more often than an interval); a sign of life."""

    entry: NodeEntry


class NodesChanged(Message, frozen=True):
    """Head to nodes, nodes to their processes: who is there, and who died since."""

    nodes: tuple[NodeEntry, ...]
    dead: tuple[str, ...] = ()  # addresses of nodes that are dead for good


class SlotsSought(Message, frozen=True):
    """A node asks: who could serve this demand of an owner?"""

    owner: str
    shape: Shape
    placement: tuple[str, ...]
    count: int
    run_us: int = 0
    held: tuple[tuple[str, int], ...] = ()


class SlotsFound(Message, frozen=True):
    """The head's answer: a node's address, or none and why."""

    owner: str
    shape: Shape
    placement: tuple[str, ...]
    node: str
    reason: str = ""
