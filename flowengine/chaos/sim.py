"""The seeded simulator: the machines of a whole cluster in one process, where time, network and disks are virtual.

Every run follows from a scenario and a seed, so a failure is repeated by its seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from flowengine.errors import BadValue

from .checkers import left_over, wrong_actors, wrong_outcome
from .sim_collectives import GroupWorld, judge_groups
from .sim_resources import wrong_resources
from .sim_settings import FaultRates, GroupSettings, NetSettings, Scenario
from .sim_world import TRACE_LINES, Broken, World

__all__ = ["Failure", "Report", "SCENARIOS", "Scenario", "simulate", "story_of"]

GANGS = ("nested", "stored", "put", "refs", "wait", "gangs")
QUIET_S = 12.0  # after the program's end: then nothing may be left


class Failure(msgspec.Struct, frozen=True):
    """A seed whose run was not right, and how."""

    seed: int
    lines: tuple[str, ...]


class Report(msgspec.Struct):
    """What a number of runs have shown."""

    scenario: str
    seeds: int = 0
    failures: list[Failure] = []
    tasks: int = 0
    events: int = 0
    messages: int = 0
    head_messages: int = 0
    virtual_s: float = 0.0
    kinds: dict[str, int] = {}
    head_kinds: dict[str, int] = {}

    @property
    def messages_per_task(self) -> float:
        """Between all processes, but for signs of life."""
        return self.messages / max(1, self.tasks)

    def __str__(self) -> str:
        head = (
            f"{self.scenario}: {self.seeds} seeds, {len(self.failures)} failed; "
            f"{self.tasks} tasks, {self.events} events, {self.messages_per_task:.2f} messages per task, "
            f"{self.head_messages} to the head, {self.virtual_s:.1f} virtual seconds"
        )
        told = [f"seed {failure.seed}: " + "\n    ".join(failure.lines[:12]) for failure in self.failures[:10]]
        return "\n  ".join([head, *told])


def run(world: World) -> list[str]:
    """Run a world to its end; lines about what was wrong."""
    if isinstance(world, GroupWorld):
        return judge_groups(world)
    scenario, clock, driver = world.scenario, world.clock, None
    try:
        world.start()
        driver = world.driver
        while driver.outcome is None and clock.step(scenario.end_s):
            pass
        if driver.outcome is not None:
            last_s = max([clock.now, *(fault.at_s + fault.seconds for fault in world.faults)])
            while clock.step(last_s + QUIET_S):
                pass
        lines = wrong_outcome(world)
        if driver.outcome is not None:
            lines += wrong_actors(world)
            lines += left_over(world)
            lines += wrong_resources(world) if scenario.resources else []
    except Broken as broken:
        return [str(broken)]
    return lines


def story_of(scenario: str | Scenario, seed: int, lines_max: int = TRACE_LINES) -> list[str]:
    """The last events of a seed's run, as lines."""
    world = world_of(known(scenario), seed)
    world.trace = deque(maxlen=lines_max)
    lines = run(world)
    return [*(f"{now:9.4f} {where:<18} {sender:<22} {event}" for now, where, sender, event in world.trace), *lines]


