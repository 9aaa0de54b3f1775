"""CPython's own tests of executors, with flow.Executor in the place of its pools."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import os
import shutil
import sys
import tempfile
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import flowengine as flow

TESTS = "test_concurrent_futures"  # one file, from 3.12 on a package
MODULES = ("executor", "test_shutdown", "test_wait", "test_as_completed", "test_init", "util")
BASE = "ExecutorMixin"
MIXINS = ("ExecutorTest", "ExecutorShutdownTest", "WaitTests", "AsCompletedTests", "InitializerMixin")


def folders() -> list[Path]:
    """Where tests of executors are: first of this interpreter, then of the nearest versions beside it."""
    homes = [Path(sys.base_prefix), *sorted(Path(sys.base_prefix).parent.glob("*"))]
    found = [folder for home in homes for folder in home.glob("lib/python3.*/test") if any(folder.glob(f"{TESTS}*"))]
    return sorted(dict.fromkeys(found), key=lambda folder: abs(version(folder) - sys.version_info.minor))


def version(folder: Path) -> int:
    """The minor version of Python that a folder of tests belongs to."""
    return int(folder.parent.name.rpartition(".")[2])


def load() -> tuple[str, dict[str, Any]]:
    """Whose tests they are, and the classes that were found; raises FileNotFoundError when there are none."""
    for folder in folders():
        try:
            if (folder / f"{TESTS}.py").is_file():
                modules = [loaded(folder)]
            else:
                modules = [importlib.import_module(f"test.{TESTS}.{name}") for name in MODULES]
        except ImportError:  # they need what only their own version has
            continue
        wanted = (BASE, *MIXINS)
        found = {name: getattr(module, name) for module in modules for name in wanted if hasattr(module, name)}
        return folder.parent.name, found
    raise FileNotFoundError("no Python here has its tests of executors: some builds leave them out")


def loaded(folder: Path) -> Any:
    """The one file of tests in a folder, found under its name by workers too, and nothing else of that folder."""
    place = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, place)
    (Path(place) / f"{TESTS}.py").symlink_to(folder / f"{TESTS}.py")
    sys.path.insert(0, place)
    os.environ["PYTHONPATH"] = os.pathsep.join([place, *filter(None, [os.environ.get("PYTHONPATH")])])
    return importlib.import_module(TESTS)


def tests(found: dict[str, Any], mixins: Sequence[str]) -> Iterator[unittest.TestCase]:
    """All tests of the mixins, with our executor."""
    base = found[BASE]
    for name in mixins:
        mixin = found.get(name)
        if mixin is not None:
            bases = (mixin,) if issubclass(mixin, base) else (base, mixin)
            kind = type(name, (*bases, unittest.TestCase), {"executor_type": flow.Executor})
            for test in unittest.defaultTestLoader.loadTestsFromTestCase(kind):
                assert isinstance(test, unittest.TestCase)
                yield test


def run(mixins: Sequence[str]) -> tuple[str, list[tuple[str, str, str]]]:
    """Whose tests were run; and of each its name, outcome and reason."""
    python, found = load()
    rows = []
    with flow.init(num_workers=2):
        for test in tests(found, mixins):
            result = unittest.TestResult()
            with contextlib.redirect_stdout(io.StringIO()):  # they print how long they took
                test.run(result)
            broken = [*result.errors, *result.failures]
            outcome = "failed" if broken else "skipped" if result.skipped else "passed"
            reason = broken[0][1].strip().splitlines()[-1] if broken else "".join(why for _, why in result.skipped)
            name = ".".join(test.id().split(".")[-2:])
            rows.append((name, outcome, reason))
    return python, rows
