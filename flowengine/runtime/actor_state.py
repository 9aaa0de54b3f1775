"""Checkpoints of the actor of this process: pickled between two calls, written in the background, read at its return.

A small state travels to the actor's owner. A large one becomes files: one for each large buffer, named by its content,
so that what did not change is not written again, and one for the rest, which names them.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import numpy as np

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.actor_saving import Snapshot, StateSaved, StateTaken
from flowengine.core.owner_estate import EstateTaken
from flowengine.errors import ActorDied, SerializationError
from flowengine.objects import codec, state
from flowengine.objects.copying import copy_buffer
from flowengine.recovery.durable import Durable, Torn
from flowengine.refs import ObjectRef

if TYPE_CHECKING:
    from flowengine.runtime.worker import WorkerSession

log = logging.getLogger(__name__)

IN_MESSAGE_BYTES_MAX = 4 << 20  # a larger state goes to files
OF_ONE_PROCESS = "memory:"  # URLs of what no other process sees: there large states travel to the owner too
OWN_FILE_BYTES_MIN = 64 << 10  # smaller buffers lie in the file that names the others
LENGTH = struct.Struct("<I")
READ_PATIENCE_S = (0.2, 1.0, 5.0)  # before a storage that fails is asked again

# Bytes of the pickle, and for each of its buffers either how many bytes follow here, or which file it is.
Parts = tuple[int, list[int | str]]


class Pickled(msgspec.Struct):
    """A state that is to be written; nobody changes its buffers."""

    calls: int
    packed: codec.Packed
    refs: tuple[m.RefTo, ...]
    cost_s: float


class Files:
    """The files of one actor's checkpoints, in a folder of their own. Used by one thread at a time.

    Their names begin with the number of the incarnation that wrote them. One that is fenced off but still runs removes
    nothing that it did not hear to be superseded, and nothing of later ones.
    """

    def __init__(self, store: Durable, incarnation: int) -> None:
        self.store = store
        self.incarnation = incarnation
        self.is_made = False
        self.of: dict[int, list[str]] = {}  # calls -> files of the checkpoint taken after them
        self.by_content: dict[str, str] = {}
        self.swept = False

    def write(self, calls: int, packed: codec.Packed) -> str:
        """Write a state, complete or not at all; the URL of its file."""
        if not self.is_made:
            self.store.make_folder()  # once: when it is removed, the actor has ended
            self.is_made = True
        parts: list[int | str] = []
        small: list[Any] = []
        for buffer in packed.buffers:
            content = written_out(buffer)
            if content.nbytes < OWN_FILE_BYTES_MIN:
                parts.append(content.nbytes)
                small.append(content)
            else:
                parts.append(self.keep(content))
        toc = msgspec.msgpack.encode((len(packed.payload), parts))
        name = f"{self.incarnation}-{calls}"
        self.store.write(name, LENGTH.pack(len(toc)), toc, packed.payload, *small)
        self.of[calls] = [name, *(part for part in parts if isinstance(part, str))]
        return f"{self.store.url}/{name}"

    def keep(self, content: memoryview) -> str:
        """The file with this content, written when there is none."""
        # 64 MB measured: sha1 0.08 s, blake2b 0.24 s; writing them 0.03 s into the cache of the system, 0.12 s to the
        # disk. So this saves the disk and the network, not the processor; comparing with a copy would double memory.
        digest = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        name = self.by_content.get(digest)
        if name is None or not self.store.exists(name):
            name = f"{self.incarnation}-{digest}"
            self.store.write(name, content)
            self.by_content[digest] = name
        return name

    def read(self, calls: int, name: str) -> tuple[memoryview, list[memoryview]]:
        """The pickle of a state and its buffers; raises OSError, Torn when the files are not what was written."""
        view = patiently(lambda: self.store.read(name))
        at = LENGTH.size + LENGTH.unpack_from(view)[0]
        payload_bytes, parts = msgspec.msgpack.decode(view[LENGTH.size : at], type=Parts)
        payload, at = view[at : at + payload_bytes], at + payload_bytes
        buffers: list[memoryview] = []
        for part in parts:
            if isinstance(part, str):
                buffers.append(patiently(lambda file=part: self.store.read(file)))  # type: ignore[misc]
            else:
                buffers.append(memoryview(bytearray(view[at : at + part])))  # where arrays may lie
                at += part
        files = [part for part in parts if isinstance(part, str)]
        self.of[calls] = [name, *files]
        self.by_content.update({file.partition("-")[2]: file for file in files})
        self.is_made = True
        return payload, buffers

    def forget(self, calls: int) -> None:
        """Remove what only checkpoints after fewer calls need, and what killed writers left."""
        if not any(number < calls for number in self.of) and self.swept:
            return
        self.of = {number: files for number, files in self.of.items() if number >= calls}
        needed = {file for files in self.of.values() for file in files}
        self.by_content = {digest: file for digest, file in self.by_content.items() if file in needed}
        self.store.delete(*[name for name in self.store.names() if name not in needed and self.may_remove(name)])
        self.swept = True

    def may_remove(self, name: str) -> bool:
        """Whether this or an earlier incarnation wrote the file."""
        number = name.partition("-")[0]
        return number.isdecimal() and int(number) <= self.incarnation


class ActorStates:
    """Saves and restores the actor that lives in this process."""

    def __init__(self, session: WorkerSession, push: m.PushTask, owner: str) -> None:
        self.session = session
        self.push = push
        self.id = push.spec.id
        self.owner = owner
        self.passed_over: list[tuple[int, str]] = []  # checkpoints that are bad: calls, and why
        self.coming: queue.SimpleQueue[Pickled | int] = queue.SimpleQueue()
        self.writer: threading.Thread | None = None
        self.opened: Files | None = None
        self.url = f"{session.settings.live_url}/actors/{self.id.hex()}"
        session.drive.perform[c.ForgetStates] = self.forget

    @property
    def files(self) -> Files:
        """Where large states of this actor go."""
        if self.opened is None:
            self.opened = Files(Durable(self.url), self.push.attempt)
        return self.opened

    # --- coming back ------------------------------------------------------------------------------------------

    def restored(self, kind: type) -> tuple[Any, Snapshot] | None:
        """The instance from the newest good checkpoint; None: there is none, and its constructor has to run."""
        if self.push.checkpoint is None:
            return None
        for checkpoint in filter(None, (self.push.checkpoint, self.push.fallback)):
            if checkpoint == m.BEGINNING:
                return None
            if not checkpoint.path:
                assert isinstance(checkpoint.value, m.Inline)
                return state.unpack_inline(checkpoint.value.blob, kind)
            try:
                self.url, _, name = checkpoint.path.rpartition("/")
                payload, buffers = self.files.read(checkpoint.calls, name)
            except (OSError, ImportError) as error:
                self.passed_over.append((checkpoint.calls, f"a checkpoint is bad, so the one before is used: {error}"))
            else:
                return state.unpack(payload, buffers, kind)
        self.give_up()

    def give_up(self) -> NoReturn:
        """All checkpoints are bad, and the calls before them are not held by anybody any more."""
        reasons = "; ".join(reason.partition(": ")[2] for _, reason in self.passed_over)
        raise ActorDied(f"none of its checkpoints can be used: {reasons}", who=self.push.spec.name,
                        what_next="nothing: it stays dead")

    # --- saving -----------------------------------------------------------------------------------------------

    def save(self, calls: int, instance: Any, kind: type) -> None:
        """Pickle the state between two calls; calls go on while a large one is written."""
        session, began = self.session, time.perf_counter()
        if not session.membership.saving(calls):
            session.step(StateSaved(calls, None, 0.0))  # the end of the next call asks again
            return
        try:
            machine = self.snapshot()
            packed = state.pack(state.saved(instance), machine, kind)
            refs = (*[ref.to() for ref in packed.refs if isinstance(ref, ObjectRef)], *machine.estate.refs())
            inline = packed.nbytes <= IN_MESSAGE_BYTES_MAX or self.url.startswith(OF_ONE_PROCESS)
            if not inline:
                packed.buffers = [held(buffer) for buffer in packed.buffers]
        except Exception as error:
            session.step(StateSaved(calls, None, 0.0, why_not(instance, error), not isinstance(error, MemoryError)))
            return
        if refs:
            session.step(s.Exported(refs, self.owner))
        session.step(EstateTaken())
        cost_s = time.perf_counter() - began
        if inline:
            session.at_point("actor.checkpoint.before_write")
            checkpoint = m.Checkpoint(calls, m.Inline(codec.to_inline(packed), refs))
            session.step(StateSaved(calls, checkpoint, time.perf_counter() - began))
            session.at_point("actor.checkpoint.after_write")
            return
        session.step(StateTaken(calls, self.url))
        self.put(Pickled(calls, packed, refs, cost_s))

    def snapshot(self) -> Snapshot:
        """What the machine needs to go on from here."""
        executor = self.session.executor
        assert executor is not None
        assert executor.host is not None
        with self.session.drive.lock:
            snapshot = executor.host.snapshot(self.seqs(), self.session.owner.estate())
        return msgspec.structs.replace(snapshot, holds=self.session.sharing.held_by(self.id))

    def seqs(self) -> tuple[tuple[bytes, int], ...]:
        """The numbers of this actor's next calls to others."""
        owner = self.session.owner
        found = {actor: seq for (actor, caller), seq in owner.seqs_before.items() if caller == self.id}
        for actor, target in owner.targets.items():
            line = target.lines.get(self.id)
            if line is not None:
                found[actor] = line.next_seq
        return tuple(found.items())

    def forget(self, command: c.ForgetStates) -> None:
        """The owner holds a newer checkpoint."""
        self.session.membership.checkpoint_kept(command.calls)
        if self.opened is not None:
            self.put(command.calls)

    def put(self, job: Pickled | int) -> None:
        """Have the writer do it."""
        if self.writer is None:
            self.writer = threading.Thread(target=self.write_all, name="flowengine-checkpoints", daemon=True)
            self.writer.start()
        self.coming.put(job)

    def write_all(self) -> None:
        """The writer: one thing after the other until the process ends."""
        while True:
            job = self.coming.get()
            if isinstance(job, Pickled):
                self.write(job)
                continue
            try:
                self.files.forget(job)
            except OSError as error:  # the next one tries again
                self.files.swept = False
                log.warning("old checkpoints in %s cannot be removed: %s", self.url, error)

    def write(self, job: Pickled) -> None:
        session, began_s = self.session, time.thread_time()
        session.at_point("actor.checkpoint.before_write")
        try:
            path = self.files.write(job.calls, job.packed)
        except (OSError, ImportError) as error:
            failure = f"a checkpoint cannot be written, and the next is tried as usual: {error}"
            session.step(StateSaved(job.calls, None, 0.0, failure))
            return
        cost_s = job.cost_s + time.thread_time() - began_s
        session.step(StateSaved(job.calls, m.Checkpoint(job.calls, m.Inline(b"", job.refs), path), cost_s))
        session.at_point("actor.checkpoint.after_write")


