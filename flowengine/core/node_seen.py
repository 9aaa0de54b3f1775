"""What a node tells people of itself again and again while they look: workers, store, groups; bounded."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from flowengine.collectives.ledger_headers import ranks_text
from flowengine.collectives.ledger_state import Book, Ledger
from flowengine.collectives.ledger_texts import seats_wait_text, wait_text
from flowengine.collectives.plan import draw

if TYPE_CHECKING:
    from .node import Node

WORKERS_MAX = 1_000
GROUPS_MAX = 50
SEATS_MAX = 64
BOOKS_MAX = 5
DRAWN_CHARS_MAX = 4_000
STORE_BYTES = ("limit_bytes", "used_bytes", "granted_bytes", "pool_bytes", "disk_bytes")


def seen(node: Node, now: float) -> dict[str, Any]:
    """All that a node tells of itself; its processes tell the rest."""
    desk, entry = node.desk, node.entry()
    return {
        "node_id": entry.node_id,
        "host": entry.host,
        "address": entry.address,
        "epoch": entry.epoch,
        "total": dict(entry.total),
        "available": dict(entry.available),
        "queued": entry.queued,
        "workers": workers(node),
        "workers_more": max(0, len(desk.workers) - WORKERS_MAX),
        "programs": [process.pid for process in desk.processes.values() if process.role == "driver"],
        "store": {name: getattr(node.store, name) for name in STORE_BYTES},
        "groups": groups(node, now),
    }


def workers(node: Node) -> list[dict[str, Any]]:
    """The worker processes, with what each has of the node's amounts."""
    found = []
    for worker in islice(node.desk.workers.values(), WORKERS_MAX):
        lease = node.leases.leases.get(worker.lease)
        found.append({"worker_id": worker.worker_id, "pid": worker.pid, "state": worker.state,
                      "address": worker.address, "holds": dict(lease.shape) if lease is not None else {}})
    return found


def groups(node: Node, now: float) -> list[dict[str, Any]]:
    """The groups whose ledger this node keeps."""
    ledgers = (ledger for named in node.ledgers.seats.by_name.values() for ledger in named)
    return [group(ledger, now) for ledger in islice(ledgers, GROUPS_MAX)]


def group(ledger: Ledger, now: float) -> dict[str, Any]:
    """A group: its members, what is open in it and for whom that waits."""
    seats = ledger.everybody()
    away = [seat.rank for seat in seats if not seat.address and not seat.left]
    gathers = [] if ledger.formed else [{"text": seats_wait_text(ledger), "state": "gathering", "course": "",
                                         "age_s": 0.0}]
    return {
        "name": ledger.name,
        "size": ledger.size,
        "formed": ledger.formed,
        "epoch": ledger.epoch,
        "on_failure": ledger.on_failure,
        "seats": [{"rank": seat.rank, "host": seat.joined.host, "pid": seat.joined.pid, "node": seat.node,
                   "attempt": seat.attempt, "next_step": seat.next_step,
                   "state": "left" if seat.left else "here" if seat.address else "away"}
                  for seat in seats[:SEATS_MAX]],
        "away": ranks_text(away) if away else "",
        "steps": [*gathers, *(step(ledger, book, now) for book in islice(ledger.open.values(), BOOKS_MAX))],
        "steps_more": max(0, len(ledger.open) - BOOKS_MAX),
    }


def step(ledger: Ledger, book: Book, now: float) -> dict[str, Any]:
    """A collective under way, with a picture of its course when it is on its way between nodes."""
    course = draw(book.course) if book.course is not None else ""
    return {"text": wait_text(ledger, book), "state": book.state, "course": course[:DRAWN_CHARS_MAX],
            "age_s": now - book.started_s}
