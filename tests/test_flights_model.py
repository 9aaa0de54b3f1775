"""The pure parts of the flights experiment: cutting and grouping text, features, and the descent to the optimum."""
from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.flights import model, source, tables

HEADER = ",".join(tables.COLUMNS)
CARRIERS, DESTS = ("AA", "B6", "UA"), ("ATL", "BOS", "IAH", "LAX")


def line(rng: np.random.Generator) -> str:
    """One flight of January as the file has it; one in ten was cancelled."""
    day, hour, minute = int(rng.integers(1, 32)), int(rng.integers(5, 24)), int(rng.integers(0, 60))
    carrier, dest = CARRIERS[rng.integers(3)], DESTS[rng.integers(4)]
    origin = tables.ORIGINS[rng.integers(3)]
    delay = int(rng.integers(-10, 40)) + 20 * (carrier == "UA")
    dep, arr = ("NA", "NA") if rng.random() < 0.1 else (str(delay), str(delay + int(rng.integers(-8, 9))))
    stamp = np.datetime64(f"2013-01-{day:02}T{hour:02}:00:00") + np.timedelta64(5, "h")
    return (f"2013,1,{day},517,{hour}{minute:02},{dep},830,819,{arr},{carrier},1545,N14228,{origin},{dest},"
            f"227,1400,{hour},{minute},{stamp}Z")


def text_of(lines: list[str]) -> tables.Bytes:
    return np.frombuffer("\n".join([HEADER, *lines, ""]).encode(), dtype=np.uint8)


@pytest.fixture(scope="module")
def text() -> tables.Bytes:
    rng = np.random.default_rng(7)
    return text_of([line(rng) for _ in range(1500)])


@pytest.fixture(scope="module")
def flights(text):
    return tables.parse(text, *tables.byte_range(text, 0, 1))


def split(text: tables.Bytes, parts: int) -> list[pa.Table]:
    return [tables.parse(text, *tables.byte_range(text, part, parts)) for part in range(parts)]


def encode_all(pieces: list[pa.Table], whole: pa.Table) -> tuple[list[tables.Encoded], tables.Layout]:
    layout = tables.layout_of(tables.group(whole)[1])
    weather = np.zeros((len(tables.WEATHER_EDGES), len(tables.ORIGINS), tables.GRID_HOURS), dtype=np.int64)
    return [tables.encode(piece, tables.pulse(whole), weather, layout) for piece in pieces], layout


# cutting


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 50))
def test_parts_are_whole_lines_and_cover_the_text_once(lengths, parts):
    text = text_of(["x" * length for length in lengths])
    edges = [tables.byte_range(text, part, parts) for part in range(parts)]
    assert edges[0][0] == len(HEADER) + 1
    assert edges[-1][1] == len(text)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(edges))
    assert all(text[start - 1] == ord("\n") for start, _ in edges)


def test_a_last_line_without_its_newline_is_kept(text):
    assert len(tables.parse(text[:-1], *tables.byte_range(text[:-1], 0, 1))) == 1500


@pytest.mark.parametrize("parts", [1, 2, 7, 64, 3000])
def test_parsing_in_parts_gives_the_same_rows(text, flights, parts):
    assert pa.concat_tables(split(text, parts)).combine_chunks().equals(flights.combine_chunks())


def test_a_missing_delay_is_null_and_a_wrong_number_is_refused(flights):
    assert flights["arr_delay"].null_count == flights["dep_delay"].null_count > 0
    broken = text_of([line(np.random.default_rng(1)).replace("2013,1,", "2013,January,", 1)])
    with pytest.raises(pa.ArrowInvalid):
        tables.parse(broken, *tables.byte_range(broken, 0, 1))


# grouping


@pytest.mark.parametrize("parts", [1, 5, 16, 40])
def test_groups_merged_in_a_tree_are_the_groups_of_the_whole(text, flights, parts):
    pieces = [tables.group(piece) for piece in split(text, parts)]
    for place, expected in enumerate(tables.group(flights)):
        assert model.tree([piece[place] for piece in pieces], tables.merge_groups).equals(expected)


