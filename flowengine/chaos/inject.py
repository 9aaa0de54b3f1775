"""The failure laboratory on real processes: kill, freeze, cut, lose, at a named point or by a seeded plan. Shell.

Each order goes to the node that started the process, so only what the engine started is ever harmed.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

from flowengine.actors import ActorHandle, ActorMethod
from flowengine.asking import NodeInfo, nodes
from flowengine.chaos.arms import Arm
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.errors import BadType, BadValue, FlowError, UsageError
from flowengine.options import real, whole
from flowengine.refs import ObjectRef, checked, current_session

if TYPE_CHECKING:
    from flowengine.runtime.session import Session

START_PATIENCE_S = 5.0
POINTS = (
    "task.before_run", "task.after_run", "task.reply.before_send", "object.before_seal", "object.after_seal",
    "actor.constructor.before_run", "actor.restored", "actor.replay.before_call",
    "actor.call.before_run", "actor.call.after_run", "actor.reply.before_send",
    "actor.checkpoint.before_write", "actor.checkpoint.after_write",
)  # fmt: skip
kill = "kill"  # the action of at()
NOT_DEADLY = {int(number): number.name for number in (
    Signals.SIGCHLD, Signals.SIGCONT, Signals.SIGSTOP, Signals.SIGTSTP, Signals.SIGTTIN, Signals.SIGTTOU,
    Signals.SIGURG, Signals.SIGWINCH)}


def kill_worker(of: ObjectRef | ActorHandle | str, signal: int = 9) -> int:
    """Send a signal to the worker that runs or ran the ref's task, or of this worker_id; gives its pid.

    A worker that lives on for `stop_grace_s` gets SIGKILL. BadValue for a signal that is not for ending a process.
    """
    number = whole("signal", signal, 1, 64)
    if number in NOT_DEADLY:
        raise BadValue(f"signal {number} ({NOT_DEADLY[number]}) does not end a process; freeze and thaw stop a worker "
                       "and let it go on")
    session = current_session()
    found, worker_id, pid = worker_of(session, of)
    session.endpoint.send(found.address, m.ChaosOrdered("kill", worker_id, number))
    return pid


def freeze(of: ObjectRef | ActorHandle | str) -> int:
    """Stop a worker (SIGSTOP): it keeps its sockets open and does nothing; gives its pid."""
    return _harm_worker("freeze", of)


def thaw(of: ObjectRef | ActorHandle | str) -> int:
    """Let a frozen worker go on (SIGCONT); gives its pid."""
    return _harm_worker("thaw", of)


def _harm_worker(action: str, of: ObjectRef | ActorHandle | str) -> int:
    session = current_session()
    found, worker_id, pid = worker_of(session, of)
    session.endpoint.send(found.address, m.ChaosOrdered(action, worker_id))
    return pid


def worker_of(session: Session, of: ObjectRef | ActorHandle | str) -> tuple[NodeInfo, str, int]:
    """Node, worker_id and pid of what `of` names; raises UsageError when there is no such worker now."""
    if isinstance(of, ActorHandle):
        worker_id = _worker_of_actor(session, of)
    elif isinstance(of, ObjectRef):
        worker_id = checked(of).owner.worker_of(of.oid)
        if not worker_id:
            raise BadValue(f"no worker runs or ran {of!r}")
    elif isinstance(of, str):
        worker_id = of
    else:
        raise BadType(f"of must be a ref, an actor or a worker_id, not {of!r}")
    end = time.monotonic() + START_PATIENCE_S
    while True:
        named = [(info, worker) for info in nodes(session) for worker in info.workers if worker.worker_id == worker_id]
        if named and named[0][1].pid:
            return named[0][0], worker_id, named[0][1].pid
        if not named or time.monotonic() > end:  # else it is about to start
            raise BadValue(f"there is no worker {worker_id!r} now")
        time.sleep(0.01)


def _worker_of_actor(session: Session, actor: ActorHandle) -> str:
    """The worker_id of an actor's process; waits while it starts."""
    ref = actor._ref
    end = time.monotonic() + START_PATIENCE_S
    while True:
        if ref.owner == session.address:
            worker_id = session.owner.worker_of(ref.oid)
        else:
            worker_id = session.ask(ref.owner, "worker_of", ref.oid, scope="local")
        if worker_id:
            return str(worker_id)
        if time.monotonic() > end:
            raise BadValue(f"{actor!r} has no process now")
        time.sleep(0.01)


def kill_node(node_id: str) -> None:
    """Kill a node's process, and with it its workers and its store, as when its host loses power."""
    session = current_session()
    session.endpoint.send(_node(session, node_id).address, m.ChaosOrdered("kill", "node", 9))


def kill_head() -> None:
    """Kill the head of a local engine, whose launcher starts it again; BadValue in a cluster, where others start it."""
    session = current_session()
    if getattr(session, "connection", None) is not None:
        raise BadValue("the head of a cluster was started by others: kill its process on its host")
    session.endpoint.send(session.node, m.ChaosOrdered("kill", "head", 9))


