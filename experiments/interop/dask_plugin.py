"""A plugin of pytest: Dask's own tests with one scheduler for all that is computed, and what became of each."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, TextIO

import dask
import dask.base
import dask.threaded

import flowengine as flow

if TYPE_CHECKING:
    import pytest

SCHEDULER, OUT = "INTEROP_SCHEDULER", "INTEROP_OUT"
NAMES = ("sync", "synchronous", "single-threaded", "threads", "threading")  # tests that ask for these get it, too
LOST = "did not end"
REASON_CHARS = 300
WORKERS = 2


class Watch:
    """Writes a line for each test that has ended."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.worst: dict[str, tuple[str, str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """It is known which tests there are."""
        for item in session.items:
            self.write(item.nodeid, LOST, "its process ended before it")

    def write(self, nodeid: str, outcome: str, reason: str) -> None:
        """A line; the last one about a test counts."""
        self.out.write(json.dumps([nodeid.split("site-packages/")[-1], outcome, reason[:REASON_CHARS]]) + "\n")
        self.out.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test has ended; the worst of its phases counts, and is known after the last one."""
        if report.outcome != "passed" or hasattr(report, "wasxfail"):
            reason = str(getattr(report, "wasxfail", "")) or str(report.longrepr).strip().splitlines()[-1]
            self.worst.setdefault(report.nodeid, ("xfailed" if hasattr(report, "wasxfail") else report.outcome, reason))
        if report.when == "teardown":
            self.write(report.nodeid, *self.worst.pop(report.nodeid, ("passed", "")))


def pytest_configure(config: Any) -> None:
    """Put the scheduler in the place of all others."""
    if os.environ[SCHEDULER] == "flowengine":
        flow.init(num_workers=WORKERS, log_to_driver=False)
        get = flow.dask_get
    else:
        get = dask.threaded.get
    dask.config.set(scheduler=get)
    dask.base.named_schedulers.update(dict.fromkeys(NAMES, get))
    config.pluginmanager.register(Watch(open(os.environ[OUT], "a")))  # noqa: SIM115


def pytest_unconfigure() -> None:
    """End the engine."""
    flow.shutdown()
