"""Losses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from driver import Case, check, floats, ints, run, with_half

import torch_ort

SCORES, LABELS = floats(4, 3).log_softmax(1), ints(0, 2, 1, 2)
IMAGES, PIXELS = floats(2, 3, 2, 2).log_softmax(1), ints(0, 2, 1, 2, 0, 0, 1, 1).reshape(2, 2, 2)
WEIGHT = torch.tensor([0.5, 1.0, 2.0])

CASES = [
    *(Case("NegativeLogLikelihoodLoss", [SCORES, LABELS], lambda x, t, r=reduction: F.nll_loss(x, t,
     reduction=r), {"reduction": reduction}, dims={0: ["N", 3], 1: ["N"]}) for reduction in ("none",
     "mean", "sum")),
    Case("NegativeLogLikelihoodLoss", [SCORES, LABELS, WEIGHT], F.nll_loss),
    Case("NegativeLogLikelihoodLoss", [SCORES, LABELS], lambda x,
        t: F.nll_loss(x, t, ignore_index=2), {"ignore_index": 2}),
    Case("NegativeLogLikelihoodLoss", [IMAGES, PIXELS], F.nll_loss, dims={0: ["N", 3, 2, 2]}),
    Case("NegativeLogLikelihoodLoss", [floats(0, 3), ints()], lambda x,
        t: F.nll_loss(x, t, reduction="sum"), {"reduction": "sum"}, reference=False, note="empty"),
]  # fmt: skip


@pytest.mark.parametrize("case", with_half(CASES), ids=str)
def test_case(case: Case) -> None:
    check(case)


def test_class_out_of_range_raises_as_in_eager() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        run(Case("NegativeLogLikelihoodLoss", [SCORES, LABELS + 1], None))


def test_unknown_reduction_is_an_error() -> None:
    case = Case("NegativeLogLikelihoodLoss", [SCORES, LABELS], None, {"reduction": "max"})
    with pytest.raises(torch_ort.UserError, match="reduction: got 'max'"):
        run(case)


def test_other_ranks_are_refused() -> None:
    case = Case("NegativeLogLikelihoodLoss", [floats(2, 3, 4), torch.zeros(2, 4).long()], None)
    with pytest.raises(torch_ort.Unsupported, match="got rank 3, want 2 or 4"):
        run(case)
