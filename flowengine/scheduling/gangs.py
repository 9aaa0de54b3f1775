"""Gangs and placement groups: bundles of amounts that are reserved together, for tasks and actors that need each other.

After Ray's placement groups (docs.ray.io, "Placement Groups"); a gang lasts as long as its members.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine import options  # not its names: it imports this package
from flowengine.core.bundles import (
    GANG,
    GROUP,
    STRATEGIES,
    BundleSet,
    GangNamed,
    bundle_name,
    in_bundle,
    is_gang,
)
from flowengine.errors import BadType, BadValue, FlowError
from flowengine.refs import Current, ObjectRef, current_session

from .policies import Policy
from .resources import of_job, program_of, shape_of, shown_need, units_of

if TYPE_CHECKING:
    from flowengine.core.parts import Shape
    from flowengine.runtime.session import Session

BUNDLES_MAX = 10_000
ID_CHARS = 16  # of a name
NAMES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory_bytes": "memory"}
STATE_S_MAX = 1.0  # how long repr waits for the head


class NoBundle(BadValue, IndexError):
    """There is no bundle with this index."""


class Member(Policy, frozen=True, kw_only=True):
    """On a bundle of a gang or placement group; made by indexing one."""

    bundles: BundleSet
    index: int

    def asked(self, shape: Shape) -> tuple[Shape, tuple[str, ...]]:
        """The same amounts of the bundle; raises BadValue when it has less."""
        have = dict(units_of(self.bundles.bundles[self.index]))
        for name, count in units_of(shape):
            if count > have.get(name, 0):
                raise BadValue(
                    f"the call needs {shown_need(name, count)}, and bundle {self.index} of {self.bundles.id} has "
                    f"{shown_need(name, have.get(name, 0))}"
                )
        return in_bundle(shape, bundle_name(self.bundles.id, self.index)), ()

    def renames(self) -> bool:
        """What others need besides is not of the bundle."""
        return True

    def turn(self, plan: Any) -> Policy:
        """The owner of the call knows the gang from now on."""
        session: Session = plan.session
        if is_gang(self.bundles.id) and self.bundles.id not in session.owner.gangs:
            driver = session.context.driver.partition(" ")[0]
            session.step(GangNamed(keyed(session, self.bundles), driver))
        return self

    def __hash__(self) -> int:
        return hash((self.bundles.id, self.index))

    def __repr__(self) -> str:
        return f"{self.bundles.id}[{self.index}]"


def keyed(session: Session, described: BundleSet) -> BundleSet:
    """The set with names of resources as this program means them."""
    job = program_of(session.context.driver, session.address)
    return msgspec.structs.replace(described, bundles=tuple([of_job(shape, job) for shape in described.bundles]))


class Bundles:
    """Indexed by the number of a bundle it gives a placement for tasks and actors. It can be passed to tasks."""

    kind = ""

    def __init__(self, described: BundleSet) -> None:
        self._described = described

    @property
    def id(self) -> str:
        """Its name in the cluster."""
        return self._described.id

    @property
    def strategy(self) -> str:
        """PACK, SPREAD, STRICT_PACK or STRICT_SPREAD."""
        return self._described.strategy

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What each bundle has."""
        return [dict(shape) for shape in self._described.bundles]

    def bundle(self, index: int) -> Policy:
        """The placement on one bundle; raises BadValue (an IndexError too) when there is none with this index."""
        if isinstance(index, bool) or not isinstance(index, int):
            raise BadType(f"the index of a bundle is a whole number, not {index!r}")
        if not 0 <= index < len(self):
            raise NoBundle(f"{self.kind} {self.id} has bundles 0 to {len(self) - 1}, not {index}")
        return Member(bundles=self._described, index=index)

    __getitem__ = bundle

    def __len__(self) -> int:
        return len(self._described.bundles)

    def __iter__(self) -> Iterator[Policy]:
        return map(self.bundle, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bundles) and other._described == self._described

    def __hash__(self) -> int:
        return hash(self._described.id)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._described,)

    def __repr__(self) -> str:
        shown = ", ".join(
            "{" + ", ".join(shown_need(name, count) for name, count in units_of(shape)) + "}"
            for shape in self._described.bundles[:8]
        )
        more = f", and {len(self) - 8} more" if len(self) > 8 else ""
        return f"{type(self).__name__}({self.id} {self.strategy} [{shown}{more}]: {self._state()})"

    def _state(self) -> str:
        session = Current.session
        if session is None:
            return "there is no session"
        try:
            state = session.ask(session.head, "bundles.state", self.id, timeout_s=STATE_S_MAX)
        except FlowError as error:
            return f"the head does not answer ({error})"
        if state is None:
            return "not reserved" if is_gang(self.id) else "removed"
        if state["reason"]:
            return str(state["reason"])
        places = ", ".join(f"{index} on {node_id or 'none yet'}" for index, node_id in enumerate(state["places"]))
        return f"bundles {places}"


