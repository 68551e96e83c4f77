"""Functions that compute ONNX's operators: their numbers, against onnxruntime.

Sizes are those that the onnx package's own cases (test_node_cases.py) do not reach: odd ones, ones
that are no squares, and none. Where onnxruntime has no kernel, or another reading than ONNX's
definition, the package's reference is asked.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from function_cases import Case, by_session, distinct, file_of, integers, tensors_of
from onnx.reference import ReferenceEvaluator
from torch import Tensor
from torch.nn import functional as F

import torch_ort
from torch_ort import Unsupported, UserError

pytestmark = pytest.mark.ort_only

# A case as a tuple: the arguments of `Case`.
Given = tuple[Any, ...]


def uniform(*sizes: int) -> Tensor:
    return torch.rand(*sizes)


def places(*sizes: int) -> Tensor:
    """Places in grids, some outside of the image."""
    return torch.rand(*sizes) * 2.6 - 1.3


def regions(count: int) -> Tensor:
    corners = torch.rand(count, 2) * torch.tensor([18.0, 14.0])
    return torch.cat([corners, corners + torch.rand(count, 2) * 8 - 0.5], 1)


def integers_below_usual(image: Sequence[int]) -> Tensor:
    """Places of a pool with windows of 2, no two of them equal."""
    count, size = torch.Size(image).numel(), 2 ** (len(image) - 2)
    return (torch.arange(count) * size + torch.randint(0, size, (count,))).view(tuple(image))


def boxes_of(batch: int, count: int, center: int) -> Tensor:
    return torch.rand(batch, count, 4) * 4 + 0.1 * center


def scores_of(sizes: Sequence[int]) -> Tensor:
    """Scores many of which are equal."""
    return integers(0, 4, sizes, torch.float32) / 5


def flags(count: int) -> Tensor:
    return torch.arange(count) % 2 == 0


def halves(sizes: Sequence[int]) -> Tensor:
    """Multiples of a quarter, which steps of a half make halves."""
    return integers(-400, 400, sizes, torch.float32) / 4


def steps(sizes: Sequence[int]) -> Tensor:
    """Scales that are powers of 2."""
    return 2.0 ** integers(-4, 2, sizes, torch.float32)


def zeros_of(dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
    """Zero points of weights: signed ones have no others in onnxruntime."""
    return bytes_of(sizes, dtype) if dtype == torch.uint8 else torch.zeros(sizes, dtype=dtype)


def labels(sizes: Sequence[int], ignored: int | None) -> Tensor:
    found = integers(0, sizes[1], (sizes[0], *sizes[2:]))
    return found if ignored is None else found.masked_fill(torch.rand(found.shape) < 0.3, ignored)


def some(sizes: Sequence[int]) -> Tensor:
    """A mask that allows at least one place of each row."""
    return (torch.rand(tuple(sizes)) < 0.6) | (torch.arange(sizes[-1]) == 0)


def bytes_of(sizes: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
    """All integers of a dtype."""
    info = torch.iinfo(dtype)
    return integers(info.min, info.max + 1, sizes, dtype)


def ids(cases: dict[str, Given]) -> Any:
    return pytest.mark.parametrize("name", cases)


def results(op: str, case: Case, inputs: Sequence[Any]) -> tuple[onnx.ModelProto, list[Tensor]]:
    model = file_of(op, case, inputs)
    got = torch_ort.load_onnx(model)(*tensors_of(inputs))
    return model, [each.detach() for each in (got if isinstance(got, tuple) else (got,))]


def assert_same(
    got: Sequence[Tensor], want: Sequence[Tensor], rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    assert len(got) == len(want)
    for mine, expected in zip(got, want, strict=True):
        assert mine.dtype == expected.dtype
        torch.testing.assert_close(
            mine.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True
        )


def compare(name: str, given: Given, **tolerances: float) -> None:
    """Compare a case of the operator that its name begins with."""
    case = Case(*given)
    inputs = case.made()
    model, got = results(name.partition(":")[0], case, inputs)
    assert_same(got, by_session(model, inputs), **tolerances)


def by_reference(model: onnx.ModelProto, inputs: Sequence[Any]) -> list[Tensor]:
    given = {each.name: inputs[int(each.name[1:])].numpy() for each in model.graph.input}
    with np.errstate(all="ignore"):
        found = ReferenceEvaluator(model).run(None, given)
    return [torch.from_numpy(np.asarray(each, order="C").copy()) for each in found]


# ---- images

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
SIZES = [((1, 2, 4, 5), (7, 4)), ((2, 1, 5, 3), (6, 7)), ((1, 1, 1, 3), (2, 4)), ((0, 1, 4, 5), (3, 7))]
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
            ("nearest", (5,), [8], {}), ("linear", (4, 5), [6, 3], {}), ("cubic", (4, 5), [6, 3], {}),
            ("linear", (1, 2, 5), [1, 2, 8], {}), ("nearest", (2, 3, 4, 5), [4, 3, 5, 6], {}),
            ("linear", (1, 2, 3, 4, 5), [1, 2, 5, 2, 7], {}), ("linear", (4, 3, 2, 2), [5, 6], {"axes": [3, 2]}),
        )
    },
    "Resize: integers": ([(integers, 0, 255, (1, 1, 4, 5), torch.uint8), None, None, [1, 1, 7, 3]], {}),
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


@ids(SAMPLED)
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


# ---- windows

WINDOWS: dict[str, Given] = {}
for op, (image, kernel, strides, pads), more in itertools.product(
    ("MaxPool", "AveragePool", "LpPool"),
    [((2, 3, 9), [3], [2], [1, 0]), ((1, 2, 7, 8), [2, 3], [3, 2], [1, 1, 0, 2]),
     ((0, 2, 6, 5), [2, 2], [2, 1], [0, 1, 1, 0]), ((1, 1, 5, 6, 5), [2, 1, 3], [2, 2, 1], [0] * 6)],
    [{}, {"ceil_mode": 1}, {"ceil_mode": 1, "dilations": 2}, {"dilations": 2},
     {"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"}, {"auto_pad": "VALID", "ceil_mode": 1}],
):  # fmt: skip
    attributes = {"kernel_shape": kernel, "strides": strides, **more}
    if "dilations" in more:
        attributes["dilations"] = [2] * len(kernel)
    if "auto_pad" not in more:
        attributes["pads"] = pads
    elif "SAME" in str(more):  # onnxruntime pads by less than nothing, where windows leave gaps
        attributes["strides"] = [min(pair) for pair in zip(kernel, strides, strict=True)]
    words = f"{op}: {len(kernel)}-D, {image[0]}, {more}"
    WINDOWS[words] = ([image], attributes)
    if op == "AveragePool":
        WINDOWS[f"{words}, padding counts"] = ([image], {**attributes, "count_include_pad": 1})
    if op == "MaxPool":
        WINDOWS[f"{words}, places"] = ([image], attributes, 2)
        WINDOWS[f"{words}, columns"] = ([image], {**attributes, "storage_order": 1}, 2)
for op, kernels in (("Conv", (2, 3)), ("ConvTranspose", (3, 2))):
    for rank, auto_pad in itertools.product((1, 2, 3), ("SAME_UPPER", "SAME_LOWER", "VALID")):
        image = (2, 4, 7, 5, 6)[: 2 + rank]
        WINDOWS[f"{op}: {rank}-D, {auto_pad}"] = (
            [image, (4, *kernels[:1], *(3, 2, 4)[:rank]), (6 if op == "ConvTranspose" else 4,)],
            {"auto_pad": auto_pad, "strides": [2, 1, 3][:rank], "group": 2},
        )  # fmt: skip
WINDOWS |= {
    "ConvTranspose: sizes": ([(1, 2, 5, 4), (2, 3, 4, 3), (3,)], {"output_shape": [11, 9], "strides": [2, 2]}),
    "ConvTranspose: sizes, same upper": (
        [(1, 2, 5), (2, 3, 4), (3,)], {"output_shape": [9], "strides": [2], "auto_pad": "SAME_UPPER"}
    ),
    "ConvTranspose: sizes and more": (
        [(2, 2, 5, 4), (2, 1, 3, 3), (1,)],
        {"output_shape": [14, 10], "strides": [3, 2], "output_padding": [1, 1]},
    ),
    "ConvTranspose: more than there is": (
        [(2, 2, 5), (2, 3, 3), (3,)], {"output_shape": [17], "strides": [3]}
    ),
    "ConvTranspose: none": ([(0, 2, 5), (2, 3, 3)], {"auto_pad": "SAME_LOWER", "strides": [2]}),
    "MaxPool: int8": ([(bytes_of, (1, 2, 6, 5), torch.int8)], {"kernel_shape": [2, 3], "ceil_mode": 1}),
    "MaxPool: uint8": ([(bytes_of, (1, 2, 6))], {"kernel_shape": [3], "strides": [2]}),
    **{
        f"GlobalLpPool: {p}, {len(image)}-D": ([image], {"p": p}, 1, 13)
        for p in (1, 2, 3) for image in ((2, 3, 5), (1, 2, 3, 4), (0, 1, 2, 2, 3))
    },
    **{
        f"MaxUnpool: {image}": (
            [image, (integers_below_usual, image)],
            {"kernel_shape": [2] * (len(image) - 2), "strides": [2] * (len(image) - 2)},
        )
        for image in ((2, 1, 3), (1, 2, 3, 2), (1, 1, 2, 1, 3))
    },
    **{
        f"Col2Im: {words}": (
            [(batch, 2 * blocks, count), image, block], attributes, 1, 18
        )
        for words, batch, blocks, count, image, block, attributes in (
            ("1-D", 2, 3, 4, [8], [3], {"strides": [2], "pads": [0, 1]}),
            ("2-D", 1, 6, 16, [5, 6], [2, 3], {}),
            ("none", 0, 4, 12, [4, 5], [2, 2], {}),
            ("3-D", 1, 2, 32, [4, 2, 5], [1, 1, 2], {"pads": [0] * 6}),
        )
    },
}  # fmt: skip


@ids(WINDOWS)
def test_windows(name: str) -> None:
    compare(name, WINDOWS[name], rtol=1e-3, atol=1e-4)


def test_blocks_with_gaps() -> None:
    """PyTorch is asked, since onnxruntime adds blocks with dilations to wrong places."""
    case = Case([(2, 12, 9), [6, 7], [2, 3]], {"dilations": [2, 1], "strides": [2, 2], "pads": [1, 0, 1, 0]}, 1, 18)
    inputs = case.made()
    want = F.fold(inputs[0], (6, 7), (2, 3), (2, 1), (1, 0), (2, 2))
    torch.testing.assert_close(results("Col2Im", case, inputs)[1][0], want)


# ---- recurrent layers


def short(length: int, batch: int) -> Tensor:
    """Lengths of sequences: the first is whole."""
    lengths = integers(1, length + 1, (batch,), torch.int32)
    lengths[0] = length
    return lengths


LAYERS = {"RNN": (1, 1), "GRU": (3, 2), "LSTM": (4, 3)}  # gates, and activations
ALPHA = ["Affine", "LeakyRelu", "ThresholdedRelu", "ScaledTanh", "HardSigmoid", "Elu"]
BETA = ["Affine", "ScaledTanh", "HardSigmoid"]
FUNCTIONS = ["Relu", "Tanh", "Sigmoid", *ALPHA, "Softsign", "Softplus"]


def layer(
    op: str, length: int, batch: int, hidden: int, direction: str, is_short: bool, has_states: bool
) -> list[Any]:
    gates, directions = LAYERS[op][0], 2 if direction == "bidirectional" else 1
    state = (directions, batch, hidden) if has_states else None
    return [
        (length, batch, 2), (directions, gates * hidden, 2), (directions, gates * hidden, hidden),
        (directions, 2 * gates * hidden) if has_states else None,
        (short, length, batch) if is_short else None, state, *([state] if op == "LSTM" else []),
    ]  # fmt: skip


def functions(op: str, first: int, directions: int) -> dict[str, Any]:
    names = [FUNCTIONS[(first + i) % len(FUNCTIONS)] for i in range(LAYERS[op][1] * directions)]
    return {
        "activations": names,
        "activation_alpha": [0.4 + 0.1 * i for i in range(sum(each in ALPHA for each in names))],
        "activation_beta": [0.3 + 0.1 * i for i in range(sum(each in BETA for each in names))],
    }


RECURRENT: dict[str, Given] = {}
for (op, (_, count)), direction, is_short, has_states in itertools.product(
    LAYERS.items(), ("forward", "reverse", "bidirectional"), (False, True), (False, True)
):
    inputs = layer(op, 5, 3, 4, direction, is_short, has_states)
    named = {"direction": direction, "hidden_size": 4}
    words = f"{op}: {direction}, {'lengths' if is_short else 'whole'}{', states' if has_states else ''}"
    num_outputs = 3 if op == "LSTM" else 2
    RECURRENT[words] = (inputs, named, num_outputs)
    RECURRENT[f"{words}, clip"] = (inputs, {**named, "clip": 0.7}, num_outputs)
    if op == "GRU":
        RECURRENT[f"{words}, linear"] = (inputs, {**named, "linear_before_reset": 1}, 2)
    if op == "LSTM":
        peepholes = (2 if direction == "bidirectional" else 1, 12)
        RECURRENT[f"{words}, peepholes"] = ([*inputs, peepholes], {**named, "input_forget": 1}, 3)
for op, first in itertools.product(LAYERS, range(len(FUNCTIONS))):
    inputs = layer(op, 1, 2, 3, "bidirectional", False, True)
    named = {"direction": "bidirectional", "hidden_size": 3}
    RECURRENT[f"{op}: functions from {FUNCTIONS[first]}"] = (
        inputs, {**named, **functions(op, first, 2)}, 3 if op == "LSTM" else 2
    )  # fmt: skip


@ids(RECURRENT)
def test_recurrent(name: str) -> None:
    compare(name, RECURRENT[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("op", LAYERS)
def test_layout_1_is_layout_0_transposed(op: str) -> None:
    """onnxruntime has no layout 1."""
    case = Case(layer(op, 4, 3, 5, "bidirectional", True, True), {"direction": "bidirectional"},
                3 if op == "LSTM" else 2)  # fmt: skip
    inputs = case.made()
    _, (all_states, *last) = results(op, case, inputs)
    turned = [x.transpose(0, 1).contiguous() if i in (0, 5, 6) else x for i, x in enumerate(inputs)]
    other = Case([], {**case.attributes, "layout": 1}, case.num_outputs)
    _, (got, *got_last) = results(op, other, turned)
    assert_same([got], [all_states.permute(2, 0, 1, 3)])
    assert_same(got_last, [each.transpose(0, 1) for each in last])


def test_activations_of_one_direction_for_two() -> None:
    case = Case(layer("RNN", 2, 1, 3, "bidirectional", False, False),
                {"direction": "bidirectional", "activations": ["Tanh"]}, 2)  # fmt: skip
    with pytest.raises(UserError, match="recurrent layer: activations: got 1, want 2"):
        results("RNN", case, case.made())


# ---- elements that are picked and placed


def scattered(sizes: Sequence[int], indices: Sequence[int], is_unique: bool) -> Tensor:
    """Indices of parts, of which some count from the end."""
    parts = torch.tensor(sizes[: indices[-1]])
    total, count = int(parts.prod()), torch.Size(indices[:-1]).numel()
    numbers = torch.randperm(total)[:count] if is_unique else torch.randint(0, total, (count,))
    found = torch.stack(torch.unravel_index(numbers, parts.tolist()), -1).view(tuple(indices))
    return torch.where(torch.rand(tuple(indices)) < 0.3, found - parts, found)


def few(sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers many of which are equal."""
    return integers(-2, 3, sizes, dtype)


