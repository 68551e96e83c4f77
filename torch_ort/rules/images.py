"""Shape rules of convolutions, and of operators that resize images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ort.pytorch.dispatch_compat import RESIZING
from torch_ort.rules.forms import (
    NoRule,
    Size,
    Spec,
    dense_order,
    format_strides,
    is_channels_last,
    is_contiguous,
    is_cpu,
    joins,
    rows,
    value,
)
from torch_ort.rules.table import rule_of

aten = torch.ops.aten


@rule_of(aten.convolution.default)
def _convolution(
    x: Spec, weight: Spec, bias: Spec | None, stride: Sequence[Size], padding: Sequence[Size],
    dilation: Sequence[Size], transposed: bool, output_padding: Sequence[Size], groups: Size,
) -> Spec:  # fmt: skip
    rank = len(weight.sizes) - 2
    if not is_cpu(x) or len(x.sizes) != rank + 2 or x.dtype != weight.dtype:
        raise NoRule
    memory_format = _convolution_format(x, weight)
    in_channels = weight.sizes[0] if transposed else weight.sizes[1] * groups
    joins(x.sizes[1], in_channels)
    out_channels = weight.sizes[1] * groups if transposed else weight.sizes[0]

    def per_dim(values: Sequence[Size], d: int) -> Size:
        return values[d] if len(values) > 1 else values[0]

    sizes: list[Size] = [x.sizes[0], out_channels]
    for d in range(rank):
        reach = per_dim(dilation, d) * (weight.sizes[d + 2] - 1)
        step, pad, size = per_dim(stride, d), per_dim(padding, d), x.sizes[d + 2]
        if transposed:
            extra = per_dim(output_padding, d) if output_padding else 0
            sizes.append((size - 1) * step - 2 * pad + reach + extra + 1)
            continue
        covered = size + 2 * pad - reach - 1
        if not (type(covered) is int and covered >= 0) and not bool(covered >= 0):
            raise NoRule
        sizes.append(covered // step + 1)
    return Spec(sizes, format_strides(sizes, memory_format), x.dtype, x.device)


def _convolution_format(x: Spec, weight: Spec) -> torch.memory_format:
    """Give the layout of all that a convolution of the CPU gives: channels last if one operand."""
    formats = [_format_to_read(x), _format_to_read(weight)]
    # Where width and height are 1, a weight is also contiguous.
    if len(weight.sizes) == 4 and is_channels_last(weight):
        formats.append(torch.channels_last)
    return torch.channels_last if torch.channels_last in formats else torch.contiguous_format


def _format_to_read(x: Spec) -> torch.memory_format:
    """Give the layout in which a convolution of the CPU reads an operand, maybe from a copy."""
    if is_contiguous(x):
        return torch.contiguous_format
    order = dense_order(x)
    if order is None:
        order = _order_with_gaps(x)
        # Of others with gaps, and of dims of one element, other sizes may lie otherwise.
        if order == sorted(order) and all(type(size) is not int or size > 1 for size in x.sizes):
            return torch.contiguous_format
        raise NoRule
    if len(x.sizes) != 4 or order != [0, 2, 3, 1]:
        raise NoRule
    return torch.channels_last


@rule_of(aten.convolution_backward.default)
def _convolution_backward(
    gradient: Spec, x: Spec, weight: Spec, bias_sizes: Sequence[Size] | None,
    stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: Size,
    mask: Sequence[bool],
) -> tuple[Spec | None, ...]:  # fmt: skip
    if not is_cpu(x):
        raise NoRule
    memory_format = _convolution_format(x, weight)

    def like(spec: Spec) -> Spec:
        return spec._replace(strides=format_strides(spec.sizes, memory_format))

    return (
        like(x) if mask[0] else None,
        like(weight) if mask[1] else None,
        rows([gradient.sizes[1]], gradient) if mask[2] else None,
    )


# ---- resizing of images


@rule_of(*(getattr(aten, name).default for name in RESIZING))
def _resize(x: Spec, sizes: Sequence[Size], *others: Any) -> Spec:
    return _image([*x.sizes[:2], *sizes], x, _image_format(x))


# Kernels whose results are channels last if their images are.
_KEEPING_ORDER = [
    getattr(aten, f"{name}_backward").default
    for name in RESIZING
    if "nearest3d" not in name and "nearest_exact3d" not in name and "bicubic" not in name
]


@rule_of(*_KEEPING_ORDER)
def _resize_backward(
    gradient: Spec, sizes: Sequence[Size], given: Sequence[Size], *others: Any
) -> Spec:  # fmt: skip
    return _image(given, gradient, _image_format(gradient))


@rule_of(
    aten.upsample_nearest3d_backward.default, aten._upsample_nearest_exact3d_backward.default,
    aten.upsample_bicubic2d_backward.default,
)  # fmt: skip
def _resize_backward_to_rows(
    gradient: Spec, sizes: Sequence[Size], given: Sequence[Size], *others: Any
) -> Spec:  # fmt: skip
    return _image(given, gradient, torch.contiguous_format)


def _image(sizes: Sequence[Size], like: Spec, memory_format: torch.memory_format) -> Spec:
    are_sizes = all(type(size) is not int or size > 0 for size in sizes[2:])
    # A function of PyTorch decides the layout for kernels of the CPU and of CUDA.
    has_rule = like.device.type in ("cpu", "cuda")
    if not has_rule or len(sizes) != len(like.sizes) or not are_sizes:
        raise NoRule
    return like._replace(sizes=list(sizes), strides=format_strides(sizes, memory_format))


def _image_format(x: Spec) -> torch.memory_format:
    if is_contiguous(x) or 0 in x.strides:
        return torch.contiguous_format
    order = dense_order(x)
    if order is None:
        order = _order_with_gaps(x)
    formats = {(0, 2, 3, 1): torch.channels_last, (0, 2, 3, 4, 1): torch.channels_last_3d}
    return formats.get(tuple(order), torch.contiguous_format)


def _order_with_gaps(x: Spec) -> list[int]:
    """Give the order of the dims of a part of an image, outermost first."""
    strides = [value(stride) for stride in x.strides]
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    reach = 1
    for d in reversed(order):
        if strides[d] < reach:
            raise NoRule  # several elements share a place
        reach = strides[d] * max(value(x.sizes[d]), 1)
    return order
