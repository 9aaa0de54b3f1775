"""Values in and out: small ones inside of messages, large ones in the store of the host. Shell, any thread."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.ids import short
from flowengine.errors import EngineBug, FlowError, OutOfDisk, StoreFull, TaskError, traceback_text, unpack_error
from flowengine.objects import arrays, codec
from flowengine.objects.segments import Segment, Segments
from flowengine.recovery import durable
from flowengine.recovery.durable import Durable
from flowengine.refs import ObjectRef

if TYPE_CHECKING:
    from flowengine.runtime.session import Session

log = logging.getLogger(__name__)

TRIES_MAX = 1_000  # to open what is said to be here: it may be spilled again and again just before
HOLLOW_BYTES_MIN = 2 << 20  # of what a group is given and has no warm memory: less is not worth another way
SUCCESSOR_LOOK_S = 0.02  # a restarted node listens after some tenths of a second
STORE_ERRORS: dict[str, type[FlowError]] = {"StoreFull": StoreFull, "OutOfDisk": OutOfDisk}
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Unbroken:
    """Inside of this block the main thread is not interrupted, but where it waits for room in the store."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.is_main = threading.get_ident() == session.main_thread

    def __enter__(self) -> None:
        self.session.masked += self.is_main

    def __exit__(self, *error: object) -> None:
        self.session.masked -= self.is_main
        if self.is_main and not self.session.masked:
            self.session.raise_pending()


class NodeGone(FlowError):
    """The node of this host was started again while a value was stored: its successor takes the value."""


def drop_state(command: c.DropState) -> None:
    """Remove the files of an actor's checkpoints, in a thread of its own."""
    threading.Thread(target=durable.drop, args=(command.url,), name="flowengine-drop", daemon=True).start()


def drop_durable(command: c.DropDurable) -> None:
    """Remove a durable copy, in a thread of its own."""

    def work() -> None:
        try:
            Durable(command.url).delete(command.oid.hex())
        except Exception as error:  # each file system has errors of its own
            log.warning("the durable copy %s/%s is left: %s", command.url, command.oid.hex(), error)

    threading.Thread(target=work, name="flowengine-drop", daemon=True).start()


def warn(command: c.Warn) -> None:
    """Tell the program."""
    log.warning("%s", command.text)


