"""Tensors of one number without dims.

In reductions of them PyTorch takes the dims 0 and -1, whereas ONNX has no such axis. An operator
that gets Python numbers in place of all its tensors makes one.
"""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.exc import TorchRuntimeError

import torch_ort
from tests.roads import ROADS, Applies

pytestmark = pytest.mark.ort_only

REDUCTIONS = {
    "all": lambda x, dim: x.all(dim) * x,
    "amax": lambda x, dim: x.amax(dim),
    "amin with kept dims": lambda x, dim: x.amin(dim, keepdim=True),
    "any": lambda x, dim: x.any(dim) * x,
    "argmax": lambda x, dim: x.argmax(dim) + x,
    "argmin": lambda x, dim: x.argmin(dim) + x,
    "cosine similarity": lambda x, dim: torch.cosine_similarity(x, x * 2, dim=dim),
    "cumprod": lambda x, dim: x.cumprod(dim),
    "cumsum": lambda x, dim: x.cumsum(dim),
    "log_softmax": lambda x, dim: x.log_softmax(dim) + x,
    "logsumexp": lambda x, dim: x.logsumexp(dim),
    "max": lambda x, dim: x.max(dim)[0],
    "mean": lambda x, dim: x.mean(dim),
    "mean of means": lambda x, dim: x.mean(dim).mean(dim, keepdim=True),
    "norm": lambda x, dim: x.norm(dim=dim),
    "norm of order 1": lambda x, dim: torch.linalg.vector_norm(x, 1, dim=dim),
    "norm of order 3": lambda x, dim: torch.linalg.vector_norm(x, 3, dim=dim),
    "normalize": lambda x, dim: torch.nn.functional.normalize(x, dim=dim) + x,
    "prod": lambda x, dim: x.prod(dim),
    "softmax": lambda x, dim: x.softmax(dim) + x,
    "sort": lambda x, dim: x.sort(dim)[0],
    "squeeze": lambda x, dim: x.squeeze(dim) * 2,
    "std": lambda x, dim: x.std(dim, correction=0) + x,
    "sum": lambda x, dim: x.sum(dim),
    "sum in float64": lambda x, dim: x.sum(dim, keepdim=True, dtype=torch.float64),
    "sum of a list": lambda x, dim: x.sum((dim,)),
    "var": lambda x, dim: x.var(dim, correction=0) + x,
}


@pytest.mark.parametrize("road", ROADS)
def test_reductions_over_the_dims_of_a_number(road):
    def reduced(x):
        return {
            f"{name} over {dim}": reduction(x * 1.5, dim)
            for name, reduction in REDUCTIONS.items()
            for dim in (0, -1)
        }

    x = torch.tensor(0.7, requires_grad=True)
    want, got = reduced(x), ROADS[road](Applies(reduced))(x)
    for name in want:
        torch.testing.assert_close(got[name], want[name], msg=lambda text, n=name: f"{n}: {text}")
        gradients = [torch.autograd.grad(y[name], x, retain_graph=True) for y in (got, want)]
        torch.testing.assert_close(*gradients, msg=lambda text, n=name: f"{n}: {text}")
    assert torch_ort.counters()["fallbacks"] == 0
    assert torch_ort.counters()["recordings_handed_over"] == 0


@pytest.mark.hands_over("PyTorch words the error")
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", ["amax", "logsumexp", "mean", "prod", "softmax", "sum"])
def test_a_dim_that_is_none_is_the_programs_error(name, road, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    module = Applies(lambda x: REDUCTIONS[name](x, 2))
    # Dynamo of torch 2.11 makes an error of its own of it, with any backend.
    kinds = (IndexError, TorchRuntimeError) if road == "compile" else IndexError
    with pytest.raises(kinds, match="Dimension out of range"):
        ROADS[road](module)(torch.randn(3, 4, requires_grad=True))


@pytest.mark.parametrize("road", ROADS)
def test_operators_of_numbers_alone(road):
    def scaled(x):
        rows = x.shape[0]
        return {
            "trunc": x * torch.div(rows, 4, rounding_mode="trunc"),
            "quotient": x * torch.div(rows, 4),
            "quotient of floats": x + torch.div(7.0, rows),
            "sum": x * torch.add(rows, 2, alpha=3),
            "chunks": torch.div(rows, 4, rounding_mode="trunc") - 1,
            "constant": x * torch.div(7, 2, rounding_mode="floor"),
            "edited": x * torch.floor_divide(rows, 2).add_(1),
            "view": x.view(torch.div(rows, 3, rounding_mode="trunc"), 3, 2),
        }

    call = ROADS[road](Applies(scaled))
    for rows in (6, 9, 12):
        x = torch.randn(rows, 2, requires_grad=True)
        want, got = scaled(x), call(x)
        for name in want:
            torch.testing.assert_close(
                got[name], want[name], msg=lambda text, n=name: f"{n}: {text}"
            )
        gradients = [torch.autograd.grad(y["edited"].sum(), x) for y in (got, want)]
        torch.testing.assert_close(*gradients)
    assert torch_ort.counters()["fallbacks"] == 0
    assert torch_ort.counters()["recordings_handed_over"] == 0
