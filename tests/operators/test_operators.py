# PyTorch's own operator database on both roads: a fixed tenth with some samples always, the whole
# of it where slow tests are asked for.
from __future__ import annotations

import pytest
import torch
from operators import Extent, check_operators, database

pytestmark = pytest.mark.hands_over("some operators have results of unbacked sizes")

PARTS = 10

pytest.importorskip("expecttest", reason="torch.testing's samples need it")


def assert_right(part: int, extent: Extent) -> int:
    """Check every tenth operator; give how many calls of it the engine's roads ran."""
    calls, failures = 0, []
    for _, tally in check_operators(database()[part::PARTS], extent):
        calls += sum(tally.counts[road] for road in extent.roads)
        failures += tally.failures
    assert not failures, "\n".join([f"{len(failures)} of {calls} calls:", *failures[:100]])
    return calls


# An ORTModule copies what is not dense: layouts are the graph's to get right, which is cheaper.
@pytest.mark.parametrize(
    ("road", "layouts", "max_samples"),
    [("ortmodule", ("as given", "empty"), 1), ("graph", ("as given", "transposed"), 2)],
)
def test_tenth_of_all_operators(road, layouts, max_samples):
    extent = Extent((torch.float32,), layouts, max_samples, roads=(road,))
    assert assert_right(0, extent) > 80


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_operators(part: int):
    assert assert_right(part, Extent()) > 2000
