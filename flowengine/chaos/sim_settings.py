"""What a simulation is made of: a scenario is data, so that a seed repeats it."""

from __future__ import annotations

import msgspec

from flowengine.config import Config


class NetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A virtual network."""

    delay_s: float = 0.0005
    loss: float = 0.0  # share of messages that have to be sent again
    resend_s: float = 0.02
    spike_s: float = 0.5  # the most that a spike adds to a delay
    link_lost_s: float = 4.0


class FaultRates(msgspec.Struct, frozen=True, kw_only=True):
    """How many of each harm are done while a program runs."""

    kill_worker: float = 0.0
    kill_node: float = 0.0
    kill_head: float = 0.0
    freeze_worker: float = 0.0
    freeze_node: float = 0.0
    cut_host: float = 0.0
    lose_copies: float = 0.0
    spike: float = 0.0
    kill_actor: float = 0.0
    kill_several: float = 0.0
    kill_member: float = 0.0
    break_lane: float = 0.0


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the members of groups behave, in a scenario of collectives."""

    on_failure: tuple[str, ...] = ("recover",)
    timeout_s: float = 3.0
    late: float = 0.3  # share of operations to which one rank comes late
    big: bool = False  # large arrays only, in operations that may begin before all have come
    too_late: float = 0.0  # share of late ranks that come after the timeout
    wrong: float = 0.0  # share of folds in which one rank gives another shape
    grows: float = 0.0  # share of groups that take in newcomers
    never_back: float = 0.0  # share of members that do not come back when they die
    again: float = 0.0  # share of programs with another group of the same name after the first
    beside: float = 0.0  # share of programs with another group of another name


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of run: the shape of the cluster, of the program, of the network and the harm."""

    name: str = "scenario"
    nodes: int = 3
    workers: int = 2
    store_limit_bytes: int = 1 << 20
    tasks: int = 20  # about so many in a program
    depth: int = 2  # of nested tasks
    features: tuple[str, ...] = ("nested", "stored", "put", "refs", "streams", "errors", "wait", "cancel", "keep")
    gang_max: int = 5  # members of a gang
    resources: int = 0  # names that the program makes resources under; 0: none
    policies: bool = False  # tasks have some
    run_s: float = 0.05  # mean run time of a task
    actors: int = 0  # at most so many in a program; 0: it is one of tasks and objects
    own_actors: float = 0.0  # share of tasks that make an actor
    stored: float = 0.0  # share of tasks that call actors and give a large result
    unread: float = 0.0  # share of calls whose reply nobody reads
    files: float = 0.0  # share of checkpoints that are files, written while calls go on
    torn: float = 0.0  # share of the newest of these that turn out to be bad when their actor comes back
    flat: bool = False  # all tasks are alike and independent: for measuring
    faults: FaultRates = FaultRates()
    faults_until_s: float = 3.0
    net: NetSettings = NetSettings()
    end_s: float = 300.0  # a program that has not ended by then is stuck
    group: GroupSettings | None = None  # the program is one of groups, with at most `tasks` operations each
    check_every: int = 1  # laws are checked after every n-th event
    config: Config = Config(
        heartbeat_s=0.5, suspect_after_s=2.0, link_lost_after_s=4.0, story_lines_max=1, worker_idle_s=2.0,
        inline_bytes_max=100, link_unacked_bytes_max=4096, store_full_s=2.0, stash_holders_max=0,
    )
