"""Placement policies: values for the option `placement`."""

from .gangs import gang
from .labels import affinity, anti_affinity
from .policies import Policy, fair_share, node, soft
from .spreading import pack, spread

__all__ = [
    "Policy",
    "affinity",
    "anti_affinity",
    "fair_share",
    "gang",
    "node",
    "pack",
    "soft",
    "spread",
]
