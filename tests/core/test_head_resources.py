"""Resources that programs make, as the head decides about them, event by event."""

from __future__ import annotations

import math

import pytest

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.head import Head, HeadBeat, HeadSettings
from flowengine.core.head_jobs import JobDoubted
from flowengine.core.head_resources import OrdersDue, amount_of
from flowengine.core.invariants import check
from flowengine.scheduling.resources import LIMITLESS, SEP, Units, plain

CPU = (("CPU", 2.0),)
GPU = (("CPU", 2.0), ("GPU", 1.0))
JOB = "tcp://driver#1"
ELSEWHERE = "its amount is changed by flow.resources.set; to have it elsewhere delete it first"


def key(name: str, job: str = JOB) -> str:
    return name + SEP + job


class Kit:
    """A head, its journal and a program that gives orders; the laws are checked after every event."""

    def __init__(self, rows: dict[str, bytes] | None = None) -> None:
        self.rows = {} if rows is None else rows
        self.now = 0.0
        self.unwritten: list[c.WriteJournal] = []
        self.head = Head(HeadSettings("tcp://head#a", "s", "h", 7), Config(suspect_after_s=2.0), self.rows)
        self.first = self.note(self.head.start(0.0))

    def note(self, commands: list[c.Command]) -> list[c.Command]:
        self.unwritten += [command for command in commands if isinstance(command, c.WriteJournal)]
        assert check(self.head) == []
        return commands

    def says(self, event: m.Message, sender: str = "", after_s: float = 0.0) -> list[c.Command]:
        self.now += after_s
        return self.note(self.head.handle(event, self.now, sender))

    def written(self) -> list[c.Command]:
        """The journal has all that it was given."""
        commands, unwritten = [], self.unwritten
        self.unwritten = []
        for order in unwritten:
            for row, value in order.rows:
                if value is None:
                    self.rows.pop(row, None)
                else:
                    self.rows[row] = value
            if order.number:
                commands += self.says(c.JournalWritten(order.number))
        for command in list(commands):
            if isinstance(command, c.Send) and isinstance(command.message, m.AmountsSet) and command.message.order:
                commands += self.says(m.AmountsDone(command.message.order), command.to)
        return commands

    def joins(self, node_id: str, total: m.Shape = CPU, life: int = 1, epoch: int = 0) -> list[c.Command]:
        address = f"{node_id}#{life}"
        commands = self.says(m.NodeJoined(m.NodeEntry(node_id, address, "h", total, total, epoch=epoch)), address)
        self.written()
        return commands

    def reports(self, node_id: str, *dynamic: tuple[str, int, int], total: m.Shape = CPU) -> list[c.Command]:
        entry = m.NodeEntry(node_id, f"{node_id}#1", "h", total, total, epoch=1)
        return self.says(m.NodeReport(entry, dynamic), f"{node_id}#1")

    def orders(self, verb: str, *argument: object, sender: str = JOB) -> tuple[str, list[c.Command]]:
        """An order, to its end: what is wrong about it, and what was told to others when it was done."""
        assert sent(self.says(m.Asked(1, f"resource.{verb}", list(argument)), sender), m.Answered) == []
        commands = self.written()
        (answer,) = sent(commands, m.Answered, sender)
        number, wrong = answer.content
        return wrong, [*commands, *self.says(m.OrderSeen(number), sender)]

    def creates(self, name: str, units: int = 10_000, node: object = None, selector: object = None, home: str = "a",
                job: str = JOB) -> tuple[str, dict[str, Units]]:
        wrong, commands = self.orders("create", key(name, job), units, node, selector, home, sender=job)
        return wrong, told(commands)

    def listed(self, job: str = JOB) -> dict[str, dict]:
        (answer,) = sent(self.says(m.Asked(2, "resource.list", job), job), m.Answered)
        return answer.content

    def ends(self, job: str) -> list[c.Command]:
        """The program is gone: its link is lost, and again."""
        assert told(self.says(m.PeerLost(job, "killed"))) == {}
        assert len(sent(self.says(JobDoubted(job), after_s=1.0), m.Ping, job)) == 1
        return self.says(m.PeerLost(job, "connection refused"))

    def dies(self, node_id: str, others: tuple[str, ...] = (), life: int = 1) -> list[c.Command]:
        commands = self.says(m.PeerLost(f"{node_id}#{life}", "killed"))
        for _ in range(6):
            for other in others:
                commands += self.reports(other)
            commands += self.says(HeadBeat(), after_s=0.5)
        self.written()
        return commands


def sent(commands: list[c.Command], kind: type, to: str = "") -> list[m.Message]:
    return [
        command.message
        for command in commands
        if isinstance(command, c.Send) and isinstance(command.message, kind) and to in ("", command.to)
    ]


