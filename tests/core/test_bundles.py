"""Bundles: which nodes they go to, what a node makes of them, and how the head gets all of a set or none."""

from __future__ import annotations

import pytest

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.bundles import SPLIT, bundle_of, group_of, in_bundle, index_of, is_gang
from flowengine.core.head import Head, HeadBeat, HeadSettings
from flowengine.core.invariants import check
from flowengine.core.node import Node, NodeSettings
from flowengine.core.node_bundles import HoldEnded
from flowengine.scheduling.bundling import arrange, why_never, why_not_now
from flowengine.scheduling.resources import units_of
from tests.core.shell_kit import keep_rows

ONE = (("CPU", 1.0),)
TWO = (("CPU", 2.0),)
GPU = (("CPU", 1.0), ("GPU", 1.0))
CONFIG = Config(suspect_after_s=2.0, starve_s=2.0)


def table(**nodes: m.Shape) -> dict[str, dict[str, int]]:
    return {node: dict(units_of(shape)) for node, shape in nodes.items()}


def placed(free, bundles, strategy="PACK", fixed=None) -> str:
    plan = arrange(free, [units_of(shape) for shape in bundles], strategy, fixed or {})
    return "" if plan is None else "".join(plan[index] for index in sorted(plan))


CASES = [
    ("one node when it has room", dict(a=TWO, b=TWO), [ONE, ONE], "PACK", "aa"),
    ("the next when it has not", dict(a=TWO, b=ONE), [ONE, ONE, ONE], "PACK", "aab"),
    ("none when one is too many", dict(a=TWO, b=ONE), [ONE] * 4, "PACK", ""),
    ("large ones first", dict(a=(("CPU", 3.0),), b=TWO), [ONE, TWO, TWO], "PACK", "aab"),
    ("back and forth, as taking the best first does not do",
     dict(a=(("CPU", 6.0),), b=(("CPU", 5.0),)), [(("CPU", n),) for n in (4.0, 3.0, 2.0, 2.0)], "PACK", "abab"),
    ("as many nodes as there are", dict(a=TWO, b=TWO), [ONE, ONE, ONE], "SPREAD", "aba"),
    ("fewer when it must be", dict(a=(("CPU", 3.0),)), [ONE, ONE], "SPREAD", "aa"),
    ("a node each", dict(a=TWO, b=TWO), [ONE, ONE], "STRICT_SPREAD", "ab"),
    ("or none", dict(a=TWO, b=TWO), [ONE, ONE, ONE], "STRICT_SPREAD", ""),
    ("the large node for what needs it", dict(a=(("CPU", 4.0),), b=ONE), [ONE, (("CPU", 4.0),)], "STRICT_SPREAD", "ba"),
    ("one node", dict(a=ONE, b=TWO), [ONE, ONE], "STRICT_PACK", "bb"),
    ("or none at all", dict(a=ONE, b=TWO), [ONE, TWO], "STRICT_PACK", ""),
    ("what only one node has", dict(a=(("CPU", 8.0),), b=GPU), [ONE, GPU], "PACK", "ab"),
]


@pytest.mark.parametrize(("what", "nodes", "bundles", "strategy", "want"), CASES, ids=[case[0] for case in CASES])
def test_where_bundles_go(what, nodes, bundles, strategy, want):
    assert placed(table(**nodes), bundles, strategy) == want


def test_what_is_placed_stays_and_counts_for_the_strategy():
    assert placed(table(a=TWO, b=TWO), [ONE, ONE], "STRICT_SPREAD", {0: "a"}) == "b"
    assert placed(table(a=TWO, b=TWO), [ONE, ONE], "STRICT_PACK", {0: "b"}) == "b"
    assert placed(table(a=TWO, b=TWO), [ONE, ONE], "PACK", {0: "b"}) == "b"


def test_a_thousand_bundles_are_placed_and_a_thousand_too_many_are_not():
    nodes = {f"n{index}": {"CPU": 40_000} for index in range(250)}
    assert placed(nodes, [ONE] * 1000) != ""
    assert placed(nodes, [ONE] * 1001) == ""


