"""Gradients of embeddings for kernels of a GPU, with what they are in float64.

Sizes are such that the last block, tile, part and strip of each kernel is not full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import regions
import torch
from kernel_cases import numbers

from torch_ort import _C
from torch_ort.engine import cuda


@dataclass(frozen=True)
class Case:
    """Rows of a gradient and their ids. Sizes are symbols of the graph, but for the table's."""

    words: ClassVar[str] = "index out of range in self"  # of the error for a bad one

    ids: torch.Tensor
    rows: int
    columns: int
    dtype: torch.dtype = torch.float32
    padding: int = -1
    tells_fault: bool = field(init=False)

    def __post_init__(self) -> None:
        is_bad = (self.ids < 0) | (self.ids >= self.rows)
        object.__setattr__(self, "tells_fault", bool(is_bad.any()))

    def graph(self) -> _C.Graph:
        """Give the operator of PyTorch as the engine's node."""
        dims = [f"N{i}" for i in range(self.ids.dim())]
        text = regions.type_text
        graph = regions.read(
            {"x": text(self.dtype, [*dims, self.columns]), "ids": text(self.ids.dtype, dims)},
            [node(self.rows, self.padding)],
            ["y"],
            types={"y": text(self.dtype, [self.rows, self.columns])},
        )
        return expanded(graph)

    def given(self) -> dict[str, torch.Tensor]:
        """Give the inputs of the graph."""
        x = numbers(*self.ids.shape, self.columns, dtype=self.dtype)
        return {"x": x, "ids": self.ids}

    def wanted(self) -> dict[str, torch.Tensor]:
        """Give the sums in float64."""
        given = self.given()
        return {"y": sums(given["x"], given["ids"], self.rows, self.padding)}

    def compare(self, got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
        """Raise AssertionError if a sum is not what it should be."""
        squares = sums(self.given()["x"].double() ** 2, self.ids, self.rows, self.padding)
        assert_sums_near(got["y"], wanted["y"], self.dtype, squares)


def assert_sums_near(
    got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, squares: torch.Tensor
) -> None:
    """Compare with sums in float64; those that nearly cancel keep the rounding of their terms.

    `squares` has the sums of the squares of the terms. The sums are compared before they are
    rounded: where one lies half-way between two short floats, either is right.
    """
    scale = squares.amax().sqrt().item() if want.numel() else 0
    atol = {torch.float64: 1e-15}.get(dtype, 1e-7) * scale
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.double(), want.double(), rtol=regions.TOLERANCE[dtype], atol=16 * atol, equal_nan=True
    )


def node(rows: int, padding: int = -1) -> str:
    """Write the node that makes the gradient y of a table from rows x and their ids."""
    names = ["grad_output", "indices"]
    attrs = f'num_weights = {rows}, padding_idx = {padding}, scale_grad_by_freq = "false"'
    return "y = " + regions.aten(
        "aten::embedding_dense_backward", "x", "ids", names=names, attrs=attrs
    )


def expanded(graph: _C.Graph) -> _C.Graph:
    """Give the graph on the GPU, with the engine's node."""
    cuda.configure()
    graph = regions.on_cuda(graph)
    _C.run_pass("expand_composites", graph)
    assert regions.ops(graph) == ["EmbeddingGrad"]
    return graph


def sums(x: torch.Tensor, ids: torch.Tensor, rows: int, padding: int = -1) -> torch.Tensor:
    """Add up rows by their ids, in float64. Ids that no row has are left out."""
    table = torch.zeros(rows, x.shape[-1], dtype=torch.float64)
    ids, x = ids.reshape(-1).long(), x.reshape(-1, x.shape[-1]).double()
    is_kept = (ids >= 0) & (ids < rows) & (ids != padding)
    return table.index_add_(0, ids[is_kept], x[is_kept])


def drawn(count: int, rows: int, seed: int = 0) -> torch.Tensor:
    """Draw ids that are as unequal as words are: the first ones are the most frequent."""
    generator = torch.Generator().manual_seed(seed)
    return (rows ** torch.rand(count, generator=generator, dtype=torch.float64) - 1).long()


def with_bad(id: int) -> torch.Tensor:
    """Give ids of twenty rows, one of which is another one."""
    ids = drawn(60, 20)
    ids[7] = id
    return ids


# The number of ids decides how many blocks sort them, and the number of rows by how many digits.
# An id of more than 128 rows has parts.
CASES: dict[str, Case] = {
    "few": Case(drawn(37, 30), 30, 12),
    "tiles": Case(drawn(1500, 600), 600, 8),
    "blocks": Case(drawn(2900, 600), 600, 8),
    "three digits": Case(drawn(2100, 300_000), 300_000, 2),
    "one digit": Case(drawn(1100, 500), 500, 4),
    "parts": Case(torch.arange(2900) % 5 // 2, 3, 132),
    "parts that begin anywhere": Case(torch.arange(900).div(150).long() % 4, 4, 4),
    "whole parts": Case(
        torch.arange(5).repeat_interleave(torch.tensor([256, 128, 129, 8, 9])), 5, 4
    ),
    "strips": Case(drawn(300, 40), 40, 300),
    "padding": Case(drawn(700, 9), 9, 8, padding=1),
    "an id below": Case(with_bad(-1), 20, 4),
    "an id behind": Case(with_bad(20), 20, 4),
    "an id far behind": Case(with_bad(1 << 40), 20, 4),
    "bfloat16": Case(drawn(700, 50), 50, 24, torch.bfloat16),
    "float16": Case(drawn(400, 33), 33, 40, torch.float16),
    "float64": Case(drawn(400, 33), 33, 6, torch.float64),
    "int32": Case(drawn(2300, 70).int(), 70, 4),
    "single columns": Case(drawn(500, 33), 33, 7, torch.bfloat16),
}
