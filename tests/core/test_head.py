"""What the Head machine answers, event by event."""

from __future__ import annotations

import msgspec

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.head import AbsentAsked, Head, HeadBeat, HeadSettings
from flowengine.core.invariants import check

CPU = (("CPU", 1.0),)
TWO = (("CPU", 2.0),)


class Kit:
    """A head with helpful verbs; every event is followed by a check of the laws."""

    def __init__(self, rows: dict[str, bytes] | None = None, now: float = 0.0) -> None:
        self.rows = {} if rows is None else rows
        self.now = now
        self.head = Head(HeadSettings("tcp://head#a", "s", "h", 7), Config(suspect_after_s=2.0), self.rows)
        self.note(self.head.start(now))

    def note(self, commands: list[c.Command]) -> list[c.Command]:
        for command in commands:
            if isinstance(command, c.WriteJournal):
                self.rows.update({key: row for key, row in command.rows if row is not None})
        assert check(self.head) == []
        return commands

    def says(self, event: m.Message, sender: str = "", after_s: float = 0.0) -> list[c.Command]:
        self.now += after_s
        return self.note(self.head.handle(event, self.now, sender))

    def joins(self, node_id: str, life: int = 1, epoch: int = 0, total: m.Shape = TWO) -> list[c.Command]:
        address = f"{node_id}#{life}"
        return self.says(m.NodeJoined(m.NodeEntry(node_id, address, "h", total, total, epoch=epoch)), address)

    def reports(self, node_id: str, available: m.Shape, epoch: int = 1) -> list[c.Command]:
        address = f"{node_id}#1"
        return self.says(m.NodeReport(m.NodeEntry(node_id, address, "h", TWO, available, epoch=epoch)), address)

    def beats(self, seconds: float, speaking: tuple[str, ...] = ()) -> list[c.Command]:
        commands: list[c.Command] = []
        for _ in range(int(seconds / 0.5)):
            for node_id in speaking:
                commands += self.reports(node_id, TWO)
            commands += self.says(HeadBeat(), after_s=0.5)
        return commands


def sent(commands: list[c.Command], kind: type, to: str = "") -> list[m.Message]:
    return [
        command.message
        for command in commands
        if isinstance(command, c.Send) and isinstance(command.message, kind) and to in ("", command.to)
    ]


def test_join_is_accepted_and_told_to_the_others():
    kit = Kit()
    assert sent(kit.joins("a"), m.NodeAccepted, "a#1")[0].epoch == 1
    commands = kit.joins("b")
    assert [entry.node_id for entry in sent(commands, m.NodeAccepted)[0].nodes] == ["a", "b"]
    assert len(sent(commands, m.NodesChanged, "a#1")) == 1
    assert sent(commands, m.NodesChanged, "b#1") == []


def test_a_new_life_gets_a_new_epoch_and_the_old_address_is_dead():
    kit = Kit()
    kit.joins("a")
    kit.joins("b")
    commands = kit.joins("a", life=2)
    assert sent(commands, m.NodeAccepted, "a#2")[0].epoch == 2
    assert sent(commands, m.NodesChanged, "b#1")[0].dead == ("a#1",)


def test_lost_link_kills_after_the_wait_and_the_returned_is_fenced():
    kit = Kit()
    kit.joins("a")
    kit.joins("b")
    kit.says(m.PeerLost("a#1", "cut"))
    assert sent(kit.beats(2.0, ("b",)), m.NodesChanged) == []
    assert sent(kit.beats(1.0, ("b",)), m.NodesChanged, "b#1")[0].dead == ("a#1",)
    (fenced,) = sent(kit.reports("a", TWO), m.NodeFenced, "a#1")
    assert fenced.epoch == 2
    commands = kit.joins("a", epoch=2)
    assert sent(commands, m.NodeAccepted)[0].epoch == 2
    assert sent(commands, m.NodesChanged, "b#1")[0].dead == ()


def test_a_node_whose_port_refuses_is_dead_at_once():
    kit = Kit()
    kit.joins("a")
    kit.joins("b")
    assert sent(kit.says(m.PeerLost("a#1", "refused", ended=True)), m.NodesChanged, "b#1")[0].dead == ("a#1",)
    assert list(kit.head.members) == ["b"]
    assert sent(kit.says(m.PeerLost("a#1", "refused", ended=True)), m.NodesChanged) == []


def test_a_young_head_dials_those_that_do_not_come_back():
    old = Kit()
    for node_id in "abc":
        old.joins(node_id)
    kit = Kit(old.rows, now=100.0)
    kit.joins("a", epoch=1)
    commands = kit.says(AbsentAsked(), after_s=1.5)
    assert [command.to for command in commands if isinstance(command, c.Send)] == ["b#1", "c#1"]
    assert sent(kit.says(m.PeerLost("b#1", "refused", ended=True)), m.NodesChanged, "a#1")[0].dead == ("b#1",)
    assert sent(kit.says(m.PeerLost("c#1", "not reached")), m.NodesChanged) == []
    assert list(kit.head.expected) == ["c"]


