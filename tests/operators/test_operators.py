# PyTorch's own operator database on both roads: a fixed tenth with some samples always, the whole
# of it where slow tests are asked for.
from __future__ import annotations

import pytest
import torch
from operators import Extent, check_operators, database

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


def test_tenth_of_all_operators():
    extent = Extent(
        dtypes=(torch.float32,), layouts=("as given", "transposed", "empty"), max_samples=2,
        roads=("ortmodule", "graph"),
    )  # fmt: skip
    assert assert_right(0, extent) > 200


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_operators(part: int):
    assert assert_right(part, Extent()) > 2000
