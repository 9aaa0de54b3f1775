"""What must be true of groups, judged from outside: each result is that of its members, the same for all, for ever."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations
from typing import TYPE_CHECKING

import msgspec

from flowengine.core.collective import Seating

from .sim_collectives_programs import Arrays, Formation, GroupOp, Members, is_right

if TYPE_CHECKING:
    from .sim_collectives import GroupWorld

STORE_BYTES = 1 << 16  # a smaller store may be full
EXCUSED = ("lost", "behind", "timeout")  # kinds of failures that follow from harm


class Outcome(msgspec.Struct, frozen=True):
    """What a member saw of an operation: arrays (None: nothing is given to it), or the kind and reason of a failure."""

    arrays: Arrays | None = None
    kind: str = ""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}" if self.kind else f"{arrays_told(self.arrays)}"


class Seat(msgspec.Struct, frozen=True):
    """What a member heard of its group at some moment."""

    key: bytes
    rank: int
    size: int
    seating: Seating


class GroupBook:
    """All that members saw."""

    def __init__(self) -> None:
        self.seats: dict[int, list[Seat]] = {}  # by number of the formation
        self.seen: dict[tuple[int, int], dict[bytes, list[Outcome]]] = {}  # by formation and operation, by member
        self.refused: list[tuple[int, bytes, str, str]] = []
        self.ended: dict[bytes, str] = {}  # how a member's loop ended

    def formed(self, number: int, seat: Seat) -> None:
        """A member has heard who sits where."""
        self.seats.setdefault(number, []).append(seat)

    def saw(self, number: int, op: GroupOp, key: bytes, outcome: Outcome) -> None:
        """An operation has ended for a member."""
        self.seen.setdefault((number, op.number), {}).setdefault(key, []).append(outcome)


def arrays_told(arrays: Arrays | None) -> str:
    """A few words for a story."""
    if arrays is None:
        return "nothing"
    return ", ".join(f"{dtype}{list(shape)} {raw[:8].hex()}" for dtype, shape, raw in arrays[:4])


def wrong_groups(world: GroupWorld) -> list[str]:
    """Lines about operations that gave what they must not."""
    lines: list[str] = []
    if not world.is_harmed and not any(formation.is_slow for formation in world.formations):
        lines += [f"member {key.hex()} was refused: {kind}: {reason}" for _, key, kind, reason in world.book.refused]
    for number, formation in enumerate(world.formations):
        for op in formation.ops:
            seen = world.book.seen.get((number, op.number), {})
            found = wrong_op(world, number, op, seen)
            lines += [f"{formation.name}{number} operation {op.number} ({op.kind}): {line}" for line in found]
    return lines


def wrong_op(world: GroupWorld, number: int, op: GroupOp, seen: dict[bytes, list[Outcome]]) -> list[str]:
    """What is wrong with one operation of a group."""
    lines = []
    for key, outcomes in seen.items():
        lines += [
            f"member {key.hex()} saw {outcomes[0]} and then {later}" for later in outcomes[1:]
            if later != outcomes[0] and not is_lost_later(world, outcomes[0], later)
        ]  # fmt: skip
    firsts = {key: outcomes[0] for key, outcomes in seen.items()}
    failed = {key: outcome for key, outcome in firsts.items() if outcome.kind}
    lines += mixed(world, firsts, failed)
    for outcome in dict.fromkeys(failed.values()):
        if not may_fail(world, world.formations[number], op, outcome):
            lines.append(f"it must not fail: {outcome}")
    good = {key: outcome.arrays for key, outcome in firsts.items() if not outcome.kind}
    parts = [good] if good else []
    if world.hosts_harmed and world.formations[number].on_failure == "shrink":
        # Who had the result of all may have died with the host that had it, and the others did the step anew.
        parts = [{key: good[key] for key in good if good[key] == arrays} for arrays in dict.fromkeys(good.values())]
    for part in parts:
        if not any(are_right(op, members, part) for members in memberships(world, number, op, part)):
            told = "; ".join(f"{key.hex()} {arrays_told(arrays)}" for key, arrays in part.items())
            lines.append(f"no members of the group give this: {told}")
    return lines


def mixed(world: GroupWorld, firsts: dict[bytes, Outcome], failed: dict[bytes, Outcome]) -> list[str]:
    """A step fails for all of its ranks in the same way, or for none; a result may be lost with a host."""
    real = {key: outcome for key, outcome in failed.items() if not (outcome.kind in EXCUSED and world.hosts_harmed)}
    if real and len(real) < len(firsts) and len(failed) < len(firsts):
        return [f"it failed for {len(real)} of {len(firsts)} members: {next(iter(real.values()))}"]
    told = dict.fromkeys(real.values())
    return [f"it failed in several ways: {'; '.join(str(one) for one in told)}"] if len(told) > 1 else []


def is_lost_later(world: GroupWorld, first: Outcome, later: Outcome) -> bool:
    """A result was there once, and the host that had it is gone."""
    return world.hosts_harmed and later.kind in EXCUSED


def may_fail(world: GroupWorld, formation: Formation, op: GroupOp, outcome: Outcome) -> bool:
    """Whether the program or the harm explains this failure."""
    if outcome.kind in ("store", "timeout") and world.scenario.store_limit_bytes < STORE_BYTES:
        return True  # results and what they are made of push each other out
    if outcome.kind == "mismatch":
        return op.wrong >= 0 or formation.on_failure == "shrink"
    if outcome.kind == "timeout":
        return formation.is_slow or world.is_harmed
    return outcome.kind in EXCUSED and (world.is_harmed or world.hosts_harmed)


def are_right(op: GroupOp, members: Members, good: dict[bytes, Arrays | None]) -> bool:
    """Whether these members would give what was seen."""
    if any(key not in members.keys for key in good):
        return False
    if not are_alike(op, members, good):
        return False
    judged: dict[Arrays | None, bool] = {}
    for key, arrays in good.items():
        rank = members.keys.index(key)
        if op.kind == "allreduce":
            if arrays not in judged:
                judged[arrays] = is_right(op, members, rank, arrays)
            if not judged[arrays]:
                return False
        elif not is_right(op, members, rank, arrays):
            return False
    return True


def are_alike(op: GroupOp, members: Members, good: dict[bytes, Arrays | None]) -> bool:
    """Whether those that share a result have the same one."""
    if op.kind not in ("allreduce", "allgather", "broadcast"):
        return True
    return len(dict.fromkeys(good.values())) == 1


def memberships(
    world: GroupWorld, number: int, op: GroupOp, good: dict[bytes, Arrays | None]
) -> Iterator[Members]:
    """Who may have been in the group when the operation was done: those of each epoch that somebody heard of."""
    formation = world.formations[number]
    tried: dict[Members, None] = {}
    epochs: dict[tuple[bytes, int], tuple[Seat, dict[int, bytes]]] = {}
    for seat in world.book.seats.get(number, []):
        _, keys = epochs.setdefault((seat.seating.group, seat.seating.epoch), (seat, {}))
        keys[seat.rank] = seat.key
    for seat, keys in epochs.values():
        for chosen in chain.from_iterable(combinations(turn, seat.size) for turn in formation.turns()):
            if all(chosen[rank] == key for rank, key in keys.items() if rank < len(chosen)):
                members = Members(chosen, seat.seating.order, seat.seating.starts)
                if members not in tried and all(key in chosen for key in good):
                    tried[members] = None
                    yield members
    if formation.on_failure == "shrink":
        for turn in formation.turns():
            yield from fewer(turn, epochs, good)


def fewer(
    known: tuple[bytes, ...],
    epochs: dict[tuple[bytes, int], tuple[Seat, dict[int, bytes]]],
    good: dict[bytes, Arrays | None],
) -> Iterator[Members]:
    """Those that were left at some time; who got a result may not have heard yet that there are fewer."""
    for seat, keys in list(epochs.values())[:1]:
        order = [known[rank] for rank in seat.seating.order] if len(keys) <= len(known) else []
        for size in range(len(order) - 1, 0, -1):
            for chosen in combinations(known, size):
                if all(key in chosen for key in good):
                    ranks = tuple(chosen.index(key) for key in order if key in chosen)
                    yield Members(chosen, ranks, tuple(range(size)))


# --- ends -------------------------------------------------------------------------------------------


def stuck_groups(world: GroupWorld) -> list[str]:
    """Members whose loops have not ended."""
    return [
        f"member {member.script.key.hex()} at {member.address} waits: {member.waits_for()}"
        for member in world.members.values() if not member.is_done
    ]  # fmt: skip


def left_of_groups(world: GroupWorld) -> list[str]:
    """What is still there though all members have left or are dead."""
    lines = []
    for node in world.group_nodes():
        books = node.left()
        lines += [f"{node.address}: {count} {what}" for what, count in books.items() if count]
    return lines


def unlike_calm(world: GroupWorld, calm: GroupWorld) -> list[str]:
    """Results that are not those of the run without harm, though nobody was lost."""
    lines = []
    for (number, op), seen in calm.book.seen.items():
        orders = {(seat.seating.order, seat.seating.starts) for seat in world.book.seats.get(number, [])}
        same = orders == {(seat.seating.order, seat.seating.starts) for seat in calm.book.seats.get(number, [])}
        kind = world.formations[number].ops[op].kind
        for key, outcomes in seen.items():
            found = world.book.seen.get((number, op), {}).get(key, [])
            if not found:
                lines.append(f"group {number} operation {op}: member {key.hex()} did not do it")
            elif found[0] != outcomes[0] and (same or kind not in ("allreduce", "reduce", "reduce_scatter")):
                lines.append(f"group {number} operation {op}: {key.hex()} saw {found[0]}, calm is {outcomes[0]}")
    return lines