def test_sums_are_those_of_plain_python(flights):
    _, routes = tables.group(flights)
    rows = [row for row in flights.to_pylist() if (row["origin"], row["dest"], row["carrier"]) == ("JFK", "LAX", "UA")]
    found = next(row for row in routes.to_pylist() if (row["origin"], row["dest"], row["carrier"]) ==
                 ("JFK", "LAX", "UA"))
    delays = [row["arr_delay"] for row in rows if row["arr_delay"] is not None]
    assert found["flights"] == len(rows)
    assert found["cancelled"] == sum(row["dep_delay"] is None for row in rows)
    assert found["arrived"] == len(delays)
    assert found["late"] == sum(delay > 15 for delay in delays)
    assert found["arr_delay_min"] == sum(delays)


def test_a_delay_is_seen_only_as_far_as_time_has_passed():
    # Due at 9:50 and 100 minutes late: ten minutes of that have shown by 10:00, seventy by 11:00.
    row = "2013,1,1,1130,950,100,1400,1230,90,UA,1,N1,JFK,LAX,200,2475,9,50,2013-01-01T14:00:00Z"
    text = text_of([row, row.replace(",100,", ",NA,").replace(",90,", ",NA,"), row.replace(",100,", ",-4,")])
    seen = tables.pulse(tables.parse(text, *tables.byte_range(text, 0, 1)))
    hour = 24 + 14
    assert seen[:, tables.ORIGINS.index("JFK"), hour].tolist() == [3, 10 + 10, 70 + 70]
    assert seen.sum(axis=(1, 2)).tolist() == [3, 20, 140]


# features


def test_bins_keep_missing_values_apart():
    assert tables.bins(np.array([np.nan, 0.0, 1.0, 1.5, 9.0]), (1, 2)).tolist() == [0, 1, 2, 2, 3]


def test_weather_lands_in_its_hour():
    csv = (b"origin,temp,humid,wind_speed,precip,pressure,visib,time_hour\n"
           b"LGA,39.02,59.37,NA,0,1012,10,2013-01-01T06:00:00Z\n")
    grid = tables.weather_grid(csv)
    got = dict(zip(tables.WEATHER_EDGES, grid[:, tables.ORIGINS.index("LGA"), 24 + 6].tolist(), strict=True))
    assert got == {"wind_speed": 0, "visib": 8, "precip": 1, "humid": 3, "pressure": 4, "temp": 3}
    assert np.count_nonzero(grid) == 5


def test_every_feature_stays_within_its_own_columns(text, flights):
    (part,), layout = encode_all([flights], flights)
    edges = np.cumsum([0, *layout.sizes().values()])
    for codes, low, high in zip(np.hstack([part.train, part.held]), edges[:-1], edges[1:], strict=True):
        assert low <= codes.min() <= codes.max() < high
    assert len(part.train_late) + len(part.held_late) == flights.num_rows - flights["arr_delay"].null_count


def test_nothing_of_the_flight_itself_reaches_its_features(flights):
    # The delays of one hour must not change the features of flights in that hour.
    layout = tables.layout_of(tables.group(flights)[1])
    weather = np.zeros((len(tables.WEATHER_EDGES), len(tables.ORIGINS), tables.GRID_HOURS), dtype=np.int64)
    hours = tables.hour_number(flights["time_hour"])
    last = flights.filter(pa.array(hours == hours.max()))
    seen = tables.pulse(flights)
    before = tables.feature_codes(last, seen, weather, layout)
    seen[:, :, hours.max():] += 1000
    assert all(np.array_equal(*pair) for pair in zip(before, tables.feature_codes(last, seen, weather, layout),
                                                     strict=True))


def test_an_unknown_value_is_named():
    with pytest.raises(ValueError, match="SFO"):
        tables.numbers(pa.chunked_array([["JFK", "SFO"]]), tables.ORIGINS)


# the tree and the descent


