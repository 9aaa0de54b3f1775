"""Simulated groups: real nodes with their ledgers and posts, members with their seats, and the harm of a plan."""

from __future__ import annotations

from random import Random

import msgspec

from flowengine.collectives.posts_kept import LEFT_S

from .faults import Fault, plan
from .sim_collectives_checks import STORE_BYTES, GroupBook, left_of_groups, stuck_groups, unlike_calm, wrong_groups
from .sim_collectives_member import Member, Saved
from .sim_collectives_node import GroupNode
from .sim_collectives_programs import GroupWriter, Script
from .sim_node import SimNode
from .sim_programs import Body
from .sim_settings import FaultRates, Scenario
from .sim_world import Broken, World

QUIET_S = 12.0  # after the last member has left: then nothing may be left
BEGIN_S = 0.05  # then the cluster is up
SOON_S = 0.05
KEPT_BYTES = 1 << 20  # of all results of a run
AGAIN_S = 0.03  # a second harm comes so soon after the first, now and then


class GroupWorld(World):
    """A cluster whose programs are members of groups."""

    def __init__(self, scenario: Scenario, seed: int, spared: tuple[int, ...] = ()) -> None:
        super().__init__(scenario, seed, Body(0, (), 0.0))
        self.spared = spared  # numbers of harms of the plan that are not done
        writer = GroupWriter(Random(seed * 2 + 1), scenario)
        self.nodes_count = writer.nodes
        self.formations = writer.formations()
        self.book = GroupBook()
        self.members: dict[str, Member] = {}  # those that live, or have come to their end
        self.orders: dict[bytes, tuple[tuple[int, ...], ...]] = {}  # in which members' groups fold, by key
        self.saved: dict[bytes, Saved] = {}  # where members begin when they come again, by key
        self.waiting = 0  # members that are to come yet
        # Results may be gone with a host, or because too many are kept.
        self.hosts_harmed = scenario.config.collective_kept_bytes_max < KEPT_BYTES
        self.lost_for_good = False  # a member that died does not come again
        self.is_harmed = False

    def start(self) -> None:
        """The cluster comes up and the members begin."""
        self.start_head()
        for index in range(self.nodes_count):
            self.start_node(f"n{index}")
        for number, formation in enumerate(self.formations):
            for script in formation.scripts:
                self.waiting += 1
                self.clock.after(BEGIN_S + script.start_s, self.start_member, number, script)
        faults = plan(self.dice, self.scenario)
        self.faults = tuple(fault for number, fault in enumerate(faults) if number not in self.spared)
        for fault in self.faults:
            self.clock.after(BEGIN_S + fault.at_s, self.harm, fault)

    def start_node(self, node_id: str) -> SimNode:
        """A node process in a new life."""
        life = self.lives[node_id] = self.lives.get(node_id, 0) + 1
        node = GroupNode(self, f"tcp://{node_id}#{life}", node_id)
        self.nodes[node.address] = node
        self.net.add(node)
        node.start()
        return node

    def start_member(self, number: int, script: Script) -> None:
        """A member's process begins, where it was when it was saved last; later when no node lives.

        Members of two groups of one name do not come at the same time: nobody could tell them apart.
        """
        nodes = self.group_nodes()
        if not nodes or self.has_to_wait(number, script):
            self.clock.after(SOON_S, self.start_member, number, script)
            return
        self.waiting -= 1
        at_home = [node for node in nodes if node.node_id == f"n{script.home % self.nodes_count}"]
        name = f"m{script.key.hex()}"
        life = self.lives[name] = self.lives.get(name, 0) + 1
        moves = script.moves and life > 1
        node = at_home[0] if at_home and not moves else nodes[self.dice.randrange(len(nodes))]
        member = Member(self, f"tcp://{name}#{life}", node, (number, script))
        self.members[member.address] = member
        self.net.add(member)
        member.start()

    # --- ends -------------------------------------------------------------------------------------

    def end_member(self, member: Member) -> None:
        """The process dies; it comes again or not."""
        if not member.alive:
            return
        self.is_harmed = True
        self.net.died(member)
        del self.members[member.address]
        if member.is_done:
            return
        if member.script.restored_s < 0:
            self.lost_for_good = True
            self.book.ended[member.script.key] = "gone"
            return
        self.waiting += 1
        self.clock.after(member.script.restored_s, self.start_member, member.number, member.script)

    def end_node(self, node: SimNode) -> None:
        """The node process ends, its store and its members with it."""
        self.is_harmed = self.hosts_harmed = True
        super().end_node(node)
        for member in [member for member in self.members.values() if member.node is node]:
            self.end_member(member)

    def restart_node(self, node_id: str) -> None:
        """The supervisor starts the node again."""
        self.start_node(node_id)

    def group_nodes(self) -> list[GroupNode]:
        """Nodes that live."""
        return [node for node in self.living_nodes() if isinstance(node, GroupNode)]

    def has_to_wait(self, number: int, script: Script) -> bool:
        """Whether this member has to come later: after an operation, or when the group before or its own is formed."""
        formations = self.formations
        if script.after >= 0 and (number, script.after) in self.book.seen:
            return False
        if script.rank >= formations[number].size:
            before = number
        elif number and formations[0].name == formations[number].name:
            before = 0
        else:
            return False
        members = [script for script in formations[before].scripts if script.rank < formations[before].size]
        is_ahead = before not in self.book.seats or script.after >= 0
        return is_ahead and any(member.key not in self.book.ended for member in members)

    def is_over(self) -> bool:
        """Whether no member does anything any more."""
        return not self.waiting and all(member.is_done for member in self.members.values())

    # --- harm -------------------------------------------------------------------------------------

    def busy(self) -> list[Member]:
        """Members that can be harmed."""
        return [member for member in self.members.values() if not member.is_done]

    def harm_kill_member(self, fault: Fault) -> None:
        """A member dies, and now and then another at once, or it again as soon as it is back."""
        members = self.busy()
        if not members:
            return
        dice = Random(fault.luck)
        member = members[int(fault.luck * len(members))]
        self.end_member(member)
        if dice.random() < 0.3:
            self.clock.after(dice.random() * AGAIN_S, self.harm, Fault(0.0, "kill_member", dice.random()))
        if dice.random() < 0.3 and member.script.restored_s >= 0:
            again_s = member.script.restored_s + dice.random() * AGAIN_S
            self.clock.after(again_s, self.kill_key, member.script.key)

    def kill_key(self, key: bytes) -> None:
        """The process that has this member's seat dies."""
        for member in self.busy():
            if member.script.key == key:
                self.end_member(member)
                return

    def harm_kill_several(self, fault: Fault) -> None:
        """About half of all members die in the same moment."""
        dice = Random(fault.luck)
        for member in self.busy():
            if dice.random() < 0.5:
                self.end_member(member)

    def harm_break_lane(self, fault: Fault) -> None:
        """A stream between two nodes breaks."""
        self.is_harmed = True
        lanes = [lane for node in self.group_nodes() for lane in node.lanes.values()]
        if lanes:
            lanes[int(fault.luck * len(lanes))].broke("it broke")

    def harm_cut_host(self, fault: Fault) -> None:
        """A host is cut off for a while."""
        hosts = [node.host for node in self.living_nodes()]
        if hosts:
            host = hosts[int(fault.luck * len(hosts))]
            self.is_harmed = self.hosts_harmed = True
            self.net.cut_host(host)
            self.clock.after(fault.seconds, self.net.heal_host, host)


