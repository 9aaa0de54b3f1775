"""Training loops on a live engine: weights after deaths, members that come and go, what user code raises."""

from __future__ import annotations

import math
import os
import signal
from typing import Any

import numpy as np
import pytest

import flowengine as flow
from flowengine.train.elastic import has_died
from flowengine.train.trainer import Trainer
from tests.cluster.kit import gone, two_workers, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90)]
WIDTH = 20
PATIENCE_S = 40


@pytest.fixture(scope="module", autouse=True)
def engine():
    yield from two_workers()


class Line:
    """Learns the numbers 0, 1, 2, ... as the weights of a line."""

    def __init__(self, fault: str = "") -> None:
        self.weights = np.zeros(WIDTH)
        self.fault = fault
        self.mean = math.nan
        if fault == "made":
            raise KeyError(fault)

    def gradient(self, step: int, rank: int, size: int) -> Any:
        if self.fault == "gradient" and rank == size - 1 and step:
            raise ZeroDivisionError(self.fault)
        if self.fault == "form":
            return "a word"
        x = np.random.default_rng([step, rank]).normal(size=(64, WIDTH))
        error = x @ (self.weights - np.arange(WIDTH))
        self.mean = float(np.mean(error**2))
        return x.T @ error / len(x)

    def apply(self, gradient: Any) -> None:
        if self.fault == "apply":
            raise KeyError(self.fault)
        self.weights = self.weights - 0.1 * gradient

    def loss(self) -> float:
        return self.mean


class Silent:
    """Tells no loss; its weights are a dict of two arrays."""

    def __init__(self) -> None:
        self.weights = {"w": np.zeros(3, np.float32), "steps": np.zeros(1, np.int64)}

    def gradient(self, step: int, rank: int, size: int) -> Any:
        return [np.full(3, rank, np.float32)]

    def apply(self, gradient: Any) -> None:
        self.weights = {"w": self.weights["w"] + gradient[0], "steps": self.weights["steps"] + 1}


def each_weights(trainer: Trainer) -> list[bytes]:
    found = flow.get([member.weights.remote() for member in trainer.members], timeout=PATIENCE_S)
    return [one.tobytes() for one in found]


# --- synchronous ----------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", ["adaptive", "never"])
def test_weights_and_losses_are_the_same_whoever_dies(checkpoint: str) -> None:
    found = []
    for victims in ([], [2], [0, 1]):
        with flow.train.DataParallel(Line, workers=3, steps_per_call=5, checkpoint=checkpoint) as trainer:
            losses = []
            for step, loss in trainer.steps(60):
                losses.append(loss)
                if step == 29:
                    for victim in victims:
                        flow.chaos.kill_worker(of=trainer.members[victim])
            assert len(set(each_weights(trainer))) == 1
            found.append((losses, trainer.weights().tobytes()))
    assert found[0] == found[1] == found[2]
    assert found[0][0][-1] < found[0][0][0] / 100


def test_the_weights_do_not_depend_on_how_steps_are_cut_into_calls() -> None:
    found = set()
    for steps_per_call in (None, 1, 13):
        with flow.train.DataParallel(Line, workers=2, steps_per_call=steps_per_call) as trainer:
            assert trainer.run(0) == []
            assert len(trainer.run(7)) == 7
            assert [step for step, _ in trainer.steps(20)] == list(range(7, 27))
            found.add(trainer.weights().tobytes())
    assert len(found) == 1


def test_what_is_read_no_further_is_done_and_counted() -> None:
    with flow.train.DataParallel(Line, workers=2, steps_per_call=3) as trainer:
        for step, _ in trainer.steps(100):
            if step == 4:
                break
        assert next(trainer.steps(1))[0] == 9  # 6 of the calls that were read, and 3 of the one under way


def test_a_model_without_a_loss_and_with_weights_in_a_dict() -> None:
    with flow.train.DataParallel(Silent, workers=3) as trainer:
        assert all(math.isnan(loss) for loss in trainer.run(4))
        weights = trainer.weights()
        assert weights["w"].tolist() == [4, 4, 4]
        assert weights["w"].dtype == np.float32
        weights["w"] += 1  # they are the caller's own
        assert trainer.weights()["steps"].tolist() == [4]


