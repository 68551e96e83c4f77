"""Rows of tensors made from numbers."""

from __future__ import annotations

import pytest
import torch
from conversion import check, floats

X = floats(4, 6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.zeros(2, 3),
        lambda x: torch.ones(2, 3, dtype=torch.int64),
        lambda x: torch.full((2, 3), -float("inf")),
        lambda x: torch.full((), 2.5),
        lambda x: torch.full((2,), True),
        lambda x: torch.zeros_like(x),
        lambda x: torch.ones_like(x, dtype=torch.float64),
        lambda x: torch.full_like(x, 3),
        lambda x: x.new_zeros(2),
        lambda x: x.new_ones(0, 2),
        lambda x: x.new_full((1,), 0.1),
    ],
)
def test_filled(function) -> None:
    check(function, X, ops=["ConstantOfShape"])


def test_filled_with_symbolic_sizes() -> None:
    check(lambda x: torch.zeros_like(x), X, ops=["ConstantOfShape"], dynamic=True, pins=(20,))
    check(
        lambda x: x.new_full((x.shape[0], 2), 1.5),
        X,
        ops=["ConstantOfShape"],
        dynamic=True,
        pins=(20,),
    )


def test_half_types_take_numbers_that_they_hold() -> None:
    half, brain = X.half(), X.bfloat16()
    check(lambda x: torch.full_like(x, 0.5), half, ops=["ConstantOfShape"])
    check(lambda x: torch.full_like(x, 0.1), half, ops=["aten::full_like"], pins=(20,))
    check(
        lambda x: torch.zeros_like(x), brain, ops={0: ["aten::zeros_like"], 20: ["ConstantOfShape"]}
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.arange(5),
        lambda x: torch.arange(2, 7),
        lambda x: torch.arange(7, 0, -2),
        lambda x: torch.arange(2, 7, dtype=torch.int32),
        lambda x: torch.arange(0),
    ],
)
def test_ranges(function) -> None:
    check(function, X, ops=["Range"])


def test_ranges_that_stay_aten_nodes() -> None:
    check(lambda x: torch.arange(0.0, 1.0, 0.3), X, ops=["aten::arange"], pins=(20,))
    check(lambda x: torch.arange(x.shape[0]), X, ops=["aten::arange"], dynamic=True, pins=(20,))


def test_strided_tensors_stay_aten_nodes() -> None:
    image = floats(2, 3, 4, 5).to(memory_format=torch.channels_last)
    check(lambda x: torch.zeros_like(x), image, ops=["aten::zeros_like"], pins=(20,))
