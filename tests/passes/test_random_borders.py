"""Random training graphs: what rebuild_values rebuilds are the same bits, and fewer bytes cross."""

from __future__ import annotations

import onnx.parser
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ort import _C

ROWS, COLUMNS = 3, 4
# PyTorch's kernels and those of regions give the same bits of these.
UNARY = ("Neg", "Abs", "Relu", "Swish", "Gelu", "Reciprocal")
BINARY = ("Add", "Mul", "Sub")


@st.composite
def half(draw: st.DrawFn, names: list[str], rows: list[str], prefix: str, count: int) -> list[str]:
    """Write nodes that read earlier values; `names` and `rows` grow by their results."""
    lines = []
    for number in range(count):
        name, earlier = f"{prefix}{number}", st.sampled_from(names)
        kind = draw(st.sampled_from(("unary", "unary", "binary", "row", "by_row", "product")))
        if kind == "unary":
            line = f"{draw(st.sampled_from(UNARY))} ({draw(earlier)})"
        elif kind == "binary":
            line = f"{draw(st.sampled_from(BINARY))} ({draw(earlier)}, {draw(earlier)})"
        elif kind == "product":
            line = f"MatMul ({draw(earlier)}, w)"
        elif kind == "row":
            lines.append(f"r{name} = ReduceMax <keepdims = 1> ({draw(earlier)}, last)")
            rows.append(f"r{name}")
            continue
        else:
            line = f"Sub ({draw(earlier)}, {draw(st.sampled_from(rows))})"
        lines.append(f"{name} = {line}")
        names.append(name)
    return lines


@st.composite
def programs(draw: st.DrawFn, dtype: str) -> str:
    names, rows = ["x", "h"], ["row"]
    lines = ["h = MatMul (x, w)", *draw(half(names, rows, "f", draw(st.integers(2, 10))))]
    outputs = draw(st.lists(st.sampled_from(names[1:]), min_size=1, max_size=2, unique=True))
    gradients = [f"d{name}" for name in outputs]
    lines.append(f"{', '.join(gradients)} = com.microsoft.YieldOp ({', '.join(outputs)})")
    names.extend(gradients)
    lines += draw(half(names, rows, "b", draw(st.integers(2, 8))))
    made = [name for name in names if name.startswith("b")] or [gradients[0]]
    results = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    full, inner = f"{dtype}[N,{COLUMNS}]", ", ".join(f"{dtype}[N,{COLUMNS}] {g}" for g in gradients)
    body = "\n".join(lines)
    return f"""
        <ir_version: 10, opset_import: ["" : 24, "com.microsoft" : 1]>
        random ({full} x, {dtype}[{COLUMNS},{COLUMNS}] w, {dtype}[N,1] row)
            => ({", ".join(f"{full} {name}" for name in results)})
        <int64[1] last = {{1}}, {inner}>
        {{ {body} }}
    """


def read(text: str) -> _C.Graph:
    graph = _C.Graph.from_onnx(onnx.parser.parse_model(text).SerializeToString())
    _C.infer_types(graph)
    graph.size_hints = {"N": ROWS}
    return graph


def run(graph: _C.Graph, emulate: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    types = graph.types()
    names = list(graph.input_names)
    names += [name for node in graph.nodes() if node["op"] == "YieldOp" for name in node["outputs"]]
    inputs = {}
    for name in names:
        dtype, shape = types[name][:2]
        sizes = [ROWS if size == "N" else size for size in shape]
        inputs[name] = torch.randn(sizes, dtype=torch.float64).to(getattr(torch, dtype))
    return list(_C.run(graph, inputs, _C.SessionOptions(emulate_eager_casts=emulate)).values())


def crossing(graph: _C.Graph) -> dict[str, int]:
    """Give the bytes of each result of the forward half that the backward half reads."""
    nodes, types = list(graph.nodes()), graph.types()
    border = [node["op"] for node in nodes].index("YieldOp")
    made = {name for node in nodes[:border] for name in node["outputs"]}
    read_later = {name for node in nodes[border + 1 :] for name in node["inputs"]}
    found = {}
    for name in made & read_later:
        dtype, shape = types[name][:2]
        sizes = [ROWS if size == "N" else size for size in shape]
        found[name] = torch.empty(sizes, dtype=getattr(torch, dtype)).nbytes
    return found


def watched(graph: _C.Graph, crossing: dict[str, int]) -> tuple[list[bool], list[bool]]:
    """Say which outputs of the module, and which inputs, autograd saves."""
    nodes = list(graph.nodes())
    (border,) = [at for at, node in enumerate(nodes) if node["op"] == "YieldOp"]
    read_later = {name for node in nodes[border + 1 :] for name in node["inputs"]}
    return (
        [name in crossing for name in nodes[border]["inputs"]],
        [name in read_later for name in graph.input_names],
    )


@pytest.mark.parametrize("dtype", ["float", "double", "bfloat16"])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_same_bits_and_fewer_bytes_cross(dtype: str, data: st.DataObject) -> None:
    """Of short floats where every value is rounded: regions keep more digits otherwise."""
    graph = read(data.draw(programs(dtype)))
    emulate = dtype == "bfloat16"
    kept, rebuilt = graph.clone(), graph.clone()
    _C.run_pipeline(kept, disabled=["rebuild_values"], check=2)
    _C.run_pipeline(rebuilt, check=2)

    for got, want in zip(run(rebuilt, emulate), run(kept, emulate), strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())

    before, after = crossing(kept), crossing(rebuilt)
    assert watched(rebuilt, after) == watched(kept, before)
    assert sum(after.values()) <= sum(before.values())
