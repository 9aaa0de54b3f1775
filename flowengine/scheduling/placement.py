"""Which node should serve a demand: costs in seconds, and words for why none can."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flowengine.core.messages import NodeEntry, Record, Shape

from .resources import SCALE, Units, shape_of, shown_amount, units_of

ANYWHERE = "*"
RUN_S_GUESS = 0.01  # of a task, until it was measured
BYTES_PER_S_GUESS = 1e9
RANK_S = 0.05  # what one step down in an order of preference is worth


class Costs(Record, frozen=True):
    """What a placement is judged by; all that is measured has a guess to begin with."""

    run_s: float = RUN_S_GUESS
    bytes_to_move: int = 0
    bytes_per_s: float = BYTES_PER_S_GUESS


def cost_s(queued: int, slots: int, rank: int, costs: Costs) -> float:
    """Seconds until a task begins on a node: its turn in the queue, its bytes on the way, its place in preference."""
    return queued * costs.run_s / max(1, slots) + costs.bytes_to_move / costs.bytes_per_s + rank * RANK_S


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


def minus(have: Shape, need: Units, count: int) -> Shape:
    """What is left of the amounts of a node when it serves so many of them; never below 0."""
    amounts = dict(units_of(have))
    for name, each in need:
        amounts[name] = max(0, amounts.get(name, 0) - each * count)
    return shape_of(tuple((name, amounts.get(name, 0)) for name, _ in have))


def could_run(node: NodeEntry, shape: Shape, placement: tuple[str, ...]) -> bool:
    """Whether the node could serve the demand now."""
    return allows(placement, node.node_id) and covers(node.available, units_of(shape))


def candidates(nodes: Iterable[NodeEntry], shape: Shape, placement: tuple[str, ...]) -> list[NodeEntry]:
    """Nodes that could serve the demand when they were empty, best liked first."""
    need = units_of(shape)
    able = [node for node in nodes if allows(placement, node.node_id) and covers(node.total, need)]
    able.sort(key=lambda node: (rank_of(placement, node.node_id), node.node_id))
    return able


def choose(
    nodes: Iterable[NodeEntry],
    shape: Shape,
    placement: tuple[str, ...],
    run_s: float = RUN_S_GUESS,
    held: Mapping[str, int] | None = None,
) -> NodeEntry | None:
    """The node with the amounts free now where the task begins soonest, or None; held: bytes of its inputs by node."""
    need = units_of(shape)
    free = [node for node in candidates(nodes, shape, placement) if covers(node.available, need)]
    if not free:
        return None
    held = held or {}
    largest = max(held.values(), default=0)

    def price(node: NodeEntry) -> tuple[float, int, str]:
        slots = times(node.total, need, 1 << 20)
        spare = times(node.available, need, 1 << 20)
        costs = Costs(run_s, largest - held.get(node.address, 0))
        return (cost_s(node.queued, slots, rank_of(placement, node.node_id), costs), -spare, node.node_id)

    return min(free, key=price)


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
            return f"{who} has {name}: {shown_amount(count)} (largest: {shown_amount(largest)})"
    wanted = " and ".join(f"{name}: {shown_amount(round(amount * SCALE))}" for name, amount in shape)
    return f"{who} has {wanted} together"
