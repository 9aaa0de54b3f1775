"""What users give to a group as arrays in one buffer, and results back in the form of what was given.

Arrays of numpy, Arrow and torch, numbers, and lists, tuples and dicts of them. A form is their tree in text, in which
"*" stands for each array or number: "{'b': ['*', '*'], 'w': '*'}".
"""

from __future__ import annotations

import ast
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from flowengine.core.collective import ArrayPart, Header, Layout
from flowengine.errors import BadType, BadValue
from flowengine.objects import codec

Array = np.ndarray[Any, Any]
Back = Callable[[Array], Any]

ALIGN_BYTES = 64
DTYPE_KINDS = "biufcmMSUO"  # those that fit an operation are its ledger's to choose, so that all ranks hear the same
NUMBERS: dict[type, str] = {bool: "|b1", int: "<i8", float: "<f8", complex: "<c16"}
KEYS = (str, int, bytes, bool, type(None))
DEPTH_MAX = 64  # of lists, tuples and dicts; Python reads no text of 200 brackets
ARRAY = "*"
TAKES = "numpy arrays, numbers, Arrow or torch tensors, or lists, tuples and dicts of them"


class Leaf:
    """One array of a value: how a result becomes what it was, and what tells others how."""

    __slots__ = ("back", "kind")

    def __init__(self, back: Back, kind: str = "") -> None:
        self.back = back
        self.kind = kind

    def __repr__(self) -> str:
        return "'*'"


def _as_it_is(array: Array) -> Any:
    return array


def _item(array: Array) -> Any:
    return array.item()


def _scalar(array: Array) -> Any:
    return array[()]


@functools.cache
def _to_torch(torch: Any, device: Any) -> Back:
    def back(array: Array) -> Any:
        made = torch.from_numpy(array)
        return made if device.type == "cpu" else made.to(device)

    return back


def _torch_of_another(array: Array) -> Any:
    try:
        import torch
    except ImportError:
        return array
    return torch.from_numpy(array)


def _arrow_of_another(array: Array) -> Any:
    try:
        import pyarrow
    except ImportError:
        return array
    return pyarrow.Tensor.from_numpy(array)


FOREIGN = {  # by kind: what another rank gave becomes the same here; an array, where what that takes is not installed
    kind: Leaf(back)
    for kind, back in (
        ("", _as_it_is), ("item", _item), ("scalar", _scalar),
        ("torch", _torch_of_another), ("arrow", _arrow_of_another),
    )
}  # fmt: skip


# ---------------------------------------------------------------- values to arrays


