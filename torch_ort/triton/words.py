"""The point-wise words of regions (csrc/ops/words.h) as functions of Triton.

Numbers are float32, or float64 in regions of doubles. A bfloat16 is read and written as its bits,
since Triton's interpreter cuts off what does not fit one, where a GPU rounds to the nearest, and
reads those that are not normal as zeros.
"""

# ruff: noqa: D103 - most are the words that their names say
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def of_bfloat16(bits):
    return (bits.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def bfloat16_bits(x):
    """Of the nearest one, and of the even one of two."""
    bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, near).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def rounded_to_bfloat16(x):
    """Still in the dtype of `x`."""
    return of_bfloat16(bfloat16_bits(x)).to(x.dtype)


@triton.jit
def rounded_to_half(x):
    return x.to(tl.float32).to(tl.float16).to(x.dtype)


@triton.jit
def quotient(x, y):
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)


@triton.jit
def reciprocal(x):
    return quotient(tl.zeros_like(x) + 1.0, x)


@triton.jit
def root(x):
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def log1p(x):
    """By Kahan: a ratio of differences makes up for the rounding of 1 + x."""
    near = 1.0 + x
    rest = near - 1.0
    bent = tl.log(near) * quotient(x, tl.where(rest == 0, 1.0, rest))
    return tl.where(rest == 0, x, tl.where(rest == x, tl.log(near), bent))


@triton.jit
def larger(x, y):
    """NaN stays NaN."""
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def smaller(x, y):
    return tl.where((x < y) | (x != x), x, y)


@triton.jit
def tanh(x):
    """Near zero by the series, since 1 - exp(-2 |x|) would cancel."""
    size = tl.abs(x)
    power = tl.exp(-2.0 * size)
    far = quotient(1.0 - power, 1.0 + power)
    s = x * x
    series = 21844.0 / 6081075.0 + s * (-929569.0 / 638512875.0)
    series = -1382.0 / 155925.0 + s * series
    series = 62.0 / 2835.0 + s * series
    series = -17.0 / 315.0 + s * series
    series = 2.0 / 15.0 + s * series
    series = -1.0 / 3.0 + s * series
    near = x * (1.0 + s * series)
    return tl.where(size < 0.1, near, tl.where(x < 0, far * -1.0, far))


@triton.jit
def nearest(x):
    """To the even one of two."""
    low = tl.floor(x)
    rest = x - low
    is_odd = low - 2.0 * tl.floor(low * 0.5) != 0
    up = (rest > 0.5) | ((rest == 0.5) & is_odd)
    made = tl.where(up, low + 1.0, low)
    # What is not finite is itself; a zero keeps its sign.
    return tl.where((rest == 0) | (rest != rest), x, tl.where(made == 0, x * 0.0, made))


@triton.jit
def whole(x):
    made = tl.where(x < 0, tl.ceil(x), tl.floor(x))
    return tl.where(made == 0, x * 0.0, made)


@triton.jit
def power(x, y):
    """X to the y, with the signs and infinities of C."""
    size = tl.abs(x)
    made = tl.exp(y * tl.log(size))
    is_whole = y == tl.floor(y)
    is_odd = is_whole & (tl.abs(y) != float("inf")) & (y - 2.0 * tl.floor(y * 0.5) != 0)
    made = tl.where((x < 0) & is_odd, made * -1.0, made)
    made = tl.where((x < 0) & (size != float("inf")) & ~is_whole, float("nan"), made)
    of_zero = tl.where(y < 0, float("inf"), tl.where(y != y, y, 0.0))
    made = tl.where(x == 0, tl.where(is_odd, quotient_of_sign(x, of_zero), of_zero), made)
    made = tl.where((size == 1) & (tl.abs(y) == float("inf")), 1.0, made)
    return tl.where((y == 0) | (x == 1), 1.0, made)


@triton.jit
def quotient_of_sign(x, size):
    """`size` with the sign of a zero."""
    is_negative = reciprocal(x) < 0
    return tl.where(is_negative, size * -1.0, size)


@triton.jit
def sigmoid(x):
    return reciprocal(1.0 + tl.exp(-x))


@triton.jit
def normal_cdf(x):
    return 0.5 * (1.0 + tl.erf(x * 0.70710678118654752440))


@triton.jit
def gelu_tanh_inner(x):
    return 0.79788456080286535588 * (x + 0.044715 * x * x * x)


@triton.jit
def gelu_grad(gradient, x):
    density = 0.39894228040143267794 * tl.exp(-0.5 * x * x)
    return gradient * (normal_cdf(x) + x * density)


@triton.jit
def gelu_tanh_grad(gradient, x):
    of_tanh = tanh(gelu_tanh_inner(x))
    slope = 0.79788456080286535588 * (1.0 + 3 * 0.044715 * x * x)
    return gradient * (0.5 * (1.0 + of_tanh) + 0.5 * x * (1.0 - of_tanh * of_tanh) * slope)


@triton.jit
def silu(x):
    return quotient(x, 1.0 + tl.exp(-x))


@triton.jit
def silu_grad(gradient, x):
    of_sigmoid = sigmoid(x)
    return gradient * of_sigmoid * (1.0 + x * (1.0 - of_sigmoid))


@triton.jit
def hard_swish_grad(gradient, x):
    """Where x is NaN the gradient passes, as in PyTorch."""
    curved = tl.where(x < 3, gradient * (x * (1.0 / 3.0) + 0.5), gradient)
    return tl.where(x <= -3, 0.0, curved)


@triton.jit
def largest(x):
    """Of each row; NaN if there is one."""
    has_nan = tl.max((x != x).to(tl.int32), 1, keep_dims=True) > 0
    return tl.where(has_nan, float("nan"), tl.max(x, 1, keep_dims=True))


@triton.jit
def smallest(x):
    has_nan = tl.max((x != x).to(tl.int32), 1, keep_dims=True) > 0
    return tl.where(has_nan, float("nan"), tl.min(x, 1, keep_dims=True))


@triton.jit
def drawn(seed, stream, element, limit):
    """1 where the random number of an element is below the limit (Philox 4x32, 10 rounds)."""
    counter = element // 4
    at = element % 4
    low, high = counter & 0xFFFFFFFF, counter >> 32
    of_stream = (counter * 0 + stream).to(tl.uint32)
    x0, x1, x2, x3 = tl.philox(
        seed, low.to(tl.uint32), high.to(tl.uint32), of_stream, of_stream * 0
    )
    return tl.where(at == 0, x0, tl.where(at == 1, x1, tl.where(at == 2, x2, x3))) < limit
