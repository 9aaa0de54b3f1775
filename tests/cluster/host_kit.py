"""A head and two nodes of different "hosts" on this one, as children that run `flow head` and `flow node`."""
from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import flowengine as flow
from flowengine.runtime.connection import read_connection
from tests.runtime.kit import PATIENCE_S, PROJECT


class Flow:
    """`flow ...` as a child that goes on; its log is read line by line."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flowengine.cli", *map(str, arguments)], stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(PROJECT)}, cwd=PROJECT)

    def says(self, pattern: str) -> re.Match[str]:
        assert self.process.stderr is not None
        told = []
        for line in self.process.stderr:
            told.append(line)
            found = re.search(pattern, line)
            if found:
                return found
        raise AssertionError(f"it ended with {self.process.wait()} and said {told}")

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout=PATIENCE_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


class Cluster:
    def __init__(self, folder: pathlib.Path, *options: str) -> None:
        self.folder = folder
        self.options = options
        self.file = folder / "cluster.json"
        self.head = self.start_head()
        self.nodes = [self.start_node(name, "--num-workers", 1, *rest) for name, rest in
                      (("one", ()), ("two", ("--resources", '{"two": 1}')))]

    def start_head(self) -> Flow:
        head = Flow("head", "--connection-file", self.file, "--state-dir", self.folder / "head", *self.options)
        head.says("listens at")
        return head

    def start_node(self, name: str, *options: object) -> Flow:
        node = Flow("node", "--join", self.file, "--state-dir", self.folder / name,
                    "--object-store-bytes", 64 << 20, *options)
        node.says("listens at")
        return node

    def left(self) -> list[str]:
        """What is in shared memory of this cluster."""
        base = pathlib.Path(f"/dev/shm/flowengine-{os.getuid()}")
        session = read_connection(self.file).session
        return [path.name for path in base.glob(f"*{session}*")] if base.exists() else []

    def end(self) -> None:
        for part in (*self.nodes, self.head):
            part.end()


def wait_for(condition):
    """Nobody tells when other processes are so far: look, until the patience of a test ends."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def on(node, function):
    return function.options(placement=flow.scheduling.node(node.node_id))


def name_of(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