# --- a whole host is lost, and with it what its group kept -----------------------------------------


class Uneven(Line):
    """Of one rank there is never a checkpoint, so after the death of all it is behind the others."""

    def __init__(self, left: int, heavy: bool = True) -> None:
        super().__init__()
        self.left, self.rank, self.heavy = left, -1, heavy
        self.weights = [np.zeros(WIDTH), np.zeros(WIDTH)]  # the second: momenta
        self.momenta = np.zeros(WIDTH)

    def gradient(self, step: int, rank: int, size: int) -> Any:
        self.rank = rank
        x = np.random.default_rng([step, rank]).normal(size=(64, WIDTH))
        error = x @ (self.weights[0] - np.arange(WIDTH))
        self.mean = float(np.mean(error**2))
        return x.T @ error / len(x)

    def apply(self, gradient: Any) -> None:
        self.momenta = 0.5 * (self.weights[1] if self.heavy else self.momenta) + gradient
        self.weights = [self.weights[0] - 0.03 * self.momenta, self.momenta * self.heavy]

    def __getstate__(self) -> dict[str, Any]:
        if self.rank == self.left:
            raise ValueError("not this one")
        return self.__dict__


def kill_the_node_of(trainer: Trainer) -> None:
    pids = trainer.pids()
    flow.chaos.kill_node(flow.nodes()[0].node_id)
    until(lambda: all(gone(pid) for pid in pids))


@pytest.mark.parametrize("left", [0, 2])
def test_members_that_lost_what_was_kept_go_on_from_the_one_that_is_furthest(left: int) -> None:
    found = []
    for kills in (False, True):
        with flow.train.DataParallel(Uneven, left, workers=3, steps_per_call=2, checkpoint=1) as trainer:
            told = list(trainer.steps(8))
            for step, loss in trainer.steps(12):
                told.append((step, loss))
                if kills and step == 11:
                    kill_the_node_of(trainer)
            if kills:
                assert trainer.groups > 1
                assert len(set(map(str, flow.get([one.weights.remote() for one in trainer.members])))) == 1
            found.append((told, np.stack(trainer.weights()).tobytes()))
    assert [step for step, _ in found[1][0]] == list(range(20))
    assert found[0] == found[1]


def test_weights_are_those_of_the_last_step_also_when_all_have_died_since() -> None:
    found = []
    for kills in (False, True):
        with flow.train.DataParallel(Uneven, 0, workers=2, steps_per_call=2, checkpoint=1) as trainer:
            trainer.run(8)
            if kills:
                kill_the_node_of(trainer)
                with pytest.raises(flow.MemberLost):
                    flow.get(trainer.members[0].weights.remote(), timeout=PATIENCE_S)
            found.append(np.stack(trainer.weights()).tobytes())
    assert found[0] == found[1]


def test_what_is_not_in_the_weights_cannot_be_brought_on_and_is_told() -> None:
    with flow.train.DataParallel(Uneven, 1, False, workers=2, steps_per_call=2, checkpoint=1) as trainer:
        trainer.run(8)
        kill_the_node_of(trainer)
        with pytest.raises(ValueError, match="All that `apply` uses has to be in `weights`, such as momenta"):
            trainer.run(2)


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [flow.train.DataParallel, flow.train.Elastic])
@pytest.mark.parametrize(("fault", "error"), [
    ("gradient", ZeroDivisionError), ("apply", KeyError), ("form", TypeError),
])  # fmt: skip
def test_what_the_model_raises_comes_through_at_once(kind: Any, fault: str, error: type[Exception]) -> None:
    with kind(Line, fault, workers=2, timeout_s=PATIENCE_S * 10) as trainer:
        with pytest.raises(error, match="a word" if fault == "form" else fault):
            trainer.run(5)
        with pytest.raises(ValueError, match="does no more steps: a step failed"):
            trainer.run(1)


