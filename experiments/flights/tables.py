"""From text to features: pure functions over Arrow tables and numpy arrays; no engine, no clock, no files.

The same functions run inside tasks and in the single process that checks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Array = TypeVar("Array", Ints, Floats)

LATE_MIN = 15  # an arrival is late when it is more than this many minutes after the schedule
ORIGINS = ("EWR", "JFK", "LGA")
# Hours are counted in UTC from the day before the year, so that "the hour before" never leaves the grid.
FIRST_HOUR_S = 1_356_912_000  # 2012-12-31T00:00Z
GRID_HOURS = 24 * 368
DAYS_BEFORE_MONTH = np.array([0, 0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334])
HELD_OUT_EVERY_DAYS = 5  # every fifth day is kept for judging: whole days, since flights of one day share their fate

COLUMNS = (
    "year",
    "month",
    "day",
    "dep_time",
    "sched_dep_time",
    "dep_delay",
    "arr_time",
    "sched_arr_time",
    "arr_delay",
    "carrier",
    "flight",
    "tailnum",
    "origin",
    "dest",
    "air_time",
    "distance",
    "hour",
    "minute",
    "time_hour",
)
KEPT = {
    "month": pa.int64(),
    "day": pa.int64(),
    "hour": pa.int64(),
    "minute": pa.int64(),
    "dep_delay": pa.int64(),
    "arr_delay": pa.int64(),
    "distance": pa.int64(),
    "carrier": pa.string(),
    "origin": pa.string(),
    "dest": pa.string(),
    "time_hour": pa.timestamp("s", tz="UTC"),
}

SLOT_KEYS = ("carrier", "origin", "month", "hour")
ROUTE_KEYS = ("origin", "dest", "carrier")
SUMS = ("flights", "cancelled", "arrived", "late", "dep_delay_min", "arr_delay_min", "distance_miles")


# ------------------------------------------------------------ reading


def after_newline(text: Bytes, position: int) -> int:
    """The start of the first line that begins at or after position; the end of the text if there is none."""
    if position <= 0:
        return 0
    window = 512
    for start in range(position - 1, len(text), window):
        hits = np.flatnonzero(text[start : start + window] == ord("\n"))
        if len(hits):
            return start + int(hits[0]) + 1
    return len(text)


def byte_range(text: Bytes, part: int, parts: int) -> tuple[int, int]:
    """Where part number `part` of `parts` begins and ends: whole lines, the header in none of them."""
    header_bytes = after_newline(text, 1)
    body_bytes = len(text) - header_bytes
    start, stop = (after_newline(text, header_bytes + body_bytes * edge // parts) for edge in (part, part + 1))
    return start, stop


def parse(text: Bytes, start: int, stop: int) -> pa.Table:
    """The lines between two byte positions as a table of the columns in KEPT."""
    if start == stop:
        return pa.schema(list(KEPT.items())).empty_table()
    return pyarrow.csv.read_csv(
        pa.BufferReader(pa.py_buffer(text[start:stop])),
        read_options=pyarrow.csv.ReadOptions(
            column_names=list(COLUMNS), use_threads=False, block_size=stop - start + 1
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=KEPT, include_columns=list(KEPT), null_values=["NA", ""], strings_can_be_null=True
        ),
    )


# ------------------------------------------------------------ grouping


def with_measures(flights: pa.Table) -> pa.Table:
    """The keys of both groupings, and one integer column for each of SUMS."""
    keys = dict.fromkeys(SLOT_KEYS + ROUTE_KEYS)
    table = flights.select(list(keys))
    measures = (
        pa.array(np.ones(len(flights), dtype=np.int64)),
        pc.is_null(flights["dep_delay"]).cast(pa.int64()),
        pc.is_valid(flights["arr_delay"]).cast(pa.int64()),
        pc.greater(flights["arr_delay"], LATE_MIN).fill_null(False).cast(pa.int64()),
        flights["dep_delay"].fill_null(0),
        flights["arr_delay"].fill_null(0),
        flights["distance"],
    )
    for name, column in zip(SUMS, measures, strict=True):
        table = table.append_column(name, column)
    return table


def add_up(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """One row for each combination of the keys, ordered by them, with the sums of SUMS; all integers, so exact."""
    grouped = table.group_by(list(keys), use_threads=False).aggregate([(name, "sum") for name in SUMS])
    named = grouped.select([*keys, *(f"{name}_sum" for name in SUMS)]).rename_columns([*keys, *SUMS])
    return named.sort_by([(key, "ascending") for key in keys]).combine_chunks()


def group(flights: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The sums by slot (carrier, origin, month, hour) and by route (origin, destination, carrier)."""
    table = with_measures(flights)
    return add_up(table, SLOT_KEYS), add_up(table, ROUTE_KEYS)