def test_why_not_is_told():
    units = [units_of(shape) for shape in (ONE, GPU)]
    assert "no node has CPU: 1 and GPU: 1 (bundle 1)" in why_never(table(a=TWO), units, "PACK")
    assert "needs CPU: 3 and all nodes have 2" in why_never(table(a=TWO), [units_of(ONE)] * 3, "PACK")
    assert "STRICT_PACK" in why_never(table(a=ONE, b=ONE), [units_of(ONE)] * 2, "STRICT_PACK")
    assert "there are 1" in why_never(table(a=TWO), [units_of(ONE)] * 2, "STRICT_SPREAD")
    assert why_never(table(a=TWO), [units_of(ONE)] * 2, "PACK") == ""
    assert "bundles 0, 1 wait for CPU: 2, free is 1" in why_not_now(table(a=ONE), [units_of(ONE)] * 2, [0, 1])


def test_names_of_bundles():
    shape = in_bundle(GPU, "gang-1.12")
    assert shape == (("@gang-1.12", 1.0), ("CPU@gang-1.12", 1.0), ("GPU@gang-1.12", 1.0))
    assert bundle_of(shape) == "gang-1.12"
    assert bundle_of(GPU) == ""
    assert bundle_of((("@actor:1", 1.0),)) == ""
    assert (group_of("gang-1.12"), index_of("gang-1.12")) == ("gang-1", 12)
    assert is_gang("gang-1")
    assert not is_gang("group-1")


# --- a node ---------------------------------------------------------------------------------------

ME, HEAD, DRIVER = "tcp://n1#a", "tcp://head#a", "tcp://d#1"


class NodeKit:
    """A node of two CPUs with two workers that a head has accepted; every event is followed by the laws."""

    def __init__(self) -> None:
        self.now = 0.0
        self.node = Node(NodeSettings(ME, "n1", "h", TWO, 2, "/shm", 1 << 20, "s", HEAD), CONFIG)
        self.node.start(0.0)
        for number in (1, 2):
            self.says(m.WorkerStarted(f"n1.w{number}", number, f"tcp://w#{number}"), f"tcp://w#{number}")
        self.says(m.Joined(DRIVER, 9, "driver"), DRIVER)
        self.says(m.NodeAccepted(1, (self.node.entry(),)), HEAD)

    def says(self, event: m.Message, sender: str = "", after_s: float = 0.0) -> list[m.Message]:
        self.now += after_s
        commands = self.node.handle(event, self.now, sender)
        assert check(self.node) == []
        return [command.message for command in commands if isinstance(command, c.Send)]

    def head(self, event: m.Message) -> list[m.Message]:
        return self.says(event, HEAD)

    def asks(self, group: str, *bundles: m.Shape, turn: int = 1, hold_s: float = 0.0) -> list[m.BundlesTaken]:
        told = self.head(m.BundlesAsked(group, turn, tuple(enumerate(bundles)), hold_s))
        return [message for message in told if isinstance(message, m.BundlesTaken)]

    def wants(self, shape: m.Shape, total: int = 1) -> list[m.LeaseGranted]:
        told = self.says(m.LeaseDemand(shape, (), total, 0, 0), DRIVER)
        return [message for message in told if isinstance(message, m.LeaseGranted)]

    def free(self, name: str = "CPU") -> float:
        return self.node.leases.ledger.free(name) / 10_000


def test_a_bundle_is_taken_opened_used_and_given_back():
    kit = NodeKit()
    assert [taken.refused for taken in kit.asks("gang-1", ONE)] == [""]
    assert kit.free() == 1
    member = in_bundle(ONE, "gang-1.0")
    assert kit.wants(member) == []  # until all have theirs
    granted = [told for told in kit.head(m.BundlesOpened("gang-1", 1)) if isinstance(told, m.LeaseGranted)]
    assert len(granted) == 1
    assert kit.wants(member, 2) == []
    wanted = [told for told in kit.head(m.BundlesDropped("gang-1")) if isinstance(told, m.LeaseWanted)]
    assert len(wanted) == 1
    assert kit.free() == 1
    told = kit.says(m.LeaseReturned(granted[0].lease), DRIVER)
    assert [message.available for message in told if isinstance(message, m.BundlesGiven)] == [TWO]
    assert kit.node.leases.ledger.names() == ("CPU",)


