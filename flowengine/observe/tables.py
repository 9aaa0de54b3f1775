"""The tables of `flow top` and `flow memory`; they fit 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flowengine.scheduling.resources import AT, plain, shown_amount, shown_name, units_of

GIB = 1 << 30
ROWS_MAX = 15
SIZES = ((1 << 40, "TiB"), (GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
AGES_S = ((86_400, "d"), (3_600, "h"), (60, "min"))
TIGHT = 80


def size(size_bytes: float) -> str:
    """A size as people read it."""
    for unit, name in SIZES:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes:.0f} B"


def age(age_s: float) -> str:
    """A time as people read it; nothing when it is not known."""
    if age_s < 0:
        return ""
    for unit_s, name in AGES_S:
        if age_s >= 2 * unit_s:
            return f"{age_s / unit_s:.0f} {name}"
    return f"{age_s:.1f} s" if age_s >= 1 else f"{age_s * 1e3:.0f} ms"


def share(part: float) -> str:
    """A share of a CPU or a host; nothing when it is not known."""
    return f"{part:.0%}" if part >= 0 else ""


def table(title: str, columns: Sequence[tuple[str, bool]]) -> Table:
    """One with these columns; True: numbers."""
    found = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False,
                  padding=(0, 1, 0, 0))
    for name, is_number in columns:
        found.add_column(name, justify="right" if is_number else "left", overflow="ellipsis", no_wrap=True)
    return found


def text(value: Any) -> Text:
    """What others wrote is not markup."""
    return Text(str(value))


# --- top ----------------------------------------------------------------------------------------------------------


def top(found: Mapping[str, Any], width: int) -> RenderableType:
    """The cluster at one moment."""
    totals, rates = found["totals"], found["rates"]
    tasks, store = totals["tasks"], totals["store"]
    busy = sum(count for state, count in totals["workers"].items() if state not in ("idle", "starting"))
    actors = ", ".join(f"{count} {state}" for state, count in totals["actors"].items()) or "none"
    head = Text("\n".join((
        f"session {found['session']}  nodes {totals['nodes']}"
        + (f" ({totals['silent']} silent)" if totals["silent"] else "")
        + f"  workers {busy} of {sum(totals['workers'].values())} busy  programs {totals['programs']}",
        f"tasks  {tasks['sent']:g} sent, {tasks['ready']:g} queued, {tasks['waiting']:g} wait for inputs;  "
        f"{rates['tasks_executed']:,.1f} tasks/s, {rates['calls_executed']:,.1f} calls/s",
        f"actors {actors};  objects {totals['objects']:,};  store {size(store.get('used_bytes', 0))} of "
        f"{size(store.get('limit_bytes', 0))}"
        + (f", {size(store['disk_bytes'])} on disk" if store.get("disk_bytes") else ""),
    )))
    return Group(head, Text(""), *filter(None, (
        nodes(found["nodes"]), running(found["nodes"], found["actors"], width), functions(found["functions"]),
        queues(found["queues"], width))))


def nodes(found: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each."""
    made = table("nodes", (("node", False), ("host", False), ("CPU", True), ("memory", True), ("free", True),
                           ("store", True), ("queued", True)))
    for node in found[:ROWS_MAX]:
        cpu = f"{node['available'].get('CPU', 0):g} of {node['total'].get('CPU', 0):g} CPU"
        memory_used = f"{node['memory_used_bytes'] / GIB:.1f} of {node['memory_total_bytes'] / GIB:.1f} GiB"
        made.add_row(
            text(node["node_id"]), text(node["host"]), share(node["cpu_share"]) if node["answered"] else "silent",
            memory_used if node["memory_total_bytes"] else "", cpu, size(node["store"].get("used_bytes", 0)),
            f"{node['queued']:,}")
    return with_rest(made, len(found))


def running(found: Sequence[Mapping[str, Any]], actors: Sequence[Mapping[str, Any]], width: int) -> Table:
    """What workers run, the longest first; actors that wait for calls run nothing."""
    idle = {actor["worker"] for actor in actors if actor["state"] == "alive" and actor["calls"] >= 0
            and not actor["running"] and not actor["replaying"]}
    rows = [worker for node in found for worker in node["workers"]
            if (worker["task"] or worker["actor"]) and worker["worker_id"] not in idle]
    rows.sort(key=lambda worker: (-worker["age_s"], worker["worker_id"]))
    made = table("running", (("task", False), ("id", False), ("age", True), ("worker", False), ("pid", True),
                             ("CPU", True), ("memory", True)))
    made.columns[0].max_width = max(12, width - 66)
    for worker in rows[:ROWS_MAX]:
        name = worker["name"] or worker["actor"]
        attempt = f" ({worker['attempt']})" if worker["attempt"] > 1 else ""
        attempt += " (waits)" if worker["state"] == "blocked" else ""
        made.add_row(text(name + attempt), worker["task"][:12], age(worker["age_s"]), text(worker["worker_id"]),
                     str(worker["pid"]), share(worker["cpu_share"]), size(worker["memory_bytes"]))
    return with_rest(made, len(rows))


