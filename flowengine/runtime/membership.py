"""The shell of a process's seats in groups: messages, threads that wait, the search for ledgers, gifts and results."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.collectives.plan_ways import given_name
from flowengine.collectives.seats import (
    FindLedger,
    Formed,
    LedgerFound,
    NodeTaken,
    SeatAsked,
    SeatLeft,
    Seats,
    StepAsked,
    StepsDone,
    Tell,
)
from flowengine.core import messages as m
from flowengine.core.actor_saving import CheckpointAsked
from flowengine.core.collective import ENTRY, Order, Step
from flowengine.core.ids import object_id, root_id, short
from flowengine.core.owner_promises import Promised, PromiseKept
from flowengine.errors import FlowError, ObjectLost, pack_error
from flowengine.objects import codec
from flowengine.refs import ObjectRef
from flowengine.runtime.drive import Drive
from flowengine.runtime.link import LinkError
from flowengine.runtime.values import Unbroken

if TYPE_CHECKING:
    from flowengine.collectives.group import Call, Group
    from flowengine.core.actor_host import ActorHost
    from flowengine.runtime.session import Session

BRING_TRIES = 5
BRING_AGAIN_S = 0.2
STEP_S = 0.01  # most steps are done by then
LIVES_AGAIN_S = 0.1  # before a node that the head knows is tried again


class Membership:
    """All groups of one process."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.machine = Seats(session.address, session.node, session.config)
        self.drive = Drive(self.machine, session.on_bug)
        self.drive.attach(session.endpoint, session.loop)
        self.drive.perform.update({FindLedger: self.find, Formed: self.formed, Tell: self.tell})
        self.numbers = itertools.count(1)
        self.members: dict[int, weakref.ref[Group]] = {}
        self.answers: dict[int, Any] = {}  # tickets that threads wait for, and what they get
        self.later: dict[int, Callable[[Any], None]] = {}  # tickets that nobody waits for
        self.wanted: dict[bytes, list[int]] = {}  # results under way to this host, and who waits
        self.missing: dict[bytes, str] = {}
        self.saved: dict[int, list[tuple[int, int]]] = {}  # calls -> (seat, its next step) in that checkpoint

    def step(self, event: Any) -> None:
        """Hand an event to the machine; an interrupt of the main thread waits meanwhile."""
        with Unbroken(self.session):
            self.drive.step(event)

    # --- who sits here ----------------------------------------------------------------------------

    def home(self) -> bytes:
        """Whose code runs: the actor that lives here, else the task."""
        session = self.session
        return session.actor_home()[0] or session.context.task

    def next_join(self) -> int:
        """How many seats the running code took before."""
        return self.session.context.next_choice("join")

    def key_of(self, number: int) -> bytes:
        """A name for that seat of the running code, that a re-run has again."""
        return root_id(b"seat" + self.session.context.task + number.to_bytes(8, "big"))

    def order_of(self, number: int) -> Order:
        """In which order that seat's group folded when this code ran before; empty if it did not come so far."""
        noted = self.session.context.recorded.get(("join", number))
        return msgspec.msgpack.decode(noted, type=Order) if noted is not None else ()

    def note_order(self, number: int, order: Order) -> None:
        """Remember it for another run of this code: a group that is formed anew on other nodes gives the same bits."""
        if ("join", number) not in self.session.context.recorded:
            self.session.note("join", number, msgspec.msgpack.encode(order))

    def host(self) -> ActorHost | None:
        """The machine of the actor that lives here, if one does."""
        executor = getattr(self.session, "executor", None)  # of a worker
        return executor.host if executor is not None else None

    def is_restorable(self) -> bool:
        """Whether the running code may come again and repeat what it did."""
        host = self.host()
        if host is not None:
            return bool(host.life.recovery == "exactly_once" and host.life.max_restarts != 0)
        push = self.session.context.push
        return push is not None and push.spec.max_retries != 0

    def life(self) -> int:
        """The how manieth attempt of the actor that lives here, or of the task."""
        host = self.host()
        push = host.push if host is not None else self.session.context.push
        return push.attempt if push is not None else 0

    def sit(self, group: Group) -> None:
        """Ask for the group's seat; nobody waits yet."""
        self.session.context.reach_out()
        for number, member in list(self.members.items()):
            other = member()
            if other is None or (other.name, other.home, other.rank) == (group.name, group.home, group.rank):
                self.leave(number)  # nobody refers to it, or it joins again
                if other is not None and other.key != group.key:  # else one is a copy of the other
                    other.replaced()
        group.seat = next(self.numbers)
        self.members[group.seat] = weakref.ref(group)
        self.step(SeatAsked(group.seat, 0, self.joined(group)))

    def joined(self, group: Group) -> m.GroupJoined:
        """How it is asked for."""
        session = self.session
        return m.GroupJoined(
            group.name, group.place.size, group.rank, group.key, session.node, session.host, os.getpid(),
            group.timeout_s, group.on_failure, group.restorable, group.seating, group.next_step, self.life(),
            *group.former,
        )  # fmt: skip

    def seated(self, group: Group) -> m.GroupFormed | m.JoinRefused:
        """Wait until the group is formed."""
        return self.ask(lambda ticket: SeatAsked(group.seat, ticket, self.joined(group)))  # type: ignore[no-any-return]

    def formed(self, command: Formed) -> None:
        """Who sits where has changed."""
        member = self.members.get(command.seat)
        group = member() if member is not None else None
        if group is not None:
            group.formed(command.formed)

    def leave(self, seat: int, kept: bool = False, at_once: bool = True) -> None:
        """A seat is given up."""
        self.step(SeatLeft(seat, kept, at_once))
        self.members.pop(seat, None)

    def code_ended(self, again: bool) -> None:
        """The task that ran here is over: so are its seats; again: it may take them when it runs again."""
        for seat in list(self.members):
            self.leave(seat, again, at_once=again)

    def close(self) -> None:
        """This process ends on purpose."""
        for seat in list(self.members):
            self.leave(seat)

    def moved(self, node: str) -> None:
        """This host has another node."""
        self.drive.step(NodeTaken(node))

    # --- checkpoints of the actor here ------------------------------------------------------------

    def saving(self, calls: int) -> bool:
        """A checkpoint is about to be pickled; False: it would miss steps that are under way."""
        if not self.members:
            return True
        with self.drive.lock:
            seats = list(self.machine.seats.values())
            if any(seat.open for seat in seats):
                return False
            self.saved[calls] = [(seat.number, seat.next_step) for seat in seats]
        return True

    def checkpoint_kept(self, calls: int) -> None:
        """The actor will never be brought back to a state before this one: its steps will not be repeated."""
        for seat, number in self.saved.get(calls, ()):
            self.step(StepsDone(seat, number))
        self.saved = {taken: steps for taken, steps in self.saved.items() if taken > calls}

    def read(self, group: Group, number: int, pair: Step | None) -> None:
        """A member that never repeats anything has read what it waited for: results of its steps may go."""
        self.step(StepsDone(group.seat, number, pair))

    # --- steps ------------------------------------------------------------------------------------

    def ask(self, event: Callable[[int], Any]) -> Any:
        """Hand the event of a new ticket to the machine and wait for what it tells."""
        session = self.session
        if session.dropped:  # a loop of steps may do nothing else for long
            with Unbroken(session):
                session._drop()
        ticket, lock = session.new_wait()
        self.step(event(ticket))
        try:
            session.block(ticket, lock, None, STEP_S)
            return self.answers[ticket]
        finally:
            self.answers.pop(ticket, None)

    def give(self, group: Group, step: Step, call: Call) -> m.StepGiven:
        """What a member gives, small as a blob, larger as an object that the node owns."""
        given, place = call.given, call.place
        blob, oid = b"", b""
        if given is not None and given.nbytes > self.session.config.collective_inline_bytes_max:
            oid = given_name(place.group, group.key, self.session.address, step)
            with Unbroken(self.session):
                self.session.values.store(oid, given.packed(), self.session.node, is_gift=True)
        elif given is not None:
            blob = given.blob()
        return m.StepGiven(place.group, step, place.rank, call.header, blob, oid, place.epoch)

    def give_nothing(self, group: Group, step: Step, error: Exception) -> None:
        """The step cannot be done from here: the others hear of it as of any other difference."""
        place, header = group.place, m.Header(f"nothing ({type(error).__name__}: {error})")
        given = m.StepGiven(place.group, step, place.rank, header, epoch=place.epoch)
        self.step(StepAsked(group.seat, 0, given))

    def wait_for(self, group: Group, given: m.StepGiven) -> Any:
        """Give to a step and wait for StepDone or StepFailed."""
        return self.ask(lambda ticket: StepAsked(group.seat, ticket, given))

    def promise(self, group: Group, given: m.StepGiven, value_of: Callable[[Any], Any]) -> ObjectRef:
        """Give to a step; the reference has the value of what it is answered with."""
        session = self.session
        oid = object_id(session.context.new_child(), 0)
        ref = ObjectRef(session, oid, session.address, session.heir())
        session.step(Promised(oid))
        ticket = next(session.waiter_ids)

        def keep(outcome: Any) -> None:
            value: m.Value
            try:
                value = session.values.keep(oid, codec.pack(value_of(outcome)), session.address)
            except Exception as error:
                value = m.Failed(pack_error(error))
            session.step(PromiseKept(oid, value))

        self.later[ticket] = keep
        self.step(StepAsked(group.seat, ticket, given))
        return ref

    def tell(self, command: Tell) -> None:
        """An answer has come."""
        session, outcome = self.session, command.outcome
        if type(outcome) is m.StepDone and outcome.checkpoint and self.host() is not None:
            session.step(CheckpointAsked())
        later = self.later.pop(command.ticket, None)
        if later is not None:
            session.callbacks.run(lambda: later(outcome))  # what it gives is read, packed and stored
            return
        wake = session.waits.pop(command.ticket, None)
        if wake is not None:
            self.answers[command.ticket] = outcome
            wake()

    # --- results ----------------------------------------------------------------------------------

    def buffer_of(self, done: m.StepDone) -> memoryview:
        """The bytes of a result, as memory of our own."""
        if not done.oid:
            return memoryview(bytearray(done.blob))
        for _ in range(BRING_TRIES):
            view = self.session.values.segments.open_private(done.oid.hex())
            if view is not None:
                return codec.read_packed_parts(view, own=True)[1][0]
            reason = self.bring(done)
            if reason:
                time.sleep(BRING_AGAIN_S)  # it may be on its way from one place to another
        where = ", ".join(done.nodes)
        raise ObjectLost(f"the result {short(done.oid)} of a step of a group cannot be had from {where}: {reason}")

    def bring(self, done: m.StepDone) -> str:
        """Have the node bring a result to this host; why it cannot, or nothing."""
        session = self.session
        ticket, lock = session.new_wait()
        with self.drive.lock:
            self.wanted.setdefault(done.oid, []).append(ticket)
        # The node that made it owns it, and frees the copies with it.
        session.endpoint.send(session.node, m.ObjectWanted(done.oid, done.nbytes, done.nodes[0], done.nodes))
        session.block(ticket, lock, None)
        return self.missing.pop(done.oid, "")

    def told(self, peer: str, message: Any) -> bool:
        """A peer says something; False: it is not about groups."""
        if type(message) is m.ObjectHere or type(message) is m.ObjectMissing:
            return self.brought(message)
        self.drive.step(message, peer)
        return True

    def lost(self, peer: str, reason: str) -> None:
        """A peer is gone."""
        if self.machine.seats:
            self.drive.step(m.PeerLost(peer, reason), peer)

    def brought(self, message: m.ObjectHere | m.ObjectMissing) -> bool:
        """The node answers; whether it was about a result of a group."""
        tickets = self.wanted.pop(message.oid, None) if self.wanted else None
        if tickets is None:
            return False
        if type(message) is m.ObjectMissing:
            self.missing[message.oid] = message.reason
        for ticket in tickets:
            wake = self.session.waits.pop(ticket, None)
            if wake is not None:
                wake()
        return True

    # --- where the ledger is ----------------------------------------------------------------------

    def find(self, command: FindLedger) -> None:
        """In a thread, since the head is asked."""
        self.session.callbacks.run(lambda: self.find_now(command))

    def find_now(self, command: FindLedger) -> None:
        try:
            found = LedgerFound(command.name, self.ledger_of(command.name, command.dead))
        except FlowError as error:
            found = LedgerFound(command.name, "", f"the node that keeps the books of the group was not found: {error}")
        self.drive.step(found)

    def ledger_of(self, name: str, dead: str) -> str:
        """The node that keeps the ledger of a group; ours when there is none, or the one that did is dead."""
        session, entry = self.session, ENTRY + name
        while True:
            known = session.ask(session.head, "name.get", entry)
            if known is not None:
                if known[0] != dead or self.lives(dead):
                    time.sleep(LIVES_AGAIN_S if known[0] == dead else 0.0)
                    return str(known[0])
                session.ask(session.head, "name.drop", [entry, dead])
            node = session.node
            if node == dead:
                raise FlowError("the node of this host is gone")
            if session.ask(session.head, "name.claim", [entry, [node]]):
                return node

    def lives(self, node: str) -> bool:
        """Whether only our link to the node was gone: it can be reached again, or the head reaches it."""
        session = self.session
        reached = asyncio.run_coroutine_threadsafe(session.endpoint.connect(node), session.loop)
        try:
            reached.result(session.config.connect_timeout_s)
        except LinkError:  # nobody listens there, or another life of the process does
            return False
        except TimeoutError:
            reached.cancel()
            return any(entry["address"] == node for entry in session.ask(session.head, "nodes"))
        return True
