"""What `flow` shows of a cluster, as tables and text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowengine.observe.tables import queues

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flowengine.runtime.connection import Connection

MIB = 1 << 20
MEMORY = ("memory",)  # amounts in bytes
WIDTH_MIN = 100  # of a table that does not go to a terminal


class NodeView:
    """A node as the head lists it, and what it says itself (None: no answer)."""

    def __init__(
        self, listed: Mapping[str, Any], own: Mapping[str, Any] | None, store: Mapping[str, int] | None
    ) -> None:
        self.listed = listed
        self.own = own
        self.store = store


def console() -> Console:
    """The terminal, or a file that is wide enough."""
    found = Console(highlight=False)
    if not found.is_terminal:
        found = Console(highlight=False, width=max(WIDTH_MIN, found.width))
    return found


def show_status(connection: Connection, nodes: Sequence[NodeView], stats: Iterable[Mapping[str, Any] | None],
                waiting: Sequence[Mapping[str, Any]] = ()) -> None:
    """One row a node, then what waits for slots, then the sums of all counters."""
    out = console()
    count = f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
    out.print(Text(f"session {connection.session}, head {connection.address.partition('#')[0]}, {count}"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("node", "host", "workers", "free", "store", "queued"):
        table.add_column(name, overflow="fold")
    for view in nodes:
        entry = view.own or view.listed
        store = "no answer" if view.store is None else shown_store(view.store)
        table.add_row(entry["node_id"], entry["host"], shown_workers(entry["workers"]), shown_free(entry), store,
                      str(entry["queued"]))
    out.print(table)
    queued = queues(waiting, out.width)
    if queued is not None:
        out.print(queued)
    sums: Counter[str] = Counter()
    for counters in stats:
        sums.update({name: count for name, count in (counters or {}).items() if isinstance(count, int | float)})
    counted = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    counted.add_column("counter")
    counted.add_column("sum", justify="right")
    for name in sorted(name for name, count in sums.items() if count):
        counted.add_row(name, f"{sums[name]:,}")
    out.print(counted)


def show_page(url: str, reason: str) -> None:
    """Where the live page is."""
    console().print(Text(f"page {url}" if url else f"no page: {reason}"), soft_wrap=True)


def tunnel(head: str, url: str) -> str:
    """The command that makes a page of another host's loopback one of this host's."""
    host = head.partition("://")[2].partition("#")[0].rpartition(":")[0]
    port = url.partition("/?")[0].rpartition(":")[2]
    return f"ssh -N -L {port}:127.0.0.1:{port} {host.strip('[]')}"


def shown_workers(workers: Sequence[Any]) -> str:
    """How many are in which state."""
    states = Counter(worker["state"] if isinstance(worker, dict) else worker[2] for worker in workers)
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"


def shown_free(entry: Mapping[str, Any]) -> str:
    """Free of total, a line for each resource."""
    total, available = dict(entry["total"]), dict(entry["available"])
    lines = []
    for name, amount in sorted(total.items()):
        unit = " GiB" if name in MEMORY else ""
        lines.append(f"{name} {shown_amount(name, available.get(name, 0))} of {shown_amount(name, amount)}{unit}")
    return "\n".join(lines)


def shown_amount(name: str, amount: float) -> str:
    """An amount as people read it; of memory in GiB."""
    return f"{amount / (1 << 30):.1f}" if name in MEMORY else f"{amount:g}"


def shown_store(store: Mapping[str, int]) -> str:
    """What of the store is used."""
    used = (store["used_bytes"] + store["granted_bytes"]) / MIB
    lines = [f"{used:,.1f} of {store['limit_bytes'] / MIB:,.0f} MiB"]
    for name in ("pool_bytes", "disk_bytes"):
        if store[name]:
            lines.append(f"{name.removesuffix('_bytes')} {store[name] / MIB:,.1f} MiB")
    return "\n".join(lines)


def show_stack(entry: Mapping[str, Any], stacks: Mapping[str, Sequence[str]] | None, threads: Sequence[str] | None,
               running: Mapping[str, Sequence[Any]] | None) -> None:
    """A node, then each of its processes, with the task that a worker runs."""
    out = console()
    where = f"node {entry['node_id']} on {entry['host']}"
    out.rule(Text(where))
    show_threads(out, where, threads)
    rest = dict(stacks or {})
    for worker_id, (pid, task, attempt, name) in sorted((running or {}).items()):
        doing = f"runs {name or 'task'} {task[:12]}, attempt {attempt}" if task else "runs no task"
        show_threads(out, f"worker {worker_id} pid {pid}: {doing}", rest.pop(f"worker {pid}", None))
    for process, found in sorted(rest.items()):
        show_threads(out, process, found)


def show_threads(out: Console, title: str, threads: Sequence[str] | None) -> None:
    """One process."""
    out.print(Text(title, style="bold"))
    if threads is None:
        out.print(Text("  no answer: it is busy in code that does not let other threads run, or has ended\n"))
    for text in threads or ():
        out.print(Text("\n".join("  " + line for line in text.rstrip().splitlines()) + "\n"), soft_wrap=True)
