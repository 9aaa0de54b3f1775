"""Values through the codec: equal, of the same type, without copies, read-only; and errors that name the member."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import os
import pickle
import threading
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from flowengine.errors import SerializationError
from flowengine.objects import codec, copying

KIB, MIB = 1 << 10, 1 << 20


def stored(packed: codec.Packed, name: bytes = b"o") -> memoryview:
    view = memoryview(bytearray(packed.nbytes))
    codec.write_object(view, packed, name)
    return view


def both(value: Any, copy: bool = False) -> tuple[Any, Any]:
    packed = codec.pack(value)
    return codec.read_object(stored(packed), copy), codec.from_inline(codec.to_inline(packed), copy)


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def inside(array: np.ndarray[Any, Any], view: memoryview) -> bool:
    start = address(np.frombuffer(view, np.uint8))
    return start <= address(array) < start + len(view)


ARRAYS = {
    "strided": np.arange(40)[::2], "reversed": np.arange(12).reshape(3, 4)[::-1, ::-1],
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)), "transposed": np.arange(24).reshape(2, 3, 4).T,
    "permuted": np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0), "empty": np.empty((0,)),
    "empty 2-d": np.empty((2, 0), "i4"), "0-d": np.array(3.5), "datetime": np.array(["2024-02-29", "NaT"], "M8[ms]"),
    "timedelta": np.array([1, 2], "m8[us]"), "bytes": np.array([b"ab", b""]), "str": np.array(["ä", ""]),
    "structured": np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)), "no size": np.zeros(3, "V0"),
    "object": np.array([None, {"k": [1]}, "x"], object), "big-endian": np.arange(5, dtype=">i4"),
    "bool": np.array([True, False]), "complex": np.array([1 + 2j]), "half": np.arange(4, dtype="f2"),
    "long double": np.arange(3, dtype=np.longdouble), "masked": np.ma.masked_array([1, 2, 3], [0, 1, 0]),
    "masked none": np.ma.masked_array([1.0, 2.0]), "masked 2-d": np.ma.masked_less(np.eye(3), 0.5),
    "record": np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "large strided": np.arange(1 << 18).reshape(512, 512)[:, ::2], "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "broadcast 0-d": np.broadcast_to(np.float64(1), (5,)),
    "window": np.lib.stride_tricks.sliding_window_view(np.arange(9), 4),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("copy", [False, True])
def test_arrays_come_back_equal(name: str, copy: bool) -> None:
    x = ARRAYS[name]
    for y in both(x, copy):
        assert type(y) is type(x)
        assert y.dtype == x.dtype
        assert y.dtype.isalignedstruct == x.dtype.isalignedstruct
        assert y.shape == x.shape
        np.testing.assert_array_equal(np.ma.getdata(y), np.ma.getdata(x))
        np.testing.assert_array_equal(np.ma.getmaskarray(y), np.ma.getmaskarray(x))
        if not x.dtype.hasobject and x.dtype.itemsize:
            assert y.flags.writeable is copy


def test_masked_arrays_keep_fill_value_and_mask_kind() -> None:
    x = np.ma.masked_array([1, 2], [0, 1], fill_value=7, hard_mask=True)
    y, _ = both(x)
    assert (y.fill_value, y.hardmask) == (7, True)
    assert both(np.ma.masked_array([1]))[0].mask is np.ma.nomask


def test_views_without_memory_of_their_own_stay_small() -> None:
    x = np.broadcast_to(np.arange(10.0), (1_000_000, 10))
    packed = codec.pack(x)
    assert packed.nbytes < 1_000
    y = codec.read_object(stored(packed))
    np.testing.assert_array_equal(y[::100_000], x[::100_000])
    z = codec.read_object(stored(packed), copy=True)
    z[0, 0] = 5
    assert z[1, 0] == 0


def test_large_arrays_are_neither_copied_when_packed_nor_when_read() -> None:
    for x in (np.arange(1 << 16), np.asfortranarray(np.ones((300, 200))), np.arange(24_000).reshape(20, 30, 40).T):
        packed = codec.pack({"x": x})
        assert [address(np.frombuffer(b, np.uint8)) for b in packed.buffers] == [address(x)]
        view = stored(packed)
        y = codec.read_object(view)["x"]
        assert inside(y, view)
        assert y.strides == x.strides
        assert address(y) % 64 == address(np.frombuffer(view, np.uint8)) % 64


def test_values_are_read_only_and_copies_are_independent() -> None:
    view = stored(codec.pack([np.zeros(3), np.zeros(1 << 12)]))
    for y in codec.read_object(view):
        with pytest.raises(ValueError, match="read-only"):
            y[0] = 1
    first, second = codec.read_object(view, copy=True), codec.read_object(view, copy=True)
    first[0][0] = first[1][0] = 1
    assert second[0][0] == second[1][0] == codec.read_object(view)[1][0] == 0


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_long_bytes_go_out_of_band_and_keep_their_type(kind: type) -> None:
    x = kind(os.urandom(100_000))
    packed = codec.pack(x)
    assert len(packed.payload) < 200
    y = codec.read_object(stored(packed))
    assert type(y) is kind
    assert y == x


DICTIONARY = pa.array(["x", "y", "x"]).dictionary_encode()
TABLE = pa.table({"i": pa.array([1, None, 3]), "s": ["a", None, "ccc"], "b": [True, False, None], "l": [[1], [], None],
                  "d": DICTIONARY, "t": pa.array([0, 1, 2], pa.timestamp("us", "UTC"))}, metadata={"k": "v"})
CHUNKS = pa.chunked_array([[1], [], [2, 3]])


@pytest.mark.parametrize("value", [
    TABLE, TABLE.slice(1, 1), TABLE.slice(0, 0), TABLE.to_batches()[0], TABLE["s"], TABLE["d"], TABLE.schema, CHUNKS,
    pa.chunked_array([], pa.int8()), pa.array([1.5, None]), pa.array([], pa.string()), DICTIONARY, pa.array([{"a": 1}]),
    pa.nulls(3), pa.table({}), pa.array(["a", "b"], pa.string_view()), pa.concat_tables([TABLE, TABLE]), pa.int8(),
])
def test_arrow_comes_back_equal(value: Any) -> None:
    for copy in (False, True):
        for y in both(value, copy):
            assert y.equals(value)
            assert type(y) is type(value)
    if isinstance(value, pa.Table):
        assert both(value)[0].schema.metadata == value.schema.metadata


def test_small_arrow_columns_are_sent_without_a_stream() -> None:
    for column in (pa.array(["a", "b", "c"]), pa.chunked_array([["a"], ["b", "c"]])):
        packed = codec.pack(column)
        assert not any(isinstance(buffer, codec.ArrowStream) for buffer in packed.buffers)
        assert codec.from_inline(codec.to_inline(packed)).equals(column)


def test_arrow_slices_are_sent_at_their_own_size_and_read_in_place() -> None:
    big = pa.table({"x": np.arange(1 << 20), "s": pa.array(["abcdefgh"] * (1 << 20))})
    packed = codec.pack(big.slice(4096, 100))
    assert packed.nbytes < 8 * KIB
    view = stored(packed)
    y = codec.read_object(view)
    assert y["x"][0].as_py() == 4096
    assert inside(y["x"].chunk(0).to_numpy(), view)


def test_an_arrow_object_is_an_ipc_stream_for_any_reader() -> None:
    _, buffers = codec.read_packed_parts(stored(codec.pack(TABLE)))
    assert pa.ipc.open_stream(buffers[0]).read_all().equals(TABLE)


def test_pandas_is_read_in_place() -> None:
    frame = pd.DataFrame({"a": np.arange(1000.0), "b": np.arange(1000), "s": ["x", None] * 500,
                          "t": pd.date_range("2020", periods=1000), "c": pd.Categorical(["u", "v"] * 500)})
    frame["w"] = pd.array([1, None] * 500, "Int64")
    view = stored(codec.pack(frame))
    y = codec.read_object(view)
    pd.testing.assert_frame_equal(y, frame)
    assert inside(y["a"].to_numpy(), view)
    assert inside(y["t"].to_numpy(), view)
    pd.testing.assert_frame_equal(codec.from_inline(codec.to_inline(codec.pack(frame))), frame)
    pd.testing.assert_series_equal(both(frame["s"])[0], frame["s"])


class Ref:
    """Stands for a ref to an object: known to the codec by what it notes while it is pickled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> Any:
        codec.note_ref(self)
        return Ref, (self.name,)


