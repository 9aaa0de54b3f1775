"""The failure laboratory: harm on purpose, to see what survives."""

from typing import TYPE_CHECKING, Any

from .inject import at, cut, freeze, heal, kill, kill_head, kill_node, kill_worker, lose, plan, thaw

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    # The simulator takes longer to import than all that a program needs to start: it is loaded when it is asked for.
    if name in ("Report", "Scenario", "simulate"):
        from . import sim

        return getattr(sim, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
