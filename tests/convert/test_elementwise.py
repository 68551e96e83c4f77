"""Rows of element-wise calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conversion import NEWEST, check, convert, floats, ops_of

X, Y = floats(2, 3), floats(3)
POSITIVE = X.abs() + 0.5
COUNTS = torch.tensor([[1, -2, 7], [0, 5, -9]])
BOOLS = torch.tensor([[True, False, True], [False, False, True]])

UNARY = [
    (torch.abs, X, "Abs"),
    (torch.acos, torch.tanh(X), "Acos"),
    (torch.asinh, X, "Asinh"),
    (torch.ceil, X, "Ceil"),
    (torch.cos, X, "Cos"),
    (torch.erf, X, "Erf"),
    (torch.exp, X, "Exp"),
    (torch.floor, X, "Floor"),
    (torch.isinf, X / 0, "IsInf"),
    (torch.isnan, X, "IsNaN"),
    (torch.log, POSITIVE, "Log"),
    (torch.neg, X, "Neg"),
    (torch.reciprocal, POSITIVE, "Reciprocal"),
    (torch.relu, X, "Relu"),
    (torch.round, X * 3, "Round"),
    (torch.sigmoid, X, "Sigmoid"),
    (torch.sign, X, "Sign"),
    (torch.sin, X, "Sin"),
    (torch.sqrt, POSITIVE, "Sqrt"),
    (torch.tanh, X, "Tanh"),
    (torch.neg, COUNTS, "Neg"),
    (torch.abs, COUNTS, "Abs"),
    (torch.logical_not, BOOLS, "Not"),
    (torch.bitwise_not, BOOLS, "Not"),
]


@pytest.mark.parametrize(("function", "x", "op"), UNARY, ids=lambda value: str(value)[:20])
def test_unary(function: Callable, x: torch.Tensor, op: str) -> None:
    check(function, x, ops=[op])
    check(function, x, ops=[op], dynamic=True, pins=(NEWEST,))


BINARY = [
    (lambda x, y: x + y, "Add"),
    (lambda x, y: x - y, "Sub"),
    (lambda x, y: x * y, "Mul"),
    (lambda x, y: x / y, "Div"),
    (lambda x, y: x.abs() ** y, "Pow"),
    (torch.maximum, "Max"),
    (torch.minimum, "Min"),
    (lambda x, y: x == y, "Equal"),
    (lambda x, y: x < y, "Less"),
    (lambda x, y: x <= y, "LessOrEqual"),
    (lambda x, y: x > y, "Greater"),
    (lambda x, y: x >= y, "GreaterOrEqual"),
]


@pytest.mark.parametrize(("function", "op"), BINARY, ids=[op for _, op in BINARY])
def test_binary(function: Callable, op: str) -> None:
    ops = ["Abs", op] if op == "Pow" else [op]
    check(function, X, Y, ops=ops)
    check(function, X, Y, ops=ops, dynamic=True, pins=(NEWEST,))
    # No op takes bfloat16 there.
    names = ops_of(convert(function, X.bfloat16(), Y.bfloat16(), opset=12))
    assert all(name.startswith("aten::") for name in names)


NUMBERS = [
    (lambda x: x + 1.5, ["Add"]),
    (lambda x: x - 2, ["Sub"]),
    (lambda x: 1 - x, ["Sub"]),
    (lambda x: x * 0.1, ["Mul"]),
    (lambda x: x / 3, ["Div"]),
    (lambda x: 1 / x, ["Reciprocal", "Mul"]),
    (lambda x: x**2, ["Pow"]),
    (lambda x: 2**x, ["Pow"]),
    (lambda x: x > 0, ["Greater"]),
    (lambda x: x == 0.1, ["Equal"]),
    (lambda x: x != 0, ["Equal", "Not"]),
    (lambda x: torch.fmod(x, 0.5), ["Mod"]),
]


@pytest.mark.parametrize(("function", "ops"), NUMBERS, ids=range(len(NUMBERS)))
def test_numbers(function: Callable, ops: list[str]) -> None:
    check(function, X, ops=ops)


def test_numbers_that_the_dtype_does_not_hold_stay_numbers() -> None:
    half = X.bfloat16()
    check(lambda x: x * 0.1, half, ops=["aten::mul"], pins=(20,))
    check(lambda x: x * 0.5, half, ops=["Mul"], pins=(14, 20))
    check(lambda x: x > 0.5, COUNTS, ops=["aten::gt"], pins=(20,))


WIDENED = [
    (lambda x, y: x + y, X.bfloat16(), ["Cast", "Add"]),
    (lambda x, y: y - x, X.half(), ["Cast", "Sub"]),
    (lambda x, y: x * y, X.double(), ["Cast", "Mul"]),
    (lambda x, y: x / y, X > 0, ["Cast", "Div"]),
    (lambda x, y: x**y, X > 0, ["Cast", "Pow"]),
    (torch.maximum, X[0, 0].bfloat16(), ["Cast", "Max"]),
    (lambda x, y: x < y, X.bfloat16(), ["Cast", "Less"]),
    (lambda x, y: x != y, X > 0, ["Cast", "Equal", "Not"]),
    (lambda x, y: torch.where(x > 0, x, y), X.bfloat16(), ["Greater", "Cast", "Where"]),
    (lambda x, y: x.masked_fill(x > 0, y), X[0, 0].half(), ["Greater", "Cast", "Where"]),
]


@pytest.mark.parametrize(("function", "other", "ops"), WIDENED, ids=range(len(WIDENED)))
def test_a_narrow_operand_is_cast(function: Callable, other: torch.Tensor, ops: list[str]) -> None:
    check(function, X, other, ops=ops, pins=(20,))


def test_other_mixed_dtypes_stay_as_they_are() -> None:
    check(lambda x, y: x + y, X, COUNTS, ops=["aten::add"], pins=(20,))
    check(lambda x, y: x + y, X.half(), X.bfloat16(), ops=["aten::add"], pins=(20,))
    # Without dims, the wider one does not decide.
    half, number = X.bfloat16(), X[0, 0].clone()
    check(lambda x, y: x * y, half, number, ops=["aten::mul"], pins=(20,))
    check(lambda x, y: x > y, half, number, ops=["aten::gt"], pins=(20,))
    fill = ["aten::masked_fill"]
    check(lambda x, y: x.masked_fill(x == x, y), half, number, ops=["Equal", *fill], pins=(20,))
    check(
        lambda x, y: x.masked_fill(x == x, y), half[0, 0], number, ops=["Equal", *fill], pins=(20,)
    )
    check(lambda x: x / 2, COUNTS, ops=["aten::div"], pins=(20,))
    check(lambda x: x * 2.5, COUNTS, ops=["aten::mul"], pins=(20,))
    check(lambda x: torch.exp(x), COUNTS, ops=["aten::exp"], pins=(20,))


def test_factors_of_sums_stay_as_they_are() -> None:
    check(lambda x, y: torch.add(x, y, alpha=2), X, Y, ops=["aten::add"], pins=(20,))
    check(lambda x: torch.rsub(x, 1, alpha=2), X, ops=["aten::rsub"], pins=(20,))


def test_integers() -> None:
    check(lambda x: x + 3, COUNTS, ops=["Add"])
    check(lambda x: x % 3, COUNTS, ops=["Mod"])
    check(lambda x: x**2, COUNTS, ops=["Pow"])
    small = COUNTS.to(torch.int8)
    check(lambda x: x + x, small, ops={12: ["aten::add"], 14: ["Add"]})
    bits = {12: ["aten::bitwise_and"], 18: ["BitwiseAnd"]}
    check(lambda x: x & 3, COUNTS, ops=bits)
    check(torch.relu, small, ops={12: ["aten::relu"], 14: ["Relu"]})


def test_bfloat16_needs_newer_opsets() -> None:
    half = X.bfloat16()
    check(torch.exp, half, ops={12: ["aten::exp"], 14: ["Exp"]})
    check(torch.cos, half, ops={12: ["aten::cos"], NEWEST: ["Cos"]})
    check(lambda x: x >= x, half, ops={12: ["aten::ge"], 17: ["GreaterOrEqual"]})


def test_truth_values() -> None:
    for function, op in [
        (torch.logical_and, "And"),
        (torch.logical_or, "Or"),
        (torch.logical_xor, "Xor"),
        (torch.bitwise_and, "And"),
        (torch.bitwise_or, "Or"),
    ]:
        check(function, BOOLS, BOOLS.flip(0).contiguous(), ops=[op])
    check(lambda x: x == 0, BOOLS, ops=["Equal"])
    check(torch.logical_not, X, ops=["aten::logical_not"], pins=(20,))


def test_choices() -> None:
    check(torch.where, BOOLS, X, Y, ops=["Where"])
    check(lambda x, m: x.masked_fill(m, -1e9), X, BOOLS, ops=["Where"])
    check(lambda x, m: x.masked_fill(m, float("-inf")), X, BOOLS[:1], ops=["Where"])
    check(lambda x, m, v: x.masked_fill(m, v), X, BOOLS, torch.tensor(2.0), ops=["Where"])
    check(lambda x: x.clamp(-0.5, 0.5), X, ops=["Clip"])
    check(lambda x: x.clamp(min=0), X, ops=["Clip"])
    check(lambda x: x.clamp(max=0.25), X, ops=["Clip"])
    check(torch.nn.functional.relu6, X * 8, ops=["Clip"])
    check(torch.nn.functional.hardtanh, X, ops=["Clip"])
    check(lambda x: x.clamp(0, 5), COUNTS, ops=["Clip"])


def test_casts() -> None:
    for dtype in (torch.float64, torch.float16, torch.int64, torch.bool):
        check(lambda x, t=dtype: x.to(t), X * 3, ops=["Cast"])
    check(lambda x: x.float(), COUNTS, ops=["Cast"])
    check(lambda x: x.float(), BOOLS, ops=["Cast"])
    check(lambda x: x.bfloat16(), X, ops={12: ["aten::_to_copy"], 14: ["Cast"]}, runtime=False)
    channels_last = floats(2, 3, 4, 4).to(memory_format=torch.channels_last)
    check(lambda x: x.double(), channels_last, ops=["Cast"], runtime=False, pins=(20,))


def test_empty_and_single() -> None:
    check(lambda x: (x + 1).exp(), floats(0, 3), ops=["Add", "Exp"])
    check(lambda x: x * x, torch.tensor(2.0), ops=["Mul"])
