"""Operations of many members on arrays: planned, folded and repaired by the nodes of the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .group import Group


def join(name: str, world_size: int, rank: int, *, timeout_s: float = 30.0, on_failure: str = "recover") -> Group:
    """Take a seat in a group of that name and return when all are taken.

    timeout_s: how long steps, and this call, wait for ranks that do not come. on_failure, when a member is lost:
    "recover" waits for it to come again and repeat its steps, "shrink" goes on without it, "raise" gives the group up.
    """
    from .group import join  # what it needs of the engine is imported when this package is already

    return join(name, world_size, rank, timeout_s=timeout_s, on_failure=on_failure)
