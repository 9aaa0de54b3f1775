"""An owner driven by hand decides which results are written to durable storage, and takes them back from there."""
from __future__ import annotations

from typing import Any

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.ids import child_id, object_id
from flowengine.core.owner import Owner

ME, NODE, WORKER, OTHER = "tcp://h:1#me", "tcp://h:2#node", "tcp://h:3#worker", "tcp://h:4#other"
ONE = (("CPU", 1.0),)
SECOND_US = 1_000_000
SIZE = 1_000_000
URL = "file:///kept"


def entry(address: str) -> m.NodeEntry:
    return m.NodeEntry(address[-5:], address, "h", (), ())


class Scene:
    """An owner that runs one task after the other on a worker; keeps what it ordered last."""

    def __init__(self, **limits: Any) -> None:
        self.owner = Owner(ME, NODE, "node", Config(**limits))
        self.now = 0.0
        self.count = 0
        self.out: list[Any] = []
        self.step(m.NodesChanged((entry(NODE), entry(OTHER))))
        self.run(None, 0)

    def step(self, event: m.Message, sender: str = "") -> list[Any]:
        self.now += 0.001
        self.out = self.owner.handle(event, self.now, sender)
        return self.out

    def run(self, before: bytes | None, run_us: int, size_bytes: int = SIZE) -> bytes:
        """A task of one input gives a stored result; its name."""
        self.count += 1
        task = child_id(b"", self.count)
        deps = () if before is None else (m.RefTo(before, ME),)
        self.step(s.Submitted(m.TaskSpec(task, b"f", "f", deps=deps), b"blob"))
        if not self.owner.leases:
            self.step(m.LeaseGranted(self.count, ONE, (), WORKER, "w1", "node"), NODE)
        self.done(task, 1, run_us, size_bytes)
        return object_id(task, 0)

    def done(self, task: bytes, attempt: int, run_us: int, size_bytes: int = SIZE) -> None:
        self.step(m.TaskDone(task, attempt, (m.Stored(size_bytes, (NODE,)),), run_us), WORKER)

    def asked(self) -> list[bytes]:
        return [one.message.oid for one in self.out
                if isinstance(one, c.Send) and isinstance(one.message, m.PersistObject)]

    def of(self, kind: type) -> list[Any]:
        return [one for one in self.out if isinstance(one, kind)]

    def written(self, oid: bytes) -> None:
        self.step(m.ObjectPersisted(oid, URL, 0.01), WORKER)

    def lose(self, node: str = NODE) -> None:
        self.step(m.NodesChanged((entry(OTHER),), (node,)))


def chain(scene: Scene, steps: int, run_us: int) -> list[bytes]:
    """The results that were to be written of a chain, all of which is written when asked for."""
    oid, found = scene.run(None, run_us), []
    for _ in range(steps):
        found += scene.asked()
        for one in scene.asked():
            scene.written(one)
        oid = scene.run(oid, run_us)
    return found


