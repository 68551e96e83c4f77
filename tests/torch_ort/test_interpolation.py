# Interpolations run in eager PyTorch's own kernels: what weighs nothing is not read, so that what
# is infinite or no number stays where it is.
from __future__ import annotations

import pytest
import torch
from roads import ROADS, Applies
from torch.nn import functional as F

import torch_ort

pytestmark = pytest.mark.ort_only

SHAPES = {"linear": (2, 3, 6), "trilinear": (2, 3, 3, 4, 2)}
MODES = ("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear")


def images(mode: str, batch: int) -> torch.Tensor:
    x = torch.randn(batch, *SHAPES.get(mode, (2, 3, 4, 6))[1:])
    for number in ("nan", "inf", "-inf"):
        x[torch.rand(x.shape) < 0.03] = float(number)
    return x.requires_grad_()


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("mode", MODES)
def test_results_and_gradients_have_eagers_bits(mode: str, road: str):
    last = (7,) * (len(SHAPES.get(mode, (2, 3, 4, 6))) - 2)

    def enlarge(x):
        return F.interpolate(x, scale_factor=2, mode=mode), F.interpolate(x, last, mode=mode)

    call = ROADS[road](Applies(enlarge))
    for batch in (2, 3):
        x = images(mode, batch)
        y = x.detach().clone().requires_grad_()
        want, got = enlarge(x), call(y)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        for results in (want, got):
            torch.autograd.backward(results, [torch.ones_like(one) for one in results])
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-6, atol=1e-6, equal_nan=True)
    counters = torch_ort.counters()
    assert (counters["fallbacks"], counters["recordings_handed_over"]) == (0, 0)


@pytest.mark.parametrize("road", ROADS)
def test_images_with_channels_last_stay_so(road: str):
    x = images("bilinear", 2).detach().to(memory_format=torch.channels_last)
    call = ROADS[road](Applies(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")))
    assert call(x).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(
        call(x), F.interpolate(x, scale_factor=2, mode="bilinear"), rtol=0, atol=0, equal_nan=True
    )