NUMBERS = (torch.float32, torch.float64, torch.int32, torch.int64)
PICKED: dict[str, Given] = {
    **{
        f"ScatterND: {reduction}, {sizes}, {indices}, {dtype}": (
            [(few, sizes, dtype), (scattered, sizes, indices, reduction == "none"),
             (few, (*indices[:-1], *sizes[indices[-1]:]), dtype)],
            {"reduction": reduction}, 1, 18,
        )
        for reduction in ("none", "add", "mul", "max", "min")
        for sizes, indices in (
            ((4, 3, 2), (2, 2, 1)), ((4, 3, 2), (3, 2)), ((4, 3, 2), (2, 1, 3)), ((5,), (3, 1)),
            ((2, 0, 3), (1, 1)),
        )
        for dtype in NUMBERS
    },
    **{
        f"GatherND: {sizes}, {indices}, {batch}": (
            [sizes, (scattered, sizes[batch:], indices, False)], {"batch_dims": batch}
        )
        for sizes, indices, batch in (
            ((2, 3, 4), (2, 2), 0), ((2, 3, 4), (2, 5, 1), 1), ((2, 3, 4, 5), (2, 3, 2, 1), 2),
            ((2, 3, 4), (2, 3, 2), 0),
        )
    },
    **{
        f"TopK: {sizes}, {axis}, {largest}, {dtype}": (
            [(few, sizes, dtype), [3]], {"axis": axis, "largest": largest}, 2
        )
        for sizes, axis in (((3, 7), -1), ((5,), 0), ((0, 4), 1), ((2, 4, 3), 1))
        for largest in (0, 1) for dtype in NUMBERS
    },
    "TopK: none": ([(2, 3), [0]], {}, 2),
    **{
        f"OneHot: {sizes}, {axis}, {index}, {depth}, {value}": (
            [(integers, -7, 8, sizes, index), depth, torch.tensor([2, 7]).to(value)], {"axis": axis}
        )
        for sizes in ((2, 3), (0, 3), (4,)) for axis in (-1, 0, 1)
        for index, depth, value in (
            (torch.int64, 5, torch.float32), (torch.int64, [5], torch.int64),
            (torch.int64, 5.0, torch.float32), (torch.float32, 5.0, torch.float32),
            (torch.int32, 5.0, torch.float32),
        )
    },
    **{
        f"Unique: {sizes}, {axis}, {is_sorted}, {dtype}": (
            [(few, sizes, dtype)],
            {"sorted": is_sorted, **({} if axis is None else {"axis": axis})}, 4,
        )
        for sizes, axis in (
            ((4, 3), None), ((5, 2), 0), ((2, 6), 1), ((2, 3, 2), -1), ((0, 3), None), ((0, 3), 0)
        )
        for is_sorted in (0, 1) for dtype in (torch.float32, torch.int64)
    },
    **{
        f"NonMaxSuppression: {boxes} boxes, {words}": (
            [(boxes_of, batch, boxes, center), (scores_of, (batch, 2, boxes)), *limits],
            {"center_point_box": center},
        )
        for batch, boxes in ((1, 6), (2, 9), (1, 0)) for center in (0, 1)
        for words, limits in (
            (f"nothing asked, {center}", []), (f"3 of each, {center}", [[3]]),
            (f"overlaps, {center}", [[10], [0.3]]),
            (f"scores, {center}", [[10], [0.7], [0.25]]),
        )
    },
    **{
        f"ReverseSequence: {sizes}, {time}": (
            [sizes, (integers, 0, sizes[time] + 1, (sizes[1 - time],))],
            {"batch_axis": 1 - time, "time_axis": time},
        )
        for sizes in ((4, 3, 2), (5, 2), (3, 0)) for time in (0, 1)
    },
    **{
        f"Pad: {mode}, {sizes}, {pads}": ([sizes, pads], {"mode": mode})
        for mode, sizes, pads in (
            ("edge", (3, 4), [1, 0, 2, 5]), ("edge", (2, 3, 4), [0, -1, 2, 1, 0, -2]),
            ("edge", (0, 3), [0, 2, 0, 1]), ("reflect", (3, 4), [2, 3, 1, 2]),
            ("reflect", (4, 1, 5), [-1, 0, 2, 1, 0, -2]), ("wrap", (3, 4), [1, 2, 3, 0]),
            ("wrap", (2, 3), [4, 7, 5, 9]), ("wrap", (4, 5), [-1, -1, 3, 2]),
        )
    },
    "Pad: axes": ([(2, 4, 3), [1, 2], None, [-2]], {"mode": "reflect"}),
    **{
        f"{op}: {axis}, {keeps}, {dtype}": (
            [(few, (3, 4, 5), dtype)], {"axis": axis, "keepdims": keeps, "select_last_index": 1}
        )
        for op in ("ArgMax", "ArgMin") for axis in (0, -1) for keeps in (0, 1)
        for dtype in (torch.float32, torch.int32)
    },
    **{
        f"Compress: {axis}, {count}": (
            [(4, 3), (flags, count)], {} if axis is None else {"axis": axis}
        )
        for axis in (None, 0, -1) for count in (1, 3)
    },
    "NonZero: 3-D": ([(few, (2, 3, 2))],),
    "NonZero: a number": ([torch.tensor(3.0)],),
    "NonZero: none": ([(0, 3)],),
    "DepthToSpace: DCR": ([(2, 12, 2, 3)], {"blocksize": 2}),
    "DepthToSpace: CRD": ([(1, 18, 1, 3)], {"blocksize": 3, "mode": "CRD"}),
    "DepthToSpace: none": ([(0, 18, 1, 3)], {"blocksize": 3}),
    "SpaceToDepth: plain": ([(2, 3, 4, 6)], {"blocksize": 2}),
    "SpaceToDepth: none": ([(0, 3, 6, 9)], {"blocksize": 3}),
    **{
        f"CenterCropPad: {sizes}, {axes}": ([(4, 5, 3), sizes], {"axes": axes})
        for sizes, axes in (([7, 2, 4], []), ([2, 8], [-1, 0]), ([4], [1]))
    },
    **{
        f"TensorScatter: {mode}, {axis}, {starts}": (
            [(2, 3, 6, 4), update, None if starts is None else torch.tensor(starts)],
            {"axis": axis, "mode": mode}, 1, 24,
        )
        for mode, axis, update, starts in (
            ("linear", -2, (2, 3, 2, 4), [0, 3]), ("linear", 1, (2, 2, 6, 4), None),
            ("circular", 2, (2, 3, 3, 4), [5, 1]), ("circular", -1, (2, 3, 6, 1), [3, 0]),
        )
    },
}  # fmt: skip


