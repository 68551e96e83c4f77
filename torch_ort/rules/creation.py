"""Shape rules of operators that create tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ort import _C
from torch_ort.rules.forms import NoRule, Size, Spec, device_of, no_rule
from torch_ort.rules.table import rule_of

aten = torch.ops.aten


def _new(
    sizes: Sequence[Size], dtype: torch.dtype | None, device: Any, layout: Any = None
) -> Spec:  # fmt: skip
    if layout not in (None, torch.strided):
        raise NoRule
    sizes = list(sizes)
    return Spec(
        sizes, _C.contiguous_strides(sizes), dtype or torch.get_default_dtype(),
        device_of(device, torch.get_default_device()),
    )  # fmt: skip


@rule_of(aten.zeros.default, aten.ones.default, aten.empty.memory_format)
def _filled(
    sizes: Sequence[Size], *, dtype: torch.dtype | None = None, layout: Any = None,
    device: Any = None, pin_memory: bool | None = None, memory_format: Any = None,
) -> Spec:  # fmt: skip
    return no_rule() if memory_format is not None else _new(sizes, dtype, device, layout)


@rule_of(aten.full.default)
def _full(
    sizes: Sequence[Size], fill: Any, *, dtype: torch.dtype | None = None, layout: Any = None,
    device: Any = None, pin_memory: bool | None = None,
) -> Spec:  # fmt: skip
    if dtype is None:
        kinds = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}
        if type(fill) not in kinds:
            raise NoRule
        dtype = kinds[type(fill)]
    return _new(sizes, dtype, device, layout)


@rule_of(aten.scalar_tensor.default)
def _scalar_tensor(
    number: Any, *, dtype: torch.dtype | None = None, layout: Any = None, device: Any = None,
    pin_memory: bool | None = None,
) -> Spec:  # fmt: skip
    return _new([], dtype, device, layout)


@rule_of(aten.arange.start_step)
def _arange(
    start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None, layout: Any = None,
    device: Any = None, pin_memory: bool | None = None,
) -> Spec:  # fmt: skip
    if any(isinstance(number, float | torch.SymFloat) for number in (start, end, step)):
        raise NoRule
    if not (type(step) is int and step == 1) or not bool(end - start >= 0):
        raise NoRule
    return _new([end - start], dtype or torch.int64, device, layout)


@rule_of(
    aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default
)  # fmt: skip
def _new_like(
    x: Spec, sizes: Sequence[Size], *, dtype: torch.dtype | None = None, layout: Any = None,
    device: Any = None, pin_memory: bool | None = None,
) -> Spec:  # fmt: skip
    return _new(sizes, dtype or x.dtype, device_of(device, x.device), layout)


@rule_of(aten.arange.default)
def _arange_to(end: Any, **kwargs: Any) -> Spec:
    return _arange(0, end, **kwargs)


@rule_of(aten.arange.start)
def _arange_from(start: Any, end: Any, **kwargs: Any) -> Spec:
    return _arange(start, end, **kwargs)
