"""What a head tells people of itself: who waits for a node, what programs made, lost nodes; bounded."""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import Any

import msgspec

from flowengine.scheduling.resources import job_of, plain

from .bundles import is_gang
from .commands import WriteJournal
from .head import NODE_ROW, Head, NodeRow
from .head_resources import amount_of

SEEKERS_MAX = 30
RESOURCES_MAX = 100
BUNDLES_MAX = 50
PLACES_MAX = 16
FAILURES_MAX = 20
WRITES_LOOKED_AT_MAX = 200
AT_HEAD = "at the head: "
WRITES: frozenset[type] = frozenset((WriteJournal,))


def seekers(head: Head) -> list[dict[str, Any]]:
    """Demands that no node can serve now, those that wait longest first."""
    return [
        {"shape": dict(seeker.sought.shape), "placement": list(seeker.sought.placement), "count": seeker.sought.count,
         "leases": 0, "reason": f"{AT_HEAD}{seeker.told or 'a node is sought'}"}
        for seeker in islice(head.slots.seekers.values(), SEEKERS_MAX)
    ]


def resources(head: Head) -> list[dict[str, Any]]:
    """Amounts that programs made at run time; without limit: None."""
    found = []
    for key, made in islice(head.resources.made.items(), RESOURCES_MAX):
        nodes, each = head.resources.nodes_of(made), amount_of(made.given)
        limited = each != inf
        free = sum(max(0, head.rooms.nodes[node_id].free.get(key, 0)) for node_id in nodes)
        found.append({"name": plain(key), "program": job_of(key), "total": each * len(nodes) if limited else None,
                      "free": amount_of(free) if limited else None, "nodes": nodes[:PLACES_MAX],
                      "nodes_more": max(0, len(nodes) - PLACES_MAX)})
    return found


def bundles(head: Head) -> list[dict[str, Any]]:
    """Gangs and placement groups, with the nodes of their bundles ("" for none yet)."""
    return [
        {"id": group.id, "kind": "gang" if is_gang(group.id) else "placement group",
         "strategy": group.described.strategy, "whole": group.whole, "reason": group.reason,
         "bundles": len(group.units), "places": [group.places.get(index, "") for index in
                                                 range(min(len(group.units), PLACES_MAX))]}
        for group in islice(head.bundles.groups.values(), BUNDLES_MAX)
    ]


def failures(head: Head, now: float) -> list[dict[str, Any]]:
    """Nodes that were declared dead, newest first."""
    found = []
    for at, _, command in head.journal.latest(WRITES, WRITES_LOOKED_AT_MAX):
        for key, value in command.rows:
            if not key.startswith(NODE_ROW) or value is None:
                continue
            row = msgspec.msgpack.decode(value, type=NodeRow)
            if row.dead:
                found.append({"kind": "node", "id": key.removeprefix(NODE_ROW), "name": row.address, "age_s": now - at,
                              "text": f"it was declared dead in its life {row.epoch}; what it had is made again"})
    return found[:FAILURES_MAX]
