"""A member of a synchronous loop: an actor that has a copy of the model and a seat in the group."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import flowengine as flow
from flowengine.collectives.group import Group
from flowengine.train.models import loss_of, weights_of


class Seat(NamedTuple):
    """Where a member sits."""

    name: str
    size: int
    rank: int
    timeout_s: float
    on_failure: str
    number: int = 0  # who sits there, whatever its rank becomes


class Lived:
    """What this process has done: not part of a checkpoint, so steps that are repeated count again."""

    steps = 0


class Replica:
    """Steps of all members end with the same mean of their gradients, so their models stay the same."""

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.model = model(*args)
        self.step = 0
        self.group: Group | None = None
        self.number = 0

    def join(self, seat: Seat) -> int:
        """Take a seat, and the weights of rank 0 with it; gives the size of the group."""
        self.group = flow.collectives.join(
            seat.name, seat.size, seat.rank, timeout_s=seat.timeout_s, on_failure=seat.on_failure
        )
        self.number = seat.number
        self.meet()
        return self.group.size

    def meet(self) -> list[int]:
        """All members hear who is there, and go on together."""
        there = self.seated().allgather(self.number)
        self.share()
        return [int(number) for number in there]

    def share(self) -> None:
        """All members go on from the weights and the step of rank 0."""
        group = self.seated()
        if group.rank == 0:
            group.broadcast([self.step, weights_of(self.model)])
        else:
            self.step, self.model.weights = group.broadcast()

    def seated(self) -> Group:
        """The group, in which every member is before it runs."""
        assert self.group is not None
        return self.group

    def run(self, steps: int) -> tuple[int, list[float]]:
        """So many steps; gives the number of the first, and the mean losses, which are the same on all ranks."""
        group, losses, first = self.seated(), [], self.step
        for _ in range(steps):
            try:
                given = [self.model.gradient(self.step, group.rank, group.size), loss_of(self.model)]
            except Exception as error:
                self.give_up(error)
            gradient, loss = group.allreduce(given, op="mean")
            try:
                self.model.apply(gradient)
            except Exception as error:
                self.give_up(error)
            self.step += 1
            Lived.steps += 1
            losses.append(loss)
        return first, losses

    def give_up(self, error: Exception) -> NoReturn:
        """Raise what the model raised; the others hear of it in the step that they are in, or come to next."""
        try:
            self.seated().allreduce(error)  # nobody can take that: it is a difference that is told to all
        except flow.FlowError:
            pass  # of course
        raise error

    def admit(self) -> list[int]:
        """Take in who waits, who gets the weights then; gives the numbers of all who are there."""
        self.seated().admit()
        return self.meet()  # always: sizes do not tell whether one has come when another has died meanwhile

    def leave(self) -> None:
        """Give the seat up."""
        self.seated().leave()

    def ready(self) -> bool:
        """The model is made."""
        return True

    def pid(self) -> int:
        """The process of now."""
        return os.getpid()

    def weights(self) -> Any:
        """Those of the model."""
        return weights_of(self.model)

    def steps_here(self) -> int:
        """How many steps this process has done, repeated ones too."""
        return Lived.steps
