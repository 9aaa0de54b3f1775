"""What the Node machine answers, event by event."""

from __future__ import annotations

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.invariants import check
from flowengine.core.node import Node, NodeSettings
from flowengine.core.node_desk import Tick
from flowengine.scheduling.resources import SEP

ME, HEAD, OTHER = "tcp://n1#a", "tcp://head#a", "tcp://n2#a"
CPU = (("CPU", 1.0),)
MIB = 1 << 20


class Kit:
    """A node with helpful verbs; every event is followed by a check of the laws."""

    def __init__(self, cpus: float = 2, workers: int = 2, store_bytes: int = 100, **config: float) -> None:
        total = (("CPU", float(cpus)), ("GPU", 1.0))
        settings = NodeSettings(ME, "n1", "h", total, workers, "/dev/shm/f", store_bytes, "s", HEAD)
        self.node = Node(settings, Config(**config))
        self.now = 0.0
        self.first = self.node.start(0.0)
        for number in range(1, workers + 1):
            self.started(number)

    def says(self, event: m.Message, sender: str = "", after_s: float = 0.0) -> list[c.Command]:
        self.now += after_s
        commands = self.node.handle(event, self.now, sender)
        assert check(self.node) == []
        return [command for command in commands if not isinstance(command, c.SetTimer)]

    def started(self, number: int) -> list[c.Command]:
        return self.says(m.WorkerStarted(f"n1.w{number}", number, f"w{number}"), f"w{number}")

    def demand(self, owner: str, total: int, shape: m.Shape = CPU, placement: tuple[str, ...] = (), depth: int = 0,
               ) -> list[c.Command]:
        return self.says(m.LeaseDemand(shape, placement, total, depth, 0), owner)

    def beats(self, seconds: float) -> list[c.Command]:
        commands: list[c.Command] = []
        for _ in range(int(seconds / 0.5)):
            commands += self.says(Tick("beat"), after_s=0.5)
        return commands

    def ended(self, number: int, code: int = -9) -> list[c.Command]:
        return self.says(c.WorkerEnded(m.Death(f"n1.w{number}", "h", number, code)))

    def cluster(self) -> list[c.Command]:
        four = (("CPU", 4.0),)
        there = tuple(m.NodeEntry(i, address, "h", four, four) for i, address in (("n1", ME), ("n2", OTHER)))
        return self.says(m.NodeAccepted(1, there), HEAD)


def sent(commands: list[c.Command], kind: type, to: str = "") -> list[m.Message]:
    return [
        command.message
        for command in commands
        if isinstance(command, c.Send) and isinstance(command.message, kind) and to in ("", command.to)
    ]


def ordered(commands: list[c.Command], kind: type) -> list[c.Command]:
    return [command for command in commands if isinstance(command, kind)]


def test_start_joins_and_prestarts_workers():
    first = Kit().first
    assert [command.worker_id for command in ordered(first, c.StartWorker)] == ["n1.w1", "n1.w2"]
    assert len(sent(first, m.NodeJoined, HEAD)) == 1


def test_grants_at_once_and_only_what_is_there():
    kit = Kit()
    granted = sent(kit.demand("d", 3), m.LeaseGranted, "d")
    assert [(grant.lease, grant.worker) for grant in granted] == [(1, "w2"), (2, "w1")]
    assert sent(kit.says(m.LeaseReturned(1), "d"), m.LeaseGranted, "d")[0].lease == 3
    assert sent(kit.says(m.LeaseReturned(2), "d"), m.LeaseGranted) == []


def test_a_stranger_cannot_return_a_lease():
    kit = Kit()
    kit.demand("d", 1)
    kit.says(m.LeaseReturned(1), "somebody")
    assert list(kit.node.leases.leases) == [1]


def test_children_come_before_roots_and_owners_take_turns():
    kit = Kit(cpus=1, workers=1)
    kit.demand("a", 5)
    kit.demand("b", 5)
    kit.demand("child", 1, depth=1)
    order = []
    for lease in range(1, 6):
        order += [grant.to for grant in kit.says(m.LeaseReturned(lease), kit.node.leases.leases[lease].owner)
                  if isinstance(grant, c.Send) and isinstance(grant.message, m.LeaseGranted)]
    assert order == ["child", "b", "a", "b", "a"]


