"""How fast the ways to other nodes are, learnt from the courses that went over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

LATENCY_S_GUESS = 0.001
BYTES_PER_S_GUESS = 125e6  # of a gigabit; a wrong guess costs the first course only
NEW_SHARE = 0.5  # of what was measured last


class Speed(msgspec.Struct):
    """What is known of the way to a node."""

    latency_s: float = LATENCY_S_GUESS
    bytes_per_s: float = BYTES_PER_S_GUESS
    answers: int = 0
    courses: int = 0

    def answered(self, round_trip_s: float) -> None:
        """A short question was answered after so long."""
        share = NEW_SHARE if self.answers else 1.0
        self.answers += 1
        self.latency_s += share * (round_trip_s / 2 - self.latency_s)

    def carried(self, nbytes: int, hops: int, took_s: float) -> None:
        """So many bytes came over it, at the end of so many hops."""
        moving_s = took_s - hops * self.latency_s
        if moving_s < took_s / 2:
            return  # it was too little to tell
        share = NEW_SHARE if self.courses else 1.0
        self.courses += 1
        self.bytes_per_s += share * (nbytes / moving_s - self.bytes_per_s)


def slowest(speeds: Mapping[str, Speed], nodes: Iterable[str]) -> Speed:
    """The speed with which all of these ways can be reckoned."""
    known = [speeds.get(node) or Speed() for node in nodes]
    return Speed(max(speed.latency_s for speed in known), min(speed.bytes_per_s for speed in known))
