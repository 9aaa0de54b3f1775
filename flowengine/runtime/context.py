"""What a session knows of the code that runs in it, and the questions that it has asked others."""

from __future__ import annotations

import concurrent.futures
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flowengine.collectives.speeds import Speed
from flowengine.core import messages as m
from flowengine.core.ids import child_id, task_of
from flowengine.core.owner_state import REACHED_OUT
from flowengine.errors import BadValue, FlowError
from flowengine.runtime.link import Endpoint


class Uncounted(Iterator[int]):
    """In place of a context's children while `flow.record` runs a function; other threads of the code count on."""

    def __init__(self, children: Iterator[int]) -> None:
        self.children = children
        self.thread = threading.get_ident()

    def __next__(self) -> int:
        if threading.get_ident() == self.thread:
            raise BadValue("a function that flow.record runs cannot submit, put or choose anything: a run after a "
                           "crash does not call it again, and would take what comes later for that; do it outside, "
                           "where it is the same in every run without flow.record")
        return next(self.children)


class Context:
    """The task whose code runs here (in the driver: the program itself)."""

    # There is one for each call: what is seldom said of one is said here for all.
    heir = ""  # who is asked about what the code owns when this process is dead; see RefTo
    driver = ""  # see TaskSpec
    push: m.PushTask | None = None
    actor: bytes | None = None  # the actor whose method this is
    is_job = False  # the program itself, as a resumable job: its choices are journaled
    is_parent = False  # the machine knows that this task has children or made choices
    environment: m.Environment | None = None  # children have it too
    began_us = 0  # on this host's monotonic clock
    shared = 0  # answers about locks, queues and the like that a run after a crash would get again
    shared_bytes = 0
    own_actors: frozenset[bytes] = frozenset()  # that nobody else has unless the task hands them on
    has_reached_out = False

    def __init__(self, task: bytes, name: str = "", attempt: int = 1, caller: str = "", depth: int = 0) -> None:
        self.task = task
        self.name = name
        self.attempt = attempt
        self.caller = caller
        self.depth = depth
        self.children: Iterator[int] = itertools.count()
        self.choices: dict[str, itertools.count[int]] = {}
        self.recorded: dict[tuple[str, int], bytes] = {}
        self.noted: list[tuple[str, int, bytes]] = []
        self.caller_key = task  # who calls actors, by a name that is the same when it runs again

    def new_child(self) -> bytes:
        """The name of the next child of the task."""
        return child_id(self.task, next(self.children))

    def is_recording(self) -> bool:
        """Whether this thread runs a function of `flow.record`."""
        return type(self.children) is Uncounted and self.children.thread == threading.get_ident()

    def outside(self, function: Callable[[], Any]) -> Any:
        """Run a function that asks the outside world: it has no children and makes no choices."""
        children = self.children
        self.children = Uncounted(children)
        try:
            return function()
        finally:
            self.children = children

    def reach_out(self) -> None:
        """The task does what its result does not show: a program that is run again has to have it done again."""
        if self.caller and self.actor is None and not self.has_reached_out:
            self.has_reached_out = True
            self.noted.append((*REACHED_OUT, b""))

    def uses_actor(self, spec: m.TaskSpec) -> None:
        """The code makes or calls an actor; one of its own ends with it."""
        if spec.life is not None and not spec.life.name and not spec.life.detached:
            self.own_actors |= {spec.id}
        elif spec.actor is None or task_of(spec.actor.oid) not in self.own_actors:
            self.reach_out()

    def next_choice(self, kind: str) -> int:
        """How many choices of this kind the task made before."""
        if self.is_recording():
            next(self.children)
        return next(self.choices.setdefault(kind, itertools.count()))


def wait_name(oids: Sequence[bytes]) -> int:
    """The number of a wait among the choices of its code: the same when the code runs again."""
    return int.from_bytes(oids[0][:7], "big")


class Courses:
    """Courses that code here has ordered of nodes, and how fast the ways to nodes were."""

    def __init__(self) -> None:
        self.open: dict[bytes, queue.SimpleQueue[tuple[str, Any]]] = {}
        self.speeds: dict[str, Speed] = {}

    def told(self, peer: str, message: Any) -> None:
        """News of one of them."""
        news = self.open.get(message.op)
        if news is not None:
            news.put((peer, message))

    def lost(self, peers: Sequence[str], reason: str) -> None:
        """Who is gone may have had a part in any."""
        for news in list(self.open.values()):
            for peer in peers:
                news.put((peer, m.PeerLost(peer, reason)))


class Questions:
    """Questions under way: asked by any thread, answered on the loop thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.open: dict[int, tuple[str, concurrent.futures.Future[Any]]] = {}
        self.numbers = itertools.count(1)

    def next(self) -> int:
        """A number for a question."""
        return next(self.numbers)

    def ask(self, question: m.Asked, to: str, timeout_s: float) -> Any:
        """Send it and wait for the answer; raises FlowError when none comes in time."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.open[question.request] = to, future
        self.endpoint.send(to, question)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise FlowError(f"no answer about {question.topic} from {to} within {timeout_s:g} s") from None
        finally:
            self.open.pop(question.request, None)

    def answered(self, message: m.Answered) -> None:
        """An answer came; too late is harmless."""
        _, future = self.open.get(message.request, ("", None))
        if future is not None and not future.done():
            future.set_result(message.content)

    def lost(self, peer: str, reason: str) -> None:
        """Who is gone does not answer."""
        for to, future in list(self.open.values()):
            if to == peer and not future.done():
                future.set_exception(FlowError(f"{peer} is gone: {reason}"))
