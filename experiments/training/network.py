"""A network with one hidden layer as flow.train asks for it: gradient, apply, weights, loss."""

from __future__ import annotations

from typing import Any

import numpy as np

import flowengine as flow
from experiments.flights import model
from experiments.training.features import Flights, Singles

HIDDEN = 256
BATCH = 512  # flights of each rank in a step
RATE, MOMENTUM = 0.01, 0.9
JUDGE_ROWS = 8192

Weights = dict[str, Singles]


class Network:
    """Foretells whether a flight is late; learns by gradients with momentum."""

    def __init__(self, flights: list[Any]) -> None:
        """flights: a list with a reference to them, so that it stays a reference."""
        [self.ref] = flights
        self.flights = Flights(*flow.get(self.ref))
        self.weights = first_weights(len(self.flights.center))
        self.speed = {name: np.zeros_like(one) for name, one in self.weights.items()}
        self.mean_loss = 0.0

    def gradient(self, step: int, rank: int, size: int) -> Weights:
        """That of a batch of this rank's own, chosen by the number of the step."""
        rows = np.random.default_rng(step).integers(0, len(self.flights.late), (size, BATCH))[rank]
        x, late = self.flights.wide(rows), self.flights.late[rows]
        hidden, z = forward(self.weights, x)
        self.mean_loss = float(np.mean(model.log_loss(z, late)))
        excess = ((model.probability(z) - late) / len(late)).astype(np.float32)
        back = excess[:, np.newaxis] * self.weights["out"] * (1 - hidden * hidden)
        level = excess.sum(keepdims=True)
        return {"in": x.T @ back, "bias": back.sum(axis=0), "out": hidden.T @ excess, "level": level}

    def apply(self, gradient: Weights) -> None:
        """A step down, with momentum."""
        for name, one in gradient.items():
            self.speed[name] = np.float32(MOMENTUM) * self.speed[name] - np.float32(RATE) * one
            self.weights[name] = self.weights[name] + self.speed[name]

    def loss(self) -> float:
        """The mean loss of the last batch."""
        return self.mean_loss

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "flights": None}  # they stay in shared memory, and are not part of a checkpoint

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.flights = Flights(*flow.get(self.ref))


def first_weights(columns: int) -> Weights:
    """The same on all ranks."""
    rng = np.random.default_rng(2013)
    return {
        "in": (rng.normal(size=(columns, HIDDEN)) / np.sqrt(columns)).astype(np.float32),
        "bias": np.zeros(HIDDEN, np.float32),
        "out": (rng.normal(size=HIDDEN) / HIDDEN).astype(np.float32),
        "level": np.zeros(1, np.float32),
    }


def forward(weights: Weights, x: Singles) -> tuple[Singles, Singles]:
    """What the hidden layer gives, and the logits."""
    hidden = np.tanh(x @ weights["in"] + weights["bias"])
    return hidden, hidden @ weights["out"] + weights["level"]


def judge(weights: Weights, held: Flights) -> model.Judgement:
    """What flights that were not learnt from say about the weights."""
    counts = np.zeros(2 * model.SCORE_BINS, np.int64)
    for begin in range(0, len(held.late), JUDGE_ROWS):
        rows = np.arange(begin, min(begin + JUDGE_ROWS, len(held.late)))
        chance = model.probability(forward(weights, held.wide(rows))[1])
        level = np.minimum((chance * model.SCORE_BINS).astype(np.int64), model.SCORE_BINS - 1)
        counts += np.bincount(held.late[rows].astype(np.int64) * model.SCORE_BINS + level, minlength=len(counts))
    return model.judge(counts.reshape(2, model.SCORE_BINS))
