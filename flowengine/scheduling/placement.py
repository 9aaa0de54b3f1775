"""Which node should serve a demand: costs in seconds, and words for why none can."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flowengine.core.messages import NodeEntry, Shape

from .resources import AT, SCALE, SEP, Units, shown_amount, shown_need, units_of

ANYWHERE = "*"
FEW = "-few-"  # no node's id: the tasks need no amounts and seldom wait for each other, so few processes do for many
RUN_S_GUESS = 0.01  # of a task, until it was measured
BYTES_PER_S_GUESS = 1e9
RANK_S = 0.05  # what one step down in an order of preference is worth


def cost_s(queued: int, slots: int, rank: int, run_s: float = RUN_S_GUESS, bytes_to_move: int = 0) -> float:
    """Seconds until a task begins on a node: its turn in the queue, its bytes on the way, its place in preference."""
    return queued * run_s / max(1, slots) + bytes_to_move / BYTES_PER_S_GUESS + rank * RANK_S


def allows(placement: tuple[str, ...], node_id: str) -> bool:
    """Whether the placement admits the node."""
    return not placement or node_id in placement or placement[-1] == ANYWHERE


def rank_of(placement: tuple[str, ...], node_id: str) -> int:
    """Place of the node in the order of preference; 0 is best."""
    if not placement:
        return 0
    return placement.index(node_id) if node_id in placement else len(placement) - 1


def covers(have: Shape, need: Units) -> bool:
    """Whether the amounts of a node cover what is needed."""
    amounts = dict(units_of(have))
    return all(amounts.get(name, 0) >= count for name, count in need)


def times(have: Shape, need: Units, limit: int) -> int:
    """How often the amounts of a node cover what is needed, at most `limit`."""
    amounts = dict(units_of(have))
    for name, count in need:
        limit = min(limit, amounts.get(name, 0) // count)
    return max(0, limit)


def preferred(nodes: Mapping[str, NodeEntry], better: Iterable[str], need: Units) -> NodeEntry | None:
    """The first of these nodes that is there and has what is needed, as far as that is known of others' nodes."""
    known = tuple(pair for pair in need if SEP not in pair[0] and AT not in pair[0])
    for node_id in better:
        entry = nodes.get(node_id)
        if entry is not None and covers(entry.total, known):
            return entry
    return None


def candidates(nodes: Iterable[NodeEntry], shape: Shape, placement: tuple[str, ...]) -> list[NodeEntry]:
    """Nodes that could serve the demand when they were empty, best liked first."""
    need = units_of(shape)
    able = [node for node in nodes if allows(placement, node.node_id) and covers(node.total, need)]
    able.sort(key=lambda node: (rank_of(placement, node.node_id), node.node_id))
    return able


def why_not(nodes: Sequence[NodeEntry], shape: Shape, placement: tuple[str, ...]) -> str:
    """Why no node can ever serve the demand as things are, or "" when one can."""
    if candidates(nodes, shape, placement):
        return ""
    allowed = [node for node in nodes if allows(placement, node.node_id)]
    if not allowed:
        wanted = ", ".join(name for name in placement if name != ANYWHERE)
        return f"node {wanted} is not there" if wanted else "no node is there"
    who = "no node" if len(allowed) == len(nodes) else f"none of {', '.join(node.node_id for node in allowed)}"
    for name, count in units_of(shape):
        largest = max(dict(units_of(node.total)).get(name, 0) for node in allowed)
        if largest < count:
            return f"{who} has {shown_need(name, count)} (largest: {shown_amount(largest, name)})"
    wanted = " and ".join(shown_need(name, round(amount * SCALE)) for name, amount in shape)
    return f"{who} has {wanted} together"
