"""The command `flow`: starts a head or a node on this host, shows what a cluster does, ends it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from flowengine.api import default_state_dir, driver_of, driver_settings, init, local_folder, shutdown
from flowengine.config import from_environment, make_config
from flowengine.errors import BadValue, FlowError
from flowengine.objects.session_folders import session_folder
from flowengine.observe import screens
from flowengine.observe.timeline import Span, on_one_clock, trace
from flowengine.runtime.answers import NAME_DIGITS_MIN
from flowengine.runtime.connection import (
    Connection,
    head_settings,
    listens,
    local_sessions,
    read_connection,
    session_path,
    write_private,
)
from flowengine.runtime.open_files import check_open_files
from flowengine.runtime.settings import LauncherReady, LauncherSettings

if TYPE_CHECKING:
    from flowengine.recovery.replay import Found
    from flowengine.runtime.driver import DriverSession

log = logging.getLogger("flowengine.cli")

STORE_ROOT = "/dev/shm"
SECRET_CHECK_S = 3.0
END_PATIENCE_S = 10.0
END_LOOK_S = 0.1
PIPE_BROKEN = 128 + signal.SIGPIPE
BAD_USAGE = 2  # as argparse has it


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; gives the exit code."""
    known = parser()
    options = known.parse_args(arguments)
    if options.command is None:
        known.print_help(sys.stderr)
        return BAD_USAGE
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("flowengine").setLevel(logging.INFO)
    try:
        code: int = options.run(options)
        return code
    except BrokenPipeError:  # as `flow logs | head` has it: what is left to write goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_BROKEN
    except (FlowError, OSError) as error:
        print(f"flow {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """What may be written after `flow`."""
    top = argparse.ArgumentParser(prog="flow", description=__doc__)
    commands = top.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        added.set_defaults(run=run)
        added.add_argument("--state-dir", metavar="DIR", help="where state is kept (default: a folder of this user)")
        return added

    head = command("head", run_head_command)
    head.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="of this host, as other hosts reach it")
    head.add_argument("--connection-file", required=True, metavar="FILE", help="written for nodes and programs")
    head.add_argument("--port", type=int, default=0, help="default: the last one, or any")
    head.add_argument("--no-tls", action="store_true", help="do not encrypt what goes between hosts")
    head.add_argument("--page-port", type=int, metavar="N",
                      help="of the live page, on this host only (default: any, from when somebody asks for it on)")
    head.add_argument("--metrics-port", type=int, metavar="N",
                      help="serve /metrics without a token, on this host only")
    node = command("node", run_node_command)
    node.add_argument("--join", required=True, metavar="FILE", help="connection file of the head")
    node.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="of this host, as other hosts reach it")
    node.add_argument("--num-workers", type=int, metavar="N", help="default: the CPUs of this host")
    node.add_argument("--resources", metavar="JSON", help='more amounts that tasks may ask for, as {"disk": 2}')
    node.add_argument("--object-store-bytes", type=int, metavar="N", help="default: 30 %% of the memory")
    for name, run in (("status", run_status), ("stack", run_stack), ("stop", run_stop), ("timeline", run_timeline),
                      ("story", run_story), ("explain", run_explain)):
        asking = command(name, run)
        asking.add_argument("--join", metavar="FILE", help="connection file (default: your newest local engine)")
        if name == "timeline":
            asking.add_argument("out", metavar="OUT.json")
        elif name == "status":
            asking.add_argument("--json", action="store_true", help="for scripts: all that the live page shows")
        elif name in ("story", "explain"):
            asking.add_argument("id", metavar="ID",
                                help="of a task, object, actor, worker or node (its start will do), or of a group")
    for name, run in (("top", run_top), ("memory", run_memory), ("logs", run_logs)):
        watching = command(name, run)
        watching.add_argument("--join", metavar="FILE", help="connection file (default: your newest local engine)")
        watching.add_argument("--json", action="store_true", help="for scripts")
        add_watch_arguments(watching, name)
    page = command("page", run_page)
    page.add_argument("--join", metavar="FILE", help="connection file (default: your newest local engine)")
    page.add_argument("--open", action="store_true", help="show it in the browser of this host")
    replay = command("replay", run_replay)
    replay.add_argument("id", metavar="ID", nargs="?", help="of a task, actor or call; its start will do")
    replay.add_argument("--join", metavar="FILE", help="connection file (default: your newest local engine)")
    replay.add_argument("--call", metavar="N", type=int, help="of an actor: how many calls of its life are run")
    replay.add_argument("--no-debug", action="store_true", help="run through, without stops")
    place = replay.add_mutually_exclusive_group()
    place.add_argument("--to", metavar="FILE", help="write the record into a file instead")
    place.add_argument("--from", metavar="FILE", dest="source", help="take the record from a file")
    return top


def add_watch_arguments(command: argparse.ArgumentParser, name: str) -> None:
    """What top, memory and logs take."""
    if name == "top":
        command.add_argument("--once", action="store_true", help="print it once")
        command.add_argument("--interval", type=float, default=1.0, metavar="S", help="between two looks (default: 1)")
    elif name == "memory":
        command.add_argument("--by", choices=("object", "function", "owner"), default="object")
        command.add_argument("--limit", type=int, default=25, metavar="N", help="rows (default: 25)")
    else:
        command.add_argument("id", metavar="ID", nargs="?", default="",
                             help="of a worker, an actor or a task (its start will do), or a worker's process id")
        command.add_argument("--follow", "-f", action="store_true", help="go on until ctrl-c")
        command.add_argument("--lines", "-n", type=int, default=100, metavar="N", help="the last ones (default: 100)")


def state_dir_of(options: argparse.Namespace) -> str:
    """Where state is kept."""
    return local_folder(options.state_dir or default_state_dir())


# --- head and node ------------------------------------------------------------------------------------------------


def check_host(host: str) -> None:
    """Raise BadValue when nobody can listen at this address here."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise BadValue(f"--host must be an address of this host, not {host!r}: {error}") from error


def run_head_command(options: argparse.Namespace) -> int:
    """be the head of a cluster; started again with the same state it continues"""
    from flowengine.runtime.launcher import run_head

    check_host(options.host)
    check_open_files()
    if not 0 <= options.port < 65_536:
        raise BadValue(f"--port must be between 0 and 65535, not {options.port}")
    if os.path.isdir(options.connection_file):
        raise BadValue(f"--connection-file must name a file, and {options.connection_file} is a folder")
    state_dir = state_dir_of(options)
    os.makedirs(state_dir, mode=0o700, exist_ok=True)
    asked = {name: port for name in ("page_port", "metrics_port") if (port := getattr(options, name)) is not None}
    settings = head_settings(options.host, os.path.abspath(options.connection_file), state_dir, not options.no_tls,
                             make_config({**from_environment(os.environ), **asked}), options.port)
    if other := asyncio.run(other_head(options.connection_file, settings.session)):
        raise BadValue(f"{options.connection_file} is of another head, which runs at {other}, and nobody would find "
                       "that one any more: end it first, or give this one a file of its own")
    return run_head(settings)


async def other_head(file: str, session: str) -> str:
    """Where the head runs to which a connection file leads, if there is one, and it is of another session."""
    from flowengine.runtime.visitor import Visitor

    with contextlib.suppress(FlowError):  # no file, not one of ours, or nobody answers there
        known = read_connection(file)
        if known.session != session and listens(known.address):
            async with Visitor(known):
                return known.address.partition("#")[0]
    return ""


def run_node_command(options: argparse.Namespace) -> int:
    """be a node: this host's store and workers"""
    check_host(options.host)
    connection = read_connection(options.join)
    with presence(connection):
        from flowengine.runtime.launcher import run_launcher
        from flowengine.runtime.visitor import check_secret

        asked = driver_settings(options.num_workers, resources_of(options.resources), options.object_store_bytes,
                                options.state_dir, (True, None))
        os.makedirs(asked.state_dir, mode=0o700, exist_ok=True)
        asyncio.run(check_secret(connection, SECRET_CHECK_S))
        settings = LauncherSettings(
            host=options.host, session=connection.session, secret=connection.secret_bytes, total=asked.total,
            num_workers=asked.num_workers, store_limit_bytes=asked.store_limit_bytes, state_dir=asked.state_dir,
            durable_url=asked.durable_url, tls=connection.tls, store_root=STORE_ROOT, head=connection.address,
            config=asked.config, watch_parent=False, connection_path=os.path.abspath(options.join))
        check_open_files(settings.num_workers, settings.extra_workers)

        def tell(ready: LauncherReady) -> None:
            log.info("node %s listens at %s", ready.node_id, ready.node)

        return run_launcher(settings, tell)


@contextlib.contextmanager
def presence(connection: Connection) -> Iterator[None]:
    """While this process lives, programs of this host know that a node is here or about to be."""
    from flowengine.runtime.driver import COMING_NODE

    folder = session_folder(COMING_NODE + connection.session, os.getpid(), STORE_ROOT)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(folder))  # when nothing else of this user is there


