"""What policies ask for: nodes, amounts, ways in turn; and clocks of tenants against max-min by water-filling."""
from __future__ import annotations

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flowengine as flow
from flowengine.core.bundles import BundleSet
from flowengine.options import task_options
from flowengine.scheduling import affinity, anti_affinity, fair_share, gang, node, soft, spread
from flowengine.scheduling.gangs import Gang, PlacementGroup
from flowengine.scheduling.policies import Policy, Way, meet, patience_of, share_of
from flowengine.scheduling.shares import OTHERS, OWN, Shares

CPU = (("CPU", 1.0),)
EXPECTED_S = 0.005
DISK = Policy(needs=(("disk", 1.0),))
LISTS = st.lists(st.sampled_from("abcd"), unique=True).map(tuple)
NODES = st.one_of(st.just(()), LISTS.filter(bool), LISTS.map(lambda names: (*names, "*")))


def allowed(nodes: tuple[str, ...], name: str) -> bool:
    return not nodes or name in nodes or nodes[-1] == "*"


@given(NODES, NODES)
def test_nodes_that_both_allow(first, then):
    met = meet(first, then)
    for name in "abcdx":
        both = allowed(first, name) and allowed(then, name)
        assert both == (allowed(met, name) if met or not (first or then) else False)
    liked = [name for name in met if name != "*" and name in first]
    assert liked == [name for name in first if name in liked]


def test_both_adds_amounts_and_leaves_nodes_that_all_allow():
    assert (soft([node("a"), node("b")]) & node("b") & DISK).ways(CPU) == (Way((("CPU", 1.0), ("disk", 1.0)), ("b",)),)
    assert (DISK & DISK).ways(())[0].shape == (("disk", 2.0),)
    with pytest.raises(flow.BadValue, match="no node is allowed by all"):
        (node("a") & node("b")).ways(CPU)


def test_what_others_need_is_not_of_the_bundle_in_any_order():
    place = gang([{"CPU": 1}])[0]
    wanted = tuple(sorted((*place.ways(CPU)[0].shape, ("disk", 1.0))))
    for policy in (place & DISK, DISK & place, node("a") & (DISK & place), Policy(alternatives=(place,)) & DISK):
        assert policy.ways(CPU)[-1].shape == wanted
    assert [way.shape for way in (DISK & (place | node("a"))).ways(CPU)] == [wanted, (("CPU", 1.0), ("disk", 1.0))]


def test_either_tries_one_after_the_other():
    ways = (node("a") | (DISK & node("b"))).ways(CPU)
    assert ways == (Way(CPU, ("a",)), Way((("CPU", 1.0), ("disk", 1.0)), ("b",)))
    mixed = (node("a") | node("b")) & (node("b") | Policy())
    assert [way.nodes for way in mixed.ways(CPU)] == [("a",), ("b",), ("b",)]


def test_soft_ranks_nodes_alone_and_tries_the_rest_in_turn():
    assert soft([node("a"), node("b")]) == Policy(("a", "b", "*"))
    assert soft([]) == Policy(("*",))
    assert soft([node("a"), DISK]).ways(()) == (Way((), ("a",)), Way((("disk", 1.0),)), Way(()))


def test_the_most_patient_part_counts():
    slow = Policy(patience_s=3.0)
    assert patience_of(soft([DISK, slow & node("a")])) == 3.0


class Counting(Policy, frozen=True):
    """An own policy with hooks, as a user writes it."""

    def turn(self, plan):
        return node("a")


def test_policies_with_hooks_keep_them_in_company_and_when_pickled():
    for policy in (Counting(), Counting() & DISK, DISK | Counting()):
        assert policy.hooked()
        assert cloudpickle.loads(cloudpickle.dumps(policy)) == policy
    assert not (DISK & node("a") | Policy()).hooked()
    assert (Counting() & DISK).turn(None).ways(()) == (Way((("disk", 1.0),), ("a",)),)


@pytest.mark.parametrize("bad", ["a", 1, [node("a")], Policy, flow.scheduling.spread])
def test_what_is_no_policy_is_refused_where_it_is_given(bad):
    with pytest.raises(flow.BadType, match="placement must be a policy"):
        task_options({"placement": bad})
    for use in (lambda: soft([bad]), lambda: node("a") & bad, lambda: node("a") | bad):
        with pytest.raises(flow.BadType):
            use()


@pytest.mark.parametrize("bad", [{"nodes": "abc"}, {"nodes": (1,)}, {"needs": {"disk": 1}}, {"needs": (("disk",),)}])
def test_a_policy_of_ones_own_has_tuples(bad):
    with pytest.raises(flow.BadType, match="Policy"):
        Policy(**bad)


def test_a_policy_that_was_not_called_is_named():
    with pytest.raises(flow.BadType, match=r"call it: spread\(\.\.\.\)"):
        task_options({"placement": flow.scheduling.spread})


@pytest.mark.parametrize("bad", [node, 3, None, "", "*"])
def test_node_takes_an_id(bad):
    with pytest.raises((flow.BadType, flow.BadValue), match="node_id"):
        node(bad)


