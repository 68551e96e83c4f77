"""Logits of a short float that a model returns beside its loss: backward reads a copy of them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_ort

ROWS, WIDTH, CLASSES = 48, 16, 384
# The loss of a linear layer in chunks of rows keeps nothing for backward.
OPTIONS = {"disable": "chunk_losses", "exact_random": False}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.head(self.layer(x).relu())
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), logits


def batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(2, ROWS // 2, WIDTH, generator=numbers)
    labels = torch.randint(CLASSES, (2, ROWS // 2), generator=numbers)
    labels[0, :3] = -100
    return x.to(device), labels.to(device)


def made(device: str) -> tuple[nn.Module, nn.Module, Callable]:
    torch.manual_seed(0)
    eager = Head().to(device)
    ours = copy.deepcopy(eager)
    return eager, ours, torch.compile(ours, backend="ort", options=OPTIONS)


def results(call: Callable, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        return call(*batch(device))


def assert_same_gradients(ours: nn.Module, eager: nn.Module, dtype: torch.dtype) -> None:
    bound = 1e-5 if dtype == torch.float32 else 0.02
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        error = (mine.grad - theirs.grad).abs().max() / theirs.grad.abs().max()
        assert error < bound


@pytest.mark.parametrize(
    ("dtype", "bytes_of_logit"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)]
)
def test_a_copy_is_saved_in_place_of_log_probabilities(device, dtype, bytes_of_logit):
    eager, ours, call = made(device)
    for _ in range(2):
        for module, function in ((ours, call), (eager, eager)):
            module.zero_grad()
            loss, _ = results(function, device, dtype)
            loss.backward()
        assert_same_gradients(ours, eager, dtype)
    saved = torch_ort.counters()["saved_bytes"]
    # What the layers before save, at most, and the weight in a short float.
    other = ROWS * WIDTH * 4 * 4 + CLASSES * WIDTH * 2
    assert ROWS * CLASSES * bytes_of_logit <= saved <= ROWS * CLASSES * bytes_of_logit + other
    assert torch_ort.counters()["fallbacks"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_caller_may_edit_the_logits(device, dtype):
    """Eager PyTorch has not saved them, so it does not mind."""
    eager, ours, call = made(device)
    for function in (call, eager):
        loss, logits = results(function, device, dtype)
        logits.detach().fill_(7)
        loss.backward()
    assert_same_gradients(ours, eager, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_with_gradients_of_their_own(device, dtype):
    eager, ours, call = made(device)
    for function in (call, eager):
        loss, logits = results(function, device, dtype)
        (loss + logits.float().square().mean()).backward()
    assert_same_gradients(ours, eager, dtype)