def merge_groups(*groups: pa.Table) -> pa.Table:
    """The sums of several groupings by the same keys."""
    keys = [name for name in groups[0].column_names if name not in SUMS]
    return add_up(pa.concat_tables(groups), keys)


# ------------------------------------------------------------ the pulse of an airport


def hour_number(time_hour: pa.ChunkedArray) -> Ints:
    """The place of each time stamp in the grid of hours."""
    seconds: Ints = time_hour.cast(pa.int64()).to_numpy()
    return (seconds - FIRST_HOUR_S) // 3600


def origin_number(origin: pa.ChunkedArray) -> Ints:
    """The place of each airport in ORIGINS; raises ValueError for an unknown one."""
    return numbers(origin, ORIGINS)


def numbers(column: pa.ChunkedArray, known: Sequence[str]) -> Ints:
    """The place of each value in `known`; raises ValueError for a value that is not there."""
    found = pc.index_in(column, value_set=pa.array(list(known), type=pa.string()))
    if found.null_count:
        raise ValueError(f"unknown values: {sorted(set(column.filter(pc.is_null(found)).to_pylist()))[:5]}")
    places: Ints = found.to_numpy().astype(np.int64)
    return places


def pulse(flights: pa.Table) -> Ints:
    """For each airport and hour: flights, minutes of delay seen by its end, minutes seen an hour later.

    Shape (3, airports, hours), integers, so that pulses of parts add up exactly.
    """
    minute = flights["minute"].to_numpy()
    # A flight that has not left yet shows as much delay as has passed since its time of departure.
    never_left = 24 * 60
    delay_min = np.maximum(flights["dep_delay"].fill_null(never_left).to_numpy(), 0)
    seen_at_end = np.minimum(delay_min, 60 - minute)
    seen_later = np.minimum(delay_min, 120 - minute)
    cell = origin_number(flights["origin"]) * GRID_HOURS + hour_number(flights["time_hour"])
    cells = len(ORIGINS) * GRID_HOURS
    layers = [np.bincount(cell, minlength=cells)]
    layers += [np.bincount(cell, weights=seen, minlength=cells) for seen in (seen_at_end, seen_later)]
    return np.stack(layers).astype(np.int64).reshape(3, len(ORIGINS), GRID_HOURS)


def merge_arrays(*arrays: Array) -> Array:
    """The sum, added from left to right: the order is part of the contract, since floats depend on it."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


# ------------------------------------------------------------ weather

WEATHER_EDGES = {
    "wind_speed": (4, 7, 10, 13, 16, 20, 25),
    "visib": (0.5, 1, 2, 3, 5, 8, 9.9),
    "precip": (0.001, 0.02, 0.05, 0.1, 0.2),
    "humid": (35, 50, 60, 70, 80, 88, 94),
    "pressure": (1002, 1007, 1011, 1015, 1019, 1024),
    "temp": (25, 32, 40, 50, 60, 70, 78, 85),
}


def bins(values: Floats, edges: Sequence[float]) -> Ints:
    """0 for a missing value, else 1 + the number of edges at or below it."""
    return np.where(np.isnan(values), 0, 1 + np.searchsorted(np.asarray(edges, dtype=np.float64), values, "right"))


def weather_grid(text: bytes) -> Ints:
    """For each measure of WEATHER_EDGES, airport and hour: its bin; 0 where nothing was measured."""
    table = pyarrow.csv.read_csv(
        pa.BufferReader(text),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types={"time_hour": KEPT["time_hour"], **dict.fromkeys(WEATHER_EDGES, pa.float64())},
            null_values=["NA", ""],
        ),
    )
    grid = np.zeros((len(WEATHER_EDGES), len(ORIGINS), GRID_HOURS), dtype=np.int64)
    place = origin_number(table["origin"]), hour_number(table["time_hour"])
    for layer, (name, edges) in zip(grid, WEATHER_EDGES.items(), strict=True):
        layer[place] = bins(table[name].to_numpy(), edges)
    return grid


# ------------------------------------------------------------ features

PULSE_EDGES = (0.5, 1, 2, 3, 4.5, 6, 8, 10.5, 14, 18, 24, 32)
CLOCK_HOURS = 24


class Layout(NamedTuple):
    """Which values the one-hot features can take: known only after the flights were grouped."""

    carriers: tuple[str, ...]
    dests: tuple[str, ...]

    def sizes(self) -> dict[str, int]:
        """How many columns each feature has, in their order."""
        pulse_bins = len(PULSE_EDGES) + 2
        return {
            "carrier": len(self.carriers),
            "destination": len(self.dests),
            "month": 12,
            "weekday": 7,
            "airport and hour": len(ORIGINS) * CLOCK_HOURS,
            "carrier and airport": len(self.carriers) * len(ORIGINS),
            "delays here 1 h ago": pulse_bins,
            "delays here 2 h ago": pulse_bins,
            "delays there 1 h ago": pulse_bins,
            **{f"{name} 1 h ago": len(edges) + 2 for name, edges in WEATHER_EDGES.items()},
        }

    def columns(self) -> int:
        """The length of the model's vector of weights."""
        return sum(self.sizes().values())


