"""Gradients of a batch of gradients at once: is_grads_batched=True, jacobian(vectorize=True)."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import torch_ort
from tests.models import module_with
from tests.roads import ROADS
from torch_ort.fallback import FallbackWarning

WORDS = "called with a batch of gradients"


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3)).double()


def rows(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 4, dtype=torch.float64, requires_grad=True)


def of_each_element(call, x: torch.Tensor) -> torch.Tensor:
    """Give the gradients of x of each element of the result."""
    y = call(x)
    units = torch.eye(y.numel(), dtype=y.dtype).reshape(-1, *y.shape)
    return torch.autograd.grad(y, x, units, is_grads_batched=True)[0]


@pytest.mark.parametrize("is_first", [True, False], ids=["first backward", "later backward"])
@pytest.mark.parametrize("road", ROADS)
def test_batches_run_in_eager_after_one_warning(road, is_first, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    module = model()
    eager, ours = copy.deepcopy(module), ROADS[road](module)
    if not is_first:
        ours(rows()).sum().backward()
    x = rows()
    with pytest.warns(FallbackWarning, match=WORDS):
        got = of_each_element(ours, x)
    torch.testing.assert_close(got, of_each_element(eager, x))
    torch.testing.assert_close(of_each_element(ours, x), of_each_element(eager, x))
    assert torch_ort.counters()["fallbacks_backward"] == 1


@pytest.mark.parametrize("road", ROADS)
def test_jacobians_and_hessians(road, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    module = model()
    eager, ours = copy.deepcopy(module), ROADS[road](module)
    ours(rows()).sum().backward()
    x = rows(2).detach()
    functional = torch.autograd.functional
    with pytest.warns(FallbackWarning, match=WORDS):
        got = functional.jacobian(ours, x, vectorize=True)
    torch.testing.assert_close(got, functional.jacobian(eager, x))
    got = functional.hessian(lambda x: ours(x).exp().sum(), x, vectorize=True)
    torch.testing.assert_close(got, functional.hessian(lambda x: eager(x).exp().sum(), x))


@pytest.mark.parametrize("road", ROADS)
def test_strict_mode_raises(road):
    module = model()
    ours = ROADS[road](module)
    ours(rows()).sum().backward()
    with pytest.raises(RuntimeError, match=WORDS):
        of_each_element(ours, rows())


@pytest.mark.parametrize("road", ROADS)
def test_a_call_that_cannot_run_again_says_so(road, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    ours = ROADS[road](module_with(lambda self, x, y: x.exp() * y.sum()))
    ours(rows(), torch.ones(3)).sum().backward()
    x, y = rows(), torch.ones(3)
    result = ours(x, y)
    del y
    gc.collect()
    units = torch.eye(result.numel(), dtype=result.dtype).reshape(-1, *result.shape)
    with pytest.raises(RuntimeError, match=f"{WORDS}.* cannot run again: its inputs were freed"):
        torch.autograd.grad(result, x, units, is_grads_batched=True)
    got = of_each_element(lambda x: ours(x, torch.ones(3)), x)  # as the message promises
    torch.testing.assert_close(got, of_each_element(lambda x: x.exp() * 3, x))


@pytest.mark.hands_over("the recorder is off")
@pytest.mark.parametrize("is_first", [True, False], ids=["first backward", "later backward"])
@pytest.mark.parametrize("road", ROADS)
def test_captures_of_aotautograd(road, is_first, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    monkeypatch.setenv("TORCH_ORT_DISABLE", "recorder")
    module = model()
    eager, ours = copy.deepcopy(module), ROADS[road](module)
    x = rows()
    if is_first:
        with pytest.warns(FallbackWarning):
            got = of_each_element(ours, x)
    else:
        ours(rows()).sum().backward()
        with pytest.raises(RuntimeError, match=f"{WORDS}.*: AOTAutograd has captured it; later"):
            of_each_element(ours, x)
        got = of_each_element(ours, x)
    torch.testing.assert_close(got, of_each_element(eager, x))
