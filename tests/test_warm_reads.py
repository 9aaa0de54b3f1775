"""Reading files that a writer uses in turn: the right object, locked while it is looked at, nothing pinned for long."""
from __future__ import annotations

import os

import numpy as np
import pytest

from flowengine.objects import codec, warm_reads
from flowengine.objects.segments import Segments


@pytest.fixture
def writer(tmp_path):
    return Segments(str(tmp_path), 1 << 20)


def write(writer, name, value):
    packed = codec.pack(np.full(1000, value))
    segment = writer.create(name, codec.layout_bytes(packed))
    codec.write_object(segment.view, packed, name.encode())
    segment.seal()


def read(reader, name):
    view = reader.open(name)
    return None if view is None else float(codec.read_object(view)[-1])


def test_a_file_that_is_used_again_is_mapped_once_and_read_right(writer, tmp_path):
    reader = warm_reads.WarmReads(str(tmp_path))
    inodes = set()
    for number in range(5):
        name = f"a{number}"
        write(writer, name, number)
        inodes.add(os.stat(tmp_path / name).st_ino)
        assert read(reader, name) == number
        writer.free(name)
    assert len(inodes) == 1
    assert len(reader._mappings) == 1
    assert reader.open("a0") is None


def test_the_writer_leaves_a_file_alone_while_it_is_looked_at(writer, tmp_path):
    reader = warm_reads.WarmReads(str(tmp_path))
    write(writer, "a", 1)
    view = reader.open("a")
    writer.free("a")
    write(writer, "b", 2)
    assert codec.read_object(view)[0] == 1
    assert read(reader, "b") == 2
    del view
    writer.free("b")
    write(writer, "c", 3)
    assert read(reader, "c") == 3
    assert len(reader._mappings) == 2


def test_an_object_under_a_foreign_name_is_not_given(writer, tmp_path):
    write(writer, "a", 1)
    os.link(tmp_path / "a", tmp_path / "b")
    assert warm_reads.WarmReads(str(tmp_path)).open("b") is None


def test_what_is_not_read_for_a_while_is_let_go(writer, tmp_path, monkeypatch):
    reader = warm_reads.WarmReads(str(tmp_path))
    write(writer, "a", 1)
    assert read(reader, "a") == 1
    assert reader.sweep()
    monkeypatch.setattr(warm_reads, "IDLE_S", -1.0)
    assert not reader.sweep()
    assert not reader._mappings


def test_what_is_written_past_the_view_is_read(writer, tmp_path):
    packed = codec.pack(np.zeros(1000))
    segment = writer.create("a", codec.layout_bytes(packed))
    codec.write_object(segment.view, packed, b"a")
    assert segment.is_new
    segment.write(codec.layout_bytes(packed) - 8, np.float64(7).data.cast("B"))
    segment.seal()
    assert read(warm_reads.WarmReads(str(tmp_path)), "a") == 7