@ids(PICKED)
def test_picked(name: str) -> None:
    compare(name, PICKED[name], rtol=0, atol=1e-6)


# ---- quantized numbers

BYTES = (torch.uint8, torch.int8)
CONVOLVED: list[tuple[Any, Any, dict[str, Any]]] = [
    ((2, 4, 7), (6, 2, 3), {"group": 2, "strides": [2], "pads": [1, 0]}),
    ((1, 2, 6, 5), (6, 2, 2, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 1]}),
    ((1, 2, 6, 5), (6, 2, 2, 3), {"auto_pad": "SAME_LOWER"}),
    ((0, 2, 6, 5), (6, 2, 2, 3), {"dilations": [2, 1]}),
    ((1, 2, 5, 4, 6), (6, 2, 2, 1, 2), {"pads": [1, 0, 0, 0, 1, 0]}),
]
QUANTIZED: dict[str, Given] = {}
for dtype, (words, image, scale, attributes), has_zero, opset in itertools.product(
    (*BYTES, torch.uint16, torch.int16),
    [("tensor", (3, 4, 5), (), {}), ("first axis", (3, 4, 5), (3,), {"axis": 0}),
     ("axis", (2, 5), (5,), {}), ("last axis", (0, 4), (4,), {"axis": -1}),
     ("blocks", (2, 6, 3), (2, 2, 3), {"axis": 1, "block_size": 3}),
     ("uneven blocks", (2, 5), (2, 2), {"axis": 1, "block_size": 3})],
    (False, True), (13, 21, 23),
):  # fmt: skip
    if opset < 21 and (dtype.itemsize > 1 or "block_size" in attributes):
        continue
    zero = (bytes_of, scale, dtype) if has_zero else None
    words = f"{dtype}, {words}, {'zeros, ' if has_zero else ''}opset {opset}"
    number = onnx.helper.np_dtype_to_tensor_dtype(torch.empty(0, dtype=dtype).numpy().dtype)
    is_named = not has_zero and opset >= 21
    if has_zero or is_named or dtype == torch.uint8:
        QUANTIZED[f"QuantizeLinear: {words}"] = (
            [(halves, image), (steps, scale), zero],
            {**attributes, **({"output_dtype": number} if is_named else {})}, 1, opset,
        )  # fmt: skip
    QUANTIZED[f"DequantizeLinear: {words}"] = (
        [(bytes_of, image, dtype), (steps, scale), zero], attributes, 1, opset
    )  # fmt: skip
