"""A ledger alone on a stage: events go in by hand, and what it says to members and nodes is kept."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowengine.collectives.combine import perform_combine
from flowengine.collectives.ledger import Ledgers, check
from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.dispatch import routes
from flowengine.core.node_desk import Desk, NodeSettings
from tests.core.shell_kit import due

ME, OTHER, THIRD = "n1", "n2", "n3"
WHOLE = -1


class Stage:
    """Shell, members and nodes in one; nothing is answered but by `CombineBlobs`."""

    def __init__(self, config: Config | None = None, me: str = ME) -> None:
        settings = NodeSettings(me, me, "h", (), 2, "/shm", 1, "s", "head")
        self.desk = Desk(settings, config or Config())
        self.ledgers = Ledgers(self.desk)
        self.routes = routes(self.ledgers)
        self.now = 0.0
        self.timers: list[tuple[float, int, m.Message]] = []
        self.said: list[tuple[str, m.Message]] = []

    def tell(self, event: m.Message, sender: str = "") -> None:
        self.routes[type(event)](event, self.now, sender)
        self.drain()

    def drain(self) -> None:
        while commands := self.desk.out.take():
            for command in commands:
                if isinstance(command, c.SetTimer):
                    self.timers.append((self.now + command.delay_s, len(self.timers), command.event))
                elif isinstance(command, c.Send):
                    self.said.append((command.to, command.message))
                else:
                    assert isinstance(command, c.CombineBlobs)
                    self.routes[c.BlobsCombined](perform_combine(command), self.now, "")
        for ledger in self.ledgers.seats.by_group.values():
            assert check(ledger) == []

    def sleep(self, time_s: float) -> None:
        until = self.now + time_s
        for at, _, event in due(self.timers, until):
            self.now = max(self.now, at)
            self.tell(event)
        self.now = until

    def lose(self, address: str, reason: str = "killed by signal 9") -> None:
        self.ledgers.peer_lost(address, self.now, reason)
        self.drain()

    def lose_node(self, *nodes: str) -> None:
        for node in nodes:
            self.desk.dead_nodes[node] = None
        self.ledgers.nodes_lost(nodes, self.now)
        self.drain()

    def heard(self, kind: type[Any], to: str | None = None) -> list[Any]:
        """What was said of a kind, to one process, since the last look at that."""
        found = [told for at, told in self.said if isinstance(told, kind) and to in (None, at)]
        self.said = [(at, told) for at, told in self.said if not isinstance(told, kind) or to not in (None, at)]
        return found

    # --- members ----------------------------------------------------------------------------------

    def join(self, rank: int, size: int = 2, name: str = "g", **fields: Any) -> None:
        """Rank r is process "p<r>" on n1 when even, on n2 when odd."""
        address = fields.pop("address", f"p{rank}")
        node = fields.pop("node", (ME, OTHER)[rank % 2])
        defaults = {"key": f"key{rank}".encode(), "host": f"host-{node}", "pid": 100 + rank, "timeout_s": 4.0,
                    "on_failure": "recover", "restorable": True}  # fmt: skip
        self.tell(m.GroupJoined(name, size, rank, node=node, **{**defaults, **fields}), address)

    def form(self, size: int = 2, name: str = "g", **fields: Any) -> m.GroupFormed:
        for rank in range(size):
            self.join(rank, size, name, **fields)
        formed = [self.heard(m.GroupFormed, f"p{rank}")[-1] for rank in range(size)]
        return formed[0]

    def give(self, formed: m.GroupFormed, rank: int, step: int | m.Step, value: Any = None, **fields: Any) -> None:
        address = fields.pop("address", f"p{rank}")
        epoch = fields.pop("epoch", 0)
        oid = fields.pop("oid", b"")
        step = (WHOLE, WHOLE, step) if isinstance(step, int) else step
        header, blob = header_of(value, **fields)
        blob = b"" if oid else blob
        self.tell(m.StepGiven(formed.seating.group, step, rank, header, blob, oid, epoch), address)


def header_of(value: Any, op: str = "allreduce", fold: str = "", root: int = -1) -> tuple[m.Header, bytes]:
    """Header and fused bytes of an array, or of a list of arrays."""
    if op in ("allreduce", "reduce", "reduce_scatter"):
        fold = fold or "sum"
    if value is None:
        return m.Header(op, fold, root), b""
    arrays = value if isinstance(value, list) else [value]
    form = "[" + ", ".join(["'*'"] * len(arrays)) + "]" if isinstance(value, list) else "*"
    parts, blob = [], b""
    for array in arrays:
        blob += b"\0" * (-len(blob) % 64)
        parts.append(m.ArrayPart(array.dtype.str, array.shape, len(blob)))
        blob += np.ascontiguousarray(array).tobytes()
    return m.Header(op, fold, root, form, tuple(parts), len(blob)), blob


def arrays_of(blob: bytes, header: m.Header, offset: int = 0) -> list[np.ndarray[Any, Any]]:
    """The arrays in a result."""
    found = []
    for part in header.parts:
        count = int(np.prod(part.shape, dtype=int))
        array = np.frombuffer(blob, np.dtype(part.dtype), count, offset + part.offset) if count else np.zeros(0)
        found.append(array.reshape(part.shape))
    return found
