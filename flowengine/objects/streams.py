"""Buffers that exist only where they are written to: Arrow tables, and what else is put together at its destination."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

Write = Callable[[int, memoryview], None]  # (offset, part)


class ArrowStream(bytearray):
    """A placeholder buffer for Arrow record batches, which are written as an IPC stream only at their destination."""

    table: Any
    nbytes: int

    def write_into(self, target: memoryview) -> None:
        """Write the stream into a writable view of exactly nbytes."""
        pa = pyarrow()
        sink = pa.FixedSizeBufferWriter(pa.py_buffer(target))
        sink.set_memcopy_threads(2)
        with pa.ipc.new_stream(sink, self.table.schema) as writer:
            writer.write(self.table)
        sink.close()

    def pour(self, write: Write) -> None:
        """Hand the stream on in parts."""
        target = memoryview(bytearray(self.nbytes))
        self.write_into(target)
        write(0, target)


def stream_of(table: Any) -> ArrowStream:
    """The placeholder of a table or record batch."""
    pa = pyarrow()
    # A dry run finds the size; Arrow cuts slices to their own size as it writes.
    sink = pa.MockOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    stream = ArrowStream()
    stream.table = table
    stream.nbytes = sink.size()
    return stream


def pyarrow() -> Any:
    """Arrow, where values of it are met."""
    return importlib.import_module("pyarrow")
