"""Instance norms on GPUs are parts of regions, as those of the CPU are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_ort

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("sizes", [(3, 5, 7, 6), (1, 4, 40, 50), (2, 3, 300)], ids=str)
def test_step(sizes: tuple[int, ...], affine: bool) -> None:
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d if len(sizes) == 4 else nn.InstanceNorm1d
    model = nn.Sequential(nn.Tanh(), norm(sizes[1], affine=affine), nn.Sigmoid())
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5, 0.3)
    exact = copy.deepcopy(model).double()
    x, weights = torch.randn(sizes), torch.randn(sizes)
    results = []
    compiled = torch.compile(model.to("cuda"), backend="ort", options={"strict": True})
    for call, to in ((compiled, {"device": "cuda"}), (exact, {"dtype": torch.float64})):
        leaf = x.to(**to).requires_grad_()
        y = call(leaf)
        (y * weights.to(**to)).sum().backward()
        gradients = [each.grad for each in (leaf, *call.parameters())]
        results.append([each.detach().cpu() for each in (y, *gradients)])
    for got, want in zip(*results, strict=True):
        size = max(1.0, float(want.abs().max()))
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * size)
    report = torch_ort.explain(model, x.to("cuda").requires_grad_())
    assert not [name for name in report.graphs[0].aten if "norm" in name]
