"""Shape rules of sparse gradients: their form is told as if they were dense.

They are sparse when the graph runs, and leave it as they are
(csrc/run/autograd/sparse_gradients.cpp).
"""

from __future__ import annotations

from typing import Any

import torch

from torch_ort.rules.forms import Size, Spec, rows
from torch_ort.rules.table import rule_of

ops = torch.ops.torch_ort


@rule_of(ops.sparse_embedding_backward.default)
def _embedding_backward(gradient: Spec, indices: Spec, num_weights: Size, *others: Any) -> Spec:
    return rows([num_weights, gradient.sizes[-1]], gradient)


@rule_of(ops.sparse_embedding_bag_backward.default)
def _embedding_bag_backward(
    gradient: Spec, indices: Spec, offsets: Spec, bags: Spec, sizes: Spec, largest: Spec,
    num_weights: Size, *others: Any,
) -> Spec:  # fmt: skip
    return rows([num_weights, gradient.sizes[-1]], gradient)


@rule_of(ops.sparse_gather_backward.default)
def _gather_backward(gradient: Spec, source: Spec, dim: int, index: Spec) -> Spec:
    return rows(source.sizes, gradient)


@torch.library.register_fake("torch_ort::sparse_embedding_backward")
def _fake_embedding_backward(
    gradient: torch.Tensor, indices: torch.Tensor, num_weights: Size, *others: Any
) -> torch.Tensor:
    return gradient.new_empty(num_weights, gradient.shape[-1])


@torch.library.register_fake("torch_ort::sparse_embedding_bag_backward")
def _fake_embedding_bag_backward(
    gradient: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, bags: torch.Tensor,
    sizes: torch.Tensor, largest: torch.Tensor, num_weights: Size, *others: Any,
) -> torch.Tensor:  # fmt: skip
    return gradient.new_empty(num_weights, gradient.shape[-1])


@torch.library.register_fake("torch_ort::sparse_gather_backward")
def _fake_gather_backward(
    gradient: torch.Tensor, source: torch.Tensor, dim: int, index: torch.Tensor
) -> torch.Tensor:
    return gradient.new_empty(source.shape)
