"""How a ledger says why somebody gets no seat and no result."""

from __future__ import annotations

from collections.abc import Iterable

from flowengine.core.collective import GroupJoined

from .ledger_headers import ranks_text, step_text
from .ledger_state import Book, Ledger, Seat

SEATS_SHOWN = 8


def seconds_text(time_s: float) -> str:
    """A time limit in words."""
    return f"{time_s:g} s"


def seats_text(seats: Iterable[Seat]) -> str:
    """Members with their places."""
    shown = [f"rank {seat.rank} ({seat.where()})" for seat in seats]
    if len(shown) > SEATS_SHOWN:
        shown[SEATS_SHOWN:] = [f"{len(shown) - SEATS_SHOWN} more"]
    return ", ".join(shown)


def gone(ledger: Ledger, seat: Seat, now: float) -> str:
    """Why a member will not take part any more; empty while it may."""
    who = f"rank {seat.rank} of group {ledger.name!r}"
    why = f": {seat.reason}" if seat.reason else ""
    if seat.left:
        return f"{who} has left it ({seat.where()}){why}"
    if seat.address:
        return ""
    again = f", attempt {seat.attempt}" if seat.attempt > 1 else ""
    died = f"{who} died ({seat.where()}{again}){why}"
    is_over = now >= seat.lost_s + ledger.timeout_s
    if seat.unknown and seat.reason and ledger.on_failure != "recover":
        return f"{who} was lost with the node that kept the group's ledger{why}"
    if seat.unknown:
        return f"{who} was not heard of after the node that kept the group's ledger was lost" if is_over else ""
    if ledger.on_failure != "recover":
        return died
    if not seat.joined.restorable:
        return f"{died}; nothing repeats its steps"
    return f"{died}; it did not come back within {seconds_text(ledger.timeout_s)}" if is_over else ""


def late(ledger: Ledger, book: Book) -> str:
    """Who did not come to a step, and what is known of them."""
    found: list[str] = []
    for rank in book.missing()[:SEATS_SHOWN]:
        seat = book.roster.seats[rank]
        last = f"its last step was {seat.next_step - 1}" if seat.next_step else "it has not come to any step"
        is_there = "it is alive on" if seat.address else "it was last seen on"
        again = f", attempt {seat.attempt}" if seat.attempt > 1 else ""
        came = "" if found else f" of group {ledger.name!r} did not come to {book.text()} within"
        limit = f"{came} {seconds_text(ledger.timeout_s)}; " if came else " neither; "
        place = f"host {seat.joined.host} (pid {seat.joined.pid}{again})"
        found.append(f"rank {seat.rank}{limit}{is_there} {place} and {last}")
    more = len(book.missing()) - len(found)
    return "; ".join([*found, f"and {more} more"] if more else found)


def absent(ledger: Ledger) -> str:
    """Why a group did not form."""
    came = ranks_text(ledger.seats)
    missing = ranks_text(rank for rank in range(ledger.size) if rank not in ledger.seats)
    return f"{missing} of group {ledger.name!r} did not come within {seconds_text(ledger.timeout_s)}; {came} came"


def taken(event: GroupJoined, other: Seat) -> str:
    """Why a rank cannot be had."""
    return f"rank {event.rank} of group {event.name!r} is taken by another process ({other.where()})"


def in_use(name: str, old: Ledger, asked: Ledger) -> str:
    """Why a name cannot be used by others."""
    text = f"group {name!r} is in use by {seats_text(old.here())}"
    if all(old.is_wish(rank) for rank in asked.seats):
        text += f"; they did not admit {ranks_text(asked.seats)} within {seconds_text(asked.timeout_s)}"
    return text


def disagreement(name: str, joined: Iterable[GroupJoined]) -> str:
    """How those who want to form a group differ; empty when they do not."""
    told = sorted(joined, key=lambda one: one.rank)
    fields = []
    if any(one.size != told[0].size for one in told):
        fields.append("the number of ranks")
    if any(one.timeout_s != told[0].timeout_s for one in told):
        fields.append("timeout_s")
    if any(one.on_failure != told[0].on_failure for one in told):
        fields.append("on_failure")
    if not fields:
        return ""
    same: dict[tuple[int, float, str], list[int]] = {}
    for one in told:
        same.setdefault((one.size, one.timeout_s, one.on_failure), []).append(one.rank)
    given = "; ".join(
        f"{ranks_text(ranks)}: {size} ranks, timeout_s={timeout_s:g}, on_failure={on_failure}"
        for (size, timeout_s, on_failure), ranks in same.items()
    )
    return f"ranks of group {name!r} do not agree on {', '.join(fields)}: {given}"


def step_lost(ledger: Ledger, book: Book) -> str:
    """Why a result cannot be had any more."""
    why = "; ".join(book.lost) or "the nodes that had it took it along"
    return f"the result of {step_text(book.step)} of group {ledger.name!r} is gone: {why}"


def not_again(seat: Seat) -> str:
    """Who would have to give again what is lost."""
    return f"rank {seat.rank} ({seat.where()}) has not given to it again"


def too_much(limit_bytes: int) -> str:
    """Why results went that were whole."""
    return (
        f"more than {limit_bytes} bytes of results were kept on a node, and the oldest went; "
        "shorter calls, or checkpoints more often, would have let go of others before"
    )


def wait_text(ledger: Ledger, book: Book) -> str:
    """What a step waits for, for people."""
    missing = book.missing()
    what = ranks_text(missing) if missing else f"nodes {', '.join(book.waiting)}"
    return f"group {ledger.name!r}: {book.text()} waits for {what}, at most {seconds_text(ledger.timeout_s)}"


def seats_wait_text(ledger: Ledger) -> str:
    """The same for those who want to form a group."""
    missing = [rank for rank in range(ledger.size) if rank not in ledger.seats]
    what = ranks_text(missing) if missing else "those who use the name"
    return f"group {ledger.name!r}: {ranks_text(ledger.seats)} of {ledger.size} ranks wait for {what}"
