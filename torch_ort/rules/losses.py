"""Shape rules of softmax, norms and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ort import _C
from torch_ort.rules.forms import (
    NoRule,
    Size,
    Spec,
    as_image,
    broadcast_sizes,
    dim_at,
    equal,
    is_channels_last,
    is_contiguous,
    is_cpu,
    joins,
    kept_strides,
    no_rule,
    numel,
    rows,
)
from torch_ort.rules.pointwise import pointwise
from torch_ort.rules.table import rule_of

aten = torch.ops.aten


@rule_of(aten._softmax.default, aten._log_softmax.default)
def _softmax(x: Spec, dim: int, half_to_float: bool) -> Spec:
    dim_at(dim, len(x.sizes))
    if half_to_float or not is_contiguous(x):
        raise NoRule
    return rows(x.sizes, x)


@rule_of(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(gradient: Spec, output: Spec, dim: int, dtype: torch.dtype) -> Spec:
    if not (is_contiguous(gradient) and is_contiguous(output)):
        raise NoRule
    return rows(gradient.sizes, gradient, dtype)


@rule_of(aten.native_layer_norm.default)
def _layer_norm(
    x: Spec, shape: Sequence[Size], weight: Spec | None, bias: Spec | None, eps: float
) -> tuple[Spec, Spec, Spec]:
    mixed = weight is not None and weight.dtype != x.dtype
    if not is_cpu(x) or mixed:
        raise NoRule
    outer = len(x.sizes) - len(shape)
    statistics = rows([*x.sizes[:outer], *[1] * len(shape)], x)
    return rows(x.sizes, x), statistics, statistics


_SHORT = (torch.bfloat16, torch.float16)
_FULL = (torch.float32, torch.float64)


@rule_of(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    gradient: Spec, x: Spec, shape: Sequence[Size], mean: Spec, rstd: Spec, weight: Spec | None,
    bias: Spec | None, mask: Sequence[bool],
) -> tuple[Spec | None, ...]:  # fmt: skip
    mixed = weight is not None and weight.dtype != x.dtype
    if not is_cpu(x) or mixed:
        raise NoRule
    return (
        rows(x.sizes, x) if mask[0] else None,
        rows(weight.sizes, weight) if mask[1] and weight is not None else None,
        rows(bias.sizes, bias) if mask[2] and bias is not None else None,
    )


@rule_of(aten._fused_rms_norm.default)
def _rms_norm(
    x: Spec, shape: Sequence[Size], weight: Spec | None, eps: float | None
) -> tuple[Spec, Spec]:
    mixed = weight is not None and weight.dtype != x.dtype
    # A norm of other layouts takes other steps on the CPU and on a GPU.
    if mixed or not is_contiguous(x):
        raise NoRule
    outer = len(x.sizes) - len(shape)
    statistics = torch.float64 if x.dtype is torch.float64 else torch.float32
    return rows(x.sizes, x), rows([*x.sizes[:outer], *[1] * len(shape)], x, statistics)


@rule_of(aten._fused_rms_norm_backward.default)
def _rms_norm_backward(
    gradient: Spec, x: Spec, shape: Sequence[Size], rstd: Spec, weight: Spec | None,
    mask: Sequence[bool],
) -> tuple[Spec | None, ...]:  # fmt: skip
    if weight is not None and weight.dtype != x.dtype:
        raise NoRule
    return (
        rows(x.sizes, x) if mask[0] else None,
        rows(weight.sizes, weight) if mask[1] and weight is not None else None,
    )


@rule_of(aten.binary_cross_entropy_with_logits.default)
def _cross_entropy_with_logits(
    x: Spec, target: Spec, weight: Spec | None = None, positive: Spec | None = None,
    reduction: int = 1,
) -> Spec:  # fmt: skip
    if reduction == 0 or not all(map(equal, x.sizes, target.sizes)):
        raise NoRule
    return rows([], x)


@rule_of(aten.mse_loss.default, aten.smooth_l1_loss.default)
def _loss_of_differences(
    x: Spec, target: Spec, reduction: int = 1, threshold: float | None = None
) -> Spec:
    each = pointwise(aten.sub.Tensor, x, target)
    return rows([], each) if reduction else each


@rule_of(aten.huber_loss.default, aten.soft_margin_loss.default)
def _loss_like_its_input(x: Spec, target: Spec, reduction: int = 1, delta: float = 1.0) -> Spec:
    if not _C.same_sizes(broadcast_sizes(x.sizes, target.sizes), x.sizes):
        raise NoRule
    return rows([], x) if reduction else x._replace(strides=kept_strides(x))


@rule_of(
    aten.mse_loss_backward.default, aten.huber_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
)  # fmt: skip
def _loss_of_differences_backward(
    gradient: Spec, x: Spec, target: Spec, reduction: int, threshold: float | None = None
) -> Spec:
    if target.dtype != x.dtype or not is_cpu(x):
        raise NoRule
    if not _C.same_sizes(broadcast_sizes(x.sizes, target.sizes), x.sizes):
        raise NoRule
    return rows(x.sizes, x)


@rule_of(aten.native_group_norm.default)
def _group_norm(
    x: Spec, weight: Spec | None, bias: Spec | None, batch: Size, channels: Size, rest: Size,
    groups: Size, eps: float,
) -> tuple[Spec, ...]:  # fmt: skip
    if not is_cpu(x) or not (is_contiguous(x) or is_channels_last(x)):
        raise NoRule
    # Statistics have the dtype of the parameters: of short floats, float32 or the same. PyTorch's
    # meta kernel does not tell that, nor, since torch 2.14, that results lie as the images do.
    dtypes = {spec.dtype for spec in (weight, bias) if spec is not None} or {x.dtype}
    if x.dtype not in (*_FULL, *_SHORT) or len(dtypes) > 1:
        raise NoRule
    (dtype,) = dtypes
    if dtype != x.dtype and not (x.dtype in _SHORT and dtype == torch.float32):
        raise NoRule
    statistics = rows([batch, groups], x._replace(dtype=dtype))
    return _normalized(x), statistics, statistics


@rule_of(aten.native_group_norm_backward.default)
def _group_norm_backward(
    gradient: Spec, x: Spec, mean: Spec, rstd: Spec, weight: Spec | None, batch: Size,
    channels: Size, rest: Size, groups: Size, mask: Sequence[bool],
) -> tuple[Spec | None, ...]:  # fmt: skip
    is_dense = is_contiguous(x) or is_channels_last(x)
    if not is_cpu(x) or mean.dtype not in (*_FULL, x.dtype) or not is_dense:
        raise NoRule
    per_channel = rows([channels], mean)
    return (
        _normalized(x) if mask[0] else None,
        per_channel if mask[1] else None,
        per_channel if mask[2] else None,
    )


@rule_of(aten.nll_loss_forward.default)
def _nll_loss(
    x: Spec, target: Spec, weight: Spec | None, reduction: int, ignore: Size
) -> tuple[Spec, Spec]:
    if len(x.sizes) == 2:
        joins(x.sizes[0], target.sizes[0])
    if reduction == 0:
        raise NoRule
    return rows([], x), rows([], x)


@rule_of(aten.nll_loss_backward.default)
def _nll_loss_backward(
    gradient: Spec, x: Spec, target: Spec, weight: Spec | None, reduction: int, ignore: Size,
    total: Spec,
) -> Spec:  # fmt: skip
    return rows(x.sizes, x) if is_contiguous(x) else no_rule()


@rule_of(aten.log_sigmoid_forward.default)
def _log_sigmoid(x: Spec) -> tuple[Spec, Spec]:
    return (rows(x.sizes, x), rows(x.sizes, x)) if is_cpu(x) else no_rule()


@rule_of(aten.log_sigmoid_backward.default)
def _log_sigmoid_backward(gradient: Spec, x: Spec, buffer: Spec) -> Spec:
    if not is_cpu(x) or not all(map(equal, gradient.sizes, x.sizes)):
        raise NoRule
    return gradient._replace(strides=kept_strides(gradient))


@rule_of(aten.multi_margin_loss.default)
def _multi_margin_loss(
    x: Spec, target: Spec, p: Any = 1, margin: Any = 1, weight: Spec | None = None,
    reduction: int = 1,
) -> Spec:  # fmt: skip
    return _margin_loss(x, reduction)


@rule_of(aten.multilabel_margin_loss_forward.default)
def _multilabel_margin_loss(x: Spec, target: Spec, reduction: int) -> tuple[Spec, Spec]:
    return _margin_loss(x, reduction), rows(target.sizes, x)


def _margin_loss(x: Spec, reduction: int) -> Spec:
    if not is_cpu(x) or len(x.sizes) != 2:
        raise NoRule
    return rows(x.sizes[:1] if reduction == 0 else [], x)


@rule_of(
    aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default
)  # fmt: skip
def _margin_loss_backward(gradient: Spec, x: Spec, *others: Any) -> Spec:
    return rows(x.sizes, x) if is_cpu(x) else no_rule()  # also where x has other strides


@rule_of(aten._native_batch_norm_legit_functional.default)
def _batch_norm(
    x: Spec, weight: Spec | None, bias: Spec | None, mean: Spec, variance: Spec, training: bool,
    momentum: float, eps: float,
) -> tuple[Spec, ...]:  # fmt: skip
    others = [spec for spec in (weight, bias, mean, variance) if spec is not None]
    if not training or not is_cpu(x):
        raise NoRule
    if not _counts_in(mean, x) or any(spec.dtype != mean.dtype for spec in others):
        raise NoRule
    bool(numel(x.sizes) != 0)  # a guard: an empty batch changes no statistics
    statistics = rows([x.sizes[1]], mean)
    running = rows(mean.sizes, mean), rows(variance.sizes, variance)
    return _normalized(x), statistics, statistics, *running


@rule_of(aten._native_batch_norm_legit.no_stats)
def _batch_norm_of_one_batch(
    x: Spec, weight: Spec | None, bias: Spec | None, training: bool, momentum: float, eps: float
) -> tuple[Spec, ...]:  # fmt: skip
    others = [spec for spec in (weight, bias) if spec is not None]
    if not is_cpu(x) or x.dtype not in _FULL or any(spec.dtype != x.dtype for spec in others):
        raise NoRule
    bool(numel(x.sizes) != 0)  # a guard, as above
    statistics = rows([x.sizes[1]], x)
    return _normalized(x), statistics, statistics


def _normalized(x: Spec) -> Spec:
    """Give the form of a norm's result: images that are channels last stay so."""
    if is_contiguous(x) or not is_channels_last(x):
        return rows(x.sizes, x)
    return as_image(x.sizes, x)


def _counts_in(statistics: Spec, x: Spec) -> bool:
    """Tell whether a batch norm of x may keep these statistics: of its dtype, or under autocast."""
    if x.dtype in (torch.float16, torch.bfloat16):
        return statistics.dtype == torch.float32
    return x.dtype in _FULL and statistics.dtype == x.dtype


@rule_of(aten.native_batch_norm_backward.default)
def _batch_norm_backward(
    gradient: Spec, x: Spec, weight: Spec | None, mean: Spec | None, variance: Spec | None,
    saved_mean: Spec | None, saved_rstd: Spec | None, training: bool, eps: float,
    mask: Sequence[bool],
) -> tuple[Spec | None, ...]:  # fmt: skip
    if not is_cpu(x) or saved_mean is None or not _counts_in(saved_mean, x):
        raise NoRule
    if weight is not None and weight.dtype != saved_mean.dtype:
        raise NoRule
    channels = rows([x.sizes[1]], saved_mean)
    return (
        _normalized(x) if mask[0] else None,
        channels if mask[1] else None,
        channels if mask[2] else None,
    )