def test_soft_takes_a_list():
    with pytest.raises(flow.BadType, match="list of policies"):
        soft(node("a"))


@pytest.mark.parametrize("label", ["", "a@b", "x" * 201, "line\nbreak", 7, None])
def test_labels(label):
    for policy in (flow.scheduling.anti_affinity, flow.scheduling.affinity):
        with pytest.raises((flow.BadType, flow.BadValue)):
            policy(label)


@pytest.mark.parametrize("bad", [[], [1], {"a": 1}, 2.5, ["label"]])
def test_affinity_takes_references_actors_or_a_label(bad):
    with pytest.raises((flow.BadType, flow.BadValue), match="affinity takes"):
        flow.scheduling.affinity(bad)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_per_node_is_a_whole_number(bad):
    with pytest.raises((flow.BadType, flow.BadValue), match="per_node"):
        flow.scheduling.anti_affinity("x", per_node=bad)


# --- shares -------------------------------------------------------------------------------------------


def test_shares_are_paths_of_names_and_weights():
    one = fair_share("one", 2)
    a = fair_share("A", weight=3, parent=one)
    assert share_of(a) == (("one", 2.0), ("A", 3.0))
    assert share_of(node("n") & a) == share_of(soft([a, node("n")])) == share_of(a)
    with pytest.raises(flow.BadValue, match="one fair share"):
        task_options({"placement": a & one})


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), "2", None, True])
def test_a_weight_is_a_number_above_0(weight):
    with pytest.raises((flow.BadType, flow.BadValue), match="weight"):
        fair_share("A", weight)


@pytest.mark.parametrize("parent", ["org", node("a"), 1])
def test_a_parent_is_another_share(parent):
    with pytest.raises((flow.BadType, flow.BadValue), match="parent"):
        fair_share("A", parent=parent)
    with pytest.raises(flow.BadType, match="name"):
        fair_share("")


def test_an_actor_has_no_share():
    @flow.remote
    class Actor:
        pass

    with pytest.raises(flow.BadValue, match="no fair share"):
        Actor.options(placement=fair_share("A"))


def run(shares: Shares, demand: dict, seconds: float, cpus: int, cost: dict) -> dict:
    """Serve tenants that always have tasks that wait, on so many CPUs; gives the CPU time of each."""
    running: list[tuple[float, tuple]] = [(0.0, ())] * cpus
    used = dict.fromkeys(demand, 0.0)
    while True:
        at, path = running.pop(running.index(min(running)))
        if at >= seconds:
            return used
        if path:
            shares.used(path, cost[path] - EXPECTED_S)
        path = shares.first(demand)
        shares.began(path, EXPECTED_S)
        used[path] += min(cost[path], seconds - at)
        running.append((at + cost[path], path))


ORG = (("org1", 1.0),)
A, B, C = (*ORG, ("A", 2.0), OWN), (*ORG, ("B", 3.0), OWN), (("org2", 1.0), ("C", 1.0), OWN)


def arrive(shares: Shares, *paths: tuple) -> None:
    for path in paths:
        shares.came(path)


def test_two_organisations_whose_tenants_join_one_after_the_other():
    shares, cost = Shares(), {A: 0.02, B: 0.05, C: 0.011}
    for members, wanted in (
        ((A,), {A: 1.0}), ((A, B), {A: 0.4, B: 0.6}), ((A, B, C), {A: 0.2, B: 0.3, C: 0.5}),
    ):  # fmt: skip
        arrive(shares, members[-1])
        used = run(shares, dict.fromkeys(members), 40.0, 2, cost)
        for path, share in wanted.items():
            assert used[path] / sum(used.values()) == pytest.approx(share, rel=0.01)
    shares.went(A)  # what A leaves is its own organisation's
    used = run(shares, dict.fromkeys((B, C)), 40.0, 2, cost)
    assert used[B] / sum(used.values()) == pytest.approx(0.5, rel=0.01)


def test_what_was_idle_is_not_paid_back():
    shares, cost = Shares(), {A: 0.01, B: 0.01, C: 0.01}
    arrive(shares, A)
    run(shares, {A: None}, 50.0, 1, cost)
    arrive(shares, B)
    used = run(shares, dict.fromkeys((A, B)), 10.0, 1, cost)
    assert used[A] == pytest.approx(4.0, rel=0.02)
    shares.went(B)
    run(shares, {A: None}, 50.0, 1, cost)
    arrive(shares, B)
    used = run(shares, dict.fromkeys((A, B)), 10.0, 1, cost)
    assert used[A] == pytest.approx(4.0, rel=0.02)


def test_a_tenant_has_work_of_its_own_beside_its_parts_and_others_have_none():
    own, part = (*ORG, OWN), (*ORG, ("A", 1.0), OWN)
    shares = Shares()
    arrive(shares, own, part, OTHERS)
    used = run(shares, dict.fromkeys((own, part, OTHERS)), 100.0, 2, dict.fromkeys((own, part, OTHERS), 0.03))
    total = sum(used.values())
    assert used[OTHERS] / total == pytest.approx(0.5, rel=0.01)
    assert used[own] / total == pytest.approx(0.25, rel=0.01)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=6,
                unique_by=lambda one: one[0]), st.integers(1, 4))
