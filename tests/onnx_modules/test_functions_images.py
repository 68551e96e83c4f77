"""Functions that sample images at other places: their numbers, against onnxruntime.

Sizes are those that the onnx package's own cases (test_node_cases.py) do not reach: odd ones, ones
that are no squares, and none. So they are in the other files of this name.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from function_cases import (
    Case,
    Given,
    assert_same,
    by_reference,
    compare,
    integers,
    places,
    results,
    uniform,
)
from torch import Tensor

pytestmark = pytest.mark.ort_only


def regions(count: int) -> Tensor:
    corners = torch.rand(count, 2) * torch.tensor([18.0, 14.0])
    return torch.cat([corners, corners + torch.rand(count, 2) * 8 - 0.5], 1)


COORDINATES = (
    "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric",
    "tf_crop_and_resize",
)  # fmt: skip
MODES = {
    **{f"nearest {rounding}": {"mode": "nearest", "nearest_mode": rounding}
       for rounding in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")},
    "linear": {"mode": "linear"},
    "linear, antialias": {"mode": "linear", "antialias": 1},
    "linear, antialias, exclude": {"mode": "linear", "antialias": 1, "exclude_outside": 1},
    "cubic": {"mode": "cubic", "cubic_coeff_a": -0.5},
    "cubic, usual": {"mode": "cubic"},
    "cubic, exclude": {"mode": "cubic", "exclude_outside": 1},
    "cubic, antialias": {"mode": "cubic", "antialias": 1},
    "cubic, antialias, exclude": {"mode": "cubic", "antialias": 1, "exclude_outside": 1},
}  # fmt: skip
# Of images, sizes and new sizes, which have no place halfway between two pixels.
SIZES = [
    ((1, 2, 4, 5), (7, 4)),
    ((2, 1, 5, 3), (6, 7)),
    ((1, 1, 1, 3), (2, 4)),
    ((0, 1, 4, 5), (3, 7)),
]
ROI = [0.0, 0.0, 0.13, -0.08, 1.0, 1.0, 0.81, 0.93]


def resized(words: str, coordinates: str) -> tuple[dict[str, Any], list[float] | None]:
    """Give attributes, and a region."""
    attributes = {**MODES[words], "coordinate_transformation_mode": coordinates}
    if coordinates != "tf_crop_and_resize":
        return attributes, None
    return {**attributes, "extrapolation_value": 1.5}, ROI


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("words", MODES)
def test_resize(words: str, coordinates: str) -> None:
    attributes, roi = resized(words, coordinates)
    for image, size in SIZES:
        compare("Resize", ([image, roi, None, [*image[:2], *size]], attributes))
    compare("Resize", ([SIZES[1][0], roi, [1.0, 1.0, 2.0, 3.0]], attributes))


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("words", [words for words in MODES if "nearest" not in words])
def test_resize_by_factors_that_give_no_whole_sizes(words: str, coordinates: str) -> None:
    """ONNX counts the part of a pixel that is left out, and onnxruntime does not."""
    attributes, roi = resized(words, coordinates)
    case = Case([(1, 1, 6, 5), roi, [1.0, 1.0, 0.6, 1.7]], attributes)
    inputs = case.made()
    model, got = results("Resize", case, inputs)
    assert_same(got, by_reference(model, inputs))


ASPECTS = list(itertools.product(
    ("not_larger", "not_smaller"), ("nearest", "linear", "cubic"),
    ([7, 3], [2, 9], [8, 8], [5, 6]), ([2, 3], [3, 2]),
))  # fmt: skip
SAMPLED: dict[str, Given] = {
    **{
        f"Resize: {policy}, {mode}, {size}, axes {axes}": (
            [(2, 3, 4, 5), None, None, size],
            {"mode": mode, "axes": axes, "keep_aspect_ratio_policy": policy},
        )
        for policy, mode, size, axes in ASPECTS
    },
    **{
        f"Resize: {mode}, {len(image)}-D": ([image, None, None, size], {"mode": mode, **more})
        for mode, image, size, more in (
            ("nearest", (5,), [8], {}), ("linear", (4, 5), [6, 3], {}),
            ("cubic", (4, 5), [6, 3], {}), ("linear", (4, 3, 2, 2), [5, 6], {"axes": [3, 2]}),
            ("linear", (1, 2, 5), [1, 2, 8], {}), ("nearest", (2, 3, 4, 5), [4, 3, 5, 6], {}),
            ("linear", (1, 2, 3, 4, 5), [1, 2, 5, 2, 7], {}),
        )
    },
    **{
        f"{op}: {mode}, {factors}, opset {opset}": (
            [(1, 2, 5, 6), [1.0, 1.0, *factors]], {"mode": mode}, 1, opset
        )
        for op, opset, mode, factors in (
            ("Upsample", 9, "nearest", [2.0, 3.0]), ("Upsample", 9, "nearest", [1.0, 1.5]),
            ("Upsample", 9, "linear", [2.0, 1.5]), ("Resize", 10, "nearest", [1.5, 0.5]),
            ("Resize", 10, "nearest", [0.4, 0.3]), ("Resize", 10, "linear", [0.4, 1.5]),
        )
    },
    **{
        f"Resize: {mode}, {coordinates}, opset 11": (
            [(1, 2, 4, 5), ROI if "crop" in coordinates else [], [1.0, 1.0, 2.0, 3.0]],
            {"mode": mode, "coordinate_transformation_mode": coordinates}, 1, 11,
        )
        for mode in ("nearest", "linear", "cubic")
        for coordinates in ("tf_half_pixel_for_nn", "align_corners", "tf_crop_and_resize")
    },
    "Resize: integers": (
        [(integers, 0, 255, (1, 1, 4, 5), torch.uint8), None, None, [1, 1, 7, 3]],
    ),
    **{
        f"GridSample: {mode}, {padding}, {align}, {image}, {opset}": (
            [image, (places, image[0], *grid)],
            {"mode": mode, "padding_mode": padding, "align_corners": align}, 1, opset,
        )
        for (image, grid), (mode, opset), padding, align in itertools.product(
            [((2, 3, 4, 5), (3, 2, 2)), ((1, 1, 1, 7), (5, 4, 2)), ((0, 2, 3, 4), (2, 2, 2)),
             ((2, 2, 3, 4, 2), (2, 3, 1, 3))],
            [("linear", 20), ("bilinear", 16), ("cubic", 20), ("bicubic", 16), ("nearest", 22)],
            ("zeros", "border", "reflection"), (0, 1),
        )
        if len(image) == 4 or (opset >= 20 and mode != "cubic")
    },
    **{
        f"AffineGrid: {size}, {align}": (
            [(size[0], len(size) - 2, len(size) - 1), size], {"align_corners": align}
        )
        for size in ([2, 1, 3, 5], [1, 2, 2, 3, 4]) for align in (0, 1)
    },
    **{
        f"RoiAlign: {mode}, {ratio}, {coordinates}, {count}": (
            [(2, 3, 7, 9), (regions, count), (integers, 0, 2, (count,))],
            {"mode": mode, "sampling_ratio": ratio, "output_height": 2, "output_width": 3,
             "spatial_scale": 0.5, **({"coordinate_transformation_mode": coordinates}
                                      if coordinates else {})},
            1, 16 if coordinates else 10,
        )
        for mode in ("avg", "max") for ratio in (0, 1, 3)
        for coordinates in ("half_pixel", "output_half_pixel", "") for count in (0, 5)
    },
    **{
        f"DeformConv: {words}": (
            [(batch, 4, 6, 8), (2 * group, 4 // group, *kernel),
             (batch, 2 * offsets * kernel[0] * kernel[1], *result),
             (2 * group,) if is_masked else None,
             (uniform, batch, offsets * kernel[0] * kernel[1], *result) if is_masked else None],
            {"group": group, "offset_group": offsets, "strides": strides, "pads": pads,
             "dilations": dilations}, 1, 19,
        )
        for words, batch, kernel, group, offsets, strides, pads, dilations, result, is_masked in (
            ("plain", 1, (3, 2), 1, 1, [1, 1], [0, 0, 0, 0], [1, 1], (4, 7), False),
            ("groups", 2, (2, 2), 2, 2, [2, 1], [1, 0, 0, 1], [1, 2], (3, 7), True),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled(name: str) -> None:
    compare(name, SAMPLED[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
def test_grids_of_other_dims(mode: str, align: int, padding: str) -> None:
    """Images of one and of three dims that are alike along one dim are those of two dims."""
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": align}
    x, grid = torch.randn(1, 2, 5), places(1, 4, 1)
    (line,) = results("GridSample", Case([], attributes), [x, grid])[1]
    plane = torch.cat([grid, torch.zeros_like(grid)], -1).unsqueeze(1)
    rows = x.unsqueeze(2).expand(1, 2, 6, 5).clone()
    (want,) = results("GridSample", Case([], attributes), [rows, plane])[1]
    torch.testing.assert_close(line, want.squeeze(2), rtol=1e-4, atol=1e-5)
    if mode == "cubic" and align:  # takes long
        return
    x, grid = torch.randn(1, 2, 3, 4), places(1, 2, 3, 2)
    (want,) = results("GridSample", Case([], attributes), [x, grid])[1]
    solid = torch.cat([grid, torch.zeros_like(grid[..., :1])], -1).unsqueeze(1)
    slices = x.unsqueeze(2).expand(1, 2, 6, 3, 4).clone()
    (got,) = results("GridSample", Case([], attributes), [slices, solid])[1]
    torch.testing.assert_close(got.squeeze(2), want, rtol=1e-4, atol=1e-5)
