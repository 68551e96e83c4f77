"""Rows of several tables side by side, and the gradients of the tables, against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import torch_ort
from tests.cpu.regions import REAL, crossed, read, run, type_text
from torch_ort import _C

# Sizes before the axis, and of each part from the axis on; a table has ids.
Part = tuple[tuple[int, ...], bool]
SHAPES: dict[str, tuple[tuple[int, ...], tuple[Part, ...]]] = {
    "side by side": ((5,), (((3,), True), ((4,), False), ((16,), True), ((8,), True))),
    "stacked": ((4,), (((1, 6), True), ((1, 6), True), ((2, 6), False))),
    "two dims of ids": ((2, 3), (((5,), True), ((2,), True))),
    "long rows": ((3,), (((300,), True), ((70,), False))),
    "no rows": ((0,), (((3,), True), ((2,), True))),
    "empty parts": ((4,), (((0,), True), ((3,), False))),
    "many rows": ((700,), (((16,), True), ((32,), True), ((1,), False))),
}
ROWS = 11


def lookups(rows: Sequence[int], parts: Sequence[tuple[Tensor, Tensor | None]], **attrs) -> Tensor:
    inputs, given, operands = {}, {}, []
    for i, (tensor, ids) in enumerate(parts):
        for name, each in ((f"x{i}", tensor), (f"z{i}", ids)):
            if each is not None:
                inputs[name] = type_text(each.dtype, each.shape)
                given[name] = each
                operands.append(name)
    tables = [int(ids is not None) for _, ids in parts]
    shapes = [x.shape[1:] if ids is not None else x.shape[len(rows) :] for x, ids in parts]
    result = torch.cat([torch.empty(*rows, *shape) for shape in shapes], len(rows)).shape
    settings = {"axis": len(rows), "tables": tables} | attrs
    text = ", ".join(f"{name} = {value}" for name, value in settings.items())
    node = f"y = torch_ort.Lookups <{text}> ({', '.join(operands)})"
    graph = read(inputs, [node], ["y"], types={"y": type_text(parts[0][0].dtype, result)})
    return run(graph, given)[0]


def concatenated(rows: Sequence[int], parts: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    return torch.cat([x if ids is None else x[ids] for x, ids in parts], len(rows))


@crossed(dtype=(torch.int64, torch.bool, *REAL), layout=("dense", "strided"), of=SHAPES)
def test_lookups(of: str, layout: str, dtype: torch.dtype) -> None:
    rows, shapes = SHAPES[of]
    parts: list[tuple[Tensor, Tensor | None]] = []
    for shape, is_table in shapes:
        sizes = (ROWS, *shape) if is_table else (*rows, *shape)
        x, ids = (torch.randn(sizes) * 3).to(dtype), torch.randint(ROWS, rows)
        if layout == "strided":  # every other column, and ids as a column of a matrix
            x = torch.stack([x, x * 0], -1)[..., 0]
            ids = torch.stack([ids, ids * 0], -1)[..., 0]
        parts.append((x, ids if is_table else None))
    got = lookups(rows, parts)
    assert torch.equal(got, concatenated(rows, parts))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bad", [-1, ROWS])
def test_ids_out_of_bounds(bad: int, threads: int) -> None:
    table, ids = torch.randn(ROWS, 64), torch.randint(ROWS, (1000,))
    ids[777] = bad
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.raises(IndexError, match="index out of range in self"):
            lookups((1000,), [(table, ids), (table, ids * 0)])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("attrs", "words"),
    [
        ({"axis": 2}, "got axis 2 of a result of 2 dims"),
        ({"axis": -1}, "Lookups: got axis"),
        ({"axis": 0}, "Lookups: got 3 ids of int64, want 1"),
        ({"tables": [1]}, "Lookups: got parts of 4 columns, want 8"),
        ({"tables": [1, 1, 1]}, "Lookups: got 4 inputs, want one for each part"),
        ({"tables": [1, 0, 0]}, "Lookups: got a part of"),
    ],
    ids=str,
)
def test_nodes_that_do_not_fit_their_operands(attrs: dict, words: str) -> None:
    table, ids = torch.randn(ROWS, 4), torch.randint(ROWS, (3,))
    with pytest.raises(_C.InternalError, match=words):
        lookups((3,), [(table, ids), (table, ids)], **attrs)


# ---- as the pass writes them ---------------------------------------------------------------------


class Tables(nn.Module):
    """Lookups of the columns of `ids`, beside a tensor."""

    def __init__(self, rows: Sequence[int], width: int, is_stacked: bool, **settings) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width, **settings) for size in rows)
        self.is_stacked = is_stacked

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        parts = [x.relu(), *(table(ids[:, i]) for i, table in enumerate(self.tables))]
        return torch.stack(parts, 1) if self.is_stacked else torch.cat(parts, 1)


def both(model: nn.Module, call: Callable, x: Tensor, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = call(leaf, ids)
    (y.sin() * torch.arange(y.numel()).view_as(y)).sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_stacked", [False, True], ids=["side by side", "stacked"])
@pytest.mark.parametrize("padding", [None, 3])
def test_training(dtype, is_stacked, padding) -> None:
    rows = [7, 300, 19, 5, 64]
    model = Tables(rows, 6, is_stacked, padding_idx=padding).to(dtype)
    compiled = torch.compile(model, backend="ort")
    for batch in (40, 3, 1):
        x = torch.randn(batch, 6, dtype=dtype)
        ids = torch.stack([torch.randint(size, (batch,)) for size in rows], 1)
        for got, want in zip(
            both(model, compiled, x, ids), both(model, model, x, ids), strict=True
        ):
            torch.testing.assert_close(got, want)


def test_one_step_looks_up_and_one_adds() -> None:
    model, x = Tables([9] * 6, 4, is_stacked=True), torch.randn(5, 4)
    graph = torch_ort.explain(model, x, torch.randint(9, (5, 6))).graphs[0]
    assert graph.nodes["torch_ort.Lookups"] == graph.nodes["torch_ort.EmbeddingGrads"] == 1
    assert graph.nodes["torch_ort.EmbeddingGrad"] == 0
    assert graph.functional.total() == 0


def test_few_tables_are_left_to_regions() -> None:
    model, x = Tables([9] * 3, 4, is_stacked=True), torch.randn(5, 4)
    graph = torch_ort.explain(model, x, torch.randint(9, (5, 3))).graphs[0]
    assert graph.nodes["torch_ort.Lookups"] == graph.nodes["torch_ort.EmbeddingGrads"] == 0
    assert graph.nodes["torch_ort.EmbeddingGrad"] == 3


def test_one_table_that_is_looked_up_often() -> None:
    """Its gradients are added up, so they are not joined."""
    table = nn.Embedding(12, 8)

    def call(ids: Tensor) -> Tensor:
        return torch.cat([table(ids[:, i]) for i in range(5)], 1).square().sum()

    ids = torch.randint(12, (6, 5))
    gradients = []
    for each in (call, torch.compile(call, backend="ort")):
        table.zero_grad()
        each(ids).backward()
        gradients.append(table.weight.grad)
    torch.testing.assert_close(*gradients)


def test_same_bits_for_any_number_of_threads() -> None:
    rows = [20_000, 5, 3000, 40, 700]
    model = Tables(rows, 16, is_stacked=True)
    x, ids = torch.randn(900, 16), torch.stack([torch.randint(r, (900,)) for r in rows], 1)
    compiled, before, results = torch.compile(model, backend="ort"), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(both(model, compiled, x, ids))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))
