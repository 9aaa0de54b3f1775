"""Remote classes, handles of actors, and the verbs on them."""

from __future__ import annotations

import functools
import inspect
import time
from typing import TYPE_CHECKING, Any

import msgspec

from .core import messages as m
from .core.ids import TASK_ID_BYTES, object_id
from .errors import ActorNotFound, BadType, BadValue, FlowError
from .functions import STREAM, Plan, pack_call, results_of, start_default
from .objects import codec
from .options import ActorOptions, TaskOptions, actor_options, task_options
from .refs import Current, ObjectRef, checked, current_session
from .scheduling.policies import check_text

if TYPE_CHECKING:
    from .runtime.session import Session

MADE_S_MAX = 1.0  # from the entry of a name to the news that its actor is made
OPERATORS = ("__call__", "__contains__", "__delitem__", "__getitem__", "__len__", "__setitem__")  # are methods as well
METHOD_OPTIONS = ("num_returns", "timeout_s", "name")


class ActorClass:
    """A class whose instances live in processes of their own: C.remote(...) gives a handle at once."""

    def __init__(self, cls: type, options: ActorOptions) -> None:
        for name in (cls.__name__, *methods_of(cls)):
            check_text("the name of an actor's class or method", name)
        self._class = cls
        self._options = options
        self._plan: Plan | None = None
        self.__name__ = cls.__name__
        functools.update_wrapper(self, cls, updated=())  # text and signature are those of the class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise BadType(f"{self.__name__} is a remote class: call {self.__name__}.remote(...)")

    def options(self, **given: Any) -> ActorClass:
        """The same class with other options; raises BadValue or BadType at once."""
        return ActorClass(self._class, actor_options(given, self._options))

    def remote(self, *args: Any, **kwargs: Any) -> ActorHandle:
        """Make an actor; its constructor runs in its own process. With a name that is taken: BadValue."""
        session = Current.session or start_default()
        options = self._options
        if options.get_if_exists and not options.name:
            raise BadValue("get_if_exists needs the name of the actor")
        if options.name and options.get_if_exists:
            try:
                found = get_actor(options.name)
            except ActorNotFound:
                pass  # then it is made
            else:
                session.context.new_child()  # a run that comes again counts on from here, whether it finds it or not
                return found
        plan = self._plan
        if plan is None or plan.session is not session:
            task = msgspec.structs.replace(options.task, num_cpus=0.0)  # an actor that waits for calls uses none
            plan = self._plan = Plan(session, self._class, task, self.__name__)
        turn = plan.take_turn() if plan.policy is not None else None
        spec, held = pack_call(plan, args, kwargs) if args or kwargs else (plan.spec(b"", None, (), ()), None)
        life = m.ActorLife(
            options.recovery, options.checkpoint, options.max_restarts, options.max_concurrency, options.detached,
            options.name, any(is_coroutine(member) for member in vars_of(self._class).values()),
        )
        check_promise(self.__name__, life)
        context = session.context
        spec = msgspec.structs.replace(
            spec, life=life, num_returns=1, name=self.__name__, max_retries=-1, caller_key=context.caller_key,
        )  # fmt: skip
        owner = context.driver.partition(" ")[0] or session.address
        ref = ObjectRef(session, object_id(spec.id, 0), owner, m.HANDLE)
        handle = ActorHandle(ref, self.__name__, methods_of(self._class))
        if options.name and not claim(session, options.name, handle, spec):
            if options.get_if_exists:
                return get_actor(options.name)  # another was faster
            raise BadValue(f"there is an actor with the name {options.name!r} already")
        session.submit(spec, plan.blob)
        if turn is not None:
            turn.submitted(session, ref.oid)
        del held
        return handle

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self._class,)  # who inherits from a remote class inherits from the class

    def __repr__(self) -> str:
        return f"ActorClass({self.__name__})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None}


