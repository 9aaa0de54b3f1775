"""Progress bars on a terminal; a line now and then where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flowengine.refs import ObjectRef

LINE_EVERY_S = 5.0


def bar(
    refs: list[ObjectRef], desc: str | None, completed: Callable[[list[ObjectRef]], Iterator[ObjectRef]]
) -> Iterator[ObjectRef]:
    """The refs as they complete, with a bar on stderr that counts them."""
    label = desc or "tasks"
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield from _lines(refs, label, completed, console)
        return
    counts = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *counts)
    with Progress(*columns, console=console) as shown:
        row = shown.add_task(label, total=len(refs))
        for ref in completed(refs):
            shown.advance(row)
            yield ref


def _lines(
    refs: list[ObjectRef], label: str, completed: Callable[[list[ObjectRef]], Iterator[ObjectRef]], console: Console
) -> Iterator[ObjectRef]:
    told_at = began_at = time.monotonic()
    for count, ref in enumerate(completed(refs), 1):
        now = time.monotonic()
        if now - told_at >= LINE_EVERY_S or count == len(refs):
            told_at = now
            console.print(f"{label}: {count}/{len(refs)} in {now - began_at:.1f} s", highlight=False)
        yield ref
