"""Rows of convolutions, pooling and resizing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conversion import check, convert, floats, ops_of

X, W = floats(2, 4, 9, 8), floats(6, 4, 3, 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.conv2d(x, w),
        lambda x, w: F.conv2d(x, w, torch.arange(6.0), 2, (1, 0), (1, 2)),
        lambda x, w: F.conv2d(x, w[:, :2], groups=2),
        lambda x, w: F.conv2d(x, w[..., :1], padding="same"),
        lambda x, w: F.conv1d(x[..., 0], w[..., 0], padding=1),
        lambda x, w: F.conv3d(x[:, :, None], w[:, :, None]),
    ],
)
def test_convolution(function) -> None:
    graph = convert(function, X, W)
    assert ops_of(graph).count("Conv") == 1
    check(function, X, W, ops=ops_of(convert(function, X, W, opset=20)), pins=(20,))


def test_convolution_at_every_pin() -> None:
    check(F.conv2d, X, W, ops=["Conv"])
    check(F.conv2d, X, W, floats(6), ops=["Conv"])
    half = [x.bfloat16() for x in (X, W)]
    check(F.conv2d, *half, ops={0: ["aten::convolution"], 22: ["Conv"]}, pins=(20, 22))


def test_convolution_with_symbolic_sizes() -> None:
    graph = check(
        lambda x: F.conv2d(x, torch.ones(6, 4, 3, 2)),
        X,
        ops=["ConstantOfShape", "Conv"],
        dynamic=True,
        pins=(20,),
    )
    batch, channels, height, width = graph.types()[graph.output_names[0]][1]
    assert channels == 6
    assert all(isinstance(size, str) for size in (batch, height, width))


def test_transposed_convolution() -> None:
    weight = floats(4, 3, 3, 3)
    check(lambda x, w: F.conv_transpose2d(x, w), X, weight, ops=["ConvTranspose"])
    check(
        lambda x, w: F.conv_transpose2d(x, w, None, 2, 1, 1, 1, 1), X, weight, ops=["ConvTranspose"]
    )


def test_channels_last_stays_channels_last() -> None:
    image = X.to(memory_format=torch.channels_last)
    check(F.conv2d, image, W, ops=["Conv"], pins=(20,))
    check(lambda x: F.max_pool2d(x, 2), image, ops=["MaxPool"], pins=(20,))


def test_max_pool() -> None:
    check(lambda x: F.max_pool2d(x, 2), X, ops=["MaxPool"])
    check(lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 0), (1, 2)), X, ops=["MaxPool"])
    check(
        lambda x: F.max_pool3d(x[None], 2),
        X,
        ops={0: ["Reshape", "MaxPool"], 13: ["Unsqueeze", "MaxPool"]},
    )
    for function in (
        lambda x: F.max_pool2d(x, 2, ceil_mode=True),
        lambda x: F.max_pool2d(x, 2, return_indices=True),
    ):
        check(function, X, ops=["aten::max_pool2d_with_indices"], pins=(20,))


def test_average_pool() -> None:
    check(lambda x: F.avg_pool2d(x, 2), X, ops=["AveragePool"])
    check(lambda x: F.avg_pool2d(x, 3, 2, 1), X, ops=["AveragePool"])
    check(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), X, ops=["AveragePool"])
    for function in (
        lambda x: F.avg_pool2d(x, 2, ceil_mode=True),
        lambda x: F.avg_pool2d(x, 2, divisor_override=3),
    ):
        check(function, X, ops=["aten::avg_pool2d"], pins=(20,))


def test_resize() -> None:
    for function, kernel in [
        (lambda x: F.interpolate(x, scale_factor=2), "aten::upsample_nearest2d"),
        (lambda x: F.interpolate(x, size=(18, 32)), "aten::upsample_nearest2d"),
        (lambda x: F.interpolate(x, scale_factor=4, mode="bilinear"), "aten::upsample_bilinear2d"),
    ]:
        check(function, X, ops={0: [kernel], 13: ["Resize"]})
    for function, kernel in [
        (lambda x: F.interpolate(x, scale_factor=3), "aten::upsample_nearest2d"),
        (lambda x: F.interpolate(x, size=(10, 9)), "aten::upsample_nearest2d"),
        (
            lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
            "aten::upsample_bilinear2d",
        ),
    ]:
        check(function, X, ops=[kernel], pins=(20,))
