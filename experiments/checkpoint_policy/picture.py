"""The grid as an SVG: a panel for each size of state and cost of a call, time over that of the best fixed policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from experiments.checkpoint_policy.virtual import Cell

WIDTH, HEIGHT, LEFT, TOP, GAP = 210, 150, 60, 70, 46
RATIO_MAX = 3.0
COLOURS = {
    "adaptive": "#d62728", "true rate": "#1f77b4", "1": "#9467bd", "10": "#8c564b", "100": "#2ca02c", "1000": "#ff7f0e",
    "never": "#7f7f7f",
}  # fmt: skip
Times = Sequence[tuple[str, float]]


def height_of(ratio: float) -> float:
    """Pixels below the top of a panel; logarithmic, what is worse than 3 x is at the top."""
    return HEIGHT * (1.0 - math.log(min(max(ratio, 0.95), RATIO_MAX) / 0.95) / math.log(RATIO_MAX / 0.95))


def picture(times: Sequence[Times], cells: Sequence[Cell], ours: str) -> str:
    """times: of each cell, by policy; the best fixed policy of a cell is at 1."""
    sizes = sorted({cell.state_bytes for cell in cells})
    calls = sorted({cell.call_s for cell in cells})
    rates = sorted({cell.mtbf_s for cell in cells})
    found = dict(zip(cells, times, strict=True))
    width = LEFT + len(calls) * (WIDTH + GAP)
    height = TOP + len(sizes) * (HEIGHT + GAP) + 20
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
           f'font-size="11"><rect width="100%" height="100%" fill="white"/>']
    out.append(f'<text x="{LEFT}" y="18" font-size="14">Time to completion / that of the best fixed policy, '
               "by mean time between failures</text>")
    for index, name in enumerate(COLOURS):
        label = {"true rate": "Young/Daly", "never": "never", ours: ours}.get(name, f"every {name}")
        x = LEFT + index * 105
        out.append(f'<line x1="{x}" y1="38" x2="{x + 16}" y2="38" stroke="{COLOURS[name]}" '
                   f'stroke-width="{3 if name == ours else 1.5}"/><text x="{x + 20}" y="42">{label}</text>')
    for row, size in enumerate(sizes):
        for column, call_s in enumerate(calls):
            x, y = LEFT + column * (WIDTH + GAP), TOP + row * (HEIGHT + GAP)
            chosen = [(rate, found[cell]) for rate in rates for cell in cells
                      if (cell.state_bytes, cell.call_s, cell.mtbf_s) == (size, call_s, rate)]
            out += panel(x, y, f"{size / 1e6:g} MB of state, calls of {call_s:g} s", chosen, ours)
    return "\n".join([*out, "</svg>"]) + "\n"


def panel(x: int, y: int, title: str, chosen: Sequence[tuple[float, Times]], ours: str) -> Iterator[str]:
    """One size of state and cost of a call."""
    yield f'<text x="{x}" y="{y - 6}">{title}</text>'
    yield f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbb"/>'
    for mark in (1.0, 1.1, 1.5, 2.0, RATIO_MAX):
        at = y + height_of(mark)
        dash = ' stroke-dasharray="4 3" stroke="#d62728"' if mark == 1.1 else ' stroke="#ddd"'
        yield f'<line x1="{x}" y1="{at:.1f}" x2="{x + WIDTH}" y2="{at:.1f}"{dash}/>'
        yield f'<text x="{x - 5}" y="{at + 4:.1f}" text-anchor="end">{mark:g}</text>'
    step = WIDTH / len(chosen)
    points: dict[str, list[str]] = {}
    for index, (rate, times) in enumerate(chosen):
        at_x = x + step * (index + 0.5)
        label = f"{rate:g} s" if math.isfinite(rate) else "none"
        yield f'<text x="{at_x:.1f}" y="{y + HEIGHT + 14}" text-anchor="middle">{label}</text>'
        best = min(time for name, time in times if name != ours)
        for name, time in times:
            points.setdefault(name, []).append(f"{at_x:.1f},{y + height_of(time / best):.1f}")
    for name in sorted(points, key=lambda name: name == ours):
        thick = 3 if name == ours else 1.5
        line = " ".join(points[name])
        yield f'<polyline points="{line}" fill="none" stroke="{COLOURS[name]}" stroke-width="{thick}"/>'