def test_a_gang_that_has_begun_again_before_it_is_given_back_is_kept():
    kit = NodeKit()
    kit.asks("gang-1", ONE, ONE)
    kit.head(m.BundlesOpened("gang-1", 1))
    (granted,) = kit.wants(in_bundle(ONE, "gang-1.0"))
    told = kit.head(m.BundlesDropped("gang-1", unless_used=True))
    assert told == [m.BundlesKept("gang-1", (0, 1))]
    assert len(kit.wants(in_bundle(ONE, "gang-1.1"))) == 1  # all of it: one member waits for the other, perhaps
    assert [taken.refused != "" for taken in kit.asks("gang-1", ONE, ONE, turn=2)] == [True]
    kit.says(m.LeaseReturned(granted.lease), DRIVER)
    assert kit.free() == 0
    assert kit.head(m.BundlesDropped("gang-1")) != []


def test_what_does_not_fit_is_refused_and_says_what_is_free():
    kit = NodeKit()
    kit.wants(ONE)
    (refused,) = kit.asks("gang-1", ONE, ONE)
    assert "CPU" in refused.refused
    assert refused.available == ONE
    assert kit.node.bundles.held == {}


def test_a_group_holds_several_members_at_a_time():
    kit = NodeKit()
    kit.asks("group-1", TWO)
    kit.head(m.BundlesOpened("group-1", 1))
    assert len(kit.wants(in_bundle(ONE, "group-1.0"), 2)) == 2


def test_an_open_bundle_that_is_asked_for_again_is_refused():
    kit = NodeKit()
    kit.asks("gang-1", ONE)
    kit.head(m.BundlesOpened("gang-1", 1))
    assert kit.asks("gang-1", ONE, turn=2)[0].refused


def test_slots_are_held_free_for_a_while():
    kit = NodeKit()
    first, second = (kit.wants(ONE, total)[0].lease for total in (1, 2))
    told = kit.head(m.BundlesAsked("gang-1", 1, ((0, TWO),), 5.0))
    assert len([message for message in told if isinstance(message, m.LeaseWanted)]) == 2
    kit.wants(ONE, 3)
    told = kit.says(m.LeaseReturned(first), DRIVER)
    assert not [message for message in told if isinstance(message, m.LeaseGranted)]  # though one is free
    told = kit.says(m.LeaseReturned(second), DRIVER)
    assert [message.refused for message in told if isinstance(message, m.BundlesTaken)] == [""]


def test_a_hold_that_was_in_vain_ends_and_others_go_on():
    kit = NodeKit()
    first, _ = (kit.wants(ONE, total)[0].lease for total in (1, 2))
    kit.asks("gang-1", TWO, hold_s=5.0)
    kit.wants(ONE, 3)
    kit.says(m.LeaseReturned(first), DRIVER)
    told = kit.says(HoldEnded("gang-1", 1), "", 5.0)
    assert [message.refused for message in told if isinstance(message, m.BundlesTaken)] == ["lacks CPU"]
    assert [message for message in told if isinstance(message, m.LeaseGranted)]


def test_a_member_that_waits_lends_its_cpu_to_anybody_or_to_its_bundle():
    kit = NodeKit()
    kit.asks("gang-1", TWO)
    told = kit.wants(in_bundle(TWO, "gang-1.0")) or kit.head(m.BundlesOpened("gang-1", 1))
    (granted,) = [message for message in told if isinstance(message, m.LeaseGranted)]
    assert kit.free() == 0
    blocked = m.WorkerBlocked(granted.worker_id, True)
    kit.says(blocked, granted.worker)
    assert kit.free() == 2  # for children that do not ask for the bundle
    (child,) = kit.wants(in_bundle(ONE, "gang-1.0"))
    assert kit.free() == 1  # what one in the bundle has is not lent to others as well
    kit.says(m.WorkerBlocked(granted.worker_id, False), granted.worker)
    assert kit.free() == 0
    assert kit.free("CPU@gang-1.0") == -1  # for a while
    kit.says(m.LeaseReturned(child.lease), DRIVER)
    assert kit.free("CPU@gang-1.0") == 0


