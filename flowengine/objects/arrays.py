"""Plain arrays among stored values: what they are, told without their bytes."""

from __future__ import annotations

import msgspec

from flowengine.objects import codec


def packed_as(dtype: str, shape: tuple[int, ...], buffer: memoryview | codec.ArrowStream) -> codec.Packed:
    """A plain array whose bytes are in the buffer."""
    packed = codec.Packed(msgspec.msgpack.encode((dtype, shape)), [buffer], [], 0)
    packed.nbytes = codec.layout_bytes(packed)
    return packed


def kind_of(packed: codec.Packed) -> bytes:
    """What a packed plain array is, for read_kind; empty for all else."""
    return packed.payload if packed.buffers and packed.payload[0] != codec.PICKLE_TAG else b""


def read_kind(kind: bytes) -> tuple[str, tuple[int, ...]]:
    """dtype and shape of an array of this kind."""
    return codec.ARRAY_KIND.decode(kind)
