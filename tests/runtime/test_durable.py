"""Durable storage, and the files of an actor's checkpoints in it: what is torn is found out, what is old goes."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from flowengine.errors import BadValue
from flowengine.objects import codec, state
from flowengine.recovery import durable
from flowengine.recovery.durable import Durable, Torn
from flowengine.runtime.actor_state import OWN_FILE_BYTES_MIN, Files, held


@pytest.fixture(params=["folder", "file", "memory"])
def store(request, tmp_path):
    urls = {"folder": str(tmp_path / "a"), "file": f"file://{tmp_path}/a", "memory": f"memory://{tmp_path.name}"}
    made = Durable(urls[request.param])
    made.make_folder()
    return made


def test_what_is_written_is_read_whatever_it_was_made_of(store):
    store.write("one", b"ab", bytearray(b"cd"), memoryview(b"ef"))
    assert bytes(store.read("one")) == b"abcdef"
    assert not store.read("one").readonly
    assert store.names() == ["one"]
    store.delete("one", "never was")
    assert store.names() == []
    with pytest.raises(FileNotFoundError):
        store.read("one")


def test_a_folder_goes_with_all_that_is_in_it(store):
    store.make_folder("x/y")
    store.write("x/y/one", b"1")
    for _ in range(2):
        store.delete_folder("x")
        assert store.names("x/y") == []


@pytest.mark.parametrize("harm", ["cut", "short", "changed", "longer", "empty", "other"])
def test_what_is_torn_or_corrupt_is_found_out(store, harm):
    store.write("one", bytes(100_000))
    with store.fs.open(store.path("one"), "rb") as file:
        blob = bytearray(file.read())
    harmed = {"cut": blob[:50_000], "short": blob[:10], "longer": blob + b"x", "empty": b"", "other": b"x" * len(blob)}
    blob[777] ^= 1
    with store.fs.open(store.path("one"), "wb") as file:
        file.write(bytes(harmed.get(harm, blob)))
    with pytest.raises(Torn, match=r"one is (torn|corrupt)"):
        store.read("one")


def test_a_write_that_fails_leaves_nothing(store):
    with pytest.raises(TypeError):
        store.write("one", b"x", "no bytes")
    assert store.names() == []


@pytest.mark.parametrize(
    ("url", "why"),
    [("s3://bucket/x", "package"), ("nonsense://x", "nonsense"), ("local:///proc/none", "cannot be used")],
)
def test_a_storage_of_no_use_is_refused_at_once(url, why):
    with pytest.raises(BadValue, match=why):
        durable.check(url)


def test_what_processes_that_are_gone_left_is_swept(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mine = durable.live_url(f"file://{tmp_path}", "s1", os.getpid())
    urls = [mine, durable.live_url(f"file://{tmp_path}", "s2", ended.pid), durable.live_url(f"file://{tmp_path}", "s3")]
    for url in urls:
        Durable(url).make_folder("actors")
    durable.sweep(mine)
    assert sorted(Durable(f"file://{tmp_path}/live").names()) == sorted(url.rpartition("/")[2] for url in urls[::2])


# --- checkpoints in files ---------------------------------------------------------------------------------------


class Model:
    def __init__(self) -> None:
        self.steps = 0
        self.weights = np.zeros(100_000)
        self.fixed = np.arange(100_000)
        self.raw = b"r" * OWN_FILE_BYTES_MIN
        self.small = np.arange(10)
        self.act = {"step": self.step}

    def step(self) -> None:
        self.steps += 1
        self.weights += 1


def write(files: Files, model: Model, calls: int) -> str:
    packed = state.pack(model, calls, Model)
    packed.buffers = [held(buffer) for buffer in packed.buffers]
    return files.write(calls, packed)


def read(files: Files, url: str, calls: int) -> Model:
    payload, buffers = files.read(calls, url.rpartition("/")[2])
    model, number = state.unpack(payload, buffers, Model)
    assert number == calls
    return model


def total_bytes(store: Durable) -> int:
    return sum(store.fs.size(store.path(name)) for name in store.names())


def test_a_state_comes_back_from_its_files(store):
    model = Model()
    model.step()
    again = read(Files(store, 2), write(Files(store, 1), model, 7), 7)
    again.act["step"]()
    assert again.steps == 2
    assert (again.weights == 2).all()
    assert again.raw == model.raw
    assert again.small.tolist() == list(range(10))
    assert all(array.flags.aligned and array.flags.writeable for array in (again.small, again.weights))


def test_what_did_not_change_is_not_written_again(store):
    model, files = Model(), Files(store, 1)
    write(files, model, 1)
    first = total_bytes(store)
    assert len(store.names()) == 4  # the state, and three large buffers
    model.step()
    write(files, model, 2)
    assert total_bytes(store) - first < first / 2
    before = total_bytes(store)
    model.steps += 1
    write(files, model, 3)
    assert total_bytes(store) - before < 2_000


def test_arrow_tables_are_written_once_too(store):
    pa = pytest.importorskip("pyarrow")
    model, files = Model(), Files(store, 1)
    model.table = pa.table({"x": np.arange(50_000)})
    write(files, model, 1)
    before = total_bytes(store)
    model.steps += 1
    url = write(files, model, 2)
    assert total_bytes(store) - before < 3_000
    assert read(files, url, 2).table == model.table


def test_a_shared_file_that_is_gone_is_written_again(store):
    model, files = Model(), Files(store, 1)
    write(files, model, 1)
    for name in store.names():
        store.delete(name)
    assert (read(files, write(files, model, 2), 2).fixed == model.fixed).all()


def test_what_no_checkpoint_needs_is_removed(store):
    model, files = Model(), Files(store, 1)
    for calls in range(1, 5):
        model.step()
        write(files, model, calls)
    files.forget(3)
    names = store.names()
    assert sorted(name for name in names if len(name) < 10) == ["1-3", "1-4"]
    assert len(names) == 6  # two states, their weights, and what they share
    for calls in (3, 4):
        assert (read(files, f"{store.url}/1-{calls}", calls).weights == calls).all()


def test_a_new_incarnation_goes_on_with_the_files_of_the_last_and_removes_what_it_left(store):
    model, first = Model(), Files(store, 1)
    url = write(first, model, 1)
    store.write("1-9.part-7-abc", b"of a writer that was killed")
    write(Files(store, 3), model, 8)  # of an incarnation that this one does not know of
    second = Files(store, 2)
    model = read(second, url, 1)
    model.step()
    before = total_bytes(store)
    write(second, model, 2)
    assert total_bytes(store) - before < 900_000  # the weights alone
    second.forget(2)
    kept = [name.partition("-")[0] for name in store.names()]
    assert kept.count("3") == 4
    assert not [name for name in store.names() if ".part-" in name or name == "1-1"]
    assert (read(second, f"{store.url}/2-2", 2).weights == 1).all()


def test_a_buffer_that_is_gone_makes_the_checkpoint_bad(store):
    files = Files(store, 1)
    url = write(files, Model(), 1)
    store.delete(next(name for name in store.names() if len(name) > 20))
    with pytest.raises(FileNotFoundError):
        read(Files(store, 2), url, 1)


def test_what_the_actor_does_while_its_state_is_written_does_not_get_into_it(store):
    model, files = Model(), Files(store, 1)
    packed = state.pack(model, 1, Model)
    packed.buffers = [held(buffer) for buffer in packed.buffers]
    model.step()
    files.write(1, packed)
    assert not read(files, f"{store.url}/1-1", 1).weights.any()


# --- classes of all kinds ---------------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("__dict__", "a")

    def __init__(self) -> None:
        self.a, self.b = 1, 2


class Counts(dict):
    def __init__(self) -> None:
        super().__init__({"x": 1})
        self.name = "counts"


class Log(list):
    pass


class Reduced:
    def __init__(self, a: int) -> None:
        self.a = a

    def __reduce__(self):
        return Reduced, (self.a,)


class Kept:
    def __init__(self) -> None:
        self.a, self.lock = 1, Path("x").open  # not to be pickled

    def __getstate__(self):
        return {"a": self.a}

    def __setstate__(self, kept):
        self.__dict__.update(kept, restored=True)


class Heir(Kept):
    pass


class Saver:
    def __init__(self) -> None:
        self.a, self.gate = 1, (item for item in ())

    def __flow_save__(self):
        return {"a": self.a, "raw": b"r" * 100_000}

    def __flow_load__(self, kept):
        self.a, self.raw = kept["a"], kept["raw"]


class Circle:
    def __init__(self) -> None:
        self.me = self
        self.do = self.add
        self.total = 0

    def add(self) -> None:
        self.total += 1


def back(instance: object) -> object:
    packed = state.pack(state.saved(instance), None, type(instance))
    return state.unpack_inline(codec.to_inline(packed), type(instance))[0]


def test_classes_keep_what_makes_up_their_instances():
    slotted, log = back(Slotted()), Log([1, 2])
    assert (slotted.a, slotted.b) == (1, 2)
    counts = back(Counts())
    assert (counts, counts.name) == ({"x": 1}, "counts")
    log.author = "me"
    assert (back(log), back(log).author) == ([1, 2], "me")
    assert back(Reduced(3)).a == 3
    for kind in (Kept, Heir):
        assert (type(back(kind())), back(kind()).a, back(kind()).restored) == (kind, 1, True)
    assert (back(Saver()).a, len(back(Saver()).raw)) == (1, 100_000)


def test_an_instance_that_refers_to_itself_is_one_again():
    circle = back(Circle())
    circle.do()
    circle.me.add()
    assert circle.total == 2


def test_a_class_that_is_defined_in_a_function_comes_back_as_the_same_class():
    class Local:
        def __init__(self) -> None:
            self.parts = [self, Local, self.size]

        def size(self) -> int:
            return len(self.parts)

    local = back(Local())
    assert local.parts[:2] == [local, Local]
    assert local.parts[2]() == 3


class Tensor:
    """As much of a tensor of torch as is used: a pickled one has no gradient any more."""

    is_leaf = True

    def __init__(self, number: float) -> None:
        self.number, self.grad = number, None

    def __reduce_ex__(self, protocol: int):
        return Tensor, (self.number,)


def test_tensors_of_torch_keep_their_gradients(monkeypatch):
    torch = types.ModuleType("torch")
    torch.Tensor = Tensor
    monkeypatch.setitem(sys.modules, "torch", torch)
    one, other = Tensor(1.0), Tensor(2.0)
    one.grad = Tensor(3.0)
    log = back(Log([one, other, one]))
    assert log[0] is log[2]
    assert (log[0].number, log[0].grad.number, log[1].grad) == (1.0, 3.0, None)
