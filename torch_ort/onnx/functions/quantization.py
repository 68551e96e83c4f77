"""Operators of quantized files.

Rounding to integers has a gradient of 1 between the bounds of the dtype and of 0 beyond, so that a
file can be trained on: QuantizeLinear gives numbers of the integer dtype, which carry no gradients,
so a QuantizeLinear whose result DequantizeLinear alone reads is computed with it (`fake_quantize`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_ort.onnx.functions.elementwise import cast_to
from torch_ort.onnx.functions.table import dtype_of, of_onnx
from torch_ort.onnx.functions.windows import convolved


def along(values: Tensor, x: Tensor, axis: int, block_size: int = 0) -> Tensor:
    """Give scales or zero points so that they broadcast against x: per tensor, axis or block."""
    if values.numel() == 1 and not block_size:
        return values.reshape(())
    if block_size:
        repeated = values.repeat_interleave(block_size, axis)
        return repeated.narrow(axis, 0, x.shape[axis])
    return values.view(*[-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])


def bounds(dtype: torch.dtype) -> tuple[int, int]:
    """Give the least and the greatest integer of a dtype."""
    info = torch.iinfo(dtype)
    return info.min, info.max


@of_onnx("QuantizeLinear")
def quantize_linear(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int = 1,
    block_size: int = 0, output_dtype: int = 0, precision: int = 0, saturate: int = 1,
) -> Tensor:  # fmt: skip
    """Give round(x / scale) + zero point within the bounds of the dtype; halves to even."""
    if zero_point is not None:
        dtype = zero_point.dtype
    else:
        dtype = dtype_of(output_dtype) if output_dtype else torch.uint8
    computed = dtype_of(precision) if precision else scale.dtype
    quotient = x.to(computed) / along(scale, x, axis, block_size).to(computed)
    if dtype.is_floating_point:
        return cast_to(quotient, dtype, bool(saturate))
    least, greatest = bounds(dtype)
    rounded = quotient.round()
    if rounded.dtype.itemsize < 4:  # halves lack most integers of 16 bits
        rounded = rounded.float()
    if zero_point is not None:
        rounded = rounded + along(zero_point, x, axis, block_size).to(rounded.dtype)
    return rounded.clamp(least, greatest).to(dtype)


@of_onnx("DequantizeLinear")
def dequantize_linear(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int = 1,
    block_size: int = 0, output_dtype: int = 0,
) -> Tensor:  # fmt: skip
    """Give (x - zero point) · scale in the dtype of the scale."""
    dtype = dtype_of(output_dtype) if output_dtype else scale.dtype
    wide = x.to(torch.int32) if not x.is_floating_point() else x.to(scale.dtype)
    if zero_point is not None:
        wide = wide - along(zero_point, x, axis, block_size).to(wide.dtype)
    return (wide.to(scale.dtype) * along(scale, x, axis, block_size)).to(dtype)


@of_onnx("FakeQuantize", domain="torch_ort")
def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, *, axis: int = 1, block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:  # fmt: skip
    """Quantize and dequantize x; its gradient passes through the rounding.

    The gradient is that of x between the bounds of the zero point's dtype, and 0 beyond.
    """
    step = along(scale, x, axis, block_size)
    # The quotient has the digits of its dtype, as ONNX says; integers of 16 bits need more.
    quotient = (x / step).float() if x.dtype.itemsize < 4 else x / step
    shift = along(zero_point, x, axis, block_size).to(quotient.dtype)
    least, greatest = bounds(zero_point.dtype)
    exact = (quotient + shift).clamp(least, greatest)
    rounded = exact + (quotient.round() + shift).clamp(least, greatest).sub(exact).detach()
    result = (rounded - shift).to(step.dtype) * step
    return result.to(dtype_of(output_dtype)) if output_dtype else result


@of_onnx("DynamicQuantizeLinear")
def dynamic_quantize_linear(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize to uint8 by the range of x and 0; gives scale and zero point, too.

    The scale of zeros alone is 1, as onnxruntime has it.
    """
    least, greatest = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = (greatest - least) / 255
    scale = torch.where(scale == 0, 1, scale)
    zero_point = (-least / scale).round().clamp(0, 255)
    quantized = ((x / scale).round() + zero_point).clamp(0, 255).to(torch.uint8)
    return quantized, scale, zero_point.to(torch.uint8)


