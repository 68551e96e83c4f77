"""Matrix products."""

from __future__ import annotations

import pytest
import torch
from driver import Case, check, floats, ints, run, with_half

import torch_ort

A, B, C = floats(4, 3), floats(3, 5), floats(4, 5)


X, Y, Z = floats(2, 4, 3), floats(2, 3, 5), floats(2, 4, 5)


def gemm(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return torch.addmm(c, a, b)


def of_batches(inputs: list[torch.Tensor | None], eager=None, **settings) -> Case:
    return Case("MatMulAdd", inputs, eager, domain="torch_ort", reference=False, **settings)


CASES = [
    Case("MatMul", [A, B], torch.mm, dims={0: ["N", 3], 1: [3, "M"]}),
    Case("MatMul", [floats(1, 1), floats(1, 1)], torch.mm),
    Case("MatMul", [floats(0, 3), B], torch.mm, note="empty"),
    Case("MatMul", [floats(4, 0), floats(0, 5)], torch.mm, note="no depth"),
    Case("MatMul", [A, floats(3)], torch.mv, dims={0: ["N", 3]}),
    Case("MatMul", [floats(3), floats(3)], torch.dot),
    Case("MatMul", [floats(3), B], torch.matmul, dims={1: [3, "M"]}),
    Case("MatMul", [floats(2, 4, 3), floats(2, 3, 5)], torch.bmm, dims={0: ["N", 4, 3]}),
    Case("MatMul", [floats(2, 4, 3), B], torch.matmul, dims={0: ["N", "T", 3]}),
    Case("MatMul", [floats(2, 2, 4, 3), floats(2, 2, 3, 5)], torch.matmul,
        dims={0: ["N", 2, "T", 3], 1: ["N", 2, 3, 5]}),
    Case("MatMul", [floats(2, 1, 4, 3), floats(5, 3, 2)], torch.matmul),
    Case("MatMul", [floats(2, 4, 3), floats(3)], torch.matmul),
    Case("MatMul", [ints(1, 2).reshape(1, 2), ints(3, 4).reshape(2, 1)], torch.mm),
    Case("MatMul", [A.double(), B.double()], torch.mm),
    Case("Gemm", [A, B, C], gemm, dims={0: ["N", 3], 2: ["N", 5]}),
    *(Case("Gemm", [A, B, floats(*shape)], gemm) for shape in [(5,), (1, 5), (4, 1), ()]),
    Case("Gemm", [A, B], torch.mm),
    Case("Gemm", [A, B], lambda a, b: (a @ b) * 0.5, {"alpha": 0.5}),
    Case("Gemm", [A, B, C], lambda a, b, c: torch.addmm(c, a, b, beta=0.25, alpha=0.5),
        {"alpha": 0.5, "beta": 0.25}),
    Case("Gemm", [A.t().contiguous(), B, C], lambda a, b, c: torch.addmm(c, a.t(), b),
        {"transA": 1}),
    Case("Gemm", [A, B.t().contiguous(), floats(5)], lambda a, b, c: torch.addmm(c, a, b.t()),
        {"transB": 1}, dims={0: ["N", 3]}),
    of_batches([X, Y, Z], lambda a, b, c: torch.baddbmm(c, a, b), dims={0: ["N", 4, 3]}),
    of_batches([X, Y], torch.bmm, dims={1: ["N", 3, "M"]}),
    of_batches([X, Y, None], torch.bmm, note="no start"),
    of_batches([X[:0], Y[:0], Z[:0]], lambda a, b, c: torch.baddbmm(c, a, b), note="empty"),
]  # fmt: skip


@pytest.mark.parametrize("case", with_half(CASES), ids=str)
def test_case(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("MatMul", [A, A], None), "MatMul: dims differ: got 4, want 3"),
        (Case("MatMul", [A, torch.tensor(1.0)], None), "without dims"),
        (Case("MatMul", [A, B.double()], None), "dtype of input 1: got float64, want float32"),
        (Case("Gemm", [A, floats(3)], None), r"got \[4,3\] and \[3\], want two matrices"),
        (of_batches([A, B]), r"MatMulAdd: input 0: got \[4,3\], want batches of matrices"),
        (of_batches([X, Y[:1]]), "MatMulAdd: dims differ: got 1, want 2"),
        (of_batches([X, Y, Z[:, :1]]), "MatMulAdd: dims differ: got 1, want 4"),
        (of_batches([X, Y, Z.double()]), "dtype of input 2: got float64, want float32"),
    ],
)
def test_wrong_node_is_an_error(case: Case, message: str) -> None:
    with pytest.raises(torch_ort.UserError, match=message):
        run(case)
