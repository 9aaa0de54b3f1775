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
    former: tuple[str, ...] = ()  # node ids of processes that its launcher has reaped: they are dead


class NodeAccepted(Message, frozen=True):
    """The head's answer: the epoch under which the node now lives, and its peers."""

    epoch: int
    nodes: tuple[NodeEntry, ...]
    whole: bool = True  # there are no others; False: one that wants to know them says so


class NodesWanted(Message, frozen=True):
    """Process to its node, node to the head: tell me of every node, now and whenever one comes."""


class NodeFenced(Message, frozen=True):
    """The head had declared this node dead: it must begin a new life (kill its workers, new epoch)."""

    epoch: int


class NodeReport(Message, frozen=True):
    """Spare capacity and queue of a node, sent when it changed (not more often than an interval); a sign of life.

    dynamic: (key, total, free) in units of what came at run time and changed since the last report to this head.
    """

    entry: NodeEntry
    dynamic: tuple[tuple[str, int, int], ...] = ()


class OrderSeen(Message, frozen=True):
    """Program to head: the call that gave this order about a resource has returned; what it does may begin."""

    number: int


class AmountsSet(Message, frozen=True):
    """Head to node: from now on it has so many units of these keys (0: none); whole: and of no others of programs."""

    amounts: tuple[tuple[str, int], ...]
    epoch: int
    whole: bool = False
    order: int = 0  # the node is to say when it has done this one, which takes away


class AmountsDone(Message, frozen=True):
    """Node to head: nobody gets more of what this order took away."""

    order: int


class NodesChanged(Message, frozen=True):
    """Head to nodes, nodes to their processes: who is there, and who died since."""

    nodes: tuple[NodeEntry, ...]
    dead: tuple[str, ...] = ()  # addresses of nodes that are dead for good
    more: bool = False  # these nodes are there beside those that were told before
    whole: bool = True  # all nodes are known now; False: there are others, see NodesWanted


class SlotsSought(Message, frozen=True):
    """A node asks: who could serve this demand of an owner?"""

    owner: str
    shape: Shape
    placement: tuple[str, ...]
    count: int
    run_us: int = 0
    held: tuple[tuple[str, int], ...] = ()


class SlotsFound(Message, frozen=True):
    """The head's answer: a node's address, or none and why; refused: and there will never be one."""

    owner: str
    shape: Shape
    placement: tuple[str, ...]
    node: str
    reason: str = ""
    refused: bool = False
