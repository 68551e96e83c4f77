"""Tensors without data, and arithmetic on their sizes and strides."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torch_ort import _C

Size = int | torch.SymInt


class Spec(NamedTuple):
    """A tensor without data. Strides in elements."""

    sizes: list[Size]
    strides: list[Size]
    dtype: torch.dtype
    device: torch.device


class Integer(NamedTuple):
    """What an operator gives where it gives an integer, which sizes of its arguments tell."""

    size: Size


def spec_of(tensor: torch.Tensor) -> Spec:
    """Give the form of a tensor: its sizes, strides, dtype and device."""
    return Spec(list(tensor.shape), list(tensor.stride()), tensor.dtype, tensor.device)


def empty(spec: Spec) -> torch.Tensor:
    """Make a tensor as a spec says."""
    return torch.empty_strided(spec.sizes, spec.strides, dtype=spec.dtype, device=spec.device)


class NoRule(Exception):
    """Raised by a rule for arguments that it does not cover."""


def same(a: Size, b: Size) -> bool:
    """Tell whether sizes are equal whatever the symbols are."""
    if type(a) is int and type(b) is int:
        return a == b
    return a is b or _C.same_sizes([a], [b])


def equal(a: Size, b: Size) -> bool:
    """Tell whether sizes are equal in the recorded call; a guard where that depends on symbols."""
    return same(a, b) or bool(a == b)


def value(size: Size) -> int:
    """Give the size in the recorded call, without a guard."""
    return size if type(size) is int else _C.size_value(size)


def broadcast(a: Size, b: Size) -> Size:
    """Give the size of two dims together.

    Where one is 1 only by chance, the guard says 1: no other graph could be recorded.
    """
    if same(a, b) or (type(b) is int and b == 1):
        return a
    if type(a) is int and a == 1:
        return b
    value_a, value_b = value(a), value(b)
    if value_a != value_b and 1 in (value_a, value_b):
        one, other = (a, b) if value_a == 1 else (b, a)
        equal(one, 1)
        return other
    if not equal(a, b):
        raise NoRule
    return a


def broadcast_sizes(*shapes: Sequence[Size]) -> list[Size]:
    """Broadcast shapes."""
    rank = max(map(len, shapes))
    sizes = list(shapes[0])
    for shape in shapes[1:]:
        if _C.same_sizes(sizes, shape):
            continue
        padded = [1] * (rank - len(sizes)) + sizes
        other = [1] * (rank - len(shape)) + list(shape)
        sizes = [broadcast(a, b) for a, b in zip(padded, other, strict=True)]
    return sizes


def numel(sizes: Sequence[Size]) -> Size:
    """Give the product of sizes."""
    return functools.reduce(lambda a, b: a * b, sizes, 1)


def is_contiguous(spec: Spec) -> bool:
    """Tell whether strides are row-major, whatever the symbols are."""
    expected = _C.contiguous_strides(spec.sizes)
    return all(
        same(stride, want) or (type(size) is int and size == 1)
        for stride, want, size in zip(spec.strides, expected, spec.sizes, strict=True)
    )


def dim_at(dim: int, rank: int) -> int:
    """Count a dim from the front; one number without dims has dims 0 and -1, as has a row."""
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise NoRule  # PyTorch raises the error
    return dim % max(rank, 1)


def dims_of(dim: int | Sequence[int] | None, rank: int) -> list[int]:
    """Count dims from the front; all where none is named."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(rank))
    dims = [dim_at(d, rank) for d in ([dim] if isinstance(dim, int) else dim)]
    return dims if len({*dims}) == len(dims) else no_rule()


def rows(sizes: Sequence[Size], like: Spec, dtype: torch.dtype | None = None) -> Spec:
    """Give a row-major tensor."""
    sizes = list(sizes)
    return Spec(sizes, _C.contiguous_strides(sizes), dtype or like.dtype, like.device)


def in_order(sizes: Sequence[Size], order: Sequence[int]) -> list[Size]:
    """Give strides of dims that lie in this order, the outermost first."""
    strides = _C.contiguous_strides([sizes[d] for d in order])
    result: list[Size] = [0] * len(order)
    for d, stride in zip(order, strides, strict=True):
        result[d] = stride
    return result


