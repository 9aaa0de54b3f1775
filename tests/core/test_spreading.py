"""Even over nodes: the emptiest is found without a look at all of them; gangs over many nodes likewise."""

from __future__ import annotations

import types
from random import Random

import pytest

from flowengine.core.messages import NodeEntry
from flowengine.scheduling import spreading
from flowengine.scheduling.bundling import Plan, Table, arrange

CPU = (("CPU", 1.0),)


def nodes(count: int) -> tuple[NodeEntry, ...]:
    return tuple(NodeEntry(f"n{number}", f"a{number}", "h", CPU, CPU) for number in range(count))


@pytest.mark.parametrize("seed", range(3))
def test_the_emptiest_is_the_one_that_a_look_at_all_finds(monkeypatch, seed):
    dice, ended, known = Random(seed), set(), [nodes(7)]
    monkeypatch.setattr(spreading, "is_under_way", lambda session, oid: oid not in ended)
    session = types.SimpleNamespace(all_nodes=lambda: known[0])
    count = spreading.Count(seed)
    for call in range(600):
        if call and dice.random() < 0.6:
            ended.add(dice.randrange(call))
        if dice.random() < 0.02:
            known[0] = nodes(dice.randrange(5, 12))
        count.look(session)
        count.able(session, CPU)
        found = count.emptiest()
        assert found == min(count.chance, key=count.place_of)
        count.add(found, call)


class CountingPlan(Plan):
    """Counts how often a node's price is worked out."""

    priced = 0

    def price(self, node: str) -> tuple[float, float, str]:
        self.priced += 1
        return super().price(node)


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_SPREAD"])
def test_many_like_bundles_cost_one_look_at_all_nodes(strategy):
    free: Table = {f"n{number}": {"CPU": 40_000 + number % 7 * 10_000} for number in range(300)}
    plan = CountingPlan(free, [(("CPU", 10_000),)] * 300, strategy, {})
    assert plan.greedily()
    assert plan.priced <= 600
    assert plan.chosen == arrange(free, [(("CPU", 10_000),)] * 300, strategy, {})


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_SPREAD"])
def test_each_bundle_goes_to_the_node_that_is_liked_best_then(strategy):
    dice = Random(7)
    for _ in range(40):
        free: Table = {f"n{number}": {"CPU": dice.randrange(1, 6), "GPU": dice.randrange(3)} for number in range(9)}
        bundles = [(("CPU", dice.randrange(1, 3)), ("GPU", dice.randrange(2))) for _ in range(6)]
        plan, slow = Plan(free, bundles, strategy, {}), Plan(free, bundles, strategy, {})
        found = plan.greedily()
        for index in slow.missing:
            able = slow.able(bundles[index])
            if not able:
                assert not found
                break
            slow.put(index, min(able, key=slow.price))
        else:
            assert found
            assert plan.chosen == slow.chosen
