"""Laws of bundles: each yields one line for a breach (see invariants)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowengine.scheduling.devices import gpus_in
from flowengine.scheduling.resources import CPU, SCALE

from .bundles import is_gang

if TYPE_CHECKING:
    from .head import Head
    from .node import Node


def offered(node: Node) -> Iterator[str]:
    """What a node offers of its bundles."""
    ledger = node.leases.ledger
    for bundle in node.bundles.held.values():
        for name, count in bundle.offers():
            if ledger.size(name) != (count if bundle.is_open and not bundle.ending else 0):
                yield f"{name}: {ledger.size(name)} of {count}, open: {bundle.is_open}, ending: {bundle.ending}"
        if not 0 <= bundle.lent <= dict(bundle.units).get(CPU, 0):
            yield f"{bundle.name} lends {bundle.lent}"
        if bundle.ending and not any(lease.bundle == bundle.name for lease in node.leases.leases.values()):
            yield f"{bundle.name} has ended and is held"


def shared(node: Node) -> Iterator[str]:
    """What a node has given of its GPUs."""
    leases, sums = node.leases, dict[tuple[str, str], int]()
    bundles = [("", bundle.devices, bundle.units) for bundle in node.bundles.held.values()]
    for pool, names, units in (*bundles, *((held.bundle, held.devices, held.units) for held in leases.leases.values())):
        for name in names:
            sums[pool, name] = sums.get((pool, name), 0) + min(gpus_in(units), SCALE)
    said = {(pool, name): count for pool, devices in leases.devices.items() for name, count in devices.held().items()}
    if said != sums:
        yield f"{said}, really {sums}"
    for (pool, name), count in said.items():
        if count > leases.devices[pool].size:
            yield f"{count / SCALE} of GPU {name}{' of ' if pool else ''}{pool} is taken"


def placed(head: Head) -> Iterator[str]:
    """Who waits at the head."""
    bundles = head.bundles
    for group in bundles.groups.values():
        if group.whole == (group.id in bundles.waiting):
            yield f"{group.id}: {len(group.places)} of {len(group.units)} placed, waits: {group.id in bundles.waiting}"
        for node_id in (*group.places.values(), *group.asked.values(), *group.silent):
            if node_id not in head.members:
                yield f"{group.id} is at {node_id}, which is not there"
        if is_gang(group.id) and not group.holders and group.id not in bundles.orphans:
            yield f"{group.id} is wanted by nobody"
    if any(group_id not in bundles.groups for group_id in bundles.waiting):
        yield f"{list(bundles.waiting)} wait"
    if bundles.holding and not bundles.groups[bundles.holding].silent:
        yield f"slots are held free for {bundles.holding}, which asks nobody"


def fitting(head: Head) -> Iterator[str]:
    """What the head has placed on nodes."""
    yield from head.bundles.over_promised()
