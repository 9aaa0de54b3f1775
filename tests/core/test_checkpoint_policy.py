"""When an actor checkpoints and when a result is written: tables, laws, and the machine of an actor that asks."""
from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.actor_host import ActorHost, CallEnded, HostReady, Rested
from flowengine.core.actor_saving import StateSaved
from flowengine.core.ids import child_id
from flowengine.recovery import checkpoint as k
from flowengine.recovery.checkpoint import Why, Work
from flowengine.recovery.failures import Lives, failure_rate_per_s
from flowengine.recovery.stash import Stash

ACTOR, CALLER, OWNER, CALLER_AT = b"a" * 16, b"A" * 16, "owner", "at-a"
costs = st.floats(1e-4, 100.0)
rates = st.floats(1e-7, 10.0)


def work(cost_s: float = 0.1, **more: Any) -> Work:
    return Work(cost_s=cost_s, is_measured=True, **more)


@pytest.mark.parametrize(("policy", "done", "now", "why"), [
    ("never", work(calls=9_000_000, run_s=1e9), 1e9, None),
    ("adaptive", work(), 1e9, None),
    ("adaptive", work(calls=3, run_s=0.5), 9.0, None),
    ("adaptive", work(calls=3, run_s=50.0), 9.0, Why.WORK),
    ("adaptive", work(calls=1, run_s=3.0), 9.0, Why.WORK),  # now is nearer to 3.4 s than after one more
    ("adaptive", work(calls=100, run_s=3.0), 9.0, None),
    ("adaptive", work(calls=k.LOG_CALLS_MAX), 0.0, Why.LOG_CALLS),
    ("adaptive", work(calls=1, log_bytes=k.LOG_BYTES_MAX), 0.0, Why.LOG_BYTES),
    ("3", work(calls=2, run_s=1e9), 1e9, None),
    ("3", work(calls=3), 0.0, Why.COUNT),
    ("2s", work(calls=1, last_at=5.0), 6.9, None),
    ("2s", work(calls=1, last_at=5.0), 7.0, Why.PERIOD),
    ("2s", work(calls=0, last_at=5.0), 99.0, None),
])
def test_when_a_checkpoint_is_due(policy, done, now, why):
    assert k.due(policy, done, now) is why


def test_the_interval_is_that_of_young_and_daly_for_rare_failures():
    assert k.daly_s(0.1, 1e-4) == pytest.approx(math.sqrt(2 * 0.1 / 1e-4), rel=0.01)
    assert k.daly_s(1.0, 2.0) == 0.5  # so short a life that it is the mean time between failures


@given(cost=costs, rate=rates)
def test_the_interval_costs_no_more_than_longer_and_shorter_ones(cost, rate):
    best = k.daly_s(cost, rate)
    if cost * rate < 0.5:
        def time_of(interval):
            return math.expm1(rate * (interval + cost)) / interval

        assert time_of(best) <= 1.02 * min(time_of(best * part) for part in (0.5, 0.8, 1.25, 2.0))


@given(cost=costs, more=st.floats(1.01, 10.0), rate=st.floats(1e-7, 0.005))
def test_the_interval_grows_with_the_cost_and_shrinks_with_the_rate(cost, more, rate):
    if cost * more * rate * more < 1.0:
        assert k.daly_s(cost * more, rate) >= k.daly_s(cost, rate)
        assert k.daly_s(cost, rate * more) <= k.daly_s(cost, rate)


@given(calls=st.integers(0, 10**7), run_s=st.floats(0, 1e6), log=st.integers(0, 10**10), deaths=st.integers(0, 100),
       lived=st.floats(0, 1e7), cost=costs, policy=st.sampled_from(["adaptive", "7", "3s", "never"]))
def test_nothing_is_due_without_a_call_and_a_full_log_always_is(calls, run_s, log, deaths, lived, cost, policy):
    done = work(cost, calls=calls, run_s=run_s, log_bytes=log, deaths=deaths, lived_s=lived)
    why = k.due(policy, done, 100.0)
    assert why is None or (calls > 0 and policy != "never")
    if policy == "adaptive" and calls > 0 and (calls >= k.LOG_CALLS_MAX or log >= k.LOG_BYTES_MAX):
        assert why is not None
    if policy == "adaptive" and calls > 0 and run_s >= k.INSURANCE * cost:
        assert why is not None  # what costs so little is always worth it
    assert k.told(policy, done, 100.0)


@given(deaths=st.integers(0, 50), lived=st.floats(0, 1e6), others=st.floats(1e-6, 1.0))
def test_a_death_makes_failures_likelier_and_life_makes_them_rarer(deaths, lived, others):
    rate = failure_rate_per_s(deaths, lived, others)
    assert failure_rate_per_s(deaths + 1, lived, others) > rate > failure_rate_per_s(deaths, lived + 60.0, others)


def test_the_rate_is_learnt():
    assert failure_rate_per_s(100, 1_000.0) == pytest.approx(0.1, rel=0.1)
    assert failure_rate_per_s(0, 1e6) < 1e-5


def test_the_lives_of_several_are_added_up():
    lives = Lives()
    lives.begin(10.0)
    lives.begin(20.0)
    assert lives.lived_s(30.0) == 30.0
    lives.end(10.0, 40.0, True)
    assert (lives.lived_s(60.0), lives.deaths, lives.alive) == (70.0, 1, 1)


