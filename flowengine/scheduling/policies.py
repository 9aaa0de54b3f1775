"""Placement policies for the option `placement`: plain descriptions, made into node preferences when a call is made."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flowengine.errors import BadType, BadValue

ANYWHERE = "*"


class Policy(msgspec.Struct, frozen=True):
    """Nodes in order of preference; "*" at the end: anywhere else."""

    nodes: tuple[str, ...]


def node(node_id: str) -> Policy:
    """On this node and no other."""
    if not isinstance(node_id, str):
        raise BadType(f"node takes a node_id of flowengine.nodes(), not {node_id!r}")
    if not node_id:
        raise BadValue("the node_id is empty")
    return Policy((node_id,))


def soft(policies: Iterable[Policy]) -> Policy:
    """The first of these that can be met, else anywhere."""
    found: list[str] = []
    for policy in policies:
        if not isinstance(policy, Policy):
            raise BadType(f"soft takes a list of policies, not {policy!r}")
        found.extend(name for name in policy.nodes if name not in found and name != ANYWHERE)
    return Policy((*found, ANYWHERE))
