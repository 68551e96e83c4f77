"""Gradients of weights under autocast are float32 as the products sum them up."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_ort
from torch_ort import _C
from torch_ort.engine import cuda, watchers

pytestmark = pytest.mark.cuda


def train(model: nn.Module, dtype: torch.dtype, options: dict | None = None) -> list[str]:
    call = torch.compile(model, backend="ort", options=options)
    torch.manual_seed(1)
    x = torch.randn(300, 16, device="cuda", requires_grad=True)
    with watchers.watching() as programs, torch.autocast("cuda", dtype):
        call(x).float().pow(2).sum().backward()
    return [op for program in programs for _, op, *_ in program.session.steps()]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_nearer_to_float64_than_eager(model, dtype):
    """A sum over 300 rows keeps the digits that eager's weight gradients lose."""
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    torch.manual_seed(1)
    x = torch.randn(300, 16, device="cuda", requires_grad=True)
    exact(x.double()).pow(2).sum().backward()
    with torch.autocast("cuda", dtype):
        eager(x).float().pow(2).sum().backward()
    ops = train(model, dtype)
    assert ops.count("aten::mm.dtype") == 3  # of both weights, and of x
    for ours, theirs, want in zip(
        model.parameters(), eager.parameters(), exact.parameters(), strict=True
    ):
        assert ours.grad.dtype == torch.float32
        largest = want.grad.abs().max()
        error = (ours.grad - want.grad).abs().max() / largest
        assert error < (2e-2 if dtype == torch.bfloat16 else 3e-3)
        if want.ndim == 2:
            assert error < 1.5 * (theirs.grad - want.grad).abs().max() / largest
            rounded = ours.grad.to(dtype).float()
            assert not torch.equal(rounded, ours.grad)  # more digits than the short dtype has


def test_casts_of_eager_are_kept_where_asked_for(model):
    eager = copy.deepcopy(model)
    torch.manual_seed(1)
    x = torch.randn(300, 16, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        eager(x).float().pow(2).sum().backward()
    ops = train(model, torch.bfloat16, {"emulate_eager_casts": True})
    assert "aten::mm.dtype" not in ops
    for got, want in zip(model.parameters(), eager.parameters(), strict=True):
        if want.ndim == 2:
            assert torch.equal(got.grad.bfloat16().float(), got.grad)


def test_a_library_without_them(model, monkeypatch):
    def without_them(*args, mm=torch.mm, **kwargs):
        if len(args) > 2 or "out_dtype" in kwargs:
            raise RuntimeError("no such kernel")
        return mm(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", without_them)
    cuda._has_wide_products.cache_clear()
    try:
        ops = train(model, torch.bfloat16)
    finally:
        monkeypatch.undo()
        cuda._has_wide_products.cache_clear()
        _C.cuda.set_wide_products(cuda._has_wide_products())
    assert "aten::mm.dtype" not in ops
    assert all(p.grad is not None for p in model.parameters())
    assert torch_ort.counters()["fallbacks"] == 0


def test_products_that_others_read_too(model):
    """The shorter result is wanted as well, so there is one product."""

    def both(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = a @ b
        return product, product.float()

    a, b = (torch.randn(8, 8, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    short, wide = torch.compile(both, backend="ort")(a, b)
    assert torch.equal(short.float(), wide)


def test_weights_that_are_used_twice():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.GELU(), nn.Linear(16, 16, bias=False))
    model = model.cuda()
    model[2].weight = model[0].weight
    ops = train(model, torch.bfloat16)
    assert ops.count("aten::mm.dtype") == 3
    assert ops.count("aten::copy_") <= 2  # of the input and the weight


def test_what_regions_read_stays_short():
    """The gradient of the first norm's result goes into its own gradient alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32)).cuda()
    ops = train(model, torch.bfloat16)
    assert ops.count("aten::mm.dtype") == 1  # of the weight
    assert ops.count("aten::mm.out") >= 1