def test_nothing_is_written_while_no_node_was_lost():
    assert chain(Scene(), 200, SECOND_US // 10) == []


def test_a_long_chain_is_cut_into_pieces_when_nodes_are_lost_often():
    found = chain(Scene(node_mtbf_s=20.0), 30, SECOND_US)
    assert 8 <= len(found) <= 30
    assert chain(Scene(node_mtbf_s=20.0), 30, 1_000) == []  # cheap to make again
    assert chain(Scene(node_mtbf_s=20.0, persist_bytes_max=0), 30, SECOND_US) == []
    assert len(chain(Scene(node_mtbf_s=20.0, persist_bytes_max=3 * SIZE), 30, SECOND_US)) == 3


def test_the_loss_of_nodes_is_learnt():
    scene = Scene()
    before = scene.owner.node_rate_per_s()
    scene.lose(OTHER)
    assert scene.owner.node_rate_per_s() > 100 * before


def persisted() -> tuple[Scene, bytes, bytes]:
    """A result that is durable, and one that was made of it."""
    scene = Scene(node_mtbf_s=20.0)
    first = scene.run(None, 10 * SECOND_US)
    assert scene.asked() == [first]
    scene.written(first)
    return scene, first, scene.run(first, 1_000)


def test_a_durable_result_is_read_back_and_not_made_again():
    scene, first, _ = persisted()
    scene.lose()
    scene.step(s.ReadyAsked(5, (first,), 1))
    assert scene.of(c.RestoreDurable) == [c.RestoreDurable(first, URL)]
    scene.step(s.ReadyAsked(6, (first,), 1))
    assert scene.out == []  # it is under way
    scene.step(s.DurableBack(first, OTHER))
    assert [one.waiter for one in scene.of(c.Resolve)] == [5, 6]
    assert scene.owner.objects[first].value == m.Stored(SIZE, (OTHER,))


def test_what_is_made_again_begins_from_the_nearest_durable_result():
    scene, first, second = persisted()
    scene.lose()
    scene.step(s.ReadyAsked(5, (second,), 1))
    assert scene.of(c.RestoreDurable) == [c.RestoreDurable(first, URL)]
    assert scene.owner.objects[first].task.state is s.State.DONE
    assert scene.owner.objects[second].task.state is s.State.WAITING


def test_a_copy_that_cannot_be_read_is_made_again():
    scene, first, _ = persisted()
    scene.lose()
    scene.step(s.ReadyAsked(5, (first,), 1))
    scene.step(s.DurableBack(first, OTHER, "the file is torn"))
    assert scene.owner.objects[first].task.state is not s.State.DONE
    assert scene.of(c.DropDurable) == [c.DropDurable(first, URL)]
    assert not scene.owner.objects[first].durable


def test_a_copy_goes_with_its_object():
    scene, first, second = persisted()
    scene.step(s.RefsDropped((first,)))
    assert scene.of(c.DropDurable) == []  # its value is gone, and what was made of it may need it
    scene.step(s.RefsDropped((second,)))
    assert scene.of(c.DropDurable) == [c.DropDurable(first, URL)]


def test_what_is_in_a_store_again_when_nobody_needs_it_any_more_is_freed():
    scene = Scene(node_mtbf_s=20.0)
    first = scene.run(None, 10 * SECOND_US)
    scene.step(s.RefsDropped((first,)))
    scene.step(s.DurableBack(first, OTHER))
    assert [one.message for one in scene.of(c.Send) if one.to == OTHER] == [m.ObjectFreed((first,))]


def test_a_copy_of_what_nobody_needs_any_more_is_dropped_when_it_comes():
    scene = Scene(node_mtbf_s=20.0)
    first = scene.run(None, 10 * SECOND_US)
    scene.step(s.RefsDropped((first,)))
    scene.written(first)
    assert scene.of(c.DropDurable) == [c.DropDurable(first, URL)]


def test_a_copy_that_could_not_be_written_is_told_of():
    scene = Scene(node_mtbf_s=20.0)
    first = scene.run(None, 10 * SECOND_US)
    scene.step(m.ObjectPersisted(first, "", 0.0, "the disk is full"), WORKER)
    assert "the disk is full" in "\n".join(scene.owner.explain(first))


def test_an_input_of_many_is_written_in_their_place():
    scene = Scene(node_mtbf_s=20.0)
    base = scene.run(None, SECOND_US // 2)
    assert scene.asked() == []
    scene.run(base, 10_000)
    scene.run(base, SECOND_US // 3)
    assert scene.asked() == [base]


def test_it_tells_why():
    scene, first, second = persisted()
    assert "durable: written: file:///kept" in "\n".join(scene.owner.explain(first))
    text = "\n".join(scene.owner.explain(second))
    for part in ("to make it again", "0.001 s of run time", "a node is lost once in", "to write it", "not written"):
        assert part in text