def told(commands: list[c.Command]) -> dict[str, Units]:
    """What nodes were told of amounts, by address and plain names."""
    return {
        command.to: tuple((plain(name), units) for name, units in command.message.amounts)
        for command in commands
        if isinstance(command, c.Send) and isinstance(command.message, m.AmountsSet)
    }


def test_an_order_is_written_answered_and_then_done():
    kit = Kit()
    kit.joins("a")
    commands = kit.says(m.Asked(9, "resource.create", [key("lock"), 10_000, None, None, "a"]), JOB)
    assert sent(commands, m.Answered) == []
    assert told(commands) == {}
    commands = kit.written()
    (answer,) = sent(commands, m.Answered, JOB)
    assert (answer.request, answer.content[1]) == (9, "")
    assert told(commands) == {}
    assert told(kit.says(m.OrderSeen(answer.content[0]), JOB)) == {"a#1": (("lock", 10_000),)}
    assert Kit(kit.rows).head.resources.made == kit.head.resources.made


def test_what_takes_away_is_done_before_the_call_returns():
    kit = Kit()
    kit.joins("a")
    kit.creates("lock", 20_000)
    for verb, argument in (("set", [10_000]), ("add", [-5_000, "t/0"]), ("delete", [])):
        kit.says(m.Asked(9, f"resource.{verb}", [key("lock"), *argument]), JOB)
        messages = [type(command.message) for command in kit.written() if isinstance(command, c.Send)]
        assert messages == [m.AmountsSet, m.Answered]


def test_what_nodes_have_by_themselves_is_theirs():
    kit = Kit()
    kit.joins("a", (*CPU, ("lic", 1.0)))
    for verb, argument in (("create", [1, None, None, "a"]), ("set", [5]), ("add", [5, "t/0"]), ("delete", [])):
        assert "'lic' is a resource that nodes have by themselves" in kit.orders(verb, key("lic"), *argument)[0]
    assert kit.orders("delete", key("never"))[0] == ""


def test_the_answer_waits_for_the_nodes_that_have_less_or_their_end():
    kit = Kit()
    kit.joins("a")
    kit.joins("b")
    kit.creates("all", selector=[])
    for goes_on in (lambda: kit.says(m.AmountsDone(kit.head.resources._number), "b#1"), lambda: kit.dies("b", "a"),
                    lambda: kit.joins("b", life=2)):
        kit.orders("set", key("all"), 20_000)
        kit.says(m.Asked(9, "resource.set", [key("all"), 10_000]), JOB)
        written = [kit.says(c.JournalWritten(order.number)) for order in kit.unwritten]
        kit.unwritten = []
        assert [sent(commands, m.Answered) for commands in written] == [[]]
        assert sent(kit.says(m.AmountsDone(kit.head.resources._number), "a#1"), m.Answered) == []
        assert len(sent(goes_on(), m.Answered, JOB)) == 1
        assert kit.head.resources.undone == {}
        if "b" not in kit.head.members:
            kit.joins("b", life=2)


def test_the_order_of_a_caller_that_died_is_done_all_the_same():
    kit = Kit()
    kit.joins("a")
    kit.says(m.Asked(9, "resource.create", [key("lock"), 10_000, None, None, "a"]), "w1")
    kit.written()
    assert told(kit.says(OrdersDue(), after_s=0.5)) == {}
    assert told(kit.says(OrdersDue(), after_s=0.6)) == {"a#1": (("lock", 10_000),)}


def test_places():
    kit = Kit()
    kit.joins("a")
    kit.joins("g", GPU)
    assert kit.creates("here", home="g")[1] == {"g#1": (("here", 10_000),)}
    assert kit.creates("named", node="a")[1] == {"a#1": (("named", 10_000),)}
    assert kit.creates("all", selector=[])[1] == {"a#1": (("all", 10_000),), "g#1": (("all", 10_000),)}
    assert kit.creates("beside GPUs", 5, selector=[["GPU", 1.0]])[1] == {"g#1": (("beside GPUs", 5),)}
    (whole,) = sent(kit.joins("h", GPU), m.AmountsSet, "h#1")
    assert whole.whole
    assert whole.amounts == ((key("all"), 10_000), (key("beside GPUs"), 5))
    assert sent(kit.joins("b", (("memory", 1.0),)), m.AmountsSet, "b#1")[0].amounts == ((key("all"), 10_000),)


def test_a_home_without_workers_is_no_place():
    kit = Kit()
    kit.joins("driver", (("memory", 1.0),))
    kit.joins("a")
    kit.joins("b")
    assert [list(kit.creates(name, home="driver")[1]) for name in "xyz"] == [["a#1"], ["b#1"], ["a#1"]]