class Nesting:
    """Packs something else while it is being packed."""

    inner: codec.Packed | None = None

    def __reduce__(self) -> Any:
        type(self).inner = codec.pack([Ref("inner")])
        return Nesting, ()


def test_refs_are_found_wherever_they_are_once_and_in_order() -> None:
    a, b = Ref("a"), Ref("b")
    value = [collections.OrderedDict(r=b), functools.partial(print, a), {Ref("a")}, (lambda: b)]
    assert codec.pack(value).refs == [b, a]
    assert codec.pack([1]).refs == []
    codec.note_ref(a)
    assert codec.pack([Ref("c")]).refs == [Ref("c")]


def test_packing_inside_packing_keeps_the_refs_apart() -> None:
    packed = codec.pack([Ref("before"), Nesting(), Ref("after")])
    assert packed.refs == [Ref("before"), Ref("after")]
    assert Nesting.inner is not None
    assert Nesting.inner.refs == [Ref("inner")]


def test_cycles_and_shared_parts() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    for back in both(loop):
        assert back[1] is back
    part = np.ones(1 << 10)
    for a, b in both([part, part]):
        assert a is b
    strided = np.arange(100)[::3]
    for a, b in both([strided, strided]):
        assert a is b


def test_functions_and_local_classes_go_by_value_and_importable_ones_by_name() -> None:
    offset = np.arange(3)

    @dataclasses.dataclass
    class Local:
        x: int

    for f in both(lambda x: x + offset):
        assert list(f(1)) == [1, 2, 3]
    for y in both([Local(3), Local]):
        assert y == [Local(3), Local]
    assert len(codec.pack(stored).payload) < 100
    assert codec.from_inline(codec.to_inline(codec.pack(stored))) is stored
    kinds = [type(None), type(...), dict, Ref, datetime.date]
    for y in both(kinds):
        assert y == kinds


