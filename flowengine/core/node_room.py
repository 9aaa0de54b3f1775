"""Who may use how much of a store's memory: grants for objects that are being written, and warm pools of writers."""

from __future__ import annotations

from collections import deque

from .commands import MemorySeen, Send, TrimPool
from .dispatch import Part, on
from .messages import PoolTrimmed, SpaceAsked, SpaceGiven, SpaceReturned
from .node_desk import Desk
from .node_objects import Ask


class Room(Part):
    """The memory of one host's store, counted; part of Store."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.limit_bytes = desk.settings.store_limit_bytes
        self.lacking_bytes = 0  # of the limit, since others use the host's shared memory too
        self.used_bytes = 0  # in memory, or about to be by a pull or restore, or not yet removed by the writer
        self.granted_bytes = 0
        self.granted: dict[str, int] = {}  # process -> bytes that it may still write
        self.pools: dict[str, int] = {}  # writer -> bytes of its warm segments
        self.pool_bytes = 0
        self.trimming: dict[str, int] = {}  # writer -> bytes that it was told to give back
        self.unasked_bytes = 0  # by so much the last that was written without asking was over the limit
        self.asks: deque[Ask] = deque()  # first come, first served
        self.progress_s = 0.0  # when room came free last

    @property
    def left_bytes(self) -> int:
        """What may still be granted."""
        return self.limit_bytes - self.lacking_bytes - self.used_bytes - self.granted_bytes

    @on(MemorySeen)
    def _memory_seen(self, event: MemorySeen, now: float, sender: str) -> None:
        self._only_free(event.free_bytes)

    def _only_free(self, free_bytes: int) -> None:
        """No more than that is left, whatever the limit; what is warm counts again when it has been given back."""
        self.lacking_bytes = max(0, self.limit_bytes - self.used_bytes - free_bytes)
        if self.pool_bytes > self.left_bytes:
            self._trim_pools(spared="")

    @on(SpaceAsked)
    def _asked(self, event: SpaceAsked, now: float, sender: str) -> None:
        size_bytes = event.size_bytes
        if sender in self.desk.gone and not self.desk.is_alive(sender):
            return
        if not self.asks and size_bytes <= self.left_bytes:
            self._grant(sender, event.request, size_bytes)
        else:
            self.asks.append(Ask(size_bytes, now, sender, event.request))

    def _grant(self, sender: str, request: int, size_bytes: int) -> None:
        self.granted_bytes += size_bytes
        self.granted[sender] = self.granted.get(sender, 0) + size_bytes
        self.desk.out.send(sender, SpaceGiven(request, True))
        if self.pool_bytes and self.pool_bytes > self.left_bytes:
            self._trim_pools(spared=sender)

    def _use_grant(self, sender: str, size_bytes: int) -> None:
        had = self.granted.get(sender, 0)
        used = min(had, size_bytes)
        self.granted_bytes -= used
        if had > used:
            self.granted[sender] = had - used
        else:
            self.granted.pop(sender, None)

    @on(SpaceReturned)
    def _returned(self, event: SpaceReturned, now: float, sender: str) -> None:
        self._use_grant(sender, event.size_bytes)
        self.progress_s = now

    def _trim_pools(self, spared: str) -> None:
        """Orders writers to give warm segments back, the largest pool first; the spared one may just reuse its own."""
        over = self.pool_bytes - self.left_bytes - sum(self.trimming.values())
        for writer in sorted(self.pools, key=lambda address: -self.pools[address]):
            if over <= 0:
                return
            part = min(over, self.pools[writer] - self.trimming.get(writer, 0))
            if writer != spared and part > 0:
                self.trimming[writer] = self.trimming.get(writer, 0) + part
                over -= part
                self.desk.out.add(TrimPool(part) if writer == self.desk.me else Send(writer, PoolTrimmed(part)))

    @on(PoolTrimmed)
    def _trimmed(self, event: PoolTrimmed, now: float, sender: str) -> None:
        self._set_pool(sender, self.pools.get(sender, 0) - event.size_bytes)
        self.trimming.pop(sender, None)

    def _set_pool(self, writer: str, size_bytes: int) -> None:
        self.pool_bytes += max(0, size_bytes) - self.pools.pop(writer, 0)
        if size_bytes > 0:
            self.pools[writer] = size_bytes
        else:
            self.trimming.pop(writer, None)

    def _written(self, writer: str, size_bytes: int) -> None:
        before_bytes = self.granted_bytes
        self._use_grant(writer, size_bytes)
        if before_bytes - self.granted_bytes < size_bytes:
            self.unasked_bytes = max(0, self.used_bytes + before_bytes + size_bytes - self.limit_bytes)
        if writer in self.pools:
            # A writer does not say when it fills a warm segment again, but it prefers to. For what it gives to a group
            # it does not ask: just after its pool was ordered back, that can be over the limit until something goes.
            self._set_pool(writer, self.pools[writer] - size_bytes)
