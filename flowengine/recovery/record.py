"""What a replay needs to know of a task or an actor: what each process can tell, and how that is put together. Pure.

Every process answers with pieces of what its machine has in its books anyway. A piece holds values and pickled
functions as they travel between processes of a session, so it is read only from those and from files of the user's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ..core import messages as m
from ..core.ids import short
from ..errors import BadValue, shown_bytes

Choices = tuple[tuple[str, int, bytes], ...]
Answer = m.TaskDone | m.TaskFailed
SENT_BYTES_MAX = 256 << 20


class TaskTold(m.Message, frozen=True):
    """The owner of a task: what it was given and what came of it."""

    spec: m.TaskSpec
    function: bytes  # pickled
    values: tuple[m.Value | m.Pending, ...]  # of its inputs; Pending: not known any more
    results: tuple[m.Value | m.Pending, ...]
    error: bytes = b""
    kind: str = ""  # of the error
    run: int = 1
    recorded: Choices = ()
    children: tuple[tuple[bytes, m.Value], ...] = ()
    owner: str = ""  # of the results
    inline_bytes_max: int = 0  # larger arguments were put, which counts as a child
    ended: bool = True


class ChildrenTold(m.Message, frozen=True):
    """The process in which a task ran: the tasks that it submitted, as (id, name)."""

    parent: bytes
    children: tuple[tuple[bytes, str], ...]


class ActorTold(m.Message, frozen=True):
    """The owner of an actor: how it is made, from where a replay begins, and which calls it keeps itself."""

    spec: m.TaskSpec
    function: bytes
    values: tuple[m.Value | m.Pending, ...]
    run: int
    starts: tuple[m.Checkpoint, ...]  # where a replay may begin, oldest first; BEGINNING: with the constructor
    recorded: Choices
    calls: tuple[m.PushTask, ...]
    inline_bytes_max: int
    reach: int = 0  # calls that are known to have begun
    died_in: bytes = b""  # the call that ran when it died for good
    error: bytes = b""  # why it is dead


class CallsTold(m.Message, frozen=True):
    """The process of an actor: the calls since its last checkpoint in their order, each with its number."""

    actor: bytes
    numbers: tuple[int, ...]
    calls: tuple[m.PushTask, ...]
    answers: tuple[Answer | None, ...]
    recorded: Choices = ()  # those that the owner may not have yet
    older: bool = False  # the call that was asked for is covered by the checkpoint


class CallsSent(m.Message, frozen=True):
    """A caller of an actor that is dead: calls that it had sent, with the answers that it knows."""

    actor: bytes
    calls: tuple[m.PushTask, ...]
    answers: tuple[Answer | None, ...]


class ReplyTold(m.Message, frozen=True):
    """The process of an actor: what it answered to a call."""

    call: bytes
    answer: Answer


class TooLarge(m.Message, frozen=True):
    """In place of pieces that a process does not send: they would take so much."""

    size_bytes: int


Piece = TaskTold | ChildrenTold | ActorTold | CallsTold | CallsSent | ReplyTold | TooLarge


class Call(m.Record, frozen=True):
    """A call of an actor as it was run, with its answer if that is known."""

    number: int
    push: m.PushTask
    answer: Answer | None = None


class TaskRecord(m.Message, frozen=True):
    """All that is known of a task that has ended."""

    told: TaskTold
    names: tuple[tuple[bytes, str], ...] = ()  # of its children

    @property
    def is_complete(self) -> bool:
        """Whether every choice that it made is known: only a process that died may have kept one for itself."""
        return self.told.kind not in ("crash", "timeout")


class ActorRecord(m.Message, frozen=True):
    """All that is known of an actor since its last checkpoint; calls of a dead one are put in order at its replay."""

    told: ActorTold
    calls: tuple[Call, ...]
    sent: tuple[tuple[m.PushTask, Answer | None], ...] = ()
    recorded: Choices = ()

    @property
    def first(self) -> int:
        """The number of calls before the first that can be run."""
        return self.told.starts[0].calls

    def start(self, number: int) -> m.Checkpoint:
        """The last checkpoint before the call with this number."""
        return [start for start in self.told.starts if start.calls <= max(number, self.first)][-1]


Record = TaskRecord | ActorRecord

_PIECE: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Piece)
encode = msgspec.msgpack.Encoder().encode


def encoded(pieces: Iterable[Piece]) -> list[bytes]:
    """Pieces as a process sends them."""
    blobs = [encode(piece) for piece in pieces]
    size_bytes = sum(map(len, blobs))
    return [encode(TooLarge(size_bytes))] if size_bytes > SENT_BYTES_MAX else blobs


def decoded(blobs: Iterable[bytes]) -> list[Piece]:
    """Pieces as they were sent or lie in a file; raises BadValue for anything else, and when they were too large."""
    try:
        found: list[Piece] = [_PIECE.decode(blob) for blob in blobs]
    except (msgspec.MsgspecError, TypeError) as error:
        raise BadValue(f"this is not the record of a task or an actor: {error}") from error
    for piece in found:
        if isinstance(piece, TooLarge):
            raise BadValue(f"the record is too large to be replayed: {shown_bytes(piece.size_bytes)}")
    return found


def task_record(pieces: Sequence[Piece], task: bytes) -> TaskRecord | None:
    """The record of a task; raises BadValue while it has not ended."""
    told = [piece for piece in pieces if isinstance(piece, TaskTold) and piece.spec.id == task]
    if not told:
        return None
    # What is on disk of a task that failed may have values that are gone; it may also be of an earlier run of a job.
    best = max(told, key=lambda piece: (piece.ended, bool(piece.function), not piece.error, count_inline(piece)))
    name = f"task {best.spec.name} {short(task)}"
    if not best.ended:
        raise BadValue(f"{name} has not ended, so there is nothing to replay yet")
    if not best.function:
        raise BadValue(f"{name} cannot be replayed: its owner does not have its function any more")
    names: dict[bytes, str] = {}
    for piece in pieces:
        if isinstance(piece, ChildrenTold) and piece.parent == task:
            names.update(piece.children)
    return TaskRecord(best, tuple(names.items()))


def count_inline(told: TaskTold) -> int:
    """How many of the inputs are in the piece itself."""
    return sum([isinstance(value, m.Inline) for value in told.values])


def actor_of(pieces: Sequence[Piece]) -> bytes:
    """The actor that the pieces are about; empty when they are not about one."""
    for piece in pieces:
        if isinstance(piece, ActorTold):
            return piece.spec.id
        if isinstance(piece, CallsTold | CallsSent):
            return piece.actor
    return b""


def actor_record(pieces: Sequence[Piece], actor: bytes) -> ActorRecord | None:
    """The record of an actor; raises BadValue when it keeps none."""
    told = next((piece for piece in pieces if isinstance(piece, ActorTold) and piece.spec.id == actor), None)
    if told is None:
        return None
    life = told.spec.life
    if life is not None and life.recovery != "exactly_once" and not (told.error and not told.died_in):
        raise BadValue(f"actor {told.spec.name} cannot be replayed: its calls are kept only with "
                       'recovery="exactly_once"')
    if not told.function:
        raise BadValue(f"actor {told.spec.name} cannot be replayed: its owner does not have its class any more")
    calls: dict[int, Call] = {}
    recorded = dict.fromkeys(told.recorded)
    sent: list[tuple[m.PushTask, Answer | None]] = [(push, None) for push in told.calls]
    for piece in pieces:
        if isinstance(piece, CallsTold) and piece.actor == actor:
            for number, push, answer in zip(piece.numbers, piece.calls, piece.answers, strict=True):
                calls[number] = Call(number, push, answer)
            recorded.update(dict.fromkeys(piece.recorded))
        elif isinstance(piece, CallsSent) and piece.actor == actor:
            sent += zip(piece.calls, piece.answers, strict=True)
    if not told.error:
        sent = []  # its process lives and knows the order
        low = max(calls, default=told.starts[-1].calls)
        while low - 1 in calls:
            low -= 1
        starts = [start for start in told.starts if start.calls >= low] or told.starts[-1:]
        told = msgspec.structs.replace(told, starts=tuple(starts))
    return ActorRecord(told, tuple([calls[number] for number in sorted(calls)]), tuple(sent), tuple(recorded))


def choices_of(recorded: Choices, call: bytes = b"") -> dict[tuple[str, int], bytes]:
    """The choices of a task, or of one call among those of its actor."""
    found: dict[tuple[str, int], bytes] = {}
    for kind, number, payload in recorded:
        plain, _, rest = kind.partition(":")
        if plain != "turn" and rest.partition(":")[0] == call.hex():
            found[plain, number] = payload
    return found


def in_order(record: ActorRecord, frontiers: Mapping[bytes, int], last_caller: bytes, number: int) -> list[Call]:
    """The calls that a dead actor ran after so many, by its turns, up to the one in which it died."""
    lines = {(push.spec.caller_key, push.seq): (push, answer) for push, answer in record.sent}
    turns = {at: (payload[:-8], int.from_bytes(payload[-8:], "big"))
             for kind, at, payload in record.recorded if kind == "turn"}
    known_to = max(record.told.reach - 1, *turns, -1)
    fatal = next((call for call in lines.values() if call[0].spec.id == record.told.died_in), None)
    done, calls = dict(frontiers), list[Call]()
    while True:
        caller, seq = turns.get(number, (last_caller, done.get(last_caller, -1) + 1))
        push, answer = lines.get((caller, seq), (None, None))
        if number > known_to and fatal is None and (push is None or not push.seen):
            return calls
        if number > known_to and push is None:
            break
        done[caller], last_caller = seq, caller
        if push is not None:
            calls.append(Call(number, push, answer))
            if fatal is not None and push is fatal[0]:
                return calls
        number += 1
    return [*calls, Call(number, *fatal)] if fatal is not None else calls


def upto(record: ActorRecord, calls: Sequence[Call], count: int | None, call: bytes) -> list[Call]:
    """Those of the calls up to `call`, or until `count` have run in the actor's life."""
    name = f"actor {record.told.spec.name} {short(record.told.spec.id)}"
    if call:
        for place, one in enumerate(calls):
            if one.push.spec.id == call:
                return list(calls[: place + 1])
        raise BadValue(f"{name} cannot be replayed up to the call {short(call)}: {reach(record, calls)}")
    if count is None:
        return list(calls)
    if count < record.first or count > (calls[-1].number + 1 if calls else record.first):
        raise BadValue(f"{name} cannot be replayed up to its state after {count} calls: {reach(record, calls)}")
    return [one for one in calls if one.number < count]


