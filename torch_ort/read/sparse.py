"""Sparse gradients in an FX graph, which look dense there: they are added, and leave it."""

from __future__ import annotations

import torch
from torch import fx

from torch_ort.core.refusals import NoCapture
from torch_ort.core.user_code import blaming
from torch_ort.read.descriptions import line_of

_SUM = torch.ops.torch_ort.sparse_sum.default
_SPARSE = frozenset(
    getattr(torch.ops.torch_ort, f"sparse_{name}_backward").default
    for name in ("embedding", "embedding_bag", "gather")
)


def add_as_sparse(graph: fx.Graph, num_outputs: int | None = None) -> None:
    """Let sums with sparse gradients be those of sparse tensors.

    `num_outputs` of the graph's results are no gradients; None: none of them is one. Raises
    NoCapture where another operator, or a result that is no gradient, is made of a sparse one.
    """
    sparse = {node for node in graph.nodes if node.target in _SPARSE}
    if not sparse:
        return
    for node in graph.nodes:
        if node.op == "output":
            if sparse.intersection(node.args[0][:num_outputs]):
                raise NoCapture("forward gives a sparse gradient as a result")
        elif not sparse.isdisjoint(node.all_input_nodes):
            if not _is_sum_in_rows(node):
                with blaming(str(node.target), line_of(node)):
                    raise NoCapture(
                        "the sparse gradient of an embedding is an argument of "
                        f"{node.target}, and a captured graph can only add it to another one"
                    )
            node.target = _SUM
            sparse.add(node)


def _is_sum_in_rows(node: fx.Node) -> bool:
    """Tell whether a node adds two gradients of one tensor, both row-major."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    return all(isinstance(arg, fx.Node) and arg.meta["val"].is_contiguous() for arg in node.args)
