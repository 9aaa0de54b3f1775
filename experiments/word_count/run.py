"""Words of a stream counted by actors, a mapper killed twice: what does the sink see, and are the counts exact?

    python experiments/word_count/run.py [--quick] [--seconds 12] [--every-ms 40]

Writes results.csv, picture.svg and the numbers in README.md; with --quick it prints only. The exit status is 1 when the
counts with the engine's own recovery are not exact.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections import Counter
from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from typing import NamedTuple

if __package__ in (None, ""):  # run as a script: the packages lie two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import flowengine as flow
from experiments.pages import fill, percentile, table
from experiments.picture import Axis, Series, line_chart
from experiments.word_count import stream
from experiments.word_count.stream import Arrival

HERE = Path(__file__).resolve().parent
SOURCES, MAPPERS, REDUCERS = 2, 2, 2
VICTIM = 0
KILLS = (  # when, as a part of the whole time, and where
    (1 / 3, "actor.call.before_run"),  # nothing of the batch has been done
    (2 / 3, "actor.call.after_run"),  # all of it has been counted, and its source has no answer yet
)
BIN_S = 0.5
STEADY_AFTER_S = 1.0
LONG_S = 300.0


class Mode(NamedTuple):
    """One way to live with the death of a mapper."""

    name: str
    recovery: str
    sends_again: bool = False


MODES = (
    Mode("exactly once", "exactly_once"),
    Mode("restart", "restart"),
    Mode("restart, failed calls sent again", "restart", sends_again=True),
    Mode("none", "none"),
)


class Load(NamedTuple):
    """How much is sent: batches of each source, one every so many seconds."""

    batches: int
    every_s: float

    def seconds(self) -> float:
        """How long it lasts."""
        return self.batches * self.every_s


class Run(NamedTuple):
    """What one run gave; times count from its start."""

    mode: Mode
    kills_s: list[float]
    arrivals: list[Arrival]
    words: Counter[str]
    parts: Counter[tuple[int, int]]
    failed: int


def run(mode: Mode, load: Load) -> Run:
    """The stream from its start to its end, with one mapper killed twice on the way."""
    with flow.init(num_workers=2):
        sink = flow.remote(stream.Sink).remote()
        reducers = [flow.remote(stream.Reducer).remote(sink) for _ in range(REDUCERS)]
        mappers = [flow.remote(stream.Mapper).options(recovery=mode.recovery).remote(reducers) for _ in range(MAPPERS)]
        sources = [flow.remote(stream.Source).remote(n, mappers, mode.sends_again) for n in range(SOURCES)]
        flow.get([reducer.totals.remote() for reducer in reducers])  # all that come later are up soon as well
        start_s = time.time() + 0.5
        ends = [source.run.remote(start_s, load.batches, load.every_s) for source in sources]
        kills_s = []
        for share, point in KILLS:
            time.sleep(max(0.0, start_s + share * load.seconds() - time.time()))
            kills_s.append(time.time() - start_s)
            flow.chaos.at(point, flow.chaos.kill, of=mappers[VICTIM])
        failed = sum(flow.get(ends, timeout=LONG_S))
        flow.get([reducer.flush.remote() for reducer in reducers], timeout=LONG_S)
        totals = flow.get([reducer.totals.remote() for reducer in reducers])
        arrivals = [Arrival(mapper, at_s - start_s, late_s) for mapper, at_s, late_s in flow.get(sink.all.remote())]
    words, parts = Counter[str](), Counter[tuple[int, int]]()
    for some_words, some_parts in totals:
        words.update(some_words)
        parts.update(some_parts)
    return Run(mode, kills_s, arrivals, words, parts, failed)


def judge(found: Run, load: Load, expected: Counter[str]) -> tuple[int, int, int, int]:
    """Words lost and counted too often; parts of batches that never came, and that came more than once."""
    lost = sum(max(0, count - found.words[word]) for word, count in expected.items())
    extra = sum(max(0, count - expected[word]) for word, count in found.words.items())
    names = [(source, number) for source in range(SOURCES) for number in range(load.batches)]
    missing = sum(max(0, REDUCERS - found.parts[name]) for name in names)
    doubled = sum(max(0, found.parts[name] - REDUCERS) for name in names)
    return lost, extra, missing, doubled


def bins(arrivals: Sequence[Arrival]) -> list[tuple[float, list[float]]]:
    """Latencies in milliseconds by the time of their arrival; times are the middles of the bins."""
    found: dict[int, list[float]] = {}
    for arrival in arrivals:
        found.setdefault(int(arrival.at_s // BIN_S), []).append(arrival.latency_s * 1e3)
    return [((place + 0.5) * BIN_S, found[place]) for place in sorted(found)]


def latencies_ms(found: Run, is_victim: bool) -> tuple[float, float, float]:
    """Median of the calm time before, median and largest of the seconds after the kills, by a mapper; nan of none."""
    mine = [arrival for arrival in found.arrivals if (arrival.mapper == VICTIM) == is_victim]
    calm = [a.latency_s * 1e3 for a in mine if STEADY_AFTER_S < a.at_s < found.kills_s[0]]
    after = [a.latency_s * 1e3 for a in mine if any(at_s <= a.at_s < at_s + 1 for at_s in found.kills_s)]
    return percentile(calm or [nan], 50), percentile(after or [nan], 50), max(after, default=nan)


def report(runs: Sequence[Run], load: Load, expected: Counter[str]) -> str:
    """The tables."""
    counts = []
    for found in runs:
        lost, extra, missing, doubled = judge(found, load, expected)
        counts.append((found.mode.name, f"{found.words.total():,}", f"{lost:,}", f"{extra:,}", f"{missing:,}",
                       f"{doubled:,}", f"{found.failed:,}"))  # fmt: skip
    heads = ("recovery of the mappers", "words counted", "lost", "counted twice", "parts lost", "parts twice", "errors")
    late = []
    for found in runs:
        for is_victim in (True, False):
            way = "the killed one" if is_victim else "the other"
            late.append((found.mode.name, way, *("-" if isnan(one) else f"{one:.1f}"
                                                 for one in latencies_ms(found, is_victim))))
    late_heads = ("recovery", "way through", "p50 before (ms)", "p50 in the seconds after", "longest then")
    words = stream.SENTENCE_WORDS * stream.BATCH_SENTENCES * SOURCES / load.every_s
    return (
        f"{expected.total():,} words in {SOURCES * load.batches:,} batches, {words:,.0f} words/s.\n\n"
        f"{table(heads, counts)}\nLatency at the sink, from when a batch was due:\n\n{table(late_heads, late)}"
    )


def draw(runs: Sequence[Run], load: Load) -> str:
    """Latency over time: of exactly once, and the median of a restart beside it."""
    ours = bins(runs[0].arrivals)
    series = [
        Series(f"p{percent:.0f}" if percent < 100 else "max", [(at, percentile(some, percent)) for at, some in ours])
        for percent in (50, 95, 100)
    ]
    other = next(found for found in runs if found.mode.sends_again)
    series.append(Series(f"max with {other.mode.name}", [(at, max(some)) for at, some in bins(other.arrivals)], True))
    all_ms = [number for one in series for _, number in one.points]
    marks = [
        (at_s, "killed " + point.split(".")[-1].replace("_", " "))
        for at_s, (_, point) in zip(runs[0].kills_s, KILLS, strict=True)
    ]
    return line_chart(
        f"Latency at the sink by {BIN_S:g} s, recovery exactly once",
        Axis("seconds", 0.0, load.seconds() + BIN_S),
        Axis("milliseconds", max(0.1, min(all_ms) / 2), max(all_ms) * 1.5, is_log=True),
        series,
        marks,
    )


def write(runs: Sequence[Run], load: Load, tables: str) -> None:
    """Results, picture, and the numbers in the README."""
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("recovery", "second", "arrivals", "p50_ms", "p95_ms", "max_ms"))
        for found in runs:
            for at_s, some_ms in bins(found.arrivals):
                figures = [f"{percentile(some_ms, percent):.2f}" for percent in (50, 95, 100)]
                writer.writerow((found.mode.name, at_s, len(some_ms), *figures))
    (HERE / "picture.svg").write_text(draw(runs, load))
    fill(HERE / "README.md", tables)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three seconds; writes nothing")
    parser.add_argument("--seconds", type=float, default=12.0, help="how long the sources send")
    parser.add_argument("--every-ms", type=float, default=40.0, help="between two batches of a source")
    chosen = parser.parse_args()
    every_s = chosen.every_ms / 1e3
    load = Load(round((3.0 if chosen.quick else chosen.seconds) / every_s), every_s)
    expected = stream.expected(SOURCES, load.batches)
    runs = []
    for mode in MODES:
        runs.append(run(mode, load))
        sys.stderr.write(f"{mode.name}: {len(runs[-1].arrivals)} arrivals at the sink\n")
    tables = report(runs, load, expected)
    sys.stdout.write(tables)
    if not chosen.quick:
        write(runs, load, tables)
    is_exact = runs[0].words == expected and not any(judge(runs[0], load, expected))
    sys.stdout.write("\nexactly once: the counts are exact\n" if is_exact else "\nexactly once: WRONG COUNTS\n")
    return int(not is_exact)


if __name__ == "__main__":
    sys.exit(main())