def reach(record: ActorRecord, calls: Sequence[Call]) -> str:
    """From where to where a replay is possible, in words."""
    last = calls[-1].number + 1 if calls else record.first
    if not record.first:
        return f"its first {last} calls are known"
    return f"its checkpoint was taken after {record.first} calls, and the calls from there up to {last} are known"


def objects_of(record: Record) -> dict[bytes, m.Value]:
    """All values that the record holds, by the ids of their objects."""
    found: dict[bytes, m.Value] = {}
    given = [(record.told.spec, record.told.values), *[(push.spec, push.values) for push in pushes_of(record)]]
    for spec, values in given:
        for ref, value in zip(inputs_of(spec), values, strict=False):
            if not isinstance(value, m.Pending):
                found[ref.oid] = value
    if isinstance(record, TaskRecord):  # what lay in a store has gone with the task that used it
        found.update((oid, value) for oid, value in record.told.children if not isinstance(value, m.Stored))
    return found


def pushes_of(record: Record) -> list[m.PushTask]:
    """The calls in a record."""
    if isinstance(record, TaskRecord):
        return []
    return [*[call.push for call in record.calls], *[push for push, _ in record.sent]]


def inputs_of(spec: m.TaskSpec) -> tuple[m.RefTo, ...]:
    """The references whose values the code is given: arguments that are references, then large arguments as a whole."""
    return spec.deps if spec.args_object is None else (*spec.deps, spec.args_object)