@pytest.mark.parametrize(("again", "wrong"), [
    ((10_000, None, None), ""),
    ((20_000, None, None), "resource 'x' is there already, with 1: change it with flow.resources.set or add"),
    ((10_000, "a", None), f"resource 'x' is there already, on node a: {ELSEWHERE}"),
    ((10_000, None, []), f"resource 'x' is there already, on node a: {ELSEWHERE}"),
])
def test_creating_again(again, wrong):
    kit = Kit()
    kit.joins("a")
    kit.creates("x")
    assert kit.creates("x", *again) == (wrong, {})


def test_a_task_that_runs_again_creates_what_was_changed_since():
    kit = Kit()
    kit.joins("a")
    kit.creates("x")
    assert kit.orders("set", key("x"), 30_000)[0] == ""
    assert kit.creates("x") == ("", {})
    assert kit.creates("x", 30_000) == ("", {})
    assert kit.listed()["x"]["total"] == 3


def test_bad_orders():
    kit = Kit()
    kit.joins("a", (("CPU", 1.0), ("license", 1.0)))
    assert "'license' is a resource that nodes have by themselves" in kit.creates("license")[0]
    assert kit.creates("x", node="b")[0].startswith("there is no node 'b'")
    kit.creates("lock")
    assert kit.orders("set", key("lok"), 1)[0] == "there is no resource 'lok': did you mean 'lock'? known are lock"
    assert kit.orders("add", key("lok"), 1, "t/0")[0].startswith("there is no resource 'lok'")
    assert told(kit.orders("delete", key("lok"))[1]) == {}
    assert kit.orders("burn", key("lock"))[0] == "there is no order 'burn'"


def test_changes_come_in_any_order_and_once():
    kit = Kit()
    kit.joins("a")
    kit.creates("x")
    assert told(kit.orders("add", key("x"), -30_000, "t/0")[1]) == {"a#1": (("x", 0),)}
    assert told(kit.orders("add", key("x"), -30_000, "t/0")[1]) == {}
    kit = Kit(kit.rows)
    kit.joins("a", epoch=1)
    assert told(kit.orders("add", key("x"), -30_000, "t/0")[1]) == {}
    assert told(kit.orders("add", key("x"), 50_000, "t/1")[1]) == {"a#1": (("x", 30_000),)}
    kit.orders("delete", key("x"))
    assert not [row for row in kit.rows if row.startswith(("made/", "add/"))]


def test_no_limit():
    kit = Kit()
    kit.joins("a")
    kit.creates("x", LIMITLESS)
    assert kit.listed()["x"]["total"] == math.inf
    assert told(kit.orders("add", key("x"), -30_000, "t/0")[1]) == {}
    assert amount_of(15_000) == 1.5


def test_a_dead_nodes_resources_are_elsewhere_before_others_hear_of_its_death():
    kit = Kit()
    for node_id in ("a", "b", "c"):
        kit.joins(node_id)
    kit.creates("any")
    kit.creates("fixed", node="a")
    kit.creates("all", selector=[])
    kit.reports("a", (key("any"), 10_000, 0))
    commands = [command for command in kit.dies("a", ("b", "c")) if isinstance(command, c.Send)]
    news = [type(command.message) for command in commands if command.to == "b#1"]
    assert told(commands) == {"b#1": (("any", 10_000),)}
    assert news.index(m.AmountsSet) < news.index(m.NodesChanged)
    listed = kit.listed()
    assert (listed["any"]["available"], list(listed["any"]["nodes"])) == (1, ["b"])
    assert list(listed["all"]["nodes"]) == ["b", "c"]
    assert listed["fixed"]["waiting"] == "it belongs to node a, which is not there"
    assert told(kit.joins("a", life=2)) == {"a#2": (("fixed", 10_000), ("all", 10_000))}


def test_what_has_no_node_waits_for_one():
    kit = Kit()
    kit.joins("a")
    kit.creates("any")
    kit.creates("all", selector=[["GPU", 1.0]])
    kit.dies("a")
    assert kit.listed()["any"]["waiting"] == "it waits for a node"
    assert kit.listed()["all"]["waiting"] == "it is made on each node with {'GPU': 1.0}, and there is none"
    kit.joins("b")
    assert list(kit.listed()["any"]["nodes"]) == ["b"]


def test_a_new_head_tells_all_again_and_ends_what_it_does_not_know():
    kit = Kit()
    kit.joins("a")
    kit.creates("x")
    kit = Kit(kit.rows)
    (whole,) = sent(kit.joins("a", epoch=1), m.AmountsSet, "a#1")
    assert (whole.whole, whole.amounts) == (True, ((key("x"), 10_000),))
    kit.orders("delete", key("x"))
    kit = Kit(kit.rows)
    (whole,) = sent(kit.joins("a", epoch=1), m.AmountsSet, "a#1")
    assert (whole.whole, whole.amounts) == (True, ())