def test_modules_registered_to_go_by_value_do() -> None:
    module = __import__(__name__)
    assert b"Stands for a ref" not in codec.pack([Ref]).payload
    cloudpickle.register_pickle_by_value(module)
    try:
        assert b"Stands for a ref" in codec.pack([Ref]).payload
    finally:
        cloudpickle.unregister_pickle_by_value(module)


class Holder:
    def __init__(self, inner: object) -> None:
        self.inner = inner

    def method(self) -> None: ...


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner = inner


class Refuses:
    def __init__(self) -> None:
        self.inner = LOCK

    def __reduce__(self) -> str:
        raise TypeError("it stays here")


LOCK = threading.Lock()


def closed_over() -> Any:
    held = {"deep": [1, {"er": LOCK}]}
    return lambda: held


@pytest.mark.parametrize(("value", "path"), [
    (LOCK, "the value is a _thread.lock"),
    ({"deep": [1, {"er": LOCK}]}, "['deep'][1]['er'] is a _thread.lock"),
    (closed_over(), "closure variable 'held' -> ['deep'][1]['er'] is a _thread.lock"),
    ([Holder((1, LOCK))], "[0].inner[1] is a _thread.lock"),
    (Slotted({"x": LOCK}), ".inner['x'] is a _thread.lock"),
    (functools.partial(print, 1, [LOCK]), ".args[1][0] is a _thread.lock"),
    (Holder(LOCK).method, ".__self__.inner is a _thread.lock"),
    ((lambda x=LOCK: x), "default 0 is a _thread.lock"),
    (np.array([1, LOCK], object), "[1] is a _thread.lock"),
    (dict.fromkeys([(1, LOCK)]), "key (1, "),
    ((x for x in ()), "the value is a generator"),
    ([Refuses()], "[0] is a tests.test_codec.Refuses"),
])
def test_what_cannot_be_pickled_is_named(value: Any, path: str) -> None:
    with pytest.raises(SerializationError) as caught:
        codec.pack(value)
    assert path in str(caught.value)
    assert isinstance(caught.value, TypeError)
    assert path in codec.explain_unpicklable(value)