def test_members_of_a_group_that_is_removed_are_killed_with_the_reason():
    kit = NodeKit()
    kit.asks("group-1", ONE)
    kit.head(m.BundlesOpened("group-1", 1))
    (granted,) = kit.wants(in_bundle(ONE, "group-1.0"))
    kit.head(m.BundlesDropped("group-1", 0, "it was removed"))
    assert kit.node.desk.workers[granted.worker_id].state == "dying"
    death = m.Death(granted.worker_id, "h", 1, -9)
    told = kit.says(c.WorkerEnded(death))
    assert [message.death.reason for message in told if isinstance(message, m.LeaseLost)] == ["it was removed"]
    assert kit.free() == 2


def test_a_new_head_hears_what_is_open_and_wanted_and_the_rest_is_given_back():
    kit = NodeKit()
    described = m.BundleSet("gang-1", (ONE,))
    kit.says(m.GangWanted(described, True), DRIVER)
    kit.asks("gang-1", ONE)
    kit.head(m.BundlesOpened("gang-1", 1))
    kit.asks("gang-2", ONE, turn=2)
    told = kit.head(m.NodeAccepted(1, (kit.node.entry(),)))
    (all_of_it,) = [message for message in told if isinstance(message, m.BundlesTold)]
    assert [bundle.group for bundle in all_of_it.held] == ["gang-1"]
    assert [want.described for want in all_of_it.wanted] == [described]
    assert kit.free() == 1
    assert [message.refused for message in kit.head(m.BundlesOpened("gang-2", 2))] == ["is gone"]


def test_the_end_of_a_process_ends_what_it_wants():
    kit = NodeKit()
    kit.says(m.GangWanted(m.BundleSet("gang-1", (ONE,)), True), DRIVER)
    told = kit.says(m.PeerLost(DRIVER, "killed"), DRIVER)
    assert [message.wanted for message in told if isinstance(message, m.GangSought)] == [False]


# --- the head -------------------------------------------------------------------------------------


class HeadKit:
    """A head and nodes that answer as they are told to; every event is followed by the laws."""

    def __init__(self, rows: dict[str, bytes] | None = None, **nodes: m.Shape) -> None:
        self.rows = {} if rows is None else rows
        self.now = 0.0
        self.head = Head(HeadSettings("tcp://head#a", "s", "h", 7), CONFIG, self.rows)
        self.heard(self.head.start(0.0))
        for node_id, total in nodes.items():
            self.joins(node_id, total)

    def heard(self, commands: list[c.Command]) -> list[tuple[str, m.Message]]:
        sent: list[tuple[str, m.Message]] = []
        for command in commands:
            if isinstance(command, c.WriteJournal):
                keep_rows(self.rows, command)
                if command.number:
                    sent += self.says(c.JournalWritten(command.number))
            elif isinstance(command, c.Send):
                sent.append((command.to, command.message))
        assert check(self.head) == []
        return sent

    def says(self, event: m.Message, sender: str = "") -> list[tuple[str, m.Message]]:
        return self.heard(self.head.handle(event, self.now, sender))

    def joins(self, node_id: str, total: m.Shape = TWO, epoch: int = 0, told: m.BundlesTold | None = None) -> None:
        address = f"{node_id}#1"
        self.says(m.NodeJoined(m.NodeEntry(node_id, address, "h", total, total, epoch=epoch)), address)
        self.says(told or m.BundlesTold((), ()), address)

    def beats(self, seconds: float, *speaking: str) -> list[tuple[str, m.Message]]:
        sent: list[tuple[str, m.Message]] = []
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            for node_id in speaking:
                entry = self.head.rooms.nodes[node_id].entry  # as it last told
                sent += self.says(m.NodeReport(entry), entry.address)
            sent += self.says(HeadBeat())
        return sent

    def wants(self, gang: str, *bundles: m.Shape, by: str = "a", wanted: bool = True) -> list[tuple[str, m.Message]]:
        return self.says(m.GangSought("d1", m.BundleSet(gang, bundles), wanted), f"{by}#1")

    def takes(self, asked: list[tuple[str, m.Message]], refused: str = "") -> list[tuple[str, m.Message]]:
        """All nodes that were asked answer."""
        sent: list[tuple[str, m.Message]] = []
        for to, message in asked:
            if isinstance(message, m.BundlesAsked):
                sent += self.says(m.BundlesTaken(message.group, message.turn, refused, (("CPU", 0.0),)), to)
        return sent

    def holds(self, gang: str) -> str:
        places = self.head.bundles.groups[gang].places
        return "".join(places.get(index, ".") for index in range(len(self.head.bundles.groups[gang].units)))


