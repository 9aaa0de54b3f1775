"""Laws of reduction trees: flat and in the order of their slots, and of the degree that is soonest done."""
from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flowengine.collectives.tree import degree, fold_s, levels, parents, upwards

EXAMPLES = settings(max_examples=200)
counts = st.integers(1, 40)
degrees = st.integers(1, 41)


def depth(above: tuple[int, ...]) -> int:
    depths: dict[int, int] = {}

    def of(slot: int) -> int:
        if slot not in depths:
            depths[slot] = 0 if above[slot] < 0 else of(above[slot]) + 1
        return depths[slot]

    return max(of(slot) for slot in range(len(above)))


def in_order(above: tuple[int, ...], slot: int) -> list[int]:
    below = [child for child, parent in enumerate(above) if parent == slot]
    found = in_order(above, below[0]) if below else []
    return found + [slot] + [deep for child in below[1:] for deep in in_order(above, child)]


@EXAMPLES
@given(counts, degrees)
def test_slots_are_a_flat_tree_in_order(count, each):
    above = parents(count + 1, each)
    assert above.count(-1) == 1
    assert max(above.count(slot) for slot in range(count + 1)) <= each
    assert in_order(above, above.index(-1)) == list(range(count + 1))
    order = upwards(above)
    assert sorted(order) == list(range(count + 1))
    assert all(order.index(slot) < order.index(parent) for slot, parent in enumerate(above) if parent >= 0)
    assert depth(above) <= levels(count, min(each, max(count, 1)))
    if each in (1, count):
        assert depth(above) == levels(count, each)


@EXAMPLES
@given(st.integers(1, 200), st.integers(1, 1 << 30), st.floats(1e-6, 0.1), st.floats(1e6, 1e11))
def test_the_degree_is_that_of_the_soonest_tree(count, nbytes, latency_s, bytes_per_s):
    best = degree(count, nbytes, latency_s, bytes_per_s)
    assert 1 <= best <= count
    soonest = fold_s(count, best, nbytes, latency_s, bytes_per_s)
    for other in {1, min(2, count), count}:
        assert soonest <= fold_s(count, other, nbytes, latency_s, bytes_per_s)
