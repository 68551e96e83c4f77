"""Rules of products of matrices, and of attention."""

from __future__ import annotations

from typing import Any

import torch

from torch_ort import _C
from torch_ort.rules.forms import (
    NoRule,
    Spec,
    broadcast_sizes,
    in_order,
    joins,
    kept_strides,
    rows,
)
from torch_ort.rules.table import rule_of

aten = torch.ops.aten


@rule_of(aten.mm.default)
def _mm(a: Spec, b: Spec) -> Spec:
    joins(a.sizes[1], b.sizes[0])
    return rows([a.sizes[0], b.sizes[1]], a)


@rule_of(aten.bmm.default)
def _bmm(a: Spec, b: Spec) -> Spec:
    joins(a.sizes[0], b.sizes[0])
    joins(a.sizes[2], b.sizes[1])
    return rows([a.sizes[0], a.sizes[1], b.sizes[2]], a)


@rule_of(aten.addmm.default)
def _addmm(x: Spec, a: Spec, b: Spec, *, beta: Any = 1, alpha: Any = 1) -> Spec:
    result = _mm(a, b)
    if not _C.same_sizes(broadcast_sizes(x.sizes, result.sizes), result.sizes):
        raise NoRule
    return result


# Attention of the CPU.


@rule_of(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(
    query: Spec, key: Spec, value: Spec, dropout: float = 0.0, is_causal: bool = False, *,
    attn_mask: Spec | None = None, scale: float | None = None,
) -> tuple[Spec, Spec]:  # fmt: skip
    batch, heads, length, _ = query.sizes
    sums = [batch, heads, length]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return (
        Spec(query.sizes, kept_strides(query), query.dtype, query.device),
        Spec(sums, in_order(sums, [0, 2, 1]), dtype, query.device),
    )


@rule_of(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_backward(
    gradient: Spec, query: Spec, key: Spec, value: Spec, *others: Any, **named: Any
) -> tuple[Spec, ...]:
    def like(x: Spec) -> Spec:
        return x._replace(strides=in_order(x.sizes, [0, 2, 1, 3]))

    return like(query), like(key), like(value)
