"""The forms of what operators give whose sizes only data tells: each such size is a new symbol."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torch_ort import _C
from torch_ort.rules.forms import Spec

aten = torch.ops.aten
# Makes the symbol of a size that is at most a number; None: without a bound.
NewSize = Callable[[int | None], torch.SymInt]


def example_of(most: int | None) -> int:
    """Give an example of a size that is at most a number; None: without a bound."""
    return 4 if most is None else min(4, most)


def _number_of(*tensors: Spec) -> int | None:
    """Give the number of elements that tensors have after broadcasting, if it is known."""
    sizes = [x.sizes for x in tensors]
    if any(type(size) is not int for each in sizes for size in each):
        return None
    return math.prod(torch.broadcast_shapes(*sizes))


def _dense(sizes: list[Any], dtype: torch.dtype, device: torch.device) -> Spec:
    return Spec(sizes, _C.contiguous_strides(sizes), dtype, device)


def _nonzero(new: NewSize, x: Spec) -> Spec:
    count = new(_number_of(x))  # the kernel writes one list of coordinates after the other
    return Spec([count, len(x.sizes)], [1, count], torch.int64, x.device)


def _masked_select(new: NewSize, x: Spec, mask: Spec) -> Spec:
    return _dense([new(_number_of(x, mask))], x.dtype, x.device)


def _unique(
    new: NewSize, x: Spec, sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[Spec, Spec, Spec]:
    count = new(_number_of(x))
    return (
        _dense([count], x.dtype, x.device),
        _dense([*x.sizes] if inverse else [0], torch.int64, x.device),
        _dense([count] if counts else [0], torch.int64, x.device),
    )


def _unique_consecutive(
    new: NewSize, x: Spec, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> tuple[Spec, Spec, Spec]:
    if dim is not None:
        return _unique_dim(new, x, dim, True, inverse, counts)
    return _unique(new, x, True, inverse, counts)


def _unique_dim(
    new: NewSize, x: Spec, dim: int, sorted: bool = True, inverse: bool = False,
    counts: bool = False,
) -> tuple[Spec, Spec, Spec]:  # fmt: skip
    dim %= len(x.sizes)
    count = new(x.sizes[dim] if type(x.sizes[dim]) is int else None)
    others = [*x.sizes[:dim], *x.sizes[dim + 1 :]]
    # The kernel makes rows of what it compares.
    first, *strides = _C.contiguous_strides([count, *others])
    return (
        Spec(
            [*others[:dim], count, *others[dim:]], [*strides[:dim], first, *strides[dim:]],
            x.dtype, x.device,
        ),
        _dense([x.sizes[dim]], torch.int64, x.device),
        _dense([count], torch.int64, x.device),
    )  # fmt: skip


def _bincount(new: NewSize, x: Spec, weights: Spec | None = None, minlength: int = 0) -> Spec:
    dtype = torch.int64
    if weights is not None:
        dtype = weights.dtype if weights.dtype == torch.float32 else torch.float64
    return _dense([new(None)], dtype, x.device)


def _repeat_interleave(new: NewSize, repeats: Spec, *, output_size: Any = None) -> Spec:
    return _dense([new(None) if output_size is None else output_size], torch.int64, repeats.device)


# A function of what makes a new size, and of the forms of the arguments.
RULES_OF_DATA: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique_consecutive,
    aten.unique_dim.default: _unique_dim,
    aten.bincount.default: _bincount,
    aten.repeat_interleave.Tensor: _repeat_interleave,
}
