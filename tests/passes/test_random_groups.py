"""Random graphs of gathers, scatters and reductions: groups never depend on each other.

A group of nodes that are fused has members at distant places of these graphs, since values of two
kinds of rows take turns, as those of nodes and edges do in graph networks.
"""

from __future__ import annotations

import random

import onnx.parser
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ort import _C

ROWS, WIDTH = {"node": 5, "edge": 7}, 4
# All ops choose among numbers that they are given, so that every order of work gives the same bits.
UNARY = ("Neg", "Relu", "Abs")
BINARY = ("Max", "Min")
KINDS = ("unary", "binary", "binary", "column", "extreme", "gather", "scatter", "product")
SCATTER = (
    'org.pytorch.aten.ATen <operator = "aten::index_reduce", overload_name = "", dim = 0,'
    ' reduce = "amax", tensor_args = ["self", "index", "source"]> (zeros_{}, {}, {})'
)


class Program:
    """A model of random nodes, which returns all values that no node reads."""

    def __init__(self, seed: int, count: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.types: dict[str, str] = {}
        self.read: set[str] = set()
        # By kind of rows and rank: the values that nodes may read. Each is a node's result, since
        # readers of a graph's input are not joined.
        self.names: dict[tuple[str, int], list[str]] = {
            (rows, rank): [] for rows in ROWS for rank in (1, 2)
        }
        for name, rows in (("x", "node"), ("e", "edge")):
            self.add(f"MatMul ({name}, order)", rows, 2)
        for _ in range(count):
            self.add_any(self.random.choice(KINDS))

    def add(self, line: str, rows: str, rank: int) -> None:
        name = f"a{len(self.types)}"
        self.lines.append(f"{name} = {line}")
        self.types[name] = f"float[{ROWS[rows]},{WIDTH}]" if rank == 2 else f"float[{ROWS[rows]}]"
        self.names[rows, rank].append(name)

    def pick(self, *wanted: tuple[str, int]) -> tuple[str, str, int]:
        """Choose a value of one of these kinds: its name, its kind of rows and its rank."""
        rows, rank = self.random.choice([kind for kind in wanted if self.names[kind]])
        name = self.random.choice(self.names[rows, rank])
        self.read.add(name)
        return name, rows, rank

    def add_any(self, kind: str) -> None:
        ids = self.random.choice(("source", "target"))
        if kind == "unary":
            name, *form = self.pick(*self.names)
            self.add(f"{self.random.choice(UNARY)} ({name})", *form)
        elif kind == "binary":
            name, *form = self.pick(*self.names)
            other, *_ = self.pick(tuple(form))
            self.add(f"{self.random.choice(BINARY)} ({name}, {other})", *form)
        elif kind == "column" and (self.names["node", 1] or self.names["edge", 1]):
            name, rows, _ = self.pick(("node", 1), ("edge", 1))
            whole, *form = self.pick((rows, 2))
            column = f"column{len(self.types)}"
            self.lines.append(f"{column} = Unsqueeze ({name}, last)")
            self.add(f"Max ({whole}, {column})", *form)
        elif kind == "gather":
            name, _, rank = self.pick(("node", 2), ("node", 1))
            self.add(f"Gather ({name}, {ids})", "edge", rank)
        elif kind == "scatter":
            name, _, rank = self.pick(("edge", 2), ("edge", 1))
            self.add(SCATTER.format(rank, ids, name), "node", rank)
        elif kind == "product":
            name, *form = self.pick(("node", 2), ("edge", 2))
            self.add(f"MatMul ({name}, order)", *form)
        else:
            name, rows, _ = self.pick(("node", 2), ("edge", 2))
            self.add(f"ReduceMin <keepdims = 0> ({name}, last)", rows, 1)

    def graph(self) -> _C.Graph:
        body = "\n".join(self.lines)
        typed = [(f"{self.types[name]} {name}", name in self.read) for name in self.types]
        results = ", ".join(text for text, is_read in typed if not is_read)
        # Of an ATen node, no rule tells the type.
        inner = "".join(f", {text}" for text, is_read in typed if is_read)
        nodes, edges = ROWS["node"], ROWS["edge"]
        text = f"""
            <ir_version: 10, opset_import: ["" : 20, "org.pytorch.aten" : 1]>
            random (float[{nodes},{WIDTH}] x, float[{edges},{WIDTH}] e,
                    float[{WIDTH},{WIDTH}] order, int64[{edges}] source, int64[{edges}] target,
                    float[{nodes}] zeros_1, float[{nodes},{WIDTH}] zeros_2) => ({results})
            <int64[1] last = {{-1}}{inner}>
            {{ {body} }}
        """
        graph = _C.Graph.from_onnx(onnx.parser.parse_model(text).SerializeToString())
        _C.infer_types(graph)
        return graph


def run(graph: _C.Graph) -> list[torch.Tensor]:
    torch.manual_seed(1)
    nodes, edges = ROWS["node"], ROWS["edge"]
    inputs = {
        "x": torch.randn(nodes, WIDTH), "e": torch.randn(edges, WIDTH),
        "order": torch.eye(WIDTH).flip(0), "source": torch.randint(nodes, (edges,)),
        "target": torch.randint(nodes, (edges,)), "zeros_1": torch.zeros(nodes),
        "zeros_2": torch.zeros(nodes, WIDTH),
    }  # fmt: skip
    return list(_C.run(graph, {name: inputs[name] for name in graph.input_names}).values())


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(20, 60))
def test_groups_of_random_graphs_have_an_order(seed: int, count: int) -> None:
    graph = Program(seed, count).graph()
    fused = graph.clone()
    _C.run_pass("fuse_regions", fused)
    for ours, theirs in zip(run(fused), run(graph), strict=True):
        assert torch.equal(ours, theirs)