def of(kind: type, sent: list[tuple[str, m.Message]]) -> list[str]:
    return [to for to, message in sent if isinstance(message, kind)]


def test_members_come_when_every_node_has_taken_its_part():
    kit = HeadKit(a=ONE, b=ONE)
    asked = kit.wants("gang-1", ONE, ONE)
    assert of(m.BundlesAsked, asked) == ["a#1", "b#1"]
    assert of(m.BundlesOpened, kit.takes(asked[:1])) == []
    assert of(m.BundlesOpened, kit.takes(asked[1:])) == ["a#1", "b#1"]
    assert kit.holds("gang-1") == "ab"


def test_a_gang_that_begins_again_as_it_ends_has_what_its_nodes_kept():
    kit = HeadKit(a=ONE, b=ONE)
    kit.takes(kit.wants("gang-1", ONE, ONE))
    ended = kit.wants("gang-1", ONE, ONE, wanted=False)
    assert [message.unless_used for _, message in ended if isinstance(message, m.BundlesDropped)] == [True, True]
    kit.says(m.BundlesGiven("gang-1", ONE), "b#1")
    asked = kit.wants("gang-1", ONE, ONE)
    kit.says(m.BundlesKept("gang-1", (0,)), "a#1")
    assert kit.holds("gang-1") == "a."
    late = m.BundlesTaken("gang-1", 2, "is being given back", (("CPU", 0.0),))
    asked += kit.says(late, "a#1")
    assert kit.holds("gang-1") == "a."  # an answer to what is not asked any more
    kit.takes([*asked, *kit.says(m.BundlesGiven("gang-1", ONE), "b#1")])
    assert kit.holds("gang-1") == "ab"


def test_what_was_kept_for_a_gang_that_nobody_wants_is_given_back():
    kit = HeadKit(a=TWO)
    kit.takes(kit.wants("gang-1", ONE))
    kit.wants("gang-1", ONE, wanted=False)
    kit.says(m.BundlesKept("gang-1", (0,)), "a#1")
    sent = kit.beats(CONFIG.link_lost_after_s + 1, "a")
    assert [message for _, message in sent if isinstance(message, m.BundlesDropped)] == [m.BundlesDropped("gang-1")]


def test_if_one_node_refuses_the_others_give_back():
    kit = HeadKit(a=ONE, b=ONE)
    asked = kit.wants("gang-1", ONE, ONE)
    kit.takes(asked[:1])
    assert of(m.BundlesDropped, kit.takes(asked[1:], "busy")) == ["a#1"]
    assert kit.holds("gang-1") == ".."


def test_a_node_whose_gpus_are_shared_in_parts_is_passed_over_for_a_while():
    gpus = (("GPU", 1.0),)
    kit = HeadKit(a=gpus, b=gpus)
    asked = kit.wants("gang-1", gpus)
    assert of(m.BundlesAsked, asked) == ["a#1"]
    kit.says(m.BundlesTaken("gang-1", 1, SPLIT, gpus), "a#1")
    asked = kit.says(m.NodeReport(kit.head.rooms.nodes["a"].entry), "a#1") + kit.beats(0.5, "a", "b")
    assert of(m.BundlesAsked, asked) == ["b#1"]
    kit.says(m.BundlesTaken("gang-1", 2, SPLIT, gpus), "b#1")
    asked = kit.beats(0.5, "a", "b")
    assert SPLIT in kit.head.bundles.groups["gang-1"].reason
    assert of(m.BundlesOpened, kit.takes(asked)) == ["a#1"]


