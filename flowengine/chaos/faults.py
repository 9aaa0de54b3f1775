"""Plans of harm: drawn from a seed, so that a run can be repeated; after the last one a program must come to an end."""

from __future__ import annotations

from random import Random

import msgspec

from .sim_settings import FaultRates, Scenario

# Without these a seed of a scenario draws as it did before there were any.
ADDED = ("kill_actor", "kill_several", "kill_member", "break_lane")
REPAIR_S = (0.3, 6.0)  # how long a cut or a freeze lasts


class Fault(msgspec.Struct, frozen=True, order=True):
    """One harm; luck picks its victim among those that are there at that moment."""

    at_s: float
    kind: str
    luck: float
    seconds: float = 0.0


def plan(dice: Random, scenario: Scenario) -> tuple[Fault, ...]:
    """All harm of a run, by time."""
    faults: list[Fault] = []
    for kind in FaultRates.__struct_fields__:
        mean = getattr(scenario.faults, kind)
        if kind in ADDED and not mean:
            continue
        count = int(mean) + (dice.random() < mean % 1)
        for _ in range(count):
            at_s = dice.random() * scenario.faults_until_s
            seconds = REPAIR_S[0] + dice.random() ** 2 * (REPAIR_S[1] - REPAIR_S[0])
            faults.append(Fault(at_s, kind, dice.random(), seconds))
    return tuple(sorted(faults))
