"""One object of a node's store as its books know it, and the words for a store that is full."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .messages import ObjectWanted
from .node_desk import NEVER_S

MIB = 1 << 20

# What may be under way for an object, by where it is now.
RUNS: dict[str, tuple[str, ...]] = {
    "memory": ("", "spill"),
    "disk": ("", "restore"),
    "": ("pull",),
}


@dataclass(slots=True, eq=False)
class Entry:
    """An object: where it is, and what is under way; the two are separate, nothing else encodes a state."""

    oid: bytes
    size_bytes: int
    owners: dict[str, None]  # several when a task ran again under another parent, or borrowers adopted it
    place: str = ""  # "memory", "disk", "" while it is pulled
    running: str = ""  # "", "spill", "restore", "pull"
    ordered: bool = False  # the command for `running` was given; False: it waits for room or its turn
    doomed: bool = False  # freed or lost on purpose: it goes as soon as what runs has ended
    sealed_meanwhile: bool = False  # made here again while it was pulled or restored
    writer: str = ""  # the process that made it here; "" for a pulled copy
    file: int = 0  # its number, if a process made it: what is freed, as another may lie there by then
    disk_bytes: int = 0
    waiters: dict[str, None] = field(default_factory=dict)  # processes that want it, in order
    nodes: dict[str, None] = field(default_factory=dict)  # where it may be pulled from
    wanted_s: float = NEVER_S
    kept_until_s: float = NEVER_S  # readers map it, or writing it failed: not spilled before
    late: list[tuple[ObjectWanted, str]] = field(default_factory=list)  # asked for since it is doomed, and by whom


@dataclass(slots=True, eq=False)
class Ask:
    """Someone waits for room: a process for a new object, or an entry that is to be restored or pulled."""

    size_bytes: int
    since_s: float
    sender: str = ""
    request: int = 0
    entry: Entry | None = None


def mib(size_bytes: int) -> str:
    """A size in MiB, as in all errors of the store."""
    return f"{size_bytes / MIB:.1f} MiB"


def too_large(size_bytes: int, limit_bytes: int, folder: str) -> str:
    """Why an object can never be stored."""
    return (
        f"an object of {mib(size_bytes)} does not fit into the store at {folder}, whose limit is {mib(limit_bytes)}; "
        "give init a larger object_store_bytes"
    )


def disk_full(disk_bytes: int, limit_bytes: int) -> str:
    """Why no more is spilled."""
    return f"{mib(disk_bytes)} are spilled to disk and the limit is {mib(limit_bytes)} (spill_limit_bytes)"


def full(size_bytes: int, limit_bytes: int, folder: str, uses: Iterable[tuple[str, int]]) -> str:
    """Why there is no room now, and who has it."""
    listed = ", ".join(f"{mib(used_bytes)} {what}" for what, used_bytes in uses if used_bytes)
    return (
        f"no room for {mib(size_bytes)} in the store at {folder} (limit {mib(limit_bytes)}): "
        f"{listed or 'nothing'} in use, and nothing left that can be moved to disk"
    )
