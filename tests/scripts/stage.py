"""A stage for scripts: one machine of each kind that a script names, and short words for events and orders.

    owner NAME                      from now on lines are for this owner's machine (made when first named)
    executor NAME | head            the same for an executor, or the head
    submit TASK [dep=..] [in=..] [n=2] [retries=1] [parent=..] [stream]
    put OBJ | drop OBJ.. | get NUMBER OBJ.. | made OBJ from=OWNER [heir=OWNER/TASK] [via=OBJ]
    grant LEASE WORKER | lost LEASE [running=TASK] | gone PEER | silent LEASE
    back TASK.. lease=N from=WORKER [blocked] | lose OBJ
    done TASK [value=stored@NODE|inline] [holds=OBJ@OWNER] [attempt=N] | failed TASK kind=.. [with=OBJ@OWNER]
    item TASK INDEX from=WORKER [with=OBJ@OWNER@HEIR/TASK]
Objects are TASK or TASK.1; names stand for themselves in outputs.
"""
from __future__ import annotations

from typing import Any

import msgspec

from flowengine.config import Config
from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.executor import Executor, TaskBlocked, TaskEnded
from flowengine.core.head import Head, HeadBeat, HeadSettings
from flowengine.core.ids import object_id
from flowengine.core.invariants import check
from flowengine.core.owner import Owner
from flowengine.recovery.stash import Stash

SHAPE = (("CPU", 1.0),)
CONFIG = Config(story_lines_max=1)
QUIET = ("held", "spec", "recorded", "children", "shape", "placement", "began_us", "run_us", "depth", "priority")


def task_id(name: str) -> bytes:
    return name.encode().ljust(16, b"\0")


def oid(name: str) -> bytes:
    task, _, index = name.partition(".")
    return object_id(task_id(task), int(index or 0))


def name_of(blob: bytes) -> str:
    name = blob[:16].rstrip(b"\0").decode(errors="replace")
    index = int.from_bytes(blob[16:], "big") if len(blob) == 20 else 0
    return f"{name}.{index}" if index else name


