"""Gradients of biases under autocast are float32 as kernels sum them up."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import torch_ort
from torch_ort.engine import watchers

pytestmark = pytest.mark.cuda


class TwoLayers(nn.Module):
    """The gradient of one bias sums what a region computes; that of the other, what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(functional.gelu(self.first(x)))


def train(model: nn.Module, dtype: torch.dtype, **settings) -> list[str]:
    """Train a step on 300 rows, and name the steps that ran."""
    call = torch.compile(model, backend="ort", **settings)
    with watchers.watching() as programs:
        step(call, dtype)
    return [op for program in programs for _, op, *_ in program.session.steps()]


def step(call, dtype: torch.dtype | None) -> None:
    torch.manual_seed(1)
    x = torch.randn(300, 16, device="cuda")
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
        y = call(x.double() if dtype is None else x)
    y.backward(torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y).to(y.dtype))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return TwoLayers().cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_no_farther_from_float64_than_eager(model, dtype):
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    step(exact, None)
    step(eager, dtype)
    ops = train(model, dtype)
    assert "aten::sum.IntList_out" not in ops
    assert ops.count("aten::copy_") == 1  # the cast of x
    for name in ("first", "second"):
        ours, theirs, want = (getattr(each, name).bias.grad for each in (model, eager, exact))
        assert ours.dtype == torch.float32
        assert ours.stride() == theirs.stride()
        error, of_eager = ((each - want).abs().max() for each in (ours, theirs))
        assert error <= 1.5 * of_eager
        # more digits than the short dtype has
        assert not torch.equal(ours.to(dtype).float(), ours)


def test_casts_of_eager_are_kept_where_asked_for(model):
    train(model, torch.bfloat16, options={"emulate_eager_casts": True})
    for layer in (model.first, model.second):
        assert torch.equal(layer.bias.grad.bfloat16().float(), layer.bias.grad)


def test_without_regions_nothing_is_cast_before_it_is_added(model):
    ops = train(model, torch.bfloat16, options={"disable": "fuse_regions"})
    assert "aten::sum.IntList_out" in ops
    assert all(p.grad is not None for p in model.parameters())


def test_sums_that_others_read_too():
    """The shorter sum is wanted as well, so it is rounded once, for both."""

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x.sum(0)
        return total, total.float()

    x = torch.randn(300, 16, device="cuda", dtype=torch.bfloat16)
    short, wide = torch.compile(both, backend="ort")(x)
    assert torch.equal(short.float(), wide)


@pytest.mark.parametrize("keepdim", [False, True])
def test_sums_of_any_dims_with_changing_sizes(keepdim):
    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum((0, 1), keepdim=keepdim).view(-1, 4).float()

    compiled = torch.compile(total, backend="ort", dynamic=True)
    for rows in (3, 5, 300):
        x = torch.randn(2, rows, 16, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(x), total(x.float()), rtol=1e-5, atol=1e-4)
    assert torch_ort.counters()["fallbacks"] == 0
