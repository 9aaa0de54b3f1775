"""What an owner knows of the durable copies of results that it chose to have, and of how often nodes are lost. Pure."""

from __future__ import annotations

import msgspec

from ..recovery.failures import Lives

WRITE_S_MIN = 0.002
WRITE_BYTES_PER_S_GUESS = 200e6


class Copy(msgspec.Struct):
    """A copy of a result in durable storage."""

    size_bytes: int
    url: str = ""  # of the folder that it is in; empty: not there yet
    write_s: float = 0.0
    failure: str = ""  # why it could not be written
    restoring: bool = False


class Persisting:
    """What this owner knows of durable copies of results, and of what they cost."""

    def __init__(self) -> None:
        self.nodes = Lives()
        self.node_since: dict[str, float] = {}
        self.copies: dict[bytes, Copy] = {}
        self.bytes = 0
        self.run_s = 0.0  # of all tasks with stored results: no result costs more to make again
        self.bytes_per_s = WRITE_BYTES_PER_S_GUESS

    def nodes_seen(self, addresses: list[str], now: float) -> None:
        """These nodes are alive."""
        for address in addresses:
            if address not in self.node_since:
                self.node_since[address] = now
                self.nodes.begin(now)

    def node_lost(self, address: str, now: float) -> None:
        """A node and its store are gone."""
        since = self.node_since.pop(address, None)
        if since is not None:
            self.nodes.end(since, now, True)

    def write_s(self, size_bytes: int) -> float:
        """What writing so much is expected to take."""
        return WRITE_S_MIN + size_bytes / self.bytes_per_s
