"""Values to bytes and back: pickling with out-of-band buffers, the layout of one object, the copy into it. No I/O."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import cloudpickle
import msgspec
import numpy as np

from flowengine.errors import SerializationError
from flowengine.objects.blame import blame
from flowengine.objects.copying import copy_buffer as copy_buffer
from flowengine.objects.streams import ArrowStream as ArrowStream
from flowengine.objects.streams import Write as Write
from flowengine.objects.streams import pyarrow, stream_of

KIB = 1 << 10
MIB = 1 << 20

MAGIC = b"flo\x01"
VERSION = 1
# magic, version, flags, name_nbytes, toc_offset, toc_nbytes, total_nbytes
HEADER = struct.Struct("<4sBBHIIQ")
HEADER_BYTES = HEADER.size
# A stored object keeps room for its name, so that its size does not depend on what it will be called.
STORED_TOC_OFFSET = 128
NAME_BYTES_MAX = STORED_TOC_OFFSET - HEADER_BYTES
BUFFER_ALIGN_BYTES = 64
# Below this a cache line per buffer would cost more than it saves: thousands of tiny arrays in one list.
SMALL_BUFFER_BYTES = KIB
SMALL_ALIGN_BYTES = 16
# The first opcode of every pickle since protocol 2; an inline value without buffers is just its pickle.
PICKLE_TAG = 0x80
INLINE_BYTES_MAX = 64 * KIB

# A top-level bytes value above this goes out of band; below, a copy is cheaper than the bookkeeping.
LONG_BYTES = 16 * KIB
NO_FILE = "<dynamic-code>"  # in place of the name of a file, by cloudpickle


class Packed(msgspec.Struct):
    """One pickled value: the stream, its out-of-band buffers, the refs met in it, and its size as a stored object."""

    payload: bytes
    buffers: list[memoryview | ArrowStream]
    refs: list[object]
    nbytes: int


class _ReadOnlySource(bytearray):
    """A placeholder buffer for read-only memory, which pickle would mark so that even a copy of it stayed read-only."""

    view: memoryview


# ---------------------------------------------------------------- refs met while packing


class _Collector(threading.local):
    refs: dict[object, None] | None = None


_collector = _Collector()


@contextlib.contextmanager
def collecting() -> Iterator[dict[object, None]]:
    """While the block runs, refs that this thread pickles by whatever pickler are collected."""
    outer, found = _collector.refs, dict[object, None]()
    _collector.refs = found
    try:
        yield found
    finally:
        _collector.refs = outer


def is_collecting() -> bool:
    """Whether a pack runs in this thread."""
    return _collector.refs is not None


def note_ref(ref: object) -> None:
    """Tell the pack that runs in this thread, if any, that its value contains this ref."""
    if _collector.refs is not None:
        _collector.refs[ref] = None


# ---------------------------------------------------------------- numpy reducers

_Reduced = tuple[Any, ...]


def _reduce_array(array: np.ndarray[Any, Any]) -> _Reduced | Any:
    dtype = array.dtype
    if dtype.hasobject or dtype.itemsize == 0:
        return NotImplemented
    # numpy itself refuses to export datetimes and copies what is not contiguous into the stream; bytes suit all.
    if array.flags.c_contiguous:
        if dtype.kind in "biufcSU" or (dtype.kind in "mM" and dtype.metadata is None):
            return _read_array, (_exported(array), dtype.str, array.shape)
        return _read_array, (_exported(array), dtype, array.shape)
    if array.size and 0 in array.strides:
        core = tuple(slice(0, 1) if step == 0 else slice(None) for step in array.strides)
        if array[core].size < array.size:
            return _read_broadcast, (array[core], array.shape)
    axes = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    ordered = array.transpose(axes)
    if ordered.flags.c_contiguous:
        return _read_permuted, (ordered, tuple(axes.index(axis) for axis in range(array.ndim)))
    return _reduce_array(np.ascontiguousarray(array))


def _exported(array: np.ndarray[Any, Any]) -> pickle.PickleBuffer:
    view = array.reshape(-1).view(np.uint8).data
    if not view.readonly:
        return pickle.PickleBuffer(view)
    source = _ReadOnlySource()
    source.view = view
    return pickle.PickleBuffer(source)


def _read_array(buffer: Any, dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.frombuffer(buffer, dtype=dtype).reshape(shape)


def _read_permuted(array: np.ndarray[Any, Any], axes: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return array.transpose(axes)


def _read_broadcast(core: np.ndarray[Any, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    view = np.broadcast_to(core, shape)
    return np.array(view) if core.flags.writeable else view


def _reduce_view(array: np.ndarray[Any, Any]) -> _Reduced | Any:
    if array.dtype.hasobject:
        return NotImplemented
    return _read_view, (array.view(np.ndarray), type(array))


def _read_view(array: np.ndarray[Any, Any], kind: type[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return array.view(kind)


def _reduce_masked(array: Any) -> _Reduced | Any:
    if array.dtype.hasobject or type(array.data) is not np.ndarray:
        return NotImplemented
    mask = None if array._mask is np.ma.nomask else array._mask
    state = {"_fill_value": array._fill_value, "_hardmask": array._hardmask, "_optinfo": array._optinfo}
    return _read_masked, (array.data, mask, state)


def _read_masked(values: Any, mask: Any, state: dict[str, Any]) -> Any:
    array = np.ma.MaskedArray(values, mask=np.ma.nomask if mask is None else mask, copy=False)
    array.__dict__.update(state)
    return array


class Raw:
    """Carries a long top-level bytes or bytearray out of band, which pickle alone would copy into the stream."""

    def __init__(self, value: bytes | bytearray) -> None:
        self.value = value

    def __reduce__(self) -> _Reduced:
        return type(self.value), (pickle.PickleBuffer(self.value),)


# ---------------------------------------------------------------- Arrow reducers


_SMALL_ARROW_BYTES = 4 * KIB  # of a column: a stream would cost more than to carry what was sliced off


def _reduce_arrow(value: Any) -> _Reduced | Any:
    pa = pyarrow()
    try:
        if isinstance(value, (pa.Table, pa.RecordBatch)):
            if value.num_columns == 0:
                return NotImplemented
            read = _read_table if isinstance(value, pa.Table) else _read_batch
            return read, (pickle.PickleBuffer(stream_of(value)),)
        if isinstance(value, (pa.Array, pa.ChunkedArray)) and value.get_total_buffer_size() <= _SMALL_ARROW_BYTES:
            return NotImplemented
        if isinstance(value, pa.ChunkedArray):
            return _read_chunked, (pickle.PickleBuffer(stream_of(pa.table([value], names=["v"]))),)
        if isinstance(value, pa.Array):
            return _read_column, (pickle.PickleBuffer(stream_of(pa.record_batch([value], names=["v"]))),)
    except pa.ArrowException:  # a type that IPC cannot carry; Arrow's own pickling may
        return NotImplemented
    return NotImplemented


def _open_stream(buffer: Any) -> Any:
    pa = pyarrow()
    return pa.ipc.open_stream(pa.py_buffer(buffer))


def _read_table(buffer: Any) -> Any:
    return _open_stream(buffer).read_all()


def _read_batch(buffer: Any) -> Any:
    return _open_stream(buffer).read_next_batch()


def _read_chunked(buffer: Any) -> Any:
    return _open_stream(buffer).read_all().column(0)


def _read_column(buffer: Any) -> Any:
    return _open_stream(buffer).read_next_batch().column(0)


# ---------------------------------------------------------------- pickling

_REDUCERS: dict[type, Callable[[Any], Any]] = {
    np.ndarray: _reduce_array,
    np.ma.MaskedArray: _reduce_masked,
    np.memmap: _reduce_view,
    np.recarray: _reduce_view,
}
_ARROW_MODULE = "pyarrow.lib"

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_LONG_KINDS = frozenset({bytes, bytearray})
_PLAIN_MEMBERS_MAX = 16

# Objects known to be found again under their module and name, by id; the value keeps the id from being reused.
_referenced: dict[int, object] = {id(kind): kind for kind in (type(None), type(...), type(NotImplemented))}


class _ByValue(Exception):
    """Something must be pickled by value, which only the slower pickler can do."""


def found_by_name(thing: Any) -> bool:
    """Whether a function or class is found again in other processes, so that its name is all that travels."""
    if cloudpickle.list_registry_pickle_by_value():
        return False
    if id(thing) in _referenced:
        return True
    module_name = getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", "")
    if not isinstance(module_name, str) or module_name in ("__main__", "__mp_main__"):
        return False
    found: Any = sys.modules.get(module_name)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not thing:
        return False
    _referenced[id(thing)] = thing
    return True


class _QuickPickler(pickle.Pickler):
    """The C pickler with our reducers; gives up as soon as something has to be pickled by value."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce what we carry in a better way; leave the rest to pickle."""
        kind = type(obj)
        reducer = _REDUCERS.get(kind)
        if reducer is not None:
            return reducer(obj)
        if kind is types.FunctionType or issubclass(kind, type):
            if not found_by_name(obj):
                raise _ByValue
        elif kind.__module__ == _ARROW_MODULE:
            return _reduce_arrow(obj)
        return NotImplemented


class FullPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler with our reducers: functions and classes without an importable home go by value."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce what we carry in a better way; leave the rest to cloudpickle."""
        kind = type(obj)
        reducer = _REDUCERS.get(kind)
        if reducer is not None:
            return reducer(obj)
        if kind.__module__ == _ARROW_MODULE:
            return _reduce_arrow(obj)
        if kind is types.CodeType:
            return self._reduce_code(obj)
        return super().reducer_override(obj)

    def _reduce_code(self, code: types.CodeType) -> _Reduced:
        """With the name of its file, for tracebacks and debuggers; a string of its own, so that equal code is equal."""
        made, fields = self.dispatch_table[types.CodeType](code)
        file = "".join(code.co_filename)
        return made, tuple([file if isinstance(field, str) and field == NO_FILE else field for field in fields])


def _is_plain(value: Any) -> bool:
    """True for atoms and small flat tuples, lists and dicts of them, one level of nesting included."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if (kind is not tuple and kind is not list and kind is not dict) or len(value) > _PLAIN_MEMBERS_MAX:
        return False
    members = value if kind is not dict else (*value, *value.values())
    for member in members:
        kind = type(member)
        if kind in _ATOMS:
            continue
        if (kind is not tuple and kind is not list and kind is not dict) or len(member) > _PLAIN_MEMBERS_MAX:
            return False
        for inner in member if kind is not dict else (*member, *member.values()):
            if type(inner) not in _ATOMS:
                return False
    return True


def pack(value: object) -> Packed:
    """Pickle a value or raise SerializationError; the buffers are still the caller's own memory until written."""
    if isinstance(value, (bytes, bytearray)) and type(value) in _LONG_KINDS and len(value) >= LONG_BYTES:
        value = Raw(value)
    elif type(value) is np.ndarray and value.flags.c_contiguous and value.size and value.dtype.kind in "biufc":
        return _pack_array(value)
    elif type(value) in _ATOMS or _is_plain(value):
        payload = pickle.dumps(value, 5)
        return Packed(payload, [], [], STORED_TOC_OFFSET + len(payload))
    outer = _collector.refs
    try:
        return _pack_any(value)
    except (MemoryError, SerializationError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise SerializationError(f"cannot be pickled: {explain_unpicklable(value)} ({reason})") from error
    finally:
        _collector.refs = outer


def _pack_array(array: np.ndarray[Any, Any]) -> Packed:
    """A plain array needs no pickle: what it is, and its bytes. Readers tell by the first byte of the payload."""
    payload = msgspec.msgpack.encode((array.dtype.str, array.shape))
    packed = Packed(payload, [array.reshape(-1).view(np.uint8).data], [], 0)
    packed.nbytes = layout_bytes(packed)
    return packed


def _pack_any(value: object) -> Packed:
    if type(value) is not types.FunctionType:
        try:
            return pack_with(_QuickPickler, value)
        except (MemoryError, SerializationError):
            raise
        except Exception:  # whatever it was, cloudpickle decides: it can do all that pickle can, and more
            pass
    return pack_with(FullPickler, value)


def pack_with(pickler: Callable[..., Any], value: object) -> Packed:
    """Pickle with this pickler; raises what it raises."""
    refs: dict[object, None] = {}
    _collector.refs = refs
    buffers: list[memoryview | ArrowStream] = []

    def keep(buffer: pickle.PickleBuffer) -> None:
        view = buffer.raw()
        source = view.obj
        if type(source) is _ReadOnlySource:
            buffers.append(source.view)
        else:
            buffers.append(source if type(source) is ArrowStream else view)

    file = io.BytesIO()
    pickler(file, protocol=5, buffer_callback=keep).dump(value)
    packed = Packed(file.getvalue(), buffers, list(refs), 0)
    packed.nbytes = layout_bytes(packed)
    return packed


class _Sink:
    def write(self, part: Any) -> int:
        return len(part)


def _fails(value: object) -> bool:
    outer = _collector.refs
    _collector.refs = {}
    try:
        FullPickler(_Sink(), protocol=5, buffer_callback=lambda buffer: None).dump(value)
    except Exception:
        return True
    finally:
        _collector.refs = outer
    return False


def explain_unpicklable(value: object) -> str:
    """Name the member that cannot be pickled, by its path from the value, as `['a'][1].lock is a _thread.lock`."""
    return blame(value, _fails)


# ---------------------------------------------------------------- layout of an object


class _Shape(msgspec.Struct):
    """Where everything lies in one object."""

    toc: bytes
    payload_at: int
    offsets: list[int]
    total_bytes: int


def _place(payload_at: int, payload_bytes: int, lengths: Iterable[int]) -> tuple[list[int], int]:
    """Offsets of the buffers and the end of the last one; a rule, so that the table of contents needs lengths only."""
    end = payload_at + payload_bytes
    offsets = []
    for length in lengths:
        align = BUFFER_ALIGN_BYTES if length >= SMALL_BUFFER_BYTES else SMALL_ALIGN_BYTES
        at = (end + align - 1) // align * align
        offsets.append(at)
        end = at + length
    return offsets, end


def _shape(packed: Packed, toc_offset: int) -> _Shape:
    if not packed.buffers:
        return _Shape(b"", toc_offset, [], toc_offset + len(packed.payload))
    lengths = [buffer.nbytes for buffer in packed.buffers]
    toc = msgspec.msgpack.encode((len(packed.payload), lengths))
    payload_at = toc_offset + len(toc)
    offsets, total_bytes = _place(payload_at, len(packed.payload), lengths)
    return _Shape(toc, payload_at, offsets, total_bytes)


def layout_bytes(packed: Packed) -> int:
    """Size of the packed value as one stored object, whatever its name."""
    return _shape(packed, STORED_TOC_OFFSET).total_bytes


def write_object(view: memoryview, packed: Packed, name: bytes) -> None:
    """Write header, name, table of contents, payload and buffers into a view of at least layout_bytes."""
    if len(name) > NAME_BYTES_MAX:
        raise ValueError(f"name of {len(name)} bytes; at most {NAME_BYTES_MAX}")
    shape = _shape(packed, STORED_TOC_OFFSET)
    if len(view) < shape.total_bytes:
        raise ValueError(f"object of {shape.total_bytes} bytes does not fit into {len(view)}")
    _write_head(view, shape, name)
    copy_buffer(view[shape.payload_at : shape.payload_at + len(packed.payload)], memoryview(packed.payload))
    for at, buffer in zip(shape.offsets, packed.buffers, strict=True):
        target = view[at : at + buffer.nbytes]
        if isinstance(buffer, ArrowStream):
            buffer.write_into(target)
        else:
            copy_buffer(target, buffer)


def _write_head(view: memoryview, shape: _Shape, name: bytes) -> None:
    view[:STORED_TOC_OFFSET] = bytes(STORED_TOC_OFFSET)
    HEADER.pack_into(view, 0, MAGIC, VERSION, 0, len(name), STORED_TOC_OFFSET, len(shape.toc), shape.total_bytes)
    view[HEADER_BYTES : HEADER_BYTES + len(name)] = name
    view[STORED_TOC_OFFSET : shape.payload_at] = shape.toc


def pour_object(write: Write, packed: Packed, name: bytes) -> None:
    """The same in parts that are handed on."""
    if len(name) > NAME_BYTES_MAX:
        raise ValueError(f"name of {len(name)} bytes; at most {NAME_BYTES_MAX}")
    shape = _shape(packed, STORED_TOC_OFFSET)
    head = memoryview(bytearray(shape.payload_at))
    _write_head(head, shape, name)
    write(0, head)
    write(shape.payload_at, memoryview(packed.payload))
    for at, buffer in zip(shape.offsets, packed.buffers, strict=True):
        if isinstance(buffer, ArrowStream):
            buffer.pour(lambda offset, part, at=at: write(at + offset, part))  # type: ignore[misc]
        else:
            write(at, buffer)


def write_array_head(view: memoryview, name: bytes, kind: tuple[str, tuple[int, ...]], nbytes: int) -> int:
    """Make the view an array object of (dtype, shape), as large as the view; where in it the array's bytes begin."""
    payload = msgspec.msgpack.encode(kind)
    toc = msgspec.msgpack.encode((len(payload), [nbytes]))
    (at,), end = _place(STORED_TOC_OFFSET + len(toc), len(payload), [nbytes])
    if len(name) > NAME_BYTES_MAX or len(view) < end:
        raise ValueError(f"an array of {nbytes} bytes does not fit into {len(view)}")
    view[:STORED_TOC_OFFSET] = bytes(STORED_TOC_OFFSET)
    HEADER.pack_into(view, 0, MAGIC, VERSION, 0, len(name), STORED_TOC_OFFSET, len(toc), len(view))
    view[HEADER_BYTES : HEADER_BYTES + len(name)] = name
    view[STORED_TOC_OFFSET : STORED_TOC_OFFSET + len(toc) + len(payload)] = toc + payload
    return at


def array_bytes(view: memoryview) -> memoryview | None:
    """The bytes of an object that is one contiguous array of numbers; None for any other."""
    payload, buffers = read_packed_parts(view)
    return None if not payload or payload[0] == PICKLE_TAG else buffers[0]


ARRAY_KIND = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...]])  # dtype and shape
_TOC = msgspec.msgpack.Decoder(tuple[int, list[int]])


