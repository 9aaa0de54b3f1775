"""What the loops have in common: steps as they are done, progress where somebody waits, an end."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import flowengine as flow
from flowengine.actors import ActorHandle
from flowengine.errors import BadValue, CollectiveError, FlowError, StaleSession
from flowengine.options import whole

STEPS_MAX = 1 << 40
WORKERS_MAX = 100_000
CALL_S = 0.25  # how long a call of several steps should take: checkpoints fall between calls
AHEAD_CALLS = 2  # so that members need not wait for the program


class Trainer:
    """A loop that has begun; it ends with close(), or as a context manager."""

    def __init__(self, model: type) -> None:
        self.name = f"{model.__name__} {flow.record(lambda: uuid.uuid4().hex[:12])}"
        self.members: list[ActorHandle] = []
        self.over = ""  # why nothing more can be done

    def steps(self, count: int) -> Iterator[tuple[int, float]]:
        """Do so many more steps; gives the number and the mean loss of each, as they are done."""
        raise NotImplementedError

    def weights(self) -> Any:
        """The weights as they are now, as arrays of the caller's own."""
        raise NotImplementedError

    def run(self, count: int) -> list[float]:
        """Do so many more steps and show progress; gives the mean loss of each (nan: the model tells none)."""
        from flowengine.observe.bars import counted

        def label(step: tuple[int, float]) -> str:
            return "steps" if math.isnan(step[1]) else f"steps, loss {step[1]:.4g}"

        return [loss for _, loss in counted(self.steps(count), count, label)]

    def checked(self, count: int) -> int:
        """The number of steps, when steps can be done."""
        if self.over:
            raise BadValue(f"{self!r} does no more steps: {self.over}")
        return whole("steps", count, 0, STEPS_MAX)

    def pids(self) -> list[int]:
        """The processes of the members, by rank."""
        pids: list[int] = flow.get([member.pid.remote() for member in self.members])
        return pids

    def close(self) -> None:
        """End all members; twice is harmless."""
        self.over = self.over or "it was closed"
        for member in self.everybody():
            try:
                flow.kill(member)
            except StaleSession:
                pass  # they have ended with it
        self.members = []

    def everybody(self) -> list[ActorHandle]:
        """All actors of the loop."""
        return self.members

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {len(self.members)} workers)"

    def first_of(self, refs: Sequence[flow.ObjectRef]) -> Any:
        """The first value, when all are there."""
        return self.all_of(refs)[0]

    def all_of(self, refs: Sequence[flow.ObjectRef]) -> list[Any]:
        """All values; of errors the one that others follow from is raised, and the loop is over."""
        values, errors = ends_of(refs)
        if errors:
            self.fail(errors)
        return values

    def fail(self, errors: Sequence[FlowError]) -> NoReturn:
        """The loop is over."""
        cause = next((error for error in errors if not isinstance(error, CollectiveError)), errors[0])
        self.over = f"a step failed: {str(cause).splitlines()[0]}"
        raise cause


class Pace:
    """How many steps a call has: so many that it takes about CALL_S, unless the user has said it."""

    def __init__(self, steps_per_call: int | None) -> None:
        self.is_fixed = steps_per_call is not None
        self.steps = 1 if steps_per_call is None else whole("steps_per_call", steps_per_call, 1, STEPS_MAX)
        self.ended_s = time.monotonic()

    def chosen(self) -> int:
        """How many steps the next call has: the same when this code runs again, as it gets the results of then."""
        return self.steps if self.is_fixed else int(flow.record(lambda: self.steps))

    def begin(self) -> None:
        """Calls begin after a while without."""
        self.ended_s = time.monotonic()

    def ended(self, steps: int) -> None:
        """A call of so many steps has ended."""
        now = time.monotonic()
        took_s, self.ended_s = max(now - self.ended_s, 1e-6), now
        if not self.is_fixed:
            self.steps = max(1, min(2 * self.steps, round(steps * CALL_S / took_s)))


def ends_of(refs: Sequence[flow.ObjectRef]) -> tuple[list[Any], list[FlowError]]:
    """Values and errors, when all are there."""
    values, errors = [], []
    for ref in refs:
        try:
            values.append(flow.get(ref))
        except FlowError as error:
            errors.append(error)
    return values, errors


def ends_with(ref: flow.ObjectRef, kind: type[FlowError]) -> bool:
    """Whether a call ends with an error of this kind; waits for its end."""
    try:
        flow.get(ref)
    except FlowError as error:
        return isinstance(error, kind)
    return False
