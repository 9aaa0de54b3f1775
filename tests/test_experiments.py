"""The parts that experiments share, and those of the experiments that need no engine."""
from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import pages, picture
from experiments.actor_rollback.run import Plate, alone, last_time
from experiments.against_peers.run import Log, Outcome, judge
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


# against_peers


def test_a_verdict_counts_what_was_answered_and_is_not_there():
    logs = [Log([("0.0", 1.0), ("0.1", 4.0)], ["ActorDied"], 2.0), Log([("1.0", 1.5), ("1.1", 4.5)], [], 0.0)]
    seen = judge("ray", Outcome(logs, ["0.1", "1.0", "1.1", "1.1"]))
    assert (seen.answered, seen.value, seen.lost, seen.doubled, seen.errors) == (4, 4, 1, 1, {"ActorDied": 1})
    assert seen.silent_s == 2.5
    assert judge("ray", Outcome(logs, None)).silent_s == -1