QUANTIZED |= {
    "DequantizeLinear: int32": ([(bytes_of, (3, 4), torch.int32), (steps, ())],),
    "DequantizeLinear: half": ([(bytes_of, (3, 4), torch.int8), torch.tensor(0.3).half()], {}, 1, 19),
    "QuantizeLinear: half, 16 bits": (
        [torch.arange(-9, 9).half(), torch.tensor(0.5).half(), torch.tensor(29221).short()]
    ,),
    "QuantizeLinear: infinity": (
        [torch.tensor([torch.inf, -torch.inf, 1e30, -1e30]), torch.tensor(0.5), torch.tensor(3).char()]
    ,),
    "DynamicQuantizeLinear: all signs": ([(3, 5)], {}, 3),
    "DynamicQuantizeLinear: positive": ([(uniform, 2, 7)], {}, 3),
    "DynamicQuantizeLinear: zeros": ([torch.zeros(2, 3)], {}, 3),
    **{
        f"MatMulInteger: {left}, {right}, {a}, {b}": (
            [(bytes_of, a, left), (bytes_of, b, right), (bytes_of, zero, left),
             (bytes_of, other, right)],
        )
        for left in BYTES for right in BYTES
        for a, b, zero, other in (
            ((3, 4), (4, 5), (), (5,)), ((2, 3, 4), (4, 5), (1,), ()), ((2, 3, 4), (2, 4, 5), (), (1,)),
            ((0, 4), (4, 5), (), (5,)), ((4,), (4, 5), (), ()),
        )
    },
    **{
        f"QLinearMatMul: {left}, {right}, {a}, {b}, opset {opset}": (
            [(bytes_of, a, left), torch.tensor(0.02), (bytes_of, (), left), (bytes_of, b, right),
             (steps, scale), (bytes_of, scale, right), torch.tensor(0.3), (bytes_of, (), left)],
            {}, 1, opset,
        )
        for left, right in ((torch.uint8, torch.uint8), (torch.int8, torch.int8), (torch.uint8, torch.int8))
        for a, b, scale in (((3, 4), (4, 5), ()), ((2, 3, 4), (2, 4, 5), ()), ((0, 4), (4, 5), (5,)))
        for opset in (13, 21)
    },
    **{
        f"ConvInteger: {image}, {right}, {attributes}": (
            [(bytes_of, image), (bytes_of, weight, right), (bytes_of, ()), (zeros_of, right, ())],
            attributes,
        )
        for right in BYTES for image, weight, attributes in CONVOLVED
    },
    **{
        f"QLinearConv: {image}, {right}, {attributes}": (
            [(bytes_of, image), torch.tensor(0.02), (bytes_of, ()), (bytes_of, weight, right),
             (steps, scale), (zeros_of, right, scale), torch.tensor(2.0), (bytes_of, ()),
             (integers, -900, 900, (6,), torch.int32)],
            attributes,
        )
        for right, scale in ((torch.uint8, ()), (torch.int8, (6,)))
        for image, weight, attributes in CONVOLVED
    },
}  # fmt: skip


