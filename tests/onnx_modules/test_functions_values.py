"""Functions that pick elements, or quantize them: their numbers, against onnxruntime."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from function_cases import NUMBERS, Given, bytes_of, compare, few, integers, uniform
from torch import Tensor

pytestmark = pytest.mark.ort_only


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


# ---- elements that are picked and placed


def scattered(sizes: Sequence[int], indices: Sequence[int], is_unique: bool) -> Tensor:
    """Indices of parts, of which some count from the end."""
    parts = torch.tensor(sizes[: indices[-1]])
    total, count = int(parts.prod()), torch.Size(indices[:-1]).numel()
    numbers = torch.randperm(total)[:count] if is_unique else torch.randint(0, total, (count,))
    found = torch.stack(torch.unravel_index(numbers, parts.tolist()), -1).view(tuple(indices))
    return torch.where(torch.rand(tuple(indices)) < 0.3, found - parts, found)


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


@pytest.mark.parametrize("name", PICKED)
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
    "DequantizeLinear: half": (
        [(bytes_of, (3, 4), torch.int8), torch.tensor(0.3).half()], {}, 1, 19
    ),
    "QuantizeLinear: half, 16 bits": (
        [torch.arange(-9, 9).half(), torch.tensor(0.5).half(), torch.tensor(29221).short()]
    ,),
    "QuantizeLinear: infinity": (
        [torch.tensor([torch.inf, -torch.inf, 1e30, -1e30]), torch.tensor(0.5),
         torch.tensor(3).char()]
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
            ((3, 4), (4, 5), (), (5,)), ((2, 3, 4), (4, 5), (1,), ()),
            ((2, 3, 4), (2, 4, 5), (), (1,)), ((0, 4), (4, 5), (), (5,)), ((4,), (4, 5), (), ()),
        )
    },
    **{
        f"QLinearMatMul: {left}, {right}, {a}, {b}, opset {opset}": (
            [(bytes_of, a, left), torch.tensor(0.02), (bytes_of, (), left), (bytes_of, b, right),
             (steps, scale), (bytes_of, scale, right), torch.tensor(0.3), (bytes_of, (), left)],
            {}, 1, opset,
        )
        for left, right in (BYTES[:1] * 2, BYTES[1:] * 2, BYTES)
        for a, b, scale in (
            ((3, 4), (4, 5), ()), ((2, 3, 4), (2, 4, 5), ()), ((0, 4), (4, 5), (5,))
        )
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


@functools.cache
def multiplies_bytes() -> bool:
    """Whether the processor adds up products of bytes in 32 bits (VNNI)."""
    cpuinfo = Path("/proc/cpuinfo")
    return not cpuinfo.exists() or "vnni" in cpuinfo.read_text()


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized(name: str) -> None:
    if "torch.int8" in name and not multiplies_bytes():
        pytest.skip("onnxruntime adds up products with int8 in 16 bits here, which saturate")
    # onnxruntime multiplies the scales of products first, which rounds elsewhere.
    compare(name, QUANTIZED[name], rtol=1e-6, atol=1 if name.startswith("QLinear") else 1e-6)
