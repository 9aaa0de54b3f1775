"""A node that was declared dead begins a new life: what remote owners have written off goes, what is ours stays."""
from __future__ import annotations

from flowengine.config import Config
from flowengine.core import messages as m
from flowengine.core.commands import RemoveObject
from flowengine.core.node import Node
from flowengine.core.node_desk import NodeSettings

ME, HEAD, DRIVER, STRANGER = (f"tcp://127.0.0.1:{port}#x" for port in (1, 2, 3, 4))
ONE = (("CPU", 1.0),)
MINE, THEIRS = b"m" * 20, b"t" * 20


def test_values_of_a_program_of_this_host_outlive_the_fence():
    node = Node(NodeSettings(me=ME, node_id="n", host="127.0.0.1", total=ONE, num_workers=0, store_folder="f",
                             store_limit_bytes=1 << 20, session="s", head=HEAD), Config())
    node.start(0.0)
    node.handle(m.NodeAccepted(1, ()), 0.1, HEAD)
    node.handle(m.Joined(DRIVER, 1, "driver"), 0.2, DRIVER)
    for oid, owner in ((MINE, DRIVER), (THEIRS, STRANGER)):
        node.handle(m.SpaceAsked(1, 100), 0.3, DRIVER)
        node.handle(m.ObjectSealed(oid, 100, owner), 0.4, DRIVER)
    commands = node.handle(m.NodeFenced(2), 0.5, HEAD)
    gone = [command.oid for command in commands if isinstance(command, RemoveObject)]
    sent = [command.message for command in commands if getattr(command, "to", "") == DRIVER]
    gone += [oid for message in sent if isinstance(message, m.ObjectFreed) for oid in message.oids]
    assert gone == [THEIRS]
    assert list(node.store.entries) == [MINE]
    joined = [command.message for command in commands if isinstance(getattr(command, "message", None), m.NodeJoined)]
    assert [message.entry.epoch for message in joined] == [2]