@given(st.lists(st.integers(), min_size=1, max_size=70), st.integers(2, 5))
def test_a_tree_keeps_order_and_loses_nothing(items, fanout):
    assert model.tree([[item] for item in items], lambda *lists: list(itertools.chain(*lists)), fanout) == items


def test_merging_leaves_its_inputs_alone():
    arrays = [np.arange(3.0), np.ones(3)]
    for array in arrays:
        array.flags.writeable = False
    assert tables.merge_arrays(*arrays).tolist() == [1, 2, 3]
    assert arrays[0].tolist() == [0, 1, 2]


def descend(parts: list[tables.Encoded], layout: tables.Layout, tolerance: float) -> model.Descent:
    seen = model.Census.of(model.tree([model.census(part, layout.columns()) for part in parts], tables.merge_arrays))
    descent = model.Descent(model.first_curvature(seen, len(layout.sizes())), tolerance)
    while not descent.done and descent.rounds < 300:
        total = model.tree([model.share(part, descent.trial) for part in parts], tables.merge_arrays)
        descent.observe(model.objective(total, descent.trial, seen))
    return descent


def test_the_share_is_the_slope_of_the_loss(flights):
    (part,), layout = encode_all([flights], flights)
    rng = np.random.default_rng(3)
    weights, ahead = rng.normal(size=(2, layout.columns())) / 10
    gradient = model.share(part, weights)[:-2]
    step = 1e-5
    up, down = (model.share(part, weights + sign * step * ahead)[-2] for sign in (1, -1))
    assert (up - down) / (2 * step) == pytest.approx(float(gradient @ ahead), rel=1e-6)


def test_the_descent_finds_the_optimum_of_newtons_method(text, flights):
    parts, layout = encode_all(split(text, 5), flights)
    (whole,), _ = encode_all([flights], flights)
    descent = descend(parts, layout, tolerance=1e-8)
    weights, loss = model.newton(whole, layout.columns(), tolerance=1e-11)
    assert descent.done
    assert descent.slope() <= 1e-8
    assert descent.loss == pytest.approx(loss, abs=1e-11)
    np.testing.assert_allclose(model.logits(whole.held, descent.weights), model.logits(whole.held, weights), atol=1e-3)


def test_the_descent_repeats_bit_for_bit(text, flights):
    first, second = (descend(*encode_all(split(text, 5), flights), tolerance=1e-6) for _ in range(2))
    assert first.rounds == second.rounds > 5
    assert first.weights.tobytes() == second.weights.tobytes()


def test_no_flight_is_too_certain_for_the_loss():
    z, late = np.array([-800.0, 800.0, 800.0]), np.array([0.0, 1.0, 0.0])
    assert model.log_loss(z, late).tolist() == [0, 0, 800]
    assert model.probability(z).tolist() == [0, 1, 1]


# the judgement


@pytest.mark.parametrize(("on_time", "late", "auc"), [
    ([1], [8], 1.0), ([8], [1], 0.0), ([5], [5], 0.5), ([1, 5], [5, 8], 0.875), ([1, 9], [5], 0.5)])
def test_area_under_the_curve(on_time, late, auc):
    counts = np.zeros((2, model.SCORE_BINS), dtype=np.int64)
    for row, places in enumerate((on_time, late)):
        np.add.at(counts[row], places, 1)
    assert model.judge(counts).auc == auc


def test_judging_parts_and_the_whole_agrees(text, flights):
    parts, layout = encode_all(split(text, 5), flights)
    (whole,), _ = encode_all([flights], flights)
    weights = descend(parts, layout, tolerance=1e-4).weights
    total = model.tree([model.score(part, weights) for part in parts], tables.merge_arrays)
    assert np.array_equal(total, model.score(whole, weights))
    judged = model.judge(total)
    chances = model.probability(model.logits(whole.held, weights))
    assert judged.flights == len(whole.held_late)
    assert judged.accuracy == pytest.approx(np.mean((chances >= 0.5) == (whole.held_late > 0)))
    assert judged.auc > 0.6


# the source


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(source, "PACKAGE", "no_such_package_of_flights")
    with pytest.raises(source.SourceMissing, match="pip install"):
        source.locate()
