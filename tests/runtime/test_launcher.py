"""The launcher and what it forks: real processes, with a worker that runs nothing."""
from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from flowengine.core.messages import Answered, Asked, LeaseLost, LogLines
from tests.runtime.kit import PROJECT, Driver, Launched, gone, launcher_settings
from tests.runtime.stub_worker import TASK

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(90)]


@pytest.fixture
def launched(tmp_path: pathlib.Path) -> Iterator[Launched]:
    child = Launched(launcher_settings(tmp_path))
    yield child
    child.close()


def test_starts_and_leaves_nothing_when_its_stdin_ends(launched):
    ready = launched.ready()
    assert ready.node.startswith("tcp://127.0.0.1:")
    assert ready.head.startswith("tcp://127.0.0.1:")

    async def scenario():
        driver = Driver(launched.settings)
        welcome = await driver.join(ready.node)
        leases = [await driver.lease(1), await driver.lease(2)]
        nodes = await driver.ask("nodes")
        await driver.endpoint.close()
        return welcome, leases, nodes

    welcome, leases, nodes = asyncio.run(scenario())
    assert (welcome.node_id, welcome.head, welcome.store_folder) == (ready.node_id, ready.head, ready.store_folder)
    workers = {worker["worker_id"]: worker["pid"] for node in nodes for worker in node["workers"]}
    assert {lease.worker_id for lease in leases} <= set(workers)
    assert os.stat(ready.store_folder).st_mode & 0o077 == 0
    assert launched.close_stdin() == 0
    assert gone([ready.node_pid, ready.head_pid, *workers.values()])
    assert not os.path.exists(ready.store_folder)


def test_a_killed_worker_is_told_with_its_last_lines_and_replaced(launched):
    ready = launched.ready()

    async def scenario():
        driver = Driver(launched.settings)
        await driver.join(ready.node)
        first = await driver.lease(1)
        driver.tell(Asked(1, "run", 3), first.worker)
        lost = await driver.next(LeaseLost)
        lines = [await driver.next(LogLines), await driver.next(LogLines)]
        again = [await driver.lease(2), await driver.lease(3)]
        await driver.endpoint.close()
        return first, lost, lines, again

    first, lost, lines, again = asyncio.run(scenario())
    death = lost.death
    assert (death.worker_id, death.exit_code, death.running, death.running_attempt) == (first.worker_id, 3, TASK, 7)
    assert sorted(death.log_lines) == ["second", "to err, unfinished", "to out"]
    told = {(part.stream, part.lines) for part in lines}
    assert told == {("out", ("to out", "second")), ("err", ("to err, unfinished",))}
    assert all(part.source == f"train pid={death.pid}" for part in lines)
    assert first.worker_id not in [lease.worker_id for lease in again]


def test_a_signal_is_told_as_a_negative_exit_code(launched):
    ready = launched.ready()

    async def scenario():
        driver = Driver(launched.settings)
        await driver.join(ready.node)
        lease = await driver.lease(1)
        (pid,) = [worker["pid"] for node in await driver.ask("nodes") for worker in node["workers"]
                  if worker["worker_id"] == lease.worker_id]
        os.kill(pid, signal.SIGKILL)
        lost = await driver.next(LeaseLost)
        await driver.endpoint.close()
        return pid, lost.death

    pid, death = asyncio.run(scenario())
    assert (death.pid, death.exit_code) == (pid, -signal.SIGKILL)


def test_a_killed_head_comes_back_under_its_address(launched):
    before = launched.ready()
    os.kill(before.head_pid, signal.SIGKILL)
    after = launched.ready()
    assert (after.head, after.node, after.node_pid) == (before.head, before.node, before.node_pid)
    assert after.head_pid != before.head_pid

    async def scenario():
        driver = Driver(launched.settings)
        await driver.join(after.node)
        while [node["node_id"] for node in await driver.ask("nodes")] != [after.node_id]:
            pass
        await driver.endpoint.close()

    asyncio.run(scenario())


def test_a_killed_node_is_replaced_with_all_that_hung_on_it(launched):
    before = launched.ready()

    async def workers_of(ready):
        driver = Driver(launched.settings)
        await driver.join(ready.node)
        await driver.lease(1)
        pids = [worker["pid"] for node in await driver.ask("nodes") for worker in node["workers"]
                if node["node_id"] == ready.node_id and worker["pid"]]
        await driver.endpoint.close()
        return pids

    pids = asyncio.run(workers_of(before))
    os.kill(before.node_pid, signal.SIGKILL)
    after = launched.ready()
    assert after.node_id != before.node_id
    assert after.head == before.head
    assert gone(pids)
    assert not os.path.exists(before.store_folder)
    assert asyncio.run(workers_of(after))


@pytest.mark.parametrize("head_too", [False, True])
def test_a_killed_node_is_dead_to_the_head_at_once(launched, head_too):
    before = launched.ready()
    os.kill(before.node_pid, signal.SIGKILL)
    if head_too:
        os.kill(before.head_pid, signal.SIGKILL)
    after = before
    while after.node_id == before.node_id or (head_too and after.head_pid == before.head_pid):
        after = launched.ready()

    async def scenario():
        driver = Driver(launched.settings)
        await driver.join(after.node)
        async with asyncio.timeout(launched.settings.config.suspect_after_s / 2):
            living = []
            while living != [after.node_id]:
                driver.tell(Asked(1, "nodes"), after.head)
                living = [node["node_id"] for node in (await driver.next(Answered)).content]
        await driver.endpoint.close()

    asyncio.run(scenario())


def test_sigterm_ends_all(launched):
    ready = launched.ready()
    launched.process.terminate()
    assert launched.process.wait(timeout=20) == 0
    assert gone([ready.node_pid, ready.head_pid])
    assert not os.path.exists(ready.store_folder)


def test_nothing_outlives_a_launcher_that_was_killed(launched, tmp_path):
    ready = launched.ready()
    launched.process.kill()
    launched.process.wait()
    assert gone([ready.node_pid, ready.head_pid])
    # What it could not remove is swept by the next one.
    following = Launched(launcher_settings(tmp_path))
    following.ready()
    assert not os.path.exists(ready.store_folder)
    following.close()


def test_ends_with_a_parent_whose_own_child_holds_the_pipe(tmp_path):
    # The program forks a child that keeps the write end of the launcher's stdin, then is killed.
    code = """
        import os, sys
        from tests.runtime.kit import Launched, launcher_settings
        child = Launched(launcher_settings(sys.argv[1]))
        ready = child.ready()
        holder = os.fork()
        if not holder:
            sys.stdin.read()
            os._exit(0)
        sys.stdout.write(f"{ready.node_pid} {ready.head_pid} {child.process.pid} {ready.store_folder}\\n")
        sys.stdout.flush()
        os.kill(os.getpid(), 9)
    """
    import textwrap

    program = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], cwd=PROJECT,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": str(PROJECT)})
    assert program.stdout is not None
    assert program.stdin is not None
    *pids, folder = program.stdout.readline().split()
    program.wait()
    assert gone([int(pid) for pid in pids])
    assert not os.path.exists(folder)
    program.stdin.close()
    program.stdout.close()
