"""What runs in workers for dask_get: nodes of a Dask graph, and functions that many of them share.

Imports nothing of Dask: the nodes bring what they need.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..refs import ObjectRef, checked

Within = Callable[[], AbstractContextManager[object]]

SHARED_MAX = 1_000  # functions kept in a process


class SharedFunction:
    """A function of many nodes that cannot be imported: sent once to each process, then found there."""

    def __init__(self, ref: ObjectRef, name: str) -> None:
        self.ref = ref
        self.__name__ = name

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.found()(*args, **kwargs)

    def found(self) -> Callable[..., Any]:
        """The function itself."""
        oid = self.ref.oid
        function = _shared.get(oid)
        if function is None:
            function = checked(self.ref).get_one(self.ref, None, False)
            with _sharing:
                if len(_shared) >= SHARED_MAX:
                    del _shared[next(iter(_shared))]
                _shared[oid] = function
        return function


_shared: dict[bytes, Callable[..., Any]] = {}
_sharing = threading.Lock()


class RunNodes:
    """The function behind all tasks of one kind of nodes: the kind is in it so that each has a cost of its own."""

    def __init__(self, kind: str, within: Within | None) -> None:
        self.kind = kind
        self.within = within  # which context they run, if in any

    def __call__(
        self, nodes: Sequence[tuple[Any, Any]], results: Sequence[Any], names: Sequence[Any], *values: Any
    ) -> Any:
        """Run nodes, by their keys, in their order and give the results, or the one; values: what names stand for."""
        known = dict(zip(names, values, strict=True))
        if self.within is None:
            run_nodes(nodes, known)
        else:
            with self.within():
                run_nodes(nodes, known)
        return known[results[0]] if len(results) == 1 else [known[key] for key in results]


def run_nodes(nodes: Sequence[tuple[Any, Any]], known: dict[Any, Any]) -> None:
    """Run nodes in their order, over values that are known; a value is kept until the last one that needs it."""
    last_use = {need: place for place, (_, node) in enumerate(nodes) for need in node.dependencies}
    for place, (key, node) in enumerate(nodes):
        known[key] = node(known)
        for need in node.dependencies:
            if last_use[need] == place:
                del known[need]
