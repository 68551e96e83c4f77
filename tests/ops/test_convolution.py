"""Convolutions, pooling and resizing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from driver import Case, check, floats, ints, run, with_half

import torch_ort

CASES = [
    Case("Conv", [floats(2, 3, 8, 9), floats(4, 3, 3, 3), floats(4)], lambda x, w,
        b: F.conv2d(x, w, b), dims={0: ["N", 3, "H", "W"]}),
    Case("Conv", [floats(2, 3, 8, 9), floats(4, 3, 3, 2)], lambda x,
        w: F.conv2d(x, w, None, (2, 1), (1, 2), (1, 2)),
        {"strides": [2, 1], "pads": [1, 2, 1, 2], "dilations": [1, 2], "kernel_shape": [3, 2]},
        dims={0: ["N", 3, "H", "W"]}),
    Case("Conv", [floats(1, 4, 6), floats(4, 2, 3)], lambda x,
        w: F.conv1d(F.pad(x, (1, 2)), w, groups=2), {"group": 2, "pads": [1, 2]}),
    Case("Conv", [floats(1, 2, 4, 5, 6), floats(3, 2, 2, 2, 2)], lambda x, w: F.conv3d(x, w)),
    Case("Conv", [floats(0, 3, 8, 8), floats(4, 3, 3, 3)], lambda x, w: F.conv2d(x, w),
        note="empty"),
    Case("Conv", [floats(1, 1, 1, 1), floats(1, 1, 1, 1)], lambda x, w: F.conv2d(x, w)),
    Case("ConvTranspose", [floats(2, 3, 5, 4), floats(3, 2, 3, 3), floats(2)], lambda x, w,
        b: F.conv_transpose2d(x, w, b), dims={0: ["N", 3, "H", "W"]}),
    Case(
        "ConvTranspose",
        [floats(2, 4, 5), floats(4, 2, 3)],
        lambda x, w: F.conv_transpose1d(x, w, None, 2, 1, 1, 2, 1),
        {"strides": [2], "pads": [1, 1], "output_padding": [1], "group": 2},
        reference=False,  # it does not know groups
    ),
    Case("ConvTranspose", [floats(2, 4, 5), floats(4, 2, 3)], lambda x,
        w: F.conv_transpose1d(x, w, None, 3, 1, 2, 1, 2),
        {"strides": [3], "pads": [1, 1], "output_padding": [2], "dilations": [2]}),
    Case("MaxPool", [floats(2, 3, 8, 9)], lambda x: F.max_pool2d(x, 2),
        {"kernel_shape": [2, 2], "strides": [2, 2]}, dims={0: ["N", 3, "H", "W"]}),
    Case("MaxPool", [floats(2, 3, 8, 9)], lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 0), (1, 2)),
        {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 0], "dilations": [1, 2]}),
    Case("MaxPool", [floats(1, 2, 5, 5)],
        lambda x: F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=-float("inf")), 2),
        {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 0, 1, 1]}, note="one side"),
    Case("MaxPool", [floats(1, 2, 4, 5, 6)], lambda x: F.max_pool3d(x, 2, 1),
        {"kernel_shape": [2, 2, 2]}),
    Case("AveragePool", [floats(2, 3, 8, 9)],
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        dims={0: ["N", 3, "H", "W"]}),
    Case("AveragePool", [floats(2, 3, 8, 9)], lambda x: F.avg_pool2d(x, 3, 2, 1),
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    Case(
        "AveragePool",
        [floats(1, 2, 4, 4, 4)],
        lambda x: F.avg_pool3d(x, 2),
        {"kernel_shape": [2, 2, 2], "strides": [2, 2, 2]},
        half=False,  # eager has no kernel for it
    ),
    Case("GlobalAveragePool", [floats(2, 3, 4, 5)], lambda x: x.mean((2, 3), keepdim=True),
        dims={0: ["N", 3, "H", "W"]}),
    Case("GlobalMaxPool", [floats(2, 3, 4, 5)], lambda x: x.amax((2, 3), keepdim=True)),
    Case("Resize", [floats(1, 2, 3, 4), None, None, ints(1, 2, 6, 16)], lambda x,
        _: F.interpolate(x, (6, 16)),
        {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}, known=[3]),
    Case("Resize", [floats(1, 2, 3, 4), None, torch.tensor([1.0, 1.0, 2.0, 2.0])], lambda x,
        _: F.interpolate(x, scale_factor=2),
        {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}, known=[2],
        half=False, dims={0: ["N", 2, "H", "W"]}),
    Case("Resize", [floats(1, 2, 3, 4), None, None, ints(1, 2, 6, 8)], lambda x,
        _: F.interpolate(x, (6, 8), mode="bilinear"), {"mode": "linear"}, known=[3]),
    Case("Resize", [floats(1, 2, 3), None, None, ints(1, 2, 7)], lambda x,
        _: F.interpolate(x, 7, mode="linear", align_corners=True),
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"}, known=[3]),
]  # fmt: skip


@pytest.mark.parametrize("case", with_half(CASES), ids=str)
def test_case(case: Case) -> None:
    check(case)


IMAGE = floats(1, 2, 5, 5)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("MaxPool", [IMAGE], None, {"kernel_shape": [2, 2], "ceil_mode": 1}),
         "MaxPool: ceil_mode"),
        (Case("MaxPool", [IMAGE], None, {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER"}),
         "auto_pad: got SAME_UPPER, want NOTSET or VALID"),
        (Case("MaxPool", [IMAGE], None, {"kernel_shape": [2, 2]}, outputs=2), "MaxPool: indices"),
        (Case("Resize", [IMAGE, None, torch.tensor([1.0, 1.0, 1.5, 1.5])], None,
              {"mode": "linear", "coordinate_transformation_mode": "align_corners"}, known=[2]),
         "align_corners with factors that give no integers"),
        (Case("Resize", [IMAGE, None, None, ints(1, 2, 9, 9)], None, {"mode": "cubic"}, known=[3]),
         "Resize: mode cubic with half_pixel"),
    ],
    ids=str,
)  # fmt: skip
def test_forms_without_a_kernel_are_unsupported(case: Case, words: str) -> None:
    with pytest.raises(torch_ort.Unsupported, match=words):
        run(case)


def test_wrong_channels_are_an_error() -> None:
    with pytest.raises(torch_ort.UserError, match="Conv: dims differ: got 2, want 3"):
        run(Case("Conv", [IMAGE, floats(4, 3, 3, 3)], None))
