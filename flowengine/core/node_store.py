"""The books of a node's store: who may use how much, what goes to disk, what is pulled. The shell moves the bytes."""

from __future__ import annotations

from collections import deque

from .commands import (
    ObjectPulled,
    ObjectRestored,
    ObjectSpilled,
    PullFailed,
    PullObject,
    RemoveObject,
    RestoreFailed,
    RestoreObject,
    SealedInVain,
    Send,
    SpillFailed,
    SpillObject,
)
from .dispatch import on
from .messages import (
    CopiesLost,
    CopyAdded,
    LoseObject,
    ObjectAdopted,
    ObjectFreed,
    ObjectHere,
    ObjectMissing,
    ObjectSealed,
    ObjectWanted,
    Ping,
    SegmentKept,
    SpaceGiven,
)
from .node_desk import NEVER_S, Desk, Tick
from .node_objects import Ask, Entry, disk_full, full, mib, too_large
from .node_room import Room

WANTED_GRACE_S = 0.5  # a reader that was told that an object is here needs this long to map it
KEPT_S = 1.0  # an object that could not be spilled is tried again later
DISK_FULL_S = 5.0  # then writing to disk is tried again
RETRY_S = 0.1  # while somebody waits for room
EARLY_FREE_S = 10.0  # an owner's free may overtake the writer's seal by so much
EARLY_FREES_MAX = 10_000