def kept_strides(spec: Spec) -> list[Size]:
    """Give the strides of a new tensor that keeps the layout of another (preserve_format)."""
    if is_contiguous(spec) or dense_order(spec) is not None:
        return spec.strides
    # With gaps or overlaps the order is that of the result of an elementwise operator.
    return in_order(spec.sizes, order_of(spec.sizes, [spec]))


def dense_order(spec: Spec) -> list[int] | None:
    """Give the order of the dims in memory, outermost first; None if there are gaps or overlaps."""
    strides = [value(stride) for stride in spec.strides]
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    wanted = in_order(spec.sizes, order)
    fits = all(
        same(stride, want) or (type(size) is int and size == 1)
        for stride, want, size in zip(spec.strides, wanted, spec.sizes, strict=True)
    )
    return order if fits else None


def order_of(sizes: Sequence[Size], operands: Sequence[Spec]) -> list[int]:
    """Order the dims of a new result as TensorIterator does: by the operands' strides.

    An insertion sort from the innermost dim, in which pairs that no operand decides stay.
    """
    rank = len(sizes)
    strides = []
    for operand in operands:
        missing = rank - len(operand.sizes)
        padded = [0] * missing
        for size, full, stride in zip(operand.sizes, sizes[missing:], operand.strides, strict=True):
            expanded = type(size) is int and size == 1 and not same(size, full)
            padded.append(0 if expanded else value(stride))
        strides.append(padded)
    values = [value(size) for size in sizes]

    def is_outer(a: int, b: int) -> int:
        """1 if dim a belongs outside of dim b, -1 inside, 0 undecided."""
        for row in strides:
            if row[a] == 0 or row[b] == 0:
                continue
            if row[a] != row[b]:
                return 1 if row[a] > row[b] else -1
            if values[a] > values[b]:
                return 1
        return 0

    inner_first = list(range(rank - 1, -1, -1))
    for i in range(1, rank):
        moving = i
        for j in range(i - 1, -1, -1):
            verdict = is_outer(inner_first[j], inner_first[moving])
            if verdict > 0:
                inner_first[j], inner_first[moving] = inner_first[moving], inner_first[j]
                moving = j
            elif verdict < 0:
                break
    return inner_first[::-1]


def common_device(specs: Sequence[Spec]) -> torch.device:
    """Give the device of a result: numbers on the CPU may be of another."""
    for spec in specs:
        if spec.sizes:
            return spec.device
    for spec in specs:
        if spec.device.type != "cpu":
            return spec.device
    return specs[0].device


def is_channels_last(x: Spec) -> bool:
    """Tell whether PyTorch would suggest channels-last for something new that is like a tensor."""
    inner_first = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}.get(len(x.sizes), ())
    least = 0
    for d in inner_first:
        size, stride = value(x.sizes[d]), value(x.strides[d])
        is_expanded = d == 1 and stride == 0
        is_one_channel = d == 0 and least == value(x.strides[1])
        if size == 0 or stride < least or is_expanded or is_one_channel:
            return False
        least = stride * max(size, 1)
    return bool(inner_first)


def as_image(sizes: Sequence[Size], like: Spec, dtype: torch.dtype | None = None) -> Spec:
    """Give a tensor with channels last."""
    memory_format = torch.channels_last if len(sizes) == 4 else torch.channels_last_3d
    made = rows(sizes, like, dtype)
    return made._replace(strides=format_strides(sizes, memory_format))


def format_strides(sizes: Sequence[Size], memory_format: torch.memory_format) -> list[Size]:
    """Give the strides of a memory format."""
    if memory_format == torch.contiguous_format:
        return _C.contiguous_strides(list(sizes))
    if memory_format == torch.channels_last and len(sizes) == 4:
        return in_order(sizes, [0, 2, 3, 1])
    if memory_format == torch.channels_last_3d and len(sizes) == 5:
        return in_order(sizes, [0, 2, 3, 4, 1])
    raise NoRule


def device_of(device: Any, default: torch.device) -> torch.device:
    """Give the device that an operator is asked for."""
    return default if device is None else torch.device(device)


def no_rule() -> Any:
    """Leave a call to PyTorch."""
    raise NoRule


def joins(a: Size, b: Size) -> None:
    """Leave sizes that must be equal, and are not, to PyTorch."""
    if not equal(a, b):
        raise NoRule  # PyTorch raises the error


def is_cpu(*specs: Spec | None) -> bool:
    """Tell whether all of some tensors lie on the CPU."""
    return all(spec is None or spec.device.type == "cpu" for spec in specs)
