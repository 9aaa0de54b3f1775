"""What a process with a session does itself with messages of its node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from flowengine.core import messages as m
from flowengine.runtime.hearing import Hearing


def test_that_segments_are_warm_is_told_with_what_is_said_next_or_soon() -> None:
    said: list[Any] = []
    timers: list[Any] = []
    hearing: Any = Hearing()
    hearing.endpoint = SimpleNamespace(
        send=lambda peer, message, urgent: said.append((peer, message, urgent)), flush=lambda: said.append("flushed")
    )
    hearing.values = SimpleNamespace(segments=SimpleNamespace(free=lambda name, file: file * 100))
    hearing.loop = SimpleNamespace(call_later=lambda delay_s, action: timers.append(action))
    one, two, three = (bytes([number]) * 20 for number in range(3))
    hearing.freed("node", m.ObjectFreed((one, two), files=(1, 2)))
    hearing.freed("node", m.ObjectFreed((three,), files=(3,)))
    assert said == [
        ("node", m.SegmentKept(oid, file * 100, file), False) for oid, file in ((one, 1), (two, 2), (three, 3))
    ]
    assert len(timers) == 1, "one is enough for all"
    timers.pop()()
    assert said[-1] == "flushed"
    hearing.freed("node", m.ObjectFreed((one,), files=(4,)))
    assert len(timers) == 1