def check_promise(name: str, life: m.ActorLife) -> None:
    """Refuse what cannot be kept: with several threads nobody knows in which order they touched the state."""
    if life.recovery == "exactly_once" and life.max_concurrency > 1 and not life.is_async:
        raise BadValue(
            f"{name}: max_concurrency={life.max_concurrency} runs methods in threads, whose order cannot be repeated, "
            'so recovery="exactly_once" cannot be promised: use recovery="restart" or "none"'
        )


def is_coroutine(member: Any) -> bool:
    """Whether calls of the method are for an event loop."""
    return inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)


def vars_of(cls: type) -> dict[str, Any]:
    """Members of a class and its bases."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base is not object:
            found.update(vars(base))
    return found


def methods_of(cls: type) -> tuple[str, ...]:
    """Names of the methods that a handle offers."""
    found = vars_of(cls).items()
    return tuple(
        name
        for name, member in found
        if (not name.startswith("__") or name in OPERATORS)
        and (callable(member) or isinstance(member, staticmethod | classmethod))
    )


class ActorHandle:
    """A reference to an actor; its attributes are methods: a.method.remote(...). It ends with the last handle."""

    __slots__ = ("__weakref__", "_methods", "_name", "_ref")

    def __init__(self, ref: ObjectRef, name: str, methods: tuple[str, ...]) -> None:
        self._ref = ref
        self._name = name
        self._methods: dict[str, CallPlan | None] = dict.fromkeys(methods)

    def __getattr__(self, name: str) -> ActorMethod:
        if name not in self._methods:
            known = ", ".join(self._methods) or "none"
            raise AttributeError(f"actor {self._name} has no method {name!r}; it has {known}")
        return ActorMethod(self, name, DEFAULTS)

    def __dir__(self) -> list[str]:
        return ["actor_id", *self._methods]

    @property
    def actor_id(self) -> str:
        """The actor's name as hex digits."""
        return self._ref.oid[:TASK_ID_BYTES].hex()

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorHandle, (self._ref, self._name, tuple(self._methods))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and other._ref == self._ref

    def __hash__(self) -> int:
        return hash(self._ref)

    def __repr__(self) -> str:
        return f"ActorHandle({self._name} {self.actor_id[:12]})"


DEFAULTS = task_options({})


class ActorMethod:
    """A method of an actor: .remote(...) submits a call, .options(...) changes its options."""

    __slots__ = ("_handle", "_name", "_options")

    def __init__(self, handle: ActorHandle, name: str, options: TaskOptions) -> None:
        self._handle = handle
        self._name = name
        self._options = options

    def __repr__(self) -> str:
        return f"ActorMethod({self._handle._name}.{self._name})"

    def options(self, **given: Any) -> ActorMethod:
        """num_returns, timeout_s, name."""
        for option in given:
            if option not in METHOD_OPTIONS:
                raise BadValue(f"a call has no option {option!r}; it has {', '.join(METHOD_OPTIONS)}")
        return ActorMethod(self._handle, self._name, task_options(given, self._options))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise BadType(f"{self._name} is a method of an actor: call .{self._name}.remote(...)")

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Submit one call; calls of one caller run in the order of their submission."""
        handle = self._handle
        session = checked(handle._ref, handle)
        plan = handle._methods[self._name] if self._options is DEFAULTS else None
        if plan is None or plan.session is not session:
            plan = CallPlan(session, handle, self._name, self._options)
            if self._options is DEFAULTS:
                handle._methods[self._name] = plan
        spec, held = pack_call(plan, args, kwargs) if args or kwargs else (plan.spec(b"", None, (), ()), None)
        session.submit(spec, None)
        del held
        return results_of(session, spec)


class CallPlan:
    """What the calls of a method with the same options through one handle share."""

    def __init__(self, session: Session, handle: ActorHandle, method: str, options: TaskOptions) -> None:
        self.session = session
        self.actor = handle._ref.to()
        self.method = method.encode()
        self.name = options.name or f"{handle._name}.{method}"
        self.num_returns = STREAM if options.num_returns == "stream" else int(options.num_returns)
        self.timeout_s = options.timeout_s or 0.0

    def spec(
        self, args: bytes, whole: m.RefTo | None, deps: tuple[m.RefTo, ...], nested: tuple[m.RefTo, ...]
    ) -> m.TaskSpec:
        """The entry of the call."""
        context = self.session.context
        return m.TaskSpec(
            context.new_child(), self.method, self.name, args, whole, deps, nested, self.num_returns, (), (), 0, b"",
            self.timeout_s, 0.0, context.depth, context.task, self.actor, context.caller_key,
        )


def claim(session: Session, name: str, handle: ActorHandle, spec: m.TaskSpec) -> bool:
    """Enter the name at the head; False when another actor has it."""
    blob = codec.to_inline(codec.pack((handle._name, tuple(handle._methods))))
    ref = handle._ref
    entry = [spec.id.hex(), blob, ref.oid, ref.owner, ref.heir]
    while not session.ask_head("name.claim", [name, entry]):
        known = session.ask_head("name.get", name)
        if known is not None and not is_gone(session, known[2], known[3]):
            return False
        if known is not None:  # its program has died with it, and could not give the name back
            session.ask_head("name.drop", [name, known[0]])
    return True


def is_gone(session: Session, oid: bytes, owner: str) -> bool:
    """Whether a named actor's program has ended, or whoever entered the name has died before it made the actor."""
    actor = oid[:TASK_ID_BYTES]
    end = time.monotonic() + MADE_S_MAX
    while not is_known(session, actor, owner):
        if time.monotonic() > end or owner in session.owner.dead:
            return True
        time.sleep(MADE_S_MAX / 20)
    return False


