"""Training with members that come and go: the others go on without a dead one, new ones are taken in on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flowengine as flow
from flowengine.actors import ActorHandle
from flowengine.errors import ActorDied
from flowengine.options import whole
from flowengine.train.models import checked_model
from flowengine.train.replica import Replica, Seat
from flowengine.train.trainer import WORKERS_MAX, Pace, Trainer, ends_with


class Elastic(Trainer):
    """One actor for each rank with a copy of Model(*args); who dies is gone, and scale() brings others.

    A gradient is asked for the rank and the size of now. Newcomers get the weights and the step of rank 0 between two
    calls. actor: options of the actors, such as num_cpus, num_gpus, placement.
    """

    def __init__(
        self, model: type, *args: Any, workers: int = 4, steps_per_call: int | None = None, timeout_s: float = 30.0,
        **actor: Any,
    ) -> None:  # fmt: skip
        super().__init__(checked_model(model))
        self.model, self.args = model, args
        self.kind = flow.remote(Replica).options(recovery="none", **actor)
        self.timeout_s = timeout_s
        self.pace = Pace(steps_per_call)
        self.coming: list[tuple[ActorHandle, flow.ObjectRef]] = []  # until their models are made
        self.going: list[ActorHandle] = []
        self.seats = 0  # that were given
        try:
            self.scale(workers)
            flow.get([made for _, made in self.coming])
            self.members = [member for member, _ in self.coming]
            self.coming = []
            self.first_of([member.join.remote(self.seat(workers, rank)) for rank, member in enumerate(self.members)])
        except BaseException:
            self.close()
            raise

    def scale(self, workers: int) -> None:
        """Go on with so many members, from the next call on or as soon as new ones are ready."""
        size = whole("workers", workers, 1, WORKERS_MAX)
        self.checked(0)
        self.members = living([(member, member.ready.remote()) for member in self.members]) or self.members
        self.going = [member for member in self.going if member in self.members]
        while len(self.members) - len(self.going) + len(self.coming) < size:
            member = self.kind.remote(self.model, self.args)
            self.coming.append((member, member.ready.remote()))
        while self.coming and len(self.members) - len(self.going) + len(self.coming) > size:
            flow.kill(self.coming.pop()[0])
        surplus = len(self.members) - len(self.going) - size
        if surplus > 0:
            self.going += [member for member in self.members if member not in self.going][-surplus:]

    def steps(self, count: int) -> Iterator[tuple[int, float]]:
        """Do so many more steps; gives the number and the mean loss of each, as they are done."""
        left = self.checked(count)
        self.pace.begin()
        while left:
            self.change()
            some = min(left, self.pace.chosen())
            ran = self.together("run", some)
            self.pace.ended(some)
            left -= some
            yield from enumerate(ran.losses, ran.first)

    def weights(self) -> Any:
        """The weights as they are now, as arrays of the caller's own."""
        self.checked(0)
        while len(self.members) > 1:
            try:
                return flow.get(self.members[0].weights.remote(), copy=True)
            except ActorDied:
                del self.members[0]
        return flow.get(self.members[0].weights.remote(), copy=True)

    def together(self, method: str, *args: Any) -> Any:
        """What a call of all members gives; those that have died are members no more."""
        refs = {member: getattr(member, method).remote(*args) for member in self.members}
        self.members = living(list(refs.items()))
        if not self.members:
            self.over = "all members have died"
        return self.first_of([refs[member] for member in self.members or refs])

    def change(self) -> None:
        """Between two calls: some go, and those whose models are made come in together."""
        for member in self.going:
            if member in self.members and len(self.members) > 1:
                self.members.remove(member)
                has_died(member.leave.remote())
            flow.kill(member)
        self.going = []
        made = dict(self.coming)
        if made and len(flow.wait(list(made.values()), num_returns=len(made), timeout=0)[0]) == len(made):
            self.coming = []
            newcomers = living(list(made.items()))
            flow.get([made[newcomer] for newcomer in newcomers])  # what a constructor raised
            self.admit(newcomers)

    def seat(self, size: int, rank: int) -> Seat:
        """A seat for somebody else than before."""
        self.seats += 1
        return Seat(self.name, size, rank, self.timeout_s, "shrink", self.seats)

    def admit(self, newcomers: list[ActorHandle]) -> None:
        """All members agree to take them in, as often as it takes: some may be slow to ask, or die."""
        entering: dict[int, tuple[ActorHandle, flow.ObjectRef]] = {}
        for rank, newcomer in enumerate(newcomers, len(self.members)):
            seat = self.seat(rank + 1, rank)
            entering[seat.number] = newcomer, newcomer.join.remote(seat)
        while entering:
            there = self.together("admit")
            for number, (newcomer, entered) in list(entering.items()):
                if number in there or flow.wait([entered], timeout=0)[0]:
                    del entering[number]
                    if not has_died(entered):  # it gets the weights
                        self.first_of([entered])
                        self.members.append(newcomer)

    def everybody(self) -> list[ActorHandle]:
        """All actors of the loop."""
        return [*self.members, *(member for member, _ in self.coming)]


def living(calls: list[tuple[ActorHandle, flow.ObjectRef]]) -> list[ActorHandle]:
    """Those whose calls have not ended with their death; waits for all ends."""
    return [member for member, ref in calls if not has_died(ref)]


def has_died(ref: flow.ObjectRef) -> bool:
    """Whether a call has ended with the death of its actor; waits for its end."""
    return ends_with(ref, ActorDied)
