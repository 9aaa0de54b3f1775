"""Values in and out: small ones inside of messages, large ones in the store of the host. Shell, any thread."""

from __future__ import annotations

import itertools
import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core.ids import short
from flowengine.errors import EngineBug, FlowError, OutOfDisk, StoreFull, TaskError, traceback_text, unpack_error
from flowengine.objects import codec
from flowengine.objects.segments import Segments
from flowengine.refs import ObjectRef

if TYPE_CHECKING:
    from flowengine.runtime.session import Session

SUCCESSOR_LOOK_S = 0.02  # a restarted node listens after some tenths of a second
STORE_ERRORS: dict[str, type[FlowError]] = {"StoreFull": StoreFull, "OutOfDisk": OutOfDisk}


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
    """Remove the files of an actor's checkpoints."""
    newest = Path(command.path)
    actor = newest.name.partition("-")[0]
    for file in newest.parent.glob(f"{actor}-*"):
        file.unlink(missing_ok=True)


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

    def store(self, oid: bytes, packed: codec.Packed, owner: str, contained: tuple[m.RefTo, ...] = ()) -> m.Stored:
        """Write a packed value into the store of this host's node, or of its successor."""
        try:
            return self.write(oid, packed, owner, contained)
        except NodeGone:
            return self.successor().store(oid, packed, owner, contained)

    def successor(self) -> Values:
        """The store that takes the place of this one, which is waited for."""
        give_up_at = time.monotonic() + self.session.config.link_lost_after_s
        while self.session.values is self:
            self.session.check_open()
            if time.monotonic() > give_up_at:
                raise StoreFull("the node of this host is gone and was not started again")
            time.sleep(SUCCESSOR_LOOK_S)
        return self.session.values

    def write(self, oid: bytes, packed: codec.Packed, owner: str, contained: tuple[m.RefTo, ...] = ()) -> m.Stored:
        """Write a packed value into a segment of its own and tell the node."""
        nbytes = codec.layout_bytes(packed)
        self.ask_space(nbytes)
        session = self.session
        try:
            try:
                segment = self.segments.create(oid.hex(), nbytes)
            except FileNotFoundError as error:
                raise NodeGone(str(error)) from error  # the folder went with its node
            try:
                codec.write_object(segment.view, packed, oid.hex().encode())
            except BaseException:
                segment.abort()
                raise
            session.at_point("object.before_seal", oid)
            segment.seal()
        except BaseException:
            session.endpoint.send(self.node, m.SpaceReturned(nbytes))
            raise
        session.endpoint.send(self.node, m.ObjectSealed(oid, nbytes, owner))
        if session.values is not self:
            raise NodeGone("the node was started again meanwhile")
        return m.Stored(nbytes, (self.node,), contained)

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

    def durable_file(self, oid: bytes) -> tuple[Any, str]:
        """File system and path of a durable value."""
        fs, path = fsspec.core.url_to_fs(self.durable_url)
        return fs, f"{path}/{oid.hex()}"

    def write_durable(self, oid: bytes, packed: codec.Packed) -> None:
        """Write the value to durable storage; complete or not at all."""
        fs, path = self.durable_file(oid)
        fs.makedirs(os.path.dirname(path), exist_ok=True)
        nbytes = codec.layout_bytes(packed)
        view = memoryview(bytearray(nbytes))
        codec.write_object(view, packed, oid.hex().encode())
        self._to_file(fs, path, view)

    def make_durable(self, oid: bytes) -> None:
        """Copy a stored value of this host to durable storage; raises OSError when it is not here."""
        fs, path = self.durable_file(oid)
        if fs.exists(path):
            return
        view = self.segments.open(oid.hex())
        if view is None:
            raise FileNotFoundError(f"object {short(oid)} is not in the store of this host")
        fs.makedirs(os.path.dirname(path), exist_ok=True)
        self._to_file(fs, path, view)

    def drop_durable(self, oid: bytes) -> None:
        """The durable copy is not needed any more."""
        fs, path = self.durable_file(oid)
        if fs.exists(path):
            fs.rm(path)

    def _to_file(self, fs: Any, path: str, view: memoryview) -> None:
        """Complete or not at all."""
        part = f"{path}.part-{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
        with fs.open(part, "wb") as file:
            file.write(view)
        fs.mv(part, path)

    def restore_durable(self, oid: bytes) -> str:
        """Bring a durable value back into the local store; the reason when that fails."""
        fs, path = self.durable_file(oid)
        try:
            with fs.open(path, "rb") as file:
                blob = file.read()
            self.ask_space(len(blob))
            segment = self.segments.create(oid.hex(), len(blob))
            segment.view[:] = blob
            segment.seal()
        except (OSError, FlowError) as error:
            return f"its durable copy could not be read: {error}"
        self.session.endpoint.send(self.session.node, m.ObjectSealed(oid, len(blob), self.session.address))
        return ""
