"""Rows of matrix products."""

from __future__ import annotations

import torch
from conversion import NEWEST, check, floats

A, B, BIAS = floats(4, 3), floats(3, 5), floats(5)


def test_products() -> None:
    check(torch.mm, A, B, ops=["MatMul"])
    check(torch.mm, A, B, ops=["MatMul"], dynamic=True, pins=(NEWEST,))
    check(torch.bmm, floats(2, 4, 3), floats(2, 3, 5), ops=["MatMul"])
    check(torch.mv, A, floats(3), ops=["MatMul"])
    check(torch.dot, floats(3), floats(3), ops=["MatMul"])
    check(torch.mm, floats(0, 3), B, ops=["MatMul"])
    check(torch.mm, A.bfloat16(), B.bfloat16(), ops={12: ["aten::mm"], 14: ["MatMul"]})


def test_addmm() -> None:
    check(lambda b, x, w: torch.addmm(b, x, w), BIAS, A, B, ops=["Gemm"])
    check(lambda b, x, w: torch.addmm(b, x, w), floats(4, 1), A, B, ops=["Gemm"])
    check(lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2), BIAS, A, B, ops=["Gemm"])
    check(lambda b, x, w: torch.addmm(b, x, w), BIAS, A, B, ops=["Gemm"], dynamic=True)
    nothing = BIAS * torch.nan
    no_bias = ["aten::addmm"]
    check(lambda b, x, w: torch.addmm(b, x, w, beta=0), nothing, A, B, ops=no_bias, pins=(20,))


def test_linear() -> None:
    function = torch.nn.functional.linear
    check(function, A, floats(5, 3), BIAS, ops=["Transpose", "Gemm"])
    ops = ["Transpose", "Reshape", "Gemm", "Reshape"]
    check(function, floats(2, 4, 3), floats(5, 3), BIAS, ops=ops)
