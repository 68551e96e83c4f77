"""Parts that a region writes side by side, against eager PyTorch in float64."""

from __future__ import annotations

import re

import pytest
import regions
import torch
from regions import ISAS, REAL, TOLERANCE

from torch_ort import _C

# Few and many rows, rows longer than a tile, one of everything, none.
SIZES = [(2, 3, 8), (70, 2, 16), (1, 2, 5000), (1, 1, 1), (3, 0, 4), (5, 7, 33)]
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40]


def graph_of(
    nodes: list[str],
    dtype: torch.dtype,
    inputs: tuple[str, ...] = ("x", "z"),
    outputs: tuple[str, ...] = ("y",),
) -> _C.Graph:
    shapes = {name: regions.type_text(dtype, ("A", "B", "C")) for name in inputs}
    return regions.read(shapes, nodes, outputs)


def data(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))
    if x.numel() > len(SPECIAL):
        x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return x.to(dtype)


@regions.also_on_cuda
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_parts_are_written_where_they_belong(axis: int, dtype: torch.dtype, isa: str) -> None:
    """One graph for all sizes; a part may be an input, and may leave by itself as well."""
    nodes = ["a = Neg (z)", "b = Mul (a, x)", f"y = Concat <axis = {axis}> (a, x, b)"]
    region = regions.fused(graph_of(nodes, dtype, outputs=("y", "b")))
    for sizes in SIZES:
        x, z = data(sizes, dtype), data(sizes, dtype).flip(0)
        got, again = regions.run(region, {"x": x, "z": z}, isa)
        product = -z.double() * x.double()
        regions.assert_near(got, torch.cat([-z.double(), x.double(), product], axis))
        regions.assert_near(again, product)
        signs = torch.cat([-z, x, again], axis).signbit()
        assert torch.equal(got.signbit() | got.isnan(), signs | got.isnan())


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 2),
        lambda x: x.transpose(0, 1),
        lambda x: x[..., ::2],
        lambda x: x[:, 1:],
        lambda x: x[:1].expand(6, -1, -1),
    ],
)
def test_parts_of_any_strides(view, axis: int) -> None:
    x = view(torch.randn(6, 6, 6))
    z = torch.randn(x.shape)
    region = regions.fused(graph_of(["a = Exp (x)", f"y = Concat <axis = {axis}> (a, z)"],
                                    torch.float32))  # fmt: skip
    (got,) = regions.run(region, {"x": x, "z": z})
    regions.assert_near(got, torch.cat([x.double().exp(), z.double()], axis))


@pytest.mark.parametrize("strides", ["[1, 2, 6]", "[48, 16, 1]", "[8, 48, 1]"])
def test_a_whole_of_any_strides(strides: str) -> None:
    """With gaps too, which a captured graph may ask for and a file may not."""
    types = dict.fromkeys(("x", "z"), "float[2,3,4]")
    known = {"a": "float[2,3,4]", "y": "float[2,3,8]"}
    graph = regions.read(
        types, ["a = Neg (x)", "y = Concat <axis = 2> (a, z)"], ("y",), types=known,
        strides={"y": strides},
    )  # fmt: skip
    x, z = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    captured = _C.Session.compile(regions.fused(graph), {}, _C.SessionOptions(verify=True))
    (got,) = captured.run({"x": x, "z": z}).values()
    assert list(got.stride()) == [int(number) for number in strides[1:-1].split(",")]
    assert torch.equal(got, torch.cat([-x, z], 2))


def test_a_part_is_made_in_the_whole() -> None:
    """No copy: the program has no Store of the part that it computes."""
    region = regions.fused(
        graph_of(["a = Neg (x)", "b = Exp (z)", "y = Concat <axis = 0> (a, b)"], torch.float32)
    )
    program = regions.program(region, {"x": torch.randn(3, 4, 8), "z": torch.randn(3, 4, 8)})
    assert not re.search("Store|Load", program), program


def test_rows_are_summed_beside_the_parts() -> None:
    nodes = [
        "a = Neg (x)", "y = Concat <axis = -1> (a, z)", "total = ReduceSum (a, last)"
    ]  # fmt: skip
    types = dict.fromkeys(("x", "z"), "float[A,B,C]")
    graph = regions.read(types, nodes, ("y", "total"), ["int64[1] last = {-1}"])
    x, z = torch.randn(40, 3, 64), torch.randn(40, 3, 64)
    y, total = regions.run(regions.fused(graph), {"x": x, "z": z})
    assert torch.equal(y, torch.cat([-x, z], -1))
    near = TOLERANCE[torch.float32] * 64
    regions.assert_near(total, -x.double().sum(-1, keepdim=True), rtol=near, atol=near)


def test_bools_are_parts() -> None:
    types = dict.fromkeys(("x", "z"), "float[A,4]")
    graph = regions.read(
        types,
        ["a = Less (x, z)", "b = Greater (x, z)", "y = Concat <axis = 1> (a, b)"],
        ("y",),
        types={"y": 'bool[A,8]'},
    )  # fmt: skip
    x, z = torch.randn(9, 4), torch.randn(9, 4)
    (got,) = regions.run(regions.fused(graph), {"x": x, "z": z})
    assert torch.equal(got, torch.cat([x < z, x > z], 1))


@pytest.mark.parametrize(
    "nodes",
    [
        ["y = Concat <axis = 0> (x, z)"],  # a copy alone is as fast by itself
        ["a = Neg (x)", "y = Concat <axis = 0> (a)"],
    ],
)
def test_what_is_no_region(nodes: list[str]) -> None:
    graph = graph_of(nodes, torch.float32)
    assert "Region" not in regions.ops(regions.fuse(graph))


def test_integers_are_no_parts() -> None:
    """Regions hold integers as doubles, which not every int64 is."""
    nodes = ["a = Abs (x)", "y = Concat <axis = 0> (a, x)"]
    assert "Region" not in regions.ops(regions.fuse(graph_of(nodes, torch.int64)))
