"""The state of an actor as bytes: the instance itself, or what its __flow_save__ gives, with what its machine needs.

Whoever reads it has the actor's class, so that is named and not pickled, and methods that the state holds stay those of
the instance. Arrays, Arrow values and long bytes go out of band, so that those that did not change need not be written.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from flowengine.objects import codec

LONG_BYTES = 16 * codec.KIB


class _Reading(threading.local):
    known: type | None = None


_here = _Reading()


@contextlib.contextmanager
def _knowing(kind: type) -> Iterator[None]:
    outer, _here.known = _here.known, kind
    try:
        yield
    finally:
        _here.known = outer


def _known() -> Any:
    return _here.known


class _StatePickler(codec.FullPickler):
    def reducer_override(self, obj: Any) -> Any:
        """As for all values, but for the class, its instances and their methods."""
        kind, known = type(obj), _here.known
        if obj is known:
            return _known, ()
        if kind is known:
            reduced = obj.__reduce_ex__(5)
            if isinstance(reduced, tuple) and len(reduced) > 2:
                return (*reduced[:2], _outside(reduced[2]), *reduced[3:])
            return reduced
        if kind is types.MethodType and type(obj.__self__) is known:
            return getattr, (obj.__self__, obj.__func__.__name__)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.is_leaf and obj.grad is not None:
            return (*obj.__reduce_ex__(5)[:2], obj.grad, None, None, _set_gradient)  # torch leaves it out
        return super().reducer_override(obj)


def _set_gradient(tensor: Any, gradient: Any) -> None:
    tensor.grad = gradient


def _outside(state: Any, depth: int = 2) -> Any:
    """The same with long bytes to be carried out of band; only in the outermost dicts and tuples."""
    kind = type(state)
    if kind is bytes and len(state) >= LONG_BYTES:
        return codec.Raw(state)
    if kind is dict and depth:
        return {name: _outside(member, depth - 1) for name, member in state.items()}
    if kind is tuple and depth:
        return tuple([_outside(member, depth - 1) for member in state])
    return state


def saved(instance: Any) -> Any:
    """What is kept of an instance; raises what its __flow_save__ raises."""
    save = getattr(instance, "__flow_save__", None)
    return _outside(save()) if save is not None else instance


def pack(kept: Any, machine: Any, kind: type) -> codec.Packed:
    """Pickle what saved() gave for an instance of this class, and what the machine needs; raises what pickle raises."""
    with codec.collecting(), _knowing(kind):
        return codec.pack_with(_StatePickler, (kept, machine))


def unpack(payload: Any, buffers: list[Any], kind: type) -> tuple[Any, Any]:
    """The instance and what the machine needs; arrays lie in the buffers, which must be writable and are given away."""
    with _knowing(kind):
        kept, machine = pickle.loads(payload, buffers=buffers)
    return _loaded(kept, kind), machine


def unpack_inline(blob: bytes, kind: type) -> tuple[Any, Any]:
    """The same from the bytes of codec.to_inline."""
    with _knowing(kind):
        found: Any = codec.from_inline(blob, copy=True)
    return _loaded(found[0], kind), found[1]


def _loaded(kept: Any, kind: type) -> Any:
    if not hasattr(kind, "__flow_save__"):
        return kept
    make: Any = kind.__new__
    instance = make(kind)
    load = getattr(instance, "__flow_load__", None) or getattr(instance, "__setstate__", None)
    if load is not None:
        load(kept)
    else:
        instance.__dict__.update(kept)
    return instance