@ids(QUANTIZED)
def test_quantized(name: str) -> None:
    # onnxruntime multiplies the scales of products first, which rounds elsewhere.
    compare(name, QUANTIZED[name], rtol=1e-6, atol=1 if name.startswith("QLinear") else 1e-6)


# ---- signals, losses, and the rest

LABELS: dict[str, Any] = {
    "2-D": (5, 3), "3-D": (2, 4, 3), "4-D": (2, 3, 2, 5), "5-D": (1, 3, 2, 1, 3), "6-D": (2, 3, 1, 2, 1, 2)
}  # fmt: skip
REST: dict[str, Given] = {
    **{
        f"DFT: {parts}, {sizes}, {axis}, {length}, {attributes}, {opset}": (
            [(*sizes, parts), length, *([axis] if opset >= 20 else [])],
            {**attributes, **({} if opset >= 20 else {"axis": axis})}, 1, opset,
        )
        for sizes, axis in (((2, 5), 1), ((1, 6), 1), ((0, 4), 1), ((2, 3, 7), 2), ((3, 4, 2), 1))
        for length in (None, 3, 8)
        for parts, attributes, opset in (
            (1, {}, 17), (1, {"onesided": 1}, 20), (1, {"inverse": 1}, 20), (2, {}, 20),
            (2, {"inverse": 1}, 17),
        )
    },
    "DFT: usual axis": ([(2, 5, 3, 1)], {}, 1, 20),
    "DFT: usual axis before": ([(2, 5, 3, 1)], {}, 1, 17),
    "DFT: one side, inverse": ([(2, 5, 2), 8, 1], {"inverse": 1, "onesided": 1}, 1, 20),
    **{
        f"STFT: {sizes}, {parts}, {onesided}, {words}": (
            [(*sizes, parts), 3, window, length], {"onesided": onesided}, 1, 17
        )
        for sizes in ((2, 9), (1, 16), (0, 8)) for parts in (1, 2) for onesided in (0, 1)
        for words, window, length in (
            ("window", (uniform, 5), None), ("length", None, 4), ("both", (uniform, 4), 4)
        )
    },
    **{
        f"{op}: {size}, {periodic}": (
            [size], {"periodic": periodic, "output_datatype": 11}, 1, 17
        )
        for op in ("HannWindow", "HammingWindow", "BlackmanWindow") for size in (2, 5, 10)
        for periodic in (0, 1)
    },
    **{
        f"MelWeightMatrix: {bins}, {length}": ([bins, length, rate, low, high], {}, 1, 17)
        for bins, length, rate, low, high in (
            (8, 16, 8192, 0.0, 4096.0), (5, 64, 16000, 20.0, 7600.0), (16, 17, 8000, 100.0, 3000.0),
            (3, 8, 800, 0.0, 400.0), (40, 512, 16000, 0.0, 8000.0),
        )
    },
    **{
        f"CumSum: {sizes}, {axis}, {exclusive}, {reverse}, {dtype}": (
            [(few, sizes, dtype), axis], {"exclusive": exclusive, "reverse": reverse}
        )
        for sizes, axis in (((3, 4), -1), ((0, 3), 0), ((2, 3, 2), 1))
        for exclusive, reverse in ((0, 1), (1, 0), (1, 1)) for dtype in NUMBERS
    },
    **{
        f"Einsum: {equation}, {dtype}": (
            [(few, each, dtype) for each in sizes], {"equation": equation}
        )
        for equation, sizes in (
            ("ij,jk->ik", ((2, 3), (3, 4))), ("bij,bjk->bik", ((0, 2, 3), (0, 3, 2))),
            ("ii->i", ((3, 3),)), ("ij,jk", ((2, 3), (3, 4))), ("ij->", ((2, 3),)),
            (" i j , j k -> i k ", ((2, 3), (3, 4))), ("abc,cd,de->abe", ((2, 3, 4), (4, 2), (2, 5))),
            ("...i,...i->...", ((2, 3), (2, 3))), ("aB,Bc->ac", ((2, 3), (3, 2))), ("i,j->ij", ((2,), (3,))),
        )
        for dtype in (torch.float32, torch.int32)
    },
    **{
        f"BitShift: {direction}, {dtype}": (
            [(bytes_of, (3, 5), dtype), (integers, 0, 8, (3, 1), dtype)], {"direction": direction}
        )
        for direction in ("LEFT", "RIGHT")
        for dtype in (torch.uint8, torch.uint16, torch.uint32)
    },
    "BitShift: by the greatest": (
        [torch.tensor([-1, 2**62 + 5, 1, 0]).view(torch.uint64), torch.tensor([63]).view(torch.uint64)],
        {"direction": "RIGHT"},
    ),
    **{
        f"EyeLike: {sizes}, {k}, {number}": (
            [sizes], {"k": k, **({"dtype": number} if number else {})}
        )
        for sizes in ((3, 4), (4, 2), (0, 3)) for k in (-3, -1, 0, 1, 5) for number in (0, 7, 11)
    },
    **{
        f"IsInf: {negative}, {positive}, {dtype}": (
            [torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0]).to(dtype)],
            {"detect_negative": negative, "detect_positive": positive}, 1, 20,
        )
        for negative in (0, 1) for positive in (0, 1)
        for dtype in (torch.float32, torch.float64, torch.float16)
    },
    **{
        f"{op}: {rank}, {reduction}{', weights' if has_weights else ''}, {ignored}": (
            [sizes, (labels, sizes, ignored), (uniform, sizes[1]) if has_weights else None],
            {"reduction": reduction, **({} if ignored is None else {"ignore_index": ignored})},
            2 if op[0] == "S" else 1, 13,
        )
        for op in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
        for rank, sizes in LABELS.items() for reduction in ("mean", "sum", "none")
        for has_weights in (False, True) for ignored in (None, 1, -100)
    },
    **{
        f"{op}: {sizes}": ([sizes, (sizes[1],), (sizes[1],)], {"epsilon": 0.01})
        for op in ("InstanceNormalization",)
        for sizes in ((2, 3, 4), (0, 3, 4), (1, 2, 1), (2, 2, 2, 1, 3))
    },
    **{
        f"BatchNormalization: {sizes}": (
            [sizes, *[(sizes[1],)] * 3, (uniform, sizes[1])],
            {"training_mode": 1, "momentum": 0.3}, 3, 15,
        )
        for sizes in ((2, 3, 4), (5, 3), (1, 2, 1), (1, 2), (2, 2, 2, 1, 3))
    },
    **{
        f"LRN: {size}, {sizes}": ([sizes], {"size": size, "alpha": 0.4, "beta": 0.6, "bias": 1.5})
        for size in (1, 3, 5) for sizes in ((2, 4, 3, 2), (0, 3, 2, 2), (1, 1, 2, 3))
    },
    "MeanVarianceNormalization: usual": ([(2, 3, 4, 5)],),
    "MeanVarianceNormalization: axes": ([(2, 3, 4)], {"axes": [0, 2]}),
    **{
        f"LpNormalization: {p}, {sizes}, {axis}": ([sizes], {"p": p, "axis": axis})
        for p in (1, 2) for sizes, axis in (((2, 3, 4), 1), ((0, 3), -1), ((4, 1), 0))
    },
    **{
        f"ReduceSumSquare: {axes}, {keeps}, {noop}, {dtype}": (
            [(few, (2, 3, 4), dtype), axes], {"keepdims": keeps, "noop_with_empty_axes": noop}, 1, 18
        )
        for axes in (None, [0], [1, -1]) for keeps in (0, 1) for noop in (0, 1) for dtype in NUMBERS
    },
    **{
        f"ReduceLogSum: {axes}, {sizes}": ([(uniform, *sizes), axes], {}, 1, 18)
        for axes in ([0], [-1]) for sizes in ((2, 3), (3, 1, 2))
    },
    **{f"Det: {sizes}": ([sizes],) for sizes in ((3, 3), (0, 2, 2), (2, 3, 4, 4))},
    **{f"Hardmax: {axis}": ([(few, (3, 4))], {"axis": axis}) for axis in (0, 1)},
    **{
        f"Shrink: {dtype}": ([(few, (3, 4), dtype)], {"lambd": 0.5, "bias": 1.0})
        for dtype in (*NUMBERS, torch.uint8, torch.int8)
    },
    "Celu: alpha": ([(3, 4)], {"alpha": 0.7}),
    "ThresholdedRelu: alpha": ([(3, 4)], {"alpha": 0.3}),
    "Mean: broadcast": ([(2, 3), (3,), (2, 1)],),
    "Sum: one": ([(0, 3)],),
    "Size: none": ([(0, 3)],),
    "Size: plain": ([(2, 3)],),
}  # fmt: skip