def _header(view: memoryview) -> tuple[int, int, int, int]:
    if len(view) < HEADER_BYTES:
        raise ValueError(f"{len(view)} bytes are too few for an object")
    magic, version, _, name_bytes, toc_offset, toc_bytes, total_bytes = HEADER.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"not an object of this version: it begins with {bytes(view[:5])!r}")
    return name_bytes, toc_offset, toc_bytes, total_bytes


def object_name(view: memoryview) -> bytes:
    """The name in the header; empty if the view holds no object."""
    try:
        name_bytes = _header(view)[0]
    except ValueError:
        return b""
    return bytes(view[HEADER_BYTES : HEADER_BYTES + name_bytes])


def named_bytes(view: memoryview, name: bytes) -> int:
    """The true size of the object in the view if it has this name, else 0."""
    try:
        name_bytes, _, _, total_bytes = _header(view)
    except ValueError:
        return 0
    return total_bytes if view[HEADER_BYTES : HEADER_BYTES + name_bytes] == name else 0


def object_bytes(view: memoryview) -> int:
    """The true size of the object in the view, which may be longer; ValueError if the view holds none."""
    return _header(view)[3]


def read_packed_parts(view: memoryview, own: bool = False) -> tuple[memoryview, list[memoryview]]:
    """The pickle stream and the buffers of an object, as slices of the view: read-only, unless it is one's own."""
    view = view if own else view.toreadonly()
    _, toc_offset, toc_bytes, total_bytes = _header(view)
    if len(view) < total_bytes:
        raise ValueError(f"object of {total_bytes} bytes is cut off at {len(view)}")
    if toc_bytes == 0:
        return view[toc_offset:total_bytes], []
    payload_at = toc_offset + toc_bytes
    payload_bytes, lengths = _TOC.decode(view[toc_offset:payload_at])
    offsets, _ = _place(payload_at, payload_bytes, lengths)
    buffers = [view[at : at + length] for at, length in zip(offsets, lengths, strict=True)]
    return view[payload_at : payload_at + payload_bytes], buffers


