"""The failure laboratory: harm on purpose, to see what survives."""

from .inject import at, cut, freeze, heal, kill, kill_head, kill_node, kill_worker, lose, plan, thaw
from .sim import Report, Scenario, simulate

__all__ = [
    "Report",
    "Scenario",
    "at",
    "cut",
    "freeze",
    "heal",
    "kill",
    "kill_head",
    "kill_node",
    "kill_worker",
    "lose",
    "plan",
    "simulate",
    "thaw",
]
