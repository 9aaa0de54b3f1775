"""One object, made, lost, freed and made again by two writers: every order of what they, the node and the owner do."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.invariants import LAWS
from flowengine.core.node import Node, NodeSettings
from flowengine.core.node_store import Store

NAME, ME, HEAD, OWNER, WRITERS, SIZE = b"x" * 20, "node", "head", "owner", ("a", "b"), 60
SETTINGS = NodeSettings(ME, "n1", "h", (("CPU", 2.0),), 0, "/shm", 100, "s", HEAD)
OTHER = "node2"
# What the owner may still say, and what each writer may still make. The object has no reader that maps it.
STORIES: dict[str, tuple[str, dict[str, int]]] = {
    "lost and made again": ("lose lose", {"a": 2, "b": 1}),
    "lost, freed and made again": ("lose free", {"a": 2, "b": 1}),
    "freed again and again": ("free free", {"a": 2, "b": 1}),
    "spilled, read, and made again": ("ask want free", {"a": 1, "b": 1}),
    "pulled from another node, and made here": ("want lose free", {"a": 1, "b": 1}),
}


def node_of() -> Node:
    node = Node(SETTINGS, Config())
    node.start(0.0)
    for process in (OWNER, *WRITERS):
        node.handle(m.Joined(process, 1, "driver"), 0.0, process)
    return node


NODE = node_of()
START = NODE.store
STORE_LAWS = [law for law in LAWS["Node"] if law.label in ("S-2", "S-3", "S-4", "S-5")]  # writers here ask for no room


@dataclass
class World:
    """The store's books and what lies there; the desk is shared by all, as nothing here changes it."""

    store: Store
    to_say: tuple[str, ...]
    to_make: dict[str, int]
    lies: int = 0  # under the object's name; 0: nothing, below: of the node itself
    on_disk: bool = False
    last_file: int = 0
    own: int = 0  # what the node has sealed last
    channels: dict[str, tuple[m.Message, ...]] = field(default_factory=dict)  # in order, between each two processes
    unsaid: dict[str, tuple[m.Message, ...]] = field(default_factory=dict)  # by the two threads of a writer
    made: dict[str, int] = field(default_factory=dict)  # by writer: what it has sealed last
    pools: dict[str, tuple[int, ...]] = field(default_factory=dict)
    disk_work: tuple[c.Command, ...] = ()
    reports: tuple[m.Message, ...] = ()
    told: tuple[int, ...] = ()  # lives that the node has heard of

    def copied(self) -> World:
        store = copy.deepcopy(self.store, {id(NODE.desk): NODE.desk})
        books = ("to_make", "channels", "unsaid", "made", "pools")
        return replace(self, store=store, **{name: dict(getattr(self, name)) for name in books})

    def key(self) -> str:
        entry = self.store.entries.get(NAME)
        books = entry and tuple([getattr(entry, name) for name in type(entry).__slots__])
        parts = (
            books, self.store.freeing, self.store.used_bytes, self.store.granted, self.store.pools,
            len(self.store.asks), self.store.early_frees, self.to_say, sorted(self.to_make.items()), self.lies,
            self.on_disk, self.own, self.last_file, sorted(self.channels.items()), sorted(self.unsaid.items()),
            sorted(self.made.items()), sorted(self.pools.items()), self.disk_work, self.reports, self.told,
        )  # fmt: skip
        return repr(parts)

    # --- what the processes do --------------------------------------------------------------------

    def put_in(self, channel: str, message: m.Message) -> None:
        self.channels[channel] = (*self.channels.get(channel, ()), message)

    def take(self, file: int) -> bool:
        """A conditional removal, as in Segments: only the life that was named goes, and the node has heard of that."""
        if not file or self.lies != file:
            return False
        assert file in self.told, f"{file} lives and its node has not heard of it, but it is removed"
        self.lies = 0
        return True

    def make(self, writer: str, file: int) -> None:
        self.to_make[writer] -= 1
        self.pools[writer] = tuple(one for one in self.pools.get(writer, ()) if one != file)
        if not file:
            file = self.last_file = self.last_file + 1
        self.told = tuple(one for one in self.told if one != file)
        self.lies = self.made[writer] = file
        self.unsaid[writer] = (*self.unsaid.get(writer, ()), m.ObjectSealed(NAME, SIZE, OWNER, file))

    def freed(self, writer: str, message: m.ObjectFreed) -> None:
        (file,) = message.files
        kept = 0
        if self.made.get(writer) == file:
            del self.made[writer]
            if self.take(file):
                self.pools[writer] = (*self.pools.get(writer, ()), file)
                kept = SIZE
        self.unsaid[writer] = (*self.unsaid.get(writer, ()), m.SegmentKept(NAME, kept, file))

    def handle(self, event: m.Message, sender: str = "") -> None:
        """The node's shell: it looks, hands the event in, and does at once what it can."""
        if isinstance(event, m.ObjectSealed):
            self.told = tuple(sorted({*self.told, event.file}))
            if self.lies != event.file:
                event = c.SealedInVain(event.oid, event.size_bytes, event.file)
        store = self.store
        type(store).HANDLERS[type(event)](store, event, 0.0, sender)
        store.serve(0.0)
        answers: list[m.Message] = []
        for command in NODE.desk.out.take():
            if isinstance(command, c.RemoveObject):
                self.remove(command, answers)
            elif isinstance(command, c.SpillObject | c.RestoreObject | c.PullObject):
                self.disk_work = (*self.disk_work, command)
            elif isinstance(command, c.Send):
                self.heard(command.to, command.message)
        for answer in answers:
            self.handle(answer, ME)
        NODE.store = store
        assert [line for law in STORE_LAWS for line in law.check(NODE)] == []

    def remove(self, command: c.RemoveObject, answers: list[m.Message]) -> None:
        if command.on_disk:
            self.on_disk = False
            return
        if command.file:
            self.take(command.file)
        elif self.own:
            self.take(self.own)
            self.own = 0
        if command.writer:
            answers.append(m.SegmentKept(command.oid, 0, command.file))

    def heard(self, to: str, message: m.Message) -> None:
        if to in WRITERS and isinstance(message, m.ObjectFreed):
            self.put_in(to, message)
        elif isinstance(message, m.ObjectHere):
            assert self.lies, "the node says that the object is here, and it is not"
        elif isinstance(message, m.SpaceGiven) and message.granted:
            self.put_in("owner to node", m.SpaceReturned(50))

    def perform(self, command: c.Command) -> m.Message:
        """Disks and other nodes."""
        if isinstance(command, c.SpillObject):
            if not self.lies or command.file not in (0, self.lies):
                return c.SpillFailed(NAME, "the object was made again")
            self.told = tuple(sorted({*self.told, self.lies}))
            self.on_disk, self.lies = True, 0
            return c.ObjectSpilled(NAME, 10)
        if isinstance(command, c.RestoreObject) and not self.on_disk:
            return c.RestoreFailed(NAME, "it is not there")
        if not self.lies:
            self.last_file += 1
            self.lies = self.own = -self.last_file
            self.told = (*self.told, self.own)
        return c.ObjectRestored(NAME) if isinstance(command, c.RestoreObject) else c.ObjectPulled(NAME, OTHER)

    # --- all that may happen next -----------------------------------------------------------------

    def next(self) -> Iterator[tuple[str, World]]:
        for what in dict.fromkeys(self.to_say):
            after = self.copied()
            at = self.to_say.index(what)
            after.to_say = self.to_say[:at] + self.to_say[at + 1 :]
            after.put_in("owner to node", {
                "lose": m.LoseObject(NAME), "free": m.ObjectFreed((NAME,), True), "ask": m.SpaceAsked(1, 50),
                "want": m.ObjectWanted(NAME, SIZE, OWNER, (ME, OTHER)),
            }[what])  # fmt: skip
            yield f"the owner says {what}", after
        for writer in WRITERS:
            sealing = any(isinstance(one, m.ObjectSealed) for one in self.unsaid.get(writer, ()))
            if self.to_make.get(writer) and not sealing:
                for file in (0, *self.pools.get(writer, ())):
                    after = self.copied()
                    after.make(writer, file)
                    yield f"{writer} seals {after.lies}", after
            for at, message in enumerate(self.unsaid.get(writer, ())):
                after = self.copied()
                rest = self.unsaid[writer]
                after.unsaid[writer] = rest[:at] + rest[at + 1 :]
                after.put_in(f"{writer} to node", message)
                yield f"{writer} says {message}", after
        for channel, messages in self.channels.items():
            if messages:
                after = self.copied()
                after.channels[channel] = messages[1:]
                if channel in WRITERS:
                    after.freed(channel, messages[0])  # type: ignore[arg-type]
                else:
                    after.handle(messages[0], channel.partition(" ")[0])
                yield f"{channel}: {messages[0]}", after
        if self.disk_work:
            after = self.copied()
            after.disk_work = self.disk_work[1:]
            after.reports = (*self.reports, after.perform(self.disk_work[0]))
            yield f"done: {self.disk_work[0]}", after
        if self.reports:
            after = self.copied()
            after.reports = self.reports[1:]
            after.handle(self.reports[0])
            yield f"reported: {self.reports[0]}", after

    def holds(self, ended: bool) -> None:
        entry = self.store.memory.get(NAME)
        spilling = entry is not None and entry.running == "spill"  # it may have gone to disk, and that is not told yet
        assert entry is None or self.lies or spilling, "the books have the object in memory, and it is not there"
        if ended:
            assert entry is not None or not self.lies, "the object is there, and not in the books"
            assert not self.store.freeing
            assert self.on_disk == (self.store.disk_bytes > 0)


def explore(world: World) -> int:
    """All orders; the number of worlds that were met. A breach is told with the shortest way to it."""
    came_from: dict[str, tuple[str, str]] = {world.key(): ("", "")}
    layer = [world]
    while layer:
        following = []
        for one in layer:
            here, ended = one.key(), True
            try:
                for what, after in one.next():
                    ended, key = False, after.key()
                    if key not in came_from:
                        came_from[key] = here, what
                        following.append(after)
                one.holds(ended)
            except AssertionError as error:
                way = [str(error)]
                while here:
                    here, what = came_from[here]
                    way.insert(1, what)
                raise AssertionError("\n".join(way)) from error
        layer = following
    return len(came_from)


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_books_and_files_agree_in_every_order(story: str) -> None:
    to_say, to_make = STORIES[story]
    assert explore(World(START, tuple(to_say.split()), to_make).copied()) > 1000