class Stage:
    def __init__(self) -> None:
        self.machines: dict[str, Any] = {}
        self.rows: dict[str, bytes] = {}
        self.machine: Any = None
        self.now = 0.0
        self.attempts: dict[str, int] = {}

    def do(self, line: str) -> list[str]:
        """Play one line; what the machine ordered, and laws that do not hold."""
        word, *rest = line.split()
        plain = [part for part in rest if "=" not in part]
        named = dict(part.split("=", 1) for part in rest if "=" in part)
        found = getattr(self, f"do_{word}")(plain, named)
        if found is None:
            return []
        event, sender = found
        self.now += 0.001
        orders = self.machine.handle(event, self.now, sender)
        return [*filter(None, map(self.shown, orders)), *(f"BROKEN {law}" for law in check(self.machine))]

    # --- words ---

    def shown(self, command: Any) -> str:
        if isinstance(command, c.SetTimer):
            return ""
        if isinstance(command, c.WriteJournal):
            self.rows.update({key: row for key, row in command.rows if row is not None})
            return "writes " + " ".join(key for key, _ in command.rows)
        if isinstance(command, c.Send):
            if isinstance(command.message, m.PushTask):
                self.attempts[name_of(command.message.spec.id)] = command.message.attempt
            return f"-> {command.to}: {self.words(command.message)}"
        return self.words(command)

    def words(self, what: Any) -> str:
        fields = []
        if isinstance(what, m.PushTask):
            fields.append(name_of(what.spec.id))
        names, defaults = what.__struct_fields__, what.__struct_defaults__
        usual = dict(zip(names[len(names) - len(defaults):], defaults, strict=True))
        for field in names:
            value = getattr(what, field)
            if field in QUIET or value in ((), b"", "", 0, False) or (field in usual and value == usual[field]):
                continue
            fields.append(f"{field}={self.word(value)}")
        return " ".join([type(what).__name__, *fields])

    def word(self, value: Any) -> str:
        if isinstance(value, bytes):
            return name_of(value) if len(value) in (16, 20) else f"{len(value)}B"
        if isinstance(value, m.Inline):
            return "inline"
        if isinstance(value, m.Stored):
            return "stored@" + ",".join(value.nodes)
        if isinstance(value, m.Failed):
            return f"{value.kind} error"
        if isinstance(value, tuple):
            return "(" + " ".join(self.word(part) for part in value) + ")"
        return self.words(value) if isinstance(value, msgspec.Struct) else f"{value}"

    def value(self, named: dict[str, str]) -> m.Value:
        kind, _, node = named.get("value", "inline").partition("@")
        held = tuple(self.ref(word) for word in named.get("with", "").split(",") if word)
        if kind == "lost":
            return m.Failed(b"", "lost")
        return m.Stored(100, (node or "n1",), held) if kind == "stored" else m.Inline(b"v", held)

    def ref(self, word: str) -> m.RefTo:
        """OBJ, OBJ@OWNER, OBJ@OWNER@HEIR/TASK."""
        obj, _, rest = word.partition("@")
        owner, _, heir = rest.partition("@")
        address, _, parent = heir.partition("/")
        return m.RefTo(oid(obj), owner or self.machine.me, f"{address} {task_id(parent).hex()}" if heir else "")

    # --- who ---

    def do_owner(self, plain: list[str], named: dict[str, str]) -> None:
        self.machine = self.machines.setdefault(plain[0], Owner(plain[0], "n1", "n1", CONFIG))

    def do_executor(self, plain: list[str], named: dict[str, str]) -> None:
        self.machine = self.machines.setdefault(plain[0], Executor(plain[0], "n1", plain[0], Stash()))
        self.machine.functions[b"f" * 16] = None

    def do_head(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str] | None:
        if "dies" in plain or "head" not in self.machines:
            self.machines["head"] = Head(HeadSettings("head", "session", "", 1), CONFIG, self.rows)
            for command in self.machines["head"].start(self.now):
                self.shown(command)
        self.machine = self.machines["head"]

    # --- user code of an owner ---

    def spec(self, plain: list[str], named: dict[str, str]) -> m.TaskSpec:
        deps = tuple(self.ref(word) for word in named.get("dep", "").split(",") if word)
        nested = tuple(self.ref(word) for word in named.get("in", "").split(",") if word)
        return m.TaskSpec(
            task_id(plain[0]), b"f" * 16, plain[0], b"", None, deps, nested,
            -1 if "stream" in plain else int(named.get("n", 1)), SHAPE, max_retries=int(named.get("retries", 3)),
            parent=task_id(named["parent"]) if "parent" in named else b"",
        )

    def do_submit(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return s.Submitted(self.spec(plain, named), b"code"), ""

    def do_put(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return s.ValuePut(oid(plain[0]), self.value(named)), ""

    def do_drop(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return s.RefsDropped(tuple(map(oid, plain))), ""

    def do_get(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return s.ReadyAsked(int(plain[0]), tuple(map(oid, plain[1:])), len(plain) - 1), ""

    def do_fetch(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return s.FetchAsked(int(plain[0]), oid(plain[1])), ""

    def do_made(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return s.RefsMade((self.ref(plain[0]),), oid(named["via"]) if "via" in named else b""), ""

    def do_parent(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        children = tuple((oid(word), m.Stored(100, ("n1",))) for word in named.get("left", "").split(",") if word)
        return s.ParentBegan(task_id(plain[0]), named["caller"], 1, children), ""

    def do_parent_ends(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return s.ParentEnded(task_id(plain[0]), "cancel" in plain, "again" in plain), ""

    # --- what others tell an owner ---

    def do_grant(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        node = named.get("node", "n1")
        return m.LeaseGranted(int(plain[0]), SHAPE, (), plain[1], plain[1], node), node

    def do_lost(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        running = task_id(named["running"]) if "running" in named else b""
        return m.LeaseLost(int(plain[0]), m.Death("w", "h", 1, -9, running)), named.get("node", "n1")

    def do_gone(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return m.PeerLost(plain[0], "closed"), plain[0]

    def do_silent(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return s.LeaseSilent("n1", int(plain[0])), ""

    def do_done(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        attempt = int(named.get("attempt", self.attempts.get(plain[0], 1)))
        held = tuple(self.ref(word) for word in named.get("holds", "").split(",") if word)
        values = (self.value(named),) * int(named.get("n", 1))
        return m.TaskDone(task_id(plain[0]), attempt, values, 10, held), named["from"]

    def do_failed(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        attempt = int(named.get("attempt", self.attempts.get(plain[0], 1)))
        inside = self.value(named).contained
        failed = m.TaskFailed(task_id(plain[0]), attempt, b"error", named["kind"], False, 10, contained=inside)
        return failed, named["from"]

    def do_item(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        attempt = self.attempts[plain[0]]
        return m.StreamItem(task_id(plain[0]), attempt, int(plain[1]), self.value(named)), named["from"]

    def do_stash(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        children = ((oid(named["child"]), self.value(named)),)
        return m.StashAdded(task_id(plain[0]), self.attempts[plain[0]], (), children), "w"

    def do_back(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        tasks = tuple(task_id(word) for word in plain if word != "blocked")
        return m.TakenBack(tasks, int(named["lease"]), "blocked" in plain), named["from"]

    def do_copies_lost(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        nodes = (named["node"],)
        return m.CopiesLost(oid(plain[0]), nodes, nodes if "silent" in plain else ()), named["node"]

    def do_lose(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return s.LoseAsked(oid(plain[0])), ""

    def do_missing(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        nodes = (named["node"],)
        return m.ObjectMissing(oid(plain[0]), nodes, "gone", nodes if "silent" in plain else ()), "n1"

    def do_seek(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return s.CopySought(oid(plain[0])), ""

    def do_gives(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return s.Exported(tuple(map(self.ref, plain)), named["to"]), ""

    def do_copy(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return m.CopyAdded(oid(plain[0]), named["node"], "left" in plain), named["node"]

    def do_borrow(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return m.BorrowAdded(oid(plain[0]), named["by"], 1, "confirm" in plain), named.get("from", named["by"])

    def do_unborrow(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return m.BorrowDropped(oid(plain[0]), 1), named["by"]

    def do_confirm(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return m.BorrowConfirmed(oid(plain[0]), int(named.get("counted", 0))), named["from"]

    def do_watch(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return m.WatchObject(oid(plain[0])), named["by"]

    def do_ready(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return m.ObjectReady(oid(plain[0]), self.value(named)), named["from"]

    def do_heir(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        parent = task_id(named["parent"]) if "parent" in named else b""
        return m.HeirAsked(oid(plain[0]), named["of"], parent), named["by"]

    def do_moved(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return s.NodeMoved(plain[0], "n1"), ""

    # --- executor ---

    def do_push(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return m.PushTask(self.spec(plain, named), 1, int(named["lease"])), named["by"]

    def do_blocks(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return TaskBlocked(True), ""

    def do_goes_on(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return TaskBlocked(False), ""

    def do_ends(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return TaskEnded(task_id(plain[0]), 1, m.TaskDone(task_id(plain[0]), 1, (self.value(named),), 10)), ""

    def do_take_back(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return m.TakeBack(tuple(map(task_id, plain)), int(named["lease"])), named["by"]

    # --- head ---

    def entry(self, plain: list[str], named: dict[str, str]) -> m.NodeEntry:
        free = (("CPU", float(named.get("free", 2))),)
        return m.NodeEntry(plain[0], f"{plain[0]}#1", "h", (("CPU", 2.0),), free, (), 0, int(named.get("epoch", 0)))

    def do_joins(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return m.NodeJoined(self.entry(plain, named)), f"{plain[0]}#1"

    def do_reports(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return m.NodeReport(self.entry(plain, named)), f"{plain[0]}#1"

    def do_seeks(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        return m.SlotsSought(named["owner"], SHAPE, (), 1), f"{plain[0]}#1"

    def do_beats(self, plain: list[str], named: dict[str, str]) -> tuple[Any, str]:
        for _ in range(int(plain[0])):
            self.now += 0.5
            assert all(isinstance(order, c.SetTimer) for order in self.machine.handle(HeadBeat(), self.now, ""))
        self.now += 0.5
        return HeadBeat(), ""
