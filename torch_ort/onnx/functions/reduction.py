"""Sums and extremes along axes, and determinants."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ort.onnx.functions.table import of_onnx


def _axes(
    x: Tensor, given: Sequence[int] | None, attribute: Sequence[int], noop_with_empty_axes: int
) -> list[int] | None:
    """Give the axes to reduce; None where the node keeps all."""
    axes = list(given if given is not None else attribute)
    if axes:
        return axes
    return None if noop_with_empty_axes else list(range(x.ndim))


@of_onnx("ReduceSumSquare", numbers=(1,))
def reduce_sum_square(
    x: Tensor, axes_input: Sequence[int] | None = None, *, axes: Sequence[int] = (),
    keepdims: int = 1, noop_with_empty_axes: int = 0,
) -> Tensor:  # fmt: skip
    """Sum squares along axes."""
    chosen = _axes(x, axes_input, axes, noop_with_empty_axes)
    return x.square() if not chosen else x.square().sum(chosen, bool(keepdims)).to(x.dtype)


@of_onnx("ReduceLogSum", numbers=(1,))
def reduce_log_sum(
    x: Tensor, axes_input: Sequence[int] | None = None, *, axes: Sequence[int] = (),
    keepdims: int = 1, noop_with_empty_axes: int = 0,
) -> Tensor:  # fmt: skip
    """Give the logarithm of sums along axes."""
    chosen = _axes(x, axes_input, axes, noop_with_empty_axes)
    return x.log() if not chosen else x.sum(chosen, bool(keepdims)).log()


@of_onnx("Det")
def det(x: Tensor) -> Tensor:
    """Give determinants of matrices (..., n, n)."""
    return torch.linalg.det(x)
