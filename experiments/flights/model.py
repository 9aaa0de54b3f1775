"""A logistic regression in rounds: pure functions over numpy arrays; no engine, no clock, no files.

One round: every part gives its share of the gradient at the trial point, a tree adds them up in a fixed order,
and `Descent` decides the next trial point or that it has arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from experiments.flights.tables import Encoded, Floats, Ints

T = TypeVar("T")
FANOUT = 4
RIDGE = 1e-4  # makes the optimum unique although one-hot blocks are linearly dependent
SCORE_BINS = 4096


def tree(items: Sequence[T], merge: Callable[..., T], fanout: int = FANOUT) -> T:
    """All items merged level by level, neighbours first; the shape depends only on how many there are."""
    level = list(items)
    while len(level) > 1:
        groups = [level[start : start + fanout] for start in range(0, len(level), fanout)]
        level = [merge(*group) if len(group) > 1 else group[0] for group in groups]
    return level[0]


# ------------------------------------------------------------ one part's share


class Share(NamedTuple):
    """The meaning of the vector that `share` returns and the tree adds up."""

    gradient: Floats
    loss: float
    held_loss: float


def logits(codes: Ints, weights: Floats) -> Floats:
    """The sum of the weights of each flight's columns, feature by feature, so that the order is fixed."""
    total: Floats = weights[codes[0]]
    for column in codes[1:]:
        total += weights[column]
    return total


def log_loss(z: Floats, late: Floats) -> Floats:
    """The negative log likelihood of each outcome, without overflow."""
    losses: Floats = np.maximum(z, 0) - z * late + np.log1p(np.exp(-np.abs(z)))
    return losses


def probability(z: Floats) -> Floats:
    """The logistic function, without overflow."""
    small = np.exp(-np.abs(z))
    chance: Floats = np.where(z >= 0, 1, small) / (1 + small)
    return chance


def share(part: Encoded, weights: Floats) -> Floats:
    """Gradient, loss and held-out loss of one part at `weights`, as sums in one vector (see Share)."""
    z = logits(part.train, weights)
    excess = probability(z) - part.train_late
    result = np.zeros(len(weights) + 2)
    for column in part.train:
        result[:-2] += np.bincount(column, weights=excess, minlength=len(weights))
    result[-2] = log_loss(z, part.train_late).sum()
    result[-1] = log_loss(logits(part.held, weights), part.held_late).sum()
    return result


def census(part: Encoded, columns: int) -> Ints:
    """How often each column occurs in training, then: flights and late ones in training and held out."""
    result = np.zeros(columns + 4, dtype=np.int64)
    for column in part.train:
        result[:-4] += np.bincount(column, minlength=columns)
    result[-4:] = len(part.train_late), part.train_late.sum(), len(part.held_late), part.held_late.sum()
    return result


class Census(NamedTuple):
    """The added-up result of `census`, taken apart."""

    columns: Ints
    train: int
    train_late: int
    held: int
    held_late: int

    @classmethod
    def of(cls, total: Ints) -> Census:
        """Takes the vector apart."""
        return cls(total[:-4], *(int(value) for value in total[-4:]))


def objective(total: Floats, weights: Floats, seen: Census) -> Share:
    """The mean loss with its ridge, its gradient, and the mean held-out loss, from the added-up shares."""
    gradient = total[:-2] / seen.train + RIDGE * weights
    loss = float(total[-2]) / seen.train + RIDGE / 2 * dot(weights, weights)
    return Share(gradient, loss, float(total[-1]) / max(seen.held, 1))


def dot(left: Floats, right: Floats) -> float:
    """The inner product by numpy's own summation: BLAS may add in another order on another number of threads."""
    return float(np.sum(left * right))


# ------------------------------------------------------------ the descent


