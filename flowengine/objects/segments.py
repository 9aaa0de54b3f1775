"""Files in shared memory that hold one object each: made, found, kept warm for reuse. Nothing is counted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import resource
import threading
import weakref

import msgspec

from flowengine.errors import StoreFull
from flowengine.objects import codec

PAGE_BYTES = 4096
BLOCK_BYTES = 512  # of which a file's size in memory is told
# Eight classes per doubling: a class is at most an eighth larger than what is asked of it.
CLASSES_PER_DOUBLING = 8
FINE_BYTES_MAX = PAGE_BYTES * CLASSES_PER_DOUBLING
# A kept mapping costs a file descriptor; beyond this the oldest are dropped and mapped again when they are reused.
KEPT_MAPPINGS_MAX = 256
OPEN_TRIES = 8
MADV_POPULATE_WRITE = 23  # of Linux 5.14; the kernel maps all pages at once, in half of the time
_numbers = itertools.count()
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


def take_away(path: str, aside: str, inode: int) -> bool:
    """Rename what lies at the path if it is that file; one that was sealed there meanwhile stays."""
    with contextlib.suppress(FileNotFoundError):
        if os.stat(path).st_ino != inode:
            return False
        os.rename(path, aside)
        if os.stat(aside).st_ino == inode:
            return True
        # Another process sealed its file between the two calls: it goes back, unless the name is taken once more.
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
        os.unlink(aside)
    return False


def remove_file(path: str, inode: int) -> None:
    """Unlink what lies at the path if it is that file."""
    aside = f"{os.path.dirname(path)}/.{os.getpid()}.{next(_numbers)}"
    if take_away(path, aside, inode):
        os.unlink(aside)


def size_class(nbytes: int) -> int:
    """The file size for an object of nbytes: whole pages, then eight steps between powers of two."""
    step = PAGE_BYTES if nbytes <= FINE_BYTES_MAX else (1 << (nbytes - 1).bit_length() - 1) // CLASSES_PER_DOUBLING
    return max(step, -(-nbytes // step) * step)


class _OwnFile(msgspec.Struct, eq=False):
    """A file that this process made; its private path is where it lies while nobody can read it under a name."""

    path: str
    inode: int
    capacity_bytes: int
    allocated_bytes: int
    mapping: mmap.mmap | None
    is_cold: bool = False  # its pages were written past the mapping


class _Reading(mmap.mmap):
    """A mapping for reading; its duplicate of the descriptor carries the shared lock until it is collected."""

    inode: int


class Segment:
    """Room for one object that only its writer sees; it must be sealed or aborted, once."""

    __slots__ = ("_descriptor", "_file", "_name", "_owner", "is_hollow", "is_new", "view")

    def __init__(self, owner: Segments, file: _OwnFile, descriptor: int, name: str, nbytes: int) -> None:
        assert file.mapping is not None
        self.is_new = False  # its pages are not mapped yet: `write` costs less than the faults of the view
        self.is_hollow = False  # it gets its memory from `write` alone, and the view is only for what was written
        self._owner = owner
        self._file = file
        self._descriptor = descriptor
        self._name = name
        self.view = memoryview(file.mapping)[:nbytes]

    def write(self, at: int, part: memoryview) -> None:
        """Fill a part of it past the view; StoreFull if it is hollow and the file system has no room."""
        while len(part):
            try:
                count = os.pwrite(self._descriptor, part, at)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                if not self._owner.trim(len(part)):
                    raise self._owner._full(len(part)) from None
                continue
            at, part = at + count, part[count:]

    def allocate(self) -> None:
        """Let it be hollow no more; StoreFull if the file system has no room."""
        if self.is_hollow:
            self._owner._allocate(self._file, self._descriptor, len(self.view))
            self.is_hollow = False

    def seal(self) -> int:
        """Make the object visible under its name; its file's number. BufferError if someone still looks at the view."""
        self._finish()
        os.rename(self._file.path, self._owner.path(self._name))
        self._owner._sealed(self._name, self._file)
        return self._file.inode

    def seal_copy(self) -> None:
        """The same for a copy, which gives way to what was sealed under its name meanwhile."""
        self._finish()
        try:
            os.link(self._file.path, self._owner.path(self._name))
        except FileExistsError:
            self._owner._dropped(self._file)
        else:
            self._owner._sealed(self._name, self._file)
        os.unlink(self._file.path)

    def _finish(self) -> None:
        self.view.release()
        if self.is_hollow:
            self._file.allocated_bytes = os.fstat(self._descriptor).st_blocks * BLOCK_BYTES
            self._file.is_cold = True
        # Unlocked before it can be found, so that no reader meets the lock. Who opened the file in its earlier life
        # may lock it now, and sees from the header that it is not what was sought.
        self._unlock()

    def abort(self) -> None:
        """Give the room back unused."""
        self.view.release()
        self._file.mapping = None
        self._owner._dropped(self._file)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._file.path)
        self._unlock()

    def _unlock(self) -> None:
        # Not by closing alone: the mapping of a new file holds a duplicate, a forked child perhaps another.
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


