"""Which tasks must run again to have lost objects back: found over the whole lost set at once. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def closure(first: Iterable[T], needs: Callable[[T], Iterable[T]], key: Callable[[T], bytes]) -> list[T]:
    """All makers that must run again, those that others need first; each once; no recursion (chains may be long)."""
    order: list[T] = []
    seen: dict[bytes, None] = {}
    stack: list[tuple[T, bool]] = [(maker, False) for maker in first]
    while stack:
        maker, expanded = stack.pop()
        name = key(maker)
        if expanded:
            order.append(maker)
            continue
        if name in seen:
            continue
        seen[name] = None
        stack.append((maker, True))
        stack.extend((other, False) for other in needs(maker) if key(other) not in seen)
    return order