def test_two_gangs_are_never_half_and_half():
    kit = HeadKit(a=ONE, b=ONE)
    first = kit.wants("gang-1", ONE, ONE)
    assert kit.wants("gang-2", ONE, ONE) == []  # promised already
    kit.takes(first)
    sent = kit.wants("gang-1", ONE, ONE, wanted=False)
    assert of(m.BundlesDropped, sent) == ["a#1", "b#1"]
    kit.says(m.BundlesGiven("gang-1", ONE), "a#1")
    assert of(m.BundlesAsked, kit.says(m.BundlesGiven("gang-1", ONE), "b#1")) == ["a#1", "b#1"]


def test_who_seeks_a_bundle_is_sent_there_or_told_why_not():
    kit = HeadKit(a=ONE, b=TWO)
    sought = m.SlotsSought("d1", in_bundle(ONE, "gang-1.2"), (), 1)
    kit.says(sought, "a#1")
    kit.wants("gang-1", ONE, ONE, ONE, ONE)
    (told,) = [message for _, message in kit.beats(0.5, "a", "b") if isinstance(message, m.SlotsFound)]
    assert not told.node
    assert "needs CPU: 4 and all nodes have 3" in told.reason
    kit.now += 0.1
    kit.joins("c", ONE)
    sent = kit.takes(kit.beats(0.5, "a", "b", "c"))
    assert [message.node for _, message in sent if isinstance(message, m.SlotsFound)] == ["c#1"] or kit.holds("gang-1")


def test_the_oldest_has_slots_held_free_and_one_at_a_time():
    kit = HeadKit(a=TWO)
    kit.says(m.NodeReport(m.NodeEntry("a", "a#1", "h", TWO, (("CPU", 0.0),), epoch=1)), "a#1")
    kit.wants("gang-1", ONE, ONE)
    kit.wants("gang-2", ONE, ONE)
    sent = kit.beats(3.0, "a")
    held = [message for _, message in sent if isinstance(message, m.BundlesAsked)]
    assert [(message.group, message.hold_s) for message in held] == [("gang-1", CONFIG.starve_s)]
    sent = kit.says(m.BundlesTaken("gang-1", held[0].turn, "lacks CPU", (("CPU", 0.0),)), "a#1")
    sent = kit.beats(8.0, "a")  # it lets others pass for a while, and is then held for longer
    again = [message for _, message in sent if isinstance(message, m.BundlesAsked)]
    assert again[0].group == "gang-2"
    assert again[0].hold_s == CONFIG.starve_s


def test_bundles_of_a_dead_node_are_reserved_anew():
    kit = HeadKit(a=ONE, b=ONE, c=ONE)
    kit.takes(kit.wants("gang-1", ONE, ONE))
    assert kit.holds("gang-1") == "ab"
    sent = kit.says(m.Goodbye("stopped"), "b#1")
    kit.takes(sent + kit.beats(0.5, "a", "c"))
    assert kit.holds("gang-1") == "ac"


def test_torn_gangs_do_not_lock_each_other_out():
    kit = HeadKit(a=ONE, b=ONE, c=ONE, d=ONE)
    for gang in ("gang-1", "gang-2"):
        kit.takes(kit.wants(gang, ONE, ONE))
    assert (kit.holds("gang-1"), kit.holds("gang-2")) == ("ab", "cd")
    for node_id in "bd":
        kit.says(m.Goodbye("stopped"), f"{node_id}#1")
    sent = kit.beats(CONFIG.starve_s + 1, "a", "c")
    assert [(to, message.group) for to, message in sent if type(message) is m.BundlesDropped] == [("c#1", "gang-2")]
    kit.takes(sent + kit.says(m.BundlesGiven("gang-2", ONE), "c#1"))
    assert (kit.holds("gang-1"), kit.holds("gang-2")) == ("ac", "..")


def test_a_gang_ends_with_its_last_holder_and_outlives_its_node_for_a_moment():
    kit = HeadKit(a=ONE, b=ONE)
    kit.takes(kit.wants("gang-1", ONE, by="a"))
    kit.takes(kit.wants("gang-1", ONE, by="b"))
    assert of(m.BundlesDropped, kit.wants("gang-1", ONE, by="b", wanted=False)) == []
    kit.says(m.Goodbye("stopped"), "a#1")
    assert "gang-1" in kit.head.bundles.groups  # its program may tell another node
    kit.takes(kit.beats(CONFIG.link_lost_after_s + 1, "b"))
    assert kit.head.bundles.groups == {}


