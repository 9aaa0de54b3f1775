"""Objects on disk: one lz4 frame a file, written and read in chunks, so that memory never holds more than one.

Works on paths and buffers alone; which object goes when is decided by the Node machine. Blocks: run it in threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator
from typing import BinaryIO

import lz4.frame

from flowengine.objects.segments import remove_file

FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
FRAME_HEADER_BYTES_MAX = 19
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class ReaderBusy(Exception):
    """A process maps the segment, so it stays in memory."""


def spill_folder(state_dir: str, session: str, pid: int) -> str:
    """Where the node with that process id keeps what it spills; made by the first spill."""
    return os.path.join(state_dir, "spill", f"{session}-{socket.gethostname()}-{pid}")


def sweep(state_dir: str, kind: str = "spill") -> list[str]:
    """Remove the folders of one kind of nodes of this host that are gone; their paths."""
    removed = []
    # The folder may be shared with other hosts, whose process ids mean nothing here.
    pattern = re.compile(rf"-{re.escape(socket.gethostname())}-(\d+)$")
    with contextlib.suppress(FileNotFoundError), os.scandir(os.path.join(state_dir, kind)) as entries:
        for entry in entries:
            match = pattern.search(entry.name)
            if match and not os.path.exists(f"/proc/{match[1]}"):
                shutil.rmtree(entry.path, ignore_errors=True)
                removed.append(entry.path)
    return removed


def is_disk_full(error: OSError) -> bool:
    """Whether the error says that nothing more fits on the disk."""
    return error.errno in DISK_FULL


def spill(segment_path: str, size_bytes: int, disk_path: str, chunk_bytes: int, inode: int = 0) -> int:
    """Move a segment to disk and give its memory back; the bytes on disk. Raises ReaderBusy or OSError."""
    with open(segment_path, "r+b", buffering=0) as segment:
        found = os.fstat(segment.fileno()).st_ino
        if inode not in (0, found):
            raise OSError(errno.ESTALE, "the object was made again")
        try:
            fcntl.flock(segment, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a reader that comes now waits for us in vain
        except BlockingIOError:
            raise ReaderBusy(segment_path) from None
        os.makedirs(os.path.dirname(disk_path), mode=0o700, exist_ok=True)
        part = f"{disk_path}.part"
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0) as disk:
                _compress(segment, disk, size_bytes, chunk_bytes)
                disk_bytes = disk.tell()
            os.replace(part, disk_path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        remove_file(segment_path, found)
        _give_memory_back(segment.fileno())
    return disk_bytes


def _compress(source: BinaryIO, target: BinaryIO, size_bytes: int, chunk_bytes: int) -> None:
    chunk = memoryview(bytearray(min(chunk_bytes, max(1, size_bytes))))
    packer = lz4.frame.LZ4FrameCompressor(block_size=lz4.frame.BLOCKSIZE_MAX1MB, auto_flush=True)
    _write_all(target, packer.begin(size_bytes))
    left_bytes = size_bytes
    while left_bytes:
        count = source.readinto(chunk[:left_bytes])  # type: ignore[attr-defined]
        if not count:
            raise OSError(errno.EIO, f"the segment lacks {left_bytes} of its {size_bytes} bytes")
        _write_all(target, packer.compress(chunk[:count]))
        left_bytes -= count
    _write_all(target, packer.flush())


def _write_all(target: BinaryIO, part: bytes) -> None:
    view = memoryview(part)
    while view:
        view = view[target.write(view) :]


def _give_memory_back(fd: int) -> None:
    # The writer may keep a mapping of the file for reuse, so unlinking alone would free nothing. Not truncated: whoever
    # has just opened it must find a file that can be mapped, and see from its empty header that the object is gone.
    size_bytes = os.fstat(fd).st_size
    if size_bytes:
        _libc.fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, size_bytes)


def chunks(disk_path: str, chunk_bytes: int, offset: int = 0) -> Iterator[memoryview]:
    """The bytes of a spilled object from an offset on, piece by piece; raises OSError or RuntimeError."""
    with lz4.frame.open(disk_path, "rb") as disk:
        # Skipped by reading: a frame can only be unpacked from its start.
        while offset:
            skipped = disk.read(min(offset, chunk_bytes))
            if not skipped:
                return
            offset -= len(skipped)
        while part := disk.read(chunk_bytes):
            yield memoryview(part)


def restore(disk_path: str, view: memoryview, chunk_bytes: int) -> None:
    """Fill a segment from disk; raises OSError or RuntimeError when the file is not whole."""
    filled = 0
    with lz4.frame.open(disk_path, "rb") as disk:
        while filled < len(view):
            count = disk.readinto(view[filled : filled + chunk_bytes])
            if not count:
                break
            filled += count
        if filled != len(view) or disk.read(1):
            raise OSError(errno.EIO, f"{disk_path} does not hold the {len(view)} bytes of the object")


def object_size(disk_path: str) -> int:
    """The size of a spilled object in memory; raises OSError or RuntimeError."""
    with open(disk_path, "rb") as disk:
        head = disk.read(FRAME_HEADER_BYTES_MAX)
    size_bytes: int = lz4.frame.get_frame_info(head)["content_size"]
    return size_bytes


def remove(disk_path: str) -> None:
    """Drop a spilled object, whether it is there or not."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(disk_path)