def is_known(session: Session, actor: bytes, owner: str) -> bool:
    """Whether the actor's owner has it, or may have it and does not answer."""
    if owner == session.address:
        return session.owner.has_actor(actor)
    try:
        return bool(session.ask(owner, "actor_known", actor, scope="local", timeout_s=session.config.suspect_after_s))
    except FlowError:
        return owner not in session.owner.dead


def get_actor(name: str) -> ActorHandle:
    """The handle of a named actor; raises ActorNotFound."""
    if not isinstance(name, str) or not name:
        raise BadType(f"an actor's name is a string, not {name!r}")
    check_text("an actor's name", name)
    session = Current.session or start_default()
    entry = session.ask_head("name.get", name)
    if entry is None:
        raise ActorNotFound(f"there is no actor with the name {name!r}")
    _, blob, oid, owner, heir = entry
    if is_gone(session, oid, owner):
        raise ActorNotFound(f"there is no actor with the name {name!r}: the program that made it has ended")
    found: Any = codec.from_inline(blob)
    class_name, methods = found
    return ActorHandle(session.ref_found(oid, owner, heir), class_name, methods)


def current_actor() -> ActorHandle:
    """Inside of an actor: a handle of itself, to be passed to others."""
    session = current_session()
    kind = session.actor_kind
    if kind is None:
        raise BadValue("current_actor is for code of actors")
    actor, owner = session.actor_home()
    ref = session.ref_found(object_id(actor, 0), owner, m.HANDLE)
    return ActorHandle(ref, kind.__name__, methods_of(kind))


def kill(actor: ActorHandle, restart: bool = False) -> None:
    """End an actor at once: what waits or runs fails with ActorDied. restart: only its process is killed."""
    if not isinstance(actor, ActorHandle):
        raise BadType(f"kill takes the handle of an actor, not {actor!r}")
    ref = actor._ref
    session = checked(ref, actor)
    message = m.KillActor(ref.oid[:TASK_ID_BYTES], bool(restart), "it was killed with flow.kill")
    if ref.owner == session.address:
        session.step(message)
    else:
        session.endpoint.send(ref.owner, message)


def exit_actor() -> None:
    """Inside of a method: the call ends well with None, and the actor ends with it."""
    session = current_session()
    if session.context.actor is None:
        raise BadValue("exit_actor is for methods of actors")
    from .runtime.actor import ExitActor

    raise ExitActor


def actor_class(cls: Any, given: dict[str, Any]) -> ActorClass:
    """What the decorator makes of a class."""
    return ActorClass(cls, actor_options(given))
