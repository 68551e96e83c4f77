"""Random graphs of point-wise nodes, lookups and reductions over broadcast shapes: fused they give
what PyTorch's kernels give of doubles, and the same bits for any number of threads.
"""

from __future__ import annotations

import os

import pytest
import regions
import torch
from emulated.cuda_driver import ORDERS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from regions import ISAS

from torch_ort import _C

# What follows each sum and product, so that no number becomes large and with it what it is off by.
BOUNDED = ("Tanh", "Sigmoid", "Sin", "Cos", "Erf")
UNARY = (*BOUNDED, "Neg", "Abs", "Relu", "Gelu")
BINARY = ("Add", "Sub", "Mul", "Max", "Min")
# Steps read inputs alone: the least difference before one would be a large difference behind it.
STEPS = ("Floor", "Sign", "Ceil")
COMPARE = ("Less", "GreaterOrEqual", "Equal")
EXTREMES = ("ReduceMean", "ReduceMax", "ReduceMin")
# Odd ones, one of everything, more rows than a tile holds, longer rows than it holds, none.
SIZES = [
    {"A": 2, "B": 3, "C": 5},
    {"A": 1, "B": 1, "C": 1},
    {"A": 70, "B": 2, "C": 33},
    {"A": 2, "B": 3, "C": 2100},
    {"A": 0, "B": 3, "C": 5},
]
# Too long for the registers of one block, and so long that several blocks share a row.
LONG = [{"A": 2, "B": 1, "C": 17001}, {"A": 1, "B": 2, "C": 66001}]
FULL = ("A", "B", "C")
TABLE_ROWS = 7
SHAPES = [FULL, ("C",), ("B", "C"), ("A", 1, 1), ("A", "B", 1), ("A", 1, "C"), (1, "B", 1), ()]
# Sums to the largest of their numbers; of narrow types also what crosses from region to region.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12, torch.bfloat16: 0.1}

# In the numbers of onnx, whose text knows no constants of bfloat16.
ONNX = {torch.float32: 1, torch.float64: 11, torch.bfloat16: 16}

Shape = tuple[int | str, ...]


def broadcast(*shapes: Shape) -> Shape:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((dim for dim in dims if dim != 1), 1) for dims in zip(*padded, strict=True))


class Body:
    """A graph as it is drawn."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.inputs = {"x0": FULL}
        for number in range(1, draw(st.integers(1, 3))):
            self.inputs[f"x{number}"] = draw(st.sampled_from(SHAPES))
        self.shapes: dict[str, Shape] = dict(self.inputs)
        self.nodes: list[str] = []
        self.lookups = 0
        self.constants: list[str] = []
        kinds = (
            self.unary, self.binary, self.binary, self.step, self.where, self.row, self.column,
            self.lookup,
        )  # fmt: skip
        for _ in range(draw(st.integers(2, 8))):
            draw(st.sampled_from(kinds))(self.choose(self.shapes))
        made = [name for name in self.shapes if name not in self.inputs]
        outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3))
        if draw(st.booleans()):
            outputs.append(self.concat())
        self.outputs = list(dict.fromkeys([*outputs, made[-1]]))

    def __repr__(self) -> str:
        return f"{self.inputs}: {'; '.join(self.nodes)} -> {self.outputs}"

    def choose(self, names) -> str:
        return self.draw(st.sampled_from(list(names)))

    def add(self, op: str, *operands: str, shape: Shape | None = None) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(f"{name} = {op} ({', '.join(operands)})")
        self.shapes[name] = self.shapes[operands[0]] if shape is None else shape
        return name

    def axes(self, axes: range) -> str:
        name = f"axes{len(self.constants)}"
        self.constants.append(f"int64[{len(axes)}] {name} = {{{', '.join(map(str, axes))}}}")
        return name

    def unary(self, a: str) -> None:
        self.add(self.choose(UNARY), a)

    def step(self, _: str) -> None:
        self.add(self.choose(STEPS), self.choose(self.inputs))

    def binary(self, a: str) -> None:
        b = self.choose(self.shapes)
        shape = broadcast(self.shapes[a], self.shapes[b])
        self.add(self.choose(BOUNDED), self.add(self.choose(BINARY), a, b, shape=shape))

    def where(self, a: str) -> None:
        b, left, right = self.choose(self.shapes), *(self.choose(self.inputs) for _ in range(2))
        shape = broadcast(self.shapes[left], self.shapes[right])
        truth = self.add(self.choose(COMPARE), left, right, shape=shape)
        shape = broadcast(self.shapes.pop(truth), self.shapes[a], self.shapes[b])
        self.add("Where", truth, a, b, shape=shape)

    def lookup(self, _: str) -> None:
        self.add("Gather", f"table{self.lookups}", f"ids{self.lookups}", shape=FULL)
        self.lookups += 1

    def concat(self) -> str:
        whole = [name for name, shape in self.shapes.items() if shape == FULL]
        parts = self.draw(st.lists(st.sampled_from(whole), min_size=2, max_size=3))
        axis = self.draw(st.integers(-3, 2))
        name = f"v{len(self.nodes)}"
        self.nodes.append(f"{name} = Concat <axis = {axis}> ({', '.join(parts)})")
        return name

    def row(self, a: str) -> None:
        shape = self.shapes[a]
        if len(shape) < 2:
            return self.unary(a)
        count = self.draw(st.integers(1, len(shape) - 1))
        reduced = shape[:-count] + (1,) * count
        self.add(self.choose(EXTREMES), a, self.axes(range(-count, 0)), shape=reduced)

    def column(self, a: str) -> None:
        shape = self.shapes[a]
        if not shape:
            return self.unary(a)
        count = self.draw(st.integers(1, len(shape)))
        reduced = (1,) * count + shape[count:]
        total = self.add("ReduceSum", a, self.axes(range(count)), shape=reduced)
        self.add(self.choose(BOUNDED), self.add("Mul", total, "small", shape=reduced))

    def graph(self, dtype: torch.dtype, is_copied: bool = False) -> _C.Graph:
        """Write the graph; `is_copied`: of copies of its inputs, over which regions may write."""
        types = {name: regions.type_text(dtype, shape) for name, shape in self.inputs.items()}
        for number in range(self.lookups):
            types[f"table{number}"] = regions.type_text(dtype, (TABLE_ROWS, "C"))
            types[f"ids{number}"] = "int64[A,B]"
        nodes = [f"small = Cast <to = {ONNX[dtype]}> (part)", *self.nodes]
        known = {}
        if is_copied:
            known = {name: types.pop(name) for name in self.inputs}
            types |= {f"given_{name}": text for name, text in known.items()}
            copies = (
                regions.aten("aten::clone", f"given_{name}", names=["self"]) for name in known
            )
            nodes = [
                *(f"{name} = {copy}" for name, copy in zip(known, copies, strict=True)),
                *nodes,
            ]
        constants = [*self.constants, "float part = {0.00390625}"]
        return regions.read(types, nodes, self.outputs, constants, known)

    def data(self, sizes: dict[str, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        tensors = {}
        shapes = dict(self.inputs)
        for number in range(self.lookups):
            shapes[f"table{number}"] = (TABLE_ROWS, "C")
            rows = torch.randint(TABLE_ROWS, (sizes["A"], sizes["B"]), generator=generator)
            tensors[f"ids{number}"] = rows
        for name, shape in shapes.items():
            known = [sizes.get(dim, dim) for dim in shape]
            # Halves are exact in every type, and some are equal.
            x = (torch.randn(known, generator=generator) * 2).round() / 2
            tensors[name] = x.clamp(-2, 2).to(dtype)
        return tensors


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    return Body(draw)


def examples(count: int) -> settings:
    """Give the settings of a test of so many bodies, which are the same in each run."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


