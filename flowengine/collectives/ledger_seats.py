"""Who sits where in the groups of a node's ledgers: coming, coming back, going, and what follows for the others."""

from __future__ import annotations

import hashlib
from math import inf

from flowengine.core.collective import (
    WHOLE,
    GroupFormed,
    GroupJoined,
    Held,
    HeldAsked,
    JoinRefused,
    Seating,
    StepsForgotten,
)
from flowengine.core.node_desk import Desk

from .ledger_headers import ON_FAILURE
from .ledger_names import Names
from .ledger_state import Book, Ledger, Roster, Seat
from .ledger_steps import StepKeeper
from .ledger_texts import absent, disagreement, gone, in_use, taken, too_much
from .plan_ways import seating as seating_of

NODE_LOST = "its node was lost"
NEXT_LIFE = "its next life has begun"
PAST_MAX = 1_000


class SeatKeeper:
    """Knows all formations of all names; a name has at most one that is formed and one that gathers."""

    def __init__(self, desk: Desk, steps: StepKeeper) -> None:
        self.desk = desk
        self.steps = steps
        self.by_name: dict[str, list[Ledger]] = {}
        self.by_group: dict[bytes, Ledger] = {}
        self.claims: dict[tuple[str, str, int], tuple[GroupJoined, float]] = {}  # by (address, name, rank), since when
        self.past: dict[bytes, None] = {}  # groups that are over
        self.names = Names(desk)
        self._made = 0
        steps.admit = self.admit

    def formed(self, name: str) -> Ledger | None:
        """The formation that uses a name."""
        return next((ledger for ledger in self.by_name.get(name, ()) if ledger.formed), None)

    def gathering(self, name: str) -> Ledger | None:
        """The formation that wants to."""
        return next((ledger for ledger in self.by_name.get(name, ()) if not ledger.formed), None)

    # --- coming -----------------------------------------------------------------------------------

    def joined(self, event: GroupJoined, now: float, sender: str) -> None:
        """A process wants a seat, or says again that it has one."""
        self.steps.courses.silent.pop(event.node, None)
        if self._has_other_life(event, now, sender):
            return
        if event.seating is not None:
            self._return(event, event.seating, now, sender)
            return
        ledger = self.formed(event.name)
        seat = _seat_of_key(ledger, event) if ledger is not None else None
        if ledger is not None and seat is not None:
            self._sit(ledger, seat, event, now, sender)
        else:
            self._gather(event, now, sender)

    def _has_other_life(self, event: GroupJoined, now: float, sender: str) -> bool:
        """Whether another process of this member sits there. One of them is dead: which, is heard soon.

        What a process said before it died may come after the first words of the next, unless it knows that it is the
        later one. While a group gathers, any process may be about to be known as dead.
        """
        claim = (sender, event.name, event.rank)
        _, since_s = self.claims.pop(claim, (event, now))
        formed = self.formed(event.name)
        is_new = event.seating is None and (formed is None or _seat_of_key(formed, event) is None)
        for ledger in self.by_name.get(event.name, ()):
            for seat in ledger.here():
                is_same = seat.is_of(event) or (seat.joined.key == event.key and seat.rank == event.rank)
                if is_same and seat.address != sender and event.life > seat.joined.life:
                    self._outlived(ledger, seat, event.node, now)
                    continue
                is_taken = is_new and not ledger.formed and event.rank == seat.rank
                wait_s = self.desk.config.link_lost_after_s if is_same else event.timeout_s
                until_s = since_s + wait_s
                if seat.address != sender and (is_same or is_taken) and now < until_s:
                    self.claims[claim] = (event, since_s)
                    self.steps.arm(ledger, until_s, now)
                    return True
        return False

    def _outlived(self, ledger: Ledger, seat: Seat, node: str, now: float) -> None:
        """The next life of a member has begun: the former is dead, though the link to it may stand for long yet.

        Its node is the likely cause when the next one is elsewhere: it counts as lost, unless others sit there.
        """
        former = seat.node
        self._away(ledger, [seat], NEXT_LIFE, now)
        here = [other.node for known in self.by_group.values() for other in known.here()]
        if former in (node, self.desk.me, *here):
            return
        for known in self.by_group.values():
            if former in known.nodes:
                self.desk.out.send(former, StepsForgotten(known.group, -1))  # in case that it lives
        self.steps.courses.silent[former] = None
        self.node_lost(former, now)

    def next_lives(self, now: float) -> None:
        """Those who found another process of theirs in their seat: it may be gone now."""
        for (sender, _, _), (event, _) in list(self.claims.items()):
            self.joined(event, now, sender)

    def _return(self, event: GroupJoined, seating: Seating, now: float, sender: str) -> None:
        ledger = self.by_group.get(seating.group)
        if ledger is None:
            if seating.group in self.past:
                why = f"group {event.name!r} is over: rank {event.rank} came back too late"
                self._refuse(event, sender, "lost", why)
                return
            ledger = self._adopt(event, seating, now)
        if seating.epoch > ledger.epoch:
            ledger.epoch = seating.epoch
        known = ledger.known_roster(seating.epoch)
        seat = known.seats[event.rank] if 0 <= event.rank < len(known.seats) else None
        if seat is None or ledger.roster.rank_of(seat) < 0 or (ledger.asked and event.size != ledger.size):
            self._refuse(event, sender, "lost", f"group {event.name!r} went on without its former rank {event.rank}")
            return
        self._ask_held(ledger, (*seating.nodes, event.node))
        self._sit(ledger, seat, event, now, sender)

    def _sit(self, ledger: Ledger, seat: Seat, event: GroupJoined, now: float, sender: str) -> None:
        """A member is there, for the first time with this ledger or again."""
        is_same = seat.address == sender and seat.node == event.node
        if not seat.unknown and not is_same:
            seat.attempt += 1
        seat.joined, seat.address, seat.left = event, sender, False
        seat.lost_s, seat.reason, seat.unknown = inf, "", False
        seat.next_step, seat.moved_s = event.next_step, now
        if event.seating is None and not event.restorable and not is_same:  # it does not know what was done before
            others = [other.next_step for other in ledger.here() if other is not seat]
            awaited = [step[2] for step in ledger.open if step[0] == WHOLE]
            seat.first_step = seat.next_step = seat.passed = min(awaited, default=max(others, default=0))
        ledger.nodes[event.node] = None
        ledger.due_s = ledger.due_s if ledger.asked else inf
        if ledger.asked:
            return
        if is_same:
            self._tell(ledger, seat)
        else:
            self._tell_all(ledger)
        self.steps.review(ledger, now)

    def _gather(self, event: GroupJoined, now: float, sender: str) -> None:
        if event.size < 1 or not 0 <= event.rank < event.size or event.on_failure not in ON_FAILURE:
            text = f"rank {event.rank} of {event.size} ranks with on_failure={event.on_failure!r} cannot be"
            self._refuse(event, sender, "usage", f"group {event.name!r}: {text}")
            return
        ledger = self.gathering(event.name)
        if ledger is None:
            self._made += 1
            group = hashlib.blake2b(f"{event.name}\n{self.desk.me}\n{self._made}".encode(), digest_size=16).digest()
            ledger = Ledger(event.name, group, event.size, event.timeout_s, event.on_failure)
            self.names.used(event.name)
            self.by_name.setdefault(event.name, []).append(ledger)
            self.by_group[group] = ledger
        other = ledger.seats.get(event.rank)
        if other is not None and other.joined.key != event.key:
            self._refuse(event, sender, "usage", taken(event, other))
            return
        ledger.seats[event.rank] = Seat(event.rank, event, event.rank, sender, moved_s=now)
        old = self.formed(event.name)
        text = disagreement(event.name, [seat.joined for seat in ledger.seats.values()])
        if text and (old is None or not old.is_wish(event.rank)):
            self._disband(ledger, "usage", text)
            return
        ledger.due_s = now + event.timeout_s
        self.steps.arm(ledger, ledger.due_s, now)
        self._form(ledger, now)

    def _form(self, ledger: Ledger, now: float) -> None:
        """Begin when all seats are taken and nobody else uses the name."""
        if not ledger.formed:
            ledger.size = min((seat.joined.size for seat in ledger.seats.values()), default=ledger.size)
        if ledger.formed or any(rank not in ledger.seats for rank in range(ledger.size)):
            return
        if not self.names.is_claimed(ledger.name):
            return
        old = self.formed(ledger.name)
        if old is not None:
            newcomers = [(seat.joined.key, seat.address) for seat in ledger.seats.values()]
            if any((seat.joined.key, seat.address) not in newcomers for seat in old.here()):
                return
            self._end(old)
        seats = tuple(ledger.seats[rank] for rank in range(ledger.size))
        later = [seat for seat in ledger.everybody() if seat.rank >= ledger.size]
        ledger.formed, ledger.epoch, ledger.due_s = True, 1, inf
        seating = seating_of(ledger.group, 1, [seat.node for seat in seats])
        formers = [seat.joined for seat in seats if len(seat.joined.order) == ledger.size]
        like = formers[0] if formers else seating
        ledger.rosters = [Roster(1, seats, like.order, like.starts)]
        ledger.seats = {}
        ledger.nodes = dict.fromkeys(seat.node for seat in seats)
        for seat in seats:
            seat.moved_s = now
            self._tell(ledger, seat)
        for seat in later:  # they wait until they are taken in
            self._gather(seat.joined, now, seat.address)
        self.next_lives(now)

    def _tell(self, ledger: Ledger, seat: Seat) -> None:
        if seat.address:
            formed = GroupFormed(ledger.name, seat.rank, ledger.size, ledger.seating(), seat.first_step)
            self.desk.out.send(seat.address, formed)

    def _tell_all(self, ledger: Ledger) -> None:
        ledger.epoch += 1
        for seat in ledger.roster.seats:
            self._tell(ledger, seat)

    def _refuse(self, event: GroupJoined, address: str, kind: str, reason: str) -> None:
        self.desk.out.send(address, JoinRefused(event.name, event.key, kind, reason))

    def _disband(self, ledger: Ledger, kind: str, reason: str) -> None:
        """Nothing comes of those who have gathered."""
        for seat in ledger.seats.values():
            self._refuse(seat.joined, seat.address, kind, reason)
        for (sender, name, rank), (event, _) in list(self.claims.items()):
            if name == ledger.name and event.seating is None and rank in ledger.seats:
                del self.claims[sender, name, rank]
                self._refuse(event, sender, "usage", taken(event, ledger.seats[rank]))
        self._drop(ledger)

    def _drop(self, ledger: Ledger) -> None:
        ledger.over = True
        self.by_group.pop(ledger.group, None)
        rest = [other for other in self.by_name.get(ledger.name, []) if other is not ledger]
        if rest:
            self.by_name[ledger.name] = rest
        else:
            self.by_name.pop(ledger.name, None)
            self.names.unused[ledger.name] = inf

    def _end(self, ledger: Ledger) -> None:
        """The group is over, and what nodes keep for it goes."""
        self._drop(ledger)
        self.past[ledger.group] = None
        if len(self.past) > PAST_MAX:
            del self.past[next(iter(self.past))]
        self.steps.end(ledger)

    def claimed(self, number: int, is_ours: bool, now: float) -> None:
        """The head has told whose a name is that we gave back before."""
        name = self.names.claimed(number, is_ours)
        waiting = self.gathering(name)
        if waiting is not None and is_ours:
            self._form(waiting, now)
        elif waiting is not None:
            self._disband(waiting, "moved", f"another node keeps the ledger of group {name!r}")

    # --- going ------------------------------------------------------------------------------------

    def lost(self, address: str, reason: str, now: float) -> None:
        """A process is gone; it may be a node."""
        if any(address in ledger.nodes for ledger in self.by_group.values()):
            self.steps.courses.silent[address] = None
            self.node_lost(address, now)
        for ledger in list(self.by_group.values()):
            seats = [seat for seat in ledger.here() if seat.address == address]
            if seats:
                self._away(ledger, seats, reason, now)
        for claim in [claim for claim in self.claims if claim[0] == address]:
            del self.claims[claim]
        self.next_lives(now)

    def node_lost(self, node: str, now: float) -> None:
        """A node is dead with all of its processes."""
        for ledger in list(self.by_group.values()):
            seats = [seat for seat in ledger.here() if seat.node == node]
            for seat in seats:
                # A program outlives its node when that was only taken for dead: it must not wait for an answer.
                if ledger.formed:
                    self.steps.cut_off(ledger, seat, NODE_LOST)  # before what it gave is taken off
                else:
                    self._refuse(seat.joined, seat.address, "lost", f"group {ledger.name!r}: {NODE_LOST}")
            if ledger.formed:
                self.steps.courses.all_lost(ledger, node, now)
            ledger.nodes.pop(node, None)
            if seats:
                self._away(ledger, seats, NODE_LOST, now)
            if ledger.asked.pop(node, 0) is None and not ledger.asked:
                self._adopted(ledger, now)
            elif ledger.adopted and not ledger.asked:
                self._bury_unheard(ledger, now)
                self.steps.review(ledger, now)
        self.next_lives(now)

    def left(self, group: bytes, rank: int, now: float, sender: str) -> None:
        """A member gives its seat up."""
        ledger = self.by_group.get(group)
        if ledger is None:
            return
        here = [seat for seat in ledger.here() if seat.address == sender]
        seat = next((seat for seat in here if seat.rank == rank), here[0] if len(here) == 1 else None)
        if seat is not None:
            seat.left = True
            self._away(ledger, [seat], seat.reason, now)
            self.next_lives(now)

    def _away(self, ledger: Ledger, seats: list[Seat], reason: str, now: float) -> None:
        for seat in seats:
            seat.address, seat.lost_s, seat.reason = "", now, reason
        if not ledger.formed:
            for seat in seats:
                del ledger.seats[seat.rank]
            if not ledger.seats:
                self._drop(ledger)
            return
        for seat in seats:
            if ledger.on_failure == "shrink":
                self._shrink(ledger, seat, now)
        if not ledger.here():
            self._nobody(ledger, now)
        self._next_form(ledger.name, now)
        if not ledger.over:
            self.steps.forget(ledger)
            self.steps.review(ledger, now)

    def _next_form(self, name: str, now: float) -> None:
        waiting = self.gathering(name)
        if waiting is not None:
            self._form(waiting, now)

    def _nobody(self, ledger: Ledger, now: float) -> None:
        """Nobody sits here: those who may come again find their results for a while."""
        if ledger.on_failure != "recover" or not any(
            seat.joined.restorable and not seat.left for seat in ledger.everybody()
        ):
            self._end(ledger)
            return
        ledger.due_s = now + ledger.timeout_s + self.desk.config.link_lost_after_s
        self.steps.arm(ledger, ledger.due_s, now)

    def _shrink(self, ledger: Ledger, lost: Seat, now: float) -> None:
        """The others go on with ranks without a gap."""
        old = ledger.roster
        gap = old.rank_of(lost)
        rest = tuple(seat for seat in old.seats if seat is not lost)
        if gap < 0 or not rest:
            return
        order = tuple(rank - (rank > gap) for rank in old.order if rank != gap)
        place = old.order.index(gap)
        starts = tuple(dict.fromkeys(start - (start > place) for start in old.starts))
        for rank, seat in enumerate(rest):
            seat.rank = rank
        ledger.epoch += 1
        ledger.size, ledger.grown = len(rest), ()
        kept = tuple(start for start in starts if start < len(rest))
        ledger.rosters.append(Roster(ledger.epoch, rest, order, kept))
        lost.rank = gap
        for seat in rest:
            self._tell(ledger, seat)
        self.steps.renumbered(ledger, old, lost, now)

    # --- growing ----------------------------------------------------------------------------------

    def admit(self, ledger: Ledger, book: Book, now: float) -> None:
        """All members agree to take those in who wait for it, in the order of the ranks that they wish for."""
        waiting = self.gathering(ledger.name)
        if waiting is None:
            return
        newcomers = [waiting.seats.pop(rank) for rank in sorted(waiting.seats) if ledger.is_wish(rank)]
        if not waiting.seats:
            self._drop(waiting)
        if not newcomers:
            return
        old = ledger.roster
        order, starts = list(old.order), list(old.starts)
        by_node: dict[str, list[int]] = {}
        for number, seat in enumerate(newcomers):
            seat.rank, seat.first_step = ledger.size + number, book.step[2] + 1
            seat.next_step, seat.moved_s = seat.first_step, now
            seat.passed = seat.first_step
            by_node.setdefault(seat.node, []).append(seat.rank)
            ledger.nodes[seat.node] = None
        for ranks in by_node.values():
            starts.append(len(order))
            order += ranks
        seats = (*old.seats, *newcomers)
        ledger.grown = (*(ledger.grown or ((0, ledger.size),)), (book.step[2] + 1, len(seats)))
        ledger.size = len(seats)
        ledger.rosters.append(Roster(ledger.epoch + 1, seats, tuple(order), tuple(starts)))
        self.steps.grown(ledger, book.step[2])
        self._tell_all(ledger)

    # --- a ledger whose node was lost -------------------------------------------------------------

    def _adopt(self, event: GroupJoined, seating: Seating, now: float) -> Ledger:
        """Go on where another node kept the ledger, from what members and nodes know."""
        ledger = Ledger(event.name, seating.group, event.size, event.timeout_s, event.on_failure)
        seats = tuple(
            Seat(
                rank,
                GroupJoined(
                    event.name, event.size, rank, key, node, "unknown", 0, event.timeout_s, event.on_failure, True
                ),
                -1,
                lost_s=now,
                unknown=True,
            )
            for rank, (node, key) in enumerate(zip(seating.nodes, seating.keys, strict=True))
        )
        ledger.rosters = [Roster(0, seats, seating.order, seating.starts)]
        ledger.formed, ledger.adopted, ledger.epoch, ledger.grown = True, True, seating.epoch, seating.grown
        for other in list(self.by_name.get(event.name, [])):
            if other.formed:
                self._end(other)
        self.names.used(event.name)
        self.by_name.setdefault(event.name, []).insert(0, ledger)
        self.by_group[ledger.group] = ledger
        ledger.due_s = now + self.desk.config.link_lost_after_s
        self.steps.arm(ledger, ledger.due_s, now)
        ledger.asked[self.desk.me] = None
        ledger.nodes[self.desk.me] = None
        self.desk.out.send(self.desk.me, HeldAsked(ledger.group))
        return ledger

    def _ask_held(self, ledger: Ledger, nodes: tuple[str, ...]) -> None:
        """While a ledger is rebuilt, all nodes that members name are asked."""
        if not ledger.asked:
            return
        for node in nodes:
            if node not in ledger.nodes and self.steps.courses.lives(node):
                ledger.nodes[node] = ledger.asked[node] = None
                self.desk.out.send(node, HeldAsked(ledger.group))

    def held(self, event: Held, now: float, sender: str) -> None:
        """What a node has."""
        ledger = self.by_group.get(event.group)
        if ledger is None or not ledger.adopted:
            return
        ledger.epoch = max(ledger.epoch, event.epoch)
        if event.floor > ledger.floor:
            limit_bytes = self.desk.config.collective_kept_bytes_max
            ledger.floor, ledger.floor_reason = event.floor, f"all members had passed it, or {too_much(limit_bytes)}"
        for step in event.steps:
            self.steps.held(ledger, step, sender, now)
        if ledger.asked.pop(sender, 0) is None and not ledger.asked:
            self._adopted(ledger, now)
        elif not ledger.asked:
            self.steps.answer_waiting(ledger, now)

    def _adopted(self, ledger: Ledger, now: float) -> None:
        """All nodes have told what they have: go on."""
        ledger.asked = {}
        ledger.due_s = inf
        for seat in ledger.roster.seats:
            if seat.unknown:
                seat.lost_s = now
                self.steps.arm(ledger, now + ledger.timeout_s, now)
        self._tell_all(ledger)
        self.steps.adopted(ledger, now)
        self._bury_unheard(ledger, now)
        self.steps.review(ledger, now)
        self._seat_early(ledger, now)

    def _bury_unheard(self, ledger: Ledger, now: float) -> None:
        """Who sat on a node that is dead, and was not heard of since the former ledger was lost, is lost too."""
        lives = self.steps.courses.lives
        lost = [seat for seat in ledger.roster.seats if seat.unknown and seat.node and not lives(seat.node)]
        for seat in lost:
            seat.reason = NODE_LOST
        for seat in lost if ledger.on_failure == "shrink" else ():
            self._shrink(ledger, seat, now)

    def _seat_early(self, ledger: Ledger, now: float) -> None:
        """Who came without knowing the seat that it had, before those who knew of it, has it now."""
        waiting = self.gathering(ledger.name)
        if waiting is None:
            return
        for seat in waiting.everybody():
            if _seat_of_key(ledger, seat.joined) is not None:
                del waiting.seats[seat.rank]
                if not waiting.seats:
                    self._drop(waiting)
                self.joined(seat.joined, now, seat.address)

    # --- time -------------------------------------------------------------------------------------

    def due(self, ledger: Ledger, now: float) -> None:
        """Time has passed: nothing waits for ever."""
        if not ledger.formed:
            if ledger.due_s <= now:
                old = self.formed(ledger.name)
                if old is not None and old.here():
                    self._disband(ledger, "usage", in_use(ledger.name, old, ledger))
                elif ledger.seats:
                    self._disband(ledger, "timeout", absent(ledger))
            else:
                self.steps.arm(ledger, ledger.due_s, now)
            return
        if ledger.due_s <= now:
            if ledger.asked:
                self._adopted(ledger, now)
            elif not ledger.here():
                self._end(ledger)
                self._next_form(ledger.name, now)
                return
        for seat in ledger.roster.seats:
            if seat.unknown and ledger.on_failure == "shrink" and gone(ledger, seat, now):
                self._shrink(ledger, seat, now)
        self.steps.review(ledger, now)
        self.steps.arm(ledger, ledger.due_s, now)


def _seat_of_key(ledger: Ledger, event: GroupJoined) -> Seat | None:
    """The seat that somebody had before; none in a group that has given up on a member."""
    if ledger.on_failure == "raise" and any(not seat.address and not seat.unknown for seat in ledger.roster.seats):
        return None
    for seat in ledger.roster.seats:
        if seat.is_of(event) and not seat.left:
            return seat
    return None
