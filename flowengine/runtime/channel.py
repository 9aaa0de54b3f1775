"""The socket between the launcher and its node: whole words, file descriptors with them, nothing ever blocks."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

WORD_BYTES_MAX = 128 * 1024
FDS_MAX = 4

T = TypeVar("T")


class Channel(Generic[T]):
    """One end; heard: the words that the other end may say."""

    def __init__(self, end: socket.socket, heard: Any) -> None:
        end.setblocking(False)
        self.end = end
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(heard)
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()

    @property
    def waiting(self) -> bool:
        """Whether something could not be sent yet."""
        return bool(self._unsent)

    def fileno(self) -> int:
        """For poll and add_reader."""
        return self.end.fileno()

    def say(self, word: Any, fds: Sequence[int] = ()) -> None:
        """Send a word; the descriptors that go with it are closed here. Raises OSError when the other end is gone."""
        self._unsent.append((msgspec.msgpack.encode(word), tuple(fds)))
        self.flush()

    def flush(self) -> bool:
        """Send what waits; False: the other end does not read at the moment, try again when it is writable."""
        while self._unsent:
            frame, fds = self._unsent[0]
            try:
                socket.send_fds(self.end, [frame], fds)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                self._forget()
                raise
            self._unsent.popleft()
            close_all(fds)
        return True

    def hear(self) -> tuple[T, list[int]] | None:
        """The next word and its descriptors, None if there is none now; EOFError when the other end is gone."""
        try:
            frame, fds, flags, _ = socket.recv_fds(self.end, WORD_BYTES_MAX, FDS_MAX)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise EOFError(str(error)) from error
        if not frame:
            raise EOFError("the other end is closed")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            close_all(fds)
            raise EOFError(f"a word of more than {WORD_BYTES_MAX} bytes")
        for fd in fds:
            os.set_inheritable(fd, False)
        return self._decoder.decode(frame), list(fds)

    def close(self) -> None:
        """Close this end."""
        self._forget()
        self.end.close()

    def _forget(self) -> None:
        for _, fds in self._unsent:
            close_all(fds)
        self._unsent.clear()


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that keep the bounds of words."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors, whether they are open or not."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
