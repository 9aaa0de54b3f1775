"""Dask's own tests on flow.dask_get, and CPython's tests of executors on flow.Executor: does all pass that should?"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import dask

from experiments.interop import cpython
from experiments.interop.dask_plugin import LOST, OUT, SCHEDULER
from experiments.interop.skips import SKIPS
from experiments.pages import table

DASK = Path(dask.__file__).parent
SUITES = {"delayed": ["tests/test_delayed.py"], "bag": ["bag"], "array": ["array"], "dataframe": ["dataframe"]}
QUICK = {"delayed": ["tests/test_delayed.py"]}
ELSEWHERE = ("dataframe/dask_expr/tests/test_distributed.py",)  # computes on a cluster that it makes itself
FILES_A_SHARD = 12
SHARD_S, TEST_S = 3600, 300
TAIL_CHARS = 2_000
PLUGINS = ("pytest", "pytest_timeout")
FAILED = ("failed", LOST)


class Seen(NamedTuple):
    """What became of one test with ours; of one that failed also with Dask's threads, and why."""

    suite: str
    name: str
    ours: str
    reason: str = ""
    threads: str = ""

    @property
    def differs(self) -> bool:
        """It passes with Dask's threads, and not with ours."""
        return self.ours in FAILED and self.threads not in FAILED


def shards(paths: Iterable[str]) -> Iterator[list[str]]:
    """Files of tests, some at a time."""
    found = (file for path in paths for file in
             ([DASK / path] if path.endswith(".py") else (DASK / path).rglob("test_*.py")))  # fmt: skip
    files = sorted(file for file in found if str(file.relative_to(DASK)) not in ELSEWHERE)
    for first in range(0, len(files), FILES_A_SHARD):
        yield [str(file) for file in files[first : first + FILES_A_SHARD]]


def outcomes(scheduler: str, files: list[str]) -> dict[str, tuple[str, str]]:
    """Run tests of Dask in a process of their own: the outcome and reason of each."""
    with tempfile.TemporaryDirectory() as folder:
        out, settings = Path(folder) / "out", Path(folder) / "pytest.ini"
        settings.write_text("[pytest]\n")
        given = {**os.environ, SCHEDULER: scheduler, OUT: str(out), "PYTHONDONTWRITEBYTECODE": "1"}
        given["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
        options = ["-q", "-p", "experiments.interop.dask_plugin", "-p", "no:cacheprovider", "-c", str(settings),
                   f"--rootdir={DASK.parent}", f"--timeout={TEST_S}", "--disable-warnings"]  # fmt: skip
        command = [sys.executable, "-m", "pytest", *options, *files]
        try:
            done = subprocess.run(command, env=given, cwd=folder, capture_output=True, text=True, timeout=SHARD_S)
            if done.returncode not in (0, 1, 5):
                print(done.stdout[-TAIL_CHARS:], done.stderr[-TAIL_CHARS:], sep="\n")
        except subprocess.TimeoutExpired:
            print(f"{scheduler}: {files[0]} and what follows took more than {SHARD_S} s")
        lines = out.read_text().splitlines() if out.exists() else []
        return {name: (outcome, reason) for name, outcome, reason in map(json.loads, lines)}


def compare(suites: dict[str, list[str]]) -> list[Seen]:
    """Run all suites with ours, and with Dask's threads what has failed."""
    seen = []
    for suite, paths in suites.items():
        for files in shards(paths):
            began = time.monotonic()
            ours = outcomes("flowengine", files)
            failed = [str(DASK.parent / name) for name, (outcome, _) in ours.items() if outcome in FAILED]
            threads = outcomes("threads", failed) if failed else {}
            found = [Seen(suite, name, *ended, threads.get(name, ("",))[0]) for name, ended in ours.items()]
            for one in found:
                if one.differs and one.name not in SKIPS:
                    print(one, flush=True)
            print(f"{suite}: {len(ours)} tests in {time.monotonic() - began:.0f} s", flush=True)
            seen += found
    return seen


def executor_tests(mixins: Sequence[str]) -> tuple[str, list[Seen]]:
    """CPython's tests of executors; they pass on its own pools."""
    try:
        python, rows = cpython.run(mixins)
    except FileNotFoundError as error:
        print(f"left out: {error}")
        return "", []
    return python, [Seen("executor", name, outcome, reason, "passed") for name, outcome, reason in rows]


def report(seen: list[Seen], python: str) -> str:
    """The tables."""
    rows = []
    for suite, found in itertools.groupby(seen, key=lambda one: one.suite):
        tests = list(found)
        count = Counter(one.ours for one in tests)
        differ = [one for one in tests if one.differs]
        known = sum(one.name in SKIPS for one in differ)
        failed = sum(count[outcome] for outcome in FAILED) - len(differ)
        rows.append((suite, len(tests), count["passed"], count["skipped"] + count["xfailed"], failed, known,
                     len(differ) - known))  # fmt: skip
    heads = ("suite", "tests", "pass", "skipped, or failures that are expected", "fail with threads, too",
             "cannot pass", "differ")  # fmt: skip
    lines = [f"Dask {dask.__version__}, tests of executors of {python or 'no Python (none found)'}.\n",
             table(heads, rows)]  # fmt: skip
    for title, is_known in (("Cannot pass, and why:", True), ("Differ:", False)):
        found = [(f"`{one.name}`", SKIPS.get(one.name, one.reason).replace("|", "/")) for one in seen
                 if one.differs and (one.name in SKIPS) is is_known]  # fmt: skip
        if found:
            lines += [f"{title}\n", table(("test", "reason"), found)]
    return "\n".join(lines)


def main() -> int:
    """Run all; the exit status says whether all passed that should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few files of tests, in under a minute")
    parser.add_argument("--suite", choices=[*SUITES, "executor"], action="append", help="only this; may be repeated")
    parser.add_argument("--out", type=Path, help="file for the tables")
    given = parser.parse_args()
    wanted = given.suite or [*SUITES, "executor"]
    lacking = [name for name in PLUGINS if find_spec(name) is None]
    if lacking and wanted != ["executor"]:
        parser.error(f"Dask's tests need {' and '.join(lacking)}: pip install -e '.[test]'")
    suites = QUICK if given.quick else SUITES
    seen = compare({name: paths for name, paths in suites.items() if name in wanted})
    python = ""
    if "executor" in wanted:
        python, more = executor_tests(cpython.MIXINS[:1] if given.quick else cpython.MIXINS)
        seen += more
    text = report(seen, python)
    print(text)
    if given.out:
        given.out.write_text(text)
    return 1 if not seen or any(one.differs and one.name not in SKIPS for one in seen) else 0


if __name__ == "__main__":
    sys.exit(main())
