"""How often processes and nodes fail, learnt from what was seen. Pure.

A rate is deaths per second of life (the mean of a Gamma law), where the prior counts as much as the first minute: what
has just begun is expected to die within a minute, so not much is lost if it does, and is trusted more as it lives on.
"""

from __future__ import annotations

import msgspec

PROCESS_RATE_PER_S = 1 / 60.0  # before anything was seen
PRIOR_S = 50.0


def failure_rate_per_s(deaths: int, lived_s: float, prior_per_s: float = 0.0, prior_s: float = PRIOR_S) -> float:
    """Deaths per second of life; prior_per_s: what is known of others like it, 0: nothing."""
    prior = (prior_per_s or PROCESS_RATE_PER_S) * prior_s
    return (deaths + prior) / (lived_s + prior_s)


class Lives(msgspec.Struct):
    """Seconds that some processes or nodes have lived, and how many of them died of themselves."""

    deaths: int = 0
    ended_s: float = 0.0
    alive: int = 0
    began_sum: float = 0.0

    def begin(self, now: float) -> None:
        """One more is alive."""
        self.alive += 1
        self.began_sum += now

    def end(self, began_at: float, now: float, died: bool = False) -> None:
        """One is not there any more; died: not because somebody wanted it to end."""
        self.alive -= 1
        self.began_sum -= began_at
        self.ended_s += now - began_at
        self.deaths += died

    def lived_s(self, now: float) -> float:
        """Of all together."""
        return self.ended_s + self.alive * now - self.began_sum

    def rate_per_s(self, now: float) -> float:
        """Deaths per second of life of one of them."""
        return failure_rate_per_s(self.deaths, self.lived_s(now))