def test_a_new_head_finds_another_place_for_what_was_on_a_node_that_does_not_return():
    kit = Kit()
    kit.joins("a")
    kit.joins("b")
    kit.creates("x")
    kit = Kit(kit.rows)
    kit.joins("b", epoch=1)
    commands: list[c.Command] = []
    for _ in range(6):
        kit.reports("b")
        commands += kit.says(HeadBeat(), after_s=0.5)
    assert told(commands) == {"b#1": (("x", 10_000),)}


def test_resources_end_with_their_program_and_are_its_own():
    kit = Kit()
    kit.joins("a")
    other = "tcp://other#1"
    kit.creates("x")
    kit.creates("x", 30_000, job=other)
    assert [kit.listed(job)["x"]["total"] for job in (JOB, other)] == [1, 3]
    assert told(kit.ends(JOB)) == {"a#1": (("x", 0),)}
    assert kit.listed() == {}
    assert list(kit.listed(other)) == ["x"]
    kit.written()
    again = Kit(kit.rows)
    assert [command.to for command in again.first if isinstance(command, c.Send)] == [other]  # does it live?
    again.joins("a", epoch=1)
    again.ends(other)
    assert again.head.resources.jobs == {}


def test_a_program_whose_link_is_lost_once_may_live():
    kit = Kit()
    kit.joins("a")
    kit.creates("x")
    kit.says(m.PeerLost(JOB, "refused: it had another link with the head before"))
    kit.says(JobDoubted(JOB), after_s=1.0)
    kit.says(m.Pong(0), JOB)
    assert sent(kit.says(JobDoubted(JOB), after_s=1.0), m.Ping) == []
    kit.says(m.PeerLost(JOB, "cut"))
    assert list(kit.listed()) == ["x"]


def test_what_a_program_ordered_last_is_not_done_after_its_end():
    kit = Kit()
    kit.joins("a")
    kit.says(m.Asked(9, "resource.create", [key("x"), 10_000, None, None, "a"]), "w1")
    kit.ends(JOB)
    commands = kit.written()
    (answer,) = sent(commands, m.Answered, "w1")
    commands += kit.says(m.OrderSeen(answer.content[0]), "w1")
    assert all(units == 0 for amounts in told(commands).values() for _, units in amounts)
    assert not [row for row in kit.rows if row.startswith("made/")]


def test_who_seeks_a_resource_is_told_why_and_where():
    kit = Kit()
    kit.joins("a")
    kit.joins("b")
    shape = (("CPU", 1.0), (key("later"), 1.0))
    sought = m.SlotsSought("d", shape, (), 1)
    (found,) = sent(kit.says(sought, "b#1"), m.SlotsFound)
    assert found.reason == "no node has later: 1; it was not created yet"
    _, commands = kit.orders("create", key("later"), 5_000, None, None, "a")
    (found,) = sent(commands, m.SlotsFound, "b#1")
    assert found.reason == "no node has later: 1 (largest: 0.5)"
    _, commands = kit.orders("set", key("later"), 10_000)
    assert sent(commands, m.SlotsFound, "b#1")[0].node == "a#1"
    (found,) = sent(kit.says(sought, "b#1"), m.SlotsFound)  # its only node is promised: it waits there
    assert (found.node, found.reason) == ("a#1", "node a is busy")
    kit.orders("delete", key("later"))
    assert sent(kit.says(sought, "b#1"), m.SlotsFound)[0].reason.endswith("it was not created yet")


def test_news_of_one_name_serves_those_who_wait_for_it():
    kit = Kit()
    for node_id in ("a", "b", "c"):
        kit.joins(node_id)
    kit.creates("x", selector=[])
    for node_id in ("a", "b", "c"):
        kit.reports(node_id, (key("x"), 10_000, 0))
    for owner in ("d1", "d2"):
        kit.says(m.SlotsSought(owner, ((key("x"), 1.0),), (), 1), "c#1")
    assert list(kit.head.slots.watched) == [key("x")]
    (found,) = sent(kit.reports("b", (key("x"), 10_000, 10_000)), m.SlotsFound)
    assert (found.owner, found.node) == ("d1", "b#1")
    assert sent(kit.reports("b"), m.SlotsFound)[0].owner == "d2"  # the promise was not taken up
    assert kit.head.slots.watched == {}


def test_who_waits_for_a_name_of_a_program_is_served_by_a_node_that_has_it_by_itself():
    kit = Kit()
    kit.joins("a")
    kit.says(m.SlotsSought("d", ((key("license"), 1.0),), (), 1), "a#1")
    commands = kit.joins("b", (("CPU", 1.0), ("license", 1.0)))
    assert sent(commands, m.SlotsFound, "a#1")[0].node == "b#1"