class Encoded(NamedTuple):
    """One part, ready for the model: column numbers (features, flights) and 1.0 for a late arrival."""

    train: Ints
    train_late: Floats
    held: Ints
    held_late: Floats


def layout_of(routes: pa.Table) -> Layout:
    """The layout that covers every route; sorted, so that it does not depend on the order of the parts."""
    return Layout(*(tuple(sorted(set(routes[name].to_pylist()))) for name in ("carrier", "dest")))


def mean_or_nan(total: Ints, count: Ints) -> Floats:
    """total / count, nan where nothing was counted."""
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def feature_codes(flights: pa.Table, seen: Ints, weather: Ints, layout: Layout) -> list[Ints]:
    """For each feature of the layout the number of its value; all known when the hour of departure begins."""
    origin, hour = origin_number(flights["origin"]), hour_number(flights["time_hour"])
    carrier, dest = numbers(flights["carrier"], layout.carriers), numbers(flights["dest"], layout.dests)
    month, clock = flights["month"].to_numpy(), flights["hour"].to_numpy()
    day = DAYS_BEFORE_MONTH[month] + flights["day"].to_numpy() - 1
    count, at_end, later = seen
    elsewhere_count, elsewhere = count.sum(axis=0) - count, at_end.sum(axis=0) - at_end
    here = mean_or_nan(at_end[origin, hour - 1], count[origin, hour - 1])
    before = mean_or_nan(later[origin, hour - 2], count[origin, hour - 2])
    there = mean_or_nan(elsewhere[origin, hour - 1], elsewhere_count[origin, hour - 1])
    return [
        carrier,
        dest,
        month - 1,
        (day + 1) % 7,  # the year began on a Tuesday
        origin * CLOCK_HOURS + clock,
        carrier * len(ORIGINS) + origin,
        *(bins(value, PULSE_EDGES) for value in (here, before, there)),
        *weather[:, origin, hour - 1],
    ]


def encode(flights: pa.Table, seen: Ints, weather: Ints, layout: Layout) -> Encoded:
    """The flights that arrived, as column numbers, split by day into those to learn from and those to judge by."""
    flights = flights.filter(pc.is_valid(flights["arr_delay"]))
    codes = np.array(feature_codes(flights, seen, weather, layout), dtype=np.int64)
    codes += np.cumsum([0, *layout.sizes().values()])[:-1, np.newaxis]
    late = (flights["arr_delay"].to_numpy() > LATE_MIN).astype(np.float64)
    day = DAYS_BEFORE_MONTH[flights["month"].to_numpy()] + flights["day"].to_numpy() - 1
    held = day % HELD_OUT_EVERY_DAYS == HELD_OUT_EVERY_DAYS - 1
    return Encoded(np.ascontiguousarray(codes[:, ~held]), late[~held], np.ascontiguousarray(codes[:, held]), late[held])
