"""e^x and tanh of float32, which the engine computes itself: units in the last place, against
float64, over all numbers that have a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tests.cpu import regions

CASES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], float]] = {
    "e^x": ("Exp(x)", torch.exp, 1.5),
    "tanh": ("Tanh(x)", torch.tanh, 3),
    "sigmoid": ("Sigmoid(x)", torch.sigmoid, 3),
}
LEAST = torch.finfo(torch.float32).tiny  # of those with all digits


def numbers() -> torch.Tensor:
    """Give numbers of all sizes, and those beside the ends of what is finite, 0, or 1."""
    sizes = torch.logspace(-44, 38, 20001, dtype=torch.float64)
    steps = torch.linspace(-110, 95, 100001, dtype=torch.float64)
    ends = torch.tensor([88.72283, 88.72284, -87.33654, -103.97208, -104.0, 89.5, 10.0, 0.3465736])
    beside = (ends[:, None] + torch.linspace(-1e-3, 1e-3, 201)).flatten()
    return torch.cat([sizes, -sizes, steps, beside]).float()


def run(node: str, x: torch.Tensor, isa: str) -> torch.Tensor:
    graph = regions.fused(regions.read({"x": "float[N]"}, [f"a = {node}", "y = Neg(a)"], ["y"]))
    return -regions.run_by_name(graph, {"x": x}, isa)["y"]


@pytest.mark.parametrize("isa", regions.ISAS)
@pytest.mark.parametrize("name", CASES)
def test_units_in_the_last_place(name: str, isa: str) -> None:
    node, function, most = CASES[name]
    x = numbers()
    got, want = run(node, x, isa), function(x.double())
    nearest = want.float()
    assert torch.equal(got.isinf(), nearest.isinf())
    has_digits = nearest.isfinite() & (nearest.abs() >= LEAST)
    above = torch.nextafter(nearest.abs(), torch.tensor(math.inf)).double()
    unit = above - nearest.abs().double()
    assert ((got.double() - want).abs() / unit)[has_digits].max() <= most
    # Those with fewer digits are off by one of their units, or one of the numbers that they are
    # divided by.
    tiny = ~has_digits & nearest.isfinite()
    assert (got - nearest)[tiny].abs().max() <= (LEAST * 2**-22 if name == "e^x" else LEAST)


@pytest.mark.parametrize("isa", regions.ISAS)
@pytest.mark.parametrize("count", [1, 5, 8, 16, 19])
def test_zeros_infinities_and_nan(count: int, isa: str) -> None:
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])
    x = special.repeat(4)[:count]
    for node, function, _ in CASES.values():
        got, want = run(node, x, isa), function(x)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.signbit(), want.signbit())
