"""Which gradients travel together, and when: buckets are filled in the order in which gradients are expected."""

from __future__ import annotations

from collections.abc import Sequence


def filled(sizes_bytes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """The numbers of the items, in their order, in buckets of at most bucket_bytes or of one item."""
    buckets: list[list[int]] = []
    held_bytes = 0
    for number, size_bytes in enumerate(sizes_bytes):
        if not buckets or held_bytes + size_bytes > bucket_bytes:
            buckets.append([])
            held_bytes = 0
        buckets[-1].append(number)
        held_bytes += size_bytes
    return buckets


class Buckets:
    """Buckets are sent in one order on all ranks, each when all of its items and those of the ones before are there."""

    def __init__(self, sizes_bytes: Sequence[int], bucket_bytes: int) -> None:
        self.buckets = filled(sizes_bytes, bucket_bytes)
        self.bucket_of = {item: number for number, items in enumerate(self.buckets) for item in items}
        self.begin()

    def begin(self) -> None:
        """Nothing is there, nothing is sent."""
        self.missing = [set(items) for items in self.buckets]
        self.sent = 0

    def arrived(self, item: int) -> list[int]:
        """An item is there; gives the buckets to send now. An item that comes again makes all be sent once more."""
        again: list[int] = []
        if item not in self.missing[self.bucket_of[item]]:
            again = self.rest()  # each round sends all, so that all ranks send alike
            self.begin()
        self.missing[self.bucket_of[item]].discard(item)
        first = self.sent
        while self.sent < len(self.buckets) and not self.missing[self.sent]:
            self.sent += 1
        return [*again, *range(first, self.sent)]

    def rest(self) -> list[int]:
        """Nothing more comes; gives the buckets that were not sent."""
        first, self.sent = self.sent, len(self.buckets)
        return list(range(first, self.sent))