def groups(
    name: str, faults: FaultRates, store_bytes: int = 1 << 20, kept_bytes: int = 1 << 30, **settings: Any
) -> Scenario:
    """A scenario of collectives."""
    config = msgspec.structs.replace(
        Scenario().config, collective_inline_bytes_max=100, collective_piece_bytes=64, transfer_timeout_s=1.0,
        collective_kept_bytes_max=kept_bytes,
    )
    return Scenario(
        name=name, nodes=4, workers=0, store_limit_bytes=store_bytes, tasks=10, faults=faults, faults_until_s=1.5,
        net=NetSettings(loss=0.02), check_every=5, config=config, group=GroupSettings(**settings),
    )


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(name="calm"),
        Scenario(name="workers", faults=FaultRates(kill_worker=3.0), net=NetSettings(loss=0.02)),
        Scenario(name="copies", faults=FaultRates(kill_worker=1.0, lose_copies=4.0), net=NetSettings(loss=0.02)),
        Scenario(
            name="nodes", faults=FaultRates(kill_worker=1.0, kill_node=1.0, kill_head=0.5, spike=0.5),
            net=NetSettings(loss=0.02),
        ),
        Scenario(
            name="spill", store_limit_bytes=12_000, tasks=30, features=("nested", "stored", "put", "refs", "streams"),
            faults=FaultRates(kill_worker=1.0, lose_copies=1.0), net=NetSettings(loss=0.02),
        ),
        Scenario(
            name="durable", faults=FaultRates(kill_worker=1.0, kill_node=2.0, lose_copies=2.0),
            net=NetSettings(loss=0.02), config=msgspec.structs.replace(Scenario().config, node_mtbf_s=0.1),
        ),
        Scenario(name="actors_calm", actors=3),
        Scenario(
            name="actors", actors=3, faults=FaultRates(kill_worker=1.0, kill_actor=2.0), net=NetSettings(loss=0.02),
        ),
        Scenario(
            name="actors_all", actors=3,
            faults=FaultRates(kill_worker=1.0, kill_actor=1.5, kill_node=0.5, kill_head=0.5, spike=0.5),
            net=NetSettings(loss=0.02),
        ),
        Scenario(
            name="actors_of_tasks", actors=2, own_actors=0.4, stored=0.4,
            faults=FaultRates(kill_worker=1.0, kill_actor=1.5, kill_node=0.3), net=NetSettings(loss=0.02),
        ),
        Scenario(
            name="actors_torn", actors=3, own_actors=0.1, files=0.7, torn=0.4,
            faults=FaultRates(kill_worker=1.0, kill_actor=4.0, kill_node=0.2), net=NetSettings(loss=0.02),
        ),
        Scenario(
            name="actors_storm", actors=3,
            faults=FaultRates(kill_several=1.5, kill_actor=1.0, kill_node=0.3), net=NetSettings(loss=0.02),
        ),
        Scenario(
            name="actors_wild", actors=3, unread=0.2, stored=0.3, own_actors=0.2,
            faults=FaultRates(
                kill_worker=1.0, kill_actor=1.5, kill_head=0.3, freeze_worker=0.5, freeze_node=0.2, cut_host=0.3,
                spike=0.5,
            ),
            net=NetSettings(loss=0.02),
        ),
        Scenario(
            name="all",
            faults=FaultRates(
                kill_worker=2.0, kill_node=0.7, kill_head=0.5, freeze_worker=0.5, freeze_node=0.3, cut_host=0.4,
                lose_copies=1.0, spike=0.5,
            ),
            net=NetSettings(loss=0.02),
        ),
        Scenario(name="policies_calm", policies=True),
        Scenario(
            name="policies", policies=True, net=NetSettings(loss=0.02),
            faults=FaultRates(
                kill_worker=1.5, kill_node=0.7, kill_head=0.5, freeze_worker=0.3, freeze_node=0.2, cut_host=0.3,
                lose_copies=1.0, spike=0.5,
            ),
        ),
        Scenario(
            name="policies_actors", policies=True, actors=3, net=NetSettings(loss=0.02),
            faults=FaultRates(kill_worker=1.0, kill_actor=1.5, kill_node=0.5, kill_head=0.3, spike=0.5),
        ),
        Scenario(name="resources_calm", resources=6, tasks=25),
        Scenario(
            name="resources", resources=6, tasks=25, net=NetSettings(loss=0.02),
            faults=FaultRates(kill_worker=1.5, kill_node=0.7, kill_head=0.7, freeze_node=0.2, cut_host=0.3, spike=0.5),
        ),
        Scenario(name="gangs_calm", features=GANGS),
        Scenario(name="gangs", features=GANGS, faults=FaultRates(kill_worker=2.0), net=NetSettings(loss=0.02)),
        Scenario(
            name="gangs_tight", nodes=2, gang_max=4, tasks=60, features=GANGS, faults=FaultRates(kill_worker=1.0),
        ),
        Scenario(
            name="gangs_all", features=GANGS,
            faults=FaultRates(kill_worker=1.5, kill_node=0.7, kill_head=0.7, freeze_node=0.2, cut_host=0.3, spike=0.5),
            net=NetSettings(loss=0.02),
        ),
        groups("collectives_calm", FaultRates(), grows=0.2, wrong=0.1, too_late=0.05, again=0.2, beside=0.2),
        groups("collectives_members", FaultRates(kill_member=2.0)),
        groups("collectives_tight", FaultRates(kill_member=1.5, break_lane=0.5), kept_bytes=12_000),
        groups("collectives_spill", FaultRates(kill_member=1.0, kill_node=0.2), store_bytes=9_000),
        groups(
            "collectives", FaultRates(kill_member=1.5, kill_node=0.3, kill_head=0.1, break_lane=0.5, spike=0.3),
            on_failure=("recover", "recover", "shrink", "raise"), grows=0.1, wrong=0.05, too_late=0.03,
            never_back=0.1, again=0.1, beside=0.1,
        ),
        groups(
            "collectives_all",
            FaultRates(
                kill_member=1.5, kill_several=0.3, kill_node=0.6, kill_head=0.2, break_lane=0.7, cut_host=0.4,
                spike=0.3,
            ),
            on_failure=("recover", "recover", "shrink", "raise"), grows=0.2, wrong=0.05, too_late=0.05,
            never_back=0.2, again=0.2, beside=0.2,
        ),
        groups(
            "collectives_late",
            FaultRates(kill_member=1.5, kill_node=0.4, kill_head=0.1, break_lane=0.5, cut_host=0.3, spike=0.3),
            on_failure=("recover", "recover", "shrink", "raise"), late=0.9, big=True, wrong=0.1,
            too_late=0.05, never_back=0.1, beside=0.2,
        ),
    )
}


def world_of(scenario: Scenario, seed: int) -> World:
    """What a seed of a scenario runs in."""
    return World(scenario, seed) if scenario.group is None else GroupWorld(scenario, seed)


def known(scenario: str | Scenario) -> Scenario:
    """The scenario itself, or the one of that name."""
    if isinstance(scenario, Scenario):
        return scenario
    if scenario not in SCENARIOS:
        raise BadValue(f"there is no scenario {scenario!r}; there are {', '.join(SCENARIOS)}")
    return SCENARIOS[scenario]


def simulate(scenario: str | Scenario, seeds: Iterable[int] = range(100), nodes: int | None = None) -> Report:
    """Run a scenario once per seed and judge each run; a scenario is a Scenario or the name of one of ours."""
    chosen = known(scenario)
    if nodes is not None:
        chosen = msgspec.structs.replace(chosen, nodes=nodes)
    report = Report(chosen.name)
    for seed in seeds:
        world = world_of(chosen, seed)
        lines = run(world)
        report.seeds += 1
        if lines:
            report.failures.append(Failure(seed, tuple(lines)))
        report.tasks += world.tasks_submitted
        report.events += world.events
        report.messages += sum(world.net.counts.values())
        report.head_messages += world.head.machine.counters["head_messages"]
        report.virtual_s += world.clock.now
        for kind, count in world.net.counts.items():
            report.kinds[kind] = report.kinds.get(kind, 0) + count
        for kind, count in world.head.machine.kinds.items():
            report.head_kinds[kind] = report.head_kinds.get(kind, 0) + count
    return report
