"""Shape rules of views."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from torch_ort import _C
from torch_ort.rules.forms import (
    NoRule,
    Size,
    Spec,
    dim_at,
    dims_of,
    equal,
    is_contiguous,
    numel,
    rows,
    same,
    value,
)
from torch_ort.rules.table import rule_of

aten = torch.ops.aten


@rule_of(
    aten.detach.default, aten.alias.default, aten.lift_fresh.default,
    # The engine computes these.
    aten._conj.default, aten._neg_view.default,
)  # fmt: skip
def _alias(x: Spec) -> Spec:
    return x


@rule_of(aten.t.default)
def _t(x: Spec) -> Spec:
    return Spec(x.sizes[::-1], x.strides[::-1], x.dtype, x.device)


@rule_of(aten.transpose.int)
def _transpose(x: Spec, dim0: int, dim1: int) -> Spec:
    order = list(range(len(x.sizes)))
    if order:
        a, b = dim_at(dim0, len(order)), dim_at(dim1, len(order))
        order[a], order[b] = order[b], order[a]
    return _permute(x, order)


@rule_of(aten.permute.default)
def _permute(x: Spec, dims: Sequence[int]) -> Spec:
    order = [dim_at(d, len(x.sizes)) for d in dims]
    return Spec(
        [x.sizes[d] for d in order], [x.strides[d] for d in order], x.dtype, x.device
    )  # fmt: skip


@rule_of(aten.view.default, aten._unsafe_view.default)
def _view(x: Spec, sizes: Sequence[Size]) -> Spec:
    sizes = list(sizes)
    total = numel(x.sizes)
    unknown = [i for i, size in enumerate(sizes) if type(size) is int and size == -1]
    if unknown:
        known = numel([size for size in sizes if not (type(size) is int and size == -1)])
        if value(known) == 0 or not equal(total % known, 0):
            raise NoRule
        sizes[unknown[0]] = total // known
    elif not equal(total, numel(sizes)):
        raise NoRule
    if is_contiguous(x):
        return rows(sizes, x)
    strides = None if value(total) == 0 else _C.viewed_strides(x.sizes, x.strides, sizes)
    if strides is None:
        raise NoRule
    return Spec(sizes, strides, x.dtype, x.device)


@rule_of(aten.expand.default)
def _expand(x: Spec, sizes: Sequence[Size], *, implicit: bool = False) -> Spec:
    missing = len(sizes) - len(x.sizes)
    result: list[Size] = []
    strides: list[Size] = []
    for i, size in enumerate(sizes):
        own, stride = (x.sizes[i - missing], x.strides[i - missing]) if i >= missing else (1, 0)
        if type(size) is int and size == -1:
            size = own
        if same(size, own) and i >= missing:
            result.append(size)
            strides.append(stride)
            continue
        if value(own) == 1 and (value(size) != 1 or type(own) is int):
            equal(own, 1)
            result.append(size)
            strides.append(0)
        elif equal(own, size):
            result.append(own)
            strides.append(stride)
        else:
            raise NoRule
    return Spec(result, strides, x.dtype, x.device)


@rule_of(aten.unsqueeze.default)
def _unsqueeze(x: Spec, dim: int) -> Spec:
    at = dim_at(dim, len(x.sizes) + 1)
    stride = x.sizes[at] * x.strides[at] if at < len(x.sizes) else 1
    sizes, strides = list(x.sizes), list(x.strides)
    sizes.insert(at, 1)
    strides.insert(at, stride)
    return Spec(sizes, strides, x.dtype, x.device)


@rule_of(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(x: Spec, dim: int | Sequence[int] | None = None) -> Spec:
    rank = len(x.sizes)
    named = [] if dim is not None and not isinstance(dim, int) and not len(dim) else None
    asked = dims_of(dim, rank) if named is None else named
    # Whether a dim is dropped decides the rank. So it is a guard, whoever asks.
    gone = {d for d in asked if d < rank and equal(x.sizes[d], 1)}
    kept = [d for d in range(rank) if d not in gone]
    return Spec([x.sizes[d] for d in kept], [x.strides[d] for d in kept], x.dtype, x.device)


@rule_of(aten.squeeze_copy.default, aten.squeeze_copy.dim, aten.squeeze_copy.dims)
def _squeeze_copy(x: Spec, dim: int | Sequence[int] | None = None) -> Spec:
    return rows(_squeeze(x, dim).sizes, x)


@rule_of(aten.slice.Tensor)
def _slice(
    x: Spec, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Size = 1
) -> Spec:
    at = dim_at(dim, len(x.sizes))
    size = x.sizes[at]
    first = _clamp(0 if start is None else start, size)
    last = size if end is None or (type(end) is int and end >= 2**62) else _clamp(end, size)
    length = last - first
    if type(length) is not int and not (type(first) is int and first == 0):
        if not bool(length >= 0):
            length = 0
    elif type(length) is int:
        length = max(length, 0)
    if not (type(step) is int and step == 1):
        length = (length + step - 1) // step
    sizes, strides = list(x.sizes), list(x.strides)
    sizes[at] = length
    strides[at] = strides[at] * step
    return Spec(sizes, strides, x.dtype, x.device)


def _clamp(index: Size, size: Size) -> Size:
    """Clamp an end of a slice to a dim; guards record on which side of the dim's ends it lies."""
    if type(index) is int and index == 0:
        return 0
    if same(index, size):
        return size
    if bool(index < 0):
        index = index + size
        if bool(index < 0):
            return 0
        return index
    return size if bool(index > size) else index


@rule_of(aten.select.int)
def _select(x: Spec, dim: int, index: Size) -> Spec:
    at = dim_at(dim, len(x.sizes))
    size = x.sizes[at]
    if not (-value(size) <= value(index) < value(size)):
        raise NoRule  # PyTorch raises the error
    if type(size) is not int or type(index) is not int:
        # The engine checks again, because the index may be wrong for other sizes.
        bool(index < size) and bool(index >= -size)
    return Spec(
        [*x.sizes[:at], *x.sizes[at + 1 :]], [*x.strides[:at], *x.strides[at + 1 :]],
        x.dtype, x.device,
    )  # fmt: skip


@rule_of(aten.split_with_sizes.default)
def _split_with_sizes(x: Spec, sizes: Sequence[Size], dim: int = 0) -> list[Spec]:
    at = dim_at(dim, len(x.sizes))
    if not equal(functools.reduce(lambda a, b: a + b, sizes, 0), x.sizes[at]):
        raise NoRule
    return [x._replace(sizes=[*x.sizes[:at], size, *x.sizes[at + 1 :]]) for size in sizes]


@rule_of(aten.split.Tensor)
def _split(x: Spec, size: Size, dim: int = 0) -> list[Spec]:
    total = x.sizes[dim_at(dim, len(x.sizes))]
    if type(size) is not int or type(total) is not int or size <= 0:
        raise NoRule
    count = max(1, -(-total // size))
    parts = [min(size, total - i * size) for i in range(count)]
    return _split_with_sizes(x, parts, dim)


@rule_of(aten.unbind.int)
def _unbind(x: Spec, dim: int = 0) -> list[Spec]:
    at = dim_at(dim, len(x.sizes))
    count = value(x.sizes[at])
    equal(x.sizes[at], count)  # the graph has this number of results
    return [_select(x, at, 0)] * count