def read_object(view: memoryview, copy: bool = False) -> object:
    """Unpickle an object; its arrays lie in the view, read-only, or with copy=True in memory of their own, writable."""
    payload, buffers = read_packed_parts(view)
    if copy:
        buffers = [_writable_copy(buffer) for buffer in buffers]
    if payload[0] != PICKLE_TAG:
        dtype, shape = ARRAY_KIND.decode(payload)
        return np.frombuffer(buffers[0], dtype).reshape(shape)
    return pickle.loads(payload, buffers=buffers)


def _writable_copy(buffer: memoryview) -> memoryview:
    target = np.empty(buffer.nbytes, np.uint8).data
    copy_buffer(target, buffer)
    return target


def to_inline(packed: Packed) -> bytes:
    """The packed value as bytes to be sent inside a message; meant for at most INLINE_BYTES_MAX."""
    if not packed.buffers:
        return packed.payload
    shape = _shape(packed, HEADER_BYTES)
    blob = bytearray(shape.total_bytes)
    HEADER.pack_into(blob, 0, MAGIC, VERSION, 0, 0, HEADER_BYTES, len(shape.toc), shape.total_bytes)
    blob[HEADER_BYTES : shape.payload_at] = shape.toc
    blob[shape.payload_at : shape.payload_at + len(packed.payload)] = packed.payload
    view = memoryview(blob)
    for at, buffer in zip(shape.offsets, packed.buffers, strict=True):
        if isinstance(buffer, ArrowStream):
            buffer.write_into(view[at : at + buffer.nbytes])
        else:
            view[at : at + buffer.nbytes] = buffer
    return bytes(blob)


def from_inline(blob: bytes | memoryview, copy: bool = False) -> object:
    """The value of to_inline's bytes; arrays lie in the blob, read-only, or with copy=True in memory of their own."""
    if blob[0] == PICKLE_TAG:
        return pickle.loads(blob)
    return read_object(memoryview(blob), copy)
