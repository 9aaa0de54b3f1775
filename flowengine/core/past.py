"""What an owner remembers of what has ended, for replays: bounded, oldest first out. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from ..recovery.record import ActorTold, CallsSent, TaskTold
from . import messages as m

T = TypeVar("T")

FAILED_TASKS_MAX = 100
DEAD_ACTORS_MAX = 20
OLDER_MAX = 100
PARENTS_MAX = 1_000
SPECS_MAX = 20_000
SPECS_BYTES_MAX = 64 << 20
KEPT_BYTES_MAX = 16 << 20  # of each other kind
SHOWN_BYTES_MAX = 1_024  # arguments that stay with a run: not to copy the small ones


def without_much(spec: m.TaskSpec) -> m.TaskSpec:
    """The spec, without its arguments when these are large."""
    return spec if len(spec.args) <= SHOWN_BYTES_MAX else msgspec.structs.replace(spec, args=b"")


class Kept(Generic[T]):
    """Things by name, so many and so large at most."""

    def __init__(self, count_max: int, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self.count_max = count_max
        self.bytes_max = bytes_max
        self.things: dict[bytes, T] = {}
        self.sizes: dict[bytes, int] = {}
        self.bytes = 0

    def put(self, name: bytes, thing: T, size_bytes: int) -> list[T]:
        """Keep it as the newest; gives what was dropped for it. One that is too large is not kept."""
        self.drop(name)
        if size_bytes > self.bytes_max:
            return [thing]
        self.things[name] = thing
        self.sizes[name] = size_bytes
        self.bytes += size_bytes
        gone = []
        while len(self.things) > self.count_max or self.bytes > self.bytes_max:
            oldest = next(iter(self.things))
            gone.append(self.things[oldest])
            self.drop(oldest)
        return gone

    def drop(self, name: bytes) -> None:
        """Forget it."""
        if self.things.pop(name, None) is not None:
            self.bytes -= self.sizes.pop(name)


class Past:
    """What has ended, as far as it may be wanted again."""

    def __init__(self) -> None:
        self.specs = Kept[m.TaskSpec](SPECS_MAX, SPECS_BYTES_MAX)  # of tasks with large arguments that have run
        self.failed = Kept[TaskTold](FAILED_TASKS_MAX)
        self.dead = Kept[ActorTold](DEAD_ACTORS_MAX)
        self.starts = Kept[m.Checkpoint](OLDER_MAX)  # older checkpoints of living actors, by actor and calls
        self.choices = Kept[dict[tuple[str, int], bytes]](OLDER_MAX)  # of living actors, that a checkpoint covers
        self.sent = Kept[CallsSent](DEAD_ACTORS_MAX)  # to actors that are dead
        # What tasks chose, and what their children gave: by the tasks that did not only compute.
        self.chosen = Kept[tuple[dict[tuple[str, int], bytes], dict[bytes, m.Value]]](PARENTS_MAX)
