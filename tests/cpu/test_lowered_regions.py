"""Fused regions whose nodes run one by one: in the place of a kernel, and beside one to check it.

| what                               | where                                    |
| ---------------------------------- | ---------------------------------------- |
| random bodies, all dtypes          | nodes as kernels, and as a check of them |
| short floats, rounded or not       | nodes compute in what kernels compute in |
| random masks, symbols, lookups     | a training step with dropout             |
| no generator                       | nodes; nothing is fused; masks refused   |
| a wrong kernel                     | the message, and the option that asks    |
| infinities, NaN, no elements       | are no difference                        |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import regions
import torch
from hypothesis import given
from hypothesis import strategies as st
from regions import type_text
from test_random_bodies import SIZES, TOLERANCE, assert_near, bodies, examples, wide
from torch import nn

import torch_ort
from torch_ort import _C

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def run(graph: _C.Graph, inputs: dict[str, torch.Tensor], mode: str) -> list[torch.Tensor]:
    compiled = _C.Session.compile(graph, {}, _C.SessionOptions(region_mode=mode, verify=True))
    return list(compiled.run({name: tensor.clone() for name, tensor in inputs.items()}).values())


@pytest.fixture
def plant_codegen() -> Iterator[Callable[..., None]]:
    """Let a test take another code generator."""
    yield _C.testing.plant_codegen
    _C.testing.plant_codegen("own")


def softmax_like(dtype: torch.dtype, rows: int = 5, columns: int = 7) -> _C.Graph:
    return regions.fused(
        regions.read(
            {"x": type_text(dtype, (rows, columns))},
            [
                "largest = ReduceMax <keepdims = 1> (x, axis)",
                "shifted = Sub (x, largest)",
                "e = Exp (shifted)",
                "total = ReduceSum <keepdims = 1> (e, axis)",
                "y = Div (e, total)",
            ],
            ["y"],
            ["int64[1] axis = {-1}"],
        )
    )


@examples(60)
@given(body=bodies(), dtype=st.sampled_from(list(TOLERANCE)))
def test_random_bodies_give_the_same_node_by_node(body, dtype):
    plain, fused = body.graph(torch.float64), regions.fuse(body.graph(dtype))
    # Copies of its inputs: kernels write over these.
    copied = regions.fuse(body.graph(dtype, is_copied=True))
    checked = _C.Session.compile(copied, {}, _C.SessionOptions(region_mode="checked"))
    for sizes in SIZES:
        inputs = body.data(sizes, dtype)
        want = regions.run(plain, wide(inputs))
        assert_near(run(fused, inputs, "nodes"), want, dtype)
        given = {f"given_{name}" if name in body.inputs else name: x for name, x in inputs.items()}
        assert_near(list(checked.run(given).values()), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nodes_compute_in_the_dtype_that_kernels_compute_in(dtype):
    torch.manual_seed(0)
    x = torch.randn(5, 7, dtype=dtype) * 3
    (got,) = run(softmax_like(dtype), {"x": x}, "nodes")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    want = torch.softmax(x.to(wide), -1).to(dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got, want, rtol=torch.finfo(dtype).eps * (4 if dtype == wide else 1), atol=0
    )


def test_nodes_round_as_operators_do_if_regions_do():
    torch.manual_seed(0)
    x = torch.randn(64, dtype=torch.bfloat16)
    graph = regions.fused(
        regions.read(
            {"x": "bfloat16[64]"},
            ["a = Exp (x)", "b = Mul (a, a)", "y = Sub (b, x)"],
            ["y"],
            types={"y": "bfloat16[64]"},
        )
    )
    compiled = _C.Session.compile(
        graph, {}, _C.SessionOptions(region_mode="nodes", emulate_eager_casts=True)
    )
    (got,) = compiled.run({"x": x}).values()
    assert torch.equal(got, x.exp() * x.exp() - x)


@pytest.mark.parametrize("mode", ["nodes", "checked"])
@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([[torch.inf, 1, 2], [0, torch.nan, 1], [-torch.inf] * 3, [3e38, -3e38, 0]]),
        torch.zeros(0, 3),
        torch.zeros(3, 0),
    ],
    ids=["infinities", "no rows", "no columns"],
)
def test_infinities_and_nothing_are_no_difference(x, mode):
    rows, columns = x.shape
    graph = regions.fuse(
        regions.read(
            {"x": f"float[{rows},{columns}]"},
            ["a = Mul (x, x)", "b = Sub (a, x)", "y = Exp (b)"],
            ["y"],
        )
    )
    (got,) = run(graph, {"x": x}, mode)
    torch.testing.assert_close(got, (x * x - x).exp(), equal_nan=True)


def test_a_wrong_kernel_is_named(plant_codegen):
    graph = softmax_like(torch.float32)
    x = torch.randn(5, 7)
    plant_codegen("wrong", "e")
    wrong = run(graph, {"x": x}, "kernel")[0]
    assert wrong[0, 0] >= 32
    with pytest.raises(_C.InternalError) as error:
        run(graph, {"x": x}, "checked")
    assert str(error.value).startswith("check: region 'largest_to_y': result 'y': 1 of 35 ")
    assert "elements differ from its nodes run one by one; the worst, [0, 0]: got " in str(
        error.value
    )
    right = run(graph, {"x": x}, "nodes")[0]
    torch.testing.assert_close(right, torch.softmax(x, -1))


def test_without_a_generator_nodes_run_one_by_one(plant_codegen):
    graph = softmax_like(torch.float32)
    x = torch.randn(5, 7)
    plant_codegen("none")
    compiled = _C.Session.compile(graph, {})
    (got,) = compiled.run({"x": x}).values()
    torch.testing.assert_close(got, torch.softmax(x, -1))
    ((name, program),) = compiled.programs()
    assert name == "largest_to_y"
    assert program.split() == ["node", "by", "node", "ReduceMax", "Sub", "Exp", "ReduceSum", "Div"]
    unfused = regions.read({"x": "float[5,7]"}, ["a = Exp (x)", "y = Mul (a, x)"], ["y"])
    assert regions.ops(regions.fuse(unfused)) == ["Exp", "Mul"]


def test_without_a_generator_nothing_draws_a_mask(plant_codegen):
    drawn = regions.read(
        {"seed": "int64", "x": "float[4,3]"},
        ["mask = torch_ort.PhiloxMask <keep = 0.5, stream = 0> (seed)"],
        ["mask"],
        types={"mask": "bool[4,3]"},
    )
    graph = regions.fused(drawn)
    seed = {"seed": torch.tensor(7), "x": torch.zeros(4, 3)}
    (kernel,), (nodes,) = run(graph, seed, "kernel"), run(graph, seed, "nodes")
    assert torch.equal(kernel, nodes)
    plant_codegen("none")
    with pytest.raises(_C.Unsupported, match="Region 'mask_to_mask': no kernel for device 'cpu'"):
        run(graph, seed, "kernel")


def test_an_unknown_mode_is_refused():
    with pytest.raises(_C.UserError, match="region_mode: got 'fast', want one of kernel, checked"):
        _C.Session.compile(softmax_like(torch.float32), {}, _C.SessionOptions(region_mode="fast"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 12)
        self.norm = nn.LayerNorm(12)
        self.linear = nn.Linear(12, 11)
        self.dropout = nn.Dropout(0.3)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.dropout(nn.functional.gelu(self.norm(self.embedding(ids))))
        return nn.functional.cross_entropy(self.linear(x).flatten(0, 1), labels.flatten())


def train_step(**options: object) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Block()
    compiled = torch.compile(model, backend="ort", options=options)
    losses = []
    for size in (5, 6, 7):  # of which the second makes a symbol
        ids = torch.arange(3 * size).reshape(3, size) % 11
        torch.manual_seed(1)
        loss = compiled(ids, ids.roll(1))
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(parameter.grad for parameter in model.parameters())]


def test_a_training_step_is_the_same_with_checks_and_without_kernels():
    want = train_step()
    torch_ort.reset_counters()
    checked = train_step(check=3)
    assert all(map(torch.equal, checked, want))
    without = train_step(disable=("region_kernels",))
    for one, other in zip(without, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert torch_ort.counters()["fallbacks"] == 0
