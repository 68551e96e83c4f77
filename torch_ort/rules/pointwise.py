"""Shape rules of element-wise operators, of copies, and of random numbers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torch_ort import _C
from torch_ort.rules.forms import (
    NoRule,
    Spec,
    broadcast_sizes,
    common_device,
    device_of,
    equal,
    format_strides,
    in_order,
    is_contiguous,
    kept_strides,
    order_of,
    rows,
)
from torch_ort.rules.table import RULES, rule_of

aten = torch.ops.aten


def _pointwise_dtype(operator: Any, described: tuple, names: tuple) -> torch.dtype:
    """Ask PyTorch for the dtype of a result, with tensors of two numbers."""
    kinds = tuple(map(type, described))
    return _dtype_asked(operator, described, kinds, names, torch.get_default_dtype())


@functools.lru_cache(maxsize=4096)
def _dtype_asked(
    operator: Any, described: tuple, kinds: tuple[type, ...], names: tuple, default: torch.dtype
) -> torch.dtype:
    # Numbers of different types are equal in Python (0, False and 0j), and give other dtypes. The
    # `default` dtype is the one in force.

    def argument(item: Any) -> Any:
        if isinstance(item, _Kind):
            return torch.empty([2] * item.rank, dtype=item.dtype, device="meta")
        return item

    values = [argument(item) for item in described]
    count = len(values) - len(names)
    with torch.no_grad():
        result = operator(*values[:count], **dict(zip(names, values[count:], strict=True)))
    return result.dtype


class _Kind(NamedTuple):
    dtype: torch.dtype
    rank: int  # 0 or 1: scalars do not promote


def dtype_with(x: Spec, numbers: Sequence[int | float]) -> torch.dtype:
    """Give the dtype to which PyTorch promotes a tensor and numbers of Python."""
    number = 1.5 if any(type(each) is float for each in numbers) else 2
    described = (_Kind(x.dtype, min(len(x.sizes), 1)), number)
    return _pointwise_dtype(aten.add.Tensor, described, ())


def pointwise(operator: Any, *args: Any, **kwargs: Any) -> Spec:
    """Give what an operator gives that works element by element."""
    described, operands = [], []
    for item in (*args, *kwargs.values()):
        if isinstance(item, Spec):
            operands.append(item)
            described.append(_Kind(item.dtype, min(len(item.sizes), 1)))
        elif isinstance(item, torch.SymInt):
            described.append(2)
        elif isinstance(item, torch.SymFloat | torch.SymBool | list | tuple):
            raise NoRule
        else:
            # The dtypes depend only on the argument being a float.
            described.append(1.5 if type(item) is float else item)
    if not operands or kwargs.get("memory_format") is not None:
        raise NoRule
    dtype = _pointwise_dtype(operator, tuple(described), tuple(kwargs))
    device = common_device(operands)
    first = operands[0]
    if len(operands) == 1:
        strides = _C.contiguous_strides(first.sizes) if is_contiguous(first) else None
        return Spec(first.sizes, strides or kept_strides(first), dtype, device)
    sizes = broadcast_sizes(*(spec.sizes for spec in operands))
    if all(not spec.sizes or is_contiguous(spec) for spec in operands):
        full = [spec for spec in operands if len(spec.sizes) == len(sizes)]
        if any(_C.same_sizes(spec.sizes, sizes) for spec in full):
            return Spec(sizes, _C.contiguous_strides(sizes), dtype, device)
    return Spec(sizes, in_order(sizes, order_of(sizes, operands)), dtype, device)


def _row_major_pointwise(operator: Any, *args: Any, **kwargs: Any) -> Spec:
    spec = pointwise(operator, *args, **kwargs)
    return spec._replace(strides=_C.contiguous_strides(spec.sizes))


# Unlike other kernels, these do not depend on the layout of the operands.
for _operator in (
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.pow.Scalar, aten.mvlgamma.default,
):  # fmt: skip
    RULES[_operator] = functools.partial(_row_major_pointwise, _operator)


# Operators that lack the tag `pointwise`.
for _operator in (
    aten.hardshrink_backward.default, aten.softshrink_backward.default, aten.floor_divide.default,
):  # fmt: skip
    RULES[_operator] = functools.partial(pointwise, _operator)


@rule_of(aten.threshold_backward.default)
def _threshold_backward(gradient: Spec, x: Spec, threshold: float) -> Spec:
    return pointwise(aten.mul.Tensor, x, gradient)  # its kernel takes them in this order


@rule_of(aten.isin.Tensor_Tensor)
def _isin(x: Spec, tested: Spec, **options: bool) -> Spec:
    return rows(x.sizes, x, torch.bool)


@rule_of(aten.angle.default)
def _angle(x: Spec) -> Spec:
    if x.dtype.is_complex:
        return rows(x.sizes, x, x.dtype.to_real())
    return pointwise(aten.angle.default, x)


@rule_of(aten.clone.default, aten._to_copy.default)
def _to_copy(
    x: Spec, *, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None,
    pin_memory: bool | None = None, non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Spec:  # fmt: skip
    if memory_format is None or memory_format == torch.preserve_format:
        strides = kept_strides(x)
    else:
        strides = format_strides(x.sizes, memory_format)
    return Spec(x.sizes, strides, dtype or x.dtype, device_of(device, x.device))


@rule_of(
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.empty_like.default, aten.rand_like.default, aten.randn_like.default,
)  # fmt: skip
def _like(
    x: Spec, fill: Any = None, *, dtype: torch.dtype | None = None, layout: Any = None,
    device: Any = None, pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Spec:  # fmt: skip
    return _to_copy(x, dtype=dtype, device=device, memory_format=memory_format)


@rule_of(aten.resize_as.default)
def _resize_as(x: Spec, like: Spec, *, memory_format: torch.memory_format | None = None) -> Spec:
    if memory_format is not None or len(x.sizes) != len(like.sizes):
        raise NoRule
    if not all(map(equal, x.sizes, like.sizes)):
        raise NoRule
    return x._replace(strides=kept_strides(x))


@rule_of(aten.bernoulli.p)
def _bernoulli(x: Spec, p: float, generator: Any = None) -> Spec:
    return rows(x.sizes, x)


@rule_of(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor)
def _normal(mean: Spec | float, std: Spec | float = 1.0, *, generator: Any = None) -> Spec:
    given = [x for x in (mean, std) if isinstance(x, Spec)]
    if not all(x.dtype.is_floating_point for x in given):
        raise NoRule
    return rows(broadcast_sizes(*(x.sizes for x in given)), given[0])


@rule_of(aten.native_dropout.default)
def _dropout(x: Spec, p: float, train: bool | None) -> tuple[Spec, Spec]:
    result = Spec(x.sizes, kept_strides(x), x.dtype, x.device)
    return result, result._replace(dtype=torch.bool)


@rule_of(aten.native_dropout_backward.default)
def _dropout_backward(gradient: Spec, mask: Spec, scale: float) -> Spec:
    return pointwise(aten.mul.Tensor, gradient, mask)
