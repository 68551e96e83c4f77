"""Gradients of places along one dim for kernels of a GPU, with what they are in float64.

Sizes are such that the last block, strip and dim of each kernel is not full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import regions
import torch
from embedding_cases import assert_sums_near, drawn
from kernel_cases import numbers

from torch_ort import _C
from torch_ort.engine import cuda


@dataclass(frozen=True)
class Case:
    """Parts of a tensor of some shape, and their places along a dim.

    The sizes of the places are symbols of the graph.
    """

    words: ClassVar[str] = "index is out of bounds for its dimension"  # of the error for a bad one

    places: torch.Tensor
    shape: tuple[int, ...]
    axis: int
    dtype: torch.dtype = torch.float32
    is_transposed: bool = False  # the parts lie in memory with their last dim first
    tells_fault: bool = field(init=False)

    def __post_init__(self) -> None:
        size = self.shape[self.axis]
        is_bad = (self.places < -size) | (self.places >= size)
        object.__setattr__(self, "tells_fault", bool(is_bad.any()))

    def _around(self, sizes: tuple[int | str, ...]) -> list[int | str]:
        return [*self.shape[: self.axis], *sizes, *self.shape[self.axis + 1 :]]

    def graph(self) -> _C.Graph:
        """Give the operator of PyTorch as the engine's node."""
        dims = tuple(f"N{i}" for i in range(self.places.dim()))
        text = regions.type_text
        none = '"", '
        nodes = [
            f"zeros = ConstantOfShape <value = {text(self.dtype, [1])} {{0}}> (sizes)",
            'y = org.pytorch.aten.ATen <operator = "aten::index_put", overload_name = "", '
            f'tensor_args = ["self", "indices:{self.axis + 1}", "values"], accumulate = "true"> '
            f"(zeros, {none * self.axis}places, x)",
        ]
        sizes = ",".join(str(size) for size in self.shape)
        graph = regions.read(
            {"x": text(self.dtype, self._around(dims)), "places": text(self.places.dtype, dims)},
            nodes,
            ["y"],
            [f"int64[{len(self.shape)}] sizes = {{{sizes}}}"],
            types={"y": text(self.dtype, self.shape)},
        )
        return taken(graph)

    def given(self) -> dict[str, torch.Tensor]:
        """Give the inputs of the graph."""
        x = numbers(*self._around(tuple(self.places.shape)), dtype=self.dtype)
        if self.is_transposed:
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        return {"x": x, "places": self.places}

    def wanted(self) -> dict[str, torch.Tensor]:
        """Give the sums in float64."""
        return {"y": sums(self.given()["x"], self.places, self.shape, self.axis)}

    def compare(self, got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
        """Raise AssertionError if a sum is not what it should be."""
        squares = sums(self.given()["x"].double() ** 2, self.places, self.shape, self.axis)
        assert_sums_near(got["y"], wanted["y"], self.dtype, squares)


def taken(graph: _C.Graph) -> _C.Graph:
    """Give the graph on the GPU, with the engine's node."""
    cuda.configure()
    graph = regions.on_cuda(graph)
    _C.run_pass("take_places", graph)
    _C.run_pass("remove_dead", graph)
    assert regions.ops(graph) == ["TakeGrad"]
    return graph


def sums(x: torch.Tensor, places: torch.Tensor, shape: tuple[int, ...], axis: int) -> torch.Tensor:
    """Add up parts at their places, in float64. Places that do not exist are left out."""
    x = x.flatten(axis, axis + places.dim() - 1) if places.dim() else x.unsqueeze(axis)
    size, places = shape[axis], places.reshape(-1).long()
    is_kept = (places >= -size) & (places < size)
    parts = x.double().index_select(axis, is_kept.nonzero()[:, 0])
    whole = torch.zeros(shape, dtype=torch.float64)
    return whole.index_add_(axis, places[is_kept] % max(size, 1), parts)


def mixed(count: int, size: int, seed: int = 0) -> torch.Tensor:
    """Draw places, half of which count from the end, where the first ones are the most frequent."""
    places = drawn(count, size, seed)
    return torch.where(torch.arange(count) % 2 == 0, places, places - size)


def with_bad(place: int) -> torch.Tensor:
    """Give places of twenty, one of which is another one."""
    places = mixed(60, 20)
    places[7] = place
    return places


CASES: dict[str, Case] = {
    "taken rows": Case(mixed(37, 30), (30, 12), 0),
    "taken columns": Case(mixed(50, 40), (37, 40), 1),
    "taken runs": Case(mixed(50, 21), (3, 21, 12), 1),
    "taken of transposed": Case(mixed(50, 21), (3, 21, 12), 1, is_transposed=True),
    "taken within": Case(mixed(700, 35), (2, 3, 35, 6), 2),
    "taken often": Case(mixed(2900, 5), (3, 5, 44), 1),
    "taken columns often": Case(mixed(900, 7), (45, 7), 1),
    "taken of many": Case(mixed(1500, 600), (5, 600, 8), 1),
    "taken in strips": Case(mixed(40, 33), (70, 33, 4), 1),
    "taken of one dim": Case(mixed(90, 33), (33,), 0),
    "a place below": Case(with_bad(-21), (3, 20, 4), 1),
    "a place behind": Case(with_bad(20), (3, 20, 4), 1),
    "taken bfloat16": Case(mixed(300, 30), (3, 30, 24), 1, torch.bfloat16),
    "taken float16": Case(mixed(200, 30), (3, 30, 8), 1, torch.float16),
    "taken float64": Case(mixed(200, 30), (3, 30, 6), 1, torch.float64),
    "taken int32": Case(mixed(200, 30).int(), (3, 30, 4), 1),
}
