"""Leaves of autograd's that forward makes and returns: as in eager PyTorch, they keep gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_ort
from torch_ort import ORTModule
from torch_ort.fallback import FallbackWarning


class Making(nn.Module):
    """Returns what `make` gives for the result of a layer."""

    def __init__(self, make) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x):
        return self.make(self.linear(x))


class Assigning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.made = nn.Parameter(torch.ones(4))
        return self.linear(x), self.linear.weight


MAKERS = {
    "parameter": lambda y: (y, nn.Parameter(torch.zeros(4) + 2)),
    "of data": lambda y: (y, nn.Parameter(y.detach() * 2)),
    "tensor": lambda y: (y, torch.ones(4).requires_grad_()),
    "detached": lambda y: (y, y.detach().requires_grad_()),
    "alone": lambda y: (nn.Parameter(torch.ones(4)),),
    "twice": lambda y: (y, *[nn.Parameter(torch.ones(4))] * 2),
    "without gradient": lambda y: (y, nn.Parameter(torch.ones(4), requires_grad=False)),
}


def results_of(call, x):
    """Give results, and what a step leaves in the last one."""
    results = call(x)
    sum(result.square().sum() for result in results).backward()
    return results


@pytest.mark.parametrize("name", MAKERS)
def test_a_leaf_that_forward_makes(name):
    model = Making(MAKERS[name])
    runs = [results_of(call, torch.ones(2, 4)) for call in (model, ORTModule(copy.deepcopy(model)))]
    for want, got in zip(*runs, strict=True):
        torch.testing.assert_close(got, want)
        assert type(got) is type(want)
        assert (got.is_leaf, got.requires_grad) == (want.is_leaf, want.requires_grad)
        if want.is_leaf:
            torch.testing.assert_close(got.grad, want.grad)
    assert (runs[1][-1] is runs[1][-2 % len(runs[1])]) == (
        runs[0][-1] is runs[0][-2 % len(runs[0])]
    )
    assert torch_ort.counters()["fallbacks"] == 0


def test_a_leaf_that_forward_assigns():
    model = ORTModule(Assigning())
    model(torch.ones(2, 4))
    made = model.made
    assert isinstance(made, nn.Parameter)
    assert made.is_leaf
    assert made.requires_grad


def test_a_leaf_from_which_another_result_is_computed_is_eagers(monkeypatch):
    """Its gradient would not leave the graph."""
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")

    def make(y):
        scale = nn.Parameter(torch.full((4,), 2.0))
        return y * scale, scale

    model = Making(make)
    call = ORTModule(copy.deepcopy(model))
    with pytest.warns(FallbackWarning, match="makes a tensor that requires grad, and returns both"):
        _, got = results_of(call, torch.ones(2, 4))
    _, want = results_of(model, torch.ones(2, 4))
    torch.testing.assert_close(got.grad, want.grad)