def test_calls_leases_back_for_an_owner_that_holds_less():
    kit = Kit()
    kit.demand("a", 2)
    wanted = kit.demand("b", 2)
    assert len(sent(wanted, m.LeaseWanted, "a")) == 1  # one each is fair
    assert sent(kit.demand("b", 3), m.LeaseWanted) == []


def test_actors_do_not_use_up_the_processes_of_tasks():
    kit = Kit(cpus=1, workers=1, workers_extra_max=1)
    for number in range(1, 5):
        kit.demand("d", number, ())  # an actor takes no CPU
        if number > 1:
            kit.started(number)
        kit.says(m.ActorHere(bytes([number])), f"w{number}")
    assert [command.worker_id for command in ordered(kit.demand("d", 1), c.StartWorker)] == ["n1.w5"]
    assert len(sent(kit.started(5), m.LeaseGranted, "d")) == 1
    assert len(ordered(kit.demand("e", 3, ()), c.StartWorker)) == 1  # tasks without a CPU are bounded
    kit.ended(4)


def test_blocked_task_lends_its_cpu_and_a_worker_is_started_for_it():
    kit = Kit(cpus=1, workers=1)
    kit.demand("d", 1)
    kit.demand("w1", 1, depth=1)
    started = ordered(kit.says(m.WorkerBlocked("n1.w1", True), "w1"), c.StartWorker)
    assert [command.worker_id for command in started] == ["n1.w2"]
    assert len(sent(kit.started(2), m.LeaseGranted, "w1")) == 1
    kit.says(m.WorkerBlocked("n1.w1", False), "w1")
    assert kit.node.leases.ledger.free("CPU") == -10_000
    assert sent(kit.demand("d", 2), m.LeaseGranted) == []
    kit.says(m.LeaseReturned(2), "w1")
    assert kit.node.leases.ledger.free("CPU") == 0


def test_superfluous_workers_are_asked_to_end_after_a_while():
    kit = Kit(cpus=1, workers=1)
    kit.demand("d", 1)
    kit.demand("w1", 1, depth=1)
    kit.says(m.WorkerBlocked("n1.w1", True), "w1")
    kit.started(2)
    kit.says(m.LeaseReturned(2), "w1")
    assert sent(kit.beats(4.0), m.Goodbye, "w2") == []
    assert len(sent(kit.beats(2.0), m.Goodbye, "w2")) == 1
    assert len(sent(kit.beats(6.0), m.Goodbye, "w2")) == 1  # it was needed: asked again, not stopped
    kit.ended(2)
    assert kit.node.desk.counters["workers_lost"] == 0


def test_death_tells_the_owner_and_a_new_worker_comes():
    kit = Kit()
    kit.demand("d", 1)
    commands = kit.says(c.WorkerEnded(m.Death("n1.w2", "h", 2, -11, b"t" * 16, 1, "", ("last words",))))
    (lost,) = sent(commands, m.LeaseLost, "d")
    assert (lost.lease, lost.death.exit_code, lost.death.log_lines) == (1, -11, ("last words",))
    assert len(ordered(commands, c.StartWorker)) == 1


def test_forced_cancel_says_so_in_the_death():
    kit = Kit()
    kit.demand("d", 1)
    assert ordered(kit.says(m.KillWorker(1, b"t" * 16, "cancelled by force"), "d"), c.StopWorker)
    (lost,) = sent(kit.ended(2), m.LeaseLost)
    assert (lost.death.reason, lost.death.running) == ("cancelled by force", b"t" * 16)


def test_workers_that_die_at_once_are_started_ever_later():
    kit = Kit(workers=1)
    assert len(ordered(kit.ended(1), c.StartWorker)) == 1
    assert len(ordered(kit.ended(2), c.StartWorker)) == 1
    assert ordered(kit.ended(3), c.StartWorker) == []
    kit.now += 0.2
    assert len(ordered(kit.says(Tick("workers")), c.StartWorker)) == 1


