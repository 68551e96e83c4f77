"""Losses of batches without a sample: eager gives NaN or 0, and gradients without elements."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch_ort
from tests.roads import ROADS, Applies

pytestmark = pytest.mark.ort_only

LOSSES = [
    F.binary_cross_entropy_with_logits, F.huber_loss, F.l1_loss, F.mse_loss, F.poisson_nll_loss,
    F.smooth_l1_loss, F.soft_margin_loss,
]  # fmt: skip


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_of_an_empty_batch(reduction, road):
    def losses(x, target):
        return [loss(x * 2, target, reduction=reduction) for loss in LOSSES]

    x, target = torch.zeros(0, 3, requires_grad=True), torch.zeros(0, 3)
    got, want = ROADS[road](Applies(losses))(x, target), losses(x, target)
    torch.testing.assert_close(got, want, equal_nan=True)
    torch.stack([loss.sum() for loss in got]).sum().backward()
    assert x.grad.shape == x.shape
    assert torch_ort.counters()["fallbacks"] == 0
    assert torch_ort.counters()["recordings_handed_over"] == 0