def functions(found: Sequence[Mapping[str, Any]]) -> Table:
    """Tasks by function."""
    made = table("functions", (("function", False), ("waiting", True), ("queued", True), ("sent", True), ("run", True),
                               ("failed", True), ("per s", True), ("mean", True)))
    made.columns[0].max_width = 26
    for row in found[:ROWS_MAX]:
        made.add_row(text(row["name"]), *(f"{row[name]:,}" for name in ("waiting", "ready", "sent", "runs",
                                                                       "failed_runs")),
                     f"{row.get('rate', 0):,.1f}", age(row["mean_us"] / 1e6) if row["runs"] else "")
    return with_rest(made, len(found))


def queues(found: Sequence[Mapping[str, Any]], width: int) -> Table | None:
    """What waits for slots, and why; nothing when nothing does."""
    if not found:
        return None
    made = table("waiting for slots", (("tasks", True), ("each needs", False), ("because", False)))
    made.columns[1].max_width, made.columns[2].max_width = 34, max(20, width - 44)
    made.columns[1].no_wrap = made.columns[2].no_wrap = False
    for row in found[:ROWS_MAX]:
        needs = ", ".join(shown_name(name) if name.startswith(AT) else
                          f"{plain(name.partition(AT)[0])} {shown_amount(count, name)}"
                          for name, count in units_of(tuple(row["shape"].items())))
        made.add_row(f"{row['count']:,}", text(needs or "nothing"), text(row["reason"] or "slots are busy"))
    return with_rest(made, len(found))


def with_rest(made: Table, count: int) -> Table:
    """Say how many rows are not shown."""
    if count > ROWS_MAX:
        made.caption, made.caption_justify = f"and {count - ROWS_MAX:,} more", "left"
    return made


# --- memory -------------------------------------------------------------------------------------------------------


def memory(found: Mapping[str, Any], group: str, limit: int, width: int) -> RenderableType:
    """Stores, then objects or functions."""
    stores = table("stores", (("node", False), ("objects", True), ("in memory", True), ("limit", True),
                              ("on disk", True)))
    for store in found["stores"]:
        stores.add_row(text(store["node_id"]), f"{store['count']:,}", size(store["memory_bytes"]),
                       size(store["limit_bytes"]), size(store["disk_bytes"]) if store["disk_bytes"] else "")
    part = objects(found, limit, width) if group == "object" else by_function(found, group, limit)
    rest = []
    if found["not_listed"]:
        rest.append(f"{found['not_listed']:,} smaller objects are not listed")
    if found["without_owner"]:
        rest.append(f"{found['without_owner']:,} objects in stores are kept for groups, or their owners did not answer")
    lines = ["; ".join(rest)] if rest else []
    if group == "object" and found["objects"]:
        lines.append("held: by references in the owner's process, by tasks that need it, by other processes (proc), "
                     "or as lineage of what may be lost (lin)")
    return Group(stores, part, Text("\n".join(lines)))


def objects(found: Mapping[str, Any], limit: int, width: int) -> Table:
    """The largest objects: held by references, tasks that need them, other processes, and lineage."""
    made = table("objects", (
        ("object", False), ("size", True), ("where", False), ("held", False), ("made by", False), ("owner", False)))
    made.columns[4].max_width = max(10, width - 66)
    for one in found["objects"][:limit]:
        where = one["kind"] if one["kind"] != "stored" else ", ".join(dict.fromkeys(one["places"])) or "elsewhere"
        held = [f"{one[name]} {word}" for name, word in (("refs", "ref"), ("tasks", "task"), ("processes", "proc"),
                                                        ("lineage", "lin")) if one[name]]
        made.add_row(one["shown"], size(one["size_bytes"]), text(where), ", ".join(held), text(one["name"]),
                     text(one["owner"]))
    return made


def by_function(found: Mapping[str, Any], group: str, limit: int) -> Table:
    """Sums by function, or by owner."""
    sums: dict[str, list[int]] = {}
    for one in found["functions"]:
        row = sums.setdefault(one["name" if group == "function" else "owner"], [0, 0])
        row[0] += one["count"]
        row[1] += one["size_bytes"]
    made = table(f"by {group}", ((group, False), ("objects", True), ("size", True)))
    for name, (count, size_bytes) in sorted(sums.items(), key=lambda row: -row[1][1])[:limit]:
        made.add_row(text(name), f"{count:,}", size(size_bytes))
    return made