def test_frozen_worker_is_killed_and_a_busy_one_is_not():
    kit = Kit(heartbeat_s=0.5, suspect_after_s=2.0)
    kit.demand("d", 2)
    checks = ordered(kit.beats(3.0), c.CheckWorker)
    assert [check.worker_id for check in checks][:2] == ["n1.w1", "n1.w2"]
    assert kit.says(c.WorkerChecked("n1.w1", False, 1.0)) == []
    assert kit.says(c.WorkerChecked("n1.w1", False, 1.4)) == []
    assert kit.says(c.WorkerChecked("n1.w1", False, 1.4)) == [c.StopWorker("n1.w1", 9)]
    assert kit.says(c.WorkerChecked("n1.w2", True, 0.0)) == [c.StopWorker("n1.w2", 9)]
    assert sent(kit.ended(2), m.LeaseLost)[0].death.reason == "frozen for 3.0 s"


def test_own_standstill_is_not_taken_for_the_silence_of_others():
    kit = Kit(heartbeat_s=0.5, suspect_after_s=2.0)
    kit.beats(0.5)
    assert ordered(kit.says(Tick("beat"), after_s=60.0), c.CheckWorker) == []


def test_driver_lost_kills_what_works_for_it_and_drops_its_objects():
    kit = Kit()
    kit.says(m.Joined("d", 9, "driver"), "d")
    kit.demand("d", 1)
    kit.demand("w2", 1)
    kit.says(m.ObjectSealed(b"o" * 20, 10, "d"), "w2")
    kit.says(m.ObjectSealed(b"p" * 20, 10, "w2"), "w2")
    commands = kit.says(m.PeerLost("d", "killed"))
    assert sorted(stop.worker_id for stop in ordered(commands, c.StopWorker)) == ["n1.w1", "n1.w2"]
    kit.ended(1)
    kit.ended(2)
    kit.says(m.OwnerEnded("w2"))
    assert kit.node.store.entries == {}
    assert kit.node.leases.leases == {}


def test_objects_of_a_dead_worker_stay_until_its_driver_ends():
    kit = Kit()
    kit.says(m.Joined("d", 9, "driver"), "d")
    kit.demand("d", 1)
    kit.says(m.ObjectSealed(b"p" * 20, 10, "w2"), "w2")
    kit.ended(2)
    assert list(kit.node.store.entries) == [b"p" * 20]
    assert ordered(kit.says(m.Goodbye(), "d"), c.RemoveObject) == [c.RemoveObject(b"p" * 20, False)]


def test_impossible_demand_names_what_is_missing():
    kit = Kit()
    (delayed,) = sent(kit.demand("d", 1, (("unobtainium", 1.0),)), m.LeaseDelayed)
    assert delayed.reason == "no node has unobtainium: 1 (largest: 0); the head is not there to be asked"


def test_other_nodes_are_sought_found_and_forgotten():
    kit = Kit(cpus=1, workers=1)
    kit.cluster()
    (sought,) = sent(kit.demand("d", 2), m.SlotsSought, HEAD)
    assert sought.count == 1
    (redirected,) = sent(kit.says(m.SlotsFound("d", CPU, (), OTHER), HEAD), m.LeaseRedirected, "d")
    assert redirected.node == OTHER
    assert kit.node.counters["leases_spilled"] == 1
    kit.beats(1.0)
    assert sent(kit.demand("d", 1), m.SlotsSought, HEAD)[0].count == 0