def test_a_server_tells_what_the_model_raises() -> None:
    for fault in ("apply", "form"):
        with (
            flow.train.ParameterServer(Line, fault, workers=2) as trainer,
            pytest.raises((KeyError, TypeError), match=r"apply|word"),
        ):
            trainer.run(3)


@pytest.mark.parametrize("kind", [flow.train.DataParallel, flow.train.Elastic, flow.train.ParameterServer])
def test_a_model_that_cannot_be_made(kind: Any) -> None:
    with pytest.raises(KeyError, match="made"):
        kind(Line, "made", workers=2)
    with pytest.raises(ValueError, match="workers"):
        kind(Line, workers=0)
    with pytest.raises(ValueError, match="nonsense"):
        kind(Line, workers=1, nonsense=1)
    with pytest.raises(TypeError, match="is a class"):
        kind(Line())


class Bare:
    """Has all methods and no weights."""

    def gradient(self, step: int, rank: int, size: int) -> Any:
        return np.zeros(1)

    def apply(self, gradient: Any) -> None: ...


@pytest.mark.parametrize("kind", [flow.train.DataParallel, flow.train.Elastic])
def test_a_model_without_weights_is_told_at_once(kind: Any) -> None:
    with pytest.raises(TypeError, match="'weights'"):
        kind(Bare, workers=2, timeout_s=PATIENCE_S * 10)


def test_an_end_is_an_end() -> None:
    trainer = flow.train.DataParallel(Line, workers=1)
    trainer.run(1)
    trainer.close()
    trainer.close()
    with pytest.raises(ValueError, match="it was closed"):
        trainer.run(1)
    with pytest.raises(ValueError, match="it was closed"):
        trainer.weights()


# --- asynchronous ---------------------------------------------------------------------------------


class Slow(Line):
    """One rank takes for ever."""

    def gradient(self, step: int, rank: int, size: int) -> Any:
        if rank == 0:
            flow.get(flow.get_actor("gate").passed.remote())
        return super().gradient(step, rank, size)


@flow.remote(num_cpus=0)
class Gate:
    async def passed(self) -> None:
        import asyncio

        await asyncio.Event().wait()


def test_a_server_waits_for_the_first_gradients_only() -> None:
    gate = Gate.options(name="gate").remote()
    with flow.train.ParameterServer(Slow, workers=3, wait_for=2) as trainer:
        losses = trainer.run(60)
        assert losses[-1] < losses[0] / 100
        assert np.abs(trainer.weights() - np.arange(WIDTH)).max() < 5
    flow.kill(gate)


def test_a_worker_of_a_server_comes_back() -> None:
    with flow.train.ParameterServer(Line, workers=3, wait_for=3) as trainer:
        before = trainer.run(10)
        for member in (*trainer.members[:2], trainer.server):
            flow.chaos.kill_worker(of=member)
        after = trainer.run(60)
        assert after[-1] < before[0] / 100


class Wide:
    """Has weights and gradients that lie in stores."""

    def __init__(self) -> None:
        self.weights = np.zeros(50_000)

    def gradient(self, step: int, rank: int, size: int) -> Any:
        return self.weights - 1

    def apply(self, gradient: Any) -> None:
        self.weights = self.weights - 0.5 * gradient


def test_gradients_that_are_lost_are_asked_for_again() -> None:
    with flow.train.ParameterServer(Wide, workers=3, wait_for=2) as trainer:
        trainer.run(2)
        flow.wait(list(trainer.pending), num_returns=3, timeout=PATIENCE_S)
        for ref in trainer.pending:
            flow.chaos.lose(ref)
        trainer.run(30)
        assert np.abs(trainer.weights() - 1).max() < 0.01
        assert [step for step, _ in trainer.steps(1)] == [32]


def test_a_server_whose_node_is_lost_goes_on_from_what_is_left() -> None:
    with flow.train.ParameterServer(Wide, workers=3, wait_for=2, checkpoint="never") as trainer:
        trainer.run(5)
        kill_the_node_of(trainer)
        trainer.run(30)
        assert np.abs(trainer.weights() - 1).max() < 0.01


# --- members that come and go ---------------------------------------------------------------------


