"""Rows of normalization."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from conversion import NEWEST, check, floats

X, SCALE, BIAS = floats(2, 3, 8), floats(8), floats(8) * 0.5
IMAGES, CHANNELS = floats(2, 4, 3, 5), floats(4)
MEAN, VARIANCE = floats(4) * 0.1, floats(4).abs() + 0.5
LAYER_NORM = {12: ["aten::native_layer_norm"], 17: ["LayerNormalization"]}


def layer_norm(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, parameters[0].shape, *parameters, eps=1e-4)


def test_layer_norm() -> None:
    check(layer_norm, X, SCALE, BIAS, ops=LAYER_NORM)
    check(layer_norm, X, SCALE, ops=LAYER_NORM)
    check(layer_norm, X, floats(3, 8), floats(3, 8), ops=LAYER_NORM)
    check(layer_norm, X, SCALE, BIAS, ops=LAYER_NORM[17], dynamic=True, pins=(NEWEST,))
    check(layer_norm, *(x.bfloat16() for x in (X, SCALE, BIAS)), ops=LAYER_NORM)


def test_statistics_of_layer_norm() -> None:
    function = lambda *x: torch.native_layer_norm(x[0], (8,), *x[1:], 1e-5)  # noqa: E731
    check(function, X, SCALE, BIAS, ops=LAYER_NORM)
    half = [x.bfloat16() for x in (X, SCALE, BIAS)]
    check(function, *half, ops=["aten::native_layer_norm"], pins=(20,))


def test_layer_norm_in_other_precision_than_onnx_asks_for() -> None:
    double = [x.double() for x in (X, SCALE, BIAS)]
    check(layer_norm, *double, ops=["aten::native_layer_norm"], pins=(20,))
    check(lambda x: F.layer_norm(x, (8,)), X, ops=["aten::native_layer_norm"], pins=(20,))


def test_group_norm() -> None:
    ops = {12: ["aten::native_group_norm"], NEWEST: ["GroupNormalization"]}
    function = lambda x, w, b: F.group_norm(x, 2, w, b)  # noqa: E731
    check(function, IMAGES, CHANNELS, CHANNELS.flip(0), ops=ops)
    check(function, IMAGES, CHANNELS, CHANNELS, ops=ops[NEWEST], dynamic=True, pins=(NEWEST,))
    check(lambda x: F.group_norm(x, 2), IMAGES, ops=["aten::native_group_norm"], pins=(20,))


def batch_norm(*inputs: torch.Tensor) -> torch.Tensor:
    x, mean, variance, *parameters = inputs
    return torch.ops.aten._native_batch_norm_legit_no_training(
        x, *(parameters or (None, None)), mean, variance, 0.1, 1e-5
    )[0]


def test_batch_norm_with_given_statistics() -> None:
    parameters = [MEAN, VARIANCE, CHANNELS, CHANNELS.flip(0)]
    check(batch_norm, IMAGES, *parameters, ops=["BatchNormalization"])
    check(batch_norm, floats(3, 4), *parameters, ops=["BatchNormalization"])
    check(batch_norm, IMAGES, *parameters, ops=["BatchNormalization"], dynamic=True, pins=(20,))
    function = lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b)  # noqa: E731
    check(function, IMAGES, *parameters, ops=["BatchNormalization"])
    plain = ["aten::_native_batch_norm_legit_no_training"]
    check(batch_norm, IMAGES, MEAN, VARIANCE, ops=plain, pins=(20,))