def test_placement_elsewhere_is_redirected_and_a_dead_one_waits_with_a_reason():
    kit = Kit()
    kit.cluster()
    assert sent(kit.demand("d", 1, placement=("n2",)), m.LeaseRedirected)[0].node == OTHER
    assert sent(kit.demand("d", 1, placement=("n2", "*")), m.LeaseRedirected)[0].node == OTHER
    (sought,) = sent(kit.demand("d", 1, placement=("gone",)), m.SlotsSought, HEAD)
    assert sought.placement == ("gone",)
    reason = "node gone is not there"
    found = m.SlotsFound("d", CPU, ("gone",), "", reason)
    assert sent(kit.says(found, HEAD), m.LeaseDelayed, "d")[0].reason == reason
    kit.says(m.PeerLost(HEAD, "gone"))
    (delayed,) = sent(kit.demand("d", 1, placement=("other",)), m.LeaseDelayed)  # as far as is known without the head
    assert delayed.reason == "node other is not there; the head is not there to be asked"
    assert len(sent(kit.beats(1.0), m.LeaseGranted)) == 1  # the soft one, when the other node does not answer


LOCK = f"lock{SEP}d"  # the job is that of driver d
LOCKED = ((LOCK, 1.0),)


def amounts(units: int, whole: bool = False, epoch: int = 1, key: str = LOCK) -> m.AmountsSet:
    return m.AmountsSet(((key, units),), epoch, whole)


def test_what_comes_at_run_time_is_granted_and_reported():
    kit = Kit()
    kit.cluster()
    assert sent(kit.demand("d", 3, LOCKED), m.SlotsSought, HEAD)[0].shape == LOCKED  # others may have it
    commands = kit.says(amounts(20_000), HEAD)
    assert len(sent(commands, m.LeaseGranted, "d")) == 2
    (report,) = sent(kit.says(Tick("report"), after_s=1.0), m.NodeReport, HEAD)
    assert report.dynamic == ((LOCK, 20_000, 0),)
    assert report.entry.total == (("CPU", 2.0), ("GPU", 1.0))
    assert sent(kit.says(Tick("beat"), after_s=1.0), m.NodeReport)[0].dynamic == ()
    kit.cluster()  # a new head hears of all
    assert sent(kit.says(Tick("report"), after_s=1.0), m.NodeReport)[0].dynamic == ((LOCK, 20_000, 0),)


def test_shrinking_calls_back_as_much_as_is_lacking():
    kit = Kit(workers=3)
    kit.cluster()
    kit.says(amounts(30_000), HEAD)
    kit.demand("d", 4, LOCKED)
    assert [back.lease for back in sent(kit.says(amounts(10_000), HEAD), m.LeaseWanted, "d")] == [3, 2]
    assert sent(kit.says(amounts(10_000), HEAD), m.LeaseWanted) == []
    assert sent(kit.says(m.LeaseReturned(3), "d"), m.LeaseGranted) == []
    assert sent(kit.says(m.LeaseReturned(2), "d"), m.LeaseGranted) == []
    assert len(sent(kit.says(m.LeaseReturned(1), "d"), m.LeaseGranted)) == 1
    assert sent(kit.says(amounts(0), HEAD), m.LeaseWanted, "d")[0].lease == 4
    kit.says(m.LeaseReturned(4), "d")
    assert kit.node.leases.ledger.names() == ("CPU", "GPU")


def test_an_order_that_takes_away_is_done_when_the_node_says_so():
    kit = Kit()
    kit.cluster()
    assert sent(kit.says(amounts(30_000), HEAD), m.AmountsDone) == []
    order = m.AmountsSet(((LOCK, 0),), 1, order=7)
    assert sent(kit.says(order, HEAD), m.AmountsDone, HEAD) == [m.AmountsDone(7)]
    assert sent(kit.demand("d", 1, LOCKED), m.LeaseGranted) == []


def test_amounts_of_another_life_are_none_and_a_whole_list_ends_what_is_not_in_it():
    kit = Kit()
    kit.cluster()
    kit.says(amounts(10_000, epoch=7), HEAD)
    assert kit.node.leases.ledger.size(LOCK) == 0
    kit.says(amounts(10_000), HEAD)
    kit.says(amounts(10_000, whole=True, key=f"other{SEP}d"), HEAD)
    assert kit.node.leases.ledger.names() == ("CPU", "GPU", f"other{SEP}d")
    kit.says(m.NodeFenced(2), HEAD)
    assert kit.node.leases.ledger.names() == ("CPU", "GPU")


