"""Waits that last: one line now and then in the log that tells what is waited for, and why."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from flowengine.core.ids import short
from flowengine.core.owner_state import Waiter

if TYPE_CHECKING:
    from flowengine.runtime.session import Session

log = logging.getLogger("flowengine.waits")

TOLD_MAX = 3  # causes in one line
LOOKED_AT_MAX = 100  # of the values that a wait is for
QUIET_S = 0.5  # between two lines, whoever waits


class LongWaits:
    """Of one session; each wait is told of after `wait_warn_s`, then after twice as long, and so on."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.lock = threading.Lock()
        self.quiet_until_s = 0.0

    def wait(self, lock: Any, number: int, deadline: float | None, waited_s: float) -> bool:
        """Acquire the lock, which whatever is waited for releases; False when the time is over."""
        began_s, due_s = time.monotonic() - waited_s, self.session.config.wait_warn_s
        done = self.ended()
        while True:
            now = time.monotonic()
            left_s = [end - now for end in (deadline, began_s + due_s if due_s else None) if end is not None]
            if lock.acquire(timeout=max(0.0, min(left_s))) if left_s else lock.acquire():
                return True
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return False
            if due_s and now - began_s >= due_s:
                due_s = 2 * (now - began_s)
                done = self.look(number, now - began_s, done)

    def ended(self) -> int:
        """How many tasks and calls of this process have ended."""
        counters = self.session.owner.counters
        return counters["tasks_executed"] + counters["calls_executed"]

    def look(self, number: int, waited_s: float, done: int) -> int:
        """Tell why the wait lasts, unless work gets done meanwhile and nothing is known to stand in its way."""
        session, ended = self.session, self.ended()
        waiter = session.owner.waiters.get(number)
        told, is_stuck = self.causes(waiter) if waiter is not None else (session.sharing.why(number), True)
        is_worth_it = is_stuck or (session.role == "driver" and ended == done)
        if not told or not is_worth_it or (session.role != "driver" and waiter is None):
            return ended
        with self.lock:
            now = time.monotonic()
            if now < self.quiet_until_s:
                return ended
            self.quiet_until_s = now + QUIET_S
        log.warning("waiting for %.0f s: %s", waited_s, told)
        return ended

    def causes(self, waiter: Waiter) -> tuple[str, bool]:
        """What stands in the way of the values, in words, and whether it does so for good as things are."""
        session, owner = self.session, self.session.owner
        missing = [obj.oid for obj in list(waiter.objects) if obj.value is None]
        stuck, found = False, dict[str, list[bytes]]()
        for oid in missing[:LOOKED_AT_MAX]:
            root, is_stuck = owner.cause(oid)
            stuck = stuck or is_stuck
            text = session.why(root)
            needs = "" if root == oid else f"{owner.name_of(oid)} needs "
            found.setdefault(needs + text.removeprefix(short(root)).strip(), []).append(oid)
        texts = [f"{short(oids[0])}{f' and {len(oids) - 1} more' if len(oids) > 1 else ''} {text}"
                 for text, oids in found.items()]
        more = f"; and {len(texts) - TOLD_MAX} more causes" if len(texts) > TOLD_MAX else ""
        return "; ".join(texts[:TOLD_MAX]) + more, stuck