@dataclass
class Descent:
    """L-BFGS as a state machine: evaluate at `trial`, tell `observe`, until `done`; decides, evaluates nothing."""

    curvature: Floats  # a guess at the diagonal of the Hessian, from how common each column is
    tolerance: float
    memory: int = 20
    rounds: int = 0
    done: bool = False
    trial: Floats = field(init=False)
    weights: Floats = field(init=False)
    loss: float = float("inf")
    gradient: Floats = field(init=False)
    step: float = 1.0
    direction: Floats = field(init=False)
    pairs: deque[tuple[Floats, Floats]] = field(init=False)

    def __post_init__(self) -> None:
        self.trial = np.zeros_like(self.curvature)
        self.weights = self.gradient = self.direction = self.trial
        self.pairs = deque(maxlen=self.memory)

    def observe(self, at_trial: Share) -> None:
        """Takes the objective at the trial point: accepts it, or shortens the step."""
        self.rounds += 1
        promised = dot(self.gradient, self.trial - self.weights)
        if self.rounds > 1 and at_trial.loss > self.loss + 1e-4 * promised + 1e-15:
            self.step /= 2
            # Below this the loss changes by less than rounding: the point is as good as floats can tell.
            self.done = self.step < 1e-8
        else:
            self.accept(at_trial)
        self.trial = self.weights + self.step * self.direction

    def accept(self, at_trial: Share) -> None:
        """Moves to the trial point and chooses the next direction there."""
        moved, turned = self.trial - self.weights, at_trial.gradient - self.gradient
        if self.rounds > 1 and dot(moved, turned) > 1e-12 * dot(turned, turned):
            self.pairs.append((moved, turned))
        self.weights, self.loss, self.gradient = self.trial, at_trial.loss, at_trial.gradient
        self.done = self.slope() <= self.tolerance
        self.step, self.direction = 1.0, -self.quasi_newton(self.gradient)

    def slope(self) -> float:
        """The largest component of the gradient."""
        return float(np.max(np.abs(self.gradient)))

    def quasi_newton(self, gradient: Floats) -> Floats:
        """The gradient times the estimated inverse Hessian (the two-loop recursion of L-BFGS)."""
        q, shares = gradient.copy(), []
        for moved, turned in reversed(self.pairs):
            shares.append(dot(moved, q) / dot(moved, turned))
            q -= shares[-1] * turned
        q /= self.curvature
        for (moved, turned), portion in zip(self.pairs, reversed(shares), strict=True):
            q += (portion - dot(turned, q) / dot(moved, turned)) * moved
        return q


def first_curvature(seen: Census, features: int) -> Floats:
    """A cautious diagonal for the first step: one-hot columns of different features add up in every flight."""
    late_share = seen.train_late / seen.train
    return np.asarray(seen.columns / seen.train * late_share * (1 - late_share) * features / 4 + RIDGE)


# ------------------------------------------------------------ the judgement


def score(part: Encoded, weights: Floats) -> Ints:
    """Counts of held-out flights by predicted probability: row 0 on time, row 1 late."""
    chance = probability(logits(part.held, weights))
    level = np.minimum((chance * SCORE_BINS).astype(np.int64), SCORE_BINS - 1)
    cell = part.held_late.astype(np.int64) * SCORE_BINS + level
    return np.bincount(cell, minlength=2 * SCORE_BINS).reshape(2, SCORE_BINS)


class Judgement(NamedTuple):
    """What the held-out flights say about the model."""

    flights: int
    base_rate: float
    base_accuracy: float
    accuracy: float
    auc: float
    late_in_worst_tenth: float


def judge(counts: Ints) -> Judgement:
    """Accuracy, area under the curve (a tie counts half) and the share of late ones in the worst tenth."""
    on_time, late = counts
    flights, late_total = int(counts.sum()), int(late.sum())
    below = np.cumsum(on_time) - on_time
    auc = float(np.sum(late * (below + on_time / 2))) / max(late_total * (flights - late_total), 1)
    half = SCORE_BINS // 2
    from_worst = np.cumsum(counts[:, ::-1], axis=1)
    tenth = int(np.searchsorted(from_worst.sum(axis=0), flights / 10))
    base_rate = late_total / flights
    return Judgement(
        flights=flights,
        base_rate=base_rate,
        base_accuracy=max(base_rate, 1 - base_rate),
        accuracy=float(on_time[:half].sum() + late[half:].sum()) / flights,
        auc=auc,
        late_in_worst_tenth=float(from_worst[1, tenth] / from_worst[:, tenth].sum()),
    )


def base_loss(seen: Census) -> float:
    """The held-out log loss of always predicting the share of late flights seen in training."""
    chance, late = seen.train_late / seen.train, seen.held_late / max(seen.held, 1)
    return float(-late * np.log(chance) - (1 - late) * np.log(1 - chance))


# ------------------------------------------------------------ another way to the same optimum


def newton(whole: Encoded, columns: int, tolerance: float) -> tuple[Floats, float]:
    """Weights and loss at the optimum, by Newton's method with the full Hessian, over all flights at once."""
    weights = np.zeros(columns)
    seen = Census.of(census(whole, columns))
    for _ in range(50):
        here = objective(share(whole, weights), weights, seen)
        if np.max(np.abs(here.gradient)) <= tolerance:
            break
        chance = probability(logits(whole.train, weights))
        weights = weights - np.linalg.solve(hessian(whole, chance * (1 - chance), columns), here.gradient)
    return weights, objective(share(whole, weights), weights, seen).loss


def hessian(whole: Encoded, spread: Floats, columns: int) -> Floats:
    """The second derivative of the objective; one-hot columns need one weighted count for each pair of features."""
    total = np.zeros(columns * columns)
    features = whole.train
    for i, left in enumerate(features):
        for right in features[i + 1 :]:
            total += np.bincount(left * columns + right, weights=spread, minlength=columns * columns)
    square = total.reshape(columns, columns)
    square = square + square.T
    for column in features:
        square[np.diag_indices(columns)] += np.bincount(column, weights=spread, minlength=columns)
    return square / len(spread) + RIDGE * np.eye(columns)