class Opened:
    """A value taken apart: its arrays, in the order of the leaves of its tree."""

    def __init__(self, value: Any, op: str) -> None:
        """Raises BadType or BadValue, saying where in the value what was found that cannot be given."""
        self.op = op
        self.arrays: list[Array] = []
        self.leaves: list[Leaf] = []
        self.tree = self._open(value, "", 0)
        self.form = ARRAY if isinstance(self.tree, Leaf) else repr(_sorted(self.tree))

    def _open(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if depth > DEPTH_MAX:
            raise BadValue(f"{self.op} takes no values that are nested more than {DEPTH_MAX} deep")
        if kind is list or kind is tuple:
            return kind([self._open(member, f"{path}[{index}]", depth + 1) for index, member in enumerate(value)])
        if isinstance(value, dict):
            return self._open_dict(value, path, depth + 1)
        leaf, array = self._leaf(value, path)
        if array.dtype.kind not in DTYPE_KINDS:
            raise BadType(f"{self.op} takes no array of dtype {array.dtype}{_at(path)}")
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        self.arrays.append(array)
        self.leaves.append(leaf)
        return leaf

    def _open_dict(self, value: dict[Any, Any], path: str, depth: int) -> dict[Any, Any]:
        for key in value:
            if not _is_plain(key):
                raise BadType(f"{self.op} takes dicts with plain keys, not {key!r}{_at(path)}")
        # All ranks have their arrays in one order, however their dicts were filled.
        opened = {key: self._open(value[key], f"{path}[{key!r}]", depth) for key in sorted(value, key=repr)}
        return {key: opened[key] for key in value}

    def _leaf(self, value: Any, path: str) -> tuple[Leaf, Array]:
        kind = type(value)
        if isinstance(value, np.ma.MaskedArray):
            raise BadType(f"{self.op} takes no masked array{_at(path)}: what it hides would count")
        if isinstance(value, np.ndarray):
            return Leaf(_as_it_is), np.asarray(value)
        if isinstance(value, np.generic):
            return Leaf(_scalar, "scalar"), np.asarray(value)
        if kind in NUMBERS:
            try:
                return Leaf(_item, "item"), np.array(value, NUMBERS[kind])
            except OverflowError:
                raise BadValue(f"{self.op}: {value}{_at(path)} does not fit into 64 bits") from None
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._torch(torch, value, path)
        arrow = sys.modules.get("pyarrow")
        if arrow is not None and isinstance(value, arrow.Tensor):
            return Leaf(arrow.Tensor.from_numpy, "arrow"), value.to_numpy()
        raise BadType(f"{self.op} takes {TAKES}, not {_named(value)}{_at(path)}")

    def _torch(self, torch: Any, tensor: Any, path: str) -> tuple[Leaf, Array]:
        try:
            array = tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
        except (TypeError, RuntimeError) as error:  # a dtype or a layout that numpy does not have
            raise BadType(f"{self.op} takes no torch tensor of {tensor.dtype}{_at(path)}: {error}") from None
        return Leaf(_to_torch(torch, tensor.device), "torch"), array


def _is_plain(key: Any) -> bool:
    """Whether its text makes the same key again."""
    kind = type(key)
    if kind is tuple:
        return all(_is_plain(member) for member in key)
    return kind in KEYS or (kind is float and math.isfinite(key))


def _sorted(tree: Any) -> Any:
    """The tree with all dicts in one order."""
    kind = type(tree)
    if kind is dict:
        return {key: _sorted(tree[key]) for key in sorted(tree, key=repr)}
    return kind([_sorted(member) for member in tree]) if kind is list or kind is tuple else tree


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _named(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


# ---------------------------------------------------------------- arrays to one buffer


class Given:
    """Arrays as they lie in one buffer: aligned, those of one dtype next to each other."""

    def __init__(self, opened: Opened, arrays: Sequence[Array] | None = None) -> None:
        """arrays: as they are folded, where that is not as they were given."""
        self.form = opened.form
        self.arrays = opened.arrays if arrays is None else arrays
        offsets, self.nbytes = _placed(self.arrays)
        placed = zip(self.arrays, offsets, opened.leaves, strict=True)
        self.parts = tuple([ArrayPart(array.dtype.str, array.shape, at, leaf.kind) for array, at, leaf in placed])

    def header(self, op: str, fold: str = "", root: int = -1) -> Header:
        """What the group is told of it."""
        return Header(op, fold, root, self.form, self.parts, self.nbytes)

    def blob(self) -> bytes:
        """The buffer's bytes."""
        if len(self.arrays) == 1:
            return b"" if self.arrays[0].dtype.hasobject else self.arrays[0].tobytes()
        blob = bytearray(self.nbytes)
        self.write_into(memoryview(blob))
        return bytes(blob)

    def write_into(self, target: memoryview) -> None:
        """Write all arrays into a view of exactly nbytes."""
        end = 0
        for array, part in self._in_order():
            if part.offset > end:
                target[end : part.offset] = bytes(part.offset - end)  # it is folded too
            np.ndarray(array.shape, array.dtype, target, part.offset)[...] = array
            end = part.offset + array.nbytes

    def pour(self, write: codec.Write) -> None:
        """The same in parts that are handed on."""
        end = 0
        for array, part in self._in_order():
            if part.offset > end:
                write(end, memoryview(bytes(part.offset - end)))
            write(part.offset, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            end = part.offset + array.nbytes

    def _in_order(self) -> Iterator[tuple[Array, ArrayPart]]:
        """The arrays that have bytes, as they lie in the buffer."""
        for array, part in sorted(zip(self.arrays, self.parts, strict=True), key=lambda pair: pair[1].offset):
            if array.nbytes and not array.dtype.hasobject:
                yield array, part

    def packed(self) -> codec.Packed:
        """The buffer as an object of the store, an array of bytes; contiguous memory is copied as it is written."""
        payload = msgspec.msgpack.encode(("|u1", (self.nbytes,)))
        packed = codec.Packed(payload, [], [], 0)
        if len(self.arrays) == 1 and self.arrays[0].flags.c_contiguous:
            packed.buffers.append(self.arrays[0].reshape(-1).view(np.uint8).data)
        else:
            packed.buffers.append(Fused.of(self))
        packed.nbytes = codec.layout_bytes(packed)
        return packed


class Fused(codec.ArrowStream):
    """A placeholder buffer for arrays that are put next to each other only at their destination."""

    given: Given

    @classmethod
    def of(cls, given: Given) -> Fused:
        """For these arrays."""
        fused = cls()
        fused.given, fused.nbytes = given, given.nbytes
        return fused

    def write_into(self, target: memoryview) -> None:
        """Write them into a writable view of exactly nbytes."""
        self.given.write_into(target)

    def pour(self, write: codec.Write) -> None:
        """Hand them on one after the other."""
        self.given.pour(write)


def _placed(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """The offsets of the arrays, and the end of the last."""
    by_dtype: dict[str, list[int]] = {}
    for index, array in enumerate(arrays):
        by_dtype.setdefault(array.dtype.str, []).append(index)
    offsets, end = [0] * len(arrays), 0
    for indices in by_dtype.values():
        for index in indices:
            array = arrays[index]
            offsets[index] = -(-end // ALIGN_BYTES) * ALIGN_BYTES
            end = offsets[index] + (0 if array.dtype.hasobject else array.nbytes)
    return offsets, end


def for_fold(opened: Opened, fold: str) -> Sequence[Array]:
    """The arrays as they are folded: a mean of whole numbers is one of floats, as in numpy."""
    if fold != "mean":
        return opened.arrays
    return [array.astype("<f8") if array.dtype.kind in "bui" else array for array in opened.arrays]


# ---------------------------------------------------------------- results to values


def value_of(buffer: memoryview, layout: Layout, like: Opened | None) -> Any:
    """The value that lies there, of the kinds of `like` if its form is the same; buffer: writable, and given away."""
    header = layout.header
    arrays = iter([_array(buffer, layout.offset, part) for part in header.parts])
    if like is not None and like.form == header.form:
        return _back(like.tree, arrays)
    tree = ARRAY if header.form == ARRAY else ast.literal_eval(header.form)
    return _back(_leaved(tree, iter([FOREIGN[part.kind] for part in header.parts])), arrays)


def closed(tree: Any, arrays: Sequence[Array]) -> Any:
    """Arrays in the form of an opened value, by its tree; they are given away."""
    return _back(tree, iter(arrays))


def _array(buffer: memoryview, base: int, part: ArrayPart) -> Array:
    dtype = np.dtype(part.dtype)
    if 0 in part.shape:
        return np.empty(part.shape, dtype)
    return np.ndarray(part.shape, dtype, buffer, base + part.offset)


def _back(tree: Any, arrays: Iterator[Array]) -> Any:
    kind = type(tree)
    if kind is dict:
        made = {key: _back(tree[key], arrays) for key in sorted(tree, key=repr)}
        return {key: made[key] for key in tree}
    if kind is list or kind is tuple:
        return kind([_back(member, arrays) for member in tree])
    return tree.back(next(arrays))


def _leaved(tree: Any, leaves: Iterator[Leaf]) -> Any:
    """The tree of a form that is not that of our own value; its dicts are sorted."""
    kind = type(tree)
    if kind is dict:
        return {key: _leaved(member, leaves) for key, member in tree.items()}
    if kind is list or kind is tuple:
        return kind([_leaved(member, leaves) for member in tree])
    return next(leaves)
