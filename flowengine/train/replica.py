"""A member of a synchronous loop: an actor that has a copy of the model and a seat in the group."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import flowengine as flow
from flowengine.collectives.group import Group
from flowengine.core.actor_saving import CheckpointAsked
from flowengine.errors import BadValue, MemberLost
from flowengine.refs import current_session
from flowengine.train.models import content_of, loss_of, weights_of

UNMET = -1  # the step of a member that has no weights of others yet


class Ran(NamedTuple):
    """What came of a call of several steps."""

    first: int  # the number of the first
    losses: list[float]  # the mean of each step that was done, the same on all ranks
    lost: str = ""  # why the group does no more steps, and these are fewer


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
        self.step = UNMET
        self.group: Group | None = None
        self.number = 0
        self.lost = ""  # why the group does no more steps
        self.is_unsure = False  # some have weights of others, and nobody has seen yet that these are all it takes

    def join(self, seat: Seat) -> int:
        """Take a seat, and the weights of who is furthest with it; gives the number of the next step."""
        self.lost = f"group {seat.name!r} did not come together"
        if self.group is None:
            self.group = flow.collectives.join(
                seat.name, seat.size, seat.rank, timeout_s=seat.timeout_s, on_failure=seat.on_failure
            )
        else:
            self.group = self.group.again(seat.name)
            current_session().step(CheckpointAsked())  # what was before cannot be repeated
        self.number = seat.number
        self.meet()
        self.lost = ""
        return self.step

    def meet(self) -> list[int]:
        """All members hear who is there, and go on together from the weights and the step of who is furthest."""
        group, mine = self.seated(), weights_of(self.model)
        told = group.allgather([self.number, self.step, int(self.is_unsure)])
        numbers, steps, unsure = ([int(one[at]) for one in told] for at in range(3))
        step = max(steps)
        root = steps.index(step)
        given, weights = group.broadcast([self.step, mine] if group.rank == root else None, root)
        if given != step:  # it repeats this, from a state of before
            raise MemberLost(f"rank {root} of group {group.name!r} was furthest, and has died since")
        if self.step != step or (step == UNMET and group.rank != root):
            self.model.weights = weights
        self.step = max(step, 0)
        self.is_unsure = group.on_failure == "recover" and (min(steps) != step or any(unsure))
        return numbers

    def seated(self) -> Group:
        """The group, in which every member is before it runs."""
        assert self.group is not None
        return self.group

    def run(self, steps: int) -> Ran:
        """So many steps, or fewer when the group is lost."""
        losses: list[float] = []
        first = self.step
        try:
            if not self.lost:
                self.do_steps(steps, losses)
        except MemberLost as error:
            if self.seated().on_failure != "recover":
                raise
            self.lost = str(error)
        return Ran(first, losses, self.lost)

    def do_steps(self, steps: int, losses: list[float]) -> None:
        """So many steps; enters the mean loss of each when it is done."""
        group = self.seated()
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
            if self.is_unsure:
                self.compare()

    def compare(self) -> None:
        """Raise on all ranks when a step from the same weights has not led to the same again."""
        contents = self.seated().allgather(content_of(weights_of(self.model)))
        if any(content != contents[0] for content in contents):
            name = type(self.model).__name__
            raise BadValue(
                f"the model {name} cannot go on: after a death some members took over the weights of another, and one "
                "step later theirs differ. All that `apply` uses has to be in `weights`, such as momenta"
            )
        self.is_unsure = False

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
        if self.lost:
            raise MemberLost(self.lost)  # others may be further
        return weights_of(self.model)

    def steps_here(self) -> int:
        """How many steps this process has done, repeated ones too."""
        return Lived.steps
