"""Remote functions: what @flow.remote makes of a function, and how a call becomes a task."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import cloudpickle

from .core.ids import function_id, object_id
from .core.messages import RefTo, TaskSpec
from .errors import BadType, SerializationError, StaleSession
from .objects import codec
from .options import TaskOptions, shape, task_options
from .refs import NOWHERE, Current, ObjectRef, StreamOfRefs, checked, no_session
from .runtime.environment import environment_of, inherited
from .scheduling.placing import Asked, asked_by, keyed, owns
from .scheduling.policies import Policy, check_text, turn_of
from .scheduling.resources import program_of
from .slots import Slot

if TYPE_CHECKING:
    from .runtime.session import Session

STREAM = -1
PATH = re.compile(r"(?<=cannot be pickled: )\[([01])\]\[")  # its beginning
TURNS_KEPT_MAX = 1_000  # of a policy that gives each call another one


class Plan:
    """What all calls of a function with the same options in one session share."""

    def __init__(self, session: Session, function: Callable[..., Any], options: TaskOptions, name: str) -> None:
        self.session = session
        try:
            packed = codec.pack(function)
        except SerializationError as error:
            raise SerializationError(f"function {name}: {error}") from error
        self.blob: bytes | None = codec.to_inline(packed)
        self.function = function_id(self.blob)
        self.refs = [ref for ref in packed.refs if isinstance(ref, ObjectRef)]  # alive as long as the plan is
        self.nested = tuple([ref.to() for ref in self.refs])
        self.name = check_text("the name of a task, which is that of its function unless `name` is given,",
                               options.name or name)
        self.num_returns = STREAM if options.num_returns == "stream" else int(options.num_returns)
        self.shape = shape(options)
        self.policy: Policy | None = None  # one that is asked for each call
        self.asks: dict[Policy, tuple[Asked, bool]] = {}  # of its turns, and whether they ask for what programs make
        self.asked = Asked(self.shape)
        self.keyed: tuple[Asked, str, Asked] | None = None  # what was asked, of which program, with its keys
        if options.placement is not None and session.places:
            self.asked = self._asked_by(options.placement)
            if options.placement.hooked():
                self.policy = options.placement
        self.owns = owns(self.asked)
        self.max_retries = options.max_retries
        self.retry_exceptions = packed_exceptions(options.retry_exceptions)
        self.timeout_s = options.timeout_s or 0.0
        self.priority = options.priority
        self.environment = environment_of(options.env_vars, options.working_dir)

    def spec(
        self, args: bytes, whole: RefTo | None, deps: tuple[RefTo, ...], nested: tuple[RefTo, ...]
    ) -> TaskSpec:
        """The lineage entry of one call."""
        context, asked = self.session.context, self.asked
        if self.owns:
            asked = self.of_program(asked, context.driver)
        if asked.unread:
            deps = (*deps, *[ref.to() for ref in asked.unread])
        environment = context.environment
        if self.environment is not None:
            environment = inherited(self.environment, environment)
        return TaskSpec(
            context.new_child(), self.function, self.name, args, whole, deps,
            self.nested + nested if nested else self.nested, self.num_returns, asked.shape, asked.placement,
            self.max_retries, self.retry_exceptions, self.timeout_s, self.priority, context.depth, context.task,
            driver=context.driver, choice=asked.choice, environment=environment,
        )

    def of_program(self, asked: Asked, driver: str) -> Asked:
        """The same, with names that programs make as those of the program for which this code runs."""
        job = program_of(driver, self.session.address)
        if self.keyed is None or self.keyed[0] is not asked or self.keyed[1] != job:
            self.keyed = asked, job, keyed(asked, job)
        return self.keyed[2]

    def _asked_by(self, policy: Policy) -> Asked:
        asked = asked_by(policy, self.shape)
        if asked.choice is not None and asked.choice.share:
            job = program_of(self.session.context.driver, self.session.address)
            self.session.owner.placing.shares.check(job, asked.choice.share)
        return asked

    def take_turn(self) -> Policy:
        """Before a call whose policy wants to be asked: what it asks for this time."""
        assert self.policy is not None
        mine = turn_of(self.policy, self)
        known = self.asks.get(mine)
        if known is None:
            if len(self.asks) >= TURNS_KEPT_MAX:
                self.asks.clear()
            asked = self._asked_by(mine)
            known = self.asks[mine] = asked, owns(asked)
        self.asked, self.owns = known
        return mine


class RemoteFunction:
    """A function whose calls run in workers: f.remote(...) gives a reference at once; f.options(...) sets options."""

    def __init__(self, function: Callable[..., Any], options: TaskOptions) -> None:
        self._function = function
        self._options = options
        self._plan: Plan | None = None
        functools.update_wrapper(self, function, updated=())
        self._name = getattr(function, "__qualname__", None) or type(function).__name__
        self._name = self._name.rpartition("<locals>.")[2]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise BadType(f"{self._name} is a remote function: call {self._name}.remote(...)")

    def options(self, **given: Any) -> RemoteFunction:
        """The same function with other options; raises BadValue or BadType at once."""
        return RemoteFunction(self._function, task_options(given, self._options))

    def remote(self, /, *args: Any, **kwargs: Any) -> Any:
        """Submit one call: never blocks. A reference; a list of n; None for 0; an iterator for a stream."""
        plan, turn, spec, held = self._packed(args, kwargs)
        session = plan.session
        session.submit(spec, plan.blob)
        if turn is not None:
            turn.submitted(session, object_id(spec.id, 0))
        del held  # references to large arguments live until the owner has noted the task
        return results_of(session, spec)

    def _later(self, /, *args: Any, **kwargs: Any) -> Callable[[], ObjectRef]:
        """One call with the arguments as they are now; what is given submits it, once, from any thread."""
        plan, turn, spec, held = self._packed(args, kwargs)
        session = plan.session
        ref_parts = object_id(spec.id, 0), session.endpoint.address, session.context.heir

        def submit(_: object = (args, kwargs, held)) -> ObjectRef:  # references in the arguments live until then
            session.check_open()
            session.submit(spec, plan.blob)
            if turn is not None:
                turn.submitted(session, ref_parts[0])
            return ObjectRef(session, *ref_parts)

        return submit

    def _took_s(self) -> float:
        """What its calls took in workers, smoothed; without end when it is not known."""
        plan = self._plan
        cost = None if plan is None else plan.session.owner.costs.get(plan.function)
        return math.inf if cost is None or cost.run_us < 0 else cost.run_us / 1e6

    def _packed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, Policy | None, TaskSpec, Any]:
        """What a call is made of: its plan, the turn of its policy, its task, and what lives until it is submitted."""
        session = Current.session or start_default()
        plan = self._plan
        if plan is None or plan.session is not session:
            plan = self._plan = Plan(session, self._function, self._options, self._name)
        turn = plan.take_turn() if plan.policy is not None else None
        if args or kwargs:
            return plan, turn, *pack_call(plan, args, kwargs)
        return plan, turn, plan.spec(b"", None, (), ()), None

    def __repr__(self) -> str:
        return f"RemoteFunction({self._name})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None}


def results_of(session: Session, spec: TaskSpec) -> Any:
    """What the caller of a submitted task gets: a reference, a list of them, an iterator, or None."""
    owner, heir = session.endpoint.address, session.context.heir
    if spec.num_returns == 1:
        return ObjectRef(session, object_id(spec.id, 0), owner, heir)
    if spec.num_returns == STREAM:
        return StreamOfRefs(session, spec.id)
    if spec.num_returns == 0:
        return None
    return [ObjectRef(session, object_id(spec.id, index), owner, heir) for index in range(spec.num_returns)]


def start_default() -> Session:
    """The first remote call without init starts the default local engine."""
    from . import api

    if Current.forked:
        raise StaleSession(no_session())
    api.init()
    assert Current.session is not None
    return Current.session


def session_of(origin: Session | None, thing: object) -> Session:
    """The session of now for a handle that belongs to it, or to none yet: then the default one if there is none.

    Raises StaleSession when the handle belongs to another.
    """
    session = Current.session
    if origin is None:
        return session or start_default()
    if session is None or session.origin is not origin:
        ended = NOWHERE.why if origin is NOWHERE else "its session has ended: make it anew"
        raise StaleSession(f"{thing!r}: {no_session() if Current.forked else ended}")
    return session


class Packs(Protocol):
    """What a call is packed for: a function's plan, or a method of an actor."""

    session: Session
    name: str

    def spec(
        self, args: bytes, whole: RefTo | None, deps: tuple[RefTo, ...], nested: tuple[RefTo, ...]
    ) -> TaskSpec:
        """The lineage entry of the call."""


