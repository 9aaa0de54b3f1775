"""What the user sees: progress while it runs (bars on a terminal, lines elsewhere) and the report at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import flowengine as flow

if TYPE_CHECKING:
    from rich.console import Console

RoundLine = Callable[[int, float, float, float], None]
LINE_EVERY_ROUNDS = 20


class Check(NamedTuple):
    """One comparison of the result: what, whether it holds, and the figures."""

    name: str
    holds: bool
    figures: str


class Board:
    """The progress of one run, written to one console."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started_s = time.monotonic()

    def clock(self) -> str:
        """Seconds since the start, as the head of a line."""
        return f"[dim]{time.monotonic() - self.started_s:6.2f} s[/dim]"

    def note(self, text: str) -> None:
        """One line about something that happened."""
        self.console.print(f"{self.clock()}  [yellow]{escape(text)}[/yellow]", highlight=False)

    def step(self, text: str) -> None:
        """One line about something that is done."""
        self.console.print(f"{self.clock()}  {text}", highlight=False)

    def bars(self) -> Progress:
        """A bar that vanishes when it is full; on something that is no terminal, nothing."""
        return Progress(
            TextColumn("          {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )

    def follow(self, title: str, refs: Sequence[Any]) -> None:
        """Waits for all refs, and shows how many are there."""
        began_s = time.monotonic()
        with self.bars() as bars:
            bar = bars.add_task(title, total=len(refs))
            for _ in flow.as_completed(list(refs)):
                bars.advance(bar)
        self.step(f"{title:<16} {len(refs):>4} results in {time.monotonic() - began_s:5.2f} s")

    @contextmanager
    def rounds(self) -> Iterator[RoundLine]:
        """A function that shows one round of the model."""
        began_s, count = time.monotonic(), 0
        with self.bars() as bars:
            bar = bars.add_task("learn", total=None)

            def line(number: int, loss: float, held_loss: float, slope: float) -> None:
                nonlocal count
                count = number
                text = f"round {number:>3}: loss {loss:.6f}, held out {held_loss:.6f}, slope {slope:.1e}"
                bars.update(bar, completed=number, description=text)
                if number == 1 or number % LINE_EVERY_ROUNDS == 0:
                    self.step(text)

            yield line
        self.step(f"{'learn':<16} {count:>4} rounds  in {time.monotonic() - began_s:5.2f} s")

    def table(self, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; all columns but the first are aligned to the right."""
        table = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
        for place, head in enumerate(heads):
            table.add_column(head, justify="left" if place == 0 else "right")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def checks(self, checks: Sequence[Check]) -> None:
        """Every check with its figures."""
        self.console.print("[bold]Checks against one process without the engine[/bold]")
        for check in checks:
            mark = "[green]ok  [/green]" if check.holds else "[red]FAIL[/red]"
            self.console.print(f"  {mark} {check.name}: {check.figures}", highlight=False)
