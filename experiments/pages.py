"""Results of experiments as text: Markdown tables, and the part of a README that a run writes anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

BEGIN, END = "<!-- what follows is written by run.py -->", "<!-- end -->"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; columns with numbers are aligned to the right."""
    is_text = [not any(is_number(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(heads) + " |",
        "|" + "|".join("---" if text else "---:" for text in is_text) + "|",
        *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def is_number(cell: object) -> bool:
    """Whether a cell is a number in words, or stands for none."""
    text = str(cell).replace(",", "").replace("%", "").replace(" x", "").strip()
    try:
        float(text)
    except ValueError:
        return text in ("", "-")
    return True


def percentile(numbers: Sequence[float], percent: float) -> float:
    """The smallest number that at least so many percent do not exceed."""
    ordered = sorted(numbers)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def fill(readme: Path, text: str) -> None:
    """Put the text between the two marks of a file."""
    before, _, rest = readme.read_text().partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{readme} has no place for results: it needs {BEGIN!r} and {END!r}")
    readme.write_text(f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}")