def test_a_node_that_its_launcher_starts_again_tells_who_is_dead():
    kit = Kit()
    kit.joins("a")
    kit.joins("b")
    entry = m.NodeEntry("c", "c#1", "h", TWO, TWO)
    commands = kit.says(m.NodeJoined(entry, ("old", "a")), "c#1")
    assert [entry.node_id for entry in sent(commands, m.NodeAccepted, "c#1")[0].nodes] == ["b", "c"]
    assert sent(commands, m.NodesChanged, "b#1")[0].dead == ("a#1",)
    assert list(kit.head.members) == ["b", "c"]


def test_lost_link_that_comes_back_is_forgotten():
    kit = Kit()
    kit.joins("a")
    kit.says(m.PeerLost("a#1", "cut"))
    kit.beats(5.0, ("a",))
    assert list(kit.head.members) == ["a"]


def test_frozen_node_with_an_open_link_dies_later():
    kit = Kit()
    kit.joins("a")
    kit.beats(3.5)
    assert list(kit.head.members) == ["a"]
    kit.beats(1.0)
    assert kit.head.members == {}


def test_restart_knows_epochs_and_buries_who_does_not_return():
    old = Kit()
    old.joins("a")
    old.joins("b")
    kit = Kit(old.rows, now=100.0)
    assert kit.head.port == 7
    assert sent(kit.joins("a", epoch=1), m.NodeAccepted)[0].epoch == 1
    assert sent(kit.beats(3.0, ("a",)), m.NodesChanged, "a#1")[0].dead == ("b#1",)
    assert sent(kit.joins("b", life=2), m.NodeAccepted)[0].epoch == 2


def test_report_to_a_young_head_is_a_join():
    kit = Kit()
    assert sent(kit.reports("a", TWO, epoch=3), m.NodeAccepted)[0].epoch == 3


def test_slots_are_promised_once():
    kit = Kit()
    for node_id in ("a", "b", "c"):
        kit.joins(node_id)
    kit.reports("a", ())
    kit.reports("c", ())
    assert sent(kit.says(m.SlotsSought("d", CPU, (), 2), "a#1"), m.SlotsFound)[0].node == "b#1"
    (found,) = sent(kit.says(m.SlotsSought("e", CPU, (), 1), "c#1"), m.SlotsFound)
    assert (found.node, found.reason) == ("", "all 3 nodes that could run it are busy")
    assert sent(kit.reports("b", CPU), m.SlotsFound, "c#1")[0].node == "b#1"
    assert kit.head.slots.seekers == {}


def test_who_waits_long_is_sent_to_a_busy_node_if_its_own_can_never_serve_it():
    kit = Kit()
    for node_id, total in (("a", CPU), ("b", TWO), ("c", TWO)):
        kit.joins(node_id, total=total)
    for node_id, queued in (("b", 5), ("c", 3)):
        busy = m.NodeEntry(node_id, f"{node_id}#1", "h", TWO, CPU, queued=queued, epoch=1)
        kit.says(m.NodeReport(busy), f"{node_id}#1")
    sought = m.SlotsSought("d", TWO, (), 1)
    for node_id in "ab":
        assert sent(kit.says(sought, f"{node_id}#1"), m.SlotsFound)[0].node == ""
    waited = [kit.says(HeadBeat(), after_s=0.5) for _ in range(4)]
    assert [sent(commands, m.SlotsFound) for commands in waited[:3]] == [[]] * 3
    (found,) = sent(waited[3], m.SlotsFound)  # who seeks for b waits there
    assert (found.node, found.reason) == ("c#1", "node c is busy")
    assert [key[0] for key in kit.head.slots.seekers] == ["b#1"]


def test_seeker_is_answered_when_a_node_joins():
    kit = Kit()
    kit.joins("a")
    gpu = (("GPU", 1.0),)
    (found,) = sent(kit.says(m.SlotsSought("d", gpu, (), 1), "a#1"), m.SlotsFound)
    assert found.reason == "no node has GPU: 1 (largest: 0)"
    assert sent(kit.joins("g", total=gpu), m.SlotsFound, "a#1")[0].node == "g#1"


def test_nodes_of_programs_alone_run_no_tasks():
    kit = Kit()
    kit.joins("p", total=())
    (found,) = sent(kit.says(m.SlotsSought("d", TWO, (), 1), "p#1"), m.SlotsFound)
    assert found.reason == "no node that runs tasks is there: `flow node --join FILE` brings one"
    assert sent(kit.joins("a"), m.SlotsFound, "p#1")[0].node == "a#1"


def test_withdrawn_seekers_are_forgotten():
    kit = Kit()
    kit.joins("a")
    kit.says(m.SlotsSought("d", CPU, (), 1), "a#1")
    kit.says(m.SlotsSought("d", CPU, (), 0), "a#1")
    assert kit.head.slots.seekers == {}


def test_messages_are_counted():
    kit = Kit()
    kit.joins("a")
    (answer,) = sent(kit.says(m.Asked(1, "stats"), "a#1"), m.Answered)
    assert answer.content == {"head_messages": 2}
    assert kit.head.story("a#1")
    assert msgspec.msgpack.encode(sent(kit.says(m.Asked(2, "nodes"), "a#1"), m.Answered)[0])