def arguments_of(spec: m.TaskSpec) -> tuple[m.RefTo, ...]:
    """The same without those that were only waited for, to run beside them."""
    passed = spec.deps if spec.choice is None else spec.deps[: len(spec.deps) - spec.choice.unread]
    return passed if spec.args_object is None else (*passed, spec.args_object)


def owners_of(record: Record) -> dict[bytes, m.RefTo]:
    """Whom to ask about the inputs, and about what is inside of them."""
    specs = [record.told.spec, *[push.spec for push in pushes_of(record)]]
    return {ref.oid: ref for spec in specs for ref in (*inputs_of(spec), *spec.nested)}


def inputs_in(piece: Piece) -> dict[bytes, m.Value]:
    """The values in a piece that code is given."""
    given: list[tuple[m.TaskSpec, Sequence[m.Value | m.Pending]]] = []
    if isinstance(piece, TaskTold | ActorTold):
        given.append((piece.spec, piece.values))
    if isinstance(piece, ActorTold | CallsTold | CallsSent):
        given += [(push.spec, push.values) for push in piece.calls]
    found = {
        ref.oid: value
        for spec, values in given
        for ref, value in zip(inputs_of(spec), values, strict=False)
        if not isinstance(value, m.Pending)
    }
    return {**found, **dict(piece.children)} if isinstance(piece, TaskTold) else found


def with_values(piece: Piece, values: Mapping[bytes, m.Value]) -> Piece:
    """The piece with other values for the same objects: copies in place of what lies in a store."""

    def renewed(spec: m.TaskSpec, old: Sequence[m.Value | m.Pending]) -> tuple[m.Value | m.Pending, ...]:
        return tuple([values.get(ref.oid, value) for ref, value in zip(inputs_of(spec), old, strict=False)])

    def pushed(calls: Sequence[m.PushTask]) -> tuple[m.PushTask, ...]:
        return tuple([msgspec.structs.replace(push, values=renewed(push.spec, push.values)) for push in calls])

    if isinstance(piece, TaskTold):
        children = tuple([(oid, values.get(oid, value)) for oid, value in piece.children])
        return msgspec.structs.replace(piece, values=renewed(piece.spec, piece.values), children=children)
    if isinstance(piece, ActorTold):
        own = renewed(piece.spec, piece.values)
        return msgspec.structs.replace(piece, values=own, calls=pushed(piece.calls))
    if isinstance(piece, CallsTold | CallsSent):
        return msgspec.structs.replace(piece, calls=pushed(piece.calls))
    return piece


def named(pieces: Sequence[Piece], digits: str) -> list[bytes]:
    """The tasks, actors and calls among the pieces whose names begin with these digits."""
    names: dict[bytes, None] = {}
    for piece in pieces:
        if isinstance(piece, TaskTold | ActorTold):
            names[piece.spec.id] = None
        elif isinstance(piece, CallsTold | CallsSent):
            names.update(dict.fromkeys([piece.actor, *[push.spec.id for push in piece.calls]]))
        elif isinstance(piece, ReplyTold):
            names[piece.call] = None
    return [name for name in names if name.hex().startswith(digits)]

