"""How much of its host a node's processes use: shares of CPUs since the last look, resident memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import psutil

PROCESSES_MAX = 1_000


class HostUse:
    """Looks at processes from time to time; of one that it sees for the first time the share is not known (-1)."""

    def __init__(self) -> None:
        self._cpu: dict[int, tuple[float, float]] = {}  # by process id: CPU seconds, and when
        self._host = psutil.cpu_times()

    def look(self, pids: Iterable[int]) -> dict[str, Any]:
        """The host's CPU share and memory, and by process id: share of one CPU, resident bytes."""
        memory = psutil.virtual_memory()
        before, self._host = self._host, psutil.cpu_times()
        total_s = sum(self._host) - sum(before)
        idle_s = self._host.idle - before.idle
        known, self._cpu = self._cpu, {}
        processes = {}
        for pid in list(pids)[:PROCESSES_MAX]:
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    times, resident_bytes = process.cpu_times(), process.memory_info().rss
            except psutil.Error:
                continue  # it has just ended
            cpu_s, now = times.user + times.system, time.monotonic()
            old_s, then = known.get(pid, (0.0, now))
            share = (cpu_s - old_s) / (now - then) if now > then else -1.0
            self._cpu[pid] = cpu_s, now
            processes[str(pid)] = [round(share, 3), resident_bytes]
        return {
            "cpu_share": round(1 - idle_s / total_s, 3) if total_s > 0 else -1.0,
            "cpu_count": psutil.cpu_count() or 1,
            "memory_used_bytes": memory.total - memory.available,
            "memory_total_bytes": memory.total,
            "processes": processes,
        }
