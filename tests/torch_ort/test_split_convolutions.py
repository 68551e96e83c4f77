"""Gradients of convolutions in two calls, so that those of large weights can wait."""

from __future__ import annotations

import copy

import pytest
import torch
from comparison import assert_as_exact_as_eager, gradients, plan_of
from torch import nn

import torch_ort
from torch_ort.engine import watchers

pytestmark = pytest.mark.ort_only


def narrowing(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Large images with small weights first, and at the end small ones with large weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 32, 3, padding=1), nn.GELU(),
        nn.AvgPool2d(8), nn.Conv2d(32, 128, 3, padding=1), nn.GELU(),
        nn.Conv2d(128, 128, 3, padding=1, groups=2), nn.GELU(),
        nn.ConvTranspose2d(128, 128, 3, padding=1, bias=False), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ).to(dtype)  # fmt: skip


@pytest.fixture(autouse=True)
def clean(many_registers: None) -> None:
    torch.compiler.reset()
    torch_ort.reset_counters()


def test_training_against_float64(monkeypatch) -> None:
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    model = narrowing()
    compiled = torch.compile(copy.deepcopy(model), backend="ort")
    with watchers.watching() as programs:
        assert_as_exact_as_eager(model, compiled, torch.randn(4, 3, 32, 32))
    rewrites = [count for name, count, _ in programs[0].passes if name == "split_convolutions"]
    assert rewrites == [3]


def test_many_sizes_through_one_graph(monkeypatch) -> None:
    monkeypatch.setenv("TORCH_ORT_CHECK", "2")
    model = narrowing()
    call = torch_ort.ORTModule(copy.deepcopy(model))
    for size in [(4, 3, 32, 32), (1, 3, 40, 16), (5, 3, 64, 48)]:
        assert_as_exact_as_eager(model, call, torch.randn(size))
    assert torch_ort.counters()["graphs_captured"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_bits_stay(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, 32, 32, dtype=dtype)
    found = []
    for disabled in ((), ("split_convolutions",)):
        torch.compiler.reset()
        model = narrowing(dtype)
        options = {"disable": disabled}
        found.append(gradients(torch.compile(model, backend="ort", options=options), x))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_large_gradients_wait_for_the_memory_of_images(monkeypatch) -> None:
    model, x = narrowing(), torch.randn(4, 3, 32, 32)
    # That of the second layer is a node of its own then, too, and the peak is lower anyway.
    monkeypatch.setenv("TORCH_ORT_DISABLE", "winograd")
    split = plan_of(model, x)["peak_bytes"]
    monkeypatch.setenv("TORCH_ORT_DISABLE", "winograd,split_convolutions")
    whole = plan_of(model, x)["peak_bytes"]
    # The gradients of the last three weights: 0.1, 0.3 and 0.6 MiB.
    assert split <= whole - 500_000
