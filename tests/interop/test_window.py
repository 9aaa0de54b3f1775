"""How many calls are sent ahead."""
from __future__ import annotations

from flowengine.interop.window import QUICK_S, SLOW_S, Window


def test_a_window_opens_for_quick_calls_closes_for_slow_ones_and_stays_between_its_bounds():
    window = Window(2, 4)
    sizes = []
    for took_s in (QUICK_S / 2, QUICK_S * 2, 0.0, 0.0, SLOW_S * 2, SLOW_S * 2, SLOW_S * 2):
        window.ended(took_s)
        sizes.append(window.size)
    assert sizes == [3, 3, 4, 4, 3, 2, 2]
    window.widen(3)
    window.ended(SLOW_S * 2)
    assert window.size == 3
