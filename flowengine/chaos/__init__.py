"""The failure laboratory: harm on purpose, to see what survives."""

import importlib
from typing import TYPE_CHECKING, Any

from .inject import at, cut, freeze, heal, kill, kill_head, kill_node, kill_worker, lose, plan, thaw

if TYPE_CHECKING:
    from .sim import Report, Scenario, simulate, story_of
    from .sim_settings import FaultRates, NetSettings

SIMULATOR = {
    "FaultRates": "sim_settings", "NetSettings": "sim_settings", "Report": "sim", "Scenario": "sim", "simulate": "sim",
    "story_of": "sim",
}  # fmt: skip
__all__ = [
    "FaultRates",
    "NetSettings",
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
    "story_of",
    "thaw",
]


def __getattr__(name: str) -> Any:
    # The simulator takes longer to import than all that a program needs to start: it is loaded when it is asked for.
    if name in SIMULATOR:
        return getattr(importlib.import_module(f"{__name__}.{SIMULATOR[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