def _integers(x: Tensor, zero_point: Tensor | None, axis: int) -> Tensor:
    wide = x.to(torch.int32)
    if zero_point is None:
        return wide
    if zero_point.ndim == 1 and zero_point.numel() > 1:
        zero_point = zero_point.view(*[-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])
    return wide - (zero_point.reshape(()) if zero_point.numel() == 1 else zero_point).to(
        torch.int32
    )


@of_onnx("MatMulInteger")
def matmul_integer(
    a: Tensor, b: Tensor, a_zero_point: Tensor | None = None, b_zero_point: Tensor | None = None
) -> Tensor:
    """Multiply matrices of 8-bit integers, less their zero points, in int32."""
    return _integers(a, a_zero_point, -2) @ _integers(b, b_zero_point, -1)


def _convolved(
    x: Tensor, w: Tensor, dilations: Sequence[int], group: int, pads: Sequence[int],
    strides: Sequence[int], auto_pad: str,
) -> Tensor:  # fmt: skip
    """Convolve integers of up to 9 bits in float64, where products and sums of them are exact."""
    return convolved(
        x.double(), w.double(), None, dilations, group, pads, strides, auto_pad
    ).to(torch.int32)  # fmt: skip


@of_onnx("ConvInteger")
def conv_integer(
    x: Tensor, w: Tensor, x_zero_point: Tensor | None = None, w_zero_point: Tensor | None = None, *,
    auto_pad: str = "NOTSET", dilations: Sequence[int] = (), group: int = 1,
    kernel_shape: Sequence[int] = (), pads: Sequence[int] = (), strides: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Convolve 8-bit integers, less their zero points, in int32."""
    return _convolved(
        _integers(x, x_zero_point, 1), _integers(w, w_zero_point, 0), dilations, group, pads,
        strides, auto_pad,
    )  # fmt: skip


@of_onnx("QLinearMatMul")
def qlinear_matmul(
    a: Tensor, a_scale: Tensor, a_zero_point: Tensor, b: Tensor, b_scale: Tensor,
    b_zero_point: Tensor, y_scale: Tensor, y_zero_point: Tensor,
) -> Tensor:  # fmt: skip
    """Multiply quantized matrices, and quantize the product."""
    product = matmul_integer(a, b, a_zero_point, b_zero_point).to(a_scale.dtype)
    return quantize_linear(product * (a_scale * b_scale), y_scale, y_zero_point)


@of_onnx("QLinearConv")
def qlinear_conv(
    x: Tensor, x_scale: Tensor, x_zero_point: Tensor, w: Tensor, w_scale: Tensor,
    w_zero_point: Tensor, y_scale: Tensor, y_zero_point: Tensor, bias: Tensor | None = None, *,
    auto_pad: str = "NOTSET", dilations: Sequence[int] = (), group: int = 1,
    kernel_shape: Sequence[int] = (), pads: Sequence[int] = (), strides: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Convolve quantized images, and quantize the result; the bias is int32."""
    total = _convolved(
        _integers(x, x_zero_point, 1), _integers(w, w_zero_point, 0), dilations, group, pads,
        strides, auto_pad,
    )  # fmt: skip
    if bias is not None:
        total = total + bias.view(-1, *[1] * (x.ndim - 2))
    scale = x_scale * w_scale
    if scale.numel() > 1:
        scale = scale.view(-1, *[1] * (x.ndim - 2))
    return quantize_linear(total.to(x_scale.dtype) * scale, y_scale, y_zero_point)
