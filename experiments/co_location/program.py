"""Boards that ask their models for each move, placed in three ways: MODULE ASKED FILE."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import numpy as np

import flowengine as flow
from experiments.collectives.trial import tell
from experiments.collectives.with_flowengine import places
from flowengine.scheduling import affinity, anti_affinity

SHAPE = (17, 19, 19)  # of what a board looks like to a model: eight moves of two colours, and whose turn it is
WARM_UP_MOVES = 20


@flow.remote(num_cpus=0)
class Model:
    """Says what it thinks of a position."""

    def __init__(self, seed: int) -> None:
        self.weights = np.random.default_rng(seed).standard_normal(SHAPE).astype("f4")

    def evaluate(self, position: Any) -> Any:
        """A value for each point of the board."""
        return (self.weights * position).sum(axis=0)


@flow.remote(num_cpus=0)
class Board:
    """Plays, one move after the other."""

    def play(self, model: Any, moves: int) -> list[float]:
        """Seconds that each move took."""
        position = np.zeros(SHAPE, "f4")
        taken = []
        for number in range(WARM_UP_MOVES + moves):
            began = time.perf_counter()
            values = flow.get(model.evaluate.remote(position))
            position[number % 2].flat[int(values.argmax())] = 1
            taken.append(time.perf_counter() - began)
        return taken[WARM_UP_MOVES:]


Pair = tuple[Any, Any]


def by_policies(pairs: int) -> list[Pair]:
    """The library's: each model on a host of its own as far as there are hosts, each board where its model is."""
    per_node = -(-pairs // len(flow.nodes()))
    models = [Model.options(placement=anti_affinity("model", per_node=per_node)).remote(seed) for seed in range(pairs)]
    return [(model, Board.options(placement=affinity(model)).remote()) for model in models]


def by_hand(pairs: int, hosts: list[Any]) -> list[Pair]:
    """The hosts are written into the program."""
    chosen = [hosts[number % len(hosts)] for number in range(pairs)]
    models = [Model.options(placement=place).remote(seed) for seed, place in enumerate(chosen)]
    return [(model, Board.options(placement=place).remote()) for model, place in zip(models, chosen, strict=True)]


def by_chance(pairs: int, hosts: list[Any], rng: random.Random) -> list[Pair]:
    """As many on each host as the other ways have, but without regard to who talks to whom."""
    chosen = [hosts[number % len(hosts)] for number in range(pairs)]
    boards = rng.sample(chosen, pairs)
    models = [Model.options(placement=place).remote(seed) for seed, place in enumerate(chosen)]
    return [(model, Board.options(placement=place).remote()) for model, place in zip(models, boards, strict=True)]


def main() -> None:
    """All ways in turns, each time with new actors; tell the seconds of all moves of each way."""
    pairs, moves, rounds, seed = json.loads(sys.argv[1])
    rng = random.Random(seed)
    found: dict[str, list[float]] = {"policies": [], "hand": [], "chance": []}
    with flow.init(address=sys.argv[2]):
        hosts = places(2)
        ways = {"policies": lambda: by_policies(pairs), "hand": lambda: by_hand(pairs, hosts),
                "chance": lambda: by_chance(pairs, hosts, rng)}
        for _ in range(rounds):
            for way, placed in ways.items():
                made = placed()
                for taken in flow.get([board.play.remote(model, moves) for model, board in made]):
                    found[way].extend(taken)
                del made
    tell(found)


if __name__ == "__main__":
    main()