def held(buffer: memoryview | codec.ArrowStream) -> memoryview | codec.ArrowStream:
    """The buffer as it is now, whatever its owner does from now on."""
    if isinstance(buffer, codec.ArrowStream) or isinstance(buffer.obj, bytes):
        return buffer  # cannot change
    target = np.empty(buffer.nbytes, np.uint8).data
    copy_buffer(target, buffer)
    return target


def written_out(buffer: memoryview | codec.ArrowStream) -> memoryview:
    """The bytes of a buffer."""
    if not isinstance(buffer, codec.ArrowStream):
        return buffer
    target = memoryview(bytearray(buffer.nbytes))
    buffer.write_into(target)
    return target


def patiently(read: Callable[[], memoryview]) -> memoryview:
    """Read; a storage that does not answer is asked again, one that has no good file is not."""
    for wait_s in READ_PATIENCE_S:
        try:
            return read()
        except (Torn, FileNotFoundError):
            raise
        except OSError:
            time.sleep(wait_s)
    return read()


def why_not(instance: Any, error: Exception) -> str:
    """Why there is no checkpoint, and what the author of the class can do."""
    name = type(instance).__qualname__
    advice = 'give the class __flow_save__ and __flow_load__, or say recovery="restart"'
    try:
        kept = state.saved(instance)
    except Exception as raised:
        why = f"{name}.__flow_save__ raised {type(raised).__name__}: {raised}"
        return f"no checkpoints are taken, since {why}. Calls are kept instead"
    culprit = codec.explain_unpicklable(kept)
    reason = error if isinstance(error, SerializationError) else f"{type(error).__name__}: {error}"
    why = f"{name}{culprit} ({reason})"
    return f"no checkpoints are taken, since its state cannot be pickled: {why}. Calls are kept instead; else {advice}"
