"""Who is told of which nodes as a cluster grows: everybody of all while it is small, then only who wants to know."""

from __future__ import annotations

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.head import Head, HeadBeat, HeadSettings, NewsDue
from flowengine.core.ids import child_id
from flowengine.core.invariants import check
from flowengine.core.node import Node, NodeSettings
from flowengine.core.owner import Owner
from flowengine.core.telling import KNOWN_TO_ALL_MAX, known_after

CPU = (("CPU", 4.0),)
ME, HEAD, DRIVER, WORKER = "tcp://n1#1", "tcp://head#1", "tcp://driver#1", "tcp://worker#1"
LARGE = KNOWN_TO_ALL_MAX + 6


def entry(number: int, life: int = 1, epoch: int = 0) -> m.NodeEntry:
    return m.NodeEntry(f"n{number}", f"tcp://n{number}#{life}", "h", CPU, CPU, epoch=epoch)


def sent(commands: list[c.Command], kind: type = m.NodesChanged) -> list[tuple[str, m.Message]]:
    return [(one.to, one.message) for one in commands if isinstance(one, c.Send) and isinstance(one.message, kind)]


class Cluster:
    """A head and nodes that only join and report."""

    def __init__(self, count: int) -> None:
        self.now = 0.0
        self.head = Head(HeadSettings(HEAD, "s", "h", 7), Config(suspect_after_s=2.0), {})
        self.head.start(0.0)
        self.commands: list[c.Command] = []
        for number in range(count):
            self.joins(number)

    def says(self, event: m.Message, sender: str = "", after_s: float = 0.0) -> list[c.Command]:
        self.now += after_s
        commands = self.head.handle(event, self.now, sender)
        self.commands += commands
        assert check(self.head) == []
        return commands

    def joins(self, number: int, life: int = 1) -> list[c.Command]:
        commands = self.says(m.NodeJoined(entry(number, life)), f"tcp://n{number}#{life}")
        due = [one for one in commands if isinstance(one, c.SetTimer) and isinstance(one.event, NewsDue)]
        return [*commands, *(self.says(NewsDue(), after_s=0.1) if due else [])]


def test_in_a_small_cluster_everybody_is_told_of_all():
    cluster = Cluster(3)
    assert [to for to, _ in sent(cluster.joins(3))] == ["tcp://n0#1", "tcp://n1#1", "tcp://n2#1"]
    accepted = sent(cluster.commands, m.NodeAccepted)[-1][1]
    assert accepted.whole
    assert len(accepted.nodes) == 4


def test_what_is_told_of_those_that_join_does_not_grow_with_the_cluster():
    told = []
    for count in (2 * LARGE, 8 * LARGE):
        cluster = Cluster(LARGE)
        cluster.commands.clear()
        for number in range(LARGE, count):
            cluster.joins(number)
        messages = [message for kind in (m.NodesChanged, m.NodeAccepted) for _, message in sent(cluster.commands, kind)]
        told.append(sum(len(message.nodes) for message in messages) / (count - LARGE))
    assert told == [1.0, 1.0]


def test_when_a_cluster_grows_large_all_hear_that_they_do_not_know_all_and_the_curious_ask():
    cluster = Cluster(KNOWN_TO_ALL_MAX)
    commands = cluster.joins(KNOWN_TO_ALL_MAX)
    assert {(len(message.nodes), message.whole) for _, message in sent(commands)} == {(0, False)}
    assert len(sent(commands)) == KNOWN_TO_ALL_MAX
    (to, answer), = sent(cluster.says(m.NodesWanted(), "tcp://n7#1"))
    assert (to, len(answer.nodes), answer.whole, answer.more) == ("tcp://n7#1", KNOWN_TO_ALL_MAX + 1, True, False)
    news = [*sent(cluster.joins(LARGE)), *sent(cluster.says(NewsDue(), after_s=0.1))]
    assert news == [("tcp://n7#1", m.NodesChanged((entry(LARGE, epoch=1),), (), more=True))]


def test_deaths_and_returns_are_told_to_everybody_once():
    cluster = Cluster(LARGE)
    cluster.says(m.PeerLost("tcp://n3#1", "gone"))
    commands = []
    for _ in range(6):
        for number in range(LARGE):
            if number != 3:
                cluster.says(m.Ping(1), f"tcp://n{number}#1")
        commands += cluster.says(HeadBeat(), after_s=0.5)
    assert len(sent(commands)) == LARGE - 1
    assert {(message.dead, message.nodes) for _, message in sent(commands)} == {(("tcp://n3#1",), ())}
    back = sent(cluster.joins(3))
    assert len(back) == LARGE - 1
    assert {message.nodes[0].address for _, message in back} == {"tcp://n3#1"}
    assert {message.dead for _, message in back} == {()}


class Host:
    """A node of a large cluster with a worker."""

    def __init__(self) -> None:
        settings = NodeSettings(ME, "n1", "h", CPU, 1, "/dev/shm/f", 100, "s", HEAD)
        self.node = Node(settings, Config())
        self.node.start(0.0)
        self.says(m.Joined(WORKER, 7, "worker"), WORKER)
        self.says(m.WorkerStarted("n1.w1", 7, WORKER), WORKER)
        self.first = self.says(m.NodeAccepted(1, (entry(1),), whole=False), HEAD)

    def says(self, event: m.Message, sender: str = "") -> list[c.Command]:
        commands = self.node.handle(event, 1.0, sender)
        assert check(self.node) == []
        return commands

    def all_told(self) -> list[c.Command]:
        return self.says(m.NodesChanged(tuple(entry(number) for number in range(LARGE))), HEAD)


