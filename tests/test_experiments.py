"""The parts that experiments share, and those of the experiments that need no engine."""
from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import pages, picture
from experiments.actor_rollback.run import Plate, alone, last_time
from experiments.against_peers.run import Log, Outcome, judge
from experiments.flights import tables
from experiments.training import features, network, show
from experiments.word_count import stream

# pages


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.floats(0, 100))
def test_a_percentile_is_one_of_the_numbers_and_so_many_do_not_exceed_it(numbers, percent):
    found = pages.percentile(numbers, percent)
    assert found in numbers
    assert sum(number <= found for number in numbers) >= len(numbers) * percent / 100 - 1e-6


def test_a_table_aligns_numbers_to_the_right():
    assert pages.table(("name", "count"), [("a", "1,000"), ("b", "-")]) == (
        "| name | count |\n|---|---:|\n| a | 1,000 |\n| b | - |\n")


def test_results_are_written_between_the_marks_again_and_again(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{pages.BEGIN}\n{pages.END}\n\nThe end.\n")
    for text in ("first", "second"):
        pages.fill(readme, text)
        assert readme.read_text() == f"# Title\n\n{pages.BEGIN}\n\n{text}\n\n{pages.END}\n\nThe end.\n"
    readme.write_text("# Title\n")
    with pytest.raises(ValueError, match="no place for results"):
        pages.fill(readme, "lost")
    assert readme.read_text() == "# Title\n"


# pictures


@given(st.floats(0.001, 1e6), st.floats(1.5, 1e6), st.booleans())
def test_ticks_lie_on_their_axis_and_are_not_too_many(low, times, is_log):
    axis = picture.Axis("", low, low * times, is_log)
    shares = [axis.share(tick) for tick in axis.ticks()]
    assert shares == sorted(shares)
    assert all(0 <= share <= 1 for share in shares)
    assert len(shares) <= 13


def test_pictures_are_well_formed_and_name_all_that_they_show():
    axis = picture.Axis("ms", 0, 10)
    drawn = [
        picture.line_chart("a < b", axis, axis, [picture.Series("p50", [(0, 1), (5, 9)])], [(5, "killed")]),
        picture.bar_chart("a < b", ["one", "two"], axis, [picture.Bars("p50", [3, None])]),
        picture.stack_chart("a < b", axis, ["p50", "rest"], [picture.Stack("killed", [1, 2])]),
    ]
    for text in drawn:
        words = [node.text for node in ElementTree.fromstring(text).iter() if node.tag.endswith("text")]
        assert {"a < b", "p50"} <= set(words)


# word_count


def test_batches_are_the_same_each_time_and_splitting_loses_no_word():
    words = stream.counted(stream.sentences(1, 2))
    assert words == stream.counted(stream.sentences(1, 2)) != stream.counted(stream.sentences(2, 1))
    parts = list(stream.split(words, 3))
    assert sum((Counter(part) for part in parts), Counter()) == words
    assert sum(map(len, parts)) == len(words)


# actor_rollback


def test_the_plate_is_the_same_each_time_and_depends_on_its_sizes():
    plate = Plate(2, 4, 8, 1)
    assert alone(plate) == alone(plate) != alone(plate._replace(columns=9))


def test_the_last_time_of_a_story():
    lines = ["10:00:01.500  ActorReady  x", "10:00:02.250  ActorReady  x", "10:00:03.000  now  x"]
    assert last_time(lines, "ActorReady", 86_400.0 * 3 + 5) == 86_400 * 3 + 36_002.25
    with pytest.raises(LookupError, match="nothing of LeaseLost"):
        last_time(lines, "LeaseLost", 0.0)


# training


def some_flights(count=400):
    rng = np.random.default_rng(1)
    layout = tables.Layout(("AA", "UA"), ("LAX",))
    sizes = [*layout.sizes().values()]
    codes = [rng.integers(0, size, count) for size in sizes]
    return features.split(codes, layout, rng.random(count) < 0.3, rng.random(count) < 0.2)


def test_features_are_standardised_by_what_is_learnt_from():
    learnt, held = some_flights()
    wide = learnt.wide(np.arange(len(learnt.late)))
    used = wide.std(axis=0) > 0
    np.testing.assert_allclose(wide.mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(wide.std(axis=0)[used], 1, atol=1e-2)
    assert held.center is learnt.center
    assert (wide[:, : learnt.places.max() + 1] > 0).sum() == learnt.places.size


def test_the_gradient_of_the_network_is_the_slope_of_its_loss(monkeypatch):
    learnt, held = some_flights()
    monkeypatch.setattr(network.flow, "get", lambda ref: tuple(learnt))
    net = network.Network(["a reference"])
    slope = net.gradient(3, 1, 2)
    assert all(np.array_equal(slope[name], again) for name, again in net.gradient(3, 1, 2).items())
    assert not np.array_equal(slope["out"], net.gradient(3, 0, 2)["out"])
    for name, place in (("in", (4, 7)), ("bias", 3), ("out", 5), ("level", 0)):
        found, near = [], np.float32(1e-2)
        for way in (near, -near):
            net.weights = network.first_weights(len(learnt.center))
            net.weights[name][place] += way
            net.gradient(3, 1, 2)
            found.append(net.loss())
        assert abs((found[0] - found[1]) / (2 * near) - slope[name][place]) < 1e-3
    net.weights = network.first_weights(len(learnt.center))
    first = net.weights["out"]
    net.apply(slope)
    np.testing.assert_allclose(net.weights["out"], first - np.float32(network.RATE) * slope["out"], atol=1e-7)
    assert net.__getstate__()["flights"] is None
    assert network.judge(net.weights, held).flights == len(held.late)


@given(st.lists(st.floats(-999, 999), min_size=1, max_size=300), st.integers(1, 40))
def test_a_curve_has_its_size_and_a_dot_in_each_column(numbers, columns):
    lines = show.curve(numbers, None, columns, 5)
    assert [len(line) for line in lines] == [len(lines[0])] * 5
    assert all(any(line[-columns:][place] != chr(show.BLANK) for line in lines) for place in range(columns))
    assert show.curve(numbers, 0, columns, 5)[2][-columns] != chr(show.BLANK)
    assert min(numbers) - 1e-3 <= min(show.smoothed(numbers)) <= max(show.smoothed(numbers)) <= max(numbers) + 1e-3


# against_peers


def test_a_verdict_counts_what_was_answered_and_is_not_there():
    logs = [Log([("0.0", 1.0), ("0.1", 4.0)], ["ActorDied"], 2.0), Log([("1.0", 1.5), ("1.1", 4.5)], [], 0.0)]
    seen = judge("ray", Outcome(logs, ["0.1", "1.0", "1.1", "1.1"]))
    assert (seen.answered, seen.value, seen.lost, seen.doubled, seen.errors) == (4, 4, 1, 1, {"ActorDied": 1})
    assert seen.silent_s == 2.5
    assert judge("ray", Outcome(logs, None)).silent_s == -1