def test_what_a_node_said_while_it_was_cut_off_is_made_up_for():
    kit = HeadKit(a=TWO)
    kit.takes(kit.wants("gang-1", ONE))
    sent = kit.says(m.BundlesTold((m.HeldBundle("gang-1", 0, ONE),), ()), "a#1")
    assert of(m.BundlesDropped, sent) == ["a#1"]
    assert kit.head.bundles.groups == {}


def test_a_new_head_learns_gangs_from_nodes_and_groups_from_its_journal():
    kit = HeadKit(a=TWO, b=TWO)
    create = m.Asked(1, "bundles.create", [m.BundleSet("group-1", (ONE, ONE)), "d1"])
    kit.takes(kit.says(create, "d1"))
    gang = m.BundleSet("gang-1", (ONE,))
    kit.takes(kit.says(m.GangSought("d1", gang, True), "a#1"))
    again = HeadKit(kit.rows)
    held = (m.HeldBundle("group-1", 0, ONE), m.HeldBundle("group-1", 1, ONE))
    again.joins("a", TWO, 1, m.BundlesTold(held, (m.GangSought("d1", gang, True, 3.0),)))
    assert again.holds("group-1") == "aa"
    assert again.holds("gang-1") == "."
    again.joins("b", TWO, 1, m.BundlesTold((m.HeldBundle("gang-1", 0, ONE), m.HeldBundle("gang-9", 0, ONE)), ()))
    assert again.holds("gang-1") == "b"
    sent = again.beats(CONFIG.link_lost_after_s + 1, "a", "b")
    assert [message.group for _, message in sent if type(message) is m.BundlesDropped] == ["gang-9"]  # nobody knows it


def test_what_waits_is_listed_for_people():
    kit = HeadKit(a=TWO)
    for number in (1, 2):
        large = m.BundleSet(f"group-{number}", (ONE, (("CPU", 3.0),)))
        kit.says(m.Asked(number, "bundles.create", [large, "d1"]), "d1")
    ((_, answer),) = kit.says(m.Asked(3, "bundles.waiting"), "v")
    assert [row["shape"] for row in answer.content] == [{"CPU": 4.0}] * 2
    assert "placement group group-1 (2 bundles, PACK), which waits for other nodes: no node has CPU: 3" in (
        answer.content[0]["reason"]
    )


def test_a_job_that_goes_on_in_another_process_keeps_its_group():
    kit = HeadKit(a=TWO)
    for number, job in enumerate(("d1", "d2")):
        kit.takes(kit.says(m.Asked(number, "bundles.create", [m.BundleSet("group-1", (ONE,)), job]), job))
    assert of(m.BundlesDropped, kit.says(m.Goodbye("ended"), "d1")) == []
    assert of(m.BundlesDropped, kit.says(m.Goodbye("ended"), "d2")) == ["a#1"]


def test_a_group_ends_with_its_program_or_when_it_is_removed_and_who_seeks_it_is_refused():
    kit = HeadKit(a=TWO)
    for number, group in enumerate(("group-1", "group-2")):
        kit.takes(kit.says(m.Asked(number, "bundles.create", [m.BundleSet(group, (ONE,)), f"d{number}"]), "d"))
    sent = kit.says(m.Goodbye("ended"), "d0")
    assert [message.group for _, message in sent if isinstance(message, m.BundlesDropped)] == ["group-1"]
    sent = kit.says(m.Asked(3, "bundles.remove", "group-2"), "d1")
    assert [message.why for _, message in sent if isinstance(message, m.BundlesDropped)] != [""]
    sent = kit.says(m.SlotsSought("d1", in_bundle(ONE, "group-2.0"), (), 1), "a#1")
    assert [message.refused for _, message in sent if isinstance(message, m.SlotsFound)] == [True]
    assert not [key for key in kit.rows if key.startswith("bundles/")]
