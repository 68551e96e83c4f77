"""Products: Einstein sums, and those of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_ort import _C
from torch_ort.onnx.functions.table import MICROSOFT, of_onnx


@of_onnx("Einsum")
def einsum(*inputs: Tensor, equation: str) -> Tensor:
    """Sum products of elements over the indices that the result lacks."""
    return torch.einsum(equation, *inputs).to(inputs[0].dtype)  # sums of integers are int64


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


# Activations of FusedGemm by name, and which of alpha, beta and gamma they take. They have no
# defaults there.
_ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "Relu": (F.relu, ()),
    "Tanh": (torch.tanh, ()),
    "Sigmoid": (torch.sigmoid, ()),
    "Softplus": (F.softplus, ()),
    "Softsign": (F.softsign, ()),
    "LeakyRelu": (F.leaky_relu, ("alpha",)),
    "Elu": (F.elu, ("alpha",)),
    "Celu": (F.celu, ("alpha",)),
    "ThresholdedRelu": (lambda x, alpha: F.threshold(x, alpha, 0.0), ("alpha",)),
    "HardSigmoid": (lambda x, alpha, beta: (alpha * x + beta).clamp(0, 1), ("alpha", "beta")),
    "ScaledTanh": (lambda x, alpha, beta: alpha * torch.tanh(beta * x), ("alpha", "beta")),
    "ParametricSoftplus": (lambda x, alpha, beta: alpha * F.softplus(beta * x), ("alpha", "beta")),
    "Selu": (lambda x, alpha, gamma: gamma * F.elu(x, alpha), ("alpha", "gamma")),
}


@of_onnx("FusedGemm", domain=MICROSOFT)
def fused_gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0,
    transA: int = 0, transB: int = 0, activation: str = "", activation_alpha: float | None = None,
    activation_beta: float | None = None, activation_gamma: float | None = None,
) -> Tensor:  # fmt: skip
    """Gemm and an activation."""
    result = alpha * (_transposed(a, transA, 0) @ _transposed(b, transB, 0))
    if c is not None:
        result = result + beta * c
    if not activation:
        return result
    if activation not in _ACTIVATIONS:
        raise _C.Unsupported(
            f"FusedGemm: activation: got {activation}, want one of {', '.join(_ACTIVATIONS)}"
        )
    function, names = _ACTIVATIONS[activation]
    given = {"alpha": activation_alpha, "beta": activation_beta, "gamma": activation_gamma}
    missing = [f"activation_{name}" for name in names if given[name] is None]
    if missing:
        raise _C.UserError(f"FusedGemm: {activation}: got no {', '.join(missing)}")
    return function(result, *(given[name] for name in names))
