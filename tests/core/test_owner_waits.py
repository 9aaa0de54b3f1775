"""Owners driven by hand: probes find waits that would never end, and only those."""

from __future__ import annotations

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.ids import child_id, object_id
from flowengine.core.owner import Owner
from flowengine.core.owner_waits import WaitIsLong, WaitTraced

DRIVER, NODE = "tcp://h:1#driver", "tcp://h:2#node"


def call_id(name: str) -> bytes:
    return child_id(b"calls", sum(ord(char) << 8 * place for place, char in enumerate(name)))


class Cluster:
    """Processes of actors A, B, ... that call each other; a call is named as A.f."""

    def __init__(self, *actors: str) -> None:
        self.owners = {actor: Owner(f"tcp://h:9#{actor}", NODE, "node", Config()) for actor in actors}
        self.at = {owner.me: actor for actor, owner in self.owners.items()}
        self.here: dict[str, list[bytes]] = {actor: [] for actor in actors}
        self.timers: list[tuple[str, m.Message]] = []
        self.broken: list[tuple[str, int]] = []
        self.now = 0.0

    def step(self, actor: str, event: m.Message) -> None:
        self.now += 0.01
        for one in self.owners[actor].handle(event, self.now):
            if isinstance(one, c.SetTimer):
                self.timers.append((actor, one.event))
            elif isinstance(one, c.Resolve):
                self.broken.append((actor, one.waiter))
            elif isinstance(one, c.Send) and isinstance(one.message, m.WaitProbe):
                to = self.at[one.to]
                self.step(to, WaitTraced(one.message, one.message.task in self.here[to]))

    def call(self, by: str, name: str) -> bytes:
        """Code of an actor calls a method, as A.f; the call comes to its actor."""
        actor, target = name.partition(".")[0], child_id(b"actors", ord(name[0]))
        ref = m.RefTo(object_id(target, 0), DRIVER, m.HANDLE)
        spec = m.TaskSpec(call_id(name), b"m", name, actor=ref, caller_key=by.encode() * 16)
        self.step(by, s.RefsMade((ref,)))
        self.step(by, s.Submitted(spec, None))
        self.step(by, m.ActorAt(target, 1, "alive", self.owners[actor].me, "exactly_once"))
        self.here[actor].append(spec.id)
        return object_id(spec.id, 0)

    def wait(self, code: str, *names: str, count: int = 0, alone: bool = True) -> None:
        """The code waits for calls; the wait has its number from the code's name."""
        actor = code.partition(".")[0]
        oids = tuple([self.call(actor, name) for name in names])
        self.here[actor].append(call_id(code))
        number = ord(code[-1])
        self.step(actor, s.ReadyAsked(number, oids, count or len(oids)))
        self.step(actor, WaitIsLong(number, call_id(code), code, number - 96, alone))

    def look(self) -> list[tuple[str, str]]:
        """Let the time of all waits come twice; gives what was told of those that were broken."""
        for _ in range(3):
            timers, self.timers = self.timers, []
            for actor, event in timers:
                self.step(actor, event)
        return [(actor, self.owners[actor].circles[waiter]) for actor, waiter in self.broken]


def test_two_actors_that_wait_for_each_other_are_told_apart_by_depth():
    cluster = Cluster("A", "B")
    cluster.wait("A.f", "B.g")
    cluster.wait("B.g", "A.h")
    assert cluster.broken == []  # it has to be found twice
    assert cluster.look() == [("B", "B.g waits for A.h, which waits for A.f to end, which waits for B.g")]


def test_an_actor_that_waits_for_a_call_of_its_own():
    cluster = Cluster("A")
    cluster.wait("A.f", "A.g")
    assert cluster.look() == [("A", "A.f waits for A.g, which waits for A.f to end")]


def test_a_circle_of_three_is_broken_once_and_who_waits_for_it_from_outside_is_left_alone():
    cluster = Cluster("A", "B", "C", "D")
    for code, call in (("A.f", "B.g"), ("B.g", "C.h"), ("C.h", "A.i"), ("D.z", "A.j")):
        cluster.wait(code, call)
    told = cluster.look()
    assert told == [("C", "C.h waits for A.i, which waits for A.f to end, which waits for B.g, which waits for C.h")]


def test_a_wait_for_one_of_several_or_in_a_thread_among_others_is_no_circle():
    cluster = Cluster("A", "B")
    cluster.wait("A.f", "B.g", "B.x", count=1)
    cluster.wait("B.g", "A.h")
    assert cluster.look() == []
    threads = Cluster("A", "B")
    threads.wait("A.f", "B.g", alone=False)
    threads.wait("B.g", "A.h")
    assert threads.look() == []


def test_a_task_of_the_first_of_its_inputs_is_no_part_of_a_circle_while_others_may_come():
    for enough, circles in ((1, 0), (0, 1)):
        cluster = Cluster("A", "B")
        other, total = child_id(b"tasks", 1), child_id(b"tasks", 2)
        cluster.step("A", s.Submitted(m.TaskSpec(other, b"f", "other"), b"code"))
        deps = tuple(m.RefTo(oid, cluster.owners["A"].me) for oid in (object_id(other, 0), cluster.call("A", "B.g")))
        cluster.step("A", s.Submitted(m.TaskSpec(total, b"r", "sum", deps=deps, enough=enough), b"code"))
        cluster.here["A"].append(call_id("A.f"))
        cluster.step("A", s.ReadyAsked(ord("f"), (object_id(total, 0),), 1))
        cluster.step("A", WaitIsLong(ord("f"), call_id("A.f"), "A.f", 6, True))
        cluster.wait("B.g", "A.h")
        assert len(cluster.look()) == circles


def test_a_call_that_has_ended_meanwhile_holds_nobody_up():
    cluster = Cluster("A", "B")
    cluster.wait("A.f", "B.g")
    cluster.wait("B.g", "A.h")
    cluster.here["A"].remove(call_id("A.h"))
    assert cluster.look() == []


def test_a_wait_that_was_given_up_is_not_counted():
    cluster = Cluster("A", "B")
    cluster.wait("A.f", "B.g")
    cluster.wait("B.g", "A.h")
    cluster.step("A", s.WaiterGone(ord("f")))
    assert cluster.look() == []
    assert cluster.owners["A"].long_waits == {}
