"""The flights as a network reads them: which hour, whose, how late others were, the weather; standardised.

Kept narrow, a few numbers for each flight, and made wide only for the flights of one batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from experiments.flights import source, tables

Singles = npt.NDArray[np.float32]

CHOICES = ("carrier", "month", "weekday", "airport and hour")  # one column for each value
CHOICE_CODES = (0, 2, 3, 4)  # where they are among the codes of tables.feature_codes
LEVEL_CODES = tuple(range(6, 15))  # delays seen an hour ago and weather, as steps of a scale: a column each


class Flights(NamedTuple):
    """Flights that arrived; columns of choices come first, then those of levels."""

    places: npt.NDArray[np.int32]  # (flights, choices): the column that is 1
    levels: Singles  # (flights, levels)
    late: Singles
    center: Singles  # of each column, in what is learnt from
    spread: Singles

    def wide(self, rows: npt.NDArray[np.int64]) -> Singles:
        """Standardised columns of some flights."""
        x = np.zeros((len(rows), len(self.center)), np.float32)
        x[np.arange(len(rows))[:, np.newaxis], self.places[rows]] = 1
        x[:, -self.levels.shape[1] :] = self.levels[rows]
        x -= self.center
        x /= self.spread
        return x


def load(files: source.Source) -> tuple[Flights, Flights]:
    """What to learn from, and what to judge by: every fifth day."""
    text = source.unzip(files.flights_zip)
    table = tables.parse(text, *tables.byte_range(text, 0, 1))
    seen, weather = tables.pulse(table), tables.weather_grid(Path(files.weather_csv).read_bytes())
    table = table.filter(pc.is_valid(table["arr_delay"]))
    names = [tuple(sorted(pc.unique(table[name]).to_pylist())) for name in ("carrier", "dest")]
    layout = tables.Layout(*names)
    return split(tables.feature_codes(table, seen, weather, layout), layout, *late_and_held(table))


def late_and_held(table: pa.Table) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Whether each flight was late, and whether it is for judging."""
    day = tables.DAYS_BEFORE_MONTH[table["month"].to_numpy()] + table["day"].to_numpy() - 1
    held = day % tables.HELD_OUT_EVERY_DAYS == tables.HELD_OUT_EVERY_DAYS - 1
    return table["arr_delay"].to_numpy() > tables.LATE_MIN, held


def split(
    codes: list[tables.Ints], layout: tables.Layout, late: npt.NDArray[np.bool_], held: npt.NDArray[np.bool_]
) -> tuple[Flights, Flights]:
    """Codes as columns; centers and spreads are those of the flights that are learnt from."""
    sizes = [layout.sizes()[name] for name in CHOICES]
    starts = np.cumsum([0, *sizes])
    places = np.stack([codes[code] + start for code, start in zip(CHOICE_CODES, starts, strict=False)], axis=1)
    levels = np.stack([codes[code] for code in LEVEL_CODES], axis=1).astype(np.float32)
    share = np.bincount(places[~held].ravel(), minlength=starts[-1]) / (~held).sum()
    center = np.concatenate([share, levels[~held].mean(axis=0)])
    spread = np.concatenate([np.sqrt(share * (1 - share)), levels[~held].std(axis=0)])
    spread[spread == 0] = 1
    scale = center.astype(np.float32), spread.astype(np.float32)
    parts = [
        Flights(places[part].astype(np.int32), levels[part], late[part].astype(np.float32), *scale)
        for part in (~held, held)
    ]
    return parts[0], parts[1]