def judge_groups(world: GroupWorld) -> list[str]:
    """Run a world; lines about what was wrong, and with how little harm it is."""
    lines = run_groups(world)
    if not lines or not world.faults:
        return lines
    fewer = world
    for number in range(len(world.faults)):
        tried = GroupWorld(world.scenario, world.seed, (*fewer.spared, number))
        if run_groups(tried):
            fewer = tried
    told = ", ".join(f"{fault.kind} at {fault.at_s + BEGIN_S:.4f}" for fault in fewer.faults)
    return [*lines, f"something is wrong with this harm alone: {told or 'none'}"]


def run_groups(world: GroupWorld) -> list[str]:
    """Run a world of groups to its end; lines about what was wrong."""
    clock, scenario = world.clock, world.scenario
    try:
        world.start()
        while not world.is_over() and clock.step(scenario.end_s):
            pass
        if not world.is_over():
            return ["the members did not end", *stuck_groups(world), *wrong_groups(world)]
        last_s = max([clock.now, *(fault.at_s + fault.seconds for fault in world.faults)])
        while clock.step(last_s + QUIET_S):
            pass
    except Broken as broken:
        return [str(broken)]
    left = left_of_groups(world)
    while left and clock.step(last_s + LEFT_S + QUIET_S + 2 * world.scenario.config.link_lost_after_s):
        pass  # what was left by those who are dead goes after a while
    return [*wrong_groups(world), *against_calm(world), *(left and left_of_groups(world))]


def against_calm(world: GroupWorld) -> list[str]:
    """Where only processes died and all came back, each loop ends with the results of the calm run."""
    settings = world.scenario.group
    if not world.is_harmed or world.hosts_harmed or world.lost_for_good or settings is None:
        return []
    if settings.grows or settings.too_late or settings.again or settings.on_failure != ("recover",):
        return []
    if world.scenario.store_limit_bytes < STORE_BYTES:
        return []
    calm = GroupWorld(msgspec.structs.replace(world.scenario, faults=FaultRates()), world.seed)
    return [*run_groups(calm), *unlike_calm(world, calm)]
