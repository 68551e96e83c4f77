"""The minimum cut that chooses what is made again, against all cuts of small networks."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch_ort._C import InternalError, testing

SOURCE, SINK = 0, 1
INFINITE = 2**60
Arc = tuple[int, int, int]


@st.composite
def networks(draw: st.DrawFn) -> tuple[int, list[Arc]]:
    """Arcs in both directions, several between two nodes, in circles, and of no capacity."""
    count = draw(st.integers(2, 8))
    node = st.integers(0, count - 1)
    capacity = st.one_of(st.integers(0, 4), st.integers(0, 1000), st.just(INFINITE))
    return count, draw(st.lists(st.tuples(node, node, capacity), max_size=20))


@st.composite
def choices(draw: st.DrawFn) -> tuple[int, list[Arc]]:
    """A network as the passes write it: values that are made of earlier ones, or cross.

    A value has two nodes. It costs to make, of what it reads, which has to cross or to be made, and
    it costs to cross; some cannot be made, and the last is wanted.
    """
    num_values = draw(st.integers(1, 4))
    cost = st.integers(0, 9)
    arcs: list[Arc] = []
    for value in range(num_values):
        made, crossed = 2 + 2 * value, 3 + 2 * value
        arcs.append((SOURCE, made, INFINITE if draw(st.booleans()) else draw(cost)))
        arcs.append((made, crossed, draw(cost)))
        for earlier in draw(st.sets(st.integers(0, value - 1))) if value else ():
            arcs.append((3 + 2 * earlier, made, INFINITE))
    wanted = draw(st.sets(st.integers(0, num_values - 1))) | {num_values - 1}
    arcs += [(3 + 2 * value, SINK, INFINITE) for value in wanted]
    return 2 + 2 * num_values, arcs


def capacity_of(with_sink: set[int], arcs: list[Arc]) -> int:
    return sum(
        capacity for start, end, capacity in arcs if start not in with_sink and end in with_sink
    )


def cheapest_cuts(count: int, arcs: list[Arc]) -> list[set[int]]:
    """Look at every way to part the nodes."""
    others = range(2, count)
    cuts = [
        {SINK, *chosen}
        for size in range(count - 1)
        for chosen in itertools.combinations(others, size)
    ]
    least = min(capacity_of(cut, arcs) for cut in cuts)
    return [cut for cut in cuts if capacity_of(cut, arcs) == least]


def sink_side(count: int, arcs: list[Arc]) -> set[int]:
    return {node for node, is_there in enumerate(testing.min_cut(count, arcs)) if is_there}


@settings(max_examples=500, deadline=None)
@given(networks())
def test_no_cut_is_cheaper(network: tuple[int, list[Arc]]) -> None:
    count, arcs = network
    cheapest = cheapest_cuts(count, arcs)
    assume(capacity_of(cheapest[0], arcs) < INFINITE)
    found = sink_side(count, arcs)
    assert capacity_of(found, arcs) == capacity_of(cheapest[0], arcs)
    assert found == set.intersection(*cheapest)  # the fewest nodes with the sink


@pytest.mark.parametrize("seed", range(4))
def test_flow_that_is_sent_back(seed: int) -> None:
    """Long ways through narrow arcs: what took a short one at first has to leave it again."""
    choose = random.Random(seed)
    for _ in range(400):
        arcs = [
            (*choose.sample(range(8), 2), choose.randint(1, 2))
            for _ in range(choose.randint(8, 18))
        ]
        cheapest = cheapest_cuts(8, arcs)
        assert sink_side(8, arcs) == set.intersection(*cheapest)


@settings(max_examples=500, deadline=None)
@given(choices())
def test_no_choice_of_what_is_made_again_is_cheaper(network: tuple[int, list[Arc]]) -> None:
    count, arcs = network
    found, cheapest = sink_side(count, arcs), cheapest_cuts(count, arcs)
    assert capacity_of(found, arcs) == capacity_of(cheapest[0], arcs) < INFINITE
    assert found == set.intersection(*cheapest)


@pytest.mark.parametrize("arc", [(0, 3, 1), (-1, 1, 1), (0, 1, -1)])
def test_arcs_that_are_none(arc: Arc) -> None:
    with pytest.raises(InternalError, match=r"min_cut: got an arc from .* want nodes below 3"):
        testing.min_cut(3, [arc])
