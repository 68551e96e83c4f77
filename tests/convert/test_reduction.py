"""Rows of reductions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conversion import NEWEST, check, floats

X = floats(2, 3, 4)
COUNTS = torch.tensor([[1, -2, 7], [0, 5, -9]])

TOTALS = [
    (torch.sum, "ReduceSum"),
    (torch.mean, "ReduceMean"),
    (torch.max, "ReduceMax"),
    (torch.min, "ReduceMin"),
    (torch.prod, "ReduceProd"),
]
PARTIAL = [
    (lambda x: x.sum(1), "ReduceSum"),
    (lambda x: x.sum((0, -1), keepdim=True), "ReduceSum"),
    (lambda x: x.mean(-1), "ReduceMean"),
    (lambda x: x.mean((-2, -1), keepdim=True), "ReduceMean"),
    (lambda x: x.amax(0), "ReduceMax"),
    (lambda x: x.amin((0, 2)), "ReduceMin"),
    (lambda x: x.amax(), "ReduceMax"),
    (lambda x: x.prod(1), "ReduceProd"),
    (lambda x: x.logsumexp(-1), "ReduceLogSumExp"),
    (lambda x: torch.linalg.vector_norm(x, 2, -1), "ReduceL2"),
    (lambda x: torch.linalg.vector_norm(x, 1, 0, True), "ReduceL1"),
]


@pytest.mark.parametrize(("function", "op"), TOTALS, ids=[op for _, op in TOTALS])
def test_total(function: Callable, op: str) -> None:
    check(function, X, ops=[op])
    check(function, X, ops=[op], dynamic=True, pins=(NEWEST,))
    check(function, torch.tensor(3.0), ops=[op])


@pytest.mark.parametrize(("function", "op"), PARTIAL, ids=range(len(PARTIAL)))
def test_along_axes(function: Callable, op: str) -> None:
    # In older opsets axes are an attribute.
    check(function, X, ops=[op])
    check(function, X, ops=[op], dynamic=True, pins=(NEWEST,))
    check(function, X.bfloat16(), ops=[op], pins=(NEWEST,))


def test_integers() -> None:
    check(lambda x: x.sum(1), COUNTS, ops=["ReduceSum"], pins=(14, 20))
    # The sum of narrow integers is wide here, and narrow in ONNX.
    check(lambda x: x.sum(1), COUNTS.int(), ops=["aten::sum"], pins=(20,))
    check(lambda x: x.sum(), COUNTS > 0, ops=["aten::sum"], pins=(20,))
    check(lambda x: x.amax(1), COUNTS, ops=["ReduceMax"], pins=(20,))
    check(lambda x: x.amax(1), COUNTS > 0, ops=["ReduceMax"], pins=(20,))


def test_other_dtype_of_the_result() -> None:
    double = torch.float64
    check(lambda x: x.sum(1, dtype=double), X, ops=["Cast", "ReduceSum"])
    check(lambda x: x.mean(dtype=double), X, ops=["Cast", "ReduceMean"])
    check(lambda x: x.sum(1, dtype=torch.float32), X.double(), ops=["aten::sum"], pins=(20,))


def test_places() -> None:
    check(lambda x: x.argmax(-1), X, ops=["ArgMax"])
    check(lambda x: x.argmin(0, keepdim=True), X, ops=["ArgMin"])
    check(lambda x: x.argmax(), X, ops=["aten::argmax"], pins=(20,))
    check(lambda x: x.max(1).indices, X, ops=["aten::max"], pins=(20,))


def test_cumsum() -> None:
    check(lambda x: x.cumsum(-1), X, ops=["CumSum"])
    check(lambda x: x.cumsum(0), COUNTS, ops=["CumSum"])
    check(lambda x: x.cumsum(0), COUNTS > 0, ops=["aten::cumsum"], pins=(20,))
    check(lambda x: x.cumsum(1), X, ops=["CumSum"], dynamic=True, pins=(NEWEST,))


def test_norm_of_all() -> None:
    ops = {12: ["ReduceL2"]}
    check(lambda x: torch.linalg.vector_norm(x), X, ops=ops)
    infinity = ["aten::linalg_vector_norm"]
    check(lambda x: torch.linalg.vector_norm(x, float("inf")), X, ops=infinity, pins=(20,))