def pack_call(plan: Packs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[TaskSpec, Any]:
    """The task of a call: references at the top become dependencies, the rest is pickled, large ones are stored."""
    deps: list[RefTo] = []
    seen: dict[bytes, int] = {}

    def slot(ref: ObjectRef) -> Slot:
        checked(ref)
        index = seen.get(ref.oid)
        if index is None:
            index = seen[ref.oid] = len(deps)
            deps.append(ref.to())
        return Slot(index)

    if has_refs(args):
        args = tuple([slot(arg) if isinstance(arg, ObjectRef) else arg for arg in args])
    if kwargs and has_refs(kwargs.values()):
        kwargs = {name: slot(arg) if isinstance(arg, ObjectRef) else arg for name, arg in kwargs.items()}
    if not kwargs and len(deps) == len(args):
        return plan.spec(b"", None, tuple(deps), ()), None  # nothing but references, each once
    try:
        packed = codec.pack((args, kwargs))
    except SerializationError as error:
        raise SerializationError(f"arguments of {plan.name}: {named_path(str(error))}") from error
    nested = tuple([ref.to() for ref in packed.refs if isinstance(ref, ObjectRef)]) if packed.refs else ()
    session = plan.session
    if packed.nbytes <= session.config.inline_bytes_max:
        return plan.spec(codec.to_inline(packed), None, tuple(deps), nested), None
    whole = session.put_packed(packed)
    return plan.spec(b"", whole.to(), tuple(deps), nested), whole


def has_refs(values: Iterable[Any]) -> bool:
    """Whether one of the values is a reference; every call asks, and `any` of a generator takes four times as long."""
    for value in values:
        if isinstance(value, ObjectRef):
            return True
    return False


def named_path(text: str) -> str:
    """The codec's path into (args, kwargs), if the text tells one, in the words of the call."""
    return PATH.sub(lambda found: ("argument [", "keyword argument [")[int(found[1])], text, count=1)


def packed_exceptions(wanted: bool | tuple[type[BaseException], ...]) -> bytes:
    """retry_exceptions as it travels."""
    if wanted is False or wanted == ():
        return b""
    if wanted is True:
        return b"*"
    return bytes(cloudpickle.dumps(wanted))


def remote_function(function: Any, given: dict[str, Any]) -> RemoteFunction:
    """What the decorator makes; raises BadType for what is no function."""
    options = task_options(given)
    if isinstance(function, RemoteFunction):
        raise BadType(f"{function!r} is remote already; use .options(...)")
    if not callable(function):
        raise BadType(f"only functions can be remote, not {function!r}")
    made = RemoteFunction(function, options)
    if is_async(function):
        raise BadType(f"{made._name} is an async function: a task is a plain function (it may call asyncio.run)")
    return made


def is_async(function: Any) -> bool:
    """Whether calls of it are for an event loop."""
    ways = (function, type(function).__call__)
    return any(inspect.iscoroutinefunction(way) or inspect.isasyncgenfunction(way) for way in ways)