def test_values_that_refuse_or_nest_too_deeply_are_reported() -> None:
    class Refuses:
        def __reduce__(self) -> Any:
            raise RuntimeError("not today")

    with pytest.raises(SerializationError, match=r"\['a'\] is a .*Refuses.*not today"):
        codec.pack({"a": Refuses()})
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SerializationError, match="recursion"):
        codec.pack(deep)
    while deep:  # taken apart by hand: the interpreter would need as deep a stack
        deep = deep.pop()


def test_small_values_are_bare_pickles() -> None:
    for value in (None, 7, "x", (1, 2.0), {"a": [1]}, ((1, "x"), {})):
        packed = codec.pack(value)
        assert codec.to_inline(packed) is packed.payload
        assert pickle.loads(packed.payload) == value


@pytest.mark.parametrize("value", [np.arange(1000), [np.ones(3000), b"x" * 40_000, "text"], {"a": 1}])
def test_what_is_poured_is_what_is_written(value: Any) -> None:
    packed = codec.pack(value)
    poured = bytearray(packed.nbytes)

    def write(at: int, part: memoryview) -> None:
        poured[at : at + len(part)] = part

    codec.pour_object(write, packed, b"o")
    assert poured == stored(packed)
    with pytest.raises(ValueError, match="name"):
        codec.pour_object(write, packed, b"x" * 200)


def test_a_table_is_poured_too() -> None:
    pa = pytest.importorskip("pyarrow")
    packed = codec.pack(pa.table({"x": list(range(5000))}))
    poured = bytearray(packed.nbytes)

    def write(at: int, part: memoryview) -> None:
        poured[at : at + len(part)] = part

    codec.pour_object(write, packed, b"o")
    assert poured == stored(packed)



def test_headers_are_checked() -> None:
    packed = codec.pack(np.arange(9))
    view = stored(packed, b"name")
    assert codec.object_name(view) == b"name"
    assert codec.object_bytes(view) == packed.nbytes
    assert codec.object_name(memoryview(b"")) == codec.object_name(memoryview(bytes(200))) == b""
    with pytest.raises(ValueError, match="cut off"):
        codec.read_object(view[:-1])
    with pytest.raises(ValueError, match="not an object"):
        codec.read_object(memoryview(bytes(200)))
    with pytest.raises(ValueError, match="does not fit"):
        codec.write_object(memoryview(bytearray(10)), packed, b"o")
    with pytest.raises(ValueError, match="at most"):
        codec.write_object(view, packed, b"x" * 200)


# ---------------------------------------------------------------- laws

ATOMS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.dates()
NESTED = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner) | st.frozensets(ATOMS),
    max_leaves=30,
)
DTYPES = arrays.scalar_dtypes() | arrays.array_dtypes()


@given(NESTED)
def test_law_values_come_back_equal_with_their_types(value: Any) -> None:
    for y in both(value):
        assert y == value
        assert pickle.dumps(y) == pickle.dumps(value) or repr(y) == repr(value) or y == value