class Values:
    """Packs and unpacks values for one session, over its host's segments."""

    def __init__(self, session: Session, segments: Segments) -> None:
        self.session = session
        self.node = session.node
        self.segments = segments
        self.requests = itertools.count(1)
        self.asked: dict[int, Future[m.SpaceGiven]] = {}
        self.not_awaited: dict[int, int] = {}  # requests whose thread was interrupted: what they get is given back
        self.durable_url = ""

    # --- out --------------------------------------------------------------------------------------

    def load(self, oid: bytes, copy: bool = False, deadline: float | None = None) -> Any:
        """The value of an object that is ready; raises its error, or the one that unpickling raised."""
        session = self.session
        tries = 0
        while True:
            value = session.owner.value_of(oid)
            kind = type(value)
            if kind is m.Inline:
                read = self.unpacked if value.contained else self.plain
                return read(oid, value.blob, None, copy)
            if kind is m.Failed:
                raise self.unpacked_error(oid, value)
            if kind is m.Stored:
                view = session.values.segments.open(oid.hex())  # the node may have been started again meanwhile
                if view is not None:
                    read = self.unpacked if value.contained else self.plain
                    return read(oid, b"", view, copy)
            session.check_open()
            if oid not in session.owner.objects:
                raise EngineBug(f"object {short(oid)} is read though nothing refers to it")
            tries += 1
            if not tries % TRIES_MAX and not session.values.segments.exists(oid.hex()):
                # Its node takes it to be there, and its file was removed behind the node's back.
                session.endpoint.send(session.node, m.LoseObject(oid))
            session.fetch(oid, deadline)

    def unpacked_error(self, oid: bytes, value: m.Failed) -> FlowError:
        """The error; references inside are kept alive by the object as those of a value are."""
        local = self.session.local
        before = getattr(local, "via", b"")
        local.via = oid
        try:
            return unpack_error(value.error)
        finally:
            local.via = before

    def unpacked(self, oid: bytes, blob: bytes, view: memoryview | None, copy: bool = False) -> Any:
        """Unpickle; references inside are kept alive by the object until their owners know about us."""
        local = self.session.local
        before = getattr(local, "via", b"")
        local.via = oid
        try:
            return self.plain(oid, blob, view, copy)
        finally:
            local.via = before

    def plain(self, oid: bytes, blob: bytes, view: memoryview | None, copy: bool = False) -> Any:
        """Unpickle a value without references inside."""
        try:
            return codec.from_inline(blob, copy) if view is None else codec.read_object(view, copy)
        except FlowError:
            raise
        except Exception as error:
            name = f"reading {short(oid)}" if oid else "reading arguments"
            raise TaskError.wrap(error, traceback_text(error), name) from error

    # --- in ---------------------------------------------------------------------------------------

    def keep(self, oid: bytes, packed: codec.Packed, owner: str) -> m.Value:
        """The value as it is kept: inline, or stored on this host. Raises StoreFull, OutOfDisk."""
        contained = tuple([ref.to() for ref in packed.refs if isinstance(ref, ObjectRef)]) if packed.refs else ()
        if packed.nbytes <= self.session.config.inline_bytes_max:
            return m.Inline(codec.to_inline(packed), contained)
        return self.store(oid, packed, owner, contained)

    def store(
        self, oid: bytes, packed: codec.Packed, owner: str, contained: tuple[m.RefTo, ...] = (), is_gift: bool = False
    ) -> m.Stored:
        """Write a packed value into the store of this host's node, or of its successor.

        is_gift: many of the same size follow one another, and what tells of this one is sent at once.
        """
        try:
            return self.write(oid, packed, owner, contained, is_gift)
        except NodeGone:
            return self.successor().store(oid, packed, owner, contained, is_gift)

    def successor(self) -> Values:
        """The store that takes the place of this one, which is waited for."""
        give_up_at = time.monotonic() + self.session.config.link_lost_after_s
        while self.session.values is self:
            self.session.check_open()
            if time.monotonic() > give_up_at:
                raise StoreFull("the node of this host is gone and was not started again")
            time.sleep(SUCCESSOR_LOOK_S)
        return self.session.values

    def write(
        self, oid: bytes, packed: codec.Packed, owner: str, contained: tuple[m.RefTo, ...] = (), is_gift: bool = False
    ) -> m.Stored:
        """Write a packed value into a segment of its own and tell the node."""
        nbytes = codec.layout_bytes(packed)
        session = self.session
        # The node counts what is warm here as ours: to fill it again needs no more room, so nobody has to be asked.
        segment = self.segments.reuse(oid.hex(), nbytes) if is_gift and session.values is self else None
        returned: m.Message = m.SpaceReturned(nbytes) if segment is None else m.PoolTrimmed(nbytes)
        if segment is None:
            segment = self._new_segment(oid, nbytes, is_gift and nbytes >= HOLLOW_BYTES_MIN)
        try:
            try:
                if segment.is_hollow:
                    codec.pour_object(segment.write, packed, oid.hex().encode())
                else:
                    codec.write_object(segment.view, packed, oid.hex().encode())
            except BaseException:
                segment.abort()
                raise
            session.at_point("object.before_seal", oid)
            file = segment.seal()
        except BaseException:
            session.endpoint.send(self.node, returned)
            raise
        session.endpoint.send(self.node, m.ObjectSealed(oid, nbytes, owner, file), not is_gift)
        session.at_point("object.after_seal", oid)
        if session.values is not self:
            raise NodeGone("the node was started again meanwhile")
        return m.Stored(nbytes, (self.node,), contained, arrays.kind_of(packed))

    def _new_segment(self, oid: bytes, nbytes: int, hollow: bool) -> Segment:
        """A segment in room that the node has given; raises StoreFull, OutOfDisk."""
        self.ask_space(nbytes)
        try:
            return self._create(oid, nbytes, hollow)
        except StoreFull:  # others use the host's shared memory too: the node looks, and makes room if it can
            self.session.endpoint.send(self.node, m.MemoryLacked())
        self.ask_space(nbytes)
        return self._create(oid, nbytes, hollow)

    def _create(self, oid: bytes, nbytes: int, hollow: bool) -> Segment:
        try:
            return self.segments.create(oid.hex(), nbytes, hollow)
        except BaseException as error:
            self.session.endpoint.send(self.node, m.SpaceReturned(nbytes))
            if isinstance(error, FileNotFoundError):
                raise NodeGone(str(error)) from error  # the folder went with its node
            raise

    def ask_space(self, nbytes: int) -> None:
        """Wait until the node has room; raises StoreFull or OutOfDisk when there will be none."""
        session = self.session
        is_main = threading.get_ident() == session.main_thread
        masked = session.masked
        number = next(self.requests)
        future: Future[m.SpaceGiven] = Future()
        self.asked[number] = future
        try:
            if session.dropped:
                session._drop()  # what is not needed any more makes room first
            session.check_open()
            if session.values is not self:
                raise NodeGone("the node was started again meanwhile")
            session.endpoint.send(self.node, m.SpaceAsked(number, nbytes))
            if is_main:
                session.masked = 0
                session.raise_pending()
            given = future.result()
        except BaseException:
            self.not_awaited[number] = nbytes
            if future.done():
                self.space_given(future.result())
            raise
        finally:
            if is_main:
                session.masked = masked
            self.asked.pop(number, None)
        if not given.granted and not given.kind:
            raise NodeGone(given.reason)
        if not given.granted:
            raise STORE_ERRORS.get(given.kind, StoreFull)(given.reason)

    def space_given(self, message: m.SpaceGiven) -> None:
        """The node's answer."""
        nbytes = self.not_awaited.pop(message.request, None)
        if nbytes is not None:
            if message.granted:
                self.session.endpoint.send(self.node, m.SpaceReturned(nbytes))
            return
        future = self.asked.get(message.request)
        if future is not None and not future.done():
            future.set_result(message)

    def give_up(self, reason: str) -> None:
        """The node that was asked, or this session, is gone: no answers will come."""
        for future in list(self.asked.values()):
            if not future.done():
                future.set_result(m.SpaceGiven(0, False, "", reason))

    def store_error(self, reason: str) -> FlowError:
        """The error of a node's reason text, which begins with its kind."""
        kind, _, text = reason.partition(": ")
        return STORE_ERRORS.get(kind, StoreFull)(text or reason)

    # --- durable values ---------------------------------------------------------------------------

    @property
    def durable(self) -> Durable:
        """Where durable values go."""
        return Durable(self.durable_url)

    def write_durable(self, oid: bytes, packed: codec.Packed) -> None:
        """Write the value to durable storage, complete or not at all; raises OutOfDisk, OSError."""
        view = memoryview(bytearray(codec.layout_bytes(packed)))
        codec.write_object(view, packed, oid.hex().encode())
        try:
            self._to_file(oid, view)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise OutOfDisk(f"durable storage does not take the value: {os.strerror(error.errno)}",
                            needed_bytes=view.nbytes, path=self.durable_url) from error

    def make_durable(self, oid: bytes) -> None:
        """Copy a stored value of this host to durable storage; raises OSError when it is not here."""
        if self.durable.exists(oid.hex()):
            return
        view = self.segments.open(oid.hex())
        if view is None:
            raise FileNotFoundError(f"object {short(oid)} is not in the store of this host")
        self._to_file(oid, view)

    def drop_durable(self, oid: bytes) -> None:
        """The durable copy is not needed any more."""
        self.durable.delete(oid.hex())

    def _to_file(self, oid: bytes, view: memoryview) -> None:
        store = self.durable
        store.make_folder()
        store.write(oid.hex(), view)

    def bring_back(self, command: c.RestoreDurable) -> None:
        """Bring a durable value back into the local store, in a thread of its own."""

        def work() -> None:
            reason = self.restore_durable(command.oid, command.url)
            self.session.step(s.DurableBack(command.oid, self.session.node, reason))

        threading.Thread(target=work, name="flowengine-restore", daemon=True).start()

    def write_behind(self, command: c.WriteDurable) -> None:
        """Copy a value to durable storage, in a thread of its own, and tell its owner."""

        def work() -> None:
            began, url, failure = time.perf_counter(), self.durable_url, ""
            try:
                self.make_durable(command.oid)
            except Exception as error:  # each file system has errors of its own
                url, failure = "", f"it could not be written to {url}: {error}"
            took_s = time.perf_counter() - began
            self.session.endpoint.send(command.owner, m.ObjectPersisted(command.oid, url, took_s, failure))

        threading.Thread(target=work, name="flowengine-persist", daemon=True).start()

    def restore_durable(self, oid: bytes, url: str = "") -> str:
        """Bring a durable value back into the local store; the reason when that fails."""
        try:
            blob = Durable(url or self.durable_url).read(oid.hex())
            self.ask_space(len(blob))
            segment = self.segments.create(oid.hex(), len(blob))
            segment.view[:] = blob
            file = segment.seal()
        except Exception as error:  # each file system has errors of its own
            return f"its durable copy could not be read: {error}"
        self.session.endpoint.send(self.session.node, m.ObjectSealed(oid, len(blob), self.session.address, file))
        return ""
