"""Operators of PyTorch that ONNX has not, as functions of those that it has.

`export_onnx` captures a module with these in their place. The results are those of the operators
but for the last bits. What ONNX has under another name is converted in csrc/convert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_IMAGES = 4  # dims of a batch of images

PARTS: dict[Any, Callable[..., Any]] = {}


def _of(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        PARTS.update(dict.fromkeys(operators, function))
        return function

    return add


def _like(x: Tensor, number: float) -> Tensor:
    return torch.full((), number, dtype=x.dtype, device=x.device)


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    """Give a loss of elements, their mean (1) or their sum (2)."""
    return (loss, loss.mean(), loss.sum())[reduction]


# ---- exponentials and logarithms


@_of(aten.log1p.default)
def _log1p(x: Tensor) -> Tensor:
    return (x + 1).log()


@_of(aten.expm1.default)
def _expm1(x: Tensor) -> Tensor:
    return x.exp() - 1


@_of(aten.exp2.default)
def _exp2(x: Tensor) -> Tensor:
    return (x * math.log(2)).exp()


@_of(aten.log2.default)
def _log2(x: Tensor) -> Tensor:
    return x.log() * (1 / math.log(2))


@_of(aten.log10.default)
def _log10(x: Tensor) -> Tensor:
    return x.log() * (1 / math.log(10))


@_of(aten.erfc.default)
def _erfc(x: Tensor) -> Tensor:
    return 1 - x.erf()


@_of(aten.logit.default)
def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    if eps is not None:
        x = x.clamp(eps, 1 - eps)
    return (x / (1 - x)).log()


@_of(aten.xlogy.Tensor)
def _xlogy(x: Tensor, y: Tensor) -> Tensor:
    is_zero = (x == 0) & (y == y)
    return torch.where(is_zero, _like(x, 0), x * y.log())


@_of(aten.logaddexp.default)
def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    largest = torch.maximum(x, y)
    return largest + (1 + (-(x - y).abs()).exp()).log()


@_of(aten.softplus.default)
def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, (scaled.exp() + 1).log() * (1 / beta))


@_of(aten.log_sigmoid_forward.default)
def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    # Clip, which clamp() becomes, turns infinities into the largest finite numbers.
    return torch.minimum(x, _like(x, 0)) - (1 + (-x.abs()).exp()).log(), x.new_zeros(0)


# ---- activations of pieces


@_of(aten.hardshrink.default)
def _hardshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    return torch.where(x.abs() <= lambd, _like(x, 0), x)


@_of(aten.softshrink.default)
def _softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    return x - x.clamp(-lambd, lambd)


@_of(aten.threshold.default)
def _threshold(x: Tensor, threshold: float, value: float) -> Tensor:
    return torch.where(x <= threshold, _like(x, value), x)


@_of(aten.celu.default)
def _celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return x.clamp(min=0) + alpha * ((x.clamp(max=0) * (1 / alpha)).exp() - 1)


@_of(aten.glu.default)
def _glu(x: Tensor, dim: int = -1) -> Tensor:
    value, gate = x.chunk(2, dim)
    return value * gate.sigmoid()


# ---- arithmetic


@_of(aten.trunc.default)
def _trunc(x: Tensor) -> Tensor:
    return x.sign() * x.abs().floor()


@_of(aten.frac.default)
def _frac(x: Tensor) -> Tensor:
    return x - _trunc(x)


@_of(aten.remainder.Scalar, aten.remainder.Tensor)
def _remainder(x: Tensor, divisor: Any) -> Tensor:
    if not x.is_floating_point():
        return NotImplemented
    return x - (x / divisor).floor() * divisor


@_of(aten.floor_divide.default, aten.floor_divide.Scalar)
def _floor_divide(x: Tensor, divisor: Any) -> Tensor:
    if x.is_floating_point():
        return (x / divisor).floor()
    if not isinstance(divisor, Tensor):
        divisor = torch.full((), divisor, dtype=x.dtype, device=x.device)
    return torch.div(x, divisor, rounding_mode="floor")


@_of(aten.round.decimals)
def _round(x: Tensor, *, decimals: int) -> Tensor:
    return (x * 10**decimals).round() / 10**decimals


@_of(aten.sgn.default)
def _sgn(x: Tensor) -> Tensor:
    return NotImplemented if x.is_complex() else x.sign()


@_of(aten.sinc.default)
def _sinc(x: Tensor) -> Tensor:
    angle = x * math.pi
    return torch.where(angle == 0, _like(x, 1), angle.sin() / angle)


@_of(aten.atan2.default)
def _atan2(y: Tensor, x: Tensor) -> Tensor:
    # A quotient of zeros has no angle of its own: it is that of the sign of x alone.
    quotient = torch.where((y == 0) & (x == 0), _like(y, 0), y / x)
    turn = torch.where(y >= 0, _like(y, math.pi), _like(y, -math.pi))
    return quotient.atan() + torch.where(x < 0, turn, _like(y, 0))


@_of(aten.hypot.default)
def _hypot(x: Tensor, y: Tensor) -> Tensor:
    return (x * x + y * y).sqrt()


@_of(aten.heaviside.default)
def _heaviside(x: Tensor, values: Tensor) -> Tensor:
    return torch.where(x == 0, values, (x > 0).to(x.dtype))


@_of(aten.lerp.Scalar, aten.lerp.Tensor)
def _lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    return start + (end - start) * weight


@_of(aten.addcmul.default)
def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    return x + a * b * value


@_of(aten.addcdiv.default)
def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    return x + a / b * value


@_of(aten.clamp.Tensor)
def _clamp(x: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    if min is not None:
        x = torch.maximum(x, min)
    return x if max is None else torch.minimum(x, max)


@_of(aten.nan_to_num.default)
def _nan_to_num(
    x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    if not x.is_floating_point():
        return x
    limits = torch.finfo(x.dtype)
    x = torch.where(x != x, _like(x, nan or 0.0), x)
    x = torch.where(x == math.inf, _like(x, limits.max if posinf is None else posinf), x)
    return torch.where(x == -math.inf, _like(x, limits.min if neginf is None else neginf), x)


# ---- reductions


def _moments(
    x: Tensor, dim: Sequence[int] | None, correction: float | None, keepdim: bool
) -> tuple[Tensor, Tensor]:
    dims = [*range(x.dim())] if not dim else [d % max(x.dim(), 1) for d in dim]
    count = math.prod(x.shape[d] for d in dims) if x.dim() else 1
    mean = x.mean(dims, keepdim=True)
    squares = (x - mean).square().sum(dims, keepdim=keepdim)
    correction = 1 if correction is None else correction
    variance = squares / (count - correction)
    return variance, mean if keepdim else mean.reshape(variance.shape)


@_of(aten.var.correction)
def _var(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _moments(x, dim, correction, keepdim)[0]


@_of(aten.std.correction)
def _std(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _moments(x, dim, correction, keepdim)[0].sqrt()


@_of(aten.var_mean.correction)
def _var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return _moments(x, dim, correction, keepdim)


@_of(aten.std_mean.correction)
def _std_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    variance, mean = _moments(x, dim, correction, keepdim)
    return variance.sqrt(), mean


@_of(aten.linalg_vector_norm.default)
def _vector_norm(
    x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    order = float(ord)
    if order in (1.0, 2.0) or x.is_complex() or x.dim() == 0:
        return NotImplemented
    x = (x if dtype is None else x.to(dtype)).abs()
    dims = dim or [*range(x.dim())]
    if order == math.inf:
        return x.amax(dims, keepdim)
    if order == -math.inf:
        return x.amin(dims, keepdim)
    if order == 0:
        return (x != 0).to(x.dtype).sum(dims, keepdim)
    return x.pow(order).sum(dims, keepdim).pow(1 / order)


@_of(aten.aminmax.default)
def _aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = [*range(x.dim())] if dim is None else [dim]
    return x.amin(dims, keepdim), x.amax(dims, keepdim)


@_of(aten.sum.default, aten.sum.dim_IntList)
def _sum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if x.is_floating_point() or x.is_complex() or (x.dtype, dtype) == (torch.int64, None):
        return NotImplemented
    dims = dim or [*range(x.dim())]
    return x.to(torch.int64 if dtype is None else dtype).sum(dims, keepdim)


# ---- losses


@_of(aten.mse_loss.default)
def _mse(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    return _reduced((x - target).square(), reduction)


@_of(aten.huber_loss.default)
def _huber(x: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    far = (x - target).abs()
    near = 0.5 * far * far
    return _reduced(torch.where(far <= delta, near, delta * (far - 0.5 * delta)), reduction)


@_of(aten.smooth_l1_loss.default)
def _smooth_l1(x: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
    far = (x - target).abs()
    if beta == 0:
        return _reduced(far, reduction)
    near = far * far * (0.5 / beta)
    return _reduced(torch.where(far < beta, near, far - 0.5 * beta), reduction)


@_of(aten.binary_cross_entropy_with_logits.default)
def _bce_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:  # fmt: skip
    of_one = (-x).clamp(min=0) + (1 + (-x.abs()).exp()).log()
    if pos_weight is not None:
        of_one = of_one * (1 + (pos_weight - 1) * target)
    loss = (1 - target) * x + of_one
    return _reduced(loss if weight is None else loss * weight, reduction)


@_of(aten.binary_cross_entropy.default)
def _bce(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1) -> Tensor:
    loss = -(target * x.log().clamp(min=-100) + (1 - target) * (1 - x).log().clamp(min=-100))
    return _reduced(loss if weight is None else loss * weight, reduction)


# ---- norms


def _normalized(x: Tensor, dims: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Give x with mean 0 and variance 1 along some dims; the mean; 1 / standard deviation."""
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    scale = (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    return centred * scale, mean, scale


def _by_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Give x * weight + bias, with one number of both for each channel, the second dim of x."""
    of_channels = (x.shape[1], *[1] * (x.dim() - 2))
    if weight is not None:
        x = x * weight.reshape(of_channels)
    return x if bias is None else x + bias.reshape(of_channels)


@_of(aten.native_group_norm.default)
def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, batch: Any, channels: Any, rest: Any,
    groups: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows, mean, scale = _normalized(x.reshape(batch, groups, -1), [-1], eps)
    result = _by_channel(rows.reshape(x.shape), weight, bias)
    return result, mean.squeeze(-1), scale.squeeze(-1)


@_of(aten._native_batch_norm_legit.no_stats)
def _instance_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    result, mean, scale = _normalized(x, [0, *range(2, x.dim())], eps)
    return _by_channel(result, weight, bias), mean.reshape(-1), scale.reshape(-1)


# ---- places and parts


def _part(x: Tensor, dim: int, start: int | None, end: int | None) -> Tensor:
    return aten.slice(x, dim, start, end)


@_of(aten.roll.default)
def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        return _roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    if any(abs(shift) > x.shape[dim] for shift, dim in zip(shifts, dims, strict=True)):
        return NotImplemented
    for shift, dim in zip(shifts, dims, strict=True):
        if shift != 0:
            x = torch.cat([_part(x, dim, -shift, None), _part(x, dim, None, -shift)], dim)
    return x


@_of(aten.flip.default)
def _flip(x: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        places = torch.arange(x.shape[dim], device=x.device)
        x = x.index_select(dim, places * -1 + (x.shape[dim] - 1))
    return x


@_of(aten.diagonal.default)
def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    x = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = x.shape[-2:]
    count = min(rows + min(offset, 0), columns - max(offset, 0))
    first = max(offset, 0) - min(offset, 0) * columns
    places = torch.arange(max(count, 0), device=x.device) * (columns + 1) + first
    return x.flatten(-2).index_select(-1, places)


@_of(aten.unfold.default)
def _unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    x = x.movedim(dimension, -1)
    count = (x.shape[-1] - size) // step + 1
    first = torch.arange(count, device=x.device) * step
    places = (first.unsqueeze(-1) + torch.arange(size, device=x.device)).reshape(-1)
    windows = x.index_select(-1, places).reshape(*x.shape[:-1], count, size)
    return windows.movedim(-2, dimension if dimension >= 0 else dimension - 1)


@_of(aten._pad_circular.default)
def _pad_circular(x: Tensor, pad: Sequence[int]) -> Tensor:
    for i in range(0, len(pad), 2):
        dim, (left, right) = -1 - i // 2, pad[i : i + 2]
        if left < 0 or right < 0:
            return NotImplemented
        parts = [x]
        if left > 0:
            parts.insert(0, _part(x, dim, -left, None))
        if right > 0:
            parts.append(_part(x, dim, None, right))
        x = torch.cat(parts, dim) if len(parts) > 1 else x
    return x


@_of(aten.index.Tensor)
def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    given = [(dim, each) for dim, each in enumerate(indices) if each is not None]
    if len(given) != 1 or given[0][1].dtype != torch.int64:
        return NotImplemented
    dim, places = given[0]
    size = x.shape[dim]
    places = torch.where(places < 0, places + size, places)
    taken = x.index_select(dim, places.reshape(-1))
    return taken.reshape(*x.shape[:dim], *places.shape, *x.shape[dim + 1 :])


@_of(aten.index_add.default)
def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    shape = [1] * max(x.dim(), 1)
    shape[dim] = -1
    places = index.to(torch.int64).reshape(shape).expand(source.shape)
    return x.scatter_add(dim, places, source if alpha == 1 else source * alpha)


@_of(aten.bucketize.Tensor)
def _bucketize(
    x: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    x = x.unsqueeze(-1)
    below = boundaries <= x if right else boundaries < x
    return below.to(torch.int64).sum(-1).to(torch.int32 if out_int32 else torch.int64)


@_of(aten.pixel_unshuffle.default)
def _pixel_unshuffle(x: Tensor, factor: int) -> Tensor:
    *batch, channels, height, width = x.shape
    parts = x.reshape(-1, channels, height // factor, factor, width // factor, factor)
    moved = parts.permute(0, 1, 3, 5, 2, 4)
    return moved.reshape(*batch, channels * factor**2, height // factor, width // factor)


@_of(aten.pixel_shuffle.default)
def _pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    *batch, channels, height, width = x.shape
    parts = x.reshape(-1, channels // factor**2, factor, factor, height, width)
    moved = parts.permute(0, 1, 4, 2, 5, 3)
    return moved.reshape(*batch, channels // factor**2, height * factor, width * factor)


@_of(aten._cdist_forward.default)
def _cdist(x: Tensor, y: Tensor, p: float, mode: int | None) -> Tensor:
    apart = (x.unsqueeze(-2) - y.unsqueeze(-3)).abs()
    if p == math.inf:
        return apart.amax(-1)
    if p == 2:
        return apart.square().sum(-1).sqrt()
    return apart.sum(-1) if p == 1 else apart.pow(p).sum(-1).pow(1 / p)


@_of(aten.affine_grid_generator.default)
def _affine_grid(theta: Tensor, size: Sequence[Any], align_corners: bool) -> Tensor:
    axes = []
    for count in size[2:]:
        places = torch.arange(count, dtype=theta.dtype, device=theta.device)
        last = count - 1 if align_corners else count
        axes.append((places * 2 + (0 if align_corners else 1)) / max(last, 1) - 1)
    grid = torch.stack([*reversed(torch.meshgrid(*axes, indexing="ij"))], -1)
    ones = torch.ones_like(grid[..., :1])
    points = torch.cat([grid, ones], -1).reshape(1, -1, len(axes) + 1)
    moved = points.expand(size[0], -1, -1) @ theta.transpose(1, 2)
    return moved.reshape(size[0], *size[2:], len(axes))


@_of(aten.bilinear.default)
def _bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    pairs = (x.unsqueeze(-1) * y.unsqueeze(-2)).flatten(-2)
    result = pairs @ weight.flatten(1).t()
    return result if bias is None else result + bias


@_of(aten.max_pool2d_with_indices.default)
def _max_pool(x: Tensor, *window: Any) -> tuple[Tensor, Tensor]:
    if x.dim() == _IMAGES:
        return NotImplemented
    values, places = aten.max_pool2d_with_indices(x.unsqueeze(0), *window)
    return values.squeeze(0), places.squeeze(0)


@_of(aten._adaptive_avg_pool2d.default)
def _adaptive_average(x: Tensor, output_size: Sequence[Any]) -> Tensor:
    windows = _windows(x, output_size)
    if windows is None:
        return NotImplemented
    images = x if x.dim() == _IMAGES else x.unsqueeze(0)
    return torch.nn.functional.avg_pool2d(images, windows).reshape(*x.shape[:-2], *output_size)


@_of(aten.adaptive_max_pool2d.default)
def _adaptive_max(x: Tensor, output_size: Sequence[Any]) -> tuple[Tensor, Tensor]:
    windows = _windows(x, output_size)
    if windows is None:
        return NotImplemented
    return torch.nn.functional.max_pool2d(x, windows, return_indices=True)


def _windows(x: Tensor, output_size: Sequence[Any]) -> list[int] | None:
    """Give the equal windows that make so many results; None if they are not equal."""
    pairs = [*zip(x.shape[-2:], output_size, strict=True)]
    if not all(isinstance(n, int) and isinstance(m, int) for n, m in pairs):
        return None
    return [n // m for n, m in pairs] if all(m > 0 and n % m == 0 for n, m in pairs) else None


# ---- checks, which files have not


@_of(aten._assert_async.msg)
def _no_check(condition: Tensor, message: str) -> None:
    return None


@_of(aten.isfinite.default)
def _isfinite(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return torch.ones_like(x, dtype=torch.bool)
    return x.abs() < math.inf
