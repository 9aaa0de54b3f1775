"""The Owner's rules for values that this process will have though none of its tasks makes them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import messages as m
from .owner_base import OwnerBase
from .owner_state import Obj


class Promised(m.Message, frozen=True):
    """User code got a reference to a value that this process will have."""

    oid: bytes


class PromiseKept(m.Message, frozen=True):
    """The value is there, or an error."""

    oid: bytes
    value: Any


class PromiseRules(OwnerBase):
    """Part of Owner: see owner_base for the state."""

    def promise_made(self, event: Promised, sender: str) -> None:
        """The object is owned here, has no maker, and is not lost while it has no value."""
        obj = self.objects.get(event.oid)
        if obj is None:
            obj = self.objects[event.oid] = Obj(event.oid, was_put=True)
        obj.local += 1  # a parent that runs again asks for the same value
        if obj.value is None:
            self.promised[event.oid] = None

    def promise_kept(self, event: PromiseKept, sender: str) -> None:
        """Whoever waits goes on; what nobody waits for any more is dropped."""
        if self.promised.pop(event.oid, event.oid) is None:
            obj = self.objects.get(event.oid)
            if obj is not None:
                self.set_value(obj, event.value, "")
                return
        self.refuse(event.oid, event.value)


HANDLERS: dict[type[Any], Callable[[Any, Any, str], None]] = {
    Promised: PromiseRules.promise_made,
    PromiseKept: PromiseRules.promise_kept,
}
