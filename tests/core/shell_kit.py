"""What a shell does for a machine under test: timers in their order, rows of a journal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flowengine.core.commands import WriteJournal


def due(timers: list[tuple[Any, ...]], until_s: float) -> Iterator[tuple[Any, ...]]:
    """Those that fire up to a moment, the earliest first, taken out in their turn; also those set meanwhile."""
    while timers and (timer := min(timers, key=lambda timer: timer[0]))[0] <= until_s:
        timers.remove(timer)
        yield timer


def keep_rows(rows: dict[str, bytes], command: WriteJournal) -> None:
    """Write to a journal."""
    for key, row in command.rows:
        if row is None:
            rows.pop(key, None)
        else:
            rows[key] = row