def test_the_dead_holder_of_a_lock_gives_it_back():
    kit = Kit()
    kit.cluster()
    kit.says(amounts(10_000), HEAD)
    kit.demand("d", 1, LOCKED)
    assert sent(kit.demand("e", 1, LOCKED), m.LeaseGranted) == []
    assert sent(kit.ended(2), m.LeaseGranted, "e")[0].shape == LOCKED


def test_what_a_node_has_by_itself_goes_before_the_name_of_a_program():
    kit = Kit()
    kit.cluster()
    (grant,) = sent(kit.demand("d", 1, ((f"GPU{SEP}d", 1.0),)), m.LeaseGranted)
    assert grant.shape == ((f"GPU{SEP}d", 1.0),)
    assert kit.node.leases.ledger.free("GPU") == 0


def test_an_owner_gives_up_one_shape_for_another_of_its_own_that_is_more_urgent_or_starves():
    kit = Kit(starve_s=1.0)
    kit.cluster()
    kit.says(amounts(10_000), HEAD)
    kit.demand("d", 1, LOCKED)
    other = (*LOCKED, ("CPU", 1.0))
    commands = kit.says(m.LeaseDemand(other, (), 1, 0, 0.0), "d")
    assert sent(commands, m.LeaseWanted, "d") == [m.LeaseWanted(1, when_idle=True)]
    assert sent(kit.beats(0.5), m.LeaseWanted) == []
    assert sent(kit.beats(1.0), m.LeaseWanted, "d")[0].lease == 1


def test_reasons_name_things_as_people_know_them():
    kit = Kit()
    kit.cluster()
    kit.says(amounts(10_000), HEAD)
    kit.demand("d", 1, LOCKED)
    kit.demand("e", 1, LOCKED)
    assert sent(kit.beats(2.0), m.LeaseDelayed, "e")[0].reason == "node n1 is busy: needs lock: 1, free 0 of 1"


def test_a_demand_for_all_slots_does_not_starve():
    kit = Kit(starve_s=1.0)
    kit.demand("small", 2)
    kit.demand("big", 1, (("CPU", 2.0),))
    kit.now += 1.5
    kit.demand("small", 4)
    assert sent(kit.says(m.LeaseReturned(1), "small"), m.LeaseGranted) == []
    assert len(sent(kit.says(m.LeaseReturned(2), "small"), m.LeaseGranted, "big")) == 1


def test_fenced_node_begins_a_new_life():
    kit = Kit()
    kit.cluster()
    kit.demand("d", 1)
    kit.says(m.ObjectSealed(b"p" * 20, 10, "d"), "w1")
    commands = kit.says(m.NodeFenced(2), HEAD)
    assert len(ordered(commands, c.StopWorker)) == 2
    assert len(ordered(commands, c.RemoveObject)) == 1
    assert sent(commands, m.NodeJoined)[0].entry.epoch == 2
    assert "new life" in sent(kit.ended(2), m.LeaseLost)[0].death.reason


def test_head_loss_stops_nothing_and_the_node_joins_again():
    kit = Kit()
    kit.cluster()
    kit.says(m.PeerLost(HEAD, "killed"))
    assert len(sent(kit.demand("d", 1), m.LeaseGranted)) == 1
    assert len(sent(kit.beats(0.5), m.NodeJoined)) == 1


# --- store -----------------------------------------------------------------------------------------------------------


def put(kit: Kit, name: bytes, size_bytes: int, writer: str = "w1") -> list[c.Command]:
    commands = kit.says(m.SpaceAsked(1, size_bytes), writer)
    return commands + kit.says(m.ObjectSealed(name * 20, size_bytes, "d"), writer)


def test_oldest_is_spilled_and_asks_are_served_in_order():
    kit = Kit()
    put(kit, b"a", 60)
    put(kit, b"b", 40)
    assert kit.says(m.SpaceAsked(7, 50), "w1") == [c.SpillObject(b"a" * 20, 60)]
    assert sent(kit.says(m.SpaceAsked(8, 10), "w2"), m.SpaceGiven) == []
    given = sent(kit.says(c.ObjectSpilled(b"a" * 20, 30)), m.SpaceGiven)
    assert [(answer.request, answer.granted) for answer in given] == [(7, True), (8, True)]
    assert kit.node.stats()["bytes_spilled"] == 60


