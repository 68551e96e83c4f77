"""Rows of tables in regions, against eager PyTorch in float64."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import regions
import torch
from regions import ISAS, REAL
from torch import Tensor, nn
from torch.nn import functional

import torch_ort
from torch_ort import _C

# Rows of the table, columns, shape of the ids: few and many, longer than a tile, one, none.
SIZES = [(7, 8, (2, 3)), (300, 33, (70, 2)), (4, 5000, (1, 3)), (1, 1, (1, 1)), (5, 4, (0, 3))]
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40]


def used_by(nodes: list[str], inputs: dict[str, str]) -> dict[str, str]:
    words = set(re.findall(r"\w+", " ".join(nodes)))
    return {name: text for name, text in inputs.items() if name in words}


def embedding_graph(dtype: torch.dtype, ids: torch.dtype, nodes: list[str], outputs) -> _C.Graph:
    inputs = {
        "table": regions.type_text(dtype, ("V", "D")),
        "ids": regions.type_text(ids, ("A", "B")),
        "x": regions.type_text(dtype, ("A", "B", "D")),
        "c": regions.type_text(dtype, ("D",)),
    }
    inputs = used_by(nodes, inputs)
    return regions.read(inputs, nodes, outputs, ["int64[1] last = {-1}"])


def table_of(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    table = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    if table.numel() > len(SPECIAL):
        table.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return table.to(dtype)


@regions.also_on_cuda
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", REAL)
def test_rows_of_a_table(dtype: torch.dtype, ids_dtype: torch.dtype, isa: str) -> None:
    """One graph for all sizes; looked-up rows that others read too leave beside what is made."""
    nodes = [
        "rows = Gather (table, ids)", "sum = Add (rows, c)", "y = Mul (sum, x)",
        "total = ReduceSum (y, last)",
    ]  # fmt: skip
    graph = embedding_graph(dtype, ids_dtype, nodes, ("y", "rows", "total"))
    region = regions.fused(graph)
    for rows, columns, shape in SIZES:
        table, c = table_of(rows, columns, dtype), torch.randn(columns).to(dtype)
        x = torch.randn(*shape, columns).to(dtype)
        ids = torch.randint(rows, shape).to(ids_dtype)
        y, looked_up, total = regions.run(
            region, {"table": table, "ids": ids, "x": x, "c": c}, isa
        )  # fmt: skip
        want = (table.double()[ids.long()] + c.double()) * x.double()
        torch.testing.assert_close(looked_up, table[ids.long()], rtol=0, atol=0, equal_nan=True)
        regions.assert_near(y, want, atol=1e-6 if dtype == torch.float32 else None)
        near = columns * regions.TOLERANCE[dtype]
        if not want.isnan().any() and columns < 100:
            regions.assert_near(total, want.sum(-1, keepdim=True), rtol=near, atol=near)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 1, 3), (0,)])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.t().contiguous().t(),
        lambda x: x[::2],
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(6, -1),
    ],
)
def test_tables_and_ids_of_any_layout(view: Callable[[Tensor], Tensor], shape) -> None:
    table = view(torch.randn(8, 12))
    ids = torch.randint(len(table), shape)
    for given in (ids, ids.flip(0).transpose(0, -1), ids[:1].expand(shape)):
        with torch.no_grad():
            compiled = torch.compile(
                lambda t, i: torch.tanh(functional.embedding(i, t)).exp(), backend="ort"
            )
            want = functional.embedding(given, table).tanh().exp()
            torch.testing.assert_close(compiled(table, given), want)


def test_tables_of_more_dims() -> None:
    inputs = {"table": "float[V,H,D]", "ids": "int64[N]"}
    nodes = ["rows = Gather (table, ids)", "e = Tanh (rows)", "y = Neg (e)"]
    region = regions.fused(regions.read(inputs, nodes, ("y",)))
    for shape in ((5, 2, 3), (2, 1, 70), (3, 4, 1)):
        table, ids = torch.randn(shape), torch.randint(shape[0], (11,))
        (got,) = regions.run(region, {"table": table, "ids": ids})
        regions.assert_near(got, -table.double()[ids].tanh())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("id_", [-1, 5, 2**40, -(2**40)])
def test_an_id_that_names_no_row(id_: int, threads: int) -> None:
    """The same error as eager PyTorch, whichever thread finds it."""
    torch.set_num_threads(threads)
    nodes = ["rows = Gather (table, ids)", "a = Mul (rows, rows)", "y = Tanh (a)"]
    region = regions.fused(embedding_graph(torch.float32, torch.int64, nodes, ("y",)))
    table, ids = torch.randn(5, 64), torch.zeros(3000, 4, dtype=torch.int64)
    ids[2999, 3] = id_
    with pytest.raises(IndexError, match="index out of range in self"):
        functional.embedding(ids, table)
    with pytest.raises(IndexError, match="index out of range in self"):
        regions.run(region, {"table": table, "ids": ids})


def test_two_lookups_in_one_table_and_in_two() -> None:
    inputs = {"table": "float[V,D]", "other": "float[W,D]"}
    inputs |= dict.fromkeys(("i", "j"), "int64[A,B]")
    nodes = [
        "p = Gather (table, i)", "q = Gather (table, j)", "r = Gather (other, i)",
        "s = Add (p, q)", "y = Mul (s, r)",
    ]  # fmt: skip
    region = regions.fused(regions.read(inputs, nodes, ("y",)))
    table, other = torch.randn(9, 16), torch.randn(5, 16)
    i, j = torch.randint(5, (7, 3)), torch.randint(9, (7, 3))
    (got,) = regions.run(region, {"table": table, "other": other, "i": i, "j": j})
    regions.assert_near(got, (table.double()[i] + table.double()[j]) * other.double()[i])


@pytest.mark.parametrize(
    "nodes",
    [
        ["y = Gather (table, ids)"],  # as fast by itself
        ["y = Gather <axis = 1> (table, ids)", "z = Neg (y)"],
        ["rows = Gather (table, ids)", "y = MatMul (rows, w)"],
        ["exp = Exp (table)", "y = Gather (exp, ids)"],  # all rows, to look some of them up
    ],
)
def test_what_is_no_region(nodes: list[str]) -> None:
    inputs = {"table": "float[V,D]", "ids": "int64[A,B]", "w": "float[D,D]"}
    inputs = used_by(nodes, inputs)
    output = nodes[-1].split()[0]
    assert "Region" not in regions.ops(regions.fuse(regions.read(inputs, nodes, (output,))))


def test_integers_are_looked_up_as_they_are() -> None:
    nodes = ["rows = Gather (table, ids)", "y = Less (rows, rows)"]
    graph = embedding_graph(torch.int64, torch.int64, nodes, ("y",))
    assert "Region" not in regions.ops(regions.fuse(graph))


def test_same_bits_for_any_number_of_threads() -> None:
    nodes = ["rows = Gather (table, ids)", "a = Mul (rows, x)", "y = ReduceSum (a, last)"]
    region = regions.fused(embedding_graph(torch.float32, torch.int64, nodes, ("y",)))
    inputs = {
        "table": torch.randn(100, 64), "ids": torch.randint(100, (500, 4)),
        "x": torch.randn(500, 4, 64),
    }  # fmt: skip
    results = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        results += regions.run(region, inputs)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


class Embedder(nn.Module):
    """Tokens, places and segments, as BERT adds them up; with padding."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 16, padding_idx=0, dtype=dtype)
        self.places = nn.Embedding(12, 16, dtype=dtype)
        self.segments = nn.Embedding(2, 16, dtype=dtype)
        self.norm = nn.LayerNorm(16, dtype=dtype)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        hidden = 4 * self.tokens(ids) + self.places(places) + self.segments(segments)
        return self.norm(hidden)


