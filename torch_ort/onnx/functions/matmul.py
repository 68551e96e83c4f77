"""Products: Einstein sums, and those of ONNX Runtime."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_ort import _C
from torch_ort.onnx.functions.table import MICROSOFT, of_onnx


@of_onnx("Einsum")
def einsum(*inputs: Tensor, equation: str) -> Tensor:
    """Sum products of elements over the indices that the result lacks."""
    return torch.einsum(equation, *inputs)


def _transposed(x: Tensor, is_transposed: int, has_moved_batch: int) -> Tensor:
    if has_moved_batch:  # the first dim stands before the last one
        x = x.movedim(0, -2)
    return x.transpose(-1, -2) if is_transposed and x.ndim > 1 else x


@of_onnx("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def fused_matmul(
    a: Tensor, b: Tensor, *, alpha: float = 1.0, transA: int = 0, transB: int = 0,
    transBatchA: int = 0, transBatchB: int = 0,
) -> Tensor:  # fmt: skip
    """Alpha times the product of matrices, each transposed if the attributes say so."""
    product = _transposed(a, transA, transBatchA) @ _transposed(b, transB, transBatchB)
    return product if alpha == 1 else alpha * product


@of_onnx("FusedGemm", domain=MICROSOFT)
def fused_gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0,
    transA: int = 0, transB: int = 0, activation: str = "", activation_alpha: float = 0.0,
    activation_beta: float = 0.0, activation_gamma: float = 0.0,
) -> Tensor:  # fmt: skip
    """Gemm and an activation."""
    functions = {
        "": lambda x: x, "Relu": F.relu, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid,
        "LeakyRelu": lambda x: F.leaky_relu(x, activation_alpha),
    }  # fmt: skip
    if activation not in functions:
        raise _C.Unsupported(
            f"FusedGemm: activation: got {activation}, want one of {', '.join(functions)}"
        )
    result = alpha * (_transposed(a, transA, 0) @ _transposed(b, transB, 0))
    return functions[activation](result if c is None else result + beta * c)
