"""flow.dask_get: a Dask scheduler. The graph's nodes become tasks, and what one needs of another goes as a reference.

Dask is imported when the first graph comes. Nodes are submitted when what they need is there, in the order of
dask.order (depth first, so that few results are alive at a time), and only so many at once as keep the workers busy.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import heapq
import operator
import queue
import sys
import time
import types
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .. import asking
from ..core import messages as m
from ..core import owner_state as s
from ..errors import BadType, BadValue, SerializationError, TaskError
from ..functions import RemoteFunction, start_default
from ..objects import codec
from ..options import CHECKS, NUM_RETURNS_MAX, TaskOptions, task_options, unknown_name, whole
from ..refs import Current, ObjectRef
from .nodes import RunNodes, SharedFunction, Within
from .watch import Watch
from .window import Window

if TYPE_CHECKING:
    from ..runtime.session import Session

Key = Hashable
LITERAL_BYTES_MAX = 1024  # larger constants of a graph are stored once
AHEAD_MIN, AHEAD_MAX = 4, 4096
AHEAD_PER_CPU = 2
DISK_SHUFFLE, P2P_SHUFFLE = "maybe_buffered_partd", "distributed.shuffle"  # the class, the package behind them
PICKS = (operator.getitem, dict.get)  # what takes a part out of a value
OWN_KEYWORDS = ("num_workers", "callbacks", "cache")
# Those of Dask's other schedulers, which programs may have for these.
DASK_KEYWORDS = ("allow_other_workers", "asynchronous", "chunksize", "direct", "get_id", "optimize_graph", "pool",
                 "raise_exception", "rerun_exceptions_locally", "retries", "scheduler", "sync", "workers")
NEAR = 0.75  # from that likeness on a keyword is taken for a mistyped one
OWN_CONFIG = ("scheduler", "pool", "num_workers")  # how this computation runs, not what its nodes do
LOOK_S = 1.0  # a wait for so long: the cluster may have grown


def dask_get(dsk: Any, keys: Any, cache: Mapping[Any, Any] | None = None, **kwargs: Any) -> Any:
    """Compute keys (a key, or lists of keys within lists) of a Dask graph; gives values, lists as tuples.

    For `dask.compute(..., scheduler=flow.dask_get)` and `dask.config.set(scheduler=flow.dask_get)`. Keywords: cache
    (values that are known), num_workers (how many tasks at once), callbacks (as Dask's), and options of tasks
    (max_retries, num_cpus, resources ...); others are ignored, as Dask's own schedulers do. Starts the default engine
    when there is none. Raises what a task raised, SerializationError for what cannot be sent to a worker, BadValue for
    a keyword that is nearly one of these.
    """
    from dask.callbacks import local_callbacks

    check_keywords(kwargs)
    ahead = kwargs.get("num_workers")
    options = task_options({name: value for name, value in kwargs.items() if name in CHECKS and name != "num_returns"})
    with local_callbacks(kwargs.get("callbacks")) as callbacks:
        watch = Watch(list(callbacks))
        graph = {**graph_of(dsk, None), **{key: data_node(key, value) for key, value in (cache or {}).items()}}
        wanted = list(flat(keys))
        done = False
        watch.started(graph)
        try:
            parts = Parts(graph_of(graph, set(graph)) if watch.callbacks else graph, wanted, fuse=not watch.callbacks)
            run = Run(Current.session or start_default(), parts, options, watch)
            if ahead is not None:
                run.fix(whole("num_workers", ahead, 1, AHEAD_MAX))
            values = run.values(wanted)
            done = True
        finally:
            watch.finished(not done)
    return nested(keys, values)


def check_keywords(given: Iterable[str]) -> None:
    """Raise BadValue for what looks like a keyword of ours and is not quite one."""
    known = (*CHECKS, *OWN_KEYWORDS)
    for name in given:
        if name not in known and name not in DASK_KEYWORDS and difflib.get_close_matches(name, known, 1, NEAR):
            raise BadValue(unknown_name("keyword of dask_get", name, known))


def graph_of(dsk: Any, known: set[Any] | None) -> dict[Any, Any]:
    """A graph of whatever form as a dict of Dask's graph nodes."""
    from dask._task_spec import convert_legacy_graph

    if not isinstance(dsk, Mapping):
        if not hasattr(dsk, "__dask_graph__"):
            raise BadType(f"expected a Dask graph, not {dsk!r}")
        dsk = dsk.__dask_graph__()
    return dict(convert_legacy_graph(dsk, known))


def data_node(key: Any, value: Any) -> Any:
    """A constant of a graph."""
    from dask._task_spec import DataNode

    return DataNode(key, value)


def flat(keys: Any) -> Iterator[Any]:
    """The keys in lists within lists."""
    if isinstance(keys, list):
        for key in keys:
            yield from flat(key)
    else:
        yield keys


def nested(keys: Any, values: Mapping[Any, Any]) -> Any:
    """Values in the places of keys."""
    return tuple([nested(key, values) for key in keys]) if isinstance(keys, list) else values[keys]


# --- what has to run ------------------------------------------------------------------------------


class Unit:
    """Nodes that one task runs: the last one is its result, or those are that pick the parts of what it makes."""

    def __init__(self) -> None:
        self.key: Any = None  # of what it makes
        self.results: tuple[Any, ...] = ()  # keys of what it gives
        self.nodes: dict[Any, Any] = {}
        self.needs: dict[Any, None] = {}  # results of other units, and constants
        self.place = 0  # in the order of the graph
        self.missing = 0  # of the needs
        self.users: list[Unit] = []  # one for each result and unit that needs it
        self.oid = b""  # of the first result, once it is sent
        self.sent_at = 0.0


class Parts:
    """A graph cut into units and constants, without what nobody asked for."""

    def __init__(self, graph: dict[Any, Any], wanted: list[Any], fuse: bool) -> None:
        from dask._task_spec import Alias, DataNode, cull
        from dask.order import order

        for key in wanted:
            if key not in graph:
                raise KeyError(key)
        self.graph = cull(graph, list(dict.fromkeys(wanted)))
        self.check_complete()
        self.places: dict[Any, int] = order(self.graph) if self.graph else {}
        aliases = {key: node.target for key, node in self.graph.items() if isinstance(node, Alias)}
        self.targets = {key: self.resolve(key, aliases) for key in aliases}
        self.constants = {key: node for key, node in self.graph.items() if isinstance(node, DataNode)}
        self.wanted = dict.fromkeys(self.targets.get(key, key) for key in wanted)
        self.units: dict[Any, Unit] = {}
        self.make_units(fuse)

    def check_complete(self) -> None:
        """Raise ValueError for what a node needs and the graph does not have."""
        for key, node in self.graph.items():
            for need in node.dependencies:
                if need not in self.graph:
                    where = ": a Dask client has it, compute with that client or gather it" if is_future(need) else ""
                    raise ValueError(f"Missing dependency {need} for dependents {key}{where}")

    def resolve(self, key: Any, aliases: Mapping[Any, Any]) -> Any:
        """What an alias stands for in the end."""
        while key in aliases:
            key = aliases[key]
        return key

    def make_units(self, fuse: bool) -> None:
        """One unit a node; but what only one other needs, and nothing else beside it, goes with that one.

        And where nothing is needed of a value but parts, its unit gives these.
        """
        targets, constants = self.targets, self.constants
        ordered = sorted(self.graph, key=self.places.__getitem__)
        nodes = {key: self.without_aliases(self.graph[key]) for key in ordered
                 if key not in targets and key not in constants}  # fmt: skip
        count = Counter(need for node in nodes.values() for need in node.dependencies if need not in constants)
        picked = self.picked(nodes, count) if fuse else {}
        with_user: dict[Any, Unit] = {}  # containers: each user makes its own, which copies no values
        for key, node in nodes.items():
            if key in picked:
                unit = self.units[picked[key]]
                unit.nodes[key] = node
                unit.results += (key,)
                continue
            computed = [need for need in node.dependencies if need not in constants]
            is_inner = fuse and is_container(node) and key not in self.wanted
            follows = fuse and len(computed) == 1 and not is_inner and not node.block_fusion
            if follows and computed[0] in self.units and count[computed[0]] == 1 and computed[0] not in self.wanted:
                unit = self.units.pop(computed[0])
            else:
                unit = Unit()
            for need in sorted(node.dependencies, key=self.places.__getitem__):
                inner = with_user.get(need)
                if inner is not None:
                    unit.nodes.update(inner.nodes)
                    unit.needs.update(inner.needs)
                elif need not in unit.nodes:
                    unit.needs[need] = None
            unit.nodes[key] = node
            unit.key, unit.place = key, self.places[key]
            (with_user if is_inner else self.units)[key] = unit
        self.join()

    def picked(self, nodes: Mapping[Any, Any], count: Mapping[Any, int]) -> dict[Any, Any]:
        """Which nodes pick a part of which value, of those values of which nothing else is needed."""
        picks: dict[Any, list[Any]] = {}
        for key, node in nodes.items():
            whole = picked_from(node)
            if whole in nodes:
                picks.setdefault(whole, []).append(key)
        return {
            key: whole for whole, keys in picks.items() for key in keys
            if 1 < len(keys) == count[whole] <= NUM_RETURNS_MAX
            and whole not in self.wanted and not is_container(nodes[whole])
        }  # fmt: skip

    def without_aliases(self, node: Any) -> Any:
        """The node with what aliases stand for in their place."""
        subs = {need: self.targets[need] for need in node.dependencies if need in self.targets}
        return node.substitute(subs) if subs else node

    def join(self) -> None:
        """Tell units of each other."""
        for unit in self.units.values():
            unit.results = unit.results or (unit.key,)
        makers = {key: unit for unit in self.units.values() for key in unit.results}
        for unit in self.units.values():
            for need in unit.needs:
                maker = makers.get(need)
                if maker is not None:
                    unit.missing += 1
                    maker.users.append(unit)


def is_future(key: Any) -> bool:
    """Whether this program's Dask client, if it has one, holds the value of a key."""
    clients = sys.modules.get("distributed.client")
    try:
        return clients is not None and key in clients.Client.current().futures
    except ValueError:  # there is none
        return False


def is_container(node: Any) -> bool:
    """Whether the node only gathers values in a list, tuple, set or dict."""
    from dask._task_spec import NestedContainer, Task, _identity_cast

    return isinstance(node, NestedContainer) or (isinstance(node, Task) and node.func is _identity_cast)


def picked_from(node: Any) -> Any:
    """Of which value the node is the part that has some name or number; None for other nodes."""
    from dask._task_spec import Alias, Task, TaskRef

    if type(node) is not Task or node.kwargs or len(node.args) < 2 or not any(node.func is pick for pick in PICKS):
        return None
    source, name = node.args[:2]
    is_part = isinstance(source, (Alias, TaskRef)) and isinstance(name, (int, str)) and len(node.dependencies) == 1
    return next(iter(node.dependencies)) if is_part else None


def tasks_in(node: Any) -> Iterator[Any]:
    """The node and the nodes in its arguments."""
    from dask._task_spec import GraphNode, Task

    if isinstance(node, Task):
        yield node
        for part in (*node.args, *node.kwargs.values()):
            if isinstance(part, GraphNode):
                yield from tasks_in(part)
            elif type(part) is dict:  # the inner graph of nodes that Dask has fused
                for inner in part.values():
                    if isinstance(inner, GraphNode):
                        yield from tasks_in(inner)


def with_functions(node: Any, shared: Mapping[int, Any]) -> Any:
    """The node with shared functions in place of their originals; a copy if there are any."""
    from dask._task_spec import NestedContainer, Task

    if not any(id(task.func) in shared for task in tasks_in(node)):
        return node
    args = [part_with_functions(arg, shared) for arg in node.args]
    if isinstance(node, NestedContainer):
        return type(node)(*args)
    if type(node) is not Task:
        return node
    kwargs = {name: part_with_functions(value, shared) for name, value in node.kwargs.items()}
    return Task(node.key, shared.get(id(node.func), node.func), *args, **kwargs)


def part_with_functions(part: Any, shared: Mapping[int, Any]) -> Any:
    """The same for what may be a node, or the inner graph of nodes that Dask has fused."""
    from dask._task_spec import Task

    if isinstance(part, Task):
        return with_functions(part, shared)
    if type(part) is dict:
        return {key: part_with_functions(value, shared) for key, value in part.items()}
    return part


def is_sent_by_value(function: Any) -> bool:
    """Whether the code itself would travel with each node."""
    if isinstance(function, types.FunctionType):
        return not codec.found_by_name(function)
    inner = getattr(function, "func", None)  # partial, curry
    return inner is not None and inner is not function and is_sent_by_value(inner)


# --- running --------------------------------------------------------------------------------------


class Run:
    """One graph on its way through the engine."""

    is_fixed = False  # the caller has said how many tasks at once

    def __init__(self, session: Session, parts: Parts, options: TaskOptions, watch: Watch) -> None:
        self.session = session
        self.parts = parts
        self.options = options
        self.watch = watch
        self.ended: queue.SimpleQueue[Unit] = queue.SimpleQueue()
        self.under_way: dict[Unit, None] = {}
        self.remotes: dict[tuple[str, int], RemoteFunction] = {}
        self.refs: dict[Any, ObjectRef] = {}  # of results that somebody needs
        self.needed = Counter([*parts.wanted, *[need for unit in parts.units.values() for need in unit.needs]])
        self.constants: dict[Any, Any] = {}  # values, or references to them
        self.shared: dict[int, SharedFunction] = {}
        self.within = own_config()
        self.has_looked = False
        self.ahead = Window(AHEAD_MIN, AHEAD_MAX)

    def fix(self, count: int) -> None:
        """Have so many tasks at once, whatever they take."""
        self.is_fixed = True
        self.ahead = Window(count, count)

    def values(self, wanted: Iterable[Any]) -> dict[Any, Any]:
        """The values of the keys, when all that they need has run."""
        parts, units = self.parts, self.parts.units
        self.watch.planned(parts)
        if units:
            self.share_functions()
        ready = [(unit.place, key_index, unit) for key_index, unit in enumerate(units.values()) if not unit.missing]
        heapq.heapify(ready)
        left, number = len(units), len(units)
        try:
            while left:
                while ready and self.takes_more():
                    self.submit(heapq.heappop(ready)[2])
                for unit in self.wait():
                    left -= 1
                    for user in self.settle(unit):
                        number += 1
                        heapq.heappush(ready, (user.place, number, user))
            return self.fetched(wanted)
        finally:
            for unit in self.under_way if not self.session.closed else ():  # something went wrong
                self.session.step(s.CancelAsked(unit.oid, False, True))

    def takes_more(self) -> bool:
        """Whether another task at once is of use: as many as there are slots are, and more while they are quick."""
        if len(self.under_way) >= self.ahead.size and not self.has_looked:
            self.look_around()
        return len(self.under_way) < self.ahead.size

    def look_around(self) -> None:
        """See how many slots there are."""
        self.has_looked = True
        if not self.is_fixed:
            cpus = int(asking.resources(self.session, "total").get("CPU", 1))
            self.ahead.widen(max(AHEAD_MIN, AHEAD_PER_CPU * cpus))

    def share_functions(self) -> None:
        """Functions of several nodes whose code would travel with each of them are stored once."""
        count: Counter[int] = Counter()
        found: dict[int, Any] = {}
        for unit in self.parts.units.values():
            for node in unit.nodes.values():
                for task in tasks_in(node):
                    number = id(task.func)
                    count[number] += 1
                    found[number] = task.func
        self.check_shuffles({(type(one).__name__, getattr(one, "__module__", "")) for one in found.values()})
        for number, function in found.items():
            if count[number] > 1 and is_sent_by_value(function):
                name = getattr(function, "__name__", type(function).__name__)
                self.shared[number] = SharedFunction(self.session.put_packed(packed(function, name)), name)

    def check_shuffles(self, kinds: set[tuple[str, str]]) -> None:
        """Dask chooses how to shuffle before the graph comes here, and not every way works in every place."""
        fails = ""
        if any((module or "").startswith(P2P_SHUFFLE) for _, module in kinds):
            fails = "p2p works between the workers of a Dask cluster only"
        elif any(name == DISK_SHUFFLE for name, _ in kinds):
            # What was appended to its files by a task that died would be there twice after another try.
            self.options = task_options({"max_retries": 0}, self.options)
            if len({node.host for node in asking.nodes(self.session)}) > 1:
                fails = "disk works on one host only"
        if fails:
            ways = "{'dataframe.shuffle.method': 'tasks', 'array.rechunk.method': 'tasks'}"
            raise BadValue(f"a shuffle of this graph cannot run here: {fails}; use dask.config.set({ways})")

    def submit(self, unit: Unit) -> None:
        """Make a task of it."""
        from dask.utils import key_split

        kind = str(key_split(unit.key))[:100]
        count = len(unit.results)
        remote = self.remotes.get((kind, count))
        if remote is None:
            options = task_options({"name": self.options.name or kind, "num_returns": count}, self.options)
            remote = self.remotes[kind, count] = RemoteFunction(RunNodes(kind, self.within), options)
        shared = self.shared
        nodes = [(key, with_functions(node, shared) if shared else node) for key, node in unit.nodes.items()]
        try:
            made = remote.remote(nodes, unit.results, tuple(unit.needs), *[self.need(key) for key in unit.needs])
        except SerializationError as error:
            raise SerializationError(f"node {unit.key!r} of the graph: {error}") from error
        self.refs.update(zip(unit.results, made if count > 1 else (made,), strict=True))
        unit.oid = self.refs[unit.results[0]].oid
        unit.sent_at = time.monotonic()
        self.under_way[unit] = None
        self.watch.sent(unit)
        self.session.when_ready(unit.oid, lambda: self.ended.put(unit))

    def need(self, key: Any) -> Any:
        """The value of a constant, or a reference."""
        if key in self.refs:
            return self.refs[key]
        if key not in self.constants:
            value = self.parts.constants[key].value
            if self.needed[key] == 1:
                return value  # it goes with the only task that needs it
            one = packed(value, key)
            self.constants[key] = value if one.nbytes <= LITERAL_BYTES_MAX else self.session.put_packed(one)
        return self.constants[key]

    def wait(self) -> list[Unit]:
        """The units that have ended since the last time; none when there is room for more at once."""
        session, ended = self.session, self.ended
        found: list[Unit] = []
        if ended.empty():
            session.drive.flush_lazily()
            context = session.context
            session.going_to_block(context)
            try:
                while not found:
                    try:
                        found.append(ended.get(timeout=LOOK_S))
                    except queue.Empty:
                        self.look_around()
                        if len(self.under_way) < self.ahead.size:
                            break
            finally:
                session.blocked_no_more(context)
        while not ended.empty():
            found.append(ended.get())
        return found

    def settle(self, unit: Unit) -> list[Unit]:
        """A unit has ended: raise its error, let go of what nobody needs any more, and give what can run now."""
        session = self.session
        session.check_open()
        del self.under_way[unit]
        first = self.refs[unit.results[0]]
        if type(session.owner.value_of(unit.oid)) is m.Failed:
            self.fail(first)
        self.watch.ended(unit, first, session)
        self.ahead.ended(time.monotonic() - unit.sent_at)
        for need in unit.needs:
            self.needed[need] -= 1
            if not self.needed[need] and self.refs.pop(need, None) is not None:
                self.watch.released(need)
        ready = []
        for user in unit.users:
            user.missing -= 1
            if not user.missing:
                ready.append(user)
        return ready

    def fail(self, ref: ObjectRef) -> None:
        """Raise what the code of a unit raised itself, as Dask's own schedulers do; what it was here is its cause."""
        try:
            self.session.get_one(ref, None, False)
        except TaskError as error:
            original = error.__cause__
            if not isinstance(original, Exception):
                raise
            error.__cause__ = None
            raise original from error

    def fetched(self, wanted: Iterable[Any]) -> dict[Any, Any]:
        """The values of the keys; arrays are the caller's own."""
        parts = self.parts
        refs = {key: self.refs[key] for key in parts.wanted if key in self.refs}
        read = dict(zip(refs, self.session.get(list(refs.values()), None, True), strict=True))
        values = {}
        for key in wanted:
            target = parts.targets.get(key, key)
            values[key] = read[target] if target in read else parts.constants[target].value
        return values


def packed(value: Any, name: Any) -> codec.Packed:
    """The value, pickled; raises SerializationError with the name."""
    try:
        return codec.pack(value)
    except SerializationError as error:
        raise SerializationError(f"{name!r} of the graph: {error}") from error


@functools.cache
def config_before(_defaults: int) -> dict[str, Any]:
    """Dask's configuration as it was before the program changed it: from so many defaults, files and variables."""
    from dask import config

    before: dict[str, Any] = {}
    config.refresh(config=before)
    return before


def own_config() -> Within | None:
    """A context with what the program has changed in Dask's configuration, as far as it can be sent; None: nothing."""
    from dask import config

    before = config_before(len(config.defaults))
    changed: dict[str, Any] = {}
    for name, value in dict(config.config).items():
        if name not in OWN_CONFIG and (name not in before or before[name] != value):
            with contextlib.suppress(SerializationError):
                codec.pack(value)
                changed[name] = value
    return functools.partial(config.set, changed) if changed else None
