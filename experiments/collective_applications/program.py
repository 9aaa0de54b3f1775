"""Two applications over the hosts of a cluster: -m experiments.collective_applications.program ENGINE ASKED PLACE.

Asynchronous SGD: a server with the weights on the first host, a worker on each other one. The server waits for the
first few gradients, adds them up, and gives new weights to exactly those workers. Serving: each request is a batch that
all models of an ensemble see, one on each host; the answer is the class for which the sum of their outputs is highest.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.collectives.trial import tell

CLASSES, IMAGES = 1000, 64
WARM_UP = 2  # steps and requests that are not counted


class Worker:
    """One that makes gradients."""

    def __init__(self, number: int) -> None:
        self.number = number

    def gradient(self, weights: Any) -> Any:
        """As large as the weights, and made of them."""
        return weights * np.float32(0.1) + np.float32(self.number + 1)


class Model:
    """One of the ensemble."""

    def __init__(self, number: int) -> None:
        self.number = number

    def predict(self, batch: Any) -> Any:
        """A number for each image and class."""
        rows = batch.reshape(IMAGES, -1)
        return rows[:, :CLASSES] * np.float32(self.number + 1)


class Engine(NamedTuple):
    """What the applications ask of an engine."""

    put: Callable[[Any], Any]
    get: Callable[[Any], Any]
    wait: Callable[..., tuple[list[Any], list[Any]]]
    fold: Callable[[list[Any]], Any]  # the sum of the values, here
    actors: Callable[[type, Sequence[int]], list[Any]]  # one on each of these hosts


def with_flowengine(place: str, hosts: int) -> Engine:
    """A sum is folded on its way, a batch is passed on from host to host."""
    import flowengine as flow
    from experiments.collectives.with_flowengine import places

    flow.init(address=place) if place else flow.init(num_workers=2)
    return running([{"placement": one} for one in places(hosts)] if place else [{}] * hosts)


def running(options: Sequence[dict[str, Any]]) -> Engine:
    """The engine that runs, with options for the actors of each host."""
    import flowengine as flow

    def actors(kind: type, where: Sequence[int]) -> list[Any]:
        made = flow.remote(num_cpus=0)(kind)
        return [made.options(**options[host]).remote(host) for host in where]

    return Engine(flow.put, flow.get, flow.wait, lambda refs: flow.get(flow.reduce(refs)), actors)


def with_ray(place: str, hosts: int) -> Engine:
    """A sum is made where its inputs are fetched to, a batch is fetched by each reader."""
    import ray

    from experiments.collectives.with_ray import places

    ray.init(address=place, log_to_driver=False, logging_level="error")
    options = places(hosts)

    def actors(kind: type, where: Sequence[int]) -> list[Any]:
        made = ray.remote(num_cpus=0)(kind)
        return [made.options(scheduling_strategy=options[host]).remote(host) for host in where]

    def wait(refs: list[Any], num_returns: int) -> Any:
        return ray.wait(refs, num_returns=num_returns, fetch_local=False)

    return Engine(ray.put, ray.get, wait, lambda refs: sum(ray.get(refs)), actors)


ENGINES = {"flowengine": with_flowengine, "ray": with_ray}


def train(engine: Engine, hosts: int, nbytes: int, steps: int) -> list[float]:
    """Seconds of each step: until the server has new weights and has sent them on their way."""
    workers = engine.actors(Worker, range(1, hosts))
    first = max(1, len(workers) // 2)
    weights = np.zeros(nbytes // 4, "f4")
    source = engine.put(weights)
    under_way = {one.gradient.remote(source): one for one in workers}
    took = []
    for _ in range(WARM_UP + steps):
        began = time.perf_counter()
        ready, _ = engine.wait(list(under_way), num_returns=first)
        weights = weights - np.float32(0.01 / first) * engine.fold(ready)
        source = engine.put(weights)
        for one in ready:
            worker = under_way.pop(one)
            under_way[worker.gradient.remote(source)] = worker
        took.append(time.perf_counter() - began)
    if not np.isfinite(weights).all() or weights[0] != weights[-1] or not weights[0] < 0:
        raise ValueError(f"weights of {weights}")
    return took[WARM_UP:]


def serve(engine: Engine, hosts: int, nbytes: int, requests: int) -> list[float]:
    """Seconds of each request."""
    models = engine.actors(Model, range(hosts))
    batch = np.zeros((IMAGES, nbytes // 4 // IMAGES), "f4")
    took = []
    for number in range(WARM_UP + requests):
        wanted = number % CLASSES
        batch[:, wanted] = 1
        began = time.perf_counter()
        source = engine.put(batch)
        answer = np.argmax(engine.fold([one.predict.remote(source) for one in models]), axis=1)
        took.append(time.perf_counter() - began)
        if not (answer == wanted).all():
            raise ValueError(f"request {number}: {answer}")
        batch[:, wanted] = 0
    return took[WARM_UP:]


APPLICATIONS = {"asynchronous SGD": train, "serving an ensemble": serve}


def measure(engine: Engine, hosts: int, cases: Sequence[Any]) -> list[list[float]]:
    """Seconds of each step or request of each case."""
    return [APPLICATIONS[name](engine, hosts, nbytes, rounds) for name, nbytes, rounds in cases]


def main() -> None:
    """Measure and tell."""
    name, asked, place = sys.argv[1:]
    hosts, cases = json.loads(asked)
    tell(measure(ENGINES[name](place, hosts), hosts, cases))


if __name__ == "__main__":
    main()
