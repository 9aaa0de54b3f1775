"""The worker processes of a node: started, lent, watched, replaced. Which owner gets one is decided in node_leases."""

from __future__ import annotations

from .commands import CheckWorker, StartWorker, StopWorker, WorkerChecked
from .dispatch import Part, on
from .messages import Death, Goodbye, Ping, Pong, WorkerStarted, WorkerStuck
from .node_desk import SIGKILL, Desk, Tick, Worker

# Life of a worker process. blocked: its task waits in get, so its CPU is lent to others.
MOVES: frozenset[tuple[str, str]] = frozenset(
    (
        ("starting", "idle"),
        ("idle", "leased"),
        ("leased", "idle"),
        ("leased", "blocked"),
        ("blocked", "leased"),
        ("blocked", "idle"),
        ("starting", "dying"),
        ("idle", "dying"),
        ("leased", "dying"),
        ("blocked", "dying"),
    )
)

STARTING_MAX = 4  # beyond the slots, at the same time
QUICK_DEATH_S = 1.0  # a worker that dies sooner after its start may do so again
QUICK_DEATHS_FREE = 2  # so many in a row are replaced at once
CPU_S_STILL = 0.005  # a process that used less CPU than this between two checks stands still


class Pool(Part):
    """All worker processes; laws N-2, N-4."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.idle: dict[str, Worker] = {}  # by worker id, the one used last is at the end
        self.starting = 0
        self.dying = 0
        self.not_before_s = 0.0  # no start earlier: workers die at once
        self.quick_deaths = 0
        self.cannot_start = ""  # why the last start failed, until one succeeds
        self._number = 0
        self._beat = 0
        self._beat_s = 0.0
        self._timer_set = False

    # --- how many ---------------------------------------------------------------------------------

    def alive(self) -> int:
        """Processes that are not about to end."""
        return len(self.desk.workers) - self.dying

    def startable(self) -> int:
        """So many more may be started; those in which actors live are not counted, a program asks for each of them."""
        count = self.desk.settings.num_workers + self.desk.config.workers_extra_max - self.alive()
        if count <= 0:
            count += sum(bool(worker.actor) and worker.state != "dying" for worker in self.desk.workers.values())
        return count

    def replenish(self, now: float) -> None:
        """Starts workers until there is one for each slot."""
        missing = self.desk.settings.num_workers - self.alive()
        if missing > 0:
            self._start(missing, now)

    def want(self, count: int, now: float) -> bool:
        """Leases could be granted if there were so many more idle workers; False when the bound forbids any."""
        limit = self.startable()
        # A few at a time: what is wanted may be done by the first ones before the last ones are there.
        at_once = max(self.desk.settings.num_workers, STARTING_MAX)
        missing = min(min(count, at_once) - self.starting, limit)
        if missing > 0:
            self._start(missing, now)
        return limit > 0 or self.starting > 0

    def _start(self, count: int, now: float) -> None:
        if now < self.not_before_s:
            if not self._timer_set:
                self._timer_set = True
                self.desk.out.timer(self.not_before_s - now, Tick("workers"))
            return
        for _ in range(count):
            self._number += 1
            worker = Worker(f"{self.desk.node_id}.w{self._number}", started_s=now, heard_s=now)
            self.desk.workers[worker.worker_id] = worker
            self.starting += 1
            self.desk.counters["workers_started"] += 1
            self.desk.out.add(StartWorker(worker.worker_id))
        self.desk.report_due = True

    def timer_fired(self, now: float) -> None:
        """The wait after quick deaths is over."""
        self._timer_set = False
        self.replenish(now)
        self.desk.leases_due = True

    # --- states -----------------------------------------------------------------------------------

    def _move(self, worker: Worker, state: str) -> None:
        if (worker.state, state) not in MOVES:
            raise self.desk.bug(f"worker {worker.worker_id} cannot go from {worker.state} to {state}", worker.worker_id)
        if worker.state == "starting":
            self.starting -= 1
        elif worker.state == "idle":
            del self.idle[worker.worker_id]
        if state == "idle":
            self.idle[worker.worker_id] = worker
        elif state == "dying":
            self.dying += 1
        worker.state = state
        self.desk.report_due = True

    @on(WorkerStarted)
    def _started(self, event: WorkerStarted, now: float, sender: str) -> None:
        worker = self.desk.workers.get(event.worker_id)
        if worker is None or worker.address:
            return
        worker.pid, worker.address, worker.heard_s = event.pid, event.address, now
        self.cannot_start = ""
        self.desk.by_address[event.address] = worker
        if worker.state == "starting":
            worker.idle_since_s = now
            self._move(worker, "idle")
            self.desk.leases_due = True

    def has_for(self, devices: tuple[str, ...]) -> bool:
        """Whether an idle worker can be lent with these GPUs: a process that has begun to use GPUs keeps to those."""
        if not devices or not self.idle:
            return bool(self.idle)
        return self.startable() <= 0 or any(worker.devices in ((), devices) for worker in self.idle.values())

    def _best(self, devices: tuple[str, ...]) -> Worker:
        last_first = list(reversed(self.idle.values()))
        for wanted in (devices, ()):
            for worker in last_first:
                if worker.devices == wanted:
                    return worker
        return last_first[0]

    def lend(self, lease: int, root: str, devices: tuple[str, ...] = ()) -> Worker:
        """The idle worker that was used last (its caches are warm) for a lease; devices: its GPUs."""
        worker = self._best(devices) if self.desk.settings.gpus else next(reversed(self.idle.values()))
        worker.devices = devices or worker.devices
        self._move(worker, "leased")
        worker.lease, worker.root = lease, root
        return worker

    def take_back(self, worker: Worker, now: float) -> None:
        """The lease of a worker has ended."""
        worker.lease = 0
        if worker.state != "dying":
            worker.idle_since_s = now
            self._move(worker, "idle")

    def block(self, worker: Worker, blocked: bool) -> None:
        """The task of a leased worker begins or ends to wait in get."""
        self._move(worker, "blocked" if blocked else "leased")

    def kill(self, worker: Worker, reason: str, now: float, signal: int = SIGKILL) -> None:
        """Ends a worker process; the first reason counts."""
        if worker.state == "dying":
            if signal == SIGKILL:
                self.desk.out.add(StopWorker(worker.worker_id, signal))
            return
        worker.kill_reason, worker.killed_s = reason, now
        self._move(worker, "dying")
        self.desk.out.add(StopWorker(worker.worker_id, signal))

    def ended(self, death: Death, now: float) -> Worker | None:
        """A worker process was reaped: it is forgotten and returned; its slot is filled again."""
        worker = self.desk.workers.pop(death.worker_id, None)
        if worker is None:
            return None
        if worker.state != "dying":
            self._move(worker, "dying")
        asked = bool(worker.kill_reason) or (worker.told_to_end and not worker.lease)
        if not asked:
            self.desk.counters["workers_lost"] += 1
        self.dying -= 1
        self.cannot_start = self.cannot_start if death.pid else death.reason
        self.desk.by_address.pop(worker.address, None)
        for name, count in worker.counters.items():
            self.desk.past[name] = self.desk.past.get(name, 0) + count
        # Death while it is leased is the task's doing, not a sign that workers cannot live here.
        quick = not asked and not worker.lease and now - worker.started_s < QUICK_DEATH_S
        self._note_death(quick, now)
        self.desk.report_due = True
        self.desk.leases_due = True
        self.replenish(now)
        return worker

    def _note_death(self, quick: bool, now: float) -> None:
        if not quick:
            self.quick_deaths = 0
            return
        self.quick_deaths += 1
        if self.quick_deaths > QUICK_DEATHS_FREE:
            config = self.desk.config
            doublings = min(self.quick_deaths - QUICK_DEATHS_FREE - 1, 30)
            delay_s = min(config.restart_delay_s * 2**doublings, config.restart_delay_s_max)
            self.not_before_s = now + delay_s

    # --- watching ---------------------------------------------------------------------------------

    @on(Pong)
    def _pong(self, event: Pong, now: float, sender: str) -> None:
        """That it was heard is noted for every message."""

    def beat(self, now: float) -> None:
        """Once a heartbeat: asks for signs of life, judges the silent, ends what is superfluous."""
        config = self.desk.config
        if self._beat and now - self._beat_s > 4 * config.heartbeat_s:
            # This process itself stood still: the silence of the others is not theirs.
            for worker in self.desk.workers.values():
                worker.heard_s = max(worker.heard_s, now - config.heartbeat_s)
        self._beat += 1
        self._beat_s = now
        for worker in list(self.desk.workers.values()):
            self._watch(worker, now)
        self._reap_idle(now)
        self.replenish(now)

    def _watch(self, worker: Worker, now: float) -> None:
        config = self.desk.config
        if worker.state == "dying":
            if now - worker.killed_s > config.stop_grace_s:
                worker.killed_s = now
                self.desk.out.add(StopWorker(worker.worker_id, SIGKILL))
            return
        if worker.state == "starting":
            if now - worker.started_s > config.worker_start_s_max:
                self.kill(worker, f"did not start within {config.worker_start_s_max:.0f} s", now)
            return
        silence_s = now - worker.heard_s
        if silence_s >= config.heartbeat_s / 2:
            self.desk.out.send(worker.address, Ping(self._beat))
        if silence_s > config.suspect_after_s:
            self.desk.out.add(CheckWorker(worker.worker_id, worker.pid))
        else:
            worker.cpu_s = -1.0

    @on(WorkerChecked)
    def _checked(self, event: WorkerChecked, now: float, sender: str) -> None:
        worker = self.desk.workers.get(event.worker_id)
        if worker is None or worker.state in ("starting", "dying"):
            return
        silence_s = now - worker.heard_s
        if silence_s <= self.desk.config.suspect_after_s:
            return
        still = worker.cpu_s >= 0 and event.cpu_s - worker.cpu_s < CPU_S_STILL
        if event.stopped or still:
            self.kill(worker, f"frozen for {silence_s:.1f} s", now)
        else:
            worker.cpu_s = event.cpu_s  # busy in code that holds the interpreter: it gets more time

    @on(WorkerStuck)
    def _stuck(self, event: WorkerStuck, now: float, sender: str) -> None:
        worker = self.desk.workers.get(event.worker_id)
        if worker is not None:
            self.kill(worker, event.reason, now)

    def _reap_idle(self, now: float) -> None:
        surplus = self.alive() - self.desk.settings.num_workers
        if surplus <= 0:
            return
        old = [worker for worker in self.idle.values() if now - worker.idle_since_s > self.desk.config.worker_idle_s]
        for worker in old[:surplus]:
            # It ends by itself, unless others need what it owns; then it is asked again after a while.
            worker.idle_since_s, worker.told_to_end = now, True
            self.desk.out.send(worker.address, Goodbye("not needed any more"))
