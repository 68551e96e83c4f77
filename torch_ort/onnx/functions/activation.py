"""Operators that bend single numbers, and gates."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_ort.onnx.functions.table import MICROSOFT, of_onnx


@of_onnx("Celu")
def celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """max(0, x) + min(0, alpha (exp(x / alpha) - 1))."""
    return F.celu(x, alpha)


@of_onnx("Shrink")
def shrink(x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    """Move numbers beyond ±lambd towards 0 by the bias; all others become 0."""
    moved = torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, 0))
    return moved.to(x.dtype)


@of_onnx("ThresholdedRelu")
def thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """X where it is above alpha, else 0."""
    return F.threshold(x, alpha, 0.0)


@of_onnx("Hardmax")
def hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """1 at the first maximum along the axis, else 0."""
    return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1)


@of_onnx("SwiGLU")
def swiglu(gate: Tensor, linear: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Multiply gate · sigmoid(alpha · gate) by the linear part."""
    return _swish(gate, alpha) * linear


@of_onnx("QuickGelu", domain=MICROSOFT)
def quick_gelu(x: Tensor, *, alpha: float = 1.702) -> Tensor:
    """X · sigmoid(alpha · x)."""
    return _swish(x, alpha)


def _swish(x: Tensor, alpha: float) -> Tensor:
    return F.silu(x) if alpha == 1 else x * torch.sigmoid(alpha * x)


@of_onnx("Gelu", domain=MICROSOFT)
def gelu(x: Tensor) -> Tensor:
    """X times the normal distribution's share below it."""
    return F.gelu(x)


@of_onnx("BiasGelu", domain=MICROSOFT)
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Gelu of x + bias."""
    return F.gelu(x + bias)


@of_onnx("FastGelu", domain=MICROSOFT)
def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Gelu of x + bias by the hyperbolic tangent."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh")