class Segments:
    """One process's way to the objects in a folder that it shares with other processes; safe to use from threads."""

    def __init__(self, folder: str, pool_bytes_max: int) -> None:
        self.folder = folder
        self.pool_bytes_max = pool_bytes_max
        self.pool_bytes = 0
        _allow_many_files()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        # Reentrant, as collecting garbage inside may free objects.
        self._lock = threading.RLock()
        self._mine: dict[str, _OwnFile] = {}
        self._pool: dict[int, list[_OwnFile]] = {}
        self._mapped: dict[_OwnFile, None] = {}
        self._readings: weakref.WeakValueDictionary[str, _Reading] = weakref.WeakValueDictionary()
        self.pool_bytes = 0

    def _in_this_process(self) -> None:
        # A forked child shares locks with its parent, so it must not reuse what the parent made.
        if self._pid != os.getpid():
            self._begin()

    def path(self, name: str) -> str:
        """Where the object of that name lies; ValueError if the name could leave the folder or hide in it."""
        if not name.isalnum() and (not name or name[0] == "." or "/" in name or "\0" in name):
            raise ValueError(f"{name!r} cannot name an object")
        return f"{self.folder}/{name}"

    # -------------------------------------------------------------------------------------------------------- writing

    def create(self, name: str, nbytes: int, hollow: bool = False) -> Segment:
        """Room for nbytes, warm if possible; StoreFull if the file system has no room.

        hollow: a new one is filled by `write` alone, which costs half of what allocating and mapping it first would.
        """
        self._in_this_process()
        self.path(name)
        capacity_bytes = size_class(nbytes)
        return self._begun(self._take_warm(capacity_bytes) or self._make(capacity_bytes), name, nbytes, hollow)

    def reuse(self, name: str, nbytes: int) -> Segment | None:
        """Room for nbytes without any more memory than the warm pool has; None if it has no such file."""
        self._in_this_process()
        self.path(name)
        taken = self._take_warm(size_class(nbytes), nbytes)
        return self._begun(taken, name, nbytes) if taken is not None else None

    def _begun(self, taken: tuple[_OwnFile, int], name: str, nbytes: int, hollow: bool = False) -> Segment:
        file, descriptor = taken
        is_new = file.mapping is None
        is_hollow = hollow and not file.allocated_bytes
        try:
            if is_hollow:
                self._begin_hollow(descriptor, nbytes)
            else:
                self._allocate(file, descriptor, nbytes)
            if file.mapping is None:
                file.mapping = mmap.mmap(descriptor, file.capacity_bytes)
                self._keep_mapping(file)
            if file.is_cold:
                file.is_cold = False
                with contextlib.suppress(OSError):  # an older kernel: they are mapped one after another
                    file.mapping.madvise(MADV_POPULATE_WRITE, 0, file.allocated_bytes)
            # What lay here must not be taken for an object, whatever becomes of this one.
            file.mapping[: codec.HEADER_BYTES] = bytes(codec.HEADER_BYTES)
        except BaseException:
            self._dropped(file)
            os.unlink(file.path)
            os.close(descriptor)
            raise
        segment = Segment(self, file, descriptor, name, nbytes)
        segment.is_new, segment.is_hollow = is_new, is_hollow
        return segment

    def _take_warm(self, capacity_bytes: int, allocated_min_bytes: int = 0) -> tuple[_OwnFile, int] | None:
        with self._lock:
            files = self._pool.get(capacity_bytes, [])
            for index in range(len(files) - 1, -1, -1):  # the last one in is the warmest
                file = files[index]
                if file.allocated_bytes < allocated_min_bytes:
                    continue
                try:
                    descriptor = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
                except FileNotFoundError:
                    self._forget_warm(file)
                    self._dropped(file)
                    continue
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:  # someone still reads what was here
                    os.close(descriptor)
                    continue
                self._forget_warm(file)
                return file, descriptor
        return None

    def _forget_warm(self, file: _OwnFile) -> None:
        self._pool[file.capacity_bytes].remove(file)
        self.pool_bytes -= file.allocated_bytes

    def _make(self, capacity_bytes: int) -> tuple[_OwnFile, int]:
        path, descriptor = "", -1
        while descriptor < 0:
            path = f"{self.folder}/.{self._pid}.{next(_numbers)}"
            # An earlier process with this pid may have been killed and not reaped yet.
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, capacity_bytes)
        return _OwnFile(path, os.fstat(descriptor).st_ino, capacity_bytes, 0, None), descriptor

    def _allocate(self, file: _OwnFile, descriptor: int, nbytes: int) -> None:
        """Give the file real memory for nbytes, so that no write to it can fail later with a bus error."""
        wanted_bytes = max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES
        if wanted_bytes <= file.allocated_bytes:
            return
        if not self._fallocate(descriptor, wanted_bytes):
            self.trim(wanted_bytes)
            if not self._fallocate(descriptor, wanted_bytes):
                raise self._full(nbytes)
        file.allocated_bytes = wanted_bytes

    def _begin_hollow(self, descriptor: int, nbytes: int) -> None:
        """See that there is room, and give the file its first and last page: a header and padding cannot fail."""
        if not self._has_room(descriptor, nbytes):
            self.trim(nbytes)
            if not self._has_room(descriptor, nbytes):
                raise self._full(nbytes)
        for at in (0, nbytes - 1):
            try:
                os.pwrite(descriptor, b"\0", at)
            except OSError as error:
                if error.errno in _FULL:
                    raise self._full(nbytes) from None
                raise

    def _full(self, nbytes: int) -> StoreFull:
        system = os.statvfs(self.folder)
        total_bytes, free_bytes = system.f_frsize * system.f_blocks, system.f_frsize * system.f_bavail
        return StoreFull(
            f"no room for an object of {_amount(nbytes)} in {self.folder}: "
            f"{_amount(free_bytes)} of {_amount(total_bytes)} of shared memory are free"
        )

    def free_bytes(self) -> int:
        """Of the file system, which is that of others too."""
        system = os.statvfs(self.folder)
        return system.f_frsize * system.f_bavail

    def _has_room(self, descriptor: int, wanted_bytes: int) -> bool:
        held_bytes = os.fstat(descriptor).st_blocks * BLOCK_BYTES
        return wanted_bytes - held_bytes <= self.free_bytes()

    def _fallocate(self, descriptor: int, wanted_bytes: int) -> bool:
        # Asking first spares the machine the filling of its memory up to the last page just to see it fail.
        if not self._has_room(descriptor, wanted_bytes):
            return False
        try:
            os.posix_fallocate(descriptor, 0, wanted_bytes)
        except OSError as error:
            if error.errno in _FULL:
                return False
            raise
        return True

    def _keep_mapping(self, file: _OwnFile) -> None:
        with self._lock:
            self._mapped[file] = None
            while len(self._mapped) > KEPT_MAPPINGS_MAX:
                oldest = next(iter(self._mapped))
                del self._mapped[oldest]
                oldest.mapping = None

    def _sealed(self, name: str, file: _OwnFile) -> None:
        with self._lock:
            replaced = self._mine.pop(name, None)
            if replaced is not None:
                self._dropped(replaced)
            self._mine[name] = file

    def _dropped(self, file: _OwnFile) -> None:
        with self._lock:
            self._mapped.pop(file, None)
            file.mapping = None

    # -------------------------------------------------------------------------------------------------------- reading

    def open(self, name: str) -> memoryview | None:
        """The object read-only, safe from reuse for as long as any view of it lives; None if there is none."""
        path = self.path(name)
        known = self._readings.get(name)
        for _ in range(OPEN_TRIES):
            try:
                if known is not None and os.stat(path).st_ino == known.inode:
                    return self._exactly(known)
                mapping = self._map(path, mmap.ACCESS_READ)
            except FileNotFoundError:
                return None
            if mapping is not None and codec.named_bytes(memoryview(mapping), name.encode()):
                self._readings[name] = mapping
                return self._exactly(mapping)
        return None

    def open_private(self, name: str) -> memoryview | None:
        """The object as memory of our own: what is written to it stays here; None if there is none."""
        path = self.path(name)
        for _ in range(OPEN_TRIES):
            try:
                mapping = self._map(path, mmap.ACCESS_COPY)
            except FileNotFoundError:
                return None
            if mapping is not None and codec.named_bytes(memoryview(mapping), name.encode()):
                return self._exactly(mapping)
        return None

    @staticmethod
    def _map(path: str, access: int) -> _Reading | None:
        """What lies at the path, locked for reading; None when it is being written again. Raises FileNotFoundError."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            mapping = _Reading(descriptor, 0, access=access)
            mapping.inode = os.fstat(descriptor).st_ino
        except BlockingIOError:  # freed since it was opened
            return None
        finally:
            os.close(descriptor)
        return mapping

    @staticmethod
    def _exactly(mapping: _Reading) -> memoryview:
        view = memoryview(mapping)
        return view[: codec.object_bytes(view)]

    def exists(self, name: str) -> bool:
        """True if an object of that name is sealed here."""
        return os.path.exists(self.path(name))

    def size(self, name: str) -> int | None:
        """The object's size in bytes; None if there is none."""
        try:
            descriptor = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            head = memoryview(os.pread(descriptor, codec.STORED_TOC_OFFSET, 0))
        finally:
            os.close(descriptor)
        return codec.named_bytes(head, name.encode()) or None

    # -------------------------------------------------------------------------------------------------------- freeing

    def holds(self, name: str, inode: int) -> bool:
        """Whether that file is the object of the name now."""
        try:
            return os.stat(self.path(name)).st_ino == inode
        except FileNotFoundError:
            return False

    def free(self, name: str, inode: int = 0) -> int:
        """Take that file (0: the one sealed here) away from under its name; the bytes kept warm, 0 if none are.

        What others have sealed under the name since then is another life of the object, and stays.
        """
        self._in_this_process()
        path = self.path(name)
        with self._lock:
            file = self._mine.get(name)
            if file is not None and inode in (0, file.inode):
                del self._mine[name]
            else:
                file = None
            room_bytes = self.pool_bytes_max - self.pool_bytes
        if file is None:
            if inode:
                remove_file(path, inode)
            return 0
        if take_away(path, file.path, file.inode):
            if file.allocated_bytes <= room_bytes:
                with self._lock:
                    self._pool.setdefault(file.capacity_bytes, []).append(file)
                    self.pool_bytes += file.allocated_bytes
                return file.allocated_bytes
            os.unlink(file.path)
        self._dropped(file)
        return 0

    def forget(self, name: str) -> None:
        """If what was sealed here was taken away otherwise, its memory is not held any more."""
        with self._lock:
            file = self._mine.get(name)
            if file is not None and not self.holds(name, file.inode):
                del self._mine[name]
                self._dropped(file)

    def trim(self, bytes_wanted: int) -> int:
        """Give memory of the pool back, the longest unused of the largest first; the bytes given back."""
        self._in_this_process()
        given_bytes = 0
        with self._lock:
            for capacity_bytes in sorted(self._pool, reverse=True):
                files = self._pool[capacity_bytes]
                while files and given_bytes < bytes_wanted:
                    file = files[0]
                    self._forget_warm(file)
                    self._dropped(file)
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(file.path)
                    given_bytes += file.allocated_bytes
                if not files:
                    del self._pool[capacity_bytes]
        return given_bytes

    def reap(self, pid: int) -> int:
        """Remove what a dead process left unsealed or warm; the number of files."""
        count = 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith(f".{pid}."):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(entry.path)
                        count += 1
        return count

    def close(self) -> None:
        """Give the pool back and drop the mappings for writing; sealed objects stay, readers keep what they have."""
        self._in_this_process()
        self.trim(self.pool_bytes + 1)
        with self._lock:
            for file in list(self._mapped):
                self._dropped(file)
            self._mine.clear()


def _amount(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"


def _allow_many_files() -> None:
    # Every object that is read costs one descriptor, the one that carries its lock.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
