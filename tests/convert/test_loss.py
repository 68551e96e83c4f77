"""Rows of losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from conversion import NEWEST, check, floats

SCORES, LABELS = floats(4, 3), torch.tensor([0, 2, 1, 2])
WEIGHT = torch.tensor([0.5, 1.0, 2.0])
OP = "NegativeLogLikelihoodLoss"


def test_cross_entropy() -> None:
    ops = {12: ["aten::_log_softmax", OP], 14: ["LogSoftmax", OP]}
    for reduction in ("none", "mean", "sum"):
        check(lambda x, t, r=reduction: F.cross_entropy(x, t, reduction=r), SCORES, LABELS, ops=ops)
    check(F.cross_entropy, SCORES, LABELS, WEIGHT, ops=ops)
    check(lambda x, t: F.cross_entropy(x, t, ignore_index=2), SCORES, LABELS, ops=ops)
    check(F.cross_entropy, SCORES, LABELS, ops=ops[14], dynamic=True, pins=(NEWEST,))
    half = {12: ["LogSoftmax", "aten::nll_loss_forward"], NEWEST: ["LogSoftmax", OP]}
    check(F.cross_entropy, SCORES.bfloat16(), LABELS, ops=half, pins=(14, 20, NEWEST))


def test_images() -> None:
    images, pixels = floats(2, 3, 2, 2), LABELS.repeat(2).reshape(2, 2, 2)
    check(F.cross_entropy, images, pixels, ops=["LogSoftmax", OP], pins=(14, NEWEST))


def test_total_weight_keeps_the_call() -> None:
    function = lambda x, t: torch.ops.aten.nll_loss_forward(x, t, None, 1, -100)[1]  # noqa: E731
    check(function, SCORES, LABELS, ops=["aten::nll_loss_forward"], pins=(20,))


def test_one_sample_without_a_batch() -> None:
    ops = ["LogSoftmax", "aten::nll_loss_forward"]
    check(F.cross_entropy, SCORES[0], LABELS[0], ops=ops, pins=(20,))