def run(graph: _C.Graph, inputs: dict[str, torch.Tensor], isa: str, threads: int) -> list:
    """On a GPU without one, other orders of its threads stand for other numbers of threads."""
    torch.set_num_threads(threads)
    os.environ["EMULATED_CUDA_ORDER"] = ORDERS[threads]
    return regions.run(graph, inputs, isa)


def assert_near(got: list, want: list, dtype: torch.dtype) -> None:
    near = TOLERANCE[dtype]
    for ours, exact in zip(got, want, strict=True):
        assert ours.dtype == dtype
        largest = max([1.0, exact.abs().max().item()] if exact.numel() else [1.0])
        torch.testing.assert_close(ours.double(), exact, rtol=near, atol=near * largest)


def wide(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


@regions.also_on_cuda
@examples(300)
@given(body=bodies(), dtype=st.sampled_from(list(TOLERANCE)), isa=st.sampled_from(ISAS))
def test_fused_graphs_give_the_same_numbers(body: Body, dtype: torch.dtype, isa: str) -> None:
    plain, fused = body.graph(torch.float64), regions.fuse(body.graph(dtype))
    for sizes in SIZES:
        inputs = body.data(sizes, dtype)
        got = run(fused, inputs, isa, 1)
        assert_near(got, run(plain, wide(inputs), "", 1), dtype)
        for ours, again in zip(got, run(fused, inputs, isa, 2), strict=True):
            assert torch.equal(ours, again)


@pytest.mark.cuda
@examples(60)
@given(body=bodies(), dtype=st.sampled_from(list(TOLERANCE)))
def test_long_rows_on_gpus(body: Body, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)  # in which the test device computes what is left of the graph
    plain, fused = body.graph(torch.float64), regions.fuse(body.graph(dtype))
    for sizes in LONG:
        inputs = body.data(sizes, dtype)
        want = regions.run(plain, wide(inputs), "")
        first = None
        for order in ORDERS[:3]:
            os.environ["EMULATED_CUDA_ORDER"] = order
            got = regions.run(fused, inputs, regions.CUDA)
            assert_near(got, want, dtype)
            for ours, again in zip(got, first or got, strict=True):
                assert torch.equal(ours, again)
            first = got


@examples(200)
@given(body=bodies(), dtype=st.sampled_from(list(TOLERANCE)))
def test_results_written_over_operands_are_the_same(body: Body, dtype: torch.dtype) -> None:
    plain = body.graph(torch.float64)
    fused = _C.Session.compile(regions.fuse(body.graph(dtype, is_copied=True)), {})
    for sizes in SIZES:
        inputs = body.data(sizes, dtype)
        given = {f"given_{name}" if name in body.inputs else name: x for name, x in inputs.items()}
        assert_near(list(fused.run(given).values()), run(plain, wide(inputs), "", 1), dtype)