def test_too_large_says_sizes_and_folder():
    (given,) = sent(Kit(store_bytes=2 * MIB).says(m.SpaceAsked(1, 3 * MIB), "w1"), m.SpaceGiven)
    assert (given.granted, given.kind) == (False, "StoreFull")
    assert "3.0 MiB" in given.reason
    assert "2.0 MiB" in given.reason
    assert "/dev/shm/f" in given.reason


def test_full_store_without_progress_and_full_disk():
    kit = Kit(store_full_s=2.0)
    put(kit, b"a", 100)
    kit.says(m.SpaceAsked(7, 50), "w1")
    assert sent(kit.says(c.ObjectSpilled(b"a" * 20, 0, busy=True)), m.SpaceGiven) == []
    kit.now += 0.5
    assert sent(kit.says(Tick("store")), m.SpaceGiven) == []
    kit.now += 0.4
    kit.says(Tick("store"))
    kit.now += 0.2
    assert ordered(kit.says(Tick("store")), c.SpillObject)  # tried again
    (given,) = sent(kit.says(c.SpillFailed(b"a" * 20, "No space left on device", True)), m.SpaceGiven)
    assert (given.kind, "No space left" in given.reason) == ("OutOfDisk", True)


def test_spilled_object_is_restored_when_wanted():
    kit = Kit()
    put(kit, b"a", 60)
    kit.says(m.SpaceAsked(7, 50), "w1")
    kit.says(c.ObjectSpilled(b"a" * 20, 30))
    kit.says(m.SpaceReturned(50), "w1")
    assert kit.says(m.ObjectWanted(b"a" * 20, 60, "d", (ME,)), "w2") == [c.RestoreObject(b"a" * 20, 60)]
    commands = kit.says(c.ObjectRestored(b"a" * 20))
    assert sent(commands, m.ObjectHere, "w2")
    assert ordered(commands, c.RemoveObject) == [c.RemoveObject(b"a" * 20, True)]
    assert sent(kit.says(m.ObjectWanted(b"a" * 20, 60, "d", (ME,)), "w2"), m.ObjectHere, "w2")


def test_one_pull_serves_all_who_ask():
    kit, want = Kit(), m.ObjectWanted(b"a" * 20, 60, "owner", (ME, OTHER))
    assert kit.says(want, "w1") == [c.PullObject(b"a" * 20, 60, (OTHER,))]
    assert kit.says(want, "w2") == []
    commands = kit.says(c.ObjectPulled(b"a" * 20, OTHER))
    assert len(sent(commands, m.ObjectHere)) == 2
    assert sent(commands, m.CopyAdded, "owner") == [m.CopyAdded(b"a" * 20, ME)]
    assert kit.node.stats()["bytes_moved"] == 60


def test_owners_hear_of_a_copy_that_was_made_here_while_it_could_not_be_pulled():
    kit, oid = Kit(), b"a" * 20
    kit.says(m.ObjectWanted(oid, 60, "heir", (OTHER,)), "w1")
    kit.says(m.ObjectSealed(oid, 60, "owner", 1), "w2")
    failed = kit.says(c.PullFailed(oid, (OTHER,), "silence", (OTHER,)))
    assert sent(failed, m.CopyAdded, "heir") == [m.CopyAdded(oid, ME)]
    kit.says(m.ObjectFreed((oid,)), "heir")
    kit.says(m.ObjectFreed((oid,)), "owner")
    assert oid not in kit.node.store.entries


def test_failed_pull_is_forgotten():
    kit, want = Kit(), m.ObjectWanted(b"a" * 20, 60, "owner", (OTHER,))
    kit.says(want, "w1")
    failed = kit.says(c.PullFailed(b"a" * 20, (OTHER,), "gone", (OTHER,)))
    assert sent(failed, m.ObjectMissing) == [m.ObjectMissing(b"a" * 20, (OTHER,), "gone", (OTHER,))]
    assert ordered(kit.says(want, "w1"), c.PullObject)
    assert sent(kit.says(m.ObjectWanted(b"b" * 20, 1, "owner", (ME,)), "w1"), m.ObjectMissing)


