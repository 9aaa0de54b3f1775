"""Progress bars on a terminal; a line now and then where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flowengine.refs import ObjectRef

LINE_EVERY_S = 5.0
T = TypeVar("T")


def bar(
    refs: list[ObjectRef], desc: str | None, completed: Callable[[list[ObjectRef]], Iterator[ObjectRef]]
) -> Iterator[ObjectRef]:
    """The refs as they complete, with a bar on stderr that counts them."""
    label = desc or "tasks"
    yield from counted(completed(refs), len(refs), lambda ref: label)


def counted(items: Iterator[T], total: int, label: Callable[[T], str]) -> Iterator[T]:
    """The items as they come, with a bar on stderr that counts them and is labelled after the last one."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield from _lines(items, total, label, console)
        return
    counts = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *counts)
    with Progress(*columns, console=console) as shown:
        row = shown.add_task("", total=total)
        for item in items:
            shown.update(row, advance=1, description=label(item))
            yield item


def _lines(items: Iterator[T], total: int, label: Callable[[T], str], console: Console) -> Iterator[T]:
    told_at = began_at = time.monotonic()
    for count, item in enumerate(items, 1):
        now = time.monotonic()
        if now - told_at >= LINE_EVERY_S or count == total:
            told_at = now
            console.print(f"{label(item)}: {count}/{total} in {now - began_at:.1f} s", highlight=False)
        yield item
