"""What is given to a group as arrays in one buffer, and results back in the form of what was given."""
from __future__ import annotations

import collections
import sys
import types
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as some

from flowengine.collectives.forms import Given, Opened, for_fold, value_of
from flowengine.core.collective import ArrayPart, Header, Layout
from flowengine.errors import BadType, BadValue
from flowengine.objects import codec

DTYPES = st.one_of(
    some.boolean_dtypes(), some.integer_dtypes(endianness="="), some.unsigned_integer_dtypes(endianness="="),
    some.floating_dtypes(endianness="="), some.complex_number_dtypes(endianness="="),
    some.datetime64_dtypes(endianness="="), some.unicode_string_dtypes(endianness="=", min_len=1),
)  # fmt: skip
ARRAYS = some.arrays(DTYPES, some.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
NUMBERS = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False)
)
KEYS = st.one_of(st.text(max_size=3), st.integers(0, 9), st.tuples(st.integers(0, 3), st.just("*")))


def nests(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(KEYS, inner, max_size=3),
        ),
        max_leaves=6,
    )


def same(one: Any, other: Any) -> bool:
    """Equal in kind, type and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return bool(one == other)


def there_and_back(value: Any, own: bool = True) -> Any:
    opened = Opened(value, "allgather")
    fused = Given(opened)
    buffer = memoryview(bytearray(64 + fused.nbytes))[64:]  # as behind another rank's
    buffer[:] = fused.blob()
    return value_of(buffer, Layout(0, fused.header("allgather")), opened if own else None)


@given(nests(st.one_of(ARRAYS, NUMBERS)))
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    assert same(there_and_back(value), value)


@given(nests(st.one_of(ARRAYS, NUMBERS, st.just(np.float32(2)))))
def test_what_another_rank_gave_comes_in_the_form_in_which_it_gave_it(value: Any) -> None:
    assert same(there_and_back(value, own=False), value)


@given(nests(st.one_of(ARRAYS, NUMBERS)))
def test_an_object_of_the_store_has_the_same_bytes_as_the_blob(value: Any) -> None:
    opened = Opened(value, "allreduce")
    fused = Given(opened)
    packed = fused.packed()
    view = memoryview(bytearray(packed.nbytes))
    codec.write_object(view, packed, b"name")
    assert bytes(codec.read_packed_parts(view)[1][0]) == fused.blob()
    poured = bytearray(packed.nbytes)

    def write(at: int, part: memoryview) -> None:
        poured[at : at + len(part)] = part

    codec.pour_object(write, packed, b"name")
    assert poured == view


@given(ARRAYS, st.data())
def test_strides_do_not_matter(array: np.ndarray[Any, Any], data: st.DataObject) -> None:
    view = array.transpose(data.draw(st.permutations(range(array.ndim))))
    view = view[tuple(slice(None, None, data.draw(st.sampled_from([1, 2, -1]))) for _ in range(view.ndim))]
    back = there_and_back(view)
    assert back.dtype == view.dtype
    assert back.shape == view.shape
    assert back.tobytes() == view.tobytes()


@given(nests(ARRAYS))
def test_arrays_of_a_kind_lie_next_to_each_other_aligned_and_do_not_overlap(value: Any) -> None:
    opened = Opened(value, "allreduce")
    fused = Given(opened)
    end, seen = 0, []
    for part, array in sorted(zip(fused.parts, opened.arrays, strict=True), key=lambda pair: pair[0].offset):
        assert part.offset % 64 == 0
        assert (part.offset >= end or not array.nbytes)
        end = max(end, part.offset + array.nbytes)
        if array.nbytes and (not seen or seen[-1] != part.dtype):
            seen.append(part.dtype)
    assert len(seen) == len(set(seen))
    assert fused.nbytes == end


@pytest.mark.parametrize(("value", "form"), [
    (np.ones(3), "*"), (4, "*"), ([np.ones(1), 2], "['*', '*']"), ((np.ones(1),), "('*',)"),
    ({"w": np.ones(1), "b": [1.0]}, "{'b': ['*'], 'w': '*'}"), ([], "[]"),
])  # fmt: skip
def test_forms_in_text(value: Any, form: str) -> None:
    assert Opened(value, "allreduce").form == form


def test_dicts_of_other_classes_come_back_as_plain_ones_in_their_order() -> None:
    back = there_and_back(collections.OrderedDict(weight=np.ones(1), bias=np.zeros(2)))
    assert type(back) is dict
    assert [(key, len(array)) for key, array in back.items()] == [("weight", 1), ("bias", 2)]


def test_what_is_nested_without_an_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(BadValue, match="nested"):
        Opened(endless, "allreduce")


def test_dicts_filled_in_another_order_are_the_same() -> None:
    one, other = Opened({"a": np.ones(1), "b": np.zeros(2)}, "x"), Opened({"b": np.zeros(2), "a": np.ones(1)}, "x")
    assert one.form == other.form
    assert Given(one).parts == Given(other).parts


def test_contiguous_memory_is_written_without_a_copy_before() -> None:
    array = np.arange(100.0)
    opened = Opened(array, "allreduce")
    [buffer] = Given(opened).packed().buffers
    assert isinstance(buffer, memoryview)
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), array)


def test_results_are_writable_views_of_their_buffer() -> None:
    buffer = memoryview(bytearray(16))
    array = value_of(buffer, Layout(0, Header("x", parts=(ArrayPart("<f8", (2,), 0),), form="*", nbytes=16)), None)
    array += 1
    assert np.frombuffer(buffer, "<f8").tolist() == [1, 1]


def test_numbers_of_python_stay_what_they_are() -> None:
    for value in (3, 2.5, True, 1j):
        assert type(there_and_back(value)) is type(value)
    assert type(there_and_back(np.float32(2))) is np.float32
    assert there_and_back(np.array(2.0)).shape == ()


def test_other_byte_orders_become_that_of_the_machine() -> None:
    back = there_and_back(np.arange(3, dtype=">f4"))
    assert back.dtype.isnative
    assert back.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("dtype", "folded"), [("?", "f8"), ("i4", "f8"), ("u8", "f8"), ("f4", "f4"), ("c8", "c8")])
def test_a_mean_of_whole_numbers_is_one_of_floats(dtype: str, folded: str) -> None:
    opened = Opened(np.ones(2, dtype), "allreduce")
    assert for_fold(opened, "mean")[0].dtype == np.dtype(folded)
    assert for_fold(opened, "sum")[0].dtype == np.dtype(dtype)


def test_a_mean_of_whole_numbers_of_python_is_a_float() -> None:
    opened = Opened(3, "allreduce")
    fused = Given(opened, for_fold(opened, "mean"))
    back = value_of(memoryview(bytearray(fused.blob())), Layout(0, fused.header("allreduce")), opened)
    assert type(back) is float
    assert back == 3.0


@pytest.mark.parametrize(("value", "words"), [
    ("text", "str 'text'"), (None, "NoneType"), ({1}, "set"), ([np.ones(1), object()], r"at \[1\]"),
    ({"a": {"b": "c"}}, r"at \['a'\]\['b'\]"), (np.zeros(1, [("a", "f4")]), "dtype"),
    (np.ma.masked_array([1], [True]), "masked"), ({np: 1}, "keys"), ({np.str_("a"): 1}, "keys"),
    ({float("nan"): 1}, "keys"), ({(1, object()): 1}, "keys"),
])  # fmt: skip
def test_what_cannot_be_given_is_named(value: Any, words: str) -> None:
    with pytest.raises(BadType, match=words):
        Opened(value, "allreduce")


def test_a_number_that_no_array_holds_is_refused() -> None:
    with pytest.raises(BadValue, match="64 bits"):
        Opened(2**64, "allreduce")


def test_objects_are_told_without_bytes_so_that_all_ranks_hear_the_refusal() -> None:
    opened = Opened(np.array([object()]), "allreduce")
    fused = Given(opened)
    assert fused.parts[0].dtype == "|O"
    assert fused.blob() == b""
    assert fused.nbytes == 0


def test_arrow_tensors_come_back_as_such() -> None:
    back = there_and_back(pa.Tensor.from_numpy(np.arange(6.0).reshape(2, 3)))
    assert isinstance(back, pa.Tensor)
    assert back.to_numpy().tolist() == [[0, 1, 2], [3, 4, 5]]


class Tensor:
    """As much of a tensor of torch as is used."""

    def __init__(self, array: np.ndarray[Any, Any], device: str = "cpu") -> None:
        self.array = array
        self.device = types.SimpleNamespace(type=device) if device != "cpu" else CPU
        self.dtype = f"torch.{array.dtype}"

    def detach(self) -> Tensor:
        return self

    cpu = resolve_conj = resolve_neg = detach

    def numpy(self) -> np.ndarray[Any, Any]:
        if self.array.dtype == np.dtype("f2"):
            raise TypeError("numpy has no such type")
        return self.array


CPU = type("Device", (), {"type": "cpu"})()


def test_tensors_of_torch_are_known_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadType, match="Tensor"):
        Opened(Tensor(np.ones(2)), "allreduce")
    torch = types.ModuleType("torch")
    torch.__dict__.update(Tensor=Tensor, from_numpy=Tensor)
    monkeypatch.setitem(sys.modules, "torch", torch)
    back = there_and_back([Tensor(np.ones(2)), Tensor(np.zeros(1))])
    assert [type(one) for one in back] == [Tensor, Tensor]
    assert back[0].array.tolist() == [1, 1]
    assert type(there_and_back(Tensor(np.ones(2)), own=False)) is Tensor
    with pytest.raises(BadType, match="float16"):
        Opened(Tensor(np.ones(2, "f2")), "allreduce")


def test_nothing_is_left_unwritten_between_arrays() -> None:
    opened = Opened([np.ones(1, "i1"), np.ones(1, "f8"), np.ones(1, "i1")], "allreduce")
    fused = Given(opened)
    dirty = memoryview(bytearray(b"\xff" * fused.nbytes))
    fused.write_into(dirty)
    assert bytes(dirty) == fused.blob()
    assert sum(dirty) == 2 + sum(np.float64(1).tobytes())
