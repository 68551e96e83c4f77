"""e^x, tanh and erf of float32, which the engine computes itself: units in the last place, against
float64, over all numbers that have a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.cpu import regions

CASES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], float]] = {
    "e^x": ("Exp(x)", torch.exp, 1.5),
    "tanh": ("Tanh(x)", torch.tanh, 3),
    "sigmoid": ("Sigmoid(x)", torch.sigmoid, 3),
    "erf": ("Erf(x)", torch.erf, 3),
}
LEAST = torch.finfo(torch.float32).tiny  # of those with all digits


def numbers() -> torch.Tensor:
    """Give numbers of all sizes, and those beside the ends of what is finite, 0, or 1."""
    sizes = torch.logspace(-44, 38, 20001, dtype=torch.float64)
    steps = torch.linspace(-110, 95, 100001, dtype=torch.float64)
    ends = torch.tensor(
        [88.72283, 88.72284, -87.33654, -103.97208, -104.0, 89.5, 10.0, 0.7, 0.3465736]
    )
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


@pytest.mark.parametrize("isa", regions.ISAS)
def test_gelu_is_that_of_the_normal_distribution(isa: str) -> None:
    x = torch.cat([numbers(), torch.linspace(-12, 12, 100001)])
    (got, got_slope), (want, slope) = run_gelu(x, isa), gelu(x.double())
    is_known = want.isfinite() & slope.isfinite()
    assert ((got - want).abs() / x.abs().clamp(1))[is_known].max() < 1.5e-7
    assert (got_slope - slope)[is_known].abs().max() < 4e-7


@pytest.mark.parametrize("isa", regions.ISAS)
def test_gelu_of_numbers_without_a_tail(isa: str) -> None:
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 200, -200])
    want = [each.float() for each in gelu(special.double())]
    got = list(run_gelu(special, isa))
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def gelu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    result = functional.gelu(x)
    result.sum().backward()
    return result.detach(), x.grad


def run_gelu(x: torch.Tensor, isa: str) -> tuple[torch.Tensor, torch.Tensor]:
    slope = regions.aten("aten::gelu_backward", "g", "x", names=("grad_output", "self"))
    graph = regions.read(
        {"x": "float[N]", "g": "float[N]"},
        [f"a = {slope}", "y = Neg(a)"],
        ["y"],
        types={"a": "float[N]", "y": "float[N]"},
    )
    inputs = {"x": x, "g": torch.ones_like(x)}
    return run("Gelu(x)", x, isa), -regions.run_by_name(regions.fused(graph), inputs, isa)["y"]