def test_a_writer_that_fills_a_warm_segment_anew_need_not_ask():
    kit = Kit()
    put(kit, b"a", 60)
    kit.says(m.ObjectFreed((b"a" * 20,)), "d")
    kit.says(m.SegmentKept(b"a" * 20, 64), "w1")
    trimmed = sent(kit.says(m.SpaceAsked(2, 90), "w2"), m.PoolTrimmed, "w1")
    kit.says(m.ObjectSealed(b"b" * 20, 60, "d", 1), "w1")
    store = kit.node.store
    assert (store.used_bytes, store.granted_bytes, store.pools, trimmed) == (60, 90, {"w1": 4}, [m.PoolTrimmed(54)])
    kit.says(m.PoolTrimmed(0), "w1")
    kit.says(m.SpaceReturned(90), "w2")
    assert sent(kit.says(m.SpaceAsked(3, 30), "w1"), m.SpaceGiven) == [m.SpaceGiven(3, True)]


def test_free_asks_the_writer_who_may_keep_the_segment():
    kit = Kit()
    put(kit, b"a", 60)
    assert sent(kit.says(m.ObjectFreed((b"a" * 20,)), "d"), m.ObjectFreed, "w1")
    kit.says(m.SegmentKept(b"a" * 20, 64), "w1")
    assert (kit.node.store.used_bytes, kit.node.store.pools) == (0, {"w1": 64})
    assert sent(kit.says(m.SpaceAsked(2, 90), "w2"), m.PoolTrimmed, "w1") == [m.PoolTrimmed(54)]
    kit.says(m.PoolTrimmed(64), "w1")
    assert kit.node.store.pools == {}


def test_free_of_a_dead_writers_object_and_free_before_seal():
    kit = Kit()
    put(kit, b"a", 60)
    kit.ended(1)
    assert ordered(kit.says(m.ObjectFreed((b"a" * 20,)), "d"), c.RemoveObject) == [c.RemoveObject(b"a" * 20, False)]
    kit.says(m.ObjectFreed((b"b" * 20,)), "d")
    assert sent(put(kit, b"b", 10, "w2"), m.ObjectFreed, "w2")


def seal(kit: Kit, file: int, writer: str, size_bytes: int = 60) -> list[c.Command]:
    return kit.says(m.ObjectSealed(b"a" * 20, size_bytes, "d", file), writer)


def test_a_free_names_the_file_and_another_life_of_the_object_stays():
    kit = Kit(store_bytes=1000)
    seal(kit, 5, "w1")
    assert sent(kit.says(m.ObjectFreed((b"a" * 20,)), "d"), m.ObjectFreed, "w1") == [
        m.ObjectFreed((b"a" * 20,), files=(5,))]
    seal(kit, 7, "w2")
    assert kit.says(m.SegmentKept(b"a" * 20, 60, 5), "w1") == []
    assert kit.node.store.used_bytes == 60
    assert kit.says(m.ObjectWanted(b"a" * 20, 60, "d", (ME,)), "w1") == [c.Send("w1", m.ObjectHere(b"a" * 20))]
    assert kit.says(m.LoseObject(b"a" * 20), "d") == [c.RemoveObject(b"a" * 20, False, "", 7)]


def test_what_was_replaced_before_its_seal_was_told_is_no_object_and_its_writer_lets_go_of_it():
    kit = Kit()
    kit.says(m.SpaceAsked(1, 60), "w1")
    assert kit.says(c.SealedInVain(b"a" * 20, 60, 5), "w1") == [
        c.Send("w1", m.ObjectFreed((b"a" * 20,), files=(5,)))]
    assert (kit.node.store.entries, kit.node.store.granted_bytes, kit.node.store.used_bytes) == ({}, 0, 0)
    assert kit.says(m.SegmentKept(b"a" * 20, 0, 5), "w1") == []
    seal(kit, 7, "w2")
    assert sent(seal(kit, 8, "w1"), m.ObjectFreed, "w2") == [m.ObjectFreed((b"a" * 20,), files=(7,))]
    assert seal(kit, 9, "w1") == []  # a process lets go of its own
    kit.ended(1)
    assert kit.says(m.ObjectFreed((b"a" * 20,)), "d") == [c.RemoveObject(b"a" * 20, False, "", 9)]


