"""Which objects take the memory, and who holds them: what owners and nodes tell when they are asked. Bounded. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nlargest
from typing import TYPE_CHECKING, Any

from .ids import short, task_of
from .parts import Failed, Inline, Stored

if TYPE_CHECKING:
    from .node import Node
    from .owner_base import OwnerBase
    from .owner_state import Obj

OBJECTS_MAX = 1_000  # the largest of each process
NAME_CHARS_MAX = 120


def owned(owner: OwnerBase) -> dict[str, Any]:
    """The largest objects of a process that owns objects, and the sums over all by function."""
    sums: dict[str, list[int]] = {}
    rows = []
    for obj in list(owner.objects.values()):
        if obj.owner or obj.value is None:
            continue
        size_bytes, name = size_of(obj), name_of(owner, obj)
        row = sums.setdefault(name, [0, 0])
        row[0] += 1
        row[1] += size_bytes
        rows.append((size_bytes, obj.oid, obj, name))
    largest = nlargest(OBJECTS_MAX, rows, key=lambda row: row[:2])
    return {
        "address": owner.me,
        "count": len(rows),
        "functions": [[name, *row] for name, row in nlargest(OBJECTS_MAX, sums.items(), key=lambda item: item[1][1])],
        "objects": [described(obj, size_bytes, name) for size_bytes, _, obj, name in largest],
    }


def described(obj: Obj, size_bytes: int, name: str) -> dict[str, Any]:
    """One object of its owner's."""
    value = obj.value
    return {
        "id": obj.oid.hex(),
        "shown": short(obj.oid),
        "name": name,
        "size_bytes": size_bytes,
        "nodes": list(value.nodes) if isinstance(value, Stored) else [],
        "kind": "error" if isinstance(value, Failed) else "stored" if isinstance(value, Stored) else "inline",
        "refs": max(0, obj.local),
        "tasks": obj.pins,
        "processes": sum(1 for count in (obj.borrowers or {}).values() if count > 0),
        "lineage": obj.lineage,
    }


def size_of(obj: Obj) -> int:
    """The bytes of a value that is there."""
    value = obj.value
    if isinstance(value, Stored):
        return value.size_bytes
    return len(value.blob) if isinstance(value, Inline) else len(value.error) if isinstance(value, Failed) else 0


def name_of(owner: OwnerBase, obj: Obj) -> str:
    """The function or method that made it, or put()."""
    task = obj.task or owner.tasks.get(task_of(obj.oid))
    if task is not None:
        return task.spec.name[:NAME_CHARS_MAX]
    return "put()" if obj.was_put else obj.method[:NAME_CHARS_MAX] or "(forgotten)"


def stored(node: Node) -> dict[str, Any]:
    """The largest objects in the store of a node: size, place (memory or disk), and what is under way."""
    entries: Mapping[bytes, Any] = node.store.entries
    largest = nlargest(OBJECTS_MAX, list(entries.values()), key=lambda entry: (entry.size_bytes, entry.oid))
    return {
        "node": node.desk.me,
        "node_id": node.desk.node_id,
        "limit_bytes": node.store.limit_bytes,
        "count": len(entries),
        "memory_bytes": sum(entry.size_bytes for entry in entries.values() if entry.place == "memory"),
        "disk_bytes": sum(entry.disk_bytes for entry in entries.values() if entry.place == "disk"),
        "objects": [[entry.oid.hex(), entry.size_bytes, entry.running or entry.place] for entry in largest],
    }
