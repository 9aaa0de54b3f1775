"""Bundles: plans take nothing twice and miss nothing small, and a node keeps its laws whatever a head asks of it."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from flowengine.core import messages as m
from flowengine.core.bundles import bundle_name, bundle_of, in_bundle, is_gang
from flowengine.scheduling.bundling import arrange
from tests.laws.test_node_machine import HEAD, NodeMachine, pick

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
GROUPS = ("gang-1", "gang-2", "group-1")
SETS: tuple[tuple[m.Shape, ...], ...] = (
    ((("CPU", 1.0),),),
    ((("CPU", 1.0),), (("CPU", 1.0),)),
    ((("CPU", 0.5), ("GPU", 1.0)), (("CPU", 1.0),)),
    ((("CPU", 3.0),),),
    ((("GPU", 0.5),), (("CPU", 0.5), ("GPU", 0.75))),
    ((("GPU", 2.0),),),
)
MEMBERS: tuple[m.Shape, ...] = ((("CPU", 1.0),), (("GPU", 0.5),), (("GPU", 1.0),))
amounts = st.fixed_dictionaries({"CPU": st.integers(0, 3), "GPU": st.integers(0, 1)})


def is_right(nodes, bundles, strategy, plan) -> bool:
    left = {node: dict(have) for node, have in nodes.items()}
    for index, node in plan.items():
        for name, count in bundles[index]:
            left[node][name] -= count
    used = list(plan.values())
    apart = strategy != "STRICT_SPREAD" or len(dict.fromkeys(used)) == len(used)
    together = strategy != "STRICT_PACK" or len(dict.fromkeys(used)) <= 1
    return apart and together and all(count >= 0 for have in left.values() for count in have.values())


@settings(max_examples=200, deadline=None)
@given(
    st.lists(amounts, min_size=1, max_size=3), st.lists(amounts, min_size=1, max_size=4), st.sampled_from(STRATEGIES)
)  # fmt: skip
def test_a_plan_is_right_and_is_found_when_there_is_one(have, want, strategy):
    nodes = {f"n{index}": amount for index, amount in enumerate(have)}
    bundles = [tuple((name, count) for name, count in bundle.items() if count) for bundle in want]
    plan = arrange(nodes, bundles, strategy, {})
    if plan is not None:
        assert sorted(plan) == list(range(len(bundles)))
        assert is_right(nodes, bundles, strategy, plan)
        return
    for places in itertools.product(nodes, repeat=len(bundles)):
        assert not is_right(nodes, bundles, strategy, dict(enumerate(places)))


class BundleMachine(NodeMachine):
    """A node as its owners and a head see it that reserves, opens and drops at will."""

    gpus = ("4", "6")

    def __init__(self) -> None:
        self.turn = 0
        self.taken: list[tuple[str, int]] = []
        self.inside: dict[tuple[str, m.Shape], int] = {}  # granted, by owner and shape
        super().__init__()

    def heard(self, to: str, message: m.Message) -> None:
        if isinstance(message, m.LeaseGranted) and bundle_of(message.shape):
            self.leases[message.lease] = to
            self.inside[to, message.shape] = self.inside.get((to, message.shape), 0) + 1
        elif isinstance(message, m.BundlesTaken) and not message.refused:
            self.taken.append((message.group, message.turn))
        else:
            super().heard(to, message)

    def gone(self, address: str) -> None:
        super().gone(address)
        for key in [key for key in self.inside if key[0] == address]:
            del self.inside[key]

    @rule(group=st.sampled_from(GROUPS), bundles=st.sampled_from(SETS), hold_s=st.sampled_from((0.0, 1.0)))
    def head_asks(self, group: str, bundles: tuple[m.Shape, ...], hold_s: float) -> None:
        self.turn += 1
        self.tell(m.BundlesAsked(group, self.turn, tuple(enumerate(bundles)), hold_s), HEAD)

    @precondition(lambda self: self.taken)
    @rule(which=pick)
    def head_opens(self, which: int) -> None:
        self.tell(m.BundlesOpened(*self.taken.pop(which % len(self.taken))), HEAD)

    @rule(group=st.sampled_from(GROUPS), why=st.sampled_from(("", "it was removed")))
    def head_drops(self, group: str, why: str) -> None:
        self.tell(m.BundlesDropped(group, 0, why), HEAD)

    @precondition(lambda self: self.alive())
    @rule(
        which=pick, bundle=st.tuples(st.sampled_from(GROUPS), st.integers(0, 1)), count=st.integers(0, 2),
        needs=st.sampled_from(MEMBERS),
    )  # fmt: skip
    def member_comes(self, which: int, bundle: tuple[str, int], count: int, needs: m.Shape) -> None:
        owner, shape = self.alive()[which % len(self.alive())], in_bundle(needs, bundle_name(*bundle))
        self.tell(m.LeaseDemand(shape, (), self.inside.get((owner, shape), 0) + count, 0, 0), owner)

    @rule(wanted=st.booleans())
    def gang_is_wanted(self, wanted: bool) -> None:
        for owner in self.drivers:
            self.tell(m.GangWanted(m.BundleSet("gang-1", SETS[0]), wanted), owner)

    @rule()
    def head_is_another(self) -> None:
        self.taken = []
        self.tell(m.NodeAccepted(max(1, self.node.desk.epoch), (self.node.entry(),)), HEAD)

    def teardown(self) -> None:
        """What is given back is free again."""
        for group in GROUPS:
            self.tell(m.BundlesDropped(group, 0, "the end"), HEAD)
        for key in list(self.inside):
            self.tell(m.LeaseDemand(key[1], (), 0, 0, 0), key[0])
        super().teardown()
        assert [name for name in self.node.leases.ledger.names() if "@" in name] == []


def test_a_gang_is_known_by_its_name():
    assert [is_gang(group) for group in GROUPS] == [True, True, False]


BundleMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestBundleMachine = BundleMachine.TestCase