@pytest.mark.parametrize(("rerun_s", "write_s", "rate", "due"), [
    (10.0, 0.01, 1 / 864_000, False),
    (1_000.0, 0.1, 1 / 864_000, True),
    (1.0, 0.01, 0.1, True),
    (0.1, 0.01, 0.1, False),
    (5.0, 10.0, 100.0, False),  # never when writing takes longer than making it again
])
def test_when_a_result_is_written(rerun_s, write_s, rate, due):
    assert k.persist_due(rerun_s, write_s, rate) is due


# --- the machine of an actor asks -------------------------------------------------------------------------------------


class Hosted:
    """An adaptive actor in a hand-driven process, with a clock."""

    def __init__(self, odds: m.Odds | None = None, attempt: int = 1) -> None:
        spec = m.TaskSpec(ACTOR, b"f", "C", life=m.ActorLife())
        self.host = ActorHost(m.PushTask(spec, attempt, 1, run=attempt, odds=odds), OWNER, "me", Stash())
        self.out: list[Any] = []
        self.seq = 0
        self.tell(0.0, HostReady(None))

    def tell(self, at: float, event: Any) -> list[Any]:
        self.host.now, self.host.out = at, []
        self.host.told(event, "")
        self.out = self.host.out
        return self.out

    def call(self, began: float, ended: float, args: bytes = b"", seen: bool = False) -> None:
        actor = m.RefTo(ACTOR + bytes(4), OWNER)
        spec = m.TaskSpec(child_id(CALLER, self.seq), b"m", "m", args=args, actor=actor, caller_key=CALLER)
        self.host.now, self.host.out = began, []
        self.host.call_came(m.PushTask(spec, 1, 0, seq=self.seq, seen=seen), CALLER_AT)
        self.seq += 1
        self.tell(ended, CallEnded(spec.id, m.TaskDone(spec.id, 1, (), int((ended - began) * 1e6))))

    def saved(self, at: float) -> None:
        self.tell(at, StateSaved(self.host.calls, m.Checkpoint(self.host.calls, m.Inline(b"")), 0.1))

    def saves(self) -> int:
        return sum(isinstance(command, c.SaveState) for command in self.out)

    def rests(self) -> list[tuple[float, Rested]]:
        return [(one.delay_s, one.event) for one in self.out
                if isinstance(one, c.SetTimer) and isinstance(one.event, Rested)]


def test_the_first_checkpoint_teaches_its_cost():
    hosted = Hosted()
    hosted.call(1.0, 2.0)
    assert (hosted.saves(), hosted.host.why) == (1, Why.WORK)
    hosted.saved(3.0)
    assert hosted.host.work.cost_s == pytest.approx(1.0, rel=0.01)
    hosted.call(3.0, 4.0)
    assert hosted.saves() == 0


def with_uncovered_work() -> Hosted:
    hosted = Hosted()
    hosted.call(1.0, 2.0)
    hosted.saved(2.1)
    hosted.call(3.0, 3.5)
    assert hosted.saves() == 0
    return hosted


def test_an_actor_with_nothing_to_do_checkpoints_for_free():
    hosted = with_uncovered_work()
    [(delay_s, event)] = hosted.rests()
    assert delay_s == pytest.approx(1.0, rel=0.02)  # ten times as long as a checkpoint takes
    hosted.tell(4.5, event)
    assert (hosted.saves(), hosted.host.why) == (1, Why.IDLE)
    hosted.saved(4.6)
    assert hosted.rests() == []  # no timer runs when there is nothing to cover


def test_a_rest_that_is_disturbed_begins_anew():
    hosted = with_uncovered_work()
    [(_, event)] = hosted.rests()
    hosted.call(3.6, 3.7)
    assert hosted.rests() == []  # one timer is enough
    hosted.tell(4.5, event)
    assert hosted.saves() == 0
    [(_, again)] = hosted.rests()
    hosted.tell(5.5, again)
    assert hosted.saves() == 1


def test_work_that_is_cheap_to_repeat_sets_no_timer():
    hosted = with_uncovered_work()
    hosted.tell(4.5, hosted.rests()[0][1])
    hosted.saved(4.6)
    hosted.call(5.0, 5.01)
    assert hosted.rests() == []


def test_what_the_owner_has_seen_shortens_the_interval():
    calm, wild = Hosted(m.Odds(0, 900.0, 1e-5)), Hosted(m.Odds(9, 90.0, 0.1))
    for hosted in (calm, wild):
        hosted.call(1.0, 2.0)
        hosted.saved(2.1)
        hosted.call(3.0, 4.6)
    assert (calm.saves(), wild.saves()) == (0, 1)
    calm.tell(4.7, m.CheckpointKept(ACTOR, 1, 0.5))  # others die often meanwhile
    assert k.interval_s(calm.host.work) < 4.0


def test_a_long_replay_is_checkpointed_on_its_way():
    hosted = Hosted(attempt=2)
    turns = (("turn", 0, CALLER + bytes(8)),)
    hosted.tell(0.0, m.CallersKnown(ACTOR, (CALLER_AT,), turns, 10))
    hosted.call(1.0, 2.0, seen=True)
    assert hosted.host.recovering
    assert hosted.saves() == 1  # if it dies again this need not be done again


def test_arguments_that_callers_keep_are_counted():
    hosted = with_uncovered_work()
    before = hosted.host.work.log_bytes
    hosted.call(3.6, 3.7, b"x" * 1_000)
    assert hosted.host.work.log_bytes == before + 1_000


def test_it_tells_why():
    text = "\n".join(with_uncovered_work().host.explain())
    for part in ("adaptive", "measured", "interval", "1 calls, 0.5 s of work", "taken by this process: 1", "waits for"):
        assert part in text
