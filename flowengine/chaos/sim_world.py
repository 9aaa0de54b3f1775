"""One simulated run: the cluster of a scenario, the program of a seed, the harm of a plan, and what was seen."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

from flowengine.core import commands as c
from flowengine.core import messages as m
from flowengine.core import owner_state as s
from flowengine.core.invariants import check as laws_of

from .faults import Fault, plan
from .sim_actor_programs import ActorWriter
from .sim_actors import ActorBook
from .sim_code import Driver, Worker
from .sim_gangs import Meetings
from .sim_net import Clock, Network
from .sim_node import REAP_S, SimHead, SimNode
from .sim_programs import Body, Writer
from .sim_resources import ResourceWriter
from .sim_settings import Scenario

RESTART_S = 0.6
TRACE_LINES = 4_000


class Broken(Exception):
    """A law was broken or a machine failed: the run ends here."""


class World:
    """Everything that a run consists of."""

    def __init__(self, scenario: Scenario, seed: int, program: Body | None = None) -> None:
        self.scenario = scenario
        self.seed = seed
        self.dice = Random(seed)
        self.clock = Clock()
        self.net = Network(self.clock, self.dice, scenario.net)
        writer = ActorWriter if scenario.actors else ResourceWriter if scenario.resources else Writer
        self.program = program or writer(Random(seed * 2 + 1), scenario).program()
        self.actors = ActorBook()
        self.meetings = Meetings()
        self.head_address = "tcp://head#0"
        self.rows: dict[str, bytes] = {}
        self.nodes: dict[str, SimNode] = {}
        self.workers: dict[str, Worker] = {}
        self.by_id: dict[tuple[str, str], Worker] = {}  # (node address, worker_id)
        self.names: dict[int, bytes] = {}
        self.bodies: dict[bytes, Body] = {}
        self.blobs: dict[bytes, bytes] = {}
        self.choices: dict[tuple[bytes, int], bytes] = {}
        self.lives: dict[str, int] = {}
        self.files: dict[str, bytes] = {}  # of checkpoints
        self.durable: dict[bytes, bytes] = {}  # copies of results
        self.tasks_submitted = 0
        self.events = 0
        self.breaches: list[str] = []
        self.put_lost = False  # a store that may have held the only copy of a put value is gone
        self.trace: deque[tuple[float, str, str, Any]] | None = None
        self.head: SimHead
        self.driver: Driver
        self.faults: tuple[Fault, ...] = ()

    # --- beginning --------------------------------------------------------------------------------

    def start(self) -> None:
        """The cluster comes up and the program begins."""
        self.start_head()
        for index in range(self.scenario.nodes):
            self.start_node(f"n{index}")
        first = next(iter(self.nodes.values()))
        self.driver = Driver(self, "tcp://driver#0", first)
        self.net.add(self.driver)
        self.clock.after(0.05, self.driver.start)
        self.faults = plan(self.dice, self.scenario)
        for fault in self.faults:
            self.clock.after(0.05 + fault.at_s, self.harm, fault)

    def start_head(self) -> None:
        """The head, with what its journal holds."""
        self.head = SimHead(self)
        self.net.add(self.head)
        self.head.start()

    def start_node(self, node_id: str) -> SimNode:
        """A node process in a new life."""
        life = self.lives[node_id] = self.lives.get(node_id, 0) + 1
        node = SimNode(self, f"tcp://{node_id}#{life}", node_id)
        self.nodes[node.address] = node
        self.net.add(node)
        node.start()
        return node

    def start_worker(self, node: SimNode, worker_id: str) -> None:
        """A forked worker comes up."""
        life = self.lives[node.address] = self.lives.get(node.address, 0) + 1
        worker = Worker(self, f"{node.address}/{worker_id}.{life}", node, worker_id)
        self.workers[worker.address] = worker
        self.by_id[node.address, worker_id] = worker
        self.net.add(worker)
        worker.start()

    def worker_of(self, node: SimNode, worker_id: str) -> Worker | None:
        """The living process behind a worker_id."""
        worker = self.by_id.get((node.address, worker_id))
        return worker if worker is not None and worker.alive else None

    def is_cut(self, first: str, second: str) -> bool:
        """Whether nothing goes between two hosts."""
        return first != second and (first in self.net.cut or second in self.net.cut)

    # --- what is seen -----------------------------------------------------------------------------

    def tell(self, where: str, sender: str, event: Any) -> None:
        """Keep a line of the story."""
        assert self.trace is not None
        self.trace.append((self.clock.now, where, sender, event))

    def check(self, machine: object, where: str, event: m.Message) -> None:
        """The laws of the machine that has just moved."""
        self.events += 1
        if self.events % self.scenario.check_every:
            return
        breaches = laws_of(machine)
        if breaches:
            raise Broken(f"{self.clock.now:.4f} {where} after {type(event).__name__}: " + "; ".join(breaches[:3]))

    def chosen(self, task: bytes, number: int, choice: bytes) -> None:
        """A task has made or repeated a choice."""
        self.choices[task, number] = choice

    # --- ends -------------------------------------------------------------------------------------

    def end_worker(self, worker: Worker, reason: str) -> None:
        """The process ends; its node reaps it."""
        if not worker.alive:
            return
        self.net.died(worker)
        self.actors.died(worker.address, self.clock.now)
        del self.workers[worker.address]
        death = m.Death(
            worker.worker_id, worker.host, 1, -9, worker.running, worker.running_attempt, reason
        )
        node = worker.node
        self.clock.after(REAP_S * (0.2 + self.dice.random()), node.run, node.step, c.WorkerEnded(death))

    def end_node(self, node: SimNode) -> None:
        """The node process ends, its store and its workers with it."""
        if node.memory or node.disk or node.machine.store.granted_bytes:
            self.put_lost = True
        self.net.died(node)
        node.memory.clear()
        node.disk.clear()
        for worker in [worker for worker in self.workers.values() if worker.node is node]:
            self.end_worker(worker, "its node is gone")

    def restart_node(self, node_id: str) -> None:
        """The supervisor starts the node again."""
        node = self.start_node(node_id)
        if self.driver.node.node_id == node_id:
            self.clock.after(0.05, self.driver.run, self.driver.moved, node)

    # --- harm -------------------------------------------------------------------------------------

    def harm(self, fault: Fault) -> None:
        """Do one harm of the plan, if there is a victim."""
        if self.trace is not None:
            self.tell("FAULT", fault.kind, fault)
        getattr(self, f"harm_{fault.kind}")(fault)

    def living_nodes(self) -> list[SimNode]:
        """Nodes that live, but for the driver's own host when harm would end the program with it."""
        return [node for node in self.nodes.values() if node.alive]

    def harm_kill_worker(self, fault: Fault) -> None:
        """A worker dies; busy ones first."""
        workers = [worker for worker in self.workers.values() if worker.running] or list(self.workers.values())
        if workers:
            self.end_worker(workers[int(fault.luck * len(workers))], "killed")

    def harm_kill_actor(self, fault: Fault) -> None:
        """The process of an actor dies."""
        workers = [worker for worker in self.workers.values() if worker.actor is not None]
        if workers:
            self.end_worker(workers[int(fault.luck * len(workers))], "killed")

    def harm_kill_several(self, fault: Fault) -> None:
        """About half of all workers die in the same moment, actors and their callers among them."""
        dice = Random(fault.luck)
        for worker in list(self.workers.values()):
            if dice.random() < 0.5:
                self.end_worker(worker, "killed")

    def harm_kill_node(self, fault: Fault) -> None:
        """A node dies and is started again."""
        nodes = self.living_nodes()
        if nodes:
            node = nodes[int(fault.luck * len(nodes))]
            self.end_node(node)
            self.clock.after(RESTART_S + fault.seconds, self.restart_node, node.node_id)

    def harm_kill_head(self, fault: Fault) -> None:
        """The head dies and is started again from its journal."""
        if self.head.alive:
            self.net.died(self.head)
            self.clock.after(RESTART_S, self.start_head)

    def harm_freeze_worker(self, fault: Fault) -> None:
        """A worker stands still for a while."""
        workers = [worker for worker in self.workers.values() if not worker.frozen]
        if workers:
            worker = workers[int(fault.luck * len(workers))]
            self.net.freeze(worker)
            self.clock.after(fault.seconds, self.net.thaw, worker)

    def harm_freeze_node(self, fault: Fault) -> None:
        """A node process stands still for a while; its workers go on."""
        nodes = [node for node in self.living_nodes() if not node.frozen]
        if nodes:
            node = nodes[int(fault.luck * len(nodes))]
            self.put_lost = True
            self.net.freeze(node)
            self.clock.after(fault.seconds, self.net.thaw, node)

    def harm_cut_host(self, fault: Fault) -> None:
        """A host is cut off for a while, but not the driver's."""
        hosts = [node.host for node in self.living_nodes() if node is not self.driver.node]
        if hosts:
            host = hosts[int(fault.luck * len(hosts))]
            self.put_lost = True
            self.net.cut_host(host)
            self.clock.after(fault.seconds, self.net.heal_host, host)

    def harm_lose_copies(self, fault: Fault) -> None:
        """All copies of an object that somebody owns are lost."""
        stored = [
            (process, oid)
            for process in (self.driver, *self.workers.values())
            for oid, obj in process.owner.objects.items()
            if type(obj.value) is m.Stored and not obj.owner and obj.task is not None and not process.frozen
        ]
        if stored:
            process, oid = stored[int(fault.luck * len(stored))]
            process.run(process.step, s.LoseAsked(oid))

    def harm_spike(self, fault: Fault) -> None:
        """Messages are slow for a while."""
        self.net.spike_until_s = self.clock.now + fault.seconds / 4