class Store(Room):
    """Accounting of one host's store; laws S-1 to S-6."""

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self.entries: dict[bytes, Entry] = {}
        self.memory: dict[bytes, Entry] = {}  # those in memory, the one used last is at the end
        self.by_owner: dict[str, dict[bytes, None]] = {}
        self.freeing: dict[tuple[str, bytes, int], int] = {}  # (writer, oid, file) -> bytes that the writer removes
        self.leaving_bytes = 0  # part of used_bytes that is being spilled or removed
        self.disk_bytes = 0
        self.pulls: deque[Entry] = deque()  # that wait for one of the parallel pulls to end
        self.pulling = 0
        self.spilling = 0
        self.disk_full_until_s = NEVER_S
        self.disk_full_reason = ""
        self.early_frees: dict[tuple[bytes, str], float] = {}  # (object, owner)
        self._timer_set = False

    # --- who waits for room -----------------------------------------------------------------------

    def serve(self, now: float) -> None:
        """Grants room in the order of the asks, makes room for the first that does not fit, gives up when it must."""
        while self.asks:
            ask = self.asks[0]
            missing = ask.size_bytes - self.left_bytes
            if missing <= 0:
                self.asks.popleft()
                self._give_room(ask, now)
                continue
            kind, reason = self._hopeless(ask, missing, now)
            if not kind:
                break
            self.asks.popleft()
            self._refuse(ask, kind, reason)
        if self.asks and not self._timer_set:
            self._timer_set = True
            self.desk.out.timer(RETRY_S, Tick("store"))

    def timer_fired(self, now: float) -> None:
        """Somebody waited for room a moment ago."""
        self._timer_set = False

    def _give_room(self, ask: Ask, now: float) -> None:
        entry = ask.entry
        if entry is None:
            self._grant(ask.sender, ask.request, ask.size_bytes)
            return
        self.used_bytes += entry.size_bytes
        entry.ordered = True
        if entry.running == "restore":
            self.desk.out.add(RestoreObject(entry.oid, entry.size_bytes))
        else:
            self.desk.out.add(PullObject(entry.oid, entry.size_bytes, tuple(entry.nodes)))

    def _hopeless(self, ask: Ask, missing: int, now: float) -> tuple[str, str]:
        """Orders to make room; (kind, reason) when it is certain or likely that none will come."""
        folder = self.desk.settings.store_folder
        if ask.size_bytes > self.limit_bytes:
            return "StoreFull", too_large(ask.size_bytes, self.limit_bytes, folder)
        if now >= self.disk_full_until_s:
            self._spill(missing - self.leaving_bytes, now)
        if self.leaving_bytes:
            return "", ""
        if now < self.disk_full_until_s:
            return "OutOfDisk", f"no room for an object of {mib(ask.size_bytes)}: {self.disk_full_reason}"
        if now - max(ask.since_s, self.progress_s) < self.desk.config.store_full_s:
            return "", ""
        uses = (
            ("in objects", self.used_bytes),
            ("in objects that are just written", self.granted_bytes),
            ("in warm segments", self.pool_bytes),
            ("of other programs", self.lacking_bytes),
        )
        return "StoreFull", full(ask.size_bytes, self.limit_bytes, folder, uses)

    def _refuse(self, ask: Ask, kind: str, reason: str) -> None:
        if ask.entry is None:
            self.desk.out.send(ask.sender, SpaceGiven(ask.request, False, kind, reason))
            return
        entry = ask.entry
        self._tell_missing(entry, (self.desk.me,), f"{kind}: {reason}")
        if entry.running == "pull":
            self._pull_ended()
            self._forget(entry)
        else:
            entry.running = ""

    def _spill(self, need: int, now: float) -> None:
        """Orders to write objects to disk, the ones used longest ago first."""
        config = self.desk.config
        for entry in self.memory.values():
            if need <= 0 or self.spilling >= config.spill_parallel_max:
                return
            if entry.running or entry.kept_until_s > now or now - entry.wanted_s < WANTED_GRACE_S:
                continue
            if config.spill_limit_bytes and self.disk_bytes + entry.size_bytes > config.spill_limit_bytes:
                self.disk_full_until_s = now + DISK_FULL_S
                self.disk_full_reason = disk_full(self.disk_bytes, config.spill_limit_bytes)
                return
            entry.running, entry.ordered = "spill", True
            self.spilling += 1
            self.leaving_bytes += entry.size_bytes
            need -= entry.size_bytes
            self.desk.out.add(SpillObject(entry.oid, entry.size_bytes, entry.file))

    # --- objects come -----------------------------------------------------------------------------

    @on(SealedInVain)
    def _sealed_in_vain(self, event: SealedInVain, now: float, sender: str) -> None:
        self._written(sender, event.size_bytes)
        self._let_go(sender, event.oid, event.file)

    def _let_go(self, writer: str, oid: bytes, file: int) -> None:
        """A writer's file lies under the object's name no more: it drops its mapping, and has no room to give back."""
        if writer in ("", self.desk.me):
            self.desk.out.add(RemoveObject(oid, False, writer, file))
        elif self.desk.is_alive(writer):
            self.desk.out.send(writer, ObjectFreed((oid,), files=(file,)))

    @on(ObjectSealed)
    def _sealed(self, event: ObjectSealed, now: float, sender: str) -> None:
        self._written(sender, event.size_bytes)
        entry = self.entries.get(event.oid)
        if entry is None:
            entry = self.entries[event.oid] = Entry(event.oid, event.size_bytes, {})
            self._add_owner(entry, event.owner)
        elif not self._sealed_again(entry, event, now, sender):
            return
        entry.writer, entry.file = sender, event.file
        self._now_in_memory(entry, event.size_bytes, now)
        if self.early_frees and now - self.early_frees.pop((event.oid, event.owner), NEVER_S) < EARLY_FREE_S:
            self._free_for(entry, event.owner)

    def _sealed_again(self, entry: Entry, event: ObjectSealed, now: float, sender: str) -> bool:
        """An object that is known was made here once more; False when nothing else is to be done about it now."""
        self._add_owner(entry, event.owner)
        if entry.writer != sender:
            self._let_go(entry.writer, entry.oid, entry.file)
        entry.doomed = False  # it was lost and is wanted again
        self._look_again(entry, now)
        if entry.place == "memory":
            change = event.size_bytes - entry.size_bytes
            self.used_bytes += change
            self.leaving_bytes += change if entry.running else 0
            entry.size_bytes = event.size_bytes
        elif not entry.ordered:
            self._unqueue(entry)
            self._leave_disk(entry)
            return True
        entry.sealed_meanwhile, entry.writer, entry.file = entry.ordered, sender, event.file
        return False

    def _now_in_memory(self, entry: Entry, size_bytes: int, now: float) -> None:
        entry.size_bytes = size_bytes
        entry.place, entry.running, entry.ordered = "memory", "", False
        self.used_bytes += size_bytes
        self.memory[entry.oid] = entry
        self._tell_here(entry, now)

    @on(ObjectWanted)
    def _wanted(self, event: ObjectWanted, now: float, sender: str) -> None:
        entry = self.entries.get(event.oid)
        if entry is not None and entry.doomed:
            entry.late.append((event, sender))  # other nodes may have it: looked at when this copy is gone
            return
        if entry is None:
            nodes = [node for node in event.nodes if node != self.desk.me and node not in self.desk.dead_nodes]
            if not nodes:
                reason = "no living node has it" if self.desk.dead_nodes else "it is not in the store"
                self.desk.out.send(sender, ObjectMissing(event.oid, event.nodes, reason))
                return
            entry = self.entries[event.oid] = Entry(event.oid, event.size_bytes, {}, running="pull")
            self._add_owner(entry, event.owner)
            entry.nodes = dict.fromkeys(nodes)
            self.pulls.append(entry)
            entry.waiters[sender] = None
            self._next_pulls(now)
            return
        entry.wanted_s = now
        if entry.place == "memory" and not entry.running:
            self.memory[event.oid] = self.memory.pop(event.oid)  # used last
            self.desk.out.send(sender, ObjectHere(event.oid))
            return
        entry.waiters[sender] = None
        if entry.running == "pull" and not entry.ordered:
            entry.nodes.update(dict.fromkeys(node for node in event.nodes if node != self.desk.me))
        elif entry.place == "disk" and not entry.running:
            self._restore(entry, now)

    def _restore(self, entry: Entry, now: float) -> None:
        entry.running, entry.ordered = "restore", False
        self.asks.append(Ask(entry.size_bytes, now, entry=entry))

    def _next_pulls(self, now: float) -> None:
        while self.pulls and self.pulling < self.desk.config.pull_parallel_max:
            entry = self.pulls.popleft()
            self.pulling += 1
            self.asks.append(Ask(entry.size_bytes, now, entry=entry))

    def _pull_ended(self) -> None:
        self.pulling -= 1
        if self.pulls:
            self._next_pulls(self.progress_s)

    def _tell_here(self, entry: Entry, now: float) -> None:
        if entry.waiters:
            entry.wanted_s = now
            for waiter in entry.waiters:
                self.desk.out.send(waiter, ObjectHere(entry.oid))
            entry.waiters = {}

    def _tell_missing(
        self, entry: Entry, nodes: tuple[str, ...], reason: str, silent: tuple[str, ...] = ()
    ) -> None:
        for waiter in entry.waiters:
            self.desk.out.send(waiter, ObjectMissing(entry.oid, nodes, reason, silent))
        entry.waiters = {}

    # --- what the shell reports -------------------------------------------------------------------

    def _running(self, oid: bytes, kind: str) -> Entry | None:
        entry = self.entries.get(oid)
        return entry if entry is not None and entry.running == kind and entry.ordered else None

    def _spill_ended(self, entry: Entry) -> bool:
        """Whether the object was made again meanwhile, so that what went to disk is the former one."""
        self.spilling -= 1
        self.leaving_bytes -= entry.size_bytes
        again, entry.sealed_meanwhile = entry.sealed_meanwhile, False
        entry.running, entry.ordered = "", False
        return again

    @on(ObjectSpilled)
    def _spilled(self, event: ObjectSpilled, now: float, sender: str) -> None:
        entry = self._running(event.oid, "spill")
        if entry is None:
            return
        again = self._spill_ended(entry)
        if again or event.busy:
            if not event.busy:
                self.desk.out.add(RemoveObject(entry.oid, True))
            self._stays(entry, now)
            return
        self.progress_s = now
        self.disk_full_until_s = NEVER_S
        self.desk.counters["bytes_spilled"] += entry.size_bytes
        del self.memory[entry.oid]
        self.used_bytes -= entry.size_bytes
        entry.place, entry.writer, entry.file, entry.disk_bytes = "disk", "", 0, event.disk_bytes
        self.disk_bytes += event.disk_bytes
        if entry.doomed:
            self._drop(entry, quietly=True)
        elif entry.waiters:
            self._restore(entry, now)

    @on(SpillFailed)
    def _spill_failed(self, event: SpillFailed, now: float, sender: str) -> None:
        entry = self._running(event.oid, "spill")
        if entry is None:
            return
        self._spill_ended(entry)
        if event.disk_full:
            self.disk_full_until_s = now + DISK_FULL_S
            self.disk_full_reason = event.reason
        self._stays(entry, now)

    def _stays(self, entry: Entry, now: float) -> None:
        """An object could not leave memory."""
        if entry.doomed:
            self._drop(entry, quietly=False)
            return
        entry.kept_until_s = now + KEPT_S
        self.memory[entry.oid] = self.memory.pop(entry.oid)  # others are tried before it is tried again
        self._tell_here(entry, now)

    @on(ObjectRestored)
    def _restored(self, event: ObjectRestored, now: float, sender: str) -> None:
        entry = self._running(event.oid, "restore")
        if entry is not None:
            self._leave_disk(entry)
            self._arrived(entry, now)

    @on(ObjectPulled)
    def _pulled(self, event: ObjectPulled, now: float, sender: str) -> None:
        entry = self._running(event.oid, "pull")
        if entry is None:
            return
        self.desk.counters["bytes_moved"] += entry.size_bytes
        self._pull_ended()
        self._tell_owners(entry)
        self._arrived(entry, now)

    def _tell_owners(self, entry: Entry) -> None:
        """They know of the copy that was to be pulled, or say that it is not needed."""
        if not entry.doomed:
            for owner in entry.owners:
                self.desk.out.send(owner, CopyAdded(entry.oid, self.desk.me))

    def _arrived(self, entry: Entry, now: float) -> None:
        """A pull or restore has ended well; its room was taken when it began."""
        self.used_bytes -= entry.size_bytes
        entry.sealed_meanwhile = False
        self._now_in_memory(entry, entry.size_bytes, now)
        if entry.doomed:
            self._drop(entry, quietly=False)

    @on(PullFailed)
    def _pull_failed(self, event: PullFailed, now: float, sender: str) -> None:
        entry = self._running(event.oid, "pull")
        if entry is None:
            return
        self._pull_ended()
        if entry.sealed_meanwhile:
            self._tell_owners(entry)
            self._arrived(entry, now)
            return
        self.used_bytes -= entry.size_bytes
        self.progress_s = now
        self._tell_missing(entry, event.nodes, event.reason, event.silent)
        self._forget(entry)

    @on(RestoreFailed)
    def _restore_failed(self, event: RestoreFailed, now: float, sender: str) -> None:
        entry = self._running(event.oid, "restore")
        if entry is None:
            return
        if event.free_bytes is not None and not entry.sealed_meanwhile and not entry.doomed:
            self.used_bytes -= entry.size_bytes
            self._only_free(event.free_bytes)
            self._restore(entry, now)
            return
        self._leave_disk(entry)
        if entry.sealed_meanwhile:
            self._arrived(entry, now)
            return
        self.used_bytes -= entry.size_bytes
        self.progress_s = now
        self._tell_missing(entry, (self.desk.me,), event.reason)
        if not entry.doomed:
            for owner in entry.owners:
                self.desk.out.send(owner, CopiesLost(entry.oid, (self.desk.me,)))
        self._forget(entry)

    # --- objects go -------------------------------------------------------------------------------

    @on(ObjectFreed)
    def _freed(self, event: ObjectFreed, now: float, sender: str) -> None:
        self.progress_s = now
        for oid in event.oids:
            entry = self.entries.get(oid)
            if entry is not None:
                self._free_for(entry, sender)
            elif not event.present:
                self.early_frees[oid, sender] = now
                if len(self.early_frees) > EARLY_FREES_MAX:
                    del self.early_frees[next(iter(self.early_frees))]

    def _free_for(self, entry: Entry, owner: str) -> None:
        """One owner needs it no more; the writer of what nobody was told of may say so too."""
        if owner not in entry.owners and (owner != entry.writer or len(entry.owners) > 1):
            return
        if owner in entry.owners and len(entry.owners) > 1:
            self._drop_owner(entry, owner)
        else:
            self._free(entry)

    def _free(self, entry: Entry) -> None:
        if entry.running and entry.ordered:
            entry.doomed = True
        else:
            self._unqueue(entry)
            self._drop(entry, quietly=False)

    def _unqueue(self, entry: Entry) -> None:
        """Takes back what was not ordered yet for an entry."""
        if not entry.running or entry.ordered:
            return
        if entry in self.pulls:
            self.pulls.remove(entry)
        else:
            self.asks = deque(ask for ask in self.asks if ask.entry is not entry)
            if entry.running == "pull":
                self._pull_ended()
        entry.running = ""

    def _drop(self, entry: Entry, quietly: bool) -> None:
        """Removes an object that nothing is under way for; quietly: the node does it, not the writer."""
        self._tell_missing(entry, (self.desk.me,), "the object was freed")
        if entry.place == "disk":
            self._leave_disk(entry)
        elif entry.place == "memory":
            del self.memory[entry.oid]
            key = (entry.writer, entry.oid, entry.file)
            here = entry.writer == self.desk.me
            if (here or (not quietly and self.desk.is_alive(entry.writer))) and key not in self.freeing:
                self.freeing[key] = entry.size_bytes
                self.leaving_bytes += entry.size_bytes
                away = Send(entry.writer, ObjectFreed((entry.oid,), files=(entry.file,)), not self.asks)
                self.desk.out.add(RemoveObject(entry.oid, False, entry.writer, entry.file) if here else away)
            else:
                self.used_bytes -= entry.size_bytes
                self.desk.out.add(RemoveObject(entry.oid, False, entry.writer if here else "", entry.file))
        self._forget(entry)

    def _leave_disk(self, entry: Entry) -> None:
        if entry.place == "disk":
            self.disk_bytes -= entry.disk_bytes
            entry.disk_bytes = 0
            self.desk.out.add(RemoveObject(entry.oid, True))

    def _forget(self, entry: Entry) -> None:
        del self.entries[entry.oid]
        for owner in list(entry.owners):
            self._drop_owner(entry, owner)
        self._look_again(entry, entry.wanted_s)

    def _look_again(self, entry: Entry, now: float) -> None:
        """What was doomed is gone, or is not doomed any more."""
        late, entry.late = entry.late, []
        for event, sender in late:
            self._wanted(event, now, sender)

    @on(SegmentKept)
    def _kept(self, event: SegmentKept, now: float, sender: str) -> None:
        size_bytes = self.freeing.pop((sender, event.oid, event.file), None)
        if size_bytes is None:
            return
        self.leaving_bytes -= size_bytes
        self.used_bytes -= size_bytes
        self.progress_s = now
        self._set_pool(sender, self.pools.get(sender, 0) + event.kept_bytes)
        if self.asks or self.pool_bytes > self.left_bytes:
            self._trim_pools(spared="")

    @on(LoseObject)
    def _lost_on_purpose(self, event: LoseObject, now: float, sender: str) -> None:
        entry = self.entries.get(event.oid)
        if entry is not None:
            self._lose(entry)

    def _lose(self, entry: Entry) -> None:
        if entry.running and entry.ordered:
            entry.doomed = True
        else:
            self._unqueue(entry)
            self._drop(entry, quietly=True)

    # --- owners and processes ---------------------------------------------------------------------

    def _add_owner(self, entry: Entry, owner: str) -> None:
        entry.owners[owner] = None
        self.by_owner.setdefault(owner, {})[entry.oid] = None

    def _drop_owner(self, entry: Entry, owner: str) -> None:
        del entry.owners[owner]
        owned = self.by_owner[owner]
        del owned[entry.oid]
        if not owned:
            del self.by_owner[owner]

    @on(ObjectAdopted)
    def _adopted(self, event: ObjectAdopted, now: float, sender: str) -> None:
        entry = self.entries.get(event.oid)
        if entry is not None:
            self._add_owner(entry, event.owner)
            if event.owner != sender:
                self.desk.out.send(event.owner, Ping(0))  # if it is dead already, this node has to hear of that

    def owner_ended(self, owner: str) -> None:
        """What an owner left and nobody adopted goes."""
        for oid in list(self.by_owner.get(owner, ())):
            self._free_for(self.entries[oid], owner)

    def writer_died(self, writer: str) -> None:
        """A worker is dead: owners may not have heard of results that it sealed last."""
        for entry in self.entries.values():
            if entry.writer == writer and not entry.doomed:
                for owner in entry.owners:
                    if owner != writer:
                        self.desk.out.send(owner, CopyAdded(entry.oid, self.desk.me, True))

    def process_gone(self, address: str, now: float) -> None:
        """A process is dead: it writes, keeps, frees and waits for nothing any more."""
        self.granted_bytes -= self.granted.pop(address, 0)
        self._set_pool(address, 0)
        self.asks = deque(ask for ask in self.asks if ask.entry is not None or ask.sender != address)
        for key in [key for key in self.freeing if key[0] == address]:
            size_bytes = self.freeing.pop(key)
            self.leaving_bytes -= size_bytes
            self.used_bytes -= size_bytes
            entry = self.entries.get(key[1])
            if entry is None or entry.file != key[2]:
                self.desk.out.add(RemoveObject(key[1], False, "", key[2]))
        for entry in list(self.entries.values()):
            entry.waiters.pop(address, None)
            if entry.late:
                entry.late = [pair for pair in entry.late if pair[1] != address]
        self.progress_s = now

    def clear(self) -> None:
        """A new life of the node: objects go whose owners have written them off; programs of this host have not."""
        kept = [process.address for process in self.desk.processes.values() if process.role == "driver"]
        for entry in [entry for entry in self.entries.values() if not any(one in entry.owners for one in kept)]:
            if entry.running and entry.ordered:
                entry.doomed = True
                self._tell_missing(entry, (self.desk.me,), "the node began a new life")
            else:
                self._unqueue(entry)
                self._drop(entry, quietly=True)

    def gauges(self) -> dict[str, int]:
        """How much is stored now."""
        stored = [entry for entry in self.entries.values() if entry.place]
        return {"objects_stored": len(stored), "bytes_stored": sum(entry.size_bytes for entry in stored)}