def test_a_node_without_a_program_knows_itself_alone_and_its_worker_hears_so():
    host = Host()
    assert list(host.node.desk.nodes) == ["n1"]
    assert not host.node.desk.knows_all
    assert [(to, message.whole) for to, message in sent(host.first)] == [(WORKER, False)]
    assert sent(host.first, m.NodesWanted) == []
    host.says(m.LeaseDemand((("CPU", 1.0),), ("n40", "n41"), 1, 0, 0), WORKER)
    assert sent(host.says(m.LeaseDemand((("GPU", 1.0),), (), 1, 0, 0), WORKER), m.SlotsSought)


def test_for_a_program_its_node_asks_and_passes_on_what_changes():
    host = Host()
    assert [to for to, _ in sent(host.says(m.Joined(DRIVER, 8, "driver"), DRIVER), m.NodesWanted)] == [HEAD]
    told = dict(sent(host.all_told()))
    assert len(told[DRIVER].nodes) == LARGE
    assert WORKER not in told
    news = m.NodesChanged((entry(200),), ("tcp://n5#1",), more=True)
    told = dict(sent(host.says(news, HEAD)))
    assert told[DRIVER] == news
    assert (told[WORKER].nodes, told[WORKER].dead, told[WORKER].whole) == ((), ("tcp://n5#1",), False)
    assert len(host.node.desk.nodes) == LARGE
    assert "n200" in host.node.desk.nodes
    assert "n5" not in host.node.desk.nodes
    told = dict(sent(host.says(m.NodesChanged((entry(5),), (), more=True), HEAD)))
    assert told[WORKER].nodes == (entry(5),)  # everybody believed that it is dead


def test_a_worker_that_wants_to_know_asks_once_and_a_new_head_is_asked_again():
    host = Host()
    assert [to for to, _ in sent(host.says(m.NodesWanted(), WORKER), m.NodesWanted)] == [HEAD]
    assert sent(host.says(m.NodesWanted(), WORKER), m.NodesWanted) == []
    again = host.says(m.NodeAccepted(1, (entry(1),), whole=False), "tcp://head#2")
    assert [to for to, _ in sent(again, m.NodesWanted)] == ["tcp://head#2"]
    assert len(dict(sent(host.all_told()))[WORKER].nodes) == LARGE


def test_a_question_to_all_nodes_waits_until_they_are_known():
    host = Host()
    commands = host.says(m.Asked(5, "nodes", None, "cluster"), WORKER)
    assert sent(commands, m.Asked) == []
    assert sent(commands, m.NodesWanted)
    assert len(sent(host.all_told(), m.Asked)) == LARGE - 1


def owner_on(nodes: tuple[m.NodeEntry, ...]) -> Owner:
    owner = Owner(WORKER, ME, "n1", Config())
    owner.handle(m.NodesChanged(nodes, (), more=True, whole=False), 0.0, ME)
    return owner


def ways(owner: Owner, *nodes: str) -> list[tuple[str, ...]]:
    """Placements of the demands for a task that may go to each of these nodes in turn."""
    choice = m.Choice(tuple([(CPU, (node,)) for node in nodes]))
    spec = m.TaskSpec(child_id(b"", 1), b"f", "f", shape=CPU, placement=(nodes[0],), choice=choice)
    owner.handle(s.Submitted(spec, b"blob"), 0.0)
    assert check(owner) == []
    return [key[1] for key, queue in owner.queues.items() if queue.count]


def test_an_owner_believes_in_nodes_that_it_does_not_know_but_not_in_dead_ones():
    assert ways(owner_on((entry(1),)), "n77", "n1") == [("n77",)]
    owner = owner_on((entry(1), entry(77)))
    owner.handle(m.NodesChanged((), ("tcp://n77#1",), more=True, whole=False), 0.0, ME)
    assert ways(owner, "n77", "n1") == [("n1",)]
    owner = owner_on(())
    owner.handle(m.NodesChanged((entry(1),)), 0.0, ME)
    assert ways(owner, "n77", "n1") == [("n1",)]  # these are all


def test_an_owner_asks_where_a_node_is_that_holds_what_a_task_is_to_be_beside():
    owner = owner_on((entry(1),))
    oid = child_id(b"", 2) + b"\0\0\0\0"
    owner.handle(s.ValuePut(oid, m.Stored(100, ("tcp://n9#1",))), 0.0)
    near = m.Choice(((CPU, ()),), near=((0,),), unread=1)
    spec = m.TaskSpec(child_id(b"", 3), b"f", "f", shape=CPU, deps=(m.RefTo(oid, WORKER),), choice=near)
    assert [to for to, _ in sent(owner.handle(s.Submitted(spec, b"blob"), 0.0), m.NodesWanted)] == [ME]
    owner.handle(m.NodesChanged((entry(1), entry(9))), 0.0, ME)
    assert owner.placing.node_ids["tcp://n9#1"] == "n9"
    assert owner.placing.knows_all


def test_what_is_known_after_news():
    known = tuple(entry(number) for number in (1, 2, 3))
    news = m.NodesChanged((entry(0), entry(2, 2)), ("tcp://n2#1", "tcp://n3#1"), more=True)
    assert [node.address for node in known_after(known, news)] == ["tcp://n0#1", "tcp://n1#1", "tcp://n2#2"]
    assert known_after(known, m.NodesChanged((entry(5),))) == (entry(5),)