def test_what_a_writer_was_freeing_when_it_died_goes_and_another_life_stays():
    kit = Kit(store_bytes=1000)
    seal(kit, 5, "w1")
    kit.says(m.ObjectFreed((b"a" * 20,)), "d")
    seal(kit, 7, "w2")
    assert ordered(kit.ended(1), c.RemoveObject) == [c.RemoveObject(b"a" * 20, False, "", 5)]
    assert list(kit.node.store.memory) == [b"a" * 20]


def test_what_is_made_again_while_the_former_is_spilled_stays_in_memory():
    kit = Kit()
    put(kit, b"a", 60)
    assert kit.says(m.SpaceAsked(7, 50), "w1") == [c.SpillObject(b"a" * 20, 60)]
    seal(kit, 7, "w2")
    assert ordered(kit.says(c.ObjectSpilled(b"a" * 20, 30)), c.RemoveObject) == [c.RemoveObject(b"a" * 20, True)]
    (entry,) = kit.node.store.memory.values()
    assert (entry.place, entry.file, entry.sealed_meanwhile, kit.node.store.disk_bytes) == ("memory", 7, False, 0)


def test_who_asked_for_what_was_doomed_hears_of_it_when_it_is_made_again():
    kit = Kit()
    put(kit, b"a", 60)
    kit.says(m.SpaceAsked(7, 50), "w1")
    kit.says(m.LoseObject(b"a" * 20), "d")
    assert kit.says(m.ObjectWanted(b"a" * 20, 60, "d", (ME,)), "w2") == []
    seal(kit, 7, "w1")
    assert sent(kit.says(c.SpillFailed(b"a" * 20, "the object was made again")), m.ObjectHere, "w2")


# --- questions ----------------------------------------------------------------------------------------------------


def test_stats_are_added_up_and_kept_of_dead_workers():
    kit = Kit()
    asked = sent(kit.says(m.Asked(5, "stats"), "d"), m.Asked)
    assert len(asked) == 2
    kit.says(m.Answered(asked[0].request, "stats", {"tasks_executed": 3}), "w1")
    (answer,) = sent(kit.says(m.Answered(asked[0].request, "stats", {"tasks_executed": 4}), "w2"), m.Answered, "d")
    assert answer.request == 5
    assert answer.content["tasks_executed"] == 7
    assert answer.content["workers_started"] == 2
    kit.ended(1)
    (again,) = sent(kit.says(m.Asked(6, "stats"), "d"), m.Asked)
    (answer,) = sent(kit.says(m.Answered(again.request, "stats", {"tasks_executed": 5}), "w2"), m.Answered, "d")
    assert answer.content["tasks_executed"] == 8


def test_nodes_and_resources():
    kit = Kit()
    kit.demand("d", 1)
    (answer,) = sent(kit.says(m.Asked(1, "nodes"), "d"), m.Answered)
    assert [worker["state"] for worker in answer.content[0]["workers"]] == ["idle", "leased"]
    (answer,) = sent(kit.says(m.Asked(1, "resources"), "d"), m.Answered)
    assert answer.content == {"total": {"CPU": 2.0, "GPU": 1.0}, "available": {"CPU": 1.0, "GPU": 1.0}}


def test_story_names_causes():
    kit = Kit()
    put(kit, b"a", 60)
    lines = kit.node.story((b"a" * 20).hex())
    assert len(lines) == 1
    assert "ObjectSealed" in lines[0]
    assert "from w1" in lines[0]
    assert kit.node.story(b"a" * 16) == lines
    assert any("WorkerStarted" in line for line in kit.node.story("n1.w1"))
