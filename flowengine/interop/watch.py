"""Callbacks of Dask, which look at a graph while dask_get computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..refs import ObjectRef

if TYPE_CHECKING:
    from ..runtime.session import Session
    from .dask_graph import Parts, Unit


class Watch:
    """Dask's callbacks, and the state that they look at."""

    def __init__(self, callbacks: list[Any]) -> None:
        self.callbacks = callbacks
        self.begun: list[Any] = []
        self.graph: dict[Any, Any] = {}
        self.state: dict[str, Any] = {}

    def started(self, graph: dict[Any, Any]) -> None:
        """A graph has come; callbacks may put known values into it."""
        self.graph = graph
        for callback in self.callbacks:
            if callback[0]:
                callback[0](graph)
            self.begun.append(callback)

    def planned(self, parts: Parts) -> None:
        """It is known what has to run."""
        if not self.callbacks:
            return
        graph, units = parts.graph, parts.units
        self.state = {
            "dependencies": {key: set(node.dependencies) for key, node in graph.items()},
            "dependents": {key: {user.key for user in unit.users} for key, unit in units.items()},
            "waiting": {key: set(unit.needs) & units.keys() for key, unit in units.items() if unit.missing},
            "waiting_data": {},
            "cache": {key: node.value for key, node in parts.constants.items()},
            "ready": [key for key, unit in units.items() if not unit.missing],
            "running": set(),
            "finished": set(),
            "released": set(),
        }
        for callback in self.callbacks:
            if callback[1]:
                callback[1](self.graph, self.state)

    def sent(self, unit: Unit) -> None:
        """A task was submitted."""
        if not self.callbacks:
            return
        self.state["ready"].remove(unit.key)
        self.state["running"].add(unit.key)
        for callback in self.callbacks:
            if callback[2]:
                callback[2](unit.key, self.graph, self.state)

    def ended(self, unit: Unit, ref: ObjectRef, session: Session) -> None:
        """A task has ended; its value is read only if a callback wants it."""
        if not self.callbacks:
            return
        key, state = unit.key, self.state
        state["running"].remove(key)
        state["finished"].add(key)
        for user in unit.users:
            state["waiting"][user.key].discard(key)
            if not state["waiting"][user.key]:
                del state["waiting"][user.key]
                state["ready"].append(user.key)
        told = [callback[3] for callback in self.callbacks if callback[3]]
        if told:
            value = session.get_one(ref, None, True)
            obj = session.owner.objects.get(ref.oid)
            for tell in told:
                tell(key, value, self.graph, state, obj.maker if obj is not None else "")

    def released(self, key: Any) -> None:
        """Nobody needs the value any more."""
        if self.callbacks:
            self.state["released"].add(key)

    def finished(self, failed: bool) -> None:
        """All is over."""
        for callback in self.begun:
            if callback[4]:
                callback[4](self.graph, self.state, failed)
