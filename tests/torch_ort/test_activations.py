"""Activations of pieces, and their gradients, are parts of fused regions, with eager's numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_ort
from tests.cpu.regions import assert_near

ACTIVATIONS = {
    "hardswish": nn.Hardswish(),
    "hardsigmoid": nn.Hardsigmoid(),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(-0.5, 0.75),
    "elu": nn.ELU(0.7),
    "elu in place": nn.ELU(0.7, inplace=True),
    "selu": nn.SELU(),
    "celu": nn.CELU(1.3),
}
# Of a region that computes in float32.
TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-12, torch.bfloat16: 2**-7}


class Between(nn.Module):
    """An activation with a bias before it and a factor after it."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self.activation(x + bias) * 1.5


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ORT_STRICT", "1")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_numbers_and_regions(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Between(ACTIVATIONS[name])
    x = torch.linspace(-8, 8, 33 * 16, dtype=dtype).reshape(33, 16)
    bias, gradient = torch.zeros(16, dtype=dtype), torch.randn(33, 16).to(dtype)
    results = []
    compiled = torch.compile(model, backend="ort")
    for call, to in ((compiled, dtype), (model, torch.float64)):
        given = [each.to(to).requires_grad_() for each in (x, bias)]
        y = call(*given)
        results.append([y.detach(), *torch.autograd.grad(y, given, gradient.to(to))])
    # PyTorch's gradient of a hard sigmoid multiplies float64, too, by the float32 next to 1 / 6.
    within = max(TOLERANCE[dtype], 3e-8 if name == "hardsigmoid" else 0)
    for got, want in zip(*results, strict=True):
        assert got.dtype == dtype
        assert_near(got, want, rtol=within, atol=8 * within)
    report = torch_ort.explain(model, x.requires_grad_(), bias.requires_grad_())
    # Forward is one region, and backward another.
    assert report.graphs[0].nodes["torch_ort.Region"] == 2
    assert not [op for op in report.graphs[0].nodes if op.startswith("aten::")]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_ends_of_pieces_and_what_is_not_finite(name: str) -> None:
    """Gradients at a bend are those of PyTorch's kernels.

    That of NaN depends there on whether a vector or the rest computes it.
    """
    ends = [-3.0, 3.0, 0.0, -0.0, 6.0, -0.5, 0.75, 1e-7, -1e-7, -1e-30, 100.0, -100.0]
    special = [float("nan"), float("inf"), -float("inf")]
    x = torch.tensor([*ends, *special, 1.0])
    model, results = Between(ACTIVATIONS[name]), []
    for call in (torch.compile(model, backend="ort"), model):
        given = x.clone().requires_grad_()
        y = call(given, torch.zeros(()))
        (gradient,) = torch.autograd.grad(y, given, torch.full_like(x, 2))
        results.append((y.detach(), gradient[~x.isnan()]))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("shape", [(5, 12), (3, 8, 7), (0, 6, 4)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [1, -2, -1])
def test_gated_units(dim: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Both halves of the gradient are written where the next node reads them."""
    torch.manual_seed(0)
    shape = tuple(2 * size if at == dim % len(shape) else size for at, size in enumerate(shape))
    x, results = (3 * torch.randn(shape)).to(dtype), []

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.glu(x * 1.5, dim) + 1

    gradient = torch.randn(run(x).shape).to(dtype)
    for call, to in ((torch.compile(run, backend="ort"), dtype), (run, torch.float64)):
        given = x.to(to).requires_grad_()
        y = call(given)
        results.append([y.detach(), *torch.autograd.grad(y, given, gradient.to(to))])
    for got, want in zip(*results, strict=True):
        assert got.dtype == dtype
        assert_near(got, want, rtol=TOLERANCE[dtype], atol=8 * TOLERANCE[dtype])
    if x.numel() > 0:
        nodes = torch_ort.explain(run, x.requires_grad_()).graphs[0].nodes
        assert nodes["torch_ort.Region"] > 0
        assert nodes["org.pytorch.aten.ATen"] == 0


@pytest.mark.parametrize("name", ["weight", "pos_weight"])
def test_a_weight_with_more_numbers_than_the_loss_raises_as_in_eager(name: str) -> None:
    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        given = {name: weight}
        return nn.functional.binary_cross_entropy_with_logits(x, x.detach().sigmoid(), **given)

    compiled = torch.compile(loss, backend="ort")
    x = torch.ones(1, 9)
    torch.testing.assert_close(compiled(x, torch.ones(9) * 2), loss(x, torch.ones(9) * 2))
    for call in (loss, compiled):
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            call(x, torch.ones(5, 9))
