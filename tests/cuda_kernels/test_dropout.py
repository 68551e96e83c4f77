"""Masks of dropout with exact_random: the kernel of eager's dropout draws, regions multiply."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_ort
from torch_ort import ORTModule

pytestmark = pytest.mark.cuda

DRAW, DRAW_BY_BERNOULLI = "Dropout", "torch_ort.BernoulliMask"


class Activated(nn.Module):
    """Dropouts of the input and of a result, with point-wise nodes on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.dropout(torch.tanh(F.dropout(x, 0.3)) * self.scale, 0.2))


# Inputs of 6 x 8 x 4 x 4 as they lie in memory, on which the order of the draws depends.
LAYOUTS = {
    "row-major": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "of another address": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("road", ["compile", "ortmodule"])
def test_masks_are_those_of_eager(road, layout, dtype):
    model = Activated().cuda().to(dtype)
    ours = copy.deepcopy(model)
    call = torch.compile(ours, backend="ort") if road == "compile" else ORTModule(ours)
    x = LAYOUTS[layout](torch.randn(6, 8, 4, 4, device="cuda", dtype=dtype))
    results = []
    for run in (model, call):
        given = x.detach().requires_grad_()
        torch.manual_seed(5)
        y = run(given)
        (gradient,) = torch.autograd.grad(y.sum(), given)
        results.append((y, gradient, torch.cuda.get_rng_state()))
    (want, want_gradient, want_state), (got, gradient, state) = results
    assert torch.equal(got == 0, want == 0)
    assert torch.equal(gradient == 0, want_gradient == 0)
    assert torch.equal(state, want_state)
    tolerance = 0.05 if dtype is torch.bfloat16 else 1e-5  # eager rounds after each operator
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient, want_gradient, rtol=tolerance, atol=tolerance)


def graph_of(exact: bool) -> torch_ort.GraphReport:
    model, x = Activated().cuda(), torch.randn(6, 8, device="cuda", requires_grad=True)
    report = torch_ort.explain(model, x, options={"exact_random": exact})
    (graph,) = report.graphs
    return graph


def test_the_product_with_the_mask_stays_in_regions():
    graph = graph_of(exact=True)
    assert graph.nodes[DRAW] == 2
    assert not graph.nodes[DRAW_BY_BERNOULLI]
    assert not any("dropout" in name.lower() for name in graph.nodes if name != DRAW)


def test_without_the_option_regions_draw():
    graph = graph_of(exact=False)
    assert not graph.nodes[DRAW]
    assert not graph.nodes[DRAW_BY_BERNOULLI]
    assert graph.fused["PhiloxMask"] == 4  # forward, and again in backward


def test_of_the_draw_nothing_but_the_mask_is_kept():
    rows, columns = 512, 64
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.25)).cuda()
    call = torch.compile(model, backend="ort")
    call(torch.ones(rows, columns, device="cuda", requires_grad=True))
    masks = 2 * rows * columns
    assert masks <= torch_ort.counters()["saved_bytes"] < masks + 1024
