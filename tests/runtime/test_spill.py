"""Objects on disk and back."""
from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from flowengine.objects import codec, spill
from flowengine.objects.segments import Segments

CHUNK_BYTES = 64 << 10
NAME = "ab" * 20


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    return Segments(str(folder), pool_bytes_max=0)


def put(store, payload):
    packed = codec.pack(payload)
    segment = store.create(NAME, codec.layout_bytes(packed))
    codec.write_object(segment.view, packed, NAME.encode())
    segment.seal()
    return store.size(NAME)


@pytest.mark.parametrize("payload", [b"", b"x", bytes(1 << 20), os.urandom((1 << 20) + 13)], ids=len)
def test_there_and_back(store, tmp_path, payload):
    size = put(store, payload)
    whole = bytes(store.open(NAME))
    disk = str(tmp_path / "spill" / "object.lz4")
    disk_bytes = spill.spill(store.path(NAME), size, disk, CHUNK_BYTES)
    assert disk_bytes == os.path.getsize(disk)
    assert os.stat(disk).st_mode & 0o077 == 0
    assert not store.exists(NAME)
    assert spill.object_size(disk) == size
    segment = store.create(NAME, size)
    spill.restore(disk, segment.view, CHUNK_BYTES)
    segment.seal()
    assert bytes(store.open(NAME)) == whole
    for offset in (0, 1, size - 1, size):
        assert b"".join(spill.chunks(disk, CHUNK_BYTES, offset)) == whole[offset:]
    spill.remove(disk)
    spill.remove(disk)
    assert not os.path.exists(disk)


def test_what_a_reader_maps_stays(store, tmp_path):
    size = put(store, bytes(1 << 20))
    view = store.open(NAME)
    disk = str(tmp_path / "object.lz4")
    with pytest.raises(spill.ReaderBusy):
        spill.spill(store.path(NAME), size, disk, CHUNK_BYTES)
    assert store.exists(NAME)
    assert not os.path.exists(disk)
    del view
    spill.spill(store.path(NAME), size, disk, CHUNK_BYTES)


def test_another_life_of_the_object_is_not_spilled_and_not_removed(store, tmp_path, monkeypatch):
    size = put(store, bytes(1 << 20))
    inode = os.stat(store.path(NAME)).st_ino
    disk = str(tmp_path / "object.lz4")
    with pytest.raises(OSError, match="made again"):
        spill.spill(store.path(NAME), size, disk, CHUNK_BYTES, inode + 1)
    assert not os.path.exists(disk)
    replace = os.replace

    def made_again_first(source, target):
        put(store, bytes([1]) * (1 << 20))
        replace(source, target)

    monkeypatch.setattr(os, "replace", made_again_first)
    spill.spill(store.path(NAME), size, disk, CHUNK_BYTES, inode)
    assert codec.read_object(store.open(NAME)) == bytes([1]) * (1 << 20)


def test_memory_comes_back_although_the_writer_keeps_its_mapping(tmp_path):
    with_mapping = Segments(str(tmp_path), pool_bytes_max=1 << 30)
    size = put(with_mapping, os.urandom(4 << 20))
    descriptor = os.open(with_mapping.path(NAME), os.O_RDONLY)
    before_bytes = os.fstat(descriptor).st_blocks * 512
    spill.spill(with_mapping.path(NAME), size, str(tmp_path / "disk" / "object"), CHUNK_BYTES)
    after = os.fstat(descriptor)
    os.close(descriptor)
    assert before_bytes >= size
    assert after.st_blocks == 0
    assert after.st_size >= size    # whoever opened it a moment ago can still map it


def test_a_full_disk_is_known_and_leaves_the_object(store, tmp_path, monkeypatch):
    size = put(store, os.urandom(1 << 20))

    def full(target, part):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spill, "_write_all", full)
    with pytest.raises(OSError, match="No space") as failed:
        spill.spill(store.path(NAME), size, str(tmp_path / "object"), CHUNK_BYTES)
    assert spill.is_disk_full(failed.value)
    assert store.open(NAME) is not None
    assert not [name for name in os.listdir(tmp_path) if "object" in name]


def test_a_file_that_is_not_whole_is_refused(store, tmp_path):
    size = put(store, os.urandom(1 << 20))
    disk = tmp_path / "object"
    spill.spill(store.path(NAME), size, str(disk), CHUNK_BYTES)
    disk.write_bytes(disk.read_bytes()[:-CHUNK_BYTES])
    segment = store.create(NAME, size)
    with pytest.raises((OSError, RuntimeError, EOFError)):
        spill.restore(str(disk), segment.view, CHUNK_BYTES)
    segment.abort()


def test_folders_of_nodes_that_are_gone_are_swept(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mine = spill.spill_folder(str(tmp_path), "session", os.getpid())
    left = spill.spill_folder(str(tmp_path), "session", ended.pid)
    elsewhere = str(tmp_path / "spill" / f"session-another_host-{ended.pid}")
    for folder in (mine, left, elsewhere):
        os.makedirs(folder)
    assert spill.sweep(str(tmp_path)) == [left]
    assert os.path.exists(mine)
    assert os.path.exists(elsewhere)
    assert spill.sweep(str(tmp_path / "none")) == []