class Gang(Bundles):
    """Reserved from when a member is ready until no member is, and none runs; each bundle runs one at a time."""

    kind = "gang"


class PlacementGroup(Bundles):
    """Reserved until it is removed, or its program ends. As a context manager it is removed at the end."""

    kind = "placement group"

    def __init__(self, described: BundleSet) -> None:
        super().__init__(described)
        self._ready: ObjectRef | None = None

    def ready(self) -> ObjectRef:
        """A reference that has a value (True) when all bundles are reserved, and an error when it was removed."""
        session = current_session()
        if self._ready is None or self._ready._session is not session:
            from flowengine.functions import remote_function

            given = {"num_cpus": 0, "max_retries": -1, "placement": self.bundle(0), "name": f"{self.id} is ready"}
            self._ready = remote_function(is_ready, given).remote()
        return self._ready

    def wait(self, timeout: float | None = None) -> bool:
        """Whether all bundles are reserved within so many seconds (None: no limit); raises when it was removed."""
        from flowengine.api import get, wait

        ready, _ = wait([self.ready()], timeout=timeout)
        return bool(ready and get(ready[0]))

    def remove(self) -> None:
        """Give everything back: members that run are stopped, those that wait fail with TaskCancelled (ActorDied)."""
        current_session().ask_head("bundles.remove", self.id)
        self._ready = None  # what it told is not true any more

    def __enter__(self) -> PlacementGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if Current.session is not None:  # else it went with its session
            self.remove()


def is_ready() -> bool:
    """Runs in the first bundle."""
    return True


def gang(bundles: list[dict[str, float]], strategy: str = "PACK") -> Gang:
    """Bundles ({"CPU": 1, ...} each) that are reserved all or none, while members run: f.options(placement=gang[i]).

    Two gangs never wait for each other's part; the oldest is served in the end. memory is in bytes. Raises BadValue or
    BadType.
    """
    session = Current.session
    name = session.context.new_child() if session is not None else os.urandom(16)
    return Gang(described(GANG, name, bundles, strategy))


def placement_group(bundles: list[dict[str, float]], strategy: str = "PACK") -> PlacementGroup:
    """Reserve bundles ({"CPU": 1, ...} each) together, until `remove`; at once or when there is room: see `wait`.

    strategy: PACK (on few nodes), SPREAD (on many), STRICT_PACK (one node), STRICT_SPREAD (a node each). memory is in
    bytes. Raises BadValue or BadType.
    """
    checked = described(GROUP, b"", bundles, strategy)
    from flowengine.api import session_or_start

    session = session_or_start()
    name = GROUP + session.context.new_child().hex()[:ID_CHARS]
    group = PlacementGroup(msgspec.structs.replace(checked, id=name))
    job = program_of(session.context.driver, session.address)
    session.ask_head("bundles.create", [keyed(session, group._described), job])
    return group


def described(prefix: str, name: bytes, bundles: Any, strategy: Any) -> BundleSet:
    """What was given, checked."""
    if not isinstance(bundles, (list, tuple)):
        raise BadType(f"bundles must be a list of dicts of names and amounts, not {bundles!r}")
    if not 0 < len(bundles) <= BUNDLES_MAX:
        raise BadValue(f"bundles must be a list of 1 to {BUNDLES_MAX} dicts, not of {len(bundles)}")
    if strategy not in STRATEGIES:
        raise BadValue(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
    shapes = tuple([bundle_shape(index, bundle) for index, bundle in enumerate(bundles)])
    return BundleSet(prefix + name.hex()[:ID_CHARS], shapes, strategy)


def bundle_shape(index: int, bundle: Any) -> Shape:
    """One bundle, checked."""
    where = f"bundle {index}"
    if not isinstance(bundle, Mapping):
        raise BadType(f"{where} must be a dict of names and amounts, not {bundle!r}")
    pairs = []
    for name, amount in bundle.items():
        if not isinstance(name, str):
            raise BadType(f"{where} must have strings as names, not {name!r}")
        if name in NAMES:
            raise BadValue(f"{where} has {name!r}: in bundles that is {NAMES[name]!r}")
        most = options.NAME_CHARS_MAX
        if not name or len(name) > most or "@" in name or not name.isprintable():
            raise BadValue(f"{where} has a bad name {name[:40]!r}: 1 to {most} printable characters without '@'")
        label = f"{where}[{name!r}]"
        real = options.gpus(label, amount) if name == "GPU" else options.real(label, amount, 0, options.AMOUNT_MAX)
        pairs.append((name, real))
    shape = shape_of(units_of(tuple(sorted(pairs))))
    if not shape:
        raise BadValue(f"{where} must have an amount above 0, not {dict(bundle)!r}")
    return shape