@pytest.mark.hands_over("Dynamo gives a norm's eps as a tensor (dynamic=True)")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_training_of_embeddings(dtype: torch.dtype, dynamic: bool) -> None:
    torch.manual_seed(0)
    model = Embedder(dtype)
    compiled = torch.compile(model, backend="ort", dynamic=dynamic, options={"check": 2})
    torch_ort.reset_counters()
    near = {"rtol": 0.05, "atol": 0.1} if dtype == torch.bfloat16 else {}
    for batch, length in ((3, 7), (2, 12), (3, 7)):
        ids, segments = torch.randint(50, (batch, length)), torch.randint(2, (batch, length))
        ids[0, 0] = 0
        results = []
        for call in (compiled, model):
            model.zero_grad()
            loss = call(ids, segments).square().mul(torch.linspace(0, 1, 16, dtype=dtype)).mean()
            loss.backward()
            results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        torch.testing.assert_close(*results, **near)
    assert not any(count for key, count in torch_ort.counters().items() if "fallback" in key)


def test_long_rows_leave_several_times() -> None:
    """Rows that are taken in chunks and stored in more than one place, in one phase."""
    inputs = {"table": "float[V,D]", "ids": "int64[A,B]"}
    nodes = ["rows = Gather (table, ids)", "y = Concat <axis = 0> (rows, rows)"]
    region = regions.fused(regions.read(inputs, nodes, ("rows", "y")))
    table, ids = torch.randn(7, 5000), torch.randint(7, (2, 3))
    rows, y = regions.run(region, {"table": table, "ids": ids})
    assert torch.equal(rows, table[ids])
    assert torch.equal(y, torch.cat([rows, rows]))
    assert "phase 1" not in regions.program(region, {"table": table, "ids": ids})
