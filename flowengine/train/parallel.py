"""Synchronous training: every step takes the mean of the gradients of all members, and a death changes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import flowengine as flow
from flowengine.options import whole
from flowengine.train.models import checked_model
from flowengine.train.replica import Replica, Seat
from flowengine.train.trainer import AHEAD_CALLS, WORKERS_MAX, Pace, Trainer


class DataParallel(Trainer):
    """One actor for each rank with a copy of Model(*args); a killed one comes back and repeats what it has to.

    The weights after so many steps are the same, bit for bit, whichever members die meanwhile. actor: options of the
    actors, such as num_cpus, num_gpus, checkpoint, placement.
    """

    def __init__(
        self, model: type, *args: Any, workers: int = 4, steps_per_call: int | None = None, timeout_s: float = 30.0,
        **actor: Any,
    ) -> None:  # fmt: skip
        super().__init__(checked_model(model))
        size = whole("workers", workers, 1, WORKERS_MAX)
        self.pace = Pace(steps_per_call)
        kind = flow.remote(Replica).options(**actor)
        self.members = [kind.remote(model, args) for _ in range(size)]
        seats = [Seat(self.name, size, rank, timeout_s, "recover") for rank in range(size)]
        try:
            flow.get([member.ready.remote() for member in self.members])
            self.first_of([member.join.remote(seat) for member, seat in zip(self.members, seats, strict=True)])
        except BaseException:
            self.close()
            raise

    def steps(self, count: int) -> Iterator[tuple[int, float]]:
        """Do so many more steps; gives the number and the mean loss of each, as they are done.

        Who stops reading stops after the calls that are under way, two of steps_per_call steps.
        """
        left = self.checked(count)
        ahead: deque[tuple[int, list[flow.ObjectRef]]] = deque()
        self.pace.begin()
        while left or ahead:
            while left and len(ahead) < AHEAD_CALLS:
                some = min(left, self.pace.steps)
                ahead.append((some, [member.run.remote(some) for member in self.members]))
                left -= some
            some, refs = ahead.popleft()
            first, losses = self.first_of(refs)
            self.pace.ended(some)
            yield from enumerate(losses, first)

    def weights(self) -> Any:
        """The weights as they are now, as arrays of the caller's own."""
        self.checked(0)
        return flow.get(self.members[0].weights.remote(), copy=True)
