"""Hosts of their own on one machine, made by a script, and a cluster of the engine over them or over this host alone.

The script knows `up N RATE_MBIT`, `exec I CMD...`, `ip I`, `crash I` and `down`, as one can write it with network
namespaces, a bridge and tc; it keeps what it notes in the folder HOSTS_DIR.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil

PROJECT = Path(__file__).resolve().parents[1]
TCP_SHARE = 0.956  # of a link's rate that TCP leaves to its users
PATIENCE_S = 60.0
FLOW = (sys.executable, "-m", "flowengine.cli")
LAST_WORDS = 4000  # characters of a program's errors that are shown


def missing(script: str) -> str:
    """Why there can be no hosts, or nothing."""
    if not script:
        return "no script that makes hosts was given"
    if not os.access(script, os.X_OK):
        return f"{script} is not a program"
    if os.geteuid():
        return "making hosts needs root"
    lacking = [name for name in ("ip", "tc", "nsenter", "unshare") if shutil.which(name) is None]
    return f"{', '.join(lacking)} not installed" if lacking else ""


class ProgramFailed(Exception):
    """A measured program has ended with an error, or did not end."""


def last_json(process: subprocess.Popen[str], name: str, limit_s: float) -> Any:
    """What the last line of a program's output says; raises ProgramFailed with its last words."""
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise ProgramFailed(f"{name} did not end in {limit_s:.0f} s\n{err[-LAST_WORDS:]}") from None
    if process.returncode:
        raise ProgramFailed(f"{name} failed\n{out[-LAST_WORDS:]}{err[-LAST_WORDS:]}")
    return json.loads(out.strip().splitlines()[-1])


def start(command: Sequence[object], **more: Any) -> subprocess.Popen[str]:
    """A program in the project's folder, whose output is read."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words = [str(word) for word in command]
    return subprocess.Popen(words, **{"cwd": PROJECT, "stdin": subprocess.DEVNULL, **pipes, **more})


class Bed:
    """So many hosts while the context lasts; here all of them are this one, with links that are not limited."""

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self.folder, self.env = "", dict(os.environ)
        self.servers: list[tuple[int, subprocess.Popen[str], Any]] = []  # host, program, its log

    def __enter__(self) -> Self:
        self.folder = tempfile.mkdtemp(prefix="hosts-")
        self.env["HOSTS_DIR"] = f"{self.folder}/run"
        return self

    def __exit__(self, *error: object) -> None:
        for host in reversed(range(self.hosts)):
            self.crash(host)
        self.clear()

    def clear(self) -> None:
        """Remove what there was on disk."""
        for _, process, log in self.servers:
            process.wait()
            log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def address(self, host: int) -> str:
        """Of a host."""
        return "127.0.0.1"

    def words(self, host: int, command: Sequence[object]) -> list[str]:
        """The command line for something that runs on a host."""
        return [str(word) for word in command]

    def crash(self, host: int) -> None:
        """Take the power from a host."""
        for at, process, _ in self.servers:
            if at == host and process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found = psutil.Process(process.pid)
                    for one in [*found.children(recursive=True), found]:
                        with contextlib.suppress(psutil.NoSuchProcess):
                            one.kill()

    def start(self, host: int, *command: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """A program on a host, whose output is read."""
        return start(self.words(host, command), env={**self.env, **(env or {})})

    def serve(self, host: int, *command: object, env: dict[str, str] | None = None) -> None:
        """A program on a host that lives as long as it; its output goes into a file."""
        log = open(f"{self.folder}/{len(self.servers)}.log", "w")  # noqa: SIM115 (closed at the end)
        more = {"stdout": log, "stderr": log, "env": {**self.env, **(env or {})}}
        self.servers.append((host, start(self.words(host, command), **more), log))

    def log(self, number: int = 0) -> str:
        """The last words of a server; servers have numbers in the order of their starts."""
        return Path(f"{self.folder}/{number}.log").read_text()[-LAST_WORDS:]

    def until_told(self, number: int, words: str) -> None:
        """Wait until a server has said so."""
        end = time.monotonic() + PATIENCE_S
        while words not in self.log(number):
            if time.monotonic() > end:
                raise ProgramFailed(f"server {number} has not started: {self.log(number)}")
            time.sleep(0.05)

    def cluster(self, *options: object) -> str:
        """Start a head and a node on the first host and a node on each other one; the connection file."""
        head = ("--connection-file", self.file, "--host", self.address(0), "--state-dir", f"{self.folder}/head")
        self.serve(0, *FLOW, "head", *head)
        self.until_told(len(self.servers) - 1, "listens at")
        for host in range(self.hosts):
            self.node(host, *options)
        return self.file

    @property
    def file(self) -> str:
        """The connection file of the cluster."""
        return f"{self.folder}/cluster.json"

    def node(self, host: int, *options: object) -> None:
        """Start a node of the cluster."""
        self.serve(host, *FLOW, "node", "--join", self.file, "--host", self.address(host), "--num-workers", 1,
                   "--state-dir", f"{self.folder}/node{host}", *options)

    def program(self, module: str, *arguments: object, limit_s: float) -> Any:
        """Run a module of the project on the first host; what its last line says."""
        return last_json(self.start(0, sys.executable, "-m", module, *arguments), module, limit_s)


class Testbed(Bed):
    """Hosts that a script makes, each with a link of that rate both ways."""

    __test__ = False  # nothing that pytest should collect

    def __init__(self, script: str, hosts: int, rate_mbit: int) -> None:
        super().__init__(hosts)
        self.script, self.rate_mbit = os.path.abspath(script), rate_mbit

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.order("up", self.hosts, self.rate_mbit)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.order("down")
        self.clear()

    def order(self, *words: object) -> str:
        """Have the script do something."""
        command = [self.script, *map(str, words)]
        done = subprocess.run(command, env=self.env, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout.strip()

    def address(self, host: int) -> str:
        """Of a host."""
        return self.order("ip", host)

    def words(self, host: int, command: Sequence[object]) -> list[str]:
        """The command line for something that runs on a host."""
        return [self.script, "exec", str(host), *(str(word) for word in command)]

    def crash(self, host: int) -> None:
        """Take the power from a host."""
        self.order("crash", host)
