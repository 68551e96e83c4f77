"""Networks on graphs: attention by gathers along edges and sums over the edges of a node."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_ort
from tests.injection import at_place
from tests.roads import ROADS
from torch_ort import _C
from torch_ort.engine import compiler
from torch_ort.fallback import FallbackWarning

pytestmark = pytest.mark.ort_only


class GraphAttention(nn.Module):
    """One layer: a node's result is the mean of its sources, weighted by a softmax of scores."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.project, self.weight = nn.Linear(width, out), nn.Parameter(torch.randn(out))

    def forward(self, x, source, target):
        h = self.project(x)
        score = (h[source] * self.weight).sum(-1) + (h[target] * self.weight).sum(-1)
        score = F.leaky_relu(score, 0.2).exp()
        total = torch.zeros(len(x)).index_add(0, target, score)
        score = score / (total[target] + 1e-16)
        return torch.zeros_like(h).index_add(0, target, h[source] * score[:, None])


class Network(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        widths = [5, 8, 3][: layers + 1]
        self.layers = nn.ModuleList(map(GraphAttention, widths, widths[1:]))

    def forward(self, x, source, target):
        for layer in self.layers:
            x = F.elu(layer(x, source, target))
        return x


def graph(nodes: int, edges: int) -> tuple[torch.Tensor, ...]:
    ids = torch.randint(nodes, (2, edges))
    return torch.randn(nodes, 5), ids[0], ids[1]


def ten_steps(model: nn.Module, call: Any) -> list[torch.Tensor]:
    """Train by Adam on graphs of two sizes; give the losses and the parameters."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        loss = call(*graph(20 + step % 2, 60 + step % 2)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(each.detach() for each in model.parameters())]


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("layers", [1, 2])
def test_graph_attention_trains_like_eager(road: str, layers: int) -> None:
    torch.manual_seed(0)
    model = Network(layers)
    eager = copy.deepcopy(model)
    torch.testing.assert_close(ten_steps(model, ROADS[road](model)), ten_steps(eager, eager))
    counters = torch_ort.counters()
    assert counters["backward_runs"] == 10
    assert counters["fallbacks"] == counters["recorder_bugs"] == 0


@pytest.mark.hands_over("captures are made to fail")
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("place", ["fuse_regions", "plan", "results"])
def test_a_fallback_changes_no_bit_in_ten_steps(
    road: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam divides by the size of gradients, so that it would make any difference a large one."""
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    monkeypatch.setattr(compiler, "_sessions", {})  # one of another test would know the sizes
    torch.manual_seed(0)
    model = Network(2)
    eager = copy.deepcopy(model)
    at_place(place, lambda: _C.InternalError("injected by a test"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        got = ten_steps(model, ROADS[road](model))
    assert torch_ort.counters()["fallbacks"] > 0
    torch.testing.assert_close(got, ten_steps(eager, eager), rtol=0, atol=0)
