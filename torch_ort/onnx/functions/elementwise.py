"""Operators on numbers in the same place, and tensors of numbers that are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_ort.onnx.functions.table import any_of, dtype_of, has_attribute, of_onnx


@of_onnx("Sum")
def sum_of(*inputs: Tensor) -> Tensor:
    """Add tensors that broadcast against each other."""
    total = inputs[0]
    for each in inputs[1:]:
        total = total + each
    return total


@of_onnx("Mean")
def mean_of(*inputs: Tensor) -> Tensor:
    """Give the mean of tensors that broadcast against each other."""
    return sum_of(*inputs) / len(inputs)


@of_onnx("CastLike")
def cast_like(x: Tensor, like: Tensor, *, saturate: int = 1, round_mode: str = "up") -> Tensor:
    """X in the dtype of another tensor; what is beyond its numbers is its greatest in 8 bits."""
    return cast_to(x, like.dtype, bool(saturate))


@of_onnx("Cast", when=has_attribute("saturate", 0))
def cast(x: Tensor, *, to: int, saturate: int, round_mode: str = "up") -> Tensor:
    """X in another dtype; what is beyond the numbers of 8 bits is infinite, or none of them."""
    return cast_to(x, dtype_of(to), bool(saturate))


# Beyond this, the nearest number of the dtype would be one that it lacks.
_BEYOND_E4M3FN = 464


def cast_to(x: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    """Cast; `saturate` gives the greatest number of a dtype of 8 bits for what is beyond it."""
    if not (x.is_floating_point() and dtype.is_floating_point and dtype.itemsize == 1):
        return x.to(dtype)
    if saturate:
        greatest = torch.finfo(dtype).max
        x = x.clamp(-greatest, greatest)
    elif dtype == torch.float8_e4m3fn:  # PyTorch gives the greatest number
        x = x.masked_fill(x.abs() > _BEYOND_E4M3FN, math.nan)
    return x.to(dtype)


@of_onnx("BitCast")
def bit_cast(x: Tensor, *, to: int) -> Tensor:
    """Read the bits of x as another dtype of the same size."""
    dtype = dtype_of(to)
    if dtype.itemsize != x.dtype.itemsize:
        raise ValueError(f"to: got {dtype}, want a dtype of {x.dtype.itemsize} bytes")
    return x.view(dtype)


@of_onnx(
    "IsInf", when=any_of(has_attribute("detect_negative", 0), has_attribute("detect_positive", 0))
)
def is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """Tell where x is infinite, of the signs that are asked for."""
    if detect_negative and detect_positive:
        return torch.isinf(x)
    if detect_positive:
        return torch.isposinf(x)
    return torch.isneginf(x) if detect_negative else torch.zeros_like(x, dtype=torch.bool)


@of_onnx("EyeLike")
def eye_like(x: Tensor, *, dtype: int = 0, k: int = 0) -> Tensor:
    """Ones on the k-th diagonal of a matrix of the sizes of x, else zeros."""
    rows, columns = x.shape
    row = torch.arange(rows, device=x.device).unsqueeze(1)
    column = torch.arange(columns, device=x.device)
    return (column - row == k).to(dtype_of(dtype) if dtype else x.dtype)


@of_onnx("Size")
def size(x: Tensor) -> Tensor:
    """The number of elements, int64 without dims."""
    return torch.full((), x.numel(), dtype=torch.int64, device=x.device)


@of_onnx("Dropout", numbers=(1, 2), draws=True, when=has_attribute("seed"))
def dropout(
    x: Tensor, ratio: Sequence[float] | None = None, training_mode: Sequence[bool] | None = None, *,
    seed: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Drop elements if the node trains. PyTorch's generator draws, whatever the node's seed is."""
    share = ratio[0] if ratio else 0.5
    if not (training_mode and training_mode[0]) or share == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    return torch.native_dropout(x, share, True)


@of_onnx("Bernoulli", draws=True)
def bernoulli(x: Tensor, *, dtype: int = 0, seed: float | None = None) -> Tensor:
    """Draw 1 with the probability x, else 0, by PyTorch's generator; there is no seed of a node."""
    return torch.bernoulli(x).to(dtype_of(dtype) if dtype else x.dtype)


@of_onnx("BitShift")
def bit_shift(x: Tensor, by: Tensor, *, direction: str) -> Tensor:
    """Shift the bits of integers left or right, and fill up with zeros, or with a sign's bits."""
    if x.dtype.is_signed:
        return x << by if direction == "LEFT" else x >> by
    if x.dtype == torch.uint8:
        wide = x.to(torch.int64)
        shifted = wide << by.long() if direction == "LEFT" else wide >> by.long()
        return torch.where(by < 8, shifted & 255, 0).to(x.dtype)
    # PyTorch shifts no wider unsigned integers, but signed ones of the same bits.
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    bits = 8 * x.dtype.itemsize
    given, count = x.view(signed[x.dtype]).long(), by.view(signed[x.dtype]).long()
    is_inside = (count >= 0) & (count < bits)
    count = count.clamp(0, bits - 1)
    if direction == "LEFT":
        shifted = given << count
    elif bits < 64:
        shifted = (given & ((1 << bits) - 1)) >> count
    else:  # what the sign has filled up is cleared
        kept = torch.where(count == 0, -1, (1 << (63 - count)) * 2 - 1)
        shifted = (given >> count) & kept
    return torch.where(is_inside, shifted, 0).to(signed[x.dtype]).view(x.dtype)


@of_onnx(
    "CumSum", numbers=(1,), when=any_of(has_attribute("exclusive", 1), has_attribute("reverse", 1))
)
def cum_sum(x: Tensor, axis: Sequence[int], *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Sum along an axis up to each element; `exclusive` leaves the element out."""
    return _cumulated(torch.cumsum, x, axis[0], exclusive, reverse, 0)


@of_onnx("CumProd", numbers=(1,))
def cum_prod(x: Tensor, axis: Sequence[int], *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """Multiply along an axis up to each element; `exclusive` leaves the element out."""
    return _cumulated(torch.cumprod, x, axis[0], exclusive, reverse, 1)


def _cumulated(
    cumulate: Callable, x: Tensor, axis: int, exclusive: int, reverse: int, first: int
) -> Tensor:
    given = x.flip(axis) if reverse else x
    result = cumulate(given, axis, dtype=x.dtype)
    if exclusive and x.shape[axis] > 0:
        start = torch.full_like(result.narrow(axis, 0, 1), first)
        result = torch.cat([start, result.narrow(axis, 0, x.shape[axis] - 1)], axis)
    return result.flip(axis) if reverse else result
