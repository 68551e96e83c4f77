"""The minimum cut that chooses what is made again, against all cuts of small networks."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch_ort._C import InternalError, testing

SOURCE, SINK = 0, 1
INFINITE = 2**60
Arc = tuple[int, int, int]
Rerun = tuple[float, list[int]]  # what it costs, and the values that it reads
Save = tuple[int, float, bool]  # producer, what it costs, and whether it is wanted


@st.composite
def networks(draw: st.DrawFn) -> tuple[int, list[Arc]]:
    """Arcs in both directions, several between two nodes, in circles, and of no capacity."""
    count = draw(st.integers(2, 8))
    node = st.integers(0, count - 1)
    capacity = st.one_of(st.integers(0, 4), st.integers(0, 1000), st.just(INFINITE))
    return count, draw(st.lists(st.tuples(node, node, capacity), max_size=20))


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


@st.composite
def borders(draw: st.DrawFn) -> tuple[list[Rerun], list[Save]]:
    """Nodes of one or two results, made of earlier values, and values that the caller holds.

    Some nodes cannot run again, some values cannot be saved; the last value is wanted.
    """
    cost = st.one_of(st.integers(0, 9), st.just(math.inf))
    nodes: list[Rerun] = []
    values: list[Save] = []
    for _ in range(draw(st.integers(1, 5))):
        num_results = draw(st.integers(0, 2))
        producer = len(nodes) if num_results else -1
        if num_results:
            read = (
                st.sets(st.integers(0, len(values) - 1), max_size=3) if values else st.just(set())
            )
            nodes.append((draw(cost), sorted(draw(read))))
        for _ in range(max(1, num_results)):
            values.append((producer, draw(cost), draw(st.booleans())))
    values[-1] = *values[-1][:2], True
    return nodes, values


def cost_of(reruns: set[int], nodes: list[Rerun], values: list[Save]) -> float:
    """Add up what runs again and what is saved: all that is read and not made again."""
    read = {number for number, (_, _, is_wanted) in enumerate(values) if is_wanted}
    read.update(*(nodes[node][1] for node in reruns))
    saved = (values[number][1] for number in read if values[number][0] not in reruns)
    return sum(nodes[node][0] for node in reruns) + sum(saved)


@settings(max_examples=500, deadline=None)
@given(borders())
def test_no_choice_of_what_runs_again_is_cheaper(border: tuple[list[Rerun], list[Save]]) -> None:
    """Costs are in microseconds; of equal choices the one with the fewest nodes is taken."""
    nodes, values = border
    choices = [
        set(chosen)
        for size in range(len(nodes) + 1)
        for chosen in itertools.combinations(range(len(nodes)), size)
    ]
    least = min(cost_of(choice, nodes, values) for choice in choices)
    assume(least < math.inf)
    cheapest = [choice for choice in choices if cost_of(choice, nodes, values) == least]
    found = {n for n, runs in enumerate(testing.cheapest_reruns(nodes, values)) if runs}
    assert found == set.intersection(*cheapest)


@pytest.mark.parametrize("arc", [(0, 3, 1), (-1, 1, 1), (0, 1, -1)])
def test_arcs_that_are_none(arc: Arc) -> None:
    with pytest.raises(InternalError, match=r"min_cut: got an arc from .* want nodes below 3"):
        testing.min_cut(3, [arc])
