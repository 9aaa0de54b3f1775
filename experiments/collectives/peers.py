"""How the programs of each peer are started: processes of this host, or one on each host of a testbed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.collectives.trial import Case
from experiments.testbed import PROJECT, Testbed, last_json, start

MODULES = {"openmpi": "mpi4py", "gloo": "torch", "ray": "ray"}  # what a peer's Python has to have
LIMIT_S = 900.0
RAY_PORT = 6379
RAY_STORE_BYTES = 3 << 30
RAY_STARTED = "Ray runtime started"
GLOO_PORT = 29500
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # of each process: there are more processes than cores


def lacks(peer: str, python: str) -> str:
    """Why a peer cannot be measured with that Python, or nothing."""
    module = MODULES[peer]
    command = [python, "-c", f"import numpy, {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except OSError as error:
        return f"{python}: {error.strerror}"
    if done.returncode:
        return f"{python} has no {module}"
    return "" if peer != "openmpi" or beside(python, "mpirun") else f"no mpirun beside {python}"


def beside(python: str, name: str) -> str:
    """A program that was installed with that Python, or nothing."""
    found = Path(python).parent / name
    return str(found) if found.exists() else ""


def version(peer: str, python: str) -> str:
    """What is measured."""
    code = f"import importlib.metadata as m; print(m.version('{'openmpi' if peer == 'openmpi' else MODULES[peer]}'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or "of unknown version"


def module_of(peer: str) -> str:
    """Its program."""
    return f"experiments.collectives.with_{peer}"


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def gloo_env(rank: int, size: int, address: str, port: int) -> dict[str, str]:
    """What a rank has to know."""
    return {**ONE_THREAD, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}


# --- processes of this host ---------------------------------------------------------------------------


def on_this_host(peer: str, python: str, cases: Sequence[Case], size: int) -> list[list[float]]:
    """Seconds of each round of each case."""
    asked = json.dumps(cases)
    if peer in ("group", "refs"):
        command = (python, "-m", "experiments.collectives.with_flowengine", peer, asked, size)
        return list(last_json(start(command), peer, LIMIT_S))
    command = (python, "-m", module_of(peer), asked)
    if peer == "openmpi":
        begin = (beside(python, "mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", size)
        env = {**os.environ, **ONE_THREAD}
        return list(last_json(start((*begin, *command), env=env), peer, LIMIT_S))
    port = free_port()
    ranks = [
        start(command, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **gloo_env(rank, size, "127.0.0.1", port)})
        for rank in range(size)
    ]
    return of_ranks(ranks, peer)


def of_ranks(ranks: Sequence[subprocess.Popen[str]], peer: str) -> list[list[float]]:
    """What rank 0 tells; the others end with it."""
    try:
        return list(last_json(ranks[0], peer, LIMIT_S))
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


# --- hosts --------------------------------------------------------------------------------------------


def on_hosts(peer: str, python: str, cases: Sequence[Case], bed: Testbed) -> list[list[float]]:
    """The same with one process on each host of a testbed."""
    asked = json.dumps(cases)
    if peer in ("group", "refs"):
        module = "experiments.collectives.with_flowengine"
        return list(bed.program(module, peer, asked, bed.hosts, bed.cluster(), limit_s=LIMIT_S))
    return {"openmpi": mpi_hosts, "gloo": gloo_hosts, "ray": ray_hosts}[peer](python, asked, bed)


def mpi_hosts(python: str, asked: str, bed: Testbed) -> list[list[float]]:
    """mpirun on the first host reaches the others by a program that takes the place of ssh."""
    addresses = [bed.address(host) for host in range(bed.hosts)]
    hostfile, letters, agent = Path(bed.folder, "hostfile"), Path(bed.folder, "letters"), Path(bed.folder, "agent")
    hostfile.write_text("".join(f"{address} slots=1\n" for address in addresses))
    letters.mkdir()
    # A host cannot enter another one: what is to run there is written down, and started from here.
    agent.write_text(f'#!/bin/sh\nto=$1\nshift\necho "$*" >{letters}/$to.part\nmv {letters}/$to.part {letters}/$to\n')
    agent.chmod(0o755)
    command = (
        beside(python, "mpirun"), "--allow-run-as-root", "--hostfile", hostfile, "-n", bed.hosts, "--map-by", "node",
        "--prtemca", "plm_ssh_agent", agent, "--prtemca", "prte_if_include", "eth0",
        "--mca", "btl_tcp_if_include", "eth0", "--mca", "btl", "self,tcp", "--mca", "pml", "ob1",
        "--mca", "mpi_yield_when_idle", "1",  # the hosts share the cores of one machine
        "--wdir", PROJECT, "-x", "OMP_NUM_THREADS", python, "-m", module_of("openmpi"), asked,
    )  # fmt: skip
    process = bed.start(0, *command, env=ONE_THREAD)
    waiting = {address: host for host, address in enumerate(addresses)}
    while waiting and process.poll() is None:
        for letter in letters.iterdir():
            host = waiting.pop(letter.name, None)
            if host is not None:
                bed.serve(host, "sh", "-c", letter.read_text())
        if len(waiting) == 1:  # mpirun itself is on the first
            break
        time.sleep(0.05)
    return list(last_json(process, "openmpi", LIMIT_S))


def gloo_hosts(python: str, asked: str, bed: Testbed) -> list[list[float]]:
    """One process on each, which find each other by a store on the first."""
    ranks = []
    for rank in range(bed.hosts):
        env = {"GLOO_SOCKET_IFNAME": "eth0", **gloo_env(rank, bed.hosts, bed.address(0), GLOO_PORT)}
        ranks.append(bed.start(rank, python, "-m", module_of("gloo"), asked, env=env))
    return of_ranks(ranks, "gloo")


def ray_hosts(python: str, asked: str, bed: Testbed) -> list[list[float]]:
    """A head on the first host and a node on each other one."""
    process = start_on_ray(python, bed, module_of("ray"), asked, bed.hosts, ray_address(bed))
    return list(last_json(process, "ray", LIMIT_S))


def ray_address(bed: Testbed) -> str:
    """Where its head listens."""
    return f"{bed.address(0)}:{RAY_PORT}"


def start_on_ray(python: str, bed: Testbed, *module: Any) -> subprocess.Popen[str]:
    """A Ray cluster over the hosts, and a program on the first of them."""
    ray = (python, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats",
           "--object-store-memory", RAY_STORE_BYTES, "--num-cpus", 1)  # fmt: skip
    first, env = bed.address(0), {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    bed.serve(0, *ray, "--head", "--node-ip-address", first, "--port", RAY_PORT, "--include-dashboard", "false",
              "--temp-dir", f"{bed.folder}/ray", env=env)
    bed.until_told(0, RAY_STARTED)
    for host in range(1, bed.hosts):
        bed.serve(host, *ray, "--address", ray_address(bed), "--node-ip-address", bed.address(host), env=env)
        bed.until_told(host, RAY_STARTED)  # all at once would be too slow for its limits on a small machine
    return bed.start(0, python, "-m", *module, env=env)
