"""What the user sees: lines with a clock, a bar while it trains, the curve of the loss as dots in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a character of braille: four rows, two columns
BLANK = 0x2800
SMOOTHED_STEPS = 8


def smoothed(losses: Sequence[float], steps: int = SMOOTHED_STEPS) -> list[float]:
    """The mean of each loss and those before it."""
    sums = np.cumsum([0.0, *losses])
    ends = np.arange(1, len(losses) + 1)
    begins = np.maximum(0, ends - steps)
    return [float(one) for one in (sums[ends] - sums[begins]) / (ends - begins)]


def curve(numbers: Sequence[float], mark: int | None = None, columns: int = 64, rows: int = 9) -> list[str]:
    """Lines of text with the curve; mark: a place on it that gets a vertical line."""
    low, high = min(numbers), max(numbers)
    cells = np.full((rows, columns), BLANK)
    x = np.arange(2 * columns)
    places = np.minimum(x * len(numbers) // (2 * columns), len(numbers) - 1)
    share = (np.asarray(numbers)[places] - low) / ((high - low) or 1)
    y = np.rint((1 - share) * (4 * rows - 1)).astype(int)
    if mark is not None:
        at = min(mark * 2 * columns // len(numbers), 2 * columns - 1)
        for row in range(0, 4 * rows, 2):
            cells[row // 4, at // 2] |= DOTS[row % 4][at % 2]
    before = y[0]
    for column, here in zip(x, y, strict=True):  # down or up to the one before, so that the line has no gaps
        for row in range(min(before, here), max(before, here) + 1):
            cells[row // 4, column // 2] |= DOTS[row % 4][column % 2]
        before = here
    lines = ["".join(map(chr, line)) for line in cells]
    heads = [f"{high:.3f}", *[""] * (rows - 2), f"{low:.3f}"]
    return [f"{head:>8} {line}" for head, line in zip(heads, lines, strict=True)]