@ids(REST)
def test_rest(name: str) -> None:
    compare(name, REST[name], rtol=1e-3, atol=1e-4)


# ---- attention

HEADS: dict[str, Sequence[Any]] = {
    "equal": [(2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6)],
    "shared": [(1, 4, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)],
    "flat": [(2, 3, 8), (2, 5, 4), (2, 5, 6)],
}
ATTENTION: dict[str, Given] = {}
for words, mask, is_causal, past, softcap, opset in itertools.product(
    HEADS, (None, "bool", "float"), (0, 1), (0, 2), (0.0, 2.0), (23, 24)
):
    queries, keys, values = HEADS[words]
    is_flat = words == "flat"
    count = 2 if is_flat else keys[1]
    kept = [
        (keys[0], count, past, each[-1] // (count if is_flat else 1)) for each in (keys, values)
    ]  # fmt: skip
    size = (3, (keys[1] if is_flat else keys[2]) + past)
    given = {None: None, "bool": (some, size), "float": size}[mask]
    attributes = {"is_causal": is_causal, "softcap": softcap, "scale": 0.4}
    if is_flat:
        attributes |= {"q_num_heads": 4, "kv_num_heads": 2}
    ATTENTION[f"Attention: {words}, {mask}, {is_causal}, {past}, {softcap}, opset {opset}"] = (
        [queries, keys, values, given, *(kept if past else [])], attributes, 3 if past else 1, opset
    )  # fmt: skip
for mode, words in itertools.product((0, 1, 3), HEADS):
    attributes = {"qk_matmul_output_mode": mode, "softcap": 1.5}
    if words == "flat":
        attributes |= {"q_num_heads": 4, "kv_num_heads": 2}
    ATTENTION[f"Attention: scores, {mode}, {words}"] = (HEADS[words], attributes, 4, 24)
ATTENTION |= {
    f"RotaryEmbedding: {words}, {interleaved}": (
        given, {"interleaved": interleaved, **attributes}, 1, 23
    )
    for interleaved in (0, 1)
    for words, given, attributes in (
        ("positions", [(2, 3, 5, 8), (9, 4), (9, 4), (integers, 0, 9, (2, 5))], {}),
        ("tokens, flat", [(2, 5, 12), (2, 5, 2), (2, 5, 2)], {"num_heads": 3}),
        ("part", [(1, 2, 3, 8), (1, 3, 2), (1, 3, 2)], {"rotary_embedding_dim": 4}),
    )
}  # fmt: skip


@ids(ATTENTION)
def test_attention(name: str) -> None:
    compare(name, ATTENTION[name], rtol=1e-3, atol=1e-4)


WITHOUT_KERNELS: dict[str, Given] = {
    **{
        f"LinearAttention: {rule}, {sizes}, {words}": (
            [(*sizes, 8), (*sizes, 4), (*sizes, 6), (sizes[0], 2, 2, 3) if words else None,
             (uniform, *sizes, 4 if words else 2) if "gated" in rule else None,
             (uniform, *sizes, 2) if "delta" in rule else None],
            {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": rule}, 2, 27,
        )
        for rule in ("linear", "gated", "delta", "gated_delta")
        for sizes, words in (((1, 1), ""), ((2, 5), "state"), ((3, 4), ""))
    },
    **{
        f"CausalConvWithState: {sizes}, {reach}, {activation}": (
            [sizes, (sizes[1], 1, reach + 1), (sizes[1],), (*sizes[:2], reach)],
            {"activation": activation}, 2, 27,
        )
        for sizes, reach in (((2, 3, 5), 2), ((1, 1, 1), 3), ((2, 2, 4), 0))
        for activation in ("none", "silu")
    },
    "SwiGLU: alpha": ([(2, 3), (2, 3)], {"alpha": 1.3}, 1, 28),
    **{
        f"BitCast: {dtype} to {number}": ([(few, (2, 3), dtype)], {"to": number}, 1, 26)
        for dtype, number in ((torch.float32, 6), (torch.int32, 1), (torch.float64, 7))
    },
    **{
        f"CumProd: {sizes}, {axis}, {exclusive}, {reverse}": (
            [sizes, axis], {"exclusive": exclusive, "reverse": reverse}, 1, 26
        )
        for sizes, axis in (((3, 4), -1), ((2, 3, 2), 1))
        for exclusive in (0, 1) for reverse in (0, 1)
    },
    **{
        f"Attention: windows of {left} and {right}, {is_causal}": (
            [(1, 2, 4, 4), (1, 2, 5, 4), (1, 2, 5, 4), None, (1, 2, 2, 4), (1, 2, 2, 4)],
            {"left_window_size": left, "right_window_size": right, "is_causal": is_causal}, 3, 27,
        )
        for left, right in ((1, -1), (-1, 2), (1, 1), (0, 0)) for is_causal in (0, 1)
    },
    "DFT: one side, inverse, fewer": ([(2, 5, 2), 4, 1], {"inverse": 1, "onesided": 1}, 1, 20),
}  # fmt: skip


@ids(WITHOUT_KERNELS)
def test_without_kernels_of_onnxruntime(name: str) -> None:
    case = Case(*WITHOUT_KERNELS[name])
    inputs = case.made()
    model, got = results(name.partition(":")[0], case, inputs)
    assert_same(got, by_reference(model, inputs))