def cut(node_id: str) -> None:
    """The links of this node carry nothing from now on, as if its cable was cut."""
    session = current_session()
    session.endpoint.send(_node(session, node_id).address, m.ChaosOrdered("cut", "node"))


def heal(node_id: str) -> None:
    """The links of a cut node carry again."""
    session = current_session()
    session.endpoint.send(_node(session, node_id).address, m.ChaosOrdered("heal", "node"))


def _node(session: Session, node_id: str) -> NodeInfo:
    if not isinstance(node_id, str):
        raise BadType(f"node_id must be the id of a node, as in flow.nodes(), not {node_id!r}")
    found = {info.node_id: info for info in nodes(session)}
    if node_id not in found:
        raise BadValue(f"there is no node {node_id!r}; there are {', '.join(found) or 'none'}")
    return found[node_id]


def lose(ref: ObjectRef) -> None:
    """Drop every copy of a stored value; its lineage stays. A value that lives inside of a message is not lost."""
    if not isinstance(ref, ObjectRef):
        raise BadType(f"expected an ObjectRef, not {ref!r}")
    checked(ref).step(s.LoseAsked(ref.oid))


def at(point: str, action: str, of: Any = None, nth: int = 1) -> Arm:
    """Do harm (flow.chaos.kill) to the worker that passes a named point for the nth time, once; see what came of it.

    of: a ref, a remote function, a task's name, an actor or a method of it: only its passages count. After a `with`
    block it is disarmed.
    """
    if point not in POINTS:
        raise BadValue(f"there is no point {point!r}; there are {', '.join(POINTS)}")
    if action != kill:
        raise BadValue(f"action must be flow.chaos.kill, not {action!r}")
    if isinstance(of, ObjectRef):
        name = of.oid[:16].hex()
    elif isinstance(of, ActorHandle):
        name = of.actor_id
    elif isinstance(of, ActorMethod):
        name = f"{of._handle.actor_id}.{of._name}"
    elif of is None or isinstance(of, str):
        name = of or ""
    else:
        name = getattr(of, "_name", "")
        if not name:
            raise BadType(f"of must be a ref, a remote function, a task's name, an actor or its method, not {of!r}")
    session = current_session()
    arm = (secrets.token_hex(6), point, name, whole("nth", nth, 1, 1_000_000))
    folder = Path(session.values.segments.folder) / "chaos"
    folder.mkdir(mode=0o700, exist_ok=True)
    part = folder / f"{arm[0]}.part"
    part.write_text(json.dumps(arm))
    part.rename(folder / f"{arm[0]}.arm")  # a worker that starts at this moment reads a whole one
    told = {""}
    end = time.monotonic() + START_PATIENCE_S
    while True:  # one that starts may have read the folder before
        workers = [worker["address"] for info in session.ask(session.node, "nodes") for worker in info["workers"]]
        for address in dict.fromkeys(workers):
            if address not in told:
                told.add(address)
                with contextlib.suppress(FlowError):  # it has ended meanwhile; the one in its place finds the file
                    session.ask(address, "arm", arm, scope="local")
        if "" not in workers or time.monotonic() > end:
            return Arm(folder, arm[0], point, arm[3])
        time.sleep(0.01)


@contextlib.contextmanager
def plan(seed: int, kill_worker_every_s: float | None = None, lose_every_s: float | None = None) -> Iterator[None]:
    """While the block runs, kill random workers and lose random values at these intervals, chosen by the seed."""
    whole("seed", seed, 0, 1 << 62)
    session = current_session()
    ended = threading.Event()
    harms = {"kill_worker_every_s": (kill_worker_every_s, _kill_one), "lose_every_s": (lose_every_s, _lose_one)}
    threads = []
    for number, (name, (every_s, harm)) in enumerate(harms.items()):
        if every_s is None:
            continue
        chance = random.Random(seed * 2 + number)
        period_s = real(name, every_s, 0.001, 86_400)
        threads.append(threading.Thread(target=_repeat, args=(session, ended, period_s, harm, chance), daemon=True))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _repeat(session: Session, ended: threading.Event, period_s: float, harm: Any, chance: random.Random) -> None:
    while not ended.wait(period_s) and not session.closed:
        # The victim may be gone by now; the next turn finds another.
        with contextlib.suppress(UsageError, FlowError):
            harm(session, chance)


def _kill_one(session: Session, chance: random.Random) -> None:
    alive = [w.worker_id for info in nodes(session) for w in info.workers if w.state in ("leased", "idle", "blocked")]
    if alive:
        kill_worker(chance.choice(sorted(alive)))


def _lose_one(session: Session, chance: random.Random) -> None:
    # What a task has put is not made again while the worker that owns it lives.
    known = list(session.owner.objects.values())
    stored = [obj for obj in known if isinstance(obj.value, m.Stored) and obj.task and not obj.owner]
    if stored:
        session.step(s.LoseAsked(chance.choice(stored).oid))
