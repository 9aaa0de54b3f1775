"""Resources that programs make at run time: the head says how much of which is where, and its journal remembers.

A name belongs to a job, the program that made it, and is known by its key (scheduling/resources.py). What nodes are
told is always the whole amount of a key, so telling it twice does no harm.

An order of a program goes three steps: the journal has it, the call returns, it is done. So no task sees what an order
brought before the code that gave it has gone on, and what was once seen is not forgotten. One that takes away is done
before the call returns: the nodes have said so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.options import unknown_name
from flowengine.scheduling.resources import (
    CPU,
    LIMITLESS,
    SCALE,
    is_own,
    job_of,
    plain,
    shown_amount,
    units_of,
)
from flowengine.scheduling.rooms import EVERY, covers

from .commands import JournalWritten, WriteJournal
from .dispatch import Part, on
from .messages import AmountsDone, AmountsSet, Answered, Asked, Message, NodeEntry, OrderSeen, Record, Shape

if TYPE_CHECKING:
    from .head import Head

MADE_ROW, ADD_ROW = "made/", "add/"
ANY, NODE, EACH = "any", "node", "each"  # kinds of places: one that the head chooses, one that is named, all that fit
ADDS_KEPT_MAX = 10_000  # of one resource: changes that are known to be made when they are asked for again
SEEN_S_MAX = 1.0  # what an order does waits so long for its caller to go on; it is dead, or the machine very busy
BETWEEN = "\x00"  # between a key and the name of a change, in the rows of the journal


class OrdersDue(Message, frozen=True):
    """Orders whose callers say nothing are done."""


class Made(Record, frozen=True):
    """A resource, as the journal keeps it."""

    units: int  # at each of its places; below 0: changes that take away came before those that bring
    first: int  # as it was created: who creates it again asks for this
    place: str
    node: str = ""  # where it is; "": nowhere yet, or on all nodes that fit
    selector: Shape = ()

    @property
    def given(self) -> int:
        """What each of its places has of it."""
        return max(0, self.units)


Changes = list[tuple[str, Made]]  # keys, and where they have changed


class Resources(Part):
    """All that programs made; laws H-6 and H-7."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.made: dict[str, Made] = {}  # by key
        self.jobs: dict[str, dict[str, None]] = {}  # job -> its keys
        self.at: dict[str, dict[str, None]] = {}  # node id -> keys that are there; "": those that wait for a node
        self.each: dict[str, None] = {}  # keys that are on all nodes that fit
        self.adds: dict[str, dict[str, None]] = {}  # key -> changes that were made
        self.waiting: dict[int, tuple[str, Answered, Changes]] = {}  # orders that wait for the journal, by number
        self.answered: dict[int, tuple[float, Changes]] = {}  # those whose caller has to go on first, since when
        self.undone: dict[int, tuple[str, Answered, dict[str, None]]] = {}  # that take away, and nodes that do it still
        self._rows: list[tuple[str, bytes | None]] = []
        self._changes: Changes = []
        self._number = 0

    def read(self, rows: Mapping[str, bytes]) -> None:
        """What an earlier head has left."""
        for key in sorted(rows):
            if key.startswith(MADE_ROW):
                name = key.removeprefix(MADE_ROW)
                self._list(name, msgspec.msgpack.decode(rows[key], type=Made))
            elif key.startswith(ADD_ROW):
                name, _, change = key.removeprefix(ADD_ROW).partition(BETWEEN)
                self.adds.setdefault(name, {})[change] = None
        for node_id in [node_id for node_id in self.at if node_id and node_id not in self.head.expected]:
            self.node_gone(node_id)

    def start(self) -> None:
        """Programs may have ended while there was no head."""
        for job in self.jobs:
            self.head.jobs.watch(job)

    # --- questions --------------------------------------------------------------------------------

    def asked(self, event: Asked, sender: str) -> None:
        """A program's order: answered, when it is safe, with its number and "", or with what is wrong about it."""
        verb, argument = event.topic.partition(".")[2], event.argument
        if verb == "list":
            self.head.out.send(sender, Answered(event.request, event.topic, self.listed(str(argument))))
            return
        orders: dict[str, Callable[..., str]] = {
            "create": self._create, "set": self._set, "add": self._add, "delete": self._delete,
        }  # fmt: skip
        wrong = orders[verb](*argument) if verb in orders else f"there is no order {verb!r}"
        # Also when nothing has changed: the same order may have come before, and its rows be on their way.
        self._number += 1
        answer = Answered(event.request, event.topic, (self._number, wrong))
        self.waiting[self._number] = sender, answer, self._changes
        self.head.out.add(WriteJournal(tuple(self._rows), self._number))
        self._rows, self._changes = [], []

    def answer_when_written(self, rows: tuple[tuple[str, bytes | None], ...], to: str, answer: Answered) -> None:
        """The answer to another order goes out when its rows are safe."""
        self._number += 1
        self.waiting[self._number] = to, answer, []
        self.head.out.add(WriteJournal(rows, self._number))

    @on(JournalWritten)
    def _written(self, event: JournalWritten, now: float, sender: str) -> None:
        asker, answer, changes = self.waiting.pop(event.number)
        later = [change for change in changes if not self._takes_away(*change)]
        places: dict[str, None] = {}
        for key, made in changes:
            if (key, made) not in later:
                places.update(dict.fromkeys(self._tell(key, made, event.number)))
        if places:
            self.undone[event.number] = asker, answer, places
        else:
            self.head.out.send(asker, answer)
        if later:
            if not self.answered:
                self.head.out.timer(SEEN_S_MAX, OrdersDue())
            self.answered[event.number] = now, later

    @on(AmountsDone)
    def _done(self, event: AmountsDone, now: float, sender: str) -> None:
        self._done_at(event.order, self.head.rooms.ids.get(sender, ""))

    def _done_at(self, number: int, node_id: str) -> None:
        """The node gives no more of what the order took away, or is gone."""
        asker, answer, places = self.undone.get(number, ("", None, {}))
        places.pop(node_id, None)
        if answer is not None and not places:
            del self.undone[number]
            self.head.out.send(asker, answer)

    def _done_all(self, node_id: str) -> None:
        for number in list(self.undone):
            self._done_at(number, node_id)

    @on(OrderSeen)
    def _seen(self, event: OrderSeen, now: float, sender: str) -> None:
        for key, made in self.answered.pop(event.number, (0.0, []))[1]:
            self._tell(key, made)

    @on(OrdersDue)
    def _due(self, event: OrdersDue, now: float, sender: str) -> None:
        """Who gave an order may have died before it went on."""
        for number, (since_s, _) in list(self.answered.items()):
            if now - since_s >= SEEN_S_MAX * 0.99:
                self._seen(OrderSeen(number), now, sender)
        if self.answered:
            self.head.out.timer(SEEN_S_MAX, OrdersDue())

    def _create(self, key: str, units: int, node: str | None, selector: Any, home: str) -> str:
        head, rooms = self.head, self.head.rooms
        shape: Shape = tuple((str(name), float(amount)) for name, amount in selector or ())
        place = EACH if selector is not None else ANY if node is None else NODE
        if wrong := self._of_nodes(key):
            return wrong
        if node is not None and node not in head.rows:
            return unknown_name("node", node, rooms.nodes)
        known = self.made.get(key)
        if known is None:
            where = node or "" if place != ANY else self._one(home)
            self._place(key, Made(units, units, place, where, shape))
            return ""
        same = known.place == place and known.selector == shape and (place != NODE or known.node == node)
        if same and units in (known.first, known.units):
            return ""  # a task that runs again creates again
        if same:
            return (
                f"resource {plain(key)!r} is there already, with {shown_amount(known.given)}: "
                "change it with flow.resources.set or add"
            )
        return (
            f"resource {plain(key)!r} is there already, {self._where(known)}: its amount is changed by "
            "flow.resources.set; to have it elsewhere delete it first"
        )

    def _set(self, key: str, units: int) -> str:
        known = self.made.get(key)
        if known is None:
            return self._unknown(key)
        self._place(key, msgspec.structs.replace(known, units=units))
        return ""

    def _add(self, key: str, change: int, name: str) -> str:
        known = self.made.get(key)
        if known is None:
            return self._unknown(key)
        adds = self.adds.setdefault(key, {})
        if name in adds:
            return ""  # its task runs again
        adds[name] = None
        self._rows.append((f"{ADD_ROW}{key}{BETWEEN}{name}", b""))
        if len(adds) > ADDS_KEPT_MAX:
            oldest = next(iter(adds))
            del adds[oldest]
            self._rows.append((f"{ADD_ROW}{key}{BETWEEN}{oldest}", None))
        if known.units < LIMITLESS:
            self._place(key, msgspec.structs.replace(known, units=known.units + change))
        return ""

    def _delete(self, key: str) -> str:
        known = self.made.get(key)
        if known is not None:
            self._remove(key)
            if not self.jobs[job_of(key)]:
                del self.jobs[job_of(key)]
        return self._of_nodes(key) if known is None else ""

    def _of_nodes(self, key: str) -> str:
        if plain(key) not in self.head.rooms.has:
            return ""
        return (
            f"{plain(key)!r} is a resource that nodes have by themselves: they were started with it, and no program "
            "can make, change or delete it"
        )

    def _unknown(self, key: str) -> str:
        if wrong := self._of_nodes(key):
            return wrong
        return unknown_name("resource", plain(key), map(plain, self.jobs.get(job_of(key), ())))

    def _where(self, made: Made) -> str:
        if made.place == EACH:
            return f"on each node with {dict(made.selector)}" if made.selector else "on each node"
        return f"on node {made.node}" if made.node else "and waits for a node"

    # --- where they are ---------------------------------------------------------------------------

    def _list(self, key: str, made: Made) -> None:
        self.made[key] = made
        self.jobs.setdefault(job_of(key), {})[key] = None
        if made.place == EACH:
            self.each[key] = None
        else:
            self.at.setdefault(made.node, {})[key] = None

    def _unlist(self, key: str, made: Made) -> None:
        if made.place == EACH:
            del self.each[key]
            return
        keys = self.at[made.node]
        del keys[key]
        if not keys:
            del self.at[made.node]

    def _place(self, key: str, made: Made) -> None:
        """A resource is new, has another amount or another place: journal, nodes and seekers learn it."""
        known = self.made.get(key)
        if known == made:
            return
        if known is None:
            self.head.jobs.watch(job_of(key))
        else:
            self._unlist(key, known)
        self._list(key, made)
        self._rows.append((MADE_ROW + key, msgspec.msgpack.encode(made)))
        self._changes.append((key, made))

    def _do(self) -> None:
        """What the head itself decided need not wait for the journal: another head would decide it anew."""
        rows, changes, self._rows, self._changes = tuple(self._rows), self._changes, [], []
        if rows:
            self.head.out.add(WriteJournal(rows))
        for key, made in changes:
            self._tell(key, made)

    def _tell(self, key: str, changed: Made, order: int = 0) -> list[str]:
        """The places of a change hear how much of the key they have now; it may have changed again since."""
        places = self.nodes_of(changed)
        for node_id in places:
            room, units = self.head.rooms.nodes[node_id], self._units_at(node_id, key)
            self.head.rooms.resize(node_id, key, units)
            self.head.out.send(room.entry.address, AmountsSet(((key, units),), room.entry.epoch, order=order))
            self.head.slots.news(node_id)
        self.head.slots.explain(key)
        return places

    def _takes_away(self, key: str, changed: Made) -> bool:
        """Whether a change leaves one of its places with less."""
        nodes = self.head.rooms.nodes
        places = self.nodes_of(changed)
        return any(nodes[node_id].total.get(key, 0) > self._units_at(node_id, key) for node_id in places)

    def _units_at(self, node_id: str, key: str) -> int:
        """How much of a key a node is to have."""
        made = self.made.get(key)
        if made is None or not (made.node == node_id or (made.place == EACH and self._fits(node_id, made))):
            return 0
        return made.given

    def nodes_of(self, made: Made) -> list[str]:
        """The living nodes that have it."""
        nodes = self.head.rooms.nodes
        if made.place != EACH:
            return [made.node] if made.node in nodes else []
        return [node_id for node_id in nodes if self._fits(node_id, made)]

    def _fits(self, node_id: str, made: Made) -> bool:
        room = self.head.rooms.nodes[node_id]
        return covers({name: room.total[name] for name in room.static}, units_of(made.selector))

    def _one(self, home: str) -> str:
        """A node for what may be anywhere: the asker's own if it runs tasks, else the next in turn that does."""
        rooms = self.head.rooms
        workers = rooms.has.get(CPU, rooms.has[EVERY])
        if home in workers or home in self.head.expected:
            return home
        if not workers:
            return ""
        node_id = next(iter(workers))
        workers.move_to_end(node_id)
        return node_id

    def joined(self, entry: NodeEntry, is_new: bool) -> None:
        """A node is there and gets all that belongs to it; is_new: its process has none of an earlier life."""
        node_id = entry.node_id
        for key in list(self.at.get("", ())):
            self._place(key, msgspec.structs.replace(self.made[key], node=self._one(node_id)))
        self._do()
        keys = [key for key in self.each if self._fits(node_id, self.made[key])]
        amounts = tuple((key, self.made[key].given) for key in (*self.at.get(node_id, ()), *keys))
        for key, units in amounts:
            self.head.rooms.resize(node_id, key, units)
        if amounts or not is_new:
            self.head.out.send(entry.address, AmountsSet(amounts, entry.epoch, whole=True))
        self._done_all(node_id)  # if it had not heard of an order, it hears of what that left

    def node_gone(self, node_id: str) -> None:
        """A node is dead: what may be anywhere is elsewhere from now on."""
        for key in list(self.at.get(node_id, ())):
            made = self.made[key]
            if made.place == ANY:
                self._place(key, msgspec.structs.replace(made, node=self._one("")))
        self._do()
        self._done_all(node_id)

    # --- ends -------------------------------------------------------------------------------------

    def job_ended(self, job: str) -> None:
        """A program has ended, and its resources with it."""
        for key in list(self.jobs.get(job, ())):
            self._remove(key)
        if self.jobs.pop(job, None) is not None:
            self._do()

    def _remove(self, key: str) -> None:
        made = self.made.pop(key)
        del self.jobs[job_of(key)][key]
        self._unlist(key, made)
        self._rows.append((MADE_ROW + key, None))
        self._rows += [(f"{ADD_ROW}{key}{BETWEEN}{name}", None) for name in self.adds.pop(key, ())]
        self._changes.append((key, made))

    def under_way(self) -> dict[str, None]:
        """Keys of orders that are not done yet; for the laws."""
        orders = [*(changes for _, _, changes in self.waiting.values()), *(told for _, told in self.answered.values())]
        return {key: None for changes in orders for key, _ in changes}

    # --- what is told -----------------------------------------------------------------------------

    def absent(self, key: str) -> str:
        """Why no node has a resource."""
        if not is_own(key):
            return ""
        made = self.made.get(key)
        if made is None:
            return "it was not created yet"
        return self._nowhere(made) if not self.nodes_of(made) else "it has none left"

    def _nowhere(self, made: Made) -> str:
        if made.place == EACH:
            return f"it is made on each node with {dict(made.selector)}, and there is none"
        return f"it belongs to node {made.node}, which is not there" if made.node else "it waits for a node"

    def listed(self, job: str) -> dict[str, Any]:
        """A program's resources by name."""
        found: dict[str, Any] = {}
        for key in self.jobs.get(job, ()):
            made, nodes = self.made[key], {}
            for node_id in self.nodes_of(made):
                free = max(0, self.head.rooms.nodes[node_id].free.get(key, 0))
                nodes[node_id] = {"total": amount_of(made.given), "available": amount_of(free)}
            if made.node in self.head.expected:  # this head is new, and the node has not come back to it yet
                nodes[made.node] = {"total": amount_of(made.given), "available": 0.0}
            found[plain(key)] = {
                "total": sum(node["total"] for node in nodes.values()),
                "available": sum(node["available"] for node in nodes.values()),
                "nodes": nodes,
                "waiting": "" if nodes else self._nowhere(made),
            }
        return found


def amount_of(units: int) -> float:
    """Whole units as people give them; without limit: infinity."""
    return float("inf") if units >= LIMITLESS // 2 else units / SCALE
