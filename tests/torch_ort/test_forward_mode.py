"""Forward-mode AD through what the engine runs: eager's tangents, after one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import torch_ort
from torch_ort.fallback import FallbackWarning
from torch_ort.pytorch.versions import is_within

pytestmark = pytest.mark.ort_only

ROADS: dict[str, Callable[[nn.Module], Any]] = {
    "compile": lambda model: torch.compile(model, backend="ort"),
    "ortmodule": torch_ort.ORTModule,
}
WORDS = "forward-mode AD: an input has a tangent"
# Where Dynamo captures a call that has tangents.
WORDS_OF_DYNAMO = "a forward-mode AD tangent" if is_within("2.14", "") else WORDS


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def tangent_of(call: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor | None:
    """Give the tangent of a call whose input has one."""
    with forward_ad.dual_level():
        result = call(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(result).tangent


@pytest.fixture(params=ROADS)
def road(request) -> Callable[[nn.Module], Any]:
    return ROADS[request.param]


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("is_used_before", [True, False], ids=["later", "first"])
def test_tangents_are_those_of_eager(road, grad, is_used_before, monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    model, x = network(), torch.randn(5, 6)
    compiled = road(model)
    with torch.set_grad_enabled(grad), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if is_used_before:
            compiled(x)
        for _ in range(2):
            torch.testing.assert_close(tangent_of(compiled, x), tangent_of(model, x))
        runs = torch_ort.counters()["forward_runs"]
        torch.testing.assert_close(compiled(x), model(x))
    ours = [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]
    by_dynamo = road is ROADS["compile"] and not is_used_before
    assert len(ours) == 1
    assert (WORDS_OF_DYNAMO if by_dynamo else WORDS) in ours[0]
    counters = torch_ort.counters()
    is_refused = by_dynamo and WORDS_OF_DYNAMO != WORDS
    assert counters["fallbacks"] == counters["fallbacks_forward"] == (not is_refused)
    assert counters["frames_left_to_eager"] == is_refused
    assert counters["forward_runs"] == runs + 1, "calls without tangents run in the engine"


def test_a_tangent_of_a_parameter(monkeypatch):
    monkeypatch.setenv("TORCH_ORT_STRICT", "0")
    layer, x = nn.Linear(6, 3), torch.randn(5, 6)
    wrapped = torch_ort.ORTModule(layer)
    weight = layer.weight.detach()
    with forward_ad.dual_level():
        del layer.weight
        layer.weight = forward_ad.make_dual(weight, torch.ones_like(weight))
        with pytest.warns(FallbackWarning, match=WORDS):
            result = wrapped(x)
        tangent = forward_ad.unpack_dual(result).tangent
        torch.testing.assert_close(tangent, x.sum(1, keepdim=True).expand(5, 3))


def test_a_level_without_tangents_is_for_the_engine(road):
    model, x = network(), torch.randn(5, 6)
    with forward_ad.dual_level():
        torch.testing.assert_close(road(model)(x), model(x))
    assert torch_ort.counters()["forward_runs"] == 1


def test_strict_raises(road):
    words = WORDS_OF_DYNAMO if road is ROADS["compile"] else WORDS
    with pytest.raises(Exception, match=words):
        tangent_of(road(network()), torch.randn(5, 6))
