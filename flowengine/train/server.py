"""Asynchronous training: a server takes the first gradients that are there, so nobody waits for the slow ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import flowengine as flow
from flowengine.actors import ActorHandle
from flowengine.errors import ObjectLost
from flowengine.options import whole
from flowengine.train.models import checked_model, loss_of, weights_of
from flowengine.train.trainer import WORKERS_MAX, Trainer, ends_with

LOST_MAX = 5  # attempts at one step


class ParameterServer(Trainer):
    """Workers give gradients at the weights that they last got; each step applies the mean of the first wait_for.

    A step is one update of the server's weights, which go to exactly those workers whose gradients were in it. Which
    these are depends on time, so two runs differ. actor: options of the actors, such as num_cpus, num_gpus, placement.
    """

    def __init__(
        self, model: type, *args: Any, workers: int = 4, wait_for: int | None = None, **actor: Any
    ) -> None:
        super().__init__(checked_model(model))
        size = whole("workers", workers, 1, WORKERS_MAX)
        self.wait_for = max(1, size // 2) if wait_for is None else whole("wait_for", wait_for, 1, size)
        self.step = 0
        self.server = flow.remote(Server).options(**actor).remote(model, args)
        self.members = [flow.remote(Worker).options(**actor).remote(model, args, rank, size) for rank in range(size)]
        self.pending: dict[flow.ObjectRef, ActorHandle] = {}  # the oldest first
        try:
            now = self.server.weights.remote()
            flow.get([now, *(member.ready.remote() for member in self.members)])
        except BaseException:
            self.close()
            raise
        for member in self.members:
            self.pending[member.gradient.remote(self.step, [now])] = member

    def steps(self, count: int) -> Iterator[tuple[int, float]]:
        """Do so many more steps; gives the number and the mean loss of each, as they are done."""
        for _ in range(self.checked(count)):
            loss = self.update()
            yield self.step - 1, loss

    def update(self) -> float:
        """One step; large gradients and weights that went with their node are asked for again."""
        for _ in range(LOST_MAX):
            first, _ = flow.wait(list(self.pending), num_returns=self.wait_for)
            loss, now = self.server.apply.options(num_returns=2).remote([flow.reduce(first, op="mean")])
            self.ask([self.pending.pop(ref) for ref in first], self.step + 1, now)
            if not ends_with(loss, ObjectLost):
                break
            self.pending = {}
            self.ask(self.members, self.step, self.server.weights.remote())
        self.step += 1
        return self.first_of([loss])  # type: ignore[no-any-return]

    def ask(self, members: list[ActorHandle], step: int, weights: flow.ObjectRef) -> None:
        """Have them compute gradients at these weights."""
        for member in members:
            self.pending[member.gradient.remote(step, [weights])] = member

    def weights(self) -> Any:
        """The weights as they are now, as arrays of the caller's own."""
        self.checked(0)
        return flow.get(self.server.weights.remote(), copy=True)

    def everybody(self) -> list[ActorHandle]:
        """All actors of the loop."""
        return [self.server, *self.members]


# What they are given they get inside of the call: in a process that comes back and repeats its calls, one whose input
# went with a node raises ObjectLost, which nobody hears, instead of ending the actor.


class Server:
    """Keeps the weights."""

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.model = model(*args)

    def apply(self, given: list[flow.ObjectRef]) -> tuple[float, Any]:
        """Change the weights; gives the mean loss, and them."""
        gradient, loss = flow.get(given[0])
        self.model.apply(gradient)
        return float(loss), weights_of(self.model)

    def weights(self) -> Any:
        """Those of the model."""
        return weights_of(self.model)


class Worker:
    """Gives gradients."""

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...], rank: int, size: int) -> None:
        self.model = model(*args)
        self.rank = rank
        self.size = size

    def ready(self) -> bool:
        """The model is made."""
        return True

    def gradient(self, step: int, weights: list[flow.ObjectRef]) -> list[Any]:
        """The gradient at these weights, and its loss."""
        self.model.weights = flow.get(weights[0])
        return [self.model.gradient(step, self.rank, self.size), loss_of(self.model)]

    def pid(self) -> int:
        """The process of now."""
        return os.getpid()