@given(st.data())
def test_law_any_array_view_comes_back_equal(draw: st.DataObject) -> None:
    x = draw.draw(arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6)))
    x = x.transpose(draw.draw(st.permutations(range(x.ndim))))
    if x.ndim:
        x = x[tuple(slice(None, None, draw.draw(st.sampled_from([1, 2, -1, -2]))) for _ in range(x.ndim))]
    if draw.draw(st.booleans()):
        x = np.broadcast_to(x, (draw.draw(st.integers(1, 4)), *x.shape))
    for copy in (False, True):
        for y in both(x, copy):
            assert (type(y), y.dtype, y.shape) == (type(x), x.dtype, x.shape)
            assert y.tobytes() == x.tobytes()
            assert y.flags.writeable is copy or x.dtype.itemsize == 0


@given(st.lists(st.integers(0, 5000), max_size=20), st.binary(max_size=codec.NAME_BYTES_MAX))
def test_law_objects_fill_their_layout_exactly(sizes: list[int], name: bytes) -> None:
    value = [np.full(size, index, np.uint8) for index, size in enumerate(sizes)]
    packed = codec.pack(value)
    assert packed.nbytes == codec.layout_bytes(packed)
    guarded = bytearray(packed.nbytes + 1)
    guarded[-1] = 0xAB
    codec.write_object(memoryview(guarded), packed, name)
    assert guarded[-1] == 0xAB
    assert codec.object_name(memoryview(guarded)) == name
    _, buffers = codec.read_packed_parts(memoryview(guarded))
    start = address(np.frombuffer(guarded, np.uint8))
    for size, buffer in zip(sizes, buffers, strict=True):
        assert len(buffer) == size
        if size >= codec.SMALL_BUFFER_BYTES:
            assert (address(np.frombuffer(buffer, np.uint8)) - start) % codec.BUFFER_ALIGN_BYTES == 0


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([0, 1, 4095, copying.NUMPY_BYTES_MIN, copying.PAIR_BYTES_MIN]), st.integers(-1, 4097))
def test_law_copies_are_whole_and_stay_inside(base: int, extra: int) -> None:
    count = max(0, base + extra)
    source = np.arange(count, dtype=np.uint32).astype(np.uint8)
    target = bytearray(count + 2)
    copying.copy_buffer(memoryview(target)[1:-1], memoryview(source))
    assert target == b"\0" + source.tobytes() + b"\0"


def test_two_threads_copy_in_many_threads_and_after_a_fork() -> None:
    source = np.random.default_rng(0).integers(0, 255, 6 * MIB, np.uint8)

    def copies() -> bool:
        target = np.zeros_like(source)
        copying.copy_buffer(target.data, source.data)
        return bool((target == source).all())

    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.extend(copies() for _ in range(3))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 12
    pid = os.fork()
    if pid == 0:
        os._exit(0 if copies() else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize(("dtype", "shape"), [("|u1", (1 << 20,)), ("<f4", (3, 5, 7)), ("<c16", (2,)), ("|b1", (11,))])
def test_an_array_object_is_laid_out_before_its_bytes_are_there(dtype, shape):
    array = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    view = memoryview(bytearray(array.nbytes + 1024))
    begin = codec.write_array_head(view, b"name", (dtype, shape), array.nbytes)
    target = view[begin : begin + array.nbytes]
    target[:] = array.reshape(-1).view(np.uint8).data
    assert codec.object_name(view) == b"name"
    assert codec.object_bytes(view) == len(view)
    assert codec.array_bytes(view) == target
    found = codec.read_object(view)
    assert found.dtype == array.dtype
    assert found.shape == shape
    assert (found == array).all()


def test_an_array_object_needs_room():
    with pytest.raises(ValueError, match="does not fit"):
        codec.write_array_head(memoryview(bytearray(100)), b"name", ("|u1", (64,)), 64)
