"""A ring of actors that pass tokens on: what does it cost a hop that the order of calls survives a crash?

    python experiments/off_critical_path/run.py [--quick] [--actors 8] [--rounds 32] [--passes 15]

Writes results.csv, picture.svg and the numbers in README.md; with --quick it prints only. The exit status is 1 when the
stash costs more than 1.15 times recovery off at the longest delay (the mean of the three ways, since each varies by
a tenth between runs), or write-first less than 4 times.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import itertools
import pickle
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean, mean, median
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import flowengine as flow
from experiments.pages import fill, percentile, table
from experiments.picture import Axis, Bars, bar_chart

HERE = Path(__file__).resolve().parent
DELAYS_MS = (0.0, 1.0, 5.0)
STEP_MS = (0, 1, 2, 5, 10, 20, 40)
STEP_DELAY_MS = 20.0  # of the journal, while the time that a hop takes is varied
WARM_UP_ROUNDS = 4
SAVE_CALLS = 10
STASH_MAX, FIRST_MIN = 1.15, 4.0
WAYS = {"one": 1, "both ways": 2, "one each": 0}  # tokens that begin at the first member; 0: one at every member
SHORT = {"one": "one", "both ways": "both", "one each": "each"}
LONG_S = 300.0


class Mode(NamedTuple):
    """One way to recover: options of the actors, whether each saves its own state, limits of the engine."""

    name: str
    options: dict[str, Any]
    saves: bool = False
    config: tuple[tuple[str, int], ...] = ()


MODES = (
    Mode("off", {"recovery": "none"}),
    Mode("checkpoints only", {"recovery": "none"}, saves=True),
    Mode("stash", {}),
    Mode(f"stash, checkpoint={SAVE_CALLS}", {"checkpoint": SAVE_CALLS}),
    Mode("stash, any number", {}, config=(("stash_holders_max", 0),)),
    Mode("write-first", {}, config=(("calls_ahead_max", 0),)),
)


class Cell(NamedTuple):
    """One mode: durations of hops in microseconds by pass; for each hop CPU time and entries of the stash."""

    way: str
    delay_ms: float
    mode: str
    passes: list[list[float]]
    off: list[list[float]]  # with recovery off, in the same engine at the same time
    cpu_us: float
    carried: float
    flushed: float

    def at(self, percent: float) -> float:
        """A percentile of all hops."""
        return percentile([hop for hops_us in self.passes for hop in hops_us], percent)


@flow.remote
class Member:
    """One of the ring: hands each token to its neighbour without waiting, and notes how long it was on its way."""

    def __init__(self, end: Any, save: str, step_s: float) -> None:
        self.end, self.save, self.step_s = end, save, step_s
        self.neighbours: tuple[Any, ...] = ()
        self.hops_us: list[float] = []
        self.calls = 0
        self.cpu_s = 0.0  # of this process when the pass began

    def meet(self, *neighbours: Any) -> None:
        """Those to whom the tokens of each direction go."""
        self.neighbours = neighbours

    def take(self, way: int, hops_left: int, sent_s: float) -> None:
        """A token."""
        self.hops_us.append((time.perf_counter() - sent_s) * 1e6)
        self.calls += 1
        self.cpu_s = self.cpu_s or time.process_time()
        if self.step_s:
            time.sleep(self.step_s)
        if self.save and self.calls % SAVE_CALLS == 0:
            Path(self.save).write_bytes(pickle.dumps(self.__dict__))
        if hops_left:
            self.neighbours[way].take.remote(way, hops_left - 1, time.perf_counter())
        else:
            self.end.arrived.remote()

    def give(self) -> tuple[list[float], float]:
        """The hops since the last time, and the CPU time that this process took for them."""
        hops_us, self.hops_us = self.hops_us, []
        cpu_s, self.cpu_s = time.process_time() - self.cpu_s, 0.0
        return hops_us, cpu_s


@flow.remote(recovery="none")
class End:
    """Where tokens go that have made their rounds."""

    def __init__(self) -> None:
        self.tokens, self.news = 0, asyncio.Event()

    async def arrived(self) -> None:
        """One more."""
        self.tokens += 1
        self.news.set()

    async def until(self, tokens: int) -> None:
        """Returns when so many have come."""
        while self.tokens < tokens:
            self.news.clear()
            await self.news.wait()


class Ring:
    """The actors of one mode."""

    def __init__(self, mode: Mode, size: int, folder: str, step_s: float = 0.0) -> None:
        self.end = End.remote()
        make = Member.options(**mode.options).remote
        saves = [str(Path(folder) / f"{number}.pickle") if mode.saves else "" for number in range(size)]
        self.members = [make(self.end, save, step_s) for save in saves]
        flow.get([
            member.meet.remote(self.members[(place + 1) % size], self.members[place - 1])
            for place, member in enumerate(self.members)
        ])  # fmt: skip
        self.tokens = 0
        self.turn(WARM_UP_ROUNDS, 2)

    def turn(self, rounds: int, ways: int) -> tuple[list[float], float]:
        """Send tokens round, wait until they have come; gives all hops, and the CPU time of one."""
        starts = [(self.members[0], way) for way in range(ways)] or [(member, 0) for member in self.members]
        hops = rounds * len(self.members) // max(1, len(starts) // 2)
        for member, way in starts:
            member.take.remote(way, hops - 1, time.perf_counter())
        self.tokens += len(starts)
        flow.get(self.end.until.remote(self.tokens), timeout=LONG_S)
        given = flow.get([member.give.remote() for member in self.members])
        hops_us = [hop for hops, _ in given for hop in hops]
        return hops_us, sum(cpu_s for _, cpu_s in given) * 1e6 / len(hops_us)

    def close(self) -> None:
        """The members hold each other, so they end by order."""
        for member in self.members:
            flow.kill(member)


def measure(ring: Ring, rounds: int, ways: int) -> tuple[list[float], float, float, float]:
    """Hops in microseconds; CPU time, entries carried and flushed for each."""
    before = flow.stats()
    hops_us, cpu_us = ring.turn(rounds, ways)
    after = flow.stats()
    carried, flushed = (
        (after[name] - before[name]) / len(hops_us) for name in ("stash_entries_forwarded", "stash_entries_flushed")
    )
    return hops_us, cpu_us, carried, flushed


def at_delay(delay_ms: float, chosen: argparse.Namespace) -> list[Cell]:
    """All modes and ways at one delay of the journal, in short passes in turn, so that noise meets all of them."""
    cells = []
    for limits in dict.fromkeys(mode.config for mode in MODES):
        modes = [mode for mode in MODES if mode.config == limits or mode.name == MODES[0].name]
        found: dict[tuple[str, str], list[tuple[list[float], float, float, float]]] = {}
        config = {"journal_delay_s": delay_ms / 1e3, **dict(limits)}
        with tempfile.TemporaryDirectory() as folder, flow.init(num_workers=2, config=config):
            rings = {mode.name: Ring(mode, chosen.actors, folder) for mode in modes}
            order = list(itertools.product(WAYS.items(), rings.items()))
            for _ in range(chosen.passes):
                order.reverse()
                for (way, ways), (name, ring) in order:
                    found.setdefault((way, name), []).append(measure(ring, chosen.rounds, ways))
        for (way, name), runs in found.items():
            passes, *figures = zip(*runs, strict=True)
            off = [run[0] for run in found[way, MODES[0].name]]
            if not limits or name != MODES[0].name:
                cells.append(Cell(way, delay_ms, name, list(passes), off, *map(mean, figures)))
    return cells


def carried_by_step(chosen: argparse.Namespace, steps_ms: Sequence[int]) -> list[tuple[int, float]]:
    """Entries carried for each call, when a hop takes longer and longer and the journal always the same."""
    found = []
    config = {"journal_delay_s": STEP_DELAY_MS / 1e3}
    with tempfile.TemporaryDirectory() as folder, flow.init(num_workers=2, config=config):
        for step_ms in steps_ms:
            ring = Ring(MODES[2], chosen.actors, folder, step_ms / 1e3)
            _, _, carried, _ = measure(ring, 4, 2)
            found.append((step_ms, carried))
            ring.close()
    return found


def ratio(cell: Cell) -> float:
    """How many times longer than with recovery off, in the same way and at the same delay; the median over passes."""
    pairs = zip(cell.passes, cell.off, strict=True)
    return median(percentile(mine, 50) / percentile(others, 50) for mine, others in pairs)


def report(cells: Sequence[Cell], steps: Sequence[tuple[int, float]]) -> str:
    """The tables."""
    rows = [
        (cell.way, f"{cell.delay_ms:g}", cell.mode, f"{cell.at(50):,.0f}", f"{cell.at(99):,.0f}",
         f"{ratio(cell):.2f}", f"{cell.cpu_us:,.0f}", f"{cell.carried:.2f}", f"{cell.flushed:.2f}")
        for cell in cells
    ]  # fmt: skip
    heads = ("tokens", "journal (ms)", "recovery", "p50 (us)", "p99 (us)", "x off", "CPU (us)", "carried", "flushed")
    carried = table(("a hop takes (ms)", "carried"), [(str(step_ms), f"{count:.2f}") for step_ms, count in steps])
    return f"{table(heads, rows)}\nWith a journal that takes {STEP_DELAY_MS:g} ms, tokens both ways:\n\n{carried}"


def faults(cells: Sequence[Cell]) -> list[str]:
    """What does not hold at the longest delay."""
    found = []
    longest_ms = max(cell.delay_ms for cell in cells)
    cells = [cell for cell in cells if cell.delay_ms == longest_ms]
    times = geometric_mean([ratio(cell) for cell in cells if cell.mode == "stash"])
    if times > STASH_MAX:
        found.append(f"the stash costs {times:.2f} x recovery off, at most {STASH_MAX}")
    for cell in cells:
        times = ratio(cell)
        if cell.mode == "write-first" and times < FIRST_MIN:
            found.append(f"{cell.way}: write-first costs only {times:.2f} x recovery off, at least {FIRST_MIN}")
    return found


def draw(cells: Sequence[Cell]) -> str:
    """The medians as bars on a logarithmic axis."""
    groups = [(way, delay_ms) for way in WAYS for delay_ms in sorted({cell.delay_ms for cell in cells})]
    middle = {(cell.way, cell.delay_ms, cell.mode): cell.at(50) / 1e3 for cell in cells}
    bars = [Bars(mode.name, [middle[(*group, mode.name)] for group in groups]) for mode in MODES]
    low, high = min(middle.values()), max(middle.values())
    return bar_chart(
        "Median duration of a hop, by delay of the journal",
        [f"{SHORT[way]}, {delay_ms:g} ms" for way, delay_ms in groups],
        Axis("milliseconds", low / 2, high * 2, is_log=True),
        bars,
    )


def write(cells: Sequence[Cell], tables: str) -> None:
    """Results, picture, and the numbers in the README."""
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        names = ("hops", "p50_us", "p99_us", "cpu_us", "carried", "flushed")
        writer.writerow(("tokens", "journal_ms", "recovery", *names))
        for cell in cells:
            figures = (f"{number:.3f}" for number in (cell.at(50), cell.at(99), *cell[5:]))
            writer.writerow((cell.way, cell.delay_ms, cell.mode, sum(map(len, cell.passes)), *figures))
    (HERE / "picture.svg").write_text(draw(cells))
    fill(HERE / "README.md", tables)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 rounds, the longest delay; writes nothing")
    parser.add_argument("--actors", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--passes", type=int, default=15)
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.passes = 16, 7
    cells: list[Cell] = []
    for delay_ms in DELAYS_MS[-1:] if chosen.quick else DELAYS_MS:
        cells += at_delay(delay_ms, chosen)
        sys.stderr.write(f"a journal of {delay_ms:g} ms: done\n")
    names = [mode.name for mode in MODES]
    cells.sort(key=lambda cell: (list(WAYS).index(cell.way), cell.delay_ms, names.index(cell.mode)))
    steps = carried_by_step(chosen, STEP_MS[:4] if chosen.quick else STEP_MS)
    tables = report(cells, steps)
    sys.stdout.write(tables)
    if not chosen.quick:
        write(cells, tables)
    found = faults(cells)
    sys.stdout.write("\n" + "\n".join(found or ["all holds"]) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
