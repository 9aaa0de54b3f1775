"""How many calls are under way at once, beside those that run: as many as are over soon."""

from __future__ import annotations

QUICK_S, SLOW_S = 0.01, 0.05


class Window:
    """A size between two bounds: one more for a call that took less than 10 ms, one less for one over 50 ms."""

    def __init__(self, least: int, most: int) -> None:
        self.size = self.least = least
        self.most = most

    def ended(self, took_s: float) -> None:
        """A call is over."""
        if took_s < QUICK_S:
            self.size = min(self.size + 1, self.most)
        elif took_s > SLOW_S:
            self.size = max(self.size - 1, self.least)

    def widen(self, least: int) -> None:
        """It is never less than that from now on."""
        self.least = least
        self.size = max(self.size, least)
