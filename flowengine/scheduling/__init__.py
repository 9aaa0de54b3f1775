"""Placement policies: values for the option `placement`."""

from .policies import Policy, node, soft

__all__ = ["Policy", "node", "soft"]
