"""Shape rules of reductions."""

from __future__ import annotations

from typing import Any

import torch

from torch_ort.rules.forms import Spec, dims_of, rows
from torch_ort.rules.table import rule_of

aten = torch.ops.aten


def _reduced(x: Spec, dim: Any, keepdim: bool, dtype: torch.dtype) -> Spec:
    rank = len(x.sizes)
    gone = set(dims_of(dim, rank))
    sizes = [1 if d in gone else x.sizes[d] for d in range(rank)]
    if not keepdim:
        sizes = [x.sizes[d] for d in range(rank) if d not in gone]
    return rows(sizes, x, dtype)


def _sum_dtype(x: Spec, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    return x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64


@rule_of(aten.sum.dim_IntList)
def _sum(
    x: Spec, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Spec:  # fmt: skip
    return _reduced(x, dim, keepdim, _sum_dtype(x, dtype))


@rule_of(aten.mean.dim)
def _mean(
    x: Spec, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Spec:  # fmt: skip
    return _reduced(x, dim, keepdim, dtype or x.dtype)


@rule_of(aten.sum.default)
def _sum_all(x: Spec, *, dtype: torch.dtype | None = None) -> Spec:
    return rows([], x, _sum_dtype(x, dtype))


@rule_of(aten.mean.default)
def _mean_all(x: Spec, *, dtype: torch.dtype | None = None) -> Spec:
    return rows([], x, dtype or x.dtype)


@rule_of(aten.amax.default, aten.amin.default)
def _extreme(x: Spec, dim: Any = (), keepdim: bool = False) -> Spec:
    return _reduced(x, dim, keepdim, x.dtype)