def test_the_others_go_on_and_newcomers_get_the_weights() -> None:
    with flow.train.Elastic(Line, workers=3, steps_per_call=5) as trainer:
        losses = trainer.run(10)
        os.kill(trainer.pids()[0], signal.SIGKILL)
        losses += trainer.run(20)
        assert len(trainer.members) == 2
        trainer.scale(5)
        until(lambda: trainer.run(5) and len(trainer.members) == 5)
        assert len(set(each_weights(trainer))) == 1
        trainer.scale(1)
        [number] = [step for step, _ in trainer.steps(1)]
        assert len(trainer.members) == 1
        assert number >= 35
        assert trainer.run(30)[-1] < losses[0] / 100


def test_one_dies_while_another_is_taken_in() -> None:
    with flow.train.Elastic(Line, workers=3, steps_per_call=5) as trainer:
        trainer.run(5)
        trainer.scale(4)
        flow.get([made for _, made in trainer.coming], timeout=PATIENCE_S)
        os.kill(trainer.pids()[0], signal.SIGKILL)
        trainer.run(10)
        assert len(trainer.members) == 3
        assert len(set(each_weights(trainer))) == 1


def test_a_newcomer_that_dies_is_gone_and_the_dead_are_not_counted() -> None:
    with flow.train.Elastic(Line, workers=2, steps_per_call=2) as trainer:
        trainer.scale(3)
        flow.kill(trainer.coming[0][0])
        until(lambda: trainer.run(1) and not trainer.coming)
        assert len(trainer.members) == 2
        os.kill(trainer.pids()[0], signal.SIGKILL)
        until(lambda: has_died(trainer.members[0].ready.remote()))
        trainer.scale(3)
        until(lambda: trainer.run(1) and len(trainer.members) == 3)
    with pytest.raises(ValueError, match="closed"):
        trainer.scale(4)


def test_when_all_have_died_it_is_over() -> None:
    with flow.train.Elastic(Line, workers=1) as trainer:
        trainer.run(2)
        os.kill(trainer.pids()[0], signal.SIGKILL)
        with pytest.raises(flow.ActorDied):
            trainer.run(2)
        with pytest.raises(ValueError, match="does no more steps"):
            trainer.run(1)


# --- modules of torch -----------------------------------------------------------------------------


@flow.remote(num_cpus=0)
class TorchMember:
    """Learns with a module of torch; each rank has other rows of one batch, and other weights at first."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(rank)
        module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.unused = torch.nn.Parameter(torch.ones(2))
        module.register_parameter("unused", self.unused)
        group = flow.collectives.join(name, size, rank)
        self.net = flow.train.torch.DistributedDataParallel(module, group, bucket_bytes=64)
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(7))
        self.x, self.y = x[rank::size], x[rank::size, :1]

    def step(self, rounds: int) -> tuple[int, list[Any]]:
        ahead = 0
        for _ in range(rounds):
            self.optimizer.zero_grad()
            with self.net.no_sync():
                ((self.net(self.x) - self.y) ** 2).mean().backward()
            assert not self.net.under_way
            ((self.net(self.x) - self.y) ** 2).mean().backward()
            ahead = len(self.net.under_way)
            self.net.synchronize()
            self.optimizer.step()
        return ahead, [one.detach().numpy().copy() for one in self.net.module.parameters()]


def test_modules_of_torch_learn_as_one() -> None:
    pytest.importorskip("torch")
    [(_, alone)] = flow.get([TorchMember.remote("one", 0, 1).step.remote(10)], timeout=80)
    members = [TorchMember.remote("two", rank, 2) for rank in range(2)]
    flow.get([member.step.remote(5) for member in members], timeout=80)
    flow.chaos.kill_worker(of=members[1])
    found = flow.get([member.step.remote(5) for member in members], timeout=80)
    for ahead, weights in found:
        assert ahead  # some were on their way before backward had ended
        for one, mine, other in zip(alone, weights, found[0][1], strict=True):
            assert np.array_equal(mine, other)
            assert np.allclose(mine, one, atol=1e-5)