def resources_of(text: str | None) -> dict[str, float] | None:
    """The amounts in --resources."""
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, float])
    except msgspec.MsgspecError as error:
        raise BadValue(f"--resources must be a JSON object of numbers, as {{\"disk\": 2}}: {error}") from error


# --- asking -------------------------------------------------------------------------------------------------------


def connection_of(options: argparse.Namespace) -> Connection:
    """The cluster that is meant."""
    if options.join:
        return read_connection(options.join)
    found = local_sessions(state_dir_of(options))
    if not found:
        raise BadValue(f"no engine of yours that keeps its state in {state_dir_of(options)} runs on this host; "
                       "name a cluster with --join FILE")
    return found[0]


def run_status(options: argparse.Namespace) -> int:
    """nodes, workers, free resources, store, what waits for slots and why, counters"""
    connection = connection_of(options)
    if options.json:
        from flowengine.observe import watch

        print(watch.as_json(asyncio.run(watch.looked(connection))))
        return 0
    asyncio.run(_status(connection))
    return 0


async def _status(connection: Connection) -> None:
    from flowengine.runtime.visitor import Visitor

    async with Visitor(connection) as visitor:
        nodes = await visitor.ask_head("nodes")
        page, head, bundles, fresh, stores, stats, seen = await asyncio.gather(
            visitor.ask_head("page"), visitor.ask_head("stats"), visitor.ask_head("bundles.waiting"),
            visitor.ask_all(nodes, "nodes"), visitor.ask_all(nodes, "store"), visitor.ask_all(nodes, "stats"),
            visitor.ask_all(nodes, "seen"))
    views = [
        screens.NodeView(entry, own[0] if own else None, store)
        for entry, own, store in zip(nodes, fresh, stores, strict=True)
    ]
    waiting = [queue for answer in seen for process in (answer or ())[1:] for queue in process.get("queues", ())]
    waiting += bundles or []
    screens.show_status(connection, views, [head, *stats], waiting)
    screens.show_page(*page)


