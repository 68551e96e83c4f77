"""Ops that make tensors from numbers."""

from __future__ import annotations

import onnx.helper
import pytest
import torch
from driver import Case, check, floats, ints, run, to_proto

import torch_ort


def value(number: torch.Tensor) -> dict:
    return {"value": to_proto(number, "value")}


def scalar(number: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(number, dtype=dtype)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bool, torch.uint8, torch.int32]
CASES = [
    Case("ConstantOfShape", [ints(2, 3)], lambda _: torch.zeros(2, 3), known=[0]),
    Case("ConstantOfShape", [ints()], lambda _: torch.zeros(()), known=[0]),
    Case("ConstantOfShape", [ints(0, 3)], lambda _: torch.zeros(0, 3), known=[0]),
    *(Case("ConstantOfShape", [ints(2, 3)], lambda _, dtype=dtype: torch.ones(2, 3, dtype=dtype),
     value(torch.ones(1, dtype=dtype)), known=[0], note=str(dtype)) for dtype in DTYPES),
    Case("ConstantOfShape", [ints(2)], lambda _: torch.full((2, ), -0.375, dtype=torch.bfloat16),
        value(torch.tensor([-0.375], dtype=torch.bfloat16)), known=[0], opset=20, note="bf16"),
    *(Case("ConstantOfShape", [ints(2)], lambda _, n=number: torch.full((2, ), n,
     dtype=torch.float16), value(torch.tensor([number], dtype=torch.float16)), known=[0],
     note=f"half {number}") for number in (65504.0, 2.0**-24, -float("inf"), 1.5 * 2.0**-14,
     float("nan"))),
    Case("Range", [scalar(0), scalar(5), scalar(1)], lambda *_: torch.arange(5), known=[0, 1, 2]),
    Case("Range", [scalar(7), scalar(0), scalar(-3)], lambda *_: torch.arange(7, 0, -3),
        known=[0, 1, 2]),
    Case("Range", [scalar(5), scalar(0), scalar(1)], lambda *_: ints(), known=[0, 1, 2],
        note="empty"),
    Case("Range", [scalar(n, torch.float32) for n in (0.5, 3.0, 0.5)],
        lambda *_: torch.arange(0.5, 3.0, 0.5), known=[0, 1, 2], half=False),
    Case("Constant", [], lambda: floats(2, 3), value(floats(2, 3))),
    Case("Constant", [], lambda: torch.tensor(3), {"value_int": 3}),
    Case("Constant", [], lambda: torch.tensor(0.5), {"value_float": 0.5}),
    Case("Constant", [], lambda: ints(1, 2), {"value_ints": [1, 2]}),
    Case("Constant", [], lambda: torch.tensor([0.5, 1.5]), {"value_floats": [0.5, 1.5]}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case} {case.attrs.keys()}")
def test_case(case: Case) -> None:
    check(case)


def test_range_without_a_step_is_an_error() -> None:
    case = Case("Range", [scalar(0), scalar(5), scalar(0)], None, known=[0, 1, 2])
    with pytest.raises(torch_ort.UserError, match="Range: delta: got 0"):
        run(case)


def test_constant_without_numbers_is_unsupported() -> None:
    case = Case("Constant", [], None, {"value_strings": ["a"]})
    with pytest.raises(torch_ort.Unsupported, match="holds no dense tensor of numbers"):
        run(case)


def test_value_of_several_elements_is_an_error() -> None:
    pair = onnx.helper.make_tensor("value", onnx.TensorProto.FLOAT, [2], [1.0, 2.0])
    case = Case("ConstantOfShape", [ints(2)], None, {"value": pair}, known=[0])
    with pytest.raises(torch_ort.UserError, match="want one element"):
        run(case)
