"""Questions of people to a node: it adds up the answers of its processes, of other nodes and of the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from .dispatch import Part, on
from .memory_seen import stored
from .messages import Answered, Asked, NodeEntry
from .node_desk import Desk, QuestionExpired
from .node_seen import STORE_BYTES, seen

if TYPE_CHECKING:
    from .node import Node

CLUSTER, LOCAL = "cluster", "local"
CLUSTER_ANSWER_S_MAX = 1.5
LOCAL_ANSWER_S_MAX = 1.0  # shorter: another node waits for this one

ASKS_PROCESSES = frozenset(("stats", "story", "stack", "spans", "stash", "record", "reply", "explain", "seen",
                            "memory"))
ASKS_HEAD = frozenset(("stats", "story"))
LISTS = frozenset(("nodes", "story", "spans", "stash", "record", "reply", "explain", "seen", "memory"))


@dataclass(slots=True, eq=False)
class Question:
    """Answers so far, and who has not answered."""

    sender: str
    asked: Asked
    content: Any
    pending: dict[str, None]


class Questions(Part):
    """Open questions; each is answered once, in time, with what came."""

    def __init__(self, desk: Desk, node: Node) -> None:
        self.desk = desk
        self.node = node
        self.open: dict[int, Question] = {}
        self.early: list[tuple[Asked, str]] = []  # for all nodes, before they are known here; with who asked
        self._number = 0

    @on(Asked)
    def _asked(self, event: Asked, now: float, sender: str) -> None:
        desk = self.desk
        if event.scope == CLUSTER and not desk.knows_all and desk.head_up:
            self.early.append((event, sender))
            desk.want_nodes()
            return
        content = round(now * 1e6) if event.topic == "clock" else self._own(event, now)
        if content is None:
            desk.out.send(sender, Answered(event.request, event.topic, None))
            return
        pending: dict[str, None] = {}
        if event.topic in ASKS_PROCESSES:
            pending.update(dict.fromkeys(desk.locals()))
        if event.scope == CLUSTER:
            pending.update({entry.address: None for entry in desk.others()})
            if event.topic in ASKS_HEAD and desk.head_up:
                pending[desk.head] = None
        if not pending:
            desk.out.send(sender, Answered(event.request, event.topic, content))
            return
        self._number += 1
        self.open[self._number] = Question(sender, event, content, pending)
        for address in pending:
            desk.out.send(address, Asked(self._number, event.topic, event.argument, LOCAL))
        wait_s = CLUSTER_ANSWER_S_MAX if event.scope == CLUSTER else LOCAL_ANSWER_S_MAX
        desk.out.timer(wait_s, QuestionExpired(self._number))

    def nodes_known(self, now: float) -> None:
        """All nodes are known: what was asked of them goes there."""
        early, self.early = self.early, []
        for event, sender in early:
            self._asked(event, now, sender)

    def _own(self, event: Asked, now: float) -> Any:
        if event.topic == "stats":
            return {**self.desk.past, **add(self.desk.past, self.node.stats())}
        if event.topic == "nodes":
            return [shown(self.node.entry())]
        if event.topic == "seen":
            return [seen(self.node, now)]
        if event.topic == "memory":
            return [stored(self.node)]
        if event.topic == "resources":
            entry = self.node.entry()
            return {"total": dict(entry.total), "available": dict(entry.available)}
        if event.topic == "story":
            return self.node.story(event.argument)
        if event.topic == "store":
            store = self.node.store
            return {name: getattr(store, name) for name in STORE_BYTES}
        if event.topic == "explain":
            return self.node.ledgers.waits(str(event.argument))
        return {"stack": {}, "spans": [], "stash": [], "record": [], "reply": []}.get(event.topic)

    @on(Answered)
    def _answered(self, event: Answered, now: float, sender: str) -> None:
        worker = self.desk.by_address.get(sender)
        if worker is not None and event.topic == "stats" and isinstance(event.content, dict):
            worker.counters = dict(event.content)  # kept for when the worker is dead
        if event.topic == "name.claim":
            self.node.ledgers.name_claimed(event.request, bool(event.content), now)
            return
        question = self.open.get(event.request)
        if question is None or sender not in question.pending:
            return
        del question.pending[sender]
        question.content = merged(question.asked.topic, question.content, event.content, sender)
        if not question.pending:
            self._close(event.request)

    @on(QuestionExpired)
    def _expired(self, event: QuestionExpired, now: float, sender: str) -> None:
        if event.number in self.open:
            self._close(event.number)

    def _close(self, number: int) -> None:
        question = self.open.pop(number)
        content = sorted(question.content) if question.asked.topic == "story" else question.content
        self.desk.out.send(question.sender, Answered(question.asked.request, question.asked.topic, content))

    def process_gone(self, address: str) -> None:
        """Who is dead does not answer."""
        self.early = [entry for entry in self.early if entry[1] != address]
        for number, question in list(self.open.items()):
            if question.sender == address:
                del self.open[number]
            elif question.pending.pop(address, "") is None and not question.pending:
                self._close(number)


def shown(entry: NodeEntry) -> dict[str, Any]:
    """A node as JSON-like content."""
    shape = msgspec.structs.asdict(entry)
    workers = [
        {"worker_id": worker_id, "pid": pid, "state": state, "address": address}
        for worker_id, pid, state, address in entry.workers
    ]
    return {**shape, "total": dict(entry.total), "available": dict(entry.available), "workers": workers}


def add(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Sums of numbers by name."""
    sums = dict(first)
    for name, count in second.items():
        if isinstance(count, int | float):
            sums[name] = round(sums.get(name, 0) + count, 4)  # amounts are exact to four digits
    return sums


def merged(topic: str, content: Any, more: Any, sender: str) -> Any:
    """An answer with another process's answer added; what has the wrong form is left out."""
    if topic == "stats" and isinstance(more, dict):
        return add(content, more)
    if topic in LISTS and isinstance(more, list | tuple):
        together = [*content, *more]
        return sorted(together, key=lambda node: str(node["node_id"])) if topic == "nodes" else together
    if topic == "resources" and isinstance(more, dict):
        return {part: add(content[part], more.get(part, {})) for part in ("total", "available")}
    if topic == "stack":
        return {**content, **(more if isinstance(more, dict) else {sender: more})}
    return content
