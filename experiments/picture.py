"""Pictures of experiments: lines, groups of bars and stacked bars as SVG, from the standard library alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 74, 20, 66, 52
ROW = 58  # height of one stacked bar
NARROW = 28  # no room for a number above a bar that is less wide
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")  # told apart by all eyes
INK, GRID = "#222222", "#dddddd"


class Axis(NamedTuple):
    """What an axis shows, and from where to where."""

    label: str
    low: float
    high: float
    is_log: bool = False

    def share(self, number: float) -> float:
        """Where a number lies, 0 to 1."""
        if self.is_log:
            low, high, number = (math.log10(max(n, 1e-12)) for n in (self.low, self.high, number))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (number - low) / (high - low)))

    def ticks(self) -> list[float]:
        """Round numbers along it."""
        if self.is_log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(decades) < 5 else (1,)
            found = [step * 10.0**decade for decade in decades for step in steps]
        else:
            rough = (self.high - self.low) / 6
            unit = 10.0 ** math.floor(math.log10(rough))
            step = unit * next(times for times in (1, 2, 5, 10) if times * unit >= rough)
            found = [step * place for place in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [tick for tick in found if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]


class Series(NamedTuple):
    """A line, or the bars of one colour: one name, its points or heights."""

    name: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


class Bars(NamedTuple):
    """The bars of one colour: one name, one height for each group; None leaves the bar out."""

    name: str
    heights: Sequence[float | None]


class Stack(NamedTuple):
    """One bar made of parts that follow one another."""

    name: str
    parts: Sequence[float]


def text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'


def shown(number: float) -> str:
    """A number with as many digits as it deserves."""
    return f"{number:,.0f}" if abs(number) >= 100 or number == round(number) else f"{number:.3g}"


def page(title: str, parts: Sequence[str], height: float = HEIGHT) -> str:
    """The whole drawing."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" font-size="12" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
        text(LEFT, 22, title, more='font-size="15" font-weight="bold"'),
        *parts,
        "</svg>",
        "",
    ])  # fmt: skip


def legend(names: Sequence[str]) -> list[str]:
    """A square and a name for each colour, in a row below the title."""
    parts, x = [], float(LEFT)
    for place, name in enumerate(names):
        parts += [
            f'<rect x="{x:.1f}" y="35" width="11" height="11" fill="{COLORS[place % len(COLORS)]}"/>',
            text(x + 16, 45, name),
        ]
        x += 34 + 6.6 * len(name)
    return parts


def place_y(axis: Axis, number: float, height: float = HEIGHT) -> float:
    """Where a number lies on the vertical axis, in the drawing's units."""
    return height - BOTTOM - axis.share(number) * (height - TOP - BOTTOM)


def place_x(axis: Axis, number: float) -> float:
    """Where a number lies on the horizontal axis, in the drawing's units."""
    return LEFT + axis.share(number) * (WIDTH - LEFT - RIGHT)


def vertical(axis: Axis) -> list[str]:
    """The vertical axis with its grid."""
    middle = (HEIGHT - BOTTOM + TOP) / 2
    parts = [text(18, middle, axis.label, "middle", f'transform="rotate(-90 18 {middle})"')]
    for tick in axis.ticks():
        y = place_y(axis, tick)
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>',
            text(LEFT - 8, y + 4, shown(tick), "end"),
        ]
    return parts


def horizontal(axis: Axis, height: float = HEIGHT) -> list[str]:
    """The horizontal axis with its grid."""
    parts = [text((LEFT + WIDTH - RIGHT) / 2, height - 12, axis.label, "middle")]
    for tick in axis.ticks():
        x = place_x(axis, tick)
        parts += [
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}" stroke="{GRID}"/>',
            text(x, height - BOTTOM + 18, shown(tick), "middle"),
        ]
    return parts


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series], marks: Sequence[tuple[float, str]] = ()) -> str:
    """Lines over a common axis; marks are vertical lines with a word."""
    parts = [*vertical(y), *horizontal(x), *legend([one.name for one in series])]
    for at, word in marks:
        mark = place_x(x, at)
        parts += [
            f'<line x1="{mark:.1f}" x2="{mark:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="{INK}" '
            'stroke-dasharray="2 3"/>',
            text(mark + 5, TOP + 12, word),
        ]
    for place, one in enumerate(series):
        way = " ".join(f"{place_x(x, at):.1f},{place_y(y, number):.1f}" for at, number in one.points)
        dashes = ' stroke-dasharray="6 4"' if one.is_dashed else ""
        color = COLORS[place % len(COLORS)]
        parts.append(f'<polyline points="{way}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')
    return page(title, parts)


def above(x: float, y: float, words: str, width: float) -> str:
    """A number above a bar, on end when the bar is narrow."""
    if width >= NARROW:
        return text(x, y, words, "middle", 'font-size="10"')
    return text(x + 3, y, words, "start", f'font-size="9" transform="rotate(-90 {x + 3:.1f} {y:.1f})"')


def bar_chart(title: str, groups: Sequence[str], y: Axis, bars: Sequence[Bars]) -> str:
    """Groups of bars side by side, each with its number."""
    parts = [*vertical(y), *legend([one.name for one in bars])]
    room = (WIDTH - LEFT - RIGHT) / len(groups)
    width = room * 0.84 / len(bars)
    base = HEIGHT - BOTTOM
    for place, group in enumerate(groups):
        left = LEFT + place * room + room * 0.08
        parts.append(text(left + room * 0.42, base + 18, group, "middle"))
        for number, one in enumerate(bars):
            height = one.heights[place]
            if height is None:
                continue
            top, x = place_y(y, height), left + number * width
            color, wide = COLORS[number % len(COLORS)], width * 0.92
            parts += [
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{base - top:.1f}" fill="{color}"/>',
                above(x + width * 0.46, top - 4, shown(height), width),
            ]
    parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}" stroke="{INK}"/>')
    return page(title, parts)


def stack_chart(title: str, x: Axis, names: Sequence[str], stacks: Sequence[Stack]) -> str:
    """Horizontal bars whose parts have a colour each."""
    height = TOP + ROW * len(stacks) + BOTTOM
    parts = [*horizontal(x, height), *legend(names)]
    for place, stack in enumerate(stacks):
        top, reached = TOP + place * ROW, 0.0
        parts.append(text(LEFT + 4, top + 16, f"{stack.name}: {shown(sum(stack.parts))}"))
        for number, part in enumerate(stack.parts):
            left, right = place_x(x, reached), place_x(x, reached + part)
            color = COLORS[number % len(COLORS)]
            parts.append(
                f'<rect x="{left:.1f}" y="{top + 22:.1f}" width="{right - left:.1f}" height="24" fill="{color}"/>'
            )
            reached += part
    return page(title, parts, height)
