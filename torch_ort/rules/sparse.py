"""Shape rules of sparse gradients: their form is told as if they were dense.

They are sparse when the graph runs, and leave it as they are
(csrc/run/autograd/sparse_gradients.cpp).
"""

from __future__ import annotations

from typing import Any

from torch_ort.rules.forms import Size, Spec, rows
from torch_ort.rules.table import rule_of_ours


@rule_of_ours("sparse_embedding_backward")
def _embedding_backward(gradient: Spec, indices: Spec, num_weights: Size, *others: Any) -> Spec:
    return rows([num_weights, gradient.sizes[-1]], gradient)


@rule_of_ours("sparse_embedding_bag_backward")
def _embedding_bag_backward(
    gradient: Spec, indices: Spec, offsets: Spec, bags: Spec, sizes: Spec, largest: Spec,
    num_weights: Size, *others: Any,
) -> Spec:  # fmt: skip
    return rows([num_weights, gradient.sizes[-1]], gradient)


@rule_of_ours("sparse_gather_backward")
def _gather_backward(gradient: Spec, source: Spec, dim: int, index: Spec) -> Spec:
    return rows(source.sizes, gradient)
