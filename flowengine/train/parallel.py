"""Synchronous training: every step takes the mean of the gradients of all members, and a death changes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import flowengine as flow
from flowengine.errors import CollectiveTimeout, FlowError, MemberLost
from flowengine.options import whole
from flowengine.train.models import checked_model
from flowengine.train.replica import Ran, Replica, Seat
from flowengine.train.trainer import AHEAD_CALLS, WORKERS_MAX, Pace, Trainer, ends_of

GROUPS_MAX = 3  # made one after the other without a step


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
        self.seats = [Seat(self.name, size, rank, timeout_s, "recover") for rank in range(size)]
        self.step = 0  # so many the members have been asked for
        self.groups = 0  # that were made
        self.vain = 0  # of them without a step
        try:
            flow.get([member.ready.remote() for member in self.members])
            self.gather()
        except BaseException:
            self.close()
            raise

    def steps(self, count: int) -> Iterator[tuple[int, float]]:
        """Do so many more steps; gives the number and the mean loss of each, as they are done.

        Who stops reading stops after the calls that are under way, two of steps_per_call steps.
        """
        count = self.checked(count)
        yield from self.rest(self.step, self.step + count)

    def weights(self) -> Any:
        """The weights as they are now, as arrays of the caller's own."""
        self.checked(0)
        end = self.step
        while True:
            for _ in self.rest(end, end):
                pass
            try:
                return flow.get(self.members[0].weights.remote(), copy=True)
            except MemberLost as error:
                self.gather(error)

    def rest(self, told: int, end: int) -> Iterator[tuple[int, float]]:
        """The steps up to the end; gives those that were not told yet."""
        ahead: deque[tuple[int, list[flow.ObjectRef]]] = deque()
        lost = ""
        self.pace.begin()
        while ahead or lost or self.step < end:
            if lost and not ahead:
                self.gather(MemberLost(lost))
                lost = ""
                self.pace.begin()
            while not lost and self.step < end and len(ahead) < AHEAD_CALLS:
                some = min(end - self.step, self.pace.chosen())
                ahead.append((some, [member.run.remote(some) for member in self.members]))
                self.step += some
            if not ahead:
                continue
            some, refs = ahead.popleft()
            ran = furthest(self.all_of(refs))
            lost = lost or ran.lost
            if ran.losses:
                self.vain = 0
            if not ran.lost:
                self.pace.ended(some)
            for step, loss in enumerate(ran.losses, ran.first):
                if step >= told:
                    told = step + 1
                    yield step, loss

    def gather(self, lost: FlowError | None = None) -> None:
        """Have the members sit in a new group, as one was lost, and go on from the state of who is furthest."""
        while True:
            if lost is not None and self.vain >= GROUPS_MAX:
                self.fail([lost])
            self.groups, self.vain = self.groups + 1, self.vain + 1
            name = self.name if self.groups == 1 else f"{self.name} {self.groups}"
            seats = [seat._replace(name=name) for seat in self.seats]
            refs = [member.join.remote(seat) for member, seat in zip(self.members, seats, strict=True)]
            steps, errors = ends_of(refs)
            if not errors:
                self.step = steps[0]
                return
            if not all(isinstance(error, (MemberLost, CollectiveTimeout)) for error in errors):
                self.fail(errors)
            lost = errors[0]


def furthest(ran: list[Ran]) -> Ran:
    """Of the member that has done the most steps."""
    return max(ran, key=lambda one: one.first + len(one.losses))