def run_page(options: argparse.Namespace) -> int:
    """tell the address of the live page, which has the token that opens it, or show it"""
    connection = connection_of(options)
    url, reason = asyncio.run(_page(connection))
    if not url:
        raise FlowError(f"the head has no page: {reason}")
    print(url)
    if options.open:
        open_page(url, state_dir_of(options))
    elif not listens(url.partition("/?")[0] + "#page"):
        print(f"It is for a browser on the head's host; from here: {screens.tunnel(connection.address, url)}",
              file=sys.stderr)
    return 0


async def _page(connection: Connection) -> tuple[str, str]:
    from flowengine.runtime.visitor import Visitor

    async with Visitor(connection) as visitor:
        url, reason = await visitor.ask_head("page")
    return url, reason


def open_page(url: str, state_dir: str) -> None:
    """Show a page in a browser; the address goes through a file of this user, as others may see what is started."""
    import webbrowser

    os.makedirs(state_dir, mode=0o700, exist_ok=True)
    path = Path(state_dir, "page.html")
    write_private(path, f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">'.encode())
    if not webbrowser.open(path.as_uri()):
        raise FlowError("no browser was found on this host; open the address above")


def run_stack(options: argparse.Namespace) -> int:
    """what every worker and node does now, thread by thread"""
    asyncio.run(_stack(connection_of(options)))
    return 0


async def _stack(connection: Connection) -> None:
    from flowengine.runtime.visitor import Visitor

    async with Visitor(connection) as visitor:
        nodes = await visitor.ask_head("nodes")
        stacks, threads, running = await asyncio.gather(
            visitor.ask_all(nodes, "stack"), visitor.ask_all(nodes, "threads"), visitor.ask_all(nodes, "running"))
    for found in zip(nodes, stacks, threads, running, strict=True):
        screens.show_stack(*found)


def run_top(options: argparse.Namespace) -> int:
    """nodes, workers, CPU, memory, what runs and what waits, again and again; q ends it"""
    from flowengine.observe import watch

    return watch.top(connection_of(options), options.interval, options.once, options.json)


def run_memory(options: argparse.Namespace) -> int:
    """which objects take the memory, where they lie, and who holds them"""
    from flowengine.observe import watch

    return watch.memory(connection_of(options), options.by, options.limit, options.json)


def run_logs(options: argparse.Namespace) -> int:
    """what workers have printed: all, or a worker, an actor, a task"""
    from flowengine.observe import watch

    return watch.logs(connection_of(options), options.id, options.lines, options.follow, options.json)


def run_story(options: argparse.Namespace) -> int:
    """what happened to a task, call, object, actor, worker or node"""
    check_id(options.id)
    connection = connection_of(options)
    lines = [*asyncio.run(_story(connection, options.id)), *asyncio.run(_explained(connection, options.id))]
    for line in lines:
        print(line)
    if not lines:
        print(f"nobody remembers {options.id}{hint(options.id)}", file=sys.stderr)
    return 0 if lines else 1


def run_explain(options: argparse.Namespace) -> int:
    """what a task waits for; why an actor was checkpointed or not, a result written to durable storage or not"""
    check_id(options.id)
    texts = asyncio.run(_explained(connection_of(options), options.id))
    for text in texts:
        print(text)
    if not texts:
        print(f"nobody has {options.id} now{hint(options.id) or ': flow story may tell what became of it'}",
              file=sys.stderr)
    return 0 if texts else 1


def check_id(name: str) -> None:
    """Raise BadValue for no name at all, which would be the start of every one."""
    if not name.strip():
        raise BadValue("ID must not be empty: give that of a task, object, actor, worker or node")


def hint(name: str) -> str:
    """What to do about a name that is too short."""
    return f": give at least {NAME_DIGITS_MIN} characters of an id" if len(name) < NAME_DIGITS_MIN else ""


async def _explained(connection: Connection, name: str) -> list[str]:
    from flowengine.runtime.visitor import Visitor

    async with Visitor(connection) as visitor:
        found = await visitor.ask_all(await visitor.ask_head("nodes"), "explain", name)
    return [text for texts in found for text in texts or ()]


async def _story(connection: Connection, name: str) -> list[str]:
    from flowengine.runtime.visitor import Visitor

    async with Visitor(connection) as visitor:
        nodes = await visitor.ask_head("nodes")
        told, here = await asyncio.gather(visitor.ask_head("story", name), visitor.ask_all(nodes, "story", name))
    lines = [f"{line}  (head)" for line in told or ()]
    for entry, found in zip(nodes, here, strict=True):
        lines += [f"{line}  (node {entry['node_id']})" for line in found or ()]
    return sorted(dict.fromkeys(lines))


def run_replay(options: argparse.Namespace) -> int:
    """run a task or an actor again in this process from its record, under pdb"""
    from flowengine.recovery import records, replay

    if (options.id is None) == (options.source is None):
        left = ", ".join(records.newest(state_dir_of(options))) or "nothing"
        raise BadValue("name either a task, an actor or a call, or a file with --from; what programs have left in "
                       f"{state_dir_of(options)}: {left}")
    debugger = None if options.to else replay.debugger_for(not options.no_debug, "--no-debug to run through")
    sys.path.insert(0, os.getcwd())  # as for the program, which could import what is beside it
    found, session = record_for(options)
    try:
        if options.to:
            replay.write(options.to, found, session)
            print(f"the record of {found.name} is in {options.to}")
            return 0
        told = replay.tell(found, session, options.call, debugger)
        print("\n".join(told))
        return 0
    finally:
        shutdown()


def record_for(options: argparse.Namespace) -> tuple[Found, DriverSession | None]:
    """What is to be replayed: from a file, from a running engine, or from what a program has left on disk."""
    from flowengine.recovery import records, replay

    if options.source:
        name, pieces = records.read_record(options.source)
        return replay.find(lambda digits: pieces, name), None
    state_dir, digits = state_dir_of(options), options.id.lower()
    running = local_sessions(state_dir)
    file = options.join or (session_path(state_dir, running[0].session) if running else None)
    why = f"no engine of yours that keeps its state in {state_dir} runs on this host"
    if file is not None:
        session = driver_of(init(address=file, state_dir=state_dir, log_to_driver=False))
        try:
            return replay.find(session.ask_record, digits), session
        except BadValue as error:
            why = str(error)
    kept = records.kept_record(state_dir, digits)
    if kept is None:
        shutdown()
        last = records.newest(state_dir)
        raise BadValue(f"{why}; what programs have left in {state_dir}: {', '.join(last) or 'nothing'}")
    return replay.find(lambda digits: kept[1], kept[0]), None


def run_timeline(options: argparse.Namespace) -> int:
    """write what ran when and where as a Chrome trace, for Perfetto"""
    found = asyncio.run(_spans(connection_of(options)))
    Path(options.out).write_bytes(msgspec.json.encode(trace(found)))
    print(f"{len(found)} runs in {options.out}")
    return 0


async def _spans(connection: Connection) -> list[Span]:
    from flowengine.runtime.visitor import Visitor

    loop = asyncio.get_running_loop()
    ahead_us: dict[str, int] = {}
    async with Visitor(connection) as visitor:
        nodes = await visitor.ask_head("nodes")
        await visitor.ask_all(nodes, "clock")  # the links are up now, so the next answers take one round trip
        for entry in nodes:
            asked_s = loop.time()
            (clock_us,) = await visitor.ask_all([entry], "clock")
            if clock_us is not None:
                ahead_us[entry["node_id"]] = clock_us - round((asked_s + loop.time()) / 2 * 1e6)
        told = await visitor.ask_all(nodes, "spans")
    found: list[Span] = []
    for entry, rows in zip(nodes, told, strict=True):
        found += on_one_clock(msgspec.convert(rows or [], list[Span]), entry["node_id"], ahead_us)
    return sorted(found, key=lambda span: span.began_us)


# --- ending -------------------------------------------------------------------------------------------------------


def run_stop(options: argparse.Namespace) -> int:
    """end all nodes and the head"""
    connection = connection_of(options)
    file = session_path(state_dir_of(options), connection.session)  # of a local engine, whose launcher removes it last
    count, left = asyncio.run(_stop(connection, file.exists))
    print(f"{count} node{'' if count == 1 else 's'} and the head of session {connection.session} were told to end")
    for address in left:
        print(f"still there after {END_PATIENCE_S:g} s: {address}", file=sys.stderr)
    return 1 if left else 0


async def _stop(connection: Connection, is_here: Callable[[], bool]) -> tuple[int, list[str]]:
    from flowengine.runtime.process import END_TOPIC
    from flowengine.runtime.visitor import Visitor

    loop = asyncio.get_running_loop()
    async with Visitor(connection) as visitor:
        nodes: list[dict[str, Any]] = await visitor.ask_head("nodes")
        ending = [*(entry["address"] for entry in nodes), connection.address]
        await visitor.ask_all(nodes, END_TOPIC)
        with contextlib.suppress(FlowError):  # a local engine's head ends with its node
            await visitor.ask_head(END_TOPIC)
        end_s = loop.time() + END_PATIENCE_S
        while (left := [address for address in ending if address not in visitor.lost]) or is_here():
            if loop.time() > end_s:
                break
            await asyncio.sleep(END_LOOK_S)
    return len(nodes), left


if __name__ == "__main__":
    sys.exit(main())
