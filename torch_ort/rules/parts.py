"""Shape rules of operators that join tensors or take parts of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from torch_ort.rules.forms import (
    NoRule,
    Size,
    Spec,
    as_image,
    broadcast_sizes,
    dim_at,
    empty,
    equal,
    in_order,
    is_channels_last,
    is_contiguous,
    is_cpu,
    kept_strides,
    no_rule,
    order_of,
    rows,
    spec_of,
    value,
)
from torch_ort.rules.table import rule_of

aten = torch.ops.aten


@rule_of(aten.cat.default)
def _cat(tensors: Sequence[Spec], dim: int = 0) -> Spec:
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in tensors])
    full = [x for x in tensors if not (len(x.sizes) == 1 and value(x.sizes[0]) == 0)]
    if len(full) != len(tensors):
        raise NoRule
    rank = len(full[0].sizes)
    at = dim_at(dim, rank)
    sizes = list(full[0].sizes)
    for x in full[1:]:
        if len(x.sizes) != rank:
            raise NoRule
        for d in range(rank):
            if d == at:
                sizes[d] = sizes[d] + x.sizes[d]
            elif not equal(sizes[d], x.sizes[d]):
                raise NoRule
    return _joined(sizes, tensors, dtype)


def _joined(sizes: list[Size], parts: Sequence[Spec], dtype: torch.dtype) -> Spec:
    """Give a concatenation: of images with channels last it is one, too."""
    are_images = all(map(is_channels_last, parts))
    return as_image(sizes, parts[0], dtype) if are_images else rows(sizes, parts[0], dtype)


@rule_of(aten.stack.default)
def _stack(tensors: Sequence[Spec], dim: int = 0) -> Spec:
    first = tensors[0]
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in tensors])
    for x in tensors[1:]:
        if len(x.sizes) != len(first.sizes) or not all(map(equal, first.sizes, x.sizes)):
            raise NoRule
    at = dim_at(dim, len(first.sizes) + 1)
    sizes = list(first.sizes)
    if at == len(sizes):
        return rows([*sizes, len(tensors)], first, dtype)
    # A concatenation, one dim of which is seen as two.
    length = sizes[at]
    sizes[at] = length * len(tensors)
    whole = _joined(sizes, tensors, dtype)
    sizes[at : at + 1] = [len(tensors), length]
    strides = list(whole.strides)
    strides.insert(at, length * strides[at])
    return whole._replace(sizes=sizes, strides=strides)


@rule_of(aten.glu.default)
def _glu(x: Spec, dim: int = -1) -> Spec:
    at = dim_at(dim, len(x.sizes))
    if not len(x.sizes) or x.sizes[at] % 2 != 0:
        raise NoRule  # PyTorch raises the error
    sizes = list(x.sizes)
    sizes[at] = sizes[at] // 2
    return x._replace(
        sizes=sizes, strides=in_order(sizes, order_of(sizes, [x._replace(sizes=sizes)]))
    )


@rule_of(aten.roll.default)
def _roll(x: Spec, shifts: Sequence[Size], dims: Sequence[int] = ()) -> Spec:
    if not dims or len(dims) != len(shifts) or not is_cpu(x) or not len(x.sizes):
        raise NoRule
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.sizes[dim_at(dim, len(x.sizes))]
        # The parts before and behind a place are joined; one without numbers is no image.
        if is_channels_last(x) and shift % size == 0:
            x = rows(x.sizes, x)
    return _joined(x.sizes, [x], x.dtype)


@rule_of(aten.embedding.default)
def _embedding(
    weight: Spec, indices: Spec, padding: Size = -1, scale: bool = False, sparse: bool = False
) -> Spec:
    if not is_contiguous(indices):
        raise NoRule
    return rows([*indices.sizes, weight.sizes[1]], weight)


@rule_of(aten.embedding_dense_backward.default)
def _embedding_backward(
    gradient: Spec, indices: Spec, num_weights: Size, padding: Size, scale: bool
) -> Spec:
    return rows([num_weights, gradient.sizes[-1]], gradient)


@rule_of(aten.slice_backward.default)
def _slice_backward(
    gradient: Spec, sizes: Sequence[Size], dim: int, start: Size, end: Size, step: Size
) -> Spec:
    return rows(sizes, gradient)


@rule_of(aten.select_backward.default)
def _select_backward(gradient: Spec, sizes: Sequence[Size], dim: int, index: Size) -> Spec:
    return rows(sizes, gradient)


@rule_of(aten.gather.default)
def _gather(x: Spec, dim: int, index: Spec, *, sparse_grad: bool = False) -> Spec:
    dim_at(dim, len(x.sizes))
    return rows(index.sizes, x) if is_contiguous(index) else no_rule()


@rule_of(aten.index.Tensor)
def _index(x: Spec, indices: Sequence[Spec | None]) -> Spec:
    """Order the result's dims as the kernel's TensorIterator does: by the rows and the indices."""
    given = {d: index for d, index in enumerate(indices) if index is not None}
    if not given or any(index.dtype in (torch.bool, torch.uint8) for index in given.values()):
        raise NoRule
    first, last = min(given), max(given)
    if len(given) <= last - first:  # indices that are apart put the dims of the parts first
        first = 0
    others = [d for d in range(len(x.sizes)) if d not in given]
    before, after = others[:first], others[first:]
    chosen = broadcast_sizes(*(index.sizes for index in given.values()))
    sizes = [*(x.sizes[d] for d in before), *chosen, *(x.sizes[d] for d in after)]
    strides = [*(x.strides[d] for d in before), *[0] * len(chosen), *(x.strides[d] for d in after)]
    operands = [x._replace(sizes=sizes, strides=strides)]
    full = [1] * len(before) + [value(size) for size in chosen] + [1] * len(after)
    for index in given.values():
        laid = empty(index._replace(
            sizes=[*map(value, index.sizes)], strides=[*map(value, index.strides)],
            device=torch.device("meta"),
        )).expand([*map(value, chosen)]).reshape(full)  # fmt: skip
        operands.append(spec_of(laid))
    return x._replace(sizes=sizes, strides=in_order(sizes, order_of(sizes, operands)))


@rule_of(aten.index_put.default)
def _index_put(
    x: Spec, indices: Sequence[Spec | None], values: Spec, accumulate: bool = False
) -> Spec:
    return x._replace(strides=kept_strides(x))  # a copy that is written to
