"""Shape rules of matrix products and of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ort import _C
from torch_ort.rules.forms import (
    Integer,
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


# ---- attention on the CPU


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


# ---- attention on GPUs. Heads and rows are in memory as [batch, rows, heads, head].


@rule_of(aten._scaled_dot_product_flash_attention.default)
def _flash_attention(
    query: Spec, key: Spec, value: Spec, dropout: float = 0.0, is_causal: bool = False,
    with_mask: bool = False, *, scale: float | None = None,
) -> tuple[Spec | Integer | None, ...]:  # fmt: skip
    if with_mask:
        raise NoRule
    batch, heads, length, _ = query.sizes
    return (
        Spec(query.sizes, kept_strides(query), query.dtype, query.device),
        rows([batch, heads, length], query, torch.float32),
        None,
        None,
        Integer(length),
        Integer(key.sizes[2]),
        rows([2], query, torch.uint64),
        rows([], query, torch.uint64),
        rows([0], query),
    )


@rule_of(aten._scaled_dot_product_flash_attention_backward.default)
def _flash_attention_backward(
    gradient: Spec, query: Spec, key: Spec, value: Spec, *others: Any, **named: Any
) -> tuple[Spec, ...]:
    return tuple(x._replace(strides=kept_strides(x)) for x in (query, key, value))


@rule_of(aten._scaled_dot_product_cudnn_attention.default)
def _cudnn_attention(
    query: Spec, key: Spec, value: Spec, bias: Spec | None, with_sums: bool, dropout: float = 0.0,
    is_causal: bool = False, with_mask: bool = False, *, scale: float | None = None,
) -> tuple[Spec | Integer | None, ...]:  # fmt: skip
    batch, heads, length, width = query.sizes
    if with_mask or not _C.same_sizes([width], [value.sizes[3]]):
        raise NoRule
    state = rows([], query, torch.int64)
    return (
        Spec(query.sizes, kept_strides(query), query.dtype, query.device),
        rows([batch, heads, length, 1], query, torch.float32) if with_sums else None,
        None,
        None,
        Integer(length),
        Integer(key.sizes[2]),
        state,
        state,
        None,
    )


@rule_of(aten._scaled_dot_product_cudnn_attention_backward.default)
def _cudnn_attention_backward(
    gradient: Spec, query: Spec, key: Spec, value: Spec, *others: Any, **named: Any
) -> tuple[Spec, ...]:
    return tuple(x._replace(strides=kept_strides(x)) for x in (query, key, value))


# In the memory-efficient kernels, the number of rows of log-sums is a multiple of this.
_EFFICIENT_ROWS = 32


def _rows_before_heads(x: Spec) -> Spec:
    return x._replace(strides=in_order(x.sizes, [0, 2, 1, 3]))


@rule_of(aten._scaled_dot_product_efficient_attention.default)
def _efficient_attention(
    query: Spec, key: Spec, value: Spec, bias: Spec | None, with_sums: bool,
    dropout: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Spec, ...]:  # fmt: skip
    batch, heads, length, _ = query.sizes
    padded = (length + _EFFICIENT_ROWS - 1) // _EFFICIENT_ROWS * _EFFICIENT_ROWS
    # The kernel returns on the host at which position of the random stream it began.
    state = Spec([], [], torch.int64, torch.device("cpu") if dropout > 0 else query.device)
    return (
        _rows_before_heads(query._replace(sizes=[batch, heads, length, value.sizes[3]])),
        rows([batch, heads, padded if with_sums else 0], query, torch.float32),
        state,
        state,
    )


@rule_of(aten._scaled_dot_product_efficient_attention_backward.default)
def _efficient_attention_backward(
    gradient: Spec, query: Spec, key: Spec, value: Spec, bias: Spec | None, output: Spec,
    sums: Spec, seed: Spec, offset: Spec, dropout: float, wanted: Sequence[bool],
    is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Spec | None, ...]:  # fmt: skip
    if bias is not None and wanted[3]:
        raise NoRule
    return *map(_rows_before_heads, (query, key, value)), None
