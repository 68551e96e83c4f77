# Shrinking runs in eager PyTorch's own kernels: where it gives 0, a gradient that is infinite or no
# number ends; its results and those of logsigmoid lie in memory as eager's do.
from __future__ import annotations

import pytest
import torch
from roads import ROADS, Applies
from torch.nn import functional as F

import torch_ort

pytestmark = pytest.mark.ort_only


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("function", [F.softshrink, F.hardshrink])
def test_gradients_end_where_the_result_is_0(function, road: str):
    x = torch.tensor([0.0, 0.2, 3.0, -3.0] * 4)
    eager, ours = (x.clone().requires_grad_() for _ in range(2))
    gradient = torch.tensor([float("inf"), float("nan"), float("inf"), 1.0] * 4)
    function(eager).backward(gradient)
    ROADS[road](Applies(function))(ours).backward(gradient)
    assert torch.equal(ours.grad.isnan(), eager.grad.isnan())
    assert torch.equal(ours.grad.nan_to_num(), eager.grad.nan_to_num())
    counters = torch_ort.counters()
    assert (counters["fallbacks"], counters["recordings_handed_over"]) == (0, 0)


@pytest.mark.parametrize("function", [F.softshrink, F.hardshrink, F.logsigmoid])
def test_results_lie_as_eagers_do(function):
    x = torch.randn(4, 3).t().requires_grad_()
    got, want = torch.compile(function, backend="ort")(x), function(x)
    assert got.stride() == want.stride()
    assert torch.equal(got, want) or function is F.logsigmoid
    torch.testing.assert_close(got, want)
