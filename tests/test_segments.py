"""Segments: sealed at once, reused only when nobody reads, safe between processes, never a bus error, swept."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from flowengine.errors import StoreFull
from flowengine.objects import codec, segments
from flowengine.objects.segments import Segments

KIB, MIB = 1 << 10, 1 << 20

READER = """
import sys
from flowengine.objects.segments import Segments
view = Segments(sys.argv[1], 0).open(sys.argv[2])
print("none" if view is None else "held", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def folder() -> Iterator[str]:
    path = tempfile.mkdtemp(dir="/dev/shm", prefix="flowengine-test-")
    yield path
    shutil.rmtree(path)


def put(store: Segments, name: str, value: object) -> int:
    """The inode that the object lies in."""
    packed = codec.pack(value)
    segment = store.create(name, packed.nbytes)
    codec.write_object(segment.view, packed, name.encode())
    segment.seal()
    return os.stat(store.path(name)).st_ino


def value_of(store: Segments, name: str) -> object:
    view = store.open(name)
    assert view is not None
    return codec.read_object(view)


@contextlib.contextmanager
def reader(folder: str, name: str, says: str = "held") -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", READER, folder, name], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == says
        try:
            yield process
        finally:
            process.kill()


def files(folder: str) -> int:
    return len(os.listdir(folder))


# ---------------------------------------------------------------- one process


def test_an_object_is_seen_when_it_is_sealed_and_not_before(folder: str) -> None:
    store, other = Segments(folder, MIB), Segments(folder, MIB)
    packed = codec.pack(np.arange(1000))
    segment = store.create("a", packed.nbytes)
    codec.write_object(segment.view, packed, b"a")
    assert len(segment.view) == packed.nbytes
    assert not other.exists("a")
    assert (other.open("a"), other.size("a")) == (None, None)
    segment.seal()
    assert other.exists("a")
    assert other.size("a") == packed.nbytes
    view = other.open("a")
    assert view is not None
    assert view.readonly
    assert len(view) == packed.nbytes
    np.testing.assert_array_equal(codec.read_object(view), np.arange(1000))


def test_aborted_room_is_given_back(folder: str) -> None:
    store = Segments(folder, MIB)
    store.create("a", 1000).abort()
    assert files(folder) == 0


def test_a_freed_segment_is_warm_for_the_next_of_its_class(folder: str) -> None:
    store = Segments(folder, 10 * MIB)
    first = put(store, "a", np.zeros(100_000))
    kept_bytes = store.free("a")
    assert kept_bytes == store.pool_bytes >= 800_000
    assert not store.exists("a")
    assert put(store, "b", np.ones(100_000)) == first
    assert store.pool_bytes == 0
    assert value_of(store, "b")[5] == 1
    assert store.reuse("c", 800_000) is None
    assert store.free("b")
    assert store.reuse("c", segments.size_class(kept_bytes)) is None, "of the same class, but it has less memory"
    reused = store.reuse("c", 800_000)
    assert reused is not None
    reused.abort()
    assert (store.pool_bytes, files(folder)) == (0, 0)


def test_a_segment_that_is_read_is_not_reused_until_the_last_view_is_gone(folder: str) -> None:
    store = Segments(folder, 10 * MIB)
    first = put(store, "a", np.zeros(100_000))
    part = value_of(store, "a")[10:20]
    store.free("a")
    assert put(store, "b", np.ones(100_000)) != first
    assert part.sum() == 0
    del part
    gc.collect()
    assert put(store, "c", np.ones(100_000)) == first


def test_what_is_over_the_pool_or_was_made_elsewhere_is_given_back(folder: str) -> None:
    store, other = Segments(folder, MIB), Segments(folder, MIB)
    put(store, "large", np.zeros(1 << 18))
    assert store.free("large") == 0
    inode = put(store, "a", np.zeros(1 << 14))
    assert other.free("a") == 0
    assert other.free("a", inode + 1) == 0
    assert files(folder) == 1
    assert other.free("a", inode) == 0
    assert store.free("a") == 0
    assert store.free("never") == 0
    assert files(folder) == 0


def test_another_life_of_an_object_is_not_freed_with_an_earlier_one(folder: str) -> None:
    store, other, node = Segments(folder, MIB), Segments(folder, MIB), Segments(folder, MIB)
    first = put(store, "a", np.zeros(1 << 14))
    second = put(other, "a", np.ones(1 << 14))
    assert store.holds("a", second)
    assert not store.holds("a", first)
    assert store.free("a", first) == node.free("a", first) == 0
    assert (store.pool_bytes, value_of(store, "a")[0]) == (0, 1)
    third = put(other, "a", np.full(1 << 14, 3))
    assert other.free("a", second) == 0
    assert value_of(store, "a")[0] == 3
    assert other.free("a", third) > 0
    assert not store.exists("a")
    assert not store.holds("a", third)
    put(store, "a", np.zeros(1 << 14))
    put(store, "a", np.ones(1 << 14))
    assert value_of(store, "a")[0] == 1


@pytest.mark.parametrize("once_more", [False, True])
@pytest.mark.parametrize("by_writer", [False, True])
def test_what_is_sealed_while_the_former_is_being_freed_stays(
    folder: str, monkeypatch: pytest.MonkeyPatch, by_writer: bool, once_more: bool
) -> None:
    store, other, node = Segments(folder, MIB), Segments(folder, MIB), Segments(folder, MIB)
    first = put(store, "a", np.zeros(1 << 14))
    rename, link = os.rename, os.link

    def sealed_before(source: str, target: str) -> None:
        monkeypatch.setattr(os, "rename", rename)
        put(other, "a", np.ones(1 << 14))
        rename(source, target)

    def sealed_once_more(source: str, target: str) -> None:
        put(store, "a", np.full(1 << 14, 2))
        link(source, target)

    monkeypatch.setattr(os, "rename", sealed_before)
    if once_more:
        monkeypatch.setattr(os, "link", sealed_once_more)
    assert (store if by_writer else node).free("a", first) == 0
    assert value_of(node, "a")[0] == (2 if once_more else 1)
    assert files(folder) == 1
    assert (store if once_more else other).free("a") > 0
    assert not store.exists("a")


def test_what_is_forgotten_is_what_lies_there_no_more(folder: str) -> None:
    store, other = Segments(folder, MIB), Segments(folder, MIB)
    put(store, "a", np.zeros(1 << 14))
    store.forget("a")
    assert store.free("a") > 0
    put(store, "a", np.zeros(1 << 14))
    put(other, "a", np.ones(1 << 14))
    store.forget("a")
    assert store.free("a") == 0
    assert value_of(store, "a")[0] == 1


def test_a_copy_gives_way_to_what_was_sealed_meanwhile(folder: str) -> None:
    store, node = Segments(folder, MIB), Segments(folder, MIB)
    copies = [node.create("a", 1 << 14) for _ in range(2)]
    copies[0].seal_copy()
    first = os.stat(store.path("a")).st_ino
    copies[1].seal_copy()
    assert node.holds("a", first)
    assert files(folder) == 1
    copy = node.create("a", 1 << 14)
    put(store, "a", np.ones(1 << 14))
    copy.seal_copy()
    assert value_of(node, "a")[0] == 1
    assert node.free("a") == 0
    assert value_of(node, "a")[0] == 1
    assert files(folder) == 1


def test_one_mapping_serves_all_readers_of_an_object_in_a_process(folder: str) -> None:
    store = Segments(folder, MIB)
    put(store, "a", np.arange(1 << 14))
    x, y = value_of(store, "a"), value_of(store, "a")
    assert np.shares_memory(x, y)
    store.free("a")
    assert store.open("a") is None
    put(store, "a", np.zeros(1 << 14))
    assert value_of(store, "a")[9] == 0
    assert x[9] == y[9] == 9


def test_trim_and_close_give_the_pool_back_and_leave_the_objects(folder: str) -> None:
    store = Segments(folder, 10 * MIB)
    for name in ("a", "b", "c"):
        put(store, name, np.zeros(1 << 15))
    put(store, "stays", np.full(1 << 15, 7))
    one, _, _ = (store.free(name) for name in ("a", "b", "c"))
    assert store.trim(1) == one
    assert store.pool_bytes == 2 * one
    store.close()
    assert store.pool_bytes == 0
    assert os.listdir(folder) == ["stays"]
    assert value_of(store, "stays")[0] == 7
    assert store.free("stays") == 0


def test_a_reader_that_opened_before_the_reuse_sees_that_it_is_another_object(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = Segments(folder, 10 * MIB), Segments(folder, 10 * MIB)
    put(store, "a", np.zeros(1 << 14))
    lock = fcntl.flock

    def recycled_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        store.free("a")
        put(store, "b", np.ones(1 << 14))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", recycled_first)
    assert other.open("a") is None
    assert value_of(other, "b")[0] == 1


def test_a_reader_that_opened_before_the_reuse_does_not_wait_for_the_writer(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = Segments(folder, 10 * MIB), Segments(folder, 10 * MIB)
    put(store, "a", np.zeros(1 << 14))
    lock = fcntl.flock
    writing = []

    def recycled_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        store.free("a")
        writing.append(store.create("b", (1 << 17) + 200))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", recycled_first)
    assert other.open("a") is None
    writing[0].abort()


def test_what_was_in_a_reused_segment_is_never_taken_for_an_object(folder: str) -> None:
    store = Segments(folder, MIB)
    put(store, "a", np.zeros(1 << 14))
    store.free("a")
    store.create("a", (1 << 17) + 200).seal()
    assert store.open("a") is None
    assert store.size("a") is None


def test_no_room_is_an_error_with_sizes_and_path(folder: str) -> None:
    store = Segments(folder, MIB)
    system = os.statvfs(folder)
    with pytest.raises(StoreFull, match=rf"MiB in {folder}: .* MiB of .* MiB"):
        store.create("a", system.f_frsize * system.f_blocks + MIB)
    assert files(folder) == 0


def test_a_full_file_system_takes_the_pool_first(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Segments(folder, 10 * MIB)
    put(store, "a", np.zeros(1 << 15))
    store.free("a")
    allocate = os.posix_fallocate

    def full_while_pooled(descriptor: int, offset: int, nbytes: int) -> None:
        if store.pool_bytes:
            raise OSError(28, "No space left on device")
        allocate(descriptor, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full_while_pooled)
    put(store, "b", np.zeros(1 << 17))
    assert os.listdir(folder) == ["b"]


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../a", "a\0"])
def test_names_stay_in_the_folder(folder: str, name: str) -> None:
    store = Segments(folder, MIB)
    for call in (store.open, store.exists, store.size, store.free):
        with pytest.raises(ValueError, match="cannot name"):
            call(name)
    with pytest.raises(ValueError, match="cannot name"):
        store.create(name, 1)


def test_more_objects_than_kept_mappings(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "KEPT_MAPPINGS_MAX", 4)
    store = Segments(folder, 10 * MIB)
    before = len(os.listdir("/proc/self/fd"))
    first = [put(store, f"a{i}", np.full(1 << 12, i)) for i in range(20)]
    assert len(os.listdir("/proc/self/fd")) <= before + 4
    for i in range(20):
        assert store.free(f"a{i}") > 0
    assert sorted(put(store, f"b{i}", np.full(1 << 12, -i)) for i in range(20)) == sorted(first)
    assert [value_of(store, f"b{i}")[7] for i in range(20)] == [-i for i in range(20)]


def test_threads_share_one_store(folder: str) -> None:
    store = Segments(folder, 4 * MIB)
    faults: list[object] = []

    def work(thread: int) -> None:
        for i in range(40):
            name, number = f"t{thread}-{i}", thread * 1000 + i
            put(store, name, np.full(1 << 13, number))
            y = value_of(store, name)
            store.free(name)
            if (y != number).any():
                faults.append((name, y))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert store.pool_bytes <= 4 * MIB
    store.close()
    assert files(folder) == 0


# ---------------------------------------------------------------- several processes


def test_a_reader_in_another_process_keeps_the_segment_until_it_is_killed(folder: str) -> None:
    store = Segments(folder, 10 * MIB)
    first = put(store, "a", np.zeros(1 << 15))
    with reader(folder, "a") as process:
        store.free("a")
        assert put(store, "b", np.ones(1 << 15)) != first
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert put(store, "c", np.ones(1 << 15)) == first
    with reader(folder, "a", says="none"):
        pass


def test_a_child_of_a_fork_neither_reuses_nor_loses_what_its_parent_made(folder: str) -> None:
    store = Segments(folder, 10 * MIB)
    warm = put(store, "a", np.zeros(1 << 15))
    held = put(store, "held", np.full(1 << 15, 4))
    store.free("a")
    x = value_of(store, "held")
    pid = os.fork()
    if pid == 0:
        good = put(store, "b", np.ones(1 << 15)) not in (warm, held) and x[0] == 4
        store.free("b")
        store.close()
        os._exit(0 if good else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.free("held") > 0
    assert put(store, "c", np.ones(1 << 15)) == warm
    assert put(store, "d", np.ones(1 << 15)) != held
    assert x[0] == 4


def test_what_a_killed_writer_left_is_reaped(folder: str) -> None:
    store = Segments(folder, MIB)
    pid = os.fork()
    if pid == 0:
        put(store, "sealed", np.full(1 << 12, 3))
        put(store, "warm", np.zeros(1 << 13))
        store.free("warm")
        segment = store.create("unfinished", MIB)
        segment.view[0] = 1
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert files(folder) == 3
    assert store.reap(pid) == 2
    assert os.listdir(folder) == ["sealed"]
    assert value_of(store, "sealed")[0] == 3


# ---------------------------------------------------------------- laws


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_law_size_classes_hold_their_size_with_little_waste(a: int, b: int) -> None:
    small, large = sorted((a, b))
    capacity_bytes = segments.size_class(large)
    assert capacity_bytes >= max(large, 1)
    assert capacity_bytes % segments.PAGE_BYTES == 0
    assert capacity_bytes - large <= max(segments.PAGE_BYTES, large / 8)
    assert segments.size_class(small) <= capacity_bytes
    assert segments.size_class(capacity_bytes) == capacity_bytes


class SegmentsMachine(RuleBasedStateMachine):
    """Two stores in one folder, and readers that hold on to what they read."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(dir="/dev/shm", prefix="flowengine-test-")
        self.stores = [Segments(self.folder, 64 * KIB), Segments(self.folder, 64 * KIB)]
        self.known: dict[str, tuple[int, int]] = {}
        self.lies: dict[str, tuple[int, int]] = {}  # store and inode of what is known
        self.past: list[tuple[str, int]] = []  # lives that have ended
        self.number = 0

    stores_ = st.integers(0, 1)
    names = st.sampled_from("abc")

    @rule(store=stores_, name=names, count=st.sampled_from([1, 900, 3000, 3001, 7000]))
    def write(self, store: int, name: str, count: int) -> None:
        self.number += 1
        if name in self.known:
            self.end(name)
        inode = put(self.stores[store], name, np.full(count, self.number, np.int32))
        self.known[name] = (count, self.number)
        self.lies[name] = (store, inode)
        self.past = [life for life in self.past if life != (name, inode)]  # a warm file has the same number again

    def end(self, name: str) -> None:
        del self.known[name]
        self.past.append((name, self.lies.pop(name)[1]))

    @rule(store=stores_, name=names)
    def give_up(self, store: int, name: str) -> None:
        segment = self.stores[store].create(name, 5000)
        segment.view[:] = b"\xff" * 5000
        segment.abort()

    @rule(store=stores_, name=names)
    def free(self, store: int, name: str) -> None:
        if name in self.known and self.lies[name][0] == store:
            self.end(name)
        self.stores[store].free(name)

    @precondition(lambda self: self.known)
    @rule(store=stores_, which=st.integers(0, 2))
    def free_by_number(self, store: int, which: int) -> None:
        name = sorted(self.known)[which % len(self.known)]
        inode = self.lies[name][1]
        self.end(name)
        self.stores[store].free(name, inode)

    @precondition(lambda self: self.past)
    @rule(store=stores_, which=st.integers(0, 100))
    def free_too_late(self, store: int, which: int) -> None:
        self.stores[store].free(*self.past[which % len(self.past)])

    @rule(store=stores_, bytes_wanted=st.integers(0, 40_000))
    def trim(self, store: int, bytes_wanted: int) -> None:
        self.stores[store].trim(bytes_wanted)

    @rule(target=held, store=stores_, name=names)
    def read(self, store: int, name: str) -> object:
        view = self.stores[store].open(name)
        if view is None:
            assert name not in self.known
            return None
        value = codec.read_object(view)
        count, number = self.known[name]
        assert len(value) == count
        return value, number

    @rule(reading=consumes(held))
    def let_go(self, reading: object) -> None:
        self.unchanged(reading)

    @rule(reading=held)
    def unchanged(self, reading: object) -> None:
        if reading is not None:
            value, number = reading  # type: ignore[misc]
            assert (value == number).all()

    @invariant()
    def all_fits(self) -> None:
        for store in self.stores:
            assert 0 <= store.pool_bytes <= store.pool_bytes_max
            assert {name for name in "abc" if store.exists(name)} == self.known.keys()
        warm_bytes = sum(e.stat().st_blocks * 512 for e in os.scandir(self.folder) if e.name[0] == ".")
        assert warm_bytes == sum(store.pool_bytes for store in self.stores)

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        assert sorted(os.listdir(self.folder)) == sorted(self.known)
        shutil.rmtree(self.folder)


TestSegmentsMachine = SegmentsMachine.TestCase
TestSegmentsMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