def test_shares_go_by_weight_however_long_tasks_are(tenants, cpus):
    paths = {((name, float(weight)), OWN): length / 100 for name, weight, length in tenants}
    shares = Shares()
    arrive(shares, *paths)
    used = run(shares, dict.fromkeys(paths), 20.0, cpus, paths)
    weights = sum(path[0][1] for path in paths)
    for path in paths:
        assert used[path] / (20.0 * cpus) == pytest.approx(path[0][1] / weights, abs=0.015)


def test_tenants_of_one_name_have_one_weight_and_one_parent():
    shares = Shares()
    one = fair_share("one")
    for policy in (fair_share("A", 2, one), fair_share("A", 2, fair_share("one")), one):
        shares.check("job", (*share_of(policy), OWN))
    with pytest.raises(flow.BadValue, match="UTF-8"):
        fair_share("\ud800")
    shares.check("another job", (*share_of(fair_share("A", 3)), OWN))
    for policy in (fair_share("A", 3, one), fair_share("A", 2), fair_share("B", parent=fair_share("one", 5))):
        with pytest.raises(flow.BadValue, match=r"there is a fair_share '(A|one)' already, of weight"):
            shares.check("job", (*share_of(policy), OWN))


# --- what is wrong about own ones ------------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "words"), [
    ({"nodes": 3}, "nodes as"),
    ({"nodes": "abc"}, "nodes as"),
    ({"nodes": (1,)}, "nodes as"),
    ({"nodes": ("*", "a")}, "only at the end"),
    ({"nodes": ("\ud800",)}, "UTF-8"),
    ({"needs": (("\ud800", 1.0),)}, "UTF-8"),
    ({"needs": 3}, "needs as"),
    ({"needs": (("b", "x"),)}, "needs as .* not with .'b', 'x'"),
    ({"needs": (("b", True),)}, "needs as"),
    ({"needs": ("ab",)}, "needs as"),
    ({"needs": (("b", -1),)}, "amounts from 0"),
    ({"needs": (("b", float("nan")),)}, "amounts from 0"),
    ({"alternatives": (3,)}, "alternatives"),
    ({"alternatives": DISK}, "alternatives"),
    ({"near": 3}, "near"),
    ({"patience_s": -1}, "patience_s"),
    ({"patience_s": "x"}, "patience_s"),
])
def test_a_bad_policy_is_refused_where_it_is_made(fields, words):
    with pytest.raises((flow.BadType, flow.BadValue), match=words):
        Policy(**fields)


class Answers(Policy, frozen=True, kw_only=True):
    """Hooks give what they are told to."""

    gives: object

    def asked(self, shape):
        return self.gives

    def turn(self, plan):
        return self.gives


@pytest.mark.parametrize("gives", [7, (), (CPU,), ((("b", "x"),), ()), (CPU, "ab"), (CPU, (1,)), (dict(CPU), ())])
def test_bad_answers_of_own_hooks_are_told_with_the_name_of_the_hook(gives):
    with pytest.raises(flow.BadType, match=r"Answers\.asked gives"):
        Answers(gives=gives).ways(CPU)
    with pytest.raises(flow.BadType, match=r"Answers\.turn gives a policy"):
        (Answers(gives=gives) & DISK).turn(None)


def test_amounts_in_any_order_are_put_in_order():
    assert Answers(gives=((("b", 1), ("a", 2)), ())).ways(()) == (Way((("a", 2.0), ("b", 1.0))),)
    assert Policy(needs=(("b", 1), ("a", 2))).ways(()) == (Way((("a", 2.0), ("b", 1.0))),)


@pytest.mark.parametrize("whole", [
    Gang(BundleSet("gang-1", (CPU,), "PACK")), PlacementGroup(BundleSet("group-1", (CPU,), "PACK")),
])
def test_a_whole_set_of_bundles_is_no_placement(whole):
    for use in (lambda: task_options({"placement": whole}), lambda: soft([whole])):
        with pytest.raises(flow.BadType, match=r"the whole \S+.* take a bundle: (gang|group)\[0\]"):
            use()


def test_policies_are_shown_as_they_are_made():
    one = fair_share("one", 2)
    for policy, words in (
        (Policy(), "Policy()"),
        (node("65ff"), "node('65ff')"),
        (soft([node("a"), node("b")]), "soft([node('a'), node('b')])"),
        (soft([DISK, node("a")]), "soft([Policy(needs=(('disk', 1.0),)), node('a')])"),
        (fair_share("A", parent=one), "fair_share('A', 1, parent=fair_share('one', 2))"),
        (spread() & (DISK | node("a")), "spread() & (Policy(needs=(('disk', 1.0),)) | node('a'))"),
        (affinity("team") | anti_affinity("db"), "affinity('team') | anti_affinity('db', 1)"),
        (Policy(needs=(("@actor:0123456789abcdef", 1.0),)), "affinity(actor 0123456789ab)"),
        (Counting(), "Counting()"),
        (Answers(gives=1, nodes=("a",)), "Answers(nodes=('a',), gives=1)"),
    ):
        assert repr(policy) == words
